"""Compare steps predicted from CPU captures with published training speeds.

    python -m benchmarks.no_device.published [FOLDER]

FOLDER keeps the captures for the next run. Needs `pip install -e '.[capture]'`. The models have
random weights; nothing is downloaded. Captures each model of `published.toml` on this CPU
(`published_step.py`, three samples), re-costs it at the published size for the published GPU from
its description, and prints

- published and predicted: tokens or images per second of one GPU;
- 80% interval: of the prediction, at kernels as captured;
- fused: predicted with `--fuse norm`, as for torch.compile or hand-written kernels;
- MFU: FLOPs of the GEMMs, over the dense peak of the data type.

The prediction is the sum of the kernels' times, without host, data loading or data-parallel
communication. A GPT's step is extrapolated linearly from two depths. SGD represents the optimizer;
if several GPUs share the optimizer's work, its share of a micro-batch is excluded. A float16 step
is the bfloat16 step with its data type replaced.
"""

import math
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import onerank
from benchmarks.harness import parser_of, print_conditions, version_of
from benchmarks.no_device import published_step
from onerank.annotate import CLASSES, PassOptions, classify, load_gpu, recost
from onerank.annotate.op_costs.op_classes import OpClass
from onerank.annotate.passes.resize.resize import Resize
from onerank.annotate.passes.resize.size_change import Change
from onerank.ir import Graph, Phase

HERE = Path(__file__).parent
SAMPLES = 3
DEPTHS = (2, 4)
WIDE_DEPTHS = (1, 2)  # what a CPU's memory holds of wide models
WIDE = 4096
PEAKS = {"bfloat16": "bf16_tensor_tflops", "float16": "fp16_tensor_tflops",
         "float32": "tf32_tensor_tflops"}  # fmt: skip
Row = dict[str, Any]


class Step(NamedTuple):
    """Nanoseconds of a step's kernels, the ends of their interval, fused, and FLOPs of products."""

    ns: float
    low_ns: float
    high_ns: float
    fused_ns: float
    flops: float

    def beyond(self, deeper: "Step", times: float) -> "Step":
        """Return this step plus `times` its difference from another one."""
        return Step(*(a + times * (b - a) for a, b in zip(self, deeper, strict=True)))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="keeps the captures")
    folder = parser.parse_args().folder
    rows = published_rows()
    print_conditions(version_of("torch"))
    print(f"{'model':14}{'GPU':>14}{'type':>9}{'batch':>10}{'GPUs':>5}{'published':>10}"
          f"{'predicted':>10}{'80% interval':>17}{'fused':>8}{'MFU %':>6}  ratio")  # fmt: skip
    errors: dict[str, list[float]] = {}
    inside: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as passing:
        captures = Captures(folder or Path(passing))
        for row in rows:
            step = predicted(row, captures)
            items = row["batch"] * max(1, row["sequence"])
            rate, low, high, fused = (
                items / ns * 1e9 for ns in (step.ns, step.high_ns, step.low_ns, step.fused_ns)
            )
            ratio = (fused if row["compiled"] else rate) / row["value"]
            errors.setdefault(row["gpu"], []).append(abs(math.log(ratio)))
            is_inside = low <= row["value"] <= high
            inside[row["gpu"]] = inside.get(row["gpu"], 0) + is_inside
            print(f"{row['model']:14}{row['gpu']:>14}{row['dtype']:>9}"
                  f"{row['batch']:>4}{'x' + str(row['sequence']) if row['sequence'] else '':6}"
                  f"{row['gpus']:>5}{row['value']:>10}{rate:>10.0f}"
                  f"{f'{low:.0f} to {high:.0f}':>17}{fused:>8.0f}"
                  f"{100 * step.flops / step.ns / 1e3 / peak(row):>6.0f}  {ratio:.2f}",
                  flush=True)  # fmt: skip
    print("ratio: predicted, fused where the published step was compiled, over published")
    for gpu, gpu_errors in errors.items():
        count = f"{inside[gpu]} of {len(gpu_errors)}"
        print(f"{gpu:14} off by {off(gpu_errors):.2f} times in the geometric mean; "
              f"{count} published figures lie in the interval")  # fmt: skip
    every = [error for gpu_errors in errors.values() for error in gpu_errors]
    print(f"all            off by {off(every):.2f} times, each GPU once "
          f"{off([math.log(off(gpu_errors)) for gpu_errors in errors.values()]):.2f}; "
          f"{sum(inside.values())} of {len(every)} lie in it")  # fmt: skip


def off(errors: list[float]) -> float:
    """Return the geometric mean of ratios from their |ln|."""
    return math.exp(sum(errors) / len(errors))


def published_rows() -> list[Row]:
    """Return the published figures, one row each."""
    content = tomllib.loads((HERE / "published.toml").read_text())
    rows: list[Row] = content["row"]
    for table in content["table"]:
        shared = {name: value for name, value in table.items() if name != "rows"}
        for model, sequence, batch, value in table["rows"]:
            values = {"model": model, "sequence": sequence, "batch": batch, "value": value}
            rows.append({**shared, **values, "layers": table["layers"][model]})
    return rows


class Captures:
    """Captures of published_step.py, each run once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.graphs: dict[tuple[str, str, int], Graph] = {}

    def of(self, model: str, dtype: str, layers: int) -> Graph:
        if dtype == "float16":  # CPUs compute float16 convolutions very slowly
            return as_float16(self.of(model, "bfloat16", layers))
        key = (model, dtype, layers)
        if key not in self.graphs:
            out = self.folder / f"{model}-{dtype}-{layers}.et"
            words = [sys.executable, "-m", "onerank", "capture", "run",
                     str(HERE / "published_step.py"), "--warm-up", "1", "--timed-steps", "1",
                     "-o", str(out), "--", model, dtype, str(layers), str(SAMPLES)]  # fmt: skip
            if not out.exists():
                subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
            self.graphs[key] = onerank.read(out)
        return self.graphs[key]


def as_float16(graph: Graph) -> Graph:
    """Return a step in bfloat16 as one in float16."""
    types = ("input_types", "output_types")
    columns = {
        name: [types_text.replace("BFloat16", "Half") for types_text in graph.text(name)]
        for name in types
    }
    return graph.with_columns(**columns)


def predicted(row: Row, captures: Captures) -> Step:
    """Return the step at the published size on the published GPU."""
    if row["model"] not in published_step.GPTS:
        return recosted(captures.of(row["model"], row["dtype"], 0), row)
    depths = WIDE_DEPTHS if published_step.GPTS[row["model"]][0] >= WIDE else DEPTHS
    shallow, deep = (recosted(captures.of(row["model"], row["dtype"], n), row) for n in depths)
    return shallow.beyond(deep, (row["layers"] - depths[0]) / (depths[1] - depths[0]))


def recosted(graph: Graph, row: Row) -> Step:
    """Return the step of one capture at the published size on the published GPU."""
    length = published_step.SEQUENCE
    seq = Change(length, row["sequence"]) if row["sequence"] else None
    sizes = Resize(seq, Change(SAMPLES, row["batch"]))
    passes = PassOptions(sizes=sizes, attention=row.get("attention", "usual"))
    predicted_graph = recost(graph, row["gpu"], passes=passes)
    fused = recost(graph, row["gpu"], passes=replace(passes, fuse="norm"))
    low, high = predicted_graph.job.annotations[-1].details["interval"]
    all_ns, ns = (
        predicted_graph.nodes.duration_ns[predicted_graph.gpu_compute].sum(),
        kept_ns(predicted_graph, row),
    )
    kinds = [CLASSES.index(op_class) for op_class in (OpClass.GEMM, OpClass.ATTENTION)]
    index = np.flatnonzero(predicted_graph.gpu_compute)
    products = index[np.isin(classify(predicted_graph, index), kinds)]
    flops = float(predicted_graph.nodes.flops[products].clip(0).sum())
    return Step(ns, low * ns / all_ns, high * ns / all_ns, kept_ns(fused, row), flops)


def kept_ns(graph: Graph, row: Row) -> float:
    """Return the kernels' time, without the optimizer's if several GPUs share its work."""
    is_counted = graph.gpu_compute & ((graph.nodes.phase != Phase.OPTIMIZER) | (row["gpus"] == 1))
    return float(graph.nodes.duration_ns[is_counted].sum())


def peak(row: Row) -> float:
    """Return the GPU's dense peak of the step's products in TFLOPS."""
    figures = load_gpu(row["gpu"]).figures
    figure = figures.get(PEAKS[row["dtype"]]) or figures["fp32_vector_tflops"]
    return figure.value


if __name__ == "__main__":
    main()

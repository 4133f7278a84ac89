"""Steps of an inference engine: interpolated, and from shapes alone, against measured ones.

python benchmarks/serving.py measure -o DIR [--config config.json] [--tp 1]    on one GPU
python benchmarks/serving.py compare DIR                                        anywhere

`measure` runs the default grid of `capture serve`, then 40 other compositions, drawn with a fixed
seed, without a profiler; then it finds the largest KV cache that fits. `compare` interpolates the
40 compositions from the grid, predicts them from shapes alone (device none), and prints the errors.
"""

import argparse
import dataclasses
import json
import random
import statistics
import time
from pathlib import Path

import numpy as np

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "dtype": "bfloat16",
}

COMPOSITIONS = 40
SEED = 28

# Tokens in the KV cache of a drawn composition: of a Llama-8B 52 GB, which fit into 80 GB next to
# 16 GB of weights.
MOST_CACHED = 400_000


def drawn(longest: int):
    """Return compositions that are not in the default grid: a third of each kind."""
    from onerank.capture.serving.compositions import Composition, default_grid

    draw, grid = random.Random(SEED), {*default_grid(longest)}
    chosen = []
    while len(chosen) < COMPOSITIONS:
        kind = ("decode", "prefill", "mixed")[len(chosen) % 3]
        decodes, prefills = int(kind != "prefill"), int(kind != "decode")
        c = Composition(
            decodes=round(2 ** draw.uniform(0, 8)) * decodes,
            decode_context=round(2 ** draw.uniform(7, 15)) * decodes,
            prefills=prefills,
            prefill_tokens=round(2 ** draw.uniform(6, 13)) * prefills,
            prefill_context=draw.choice((0, round(2 ** draw.uniform(8, 13)))) * prefills,
        )
        if c.cached_tokens <= MOST_CACHED and c not in grid:
            chosen.append(c)
    return chosen


def measure(output: Path, config: Path | None, tp: int) -> None:
    """Measure the grid, the drawn compositions and the capacity, and write them."""
    import torch

    from onerank.capture.options import Options
    from onerank.capture.profiling.window_plan import WindowPlan
    from onerank.capture.serving.measure_grid import serving
    from onerank.plan.tasks import Store
    from onerank.serving.build_bundle import serve

    output.mkdir(exist_ok=True)
    path = output / "config.json"
    path.write_text(config.read_text() if config else json.dumps(LLAMA_8B))
    options = Options(tp=tp, windows=WindowPlan(warm_up=2, settle=False))
    began = time.perf_counter()
    with serving(path, options) as server:
        rows = []
        for composition in drawn(server.served.longest):
            try:
                timed = server.time(composition, 7)
            except torch.cuda.OutOfMemoryError:
                print(f"{composition} does not fit", flush=True)
                continue
            rows.append(_record(composition, timed))
            (output / "drawn.json").write_text(json.dumps(rows))
        print(f"{len(rows)} drawn compositions: {time.perf_counter() - began:.0f} s", flush=True)

    def progress(_: str, complete: int, whole: int) -> None:
        if complete % 10 == 0 or complete == whole:
            print(f"{complete} of {whole}: {time.perf_counter() - began:.0f} s", flush=True)

    bundle, traces = serve(path, options, None, Store(output / "store"), progress=progress)
    bundle.write(output / "bundle", traces)
    memory = bundle.manifest.memory
    with serving(path, options) as server:
        tokens = capacity(server, memory)
    (output / "capacity.json").write_text(json.dumps(tokens))
    print(f"complete: {time.perf_counter() - began:.0f} s")


def _record(composition, timed) -> dict:
    import msgspec

    return {"composition": msgspec.structs.asdict(composition), **dataclasses.asdict(timed)}


def capacity(server, memory) -> dict:
    """Return the largest KV cache that fits next to a prefill of 8,192 tokens, by bisection."""
    import torch

    from onerank.capture.serving.compositions import Composition

    def tokens(context: int) -> Composition:
        return Composition(64, context, 1, 8192, 0)

    low, high = 0, 4 * memory.tokens_that_fit // 64
    predicted = (memory.tokens_that_fit - 8192 - 64) // 64
    # Two probes bracket a prediction that is right within 1%.
    probes = iter([predicted * 99 // 100, predicted * 101 // 100])
    while high - low > max(1, predicted // 400):
        context = next(probes, (low + high) // 2)
        if not low < context < high:
            continue
        try:
            step = server.step(tokens(context))
            step()
            torch.cuda.synchronize()
            low = context
        except torch.cuda.OutOfMemoryError:
            high = context
        step = None
        torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return {
        "measured_tokens": tokens(low).cached_tokens,
        "too_many_tokens": tokens(high).cached_tokens,
        "predicted_tokens": memory.tokens_that_fit,
        "outside_bytes": total - free - torch.cuda.memory_reserved(),
    }


def errors(pairs) -> tuple[float, float, float]:
    """Return median and 90th percentile of the relative errors, and their mean."""
    relative = [abs(predicted / measured - 1) for predicted, measured in pairs]
    return (*np.quantile(relative, (0.5, 0.9)).tolist(), statistics.mean(relative))


def compare(directory: Path) -> None:
    """Print the errors of interpolation, of shapes alone, and of memory."""
    import onerank
    from onerank.annotate import PassOptions, load_gpu
    from onerank.capture.options import Options
    from onerank.capture.serving.compositions import Composition
    from onerank.capture.serving.measure_grid import serving
    from onerank.serving.points import Target, predicted

    bundle = onerank.read_bundle(directory / "bundle")
    print(bundle)
    rows = json.loads((directory / "drawn.json").read_text())
    compositions = [Composition(**row["composition"]) for row in rows]
    graph = [statistics.median(row["graph_ns"] or [0]) for row in rows]
    eager = [statistics.median(row["step_ns"]) for row in rows]
    table = bundle.at(compositions)
    print(f"{'':38} {'median':>8} {'p90':>8} {'mean':>8}")

    def line(label: str, pairs) -> None:
        print(f"{label:38}" + "".join(f" {error:8.1%}" for error in errors([*pairs])))

    for kind in ("", "prefill", "decode", "mixed"):
        index = [i for i, c in enumerate(compositions) if kind in ("", c.kind)]
        for name, measured, column in (
            ("CUDA graph", graph, "graph_ns"),
            ("eager", eager, "step_ns"),
        ):
            figures = table[column].to_list()
            line(f"interpolated, {name} {kind}", ((figures[i], measured[i]) for i in index))
    peaks = table["peak_bytes"].to_list()
    line("peak memory", zip(peaks, (row["peak_bytes"] for row in rows), strict=True))
    inside = [row["graph_low_ns"] <= g <= row["graph_high_ns"]
            for row, g in zip(table.to_dicts(), graph, strict=True)]  # fmt: skip
    print(f"inside the 80% interval: {sum(inside)} of {len(inside)}")
    measured_capacity = directory / "capacity.json"
    if measured_capacity.is_file():
        print(measured_capacity.read_text())
    like = load_gpu(bundle.manifest.device)
    # The step ran torch's FlashAttention 2, and no other kernel is predicted.
    target = Target(like, None, passes=PassOptions(attention="same"))
    shapes = []
    with serving(directory / "config.json", Options(tp=bundle.manifest.tp, device="none",
                                                    like=like.name)) as server:  # fmt: skip
        for number, composition in enumerate(compositions, start=1):
            point = server.measure(composition, number)
            row = predicted(composition, point.graph, target).row if point.graph else None
            shapes.append(row.graph_ns if row else None)
    for kind in ("", "prefill", "decode", "mixed"):
        pairs = [(s, g) for s, g, c in zip(shapes, graph, compositions, strict=True)
                 if s and kind in ("", c.kind)]  # fmt: skip
        line(f"shapes alone, CUDA graph {kind}", pairs)


def main() -> None:
    """Run one of the two commands."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("measure")
    run.add_argument("-o", "--output", type=Path, required=True)
    run.add_argument("--config", type=Path)
    run.add_argument("--tp", type=int, default=1)
    commands.add_parser("compare").add_argument("directory", type=Path)
    args = parser.parse_args()
    if args.command == "measure":
        measure(args.output, args.config, args.tp)
    else:
        compare(args.directory)


if __name__ == "__main__":
    main()

"""Compare passes with captures of the changed step, on the current device.

    python -m benchmarks.predictions.passes_vs_captured capture OUT [--shape 8b --layers 4]
        [--seq 4096 --batch 1]
    python -m benchmarks.predictions.passes_vs_captured between A.et B.et --seq 4096=2048
        [--micro-batch 1=1]
    python -m benchmarks.predictions.passes_vs_captured attention EAGER.et FUSED.et

`capture` takes `examples/train_llama.py` at a sequence length and micro-batch, at others, with
eager attention and compiled, and prints the prediction of each pass from the first next to the
capture. `between` does so for one capture and another at the size named, and back; `attention` for
one with eager attention and another with a fused kernel, on one GPU.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np

import onerank
from benchmarks.harness import parser_of, print_conditions
from onerank.analysis.step_time import replay
from onerank.annotate import CLASSES, PassOptions, classify, find_gpu, recost
from onerank.annotate.memory.memory_report import report_memory
from onerank.annotate.passes.resize.resize import Resize
from onerank.annotate.passes.resize.size_change import Change, parse_change
from onerank.ir import Graph
from onerank.ir.arrays import I64

_LONG_NS = 10_000
_SIZED = ("embedding", "memset", "scan/sort/index", "copy")  # one or several, by size
EXAMPLE = Path(__file__).parents[2] / "examples" / "train_llama.py"


def main() -> None:
    """Run the requested comparison."""
    parser = parser_of(__doc__)
    parts = parser.add_subparsers(dest="part", required=True)
    capturing(parts.add_parser("capture"))
    pair = parts.add_parser("between")
    pair.add_argument("captures", type=Path, nargs=2)
    pair.add_argument("--seq", required=True)
    pair.add_argument("--micro-batch", default="1=1")
    kernels = parts.add_parser("attention")
    kernels.add_argument("captures", type=Path, nargs=2)
    arguments = parser.parse_args()
    if arguments.part == "capture":
        capture(arguments)
        return
    print_conditions()
    if arguments.part == "attention":
        attention(*map(onerank.read, arguments.captures))
    else:
        sizes = (
            parse_change("--seq", arguments.seq),
            parse_change("--micro-batch", arguments.micro_batch),
        )
        between(*map(onerank.read, arguments.captures), *sizes)


def between(first: Graph, second: Graph, seq: Change, batch: Change) -> None:
    """Compare each of two captures with its prediction from the other."""
    back = [Change(change.after, change.before) for change in (seq, batch)]
    for start, end, sizes in ((first, second, [seq, batch]), (second, first, back)):
        target = gpu_of(start)
        for graph in (start, end):
            print_capture(graph)
        passes = PassOptions(sizes=Resize(*sizes))
        title = f"--seq {sizes[0].before}={sizes[0].after} --micro-batch {sizes[1].before}="
        compare(f"{title}{sizes[1].after}", recost(start, target, passes=passes), end)


def attention(eager: Graph, fused: Graph) -> None:
    """Compare a capture with fused attention with its prediction from eager attention."""
    for graph in (eager, fused):
        print_capture(graph)
    predicted = recost(eager, gpu_of(eager), passes=PassOptions(attention="fused"))
    compare("--kernel attention=fused", predicted, fused)


def gpu_of(graph: Graph) -> str:
    """Return the GPU of a capture; H100 for a capture on a CPU."""
    gpu = find_gpu(graph.job.device.name)
    return gpu.name if gpu else "H100"


def print_capture(graph: Graph) -> None:
    """Print a capture's device, software, step time, clock and power."""
    device, measured = graph.job.device, graph.job.measurement
    sensors = device.sensors
    conditions = [f"step {measured.median_step_ns} ns"] if measured.step_ns else []
    if sensors and sensors.sm_clock_mhz and sensors.power_mw:
        conditions += [f"{sensors.sm_clock_mhz.median} MHz, {sensors.power_mw.median / 1000:.0f} W"]
    print(device.name, measured.versions.get("torch", ""), *conditions, sep=", ")


def capturing(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `capture`."""
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=1)


def capture(arguments: argparse.Namespace) -> None:
    """Capture and compare."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    seq, batch = arguments.seq, arguments.batch
    model = ["--shape", arguments.shape, "--layers", str(arguments.layers)]

    def take(name: str, length: int, size: int, *options: str, attention: str = "sdpa") -> Graph:
        path = arguments.out / f"{name}.et"
        script_arguments = [
            *model,
            "--seq",
            str(length),
            "--batch",
            str(size),
            "--attention",
            attention,
        ]
        command = [sys.executable, "-m", "onerank", "capture", "run", *options, str(EXAMPLE)]
        subprocess.run([*command, "-o", str(path), "--", *script_arguments], check=True)
        return onerank.read(path)

    base = take("base", seq, batch, "--tp", "4")
    name = base.job.device.name
    target = gpu_of(base)
    print(
        f"{name} -> {target}, {arguments.shape}, {arguments.layers} layers, {seq} x {batch}, TP 4"
    )
    sizes = ((seq // 2, batch), (2 * seq, batch), (seq, 2 * batch), (seq // 4, 4 * batch))
    for length, size in sizes:
        passes = PassOptions(sizes=Resize(Change(seq, length), Change(batch, size)))
        real = take(f"{length}x{size}", length, size, "--tp", "4")
        compare(f"--seq {length} --micro-batch {size}", recost(base, target, passes=passes),
                recost(real, target))  # fmt: skip
    unsharded = take("alone", seq, batch)
    eager = take("eager", seq, batch, attention="eager")
    unfuse, fuse = PassOptions(attention="eager"), PassOptions(attention="fused")
    compare(
        "--kernel attention=eager", recost(unsharded, target, passes=unfuse), recost(eager, target)
    )
    compare(
        "--kernel attention=fused", recost(eager, target, passes=fuse), recost(unsharded, target)
    )
    compiled = take("compiled", seq, batch, "--compile=default")
    for fusion in ("elementwise", "norm"):
        compare(f"--fuse {fusion}", recost(unsharded, target, passes=PassOptions(fuse=fusion)),
                recost(compiled, target))  # fmt: skip


def compare(title: str, predicted: Graph, real: Graph) -> None:
    """Print both by class, their steps and their memory."""
    print(f"\n{title}\n{'':18}{'kernels':>16}{'time, us':>24}{'made/real':>11}")
    for name in sorted({*_names(predicted), *_names(real)}):
        rows = [_sums(graph, name) for graph in (predicted, real)]
        _row(name, rows)
    rows = [_sums(graph, None) for graph in (predicted, real)]
    _row("all", rows)
    if ends := predicted.job.annotations[-1].details.get("interval"):
        print(f"80% interval of all: {ends[0] / 1e3:.1f} to {ends[1] / 1e3:.1f} us")
    replayed, replayed_real = replay(predicted), replay(real)
    _step("step, replayed", replayed.step_time_ns, replayed_real.step_time_ns)
    pure = real.job.measurement.median_step_ns
    if replayed.steady_state is not None and pure is not None:
        _step("step in a row, real without a profiler", replayed.steady_state.step_ns, pure)
        _step("replayed, real without a profiler", replayed.step_time_ns, pure)
    pairs = [_comparable_kernels(graph) for graph in (predicted, real)]
    ops = [np.array(g.text("op"))[k] for g, k in zip((predicted, real), pairs, strict=True)]
    if len(ops[0]) == len(ops[1]) and (ops[0] == ops[1]).all():
        per_kernel(predicted, real, pairs[0], pairs[1])
    peaks = [report_memory(graph).peak_bytes for graph in (predicted, real)]
    print(f"peak memory {peaks[0]} made, {peaks[1]} real, {peaks[0] / peaks[1] - 1:+.2%}")


def _step(label: str, predicted_ns: int, real_ns: int) -> None:
    print(f"{label}: {predicted_ns} ns made, {real_ns} ns real, {predicted_ns / real_ns - 1:+.2%}")


def per_kernel(predicted: Graph, real: Graph, predicted_rows: I64, real_rows: I64) -> None:
    """Print the errors of the individual kernels that the pass changed."""
    changed = predicted.nodes.p10_ns[predicted_rows] >= 0
    predicted_rows, real_rows = predicted_rows[changed], real_rows[changed]
    times = predicted.nodes.duration_ns[predicted_rows], real.nodes.duration_ns[real_rows]
    off = np.abs(times[0] / times[1] - 1)
    inside = (predicted.nodes.p10_ns[predicted_rows] <= times[1]) & (
        times[1] <= predicted.nodes.p90_ns[predicted_rows]
    )
    long = times[1] > _LONG_NS
    shapes = [
        np.array(g.text("input_shapes"))[k]
        for g, k in ((predicted, predicted_rows), (real, real_rows))
    ]
    shares = {
        "mean": off.mean(),
        "median": np.median(off),
        "over 10 us": off[long].mean(),
        "by time": (off * times[1]).sum() / times[1].sum(),
        "inside its interval": inside.mean(),
        "the same over 10 us": inside[long].mean(),
        "shapes equal": (shapes[0] == shapes[1]).mean(),
    }
    figures = ", ".join(f"{name} {value:.1%}" for name, value in shares.items())
    print(f"{len(predicted_rows)} kernels that changed: {figures}")


def _comparable_kernels(graph: Graph) -> I64:
    """Return the kernels, in order, whose number does not depend on the sizes."""
    kernels = np.flatnonzero(graph.gpu_compute)
    kernels = kernels[np.argsort(graph.nodes.start_ns[kernels], kind="stable")]
    codes = classify(graph, kernels)
    return kernels[[CLASSES[code].value not in _SIZED for code in codes]]


def _names(graph: Graph) -> list[str]:
    kernels = np.flatnonzero(graph.gpu_compute)
    return [CLASSES[code].value for code in np.unique(classify(graph, kernels))]


def _sums(graph: Graph, name: str | None) -> tuple[int, int]:
    kernels = np.flatnonzero(graph.gpu_compute)
    if name is not None:
        codes = classify(graph, kernels)
        kernels = kernels[[CLASSES[code].value == name for code in codes]]
    return len(kernels), int(graph.nodes.duration_ns[kernels].sum())


def _row(name: str, rows: list[tuple[int, int]]) -> None:
    (count, time), (real_count, real_time) = rows
    ratio = f"{time / real_time:11.3f}" if real_time else ""
    print(f"{name:18}{count:8}{real_count:8}{time / 1e3:12.1f}{real_time / 1e3:12.1f}{ratio}")


if __name__ == "__main__":
    main()

"""Compare passes with captures of the changed step, on the current device.

    python benchmarks/passes_vs_captured.py capture OUT [--shape 8b --layers 4 --seq 4096 --batch 1]
    python benchmarks/passes_vs_captured.py between A.et B.et --seq 4096=2048 [--micro-batch 1=1]
    python benchmarks/passes_vs_captured.py attention EAGER.et FUSED.et

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
import numpy.typing as npt

import onerank
from onerank.analysis.step_time import replay
from onerank.annotate import CLASSES, PassOptions, classify, find_gpu, recost
from onerank.annotate.memory.memory_report import report_memory
from onerank.annotate.passes.resize.resize import Resize
from onerank.annotate.passes.resize.size_change import Change, parse_change
from onerank.ir import Graph

Rows = npt.NDArray[np.int64]

_LONG_NS = 10_000
_SIZED = ("embedding", "memset", "scan/sort/index", "copy")  # one or several, by size
EXAMPLE = Path(__file__).parents[1] / "examples" / "train_llama.py"


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parts = parser.add_subparsers(dest="part", required=True)
    capturing(parts.add_parser("capture"))
    pair = parts.add_parser("between")
    pair.add_argument("captures", type=Path, nargs=2)
    pair.add_argument("--seq", required=True)
    pair.add_argument("--micro-batch", default="1=1")
    kernels = parts.add_parser("attention")
    kernels.add_argument("captures", type=Path, nargs=2)
    given = parser.parse_args()
    if given.part == "capture":
        capture(given)
    elif given.part == "attention":
        attention(*map(onerank.read, given.captures))
    else:
        sizes = parse_change("--seq", given.seq), parse_change("--micro-batch", given.micro_batch)
        between(*map(onerank.read, given.captures), *sizes)


def between(first: Graph, second: Graph, seq: Change, batch: Change) -> None:
    """Compare each of two captures with what the other makes of it."""
    back = [Change(change.after, change.before) for change in (seq, batch)]
    for start, end, sizes in ((first, second, [seq, batch]), (second, first, back)):
        target = gpu_of(start)
        for graph in (start, end):
            print_conditions(graph)
        asked = PassOptions(sizes=Resize(*sizes))
        title = f"--seq {sizes[0].before}={sizes[0].after} --micro-batch {sizes[1].before}="
        compare(f"{title}{sizes[1].after}", recost(start, target, passes=asked), end)


def attention(eager: Graph, fused: Graph) -> None:
    """Compare a capture with fused attention with what one of eager attention makes of it."""
    for graph in (eager, fused):
        print_conditions(graph)
    made = recost(eager, gpu_of(eager), passes=PassOptions(attention="fused"))
    compare("--kernel attention=fused", made, fused)


def gpu_of(graph: Graph) -> str:
    """Return the GPU that a capture is of; of one on a CPU some GPU."""
    found = find_gpu(graph.job.device.name)
    return found.name if found else "H100"


def print_conditions(graph: Graph) -> None:
    """Print what a capture ran on, and how the GPU's clocks were."""
    device, measured = graph.job.device, graph.job.measurement
    sensors = device.sensors
    told = [f"step {measured.median_step_ns} ns"] if measured.step_ns else []
    if sensors and sensors.sm_clock_mhz and sensors.power_mw:
        told += [f"{sensors.sm_clock_mhz.median} MHz, {sensors.power_mw.median / 1000:.0f} W"]
    print(device.name, measured.versions.get("torch", ""), *told, sep=", ")


def capturing(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `capture`."""
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=1)


def capture(given: argparse.Namespace) -> None:
    """Capture and compare."""
    given.out.mkdir(parents=True, exist_ok=True)
    seq, batch = given.seq, given.batch
    model = ["--shape", given.shape, "--layers", str(given.layers)]

    def take(name: str, length: int, size: int, *options: str, attention: str = "sdpa") -> Graph:
        path = given.out / f"{name}.et"
        own = [*model, "--seq", str(length), "--batch", str(size), "--attention", attention]
        command = [sys.executable, "-m", "onerank", "capture", "run", *options, str(EXAMPLE)]
        subprocess.run([*command, "-o", str(path), "--", *own], check=True)
        return onerank.read(path)

    base = take("base", seq, batch, "--tp", "4")
    name = base.job.device.name
    target = gpu_of(base)
    print(f"{name} -> {target}, {given.shape}, {given.layers} layers, {seq} x {batch}, TP 4")
    sizes = ((seq // 2, batch), (2 * seq, batch), (seq, 2 * batch), (seq // 4, 4 * batch))
    for length, size in sizes:
        asked = PassOptions(sizes=Resize(Change(seq, length), Change(batch, size)))
        real = take(f"{length}x{size}", length, size, "--tp", "4")
        compare(f"--seq {length} --micro-batch {size}", recost(base, target, passes=asked),
                recost(real, target))  # fmt: skip
    alone = take("alone", seq, batch)
    eager = take("eager", seq, batch, attention="eager")
    unfuse, fuse = PassOptions(attention="eager"), PassOptions(attention="fused")
    compare("--kernel attention=eager", recost(alone, target, passes=unfuse), recost(eager, target))
    compare("--kernel attention=fused", recost(eager, target, passes=fuse), recost(alone, target))
    compiled = take("compiled", seq, batch, "--compile=default")
    for what in ("elementwise", "norm"):
        compare(f"--fuse {what}", recost(alone, target, passes=PassOptions(fuse=what)),
                recost(compiled, target))  # fmt: skip


def compare(title: str, made: Graph, real: Graph) -> None:
    """Print both by class, their steps and their memory."""
    print(f"\n{title}\n{'':18}{'kernels':>16}{'time, us':>24}{'made/real':>11}")
    for name in sorted({*_names(made), *_names(real)}):
        rows = [_sums(graph, name) for graph in (made, real)]
        _row(name, rows)
    rows = [_sums(graph, None) for graph in (made, real)]
    _row("all", rows)
    if ends := made.job.annotations[-1].details.get("interval"):
        print(f"80% interval of all: {ends[0] / 1e3:.1f} to {ends[1] / 1e3:.1f} us")
    ours, theirs = replay(made), replay(real)
    _step("step, replayed", ours.step_time_ns, theirs.step_time_ns)
    pure = real.job.measurement.median_step_ns
    if ours.row is not None and pure is not None:
        _step("step in a row, real without a profiler", ours.row.step_ns, pure)
        _step("replayed, real without a profiler", ours.step_time_ns, pure)
    pairs = [_alike(graph) for graph in (made, real)]
    ops = [np.array(g.text("op"))[k] for g, k in zip((made, real), pairs, strict=True)]
    if len(ops[0]) == len(ops[1]) and (ops[0] == ops[1]).all():
        per_kernel(made, real, pairs[0], pairs[1])
    peaks = [report_memory(graph).peak_bytes for graph in (made, real)]
    print(f"peak memory {peaks[0]} made, {peaks[1]} real, {peaks[0] / peaks[1] - 1:+.2%}")


def _step(what: str, made_ns: int, real_ns: int) -> None:
    print(f"{what}: {made_ns} ns made, {real_ns} ns real, {made_ns / real_ns - 1:+.2%}")


def per_kernel(made: Graph, real: Graph, ours: Rows, theirs: Rows) -> None:
    """Print how far off the kernels are, of those that changed, one by one."""
    changed = made.nodes.p10_ns[ours] >= 0
    ours, theirs = ours[changed], theirs[changed]
    times = made.nodes.duration_ns[ours], real.nodes.duration_ns[theirs]
    off = np.abs(times[0] / times[1] - 1)
    inside = (made.nodes.p10_ns[ours] <= times[1]) & (times[1] <= made.nodes.p90_ns[ours])
    long = times[1] > _LONG_NS
    shapes = [np.array(g.text("input_shapes"))[k] for g, k in ((made, ours), (real, theirs))]
    told = {
        "mean": off.mean(),
        "median": np.median(off),
        "over 10 us": off[long].mean(),
        "by time": (off * times[1]).sum() / times[1].sum(),
        "inside its interval": inside.mean(),
        "the same over 10 us": inside[long].mean(),
        "shapes equal": (shapes[0] == shapes[1]).mean(),
    }
    figures = ", ".join(f"{name} {value:.1%}" for name, value in told.items())
    print(f"{len(ours)} kernels that changed: {figures}")


def _alike(graph: Graph) -> Rows:
    """Return the kernels, in order, that a step of any size launches as often."""
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
    (count, time), (others, other) = rows
    ratio = f"{time / other:11.3f}" if other else ""
    print(f"{name:18}{count:8}{others:8}{time / 1e3:12.1f}{other / 1e3:12.1f}{ratio}")


if __name__ == "__main__":
    main()

"""What-ifs against captures of what they ask for, on the device at hand.

    python benchmarks/what_if.py OUT [--shape 8b --layers 4 --seq 4096 --batch 1]

Captures `examples/train_llama.py` at a sequence length and micro-batch, at others, with eager
attention and compiled, and prints what each what-if of the first makes of it beside the capture.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np

import onerank
from onerank.annotate import CLASSES, WhatIf, classify, find_gpu, recost
from onerank.annotate.memory import report_memory
from onerank.annotate.resize import Resize
from onerank.annotate.sizing import Change
from onerank.ir import Graph, Phase

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_llama.py"


def main() -> None:
    """Capture and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=1)
    given = parser.parse_args()
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
    target = found.name if (found := find_gpu(name)) else "H100"
    print(f"{name} -> {target}, {given.shape}, {given.layers} layers, {seq} x {batch}, TP 4")
    sizes = ((seq // 2, batch), (2 * seq, batch), (seq, 2 * batch), (seq // 4, 4 * batch))
    for length, size in sizes:
        asked = WhatIf(sizes=Resize(Change(seq, length), Change(batch, size)))
        real = take(f"{length}x{size}", length, size, "--tp", "4")
        compare(f"--seq {length} --micro-batch {size}", recost(base, target, what_if=asked),
                recost(real, target))  # fmt: skip
    alone = take("alone", seq, batch)
    eager = take("eager", seq, batch, attention="eager")
    compare("--kernel attention=eager", recost(alone, target, what_if=WhatIf(attention="eager")),
            recost(eager, target))  # fmt: skip
    compiled = take("compiled", seq, batch, "--compile")
    for what in ("elementwise", "norm"):
        compare(f"--fuse {what}", recost(alone, target, what_if=WhatIf(fuse=what)),
                recost(compiled, target))  # fmt: skip


def compare(title: str, made: Graph, real: Graph) -> None:
    """Print both by class, forward and backward, and their memory."""
    print(f"\n{title}\n{'':18}{'kernels':>16}{'time, us':>24}{'made/real':>11}")
    for name in sorted({*_names(made), *_names(real)}):
        rows = [_sums(graph, name) for graph in (made, real)]
        _row(name, rows)
    rows = [_sums(graph, None) for graph in (made, real)]
    _row("all", rows)
    ends = made.job.annotations[-1].details.get("interval")
    if ends:
        print(f"{'interval':18}{ends[0] / 1e3:24.1f} to {ends[1] / 1e3:.1f}")
    same = made.text("op") == real.text("op")
    if same:
        kernels = made.gpu_compute & (made.nodes.phase != Phase.OPTIMIZER)
        kernels &= real.nodes.duration_ns > 0
        times = [graph.nodes.duration_ns[kernels] for graph in (made, real)]
        off = np.abs(times[0] / times[1] - 1)
        low, high = (getattr(made.nodes, n)[kernels] for n in ("low_ns", "high_ns"))
        inside = (low <= times[1]) & (times[1] <= high)
        shapes = [np.array(graph.text("input_shapes"))[kernels] for graph in (made, real)]
        told = {
            "mean": off.mean(),
            "median": np.median(off),
            "by time": (off * times[1]).sum() / times[1].sum(),
            "inside its interval": inside[low >= 0].mean(),
            "shapes equal": (shapes[0] == shapes[1]).mean(),
        }
        print("per kernel: " + ", ".join(f"{name} {value:.1%}" for name, value in told.items()))
    peaks = [report_memory(graph).peak_bytes for graph in (made, real)]
    print(f"peak memory {peaks[0]} made, {peaks[1]} real, {peaks[0] / peaks[1] - 1:+.2%}")


def _names(graph: Graph) -> list[str]:
    kernels = np.flatnonzero(graph.gpu_compute)
    return [CLASSES[code].value for code in np.unique(classify(graph, kernels))]


def _sums(graph: Graph, name: str | None) -> tuple[int, int]:
    kernels = np.flatnonzero(graph.gpu_compute & (graph.nodes.phase != Phase.OPTIMIZER))
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

"""Compare predictions from captures of another GPU with captures on the target GPU.

    python benchmarks/paired_steps.py FROM/ TO/ [--target GPU|FILE] [--database FILE]

Traces with the same name in both folders are a pair: captures of the same job. Columns:

- compute: the sum captured in TO, the prediction of `annotate --target` from FROM, and whether the
  captured sum lies in the 80% interval;
- step: CUDA events without a profiler, and the predicted steady-state step with the host of FROM;
- energy of a step: NVML's power, and the prediction of `onerank energy`. NVML averages over a
  second, so shorter measurements have no figure;
- the allocator's peak.

Then compute by class, over all pairs and for each pair. Copies between host and GPU are excluded.
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from paired_traces import by_class

import onerank
from onerank.analysis.step_energy import power_timeline_of
from onerank.analysis.step_time import replay
from onerank.annotate import Gpu, find_gpu, load_gpu, recost, summarise
from onerank.annotate.energy import report_energy
from onerank.ir import Graph

AVERAGED_NS = 1_000_000_000
HEADS = ("compute ms", "told", "off", "80%", "step ms", "told", "off", "joule", "told", "off")
"""Of the table of pairs."""


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folders", type=Path, nargs=2)
    parser.add_argument("--target", help="a description of the second folder's GPU")
    parser.add_argument("--database", type=Path, action="append", default=[])
    given = parser.parse_args()
    here, there = given.folders
    names = sorted({p.name for p in here.glob("*.et")} & {p.name for p in there.glob("*.et")})
    if not names:
        sys.exit(f"no trace has one name in {here} and {there}")
    pairs = {Path(name).stem: (onerank.read(here / name), onerank.read(there / name))
             for name in names}  # fmt: skip
    one, other = next(iter(pairs.values()))
    target = load_gpu(given.target) if given.target else find_gpu(other.job.device.name)
    if target is None:
        sys.exit(f"{other.job.device.name} is no GPU known here; give --target")
    versions = ", ".join(f"{k} {v}" for k, v in other.job.measurement.versions.items())
    print(f"{one.job.device.name} -> {other.job.device.name} as {target.name}; {versions}")
    print(f"\n{'':18}" + "".join(f"{head:>11}" for head in HEADS) + f"{'peak off':>11}")
    classes: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for name, (start, end) in pairs.items():
        told = recost(start, target, databases=given.database)
        print(f"{name:18}" + "".join(f"{cell:>11}" for cell in row(start, told, end, target)))
        held(start, told, end, classes)
    print(f"\n{'':18}{'ms':>11}{'there, ms':>11}{'told, ms':>11}{'off':>11}{'of classes':>22}")
    for name, sums in sorted(classes.items(), key=lambda one: -sum(s[1] for s in one[1])):
        before, took, made = np.sum(sums, axis=0)
        spread = [f"{100 * (m / t - 1):+.0f}" for _, t, m in sums]
        cells = (f"{before / 1e6:.2f}", f"{took / 1e6:.2f}", f"{made / 1e6:.2f}", off(made, took))
        print(f"{name:18}" + "".join(f"{cell:>11}" for cell in cells) + "   " + " ".join(spread))


def row(start: Graph, told: Graph, end: Graph, target: Gpu) -> list[str]:
    """Return the cells of a pair."""
    changed = summarise(start, told)
    took = int(end.nodes.duration_ns[end.gpu_compute].sum())
    low, high = changed.interval or (0, 0)
    step, ran = end.job.measurement.median_step_ns, replay(told)
    assert step is not None
    made = ran.steady_state.step_ns if ran.steady_state else ran.step_time_ns
    long = sum(end.job.measurement.step_ns) >= AVERAGED_NS
    drawn = end.job.device.sensors.power_mw if long and end.job.device.sensors else None
    energy = report_energy(told, target, power_timeline_of(told)).step_uj * 1e-6
    peaks = (told.job.measurement.peak_memory_bytes, end.job.measurement.peak_memory_bytes)
    return [
        f"{took / 1e6:.3f}",
        f"{changed.after_ns / 1e6:.3f}",
        off(changed.after_ns, took),
        "in" if low <= took <= high else "out",
        f"{step / 1e6:.2f}",
        f"{made / 1e6:.2f}",
        off(made, step),
        *(_beside(drawn.median * step * 1e-12, energy) if drawn else ("", "", "")),
        off(*peaks) if all(peaks) else "",
    ]


def _beside(took: float, told: float) -> tuple[str, str, str]:
    return f"{took:.1f}", f"{told:.1f}", off(told, took)


def held(
    start: Graph, told: Graph, end: Graph, classes: dict[str, list[tuple[float, float, float]]]
) -> None:
    """Add a pair's times of each class: in FROM, in TO, and as told."""
    before, after = by_class(start), by_class(end)
    for name in before.keys() & after.keys():
        rows, there = before[name], after[name]
        sums = (start.nodes.duration_ns[rows], end.nodes.duration_ns[there])
        classes[name].append(
            (*(float(s.sum()) for s in sums), float(told.nodes.duration_ns[rows].sum()))
        )


def off(told: float, took: float) -> str:
    """Return how far one is from the other."""
    return f"{100 * (told / took - 1):+.1f}%"


if __name__ == "__main__":
    main()

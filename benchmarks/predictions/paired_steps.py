"""Compare predictions from captures of another GPU with captures on the target GPU.

    python -m benchmarks.predictions.paired_steps FROM/ TO/ [--target GPU|FILE] [--database FILE]

Traces with the same name in both folders are a pair: captures of the same job. Columns:

- compute: the sum captured in TO, the prediction of `annotate --target` from FROM, and whether the
  captured sum lies in the 80% interval;
- step: CUDA events without a profiler, the predicted step with the host of FROM, and whether the
  measured step lies in the 80% interval, which includes the spread over hosts;
- energy of a step: NVML's power, and the prediction of `onerank energy`. NVML averages over a
  second, so shorter measurements have no figure;
- the allocator's peak.

Then compute by class, over all pairs and for each pair. Copies between host and GPU are excluded.
"""

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

import onerank
from benchmarks.harness import parser_of, print_conditions
from benchmarks.predictions.paired_traces import by_class
from onerank.analysis.step_energy import step_durations_of
from onerank.analysis.step_time import step_change
from onerank.annotate import Gpu, find_gpu, load_gpu, summarise
from onerank.annotate.energy import report_energy
from onerank.ir import Graph

AVERAGED_NS = 1_000_000_000
HEADS = (
    *("compute ms", "predicted", "error", "80%"),
    *("step ms", "predicted", "error", "p10", "p90", "80%"),
    *("joule", "predicted", "error"),
)
"""Of the table of pairs."""


def main() -> None:
    """Print both tables."""
    parser = parser_of(__doc__)
    parser.add_argument("folders", type=Path, nargs=2)
    parser.add_argument("--target", help="a description of the second folder's GPU")
    parser.add_argument("--database", type=Path, action="append", default=[])
    arguments = parser.parse_args()
    sources, targets = arguments.folders
    names = sorted({p.name for p in sources.glob("*.et")} & {p.name for p in targets.glob("*.et")})
    if not names:
        sys.exit(f"no trace has one name in {sources} and {targets}")
    pairs = {Path(name).stem: (onerank.read(sources / name), onerank.read(targets / name))
             for name in names}  # fmt: skip
    first, second = next(iter(pairs.values()))
    target = load_gpu(arguments.target) if arguments.target else find_gpu(second.job.device.name)
    if target is None:
        sys.exit(f"{second.job.device.name} is no GPU known here; give --target")
    name_of_target = arguments.target or target.name
    versions = ", ".join(f"{k} {v}" for k, v in second.job.measurement.versions.items())
    print_conditions()
    print(f"{first.job.device.name} -> {second.job.device.name} as {target.name}; {versions}")
    print(f"\n{'':18}" + "".join(f"{head:>11}" for head in HEADS) + f"{'peak error':>12}")
    classes: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for name, (start, end) in pairs.items():
        predicted = onerank.recost(start, name_of_target, databases=arguments.database)
        print(f"{name:18}" + "".join(f"{cell:>11}" for cell in row(start, predicted, end, target)))
        add_classes(start, predicted, end, classes)
    print(f"\n{'':18}{'FROM, ms':>11}{'TO, ms':>11}{'predicted':>11}{'error':>11}{'by pair':>22}")
    for name, sums in sorted(classes.items(), key=lambda first: -sum(s[1] for s in first[1])):
        before, took, predicted_sum = np.sum(sums, axis=0)
        spread = [f"{100 * (m / t - 1):+.0f}" for _, t, m in sums]
        cells = (
            f"{before / 1e6:.2f}",
            f"{took / 1e6:.2f}",
            f"{predicted_sum / 1e6:.2f}",
            off(predicted_sum, took),
        )
        print(f"{name:18}" + "".join(f"{cell:>11}" for cell in cells) + "   " + " ".join(spread))


def row(start: Graph, predicted: Graph, end: Graph, target: Gpu) -> list[str]:
    """Return the cells of a pair."""
    changed = summarise(start, predicted)
    took = int(end.nodes.duration_ns[end.gpu_compute].sum())
    low, high = changed.interval or (0, 0)
    step = end.job.measurement.median_step_ns
    step_predicted = step_change(start, predicted, changed.interval or ())
    assert step is not None
    assert step_predicted.after is not None
    ends = step_predicted.p10_ns or 0, step_predicted.p90_ns or 0
    long = sum(end.job.measurement.step_ns) >= AVERAGED_NS
    drawn = end.job.device.sensors.power_mw if long and end.job.device.sensors else None
    energy = report_energy(predicted, target, step_durations_of(predicted)).step_uj * 1e-6
    peaks = (predicted.job.measurement.peak_memory_bytes, end.job.measurement.peak_memory_bytes)
    return [
        f"{took / 1e6:.3f}",
        f"{changed.after_ns / 1e6:.3f}",
        off(changed.after_ns, took),
        "in" if low <= took <= high else "out",
        f"{step / 1e6:.2f}",
        f"{step_predicted.after.step_ns / 1e6:.2f}",
        off(step_predicted.after.step_ns, step),
        *(f"{end / 1e6:.2f}" for end in ends),
        "in" if ends[0] <= step <= ends[1] else "out",
        *(_energy_cells(drawn.median * step * 1e-12, energy) if drawn else ("", "", "")),
        off(*peaks) if all(peaks) else "",
    ]


def _energy_cells(took: float, predicted: float) -> tuple[str, str, str]:
    return f"{took:.1f}", f"{predicted:.1f}", off(predicted, took)


def add_classes(
    start: Graph, predicted: Graph, end: Graph, classes: dict[str, list[tuple[float, float, float]]]
) -> None:
    """Add a pair's times of each class: in FROM, in TO, and predicted."""
    before, after = by_class(start), by_class(end)
    for name in before.keys() & after.keys():
        rows, target_rows = before[name], after[name]
        columns = (
            start.nodes.duration_ns[rows],
            end.nodes.duration_ns[target_rows],
            predicted.nodes.duration_ns[rows],
        )
        was, took, prediction = (float(column.sum()) for column in columns)
        classes[name].append((was, took, prediction))


def off(predicted: float, took: float) -> str:
    """Return the relative difference as text."""
    return f"{100 * (predicted / took - 1):+.1f}%"


if __name__ == "__main__":
    main()

"""Predict the iterations that vTrain's authors published, without a GPU.

    python -m benchmarks.no_device.megatron_iterations DATA [CAPTURES]

DATA holds megatron_a100_iterations.csv: rows of data/ground_truth_single.csv of VIA-Research/vTrain
(f8dda84), or in the same columns rows of ground_truth_multi.csv. CAPTURES keeps the captures of
benchmarks/jobs/megatron_gpt.py for a second run.

Rows on one node are no measurements. vTrain calls them collected with Megatron-DeepSpeed, but they
are what its simulator computes: the first table below shows that rows which differ in replicas
differ by the same time to the nanosecond whatever the micro-batch, and by that of the all-reduce in
its table (trace/a100). src/predictor.py reproduces them all, without recomputation. They hold one
profile of a single layer for each of 32 shapes, and each row repeats the noise of its profile: the
second table has layers that take less time for twice the tokens.

For these rows the prediction follows that simulator (`vtrain_ns`): kernels and host calls of one
captured layer, embedding, head and loss in the order of the profile; `annotate --target A100`;
1F1B; vTrain's table of all-reduces. The profiler traces CUPTI_ACTIVITY_KIND_KERNEL, under which
kernels run one by one: a launch waits for the kernel before it, so the host never runs ahead. It
also records every call of the CUDA runtime and driver, which slows the host by an unknown factor.
That factor is chosen on the rows of hidden size 1024; those of 2048 check it.

Another model of the profile explains the rows with large kernels better. The typical host has no
factor, and each launch costs a time that nothing hides: the profiler waits for the kernel and
records it. That time is chosen on hidden size 1024, too. Products of a layer have an operand of
zeros, because vTrain allocates weights without filling them (`torch.empty`). An A100 multiplies
zeros at 295 and random numbers at 257 TFLOP/s (8192 x 8192 x 8192, H. He, "Strangely, Matrix
Multiplications on GPUs Run Faster When Given Predictable Data"). Fused bias, norms and attention
scores keep their times.

For rows on several nodes, which are measurements, the prediction is `megatron_step.step_ns`: layers
recomputed, as vTrain's configurations say, the typical host, 200 GB/s within a node and 12.5 GB/s
for each GPU between nodes (four HDR adapters for eight GPUs, as they say).
"""

import math
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
from scipy.stats import kendalltau

import onerank
from benchmarks.harness import parser_of, print_conditions, version_of
from benchmarks.no_device.megatron_step import (
    GPU,
    NODE,
    Job,
    Network,
    Parts,
    captured,
    parts_of,
    step_ns,
)
from benchmarks.no_device.vtrain_profiles import (
    Launches,
    Row,
    all_reduce_ns,
    launches_of,
    profile_of,
    rows_of,
    vtrain_ns,
)
from onerank.ir import Graph

# Factor on the typical host for the host of vTrain's profiles: the best of 1.0 to 2.5, in steps of
# 0.1, for the 348 rows of hidden size 1024.
PROFILED_HOST = 1.8
CHOSEN_ON = 1024

# Time of a launch under vTrain's profiler that nothing hides: the best of 0 to 60 us, in steps of
# 5 us, for the rows of hidden size 1024 with the typical host.
PROFILED_LAUNCH_NS = 30_000

# Time of a product of zeros on an A100 over that of random numbers.
ZEROS = 257 / 295

SEVERAL_NODES = Network(node_gb_per_s=200, nic_gb_per_s=12.5)

LARGE_NS = 2.2e6

PLANNED_LAYERS = 24

DRAWS = 1000

HOST_BOUND = 1.15
"""A layer that takes less than this times the shortest one waits for its host."""


def print_that_rows_are_simulated(rows: Iterable[Row]) -> None:
    """Print how equal the times are by which rows with other numbers of replicas differ."""
    replicas: dict[object, dict[int, float]] = defaultdict(dict)
    for row in rows:
        job = row.job
        key = (*row.model, job.tp, job.pp), (job.micro_batch, job.micro_batches)
        replicas[key][job.dp] = row.measured_ms
    differences: dict[object, list[float]] = defaultdict(list)
    for (shape, _), times in replicas.items():
        for fewer, more in pairwise(sorted(dp for dp in times if dp > 1)):
            differences[shape, fewer, more].append(times[more] - times[fewer])
    several = [ms for ms in differences.values() if len(ms) > 1]
    if not several:
        return
    spread_ns = max(max(ms) - min(ms) for ms in several) * 1e6
    shorter = sum(ms[0] < 0 for ms in several)
    print(f"{sum(map(len, several))} pairs of rows that differ in replicas and the batch for them, "
          f"in {len(several)} sets of a model and layout: within a set\nthe differences of "
          f"iterations are equal to {spread_ns:.1f} ns; in {shorter} sets more replicas are "
          "faster\n")  # fmt: skip


def print_layers(rows: Iterable[Row]) -> None:
    """Print the time of a layer in each profile, which rows with other numbers of layers tell."""
    steps: dict[object, dict[int, float]] = defaultdict(dict)
    for row in rows:
        job = row.job
        if job.pp == job.dp == 1:
            steps[job.hidden, job.tp, job.micro_batch, job.micro_batches][job.layers] = (
                row.measured_ms
            )
    layers: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
    most: dict[object, int] = {}
    for (hidden, tp, size, count), times in steps.items():
        # The update of a layer counts once in a step, so the most micro-batches hide it best.
        if len(times) < 2 or count < most.get((hidden, tp, size), 0):
            continue
        most[hidden, tp, size] = count
        fewer, more = min(times), max(times)
        reduces = 4 * all_reduce_ns(2 * size * 1024 * hidden, tp) / 1e6
        ms = (times[more] - times[fewer]) / (more - fewer) / count - reduces
        layers[hidden, tp][size] = ms
    print("ms of a layer and micro-batch in these rows, without all-reduces, by micro-batch")
    sizes = (1, 2, 4, 8)
    print(f"{'':18}" + "".join(f"{size:8}" for size in sizes))
    for (hidden, tp), times in sorted(layers.items()):
        cells = (f"{times[size]:8.2f}" if size in times else f"{'-':>8}" for size in sizes)
        print(f"hidden {hidden} tp {tp}  {''.join(cells)}")
    print()


def main() -> None:
    """Print the errors by way of prediction, model and layout."""
    parser = parser_of(__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("captures", type=Path, nargs="?")
    options = parser.parse_args()
    path = options.data / "megatron_a100_iterations.csv"
    if not path.is_file():
        sys.exit(f"{path}: no such file; give the directory that holds it")
    print_conditions(version_of("torch"))
    print((__doc__ or "").split("\n\n", 2)[2])
    rows = rows_of(path)
    with tempfile.TemporaryDirectory() as directory:
        folder = options.captures or Path(directory)
        folder.mkdir(exist_ok=True)
        on_one = [row for row in rows if row.gpus <= NODE]
        if on_one:
            print_that_rows_are_simulated(on_one)
            print_layers(on_one)
            print_one_node(on_one, folder)
        on_several = [row for row in rows if row.gpus > NODE]
        if on_several:
            print_several_nodes(on_several, folder)


@dataclass(frozen=True)
class Predictor:
    """Predicts vTrain's iterations from captures of one layer.

    Attributes:
        graphs: shape of a job -> its re-costed capture.
        launches: shape of a job -> the launches of that capture.
    """

    graphs: Mapping[tuple[int, ...], Graph]
    launches: Mapping[tuple[int, ...], Launches]

    @classmethod
    def of(cls, rows: Sequence[Row], folder: Path) -> "Predictor":
        """Capture the shapes of some rows, on shapes alone."""
        graphs: dict[tuple[int, ...], Graph] = {}
        for row in rows:
            hidden, heads, sequence, size, tp = shape_of(row.job)
            if shape_of(row.job) not in graphs:
                job = Job(hidden, heads, 0, sequence, size, 0, tp, recompute="none")
                graph = captured(job, folder, layers=1, extra=("--vtrain",))
                graphs[shape_of(row.job)] = onerank.recost(graph, GPU)
        return cls(graphs, {shape: launches_of(graph) for shape, graph in graphs.items()})

    def times_ms(self, rows: Iterable[Row], host: float, end: int | None = None) -> list[float]:
        """Predict rows; at an end of their 80% interval, the host's and the kernels' combined."""
        middle, by_host, by_kernels = {}, {}, {}
        for shape, step in self.launches.items():
            middle[shape] = profile_of(step, host=host)
            if end is not None:
                details = self.graphs[shape].job.annotations[-1].details
                kernels = details["interval"][end] / step.duration_ns.sum()
                by_host[shape] = profile_of(step, host=host * details["host_interval"][end])
                by_kernels[shape] = profile_of(step, host=host, kernels=kernels)
        times: list[float] = []
        for row in rows:
            shape = shape_of(row.job)
            ns = vtrain_ns(row.job, middle[shape])
            if end is not None:
                ratios = [vtrain_ns(row.job, p[shape]) / ns for p in (by_host, by_kernels)]
                spread = float(np.hypot(*np.log(ratios)))
                ns *= np.exp(spread if end else -spread)
            times.append(ns / 1e6)
        return times

    def long_launches_ms(self, rows: Iterable[Row], launch_ns: float) -> list[float]:
        """Predict rows of a profiler that makes each launch longer."""
        profiles = {
            shape: profile_of(step, host=1.0, launch_ns=launch_ns, zeros=ZEROS)
            for shape, step in self.launches.items()
        }
        return [vtrain_ns(row.job, profiles[shape_of(row.job)]) / 1e6 for row in rows]


def print_choices(predictor: Predictor, choosing: Sequence[Row]) -> None:
    """Print the host factor and the time of a launch that fit some rows best, and those used."""
    factors = np.arange(1.0, 2.55, 0.1).round(1).tolist()
    best = min(factors, key=lambda f: mean_error(predictor.times_ms(choosing, f), choosing))
    print(f"best factor on the typical host for hidden {CHOSEN_ON}: {best}; used: {PROFILED_HOST}")
    tried = range(0, 65_000, 5_000)
    best = min(tried, key=lambda ns: mean_error(predictor.long_launches_ms(choosing, ns), choosing))
    print(f"best time of a launch under the profiler for hidden {CHOSEN_ON}: {best / 1e3:.0f} us; "
          f"used: {PROFILED_LAUNCH_NS / 1e3:.0f} us")  # fmt: skip


def print_one_node(rows: Sequence[Row], folder: Path) -> None:
    """Print predictions of what vTrain simulates."""
    predictor = Predictor.of(rows, folder)
    if choosing := [row for row in rows if row.job.hidden == CHOSEN_ON]:
        print_choices(predictor, choosing)
    cases = {
        "kernels only": predictor.times_ms(rows, 0.0),
        "longer launches, zeros": predictor.long_launches_ms(rows, PROFILED_LAUNCH_NS),
        "typical host": predictor.times_ms(rows, 1.0),
        "typical host, factor": predictor.times_ms(rows, PROFILED_HOST),
    }
    launches = predictor.launches
    print_cases(cases, rows)
    print_large_kernels({name: cases[name] for name in list(cases)[1:]}, rows, launches)
    profiles = {shape: profile_of(step, host=PROFILED_HOST) for shape, step in launches.items()}
    layer_ns = {shape: sum(profile.layer) for shape, profile in profiles.items()}
    print_ranks_by_cause(cases["typical host, factor"], rows, layer_ns)
    low, high = (predictor.times_ms(rows, PROFILED_HOST, end) for end in (0, 1))
    held = sum(a <= row.measured_ms <= b for a, row, b in zip(low, rows, high, strict=True))
    print(f"{held} of {len(rows)} in the 80% interval")


def print_large_kernels(
    cases: Mapping[str, Sequence[float]],
    rows: Sequence[Row],
    launches: Mapping[tuple[int, ...], Launches],
) -> None:
    """Print the median error of shapes whose kernels take long, by case and shape."""
    large = [
        shape
        for shape, step in sorted(launches.items())
        if sum(profile_of(step, host=0.0).layer) > LARGE_NS
    ]
    print(f"\nmedian error of the shapes whose kernels take over {LARGE_NS / 1e6:.1f} ms a layer")
    print(f"{'hidden  micro-batch  tp':28}" + "".join(f"{name:>24}" for name in cases))
    for shape in large:
        hidden, _, _, size, tp = shape
        line = f"{hidden:6}{size:13}{tp:4}{'':5}"
        for predicted in cases.values():
            errors = [
                ms / row.measured_ms - 1
                for ms, row in zip(predicted, rows, strict=True)
                if shape_of(row.job) == shape
            ]
            line += f"{statistics.median(errors):+24.1%}"
        print(line)


def print_ranks_by_cause(
    predicted: Sequence[float], rows: Sequence[Row], layer_ns: Mapping[tuple[int, ...], float]
) -> None:
    """Print how rows would rank if the time of a layer were exact for some shapes.

    These figures explain errors. They use what is judged, so they are no predictions.

    Args:
        predicted: ms of each row.
        rows: the rows.
        layer_ns: shape -> predicted time of a layer, forward and backward.
    """
    ratios: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for ms, row in zip(predicted, rows, strict=True):
        ratios[shape_of(row.job)].append(row.measured_ms / ms)
    exact = {shape: statistics.median(of_shape) for shape, of_shape in ratios.items()}
    # Layers with the same launches whose kernels are short take the host's time.
    shortest = min(layer_ns.values())
    waits = {shape for shape, ns in layer_ns.items() if ns < HOST_BOUND * shortest}
    common = statistics.median(exact[shape] for shape in waits)
    times = sorted(exact[shape] * layer_ns[shape] / 1e6 for shape in waits)
    print(f"\n{len(waits)} of {len(exact)} shapes wait for the host: "
          f"predicted {shortest / 1e6:.2f} to {HOST_BOUND * shortest / 1e6:.2f} "
          f"ms a layer, in the rows {times[0]:.2f} to "
          f"{times[-1]:.2f} ms")  # fmt: skip
    cases = {
        "as predicted": lambda shape: 1.0,
        "exact: shapes that wait": lambda shape: exact[shape] if shape in waits else 1.0,
        "exact: the others": lambda shape: common if shape in waits else exact[shape],
        "exact: all": lambda shape: exact[shape],
    }
    for name, factor in cases.items():
        changed = [ms * factor(shape_of(row.job)) for ms, row in zip(predicted, rows, strict=True)]
        lost = losses(changed, rows)
        print(f"  {name:26}mean error {mean_error(changed, rows):.1%}, "
              f"tau of the worst model {min(taus(changed, rows)):.3f}, best one loses "
              f"{statistics.mean(lost):.1%} in the mean, {max(lost):.1%} at worst; tau of the "
              f"alternatives of 24 layers {tau_of_alternatives(changed, rows):.3f}")  # fmt: skip
    # What another profile of the same machine would score against this one: each layer that waits
    # draws its deviation anew from those of all that wait.
    drawn: dict[str, list[float]] = {"error": [], "tau": [], "loses": []}
    generator = np.random.default_rng(0)
    deviations = [exact[shape] for shape in waits]
    for _ in range(DRAWS):
        again = dict(zip(waits, generator.choice(deviations, len(waits)).tolist(), strict=True))
        factors = [again.get(shape_of(row.job), exact[shape_of(row.job)]) for row in rows]
        times = [ms * factor for ms, factor in zip(predicted, factors, strict=True)]
        drawn["error"].append(mean_error(times, rows))
        drawn["tau"].append(tau_of_alternatives(times, rows))
        drawn["loses"].append(statistics.mean(losses(times, rows)))
    low, middle, high = np.quantile(drawn["tau"], (0.1, 0.5, 0.9))
    error = statistics.median(drawn["error"])
    print(f"profiles drawn anew, {DRAWS} times: mean error {error:.1%}, "
          f"tau of the alternatives of 24 layers {middle:.3f} (80% of draws: {low:.3f} to "
          f"{high:.3f}), best one loses "
          f"{statistics.median(drawn['loses']):.1%} in the mean")  # fmt: skip


def print_several_nodes(rows: Sequence[Row], folder: Path) -> None:
    """Print predictions of measured iterations on several nodes."""
    predicted: list[float] = []
    held = 0
    for row in rows:
        job = row.job
        shape = Job(job.hidden, job.heads, 0, job.sequence, job.micro_batch, 0, job.tp)
        parts = _parts(shape, folder)
        predicted.append(step_ns(job, parts, SEVERAL_NODES) / 1e6)
        held += predicted[-1] * parts.low <= row.measured_ms <= predicted[-1] * parts.high
    print_cases({"several nodes": predicted}, rows)
    print(f"{held} of {len(rows)} in the 80% interval")


@cache
def _parts(shape: Job, folder: Path) -> Parts:
    return parts_of(shape, folder, SEVERAL_NODES)


def shape_of(job: Job) -> tuple[int, int, int, int, int]:
    return job.hidden, job.heads, job.sequence, job.micro_batch, job.tp


def mean_error(predicted: Iterable[float], rows: Iterable[Row]) -> float:
    return statistics.mean(
        abs(ms / row.measured_ms - 1) for ms, row in zip(predicted, rows, strict=True)
    )


def print_cases(cases: Mapping[str, Sequence[float]], rows: Sequence[Row]) -> None:
    """Print errors and ranks of each case, and the errors of the last case by model and layout."""
    print(f"\n{'':26}{'mean abs':>10}{'median':>9}{'worst':>9}{'tau, worst model':>18}"
          f"{'best one loses: mean, worst':>28}")  # fmt: skip
    for name, predicted in cases.items():
        errors = [ms / row.measured_ms - 1 for ms, row in zip(predicted, rows, strict=True)]
        lost = losses(predicted, rows) or [math.nan]
        tau = min(taus(predicted, rows), default=math.nan)
        print(f"{name:26}{mean_error(predicted, rows):10.1%}{statistics.median(errors):+9.1%}"
              f"{max(errors, key=abs):+9.1%}{tau:18.3f}"
              f"{statistics.mean(lost):18.1%}{max(lost):10.1%}")  # fmt: skip
    last = list(cases)[-1]
    print(f"\n{last}: mean absolute error and median of the rows")
    keys: tuple[Callable[[Row], object], ...] = (
        lambda row: f"hidden {row.job.hidden}, {row.job.layers} layers",
        lambda row: row.layout,
        lambda row: f"micro-batch {row.job.micro_batch}",
    )
    for key in keys:
        groups: dict[str, list[float]] = defaultdict(list)
        for ms, row in zip(cases[last], rows, strict=True):
            groups[str(key(row))].append(ms / row.measured_ms - 1)
        for name, errors in sorted(groups.items()):
            print(f"  {name:26}{len(errors):5}{statistics.mean(map(abs, errors)):8.1%}"
                  f"{statistics.median(errors):+8.1%}")  # fmt: skip


def taus(predicted: Iterable[float], rows: Iterable[Row]) -> list[float]:
    """Return Kendall's tau of predicted against measured iterations, of each model."""
    groups: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for ms, row in zip(predicted, rows, strict=True):
        groups[row.model].append((ms, row.measured_ms))
    return [
        float(kendalltau(*zip(*pairs, strict=True)).statistic)
        for pairs in groups.values()
        if len(pairs) > 2
    ]


def tau_of_alternatives(predicted: Iterable[float], rows: Iterable[Row]) -> float:
    """Return Kendall's tau of all pairs of alternatives of 24 layers, which plan_ranking plans."""
    groups: dict[object, list[tuple[float, float]]] = defaultdict(list)
    for ms, row in zip(predicted, rows, strict=True):
        if row.job.layers == PLANNED_LAYERS:
            groups[row.model, row.gpus, row.job.global_batch].append((ms, row.measured_ms))
    signs = [
        np.sign((a[0] - b[0]) * (a[1] - b[1]))
        for pairs in groups.values()
        for a, b in combinations(pairs, 2)
    ]
    return float(np.mean(signs))


def losses(predicted: Iterable[float], rows: Iterable[Row]) -> list[float]:
    """Return by how much the best predicted row of a model, GPUs and batch misses the best."""
    groups: dict[object, list[tuple[float, float]]] = defaultdict(list)
    for ms, row in zip(predicted, rows, strict=True):
        groups[row.model, row.gpus, row.job.global_batch].append((ms, row.measured_ms))
    return [
        min(pairs)[1] / min(measured for _, measured in pairs) - 1
        for pairs in groups.values()
        if len(pairs) > 1
    ]


if __name__ == "__main__":
    main()

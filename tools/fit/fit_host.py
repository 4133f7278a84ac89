"""`python -m tools.fit.fit_host GRAPH... -o FILE`: fit a description of a host from GPU captures.

Each capture needs the host time of steps with and without the profiler, which `capture run` records
on a GPU. The host is replayed without the profiler and with a GPU that takes no time. Each call's
time is the distance from the launch before it. The sum over the step is scaled to the measured one.
Figures of kinds without a call in the captures stay as the shipped description has them.

`further` is the 80% prediction interval of a host that is not among the captured ones: few hosts
were captured, and the percentiles of few are too close. It is Student's, of ln(host time of a step
over the sum of the p50) and of the residual per call.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np

from onerank.annotate.hosts.host import (
    HOST_OP_KINDS,
    TYPICAL,
    FurtherHost,
    Host,
    HostTime,
    load_host,
)
from onerank.annotate.passes.host_time import HostCalls, launched_calls
from onerank.ir import Graph, Kind
from onerank.ir.arrays import F64, I64
from onerank.ir.chakra import read
from onerank.ir.steady_state import replay_without_profiler


def host_times(graph: Graph) -> tuple[HostCalls, dict[str, float]]:
    """Return the calls of a capture, and the mean time of its host in ns for each kind that it has.

    Raises:
        ValueError: the capture has no host time without the profiler.
    """
    measurement = graph.job.measurement
    overhead = measurement.host_overhead
    if overhead is None or not measurement.host_step_ns:
        raise ValueError("the capture has no host time without the profiler")
    replayed = replay_without_profiler(graph, overhead.host_factor)
    # A GPU that is never busy, so that no call waits for it and the host alone sets the pace.
    free_gpu = replayed.with_gpu_durations(np.zeros(len(graph), dtype=np.int64))
    times = free_gpu.schedule()
    host = graph.mask(Kind.HOST_OP)
    began_ns, ended_ns = int(times.start_ns[host].min()), int(times.end_ns[host].max())
    calls = launched_calls(graph, times.start_ns)
    at_ns = _launch_times(graph, calls, times.start_ns)
    before_ns = np.diff(at_ns, prepend=began_ns).astype(np.float64)
    # The replay is within 2% of the measured host time; all calls are scaled by the difference.
    scale = statistics.median(measurement.host_step_ns) / (ended_ns - began_ns)
    shipped = load_host(TYPICAL)
    assert shipped is not None
    # Autograd functions and operators of subclasses of Tensor have figures, which add to those of
    # the kinds.
    python_ns = calls.python_ns(shipped, "p50_ns") / scale
    of_call = np.bincount(calls.call, weights=before_ns) - python_ns
    sums = np.bincount(calls.kind, weights=of_call, minlength=len(HOST_OP_KINDS))
    # A single call may take less than Python's p50. To cut each call at 0 would lengthen the mean,
    # so only the sums are cut.
    sums = np.maximum(sums, 0)
    counts = np.bincount(calls.kind, weights=calls.times, minlength=len(HOST_OP_KINDS))
    rest = list(HOST_OP_KINDS).index("step")
    # What the host does after the last launch belongs to no call.
    sums[rest], counts[rest] = ended_ns - at_ns[-1], 1
    means = {
        kind: float(total * scale / count)
        for kind, total, count in zip(HOST_OP_KINDS, sums, counts, strict=True)
        if count
    }
    means |= _optimizer_times(calls, of_call * scale, shipped)
    # Time between steps, which a captured step does not contain.
    means["step"] += overhead.inter_step_host_ns
    return calls, means


def _optimizer_times(calls: HostCalls, of_call: F64, shipped: Host) -> dict[str, float]:
    """Return the figures of an optimizer whose operators take lists.

    One capture cannot tell what a tensor takes and what a launch does, so both are those of the
    shipped description times a factor. What remains of the first call is the rest of the step.

    Args:
        calls: the calls.
        of_call: measured time of each in ns, float64[c].
        shipped: the shipped description.
    """
    listed = np.flatnonzero(calls.kind == list(HOST_OP_KINDS).index("optimizer"))
    if not len(listed):
        return {}
    own_ns = calls.own_ns(shipped, "p50_ns")[listed]
    further_ns = float(of_call[listed][1:].sum())
    factor = further_ns / own_ns[1:].sum() if further_ns > 0 else 1.0
    figures = {
        kind: factor * shipped.figures[kind].p50_ns for kind in ("optimizer", "optimizer_launch")
    }
    step_ns = float(of_call[listed[0]] - factor * own_ns[0])
    return figures | {"optimizer_step": max(step_ns, 0.0)}


# 90th percentile of Student's t by the degrees of freedom, from 1 on. More have that of 10, which
# is at most 7% too wide.
_T90 = (3.078, 1.886, 1.638, 1.533, 1.476, 1.440, 1.415, 1.397, 1.383, 1.372)


def further_host(steps: Sequence[float], residuals_ns: Sequence[float]) -> FurtherHost | None:
    """Return the interval of a further host; None for less than two hosts.

    Args:
        steps: measured host time of a step over the time by the p50 figures, by host.
        residuals_ns: unexplained time of a step for each call, by host.
    """
    count = len(steps)
    if count < 2:
        return None
    t = _T90[min(count - 1, len(_T90)) - 1] * math.sqrt(1 + 1 / count)
    logs = [math.log(step) for step in steps]
    middle, half = statistics.mean(logs), t * statistics.stdev(logs)
    residual_ns, residual_half_ns = (
        statistics.mean(residuals_ns),
        t * statistics.stdev(residuals_ns),
    )
    return FurtherHost(
        p10=min(1.0, round(math.exp(middle - half), 3)),
        p90=max(1.0, round(math.exp(middle + half), 3)),
        residual_p10_ns=round(residual_ns - residual_half_ns),
        residual_p90_ns=round(residual_ns + residual_half_ns),
    )


def _launch_times(graph: Graph, calls: HostCalls, called_ns: I64) -> F64:
    """Return the start of the operator that launches each node, never before the last one."""
    edges = graph.edges
    host = graph.mask(Kind.HOST_OP)[edges.source]
    source = np.zeros(len(graph), dtype=np.int64)
    source[edges.target[host]] = called_ns[edges.source[host]]
    return np.maximum.accumulate(source[calls.node]).astype(np.float64)


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("graphs", type=Path, nargs="+", help="GPU captures, one per host")
    parser.add_argument("--name", default="typical")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    graphs = [read(path) for path in options.graphs]
    fitted = [host_times(graph) for graph in graphs]
    shipped = load_host(TYPICAL)
    assert shipped is not None
    known = {kind: [means[kind] for _, means in fitted if kind in means] for kind in HOST_OP_KINDS}
    kept = {kind: shipped.figures[kind] for kind, each in known.items() if not each}
    # In the shipped file "captures" are other captures than the ones of this fit.
    kept_sources = {
        figure.source: "shipped-captures" if figure.source == "captures" else figure.source
        for figure in kept.values()
    }
    sources = {"captures": _source(options.graphs)}
    sources |= {name: shipped.sources[source] for source, name in kept_sources.items()}
    figures: dict[str, HostTime] = {}
    for kind, each in known.items():
        if kind in kept:
            figure = kept[kind]
            figures[kind] = msgspec.structs.replace(figure, source=kept_sources[figure.source])
        else:
            low, mid, high = map(round, np.percentile(each, (10, 50, 90)).tolist())
            figures[kind] = HostTime(low, mid, high, "captures")
    host = Host(options.name, sources, figures, rank_spread=shipped.rank_spread)
    steps = [_of_step(graph, calls, host) for graph, (calls, _) in zip(graphs, fitted, strict=True)]
    further = further_host([ratio for ratio, _ in steps], [rest_ns for _, rest_ns in steps])
    host = msgspec.structs.replace(host, further=further)
    written_by = "Written by `python -m tools.fit.fit_host GRAPH... -o FILE`; see hosts/host.py."
    options.output.write_text(host_toml(host, written_by), encoding="utf-8")
    for path, (calls, means) in zip(options.graphs, fitted, strict=True):
        by_kind = ", ".join(f"{kind} {ns / 1e3:.1f} us" for kind, ns in means.items())
        sys.stdout.write(f"{path}: {len(calls.first)} calls; {by_kind}\n")


def host_toml(host: Host, *comments: str) -> str:
    """Return a description as TOML, below lines of comment."""
    lines = [
        *(f"# {comment}" for comment in comments),
        f'name = "{host.name}"',
        f"rank_spread = {host.rank_spread:g}",
        "",
        "[sources]",
        *(f'{name} = "{source}"' for name, source in host.sources.items()),
        "",
        "[figures]",
    ]
    for kind, time in host.figures.items():
        low, mid, high = (round(ns) for ns in (time.p10_ns, time.p50_ns, time.p90_ns))
        lines.append(
            f"{kind} = {{ p10_ns = {low}, p50_ns = {mid}, p90_ns = {high}, "
            f'source = "{time.source}" }}'
        )
    if host.further is not None:
        lines += ["", "[further]"]
        further = msgspec.structs.asdict(host.further)
        lines += [f"{name} = {value:g}" for name, value in further.items()]
    return "\n".join(lines) + "\n"


def _of_step(graph: Graph, calls: HostCalls, host: Host) -> tuple[float, float]:
    """Return a capture's host time over the description's, and its residual per call in ns."""
    measurement = graph.job.measurement
    assert measurement.host_overhead is not None, "host_times refuses other captures"
    measured_ns = statistics.median(measurement.host_step_ns)
    residual_ns = measurement.host_overhead.residual_ns / len(calls.first)
    return measured_ns / calls.step_ns(host, "p50_ns"), residual_ns


def _source(paths: list[Path]) -> str:
    names = ", ".join(f"{path.parent.name}/{path.name}" for path in paths)
    torch = {str(read(path).job.measurement.versions.get("torch")) for path in paths}
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    return f"traces/: {names}; torch {', '.join(sorted(torch))}; fitted {today}"


if __name__ == "__main__":
    main()

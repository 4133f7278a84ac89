"""`python -m tools.fit.fit_host GRAPH... -o FILE`: fit a description of a host from GPU captures.

Each capture needs the host time of steps with and without the profiler, which `capture run` records
on a GPU. The host is replayed without the profiler and with a GPU that takes no time. Each call's
time is the distance from the launch before it. The sum over the step is scaled to the measured one.
"""

import argparse
import statistics
import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt

from onerank.annotate.hosts.host import SORTS
from onerank.annotate.passes.host_time import Calls, launched_calls
from onerank.ir import Graph, Kind
from onerank.ir.chakra import read
from onerank.ir.replay import replay_without_profiler

F64 = npt.NDArray[np.float64]


def host_times(graph: Graph) -> tuple[Calls, dict[str, float]]:
    """Return the calls of a capture, and the mean time of its host by sort in ns.

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
    # The replay is within 2% of the measured host time; the rest goes to all calls alike.
    scale = statistics.median(measurement.host_step_ns) / (ended_ns - began_ns)
    of_call = np.bincount(calls.call, weights=before_ns)
    sums = np.bincount(calls.sort, weights=of_call, minlength=len(SORTS))
    counts = np.bincount(calls.sort, weights=calls.times, minlength=len(SORTS))
    rest = list(SORTS).index("step")
    # What the host does after the last launch belongs to no call.
    sums[rest], counts[rest] = ended_ns - at_ns[-1], 1
    means = dict(zip(SORTS, (sums * scale / counts).tolist(), strict=True))
    # Time between steps, which a captured step does not contain.
    means["step"] += overhead.inter_step_host_ns
    return calls, means


def _launch_times(graph: Graph, calls: Calls, called_ns: npt.NDArray[np.int64]) -> F64:
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
    fitted = [host_times(read(path)) for path in options.graphs]
    lines = [
        "# Written by `python -m tools.fit.fit_host GRAPH... -o FILE`; see hosts/host.py.",
        f'name = "{options.name}"',
        "",
        "[sources]",
        f'captures = "{_source(options.graphs)}"',
        "",
        "[figures]",
    ]
    for sort in SORTS:
        each = [means[sort] for _, means in fitted]
        low, mid, high = (round(float(np.percentile(each, q))) for q in (10, 50, 90))
        lines.append(
            f'{sort} = {{ p10_ns = {low}, p50_ns = {mid}, p90_ns = {high}, source = "captures" }}'
        )
    options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    for path, (calls, means) in zip(options.graphs, fitted, strict=True):
        figures = ", ".join(f"{sort} {ns / 1e3:.1f} us" for sort, ns in means.items())
        sys.stdout.write(f"{path}: {len(calls.first)} calls; {figures}\n")


def _source(paths: list[Path]) -> str:
    names = ", ".join(f"{path.parent.name}/{path.name}" for path in paths)
    torch = {str(read(path).job.measurement.versions.get("torch")) for path in paths}
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    return f"traces/: {names}; torch {', '.join(sorted(torch))}; fitted {today}"


if __name__ == "__main__":
    main()

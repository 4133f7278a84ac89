"""Compare a slice with the real rank: kernels, collectives, compute by class, memory, step."""

import statistics
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from onerank.analysis.step_time import replay
from onerank.analysis.summary import shares_by_class
from onerank.annotate import PassOptions, characterise, recost
from onerank.ir import Graph, Kind, Reason, Sensors
from onerank.ir.errors import OneRankError


def sensors(label: str, graph: Graph) -> None:
    """Print the NVML samples of the timed steps."""
    read = graph.job.device.sensors or Sensors(samples=0)
    clock, power, heat = read.sm_clock_mhz, read.power_mw, read.temperature_c
    if clock is None or power is None or heat is None:
        print(f"{label:24} NVML does not tell")
        return
    print(
        f"{label:24} SM {clock.median} MHz ({clock.low} - {clock.high}), "
        f"{power.median / 1000:.0f} W, {heat.median} C"
    )


def compare(sliced: Graph, at_once: list[Graph], real: list[Graph], rank: int) -> None:
    """Print the table. The last column is re-costed for links that are active as in the job.

    Args:
        sliced: the slice of `rank`, made alone.
        at_once: a slice for each real rank, made on that rank's GPU, all at the same time.
        real: graphs of the real ranks.
        rank: the rank that was sliced.
    """
    stage = sliced.job.world.point(rank).get("pp")
    same = [r for r in range(len(real)) if sliced.job.world.point(r).get("pp") == stage]
    peers_real = [real[r] for r in same]
    sliced_kernels, real_kernels = kernels(sliced), kernels(real[rank])
    with_links = {
        r: changed for r in same if (changed := with_nvlink_active(at_once[r])) is not None
    }
    print(f"{'':34}{'slice':>16}{f'real, rank {rank}':>16}{'real, equal ranks':>24}"
          f"{'slice - median':>16}{'at once - same GPU':>20}{'NVLink active':>15}")  # fmt: skip

    def row(label: str, figure: Callable[[Graph], float], form: str = ".3f") -> None:
        """Print one figure of the slice and of the real ranks that do the same work."""
        value, peers = figure(sliced), [figure(graph) for graph in peers_real]
        median = statistics.median(peers)
        spread = f"{min(peers):{form}} - {max(peers):{form}}"
        gap = f"{value / median - 1:+.2%}" if median else "-"
        pairs = [
            _median([figure(changed[r]) / figure(real[r]) - 1 for r in changed if figure(real[r])])
            for changed in ({r: at_once[r] for r in same}, with_links)
        ]
        print(f"{label:34}{value:>16{form}}{figure(real[rank]):>16{form}}{spread:>24}{gap:>16}"
              f"{pairs[0]:>20}{pairs[1]:>15}")  # fmt: skip

    row("GPU operations besides comm.", lambda graph: sum(kernels(graph).values()), "d")
    for name in sorted({*sliced_kernels, *real_kernels}):
        if sliced_kernels[name] != real_kernels[name]:
            print(f"  {sliced_kernels[name]:4} against {real_kernels[name]:4} of {name[:90]}")
    (calls, single_rank), (real_calls, real_alone) = collectives(sliced), collectives(real[rank])
    # NCCL runs no kernel for such calls, so a real trace need not show them.
    if single_rank or real_alone:
        print(f"{'calls of a group of one, dropped':34}{single_rank:>16}{real_alone:>16}")
    print(f"{'collectives, in issue order':34}{len(calls):>16}{len(real_calls):>16}"
          f"{'the same' if calls == real_calls else 'DIFFERENT':>24}")  # fmt: skip
    if calls != real_calls:
        for call in sorted({*calls, *real_calls}):
            if calls.count(call) != real_calls.count(call):
                print(f"  {calls.count(call):4} against {real_calls.count(call):4} of {call}")
    overlapped = overlapping(real[rank])
    row("summed compute, ms", compute_ms)
    row(
        "  overlaps no communication, ms",
        lambda graph: compute_ms(graph) - time_ms(graph, overlapped),
    )
    for name in [share.name for share in shares_by_class(characterise(sliced))]:
        row(f"  {name}, ms", lambda graph, name=name: class_ms(graph, name))
    row("peak memory, GB", peak_gb, ".6f")
    row("step, CUDA events, ms", step_ms)
    row("communication, ms", comm_ms)


def with_nvlink_active(graph: Graph) -> Graph | None:
    """Return the slice re-costed for active links to peers; None if that is not possible."""
    try:
        return recost(graph, graph.job.device.name, passes=PassOptions(nvlink_active=True))
    except OneRankError as error:
        print(f"NVLink active: {error}")
        return None


def _median(gaps: list[float]) -> str:
    return f"{statistics.median(gaps):+.2%}" if gaps else "-"


def kernels(graph: Graph) -> Counter[str]:
    """Count GPU operations that are not communication, by name."""
    return Counter(
        name for name, gpu in zip(graph.text("name"), graph.gpu_compute, strict=True) if gpu
    )


def collectives(graph: Graph) -> tuple[list[str], int]:
    """Return the calls among several ranks in issue order, and the number of single-rank calls."""
    calls = np.flatnonzero(graph.communication)
    issued = graph.nodes.start_ns.copy()
    launch = graph.edges.reason == Reason.LAUNCH
    issued[graph.edges.target[launch]] = graph.nodes.start_ns[graph.edges.source[launch]]
    calls_in_order, single_rank = [], 0
    for index in calls[np.argsort(issued[calls], kind="stable")]:
        node = graph.node(int(index))
        kind = node.collective.name if node.kind is Kind.COLLECTIVE else node.kind.name
        group = graph.job.group(node.text("group"))
        if group and len(group.ranks) == 1:
            single_rank += 1
            continue
        ranks = sorted(group.ranks) if group else "?"
        calls_in_order.append(f"{kind.lower()} of {node.value('comm_bytes')} bytes among {ranks}")
    return calls_in_order, single_rank


def overlapping(graph: Graph) -> set[tuple[str, int]]:
    """Return the GPU operations that run while communication does, as (name, which of them)."""
    start, end = graph.nodes.start_ns, graph.nodes.start_ns + graph.nodes.duration_ns
    calls = np.flatnonzero(graph.communication & (graph.nodes.duration_ns > 0))
    return {
        key
        for key, index in occurrences(graph)
        if ((start[calls] < end[index]) & (end[calls] > start[index])).any()
    }


def occurrences(graph: Graph) -> Iterator[tuple[tuple[str, int], int]]:
    """Yield (name, which of that name) and index of every GPU operation besides communication."""
    counts = Counter[str]()
    names = graph.text("name")
    for index in np.flatnonzero(graph.gpu_compute).tolist():
        yield (names[index], counts[names[index]]), index
        counts[names[index]] += 1


def time_ms(graph: Graph, chosen: set[tuple[str, int]]) -> float:
    """Return the summed time of the operations chosen by `overlapping`."""
    indices = [index for key, index in occurrences(graph) if key in chosen]
    return float(graph.nodes.duration_ns[indices].sum() / 1e6)


def compute_ms(graph: Graph) -> float:
    """Return the summed time of GPU operations that are not communication."""
    return float(graph.nodes.duration_ns[graph.gpu_compute].sum() / 1e6)


def class_ms(graph: Graph, name: str) -> float:
    """Return the summed time of one class of work."""
    shares = {share.name: share.time_ns for share in shares_by_class(characterise(graph))}
    return shares.get(name, 0) / 1e6


def peak_gb(graph: Graph) -> float:
    """Return the allocator's peak."""
    return graph.job.measurement.peak_memory_bytes / 1e9


def step_ms(graph: Graph) -> float:
    """Return the median step without a profiler; for a re-costed graph, the steady-state step."""
    measured = graph.job.measurement.median_step_ns
    if measured is None:
        row = replay(graph).steady_state
        measured = row.step_ns if row else 0
    return measured / 1e6


def comm_ms(graph: Graph) -> float:
    """Return the summed time of communication kernels."""
    return float(graph.nodes.duration_ns[graph.communication].sum() / 1e6)

"""What a host takes without the profiler.

The profiled step is told by its graph in full, steps without a profiler by two figures: how long
the host took for a step that began with an idle GPU, as the profiled one did; and how long a step
of a row took. The first gives the factor on the host's own times with which the graph's host is
through in that time; the second, what such a row of steps lacks.
"""

import statistics
from collections.abc import Callable
from dataclasses import replace

import msgspec

from onerank.ir import Graph, Kind, Measurement, Pace
from onerank.ir.pace import lasting, paced_run

HOST = (0.2, 1.2)
"""The factor is looked for between these."""
CLOSE = 0.001
"""Of the time that the factor is to give."""
TRIES = 8


def with_pace(graph: Graph) -> Graph:
    """Return the graph with its pace, where its job tells the two figures (`Measurement.pace`)."""
    measurement = graph.job.measurement
    if not (measurement.host_step_ns and measurement.profiled_host_ns and measurement.step_ns):
        return graph
    if not (graph.mask(Kind.HOST_OP).any() and graph.gpu_compute.any()):
        return graph
    step_ns = round(statistics.median(measurement.step_ns))
    pace = _pace(graph, measurement)
    notes = measurement.notes
    if pace.host in HOST:
        notes += (
            f"the host took {statistics.median(measurement.host_step_ns):.0f} ns a step without "
            f"the profiler and {measurement.profiled_host_ns[0]} ns under it, which no factor "
            f"from {HOST[0]} to {HOST[1]} on its own times explains: the nearest is taken",
        )
    measurement = msgspec.structs.replace(measurement, pace=pace, notes=notes)
    job = msgspec.structs.replace(graph.job, measurement=measurement)
    return lasting(replace(graph, job=job), step_ns)


def _pace(graph: Graph, measurement: Measurement) -> Pace:
    between_ns = max(measurement.profiled_host_ns[0] - _host_span(graph, 1.0), 0)

    def host_ns(factor: float) -> float:
        return _host_span(graph, factor) + factor * between_ns

    # One that waits for its GPU takes no longer for being slower: the slowest such is taken.
    shortest = host_ns(HOST[0]) * (1 + 2 * CLOSE)
    host = _factor(host_ns, max(statistics.median(measurement.host_step_ns), shortest), HOST)
    return Pace(round(host, 3), round(host * between_ns), 0)


def _factor(
    time_ns: Callable[[float], float], wanted_ns: float, within: tuple[float, float]
) -> float:
    """Return the factor that gives a time which grows with it, or the end of the range next to it.

    Regula falsi, the Illinois way.
    """
    low, high = within
    below, above = time_ns(low) - wanted_ns, time_ns(high) - wanted_ns
    if below >= 0 or above <= 0:
        return low if below >= 0 else high
    moved, factor = 0, low
    for _ in range(TRIES):
        factor = (low * above - high * below) / (above - below)
        off = time_ns(factor) - wanted_ns
        if abs(off) <= CLOSE * wanted_ns:
            break
        if off > 0:
            high, above, below = factor, off, below / 2 if moved > 0 else below
            moved = 1
        else:
            low, below, above = factor, off, above / 2 if moved < 0 else above
            moved = -1
    return factor


def _host_span(graph: Graph, factor: float) -> int:
    """Return the time from the host's first operator to its last, which begins with the GPU."""
    times = paced_run(graph, factor).schedule()
    host = graph.mask(Kind.HOST_OP)
    return int(times.end_ns[host].max() - times.start_ns[host].min())

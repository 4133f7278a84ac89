"""Peak memory of a pipeline's ranks: what was captured with one micro-batch in flight, and more."""

from collections.abc import Sequence
from typing import NamedTuple

from onerank.converters.pipeline.schedule import Action, Schedule, most_in_flight
from onerank.ir import Job


class Peak(NamedTuple):
    """Peak memory of a stage under a schedule; 0 bytes when a figure is not known."""

    schedule: str
    micro_batches: int
    in_flight: int
    bytes: int


def peak_memory(jobs: Sequence[Job], actions: Sequence[Action]) -> int:
    """Return the peak of a rank that holds the stages `jobs` by chunk and does `actions`.

    Each capture had one micro-batch in flight. What its peak has above what it starts with and
    above that micro-batch is needed once, by one chunk at a time. 0 when a figure is not known.
    """
    measured = [job.measurement for job in jobs]
    if not all(one.peak_memory_bytes and one.activation_bytes for one in measured):
        return 0
    held = {chunk: max(one.activation_bytes) for chunk, one in enumerate(measured)}
    passing = max(
        one.peak_memory_bytes - one.start_memory_bytes - held[chunk]
        for chunk, one in enumerate(measured)
    )
    start = sum(one.start_memory_bytes for one in measured)
    return start + passing + most_in_flight(actions, held)


def peaks(job: Job) -> list[Peak]:
    """Return the peaks of a captured stage for as many micro-batches as stages, twice and 4 times.

    Of the schedules with one stage per rank; the others need the other stages' graphs.
    """
    if job.pipeline is None:
        return []
    stages = len(job.pipeline.layers)
    found: list[Peak] = []
    for kind in ("gpipe", "1f1b"):
        for micro_batches in (stages, 2 * stages, 4 * stages):
            actions = Schedule(kind).actions(stages, micro_batches)[job.pipeline.stage]
            flying = most_in_flight(actions, {0: 1})
            found.append(Peak(kind, micro_batches, flying, peak_memory([job], actions)))
    return found

"""What a SimAI workload does not hold, and what else its figures mean."""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from onerank.converters.simai.rows import Row
from onerank.converters.simai.step import EMBEDDING, Step
from onerank.ir import Kind

LARGEST_MESSAGE = 2**31 - 1
"""Of pp_comm, which SimAI reads as an int."""
_SMALL_BYTES = 1 << 20
_TABLED_SIZES = (2, 4, 8, 16, 32, 64, 128)
_EXACT_NS = 1 << 24


def losses_of(chosen: Sequence[Step], stages: Sequence[Sequence[Step]], sent: int) -> Iterator[str]:
    """Yield what the file does not say, one sentence each.

    Args:
        chosen: steps whose rows it holds.
        stages: of each rank of the pipeline.
        sent: bytes that a micro-batch sends to the next stage.
    """
    graph = chosen[0].graph
    yield (
        f"dependencies ({len(graph.edges)} edges) and overlap: a row computes, then communicates, "
        "and only what is in the weight-gradient column may be hidden"
    )
    yield (
        f"{int(graph.gpu_compute.sum())} GPU operations become rows; host time, idle time, memory "
        "and FLOPs are left out"
    )
    storage = graph.mask(Kind.MEM_LOAD, Kind.MEM_STORE)
    if storage.any():
        yield (
            f"{int(storage.sum())} reads and writes of storage, of "
            f"{int(graph.nodes.duration_ns[storage].sum())} ns"
        )
    of_all = [step.losses for step in chosen]
    for reason, calls in sum((one.calls_lost for one in of_all), Counter[str]()).items():
        size = sum(one.bytes_lost[reason] for one in of_all)
        yield f"collectives {reason}: {calls}, of {size} bytes per rank"
    for what, calls in sum((one.moved for one in of_all), Counter[str]()).items():
        yield (
            f"that {calls} collectives are of the {what} ranks: they stand in the weight-gradient "
            "column, the only one with that group"
        )
    if messages := sum(one.messages for one in of_all):
        yield (
            f"{messages} sends and receives of the pipeline: pp_comm holds the {sent} bytes that a "
            "micro-batch sends on"
        )
    if sent > LARGEST_MESSAGE:
        yield f"pp_comm is {LARGEST_MESSAGE}, the most it can be, for {sent} bytes"
    classes = graph.job.classes
    if len(classes) > 1 and len(stages) == 1:
        yield (
            f"every rank replays the step of rank {graph.job.rank}; the job has {len(classes)} "
            "classes of ranks that do different work"
        )
    if len(stages) > 1:
        times = [sum(step.total_ns for step in own) for own in stages]
        yield (
            "every rank runs the slowest rank's stages; the ranks of the pipeline compute "
            f"{', '.join(map(str, times))} ns as captured"
        )


def notes_on(chosen: Sequence[Step], rows: Sequence[Row]) -> Iterator[str]:
    """Yield what a reader of the simulator's figures should know, one sentence each."""
    by_shape = sum(len(step.split.by_shape) for step in chosen)
    if by_shape:
        unclear = sum(step.split.unclear_ns for step in chosen)
        yield (
            f"The trace does not tell which node reads what in {by_shape} backwards: matrix "
            "products were told apart by shapes, all else counts as the input's gradient"
            + (f", {unclear} ns of products that fit both included." if unclear else ".")
        )
    else:
        yield "Input and weight gradients were told apart by what each operator reads and writes."
    if phaseless := sum(step.phaseless_ns for step in chosen):
        yield f"{phaseless} ns of no phase count as forward."
    times = np.array([row.times_ns for row in rows], dtype=np.int64)
    rounded = times.astype(np.float32).astype(np.int64) - times
    if rounded.any():
        yield (
            f"{int((rounded != 0).sum())} cells over {_EXACT_NS} ns lose digits in SimAI's "
            f"float32; its sum will be {int(rounded.sum()):+d} ns off."
        )
    calls = [call for row in rows for call in row.calls.values()]
    small = sum(call.size_bytes < _SMALL_BYTES for call in calls)
    if small:
        yield (
            f"{small} collectives under 1 MiB take a fixed latency in SimAI-Analytical, and no "
            f"time in groups of other sizes than {', '.join(map(str, _TABLED_SIZES))}."
        )
    if any(step.updates.backward for step in chosen):
        yield (
            "The optimizer is the first row's weight gradient: update_ns delays what follows a "
            "communication, and SimAI counts it as no compute."
        )
        if chosen[0].updates.name == EMBEDDING:
            yield f"That row is called {EMBEDDING}, so that it makes no bubble."

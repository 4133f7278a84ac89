"""What a conversion linked, by which rule, and what it left out."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Conversion:
    """Counts of a conversion. Times are nanoseconds.

    Attributes:
        gpu_ops: kernels, memcpys and memsets in the trace.
        gpu_ops_linked: of these, by rule.
        gpu_ops_unlinked: of these, kept without an operator, by reason.
        gpu_ops_left_out: count and summed time of those that emulate communication.
        host_ops: operators in the trace's window.
        host_ops_kept: of these, those that became nodes.
        host_ops_without_record: kept operators the execution trace does not hold (no shapes).
        host_ops_left_out: by reason.
        communication: recorded or measured calls.
        backward_ops: backward operators among the nodes.
        backward_ops_with_module: of these, those whose module is known.
        memory_events: allocations and frees.
        memory_events_outside: of these, those outside any operator (counted for the peak only).
        memory_events_elsewhere: left out, since of another kind of device (the host's, on a GPU).
        syncs: synchronisations that became edges.
        syncs_left_out: synchronisations that did not, by reason.
        timing: which file the times come from; of several, how.
        steps: profiled steps each compute node's duration is the median of.
        steps_left_out: profiled steps whose compute is another sequence.
        step_times_ns: summed compute of each step used.
        notes: sentences a reader should know.
    """

    gpu_ops: int
    gpu_ops_linked: dict[str, int]
    gpu_ops_unlinked: dict[str, int]
    gpu_ops_left_out: tuple[int, int]
    host_ops: int
    host_ops_kept: int
    host_ops_without_record: int
    host_ops_left_out: dict[str, int]
    communication: int
    backward_ops: int
    backward_ops_with_module: int
    memory_events: int
    memory_events_outside: int
    memory_events_elsewhere: int
    syncs: int
    syncs_left_out: dict[str, int]
    timing: str
    steps: int = 1
    steps_left_out: int = 0
    step_times_ns: tuple[int, ...] = ()
    notes: list[str] = field(default_factory=list[str])

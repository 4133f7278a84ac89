"""Vocabularies of the graph: node kinds, phases, edge reasons, collectives, evidence."""

from enum import IntEnum


class Kind(IntEnum):
    """Kind of a node. The last four occur only in files of other tools."""

    HOST_OP = 0
    KERNEL = 1
    MEMCPY = 2
    MEMSET = 3
    COLLECTIVE = 4
    SEND = 5
    RECV = 6
    MEM_LOAD = 7
    MEM_STORE = 8
    METADATA = 9
    INVALID = 10

    @property
    def is_communication(self) -> bool:
        """Whether the node is a collective, a send or a receive."""
        return self in COMMUNICATION


GPU_COMPUTE = (Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET)
COMMUNICATION = (Kind.COLLECTIVE, Kind.SEND, Kind.RECV)


class Phase(IntEnum):
    """Part of the training step a node belongs to."""

    NONE = 0
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3


class Reason(IntEnum):
    """Why one node must wait for another.

    LAUNCH_QUEUE: the launch queue was full; the host continues when a queued operation is done. The
        edge separates this wait from host time: 8 Llama-8B layers measured on an H200 and re-costed
        for a B200 replay in 88.6 ms with it, in 126.7 ms without.
    ROOM: the GPU has no room for the kernel until the last blocks of the other run; they may
        overlap.
    CONTROL: an edge of another tool's `ctrl_deps`; `data_dep_reasons` never contains it, and it
        must stay the last member.
    """

    # Traces store these numbers in `data_dep_reasons`, so no member may change its number.
    DATA = 0
    PROGRAM_ORDER = 1
    STREAM_ORDER = 2
    SYNC = 3
    LAUNCH = 4
    LAUNCH_QUEUE = 5
    ROOM = 6
    CONTROL = 7


DATA_LOADING = "enumerate(DataLoader)#"
"""Prefix of the host operation in which a script waits for its next batch."""
COMMUNICATION_CALL = "c10d::"
"""Prefix of host operators that issue a collective, a send or a receive."""


class Collective(IntEnum):
    """Collectives, numbered as Chakra numbers them; NONE for every other node."""

    NONE = -1
    ALL_REDUCE = 0
    REDUCE = 1
    ALL_GATHER = 2
    GATHER = 3
    SCATTER = 4
    BROADCAST = 5
    ALL_TO_ALL = 6
    REDUCE_SCATTER = 7
    REDUCE_SCATTER_BLOCK = 8
    BARRIER = 9


class Evidence(IntEnum):
    """The source of a node's duration, from none to strongest.

    DATASHEET: not measured; computed from the node's work and a GPU description.
    SCALED: measured on another GPU, scaled by the description of this GPU.
    CALIBRATED: like SCALED; a large GEMM and the memory were also measured on this GPU.
    EXTRAPOLATED: from measurements of the same work in other layers, at other depths of the model,
    or at another size; or one duration for several nodes measured together.
    INTERPOLATED: between measurements of neighbouring sizes on this GPU.
    LOOKED_UP: a measurement of the same work on this GPU.
    """

    NONE = 0
    DATASHEET = 1
    SCALED = 2
    CALIBRATED = 3
    EXTRAPOLATED = 4
    INTERPOLATED = 5
    LOOKED_UP = 6
    MEASURED = 7


LAUNCH_NS = 20_000
"""Longest time from the end of an operator to the start of its kernel on an idle GPU."""

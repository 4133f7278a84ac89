"""Vocabularies of the graph: node kinds, phases, edge reasons, collectives, evidence."""

from enum import IntEnum


class Kind(IntEnum):
    """What a node is. The last four are found in other tools' files only."""

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

    LAUNCH_QUEUE: the host goes on when the GPU is done with one of the operations it queued.
    ROOM: the GPU has no room for it until the last blocks of the other run; the two may overlap.
    CONTROL: an edge of another tool's `ctrl_deps`; it has no octet in a file, and is the last.
    """

    DATA = 0
    PROGRAM_ORDER = 1
    STREAM_ORDER = 2
    SYNC = 3
    LAUNCH = 4
    LAUNCH_QUEUE = 5
    ROOM = 6
    CONTROL = 7


DATA_LOADING = "enumerate(DataLoader)#"
"""What the name of a host operation begins with in which a script waits for its next batch."""
ASKS_TO_COMMUNICATE = "c10d::"
"""What the name of a host operation begins with that asks for a collective, a send or a receive."""


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
    """Where a node's duration comes from, from none to strongest.

    DATASHEET: not measured; computed from the node's work and a GPU's description.
    SCALED: measured on another GPU, scaled by the description of this GPU.
    CALIBRATED: as SCALED; a large matmul and the memory were also measured on this GPU.
    EXTRAPOLATED: of a node that was not run, from measured ones of the same work at other layers,
    from its own at other depths of the model, or at another size; or of several measured as one.
    INTERPOLATED: the same work of sizes around these was measured on this GPU by itself.
    LOOKED_UP: the same work was measured on this GPU by itself.
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
"""From the end of an operator until what it launched starts on an idle GPU, at most."""

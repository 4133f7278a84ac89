"""The fields that conversion reads from the JSON files; the parser skips every other field."""

import msgspec


class Args(msgspec.Struct, gc=False, frozen=True):
    """Arguments of a Kineto event that conversion reads; names as in the file."""

    external_id: int = msgspec.field(name="External id", default=0)
    first_external_id: int = msgspec.field(name="external id", default=0)  # of torch 1.8
    rf_id: int = msgspec.field(name="Record function id", default=0)
    sequence: int = msgspec.field(name="Sequence number", default=-1)
    forward_thread: int = msgspec.field(name="Fwd thread id", default=0)
    event_index: int = msgspec.field(name="Ev Idx", default=0)
    correlation: int = 0
    stream: int | str = -1  # text with AMD
    device: int = -1
    grid: list[int] | str | None = None  # text on kernels that the driver launches
    block: list[int] | str | None = None
    bytes: int = 0
    wait_on_stream: int = -1
    wait_on_record: int = msgspec.field(name="wait_on_cuda_event_record_corr_id", default=-1)
    wait_on_event: int = msgspec.field(name="wait_on_cuda_event_id", default=-1)
    memory_bytes: int = msgspec.field(name="Bytes", default=0)
    memory_address: int = msgspec.field(name="Addr", default=0)
    memory_allocated: int = msgspec.field(name="Total Allocated", default=0)
    memory_reserved: int = msgspec.field(name="Total Reserved", default=0)
    memory_device_type: int = msgspec.field(name="Device Type", default=-1)
    collective: str = msgspec.field(name="Collective name", default="")
    in_elements: int = msgspec.field(name="In msg nelems", default=0)
    dtype: str = ""
    group_name: str = msgspec.field(name="Process Group Name", default="")
    group_description: str = msgspec.field(name="Process Group Description", default="")
    group_ranks: str = msgspec.field(name="Process Group Ranks", default="")
    group_size: int = msgspec.field(name="Group size", default=0)
    first_rank: int = msgspec.field(name="Global rank start", default=-1)
    rank_stride: int = msgspec.field(name="Global rank stride", default=0)
    source: int = msgspec.field(name="Src Rank", default=-1)
    destination: int = msgspec.field(name="Dst Rank", default=-1)
    shapes: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw())
    types: msgspec.Raw = msgspec.field(name="Input type", default=msgspec.Raw())
    values: msgspec.Raw = msgspec.field(name="Concrete Inputs", default=msgspec.Raw())


_NO_ARGS = Args()


class Event(msgspec.Struct, gc=False, frozen=True):
    """One Kineto event. `ts` and `dur` are microseconds with nanosecond decimals."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    tid: int | str = 0
    ts: float = float("nan")  # what has none is at no time
    dur: float = 0.0
    args: Args = _NO_ARGS


class DeviceProperties(msgspec.Struct, frozen=True):
    """A GPU as Kineto describes it."""

    name: str = ""
    memory_bytes: int = msgspec.field(name="totalGlobalMem", default=0)
    sm_count: int = msgspec.field(name="numSms", default=0)


class KinetoFile(msgspec.Struct):
    """A part of a Kineto file. `device_properties` is a number in a CPU trace."""

    events: list[Event] = msgspec.field(name="traceEvents")
    device_properties: list[DeviceProperties] | int | None = msgspec.field(
        name="deviceProperties", default=None
    )
    distributed: msgspec.Raw = msgspec.field(name="distributedInfo", default=msgspec.Raw())


class Values(msgspec.Struct, gc=False, frozen=True):
    """Inputs or outputs of an ET node, each column as the JSON text of the file."""

    values: msgspec.Raw
    shapes: msgspec.Raw
    types: msgspec.Raw


class Attribute(msgspec.Struct, gc=False, frozen=True):
    """An attribute of an ET node."""

    name: str
    value: msgspec.Raw


class NestedNode(msgspec.Struct, gc=False, frozen=True):
    """One node of an execution trace; `ctrl_deps` is its caller."""

    id: int
    name: str
    ctrl_deps: int
    inputs: Values
    outputs: Values
    attrs: list[Attribute]

    @property
    def caller(self) -> int:
        """Id of the node that called it; the root's is its own."""
        return self.ctrl_deps

    @property
    def operands(self) -> tuple[msgspec.Raw, ...]:
        """Values, shapes and types of the inputs, then of the outputs."""
        given, made = self.inputs, self.outputs
        return given.values, given.shapes, given.types, made.values, made.shapes, made.types

    def attribute(self, name: str) -> int:
        """Return an integer attribute, 0 where it is not given."""
        for attribute in self.attrs:
            if attribute.name == name:
                text = bytes(attribute.value)
                return int(text) if text.isdigit() else 0
        return 0

    @property
    def rf_id(self) -> int:
        """Record function id."""
        return self.attribute("rf_id")

    @property
    def tid(self) -> int:
        """Thread, as RecordFunction numbers them."""
        return self.attribute("tid")


class NestedFile(msgspec.Struct):
    """A part of an execution trace."""

    nodes: list[NestedNode]


class FlatNode(msgspec.Struct, gc=False, frozen=True):
    """A node of the first schemas, which keep operands and attributes side by side."""

    id: int
    name: str
    parent: int
    inputs: msgspec.Raw
    input_shapes: msgspec.Raw
    input_types: msgspec.Raw
    outputs: msgspec.Raw
    output_shapes: msgspec.Raw
    output_types: msgspec.Raw
    rf_id: int = 0
    tid: int = 0

    @property
    def caller(self) -> int:
        """Id of the node that called it; the root's is its own."""
        return self.parent

    @property
    def operands(self) -> tuple[msgspec.Raw, ...]:
        """Values, shapes and types of the inputs, then of the outputs."""
        return (
            self.inputs,
            self.input_shapes,
            self.input_types,
            self.outputs,
            self.output_shapes,
            self.output_types,
        )


class FlatFile(msgspec.Struct):
    """A part of an execution trace of the first schemas."""

    nodes: list[FlatNode]


class SchemaFile(msgspec.Struct):
    """What tells the schema of an execution trace."""

    nodes: list[msgspec.Raw] = []
    schema: str = ""

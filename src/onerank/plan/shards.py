"""A captured stage with another number of replicas, among which its states are sharded.

The operators, their order and the activations stay. Other are the shards, what is gathered from
them and scattered to them, and the memory of both. FSDP2 pads each parameter's first dimension to
a multiple of the number of ranks, and ZeRO pads its flat buffers. The sizes before padding are
known exactly: from the gradients that FSDP2 packs (`_chunk_cat`), and for ZeRO because a buffer
that is padded for two ranks is padded for a multiple of them from the same number.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, cast

import msgspec
import numpy as np

from onerank.annotate.memory.allocator import round_size
from onerank.annotate.memory.peak import most_in_use
from onerank.converters.expand.data_parallel import AXIS, with_replicas
from onerank.ir import UNKNOWN, Collective, Graph, MemoryClass, Phase
from onerank.ir.arrays import I64
from onerank.plan.layouts import PlanError

ZERO_ALIGNMENT = 2
"""Multiple, per rank, that ZeRO pads its buffers to (`capture.parallelize.data.zero`)."""

_GATHER_COPY = "aten::_foreach_copy_"
_SCATTER_COPY = "aten::_chunk_cat"
_UNPACK = "aten::split_with_sizes_copy"
_CONCATENATE = "aten::cat"

# An allocation belongs to the node that follows it in the log; a collective's result is allocated
# before its input is packed, and within FSDP2's own stream one more node may lie between.
_NEAR_NODES = 3

_DECODE = msgspec.json.Decoder(list[Any])

Shape = tuple[int, ...]


class ShardError(PlanError):
    """A capture whose shards cannot be derived for another number of replicas."""


def with_shards(graph: Graph, dp: int) -> Graph:
    """Return the step of the same rank with `dp` replicas, as a capture with `dp` would give it.

    Unlike `with_replicas`, it also gives the operands and the memory of shards. Bytes that a node
    frees stay as captured, and so do the packed addresses, of some hundred bytes, that an unpacking
    operator copies from the host.

    Args:
        graph: a capture without a device, with two replicas; parameters or optimizer states are
            sharded among them, or nothing is.
        dp: a multiple of the captured number of replicas.

    Raises:
        ShardError: a shard, or memory of one, cannot be identified.
        ExportError: as for `with_replicas`.
    """
    before = graph.job.world.sizes.get(AXIS, 1)
    if dp == before:
        return graph
    if dp % before:
        raise _error(f"{dp} replicas are no multiple of the captured {before}")
    return _Resharding(graph, with_replicas(graph, dp)).graph()


def _error(reason: str) -> ShardError:
    return ShardError(f"shards of the captured replicas: {reason}", code="plan-unknown-shards")


@dataclass(frozen=True, slots=True)
class _Segment:
    """Part of a flat tensor: first element and number of elements, captured and new."""

    start: int
    count: int
    new_start: int
    new_count: int


@dataclass(frozen=True, slots=True)
class _Storage:
    """A storage of shards: its parts, which cover it."""

    segments: tuple[_Segment, ...]

    @classmethod
    def of(cls, counts: Iterable[tuple[int, int]]) -> "_Storage":
        """Return the storage with parts of these captured and new numbers of elements."""
        segments: list[_Segment] = []
        at = new_at = 0
        for count, new in counts:
            segments.append(_Segment(at, count, new_at, new))
            at, new_at = at + count, new_at + new
        return cls(tuple(segments))

    @property
    def counts(self) -> tuple[int, int]:
        """Captured and new number of elements."""
        last = self.segments[-1]
        return last.start + last.count, last.new_start + last.new_count

    def part(self, start: int, count: int) -> _Segment:
        """Return the part at captured elements.

        Raises:
            ShardError: they are not whole segments.
        """
        inside = [s for s in self.segments if start <= s.start < start + count]
        if not inside or inside[0].start != start or sum(s.count for s in inside) != count:
            raise _error(f"{count} elements from {start} are no whole shards")
        return _Segment(start, count, inside[0].new_start, sum(s.new_count for s in inside))


@dataclass(frozen=True, slots=True)
class _Operand:
    """A tensor among the arguments or results of a node.

    Attributes:
        storage: number of its storage.
        offset: first element.
        shape: sizes.
        item_bytes: bytes of an element.
    """

    storage: int
    offset: int
    shape: Shape
    item_bytes: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(slots=True)
class _Resharding:
    """Derives the columns and the memory of a step with other shards.

    Attributes:
        before: the capture.
        after: the same with the groups of the new world.
        factors: group -> its captured and new number of ranks, of groups that grow.
        units: numbers of elements in the shards that are gathered together -> the new ones.
        shards: storage -> its parts, of shards.
        resident: storages of shards that no node of the step allocates, and their captured and new
            bytes.
        parameters: those of them that hold parameters; the others hold states of the optimizer.
        allocations: row, captured and new bytes of what the step allocates for shards.
        scattered: captured and new bytes of each result of a reduce-scatter.
        columns: columns of the derived graph.
        strings: table that its text columns point into.
    """

    before: Graph
    after: Graph
    factors: dict[str, tuple[int, int]] = field(init=False)
    units: dict[Shape, Shape] = field(default_factory=dict[Shape, Shape])
    shards: dict[int, _Storage] = field(default_factory=dict[int, _Storage])
    resident: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    parameters: set[int] = field(default_factory=set[int])
    allocations: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    scattered: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    columns: dict[str, Any] = field(default_factory=dict[str, Any])
    strings: Any = None

    def __post_init__(self) -> None:
        pairs = zip(self.before.job.groups, self.after.job.groups, strict=True)
        self.factors = {
            old.name: (len(old.ranks), len(new.ranks))
            for old, new in pairs
            if len(old.ranks) != len(new.ranks)
        }

    def graph(self) -> Graph:
        """Return the derived graph."""
        self.strings = self.before.strings.copy()
        for name in ("input_shapes", "input_values", "output_shapes", "output_values"):
            self.columns[name] = getattr(self.before.nodes, name).copy()
        self.columns["comm_bytes"] = self.after.nodes.comm_bytes.copy()
        self._find_units()
        names = self.before.text("name")
        for row in range(len(self.before)):
            if self.before.nodes.input_values[row]:
                self._follow(row, names[row])
        graph = replace(self.after, strings=self.strings).with_columns(**self.columns)
        return self._with_memory(graph)

    # Shards -----------------------------------------------------------------------------------

    def _sizes(self) -> tuple[int, int]:
        """Return the captured and the new number of ranks that share states."""
        if len({*self.factors.values()}) != 1:
            raise _error(f"{len(self.factors)} groups of replicas")
        return next(iter(self.factors.values()))

    def _find_units(self) -> None:
        """Find the exact shapes of parameters that are gathered together: those of gradients."""
        for row in np.flatnonzero(self.before.named(_SCATTER_COPY)).tolist():
            old, new = self._sizes()
            chunks = _DECODE.decode(self.before.node(row).text("input_values"))[2]
            if chunks != old:
                continue
            shapes = _DECODE.decode(self.before.node(row).text("input_shapes"))[0]
            if not all(shapes):
                raise _error("a parameter without dimensions")
            key, derived = (
                tuple(-(-shape[0] // ranks) * prod(shape[1:]) for shape in shapes)
                for ranks in (old, new)
            )
            if self.units.setdefault(key, derived) != derived:
                raise _error(f"units with equal shards of {key} elements differ")

    def _unit(self, counts: Sequence[int]) -> Shape:
        """Return the new numbers of elements of shards.

        Raises:
            ShardError: no gradients of these parameters are reduced in the step.
        """
        if (unit := self.units.get(tuple(counts))) is None:
            raise _error(f"no gradients of {len(counts)} parameters are reduced")
        return unit

    def _by_sum(self, total: int) -> tuple[Shape, Shape]:
        """Return the unit whose shards have this number of elements together, and its new one."""
        units = {(key, new) for key, new in self.units.items() if sum(key) == total}
        if len({new for _, new in units}) != 1:
            raise _error(f"{len(units)} units have {total} elements in their shards")
        return units.pop()

    def _follow(self, row: int, name: str) -> None:
        """Derive the operands of a node, and mark the storages that it makes shards of."""
        node = self.before.node(row)
        group = node.text("group") if self.before.communication[row] else ""
        if name == _UNPACK:
            self._unpack(row)
        elif name == _SCATTER_COPY:
            self._pack_gradients(row)
        elif name == _GATHER_COPY and self._pack_shards(row):
            return
        elif group in self.factors and node.collective in _SHARD_COLLECTIVES:
            self._exchange(row, node.collective, group)
        else:
            self._compute(row, name)

    def _pack_shards(self, row: int) -> bool:
        """Derive the copy of a unit's shards to where they are gathered from; False for others."""
        _, sources, *_ = _operands(self.before, row, "input")
        counts = [source.elements for source in sources]
        if tuple(counts) not in self.units:
            return False
        unit = self._unit(counts)
        for source, count, new in zip(sources, counts, unit, strict=True):
            self._mark(source, [(count, new)])
            self.parameters.add(source.storage)
        flat = [[size] for size in unit]
        shapes = _DECODE.decode(self.before.node(row).text("input_shapes"))
        self._write(row, "input", [flat, flat, *shapes[2:]])
        return True

    def _unpack(self, row: int) -> None:
        """Derive the copy of gathered shards to whole, padded parameters."""
        shapes = _DECODE.decode(self.before.node(row).text("input_shapes"))
        counts = [shape[-1] for shape in shapes[3]] if len(shapes) > 3 else []
        if tuple(counts) not in self.units:
            return
        old, new = self._sizes()
        unit = self._unit(counts)
        for operand, count, size in zip(
            _operands(self.before, row, "input")[3], counts, unit, strict=True
        ):
            self._allocate(row, old * count * operand.item_bytes, new * size * operand.item_bytes)
        derived = [[new, sum(unit)], shapes[1], shapes[2], [[new, size] for size in unit]]
        self._write(row, "input", derived, {1: [*unit]})

    def _pack_gradients(self, row: int) -> None:
        """Derive the copy of padded gradients to where they are scattered from."""
        old, new = self._sizes()
        operands = _operands(self.before, row, "input")
        if _DECODE.decode(self.before.node(row).text("input_values"))[2] != old:
            return
        counts = [-(-each.shape[0] // old) * prod(each.shape[1:]) for each in operands[0]]
        unit = self._unit(counts)
        shapes = _DECODE.decode(self.before.node(row).text("input_shapes"))
        item_bytes = operands[0][0].item_bytes
        self._allocate(row, old * sum(counts) * item_bytes, new * sum(unit) * item_bytes)
        result = [new, sum(unit)]
        self._write(row, "input", [shapes[0], *shapes[1:3], *([result] * (len(shapes) > 3))],
                    {2: new})  # fmt: skip
        self._write(row, "output", [result])

    def _exchange(self, row: int, collective: Collective, group: str) -> None:
        """Derive an all-gather or a reduce-scatter of shards."""
        old, new = self.factors[group]
        first, second = (each[0] for each in _operands(self.before, row, "input")[:2])
        gathers = collective == Collective.ALL_GATHER
        shard, whole = (first, second) if gathers else (second, first)
        if whole.elements != old * shard.elements:
            raise _error(f"{whole.elements} elements are not {old} times {shard.elements}")
        if self.units:
            counts, unit = self._by_sum(shard.elements)
            parts, size = [*zip(counts, unit, strict=True)], sum(unit)
        else:
            size = -(-whole.elements // (ZERO_ALIGNMENT * new)) * ZERO_ALIGNMENT
            parts = [(shard.elements, size)]
        if gathers and self.units:
            item = whole.item_bytes
            self._allocate(row, whole.elements * item, new * size * item)
        else:
            self._mark(shard, parts)
        if gathers and not self.units:
            # ZeRO's shard is a view of the whole buffer, which is resident.
            self.resident.pop(shard.storage)
            item = whole.item_bytes
            self.resident[whole.storage] = whole.elements * item, new * size * item
            self.parameters.add(whole.storage)
        if not gathers:
            pair = shard.elements * shard.item_bytes, size * shard.item_bytes
            self._allocate(row, *pair)
            self.scattered.append(pair)
            self.resident.pop(shard.storage, None)
        sizes = [[size], [new * size]] if gathers else [[new * size], [size]]
        self._write(row, "input", sizes)
        sent = size if gathers else new * size
        self.columns["comm_bytes"][row] = sent * first.item_bytes

    def _compute(self, row: int, name: str) -> None:
        """Derive the operands of a node that works on shards."""
        arguments = _operands(self.before, row, "input")
        results = _operands(self.before, row, "output")
        every = [each for part in (*arguments, *results) for each in part]
        if not any(each.storage in self.shards for each in every):
            return
        new_sizes: dict[Shape, Shape] = {}
        for each in every:
            if each.storage in self.shards:
                size = self._new_shape(each)
                if new_sizes.setdefault(each.shape, size) != size and name != _CONCATENATE:
                    raise _error(f"shards of shape {each.shape} differ in {name}")
        if name == _CONCATENATE:
            self._concatenate(row, arguments[0], results[0][0])
            return
        allocated = {each.storage for part in results for each in part}
        for each in every:
            if each.storage in self.shards or each.elements == 1:
                continue
            if each.shape not in new_sizes:
                raise _error(f"{name} combines shards with a tensor of shape {each.shape}")
            new = prod(new_sizes[each.shape])
            self._mark(each, [(each.elements, new)])
            if each.storage in allocated:
                self.resident.pop(each.storage)
                self._allocate(row, each.elements * each.item_bytes, new * each.item_bytes)
        for side in ("input", "output"):
            shapes = _DECODE.decode(self.before.node(row).text(f"{side}_shapes") or "[]")
            self._write(row, side, _mapped(shapes, new_sizes))
        if self.before.communication[row] and self.columns["comm_bytes"][row] > 0:
            first = arguments[0][0]
            new = prod(new_sizes.get(first.shape, first.shape))
            self.columns["comm_bytes"][row] = new * first.item_bytes

    def _concatenate(self, row: int, parts: Sequence[_Operand], result: _Operand) -> None:
        counts: list[tuple[int, int]] = []
        shapes: list[list[int]] = []
        for each in parts:
            shape = self._new_shape(each) if each.storage in self.shards else each.shape
            shapes.append([*shape])
            counts.append((each.elements, prod(shape)))
        if len(result.shape) != 1:
            raise _error(f"shards are concatenated to a tensor of shape {result.shape}")
        self._mark(result, counts)
        self.resident.pop(result.storage)
        old, new = self.shards[result.storage].counts
        self._allocate(row, old * result.item_bytes, new * result.item_bytes)
        _, dimension = _DECODE.decode(self.before.node(row).text("input_shapes"))
        self._write(row, "input", [shapes, dimension])
        self._write(row, "output", [[new]])

    def _new_shape(self, operand: _Operand) -> Shape:
        """Return the new shape of a shard: its first dimension is the sharded one."""
        part = self.shards[operand.storage].part(operand.offset, operand.elements)
        rest = prod(operand.shape[1:])
        if part.new_count % rest:
            raise _error(f"{part.new_count} elements are no rows of {rest}")
        return (part.new_count // rest, *operand.shape[1:])

    def _mark(self, operand: _Operand, parts: Sequence[tuple[int, int]]) -> None:
        """Mark the storage of a tensor as shards; parts have captured and new elements."""
        storage = _Storage.of(parts)
        if operand.storage not in self.shards:
            old, new = storage.counts
            self.resident[operand.storage] = old * operand.item_bytes, new * operand.item_bytes
        if self.shards.setdefault(operand.storage, storage) != storage:
            raise _error(f"storage {operand.storage} is two kinds of shards")

    # Columns ----------------------------------------------------------------------------------

    def _write(
        self, row: int, side: str, shapes: list[Any], values: dict[int, Any] | None = None
    ) -> None:
        """Write new shapes of a node's operands, and the values of other arguments by position."""
        node = self.before.node(row)
        old = _DECODE.decode(node.text(f"{side}_shapes") or "[]")
        if old == shapes:
            return
        if side == "input" and self.before.nodes.input_strides[row] and node.text("input_strides"):
            raise _error(f"{node.text('name')} reads shards with strides")
        self.columns[f"{side}_shapes"][row] = self._intern(shapes)
        decoded = _DECODE.decode(node.text(f"{side}_values") or "[]")
        derived = [
            self._located(value, shape) for value, shape in zip(decoded, shapes, strict=True)
        ]
        for place, value in (values or {}).items():
            derived[place] = value
        self.columns[f"{side}_values"][row] = self._intern(derived)

    def _located(self, value: Any, shape: Any) -> Any:
        """Return the record of a tensor, or of a list of them, with new elements."""
        if not isinstance(value, list) or not isinstance(shape, list):
            return cast("Any", value)
        parts, sizes = cast("list[Any]", value), cast("list[Any]", shape)
        if not _is_tensor(parts):
            if len(parts) != len(sizes):
                return parts
            return [self._located(*each) for each in zip(parts, sizes, strict=True)]
        number, storage, offset, count, *rest = parts
        if storage in self.shards and offset:
            offset = self.shards[storage].part(offset, count).new_start
        return [number, storage, offset, prod(sizes), *rest]

    def _intern(self, content: Any) -> int:
        return self.strings.intern(msgspec.json.encode(content).decode())

    # Memory -----------------------------------------------------------------------------------

    def _allocate(self, row: int, before: int, after: int) -> None:
        self.allocations.append((row, before, after))

    def _with_memory(self, graph: Graph) -> Graph:
        """Return the graph with the memory of the new shards.

        Raises:
            ShardError: an allocation has no block, or a shard no resident memory.
        """
        measured = graph.job.measurement
        log = measured.memory
        if log is None:
            raise _error("the capture has no log of its memory")
        sizes = np.array(log.blocks.bytes, dtype=np.int64)
        changed = self._match_blocks(graph, sizes)
        self._match_gradients(graph, sizes)
        resident = self._resident(measured.resident_bytes)
        growth = sum(
            sum(map(round_size, resident[name])) - sum(map(round_size, captured))
            for name, captured in measured.resident_bytes.items()
        )
        blocks = msgspec.structs.replace(log.blocks, bytes=tuple(sizes.tolist()))
        derived = msgspec.structs.replace(log, blocks=blocks, reserved_bytes=0)
        allocated = graph.nodes.bytes_allocated.copy()
        for block in changed:
            row = self._rows[log.blocks.node[block]]
            allocated[row] += sizes[block] - log.blocks.bytes[block]
        peak = measured.peak_memory_bytes + growth + most_in_use(derived) - most_in_use(log)
        measured = msgspec.structs.replace(
            measured,
            memory=derived,
            resident_bytes=resident,
            start_memory_bytes=measured.start_memory_bytes + growth,
            peak_memory_bytes=peak,
            activation_bytes=self._activations(graph, sizes, changed),
        )
        graph = graph.with_columns(bytes_allocated=allocated)
        return replace(graph, job=msgspec.structs.replace(graph.job, measurement=measured))

    @property
    def _rows(self) -> dict[int, int]:
        return {int(number): row for row, number in enumerate(self.before.nodes.id.tolist())}

    def _match_blocks(self, graph: Graph, sizes: I64) -> list[int]:
        """Set the sizes of blocks that the step allocates for shards; return those blocks."""
        log = graph.job.measurement.memory
        assert log is not None
        rows = self._rows
        by_row: dict[int, list[int]] = defaultdict(list)
        for block, (node, at) in enumerate(
            zip(log.blocks.node, log.blocks.allocated_at, strict=True)
        ):
            if at >= 0 and node in rows:
                by_row[rows[node]].append(block)
        taken: list[int] = []
        free = set(range(len(sizes)))
        distances = sorted(range(-_NEAR_NODES, _NEAR_NODES + 1), key=abs)
        for row, before, after in self.allocations:
            if round_size(before) == round_size(after):
                continue
            near = (block for distance in distances for block in by_row.get(row + distance, ()))
            block = next(
                (b for b in near if b in free and log.blocks.bytes[b] == round_size(before)), None
            )
            if block is None:
                raise _error(f"no block of {before} bytes near node {row}")
            free.remove(block)
            sizes[block] = round_size(after)
            taken.append(block)
        return taken

    def _match_gradients(self, graph: Graph, sizes: I64) -> None:
        """Set the sizes of gradients that the last step left, and that this one frees."""
        log = graph.job.measurement.memory
        assert log is not None
        pool = self._pool(self.scattered)
        blocks = log.blocks
        for block, (size, kind, at) in enumerate(
            zip(blocks.bytes, blocks.memory_class, blocks.allocated_at, strict=True)
        ):
            if at < 0 and kind == MemoryClass.GRADIENTS:
                if pool[size]:
                    sizes[block] = pool[size].pop()
                elif self.units:  # ZeRO 1 keeps whole gradients
                    raise _error(f"an earlier gradient of {size} bytes is not reduced in the step")

    @staticmethod
    def _pool(pairs: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
        pool: dict[int, list[int]] = defaultdict(list)
        for before, after in pairs:
            pool[round_size(before)].append(round_size(after))
        return pool

    def _resident(self, captured: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the resident bytes by class, with those of shards."""
        parameters, states = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
        for storage, pair in self.resident.items():
            (parameters if storage in self.parameters else states)[pair] += 1
        pools = {
            MemoryClass.GRADIENTS.name.lower(): Counter(self.scattered),
            MemoryClass.PARAMETERS.name.lower(): parameters,
            MemoryClass.OPTIMIZER.name.lower(): states,
        }
        derived: dict[str, tuple[int, ...]] = {}
        for name, sizes in captured.items():
            pool = pools.get(name, Counter[tuple[int, int]]())
            by_size: dict[int, list[tuple[int, int]]] = defaultdict(list)
            for pair in pool:
                by_size[pair[0]].append(pair)
            new: list[int] = []
            for size in sizes:
                pair = next((pair for pair in by_size[size] if pool[pair] > 0), (size, size))
                pool[pair] -= 1
                new.append(pair[1])
            derived[name] = tuple(new)
        left = +(parameters + states)
        if any(before != after for before, after in left):
            raise _error(f"{left.total()} shards are not resident")
        return derived

    def _activations(self, graph: Graph, sizes: I64, changed: Sequence[int]) -> tuple[int, ...]:
        """Return the bytes that each micro-batch keeps until its backward."""
        log = graph.job.measurement.memory
        assert log is not None
        blocks, rows = log.blocks, self._rows
        micro_batch = graph.nodes.micro_batch
        begins: dict[int, int] = {}
        of_block = [int(micro_batch[rows[node]]) if node in rows else -1 for node in blocks.node]
        for at, phase, number in zip(blocks.allocated_at, blocks.phase, of_block, strict=True):
            if at >= 0 and phase == Phase.BACKWARD:
                begins[number] = min(at, begins.get(number, at))
        activations = [*graph.job.measurement.activation_bytes]
        for block in changed:
            number, freed = of_block[block], blocks.freed_at[block]
            kept = freed < 0 or freed > begins.get(number, UNKNOWN)
            if blocks.phase[block] == Phase.FORWARD and kept and 0 <= number < len(activations):
                activations[number] += int(sizes[block]) - blocks.bytes[block]
        return tuple(activations)


_SHARD_COLLECTIVES = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)


def _operands(graph: Graph, row: int, side: str) -> list[list[_Operand]]:
    """Return the tensors of each argument or result of a node; a list of tensors has several."""
    node = graph.node(row)
    values = _DECODE.decode(node.text(f"{side}_values") or "[]")
    shapes = _DECODE.decode(node.text(f"{side}_shapes") or "[]")
    found: list[list[_Operand]] = []
    for value, shape in zip(values, shapes, strict=False):
        if _is_tensor(value):
            found.append([_operand(value, shape)])
        elif isinstance(value, list) and isinstance(shape, list):
            pairs = zip(cast("list[Any]", value), cast("list[Any]", shape), strict=False)
            found.append([_operand(*each) for each in pairs if _is_tensor(each[0])])
        else:
            found.append([])
    return found


def _operand(value: Sequence[Any], shape: Sequence[int]) -> _Operand:
    _, storage, offset, _, item_bytes, *_ = value
    return _Operand(storage, offset, tuple(shape), item_bytes)


def _is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor: [id, storage, offset, elements, bytes, device]."""
    if not isinstance(value, list):
        return False
    parts = cast("list[Any]", value)
    return len(parts) == 6 and isinstance(parts[5], str)


def _mapped(shapes: Any, new_sizes: dict[Shape, Shape]) -> Any:
    """Return nested shapes with those of shards replaced."""
    if not isinstance(shapes, list):
        return shapes
    parts = cast("list[Any]", shapes)
    if parts and all(isinstance(size, int) for size in parts):
        return [*new_sizes.get(tuple(parts), tuple(parts))]
    return [_mapped(each, new_sizes) for each in parts]

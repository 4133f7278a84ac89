"""A captured stage with another number of replicas, among which its states are sharded.

The operators, their order and the activations stay. The shapes of shards change, the shapes of
tensors that are gathered from shards or scattered to them, and the memory of both
(`shard_memory`). FSDP2 pads each parameter's first dimension to a multiple of the number of ranks;
the gradients that it packs (`_chunk_cat`) show the dimension without padding. ZeRO pads its flat
buffers to a multiple of the number of ranks: a buffer padded for two ranks and one padded for four
hold the same parameters, so padding the captured buffer again gives the exact size.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, cast

import msgspec
import numpy as np

from onerank.converters.expand.data_parallel import AXIS, with_replicas
from onerank.ir import Collective, Graph, StringTable
from onerank.ir.errors import ExportError
from onerank.plan.shard_memory import ShardMemory, unknown_shards, with_shard_memory

ZERO_ALIGNMENT = 2
"""Multiple, per rank, that ZeRO pads its buffers to (`capture.parallelize.data.zero`)."""

_GATHER_COPY = "aten::_foreach_copy_"
_SCATTER_COPY = "aten::_chunk_cat"
_UNPACK = "aten::split_with_sizes_copy"
_CONCATENATE = "aten::cat"

_SHARD_COLLECTIVES = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)

_DECODE = msgspec.json.Decoder(list[Any])

Shape = tuple[int, ...]


def with_shards(graph: Graph, dp: int) -> Graph:
    """Return the step of the same rank with `dp` replicas, as a capture with `dp` would give it.

    Unlike `with_replicas`, it also derives the operands and the memory of shards. Bytes that a node
    frees stay as captured: a plan reads memory from the allocator's log, which is derived. The
    packed addresses that an unpacking operator copies from the host, of some hundred bytes, stay as
    captured, too.

    Args:
        graph: a capture without a device, with two replicas; parameters or optimizer states are
            sharded among them, or nothing is.
        dp: a multiple of the captured number of replicas.

    Raises:
        ShardError: a shard, its memory, or the counterpart of a group or peer cannot be identified.
    """
    before = graph.job.world.sizes.get(AXIS, 1)
    if dp == before:
        return graph
    if dp % before:
        raise unknown_shards(f"{dp} replicas are no multiple of the captured {before}")
    try:
        after = with_replicas(graph, dp)
    except ExportError as error:
        raise unknown_shards(str(error)) from error
    return _Resharding(graph, after).derived()


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
            raise unknown_shards(f"{count} elements from {start} are no whole shards")
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
        units: numbers of elements in the shards that FSDP2 gathers together -> the new ones; empty
            for ZeRO.
        shards: storage -> its parts, of shards.
        memory: captured and new bytes of shards.
        columns: columns of the derived graph.
        strings: table that its text columns point into.
    """

    before: Graph
    after: Graph
    factors: dict[str, tuple[int, int]] = field(init=False)
    units: dict[Shape, Shape] = field(default_factory=dict[Shape, Shape])
    shards: dict[int, _Storage] = field(default_factory=dict[int, _Storage])
    memory: ShardMemory = field(default_factory=ShardMemory)
    columns: dict[str, Any] = field(default_factory=dict[str, Any])
    strings: StringTable = field(init=False)
    communicates: list[bool] = field(init=False)

    def __post_init__(self) -> None:
        self.communicates = self.before.communication.tolist()
        self.strings = self.before.strings.copy()
        pairs = zip(self.before.job.groups, self.after.job.groups, strict=True)
        self.factors = {
            old.name: (len(old.ranks), len(new.ranks))
            for old, new in pairs
            if len(old.ranks) != len(new.ranks)
        }

    def derived(self) -> Graph:
        """Return the derived graph."""
        for name in ("input_shapes", "input_values", "output_shapes", "output_values"):
            self.columns[name] = getattr(self.before.nodes, name).copy()
        self.columns["comm_bytes"] = self.after.nodes.comm_bytes.copy()
        self._find_units()
        names = self.before.text("name")
        for row in range(len(self.before)):
            if self.before.nodes.input_values[row]:
                self._follow(row, names[row])
        graph = replace(self.after, strings=self.strings).with_columns(**self.columns)
        self.memory.sharded_gradients = bool(self.units)
        return with_shard_memory(graph, self.memory)

    # Shards -----------------------------------------------------------------------------------

    def _sizes(self) -> tuple[int, int]:
        """Return the captured and the new number of ranks that share states."""
        if len({*self.factors.values()}) != 1:
            raise unknown_shards(f"{len(self.factors)} groups of replicas")
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
                raise unknown_shards("a parameter without dimensions")
            key, derived = (
                tuple(-(-shape[0] // ranks) * prod(shape[1:]) for shape in shapes)
                for ranks in (old, new)
            )
            if self.units.setdefault(key, derived) != derived:
                raise unknown_shards(f"units with equal shards of {key} elements differ")

    def _unit(self, counts: Sequence[int]) -> Shape:
        """Return the new numbers of elements of shards.

        Raises:
            ShardError: no gradients of these parameters are reduced in the step.
        """
        if (unit := self.units.get(tuple(counts))) is None:
            raise unknown_shards(f"no gradients of {len(counts)} parameters are reduced")
        return unit

    def _by_sum(self, total: int) -> tuple[Shape, Shape]:
        """Return the unit whose shards have this number of elements together, and its new one."""
        units = {(key, new) for key, new in self.units.items() if sum(key) == total}
        if len({new for _, new in units}) != 1:
            raise unknown_shards(f"{len(units)} units have {total} elements in their shards")
        return units.pop()

    def _follow(self, row: int, name: str) -> None:
        """Derive the operands of a node, and mark the storages that it makes shards of."""
        node = self.before.node(row)
        group = node.text("group") if self.communicates[row] else ""
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
            self.memory.parameters.add(source.storage)
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
        whole = [[new, size] for size in unit]
        self._write(row, "input", [[new, sum(unit)], *shapes[1:3], whole], {1: [*unit]})
        self._write(row, "output", whole)

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
            raise unknown_shards(f"{whole.elements} elements are not {old} times {shard.elements}")
        if self.units:
            counts, unit = self._by_sum(shard.elements)
            parts, size = [*zip(counts, unit, strict=True)], sum(unit)
        else:
            size = -(-whole.elements // (ZERO_ALIGNMENT * new)) * ZERO_ALIGNMENT
            parts = [(shard.elements, size)]
        if not gathers:
            self._mark_allocated(row, shard, parts)
            pair = shard.elements * shard.item_bytes, size * shard.item_bytes
            self.memory.reduced_gradients.append(pair)
        elif self.units:
            item = whole.item_bytes
            self._allocate(row, whole.elements * item, new * size * item)
        else:
            # ZeRO's shard is a view of the whole buffer, which is resident.
            self._mark(shard, parts)
            self.memory.resident.pop(shard.storage)
            item = whole.item_bytes
            self.memory.resident[whole.storage] = whole.elements * item, new * size * item
            self.memory.parameters.add(whole.storage)
        sizes = [[size], [new * size]] if gathers else [[new * size], [size]]
        self._write(row, "input", sizes)
        sent = size if gathers else new * size
        self.columns["comm_bytes"][row] = sent * first.item_bytes

    def _compute(self, row: int, name: str) -> None:
        """Derive the operands of a node that works on shards."""
        arguments = _operands(self.before, row, "input")
        results = _operands(self.before, row, "output")
        operands = [each for part in (*arguments, *results) for each in part]
        if not any(each.storage in self.shards for each in operands):
            return
        new_sizes: dict[Shape, Shape] = {}
        for each in operands:
            if each.storage in self.shards:
                size = self._new_shape(each)
                if new_sizes.setdefault(each.shape, size) != size and name != _CONCATENATE:
                    raise unknown_shards(f"shards of shape {each.shape} differ in {name}")
        if name == _CONCATENATE:
            self._concatenate(row, arguments[0], results[0][0])
            return
        allocated = {each.storage for part in results for each in part}
        for each in operands:
            if each.storage in self.shards or each.elements == 1:
                continue
            if each.shape not in new_sizes:
                raise unknown_shards(f"{name} combines shards with a tensor of shape {each.shape}")
            parts = [(each.elements, prod(new_sizes[each.shape]))]
            if each.storage in allocated:
                self._mark_allocated(row, each, parts)
            else:
                self._mark(each, parts)
        for side in ("input", "output"):
            shapes = _DECODE.decode(self.before.node(row).text(f"{side}_shapes") or "[]")
            self._write(row, side, _mapped(shapes, new_sizes))
        if self.communicates[row] and self.columns["comm_bytes"][row] > 0:
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
            raise unknown_shards(f"shards are concatenated to a tensor of shape {result.shape}")
        self._mark_allocated(row, result, counts)
        _, new = self.shards[result.storage].counts
        _, dimension = _DECODE.decode(self.before.node(row).text("input_shapes"))
        self._write(row, "input", [shapes, dimension])
        self._write(row, "output", [[new]])

    def _new_shape(self, operand: _Operand) -> Shape:
        """Return the new shape of a shard: its first dimension is the sharded one."""
        part = self.shards[operand.storage].part(operand.offset, operand.elements)
        rest = prod(operand.shape[1:])
        if part.new_count % rest:
            raise unknown_shards(f"{part.new_count} elements are no rows of {rest}")
        return (part.new_count // rest, *operand.shape[1:])

    def _mark(self, operand: _Operand, parts: Sequence[tuple[int, int]]) -> None:
        """Mark the storage of a tensor as shards; parts have captured and new elements."""
        storage = _Storage.of(parts)
        if operand.storage not in self.shards:
            old, new = storage.counts
            self.memory.resident[operand.storage] = (
                old * operand.item_bytes,
                new * operand.item_bytes,
            )
        if self.shards.setdefault(operand.storage, storage) != storage:
            raise unknown_shards(f"storage {operand.storage} is two kinds of shards")

    def _mark_allocated(
        self, row: int, operand: _Operand, parts: Sequence[tuple[int, int]]
    ) -> None:
        """Mark the storage of a tensor that a node allocates as shards."""
        self._mark(operand, parts)
        self.memory.resident.pop(operand.storage, None)
        old, new = self.shards[operand.storage].counts
        self._allocate(row, old * operand.item_bytes, new * operand.item_bytes)

    def _allocate(self, row: int, before: int, after: int) -> None:
        self.memory.allocations.append((row, before, after))

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
            raise unknown_shards(f"{node.text('name')} reads shards with strides")
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


def _operands(graph: Graph, row: int, side: str) -> tuple[tuple[_Operand, ...], ...]:
    """Return the tensors of each argument or result of a node; a list of tensors has several."""
    node = graph.node(row)
    return _parsed(node.text(f"{side}_values") or "[]", node.text(f"{side}_shapes") or "[]")


# A plan derives several numbers of replicas from a capture. The operands of a stage of Llama-3 70B
# with four layers fit.
@functools.lru_cache(maxsize=1 << 14)
def _parsed(values: str, shapes: str) -> tuple[tuple[_Operand, ...], ...]:
    operands: list[tuple[_Operand, ...]] = []
    for value, shape in zip(_DECODE.decode(values), _DECODE.decode(shapes), strict=False):
        if _is_tensor(value):
            operands.append((_operand(value, shape),))
        elif isinstance(value, list) and isinstance(shape, list):
            pairs = zip(cast("list[Any]", value), cast("list[Any]", shape), strict=False)
            operands.append(tuple(_operand(*each) for each in pairs if _is_tensor(each[0])))
        else:
            operands.append(())
    return tuple(operands)


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

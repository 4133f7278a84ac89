"""Resize a step: shapes, communication and memory at another sequence length or micro-batch."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.annotate.memory.allocator import SMALL_BYTES, round_size
from onerank.annotate.memory.peak import most_in_use
from onerank.annotate.models.features import KernelFeatures
from onerank.annotate.models.gemm_tiles import has_misaligned_rows
from onerank.annotate.op_costs.cost_record import GemmShape
from onerank.annotate.op_costs.node_costs import compute_mask, op_costs_of
from onerank.annotate.op_costs.op_classes import OpClass, op_class
from onerank.annotate.op_costs.operands import Tensor, with_shapes
from onerank.annotate.passes.resize.size_change import (
    NO_SEQUENCE,
    Change,
    Powers,
    Sizing,
    check_products,
    infer_sizing,
    mismatch_notes,
    numel,
)
from onerank.annotate.passes.resize.tensor_growth import Operands, StepGrowth, step_growth
from onerank.annotate.passes.tensor_locations import execution_order
from onerank.ir import (
    UNKNOWN,
    Graph,
    Kind,
    Measurement,
    MemoryClass,
    MemoryLog,
    Phase,
    StringTable,
)
from onerank.ir.arrays import I32, I64, Mask, deduplicate
from onerank.ir.errors import AnnotateError
from onerank.ir.notes import Note

Columns = dict[str, npt.NDArray[Any]]

_KINDS, _LIST = msgspec.json.Decoder(list[str]), msgspec.json.Decoder(list[Any])


class Resized(NamedTuple):
    """A graph with other shapes.

    Attributes:
        graph: the resized graph; its compute nodes still have the captured durations.
        changed: whether the shapes of a node's operands changed, bool[n].
        notes: notes on the quality of the result.
    """

    graph: Graph
    changed: Mask
    notes: tuple[Note, ...]


@dataclass(frozen=True, slots=True)
class Resize:
    """Change the sequence length or the micro-batch.

    Attributes:
        seq: sequence length; None: as captured.
        batch: sequences in a micro-batch; None: as captured.
    """

    seq: Change | None = None
    batch: Change | None = None

    def apply(self, graph: Graph) -> Resized:
        """Return the graph with the operands of its calls at the new size.

        Shapes of operators and kernels, communication bytes, and memory allocated and freed change.
        FLOPs and bytes follow from the shapes. Parameters, their gradients and the optimizer stay.
        Timed communication grows in proportion to its bytes.

        Raises:
            AnnotateError: the sizes cannot be inferred or followed, do not divide, or change
                nothing.
        """
        sizing = infer_sizing(graph, self.seq, self.batch)
        growth = step_growth(graph, sizing)
        changed = growth.spread(
            [_is_changed(operands, sizing) for operands in growth.operands], False
        )
        if not changed.any():
            raise AnnotateError(
                f"no operand grows with a sequence length of {sizing.seq.before} or a micro-batch "
                f"of {sizing.batch.before}\n  check that these are the captured sizes",
                code="resize-nothing-grows",
            )
        strings = graph.strings.copy()
        columns = _shapes(graph, growth, changed, sizing, strings)
        for name in ("flops", "bytes_read", "bytes_written", "instructions"):
            columns[name] = np.where(changed, UNKNOWN, getattr(graph.nodes, name))
        columns |= _communication(graph, growth, changed, sizing)
        columns["input_values"] = _values(graph, growth, changed, sizing, strings)
        memory = resized_memory(graph, growth, sizing)
        columns |= memory.columns
        resized = replace(graph, strings=strings).with_columns(**columns)
        check_products(graph, resized, changed)
        resized = replace(
            resized, job=msgspec.structs.replace(graph.job, measurement=memory.measurement)
        )
        notes = (
            _note(growth, changed, sizing),
            *_unresized_note(graph, growth),
            *mismatch_notes(resized, changed),
            *misaligned_note(graph, resized, sizing),
        )
        notes = (*notes, *memory.notes)
        return Resized(resized, changed, notes)


def new_shapes(
    pairs: Iterable[tuple[Tensor, Powers]], sizing: Sizing
) -> tuple[tuple[int, ...], ...]:
    """Return the new shapes of tensors.

    Raises:
        AnnotateError: a new size is not a whole number.
    """
    return tuple(sizing.shape(tensor.shape, powers) for tensor, powers in pairs)


def _is_changed(operands: Operands, sizing: Sizing) -> bool:
    sides = (*operands.inputs, *operands.outputs)
    new = new_shapes(sides, sizing)
    return any(shape != tensor.shape for shape, (tensor, _) in zip(new, sides, strict=True))


def _shapes(
    graph: Graph, growth: StepGrowth, changed: Mask, sizing: Sizing, strings: StringTable
) -> Columns:
    nodes, rows = graph.nodes, np.flatnonzero(changed)
    columns: Columns = {}
    for side_index, side in enumerate(("input", "output")):
        shapes, types = getattr(nodes, f"{side}_shapes"), getattr(nodes, f"{side}_types")
        first, inverse = deduplicate([shapes[rows], types[rows], growth.of[rows]])
        texts: list[str] = []
        for row in rows[first].tolist():
            new = new_shapes(growth.operands[int(growth.of[row])][side_index], sizing)
            texts.append(with_shapes(strings[int(shapes[row])], strings[int(types[row])], new))
        column = shapes.copy()
        column[rows] = strings.encode(texts)[inverse]
        columns[f"{side}_shapes"] = column
    columns["input_strides"] = _strides(graph, changed, columns["input_shapes"], strings)
    # The captured grid belongs to the captured shape; 0 is the string code of an empty text.
    columns["grid"] = np.where(changed & graph.gpu_compute, 0, graph.nodes.grid)
    return columns


def _strides(graph: Graph, changed: Mask, new_shapes: I32, strings: StringTable) -> I32:
    """Return strides for new shapes, int32 codes."""
    nodes = graph.nodes
    rows = np.flatnonzero(changed & (nodes.input_strides > 0))
    columns = (nodes.input_strides, nodes.input_shapes, new_shapes)
    first, inverse = deduplicate([column[rows] for column in columns])
    texts: list[str] = []
    for row in rows[first].tolist():
        strides, before, after = (_LIST.decode(strings[int(column[row])]) for column in columns)
        texts.append(msgspec.json.encode(_grown_strides(strides, before, after)).decode())
    resized = nodes.input_strides.copy()
    resized[rows] = strings.encode(texts)[inverse]
    return resized


def _grown_strides(strides: Any, before: Any, after: Any) -> Any:
    """Return the strides of a tensor, or of nested ones, whose sizes grow.

    An axis steps over all axes of smaller strides, so its stride grows as their sizes do.
    """
    if not isinstance(strides, list) or not isinstance(before, list):
        return cast("Any", strides)
    axes: list[tuple[Any, Any, Any]] = [*zip(strides, before, after, strict=False)]  # pyright: ignore[reportUnknownArgumentType]
    if any(isinstance(size, list) for _, size, _ in axes):
        return [_grown_strides(*each) for each in axes]
    grown: list[int] = []
    for stride, size, _ in axes:
        inner = [
            (old, new)
            for step, old, new in axes
            if 0 < step < stride or (step == stride and size == 1 < old)
        ]
        old, new = (prod(sizes) for sizes in zip(*inner, strict=True)) if inner else (1, 1)
        grown.append(stride * new // old)
    return grown


def _values(
    graph: Graph, growth: StepGrowth, changed: Mask, sizing: Sizing, strings: StringTable
) -> I32:
    """Return argument values with new sequence lengths for attention, int32 codes.

    Attention operators take lengths as integer arguments; all other values stay as captured.
    """
    nodes = graph.nodes
    codes = np.unique(nodes.op[changed])
    attention = [code for code in codes if op_class(strings[int(code)]) is OpClass.ATTENTION]
    rows = np.flatnonzero(changed & np.isin(nodes.op, attention) & (nodes.input_values > 0))
    first, inverse = deduplicate(
        [column[rows] for column in (nodes.input_values, nodes.input_types, growth.of)]
    )
    texts: list[str] = []
    for row in rows[first].tolist():
        sizes = {
            size: sizing.resized(size, power)
            for tensor, powers in growth.operands[int(growth.of[row])].inputs
            for size, power in zip(tensor.shape, powers, strict=True)
            if power[0]
        }
        kinds = _KINDS.decode(strings[int(nodes.input_types[row])])
        values = _LIST.decode(strings[int(nodes.input_values[row])])
        pairs = zip(kinds, values, strict=True)
        resized_values = [
            sizes.get(value, value) if kind == "Int" else value for kind, value in pairs
        ]
        texts.append(msgspec.json.encode(resized_values).decode())
    column = nodes.input_values.copy()
    column[rows] = strings.encode(texts)[inverse]
    return column


def _communication(graph: Graph, growth: StepGrowth, changed: Mask, sizing: Sizing) -> Columns:
    """Return communication bytes, and durations of timed communication, scaled by its elements.

    Raises:
        AnnotateError: one of them is out of range.
    """
    ratios = growth.spread([_comm_ratio(operands, sizing) for operands in growth.operands], 1.0)
    columns: Columns = {}
    for name in ("comm_bytes", "duration_ns", "uncontended_ns"):
        column = getattr(graph.nodes, name)
        is_timed = changed & graph.communication & (column > 0)
        scaled = np.rint(column * np.where(is_timed, ratios, 1.0))
        if scaled.max(initial=0) >= _LARGEST:
            node = graph.node(int(scaled.argmax()))
            raise AnnotateError(
                f"node {node.id} ({node.name!r}): {name} would be {scaled.max():.3g}, at a "
                f"sequence length of {sizing.seq.after} and a micro-batch of {sizing.batch.after}"
                "\n  choose smaller ones",
                code="resize-too-large",
            )
        columns[name] = np.where(is_timed, scaled.astype(np.int64), column)
    return columns


_LARGEST = float(1 << 62)  # of a time or bytes


def _comm_ratio(operands: Operands, sizing: Sizing) -> float:
    """Return the ratio of new to captured elements that a collective moves."""
    pairs = operands.inputs[:1] or operands.outputs[:1]
    before = sum(numel(tensor.shape) for tensor, _ in pairs)
    return sum(map(numel, new_shapes(pairs, sizing))) / before if before else 1.0


def _unresized_note(graph: Graph, growth: StepGrowth) -> tuple[Note, ...]:
    """Return a note if kernels have no recorded operands."""
    compute = np.flatnonzero(compute_mask(graph) & (graph.nodes.phase != Phase.OPTIMIZER))
    unresized = compute[growth.of[compute] < 0]
    time_ns = int(graph.nodes.duration_ns[unresized].sum())
    if not time_ns:
        return ()
    return (
        Note(
            f"{len(unresized)} kernels of forward and backward, {time_ns} ns, do not record their "
            "operands and stay as captured.",
            code="resize-operands-unknown",
        ),
    )


# Elements of 16 bits in the 16 bytes at which rows of a fast product begin (`gemm_tiles`).
_ALIGNED_ELEMENTS = 8


def misaligned_note(before: Graph, after: Graph, sizing: Sizing) -> tuple[Note, ...]:
    """Return a note if the new size moves rows of GEMMs off 16-byte boundaries."""
    has_sequence = sizing.seq != NO_SEQUENCE
    name, change = ("sequence", sizing.seq) if has_sequence else ("micro-batch", sizing.batch)
    size = change.after
    # Checked first, because the costs of both steps take longer.
    if not any(size // part % _ALIGNED_ELEMENTS for part in sizing.parts):
        return ()
    captured, resized = _misaligned_products(before), _misaligned_products(after)
    # Other sizes, such as a vocabulary of 50257, are misaligned at every sequence length.
    if (resized <= captured and change.before % _ALIGNED_ELEMENTS == 0) or not resized:
        return ()
    lower = size - size % _ALIGNED_ELEMENTS
    nearest = " or ".join(str(size) for size in (lower, lower + _ALIGNED_ELEMENTS) if size)
    return (
        Note(
            f"A {name} of {size} is no multiple of {_ALIGNED_ELEMENTS}: in 16 bits the rows of "
            f"{resized} GEMMs begin off 16-byte boundaries (as captured: {captured}), "
            f"and libraries then run slower kernels. Compare with {nearest}.",
            code="resize-misaligned-rows",
        ),
    )


def _misaligned_products(graph: Graph) -> int:
    """Return how many GEMMs have misaligned rows if they run in 16 bits."""
    kernels = KernelFeatures.of(graph, op_costs_of(graph))
    gemm = kernels.gemm.copy()
    operand_bytes = GemmShape._fields.index("operand_bytes")
    gemm[:, operand_bytes] = np.where(gemm[:, operand_bytes] > 0, 2, 0)
    operands, results = has_misaligned_rows(gemm)
    return int((operands | results)[kernels.call].sum())


def _note(growth: StepGrowth, changed: Mask, sizing: Sizing) -> Note:
    seq, batch = sizing.seq, sizing.batch
    changes = [
        f"the {name} were {change.after} instead of {change.before}"
        for name, change in (("sequence", seq), ("micro-batch", batch))
        if change.after != change.before
    ]
    by_sizes = [
        f"{count} {name}"
        for name, count in sorted(growth.inferred_from_sizes.items(), key=lambda entry: -entry[1])
    ]
    by_sizes_note = (
        f" Results that only sizes determine: {', '.join(by_sizes[:6])}." if by_sizes else ""
    )
    return Note(
        f"What if {' and '.join(changes)}: {int(changed.sum())} of {len(changed)} nodes have other "
        "shapes. Products and attention scale by the cost model's ratio of both sizes, other "
        "kernels by their bytes. Host operators, other argument values and kernel choices stay as "
        f"captured, although libraries may pick other kernels at another size.{by_sizes_note}",
        code="what-if-size",
    )


class ResizedMemory(NamedTuple):
    """Memory of a resized step.

    Attributes:
        columns: node columns with new bytes.
        measurement: measurement with resized memory and without outdated figures.
        notes: notes on the quality of the result.
    """

    columns: dict[str, I64]
    measurement: Measurement
    notes: tuple[Note, ...]


def resized_memory(graph: Graph, growth: StepGrowth, sizing: Sizing) -> ResizedMemory:
    """Return the memory of the step with resized operands.

    A block belongs to an operand of the node that allocated it if that operand's rounded bytes are
    its size, or it is a workspace for it (see `_grown`). Otherwise it grows like most blocks of its
    size. Other blocks stay; a note counts those over 1024 bytes. Memory allocated before the step
    and freed in it, such as the last step's logits, grows like its counterpart in this step.
    Without a record of blocks, a node's allocations grow with its results.
    """
    log = graph.job.measurement.memory
    measurement = graph.job.measurement.untimed()
    if log is None:
        columns = _by_results(graph, growth, sizing)
        without_peak = msgspec.structs.replace(
            measurement, peak_memory_bytes=0, activation_bytes=()
        )
        return ResizedMemory(
            columns,
            without_peak,
            (Note("Peak memory at the new size is unknown.", code="resize-peak-unknown"),),
        )
    sizes, unmatched = _block_sizes(graph, log, growth, sizing)
    new_blocks = msgspec.structs.replace(log.blocks, bytes=tuple(sizes.tolist()))
    # What the allocator would reserve at the new size is not known; 0 says so.
    resized = msgspec.structs.replace(log, blocks=new_blocks, reserved_bytes=0)
    peaks = [most_in_use(block_log) for block_log in (log, resized)]
    saved = [_saved_activations(block_log) for block_log in (log, resized)]
    activations = tuple(
        round(size * saved[1] / saved[0]) if saved[0] else size
        for size in measurement.activation_bytes
    )
    resident_growth, resident = _resident_growth(measurement, log, sizes, rounded=log.is_rounded)
    measurement = msgspec.structs.replace(
        measurement, memory=resized, activation_bytes=activations, resident_bytes=resident,
        start_memory_bytes=measurement.start_memory_bytes + resident_growth,
        peak_memory_bytes=measurement.peak_memory_bytes + resident_growth + peaks[1] - peaks[0],
    )  # fmt: skip
    columns, unattributed = _columns(graph, log, sizes)
    notes = [
        Note(
            f"Memory: {unmatched} bytes of the step's blocks match no known operand and stay as "
            "captured; so does memory that is resident throughout the step.",
            code="resize-blocks-unmatched",
        )
    ] * bool(unmatched)
    if unattributed:
        notes.append(
            Note(
                f"Memory: blocks that change by {unattributed} bytes have no known freeing node; "
                "freed bytes of nodes stay as captured for these.",
                code="resize-blocks-without-free",
            )
        )
    return ResizedMemory(columns, measurement, tuple(notes))


def _block_sizes(
    graph: Graph, log: MemoryLog, growth: StepGrowth, sizing: Sizing
) -> tuple[I64, int]:
    """Return the new size of each block, and the bytes of blocks that match no operand."""
    rounded = log.is_rounded
    rows = {int(id_): row for row, id_ in enumerate(graph.nodes.id)}
    by_node, by_size = dict[int, dict[int, int]](), dict[int, Counter[int]]()
    writes = _Writes(graph, log, growth, sizing)
    new_sizes = np.array(log.blocks.bytes, dtype=np.int64)
    missing: list[int] = []
    for block, (size, node) in enumerate(zip(log.blocks.bytes, log.blocks.node, strict=True)):
        row = rows.get(node, -1)
        if row not in by_node:
            by_node[row] = _operand_bytes(
                growth.at(row) if row >= 0 else None, sizing, rounded=rounded
            )
        memory_class = log.blocks.memory_class[block]
        if memory_class in _FIXED_CLASSES:
            continue
        workspace = memory_class == MemoryClass.WORKSPACE
        # FSDP allocates its buffers between two calls, of which the log names the first; that has
        # other operands. The call that fills a buffer comes later.
        new = writes.new_size(block, row) if memory_class == MemoryClass.COMMUNICATION else None
        if new is None:
            new = _new_block_size(size, by_node[row], workspace=workspace, rounded=rounded)
        if new is None:
            new = writes.new_size(block, row)
        if new is None:
            missing.append(block)
        else:
            new_sizes[block] = new
            by_size.setdefault(size, Counter())[new] += 1
    # A block from before the step, such as the last step's logits, has a counterpart that outlives
    # this step. Without it the peak of a GPT that keeps its logits was 4% low.
    outliving = _blocks_outliving_step(log, new_sizes)
    unmatched = 0
    for block in missing:
        size = log.blocks.bytes[block]
        if log.blocks.allocated_at[block] < 0 and outliving.get(size):
            new_sizes[block] = outliving[size].pop()
        elif size in by_size:  # like most blocks of its size
            new_sizes[block] = by_size[size].most_common(1)[0][0]
        elif size > _SMALL:
            unmatched += size
    return new_sizes, unmatched


class _Writes:
    """Finds the call that first writes a block."""

    def __init__(self, graph: Graph, log: MemoryLog, growth: StepGrowth, sizing: Sizing) -> None:
        order = execution_order(graph)
        self._order, self._log = order, log
        self._operands = growth.of[order]
        self._position = np.full(len(graph), -1, dtype=np.int64)
        self._position[order] = np.arange(len(order))
        self._freed_by = _freeing_nodes(graph, log)
        codes, first = np.unique(self._operands, return_index=True)
        self._written = {
            int(code): _written_bytes(graph, row, growth, sizing, rounded=log.is_rounded)
            for code, row in zip(codes, order[first].tolist(), strict=True)
            if code >= 0
        }
        self._calls = dict[int, I64]()

    def new_size(self, block: int, row: int) -> int | None:
        """Return the new size of a block that the node at `row` allocated; None if not known."""
        log, size = self._log, self._log.blocks.bytes[block]
        if row < 0 or self._position[row] < 0 or log.blocks.allocated_at[block] < 0:
            return None
        if size not in self._calls:
            codes = [code for code in self._written if self._new(size, code) is not None]
            self._calls[size] = np.flatnonzero(np.isin(self._operands, codes))
        calls = self._calls[size]
        at = int(np.searchsorted(calls, self._position[row]))
        if at == len(calls):
            return None
        freed_by = int(self._freed_by[block])
        if freed_by >= 0 and calls[at] > self._position[freed_by] >= 0:
            return None
        return self._new(size, int(self._operands[calls[at]]))

    def _new(self, size: int, code: int) -> int | None:
        known = self._written[code]
        return _new_block_size(size, known, workspace=False, rounded=self._log.is_rounded)


def _written_bytes(
    graph: Graph, row: int, growth: StepGrowth, sizing: Sizing, *, rounded: bool
) -> dict[int, int]:
    """Return bytes -> new bytes of the tensors that a call writes."""
    operands, nodes = growth.at(row), graph.nodes
    is_communication = Kind(int(nodes.kind[row])).is_communication
    if operands is not None and not is_communication:
        operands = operands._replace(inputs=())
    return _operand_bytes(operands, sizing, rounded=rounded)


def _blocks_outliving_step(log: MemoryLog, sizes: I64) -> dict[int, list[int]]:
    """Return size -> new sizes of blocks that outlive the step, in reverse order of allocation."""
    blocks = log.blocks
    new_sizes: dict[int, list[int]] = {}
    for block in reversed(range(len(sizes))):
        is_fixed = blocks.memory_class[block] in _FIXED_CLASSES
        if blocks.allocated_at[block] >= 0 > blocks.freed_at[block] and not is_fixed:
            new_sizes.setdefault(blocks.bytes[block], []).append(int(sizes[block]))
    return new_sizes


def _resident_growth(
    measured: Measurement, log: MemoryLog, sizes: I64, *, rounded: bool
) -> tuple[int, dict[str, tuple[int, ...]]]:
    """Return the growth of memory allocated before the step, and its blocks by class."""
    resident = {name: list(blocks) for name, blocks in measured.resident_bytes.items()}
    grown, blocks = 0, log.blocks
    for size, new, event in zip(blocks.bytes, sizes.tolist(), blocks.allocated_at, strict=True):
        if event >= 0 or new == size:
            continue
        grown += new - size
        others = resident.get(MemoryClass.OTHER.name.lower(), [])
        block_sizes = [round_size(storage) if rounded else storage for storage in others]
        if size in block_sizes:
            others[block_sizes.index(size)] = new
    return grown, {name: tuple(storages) for name, storages in resident.items()}


def _new_block_size(
    size: int, known: Mapping[int, int], *, workspace: bool, rounded: bool
) -> int | None:
    """Return the new size of a block from its operand or, for a workspace, a multiple of one.

    None if no operand matches.
    """
    if size in known:
        return known[size]
    # The CUDA caching allocator does not split a block if the rest would be below 1 MiB.
    slack = SMALL_BYTES if rounded else 0
    for times in _MULTIPLES if workspace else (1,):
        for before, after in known.items():
            if 0 <= size - times * before <= slack and before > slack:
                return times * after
    return None


# A workspace has another dtype or partial sums: a power of two times its operand.
_MULTIPLES = (1, 2, 4, 8)
# No size of these depends on the sequence or the micro-batch.
_FIXED_CLASSES = (MemoryClass.PARAMETERS, MemoryClass.GRADIENTS, MemoryClass.OPTIMIZER)
_SMALL = 1024  # scalars and small buffers are not worth a note


def _operand_bytes(operands: Operands | None, sizing: Sizing, *, rounded: bool) -> dict[int, int]:
    """Return bytes -> new bytes of the tensors of a node; results take precedence."""
    known: dict[int, int] = {}
    if operands is None:
        return known
    for tensor, powers in (*operands.outputs, *operands.inputs):
        before = numel(tensor.shape) * tensor.item_bytes
        after = numel(sizing.shape(tensor.shape, powers)) * tensor.item_bytes
        if rounded:
            before, after = round_size(before), round_size(after)
        # Results are listed first and win: a node more often allocates a result than a copy of an
        # input.
        known.setdefault(before, after)
    return known


def _columns(graph: Graph, log: MemoryLog, sizes: I64) -> tuple[dict[str, I64], int]:
    """Return the bytes that each node allocates and frees, with the growth of its blocks.

    The second result is the absolute change in bytes of blocks without a known freeing node.
    """
    blocks, nodes = log.blocks, graph.nodes
    growth = sizes - np.array(blocks.bytes, dtype=np.int64)
    order = np.argsort(nodes.id)
    ids = np.array(blocks.node, dtype=np.int64)
    in_step = (np.array(blocks.allocated_at) >= 0) & (ids >= 0)
    allocator_node = order[np.searchsorted(nodes.id[order], ids[in_step].astype(np.uint64))]
    allocated = nodes.bytes_allocated.copy()
    # Not `+=`, which would count only one of several blocks of a node.
    np.add.at(allocated, allocator_node, growth[in_step])
    freed = nodes.bytes_freed.copy()
    freed_by = _freeing_nodes(graph, log)
    known = freed_by >= 0
    np.add.at(freed, freed_by[known], growth[known])
    columns = {"bytes_allocated": np.maximum(allocated, 0), "bytes_freed": np.maximum(freed, 0)}
    unattributed = ~known & (np.array(blocks.freed_at) >= 0)
    return columns, int(np.abs(growth[unattributed]).sum())


def _freeing_nodes(graph: Graph, log: MemoryLog) -> I64:
    """Return the node that freed each block; -1 for none, and for a block that is not freed.

    The log names no freeing node. Nodes free in start order, so the cumulative bytes of blocks and
    of nodes match: a block belongs to the node whose range of freed bytes contains its middle.
    """
    nodes = graph.nodes
    freed_at = np.array(log.blocks.freed_at, dtype=np.int64)
    freed = np.flatnonzero(freed_at >= 0)
    freed = freed[np.argsort(freed_at[freed])]
    sizes = np.array(log.blocks.bytes, dtype=np.int64)[freed]
    order = np.argsort(nodes.start_ns, kind="stable")
    freed_until = np.cumsum(nodes.bytes_freed[order])
    # The middle of a block tolerates rounding at both of its ends.
    middle = np.cumsum(sizes) - (sizes + 1) // 2
    position = np.searchsorted(freed_until, middle, side="right")
    freed_by = np.full(len(freed_at), -1, dtype=np.int64)
    freed_by[freed] = np.where(
        position < len(order), order[np.minimum(position, len(order) - 1)], -1
    )
    return freed_by


def _by_results(graph: Graph, growth: StepGrowth, sizing: Sizing) -> dict[str, I64]:
    ratios = growth.spread([_ratio(operands, sizing) for operands in growth.operands], 1.0)
    return {"bytes_allocated": np.rint(graph.nodes.bytes_allocated * ratios).astype(np.int64)}


def _ratio(operands: Operands, sizing: Sizing) -> float:
    """Return the ratio of new to captured elements of results."""
    before = sum(numel(tensor.shape) for tensor, _ in operands.outputs)
    after = sum(numel(sizing.shape(t.shape, powers)) for t, powers in operands.outputs)
    return after / before if before else 1.0


def _saved_activations(log: MemoryLog) -> int:
    """Return the bytes of activations that forward saves for backward."""
    blocks = log.blocks
    allocations = zip(blocks.phase, blocks.allocated_at, strict=True)
    backward_start = min(
        (event for phase, event in allocations if phase == Phase.BACKWARD and event >= 0), default=0
    )
    rows = zip(blocks.bytes, blocks.memory_class, blocks.phase, blocks.freed_at, strict=True)
    return sum(
        size
        for size, memory_class, phase, freed_at in rows
        if memory_class == MemoryClass.ACTIVATIONS
        and phase == Phase.FORWARD
        and (freed_at < 0 or freed_at > backward_start)
    )

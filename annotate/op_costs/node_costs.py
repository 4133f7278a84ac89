"""FLOPs and bytes of every compute node, and the formula of each operator.

`characterise` fills a graph's columns, and `op_costs_of` returns all that the cost models need.
`work_of` is the work of one call: the formula that its operator has in one of the other modules of
this package, or the bytes of its operands.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from onerank.annotate.op_costs import (
    attention,
    block_cycles,
    decompositions,
    engine_operators,
    gemm,
    image_cycles,
    library_operators,
    load_chains,
    memory_bound,
    state_operators,
)
from onerank.annotate.op_costs.cost_record import Work
from onerank.annotate.op_costs.custom_operator_costs import is_registered, registered_work
from onerank.annotate.op_costs.engine_operators import paged_cache_work, reads_paged_cache
from onerank.annotate.op_costs.kernel_overheads import (
    ARITHMETIC,
    cached_passes_of,
    cycles_of,
    floor_factor_of,
    passes_of,
    rereads_of,
)
from onerank.annotate.op_costs.load_chains import chain_of, far_load_of, tail_of
from onerank.annotate.op_costs.op_classes import (
    CLASSES,
    OpClass,
    base_name,
    classify,
    is_generated,
    op_class,
)
from onerank.annotate.op_costs.operand_layouts import has_unknown_layout
from onerank.annotate.op_costs.operands import (
    DENSE,
    Call,
    UnknownDtypeError,
    without_tensors,
)
from onerank.ir import UNKNOWN, GeneratedWork, Graph, Kind
from onerank.ir.arrays import F64, I64, U8, Mask, deduplicate, membership_mask
from onerank.ir.errors import AnnotateError

NEED_VALUES = (
    gemm.NEED_VALUES
    | attention.NEED_VALUES
    | memory_bound.NEED_VALUES
    | load_chains.NEED_VALUES
    | decompositions.NEED_VALUES
    | state_operators.NEED_VALUES
    | block_cycles.NEED_VALUES
    | image_cycles.NEED_VALUES
)
"""Operators, by base name, whose cost depends on argument values in addition to shapes; those of
libraries are in `library_operators.NEED_VALUES`, by full name."""

# Limit on FLOPs or bytes of a call, so that sums of reads and writes fit into int64.
_MOST = 2**61

_FORMULAS = {
    **gemm.FORMULAS,
    **attention.FORMULAS,
}

# By full name: libraries and engines reuse names of torch and of each other.
_BY_FULL_NAME = {
    **library_operators.FORMULAS,
    **engine_operators.FORMULAS,
    **state_operators.FORMULAS,
    **decompositions.FORMULAS,
}


def needs_values(op: str) -> bool:
    """Return whether `work_of` must be given the operator's input values."""
    return base_name(op) in NEED_VALUES or op.split(".", 1)[0] in library_operators.NEED_VALUES


def needs_strides(op: str) -> bool:
    """Return whether `work_of` must be given the strides of the operator's inputs."""
    name = base_name(op)
    modules = memory_bound, gemm, block_cycles, image_cycles
    listed = any(name in module.NEED_STRIDES for module in modules)
    return name in ("copy_", "cat") or listed or op_class(op) is OpClass.ELEMENTWISE


def work_of(
    op: str,
    inputs: tuple[str, str],
    outputs: tuple[str, str] = ("", ""),
    values: str = "",
    strides: str = "",
    *,
    fills: bool = False,
) -> Work:
    """Return FLOPs and bytes of a call.

    Args:
        op: operator, with or without namespace and overload.
        inputs: (shapes, types) of the arguments, JSON text as in the columns of `Nodes`.
        outputs: the same of the results.
        values: input values, for operators that `needs_values`.
        strides: strides of the arguments, for operators that `needs_strides`; `DENSE` if the graph
            has strides and all arguments are contiguous, empty if it has none.
        fills: whether the call itself zeroes a result that it writes in part: true in a CPU
            capture, whose nodes are whole operators; on a GPU a separate kernel does.

    Raises:
        AnnotateError: the text cannot be read, or the work exceeds 64 bits.
    """
    try:
        values = values if needs_values(op) else ""
        strides = strides if needs_strides(op) else ""
        call = Call.parse(base_name(op), inputs, outputs, values, strides)
    except UnknownDtypeError:
        return Work()
    work = work_of_call(op, call)
    if max(work.flops, work.bytes_read, work.bytes_written, call.output_bytes) >= _MOST:
        raise AnnotateError(
            f"{op} of shapes {inputs[0]} would be {max(work.flops, work.bytes_read):.3g} FLOPs or "
            f"bytes; expected less than {_MOST:.3g}\n  check the sizes in the trace",
            code="cost-too-large",
        )
    # After the limit was checked with `output_bytes`, so this sum cannot overflow.
    if fills and call.op in memory_bound.WRITES_INTO_ZEROS:
        return replace(work, bytes_written=work.bytes_written + call.output_bytes)
    return work


def work_of_call(op: str, call: Call) -> Work:
    """Return FLOPs and bytes of a parsed call."""
    if not call.has_tensors:
        return Work()
    # First: a user's formula overrides any formula of ours for the same name.
    if is_registered(op):
        return registered_work(op, call, memory_bound.bytes_only(call))
    # The name of a generated kernel shows its outer loop, and not its arithmetic.
    if is_generated(op):
        work = memory_bound.bytes_only(call)
        return replace(work, floor_factor=floor_factor_of(op, call, op_class(op)))
    by_full_name = _BY_FULL_NAME.get(op.split(".", 1)[0])
    if by_full_name is not None:
        # No passes or cycles, which were measured on torch's kernels.
        return by_full_name(call) or memory_bound.bytes_only(call)
    formula = _FORMULAS.get(call.op) or memory_bound.BY_CLASS.get(op_class(op))
    work = (formula(call) if formula else None) or memory_bound.bytes_only(call)
    passes, cycles, chain = passes_of(call), cycles_of(call, op_class(op)), chain_of(call)
    floor_factor = floor_factor_of(op, call, op_class(op))
    unknown_layout, tail = has_unknown_layout(call, op_class(op)), tail_of(call)
    # Most calls end here, which spares them a copy of the record.
    if passes == floor_factor == 1 and not (cycles or chain or tail or unknown_layout):
        return work
    return replace(
        work,
        passes=passes,
        cached_passes=cached_passes_of(call),
        rereads=rereads_of(call),
        cycles=cycles,
        arithmetic=call.op in ARITHMETIC,
        chain=chain,
        far_load=far_load_of(call),
        tail=tail,
        floor_factor=floor_factor,
        unknown_layout=unknown_layout,
    )


_LARGEST_COUNT = 2.0**62


@dataclass(frozen=True, slots=True)
class OpCosts:
    """The work of a graph's compute nodes; every array has one entry per node.

    Attributes:
        index: their indices in the graph, int64[n].
        op_class: positions in `op_classes.CLASSES`, uint8[n].
        flops: FLOPs, UNKNOWN without a formula, int64[n].
        bytes_read: bytes read, or UNKNOWN, int64[n].
        bytes_written: bytes written, or UNKNOWN, int64[n].
        matmul: whether the FLOPs are GEMMs, bool[n].
        dtype: positions in `dtypes`, int64[n].
        dtypes: dtypes of GEMM operands; "" for none.
        call: positions in `works`, int64[n].
        works: the work of each distinct call.
        instance: the operator instance that launched it, a number for each, int64[n].
        operator_ns: time of all kernels that the node's operator instance launched, float64[n].
        auxiliary: whether it is a copy or fill of an operator instance whose other kernels do its
            work, bool[n].
    """

    index: I64
    op_class: U8
    flops: I64
    bytes_read: I64
    bytes_written: I64
    matmul: Mask
    dtype: I64
    dtypes: tuple[str, ...]
    call: I64
    works: tuple[Work, ...]
    instance: I64
    operator_ns: F64
    auxiliary: Mask

    def is_class(self, *classes: OpClass) -> Mask:
        """Return which nodes are of one of `classes`, bool[n]."""
        return membership_mask(self.op_class, (CLASSES.index(op_class) for op_class in classes))

    @property
    def tf32_by_choice(self) -> Mask:
        """Which nodes run in TF32 by the script's choice, not as convolutions do, bool[n]."""
        by_default = np.array([work.dtype == "tfloat32" for work in self.works], dtype=bool)
        tf32 = np.array([dtype == "tfloat32" for dtype in self.dtypes], dtype=bool)
        return tf32[self.dtype] & ~by_default[self.call]

    @property
    def exact_by_cudnn(self) -> Mask:
        """Which nodes cuDNN multiplies in float32, since the script forbids TF32, bool[n]."""
        exact = [work.dtype == "float32" and bool(work.parts) for work in self.works]
        return np.array(exact, dtype=bool)[self.call]

    def only(self, rows: Mask) -> "OpCosts":
        """Return the costs of the nodes in `rows`, bool[n]."""
        values: dict[str, Any] = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        arrays = {n: value[rows] for n, value in values.items() if hasattr(value, "dtype")}
        return replace(self, **arrays)


def compute_mask(graph: Graph) -> Mask:
    """Return `graph.compute`."""
    return graph.compute


def characterise(graph: Graph) -> Graph:
    """Return the graph with flops, bytes_read and bytes_written of its compute nodes filled in.

    Existing figures are kept. An operator without formula gets the bytes of its operands and
    UNKNOWN FLOPs; one without shapes gets neither.

    The kernels of one operator instance share its figures in proportion to their durations; sums
    are exact. The share of a kernel in a split-K GEMM or in a chunked optimizer list is not
    recorded. With work in proportion to time, each kernel runs at the operator's rates, so a cost
    model scales all of them equally.

    Raises:
        AnnotateError: the text of an operand column cannot be read.
    """
    costs = op_costs_of(graph)
    columns: dict[str, I64] = {}
    for name in ("flops", "bytes_read", "bytes_written"):
        column: I64 = getattr(graph.nodes, name).copy()
        column[costs.index] = getattr(costs, name)
        columns[name] = column
    return graph.with_columns(**columns)


def with_registered_costs(graph: Graph) -> Graph:
    """Return the graph with the work of operators whose cost is registered in this process.

    Raises:
        AnnotateError: a registered formula raised, or returned no count.
    """
    names = np.unique(graph.nodes.op)
    registered = [int(code) for code in names if is_registered(graph.strings[int(code)])]
    if not registered:
        return graph
    counted = characterise(graph)
    rows = np.isin(graph.nodes.op, registered)
    columns: dict[str, I64] = {
        name: np.where(rows, getattr(counted.nodes, name), getattr(graph.nodes, name))
        for name in ("flops", "bytes_read", "bytes_written")
    }
    return graph.with_columns(**columns)


def with_generated_work(graph: Graph, work: Sequence[GeneratedWork]) -> Graph:
    """Return the graph with the work of the kernels that Inductor generated.

    Args:
        graph: a capture without a device.
        work: of each launch in order; empty for other captures.
    """
    if not work:
        return graph
    names = np.unique(graph.nodes.op).tolist()
    generated = [code for code in names if is_generated(graph.strings[code])]
    launches = np.flatnonzero(np.isin(graph.nodes.op, generated) & compute_mask(graph))
    launches = launches[np.argsort(graph.nodes.start_ns[launches], kind="stable")]
    columns: dict[str, I64] = {}
    for name, counts in zip(GeneratedWork._fields, zip(*work, strict=True), strict=True):
        columns[name] = getattr(graph.nodes, name).copy()
        columns[name][launches] = counts
    return graph.with_columns(**columns)


def op_costs_of(graph: Graph) -> OpCosts:
    """Return the work of each compute node; each distinct call is evaluated once.

    Raises:
        AnnotateError: the text of an operand column cannot be read.
    """
    index = np.flatnonzero(compute_mask(graph))
    works, call = _distinct_works(graph, index)
    kind = graph.nodes.kind[index]
    share = _shares(graph, index, call)
    # Both must have a code: "" for kernels without products,
    # "tfloat32" for those that turn out to use it below.
    dtypes = tuple(dict.fromkeys(["", "tfloat32", *(work.dtype for work in works)]))
    code = np.array([dtypes.index(work.dtype) for work in works], dtype=np.int64)[call]
    figures: dict[str, I64] = {}
    for name in ("flops", "bytes_read", "bytes_written"):
        total = np.array([getattr(work, name) for work in works], dtype=np.int64)[call]
        known: I64 = getattr(graph.nodes, name)[index]
        figures[name] = np.where(known == UNKNOWN, share.of(total), known)
    transfers = (kind == Kind.MEMCPY) | (kind == Kind.MEMSET)
    # A copy or fill of an operator with FLOPs does none of them.
    figures["flops"] = np.where(transfers, 0, figures["flops"])
    matmul = np.array([work.matmul for work in works], dtype=bool)[call] & ~transfers
    float32 = matmul & (code == (dtypes.index("float32") if "float32" in dtypes else -1))
    classes = classify(graph, index)
    tf32 = float32 & _runs_tf32(graph, index, classes)
    return OpCosts(
        index=index,
        op_class=classes,
        matmul=matmul,
        dtype=np.where(tf32, dtypes.index("tfloat32"), code),
        dtypes=dtypes,
        call=call,
        works=tuple(works),
        instance=share.instance,
        operator_ns=share.total_ns,
        auxiliary=~share.takes,
        **figures,
    )


def _distinct_works(graph: Graph, index: I64) -> tuple[list[Work], I64]:
    """Return the works of the distinct calls, and the position of each node's call, int64[n]."""
    nodes, strings = graph.nodes, graph.strings
    ops = np.unique(nodes.op[index])
    with_values = ops[[needs_values(strings[int(op)]) for op in ops]] if len(ops) else ops
    values = np.zeros(len(index), dtype=np.int64)
    where = np.flatnonzero(np.isin(nodes.op[index], with_values))
    values[where], texts = without_tensors(graph, nodes.input_values[index[where]])
    with_strides = ops[[needs_strides(strings[int(op)]) for op in ops]] if len(ops) else ops
    strides = np.where(np.isin(nodes.op[index], with_strides), nodes.input_strides[index], 0)
    columns: list[npt.NDArray[Any]] = [nodes.op[index], values, _of_sparse(graph, index), strides]
    for name in ("input_shapes", "input_types", "output_shapes", "output_types"):
        columns.append(getattr(nodes, name)[index])
    first, call = deduplicate(columns)
    rows: list[list[int]] = np.stack([column[first] for column in columns], axis=1).tolist()
    works: list[Work] = []
    fills = graph.job.device.runs_operators
    exact = not graph.job.measurement.tf32_convolutions
    # A graph with strides leaves out those of contiguous operands.
    unstated = DENSE if nodes.input_strides.any() else ""
    for row in rows:
        op, strided, *operands = (strings[code] for code in (row[0], *row[3:]))
        shapes, types, out_shapes, out_types = operands
        if row[2]:
            works.append(Work())
            continue
        inputs, outputs = (shapes, types), (out_shapes, out_types)
        if reads_paged_cache(op):
            works.append(paged_cache_work(op, inputs, graph.job.inference))
            continue
        work = work_of(op, inputs, outputs, texts[row[1]], strided or unstated, fills=fills)
        if work.dtype == "tfloat32" and exact and base_name(op) in gemm.BY_CUDNN:
            work = replace(work, dtype="float32")
        # Some traces record no results, and shape inference has no rule for every operator.
        no_results = types and not out_types
        works.append(replace(work, bytes_written=UNKNOWN) if no_results else work)
    return works, call


# End of the record of a tensor without storage: storage id, offset, elements, item size, device.
_NO_STORAGE = ',0,0,0,0,""]'


def _of_sparse(graph: Graph, index: I64) -> Mask:
    """Return the nodes that multiply a sparse tensor, recognised by its lack of storage, bool[n].

    A sparse tensor's shape does not determine the work, and its element count is not recorded.
    """
    nodes, strings = graph.nodes, graph.strings
    ops = np.unique(nodes.op[index]).tolist()
    multiply = [op for op in ops if base_name(strings[op]) in gemm.GEMMS]
    rows = np.flatnonzero(np.isin(nodes.op[index], multiply))
    codes, place = np.unique(nodes.input_values[index[rows]], return_inverse=True)
    sparse = np.zeros(len(index), dtype=bool)
    sparse[rows] = np.array([_NO_STORAGE in strings[code] for code in codes.tolist()], bool)[place]
    return sparse


@dataclass(frozen=True, slots=True)
class _Shares:
    """The shares of an operator instance's figures among its nodes.

    Attributes:
        order: nodes of instances with several nodes, by instance, int64[s].
        before: share of the instance's time before each of them, float64[s].
        until: the same, including the node, float64[s]; exactly 1 for the last.
        takes: whether a node, in the graph's order, has a share, bool[n].
        instance: the instance of each node, int64[n].
        total_ns: time of each node's instance, float64[n].
    """

    order: I64
    before: F64
    until: F64
    takes: Mask
    instance: I64
    total_ns: F64

    def of(self, total: I64) -> I64:
        """Return each node's share of its instance's total; UNKNOWN stays UNKNOWN."""
        # Differences of rounded running sums, so that the parts add up to the total exactly.
        assert total.max(initial=0) < _LARGEST_COUNT, "a count beyond int64"
        parts, ordered = total.copy(), total[self.order]
        parts[self.order] = _part(ordered, self.until) - _part(ordered, self.before)
        return np.where((total == UNKNOWN) | ~self.takes, UNKNOWN, parts)


def _part(total: I64, fraction: F64) -> I64:
    """Return the rounded fraction of each total; exactly the total for a fraction of 1."""
    # A float64 cannot represent every total above 2^53.
    return np.where(fraction >= 1, total, np.rint(total * fraction).astype(np.int64))


def _shares(graph: Graph, index: I64, call: I64) -> _Shares:
    """Group the nodes by the operator instance that launched them and divide by duration."""
    nodes, launcher = graph.nodes, graph.launchers()[index]
    # A node without a launch edge is its own instance, as in a CPU capture.
    _, instance = deduplicate([np.where(launcher >= 0, launcher, index), call])
    kernel = ~membership_mask(nodes.kind[index], [Kind.MEMCPY, Kind.MEMSET])
    count = int(instance.max(initial=-1)) + 1
    with_kernel = np.bincount(instance, weights=kernel, minlength=count) > 0
    # If an operator launches kernels, its copies and fills do none of its work.
    takes = kernel | ~with_kernel[instance]
    weight = np.maximum(nodes.duration_ns[index], 0).astype(np.float64) * takes
    total: F64 = np.bincount(instance, weights=weight, minlength=count).astype(np.float64)
    # An instance without durations is divided evenly.
    weight = np.where(total[instance] > 0, weight, takes.astype(np.float64))
    several = np.flatnonzero((np.bincount(instance, minlength=count) > 1)[instance])
    # Nodes with a share come last in each instance, so that the last one ends at exactly 1.
    order = several[np.lexsort((takes[several], instance[several]))]
    owner = instance[order]
    starts = np.flatnonzero(np.diff(owner, prepend=-1))
    sizes = np.diff(np.append(starts, len(owner)))
    running = np.cumsum(weight[order])
    base = np.repeat(running[starts] - weight[order][starts], sizes)
    until = np.clip(
        (running - base) / np.repeat(running[starts + sizes - 1] - base[starts], sizes), 0, 1
    )
    until[starts + sizes - 1] = 1.0
    before = np.concatenate([[0.0], until[:-1]])[: len(until)]
    before[starts] = 0.0
    return _Shares(order.astype(np.int64), before, until, takes, instance, total[instance])


# CUTLASS names its kernels by the instruction of the tensor cores: for float32 operands m16n8k8.
_TF32_KERNEL = re.compile(r"tf32|tensorop_s1688", re.IGNORECASE)


def _runs_tf32(graph: Graph, index: I64, classes: U8) -> Mask:
    """Return which nodes multiply float32 operands in TF32, bool[n].

    The operands' recorded dtype is float32 with or without TF32. Names of kernels show it. An
    operator that no GPU ran has no kernel: its GEMMs are in TF32 if the script allowed that.
    """
    nodes = graph.nodes
    names = np.unique(nodes.name[index])
    tf32 = names[[bool(_TF32_KERNEL.search(graph.strings[int(name)])) for name in names]]
    by_name: Mask = np.isin(nodes.name[index], tf32)
    if not graph.job.measurement.tf32_gemms:
        return by_name
    has_kernel = nodes.name[index] != nodes.op[index]
    return by_name | (~has_kernel & (classes == CLASSES.index(OpClass.GEMM)))

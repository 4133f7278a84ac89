"""Operators limited by memory: pointwise, reductions, norms, softmax, copies and indexing.

Bytes determine their time on every described GPU: each operand and each result counts once. FLOPs
follow simple conventions: one per result of a pointwise operator (a transcendental function counts
as one), more for the operators in `_PER_ELEMENT`; copies, fills, random numbers and indexing have
none. An operand passed twice (x * x) counts twice, except Adam's gradient. A broadcast (stride-0)
operand counts at its full size, because kernels read it as slowly as a dense one (the backward of a
mean over rows, on an H200). The index of a gather of whole rows counts once per row.

What a kernel takes beyond these bytes is in `kernel_overheads`.
"""

from math import prod

from onerank.annotate.op_costs.cost_record import Formula, Work, vector_work
from onerank.annotate.op_costs.op_classes import OpClass
from onerank.annotate.op_costs.operands import Call, Tensor

# Operator -> operations per element; 1 for operators that are absent.
_PER_ELEMENT = {
    # a + s*b*c and a + s*b/c; a + w*(b - a)
    "addcmul": 3,
    "addcdiv": 3,
    "lerp": 3,
    # x*sigmoid(x) and its derivative; the error function's polynomial counts as one
    "silu": 3,
    "silu_backward": 6,
    "gelu": 4,
    "gelu_backward": 8,
    "sigmoid": 3,
    "sigmoid_backward": 3,
    "tanh_backward": 3,
    "mish": 4,
    "clamp": 2,
}

# Fused optimizer -> (operations per parameter, positions of the lists that it changes).
_FUSED = {
    # decay 1, first moment 3, second moment 4, both bias corrections 2, root, eps, divide, step 4
    "_fused_adamw_": (14, (0, 2, 3, 4)),
    "_fused_adam_": (14, (0, 2, 3, 4)),
    "_fused_sgd_": (6, (0, 2)),
    "_fused_adagrad_": (7, (0, 2)),
}

NORM_FORWARD, NORM_BACKWARD = 7, 14
"""FLOPs per element of the normalised operand: forward is mean, variance, scale and affine;
backward repeats the normalisation and adds two reductions and the weight's gradient."""

SOFTMAX_FORWARD, SOFTMAX_BACKWARD = 5, 4
"""FLOPs per element: forward is maximum, subtract, exponential, sum, divide; backward is product,
sum, subtract, product."""

# Operators that overwrite their first operand without reading it.
WRITE_ONLY = frozenset(
    [
        "fill_",
        "zero_",
        "copy_",
        "normal_",
        "uniform_",
        "bernoulli_",
        "random_",
        "exponential_",
        "log_normal_",
        "cauchy_",
        "geometric_",
        "_foreach_zero_",
        "_foreach_copy_",
        "arange",
        "range",
        "linspace",
        "randperm",
    ]
)


# Tensor operands that are read; an additional operand is the `out` of an out-variant.
_READS = {
    1: """abs neg exp exp2 expm1 log log2 log10 log1p sin cos tan tanh sigmoid sqrt rsqrt
        reciprocal square sign ceil floor round trunc erf relu silu gelu softplus hardtanh
        leaky_relu elu logical_not bitwise_not clamp_min clamp_max tril triu isnan sum mean prod
        norm linalg_vector_norm amax amin argmax argmin any all logsumexp cumsum cumprod sort topk
        _softmax _log_softmax cat stack""",
    2: """add sub rsub mul div floor_divide remainder fmod pow maximum minimum fmax fmin eq ne lt le
        gt ge logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor atan2
        silu_backward gelu_backward sigmoid_backward tanh_backward threshold_backward
        leaky_relu_backward elu_backward softplus_backward hardtanh_backward
        _softmax_backward_data _log_softmax_backward_data mse_loss""",
    3: "addcmul addcdiv lerp where clamp",
}
_ARITY = {name: reads for reads, names in _READS.items() for name in names.split()}

# Operators of `SyncBatchNorm` after its all-gather; the places of the running statistics, which
# they update.
_GATHERS_STATISTICS = frozenset(("batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"))
_RUNNING_STATISTICS = (3, 4)

# Operators of vLLM that write keys and values (arguments 0, 1) into a paged cache (2).
_INTO_CACHE = frozenset(("reshape_and_cache", "reshape_and_cache_flash", "concat_and_cache_mla"))

WRITES_INTO_ZEROS = frozenset(
    "nll_loss_backward nll_loss2d_backward embedding_dense_backward "
    "_embedding_bag_dense_backward".split()
)
"""Operators that zero their result (on a GPU in a separate kernel), then write a part of it."""

_SQUARES = frozenset({"addcmul", "addcmul_", "_foreach_addcmul", "_foreach_addcmul_"})
_PUTS = frozenset({"index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"})
_BY_DIM = frozenset(
    f"{name}{suffix}"
    for name in ("gather", "index_fill", "scatter", "scatter_add", "scatter_reduce")
    for suffix in ("", "_")
)
NEED_STRIDES = _BY_DIM
"""Operators whose index may be expanded."""

NEED_VALUES = _SQUARES | _PUTS | _BY_DIM
"""Operators whose cost depends on argument values in addition to shapes.

Adam's second moment multiplies the gradient by itself (v + w*g*g), which equal operand ids show.
The dimension of a gather shows whether its index is one number per row, expanded. `index_put` adds
if a flag says so.
"""


def _elements(call: Call) -> int:
    """Return the elements of a pointwise operator's results, or of the operand it changes."""
    return call.output_numel or call.numel(0)


def _read(call: Call) -> int:
    """Return the bytes read: those of all operands but one that is only overwritten."""
    unread = {0} if call.op in WRITE_ONLY else set[int]()
    if call.op in _SQUARES and call.value(1) is not None and call.value(1) == call.value(2):
        # Adam's v + w*g*g passes the gradient twice, and the kernel loads it once.
        unread.add(2)
    tensors = [p for p, operand in enumerate(call.inputs) if operand and p not in unread]
    return call.list_bytes(*tensors[: _ARITY.get(call.op, len(tensors))])


def _written(call: Call) -> int:
    """Return the bytes written: those of all results, or of the operand changed in place."""
    return call.output_bytes or (call.list_bytes(0) if call.op.endswith("_") else 0)


def _pointwise(call: Call) -> Work:
    name = call.op.removeprefix("_foreach_").removesuffix("_")
    each = _PER_ELEMENT.get(name, 1)
    return vector_work(call, each * _elements(call), _read(call), _written(call))


def _copy_work(call: Call) -> Work:
    cache = call.tensor(2) if call.op in _INTO_CACHE else None
    if cache:
        written = (call.numel(0) + call.numel(1)) * cache.item_bytes
        return vector_work(call, 0, call.list_bytes(0, 1), written)
    return vector_work(call, 0, _read(call), _written(call))


def _reduction(call: Call) -> Work:
    # A square and an addition for each element; for a variance, a difference and its square.
    each = 2 if call.op in ("linalg_vector_norm", "norm", "var", "std", "var_mean") else 1
    return vector_work(call, each * call.numel(0), _read(call), _written(call))


def _optimizer(call: Call) -> Work:
    if call.op.startswith("_foreach_norm"):
        return vector_work(call, 2 * call.numel(0))
    if call.op not in _FUSED:
        return _pointwise(call)
    each, changed = _FUSED[call.op]
    return vector_work(call, each * call.numel(0), call.input_bytes, call.list_bytes(*changed))


def _norm(call: Call) -> Work:
    if call.op in _GATHERS_STATISTICS:
        # It merges (ranks, channels) means; of the normalised tensor it takes only the dtype.
        changed = call.list_bytes(*_RUNNING_STATISTICS)
        read = call.input_bytes - call.list_bytes(0)
        return vector_work(call, NORM_FORWARD * call.numel(1), read, call.output_bytes + changed)
    backward = "backward" in call.op
    each = NORM_BACKWARD if backward else NORM_FORWARD
    return vector_work(call, each * call.numel(0), _read(call), _written(call))


def _softmax(call: Call) -> Work:
    each = SOFTMAX_BACKWARD if "backward" in call.op else SOFTMAX_FORWARD
    return vector_work(call, each * call.numel(0), _read(call), _written(call))


def _loss(call: Call) -> Work:
    """Return the work of a loss.

    Negative log-likelihood reads one element per row; other losses are pointwise with a sum.
    """
    if not call.op.startswith("nll_loss"):
        return vector_work(call, 2 * call.numel(0), _read(call), _written(call))
    backward = "backward" in call.op
    scores, target = (call.tensor(1 if backward else 0), call.tensor(2 if backward else 1))
    if scores is None or target is None:
        return vector_work(call, 0)
    picked = target.numel * scores.item_bytes
    # In the backward a separate kernel writes the zeros around the picked elements.
    if backward:
        return vector_work(call, target.numel, target.nbytes + call.list_bytes(0, 3), picked)
    return vector_work(call, target.numel, picked + target.nbytes + call.list_bytes(2))


def _embedding(call: Call) -> Work:
    """Return the work of an embedding: the rows that are read or added to, not the whole table."""
    if "bag" in call.op or call.op == "embedding_renorm_":
        return _rows_of_bags(call)
    if "backward" in call.op:
        grad = call.list_bytes(0)
        # Rows that occur several times are written once, and never more rows than the table has.
        return vector_work(call, call.numel(0), call.input_bytes, min(grad, call.output_bytes))
    return vector_work(call, 0, call.output_bytes + call.list_bytes(1))


_TABLE_AT = {"_embedding_bag_per_sample_weights_backward": (1, 2)}


def _rows_of_bags(call: Call) -> Work:
    """Return the work of an embedding bag, which sums the rows of its indices.

    The backward reads the gradient of a bag once and adds it to the row of each index.
    """
    # Argument 0 of the dense backward is the gradient of the bags.
    at, indices = _TABLE_AT.get(call.op, (0, 1))
    table = call.tensor(at)
    if table is None or not table.shape:
        return bytes_only(call)
    elements = call.numel(indices) * table.shape[-1]
    rows = elements * table.item_bytes
    if call.op == "_embedding_bag_dense_backward":
        return vector_work(call, elements, call.input_bytes, min(rows, call.output_bytes))
    read = call.input_bytes - table.nbytes + rows
    written = rows if call.op == "embedding_renorm_" else call.output_bytes
    return vector_work(call, (2 if "weights" in call.op else 1) * elements, read, written)


def _index(call: Call) -> Work:
    """Return the work of indexing: the picked elements and the index itself."""
    name = call.op.lstrip("_").removeprefix("unsafe_")
    table = call.tensor(0)
    if table is None or not name.startswith(("index", "gather", "take", "scatter")):
        return vector_work(call, 0, _read(call), _written(call))
    operands = call.input_bytes - table.nbytes
    index = call.tensor(2)
    if name.startswith("gather"):
        operands = _index_bytes(call, table, index) if index else 0
    elif name.startswith("scatter") and index is not None:
        operands += _index_bytes(call, table, index) - index.nbytes
    if not name.startswith(("scatter", "index_put", "index_add", "index_copy", "index_fill")):
        return vector_work(call, 0, call.output_bytes + operands)
    elements = changed_elements(call, name, table)
    changed = elements * table.item_bytes
    # An addition reads what it changes.
    adds = "add" in name or "reduce" in name or (name.startswith("index_put") and call.value(3))
    added = changed if adds else 0
    # Out of place, a copy of the table is changed.
    copied = 0 if call.op.endswith("_") else table.nbytes
    return vector_work(call, elements if added else 0, operands + added + copied, changed + copied)


def changed_elements(call: Call, name: str, table: Tensor) -> int:
    """Return how many elements of a table a scattered store writes."""
    at = 2 if name.startswith("index_put") else 3
    source, index = call.tensor(at), call.tensor(2)
    if name.startswith("index_fill"):
        # A number for each row of the index, whether or not the number is a tensor.
        dim = call.value(1)
        if index is None or not isinstance(dim, int) or not table.shape:
            return index.numel if index else 0
        return index.numel * (table.numel // max(1, table.shape[dim % len(table.shape)]))
    if name.startswith("index_put"):
        indices = call.inputs[1] if len(call.inputs) > 1 else None
        if source is not None and source.numel > 1:
            return source.numel
        # One number for all: as many as the indices name, if they are those of the first axes.
        if not indices or any(each.item_bytes == 1 for each in indices):
            return source.numel if source else 0
        rest = table.shape[len(indices) :]
        return max(each.numel for each in indices) * prod(rest)
    return source.numel if source else index.numel if index else 0


def _index_bytes(call: Call, table: Tensor, index: Tensor) -> int:
    """Return the bytes of the index of a gather or scatter, of which a part may be expanded.

    `index_select`, PyTorch Geometric and routing to experts expand an index over a row. If the
    graph has no strides, an index that has the table's row counts as expanded.
    """
    if index.recorded_strides:
        return index.stored_bytes
    return index.nbytes // row_elements(call, table)


def row_elements(call: Call, table: Tensor) -> int:
    """Return how many elements share an entry of an expanded index: a row's, or 1.

    Args:
        call: a gather or a scatter.
        table: its first operand.
    """
    dim, index = call.value(1), call.tensor(2)
    if not isinstance(dim, int) or index is None or len(index.shape) != len(table.shape):
        return 1
    inner = table.shape[dim % len(table.shape) + 1 :] if table.shape else ()
    if not inner or index.shape[-len(inner) :] != inner:
        return 1
    # An index that is not expanded along the row has an entry for each of its elements.
    if index.recorded_strides and all(index.strides[-len(inner) :]):
        return 1
    return max(1, prod(inner))


BY_CLASS: dict[OpClass, Formula] = {
    OpClass.ELEMENTWISE: _pointwise,
    OpClass.OPTIMIZER: _optimizer,
    OpClass.REDUCTION: _reduction,
    OpClass.NORM: _norm,
    OpClass.SOFTMAX: _softmax,
    OpClass.LOSS: _loss,
    OpClass.EMBEDDING: _embedding,
    OpClass.INDEX: _index,
    OpClass.COPY: _copy_work,
    OpClass.MEMSET: _copy_work,
    OpClass.RANDOM: _copy_work,
}
"""Class -> formula that its operators share; GEMMs and attention have one per operator."""


def bytes_only(call: Call) -> Work:
    """Return the work of an operator without formula: its operands' bytes, FLOPs unknown."""
    return Work(bytes_read=_read(call), bytes_written=_written(call))

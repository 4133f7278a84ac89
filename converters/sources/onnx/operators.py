"""Lower each ONNX operator to calls of PyTorch operators.

The formulas for FLOPs and bytes are those of PyTorch operators, so a model and a captured script
have the same costs. An operator without a rule keeps its operands and its ONNX name, and is
counted.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import msgspec

from onerank.converters.sources.onnx.control_flow import MOST_NODES
from onerank.converters.sources.onnx.model import ELEMENT_TYPES, OnnxTensor

Argument = OnnxTensor | tuple[OnnxTensor, ...] | int | float | bool | list[Any] | None


@dataclass(frozen=True, slots=True)
class AtenCall:
    """A call of a PyTorch operator.

    Attributes:
        op: operator with namespace: "aten::mm".
        inputs: arguments by position in the operator's schema.
        outputs: results, None for a result that is not computed.
    """

    op: str
    inputs: tuple[Argument, ...]
    outputs: tuple[OnnxTensor | None, ...]

    def columns(self) -> dict[str, str]:
        """Return the operand columns of `Nodes`, as JSON text."""
        text = {
            "input_shapes": [_shape(argument) for argument in self.inputs],
            "input_types": [_type(argument) for argument in self.inputs],
            "input_values": [_value(argument) for argument in self.inputs],
            "output_shapes": [_shape(tensor) for tensor in self.outputs],
            "output_types": [_type(tensor) for tensor in self.outputs],
        }
        return {name: msgspec.json.encode(value).decode() for name, value in text.items()}


def call(op: str, inputs: Sequence[Argument], *outputs: OnnxTensor | None) -> AtenCall:
    """Return a call of an `aten` operator."""
    return AtenCall(f"aten::{op}", tuple(inputs), outputs)


def _shape(argument: Argument) -> Any:
    if isinstance(argument, OnnxTensor):
        return list(argument.shape)
    if isinstance(argument, tuple):
        return [list(tensor.shape) for tensor in argument]
    return []


def _type(argument: Argument) -> str:
    if isinstance(argument, OnnxTensor):
        return f"Tensor({ELEMENT_TYPES.get(argument.dtype, (argument.dtype,))[0]})"
    if isinstance(argument, tuple):
        return f"GenericList[{','.join(_type(tensor) for tensor in argument)}]"
    if isinstance(argument, bool):
        return "Bool"
    if isinstance(argument, list):
        return "GenericList[]" if not argument else f"GenericList[{_type(argument[0])}]"
    if isinstance(argument, int):
        return "Int"
    return "Double" if isinstance(argument, float) else "None"


def _value(argument: Argument) -> Any:
    return argument if isinstance(argument, (bool, int, float, list)) else []


@dataclass(frozen=True, slots=True)
class NodeContext:
    """An ONNX node with the shapes, types and constant data of its operands.

    Attributes:
        op: ONNX operator.
        domain: its operator set; "" is ONNX's own.
        inputs: shape and type per operand, None for an omitted one.
        outputs: shape and type per result.
        attributes: name -> value.
        data: per operand, its data if it is a small constant, else None.
        weights: per operand, whether it is a weight.
    """

    op: str
    domain: str
    inputs: tuple[OnnxTensor | None, ...]
    outputs: tuple[OnnxTensor, ...]
    attributes: Mapping[str, Any]
    data: tuple[Any, ...]
    weights: tuple[bool, ...]

    def tensor(self, position: int) -> OnnxTensor:
        """Return a required operand."""
        operand = self.inputs[position]
        assert operand is not None, f"{self.op} lacks operand {position}"
        return operand

    def optional(self, position: int) -> OnnxTensor | None:
        """Return an optional operand."""
        return self.inputs[position] if position < len(self.inputs) else None

    @property
    def present(self) -> list[OnnxTensor]:
        """The operands that are not omitted."""
        return [tensor for tensor in self.inputs if tensor is not None]

    @property
    def out(self) -> OnnxTensor:
        """The first result."""
        return self.outputs[0]


Rule = Callable[[NodeContext], list[AtenCall] | None]


# ONNX saves statistics of norms in float32 by default (`stash_type`).
def layer_norm(node: NodeContext) -> list[AtenCall]:
    """Lower LayerNormalization."""
    x = node.tensor(0)
    axis = node.attributes.get("axis", -1) % len(x.shape)
    shape = list(x.shape[axis:])
    rows = OnnxTensor(x.shape[:axis], "FLOAT")
    arguments: list[Argument] = [x, shape, node.optional(1), node.optional(2), 1e-5]
    return [call("native_layer_norm", arguments, node.out, rows, rows)]


def rms_norm(node: NodeContext) -> list[AtenCall]:
    """Lower RMSNormalization."""
    x = node.tensor(0)
    axis = node.attributes.get("axis", -1) % len(x.shape)
    rows = OnnxTensor(x.shape[:axis], "FLOAT")
    return [call("_fused_rms_norm", [x, list(x.shape[axis:]), node.optional(1)], node.out, rows)]


def skip_norm(name: str) -> Rule:
    """Return the rule of com.microsoft's fused residual addition and norm."""

    def rule(node: NodeContext) -> list[AtenCall]:
        x = node.tensor(0)
        rows = OnnxTensor(x.shape[:-1], "FLOAT")
        weight = node.optional(2)
        return [
            call("add", [x, node.tensor(1)], node.out),
            call(name, [node.out, list(x.shape[-1:]), weight], node.out, rows),
        ]

    return rule


def batch_norm(node: NodeContext) -> list[AtenCall]:
    """Lower BatchNormalization."""
    channels = node.tensor(1)
    # Momentum and epsilon are PyTorch's defaults: they change no cost.
    training = bool(node.attributes.get("training_mode"))
    arguments: list[Argument] = [*node.inputs[:5], training, 0.1, 1e-5]
    return [call("native_batch_norm", arguments, node.out, channels, channels)]


def group_norm(node: NodeContext) -> list[AtenCall]:
    """Lower GroupNormalization and InstanceNormalization, whose groups are the channels."""
    x = node.tensor(0)
    groups = node.attributes.get("num_groups", x.shape[1])
    rows = OnnxTensor((x.shape[0], groups), "FLOAT")
    arguments: list[Argument] = [x, *node.inputs[1:3]]
    return [call("native_group_norm", arguments, node.out, rows, rows)]


def softmax(name: str) -> Rule:
    """Return the rule of a softmax; PyTorch's operator also has an axis and a precision flag."""
    return lambda node: [call(name, [node.tensor(0), -1, False], node.out)]


def cross_entropy(node: NodeContext) -> list[AtenCall]:
    """Lower SoftmaxCrossEntropyLoss to a log-softmax and a negative log likelihood."""
    scores, labels = node.tensor(0), node.tensor(1)
    return [
        call("_log_softmax", [scores, 1, False], scores),
        *_nll(scores, labels, node.optional(2), node.out),
    ]


def nll_loss(node: NodeContext) -> list[AtenCall]:
    """Lower NegativeLogLikelihoodLoss."""
    return _nll(node.tensor(0), node.tensor(1), node.optional(2), node.out)


def _nll(
    scores: OnnxTensor, labels: OnnxTensor, weight: OnnxTensor | None, out: OnnxTensor
) -> list[AtenCall]:
    return [call("nll_loss_forward", [scores, labels, weight], out, scores.like())]


def matmul_of(node: NodeContext) -> list[AtenCall]:
    """Lower MatMul."""
    left, right = node.tensor(0), node.tensor(1)
    return [matmul(left, right, node.out)]


def matmul(left: OnnxTensor, right: OnnxTensor, out: OnnxTensor) -> AtenCall:
    """Return the product as PyTorch launches it: folded to two axes if `right` has no batch."""
    if len(left.shape) >= 2 and len(right.shape) == 2:
        # As torch.matmul: leading axes become rows of one `mm`, not a batch of products.
        rows = left.like(prod(left.shape[:-1]), left.shape[-1])
        return call("mm", [rows, right], out.like(rows.shape[0], right.shape[-1]))
    if 2 < len(left.shape) == len(right.shape) and left.shape[:-2] == right.shape[:-2]:
        batch = prod(left.shape[:-2])
        sides = [side.like(batch, *side.shape[-2:]) for side in (left, right)]
        return call("bmm", [*sides], out.like(batch, *out.shape[-2:]))
    return call("matmul", [left, right], out)


def gemm(node: NodeContext) -> list[AtenCall]:
    """Lower Gemm to a product, with a bias to addmm."""
    left, right, bias = node.tensor(0), node.tensor(1), node.optional(2)
    if node.attributes.get("transA"):
        left = left.like(*reversed(left.shape))
    if node.attributes.get("transB"):
        right = right.like(*reversed(right.shape))
    if bias is None:
        return [call("mm", [left, right], node.out)]
    return [call("addmm", [bias, left, right], node.out)]


def einsum(node: NodeContext) -> list[AtenCall] | None:
    """Lower an equation of two operands to a batched product; others stay `aten::einsum`."""
    equation = node.attributes["equation"]
    equation = (equation.decode() if isinstance(equation, bytes) else equation).replace(" ", "")
    terms, arrow, result = equation.partition("->")
    operands = terms.split(",")
    # An ellipsis, an implicit result or a third operand does not reduce to one product.
    if "." in equation or not arrow or len(operands) != 2:
        return [call("einsum", [*node.inputs], node.out)]
    left, right = operands
    size = {
        axis: length
        for term, tensor in zip(operands, node.present, strict=True)
        for axis, length in zip(term, tensor.shape, strict=True)
    }
    batch = prod(size[a] for a in size if a in left and a in right and a in result)
    inner = prod(size[a] for a in size if a in left and a in right and a not in result)
    rows = prod(size[a] for a in size if a in left and a not in right)
    columns = prod(size[a] for a in size if a in right and a not in left)
    x, y = node.present
    product = call("bmm", [x.like(batch, rows, inner), y.like(batch, inner, columns)],
                   node.out.like(batch, rows, columns))  # fmt: skip
    return [product]


def convolution(*, transposed: bool) -> Rule:
    """Return the rule of Conv or ConvTranspose."""

    def rule(node: NodeContext) -> list[AtenCall]:
        x, weight = node.tensor(0), node.tensor(1)
        axes = len(x.shape) - 2
        get = node.attributes.get
        # ONNX gives the padding before all axes, then after them; PyTorch has one number per axis.
        pads = list(get("pads", [0] * (2 * axes)))[:axes]
        arguments: list[Argument] = [
            *(x, weight, node.optional(2)),
            *(list(get("strides", [1] * axes)), pads, list(get("dilations", [1] * axes))),
            *(transposed, list(get("output_padding", [0] * axes)), int(get("group", 1))),
        ]
        return [call("convolution", arguments, node.out)]

    return rule


def integer_convolution(node: NodeContext) -> list[AtenCall]:
    """Lower ConvInteger and QLinearConv."""
    quantised = node.op == "QLinearConv"  # x, scale, zero point, weight ...
    x, weight = node.tensor(0), node.tensor(3 if quantised else 1)
    return [call("_slow_conv2d_forward", [x, weight], node.out)]


def attention(node: NodeContext) -> list[AtenCall]:
    """Lower ONNX's Attention, with Q, K, V as [b, h, s, d] or [b, s, h * d]."""
    heads = node.attributes.get("q_num_heads"), node.attributes.get("kv_num_heads")
    q = _by_head(node.tensor(0), heads[0])
    k = _by_head(node.tensor(1), heads[1])
    v = _by_head(node.tensor(2), heads[1])
    past = node.optional(4)
    # A cache lengthens keys and values, not queries.
    if past is not None:
        k = k.like(*k.shape[:2], k.shape[2] + past.shape[2], k.shape[3])
        v = v.like(*v.shape[:2], v.shape[2] + past.shape[2], v.shape[3])
    causal = bool(node.attributes.get("is_causal", 0))
    return [_attend(q, k, v, causal=causal)]


def _by_head(x: OnnxTensor, heads: Any) -> OnnxTensor:
    if len(x.shape) == 4 or not heads:
        return x
    batch, length, width = x.shape
    return x.like(batch, int(heads), length, width // int(heads))


def _attend(q: OnnxTensor, k: OnnxTensor, v: OnnxTensor, *, causal: bool) -> AtenCall:
    arguments: list[Argument] = [q, k, v, 0.0, causal]
    out = q.like(*q.shape[:3], v.shape[-1])
    return call("_scaled_dot_product_flash_attention", arguments, out)


def multi_head(node: NodeContext) -> list[AtenCall] | None:
    """Lower com.microsoft's MultiHeadAttention and GroupQueryAttention."""
    heads = node.attributes.get("num_heads")
    kv_heads = node.attributes.get("kv_num_heads", heads)
    if len(node.present) < 3 or any(len(x.shape) != 3 for x in node.present[:3]):
        return None  # packed projections have no rule
    q, k, v = node.present[:3]
    causal = node.op == "GroupQueryAttention" or bool(node.attributes.get("unidirectional"))
    return [
        _attend(_by_head(q, heads), _by_head(k, kv_heads), _by_head(v, kv_heads), causal=causal)
    ]


_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
RECURRENT = tuple(_GATES)
"""Operators that become three calls per time step and direction."""


def recurrent(node: NodeContext) -> list[AtenCall] | None:
    """Lower LSTM, GRU or RNN to a product for all inputs, then a product and gates per time step.

    None if there are more time steps than `MOST_NODES`.
    """
    x, weight = node.tensor(0), node.tensor(1)
    batch_first = bool(node.attributes.get("layout"))
    length, batch = (x.shape[1], x.shape[0]) if batch_first else x.shape[:2]
    directions, width = weight.shape[0], weight.shape[1]
    if length * directions > MOST_NODES:
        return None
    hidden = width // _GATES[node.op]
    state = x.like(batch, hidden)
    gates = x.like(batch, width)
    step = [
        call("addmm", [gates, state, x.like(hidden, width)], gates),
        call("sigmoid", [gates], gates),
        call("mul", [state, state], state),
    ]
    rows = x.like(length * batch, x.shape[2])
    projected = x.like(length * batch, width)
    whole = [call("mm", [rows, x.like(x.shape[2], width)], projected), *step * length]
    return whole * directions


def aten_calls(node: NodeContext) -> list[AtenCall] | None:
    """Return the calls of a node; [] if it launches nothing, None if it has no rule."""
    rule = (_MICROSOFT if node.domain else _ONNX).get(node.op)
    return None if rule is None else rule(node)


def _same(name: str) -> Rule:
    """Return the rule of an operator whose operands are PyTorch's, in the same order."""
    return lambda node: [call(name, [*node.inputs], *node.outputs)]


def _first(name: str) -> Rule:
    """Return the rule of an operator that moves or maps only its first operand."""
    return lambda node: [call(name, [node.tensor(0)], node.out)]


def _nothing(_: NodeContext) -> list[AtenCall]:
    return []


def _variadic(name: str) -> Callable[[NodeContext], list[AtenCall]]:
    """Return the rule of an n-ary operator: n - 1 calls of the binary operator."""

    def rule(node: NodeContext) -> list[AtenCall]:
        first, *others = node.present
        if not others:
            return [call("clone", [first], node.out)]
        left = [first, *[node.out] * (len(others) - 1)]
        return [call(name, [*pair], node.out) for pair in zip(left, others, strict=True)]

    return rule


def _mean(node: NodeContext) -> list[AtenCall]:
    return [*_variadic("add")(node), call("div", [node.out, len(node.present)], node.out)]


def _gather(node: NodeContext) -> list[AtenCall]:
    """Lower Gather of rows of a 2-D weight to an embedding, else to an index_select.

    A single constant index is a view, which launches nothing.
    """
    table, index = node.tensor(0), node.tensor(1)
    axis = node.attributes.get("axis", 0) % len(table.shape)
    if axis == 0 and len(table.shape) == 2 and node.weights[0]:
        return [call("embedding", [table, index], node.out)]
    if not index.shape and node.data[1] is not None:
        return []
    return [call("index_select", [table, axis, index], node.out)]


def _gather_elements(node: NodeContext) -> list[AtenCall]:
    axis = int(node.attributes.get("axis", 0))
    return [call("gather", [node.tensor(0), axis, node.tensor(1)], node.out)]


def _index(node: NodeContext) -> list[AtenCall]:
    return [call("index", [node.tensor(0), (node.tensor(1),)], node.out)]


def _scatter_nd(node: NodeContext) -> list[AtenCall]:
    data, index, updates = (node.tensor(position) for position in range(3))
    return [call("index_put", [data, (index,), updates], node.out)]


def _scatter_elements(node: NodeContext) -> list[AtenCall]:
    axis = int(node.attributes.get("axis", 0))
    data, index, updates = (node.tensor(position) for position in range(3))
    return [call("scatter", [data, axis, index, updates], node.out)]


def _concat(node: NodeContext) -> list[AtenCall]:
    # Constant data is folded before the model runs.
    if all(known is not None for known in node.data):
        return []
    return [call("cat", [tuple(node.present)], node.out)]


def _fill(node: NodeContext) -> list[AtenCall]:
    return [call("full", [list(node.out.shape)], node.out)]


def _pool(name: str) -> Rule:
    return lambda node: [call(name, [node.tensor(0)], *node.outputs)]


# Only shapes and costs matter, so some operators become another operator of similar cost: Asinh
# becomes asin, LRN an average pooling.
_ONNX: dict[str, Rule] = {
    # one result for each element
    **{name: _first(op) for name, op in {
        "Abs": "abs", "Neg": "neg", "Exp": "exp", "Log": "log", "Sqrt": "sqrt",
        "Reciprocal": "reciprocal", "Sin": "sin", "Cos": "cos", "Tan": "tan", "Asin": "asin",
        "Acos": "acos", "Atan": "atan", "Sinh": "sinh", "Cosh": "cosh", "Asinh": "asin",
        "Acosh": "acos", "Atanh": "atan", "Tanh": "tanh", "Sigmoid": "sigmoid", "Erf": "erf",
        "Relu": "relu", "LeakyRelu": "leaky_relu", "Elu": "elu", "Celu": "celu", "Selu": "selu",
        "ThresholdedRelu": "threshold", "Softplus": "softplus", "Softsign": "softplus",
        "HardSigmoid": "hardsigmoid", "HardSwish": "hardswish", "Mish": "mish", "Gelu": "gelu",
        "Swish": "silu", "Floor": "floor", "Ceil": "ceil", "Round": "round", "Sign": "sign",
        "Not": "logical_not", "IsNaN": "isnan", "IsInf": "isinf", "BitwiseNot": "bitwise_not",
        "Shrink": "where",
    }.items()},
    **{name: _same(op) for name, op in {
        "Sub": "sub", "Mul": "mul", "Div": "div", "Add": "add", "Pow": "pow", "Mod": "remainder",
        "Equal": "eq", "Greater": "gt", "GreaterOrEqual": "ge", "Less": "lt", "LessOrEqual": "le",
        "And": "logical_and", "Or": "logical_or", "Xor": "logical_xor", "PRelu": "_prelu_kernel",
        "BitShift": "bitwise_left_shift", "BitwiseAnd": "bitwise_and", "BitwiseOr": "bitwise_or",
        "BitwiseXor": "bitwise_xor", "Where": "where", "Clip": "clamp",
        "QuantizeLinear": "div", "DequantizeLinear": "mul", "DynamicQuantizeLinear": "div",
    }.items()},
    "Sum": _variadic("add"), "Max": _variadic("maximum"), "Min": _variadic("minimum"),
    "Mean": _mean,
    "Cast": _first("_to_copy"), "CastLike": _first("_to_copy"),
    # matrix products
    "MatMul": matmul_of, "MatMulInteger": matmul_of, "Gemm": gemm, "Einsum": einsum,
    "QLinearMatMul": lambda node: [matmul(node.tensor(0), node.tensor(3), node.out)],
    "Conv": convolution(transposed=False), "ConvTranspose": convolution(transposed=True),
    "ConvInteger": integer_convolution, "QLinearConv": integer_convolution,
    "LSTM": recurrent, "GRU": recurrent, "RNN": recurrent,
    "Attention": attention,
    # norms, softmax, loss
    "LayerNormalization": layer_norm, "RMSNormalization": rms_norm,
    "SimplifiedLayerNormalization": rms_norm, "BatchNormalization": batch_norm,
    "InstanceNormalization": group_norm, "GroupNormalization": group_norm,
    "LpNormalization": _first("linalg_vector_norm"), "MeanVarianceNormalization": _first("var"),
    "LRN": _first("avg_pool2d"), "RotaryEmbedding": _first("mul"),
    "Softmax": softmax("_softmax"), "LogSoftmax": softmax("_log_softmax"),
    "Hardmax": _first("argmax"), "SoftmaxCrossEntropyLoss": cross_entropy,
    "NegativeLogLikelihoodLoss": nll_loss,
    # reductions
    **{name: _first(op) for name, op in {
        "ReduceSum": "sum", "ReduceMean": "mean", "ReduceMax": "amax", "ReduceMin": "amin",
        "ReduceProd": "prod", "ReduceL1": "norm", "ReduceL2": "linalg_vector_norm",
        "ReduceSumSquare": "linalg_vector_norm", "ReduceLogSum": "logsumexp",
        "ReduceLogSumExp": "logsumexp", "ArgMax": "argmax", "ArgMin": "argmin",
        "GlobalAveragePool": "mean", "GlobalMaxPool": "amax", "GlobalLpPool": "norm",
    }.items()},
    "MaxPool": _pool("max_pool2d_with_indices"), "AveragePool": _pool("avg_pool2d"),
    "LpPool": _pool("avg_pool2d"),
    # moving data
    "Gather": _gather, "GatherElements": _gather_elements, "GatherND": _index,
    "Compress": _first("masked_select"), "ScatterND": _scatter_nd,
    "ScatterElements": _scatter_elements, "Scatter": _scatter_elements, "Concat": _concat,
    "Tile": _first("repeat"), "Pad": _first("constant_pad_nd"),
    "Resize": _first("upsample_nearest2d"), "Upsample": _first("upsample_nearest2d"),
    "DepthToSpace": _first("pixel_shuffle"),
    "SpaceToDepth": _first("pixel_shuffle"), "ReverseSequence": _first("flip"),
    "Trilu": _first("tril"),
    "TopK": lambda node: [call("topk", [node.tensor(0)], *node.outputs)],
    "NonZero": _first("nonzero"), "CumSum": _first("cumsum"), "Unique": _first("unique"),
    "ConstantOfShape": _fill, "EyeLike": _fill,
    "Range": lambda node: [call("arange", [], node.out)],
    "OneHot": lambda node: [call("one_hot", [node.tensor(0)], node.out)],
    **{name: lambda node, op=op: [call(op, [], node.out)] for name, op in {
        "RandomNormal": "normal", "RandomNormalLike": "normal", "RandomUniform": "uniform",
        "RandomUniformLike": "uniform", "Bernoulli": "bernoulli", "Multinomial": "multinomial",
    }.items()},
    # views and shapes launch nothing
    **dict.fromkeys([
        "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose", "Identity", "Expand", "Slice",
        "Split", "Shape", "Size", "Constant", "Dropout", "Optional", "OptionalGetElement",
        "OptionalHasElement", "SequenceAt", "SequenceConstruct", "SequenceEmpty",
        "SequenceErase", "SequenceInsert", "SequenceLength", "SplitToSequence",
    ], _nothing),
    "ConcatFromSequence": lambda node: [call("cat", [(node.out,)], node.out)],
}  # fmt: skip

_MICROSOFT: dict[str, Rule] = {
    "SkipLayerNormalization": skip_norm("native_layer_norm"),
    "SkipSimplifiedLayerNormalization": skip_norm("_fused_rms_norm"),
    "SimplifiedLayerNormalization": rms_norm,
    "FusedMatMul": matmul_of,
    "FastGelu": _first("gelu"),
    "BiasGelu": _first("gelu"),
    "QuickGelu": _first("silu"),
    "MultiHeadAttention": multi_head,
    "GroupQueryAttention": multi_head,
}

NOT_EXPANDED = ("If", "Loop", "Scan", "SequenceMap")
"""Control flow that stays if the model does not determine how often a body runs."""

"""What each ONNX operator does, as calls of PyTorch's operators.

Formulas of FLOPs and bytes belong to those; so a model and a captured script are costed alike.
An operator that is in no table is kept with its operands under its ONNX name, and counted.
"""

from collections.abc import Callable

from onerank.converters.onnx.calls import Call, call
from onerank.converters.onnx.norms import (
    batch_norm,
    cross_entropy,
    group_norm,
    layer_norm,
    nll_loss,
    rms_norm,
    skip_norm,
    softmax,
)
from onerank.converters.onnx.products import (
    attention,
    convolution,
    einsum,
    gemm,
    integer_convolution,
    matmul,
    matmul_of,
    multi_head,
    recurrent,
)
from onerank.converters.onnx.site import Rule, Site


def calls_of(site: Site) -> list[Call] | None:
    """Return what a node calls; an empty list for one that launches nothing, None if unknown."""
    rule = (_MICROSOFT if site.domain else _ONNX).get(site.op)
    return None if rule is None else rule(site)


def _same(name: str) -> Rule:
    """Return the rule of an operator whose operands are PyTorch's in the same order."""
    return lambda site: [call(name, [*site.inputs], *site.outputs)]


def _first(name: str) -> Rule:
    """Return the rule of an operator that moves or maps its first operand alone."""
    return lambda site: [call(name, [site.tensor(0)], site.out)]


def _nothing(_: Site) -> list[Call]:
    return []


def _variadic(name: str) -> Callable[[Site], list[Call]]:
    """Return the rule of an n-ary operator: n - 1 calls of the binary one."""

    def rule(site: Site) -> list[Call]:
        first, *rest = site.given
        if not rest:
            return [call("clone", [first], site.out)]
        firsts = [first, *[site.out] * (len(rest) - 1)]
        return [call(name, [*pair], site.out) for pair in zip(firsts, rest, strict=True)]

    return rule


def _mean(site: Site) -> list[Call]:
    return [*_variadic("add")(site), call("div", [site.out, len(site.given)], site.out)]


def _gather(site: Site) -> list[Call]:
    """Rows of a table of two axes are an embedding; one fixed place is a view."""
    table, index = site.tensor(0), site.tensor(1)
    axis = site.attributes.get("axis", 0) % len(table.shape)
    if axis == 0 and len(table.shape) == 2 and site.weights[0]:
        return [call("embedding", [table, index], site.out)]
    if not index.shape and site.data[1] is not None:
        return []
    return [call("index_select", [table, axis, index], site.out)]


def _gather_elements(site: Site) -> list[Call]:
    axis = int(site.attributes.get("axis", 0))
    return [call("gather", [site.tensor(0), axis, site.tensor(1)], site.out)]


def _index(site: Site) -> list[Call]:
    return [call("index", [site.tensor(0), (site.tensor(1),)], site.out)]


def _scatter_nd(site: Site) -> list[Call]:
    data, index, updates = (site.tensor(position) for position in range(3))
    return [call("index_put", [data, (index,), updates], site.out)]


def _scatter_elements(site: Site) -> list[Call]:
    axis = int(site.attributes.get("axis", 0))
    data, index, updates = (site.tensor(position) for position in range(3))
    return [call("scatter", [data, axis, index, updates], site.out)]


def _concat(site: Site) -> list[Call]:
    if all(known is not None for known in site.data):
        return []
    return [call("cat", [tuple(site.given)], site.out)]


def _fill(site: Site) -> list[Call]:
    return [call("full", [list(site.out.shape)], site.out)]


def _pool(name: str) -> Rule:
    return lambda site: [call(name, [site.tensor(0)], *site.outputs)]


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
    "QLinearMatMul": lambda site: [matmul(site.tensor(0), site.tensor(3), site.out)],
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
    "TopK": lambda site: [call("topk", [site.tensor(0)], *site.outputs)],
    "NonZero": _first("nonzero"), "CumSum": _first("cumsum"), "Unique": _first("unique"),
    "ConstantOfShape": _fill, "EyeLike": _fill,
    "Range": lambda site: [call("arange", [], site.out)],
    "OneHot": lambda site: [call("one_hot", [site.tensor(0)], site.out)],
    **{name: lambda site, op=op: [call(op, [], site.out)] for name, op in {
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
    "ConcatFromSequence": lambda site: [call("cat", [(site.out,)], site.out)],
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
"""Control flow, where the model does not hold how often a body runs."""

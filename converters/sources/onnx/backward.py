"""Derive the backward calls of a forward call, as PyTorch's autograd issues them."""

from collections.abc import Callable

from onerank.converters.sources.onnx.model import OnnxTensor
from onerank.converters.sources.onnx.operators import Argument, AtenCall, call, matmul

Backward = Callable[[AtenCall, tuple[bool, ...]], list[AtenCall]]
"""(forward call, which tensor operands need a gradient) -> calls."""


def backward_of(forward: AtenCall, needs: tuple[bool, ...]) -> list[AtenCall] | None:
    """Return the calls that compute the operands' gradients; None without a rule.

    Args:
        forward: the call.
        needs: whether each operand needs a gradient, in the order of the operands.
    """
    rule = _RULES.get(forward.op.removeprefix("aten::"))
    return None if rule is None else rule(forward, needs)


def _tensors(forward: AtenCall) -> list[OnnxTensor]:
    return [argument for argument in forward.inputs if isinstance(argument, OnnxTensor)]


def _out(forward: AtenCall) -> OnnxTensor:
    result = forward.outputs[0]
    assert result is not None
    return result


def _transposed(x: OnnxTensor) -> OnnxTensor:
    return x.like(*x.shape[:-2], *reversed(x.shape[-2:]))


def _product(forward: AtenCall, needs: tuple[bool, ...]) -> list[AtenCall]:
    """Differentiate C = A B: dA = dC B^T and dB = A^T dC, summed over broadcast axes."""
    *bias, left, right = _tensors(forward)
    grad = _out(forward)
    # A product with a vector has an outer product or a scaled vector as gradient: element-wise
    # work.
    if len(left.shape) < 2 or len(right.shape) < 2:
        return [call("mul", [grad, right], left)] * sum(needs)
    calls: list[AtenCall] = []
    if needs[len(bias)]:
        calls += _reduced(matmul(grad, _transposed(right), _broadcast(grad, left)), left)
    if needs[len(bias) + 1]:
        calls += _reduced(matmul(_transposed(left), grad, _broadcast(grad, right)), right)
    if bias and needs[0]:
        calls.append(call("sum", [grad], bias[0]))
    return calls


def _broadcast(grad: OnnxTensor, operand: OnnxTensor) -> OnnxTensor:
    return operand.like(*grad.shape[:-2], *operand.shape[-2:])


def _reduced(product: AtenCall, operand: OnnxTensor) -> list[AtenCall]:
    """Return the product, and a sum if the operand was broadcast and is smaller."""
    result = product.outputs[0]
    assert result is not None
    if result.numel <= operand.numel:
        return [product]
    return [product, call("sum", [result], operand)]


def _convolution(forward: AtenCall, needs: tuple[bool, ...]) -> list[AtenCall]:
    x, weight, bias = forward.inputs[:3]
    assert isinstance(x, OnnxTensor)
    # aten::convolution_backward returns input, weight and bias gradients; a convolution without
    # bias has two operands.
    mask = [bool(need) for need in (*needs, False, False)[:3]]
    results = [
        operand if wanted and isinstance(operand, OnnxTensor) else None
        for operand, wanted in zip((x, weight, bias), mask, strict=True)
    ]
    sizes = list(bias.shape) if isinstance(bias, OnnxTensor) else None
    arguments: list[Argument] = [_out(forward), x, weight, sizes, *forward.inputs[3:], list(mask)]
    return [call("convolution_backward", arguments, *results)]


def _norm(name: str) -> Backward:
    def rule(forward: AtenCall, needs: tuple[bool, ...]) -> list[AtenCall]:
        operands = _tensors(forward)
        wanted = [x if need else None for x, need in zip(operands, needs, strict=False)]
        return [call(name, [_out(forward), *operands], *wanted)]

    return rule


def _from_saved(name: str) -> Backward:
    """Return the rule of an operator whose backward reads one saved tensor."""
    return lambda forward, _: [
        call(name, [_out(forward), _tensors(forward)[0]], _tensors(forward)[0])
    ]


def _chain_rule(forward: AtenCall, needs: tuple[bool, ...]) -> list[AtenCall]:
    """Differentiate y = f(x): the gradient times the derivative, one pass per operand."""
    return _elementwise(forward, needs, per_operand=1)


def _power(forward: AtenCall, needs: tuple[bool, ...]) -> list[AtenCall]:
    return _elementwise(forward, needs, per_operand=2)


def _elementwise(forward: AtenCall, needs: tuple[bool, ...], *, per_operand: int) -> list[AtenCall]:
    grad = _out(forward)
    calls: list[AtenCall] = []
    for operand, need in zip(_tensors(forward), needs, strict=False):
        if need:
            calls += [call("mul", [grad, grad], grad)] * per_operand
            if operand.numel < grad.numel:
                calls.append(call("sum", [grad], operand))
    return calls


def _sum(forward: AtenCall, needs: tuple[bool, ...]) -> list[AtenCall]:
    """Differentiate a sum: the gradient itself, summed over broadcast axes."""
    return _elementwise(forward, needs, per_operand=0)


def _selection(forward: AtenCall, needs: tuple[bool, ...]) -> list[AtenCall]:
    grad = _out(forward)
    calls: list[AtenCall] = []
    for operand, need in zip(_tensors(forward), needs, strict=False):
        if need and operand.floating:
            calls.append(call("where", [operand.like(*grad.shape), grad, grad], grad))
            if operand.numel < grad.numel:
                calls.append(call("sum", [grad], operand))
    return calls


def _moved(name: str) -> Backward:
    """Return the rule of an operator whose gradient is moved back into the operand's shape."""
    return lambda forward, needs: (
        [call(name, [_out(forward)], _tensors(forward)[0])] if any(needs) else []
    )


def _nothing(*_: object) -> list[AtenCall]:
    return []


def _embedding(forward: AtenCall, _: tuple[bool, ...]) -> list[AtenCall]:
    # PyTorch's gradient of a weight is dense: as large as the table, whatever the number of tokens.
    table, index = _tensors(forward)
    return [call("embedding_dense_backward", [_out(forward), index], table)]


def _indexed(name: str) -> Backward:
    def rule(forward: AtenCall, _: tuple[bool, ...]) -> list[AtenCall]:
        source, *indices = forward.inputs
        return [call(name, [source, *indices, _out(forward)], _tensors(forward)[0])]

    return rule


def _attention(forward: AtenCall, _: tuple[bool, ...]) -> list[AtenCall]:
    q, k, v, _drop, causal = forward.inputs
    assert isinstance(q, OnnxTensor)
    assert isinstance(k, OnnxTensor)
    assert isinstance(v, OnnxTensor)
    out = _out(forward)
    # The forward saves a log-sum-exp per query row, in float32 whatever the inputs' type.
    statistics = OnnxTensor(q.shape[:3], "FLOAT")
    arguments: list[Argument] = [
        # In the order of the operator's schema: grad_out, query, key, value, out, logsumexp,
        # cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal.
        *(out, q, k, v, out, statistics, None, None, q.shape[2], k.shape[2], 0.0, causal)
    ]
    return [call("_scaled_dot_product_flash_attention_backward", arguments, q, k, v)]


def _loss(forward: AtenCall, _: tuple[bool, ...]) -> list[AtenCall]:
    scores, labels = _tensors(forward)[:2]
    return [call("nll_loss_backward", [_out(forward), scores, labels], scores)]


_RULES: dict[str, Backward] = {
    **dict.fromkeys(["mm", "bmm", "matmul", "addmm"], _product),
    "convolution": _convolution,
    "native_layer_norm": _norm("native_layer_norm_backward"),
    "_fused_rms_norm": _norm("_fused_rms_norm_backward"),
    "native_batch_norm": _norm("native_batch_norm_backward"),
    "native_group_norm": _norm("native_group_norm_backward"),
    **{
        name: _from_saved(backward)
        for name, backward in {
            "_softmax": "_softmax_backward_data",
            "_log_softmax": "_log_softmax_backward_data",
            "gelu": "gelu_backward",
            "silu": "silu_backward",
            "mish": "mish_backward",
            "relu": "threshold_backward",
            "threshold": "threshold_backward",
            "tanh": "tanh_backward",
            "sigmoid": "sigmoid_backward",
            "leaky_relu": "leaky_relu_backward",
            "elu": "elu_backward",
            "celu": "elu_backward",
            "selu": "elu_backward",
            "softplus": "softplus_backward",
            "hardswish": "hardswish_backward",
            "hardsigmoid": "hardsigmoid_backward",
            "avg_pool2d": "avg_pool2d_backward",
            "max_pool2d_with_indices": "max_pool2d_with_indices_backward",
            "upsample_nearest2d": "upsample_nearest2d_backward",
        }.items()
    },
    **dict.fromkeys(
        """abs neg exp log sqrt reciprocal sin cos tan asin acos atan sinh cosh erf mul div
        _prelu_kernel mean norm linalg_vector_norm amax amin prod logsumexp var""".split(),
        _chain_rule,
    ),
    "pow": _power,
    **dict.fromkeys(["add", "sub", "sum"], _sum),
    **dict.fromkeys(["where", "maximum", "minimum", "clamp"], _selection),
    **dict.fromkeys(["_to_copy", "tril", "cumsum", "flip", "pixel_shuffle"], _moved("copy_")),
    **dict.fromkeys(["repeat", "expand"], _moved("sum")),
    **dict.fromkeys(["slice", "select"], _moved("slice_backward")),
    **dict.fromkeys(["cat", "constant_pad_nd", "view", "clone"], _nothing),
    "embedding": _embedding,
    "index_select": _indexed("index_add"),
    "gather": _indexed("scatter_add"),
    "index": _indexed("index_put"),
    "_scaled_dot_product_flash_attention": _attention,
    "nll_loss_forward": _loss,
}

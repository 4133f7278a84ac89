"""What ONNX operators that are built on matrix products call."""

from math import prod
from typing import Any

from onerank.converters.onnx.calls import Argument, Call, call
from onerank.converters.onnx.model import Tensor
from onerank.converters.onnx.site import Rule, Site


def matmul_of(site: Site) -> list[Call]:
    left, right = site.tensor(0), site.tensor(1)
    return [matmul(left, right, site.out)]


def matmul(left: Tensor, right: Tensor, out: Tensor) -> Call:
    """Return the product as PyTorch launches it: folded to two axes where `right` has no batch."""
    if len(left.shape) >= 2 and len(right.shape) == 2:
        rows = left.like(prod(left.shape[:-1]), left.shape[-1])
        return call("mm", [rows, right], out.like(rows.shape[0], right.shape[-1]))
    if 2 < len(left.shape) == len(right.shape) and left.shape[:-2] == right.shape[:-2]:
        batch = prod(left.shape[:-2])
        sides = [side.like(batch, *side.shape[-2:]) for side in (left, right)]
        return call("bmm", [*sides], out.like(batch, *out.shape[-2:]))
    return call("matmul", [left, right], out)


def gemm(site: Site) -> list[Call]:
    left, right, bias = site.tensor(0), site.tensor(1), site.optional(2)
    if site.attributes.get("transA"):
        left = left.like(*reversed(left.shape))
    if site.attributes.get("transB"):
        right = right.like(*reversed(right.shape))
    if bias is None:
        return [call("mm", [left, right], site.out)]
    return [call("addmm", [bias, left, right], site.out)]


def einsum(site: Site) -> list[Call] | None:
    """Return the batched product that a two-operand equation is."""
    equation = site.attributes["equation"]
    equation = (equation.decode() if isinstance(equation, bytes) else equation).replace(" ", "")
    terms, arrow, result = equation.partition("->")
    operands = terms.split(",")
    if "." in equation or not arrow or len(operands) != 2:
        return [call("einsum", [*site.inputs], site.out)]
    left, right = operands
    size = {
        axis: length
        for term, tensor in zip(operands, site.given, strict=True)
        for axis, length in zip(term, tensor.shape, strict=True)
    }
    batch = prod(size[a] for a in size if a in left and a in right and a in result)
    inner = prod(size[a] for a in size if a in left and a in right and a not in result)
    rows = prod(size[a] for a in size if a in left and a not in right)
    columns = prod(size[a] for a in size if a in right and a not in left)
    x, y = site.given
    product = call("bmm", [x.like(batch, rows, inner), y.like(batch, inner, columns)],
                   site.out.like(batch, rows, columns))  # fmt: skip
    return [product]


def convolution(*, transposed: bool) -> Rule:
    def rule(site: Site) -> list[Call]:
        x, weight = site.tensor(0), site.tensor(1)
        axes = len(x.shape) - 2
        get = site.attributes.get
        pads = list(get("pads", [0] * (2 * axes)))[:axes]
        arguments: list[Argument] = [
            *(x, weight, site.optional(2)),
            *(list(get("strides", [1] * axes)), pads, list(get("dilations", [1] * axes))),
            *(transposed, list(get("output_padding", [0] * axes)), int(get("group", 1))),
        ]
        return [call("convolution", arguments, site.out)]

    return rule


def integer_convolution(site: Site) -> list[Call]:
    quantised = site.op == "QLinearConv"  # x, scale, zero point, weight ...
    x, weight = site.tensor(0), site.tensor(3 if quantised else 1)
    return [call("_slow_conv2d_forward", [x, weight], site.out)]


def attention(site: Site) -> list[Call]:
    """Return ONNX's own Attention: Q, K, V as [b, h, s, d], or [b, s, h * d]."""
    heads = site.attributes.get("q_num_heads"), site.attributes.get("kv_num_heads")
    q = _by_head(site.tensor(0), heads[0])
    k = _by_head(site.tensor(1), heads[1])
    v = _by_head(site.tensor(2), heads[1])
    past = site.optional(4)
    if past is not None:
        k = k.like(*k.shape[:2], k.shape[2] + past.shape[2], k.shape[3])
        v = v.like(*v.shape[:2], v.shape[2] + past.shape[2], v.shape[3])
    causal = bool(site.attributes.get("is_causal", 0))
    return [_attend(q, k, v, causal=causal)]


def _by_head(x: Tensor, heads: Any) -> Tensor:
    if len(x.shape) == 4 or not heads:
        return x
    batch, length, width = x.shape
    return x.like(batch, int(heads), length, width // int(heads))


def _attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Call:
    arguments: list[Argument] = [q, k, v, 0.0, causal]
    out = q.like(*q.shape[:3], v.shape[-1])
    return call("_scaled_dot_product_flash_attention", arguments, out)


def multi_head(site: Site) -> list[Call] | None:
    """Return com.microsoft's MultiHeadAttention and GroupQueryAttention."""
    heads = site.attributes.get("num_heads")
    pairs = site.attributes.get("kv_num_heads", heads)
    if len(site.given) < 3 or any(len(x.shape) != 3 for x in site.given[:3]):
        return None  # packed projections
    q, k, v = site.given[:3]
    causal = site.op == "GroupQueryAttention" or bool(site.attributes.get("unidirectional"))
    return [_attend(_by_head(q, heads), _by_head(k, pairs), _by_head(v, pairs), causal=causal)]


_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def recurrent(site: Site) -> list[Call]:
    """Return one product for all inputs, then one product and its gates for every step."""
    x, weight = site.tensor(0), site.tensor(1)
    batch_first = bool(site.attributes.get("layout"))
    length, batch = (x.shape[1], x.shape[0]) if batch_first else x.shape[:2]
    directions, width = weight.shape[0], weight.shape[1]
    hidden = width // _GATES[site.op]
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

"""FLOPs of matrix products.

An [m, k] x [k, n] product takes k multiply-adds for each of m*n results: 2*m*n*k FLOPs. Bias, alpha
and beta of addmm and similar operators add at most m*n and are not counted, as is common practice.
"""

from math import prod

from onerank.annotate.op_costs.cost_record import Formula, Work, product
from onerank.annotate.op_costs.operands import Call


def _at(first: int, second: int, *also: int) -> Formula:
    """Return the formula of `[..., m, k] x [..., k, n]` with operands at these positions.

    Bytes read are those of the two and of the operands at `also`; `out` of an out-variant is not
    read.
    """

    def formula(call: Call) -> Work | None:
        left, right = call.tensor(first), call.tensor(second)
        if left is None or right is None:
            return None
        sizes = _matmul_sizes(left.shape, right.shape)
        if sizes is None:
            return None
        flops = 2 * prod(sizes)
        return product(call, left, flops, call.list_bytes(first, second, *also), gemm=sizes)

    return formula


def _matmul_sizes(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return (batch, m, n, k), as torch.matmul reads the shapes; None if they do not fit."""
    if not left or not right:
        return None
    inner = right[-2:][0]
    if left[-1] != inner:
        return None
    columns = right[-1] if len(right) > 1 else 1
    rows = left[-2] if len(left) > 1 else 1
    batch = _broadcast(left[:-2], right[:-2])
    return None if batch is None else (batch, rows, columns, inner)


def _broadcast(left: tuple[int, ...], right: tuple[int, ...]) -> int | None:
    size = max(len(left), len(right))
    pairs = zip((1,) * (size - len(left)) + left, (1,) * (size - len(right)) + right, strict=True)
    sizes = [b if a == 1 else a for a, b in pairs if a == b or 1 in (a, b)]
    return prod(sizes) if len(sizes) == size else None


def _linear(call: Call) -> Work | None:
    """Return the work for x [..., k] and weight [n, k]: 2*n FLOPs per element of x."""
    x, weight = call.tensor(0), call.tensor(1)
    if x is None or weight is None or x.shape[-1:] != weight.shape[-1:]:
        return None
    columns = prod(weight.shape[:-1])
    sizes = (1, prod(x.shape[:-1]), columns, x.shape[-1])
    return product(call, x, 2 * x.numel * columns, call.list_bytes(0, 1, 2), gemm=sizes)


def _grouped_mm(call: Call) -> Work | None:
    """Return the work of experts' GEMMs, whose rows are routed by offsets.

    Every expert's matrix is read.

    [t, k] x [e, k, n]: one expert for each of t rows: 2*t*k*n.
    [m, t] x [t, n]: the inner size t is divided among experts, e results of [m, n]: 2*m*t*n.
    [e, m, k] x [k, t]: one expert for each of t columns: 2*m*k*t.
    [e, m, k] x [e, k, n]: a batched GEMM.
    """
    left, right = call.tensor(0), call.tensor(1)
    if left is None or right is None or left.shape[-1:] != right.shape[-2:-1]:
        return None
    batch = left.shape[0] if len(left.shape) == len(right.shape) == 3 else 1
    return product(call, left, 2 * batch * left.shape[-2] * left.shape[-1] * right.shape[-1])


FORMULAS: dict[str, Formula] = {
    "mm": _at(0, 1),
    "bmm": _at(0, 1),
    "matmul": _at(0, 1),
    "mv": _at(0, 1),
    "dot": _at(0, 1),
    "addmm": _at(1, 2, 0),
    "addmm_": _at(1, 2, 0),
    "_addmm_activation": _at(1, 2, 0),
    "baddbmm": _at(1, 2, 0),
    "baddbmm_": _at(1, 2, 0),
    "addbmm": _at(1, 2, 0),
    "addmv": _at(1, 2, 0),
    "_int_mm": _at(0, 1),
    "_scaled_mm": _at(0, 1, 2, 3, 4, 5),
    "_grouped_mm": _grouped_mm,
    "_scaled_grouped_mm": _grouped_mm,
    "linear": _linear,
    "mkldnn_linear": _linear,
}

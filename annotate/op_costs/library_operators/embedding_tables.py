"""Batched embedding tables of fbgemm_gpu, whose backward updates the rows."""

from math import prod

from onerank.annotate.op_costs.cost_record import Formula, Work, vector_work
from onerank.annotate.op_costs.library_operators.formulas import per_element
from onerank.annotate.op_costs.operands import Call

# fbgemm_gpu's batched tables, whose backward updates the rows: optimizer -> numbers of its state
# for each row; None: for each element of the row.
_TABLE_STATES: dict[str, int | None] = {
    "sgd": 0,
    "rowwise_adagrad": 1,
    "rowwise_adagrad_with_counter": 3,
    "adam": None,
    "lamb": None,
}

# Positions of arguments, in fbgemm_gpu 1.8. Offsets of columns have one number more than tables.
# Lookup: 1 weights, 6 offsets of columns, 10 indices, 11 offsets of bags. Backward: 0 gradient,
# 2 weights, 7 offsets of columns, 12 indices.

# Radix sort of a looked-up row and its place in the batch: bytes that a pass moves, bits it sorts.
_SORTED_BYTES, _SORTED_BITS = 8 + 4, 8

# A row's gradients are summed, squared, and added to its state and to the row.
_UPDATE = 6


def _table_lookup(call: Call) -> Work | None:
    """Return the work of summing the rows of each bag: a row is read for each index."""
    weights, pooled, tables = call.tensor(1), call.output(0), call.numel(6) - 1
    if weights is None or pooled is None or tables < 1:
        return None
    elements = call.numel(10) * pooled.shape[-1] // tables
    read = elements * weights.item_bytes + call.list_bytes(10, 11)
    return vector_work(call, elements, read, pooled.nbytes)


def _table_update(states: int | None) -> Formula:
    """Return the formula of a table's backward, as if all indices were distinct."""

    def formula(call: Call) -> Work | None:
        gradient, weights, tables = call.tensor(0), call.tensor(2), call.numel(7) - 1
        if gradient is None or weights is None or tables < 1 or not gradient.shape[-1]:
            return None
        rows = call.numel(12)
        elements = rows * gradient.shape[-1] // tables
        bits = (prod(weights.shape) * tables // gradient.shape[-1]).bit_length()
        sorted_bytes = rows * _SORTED_BYTES * -(-bits // _SORTED_BITS)
        state = 4 * (2 * elements if states is None else states * rows)
        changed = elements * weights.item_bytes + state + sorted_bytes
        return vector_work(call, _UPDATE * elements, gradient.nbytes + changed, changed)

    return formula


EMBEDDING_TABLES: dict[str, Formula] = (
    {
        # Integers of jagged tensors.
        f"fbgemm::{name}": per_element(0)
        for name in (
            "permute_2D_sparse_data",
            "asynchronous_complete_cumsum",
            "bounds_check_indices",
        )
    }
    | {
        f"fbgemm::split_embedding_codegen_forward_{kind}_pt2_wrapper": _table_lookup
        for kind in ("weighted", "unweighted")
    }
    | {
        f"fbgemm::split_embedding_backward_codegen_{name}_{kind}_pt2_wrapper": _table_update(states)
        for name, states in _TABLE_STATES.items()
        for kind in ("weighted", "unweighted")
    }
)

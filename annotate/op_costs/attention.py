"""FLOPs of scaled dot-product attention in fused kernels.

Forward: scores = Q K^T and out = P V, 2*b*h*sq*sk*(d + dv) FLOPs. Backward recomputes the scores
and has four more GEMMs: dV = P^T dO, dP = dO V^T, dQ = dS K, dK = dS^T Q; 2*b*h*sq*sk*(3*d +
2*dv) FLOPs, 2.5 times the forward for d = dv. The softmax is not counted.

Conventions: `is_causal` halves the count, because kernels skip the masked half of the tiles
(torch's FlopCounterMode does not halve). With fewer queries than keys, FlashAttention aligns the
causal mask with the last key (bottom right): a query sees sk - sq / 2 keys instead of sk / 2. A
window of FlashAttention reduces the count to the pairs inside it, of which a query's own counts as
a half under a causal mask; a mask tensor does not. A block mask of flex attention does: each block
in which the mask is true somewhere counts as a whole. h is the number of query heads: grouped-query
attention (GQA) saves no FLOPs.
"""

from dataclasses import dataclass
from typing import NamedTuple

from onerank.annotate.op_costs.cost_record import (
    LOWER_RIGHT,
    AttentionShape,
    Formula,
    Work,
    matmul_work,
)
from onerank.annotate.op_costs.operands import Call, Tensor
from onerank.annotate.op_costs.packed_lengths import PackedLengths

QUERY_TILE = 128
"""Queries of one head that a thread block of fused attention processes together."""


@dataclass(frozen=True, slots=True)
class AttentionArguments:
    """Positions in an operator's schema of the arguments that determine its cost.

    Attributes:
        query: position of Q; K and V follow.
        causal: position of `is_causal`, or of a custom mask type (0: none, 1 and 2: causal). None:
            a mask is given by a function or a tensor.
        heads_first: [b, h, s, d] rather than [b, s, h, d].
        lengths: position of the query's cumulative lengths; the longest two lengths follow at
            `longest`. None: always a padded batch.
        longest: position of the longest query length.
        key_lengths: position of the keys' cumulative lengths; None: they follow the query's.
        backward: whether it is the backward pass.
        lower_right: whether `is_causal` aligns the mask with the last key (bottom right); a custom
            mask type of 2 does too.
        pairs: position of the number of pairs of a query and a key that are computed, of all
            sequences and heads. None: no argument has it, and `is_causal` decides.
        window: position of the number of keys that a query sees before its own; the number of those
            after its own follows. Only of operators that are `lower_right`. None: no argument has
            them.
        mask: position of the tensor that masks the scores or adds to them. None: no argument has
            it, or its time was not measured.
        dropout: position of the probability of dropping a score. None: no argument has it, or its
            time was not measured.
    """

    query: int
    causal: int | None
    heads_first: bool = True
    lengths: int | None = None
    longest: int = 0
    key_lengths: int | None = None
    backward: bool = False
    lower_right: bool = False
    pairs: int | None = None
    window: int | None = None
    mask: int | None = None
    dropout: int | None = None


class KeyWindow(NamedTuple):
    """The keys that a query sees around its own, by `window_size` of FlashAttention.

    Attributes:
        left: keys before its own.
        right: keys after its own.
    """

    left: int
    right: int

    def pairs(self, rows: int, keys: int) -> int:
        """Return the pairs of a query and a key that it sees, of one sequence and head.

        Args:
            rows: queries; the last one is aligned with the last key.
            keys: keys.
        """
        own = keys - rows  # the key of the first query
        seen = _clipped_sum(own + self.right + 1, rows, keys)
        return seen - _clipped_sum(own - self.left, rows, keys)

    def hidden(self, rows: int, keys: int) -> int:
        """Return how many keys no query sees; arguments as for `pairs`."""
        return max(0, keys - rows - self.left)

    def keys_of_tile(self, rows: int, keys: int) -> int:
        """Return the mean number of keys that a tile of queries sees; arguments as for `pairs`."""
        others = min(rows, QUERY_TILE) - 1  # the windows of neighbours differ by one key
        mean = -(-self.pairs(rows, keys) // rows) + others
        return min(self.keys_of_last_tile(rows, keys), mean)

    def keys_of_last_tile(self, rows: int, keys: int) -> int:
        """Return how many keys the last tile of queries sees; arguments as for `pairs`."""
        return min(keys, self.left + min(rows, QUERY_TILE) + self.right)

    def hides(self, rows: int, keys: int, *, causal: bool) -> bool:
        """Return whether it hides a key that a mask, if any, does not; arguments as for `pairs`."""
        return self.left < keys - 1 or (not causal and self.right < rows - 1)


def _clipped_sum(start: int, count: int, most: int) -> int:
    """Return the sum of `count` numbers from `start` on, each clipped to the range 0 to `most`."""

    def below(end: int) -> int:
        inside = min(max(end, 0), most + 1)
        return inside * (inside - 1) // 2 + most * max(0, end - most - 1)

    return below(start + count) - below(start)


@dataclass(frozen=True, slots=True)
class _Mask:
    """The mask of a call, without that of a tensor or a function.

    Attributes:
        flag: `is_causal` or a custom mask type.
        window: of FlashAttention; None if the call has none.
        lower_right: whether a causal mask is aligned with the last key.
    """

    flag: int
    window: KeyWindow | None
    lower_right: bool

    def hides_by_window(self, rows: int, keys: int) -> bool:
        """Return whether the window hides more of a sequence than the flag does."""
        return self.window is not None and self.window.hides(rows, keys, causal=bool(self.flag))

    def alignment(self, rows: int, keys: int) -> int:
        """Return the mask as `AttentionShape.causal`: 0 if a window hides more."""
        if not self.flag or self.hides_by_window(rows, keys):
            return 0
        shifted = keys > rows and (self.lower_right or self.flag == LOWER_RIGHT)
        return LOWER_RIGHT if shifted else 1

    def pairs(self, rows: int, keys: int) -> int:
        """Return twice the pairs of a query and a key that one sequence and head computes."""
        if self.window is not None and self.hides_by_window(rows, keys):
            return 2 * self.window.pairs(rows, keys) - (rows if self.flag else 0)
        # Kernels skip tiles above the diagonal; FlopCounterMode counts them.
        match self.alignment(rows, keys):
            case 0:
                return 2 * rows * keys
            case 1:
                return rows * keys
            case _:
                return rows * (2 * keys - rows)


def window_of_call(call: Call) -> KeyWindow | None:
    """Return the window of a call of attention; None if its operator has no such argument."""
    layout = _LAYOUTS.get(call.op)
    return None if layout is None else _window(layout, call)


def _window(layout: AttentionArguments, call: Call) -> KeyWindow | None:
    """Return the window in the arguments of a call; None if it has none, or no shape of keys."""
    key = call.tensor(layout.query + 1)
    if layout.window is None or layout.causal is None or key is None:
        return None
    limits = [call.value(layout.window + side) for side in (0, 1)]
    # None and negative numbers stand for no limit.
    every = key.numel
    left, right = (n if isinstance(n, int) and n >= 0 else every for n in limits)
    return KeyWindow(left, 0 if call.value(layout.causal) else right)


def attention_formula(layout: AttentionArguments) -> Formula:
    """Return the cost formula of an operator whose arguments have this layout."""

    def formula(call: Call) -> Work | None:
        query, key, value = (call.tensor(layout.query + offset) for offset in range(3))
        causal = False if layout.causal is None else call.value(layout.causal)
        if query is None or key is None or value is None or causal is None:
            return None
        sizes = _sizes(layout, call, query, key)
        if sizes is None:
            return None
        batch, heads, _, rows, columns = sizes
        d, dv = query.shape[-1], value.shape[-1]
        scores = batch * heads * rows * columns
        packed = _lengths_of(layout, call)
        pairs = call.value(layout.pairs) if layout.pairs is not None else None
        if isinstance(pairs, int) and pairs < scores:
            # As if each query had the mean number of keys.
            columns, scores = -(-pairs * columns // scores), pairs
            sizes = (*sizes[:4], columns)
        width = 3 * d + 2 * dv if layout.backward else d + dv
        flag = causal if isinstance(causal, int) else bool(causal)
        mask = _Mask(int(flag), _window(layout, call), lower_right=layout.lower_right)
        if packed is not None:
            twice_pairs = heads * sum(n * mask.pairs(*pair) for pair, n in packed.counts().items())
        elif mask.flag or mask.window is not None:
            twice_pairs = batch * heads * mask.pairs(rows, columns)
        else:
            twice_pairs = 2 * scores
        flops = twice_pairs * width
        masked, bytes_read, of_last_tile = mask.alignment(rows, columns), None, 0
        if mask.hides_by_window(rows, columns) and mask.window is not None:
            unread = (key.nbytes + value.nbytes) * mask.window.hidden(rows, columns) // columns
            bytes_read = call.input_bytes - unread
            # As if each query saw the keys that its tile does, without a mask.
            of_last_tile = mask.window.keys_of_last_tile(rows, columns)
            columns = mask.window.keys_of_tile(rows, columns)
            sizes = (*sizes[:4], columns)
        batch, heads, key_heads, rows, columns = sizes
        if heads == key_heads == 1 and d > dv and not (masked or of_last_tile or layout.backward):
            # Decode of latent attention in a kernel that shares a key among the queries of one
            # head: the queries are the heads of one token, and the value is a part of the key.
            sizes = batch, rows, 1, 1, columns
            bytes_read = call.input_bytes - value.nbytes
        mask_tensor = None if layout.mask is None else call.tensor(layout.mask)
        has_mask = mask_tensor is not None and len(mask_tensor.shape) > 1
        rate = None if layout.dropout is None else call.value(layout.dropout)
        drops = isinstance(rate, float) and rate > 0
        flags = masked, int(layout.backward), of_last_tile, int(has_mask), int(drops)
        shape = AttentionShape(*sizes, d, dv, *flags)
        return matmul_work(call, query, flops, bytes_read, attention=shape)

    return formula


def _sizes(
    layout: AttentionArguments, call: Call, query: Tensor, key: Tensor
) -> tuple[int, int, int, int, int] | None:
    """Return (b, h, key heads, sq, sk); None for packed sequences of unknown lengths."""
    packed = call.tensor(layout.lengths) if layout.lengths is not None else None
    if packed is not None and packed.numel > 1:
        heads = query.shape[-2] if len(query.shape) in (3, 4) else 0
        key_heads = key.shape[-2] if len(key.shape) in (3, 4) else heads
        lengths = _lengths_of(layout, call)
        if lengths is not None:
            sequences, rows, columns = lengths.equal_sequences()
            return sequences, heads, key_heads, rows, columns
        longest_q, longest_k = call.value(layout.longest), call.value(layout.longest + 1)
        # `cu_seqlens` has one boundary more than sequences.
        sequences = packed.numel - 1
        tokens = query.numel // max(1, heads * query.shape[-1])
        if not isinstance(longest_q, int) or not isinstance(longest_k, int):
            return None
        # Lengths on a device are not recorded: they are known only if all sequences are as long as
        # the longest.
        if sequences * longest_q != tokens:
            return None
        return sequences, heads, key_heads, longest_q, longest_k
    if len(query.shape) != 4 or len(key.shape) != 4:
        return None
    batch, second, third, _ = query.shape
    heads, rows = (second, third) if layout.heads_first else (third, second)
    key_heads, columns = key.shape[1:3] if layout.heads_first else (key.shape[2], key.shape[1])
    return batch, heads, key_heads, rows, columns


def _lengths_of(layout: AttentionArguments, call: Call) -> PackedLengths | None:
    return None if layout.lengths is None else PackedLengths.of_values(call.values)


def boundaries_of(op: str) -> tuple[int, int] | None:
    """Return where an operator's schema has the boundaries of packed queries and of packed keys.

    Args:
        op: operator, without overload; with its namespace if the library's is another one.

    Returns:
        None for an operator without them.
    """
    layout = LIBRARY_LAYOUTS.get(op) or _LAYOUTS.get(op.rpartition("::")[2])
    if layout is None or layout.lengths is None:
        return None
    keys = layout.lengths + 1 if layout.key_lengths is None else layout.key_lengths
    return layout.lengths, keys


# Positions as in the schemas of torch 2.13; those that torch 2.11 shares are the same.
_LAYOUTS = {
    # On a GPU FlashAttention aligns a causal mask with the last key (since its version
    # 2.1); its CPU counterpart, cuDNN's and the math kernel align it with the first.
    "_scaled_dot_product_flash_attention": AttentionArguments(0, 4, lower_right=True, dropout=3),
    "_scaled_dot_product_flash_attention_for_cpu": AttentionArguments(0, 4),
    "_scaled_dot_product_efficient_attention": AttentionArguments(0, 6, dropout=5),
    "_scaled_dot_product_cudnn_attention": AttentionArguments(0, 6, mask=3, dropout=5),
    "_scaled_dot_product_fused_attention_overrideable": AttentionArguments(0, 5),
    "_scaled_dot_product_attention_math": AttentionArguments(0, 5),
    "scaled_dot_product_attention": AttentionArguments(0, 5),
    "_scaled_dot_product_flash_attention_backward": AttentionArguments(
        1, 11, backward=True, lower_right=True, dropout=10
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": AttentionArguments(1, 7, backward=True),
    "_scaled_dot_product_efficient_attention_backward": AttentionArguments(
        1, 11, backward=True, dropout=9
    ),
    "_scaled_dot_product_cudnn_attention_backward": AttentionArguments(
        1, 14, backward=True, mask=8, dropout=13
    ),
    "_flash_attention_forward": AttentionArguments(
        0, 8, heads_first=False, lengths=3, longest=5, lower_right=True, window=11, dropout=7
    ),
    "_flash_attention_backward": AttentionArguments(
        1,
        11,
        heads_first=False,
        lengths=6,
        longest=8,
        backward=True,
        lower_right=True,
        window=15,
        dropout=10,
    ),
    "_efficient_attention_forward": AttentionArguments(
        0, 9, heads_first=False, lengths=4, longest=6, dropout=8
    ),
    "_efficient_attention_backward": AttentionArguments(
        1, 14, heads_first=False, lengths=6, longest=8, backward=True, dropout=11
    ),
    "_cudnn_attention_forward": AttentionArguments(0, 10, lengths=4, longest=6, mask=3, dropout=9),
    "_cudnn_attention_backward": AttentionArguments(
        1, 14, lengths=9, longest=11, backward=True, mask=8, dropout=13
    ),
    # Higher-order operators; a capture without a device adds the number of pairs.
    "flex_attention": AttentionArguments(0, None, pairs=9),
    "flex_attention_backward": AttentionArguments(0, None, backward=True, pairs=14),
    # Operators of the flash_attn package, 2.7 and 2.8 (flash_attn_interface.py).
    "_flash_attn_forward": AttentionArguments(0, 5, heads_first=False, lower_right=True, window=6),
    "_flash_attn_backward": AttentionArguments(
        1, 11, heads_first=False, backward=True, lower_right=True, window=12
    ),
    "_flash_attn_varlen_forward": AttentionArguments(
        0, 9, heads_first=False, lengths=3, longest=5, lower_right=True, window=10
    ),
    "_flash_attn_varlen_backward": AttentionArguments(
        1, 15, heads_first=False, lengths=9, longest=11, backward=True, lower_right=True, window=16
    ),
}

LIBRARY_LAYOUTS = {
    # The operators that launch the kernels, at 0251105a (hopper/flash_api.cpp).
    "flash_attn_3::fwd": AttentionArguments(
        0, 24, heads_first=False, lengths=7, longest=12, lower_right=True, window=25
    ),
    "flash_attn_3::bwd": AttentionArguments(
        1, 16, heads_first=False, lengths=9, longest=13, backward=True, lower_right=True, window=17
    ),
    "flash_attn_3::_flash_attn_forward": AttentionArguments(
        0, 24, heads_first=False, lengths=7, longest=12, lower_right=True, window=25
    ),
    "flash_attn_3::_flash_attn_backward": AttentionArguments(
        1, 16, heads_first=False, lengths=6, longest=10, backward=True, lower_right=True, window=17
    ),
    "transformer_engine::fused_attn_fwd": AttentionArguments(
        0, 3, heads_first=False, lengths=4, longest=5, key_lengths=7
    ),
    "transformer_engine::fused_attn_bwd": AttentionArguments(
        0, 3, heads_first=False, lengths=4, longest=5, key_lengths=7, backward=True
    ),
}
"""Layouts by full name of operators that share their name without namespace with others."""

FORMULAS: dict[str, Formula] = {
    name: attention_formula(layout) for name, layout in _LAYOUTS.items()
}

NEED_VALUES = frozenset(FORMULAS)
"""Operators whose cost depends on argument values in addition to shapes."""


def causal_position(op: str) -> int:
    """Return where an operator's schema has `is_causal`, by base name; 0 for any other operator."""
    return (_LAYOUTS[op].causal or 0) if op in _LAYOUTS else 0

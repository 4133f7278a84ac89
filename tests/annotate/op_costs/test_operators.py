"""FLOPs and bytes of single calls, with the arithmetic next to them."""

import json
from math import prod
from typing import Any

import pytest
import torch
from raised import raises_code
from torch.profiler import ExecutionTraceObserver

from onerank.annotate import load_gpu
from onerank.annotate.op_costs.cost_record import AttentionShape
from onerank.annotate.op_costs.node_costs import work_of
from onerank.ir import UNKNOWN
from onerank.ir.dtypes import DTYPES

BF16, F32, I64 = "Tensor(c10::BFloat16)", "Tensor(float)", "Tensor(long int)"
NONE = ("None", [])


def record(op: str, inputs: list[tuple[str, Any]], outputs: list[tuple[str, Any]], values=()):
    def columns(operands: list[tuple[str, Any]]) -> tuple[str, str]:
        shapes, types = [shape for _, shape in operands], [kind for kind, _ in operands]
        return json.dumps(shapes), json.dumps(types)

    return work_of(f"aten::{op}", columns(inputs), columns(outputs), json.dumps(list(values)))


def work(op: str, inputs: list[tuple[str, Any]], outputs: list[tuple[str, Any]] = [], values=()):  # noqa: B006
    cost = record(op, inputs, outputs, values)
    return cost.flops, cost.bytes_read, cost.bytes_written


def test_mm_8192_4096_4096():
    m, n, k = 8192, 4096, 4096
    assert work("mm", [(BF16, [m, k]), (BF16, [k, n])], [(BF16, [m, n])]) == (
        274_877_906_944,  # 2 * 8192 * 4096 * 4096
        2 * (33_554_432 + 16_777_216),
        2 * 33_554_432,
    )


def test_a_product_of_vectors():
    for op in ("dot", "vdot"):
        assert work(op, [(F32, [1536]), (F32, [1536])], [(F32, [])]) == (3072, 12288, 4)


def test_gathered_statistics_of_a_batch_norm_do_not_read_its_input():
    """Of 8 ranks and 16 channels: means, inverse deviations, running ones, counts."""
    statistics = [(F32, [8, 16]), (F32, [8, 16]), (F32, [16]), (F32, [16])]
    inputs = [(F32, [32, 16, 56, 56]), *statistics, ("Double", []), ("Double", []), (F32, [8])]
    assert work("batch_norm_gather_stats_with_counts", inputs, [(F32, [16]), (F32, [16])]) == (
        7 * 128,
        4 * (128 + 128 + 16 + 16 + 8),
        4 * (16 + 16 + 16 + 16),
    )


ROWS, COLUMNS, HALF_ROWS = [4096, 1], [1, 4096], [8192, 1]


@pytest.mark.parametrize(
    ("op", "strides", "per_cycle"),
    [
        ("copy_", [ROWS, ROWS], None),
        ("copy_", [ROWS, COLUMNS], 0.5),  # a transposition
        ("copy_", [COLUMNS, COLUMNS], None),  # both are dense in the same order
        ("copy_", [ROWS, HALF_ROWS], 1.34),  # from half of each row
        ("mul", [COLUMNS, COLUMNS], None),
        ("mul", [ROWS, COLUMNS], 0.5),
        ("neg", [COLUMNS], None),  # the result has the operand's order
        ("neg", [HALF_ROWS], 1.34),
        ("neg", [[0, 1]], 2.0),  # expanded
        ("copy_", [COLUMNS, [0, 1]], 2.0),
        ("neg", [[1]], None),  # not the strides of this shape: ignored
    ],
)
def test_operands_of_unequal_strides_are_addressed_one_by_one(op, strides, per_cycle):
    shapes = json.dumps([[4096, 4096]] * len(strides))
    types = json.dumps([BF16] * len(strides))
    result = (json.dumps([[4096, 4096]]), json.dumps([BF16]))
    cycles = work_of(f"aten::{op}", (shapes, types), result, strides=json.dumps(strides)).cycles
    assert cycles == pytest.approx(4096 * 4096 / per_cycle if per_cycle else 0)


@pytest.mark.parametrize(
    ("columns", "per_cycle"), [(4, 1.3056), (64, 0.9437), (256, 0.5), (1024, 0.5)]
)
def test_transposed_copies_into_narrow_rows_use_more_of_a_sector(columns, per_cycle):
    shape = [4096, columns]
    operands = json.dumps([shape] * 2), json.dumps([BF16] * 2)
    result, strides = (json.dumps([shape]), json.dumps([BF16])), [[columns, 1], [1, 4096]]
    cycles = work_of("aten::copy_", operands, result, strides=json.dumps(strides)).cycles
    assert cycles == pytest.approx(4096 * columns / per_cycle, rel=1e-4)


def test_a_copy_of_three_axes_without_strides_permutes_and_elementwise_kernels_may():
    def cost(op: str, shape: list[int], strides: str = "", dtype: str = BF16):
        operands = (json.dumps([shape] * 2), json.dumps([dtype, BF16]))
        return work_of(
            f"aten::{op}", operands, (json.dumps([shape]), json.dumps([dtype])), strides=strides
        )

    heads, rows = [1, 32, 4096, 128], [4096, 4096]
    permuted = cost("copy_", heads)
    assert permuted.unknown_layout
    assert permuted.cycles == pytest.approx(4096 * 4096 / 1.34)
    assert (cost("mul", heads).unknown_layout, cost("mul", heads).cycles) == (True, 0)
    for known in (cost("copy_", rows), cost("mul", heads, strides="dense"), cost("cat", heads)):
        assert not known.unknown_layout


@pytest.mark.parametrize(
    ("size", "code", "names"),
    [
        (-8, "operands-unreadable", ("mm", "size of -8")),
        (2**40, "cost-too-large", ("aten::mm", "2.66e+36", "2.31e+18")),
    ],
)
def test_sizes_that_no_tensor_has_are_refused(size: int, code: str, names: tuple[str, ...]):
    with raises_code(code, naming=names):
        work("mm", [(BF16, [size, size]), (BF16, [size, size])])


def test_out_variant_does_not_read_its_result():
    inputs = [(BF16, [4, 3]), (BF16, [3, 5])]
    assert work("mm", [*inputs, (BF16, [4, 5])], [(BF16, [4, 5])]) == work(
        "mm", inputs, [(BF16, [4, 5])]
    )


def test_products_with_bias_and_batch():
    addmm = [(F32, [5]), (F32, [3, 4]), (F32, [4, 5]), ("Int", []), ("Int", [])]
    assert work("addmm", addmm, [(F32, [3, 5])]) == (2 * 3 * 4 * 5, 4 * (5 + 12 + 20), 4 * 15)
    bmm = [(F32, [2, 3, 4]), (F32, [2, 4, 5])]
    assert work("bmm", bmm, [(F32, [2, 3, 5])])[0] == 2 * 2 * 3 * 4 * 5
    matmul = [(F32, [7, 1, 3, 4]), (F32, [2, 4, 5])]
    assert work("matmul", matmul, [(F32, [7, 2, 3, 5])])[0] == 7 * 2 * 2 * 3 * 4 * 5
    linear = [(F32, [2, 3, 4]), (F32, [5, 4]), (F32, [5])]
    assert work("linear", linear, [(F32, [2, 3, 5])])[0] == 2 * 6 * 4 * 5


@pytest.mark.parametrize(
    ("left", "right", "result", "flops", "gemm", "read"),
    [
        ([32, 16], [4, 16, 8], [32, 8], 2 * 32 * 16 * 8, (4, 8, 8, 16), 32 * 16 + 4 * 16 * 8),
        # Three rows of four experts: the fourth's matrix is not read.
        ([3, 16], [4, 16, 8], [3, 8], 2 * 3 * 16 * 8, (3, 1, 8, 16), 3 * 16 + 3 * 16 * 8),
        ([8, 32], [32, 16], [4, 8, 16], 2 * 8 * 32 * 16, (4, 8, 16, 8), 8 * 32 + 32 * 16),
        ([4, 8, 16], [16, 32], [8, 32], 2 * 8 * 16 * 32, (4, 8, 8, 16), 4 * 8 * 16 + 16 * 32),
        ([4, 8, 16], [4, 16, 9], [4, 8, 9], 4 * 2 * 8 * 16 * 9, (4, 8, 9, 16), 4 * 16 * (8 + 9)),
    ],
)
def test_grouped_mm(left, right, result, flops, gemm, read):  # noqa: PLR0917
    inputs = [(BF16, left), (BF16, right), ("Tensor(int)", [4])]
    cost = record("_grouped_mm", inputs, [(BF16, result)])
    offsets_bytes = 4 * 4
    assert (cost.flops, cost.bytes_read - offsets_bytes) == (flops, 2 * read)
    assert [part[:4] for part in cost.parts] == [gemm]


def test_convolution_forward_and_backward():
    # 256 results, each 2 (in/groups) x 3 x 3 multiply-adds
    x, weight, out = (F32, [2, 4, 9, 9]), (F32, [8, 2, 3, 3]), (F32, [2, 8, 4, 4])
    more = [("None", [])] + [("GenericList[Int,Int]", [[], []])] * 3
    rest = [("Bool", []), ("GenericList[Int,Int]", [[], []]), ("Int", [])]
    values = [None, None, None, [2, 2], [0, 0], [1, 1], False, [0, 0], 2]
    assert work("convolution", [x, weight, *more, *rest], [out], values)[0] == 2 * 256 * 18
    mask = ("GenericList[Bool,Bool,Bool]", [[], [], []])
    backward = [out, x, weight, *more, *rest, mask]
    values = [None, None, None, None, [2, 2], [0, 0], [1, 1], False, [0, 0], 2, [True, True, False]]
    both = work("convolution_backward", backward, [x, weight, NONE], values)[0]
    assert both == 2 * (2 * 256 * 18)
    one = work("convolution_backward", backward, [NONE, weight, NONE], values)[0]
    assert one == 2 * 256 * 18


QKV = [(BF16, [2, 8, 128, 64]), (BF16, [2, 2, 128, 64]), (BF16, [2, 2, 128, 64])]
FULL = 2 * 2 * 8 * 128 * 128 * (64 + 64)  # 2 products, 2 FLOPs, b*h*sq*sk, d and dv


@pytest.mark.parametrize(("causal", "flops"), [(False, FULL), (True, FULL // 2)])
def test_flash_attention(causal: bool, flops: int):
    inputs = [*QKV, ("Double", []), ("Bool", []), ("Bool", []), NONE]
    values = [None, None, None, 0.0, causal, False, None]
    out = [QKV[0], (F32, [2, 8, 128])]
    found = work("_scaled_dot_product_flash_attention", inputs, out, values)
    q, kv, lse = 2 * 8 * 128 * 64 * 2, 2 * 2 * 128 * 64 * 2, 2 * 8 * 128 * 4
    assert found == (flops, q + 2 * kv, q + lse)


def test_the_last_queries_of_a_sequence_see_all_keys_before_them():
    part = (BF16, [2, 8, 32, 64])  # the last 32 of 128 positions
    inputs = [part, *QKV[1:], ("Double", []), ("Bool", []), ("Bool", []), NONE]
    values = [None, None, None, 0.0, True, False, None]
    found = work("_scaled_dot_product_flash_attention", inputs, [part], values)[0]
    triangle = 32 * 32 // 2
    assert found == 2 * 2 * 8 * (32 * 96 + triangle) * (64 + 64)


@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize("mask", [NONE, (BF16, [2, 1, 128, 128])])
def test_attention_of_cudnn_has_the_mask_and_the_dropout_that_its_operator_takes(mask, rate):
    values = [None] * 9 + [rate, False]
    found = record("_cudnn_attention_forward", [*QKV, mask], QKV[:1], values)
    assert found.attention is not None
    assert found.attention.mask == (mask is not NONE)
    assert found.attention.dropout == (rate > 0)


def test_decode_of_latent_attention_is_the_same_by_torchs_kernel():
    """Heads of a token that are the queries of one head, and the operator of `capture serve`."""
    b, h, keys, d, dv = 4, 16, 1000, 576, 512
    queries, vectors, values = (BF16, [b, h, d]), (BF16, [b, keys, d]), (BF16, [b, keys, dv])
    operands = queries, vectors, values, ("Double", [])
    texts = json.dumps([shape for _, shape in operands]), json.dumps([kind for kind, _ in operands])
    served = work_of("onerank_serving::latent_attention", texts, ("[[4,16,512]]", f'["{BF16}"]'))
    assert served.attention == AttentionShape(b, h, 1, 1, keys, d, dv, causal=0, backward=0)
    # Values are the leading part of the vectors.
    assert (served.flops, served.bytes_read, served.bytes_written) == (
        2 * b * h * keys * (d + dv),
        2 * b * (h + keys) * d,
        2 * b * h * dv,
    )
    inputs = [(kind, [b, rows, 1, size]) for kind, (_, rows, size) in (queries, vectors, values)]
    inputs += [NONE] * 5 + [("Double", []), ("Int", []), ("Bool", [])]
    by_torch = record(
        "_efficient_attention_forward",
        inputs,
        [(BF16, [b, h, 1, dv])],
        [None] * 8 + [0.0, 0, False],
    )
    assert by_torch == served


def test_flash_attention_backward_is_five_products():
    grad, lse = QKV[0], (F32, [2, 8, 128])
    undefined = ("Tensor(nullptr (uninitialized))", [])
    inputs = [grad, *QKV, QKV[0], lse, undefined, undefined, ("Int", []), ("Int", [])]
    inputs += [("Double", []), ("Bool", [])]
    values = [None] * 8 + [128, 128, 0.0, False]
    name = "_scaled_dot_product_flash_attention_backward"
    assert work(name, inputs, QKV, values)[0] == FULL * 5 // 2


def test_packed_attention_needs_equal_lengths():
    # [tokens, heads, d]; 4 sequences: their lengths are on the device
    packed = [(BF16, [512, 8, 64])] * 3
    inputs = [*packed, ("Tensor(int)", [5]), ("Tensor(int)", [5]), ("Int", []), ("Int", [])]
    inputs += [("Double", []), ("Bool", [])]
    values = [None] * 5 + [128, 128, 0.0, False]
    out = [packed[0]]
    even = work("_flash_attention_forward", inputs, out, values)[0]
    assert even == 2 * 4 * 8 * 128 * 128 * (64 + 64)
    values[5] = values[6] = 200
    assert work("_flash_attention_forward", inputs, out, values)[0] == UNKNOWN


INT, NO_TENSOR = ("Int", []), ("None", [])


@pytest.mark.parametrize(
    ("causal", "left", "right", "pairs"),
    [
        # Queries 96 to 127 of 128: without a limit, and with a window of 9 keys or more.
        (True, None, None, 32 * 96 + 32 * 16),
        (True, -1, -1, 32 * 96 + 32 * 16),
        (True, 127, 0, 32 * 96 + 32 * 16),
        (True, 8, 0, 32 * 8.5),
        # A causal mask overrides the limit to the right.
        (True, 8, 5, 32 * 8.5),
        (False, 8, 0, 32 * 9),
        # The last queries have no keys after them.
        (False, 8, 2, 32 * 11 - 2 - 1),
        (False, None, 0, 32 * 96 + 32 * 33 / 2),
    ],
)
def test_a_window_of_flash_attention(
    causal: bool, left: int | None, right: int | None, pairs: float
):
    query, key = (BF16, [2, 32, 8, 64]), (BF16, [2, 128, 2, 64])
    inputs = [query, key, key, NO_TENSOR, NO_TENSOR, INT, INT, ("Double", []), ("Bool", [])]
    inputs += [("Bool", []), NO_TENSOR, INT, INT]
    values = [None] * 5 + [32, 128, 0.0, causal, False, None, left, right]
    flops, read, _ = work("_flash_attention_forward", inputs, [query], values)
    assert flops == 2 * 2 * 8 * pairs * (64 + 64)
    keys = 128 if left is None or left in (-1, 127) else 32 + left
    assert read == 2 * (32 * 8 + 2 * keys * 2) * 64 * 2


def test_windows_of_other_operators_of_flash_attention():
    """Two sequences of 64 tokens that see 8 keys before their own: 9 * 4.5 + 55 * 8.5 pairs."""
    packed, ends = (BF16, [128, 8, 32]), ("Tensor(int)", [3])
    whole, lse = (BF16, [2, 64, 8, 32]), (F32, [2, 8, 64])
    pairs = 9 * 4.5 + 55 * 8.5
    forward, backward = (round(2 * 2 * 8 * pairs * n * 32) for n in (2, 5))
    none, sizes = NO_TENSOR, [INT, INT]
    for name, inputs, values, flops in (
        ("_flash_attn_forward", [whole] * 3, [0.0, 0.1, True, 8, 0], forward),
        ("_flash_attn_varlen_forward", [packed] * 3 + [ends] * 2 + sizes,
         [64, 64, 0.0, 0.1, True, 8, 0], forward),
        ("_flash_attn_backward", [whole] * 5 + [lse] + [whole] * 3,
         [0.0, 0.1, True, 8, 0], backward),
        ("_flash_attn_varlen_backward", [packed] * 5 + [lse] + [packed] * 3 + [ends] * 2 + sizes,
         [64, 64, 0.0, 0.1, True, 8, 0], backward),
        ("_flash_attention_backward",
         [whole] * 5 + [lse, none, none, *sizes, INT, INT, none, none, none],
         [64, 64, 0.0, True, None, None, None, 8, 0], backward),
    ):  # fmt: skip
        ahead = sum(1 for kind, _ in inputs if kind not in ("Int",))
        if name == "_flash_attention_backward":
            ahead = 8
        given = [None] * ahead + values
        rest = [INT] * (len(given) - len(inputs))
        assert work(name, [*inputs, *rest], [whole], given)[0] == flops, name


def test_the_flash_attn_package_has_its_schemas():
    """Heads come after the sequence, as in `_flash_attn_forward(q, k, v, dropout_p, ...)`."""
    query, key = (BF16, [2, 64, 8, 32]), (BF16, [2, 64, 2, 32])
    rest = [("Double", []), ("Double", []), ("Bool", [])]
    forward = [None] * 3 + [0.0, 0.1, False]
    products = 2 * 2 * 8 * 64 * 64 * (32 + 32)
    assert work("_flash_attn_forward", [query, key, key, *rest], [query], forward)[0] == products
    forward[5] = True
    assert (
        work("_flash_attn_forward", [query, key, key, *rest], [query], forward)[0] == products // 2
    )
    lse = (F32, [2, 8, 64])
    inputs = [query, query, key, key, query, lse, query, key, key, *rest]
    backward = [None] * 9 + [0.0, 0.1, False]
    assert work("_flash_attn_backward", inputs, [lse], backward)[0] == products * 5 // 2


def test_packed_sequences_of_the_flash_attn_package():
    """Two sequences of 64 tokens, as in `_flash_attn_varlen_forward(q, k, v, cu_q, cu_k, ...)`."""
    query, key, ends = (BF16, [128, 8, 32]), (BF16, [128, 2, 32]), ("Tensor(int)", [3])
    rest = [("Int", []), ("Int", []), ("Double", []), ("Double", []), ("Bool", [])]
    products = 2 * 2 * 8 * 64 * 64 * (32 + 32)
    inputs = [query, key, key, ends, ends, *rest]
    forward = [None] * 5 + [64, 64, 0.0, 0.1, False]
    assert work("_flash_attn_varlen_forward", inputs, [query], forward)[0] == products
    lse = (F32, [8, 128])
    inputs = [query, query, key, key, query, lse, query, key, key, ends, ends, *rest]
    backward = [None] * 11 + [64, 64, 0.0, 0.1, True]
    causal = products // 2 * 5 // 2
    assert work("_flash_attn_varlen_backward", inputs, [lse], backward)[0] == causal


def test_flash_attention_with_the_state_of_its_random_numbers():
    """Results as torch 2.11 records them: output, logsumexp, seed and offset, both unsigned."""
    query, key = (BF16, [1, 1024, 32, 128]), (BF16, [1, 4096, 8, 128])
    inputs = [query, key, key, ("None", []), ("None", []), ("Int", []), ("Int", [])]
    inputs += [("Double", []), ("Bool", []), ("Bool", [])]
    seed = "Tensor(long unsigned int)"
    out = [query, (F32, [1, 32, 1024]), (seed, [2]), (seed, [])]
    values = [None] * 5 + [1024, 4096, 0.0, True, False]
    found = work("_flash_attention_forward", inputs, out, values)
    # 1024 queries of the last keys see 4096 - 1024 / 2 each
    assert found[0] == 2 * 32 * 1024 * (4096 - 512) * (128 + 128)


def test_every_type_of_torch_has_the_name_that_it_is_recorded_with(tmp_path):
    """Names are the compiler's, so that they differ from those of C++'s own headers."""
    supported = [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16,
            torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
            torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.complex64,
            torch.bool]  # fmt: skip
    observer = ExecutionTraceObserver().register_callback(str(tmp_path / "et.json"))
    observer.start()
    for dtype in supported:
        torch.empty(4, dtype=dtype).view(2, 2)
    observer.stop()
    observer.unregister_callback()
    nodes = json.loads((tmp_path / "et.json").read_text())["nodes"]
    types = {one for node in nodes for one in node["inputs"]["types"] if one.startswith("Tensor(")}
    read = {DTYPES[one.removeprefix("Tensor(").removesuffix(")")][0] for one in types}
    assert read == {str(dtype).removeprefix("torch.") for dtype in supported}


def test_pointwise_broadcast_and_in_place():
    assert work("mul", [(BF16, [64, 1]), (F32, [32])], [(F32, [64, 32])]) == (2048, 128 + 128, 8192)
    assert work("add_", [(F32, [10]), (F32, [10]), ("Int", [])], [(F32, [10])]) == (10, 80, 40)
    assert work("copy_", [(BF16, [10]), (F32, [10])], [(BF16, [10])]) == (0, 40, 20)
    assert work("fill_", [(F32, [10]), ("Double", [])], [(F32, [10])]) == (0, 0, 40)


def test_lists():
    pair = "GenericList[Tensor(float),Tensor(float)]"
    cat = work("cat", [(pair, [[2, 3], [4, 3]]), ("Int", [])], [(F32, [6, 3])])
    assert cat == (0, 72, 72)
    lists = [(pair, [[16, 8], [4]])] * 3
    assert work("_foreach_addcmul_", [*lists, ("Double", [])]) == (3 * 132, 3 * 528, 528)
    assert work("_foreach_sqrt", lists[:1], lists[:1]) == (132, 528, 528)
    steps = (pair, [[], []])
    adamw = [*lists, lists[0], ("GenericList[]", []), steps, ("Double", [])]
    assert work("_fused_adamw_", adamw) == (14 * 132, 4 * 528 + 8, 3 * 528)


def test_out_variants_and_repeated_operands():
    pair = [(F32, [10]), (F32, [10])]
    assert work("exp", pair, [(F32, [10])]) == (10, 40, 40)  # the second is `out`
    assert work("mul", [*pair, pair[0]], [(F32, [10])]) == (10, 80, 40)
    moment = [*pair, (F32, [10]), ("Double", [])]
    v, g, h = ([i, i, 0, 10, 4, "cuda:0"] for i in range(3))
    assert work("addcmul_", moment, pair[:1], [v, g, g, 0.1]) == (30, 80, 40)
    assert work("addcmul_", moment, pair[:1], [v, g, h, 0.1]) == (30, 120, 40)


def test_rows_picked_not_tables():
    table, index = (BF16, [32000, 64]), (I64, [10])
    assert work("embedding", [table, index], [(BF16, [10, 64])]) == (0, 1280 + 80, 1280)
    gather = [(F32, [100, 50]), ("Int", []), (I64, [100, 1])]
    assert work("gather", gather, [(F32, [100, 1])]) == (0, 400 + 800, 400)
    rows = [(F32, [100, 50]), ("Int", []), (I64, [7, 50])]  # index_select's: one index a row
    assert work("gather", rows, [(F32, [7, 50])], [None, 0, None]) == (0, 1400 + 56, 1400)
    by_column = [(F32, [7, 50]), ("Int", []), (I64, [7, 50])]
    assert work("gather", by_column, [(F32, [7, 50])], [None, -1, None]) == (0, 1400 + 2800, 1400)
    add = [(F32, [100, 50]), ("Int", []), (I64, [7]), (F32, [7, 50])]
    assert work("index_add_", add, [(F32, [100, 50])]) == (350, 56 + 1400 + 1400, 1400)
    nll = [(F32, [64, 32000]), (I64, [64]), NONE, ("Int", []), ("Int", [])]
    assert work("nll_loss_forward", nll, [(F32, []), (F32, [])]) == (64, 256 + 512, 8)


def test_a_cache_takes_new_keys_and_values_not_its_whole():
    pages = ("Tensor(unsigned char)", [9000, 16, 1, 64])
    new = (BF16, [8, 1, 64])
    both = 2 * 8 * 64
    assert work("reshape_and_cache_flash", [new, new, pages, pages]) == (0, 2 * both, both)


def test_bags_read_a_row_for_each_index():
    table, indices, offsets = (F32, [1000, 16]), (I64, [320]), (I64, [64])
    rows, bag = 320 * 16, (F32, [64, 16])
    outs = [bag, (I64, [320]), (I64, [64]), (I64, [64])]
    numbers = 8 * (320 + 64)
    written = 4 * 64 * 16 + numbers + 8 * 64
    assert work("_embedding_bag", [table, indices, offsets], outs) == (
        rows, 4 * rows + numbers, written,
    )  # fmt: skip
    assert work("_embedding_bag_dense_backward", [bag, indices, outs[1]], [table]) == (
        rows, 4 * 64 * 16 + 2 * 8 * 320, 4 * rows,
    )  # fmt: skip
    weights = [bag, table, indices, offsets, outs[1], ("Int", [])]
    assert work("_embedding_bag_per_sample_weights_backward", weights, [(F32, [320])]) == (
        2 * rows, 4 * 64 * 16 + 4 * rows + numbers + 8 * 320, 4 * 320,
    )  # fmt: skip
    assert work("embedding_renorm_", [table, (I64, [10])], [table]) == (160, 640 + 80, 640)


def test_a_cpus_operator_fills_the_zeros_that_it_writes_into():
    scores, target, one = ("Tensor(float)", [64, 32000]), (I64, [64]), (F32, [])
    shapes, kinds = json.dumps([[], scores[1], [64], []]), json.dumps([F32, F32, I64, "None"])
    result = json.dumps([scores[1]]), json.dumps([F32])
    alone = work("nll_loss_backward", [one, scores, target, NONE], [scores])
    assert alone == (64, 8 * 64 + 4, 4 * 64)  # a GPU's fill is a kernel of its own
    whole = work_of("aten::nll_loss_backward", (shapes, kinds), result, fills=True)
    assert whole.bytes_written == 4 * 64 + 4 * 64 * 32000


def test_no_formula_keeps_bytes_no_shapes_keeps_nothing():
    assert work("never_heard_of", [(F32, [8])], [(F32, [4])]) == (UNKNOWN, 32, 16)
    assert work("mm", []) == (UNKNOWN, UNKNOWN, UNKNOWN)
    assert work("add", [("Tensor(c10::Float99)", [8])]) == (UNKNOWN, UNKNOWN, UNKNOWN)


def test_broken_columns_are_named():
    with raises_code("operands-unreadable", naming=("mm", "[[2,2]]", "[]")):
        work_of("aten::mm", ("[[2,2]]", "[]"))


# A table of 10,000 rows of 64, and an index of 100 rows: 25,600 bytes change.
TABLE, ROWS, INDEX = (F32, [10_000, 64]), (F32, [100, 64]), (I64, [100])
BY_ROW = (I64, [100, 64])  # an index for each element, expanded or not
NUMBER = ("Scalar", [])
CHANGED, NAMED, EACH = 25_600, 800, 51_200


@pytest.mark.parametrize(
    ("op", "inputs", "dim", "strides", "expected"),
    [
        ("index_add_", [TABLE, NUMBER, INDEX, ROWS], 0, None, (6400, NAMED + 2 * CHANGED, CHANGED)),
        ("index_copy_", [TABLE, NUMBER, INDEX, ROWS], 0, None, (0, NAMED + CHANGED, CHANGED)),
        # A number for each of 100 rows of 64, and for each of 100 columns of 10,000.
        ("index_fill_", [TABLE, NUMBER, INDEX, NUMBER], 0, None, (0, NAMED, CHANGED)),
        ("index_fill_", [TABLE, NUMBER, INDEX, NUMBER], 1, None, (0, NAMED, 4_000_000)),
        ("scatter_", [TABLE, NUMBER, BY_ROW, ROWS], 0, [1, 0], (0, NAMED + CHANGED, CHANGED)),
        ("scatter_", [TABLE, NUMBER, BY_ROW, ROWS], 0, [64, 1], (0, EACH + CHANGED, CHANGED)),
        ("scatter_", [TABLE, NUMBER, BY_ROW, NUMBER], 0, [1, 0], (0, NAMED, CHANGED)),
        # Without strides in the graph, an index with the table's row counts as expanded.
        ("scatter_", [TABLE, NUMBER, BY_ROW, ROWS], 0, None, (0, NAMED + CHANGED, CHANGED)),
        (
            *("scatter_add_", [TABLE, NUMBER, BY_ROW, ROWS], 0, [1, 0]),
            (6400, NAMED + 2 * CHANGED, CHANGED),
        ),
        (
            *("scatter_reduce_", [TABLE, NUMBER, BY_ROW, ROWS], 0, [64, 1]),
            (6400, EACH + 2 * CHANGED, CHANGED),
        ),
        ("gather", [TABLE, NUMBER, BY_ROW], 0, [1, 0], (0, CHANGED + NAMED, CHANGED)),
        ("gather", [TABLE, NUMBER, BY_ROW], 0, [64, 1], (0, CHANGED + EACH, CHANGED)),
    ],
)
def test_scattered_stores_move_what_they_touch(op, inputs, dim, strides, expected):
    shapes = json.dumps([shape for _, shape in inputs])
    types = json.dumps([dtype for dtype, _ in inputs])
    given = "" if strides is None else json.dumps([[64, 1], [], strides, []][: len(inputs)])
    result = [100, 64] if op == "gather" else [10_000, 64]
    results, values = (json.dumps([result]), json.dumps([F32])), json.dumps([None, dim])
    cost = work_of(op, (shapes, types), results, values, given)
    assert (cost.flops, cost.bytes_read, cost.bytes_written) == expected


@pytest.mark.parametrize(
    ("source", "accumulates", "expected"),
    [
        (ROWS, False, (0, NAMED + CHANGED, CHANGED)),
        (ROWS, True, (6400, NAMED + 2 * CHANGED, CHANGED)),
        # One number for all 100 rows.
        ((F32, []), False, (0, NAMED + 4, CHANGED)),
    ],
)
def test_index_put_adds_by_its_flag(source, accumulates, expected):
    inputs = json.dumps([[10_000, 64], [[100]], source[1], []])
    types = json.dumps([F32, f"GenericList[{I64}]", F32, "Bool"])
    values = json.dumps([None, None, None, accumulates])
    results = json.dumps([[10_000, 64]]), json.dumps([F32])
    cost = work_of("_index_put_impl_", (inputs, types), results, values)
    assert (cost.flops, cost.bytes_read, cost.bytes_written) == expected


@pytest.mark.parametrize(
    ("shape", "strides", "measured_us"),
    [
        ([768, 3072], [1, 768], 20.4),
        ([6000, 10000], [1, 6000], 498.8),
        ([24, 300, 300], [90000, 1, 300], 17.5),
    ],
)
def test_transposed_copies_of_any_size(shape: list[int], strides: list[int], measured_us: float):
    """Copies of an H100 that chose no constant (2026-11-27-kernel-sweep-h100)."""
    dense = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    operands = json.dumps([shape] * 2), json.dumps([BF16] * 2)
    result = json.dumps([shape]), json.dumps([BF16])
    cycles = work_of("aten::copy_", operands, result, strides=json.dumps([dense, strides])).cycles
    gpu = load_gpu("H100")
    assert cycles / gpu.issue_rate_hz * 1e6 == pytest.approx(measured_us, rel=0.2)

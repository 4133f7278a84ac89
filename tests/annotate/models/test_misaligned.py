"""Products whose rows begin off 16 bytes."""

import numpy as np
import pytest
from error_width import error_width

from onerank.annotate import explain, load_gpu, recost
from onerank.annotate.models.features import kernels_of
from onerank.annotate.models.learned import predict_from_description
from onerank.annotate.models.misaligned_gemms import (
    has_misaligned_rows,
    misaligned_lower_bound_ns,
)
from onerank.annotate.models.prediction_terms import Rule
from onerank.annotate.op_costs.cost_record import GemmShape, Work
from onerank.ir import Graph

VOCABULARY = 50257
LOGITS = (8192, VOCABULARY, 768)  # m, n, k: forward, and the gradients of input and weights
INPUTS, WEIGHTS = (8192, 768, VOCABULARY), (VOCABULARY, 768, 8192)
LABEL = "GEMM whose rows begin off 16 bytes: an older generation's kernel"


def gemm(*shapes: tuple[int, ...], item: int = 2) -> np.ndarray:
    """Products of m, n, k, or of batch, m, n, k."""
    every = [shape if len(shape) == 4 else (1, *shape) for shape in shapes]
    return np.array([(*shape, item, item) for shape in every], dtype=np.float64)


@pytest.mark.parametrize(
    ("products", "operands", "results"),
    [
        (gemm(LOGITS, INPUTS, WEIGHTS), [False, True, True], [True, False, False]),
        (gemm(WEIGHTS), [False], [False]),  # 50257 tokens: no layer of the step is as wide
        (gemm((8192, 50304, 768), (8192, 768, 50304)), [False] * 2, [False] * 2),
        (gemm((768, 197, 197, 64), (768, 197, 64, 197)), [False, True], [True, False]),
        (gemm((197, 768, 3072), (12, 197, 197, 64)), [False] * 2, [False, True]),
        (gemm(LOGITS, item=4), [False], [False]),
        # Rotary embeddings multiply frequencies with the positions of 700 tokens.
        (gemm((64, 700, 1), (700, 14336, 4096)), [True, False], [True, False]),
        (gemm((0, 0, 0, 0)), [False], [False]),
    ],
)
def test_whose_rows_are_off(products, operands, results):
    assert [one.tolist() for one in has_misaligned_rows(products)] == [operands, results]


def test_what_they_take_at_least():
    """2 x 8192 x 50257 x 768 FLOPs, 362 and 550 of an SM and cycle: 132 SMs at 1.98 GHz.

    In a batch, 2 x 768 x 197 x 197 x 64 FLOPs, 218 and 264 of an SM and cycle.
    """
    forward, inputs, weights, scores, sums = misaligned_lower_bound_ns(
        load_gpu("H100"),
        gemm(LOGITS, INPUTS, WEIGHTS, (768, 197, 197, 64), (768, 197, 64, 197)),
    )
    assert forward == pytest.approx(6.684e6, rel=1e-3)
    assert inputs == weights == pytest.approx(4.399e6, rel=1e-3)
    assert [scores, sums] == pytest.approx([66_960, 55_290], rel=1e-3)


def test_few_rows_of_misaligned_results():
    """Granite 3.3's head: an H200 took 135 us for one row, an H100 389 to 547 us for more."""
    rows = (1, 8, 32, 33, 65, 128)
    least = misaligned_lower_bound_ns(load_gpu("H200"), gemm(*((m, 49_159, 4096) for m in rows)))
    assert least / 1e3 == pytest.approx([135, 389, 508, 404, 454, 547], rel=0.14)


def test_rows_at_words_are_copied_asynchronously():
    """2 x 4096 x 2048 x 12564 FLOPs and half of them, 957 of an SM and cycle.

    An H100 took 763, 854 and 763 us for 12564 columns, and 444, 428 and 473 us for 6282.
    """
    shapes = [
        shape
        for n in (12564, 6282)
        for shape in ((4096, n, 2048), (4096, 2048, n), (n, 2048, 4096))
    ]
    least = misaligned_lower_bound_ns(load_gpu("H100"), gemm(*shapes))
    assert least == pytest.approx([842_700] * 3 + [421_300] * 3, rel=1e-3)
    assert least / 1e3 == pytest.approx([763, 854, 763, 444, 428, 473], rel=0.12)
    assert not misaligned_lower_bound_ns(load_gpu("MI300X"), gemm(LOGITS)).any()


@pytest.mark.parametrize(
    ("name", "took_us"),
    [("V100", [452, 575, 889, 2199, 456, 1984]), ("T4", [1060, 1431, 2135, 5280, 1241, 5755])],
)
def test_before_ampere_rows_need_no_alignment(name, took_us):
    """DeepBench's fp16 GEMMs with rows off 16 bytes take no longer than aligned ones."""
    shapes = ((1760, 7133, 1760), (2048, 7133, 2048), (2560, 7133, 2560), (4096, 7133, 4096),
              (3072, 7435, 1024), (7680, 5481, 2560))  # fmt: skip
    works = [
        Work(flops=2 * m * n * k, bytes_read=2 * (m + n) * k, bytes_written=2 * m * n, matmul=True,
             dtype="float16", gemm=GemmShape(1, m, n, k, 2, 2))
        for m, n, k in shapes
    ]  # fmt: skip
    kernels = kernels_of(works, np.zeros(len(works)))
    assert has_misaligned_rows(kernels.gemm)[1].all()
    assert not misaligned_lower_bound_ns(load_gpu(name), kernels.gemm).any()
    predicted_ns, _ = predict_from_description(kernels, load_gpu(name))
    assert predicted_ns / 1e3 == pytest.approx(took_us, rel=0.45)
    assert np.mean(predicted_ns / 1e3 / took_us) == pytest.approx(1, abs=0.3)


@pytest.fixture
def gpt2(trace, mm) -> Graph:
    """GPT-2's logits as 8192 tokens took on an H200 (2026-11-23), and a product with good rows."""
    took = (6_682_092, 4_524_627, 4_286_868)
    products = [mm(*s, ns=ns) for s, ns in zip((LOGITS, INPUTS, WEIGHTS), took, strict=True)]
    return trace(*products, mm(8192, 3072, 768, ns=56_000))


def test_from_a_gpu_of_the_same_die(gpt2):
    """An H100 took 6,639,922, 4,498,456 and 4,273,586 ns; predicted 30% less without the rows."""
    predicted = recost(gpt2, "H100", model="learned")
    times = predicted.nodes.duration_ns[predicted.gpu_compute]
    assert times[:3] == pytest.approx([6_639_922, 4_498_456, 4_273_586], rel=0.09)
    last = predicted.job.annotations[-1].details
    assert last["rules"] == {LABEL: 3, "GEMM by its tiles": 1}


def test_another_die_is_unsure(gpt2):
    predicted = recost(gpt2, "A100", model="learned")
    rows = np.flatnonzero(predicted.gpu_compute)
    wide = np.log(predicted.nodes.p90_ns[rows] / predicted.nodes.duration_ns[rows])
    kinds = [*("memory_library_unmeasured",) * 3, "gemm"]
    times_ns = predicted.nodes.duration_ns[rows]
    widths = [error_width(*each) for each in zip(kinds, ["A100"] * 4, times_ns, strict=True)]
    assert wide == pytest.approx(widths, abs=1e-3)


def test_of_unmeasured_operators():
    """Of a CPU capture, against what an H200 took; without the rows 4.4 to 6.8 times less."""
    works = [
        Work(2 * m * n * k, 2 * (m * k + k * n), 2 * m * n, matmul=True, dtype="bfloat16",
             gemm=GemmShape(1, m, n, k, 2, 2))
        for m, n, k in (LOGITS, INPUTS, WEIGHTS)
    ]  # fmt: skip
    alone, rules = predict_from_description(kernels_of(works, np.zeros(3)), load_gpu("H200"))
    assert rules.tolist() == [Rule.MISALIGNED] * 3
    ratio = alone / [6_682_092, 4_524_627, 4_286_868]
    assert ratio == pytest.approx([1.00, 0.97, 1.03], abs=0.01)


def test_explain_tells_of_them(gpt2):
    node = int(gpt2.nodes.id[gpt2.gpu_compute][0])
    lines = explain(gpt2, "A100", node, model="learned").lines
    predicted = [text for term, text in lines if term == "rows"]
    assert predicted == [
        "11,471,660 ns: rows not aligned to 16 bytes on A100-SXM-80GB",
        "6,683,901 ns: rows not aligned to 16 bytes on H200",
    ]

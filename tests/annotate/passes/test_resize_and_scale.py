"""Resizes: times of short kernels, the captured sizes, and sizes that cannot be followed."""

import numpy as np
import pytest
from kept_traces import kept_graph
from notes import has_note, note_of
from raised import raises_code

from onerank.annotate import PassOptions, Resize, load_gpu, recost
from onerank.annotate.models.features import KernelFeatures
from onerank.annotate.models.roofline import predict_from_datasheet
from onerank.annotate.op_costs.node_costs import op_costs_of
from onerank.annotate.passes.resize.resize import misaligned_note
from onerank.annotate.passes.resize.size_change import (
    Change,
    Sizing,
    check_products,
    infer_sizing,
    mismatch_notes,
)
from onerank.annotate.passes.swap_kernels import scale_to_size
from onerank.ir import Phase


def kernels_of(graph):
    return KernelFeatures.of(graph, op_costs_of(graph))


@pytest.mark.parametrize(
    ("ns", "becomes"),
    [
        # 24 kB -> 24.6 MB, 24,551 ns at 1 TB/s; 1000 ns stay. 300 of 1300 ns grow a thousandfold
        (1_300, (1000 + 300 * 1000) ** (300 / 1300) * (1_300 + 24_551) ** (1000 / 1300)),
        (1_000, 1_000 + 24_551),
        # the whole of it is above the floor, and grows; memory is no bound
        (1_000_000, (1000 + 999_000 * 1000) ** 0.999 * (1_000_000 + 24_551) ** 0.001),
    ],
)
def test_a_short_kernel_grows_by_the_time_of_its_bytes(trace, add, gpu_file, ns, becomes):
    small, large = (kernels_of(trace(add(4096 * n, ns=ns))) for n in (1, 1000))
    gpu = load_gpu(gpu_file())
    (scaled_ns,) = scale_to_size(small.duration_ns, small, large, gpu, predict_from_datasheet)
    assert scaled_ns == pytest.approx(becomes, rel=1e-3)


def test_what_was_in_the_cache_comes_from_memory_at_a_larger_size(trace, add):
    # 24.6 MB in 3 us, of an H200 whose cache holds 52.43 MB; 64 times that are 1.57 GB, of 4.8 TB/s
    small, large = (kernels_of(trace(add(4096 * 1000 * n, ns=3_000))) for n in (1, 64))
    (scaled_ns,) = scale_to_size(
        small.duration_ns, small, large, load_gpu("H200"), predict_from_datasheet
    )
    assert scaled_ns == pytest.approx((6 * 4096 * 1000 * 64 - 52.43e6) / 4800)


@pytest.mark.parametrize(("finds", "refused"), [("aten::scatter", False), ("aten::nonzero", True)])
def test_experts_that_compute_every_token_are_resized(trace, finds, refused):
    scores = {"inputs": [("Tensor(float)", [120, 4])], "outputs": [("Tensor(float)", [120, 2])]}
    values = [[7, 8, 0, 480, 4, "cpu"]]
    graph = trace(*({"op": op, "values": values, **scores} for op in ("aten::topk", finds)))
    graph = graph.with_columns(phase=np.full(len(graph), int(Phase.FORWARD), dtype=np.uint8))
    sizes = graph, Change(40, 56), Change(3, 2)
    if refused:
        with raises_code("resize-expert-tokens"):
            infer_sizing(*sizes)
    else:
        assert infer_sizing(*sizes).routes == ()


@pytest.mark.parametrize(
    ("size", "grown"), [(5, 1024), (6, 1025), (4, 1023), (10, 2048), (12, 2050)]
)
def test_labels_of_a_short_sequence_keep_their_shift(size, grown):
    """Padded labels of a sequence of 5 are 6 long; those of a micro-batch of 2 are 12 in all."""
    sizing = Sizing(Change(5, 1024), Change(2, 2))
    power = (1, 1) if size >= 10 else (1, 0)
    assert sizing.resized(size, power) == grown


def test_a_size_on_no_line_is_refused():
    with raises_code("resize-not-whole"):
        Sizing(Change(5, 1024), Change(2, 2)).resized(7, (1, 0))


@pytest.mark.parametrize("seq", [1024, 1025, 1032])
def test_no_sequence_misaligns_linear_layers(tmp_path, seq):
    """Rows have the widths of layers.

    1024 and 1025 tokens take an H100 45.3 and 45.2 us forward, 45.2 and 44.4 for the gradient of
    the input, 48.8 and 50.5 for that of the weight (n and k of 4096, 2026-11-27).
    """
    resize = PassOptions(sizes=Resize(Change(4096, seq)))
    resized = recost(kept_graph("h100-llama-8b-4l-tp4/trace", tmp_path), "H100", passes=resize)
    assert not has_note(resized.job.measurement.notes, "resize-misaligned-rows")


@pytest.mark.parametrize(("seq", "products"), [(1024, 0), (1025, 2), (1032, 0)])
def test_a_sequence_that_misaligns_the_scores_of_attention_is_noted(trace, seq, products):
    """Rows of the scores, as a result and as an operand, have as many elements as keys."""

    def attention(size: int):
        def bmm(m: int, n: int, k: int) -> dict[str, object]:
            left, right, result = (
                ("Tensor(c10::BFloat16)", sizes) for sizes in ([32, m, k], [32, k, n], [32, m, n])
            )
            return {"op": "aten::bmm", "inputs": [left, right], "outputs": [result]}

        return trace(bmm(size, size, 128), bmm(size, 128, size))

    sizing = Sizing(Change(4096, seq), Change(1, 1))
    notes = misaligned_note(attention(4096), attention(seq), sizing)
    assert has_note(notes, "resize-misaligned-rows") == (products > 0)
    if products:
        note_of(notes, "resize-misaligned-rows", products, 1024, 1032)


def test_operands_that_no_longer_broadcast_are_noted(trace, add):
    def additions(*sizes: int):
        both = {"inputs": [("Tensor(float)", [size, 64]) for size in sizes]}
        return trace({**add(64), **both})

    changed = np.ones(len(additions(56, 56)), dtype=bool)
    assert (
        mismatch_notes(additions(56, 56), changed)
        == mismatch_notes(additions(56, 1), changed)
        == ()
    )
    (note,) = mismatch_notes(additions(56, 40), changed)
    assert has_note([note], "resize-no-broadcast", 2, "aten::add")


def test_factors_that_no_longer_fit_are_refused(trace, mm):
    captured, fits = trace(mm(128, 256, 120)), trace(mm(128, 256, 240))
    changed = np.ones(len(captured), dtype=bool)
    check_products(captured, fits, changed)
    lost = fits.with_columns(
        input_shapes=[text.replace("[240,256]", "[120,256]") for text in fits.text("input_shapes")]
    )
    with raises_code(
        "resize-operands-disagree",
        naming=("aten::mm", "[128, 240] x [120, 256]", "[128, 120] x [120, 256]"),
    ):
        check_products(captured, lost, changed)

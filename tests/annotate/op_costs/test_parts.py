"""The products that libraries make of convolutions and recurrent layers."""

from dataclasses import replace

import numpy as np
import pytest

from onerank.annotate import load_gpu
from onerank.annotate.models import learned, roofline
from onerank.annotate.models.error_kinds import KINDS, kinds_of
from onerank.annotate.models.features import kernels_of
from onerank.annotate.models.prediction_terms import Rule, TermRecord
from onerank.annotate.op_costs.cost_record import PartKernel, Work
from onerank.annotate.op_costs.node_costs import work_of_call
from onerank.annotate.op_costs.operands import Call, Tensor


def tensor(*shape: int, dtype: str = "float16") -> tuple[Tensor]:
    return (Tensor(shape, dtype, 4 if dtype == "float32" else 2),)


def forward(x, weight, out, *, transposed: bool = False) -> Work:
    values = (None,) * 6 + (transposed,)
    return work_of_call("convolution", Call("convolution", (x, weight), (out,), values))


def backward(x, weight, out) -> Work:
    values = (None,) * 7 + (False, None, None, [True, True, False])
    call = Call("convolution_backward", (out, x, weight), (x, weight), values)
    return work_of_call("convolution_backward", call)


def lstm(op: str, tokens, *layers: tuple[int, int], batch: int, size: int) -> Work:
    """Return a layer's work by (rows, columns) of its weights."""
    weights = tuple(one for shape in layers for one in tensor(*shape))
    given = (tokens, weights, None, None, tensor(len(layers) // 2, batch, size))
    return work_of_call(op, Call(op, given, (), ()))


def alone(work: Work, gpu: str) -> tuple[float, Rule]:
    moved, rules = learned.predict_from_description(kernels_of([work], np.zeros(1)), load_gpu(gpu))
    return float(moved[0]), Rule(int(rules[0]))


IMAGE, FILTERS, RESULT = tensor(8, 64, 56, 56), tensor(128, 64, 3, 3), tensor(8, 128, 28, 28)


def test_a_convolution_is_a_product_whose_rows_share_the_image():
    (part,) = forward(IMAGE, FILTERS, RESULT).parts
    assert part[:5] == (1, 8 * 28 * 28, 128, 64 * 9, 2)
    assert part.reuse == 9 / 4  # each element is under nine filters, a quarter of the places
    work = backward(IMAGE, FILTERS, RESULT)
    to_image, to_filters = work.parts
    assert to_image[:5] == (1, 8 * 56 * 56, 64, 128 * 9 // 4, 2)
    assert to_image.reuse == 9
    assert to_filters[:5] == (1, 64 * 9, 128, 8 * 28 * 28, 2)
    assert to_filters.reuse == 9 / 4
    products = sum(2 * part.m * part.n * part.k for part in work.parts)
    assert products == work.flops == 2 * 2 * RESULT[0].numel * 64 * 9


def test_transposed_and_grouped_convolutions():
    (part,) = forward(RESULT, tensor(128, 64, 3, 3), IMAGE, transposed=True).parts
    assert part[:4] == (1, 8 * 56 * 56, 64, 128 * 9 // 4)
    (part,) = forward(IMAGE, tensor(128, 16, 3, 3), RESULT).parts
    assert part[:4] == (4, 8 * 28 * 28, 32, 16 * 9)
    assert part.reuse == 9 / 4


def test_channels_are_filled_up_and_long_sums_divided():
    (part,) = forward(tensor(8, 3, 224, 224), tensor(64, 3, 7, 7), tensor(8, 64, 112, 112)).parts
    assert part.k == 8 * 49  # of three channels
    wide = tensor(8, 3, 224, 224, dtype="float32")
    (part,) = forward(wide, tensor(64, 3, 7, 7, dtype="float32"), tensor(8, 64, 112, 112)).parts
    assert part.k == 4 * 49
    points = 256 * 56 * 56
    image = tensor(256, 64, 56, 56)
    _, part = backward(image, tensor(64, 64, 1, 1), image).parts
    assert (part.batch, part.m, part.n, part.k) == (25, 64, 64, points // 25)


def test_filters_of_one_channel_have_no_product():
    image = tensor(64, 64, 56, 56)
    work = forward(image, tensor(64, 1, 7, 7), image)
    assert (work.matmul, work.parts, work.flops) == (False, (), 2 * image[0].numel * 49)
    assert backward(image, tensor(64, 1, 7, 7), image).flops == 2 * work.flops
    kernels = replace(kernels_of([work], np.zeros(1)), matmul_class=np.ones(1, dtype=bool))
    made = roofline.predict_from_datasheet(kernels, load_gpu("H200"))
    kind = KINDS[kinds_of(kernels, made, None, load_gpu("H200"))[0]]
    assert kind == "memory_unmeasured_long"


def test_a_recurrent_layer_has_a_product_for_each_step():
    tokens, weights = tensor(25, 64, 512), ((4096, 512), (4096, 1024), (4096, 1024), (4096, 1024))
    work = lstm("_cudnn_rnn", tokens, *weights, batch=64, size=1024)
    assert [part[:4] for part in work.parts] == [
        (1, 64, 4096, 1024), (1, 25 * 64, 4096, 512), (1, 64, 4096, 1024), (1, 25 * 64, 4096, 1024)
    ]  # fmt: skip
    assert [(part.times, part.launches) for part in work.parts] == [(25, 6), (1, 0)] * 2
    assert work.flops == sum(2 * p.times * p.m * p.n * p.k for p in work.parts)
    back = lstm("_cudnn_rnn_backward", tokens, *weights[:2], batch=64, size=1024)
    assert [part[:4] for part in back.parts] == [
        (1, 64, 1024, 4096), (1, 1600, 512, 4096), (1, 4096, 1024, 1600), (1, 4096, 512, 1600)
    ]  # fmt: skip
    projected = lstm("_cudnn_rnn", tokens, *weights[:2], (256, 1024), batch=64, size=256)
    assert projected.parts == ()


@pytest.mark.parametrize(
    ("gpu", "measured_us", "shape"),
    [
        ("V100", 310, (16, 256, 28, 512)),
        ("T4", 740, (16, 256, 28, 512)),
        ("V100", 37, (8, 64, 56, 64)),
    ],
)
def test_convolutions_that_deepbench_measured(gpu, measured_us, shape):
    n, c, edge, k = shape
    work = forward(tensor(n, c, edge, edge), tensor(k, c, 3, 3), tensor(n, k, edge, edge))
    moved, rule = alone(work, gpu)
    assert rule is Rule.PARTS
    assert moved == pytest.approx(1000 * measured_us, rel=0.25)


def test_a_layer_that_deepbench_measured():
    layer = lstm("_cudnn_rnn", tensor(25, 64, 1024), (4096, 1), (4096, 1024), batch=64, size=1024)
    moved, _ = alone(layer, "V100")
    assert moved == pytest.approx(1.391e6, rel=0.25)
    in_float32 = lstm(
        "_cudnn_rnn", tensor(25, 64, 1024, dtype="float32"), (4096, 1), (4096, 1024),
        batch=64, size=1024,
    )  # fmt: skip
    moved, rule = alone(in_float32, "V100")  # by the roofline of each step
    assert rule is Rule.WIDER_RATE
    assert moved > 25 * 7 * load_gpu("V100").launch_floor_ns


def test_from_one_gpu_to_another_they_keep_what_they_are_off():
    works = [forward(IMAGE, FILTERS, RESULT), backward(IMAGE, FILTERS, RESULT)]
    source, target = load_gpu("A100-SXM-80GB"), load_gpu("H100-SXM")
    times = np.array([1e5, 3e5])
    moved, rules = learned.predict_learned(kernels_of(works, times), source, target)
    there, here = (
        learned.predict_from_description(kernels_of(works, times), g)[0] for g in (target, source)
    )
    assert moved == pytest.approx(times * there / here)
    assert {Rule(int(rule)) for rule in rules} == {Rule.PARTS}


def test_the_arithmetic_of_both_ways_is_reported():
    work, h100, v100 = backward(IMAGE, FILTERS, RESULT), load_gpu("H100-SXM"), load_gpu("V100")
    kernels = kernels_of([work], np.array([2e5]))
    moved, rule = alone(work, "H100-SXM")
    record = TermRecord(np.array([0]))
    learned.predict_from_description(kernels_of([work], np.zeros(1)), h100, record=record)
    terms = {term.note or term.name: term for term in record.roots[0].named()}
    sizes = ["batch, m, n, k = 1, 25088, 64, 288", "batch, m, n, k = 1, 576, 128, 6272"]
    assert sum(terms[size].value for size in sizes) == pytest.approx(moved)
    assert record.roots[0].evaluate() == pytest.approx(moved)
    assert rule is Rule.PARTS
    there, _ = learned.predict_learned(kernels, v100, h100, record=record)
    (proportion,) = [t for t in record.roots[0].named() if t.name == "in proportion"]
    assert proportion.evaluate() == pytest.approx(there[0])


def test_kernels_of_an_operator_share_the_roofline_of_its_steps():
    layer = lstm("_cudnn_rnn", tensor(9, 4, 8), (32, 8), (32, 8), batch=4, size=8)
    kernels = kernels_of([layer, layer], np.array([30.0, 10.0]))
    shared, _ = roofline.predict_from_datasheet(
        replace(kernels, operator_ns=np.full(2, 40.0)), load_gpu("H200")
    )
    whole, _ = roofline.predict_from_datasheet(kernels_of([layer], np.zeros(1)), load_gpu("H200"))
    assert shared == pytest.approx(whole * [0.75, 0.25])


# torch._grouped_mm on an H100, us by rows of each expert (2026-11-28-grouped-gemms-h100).
GROUPED_US = {
    (32, 5760, 2880): {1: 416.3, 8: 429.9, 32: 409.4, 256: 474},
    (128, 2048, 768): {1: 175.9, 8: 167.2},
    (16, 4096, 14336): {1: 705.5, 8: 693.5, 64: 697},
}


@pytest.mark.parametrize("experts", GROUPED_US, ids=str)
def test_grouped_products_by_the_tiles_of_torch(experts: tuple[int, int, int]):
    """Pairs of tiles along the rows; each wave of tiles begins with other experts."""
    number, n, k = experts
    for rows, measured_us in GROUPED_US[experts].items():
        x, weights = tensor(number * rows, k), tensor(number, k, n)
        call = Call("_grouped_mm", (x, weights), (tensor(number * rows, n),), ())
        work = work_of_call("_grouped_mm", call)
        predicted_ns, rule = alone(work, "H100")
        assert (predicted_ns / 1000, rule) == (pytest.approx(measured_us, rel=0.09), Rule.PARTS)
        # As the tiles of cuBLAS where torch's were not measured.
        plain = replace(work, parts=(work.parts[0]._replace(kernel=PartKernel.LIBRARY),))
        assert alone(work, "A100") == alone(plain, "A100")
        kinds = {
            gpu: KINDS[
                int(kinds_of(kernels, learned.predict_from_description(kernels, to), None, to)[0])
            ]
            for gpu in ("H100", "H200", "H20", "A100")
            for kernels, to in [(kernels_of([work], np.zeros(1)), load_gpu(gpu))]
        }
        measured, other = "grouped_unmeasured", "experts_unmeasured"
        assert kinds == {"H100": measured, "H200": measured, "H20": other, "A100": other}

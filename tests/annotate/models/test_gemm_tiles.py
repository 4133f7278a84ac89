"""The time of products and attention by their tiles, on a GPU with round figures."""

import json

import msgspec
import numpy as np
import pytest

from onerank.annotate import load_gpu
from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.gpus.registry import with_figures
from onerank.annotate.gpus.spec_schema import Figure
from onerank.annotate.models.attention_factors import shape_factors
from onerank.annotate.models.attention_time import attention_ns
from onerank.annotate.models.coefficients import AttentionCoefficients, shipped
from onerank.annotate.models.features import kernels_of
from onerank.annotate.models.gemm_tiles import GemmTarget, Rates, gemm_ns
from onerank.annotate.models.learned import predict_from_description
from onerank.annotate.models.tile_times import is_weight_gradient
from onerank.annotate.op_costs.cost_record import AttentionShape, Work
from onerank.annotate.op_costs.node_costs import work_of


def gemm(gpu: Gpu, *sizes: tuple[int, int, int, int], per_call: bool = False) -> list[float]:
    rates = Rates(*(np.full(len(sizes), 100e12),) * 2)
    shapes = np.array([(*size, 2, 2) for size in sizes], dtype=np.float64)
    return gemm_ns(GemmTarget(gpu, rates, per_call=per_call), shapes, shipped().gemm).tolist()


def test_a_large_product_takes_its_flops(gpu_file):
    (time,) = gemm(load_gpu(gpu_file()), (1, 16384, 16384, 16384))
    assert time == pytest.approx(2 * 16384**3 / 100e12 * 1e9, rel=0.06)


def test_a_row_takes_the_weights_bytes(gpu_file):
    (time,) = gemm(load_gpu(gpu_file()), (1, 1, 65536, 65536))
    assert time == pytest.approx(2 * 65536**2 / 1e12 * 1e9, rel=0.06)


def test_a_tiny_product_takes_the_floor(gpu_file):
    slow, fast = (gemm(load_gpu(gpu_file(floor=f)), (1, 1, 64, 64))[0] for f in (9000, 2000))
    assert slow - fast == pytest.approx(7000 * shipped().gemm.floor)
    assert fast < 3 * 2000


def test_a_batch_is_as_many_tiles(gpu_file):
    gpu = load_gpu(gpu_file())
    many, one = gemm(gpu, (64, 1024, 1024, 1024), (1, 1024, 1024, 1024))
    assert 30 * one < many < 64 * one


def test_operands_of_six_products_that_fit_the_cache_are_not_read_again(gpu_file):
    # 8 rows times 512 x 4096: 4.2 MB of weights, six of them 25 MB
    gpu = load_gpu(gpu_file())
    times = {}
    for size in (13, 50):
        cached = msgspec.structs.replace(
            gpu, figures={**gpu.figures, "l2_mb": Figure(size, "made")}
        )
        (times[size],) = gemm(cached, (1, 8, 512, 4096), per_call=True)
    assert times[13] - times[50] > 0.3 * 4.2e6 / 1e12 * 1e9


def test_a_kernel_in_a_step_reads_its_weights_from_memory_and_has_no_gap(gpu_file):
    # Six copies of 4.2 MB of weights fit into the cache, of 67 MB they do not.
    gpu = load_gpu(gpu_file())
    gpu = msgspec.structs.replace(gpu, figures={**gpu.figures, "l2_mb": Figure(50, "made")})
    sizes = (1, 8, 512, 4096), (1, 8, 4096, 8192), (64, 8, 64, 128)
    calls, kernels = (np.array(gemm(gpu, *sizes, per_call=of)) for of in (True, False))
    gap_ns = shipped().gemm.call_gap * gpu.launch_floor_ns
    small, large, batch = calls - kernels
    # A batch multiplies two activations.
    assert [large, batch] == pytest.approx([gap_ns] * 2, rel=1e-3)
    assert small < gap_ns - 0.3 * 4.2e6 / 1e12 * 1e9


def test_the_power_cap_holds_back_work_not_waiting(gpu_file):
    # one tile for each of 100 SMs and one more: a second wave, at nearly the rate of a short kernel
    gpu = load_gpu(gpu_file())
    shapes = np.array([[1, 128 * tiles, 256, 16384, 2, 2] for tiles in (50, 100)], dtype=np.float64)
    slow, fast = (
        gemm_ns(GemmTarget(gpu, Rates(sustained, np.full(2, 100e12))), shapes, shipped().gemm)
        for sustained in (np.full(2, 50e12), np.full(2, 100e12))
    )
    assert (slow > fast).all()
    assert (slow < 2 * fast).all()


def with_coefficients(gpu: Gpu, size: tuple[int, int, int, int], **changed: float) -> float:
    c = msgspec.structs.replace(shipped().gemm, **changed)
    shape = np.array([(*size, 2, 2)], dtype=np.float64)
    return float(gemm_ns(GemmTarget(gpu, Rates(*(np.array([100e12]),) * 2)), shape, c)[0])


def test_the_chain_of_steps_counts_once_however_many_waves(gpu_file):
    # 4096 / 64 steps at 1 GHz: 1000 cycles more of each are 64 us, of one tile and of 41 waves
    gpu = load_gpu(gpu_file())
    before = shipped().gemm.step_cycles
    slow, fast = (
        with_coefficients(gpu, (1, 8192, 8192, 4096), step_cycles=before + more)
        for more in (1000, 0)
    )
    assert 0 < slow - fast < 64_000


def test_results_are_written_after_the_products(gpu_file):
    # 536 MB at 1 TB/s are 537 us, 34 GFLOPs at 100 TFLOPS 344 us
    gpu = load_gpu(gpu_file())
    size = (1, 16384, 16384, 64)
    hidden, shipped_, added = (
        with_coefficients(gpu, size, write_overlap=p)
        for p in (100, shipped().gemm.write_overlap, 1)
    )
    assert hidden < shipped_ < added
    assert added - hidden > 300_000


def test_one_tile_more_than_a_wave_costs_more_than_one_less(gpu_file):
    gpu = load_gpu(gpu_file(sm=128))  # a wave is 2048 x 1024 in tiles of 128 x 128
    gpu = msgspec.structs.replace(gpu, architecture="ampere")
    under, full, over = gemm(gpu, *((1, 128 * tiles, 1024, 8192) for tiles in (15, 16, 17)))
    assert over - full > 2 * (full - under)


@pytest.mark.parametrize("figure", ["bandwidth", "bf16"])
def test_more_of_a_resource_slows_no_product(gpu_file, figure):
    sizes = [(1, m, n, k) for m in (1, 16, 300, 4096) for n in (128, 4096) for k in (64, 8192)]
    gpus = [load_gpu(gpu_file(name, **{figure: value})) for name, value in (("a", 100), ("b", 250))]
    rates = [100e12, 250e12] if figure == "bf16" else [100e12] * 2
    shapes = np.array([(*size, 2, 2) for size in sizes], dtype=np.float64)
    before, after = (
        gemm_ns(GemmTarget(gpu, Rates(*(np.full(len(sizes), rate),) * 2)), shapes, shipped().gemm)
        for gpu, rate in zip(gpus, rates, strict=True)
    )
    assert (after <= before * 1.001).all()


@pytest.mark.parametrize(
    ("gpu", "rows", "n", "k", "measured_us"),
    [("H100", 2, 2048, 8192, 44.8), ("H100", 8, 5120, 5120, 62.8), ("H200", 2, 5120, 5120, 38.1)],
)
def test_few_rows_in_float32_wait_for_each_step(gpu, rows, n, k, measured_us):
    shape = json.dumps([[rows, k], [n, k]]), json.dumps(["Tensor(float)"] * 2)
    work = work_of("aten::linear", shape, (json.dumps([[rows, n]]), json.dumps(["Tensor(float)"])))
    kernels = kernels_of([work], np.zeros(1))
    ns, _ = predict_from_description(kernels, load_gpu(gpu), shipped())
    assert ns[0] == pytest.approx(measured_us * 1e3, rel=0.08)


@pytest.mark.parametrize(("m", "n", "measured_us"), [(128, 48, 766), (48, 3, 759)])
def test_millions_of_rows_in_float32_are_divided_among_tiles(m, n, measured_us):
    rows = 2_097_152
    shape = json.dumps([[m, rows], [rows, n]]), json.dumps(["Tensor(float)"] * 2)
    work = work_of("aten::mm", shape, (json.dumps([[m, n]]), json.dumps(["Tensor(float)"])))
    ns, _ = predict_from_description(kernels_of([work], np.zeros(1)), load_gpu("H200"), shipped())
    assert ns[0] == pytest.approx(measured_us * 1e3, rel=0.32)


def test_a_weights_gradient_is_found_by_its_forward():
    tokens, inner, outer = 8192, 4096, 1024
    forward, of_input = (tokens, outer, inner), (tokens, inner, outer)
    of_weight, square = (outer, inner, tokens), (512, 512, 512)
    calls = np.array([(1, *s, 4, 4) for s in (forward, of_input, of_weight, square)], dtype=float)
    assert is_weight_gradient(calls).tolist() == [False, False, True, False]


def test_an_unknown_generation_is_between_the_known_ones(gpu_file):
    c, rates = shipped().gemm, Rates(np.ones(1), np.ones(1))
    unknown, hopper, ada = (
        GemmTarget(load_gpu(name), rates).issue(c) for name in (gpu_file(), "H100", "L40S")
    )
    assert (hopper, ada) == (c.asynchronous, c.synchronous)
    assert unknown == pytest.approx((hopper * ada) ** 0.5)


@pytest.mark.parametrize("name", ["L40S", "A100", "RTX-5090"])
def test_one_more_row_never_saves_much(name):
    """A few tiles in one more wave cost at most that wave."""
    rows = [512, 513, 1024, 1025, 1144, 1355, 2048, 2049]
    sizes = [(1, m, n, 4096) for n in (4096, 14336) for m in rows]
    times = np.array(gemm(load_gpu(name), *sizes)).reshape(2, -1)
    assert (times[:, 1:] / times[:, :-1]).min() > 0.97


class TestAttention:
    c = AttentionCoefficients(floor=1, efficiency=0.5, prologue_cycles=1000, overlap=50)

    def time(self, gpu: Gpu, *shape: int) -> float:
        rates = Rates(np.array([100e12]), np.array([100e12]))
        return attention_ns(gpu, rates, np.array([shape], dtype=float), self.c)[0]

    def test_one_tile(self, gpu_file):
        # 128 queries of one head against 128 keys of size 64: 2 * 128 * 128 * 128 FLOPs on one of
        # 100 SMs at half of 1 TFLOPS is 8389 ns; 1000 cycles are 1000 ns; the floor is 2000 ns.
        # 1.6e12 exponentials a second take the time of 62.5 FLOPs a score, 31.25 times 2, which
        # heads of 128 have too: 128 + 31.25 in the place of 128 by 256 + 31.25 in the place of 256
        gpu, fitted_to = load_gpu(gpu_file()), 256 / 287.25
        forward = 8389 * 159.25 / 128 * fitted_to
        made = self.time(gpu, 1, 1, 1, 128, 128, 64, 64, 0, 0)
        assert made == pytest.approx(3000 + forward, abs=1)
        # the backward pass has 3 * 64 + 2 * 64 in the place of 64 + 64, 1.35 times as slow, and two
        # launches next to it, of what the cache holds
        backward = self.time(gpu, 1, 1, 1, 128, 128, 64, 64, 0, 1)
        assert backward == pytest.approx(7000 + 1.35 * 8389 * 351.25 / 128 * fitted_to, rel=0.005)

    @pytest.mark.parametrize(
        ("d", "back", "tflops"),
        # FlashAttention-3 and cuDNN on an H100, 16,384 tokens, not causal (arXiv 2407.08608)
        [(64, 0, (413, 497)), (128, 0, (595, 648)), (64, 1, (433, 474)), (128, 1, (516, 561))],
    )
    def test_published_rates_of_an_h100(self, d, back, tflops):
        gpu = load_gpu("H100")
        rates = Rates(
            np.array([gpu.tensor_flops_per_s("bfloat16")]),
            np.array([gpu.peak_tensor_flops_per_s("bfloat16")]),
        )
        shape = np.array([(1, 2048 // d, 2048 // d, 16384, 16384, d, d, 0, back)], dtype=float)
        ns = attention_ns(gpu, rates, shape, shipped().attention)[0]
        flops = 4 * 16384**2 * 2048 * (2.5 if back else 1)
        low, high = tflops
        assert 0.94 * low < flops / ns / 1e3 < 1.06 * high

    @pytest.mark.parametrize(
        ("family", "shape", "us"),
        # torch 2.11 on an H100: heads of 128, bf16; (batch, heads, key heads, tokens, causal, back)
        [
            ("flash2", (2, 32, 8, 8192, 1, 0), 3180),
            ("flash2", (2, 32, 8, 8192, 0, 0), 5996),
            ("flash2", (1, 32, 8, 2048, 1, 0), 157),
            ("flash2", (1, 8, 1, 8192, 1, 0), 569),
            ("cudnn", (2, 32, 8, 8192, 1, 0), 1861),
            ("efficient", (1, 32, 32, 8192, 1, 0), 3225),
        ],
    )
    def test_measured_kernels_of_torch_on_an_h100(self, family, shape, us):
        gpu = load_gpu("H100")
        rates = Rates(
            np.array([gpu.tensor_flops_per_s("bfloat16")]),
            np.array([gpu.peak_tensor_flops_per_s("bfloat16")]),
        )
        batch, heads, key_heads, tokens, causal, back = shape
        call = batch, heads, key_heads, tokens, tokens, 128, 128, causal, back
        shapes = np.array([call], dtype=float)
        factors = shape_factors(family, gpu)
        assert factors is not None
        alone = factors.of(gpu, shapes, training=False)
        predicted_ns = attention_ns(gpu, rates, shapes, shipped().attention) * alone
        assert predicted_ns[0] / 1e3 == pytest.approx(us, rel=0.1)

    def test_in_training_the_clock_of_flash_attention_is_that_of_the_step(self):
        gpu = load_gpu("H100")
        shapes = np.array([(2, 32, 8, 8192, 8192, 128, 128, 1, back) for back in (0, 1)], float)
        factors = shape_factors("flash2", gpu)
        assert factors is not None
        alone, in_step = (factors.of(gpu, shapes, training=here) for here in (False, True))
        # Measured: 3.61 ms in a step of float8 training, 3.18 alone.
        assert in_step / alone == pytest.approx(1980 / 1830)
        # At half the sustained rate, power already limits the clock to the root of a half.
        slower = with_figures(gpu, {"bf16_sustained_fraction": 0.737 / 2})
        in_step = factors.of(slower, shapes, training=True)
        assert in_step / alone == pytest.approx(1980 / 1830 / 2**0.5)

    def test_cudnns_kernels_reach_the_power_limit_alone(self):
        gpu = load_gpu("H100")
        shapes = np.array([(2, 32, 8, 8192, 8192, 128, 128, 1, 1)], float)
        factors = shape_factors("cudnn", gpu)
        assert factors is not None
        alone, in_step = (factors.of(gpu, shapes, training=here) for here in (False, True))
        assert alone == in_step

    @pytest.mark.parametrize("name", ["boost_clock_mhz", "bf16_tensor_tflops", "sm_count"])
    @pytest.mark.parametrize("back", [0, 1])
    def test_no_better_figure_makes_attention_slower(self, name, back):
        gpu = load_gpu("H100")
        shapes = [AttentionShape(1, 16, 16, 8192, 8192, d, d, 1, back) for d in (32, 64, 128, 256)]
        works = [Work(1, 1, 1, matmul=True, dtype="bfloat16", attention=shape) for shape in shapes]
        kernels = kernels_of(works, np.zeros(len(works)))
        better = with_figures(gpu, {name: gpu.figures[name].value * 1.5})
        before, _ = predict_from_description(kernels, gpu)
        after, _ = predict_from_description(kernels, better)
        assert (after <= before).all()

    def test_causal_tiles_have_half_the_keys(self, gpu_file):
        gpu = load_gpu(gpu_file())
        full, causal = (self.time(gpu, 64, 16, 16, 4096, 4096, 64, 64, c, 0) for c in (0, 1))
        assert (causal - 2000) / (full - 2000) == pytest.approx(16.5 / 32, rel=0.01)

    def test_queries_of_the_last_keys_see_all_before(self, gpu_file):
        # 1024 queries of 4096 keys: blocks 25 to 32 of 32, on average 28.5
        gpu = load_gpu(gpu_file())
        full, last = (self.time(gpu, 64, 16, 16, 1024, 4096, 64, 64, c, 0) for c in (0, 2))
        assert (last - 2000) / (full - 2000) == pytest.approx(28.5 / 32, rel=0.01)

    def test_short_queries_of_heads_that_share_keys_are_one_tile(self, gpu_file):
        gpu = load_gpu(gpu_file(bandwidth=100_000))
        apart, shared = (self.time(gpu, 256, 32, h, 1, 128, 64, 64, 0, 0) for h in (32, 1))
        assert (apart - 2000) / (shared - 2000) == pytest.approx(32, rel=0.01)

"""Experts of MoE layers: the table, the fit and the prediction by shape."""

from dataclasses import replace

import msgspec
import numpy as np
import polars as pl
import pytest
from raised import raises_code

from onerank.annotate import load_gpu
from onerank.annotate.models.coefficients import shipped
from onerank.annotate.models.learned import predict_from_description, predict_learned
from onerank.annotate.models.prediction_terms import Rule
from onerank.annotate.models.tile_times import part_times
from onerank.annotate.op_costs.engine_operators import ExpertSizes
from onerank.ir.errors import FormatError
from tools.fit.expert_cases import (
    ExpertLayers,
    expert_cases,
    fit_experts,
    read_experts,
    untuned_steps,
)

H100 = load_gpu("H100")

# vLLM 0.24.0 and TensorRT-LLM 1.3.0rc20 on an H100 (aiconfigurator-core 0.12.0): the experts of
# Qwen3-30B-A3B, 128 of 768, 8 for each of 64, 1024 and 8192 tokens, in us.
QWEN = [ExpertSizes(tokens, 8, 128, 2048, 1536, 768) for tokens in (64, 1024, 8192)]
MEASURED_US = {
    "vllm_unquantizedfusedmoe_triton_tritonexperts": (431.9, 528.8, 1488.9),
    "moe_torch_flow_cutlass": (428.9, 546.1, 1465.8),
}


@pytest.mark.parametrize("kernel", MEASURED_US)
def test_experts_by_their_shapes(kernel):
    measured_ns = np.array(MEASURED_US[kernel]) * 1000
    layers = ExpertLayers(H100, "a dataset", kernel, QWEN, measured_ns)
    predicted_ns, rules = predict_from_description(layers.features(), H100)
    assert predicted_ns == pytest.approx(measured_ns, rel=0.21)
    assert set(rules.tolist()) == {Rule.PARTS}
    (case,) = expert_cases([layers], lambda _: predict_from_description)
    assert case.predicted_ns.tolist() == predicted_ns.tolist()


def test_half_of_the_deviation_carries_over_to_another_die():
    """Layers that take 1.44 times as long as by their tiles on an H100 take 1.2 times on a B200."""
    c, b200, h200 = shipped(), load_gpu("B200"), load_gpu("H200")
    layers = ExpertLayers(H100, "a", "moe_torch_flow_cutlass", QWEN, np.ones(3))
    here, there = (part_times(layers.features(), gpu, c) for gpu in (H100, b200))
    measured = replace(layers, times_ns=1.44 * here).features()
    assert predict_learned(measured, H100, b200)[0] == pytest.approx(1.2 * there, rel=0.01)
    # The H200 has the H100's die, which runs the same kernels.
    same_die = predict_learned(measured, H100, h200)[0] / part_times(measured, h200, c)
    assert same_die == pytest.approx(1.44, rel=0.01)


def test_layers_that_the_cache_serves_are_not_read(tmp_path):
    """One expert of 12.6 MB fits into an H100's 50 MB, and eight do not."""
    layer = {"hidden": 2048, "inner": 1024, "chosen": 1, "experts": 8, "time_us": 50.0}
    names = {"gpu": "H100-SXM", "dataset": "a", "kernel": "sglang_fused_moe_triton"}
    pl.DataFrame([{**names, **layer, "tokens": tokens} for tokens in (1, 8)]).write_parquet(
        tmp_path / "experts.parquet"
    )
    (read,) = read_experts(tmp_path)
    assert read.layers == [ExpertSizes(8, 1, 8, 2048, 2048, 1024)]


@pytest.mark.parametrize(("dataset", "first"), [("sglang 0.5.10", 3712), ("sglang 0.5.14", 1856)])
def test_experts_of_nemotron_have_no_gate_in_later_datasets(tmp_path, dataset, first):
    names = {"gpu": "L40S", "dataset": dataset, "kernel": "sglang_fused_moe_triton"}
    layer = {"tokens": 512, "hidden": 2688, "inner": 1856, "chosen": 6, "experts": 128}
    pl.DataFrame([{**names, **layer, "time_us": 3739.4}]).write_parquet(
        tmp_path / "experts.parquet"
    )
    (read,) = read_experts(tmp_path)
    assert read.layers == [ExpertSizes(512, 6, 128, 2688, first, 1856)]


def test_untuned_kernels_take_tiles_of_128_rows():
    """128 experts of 129 rows have two tiles each, of 232 x 2688 and 2688 x 232, on 132 SMs."""
    sizes = ExpertSizes(129, 128, 128, 2688, 232, 232)
    layers = ExpertLayers(H100, "a", "sglang_flashinfer_cutlass_moe", [sizes], np.ones(1))
    assert untuned_steps(layers) == pytest.approx([128 * 2 * (15 * 42 + 168 * 4) / 132])


def test_a_kernel_of_an_unknown_library_is_refused():
    layers = ExpertLayers(H100, "a", "another_moe", QWEN, np.ones(3))
    with raises_code("fit-unknown-kernel", FormatError, naming="another_moe"):
        layers.features()


def test_the_fit_of_a_library_is_shrunk_toward_that_of_all():
    """Of one die family both weigh the same, so libraries differ by the root of their ratio."""
    c = shipped()
    truth = {
        "cutlass": msgspec.structs.replace(c.experts["cutlass"], rate=1.1),
        "sglang": msgspec.structs.replace(c.experts["sglang"], rate=0.6),
        "vllm": msgspec.structs.replace(c.experts["vllm"], epilogue=1.2),
    }
    made = msgspec.structs.replace(c, experts=truth)
    sizes = [
        ExpertSizes(tokens, 8, experts, 2048, 2 * inner, inner)
        for tokens in (64, 512, 4096, 16384)
        for experts in (64, 128)
        for inner in (384, 768, 1536)
    ]
    # The fit takes every fifth layer.
    every = [layer for layer in sizes for _ in range(5)]
    measured = []
    for kernel in (*MEASURED_US, "sglang_fused_moe_triton"):
        empty = ExpertLayers(H100, "a", kernel, every, np.ones(len(every)))
        times_ns = part_times(empty.features(), H100, made)
        measured.append(ExpertLayers(H100, "a", kernel, every, times_ns))
    fitted = fit_experts(measured, c.gemm)
    for library, other in (("cutlass", "sglang"), ("sglang", "vllm"), ("vllm", "cutlass")):
        of, to, expected_of, expected_to = (
            np.array(msgspec.structs.astuple(experts[name]))
            for experts in (fitted, truth)
            for name in (library, other)
        )
        assert of / to == pytest.approx((expected_of / expected_to) ** 0.5, rel=0.05)
    of_vllm = fit_experts([layers for layers in measured if layers.library == "vllm"], c.gemm)
    # A library without layers has the coefficients of all.
    for coefficients in of_vllm.values():
        assert msgspec.structs.astuple(coefficients) == pytest.approx(
            msgspec.structs.astuple(truth["vllm"]), rel=0.1
        )

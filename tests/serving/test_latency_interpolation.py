"""Interpolation of steps, on times that a known function of the sizes gives."""

import math
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from onerank.capture.serving.compositions import Composition, default_grid, parse_grid
from onerank.ir.errors import AnnotateError
from onerank.serving.bundle import Bundle
from onerank.serving.latency_interpolation import Interpolation, cross_validate, interval_of
from onerank.serving.part_sizes import AttentionForm, AttentionWaves
from onerank.serving.tables import KernelRow, Manifest, Part, RankMemory, StepRow


def parts_of(c: Composition) -> dict[Part, float]:
    """Return times of the parts in ns, as of a large model: products have tiles of 64 tokens."""
    tiles = math.ceil(c.new_tokens / 64) * 64
    parts: dict[Part, float] = {
        "tokens": max(5e6, tiles * 3e4),
        "head": 1e5 + 500 * c.sequences,
    }
    if c.decodes:
        parts["decode_attention"] = 2e5 + 40 * c.decodes * (c.decode_context + 1)
    if c.prefills:
        keys = c.prefill_context + c.prefill_tokens / 2
        parts["prefill_attention"] = 3e5 + 0.2 * c.prefills * c.prefill_tokens * keys
    return parts


# Of an H100 and a Llama-8B: 33 decodes occupy the GPU once.
WAVES = AttentionWaves.of(sms=132, kv_heads=8)
FORM = AttentionForm()


def parts_in_waves(c: Composition) -> dict[Part, float]:
    """Return times of the parts where attention runs as FlashAttention 2 does on an H100."""
    parts = parts_of(c)
    if c.decodes:
        # A wave of few thread blocks takes 70% of the time of a full one.
        blocks = 0.3 * c.decodes + 0.7 * WAVES.occupied(c.decodes)
        parts["decode_attention"] = 2e5 + 100 * blocks * (c.decode_context + 1)
    if c.prefill_tokens % 128 or (c.prefill_tokens + c.prefill_context) % 128:
        parts["prefill_attention"] = 1.4 * parts.get("prefill_attention", 0.0)
    return parts


def rows_of(
    grid: tuple[Composition, ...],
    times: Callable[[Composition], dict[Part, float]] = parts_of,
) -> tuple[list[StepRow], list[KernelRow]]:
    """Return the rows of a grid; the host takes 20 ms."""
    steps: list[StepRow] = []
    kernels: list[KernelRow] = []
    for number, c in enumerate(grid, start=1):
        parts = times(c)
        total = sum(parts.values())
        steps.append(
            StepRow.of(
                c, step_ns=round(max(total, 2e7)), p10_ns=None, p90_ns=None,
                graph_ns=round(total * 1.02), graph_low_ns=None, graph_high_ns=None,
                gpu_ns=round(total), host_ns=20_000_000, peak_bytes=1, fits=True,
                source="measured",
            )
        )  # fmt: skip
        kernels += [KernelRow(number, part, part, 1, round(ns), 0, 0) for part, ns in parts.items()]
    return steps, kernels


def test_a_mixed_step_writes_to_the_cache_twice():
    """Also where the grid has no mixed step."""

    def times(c: Composition) -> dict[Part, float]:
        writes = int(c.prefills > 0) + int(c.decodes > 0)
        return {**parts_of(c), "cache_write": 3e5 * writes + 100 * c.new_tokens}

    grid = tuple(c for c in default_grid(8192) if c.kind != "mixed")
    time = Interpolation.of(*rows_of(grid, times), FORM).module(["cache_write"])
    for mixed in (Composition(16, 1024, 1, 256, 0), Composition(2, 500, 1, 1500, 0)):
        assert time(mixed) == pytest.approx(times(mixed)["cache_write"], rel=0.03)


def test_compositions_between_the_points_of_the_default_grid():
    interpolation = Interpolation.of(*rows_of(default_grid(32768)), FORM)
    draw = np.random.default_rng(7)
    errors: list[float] = []
    for _ in range(40):
        prefill = draw.random() < 0.7
        c = Composition(
            decodes=int(2 ** draw.uniform(0, 8)),
            decode_context=int(2 ** draw.uniform(7, 14)),
            prefills=int(prefill),
            prefill_tokens=int(2 ** draw.uniform(6, 13)) * prefill,
            prefill_context=int(2 ** draw.uniform(7, 13)) * prefill,
        )
        step = interpolation.step(c)
        assert step.graph_ns is not None
        assert step.step_ns is not None
        total = sum(parts_of(c).values())
        errors.append(abs(step.graph_ns / (total * 1.02) - 1))
        assert abs(step.step_ns / max(total, 2e7) - 1) < 0.25
        assert step.graph_low_ns is not None
        assert step.graph_high_ns is not None
        assert step.graph_low_ns < step.graph_ns < step.graph_high_ns
    assert np.median(errors) < 0.03
    assert np.quantile(errors, 0.9) < 0.10


def test_waves_of_thread_blocks():
    """FlashAttention 2 divides the keys of few decodes, and starts another wave for a 34th."""
    assert WAVES.occupied(20) == 20
    assert [WAVES.occupied(n) for n in (27, 33, 34, 66, 67)] == [33, 33, 66, 66, 99]


SERVED = {"num_key_value_heads": 8, "num_attention_heads": 32, "hidden_size": 4096}


@pytest.mark.parametrize(
    ("changed", "decodes"),
    [
        ({}, 66),
        ({"tp": 16}, 264),  # two ranks share a key-value head
        ({"config": {"text_config": {"num_attention_heads": 24}}}, 22),
        ({"config": {}}, None),
        # Other kernels divide their work differently.
        ({"attention_kernels": ("cudnn", "flash2")}, None),  # layers with a sliding window
        ({"attention_kernels": ("aotriton",), "device": "MI300X"}, None),
        ({"attention_kernels": ("",)}, None),
        # Bundles of earlier versions do not name the kernel: `capture serve` chooses it by these.
        ({"attention_kernels": None, "config": SERVED}, 66),
        ({"attention_kernels": None, "config": {**SERVED, "dtype": "float32"}}, None),
        ({"attention_kernels": None, "config": {**SERVED, "head_dim": 320}}, None),
        ({"attention_kernels": None, "config": {**SERVED, "sliding_window": 4096}}, None),
        ({"attention_kernels": None, "config": {**SERVED, "v_head_dim": 64}}, None),
        ({"attention_kernels": None, "config": SERVED, "device": "T4"}, None),
        ({"attention_kernels": None, "config": SERVED, "device": "MI300X"}, None),
        ({"attention_kernels": None, "config": SERVED, "device": "A100-SXM-80GB"}, 54),
        ({"device": "AMD EPYC 9654"}, None),
        ({"memory": RankMemory(0)}, None),  # a recording, whose attention kernel is another
    ],
)
def test_the_waves_of_a_bundle(changed: dict[str, object], decodes: float | None):
    rows, kernels = rows_of(parse_grid("decode: batch=1,2,4 context=8"))
    manifest = Manifest(
        model="LlamaForCausalLM", config={"num_key_value_heads": 8}, tp=2, layers=1, longest=4096,
        device="NVIDIA H100 80GB HBM3", device_type="cuda", source="measured",
        memory=RankMemory(0, weights_bytes=1), versions={}, attention_kernels=("flash2",),
    )  # fmt: skip
    bundle = Bundle(msgspec.structs.replace(manifest, **changed), tuple(rows), tuple(kernels))
    assert bundle.interpolation.form.waves == (None if decodes is None else AttentionWaves(decodes))


def test_attention_in_waves_and_blocks():
    rows, kernels = rows_of(default_grid(32768), parts_in_waves)
    draw = np.random.default_rng(5)
    compositions = [
        Composition(
            decodes=int(draw.integers(30, 120)),
            decode_context=int(draw.integers(2000, 6000)),
            prefills=1,
            prefill_tokens=int(draw.integers(500, 3000)),
            prefill_context=int(draw.integers(0, 6000)),
        )
        for _ in range(40)
    ]
    errors: dict[bool, float] = {}
    for waves in (None, WAVES):
        interpolation = Interpolation.of(rows, kernels, AttentionForm(waves))
        steps = [interpolation.step(c).graph_ns or 0 for c in compositions]
        measured = [sum(parts_in_waves(c).values()) * 1.02 for c in compositions]
        relative = [abs(step / total - 1) for step, total in zip(steps, measured, strict=True)]
        errors[waves is not None] = float(np.mean(relative))
    assert errors[True] < 0.02
    assert errors[True] < errors[False] / 2


def test_points_are_reproduced():
    grid = default_grid(32768)
    interpolation = Interpolation.of(*rows_of(grid), FORM)
    for c in grid:
        step = interpolation.step(c)
        assert step.graph_ns == pytest.approx(sum(parts_of(c).values()) * 1.02, rel=0.03)


def test_cross_validation_leaves_rows_out():
    grid = parse_grid("decode: batch=1,2,4,8,16,32,64 context=256,1024,4096")
    rows, kernels = rows_of(grid)
    validation = cross_validate(rows, kernels, FORM)
    assert validation is not None
    # The smallest and the largest batch are at the edge: without them, the fit would extrapolate.
    assert validation.points == len(grid) - 2 * 3 == 15
    assert validation.median < 0.01
    # A wrong row is its own error, and does not vanish in a fit that contains it.
    wrong = [*rows]
    kernels = [
        KernelRow(k.row, k.module, k.part, 1, k.time_ns * (2 if k.row == 11 else 1), 0, 0)
        for k in kernels
    ]
    total = (wrong[10].graph_ns or 0) * 2
    figures = {f: getattr(wrong[10], f) for f in ("step_ns", "p10_ns", "p90_ns", "host_ns")}
    wrong[10] = StepRow.of(
        wrong[10].composition, **figures, graph_ns=total, graph_low_ns=None, graph_high_ns=None,
        gpu_ns=round(total / 1.02), peak_bytes=1, fits=True, source="measured",
    )  # fmt: skip
    worse = cross_validate(wrong, kernels, FORM)
    assert worse is not None
    assert worse.p90 > validation.p90


def test_rows_without_a_cuda_graph_do_not_count_as_graphs():
    rows, kernels = rows_of(parse_grid("decode: batch=1,2,4,8,16,32,64 context=256,1024,4096"))
    # Eager, a step of 20 ms of host takes up to four times as long as its graph.
    rows = [
        msgspec.structs.replace(row, graph_ns=None if number % 4 == 0 else row.graph_ns)
        for number, row in enumerate(rows)
    ]
    validation = cross_validate(rows, kernels, FORM)
    assert validation is not None
    inside = [row for row in rows if 1 < row.composition.decodes < 64]
    assert validation.points == sum(row.graph_ns is not None for row in inside) == 11
    assert validation.p90 < 0.02
    interpolation = Interpolation.of(rows, kernels, FORM)
    for row in rows:
        kernels_ns = sum(parts_of(row.composition).values())
        step = interpolation.step(row.composition)
        assert step.graph_ns == pytest.approx(kernels_ns * 1.02, rel=0.03)


def test_four_of_five_further_errors_lie_within_the_interval():
    generator = np.random.default_rng(0)
    for count in (4, 9, 12, 14, 40):
        errors = generator.normal(size=(4000, count))
        further = np.abs(generator.normal(size=4000))
        inside = np.mean(further <= [interval_of(sample) for sample in errors])
        # The probability is rank / (count + 1); the mean of 4,000 trials is within 2% of it.
        assert inside == pytest.approx(math.ceil(0.8 * (count + 1)) / (count + 1), abs=0.02)
    assert interval_of(np.array([0.1, -0.2, 0.3])) == math.inf
    assert interval_of(np.array([0.1, -0.4, 0.2, 0.3])) == 0.4


def test_a_module_has_its_own_time():
    interpolation = Interpolation.of(*rows_of(default_grid(32768)), FORM)
    time_ns = interpolation.module(["decode_attention"])
    assert time_ns(Composition(24, 3000)) == pytest.approx(2e5 + 40 * 24 * 3001, rel=0.05)
    assert time_ns(Composition(prefills=1, prefill_tokens=5)) == 0
    assert interpolation.module(["no.such.module"])(Composition(1, 1)) == 0


def test_too_few_points():
    rows, kernels = rows_of(parse_grid("decode: batch=1,2 context=8"))
    with pytest.raises(AnnotateError) as error:
        Interpolation.of(rows, kernels, FORM)
    assert error.value.code == "bundle-too-few-points"
    assert cross_validate(rows, kernels, None) is None


def test_a_kind_that_was_not_measured():
    interpolation = Interpolation.of(*rows_of(parse_grid("decode: batch=1,2,4 context=8")), FORM)
    with pytest.raises(AnnotateError) as error:
        interpolation.step(Composition(prefills=1, prefill_tokens=8))
    assert error.value.code == "bundle-no-such-steps"

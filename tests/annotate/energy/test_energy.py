"""Energy of small graphs with round figures and of the captured step; the power model's fit."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import polars as pl
import pytest
from database_row import ROW
from notes import codes, has_note, note_of
from raised import raises_code

from onerank.annotate import PassOptions, load_gpu, recost, with_figures
from onerank.annotate.energy import StepDurations, report_energy, sensor_notes, work_notes
from onerank.annotate.kernel_db.database import table_of, write_database
from onerank.annotate.models.features import ComponentGemms
from onerank.annotate.models.power import PowerCoefficients, power_model, power_share
from onerank.annotate.models.tile_kernels import executed_over_counted, loads_of_small_tiles
from onerank.annotate.op_costs.cost_record import PartKernel, Work
from onerank.annotate.op_costs.engine_operators import ExpertSizes, expert_parts
from onerank.converters.sources.kineto import convert_directory
from onerank.ir import Kind, Reading, Sensors
from tools.fit.fit_power import (
    FittedPower,
    HeldOut,
    Powers,
    errors_of,
    fit,
    model_of,
    read_measured,
    step_of,
    to_toml,
)
from tools.fit.fit_power import without_its_class as left_out
from tools.fit.public_powers import read_gemm_runs

TRACES = Path(__file__).parents[3] / "traces"

C = power_model().coefficients


def test_a_kernel_at_full_rate_is_held_to_the_limit_and_gaps_draw_idle_power(trace, mm):
    gpu = with_figures(load_gpu("H200"), {"tdp_w": 700, "idle_w": 100})
    # 2 * 4096^3 FLOPs in 204.97 us are 671 of the 700 TFLOPS that the H200 sustains.
    graph = trace(mm(4096, 4096, 4096, ns=204_970))
    found = report_energy(graph, gpu, StepDurations(304_970, 204_970, "made"))
    assert C.base + C.active + C.tensor > 1
    at_limit = power_model().at_limit
    assert 0.95 < at_limit < 1
    assert found.node_uj[0] == pytest.approx(at_limit * 700 * 204.970, rel=1e-5)
    assert found.idle_uj == 100 * 100
    assert found.step_uj == found.busy_uj + found.idle_uj
    assert found.step_low_uj < found.step_uj < found.step_high_uj
    memory = 3 * 4096**2 * 2 / 204_970e-9 / (4.8e12 * 0.856)
    tensor = 2 * 4096**3 / 204_970e-9 / gpu.tensor_flops_per_s("bfloat16")
    share = C.base + C.active * (1 - 2640 / 204_970) + C.tensor * tensor + C.memory * memory
    note_of(found.notes, "energy-power-limit", round(share * 700), 700)


def test_among_others_a_kernel_may_pass_the_limit_that_holds_the_mean(trace, mm, add):
    gpu = load_gpu("H200")
    graph = trace(mm(4096, 4096, 4096, ns=204_970), add(100_000_000, ns=800_000))
    found = report_energy(graph, gpu, StepDurations(1_004_970, 1_004_970, "made"))
    product, rest = (uj / us for uj, us in zip(found.node_uj, (204.97, 800), strict=True))
    assert product > 700 > found.mean_power_mw / 1e3 > rest
    assert not has_note(found.notes, "energy-power-limit")


def test_links_that_are_active_draw_their_power_all_the_time(trace, mm, add):
    operators = mm(4096, 4096, 4096, ns=204_970), add(100_000_000, ns=800_000)
    call = {"op": "c10d::allreduce_", "kernels": [("all_reduce", 0, Kind.COLLECTIVE)]}
    idle = trace(*operators, call)
    active = recost(idle, "H200", passes=PassOptions(nvlink_active=True))
    durations, gpu = StepDurations(1_204_970, 1_004_970, "made"), load_gpu("H200")
    before, after = (report_energy(graph, gpu, durations) for graph in (idle, active))
    assert after.idle_uj - before.idle_uj == pytest.approx(23 * 200, abs=1)
    assert after.node_uj[1] - before.node_uj[1] == pytest.approx(23 * 800, abs=1)
    assert before.coefficients == after.coefficients
    note_of(after.notes, "energy-links-active", 23)


def test_a_stream_of_bytes_draws_less_than_the_limit(trace, add):
    # 6 bytes an element at 4.8 TB/s * 0.856: 1.46 ms; one operation of 67 * 0.759 TFLOPS for each
    graph = trace(add(1_000_000_000, ns=1_460_300))
    found = report_energy(graph, load_gpu("H200"), StepDurations(1_460_300, 1_460_300, "made"))
    active = 1 - 2640 / 1_460_300
    vector = 1e9 / 1_460_300e-9 / (67e12 * 0.759)
    share = C.base + C.active * active + C.memory + C.vector * vector
    assert found.mean_power_mw == pytest.approx(share * 700_000, rel=1e-3)
    assert found.mean_power_mw == pytest.approx(580_000, rel=0.1), "620 W measured of such a sum"


def test_a_short_kernel_draws_no_less_than_an_idle_gpu(trace, add):
    gpu = load_gpu("H200")
    found = report_energy(trace(add(4096, ns=1300)), gpu, StepDurations(1300, 1300, "made"))
    assert C.base * gpu.tdp_w < gpu.idle_w, "the fitted base alone is below idle power"
    assert found.mean_power_mw == gpu.idle_w * 1000
    assert found.mean_power_mw == pytest.approx(129_000, rel=0.2), "measured on an H200"


def test_a_captured_step_draws_between_idle_power_and_limit():
    graph = convert_directory(TRACES / "h200-llama-8b-4l-tp4")[0]
    found = report_energy(
        graph, load_gpu("H200"), StepDurations(31_526_976, 29_865_307, "measured")
    )
    assert 600_000 < found.mean_power_mw <= 700_000
    assert found.classes[0].op_class == "gemm"
    assert sum(row.energy_uj for row in found.classes) == pytest.approx(sum(found.node_uj), abs=900)
    assert sum(found.node_uj) == pytest.approx(found.busy_uj, rel=1e-3)
    assert len(found.node_ids) == 850
    assert codes(found.notes)[:2] == ["energy-power-model", "energy-interval-source"]
    assert codes(work_notes(0, 3)) == ["energy-unknown-work"]


def test_the_interval_holds_that_of_predicted_times(trace, mm):
    """A product of an H200: measured there, re-costed for an A100, and for a GPU unlike both."""
    graph, durations = (
        trace(mm(4096, 4096, 4096, ns=200_000)),
        StepDurations(200_000, 200_000, "made"),
    )
    (node,) = np.flatnonzero(graph.gpu_compute)
    for name in ("H200", "A100", "MI300X"):
        made, gpu = recost(graph, name), load_gpu(name)
        found = report_energy(made, gpu, durations)
        low, high = made.job.annotations[-1].details.get("interval", (1, 1))
        off, model = (high / low) ** 0.5 - 1, power_model()
        wide = found.step_high_uj / found.step_uj - 1
        assert wide == pytest.approx(np.hypot(model.step_error, off), rel=1e-3)
        above = np.log(found.node_high_uj[0] / found.node_uj[0])
        time = (
            0 if name == "H200" else np.log(made.nodes.p90_ns[node] / made.nodes.duration_ns[node])
        )
        assert above == pytest.approx(np.hypot(model.kernel_high, time), rel=1e-3)
        assert has_note(found.notes, "energy-interval-with-times") == (name != "H200")
    fused = recost(trace(mm(4096, 4096, 4096)), "A100", model="ratio")
    notes = report_energy(fused, load_gpu("A100"), durations).notes
    assert has_note(notes, "energy-interval-without-times")


def test_a_gpu_without_power_figures_is_an_error_that_says_what_to_set(trace, mm):
    graph = recost(trace(mm(64, 64, 64)), "TPU-v5p")
    with raises_code("energy-gpu-incomplete"):
        report_energy(graph, load_gpu("TPU-v5p"), StepDurations(1, 1, "made"))


def test_a_graph_without_durations_is_an_error(trace, mm):
    with raises_code("energy-no-durations"):
        report_energy(trace(mm(64, 64, 64, ns=0)), load_gpu("H200"), StepDurations(1, 1, "made"))


MADE = PowerCoefficients(base=0.2, active=0.2, tensor=0.7, memory=0.3, vector=4.0)


def held(share: float = 1.0) -> Powers:
    """Return calls of two classes whose power follows the model, at the limit for some."""
    rng = np.random.default_rng(1)
    use = np.concatenate([np.ones((400, 1)), rng.random((400, 3)), rng.random((400, 1)) / 20], 1)
    names = ("gemm", "elementwise") * 200
    drawing = np.minimum(1, power_share(use, MADE)) * share
    return Powers(load_gpu("H200"), use, drawing, rng.random(400), names)


def test_the_fit_finds_the_coefficients_it_was_made_with():
    made = msgspec.structs.astuple(MADE)
    assert fit([held()]) == pytest.approx(made, abs=1e-3)
    assert abs(errors_of(FittedPower.of([held()]), held()).energy) < 1e-3
    assert left_out(held()) == pytest.approx(0, abs=1e-3)
    assert errors_of(FittedPower(np.array(made), 1.0), held(share=0.8)).energy == pytest.approx(
        0.25
    )


def test_the_steps_interval_is_the_largest_error_that_was_not_fitted_to():
    cases = [HeldOut("some", held(share=0.8)), HeldOut("others", held())]
    model, _ = model_of([held()], cases, [], "made")
    assert model.step_error == 0.25
    assert model.step_errors == "some +25.0%, others +0.0%"
    assert "vector = 4.000" in to_toml(model)
    assert model.at_limit == 1
    drawing = held()
    below = replace(drawing, share=np.minimum(0.96, drawing.share))
    assert FittedPower.of([below]).at_limit == pytest.approx(0.96)
    alone, _ = model_of([held()], [], [], "made")
    assert alone.step_error == 1, "nothing is known of other calls"


def test_a_step_is_held_against_its_sensor_if_it_was_read_for_long_enough():
    graph = convert_directory(TRACES / "h200-llama-8b-4l-tp4")[0]
    sensors = Sensors(samples=300, power_mw=Reading(600_000, 590_000, 610_000))
    device = msgspec.structs.replace(graph.job.device, sensors=sensors)
    measured = msgspec.structs.replace(graph.job.measurement, step_ns=(31_000_000,) * 100)
    job = msgspec.structs.replace(graph.job, device=device, measurement=measured)
    step = step_of("it", replace(graph, job=job), power_model())
    assert step.read_w == 600
    brief = msgspec.structs.replace(graph.job, device=device)  # its steps take 0.3 s
    assert codes(sensor_notes(replace(graph, job=brief))) == ["energy-sensor-too-brief"]
    assert sensor_notes(replace(graph, job=job)) == ()
    assert step.error == pytest.approx(step.modelled_w / 600 - 1)
    with raises_code("fit-step-too-short", naming=("it: ", "0.3 s", "1.5 s")):
        step_of("it", graph, power_model())


def test_rows_of_a_database_become_uses(tmp_path: Path):
    """A product of 34.4 GFLOP in 45 us: 763 of 700 TFLOPS; 8 + 8 + 32 MiB at 4.11 TB/s: 12.2 us."""
    write_database(table_of([ROW]), tmp_path / "h.parquet")
    (found,) = read_measured(tmp_path / "h.parquet")
    assert found.names == ("gemm",)
    assert found.use[0] == pytest.approx([1, 1 - 2640 / 45_000, 1.090, 0.272, 0], abs=2e-3)
    assert found.share[0] == 640.5 / 700
    quiet = msgspec.structs.replace(ROW, power_w=None, energy_mj=None)
    write_database(table_of([quiet]), tmp_path / "q.parquet")
    with raises_code("fit-no-power"):
        read_measured(tmp_path / "q.parquet")


def test_a_table_without_power_is_an_error(tmp_path: Path):
    path = tmp_path / "x.parquet"
    pl.DataFrame({"gpu": ["H200"], "m": [1]}).write_parquet(path)
    with raises_code("fit-missing-columns", naming=("x.parquet", "n, k, time_us, power_w")):
        read_gemm_runs(path)
    with raises_code("fit-no-file"):
        read_gemm_runs(tmp_path / "none.parquet")


def test_a_reading_contains_half_of_the_run_before(tmp_path: Path):
    """Six copies of 1 ms run 167 times, 1.002 s; the sensor shows the last second.

    Two runs at the limit, then one at half of it. 36 ms of its warm-up are before its first
    reading, so eleven readings show 0.036 to 1 s of it: 0.533 s in the mean.
    """
    sizes = {"m": [3, 2, 1], "n": [8] * 3, "k": [8] * 3, "time_us": [1000.0] * 3}
    rows = {"gpu": ["H200"] * 3, "dtype": ["bfloat16"] * 3, **sizes, "power_w": [700.0, 700, 350]}
    pl.DataFrame(rows).write_parquet(tmp_path / "gemm_power.parquet")
    random = pl.DataFrame(rows | {"time_us": [1000.0, 1200.0, 1000.0]})
    random.write_parquet(tmp_path / "gemm.parquet")
    (runs,) = read_gemm_runs(tmp_path / "gemm_power.parquet")
    assert runs.sizes[:, 0].tolist() == [3, 2, 1]
    assert runs.with_random_weights.tolist() == [True, False, True]
    readings = runs.readings(np.array([1.0, 1.0, 0.5]))
    assert readings[:2] == pytest.approx(1)
    assert readings[2] == pytest.approx(1 - 0.5 * 0.533, abs=0.01)
    assert runs.readings(np.full(3, 0.7)) == pytest.approx(0.7)


def test_a_fill_draws_less_than_a_copy_of_as_many_bytes(trace):
    """At 80% of the bandwidth: a fill of an H200 drew 347 W, a copy 574 W and more."""
    gpu, tensor = load_gpu("H200"), "Tensor(c10::BFloat16)"
    ns = 4 * 10**8 / (gpu.bandwidth_bytes_per_s * 0.8) * 1e9
    durations, drawn = StepDurations(round(ns), round(ns), "made"), {}
    for op, inputs in (("fill_", ((200_000_000,),)), ("copy_", ((100_000_000,),) * 2)):
        operands = [(tensor, shape) for shape in inputs]
        graph = trace({"op": f"aten::{op}", "inputs": operands, "ns": round(ns)})
        drawn[op] = report_energy(graph, gpu, durations).mean_power_mw / 1e3
    assert drawn["copy_"] - drawn["fill_"] == pytest.approx(0.7 * 0.8 * C.memory * 700, rel=0.01)


def test_experts_draw_the_power_of_whole_tiles():
    """Two tokens for each of 128 experts: vLLM's tiles of 16 rows multiply 8 times as much."""
    sizes = ExpertSizes(32, 8, 128, 2048, 1536, 768)
    few = Work(parts=expert_parts(sizes, PartKernel.VLLM_FEW_TOKENS))
    plain = Work(parts=expert_parts(sizes, PartKernel.LIBRARY))
    ratio = executed_over_counted(ComponentGemms.of([few, plain, Work()]), 3)
    assert ratio.tolist() == [8, 1, 1]


def test_small_tiles_of_experts_load_more_from_the_cache_than_large_ones():
    """128 experts of 64 tokens: 24 tiles of 64 x 64 each in the first GEMM and 32 in the second.

    A tile loads 128 elements of 2 bytes for each of k, one of 256 x 128 for as many FLOPs 48.
    """
    sizes = ExpertSizes(1024, 8, 128, 2048, 1536, 768)
    layer = Work(parts=expert_parts(sizes, PartKernel.VLLM_EXPERTS))
    plain = Work(parts=expert_parts(sizes, PartKernel.LIBRARY))
    loads = loads_of_small_tiles(ComponentGemms.of([layer, plain]), 2)
    assert loads.tolist() == [2 * 80 * 128 * (24 * 2048 + 32 * 768), 0]

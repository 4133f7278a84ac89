"""Storage as nodes: how long they take, what waits, and what a simulator is given instead."""

from dataclasses import replace
from pathlib import Path

import pytest
from notes import has_note, note_of
from raised import raises_code

import onerank
from onerank.analysis.step_time import replay
from onerank.annotate.passes.storage_nodes import StorageTraffic, with_storage
from onerank.converters.sources.kineto import convert_directory
from onerank.converters.targets.astra_sim.exporter import export_astra_sim
from onerank.converters.targets.goal import export_goal
from onerank.ir import Graph, Kind

TRACES = Path(__file__).parents[2] / "traces"


@pytest.fixture(scope="module")
def h200() -> Graph:
    return convert_directory(TRACES / "h200-llama-8b-4l-tp4")[0]


def added(before: Graph, after: Graph):
    return [after.node(index) for index in range(len(before), len(after))]


def test_a_step_bears_its_share_of_a_checkpoint_of_parameters_and_optimizer(h200: Graph):
    made = with_storage(h200, StorageTraffic(gb_per_s=2, checkpoint_every=500))
    (node,) = added(h200, made)
    share = round(3 * 962_666_496 / 500)  # bf16 parameters and two moments, one rank of 4
    assert node.kind is Kind.MEM_STORE
    assert node.value("bytes_written") == share
    assert node.duration_ns == round(share / 2)
    assert replay(made).step_time_ns == pytest.approx(
        replay(h200).step_time_ns + share // 2, abs=2_000
    )
    note_of(made.job.measurement.notes, "storage-checkpoint", 2887999488, 500)


def test_a_batch_read_during_the_step_costs_nothing_and_one_before_it_all_its_time(h200: Graph):
    before = replay(h200).step_time_ns
    concurrent = with_storage(h200, StorageTraffic(gb_per_s=1, batch_bytes=5_000_000))
    (node,) = added(h200, concurrent)
    assert (node.kind, node.duration_ns) == (Kind.MEM_LOAD, 5_000_000)
    assert replay(concurrent).step_time_ns == pytest.approx(before, abs=2_000)
    note_of(concurrent.job.measurement.notes, "storage-load", 5_000_000, 1)
    waits = with_storage(h200, StorageTraffic(gb_per_s=1, batch_bytes=5_000_000, prefetch=False))
    assert replay(waits).step_time_ns == pytest.approx(before + 5_000_000, abs=2_000)


def test_nodes_survive_the_file_and_are_delays_for_simulators(h200: Graph, tmp_path: Path):
    given = StorageTraffic(gb_per_s=1, batch_bytes=1_000_000, checkpoint_every=9)
    made = with_storage(h200, given)
    made.write(tmp_path / "t.et")
    again = onerank.read(tmp_path / "t.et")
    assert [n.kind for n in added(h200, again)] == [Kind.MEM_LOAD, Kind.MEM_STORE]
    stored = 2_887_999_488 // 9
    for prefetch, delays in ((True, [stored]), (False, [1_000_000, stored])):
        made = with_storage(h200, replace(given, prefetch=prefetch))
        done = export_astra_sim(made, tmp_path / "workload")
        assert done.gpu_time_ns == 29_865_307
        assert has_note(done.notes, "storage-prefetch-not-exported", "1.000 ms") is prefetch
        nodes = onerank.read(tmp_path / "workload" / "workload.0.et").nodes
        assert nodes.duration_ns.sum() - 29_865_307 == sum(delays)
    schedule = export_goal(made, tmp_path / "job.goal")
    assert schedule.cpus == 3
    assert f"calc {stored} cpu" in (tmp_path / "job.goal").read_text()


def test_memory_nodes_without_a_time_are_refused(h200: Graph, tmp_path: Path):
    made = with_storage(h200, StorageTraffic(gb_per_s=1, batch_bytes=1))
    duration = made.nodes.duration_ns.copy()
    duration[-1] = 0
    with raises_code("storage-no-duration"):
        export_astra_sim(made.with_columns(duration_ns=duration), tmp_path / "workload")


@pytest.mark.parametrize(
    ("storage", "code"),
    [
        (StorageTraffic(gb_per_s=0, batch_bytes=1), "storage-rate-out-of-range"),
        (StorageTraffic(gb_per_s=2e9, batch_bytes=1), "storage-rate-out-of-range"),
        (StorageTraffic(gb_per_s=float("nan"), batch_bytes=1), "storage-rate-out-of-range"),
        (StorageTraffic(gb_per_s=1), "storage-nothing-to-add"),
        (StorageTraffic(gb_per_s=1, batch_bytes=-1), "storage-negative"),
    ],
)
def test_nonsense_is_an_error(trace, mm, storage: StorageTraffic, code: str):
    with raises_code(code):
        with_storage(trace(mm(8, 8, 8)), storage)


def test_a_checkpoint_of_unknown_size_is_an_error_and_may_be_given(trace, mm):
    graph = trace(mm(8, 8, 8))
    with raises_code("storage-checkpoint-unknown"):
        with_storage(graph, StorageTraffic(gb_per_s=1, checkpoint_every=2))
    made = with_storage(
        graph, StorageTraffic(gb_per_s=1, checkpoint_every=2, checkpoint_bytes=1000)
    )
    assert added(graph, made)[0].duration_ns == 500

"""Graphs and arguments that the ASTRA-sim export refuses; no file remains."""

import errno
import json
import re
import resource
from pathlib import Path
from typing import Any

import pytest
from astra_sim_steps import TP2_DP2, TP4, Step, one_collective, small_step, step_with_gaps
from raised import raises_code

from onerank.annotate.passes.storage_nodes import StorageTraffic, with_storage
from onerank.converters.expand.ranks import expand_ranks
from onerank.converters.targets.astra_sim.config_files import SimulatedNetwork
from onerank.converters.targets.astra_sim.exporter import export_astra_sim, export_astra_sim_ranks
from onerank.ir import (
    Annotation,
    Collective,
    Graph,
    Job,
    Kind,
    Measurement,
    ProcessGroup,
    World,
)


def test_other_content_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with raises_code("export-output-not-ours"):
        export_astra_sim(small_step(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with raises_code("export-output-is-file"):
        export_astra_sim(small_step(), tmp_path / "thesis.tex")


def test_other_files_of_the_directory_survive_the_next_export(tmp_path: Path) -> None:
    export_astra_sim(small_step(), tmp_path, name="old")
    notes, results = tmp_path / "notes.txt", tmp_path / "results"
    notes.write_text("x")
    results.mkdir()
    (results / "run.log").write_text("42 cycles")
    before = sorted(path.name for path in tmp_path.iterdir())
    with raises_code("export-output-not-ours"):
        export_astra_sim(small_step(), tmp_path, name="new")
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    exported = export_astra_sim(small_step(), tmp_path, name="new", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [*exported.files, "notes.txt", "results"]
    )
    assert notes.read_text() == "x"
    assert (results / "run.log").read_text() == "42 cycles"


def test_a_directory_named_like_an_exported_file_is_kept(tmp_path: Path) -> None:
    (tmp_path / "run.sh").mkdir()
    (tmp_path / "run.sh" / "mine").write_text("x")
    with raises_code("export-output-not-ours"):
        export_astra_sim(small_step(), tmp_path, overwrite=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["run.sh", "mine"]


@pytest.mark.parametrize(
    ("manifest", "code"),
    [
        ('{"files": ["../thesis.tex", "/etc/passwd", "workload.0.et"]}', ""),
        ('{"files": 3}', "export-manifest-malformed"),
        ("[" * 100_000, "export-manifest-malformed"),
    ],
)
def test_a_manifest_names_files_of_its_own_directory_only(
    manifest: str, code: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "thesis.tex").write_text("years of work")
    (out / "export.json").write_text(manifest)
    if code:
        with raises_code(code):
            export_astra_sim(small_step(), out)
    else:
        export_astra_sim(small_step(), out)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_the_current_directory_stays_when_exported_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    inode = tmp_path.stat().st_ino
    export_astra_sim(small_step(), ".", name="old")
    exported = export_astra_sim(small_step(), ".", name="new")
    assert sorted(path.name for path in Path.cwd().iterdir()) == exported.files
    assert tmp_path.stat().st_ino == inode


def test_a_full_disk_names_the_directory_and_keeps_the_earlier_export(tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_astra_sim(small_step(), out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256, limits[1]))
    try:
        with pytest.raises(OSError) as error:  # noqa: PT011 - the errno is asserted below
            export_astra_sim(small_step(), out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (error.value.errno, error.value.filename) == (errno.EFBIG, str(out))
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.parametrize(
    ("ranks", "world", "hint"),
    [
        ((0, 1), {"dp": 8}, "capture with --cp 2 --dp 4, which have such groups"),
        ((0, 1, 2, 3), {"dp": 8}, "capture with --cp 4 --dp 2"),
        ((0, 4), {"dp": 8}, "capture with --cp 4 --dp 2"),
        # Experts of a mesh that shares their tokens along tp and a part of dp.
        ((0, 1, 2, 3), {"tp": 2, "dp": 4}, "capture with --tp 2 --cp 2 --dp 2, which"),
        ((0, 4), {"tp": 2, "dp": 4, "pp": 2}, "capture with --tp 2 --cp 2 --dp 2 --pp 2"),
        ((0, 2), {"tp": 2, "cp": 4, "dp": 2}, "or give the group one of the axes tp, cp, dp$"),
        ((0, 2), {"dp": 8}, "or give the group one of the axes dp$"),  # neither a row nor a column
        ((0, 1, 3), {"dp": 8}, "or give the group one of the axes dp$"),
    ],
)
def test_a_group_inside_an_axis_gets_the_axes_to_capture_with(ranks, world, hint, tmp_path) -> None:
    """FSDP that reshards to a part of its ranks after forward has such groups."""
    job = Job(world=World.of(**world), groups=(ProcessGroup("shards", ranks),))
    with raises_code("export-group-not-placeable") as caught:
        export_astra_sim(one_collective(Collective.ALL_GATHER, 64, "shards", job), tmp_path)
    assert re.search(hint, str(caught.value))


@pytest.mark.parametrize(
    ("ranks", "groups"),
    [
        ((0, 1), [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ((0, 4), [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ((4, 6), [[0, 2], [1, 3], [4, 6], [5, 7]]),
    ],
)
def test_a_group_of_a_mesh_is_placed_by_its_dimension(ranks, groups, tmp_path) -> None:
    """HSDP of a script, exported from one rank: the mesh has a group of each rank."""
    job = Job(rank=ranks[0], world=World.of(dp=8), groups=(ProcessGroup("mesh_shard", ranks),))
    export_astra_sim(one_collective(Collective.ALL_GATHER, 64, "mesh_shard", job), tmp_path / "out")
    written = json.loads((tmp_path / "out" / "comm_groups.json").read_text())
    assert sorted(group for group in written.values() if len(group) == 2) == groups


def test_an_irregular_group_of_a_mesh_is_refused(tmp_path) -> None:
    job = Job(world=World.of(dp=8), groups=(ProcessGroup("mesh_shard", (0, 1, 3)),))
    with raises_code("export-group-not-placeable"):
        export_astra_sim(one_collective(Collective.ALL_GATHER, 64, "mesh_shard", job), tmp_path)


def test_a_group_inside_an_axis_is_placed_by_the_traces_of_all_ranks(tmp_path) -> None:
    """HSDP of a script: each rank's own trace names its group."""
    pairs = ((0, 1), (2, 3))
    graphs = []
    for rank in range(4):
        job = Job(
            rank=rank,
            world=World.of(dp=4),
            groups=(ProcessGroup("mesh_shard", pairs[rank // 2]),),
        )
        graphs.append(one_collective(Collective.ALL_GATHER, 64, "mesh_shard", job))
    export_astra_sim_ranks(expand_ranks(graphs), tmp_path / "out", name="job")
    groups = json.loads((tmp_path / "out" / "comm_groups.json").read_text())
    assert [0, 1] in groups.values()
    assert [2, 3] in groups.values()


def test_findings_leave_nothing_behind(tmp_path: Path) -> None:
    step = Step()
    for stream in range(100):
        step.kernel("gemm", 1000, stream=stream)
    with raises_code("export-check-failed") as caught:
        export_astra_sim(step.build(TP4), tmp_path / "out")
    assert "100 nodes" in str(caught.value)
    assert "[ready-width]" in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("graph", "code"),
    [
        (one_collective(Collective.NONE, 64, "tp"), "export-unknown-collective"),
        (one_collective(Collective.BROADCAST, -1, "tp"), "export-no-bytes"),
        (one_collective(Collective.ALL_REDUCE, -1, "tp"), "export-no-bytes"),
        (one_collective(Collective.ALL_REDUCE, 64, "odd"), "export-group-not-placeable"),
        (one_collective(Collective.ALL_REDUCE, 64, "ep"), "export-unknown-group"),
        (
            one_collective(
                Collective.ALL_REDUCE,
                64,
                "tp",
                Job(world=World({"tp": 4}), groups=(ProcessGroup("tp", (0, 1), "tp"),)),
            ),
            "export-group-off-axis",
        ),
        (small_step(Job()), "export-one-rank"),
        (
            small_step(Job(world=World({"tp": 1, "dp": 1}))),
            "export-one-rank",
        ),
        (small_step(Job(world=World({"tp": 2}), rank=2)), "export-rank-outside-world"),
    ],
)
def test_a_graph_that_cannot_represent_the_other_ranks(
    graph: Graph, code: str, tmp_path: Path
) -> None:
    with raises_code(code):
        export_astra_sim(graph, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "job",
    [{}, {"measurement": Measurement(step_ns=(9,)), "annotations": (Annotation("H100", "m", ""),)}],
)
def test_host_time_needs_a_capture_on_the_gpu(job: dict[str, Any], tmp_path: Path) -> None:
    with raises_code("host-delays-untimed-host"):
        export_astra_sim(step_with_gaps(**job), tmp_path, host_time=True)


def test_host_time_with_storage_needs_a_host_timed_by_itself(tmp_path: Path) -> None:
    """`onerank storage` removes the measured step, which had no such reads."""
    graph = with_storage(
        step_with_gaps(measurement=Measurement(step_ns=(9,))),
        StorageTraffic(gb_per_s=1.0, batch_bytes=1000),
    )
    with raises_code("host-delays-with-storage"):
        export_astra_sim(graph, tmp_path, host_time=True)


def test_ranks_must_agree_with_the_world(tmp_path: Path) -> None:
    with raises_code("export-rank-count") as caught:
        export_astra_sim(small_step(TP2_DP2), tmp_path, ranks=8)
    assert "tp 2 * dp 2 = 4 ranks" in str(caught.value)


def test_a_cpu_capture_must_be_annotated_first(tmp_path: Path) -> None:
    step = Step()
    step.collective(Collective.ALL_REDUCE, 64, "tp", step.host())
    with raises_code("graph-no-gpu-time"):
        export_astra_sim(step.build(TP4), tmp_path)


def test_memory_nodes_are_refused(tmp_path: Path) -> None:
    step = Step()
    step.add(name="load", kind=Kind.MEM_LOAD)
    with raises_code("storage-no-duration"):
        export_astra_sim(step.build(TP4), tmp_path)


def test_nothing_to_run(tmp_path: Path) -> None:
    with raises_code("export-empty-graph"):
        export_astra_sim(one_collective(Collective.ALL_REDUCE, 0, "tp"), tmp_path)


def test_a_cycle_is_named(tmp_path: Path) -> None:
    step = Step()
    step.kernel("one", 1000, 1)
    step.kernel("two", 1000, 0)
    with raises_code("graph-cycle"):
        export_astra_sim(step.build(TP4), tmp_path)


def test_a_pipeline_stage_cannot_represent_all_ranks(tmp_path: Path) -> None:
    job = Job(world=World({"pp": 4}), rank=1)
    step = Step()
    step.message(Kind.SEND, 2, 512, step.kernel("forward", 1000, step.message(Kind.RECV, 0, 512)))
    with raises_code("export-p2p-cycle"):
        export_astra_sim(step.build(job), tmp_path)
    step = Step()
    step.message(Kind.SEND, 2, 512, step.kernel("forward", 1000))
    with raises_code("export-unmatched-p2p"):
        export_astra_sim(step.build(job), tmp_path)


@pytest.mark.parametrize(
    ("peer", "code"), [(1, "export-peer-is-self"), (-1, "export-peer-out-of-range")]
)
def test_a_message_needs_another_rank(peer: int, code: str, tmp_path: Path) -> None:
    step = Step()
    step.message(Kind.SEND, peer, 512)
    with raises_code(code):
        export_astra_sim(step.build(Job(world=World({"pp": 4}), rank=1)), tmp_path)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ({"name": "a/b"}, "export-bad-name"),
        ({"name": "step_roofline"}, "export-reserved-name"),
        ({"network": SimulatedNetwork(0)}, "export-bandwidth"),
        ({"network": SimulatedNetwork(latency_ns=-1)}, "export-latency"),
    ],
)
def test_arguments(arguments: dict[str, Any], code: str, tmp_path: Path) -> None:
    with raises_code(code):
        export_astra_sim(small_step(), tmp_path, **arguments)

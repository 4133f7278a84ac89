"""The files of an ASTRA-sim export."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from astra_sim_steps import TP2_DP2, TP4, Step, one_collective, small_step, step_with_gaps, values
from notes import codes, has_note, note_of
from raised import raises_code

from onerank.converters.targets.astra_sim.config_files import SimulatedNetwork
from onerank.converters.targets.astra_sim.exporter import export_astra_sim
from onerank.converters.targets.astra_sim.write_traces import Workload, micros
from onerank.ir import (
    Annotation,
    Collective,
    Job,
    Kind,
    Measurement,
    World,
)
from onerank.ir.chakra import read_records


def test_micros_carry_the_remainder() -> None:
    assert micros([1500, 1500, 1500, 1500]) == [2, 1, 2, 1]
    assert micros([499, 499, 499]) == [0, 1, 0]


@pytest.mark.parametrize("nanoseconds", [1, 2, 333, 499, 500, 501, 999, 1000, 1001, 12_345])
def test_micros_never_drift_by_one(nanoseconds: int) -> None:
    simulated = exact = 0
    for whole in micros([nanoseconds] * 5000):
        simulated += whole * 1000 or 1  # ASTRA-sim runs 0 us as 1 ns
        exact += nanoseconds
        assert abs(simulated - exact) < 1000


def test_files_of_a_small_step(tmp_path: Path) -> None:
    exported = export_astra_sim(small_step(), tmp_path / "out", name="step")
    assert exported.files == sorted(path.name for path in (tmp_path / "out").iterdir())
    assert exported.files == [
        "comm_groups.json",
        "export.json",
        "logging.toml",
        "memory.json",
        "network.yml",
        "run.sh",
        *[f"step.{rank}.et" for rank in range(4)],
        *[f"step_roofline.{rank}.et" for rank in range(4)],
        "system.json",
        "system_roofline.json",
    ]
    assert (exported.ranks, exported.nodes, exported.gpu_time_ns) == (4, 3, 12_678)
    assert exported.groups == {1: (0, 1, 2, 3)}
    assert exported.dropped == {"host operations": 2}
    assert codes(exported.notes) == ["idle-time-not-exported", "assumed-network"]
    note_of(exported.notes, "idle-time-not-exported", "12.678 us")
    note_of(exported.notes, "assumed-network", 450, 500, 3350)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_nodes_in_microseconds(tmp_path: Path) -> None:
    export_astra_sim(small_step(), tmp_path / "out")
    gemm, reduce, add = read_records(tmp_path / "out/workload.2.et").nodes
    assert (gemm.id, gemm.name, gemm.type, gemm.duration_micros) == (0, "gemm", 4, 12)
    assert values(gemm) == {
        "is_cpu_op": ("bool_val", False),
        "duration_ns": ("int64_val", 12_345),
    }
    assert (reduce.id, reduce.type, tuple(reduce.data_deps)) == (1, 7, (0,))
    assert values(reduce) == {
        "is_cpu_op": ("bool_val", False),
        "duration_ns": ("int64_val", 0),
        "comm_type": ("int64_val", 0),
        "comm_size": ("int64_val", 4096),
        "pg_name": ("string_val", "1"),
    }
    # 12.345 + 0.333 us is 12.678, the nearest to which is 13
    assert (add.id, tuple(add.data_deps), add.duration_micros) == (2, (1,), 1)
    assert not any(node.ctrl_deps for node in (gemm, reduce, add))


def test_nodes_to_the_nanosecond(tmp_path: Path) -> None:
    export_astra_sim(small_step(), tmp_path / "out")
    gemm, reduce, add = read_records(tmp_path / "out/workload_roofline.0.et").nodes
    assert values(gemm)["num_ops"] == ("int64_val", 12_345_500)
    assert values(gemm)["tensor_size"] == ("uint64_val", 1)
    assert values(add)["num_ops"] == ("int64_val", 333_500)
    assert "num_ops" not in values(reduce)


def test_ranks_of_one_line_have_equal_files(tmp_path: Path) -> None:
    export_astra_sim(small_step(), tmp_path)
    assert len({path.read_bytes() for path in tmp_path.glob("workload.*.et")}) == 1


def test_groups_of_two_axes(tmp_path: Path) -> None:
    step = Step()
    first = step.collective(Collective.ALL_REDUCE, 64, "tp")
    second = step.collective(Collective.REDUCE_SCATTER, 128, "dp", first)
    step.collective(Collective.ALL_TO_ALL, 256, "all", second)
    exported = export_astra_sim(step.build(TP2_DP2), tmp_path)
    assert exported.groups == {1: (0, 1, 2, 3), 2: (0, 1), 3: (2, 3), 4: (0, 2), 5: (1, 3)}
    assert json.loads((tmp_path / "comm_groups.json").read_text()) == {
        str(number): list(ranks) for number, ranks in exported.groups.items()
    }
    used = [
        [node.attributes["pg_name"].value for node in read_records(path).nodes]
        for path in sorted(tmp_path.glob("workload.*.et"))
    ]
    assert used == [["2", "4", "1"], ["2", "5", "1"], ["3", "4", "1"], ["3", "5", "1"]]


def test_communications_of_different_groups_keep_one_order(tmp_path: Path) -> None:
    step = Step()
    for _ in range(2):
        step.collective(Collective.ALL_REDUCE, 64, "tp")
        step.collective(Collective.ALL_REDUCE, 64, "dp")
    exported = export_astra_sim(step.build(TP2_DP2), tmp_path)
    nodes = read_records(tmp_path / "workload.0.et").nodes
    assert [tuple(node.data_deps) for node in nodes] == [(), (0,), (1,), (2,)]
    note_of(exported.notes, "communication-in-order")


def test_nodes_without_time_or_bytes_are_dropped_and_counted(tmp_path: Path) -> None:
    step = Step()
    before = step.kernel("before", 1000)
    single = step.collective(Collective.BROADCAST, 64, "alone", before)
    nothing = step.collective(Collective.ALL_REDUCE, 0, "tp", single)
    marker = step.kernel("marker", 0, nothing, stream=8)
    step.add(name="profiler", kind=Kind.METADATA)
    step.kernel("after", 2000, marker, stream=9)
    exported = export_astra_sim(step.build(TP2_DP2), tmp_path)
    assert exported.dropped == {
        "GPU nodes of 0 ns": 1,
        "metadata nodes": 1,
        "collectives of one-rank groups": 1,
        "communications of 0 bytes": 1,
    }
    before_node, after_node = read_records(tmp_path / "workload.0.et").nodes
    assert (before_node.name, after_node.name) == ("before", "after")
    assert tuple(after_node.data_deps) == (0,)
    note_of(exported.notes, "ranks-independent")


def test_messages_are_shifted_along_the_ring(tmp_path: Path) -> None:
    step = Step()
    step.message(Kind.SEND, 2, 512)
    step.message(Kind.RECV, 0, 512)
    job = Job(world=World({"cp": 4}), rank=1)
    export_astra_sim(step.build(job), tmp_path)
    ends = [
        [
            (node.type, node.attributes["comm_src"].value, node.attributes["comm_dst"].value)
            for node in read_records(tmp_path / f"workload.{rank}.et").nodes
        ]
        for rank in range(4)
    ]
    assert ends == [
        [(5, 0, 1), (6, 3, 0)],
        [(5, 1, 2), (6, 0, 1)],
        [(5, 2, 3), (6, 1, 2)],
        [(5, 3, 0), (6, 2, 3)],
    ]


def test_network_and_system(tmp_path: Path) -> None:
    export_astra_sim(
        small_step(),
        tmp_path,
        network=SimulatedNetwork(1.073741824, latency_ns=600, memory_gb_per_s=4800),
    )
    assert (tmp_path / "network.yml").read_text().splitlines()[::2] == [
        "topology: [ Switch ]",
        "# 1.073741824 GB/s (10**9 bytes) per rank and direction, given in GiB/s (2**30)",
        "# 600 ns from rank to rank, given per link: rank to switch, switch to rank",
    ]
    assert (tmp_path / "network.yml").read_text().splitlines()[1::2] == [
        "npus_count: [ 4 ]",
        "bandwidth: [ 1.0 ]",
        "latency: [ 300.0 ]",
    ]
    plain = json.loads((tmp_path / "system.json").read_text())
    roofline = json.loads((tmp_path / "system_roofline.json").read_text())
    assert (plain["roofline-enabled"], roofline["roofline-enabled"]) == (0, 1)
    assert (roofline["peak-perf"], roofline["local-mem-bw"]) == (1, 4800)
    assert plain["preferred-dataset-splits"] == 1


def test_notes_on_the_measured_step(tmp_path: Path) -> None:
    step = Step()
    step.kernel("one", 4000, start_ns=0)
    step.kernel("two", 3000, start_ns=2000, stream=8)
    measured = Job(world=World({"tp": 2}), measurement=Measurement(step_ns=(9000, 11_000, 10_000)))
    notes = export_astra_sim(step.build(measured), tmp_path).notes
    told = "median step", "10.000 us", "7.000 us", "3.000 us", "--include-host-delays"
    note_of(notes, "idle-time-not-exported", *told)
    note_of(notes, "compute-on-several-streams", 2, "2.000 us")
    assert not has_note(notes, "nodes-without-stream")
    step.kernel("three", 1000, stream=-1)
    note_of(export_astra_sim(step.build(measured), tmp_path).notes, "nodes-without-stream", 1)
    step = Step()
    step.kernel("one", 4000, start_ns=0)
    step.kernel("two", 3000, start_ns=2000, stream=8)
    annotated = Job(world=World({"tp": 2}), annotations=(Annotation("B200", "roofline", "H100"),))
    notes = export_astra_sim(step.build(annotated), tmp_path).notes
    note = note_of(notes, "idle-time-not-exported", "B200", "7.000 us")
    assert "--include-host-delays" not in note.text  # it would refuse a host that was not timed
    assert "overlap" not in note_of(notes, "compute-on-several-streams", 2).text


def test_small_collectives_are_noted(tmp_path: Path) -> None:
    exported = export_astra_sim(one_collective(Collective.ALL_REDUCE, 2, "all"), tmp_path)
    note_of(exported.notes, "small-collectives-rounded", 1, 4)


def test_a_graph_without_a_world_needs_the_number_of_ranks(tmp_path: Path) -> None:
    exported = export_astra_sim(small_step(Job(), group=""), tmp_path, ranks=8)
    assert exported.groups == {1: tuple(range(8))}
    assert read_records(tmp_path / "workload.7.et").nodes[1].attributes["pg_name"].value == "1"


def test_an_earlier_export_is_replaced(tmp_path: Path) -> None:
    export_astra_sim(small_step(), tmp_path / "out", name="old")
    export_astra_sim(small_step(), tmp_path / "out", name="new")
    assert not list((tmp_path / "out").glob("old*"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_host_delays_fill_the_unprofiled_step(tmp_path: Path) -> None:
    # busy for 3500 of 7000 ns, idle for 2000, 500 and 1000; a step of 5250 leaves half of these
    graph = step_with_gaps(measurement=Measurement(step_ns=(5250, 5250, 9000)))
    exported = export_astra_sim(graph, tmp_path, host_time=True)
    nodes = read_records(tmp_path / "workload_roofline.0.et").nodes
    lasts = [(node.name, values(node)["duration_ns"][1]) for node in nodes]
    wait = "idle: waiting for the host"
    assert lasts == [
        ("gemm 0", 1000),
        (wait, 1000),
        ("gemm 1", 1000),
        (wait, 250),
        ("nccl:all_reduce", 500),
        (wait, 500),
        ("gemm 2", 1000),
    ]
    assert [node.data_deps for node in nodes] == [(), (0,), (1,), (2,), (3,), (3,), (4, 5)]
    assert exported.gpu_time_ns == 3000 + 1750
    naming = "1.750 us", "3 nodes", "median step", "5.250 us", "3.500 us"
    note_of(exported.notes, "host-delays", *naming)


FALLBACKS = {
    # of 4 ranks; 102 bytes passed on 3 times are 12 shards of 26 (25.5, rounded up)
    "BROADCAST": (102, "ALL_GATHER", 26),
    "REDUCE": (102, "REDUCE_SCATTER", 102),
    "GATHER": (102, "ALL_GATHER", 102),
    "SCATTER": (102, "REDUCE_SCATTER", 102),
    "REDUCE_SCATTER_BLOCK": (102, "REDUCE_SCATTER", 102),
    "BARRIER": (0, "ALL_REDUCE", 4),
}


def test_a_hundred_messages_are_not_all_ready_at_once(tmp_path: Path) -> None:
    step = Step()
    newest: tuple[int, ...] = ()
    for tag in range(100):
        sent = step.message(Kind.SEND, 3, 512, *newest)
        received = step.message(Kind.RECV, 3, 512)
        for message in (sent, received):
            step.update(message, comm_tag=tag)
        newest = (step.kernel("gemm", 1000, received, *newest),)
    export_astra_sim(step.build(TP2_DP2), tmp_path)
    nodes = read_records(tmp_path / "workload.0.et").nodes
    assert sum(not node.data_deps for node in nodes) == 2  # the first send, the first receive


@pytest.mark.parametrize("lacking", FALLBACKS)
def test_collectives_that_astra_sim_lacks(lacking: str, tmp_path: Path) -> None:
    size, becomes, bytes_per_rank = FALLBACKS[lacking]
    exported = export_astra_sim(one_collective(Collective[lacking], size, "tp", TP4), tmp_path)
    (node,) = read_records(tmp_path / "workload.1.et").nodes
    assert values(node)["comm_type"] == ("int64_val", int(Collective[becomes]))
    assert values(node)["comm_size"] == ("int64_val", bytes_per_rank)
    lacked, substitute = (name.lower().replace("_", "-") for name in (lacking, becomes))
    note_of(exported.notes, "collective-substituted", f"no {lacked}", f"1 became {substitute}")
    assert exported.dropped == {}


def test_ranks_are_matched_without_reading_all_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Step()
    first = step.collective(Collective.ALL_REDUCE, 64, "tp")
    gemm = step.kernel("gemm", 1000, first, step.message(Kind.RECV, 3, 512))
    second = step.collective(Collective.REDUCE_SCATTER, 128, "dp", gemm)
    step.message(Kind.SEND, 3, 512, second)
    graph = step.build(TP2_DP2)
    with raises_code("export-p2p-cycle"):
        export_astra_sim(graph, tmp_path / "out")
    step = Step()
    sent = step.message(Kind.SEND, 3, 512)
    gemm = step.kernel("gemm", 1000, step.message(Kind.RECV, 3, 512))
    step.collective(Collective.REDUCE_SCATTER, 128, "dp", gemm, sent)
    graph = step.build(TP2_DP2)
    whole = export_astra_sim(graph, tmp_path / "out")
    monkeypatch.setattr("onerank.converters.targets.astra_sim.exporter._MOST_NODES_READ_BACK", 1)
    part = export_astra_sim(graph, tmp_path / "part")
    checked = note_of(part.notes, "files-checked-in-part", "4 ranks", "0, 3")
    assert part.notes == [*whole.notes[:-1], checked, whole.notes[-1]]
    for path in (tmp_path / "out").iterdir():
        assert (tmp_path / "part" / path.name).read_bytes() == path.read_bytes()
    targets = Workload.targets
    monkeypatch.setattr(
        Workload,
        "targets",
        lambda work, placement: targets(work, placement) | ({1: 0} if placement.shift else {}),
    )
    with raises_code("export-check-failed"):
        export_astra_sim(graph, tmp_path / "wrong")


FAKE = """\
#!/bin/sh
for rank in $FINISHING; do echo "[workload] [info] sys[$rank] finished, 1 cycles"; done
exit $STATUS
"""


@pytest.mark.parametrize(
    ("finishing", "status", "expected"), [("0 1 2 3", 134, 0), ("0 1 3", 0, 1), ("", 0, 1)]
)
def test_the_script_trusts_only_finished_lines(
    finishing: str, status: int, expected: int, tmp_path: Path
) -> None:
    export_astra_sim(small_step(), tmp_path / "out")
    fake = tmp_path / "astra"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    environment = {**os.environ, "FINISHING": finishing, "STATUS": str(status)}
    environment.pop("ASTRA_SIM_BIN", None)
    script = ["out/run.sh", "roofline", "./astra"]
    process = subprocess.run(
        script, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert process.returncode == expected
    if expected:
        missing = [rank for rank in "0123" if rank not in finishing.split()]
        assert process.stderr == (
            f"out/run.sh: of 4 ranks these did not finish: {' '.join(missing)}\n"
        )
    script = ["out/run.sh"]
    process = subprocess.run(
        script, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert process.returncode == 2
    assert "ASTRA_SIM_BIN is not set" in process.stderr


@pytest.mark.parametrize(("topology", "warns"), [("Switch", True), ("FullyConnected", False)])
def test_the_script_warns_that_the_aware_backend_counts_switches_twice(topology, warns, tmp_path):
    export_astra_sim(small_step(), tmp_path / "out")
    network = tmp_path / "out" / "network.yml"
    network.write_text(network.read_text().replace("Switch", topology))
    fake = tmp_path / "AstraSim_Analytical_Congestion_Aware"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    environment = {**os.environ, "FINISHING": "0 1 2 3", "STATUS": "0"}
    script = ["out/run.sh", f"./{fake.name}"]
    process = subprocess.run(
        script, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0
    assert ("takes twice its time: use the unaware" in process.stderr) == warns

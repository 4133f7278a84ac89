"""Groups next to traces of other tools: every command reads them and notes doubts."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from raised import raises_code

import onerank
from onerank.cli import onerank as command
from onerank.converters.targets.astra_sim.check import check
from onerank.ir import ProcessGroup
from onerank.ir.chakra import attribute, header
from onerank.ir.chakra.et_def_pb2 import (
    COMM_COLL_NODE,
    COMM_SEND_NODE,
    COMP_NODE,
    METADATA_NODE,
    Node,
)
from onerank.ir.chakra.framing import frame
from onerank.ir.errors import FormatError

GROUPS = {"1": [0, 1], "2": [2, 3], "3": [0, 2], "4": [1, 3]}
RECORDED_GROUPS = '[{"pg_name": "1", "ranks": [0, 1]}, {"pg_name": "3", "ranks": []}]'


def trace(*groups: str, recorded_groups: str | None = None) -> bytes:
    """Return a kernel of 5 us, then an all-reduce of 4096 bytes on each group."""
    nodes = [Node(id=0, name="gemm", type=COMP_NODE, duration_micros=5)]
    messages = [header("0.0.4")]
    if recorded_groups is not None:
        node = Node(id=99, name="## process_group:init ##", type=METADATA_NODE)
        node.inputs.values = f'["{recorded_groups}"]'
        messages.append(node.SerializeToString())
    for number, group in enumerate(groups, start=1):
        node = Node(id=number, name=f"reduce-{number}", type=COMM_COLL_NODE, data_deps=[number - 1])
        nodes.append(node)
        parts = [
            attribute("comm_type", "int64_val", 0),
            attribute("comm_size", "int64_val", 4096),
            attribute("pg_name", "string_val", group),
        ]
        node.MergeFromString(b"".join(parts))
    for node in nodes:
        node.MergeFromString(attribute("is_cpu_op", "bool_val", False))
    return frame([*messages, *(node.SerializeToString() for node in nodes)])


def workload(folder: Path, name: str = "comm_groups.json", groups: Any = GROUPS) -> Path:
    """Write four ranks, each in two of the groups."""
    for rank, groups_of_rank in enumerate((("1", "3"), ("1", "4"), ("2", "3"), ("2", "4"))):
        (folder / f"w.{rank}.et").write_bytes(trace(*groups_of_rank))
    text = groups if isinstance(groups, str) else json.dumps(groups)
    (folder / name).write_text(text)
    return folder


def test_a_stage_that_names_no_group_has_its_rank_from_its_file(tmp_path: Path) -> None:
    for rank in range(2):
        node = Node(id=0, name="send", type=COMM_SEND_NODE)
        node.MergeFromString(attribute("comm_dst", "int32_val", 1 - rank))
        (tmp_path / f"w.{rank}.et").write_bytes(frame([header("0.0.4"), node.SerializeToString()]))
    (tmp_path / "w.json").write_text('{"1": [0], "2": [1]}')
    job = onerank.read(tmp_path / "w.1.et").job
    assert (job.rank, job.world.size) == (1, 2)


@pytest.mark.parametrize("name", ["comm_groups.json", "comm_group.json", "w.json"])
def test_a_trace_has_the_groups_of_the_file_next_to_it(tmp_path: Path, name: str) -> None:
    job = onerank.read(workload(tmp_path, name) / "w.2.et").job
    assert job.groups == tuple(
        ProcessGroup(group_name, tuple(ranks)) for group_name, ranks in GROUPS.items()
    )
    assert (job.rank, job.world.size) == (2, 4)


def test_a_node_that_holds_groups(tmp_path: Path) -> None:
    """No ranks are all ranks; "0" is the default group of ASTRA-sim."""
    for rank in range(4):
        (tmp_path / f"w.{rank}.et").write_bytes(trace("3", "0", recorded_groups=RECORDED_GROUPS))
    job = onerank.read(tmp_path / "w.1.et").job
    assert job.groups == (
        ProcessGroup("1", (0, 1)),
        ProcessGroup("3", (0, 1, 2, 3)),
        ProcessGroup("0", (0, 1, 2, 3)),
    )
    assert job.rank == 1


def test_without_a_file_of_groups_a_trace_is_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "w.0.et").write_bytes(trace("1"))
    assert onerank.read(tmp_path / "w.0.et").job.groups == ()


def test_all_commands_take_it(tmp_path: Path) -> None:
    """A workload exported again is one that ASTRA-sim takes, with the same groups."""
    folder = tmp_path / "made"
    folder.mkdir()
    workload(folder)
    files = [str(folder / f"w.{rank}.et") for rank in range(4)]

    def run(*arguments: object) -> str:
        result = CliRunner().invoke(command, [str(argument) for argument in arguments])
        assert result.exit_code == 0, result.output
        return result.stdout

    assert run("check", folder).endswith("no findings\n")
    # 2 * (2 - 1) / 2 of 4096 bytes at 4.096 GB/s, twice, behind 5 us
    replayed = json.loads(run("replay", files[1], "--busbw-gb-s", "4.096", "--json"))
    assert replayed["step_time_ns"] == 7000
    run("export", "astra-sim", *files, "-o", tmp_path / "again")
    again = json.loads((tmp_path / "again/comm_groups.json").read_text())
    assert sorted(again.values()) == [[0, 1], [0, 1, 2, 3], [0, 2], [1, 3], [2, 3]]
    assert run("check", tmp_path / "again").endswith("no findings\n")
    run("export", "goal", *files, "-o", tmp_path / "w.goal")
    run("convert", files[1], "-o", tmp_path / "alone.et")
    assert onerank.read(tmp_path / "alone.et").job == onerank.read(files[1]).job


@pytest.mark.parametrize(
    ("groups", "code", "named"),
    [
        ({"1": [0, 1]}, "groups-unknown-group", ('node 2 uses group "3"',)),
        ({**GROUPS, "5": [3, 4]}, "groups-missing-traces", ('group "5"', "rank 4", "0 to 3")),
        ({**GROUPS, "3": [1, 2]}, "groups-rank-not-member", ('node 2 uses group "3"', "1, 2")),
        ({**GROUPS, "3": [0, 2, 0]}, "groups-bad-rank", ('group "3": 0 ',)),
        ({**GROUPS, "3": [0, -2]}, "groups-bad-rank", ('group "3": -2 ',)),
        ({**GROUPS, "3": ["0"]}, "json-malformed", ("`$[...][0]`",)),
        ([[0, 1]], "json-malformed", ()),
        ('{"1": [0, 1]', "json-malformed", ()),
        ('{"1": [0, 1],, }', "json-malformed", ()),
    ],
)
def test_wrong_groups(tmp_path: Path, groups: Any, code: str, named: tuple[str, ...]) -> None:
    path = workload(tmp_path, groups=groups) / "w.0.et"
    with raises_code(code, FormatError) as caught:
        onerank.read(path)
    assert all(part in str(caught.value) for part in ("comm_groups.json", *named))
    result = CliRunner().invoke(command, ["replay", str(path)])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error[{code}]")


def test_two_files_of_groups(tmp_path: Path) -> None:
    workload(workload(tmp_path), "comm_group.json")
    with raises_code("groups-ambiguous"):
        onerank.read(tmp_path / "w.0.et")


def test_a_node_whose_groups_are_no_json(tmp_path: Path) -> None:
    (tmp_path / "w.0.et").write_bytes(trace("1", recorded_groups="none"))
    with raises_code("groups-malformed-node", naming=("w.0.et: node 99", "byte 4")):
        onerank.read(tmp_path / "w.0.et")


def test_another_json_of_the_prefix_does_not_hide_the_groups(tmp_path: Path) -> None:
    workload(tmp_path)
    (tmp_path / "w.json").write_text("[]")
    assert onerank.read(tmp_path / "w.2.et").job.world.size == 4


def test_a_node_and_a_file_that_contradict_each_other(tmp_path: Path) -> None:
    path = tmp_path / "w.0.et"
    path.write_bytes(trace("1", recorded_groups='[{"pg_name": "1", "ranks": [0, 2]}]'))
    (tmp_path / "comm_groups.json").write_text(json.dumps({"1": [0, 1]}))
    with raises_code("groups-contradict", FormatError):
        onerank.read(path)


def test_a_call_on_a_faulty_group_is_the_files_fault_alone(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"w.{rank}.et").write_bytes(trace("1", "2"))
    (tmp_path / "comm_groups.json").write_text(json.dumps({"1": [0, 1], "2": [0, 7]}))
    assert [
        (finding.rule, finding.file)
        for finding in check(tmp_path)
        if finding.rule.startswith("group")
    ] == [("group-ranks", "comm_groups.json")]


def test_two_files_of_groups_are_reported(tmp_path: Path) -> None:
    workload(tmp_path)
    workload(tmp_path, "comm_group.json")
    (finding,) = [finding for finding in check(tmp_path) if finding.file == "comm_group.json"]
    assert finding.rule == "configuration-file"
    assert "comm_groups.json" in finding.message

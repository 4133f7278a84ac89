"""Many ranks that run one step: one file is read and one rank runs, with the findings of all."""

import random
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from generated_case import GROUPS, RANKS, Line, program
from hypothesis import given, settings
from hypothesis import strategies as st

from onerank.converters.targets.astra_sim.check import Finding, check, matching
from onerank.converters.targets.astra_sim.check import workload as ranks
from onerank.ir.chakra.et_def_pb2 import GlobalMetadata, Node

COPIES = 24
WORLD = RANKS * COPIES
SENDS = (
    "0 send comm_dst={next} comm_tag=1 comm_size=8\n1 recv comm_src={last} comm_tag=1 comm_size=8"
)


def configuration(groups: dict[str, list[int]], world: int = WORLD) -> dict[str, Any]:
    network = f"topology: [ Switch ]\nnpus_count: [ {world} ]\nbandwidth: [ 50 ]\nlatency: [ 1 ]\n"
    return {"comm_groups.json": groups, "network.yml": network}


def replicated(lines: list[list[Line]]) -> dict[str, Any]:
    """Return the files of many copies of a program, side by side."""
    files = configuration(
        {
            str(int(name) + 5 * copy): [RANKS * copy + rank for rank in members]
            for name, members in GROUPS.items()
            for copy in range(COPIES)
        }
    )
    for copy in range(COPIES):
        for rank, rank_lines in enumerate(lines):
            files[f"w.{RANKS * copy + rank}.et"] = "\n".join(
                f"{number} {moved(text, copy)}"
                + (f" after={','.join(map(str, after))}" if after else "")
                for number, text, after in rank_lines
            )
    return files


def moved(text: str, copy: int) -> str:
    by = {"pg_name": 5 * copy, "comm_dst": RANKS * copy, "comm_src": RANKS * copy}
    words = (word.partition("=") for word in text.split())
    return " ".join(
        f"{key}={int(value) + by[key]}" if key in by else key + equals + value
        for key, equals, value in words
    )


@pytest.fixture
def read_whole(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were parsed, in order."""
    names: list[str] = []
    read = ranks.read_structure
    monkeypatch.setattr(
        ranks,
        "read_structure",
        lambda path, report: (names.append(path.name), read(path, report))[1],
    )
    return names


def one_by_one(folder: Path) -> list[Finding]:
    """Check with every file parsed and every rank run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "_KEPT", 0)
        patch.setattr(matching, "FEW", WORLD)
        return check(folder)


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 12), fault=st.integers(0, 4))
def test_findings_are_those_of_reading_each(
    make: SimpleNamespace, seed: int, count: int, fault: int
) -> None:
    files = replicated(program(seed, count))
    draw = random.Random(seed)
    name = f"w.{draw.randrange(WORLD)}.et"
    lines = files[name].splitlines()
    line = draw.randrange(len(lines))
    if fault == 1:
        lines[line] = lines[line].replace("comm_size=", "comm_size=3")
    elif fault == 2:
        lines[line] = (
            lines[line].replace("pg_name=", "pg_name=1").replace("comm_dst=", "comm_dst=1")
        )
    elif fault == 3:
        lines[line] += " after=999"
    elif fault == 4:
        lines[line] = f"{lines[line].split()[0]} comp us=7"
    files[name] = "\n".join(lines)
    with TemporaryDirectory() as folder:
        make.write(Path(folder), files)
        assert check(folder) == one_by_one(Path(folder))


def test_one_file_of_each_step_is_parsed_and_one_rank_of_each_class_runs(
    workload: Callable[..., Path], read_whole: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run: list[int] = []
    initialize = matching.CommRun.__init__

    def counted(self: matching.CommRun, programs: Any, members: Any) -> None:
        run.append(len(programs))
        initialize(self, programs, members)

    monkeypatch.setattr(matching.CommRun, "__init__", counted)
    reduce = (0, "coll comm_type=0 comm_size=64 pg_name=1", ())
    send = (1, "send comm_dst=1 comm_tag=0 comm_size=8", (0,))
    receive = (1, "recv comm_src=0 comm_tag=0 comm_size=8", (0,))
    lines: list[list[Line]] = [[reduce, send], [reduce, receive], [reduce], [reduce]]
    assert check(workload(replicated(lines))) == []
    assert read_whole == ["w.0.et", "w.1.et", "w.2.et"]
    assert run == [3]


def test_messages_around_a_ring(workload: Callable[..., Path], read_whole: list[str]) -> None:
    """All ranks are of one class, which sends to itself."""
    files = configuration({}) | {
        f"w.{rank}.et": SENDS.format(next=(rank + 1) % WORLD, last=(rank - 1) % WORLD)
        for rank in range(WORLD)
    }
    assert check(workload(files)) == []
    assert read_whole == ["w.0.et"]


def test_a_ring_with_a_wrong_peer(workload: Callable[..., Path], read_whole: list[str]) -> None:
    files = configuration({}) | {
        f"w.{rank}.et": SENDS.format(next=(rank + 1) % WORLD, last=(rank - 1) % WORLD)
        for rank in range(WORLD)
    }
    files["w.7.et"] = SENDS.format(next=9, last=6)
    findings = check(workload(files))
    assert read_whole == ["w.0.et"]
    assert [(finding.rule, finding.file) for finding in findings] == [
        ("unmatched-recv", "w.8.et"),
        ("unmatched-send", "w.7.et"),
    ]


def test_groups_met_in_opposite_orders_are_a_deadlock(
    workload: Callable[..., Path], read_whole: list[str]
) -> None:
    """The files are equal except for groups, and each pair of ranks shares two groups."""
    call = "coll comm_type=0 comm_size=8 pg_name={}"
    text = f"0 {call}\n1 {call} after=0"
    pairs = [[rank, rank + 1] for rank in range(0, WORLD, 2)]
    groups = {str(number): pair for number, pair in enumerate([*pairs, *pairs], start=1)}
    files = configuration(groups)
    for number, (left, right) in enumerate(pairs, start=1):
        files[f"w.{left}.et"] = text.format(number, number + len(pairs))
        files[f"w.{right}.et"] = text.format(number + len(pairs), number)
    findings = check(workload(files))
    assert read_whole == ["w.0.et"]
    assert {finding.rule for finding in findings} == {"deadlock"}
    assert len(findings) == len(pairs)


def test_a_rank_that_names_another_ranks_group_is_read_whole(
    workload: Callable[..., Path], read_whole: list[str]
) -> None:
    lines: list[list[Line]] = [[(0, "coll comm_type=0 comm_size=64 pg_name=1", ())]] * RANKS
    files = replicated(lines)
    files["w.9.et"] = files["w.3.et"]
    findings = check(workload(files))
    assert read_whole == ["w.0.et", "w.9.et"]
    assert (findings[0].rule, findings[0].file) == ("group-member", "w.9.et")
    assert findings[0].node == 0
    assert "rank 9" in findings[0].message
    assert "group 1" in findings[0].message


class TestFaultsOfAllRanks:
    """A fault of all ranks is one finding, and one file with it is parsed."""

    def test_of_the_step(self, workload: Callable[..., Path], read_whole: list[str]) -> None:
        lines: list[list[Line]] = [
            [
                (0, "comp us=5 is_cpu_op=true", ()),
                (1, "coll comm_type=0 comm_size=64 pg_name=1", (0,)),
            ]
        ] * RANKS
        (finding,) = check(workload(replicated(lines)))
        assert read_whole == ["w.0.et"]
        assert (finding.rule, finding.file) == ("host-node", "w.0.et")
        assert "94 more files" in finding.message

    def test_of_their_groups(self, workload: Callable[..., Path], read_whole: list[str]) -> None:
        lines: list[list[Line]] = [[(0, "coll comm_type=0 comm_size=64 pg_name=1", ())]] * RANKS
        missing = {"comm_groups.json": None, "run.sh": None}
        (finding,) = check(workload(replicated(lines) | missing))
        assert read_whole == ["w.0.et"]
        assert finding.rule == "group-unknown"
        assert "node 0 ('coll-0') has pg_name '1'" in finding.message

    def test_of_the_structure(self, workload: Callable[..., Path], read_whole: list[str]) -> None:
        lines: list[list[Line]] = [
            [(0, "coll comm_type=0 comm_size=64 pg_name=1", (9,))] for _ in range(RANKS)
        ]
        (finding,) = check(workload(replicated(lines)))
        assert read_whole == ["w.0.et"]
        assert finding.rule == "dangling-edge"

    def test_faults_of_other_ranks_are_reported_too(
        self, workload: Callable[..., Path], read_whole: list[str]
    ) -> None:
        lines: list[list[Line]] = [
            [
                (0, "comp us=5 is_cpu_op=true", ()),
                (1, "coll comm_type=0 comm_size=64 pg_name=1", (0,)),
            ]
        ] * RANKS
        files = replicated(lines)
        files["w.9.et"] = files["w.3.et"]  # names the group of other ranks
        findings = check(workload(files))
        assert read_whole == ["w.0.et", "w.9.et"]
        assert [(finding.rule, finding.file) for finding in findings[:3]] == [
            ("host-node", "w.0.et"),
            ("host-node", "w.9.et"),
            ("group-member", "w.9.et"),
        ]


def test_a_group_named_outside_of_slots_is_read_from_each_file(
    workload: Callable[..., Path], read_whole: list[str]
) -> None:
    """The node's name follows its attributes, so even equal files are parsed."""
    call = Node(id=0, name="coll-0", type=7)  # COMM_COLL_NODE
    for name, value in (("comm_type", 0), ("comm_size", 64)):
        call.attr.add(name=name, int64_val=value)
    call.attr.add(name="pg_name", string_val="1")
    octets = call.SerializeToString() + Node(name="coll-0").SerializeToString()
    head = GlobalMetadata(version="0.0.4").SerializeToString()
    trace = b"".join(bytes([len(one)]) + one for one in (head, octets))
    findings = check(
        workload({f"w.{rank}.et": trace for rank in range(4)} | configuration({"1": [1, 2]}, 4))
    )
    assert read_whole == [f"w.{rank}.et" for rank in range(4)]
    assert [(finding.rule, finding.file) for finding in findings] == [
        ("group-member", "w.0.et"),
        ("group-member", "w.3.et"),
    ]

"""One small bad workload per rule: the rule, the file, the node and the heart of the message."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import configuration_cases
import node_cases
import pytest
from rule_case import COMP, Case, both, coll, ranks

from onerank.converters.targets.astra_sim.check import RULES, Finding, check

CASES = [*node_cases.CASES, *configuration_cases.CASES]
ACROSS_RANKS: list[Case] = [
    Case(
        "unordered-collectives",
        "w.0.et",
        5,
        "nodes 3 and 5 are collectives of group 1 and neither waits for the other",
        both(
            "1 comp us=5\n2 comp us=9\n"
            + coll(3, 0, 8, rest="after=1")
            + coll(5, 0, 8, rest="after=2")
        ),
    ),
    Case(
        "collective-sequence",
        "w.1.et",
        4,
        "collective 2 of group 1: rank 1 issues node 4 (all_gather, 64 bytes, group 1), "
        "rank 0 issues node 9 (all_reduce, 64 bytes, group 1)",
        ranks(coll(3, 0, 8) + coll(9, 0, 64, rest="after=3"), coll(3, 0, 8) + coll(4, 2, 64)),
    ),
    Case(
        "collective-mismatch",
        "w.1.et",
        4,
        "collective 1 of group 1: rank 1 waits in node 4 (all_reduce, 64 bytes, group 1), rank 0 "
        "in node 3 (all_reduce, 32 bytes, group 1); ranks 0-1 of 2 never finish",
        ranks(coll(3, 0, 32), coll(4, 0, 64)),
    ),
    Case(
        "collective-missing",
        "w.0.et",
        5,
        "collective 2 of group 1: rank 1 finished without issuing it, rank 0 waits in node 5 "
        "(all_reduce, 64 bytes, group 1); rank 0 of 2 never finish",
        ranks(coll(3, 0, 64) + coll(5, 0, 64, rest="after=3"), coll(3, 0, 64)),
    ),
    Case(
        "deadlock",
        "w.0.et",
        3,
        "rank 0 waits in node 3 (all_reduce, 8 bytes, group 1) for rank 1, rank 1 waits in node 3 "
        "(all_reduce, 8 bytes, group 2) for rank 0; ranks 0-1 of 2 never finish",
        {
            **ranks(coll(3, 0, 8) + coll(4, 0, 8, "2"), coll(3, 0, 8, "2") + coll(4, 0, 8)),
            "comm_groups.json": {"1": [0, 1], "2": [0, 1]},
        },
    ),
    Case(
        "deadlock",
        "w.0.et",
        3,
        "rank 0 waits in node 3 (all_reduce, 8 bytes, group 1) for rank 1, rank 1 waits in node 3 "
        "(receive, 8 bytes, rank 0 to 1, tag 0) for rank 0",
        ranks(
            coll(3, 0, 8) + "4 send comm_dst=1 comm_tag=0 comm_size=8 after=3",
            "3 recv comm_src=0 comm_tag=0 comm_size=8\n" + coll(4, 0, 8, rest="after=3"),
        ),
    ),
    Case(
        "unmatched-recv",
        "w.1.et",
        4,
        "node 4 (receive, 8 bytes, rank 0 to 1, tag 0): this receive waits for ever",
        ranks(COMP, "4 recv comm_src=0 comm_tag=0 comm_size=8"),
    ),
    Case(
        "unmatched-send",
        "w.0.et",
        7,
        "this send is never received; closest is node 4 (receive, 8 bytes, rank 0 to 1, tag 0) "
        "of rank 1",
        ranks(
            "7 send comm_dst=1 comm_tag=0 comm_size=16",
            "4 recv comm_src=0 comm_tag=0 comm_size=8",
        ),
    ),
]

BYTES: list[tuple[str, str, Callable[[SimpleNamespace], bytes]]] = [
    ("empty-file", "empty", lambda _: b""),
    ("truncated-file", "", lambda make: make.trace(make.RANK)[:-3]),
    (
        "metadata-first",
        "expected a GlobalMetadata",
        lambda make: make.trace(make.RANK, metadata=False),
    ),
    ("unreadable-file", "", lambda make: make.trace("") + b"\x03\xff\xff\xff"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_bad_workload_gives_its_finding_and_no_other_rule(
    workload: Callable[..., Path], case: Case
) -> None:
    findings = check(workload(case.files))
    assert {finding.rule for finding in findings} == {case.rule}, findings
    assert (findings[0].file, findings[0].node) == (case.file, case.node), findings
    assert case.part in findings[0].message


@pytest.mark.parametrize("case", ACROSS_RANKS, ids=str)
def test_a_stall_is_explained(workload: Callable[..., Path], case: Case) -> None:
    findings = [finding for finding in check(workload(case.files)) if finding.rule == case.rule]
    assert [(finding.file, finding.node) for finding in findings] == [(case.file, case.node)]
    assert case.part in findings[0].message


@pytest.mark.parametrize(("rule", "part", "content"), BYTES, ids=[rule for rule, *_ in BYTES])
def test_bytes_that_do_not_read(
    workload: Callable[..., Path],
    make: SimpleNamespace,
    rule: str,
    part: str,
    content: Callable[[SimpleNamespace], bytes],
) -> None:
    folder = workload({"w.0.et": content(make), "w.1.et": make.RANK})
    (finding,) = check(folder)
    assert (finding.rule, finding.file, finding.node) == (rule, "w.0.et", None)
    assert part in finding.message
    assert check(folder / "w.0.et") == [finding]
    assert check(folder / "w.1.et") == list[Finding]()


def test_every_rule_has_a_case() -> None:
    shown = {rule for rule, *_ in [*CASES, *ACROSS_RANKS, *BYTES]}
    assert shown == set(RULES)

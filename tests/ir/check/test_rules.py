"""One small bad workload per rule: the rule, the file, the node and the heart of the message."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from onerank.ir.check import RULES, Finding, check

COMP = "0 comp us=5\n"
CHOICES = {"scheduling-policy": "LIFO", "collective-optimization": "localBWAware"}
SYSTEM = {
    **CHOICES,
    "preferred-dataset-splits": 4,
    "all-reduce-implementation": ["ring"],
    "all-gather-implementation": ["ring"],
    "all-to-all-implementation": ["ring"],
    "local-mem-bw": 50,
    "peak-perf": 1,
}
ROOFLINE = {**SYSTEM, "roofline-enabled": 1}
TIMED = "tensor_size=1 num_ops=5500"


def ranks(*texts: str) -> dict[str, str]:
    return {f"w.{rank}.et": text for rank, text in enumerate(texts)}


def both(text: str) -> dict[str, str]:
    return ranks(text, text)


def coll(node: int, collective: int, size: int, group: str = "1", rest: str = "") -> str:
    return f"{node} coll comm_type={collective} comm_size={size} pg_name={group} {rest}\n"


def network(topology: str, npus: str, bandwidth: str = "50", latency: str = "500") -> str:
    return (
        f"topology: [ {topology} ]\nnpus_count: [ {npus} ]\n"
        f"bandwidth: [ {bandwidth} ]\nlatency: [ {latency} ]\n"
    )


class Case(NamedTuple):
    """What `check` must find in `files`: rule, file, node and a part of the message."""

    rule: str
    file: str
    node: int | None
    part: str
    files: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.rule}: {self.part[:24]}"


CASES: list[Case] = [
    Case("no-nodes", "w.0.et", None, "no nodes after the metadata", ranks("", COMP)),
    Case(
        "unique-ids",
        "w.0.et",
        7,
        "id 7 is that of node number 0 ('a') and of number 1 ('b')",
        ranks("7 comp name=a\n7 comp name=b", COMP),
    ),
    Case(
        "dangling-edge",
        "w.1.et",
        1,
        "node 1 ('comp-1') waits for node 9, which the file does not hold",
        ranks(COMP, "0 comp\n1 comp after=0,9"),
    ),
    Case(
        "self-dependency",
        "w.0.et",
        3,
        "node 3 ('comp-3') waits for itself",
        ranks("3 comp after=3", COMP),
    ),
    Case(
        "cycle",
        "w.0.et",
        1,
        "cycle of 2 nodes: 1 waits for 2 waits for 1; 3 of 4 nodes, on or behind it",
        ranks("0 comp\n1 comp after=0,2\n2 comp after=1\n3 comp after=2", COMP),
    ),
    Case(
        "control-edge",
        "w.1.et",
        2,
        "node 2 ('comp-2') waits for node 1 by ctrl_deps alone, which older feeders do not read",
        ranks(COMP, "0 comp\n1 comp\n2 comp after=0 ctrl=0,1"),
    ),
    Case(
        "time-drift",
        "w.0.et",
        None,
        "compute lasts 1998 ns by its duration_ns, and 2 ns as simulated by duration_micros",
        ranks("0 comp duration_ns=999\n1 comp duration_ns=999 after=0\n2 comp us=9", COMP),
    ),
    Case("node-type", "w.0.et", 4, "is a METADATA node", ranks("4 metadata", COMP)),
    Case("node-type", "w.1.et", 4, "is a INVALID node", ranks(COMP, "4 invalid")),
    Case("host-node", "w.0.et", 4, "is a CPU operation", ranks("4 comp is_cpu_op=true", COMP)),
    Case("host-node", "w.0.et", 4, "is a MEM_LOAD node", ranks("4 load", COMP)),
    Case(
        "missing-attribute",
        "w.0.et",
        4,
        "has no attribute comm_type; it needs one, a int64_val",
        ranks("4 coll comm_size=8", COMP),
    ),
    Case(
        "missing-attribute",
        "w.0.et",
        4,
        "has no attribute comm_tag",
        ranks("4 send comm_dst=1 comm_size=8", COMP),
    ),
    Case(
        "missing-attribute",
        "w.0.et",
        0,
        "has no attribute tensor_size",
        {**ranks("0 comp num_ops=500", f"0 comp {TIMED}"), "system.json": ROOFLINE},
    ),
    Case(
        "attribute-type",
        "w.0.et",
        4,
        "holds comm_size as uint64_val; write it as int64_val",
        both("4 coll comm_type=0 comm_size:uint64_val=64 pg_name=1"),
    ),
    Case(
        "attribute-type",
        "w.0.et",
        4,
        "holds pg_name as int32_val; write it as string_val",
        ranks("4 coll comm_type=0 comm_size=64 pg_name:int32_val=1", COMP),
    ),
    Case(
        "ready-width",
        "w.0.et",
        0,
        "65 nodes are ready at once after node 0",
        ranks("0 comp\n" + "".join(f"{n} comp after=0\n" for n in range(1, 66)), COMP),
    ),
    Case(
        "memory-attributes",
        "w.0.et",
        0,
        "has no attribute outputs",
        {
            **ranks("0 comp inputs=a,4", "0 comp inputs=a,4 outputs=b,4"),
            "system.json": {**SYSTEM, "track-local-mem": 1},
        },
    ),
    Case(
        "memory-attributes",
        "w.0.et",
        0,
        "holds inputs as ('a',); expected [name, size, ...]",
        {
            **ranks("0 comp inputs=a outputs=", "0 comp inputs= outputs="),
            "system.json": {**SYSTEM, "track-local-mem": 1},
        },
    ),
    Case(
        "memory-attributes",
        "w.0.et",
        1,
        "writes tensor 'b', which node 0 writes too",
        {
            **ranks("0 comp inputs= outputs=b,4\n1 comp inputs= outputs=b,4", COMP[:-1]),
            "w.1.et": "0 comp inputs= outputs=",
            "system.json": {**SYSTEM, "track-local-mem": 1},
        },
    ),
    Case(
        "roofline-values",
        "w.0.et",
        1,
        "has num_ops 0; with the roofline on it must be > 0",
        {
            **ranks(f"0 comp {TIMED}\n1 comp tensor_size=1 num_ops=0 after=0", f"0 comp {TIMED}"),
            "system.json": ROOFLINE,
        },
    ),
    Case(
        "roofline-time",
        "w.0.et",
        1,
        "lasts 28 ns (duration_ns) and would be simulated as 27 ns; num_ops is 27500, "
        "expected 28 * 1000 + 500",
        {
            **both(f"0 comp {TIMED}\n1 comp tensor_size=1 num_ops=27500 duration_ns=28 after=0"),
            "w.1.et": f"0 comp {TIMED} duration_ns=5",
            "system.json": ROOFLINE,
        },
    ),
    Case(
        "zero-at-start",
        "w.0.et",
        0,
        "runs at time 0 and, with num_ops 500, takes 0 ns",
        {**ranks("0 comp tensor_size=1 num_ops=500", f"0 comp {TIMED}"), "system.json": ROOFLINE},
    ),
    Case("collective-type", "w.0.et", 4, "is barrier (comm_type 9)", ranks(coll(4, 9, 8), COMP)),
    Case("collective-replayed", "w.0.et", 4, "is a broadcast", ranks(coll(4, 5, 8), COMP)),
    Case(
        "comm-size",
        "w.0.et",
        4,
        "has comm_size 0; it must be > 0",
        ranks(coll(4, 0, 0), coll(4, 0, 0)),
    ),
    Case(
        "dataset-splits",
        "w.0.et",
        4,
        "gathers 3 bytes per rank, fewer than the 4 preferred-dataset-splits of system.json",
        both(coll(4, 2, 3)),
    ),
    Case(
        "dataset-splits",
        "system.json",
        None,
        "preferred-dataset-splits is 0",
        {"system.json": {**SYSTEM, "preferred-dataset-splits": 0}},
    ),
    Case(
        "endpoint",
        "w.0.et",
        4,
        "has comm_dst 2; expected another rank from 0 to 1",
        ranks("4 send comm_dst=2 comm_tag=0 comm_size=8", COMP),
    ),
    Case(
        "endpoint",
        "w.1.et",
        4,
        "has comm_dst 0 in the file of rank 1",
        ranks(COMP, "4 recv comm_src=0 comm_dst=0 comm_tag=0 comm_size=8"),
    ),
    Case(
        "group-name",
        "w.0.et",
        4,
        "has pg_name 'tp'; expected an integer",
        ranks(coll(4, 0, 8, "tp"), COMP),
    ),
    Case(
        "group-unknown",
        "w.0.et",
        4,
        "has pg_name '3', which comm_groups.json does not define",
        ranks(coll(4, 0, 8, "3"), COMP),
    ),
    Case(
        "group-unknown",
        "w.0.et",
        4,
        "has pg_name '1' and there is no comm_groups.json",
        {**ranks(coll(4, 0, 8), COMP), "comm_groups.json": None},
    ),
    Case(
        "group-key",
        "comm_groups.json",
        None,
        'group "0": a key must be an integer >= 1',
        {"comm_groups.json": {"1": [0, 1], "0": [0, 1]}},
    ),
    Case(
        "group-key",
        "comm_groups.json",
        None,
        'group "tp"',
        {"comm_groups.json": {"1": [0, 1], "tp": [0, 1]}},
    ),
    Case(
        "group-ranks",
        "comm_groups.json",
        None,
        'group "2" holds rank 2, and there are 2 ranks',
        {"comm_groups.json": {"1": [0, 1], "2": [0, 2]}},
    ),
    Case(
        "group-ranks",
        "comm_groups.json",
        None,
        'group "2" holds rank 1 2 times',
        {"comm_groups.json": {"1": [0, 1], "2": [1, 0, 1]}},
    ),
    Case(
        "group-member",
        "w.0.et",
        4,
        "of rank 0 runs on group 2, whose ranks are 1",
        {**ranks(coll(4, 0, 8, "2"), COMP), "comm_groups.json": {"2": [1]}},
    ),
    Case(
        "group-of-one",
        "w.0.et",
        4,
        "runs on group 2 of one rank (0)",
        {**ranks(coll(4, 0, 8, "2"), COMP), "comm_groups.json": {"2": [0]}},
    ),
    Case(
        "group-path",
        "comm_groups.json",
        None,
        'the path /data/empty/comm_groups.json holds "empty"',
        {"run.sh": "astra --comm-group-configuration=/data/empty/comm_groups.json\n"},
    ),
    Case(
        "default-group",
        "w.0.et",
        5,
        "node 5 runs on the default group while other nodes name groups",
        both(coll(4, 0, 8) + "5 coll comm_type=0 comm_size=8 after=4"),
    ),
    Case(
        "rank-files",
        "w.1.et",
        None,
        "no such file, and there is w.2.et: 1 of 3",
        {
            "w.0.et": COMP,
            "w.2.et": COMP,
            "network.yml": network("Ring", "3"),
        },
    ),
    Case(
        "rank-files",
        "w.0.et",
        None,
        "the only rank; ASTRA-sim needs at least 2",
        {
            "w.0.et": COMP,
            "network.yml": None,
            "system.json": None,
            "memory.json": None,
            "run.sh": None,
            "comm_groups.json": None,
        },
    ),
    Case(
        "rank-files", "other.et", None, "not named PREFIX.RANK.et", {**both(COMP), "other.et": COMP}
    ),
    Case(
        "configuration-file",
        "network.yml",
        None,
        "missing, and w runs with it",
        {
            "network.yml": None,
        },
    ),
    Case("configuration-file", "system.json", None, "not a JSON object", {"system.json": "{"}),
    Case(
        "configuration-file",
        "network.yml",
        None,
        "line 1, 'npus_count:', is not of the form",
        {
            "network.yml": "npus_count:\n  - 2\n",
        },
    ),
    Case(
        "network-dimensions",
        "network.yml",
        None,
        "npus_count holds '1'; each entry must be",
        {
            "network.yml": network("Ring, Ring", "2, 1", "50, 50", "5, 5"),
        },
    ),
    Case(
        "network-dimensions",
        "network.yml",
        None,
        "latency has 1 entries and topology 2",
        {
            "network.yml": network("Ring, Ring", "2, 2", "50, 50", "5"),
        },
    ),
    Case(
        "network-ranks",
        "network.yml",
        None,
        "npus_count is 2 * 2 = 4 and w has 2 ranks",
        {
            "network.yml": network("Ring, Ring", "2, 2", "50, 50", "5, 5"),
            "system.json": {**SYSTEM, **{k: ["ring"] * 2 for k in SYSTEM if "implement" in k}},
        },
    ),
    Case(
        "congestion-aware",
        "run.sh",
        None,
        "network.yml has 2: run AstraSim_Analytical",
        {
            **ranks(COMP, COMP, COMP, COMP),
            "network.yml": network("Ring, Ring", "2, 2", "50, 50", "5, 5"),
            "system.json": {**SYSTEM, **{k: ["ring"] * 2 for k in SYSTEM if "implement" in k}},
            "run.sh": "AstraSim_Analytical_Congestion_Aware --x\n",
        },
    ),
    Case(
        "algorithms",
        "system.json",
        None,
        "no all-reduce-implementation; the workload uses it",
        {
            "system.json": {**CHOICES, "preferred-dataset-splits": 1},
        },
    ),
    Case(
        "algorithms",
        "system.json",
        None,
        'all-to-all-implementation is ["ring"] and the network',
        {
            **ranks(COMP, COMP, COMP, COMP),
            "network.yml": network("Ring, Ring", "2, 2", "50, 50", "5, 5"),
            "system.json": {
                **CHOICES,
                "preferred-dataset-splits": 1,
                "all-to-all-implementation": ["ring"],
            },
        },
    ),
    Case(
        "roofline-configuration",
        "system.json",
        None,
        "peak-perf is not given",
        {
            **both(f"0 comp {TIMED}"),
            "system.json": {k: v for k, v in ROOFLINE.items() if k != "peak-perf"},
        },
    ),
    Case(
        "system-choice",
        "system.json",
        None,
        "scheduling-policy is not given; expected one of LIFO, FIFO, EXPLICIT",
        {"system.json": {k: v for k, v in SYSTEM.items() if k != "scheduling-policy"}},
    ),
    Case(
        "switch-number",
        "system.json",
        None,
        "trace-enabled is false; ASTRA-sim compares it",
        {
            "system.json": {**SYSTEM, "trace-enabled": False},
        },
    ),
]

ACROSS_RANKS: list[Case] = [
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
    found = [finding for finding in check(workload(case.files)) if finding.rule == case.rule]
    assert [(finding.file, finding.node) for finding in found] == [(case.file, case.node)]
    assert case.part in found[0].message


@pytest.mark.parametrize(("rule", "part", "content"), BYTES, ids=[rule for rule, *_ in BYTES])
def test_bytes_that_do_not_read(
    workload: Callable[..., Path],
    make: SimpleNamespace,
    rule: str,
    part: str,
    content: Callable[[SimpleNamespace], bytes],
) -> None:
    folder = workload({"w.0.et": content(make), "w.1.et": make.RANK})
    (found,) = check(folder)
    assert (found.rule, found.file, found.node) == (rule, "w.0.et", None)
    assert part in found.message
    assert check(folder / "w.0.et") == [found]
    assert check(folder / "w.1.et") == list[Finding]()


def test_every_rule_has_a_case() -> None:
    shown = {rule for rule, *_ in [*CASES, *ACROSS_RANKS, *BYTES]}
    assert shown == set(RULES)

"""Whole directories: sound ones have no findings, sets are separate, findings are merged."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from raised import raises_code
from rule_case import SCRIPT

from onerank.converters.targets.astra_sim.check import check, check_file, check_workload

PIPELINE = (
    """
0 comp us=5
1 send comm_dst=1 comm_tag=7 comm_size=64 after=0
2 recv comm_src=1 comm_tag=8 comm_size=64 after=0 ctrl=0
3 comp us=5 after=1,2
4 coll comm_type=7 comm_size=4096 after=3
""",
    """
10 recv comm_src=0 comm_tag=7 comm_size=64 comm_dst=1
11 comp us=9 after=10
12 send comm_dst=0 comm_tag=8 comm_size=64 after=11 comm_priority=1
13 coll comm_type=7 comm_size=4096 after=12 pg_name=0
""",
)


def test_a_good_workload_has_no_findings(workload: Callable[..., Path]) -> None:
    assert check(workload({})) == []


def test_point_to_point_and_the_default_group(workload: Callable[..., Path]) -> None:
    assert check(workload({"w.0.et": PIPELINE[0], "w.1.et": PIPELINE[1]})) == []


def test_bare_traces_need_no_configuration(workload: Callable[..., Path]) -> None:
    names = ("system.json", "network.yml", "memory.json", "run.sh", "comm_groups.json")
    files = {"w.0.et": PIPELINE[0], "w.1.et": PIPELINE[1], **dict.fromkeys(names)}
    assert check(workload(files)) == []


def test_each_prefix_runs_with_its_own_system(
    workload: Callable[..., Path], make: SimpleNamespace
) -> None:
    plain = "0 comp us=5"
    exact = "0 comp num_ops=5500 tensor_size=1 duration_ns=5"
    roofline = {**make.system, "roofline-enabled": 1}
    files = {"w.0.et": plain, "w.1.et": plain, "w_roofline.0.et": exact, "w_roofline.1.et": exact}
    folder = workload({**files, "system_roofline.json": roofline})
    assert check(folder) == []
    (folder / "w_roofline.1.et").write_bytes(make.trace(plain))
    assert [(finding.rule, finding.file) for finding in check(folder)] == [
        ("missing-attribute", "w_roofline.1.et"),
        ("missing-attribute", "w_roofline.1.et"),
    ]


def test_one_cause_at_many_nodes_is_one_finding(workload: Callable[..., Path]) -> None:
    chain = "".join(f"{n} load\n" for n in range(40))
    (finding,) = check(workload({"w.0.et": chain, "w.1.et": "0 comp"}))
    assert finding.node == 0
    assert "39 more" in finding.message


def test_a_rank_waiting_behind_a_fault_is_not_reported(workload: Callable[..., Path]) -> None:
    files = {
        "w.0.et": "0 coll comm_type=0 comm_size=8 pg_name=1",
        "w.1.et": "0 coll comm_type=0 comm_size=8 pg_name=2\n"
        "1 coll comm_type=0 comm_size=8 pg_name=1 after=0",
        "w.2.et": "0 recv comm_src=0 comm_tag=0 comm_size=8\n"
        "1 coll comm_type=0 comm_size=8 pg_name=2 after=0",
        "comm_groups.json": {"1": [0, 1], "2": [1, 2]},
        "network.yml": "topology: [Ring]\nnpus_count: [3]\nbandwidth: [50]\nlatency: [1]\n",
    }
    (finding,) = check(workload(files))
    assert (finding.rule, finding.file, finding.node) == ("unmatched-recv", "w.2.et", 0)


def test_the_path_is_the_scripts_or_the_folders(tmp_path: Path, make: SimpleNamespace) -> None:
    folder = tmp_path / "emptyish"
    folder.mkdir()
    make.write(folder, {"w.0.et": make.RANK, "w.1.et": make.RANK})
    assert check(folder) == []
    (folder / "run.sh").write_text(SCRIPT.replace("=comm_groups", "=$HERE/comm_groups"))
    assert [finding.rule for finding in check(folder)] == ["group-path"]


def test_what_is_not_there_raises(tmp_path: Path) -> None:
    with raises_code("check-not-a-file"):
        check(tmp_path / "no.et")
    with raises_code("check-not-a-file"):
        check_file(tmp_path)
    with raises_code("check-no-traces"):
        check_workload(tmp_path)
    with raises_code("check-not-a-directory"):
        check_workload(tmp_path / "none")

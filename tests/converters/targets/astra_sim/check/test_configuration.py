"""Configurations that run give no findings; those that stall or crash give their code."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onerank.converters.targets.astra_sim.check import check
from onerank.converters.targets.astra_sim.config_files import (
    SimulatedNetwork,
    logging_toml,
    network_yml,
    run_script,
)

Build = Callable[..., Path]

NETWORK = "topology: [ Ring ]\nnpus_count: [ 2 ]\nbandwidth: [ 50 ]\nlatency: [ 500 ]\n"
LOG_FILE = (
    '[[sink]]\nname = "file"\ntype = "rotating_file_sink_mt"\nbase_filename = "a.txt"\n'
    'max_size = "{size}"\nmax_files = 2\n'
)
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")


def rules(folder: Path) -> set[str]:
    return {finding.rule for finding in check(folder)}


def with_entries(**entries: str) -> str:
    values = {"topology": "Ring", "npus_count": "2", "bandwidth": "50", "latency": "500"}
    return "".join(f"{key}: [ {value} ]\n" for key, value in {**values, **entries}.items())


@pytest.mark.parametrize(
    "text",
    [
        "topology:\n  - Ring\nnpus_count:\n  - 2\nbandwidth:\n- 50\nlatency:\n- 0\n",
        f"---\n{NETWORK}",
        f"---\n{NETWORK}---\nmore: [",
        f"{NETWORK}name: mine\nnotes: [a, {{b: c}}]\n",
        "{topology: [Ring], npus_count: [2], bandwidth: [50.], latency: [.5]}",
        with_entries(topology="'Ring'", npus_count='"2"', bandwidth='"5e1",', latency="500, "),
        with_entries(npus_count="0x2", latency="+1.5E2"),
        with_entries(npus_count="02"),
        f"\ufeff{NETWORK}",
        NETWORK.replace("\n", "\r\n"),
        "n: &n [ 2 ]\n" + NETWORK.replace("npus_count: [ 2 ]", "npus_count: *n"),
    ],
)
def test_a_network_that_yaml_cpp_reads_has_no_findings(workload: Build, text: str) -> None:
    assert check(workload({"network.yml": text.encode()})) == []


@pytest.mark.parametrize(
    "text",
    [
        *(
            with_entries(npus_count=entry)
            for entry in ("4.0", "08", "2e0", "1_0", "two", "", "-2", "[2]", "9" * 5000, "~")
        ),
        *(
            with_entries(bandwidth=entry)
            for entry in ("inf", "4_50", "1e-9", "1e300", "1e999", ".inf", ".nan", "0", "-1", "0x5")
        ),
        *(with_entries(latency=entry) for entry in ("-1", "nan", "1e300", "5 0", "{a: 1}")),
        *(with_entries(topology=entry) for entry in ("ring", "", "Torus", "null")),
        NETWORK.replace("npus_count: [ 2 ]\n", ""),
        NETWORK.replace("[ 2 ]", "2"),
        NETWORK.replace("[ 2 ]", "{a: 2}"),
        "topology: []\nnpus_count: []\nbandwidth: []\nlatency: []\n",
    ],
)
def test_a_network_that_ends_the_simulator_is_found_for_both_encodings(
    workload: Build, make: SimpleNamespace, text: str
) -> None:
    exact = "0 comp num_ops=5500 tensor_size=1 duration_ns=5"
    folder = workload({"network.yml": text, "w_roofline.0.et": exact, "w_roofline.1.et": exact})
    make.write(
        folder,
        {
            "network.yml": text,
            "w.0.et": make.RANK,
            "w.1.et": make.RANK,
            "system_roofline.json": {**make.system, "roofline-enabled": 1},
        },
    )
    assert rules(folder) == {"network-dimensions"}


@pytest.mark.parametrize("text", ["", "[", "- a\n", "a: b: c", "\t- x", "?" * 3000 + "["])
def test_a_network_that_is_no_mapping(workload: Build, text: str) -> None:
    violated = rules(workload({"network.yml": text}))
    assert violated <= {"configuration-file", "network-dimensions"}
    assert violated


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        *(
            ("active-chunks-per-dimension", value, "setting-value")
            for value in (0, -1, 1.5, 2**31, 2**70)
        ),
        *(
            ("preferred-dataset-splits", value, "dataset-splits")
            for value in (0, -4, False, 0.5, 2**40)
        ),
        *(("local-mem-bw", value, "setting-value") for value in (0, -1, 1e-9, 1e30)),
        *(
            (key, value, "setting-type")
            for key in ("local-mem-bw", "peak-perf", "endpoint-delay", "G", "local-reduction-delay")
            for value in ("5", None, [5], {})
        ),
        ("local-mem-bw", True, "setting-type"),
        ("endpoint-delay", -1, "setting-value"),
        ("model-shared-bus", 2, "setting-value"),
        ("local-mem-trace-filename", 5, "setting-type"),
        ("per-node-custom-implementation", ["a"], "setting-type"),
        ("all-reduce-implementation-custom", [], "setting-value"),
        ("scheduling-policy", "lifo", "system-choice"),
        ("scheduling-policy", 1, "setting-type"),
        ("replay-only", 1, "replay-only"),
        ("trace-enabled", "0", "switch-number"),
        ("trace-enabled", None, "switch-number"),
        *(
            ("all-reduce-implementation", [name], "algorithms")
            for name in (
                "direct0",
                "direct-2",
                "directX",
                "Ring",
                "tree",
                "",
                "ring ",
                "oneDirect0",
            )
        ),
        ("all-gather-implementation", ["direct0"], "algorithms"),
        ("all-reduce-implementation", "ring", "setting-type"),
        ("all-reduce-implementation", [1], "setting-type"),
        ("all-reduce-implementation", [], "algorithms"),
        ("all-reduce-implementation", ["ring", "ring"], "algorithms"),
    ],
)
def test_a_setting_that_stalls_throws_or_falsifies(
    workload: Build, make: SimpleNamespace, key: str, value: Any, rule: str
) -> None:
    assert rules(workload({"system.json": {**make.system, key: value}})) == {rule}


@pytest.mark.parametrize("key", ["local-mem-bw", "preferred-dataset-splits", "scheduling-policy"])
def test_a_setting_without_default_is_missed(
    workload: Build, make: SimpleNamespace, key: str
) -> None:
    system = {name: value for name, value in make.system.items() if name != key}
    assert len(check(workload({"system.json": system}))) == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"boost-mode": 0, "my-notes": {"a": [1]}, "": 1},
        {"active-chunks-per-dimension": 2.0, "endpoint-delay": 0, "trace-enabled": 0.0},
        {"peak-perf": 0},
        {"all-reduce-implementation": ["direct"]},
        {"all-reduce-implementation": ["direct1"], "all-gather-implementation": ["oneDirect3x"]},
        {"all-reduce-implementation": ["halvingDoubling"]},
        {"all-to-all-implementation": ["halvingDoubling"]},  # not in use
    ],
)
def test_settings_that_run(workload: Build, make: SimpleNamespace, settings: Any) -> None:
    assert check(workload({"system.json": {**make.system, **settings}})) == []


def test_json_is_read_as_the_simulator_reads_it(workload: Build, make: SimpleNamespace) -> None:
    folder = workload({})
    text = json.dumps(make.system)
    for good in ("\ufeff" + text, text + " more", "\n " + text, text[:-1] + ', "a": 1, "a": 2}'):
        (folder / "system.json").write_bytes(good.encode())
        assert check(folder) == []
    for bad in ("", "[]", "5", text[:-1] + ",}", "// a\n" + text, text[:-1] + ', "x": NaN}'):
        (folder / "system.json").write_bytes(bad.encode())
        assert rules(folder) == {"configuration-file"}
    for bad in (b"\xff\xfe{}", text.replace("LIFO", "LI\tFO").encode(), b"[" * 100_000):
        (folder / "system.json").write_bytes(bad)
        assert rules(folder) == {"configuration-file"}
    (folder / "system.json").write_text(text[:-1] + ', "endpoint-delay": 1e999}')
    assert rules(folder) == {"configuration-file"}


@pytest.mark.parametrize(
    "groups",
    [
        {"1": [0.0, 1.0]},
        {"01": [0, 1]},
        {"+1": [0, 1]},
        {"1 and more": [1, 0]},
        {"1": [False, True]},
        {"1": {"a": 0, "b": 1}},
        {"1": [0, 1], "2147483647": [0, 1]},
    ],
)
def test_groups_that_the_simulator_reads(workload: Build, groups: Any) -> None:
    assert check(workload({"comm_groups.json": groups})) == []


def test_the_name_of_a_group_is_a_number(workload: Build) -> None:
    rank = "0 coll comm_type=0 comm_size=64 pg_name=02"
    files = {"w.0.et": rank, "w.1.et": rank, "comm_groups.json": {"2": [0, 1]}}
    assert check(workload(files)) == []


@pytest.mark.parametrize(
    ("groups", "rule"),
    [
        *(
            ({"1": [0, 1], key: [0, 1]}, "group-key")
            for key in ("2147483648", "9" * 5000, "-1", "0", "", "tp", "01")
        ),
        *(
            ({"1": [0, 1], "2": ranks}, "group-ranks")
            for ranks in ([], None, "01", [0.5, 1], ["0", "1"], [0, 2**40], [[0, 1]])
        ),
        ([[0, 1]], "configuration-file"),
    ],
)
def test_groups_that_end_the_simulator(workload: Build, groups: Any, rule: str) -> None:
    assert rule in rules(workload({"comm_groups.json": groups}))


def test_files_that_the_script_passes(workload: Build, make: SimpleNamespace) -> None:
    rank = "0 comp us=5"
    base = {
        "w.0.et": rank,
        "w.1.et": rank,
        "run.sh": run_script("w", 2),
        "logging.toml": logging_toml(),
    }
    folder = workload(base)
    assert check(folder) == []
    for name in ("comm_groups.json", "logging.toml", "memory.json", "network.yml", "system.json"):
        kept = (folder / name).read_bytes()
        (folder / name).unlink()
        assert [(finding.rule, finding.file) for finding in check(folder)] == [
            ("configuration-file", name)
        ]
        for broken in (b"", b"[", b"\x00"):
            (folder / name).write_bytes(broken)
            findings = [finding for finding in check(folder) if finding.file == name]
            assert findings, (name, broken)
        (folder / name).write_bytes(kept)
    assert check(folder) == []


@pytest.mark.parametrize(
    ("memory", "rule"),
    [
        ({}, "setting-value"),
        ({"memory-type": "NONE"}, "setting-value"),
        ({"memory-type": 0}, "setting-type"),
        ({"memory-type": "MEMORY_POOL", "remote-mem-bw": "5"}, "setting-type"),
        ({"memory-type": "PER_NODE_MEMORY_EXPANSION", "num-nodes": 2**31 - 1}, "setting-value"),
        ({"memory-type": "PER_NODE_MEMORY_EXPANSION", "num-nodes": "2"}, "setting-type"),
        ({"memory-type": "NO_MEMORY_EXPANSION", "remote-mem-bw": True}, "setting-type"),
        ([], "setting-value"),
    ],
)
def test_a_memory_that_ends_the_simulator(workload: Build, memory: Any, rule: str) -> None:
    assert rules(workload({"memory.json": memory})) == {rule}


@pytest.mark.parametrize(
    "text",
    [
        logging_toml().replace("null_sink_mt", "null_sink"),
        logging_toml().replace('"debug"', '"verbose"'),
        logging_toml().replace('sinks = ["nowhere"]\n', ""),
        logging_toml().replace('type = "null_sink_mt"', 'type = "rotating_file_sink_mt"'),
        logging_toml().split("[[logger]]")[0],
        "\ufeff" + logging_toml(),
        logging_toml() + logging_toml()[logging_toml().index("[[logger]]") :],
        logging_toml().replace('sinks = ["nowhere"]', 'sinks = ["nowhere"]\ntype = "async"'),
        LOG_FILE.format(size="1k") + logging_toml(),
        LOG_FILE.format(size="big") + logging_toml(),
    ],
)
def test_a_logging_file_that_throws(workload: Build, text: str) -> None:
    violated = rules(workload({"logging.toml": text}))
    assert len(violated) == 1
    assert violated <= {"logging-configuration", "configuration-file"}


@pytest.mark.parametrize(
    "text",
    [
        LOG_FILE.format(size="10M") + logging_toml(),
        LOG_FILE.format(size=" 4096 ") + logging_toml(),
        logging_toml().replace('"debug"', "1"),  # no string counts as absent
    ],
)
def test_a_logging_file_that_runs(workload: Build, text: str) -> None:
    assert check(workload({"logging.toml": text})) == []


def test_a_second_dimension_under_our_script_is_not_congestion_aware(
    workload: Build, make: SimpleNamespace
) -> None:
    system = {**make.system, **{f"{name}-implementation": ["ring", "ring"] for name in COLLECTIVES}}
    rank = "0 coll comm_type=0 comm_size=64 pg_name=1"
    folder = workload(
        {
            **{f"w.{number}.et": rank for number in range(4)},
            "comm_groups.json": {"1": [0, 1, 2, 3]},
            "system.json": system,
            "run.sh": run_script("w", 4),
            "logging.toml": logging_toml(),
            "network.yml": "topology: [ Switch, Switch ]\nnpus_count: [ 2, 2 ]\n"
            "bandwidth: [ 400, 50 ]\nlatency: [ 250, 1000 ]\n",
        }
    )
    assert check(folder) == []
    run = folder / "run.sh"
    run.write_text(run.read_text().replace("${ASTRA_SIM_BIN:-}", "/x/Any_Congestion_Aware"))
    assert rules(folder) == {"congestion-aware"}


@pytest.mark.parametrize(
    ("algorithm", "collective", "ranks", "expected"),
    [
        ("halvingDoubling", 0, 3, {"algorithms"}),
        ("halvingDoubling", 7, 2, set[str]()),
        ("halvingDoubling", 6, 2, {"algorithms"}),
        ("oneHalvingDoubling", 2, 3, {"algorithms"}),
        ("doubleBinaryTree", 0, 3, {"algorithms"}),
        ("doubleBinaryTree", 0, 4, set[str]()),
        ("doubleBinaryTree", 2, 4, {"algorithms"}),
        ("oneDirect", 6, 3, set[str]()),
    ],
)
def test_algorithms_serve_the_groups_that_use_them(  # noqa: PLR0917
    workload: Build,
    make: SimpleNamespace,
    algorithm: str,
    collective: int,
    ranks: int,
    expected: set,
) -> None:
    call = f"0 coll comm_type={collective} comm_size=64 pg_name=1"
    folder = workload(
        {
            **{f"w.{rank}.et": call if rank < ranks else "0 comp us=1" for rank in range(4)},
            "comm_groups.json": {"1": list(range(ranks))},
            "network.yml": network_yml(4, SimulatedNetwork()),
            "system.json": {
                **make.system,
                **{f"{name}-implementation": [algorithm] for name in COLLECTIVES},
            },
        }
    )
    assert rules(folder) == expected


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (f"0 coll comm_type=0 comm_size={2**62} pg_name=1", "comm-size"),
        (f"0 comp us={2**64 - 5}", "duration-range"),
        (f"0 comp us={2**62} duration_ns=5000", "duration-range"),
    ],
)
def test_figures_that_overflow(workload: Build, text: str, rule: str) -> None:
    assert rule in rules(workload({"w.0.et": text, "w.1.et": text}))


@pytest.mark.parametrize(
    ("settings", "node"),
    [
        ({"peak-perf": 2}, "num_ops=5500 tensor_size=1"),
        ({"peak-perf": 1}, "num_ops=5500000 tensor_size=1"),
        ({"peak-perf": 1}, "num_ops=5500 tensor_size=1000000"),
        ({"peak-perf": 1, "local-mem-bw": 0.001}, "num_ops=5500 tensor_size=1"),
    ],
)
def test_a_roofline_that_gives_another_time(
    workload: Build, make: SimpleNamespace, settings: Any, node: str
) -> None:
    rank = f"0 comp {node} duration_ns=5"
    system = {**make.system, "roofline-enabled": 1, **settings}
    files = {"w.0.et": rank, "w.1.et": rank, "system.json": system}
    assert rules(workload(files)) == {"roofline-time"}


@pytest.mark.parametrize(
    ("files", "rule"),
    [
        ({"system.json": {"endpoint-dealy": 10}}, "setting-name"),
        ({"system.json": {"trace-enabled": False}}, "switch-number"),
        ({"system.json": {"model-shared-bus": 2}}, "setting-value"),
        ({"comm_groups.json": {"1": [0, 1], "2": [0, 9]}}, "group-ranks"),  # not in use
        ({"w.0.et": "0 comp us=5\n1 comp us=5 ctrl=0", "w.1.et": "0 comp us=5"}, "control-edge"),
        (
            dict.fromkeys(("w.0.et", "w.1.et"), "0 comp us=5 is_cpu_op:int32_val=0"),
            "attribute-type",
        ),
    ],
)
def test_what_does_not_change_a_run_is_a_note(
    workload: Build, make: SimpleNamespace, files: Any, rule: str
) -> None:
    if "system.json" in files:
        files = {"system.json": {**make.system, **files["system.json"]}}
    assert {(finding.rule, finding.is_note) for finding in check(workload(files))} == {(rule, True)}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"L": -1, "o": 1e30, "g": True, "local-reduction-delay": 0.5}, set[str]()),
        ({"model-shared-bus": 1, "L": -1}, {"setting-value"}),
        ({"model-shared-bus": 1, "L": 5, "o": 0.5}, set[str]()),
        ({"L": None}, {"setting-type"}),
    ],
)
def test_the_costs_of_the_memory_bus_count_if_it_is_shared(
    workload: Build, make: SimpleNamespace, settings: Any, expected: set[str]
) -> None:
    assert rules(workload({"system.json": {**make.system, **settings}})) == expected


@pytest.mark.parametrize(
    "key", ["all-reduce-implementation-custom", "all-gather-implementation-custom"]
)
def test_a_custom_algorithm_in_use_has_a_file_for_each_rank(
    workload: Build, make: SimpleNamespace, key: str
) -> None:
    folder = workload({"system.json": {**make.system, key: ["more/tree"]}})
    used = key.startswith("all-reduce")
    assert rules(folder) == ({"algorithms"} if used else set[str]())
    (folder / "more").mkdir()
    for rank in range(2):
        assert rules(folder) == ({"algorithms"} if used else set[str]())
        (folder / "more" / f"tree.{rank}.et").write_bytes(make.trace(make.RANK))
    assert check(folder) == []


@pytest.mark.parametrize(
    ("text", "rule"),
    [("1: more/tree\n", "algorithms"), ("a: b\n", "configuration-file"), (None, "algorithms")],
)
def test_the_file_of_algorithms_by_node(
    workload: Build, make: SimpleNamespace, text: str | None, rule: str
) -> None:
    system = {**make.system, "per-node-custom-implementation": "nodes.yml"}
    assert rules(workload({"system.json": system, "nodes.yml": text})) == {rule}


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ({"1": [0, 1], "2": [0, 1]}, {"unordered-collectives"}),
        ({"1": [0, 1], "2": [0, 1, 2]}, {"unordered-collectives"}),
        ({"1": [0, 1], "2": [0, 2]}, set[str]()),
    ],
)
def test_collectives_of_groups_that_share_another_rank_need_an_order(
    workload: Build, members: Any, expected: set[str]
) -> None:
    """ASTRA-sim stalls with two shared ranks if messages arrive late, and never with one."""
    files: dict[str, Any] = {
        "network.yml": with_entries(npus_count="3"),
        "comm_groups.json": members,
    }
    for rank in range(3):
        calls = [group for group, ranks in members.items() if rank in ranks]
        lines = ["0 comp us=5"]
        lines += [
            f"{group} coll comm_type=0 comm_size=64 pg_name={group} after=0" for group in calls
        ]
        files[f"w.{rank}.et"] = "\n".join(lines)
    assert rules(workload(files)) == expected


def test_collectives_of_one_group_behind_a_receive_and_behind_compute(workload: Build) -> None:
    sends = "0 send comm_dst=1 comm_tag=0 comm_size=8\n"
    receives = "0 recv comm_src=0 comm_tag=0 comm_size=8\n"
    calls = (
        "1 comp us=5\n"
        "2 coll comm_type=0 comm_size=64 pg_name=1 after=0\n"
        "3 coll comm_type=0 comm_size=64 pg_name=1 after=1"
    )
    assert rules(workload({"w.0.et": sends + calls, "w.1.et": receives + calls})) == {
        "unordered-collectives"
    }

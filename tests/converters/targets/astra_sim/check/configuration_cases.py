"""Bad groups, ranks, and configurations of system and network."""

from rule_case import CHOICES, COMP, ROOFLINE, SYSTEM, TIMED, Case, both, coll, network, ranks

CASES: list[Case] = [
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
        {**ranks(coll(4, 0, 8), COMP), "comm_groups.json": None, "run.sh": None},
    ),
    Case(
        "group-key",
        "comm_groups.json",
        None,
        'group "0": a key must be an integer from 1',
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
        "not YAML",
        {"network.yml": "npus_count: [ 2\n"},
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
            "system.json": {**CHOICES, "preferred-dataset-splits": 1, "local-mem-bw": 50},
        },
    ),
    Case(
        "algorithms",
        "system.json",
        None,
        'all-to-all-implementation is ["ring"] and the network',
        {
            **ranks(*[coll(4, 6, 8)] * 4),
            "comm_groups.json": {"1": [0, 1, 2, 3]},
            "network.yml": network("Ring, Ring", "2, 2", "50, 50", "5, 5"),
            "system.json": {
                **CHOICES,
                "preferred-dataset-splits": 1,
                "local-mem-bw": 50,
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
    Case(
        "setting-type",
        "system.json",
        None,
        'local-mem-bw is "50"; expected a number',
        {"system.json": {**SYSTEM, "local-mem-bw": "50"}},
    ),
    Case(
        "setting-value",
        "system.json",
        None,
        "active-chunks-per-dimension is 0; expected an integer from 1",
        {"system.json": {**SYSTEM, "active-chunks-per-dimension": 0}},
    ),
    Case(
        "setting-name",
        "system.json",
        None,
        "endpoint-dealy is not read by ASTRA-sim; did you mean endpoint-delay?",
        {"system.json": {**SYSTEM, "endpoint-dealy": 10}},
    ),
    Case(
        "replay-only",
        "system.json",
        None,
        "replay-only is on",
        {"system.json": {**SYSTEM, "replay-only": 1}},
    ),
    Case(
        "duplicate-key",
        "network.yml",
        None,
        "line 5 gives bandwidth again",
        {"network.yml": network("Ring", "2") + "bandwidth: [ 25 ]\n"},
    ),
    Case(
        "logging-configuration",
        "logging.toml",
        None,
        "logger system names sink",
        {
            "logging.toml": '[[sink]]\nname = "a"\ntype = "null_sink_mt"\n'
            '[[logger]]\nname = "system"\nsinks = ["b"]\n'
        },
    ),
]

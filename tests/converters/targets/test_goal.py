"""GOAL schedules: every line of a small one, algorithms, and runs on a small LogGP machine."""

import os
import re
import subprocess
from collections import defaultdict
from fractions import Fraction
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import msgspec
import pytest
from goal_machine import Operation, parse, run
from notes import codes, note_of
from raised import raises_code
from stages import FORWARD_NS, INPUT_NS, OPTIMIZER_NS, WEIGHT_NS, captures

from onerank.analysis.step_time import replay
from onerank.annotate import recost
from onerank.converters.expand.pipeline import PipelineSchedule, expand
from onerank.converters.expand.ranks import RankGraph
from onerank.converters.sources.kineto import convert_directory
from onerank.converters.targets.goal import export_goal, export_goal_ranks
from onerank.converters.targets.goal_collectives import (
    ROOT,
    SUPPORTED,
    CollectiveCall,
    Message,
    messages,
    tree,
)
from onerank.ir import (
    Collective,
    Graph,
    GraphBuilder,
    Job,
    Kind,
    Measurement,
    ProcessGroup,
    Reason,
    World,
)

TRACES = Path(__file__).parents[3] / "traces"
BINARIES = os.environ.get("LOGGOPSIM_DIR", "")
TP2_DP2 = Job(
    world=World.of(tp=2, dp=2),
    groups=(ProcessGroup("tp", (0, 1), "tp"), ProcessGroup("dp", (0, 2), "dp")),
)


def step_of(job: Job, *calls: dict[str, Any], concurrent: bool = False) -> Graph:
    """Return a kernel of 1 us, the calls in sequence or concurrently, a kernel of 0.5 us."""
    builder = GraphBuilder()
    first = newest = builder.add(kind=Kind.KERNEL, stream=7, duration_ns=1000, name="before")
    last = builder.add(kind=Kind.KERNEL, stream=7, duration_ns=500, name="after")
    builder.edge(first, last, Reason.STREAM_ORDER)
    for columns in calls:
        call = builder.add(stream=20, **columns)
        builder.edge(first if concurrent else newest, call, Reason.SYNC)
        builder.edge(call, last, Reason.SYNC)
        newest = call
    return builder.build(job)


def call_of(collective: Collective, group: str, size: int, **columns: Any) -> dict[str, Any]:
    return {
        "kind": Kind.COLLECTIVE,
        "collective": collective,
        "group": group,
        "comm_bytes": size,
        **columns,
    }


def test_every_line(tmp_path: Path) -> None:
    graph = step_of(TP2_DP2, call_of(Collective.ALL_REDUCE, "dp", 7))
    exported = export_goal(graph, tmp_path / "job.goal")
    text = (tmp_path / "job.goal").read_text()
    assert text.startswith("num_ranks 4\nrank 0 {\n")
    assert text.partition("rank 2 {\n")[2].partition("rank 3")[0] == (
        "l0: calc 1000 cpu 0\n"
        "l1: calc 0 cpu 1\n"
        "l1 requires l0\n"
        "l2: send 4b to 0 tag 0 cpu 1 nic 0\n"
        "l2 requires l1\n"
        "l3: recv 3b from 0 tag 0 cpu 1 nic 0\n"
        "l3 requires l1\n"
        "l4: send 3b to 0 tag 1 cpu 1 nic 0\n"
        "l4 requires l3\n"
        "l4 irequires l2\n"
        "l5: recv 4b from 0 tag 1 cpu 1 nic 0\n"
        "l5 requires l1\n"
        "l6: calc 0 cpu 1\n"
        "l6 requires l2\n"
        "l6 requires l4\n"
        "l6 requires l5\n"
        "l7: calc 500 cpu 0\n"
        "l7 requires l6\n"
        "}\n"
    )
    assert (exported.ranks, exported.operations, exported.gpu_time_ns, exported.cpus) == (
        4,
        32,
        1500,
        2,
    )
    assert exported.algorithms == {"all_reduce by ring": 1}
    # the other group of the axis has other tags
    assert set(
        re.findall(r"tag (\d+)", text.partition("rank 1 {\n")[2].partition("rank 2")[0])
    ) == {
        "2",
        "3",
    }


def test_independent_calls_share_the_interface(tmp_path: Path) -> None:
    """450 MB on each of two groups: one interface takes them one after the other."""
    calls = [call_of(Collective.ALL_REDUCE, group, 450_000_000) for group in ("tp", "dp")]
    ends: list[int] = []
    for concurrent in (False, True):
        export_goal(step_of(TP2_DP2, *calls, concurrent=concurrent), tmp_path / "job.goal")
        ends.append(run(parse(tmp_path / "job.goal"), Fraction(1, 450))[0])
    assert ends == [pytest.approx(1500 + 2_000_000, rel=1e-4)] * 2


# Collectives -------------------------------------------------------------------------------------

LAYOUTS = [(1, 2), (1, 3), (1, 8), (2, 1), (3, 1), (2, 4), (3, 2), (5, 1), (4, 3), (9, 1)]


def group_of(nodes: int, per_node: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(n * per_node, (n + 1) * per_node)) for n in range(nodes))


def with_origins(call: CollectiveCall) -> list[list[tuple[Message, frozenset[int]]]]:
    """Return each member's messages with the members whose data they can contain."""
    lists = [messages(call, position) for position in range(call.ranks)]
    place = {
        (position, message.peer, message.step): (position, at)
        for position, member_messages in enumerate(lists)
        for at, message in enumerate(member_messages)
        if message.sends
    }
    known: dict[tuple[int, int], frozenset[int]] = {}
    pending = [
        (position, at)
        for position, member_messages in enumerate(lists)
        for at in range(len(member_messages))
    ]
    while pending:
        blocked: list[tuple[int, int]] = []
        for position, at in pending:
            message = lists[position][at]
            needs = [(position, other) for other in message.after]
            if not message.sends:
                needs = [place[message.peer, position, message.step]]
            if all(need in known for need in needs):
                known[position, at] = frozenset({position}).union(*(known[need] for need in needs))
            else:
                blocked.append((position, at))
        assert len(blocked) < len(pending), "members wait for each other"
        pending = blocked
    return [
        [(message, known[position, at]) for at, message in enumerate(member_messages)]
        for position, member_messages in enumerate(lists)
    ]


@pytest.mark.parametrize("collective", SUPPORTED)
def test_every_send_has_its_receive(collective: Collective) -> None:
    for layout, size in product(LAYOUTS, [3, 40_000, 64 << 20]):
        check_ends(CollectiveCall(collective, size, group_of(*layout)))


def check_ends(call: CollectiveCall) -> None:
    """Check that each message has two ends, and a step that no other has between the two."""
    sent: dict[tuple[int, int, int], int] = {}
    received: dict[tuple[int, int, int], int] = {}
    for position, member_messages in enumerate(with_origins(call)):
        for message, _ in member_messages:
            ends = (position, message.peer) if message.sends else (message.peer, position)
            sizes = sent if message.sends else received
            assert (*ends, message.step) not in sizes
            sizes[(*ends, message.step)] = message.size_bytes
    assert sent == received


@pytest.mark.parametrize(("layout", "size"), [*product(LAYOUTS, [40_000, 64 << 20])])
def test_an_all_reduce_reaches_all_members(layout: tuple[int, int], size: int) -> None:
    call = CollectiveCall(Collective.ALL_REDUCE, size, group_of(*layout))
    all_members = frozenset(range(call.ranks))
    for member_messages in with_origins(call):
        complete = {
            (message.peer, message.step): message.size_bytes
            for message, origins in member_messages
            if origins == all_members and (not message.sends or call.choice.algorithm == "tree")
        }
        # a part a member completes itself, it does not receive; a tree's root only sends
        assert sum(complete.values()) >= size * (call.ranks - 1) / call.ranks


@pytest.mark.parametrize(
    ("collective", "share"),
    [
        (Collective.ALL_REDUCE, Fraction(2 * 7, 8)),
        (Collective.ALL_GATHER, Fraction(7)),
        (Collective.REDUCE_SCATTER, Fraction(7, 8)),
        (Collective.ALL_TO_ALL, Fraction(7, 8)),
    ],
)
def test_bytes_of_each_member(collective: Collective, share: Fraction) -> None:
    """As in doc/PERFORMANCE.md of nccl-tests."""
    size = 8 << 20
    call = CollectiveCall(collective, size, group_of(1, 8))
    for position in range(8):
        member_messages = messages(call, position)
        assert (
            sum(message.size_bytes for message in member_messages if message.sends) == size * share
        )
        assert (
            sum(message.size_bytes for message in member_messages if not message.sends)
            == size * share
        )


@pytest.mark.parametrize("collective", [Collective.ALL_GATHER, Collective.REDUCE_SCATTER])
@pytest.mark.parametrize("nodes", [16, 21])
def test_one_gpu_per_node_uses_recursive_doubling(collective: Collective, nodes: int) -> None:
    """PAT: as many bytes as a ring in log2 steps, a gather's far ones first, when they are few."""
    shard = 512
    size = shard if collective is Collective.ALL_GATHER else shard * nodes
    call = CollectiveCall(collective, size, group_of(nodes, 1))
    assert call.choice.algorithm == "pat"
    all_members = frozenset(range(nodes))
    for member_messages in with_origins(call):
        sent = [message for message, _ in member_messages if message.sends]
        assert len(sent) == (nodes - 1).bit_length()
        assert sum(message.size_bytes for message in sent) == shard * (nodes - 1)
        ordered = sent if collective is Collective.ALL_GATHER else sent[::-1]
        assert ordered[0].size_bytes < ordered[-1].size_bytes
        assert frozenset().union(*(origins for _, origins in member_messages)) == all_members


@pytest.mark.parametrize("root", [0, 3])
def test_a_broadcast_goes_down_a_chain(root: int) -> None:
    call = CollectiveCall(Collective.BROADCAST, 1 << 20, group_of(1, 4), root=root)
    members = with_origins(call)
    assert sum(message.sends for message, _ in members[root]) == len(members[root]) > 0
    for position in range(4):
        got = [message.size_bytes for message, origins in members[position]
               if not message.sends and root in origins]  # fmt: skip
        assert sum(got) == (0 if position == root else 1 << 20)


@pytest.mark.parametrize(
    ("layout", "size", "algorithm"),
    [((1, 8), 1 << 30, "ring"), ((8, 8), 64 << 10, "tree"), ((8, 8), 4 << 30, "ring")],
)
def test_nccls_choice_by_size(layout: tuple[int, int], size: int, algorithm: str) -> None:
    assert (
        CollectiveCall(Collective.ALL_REDUCE, size, group_of(*layout)).choice.algorithm == algorithm
    )


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 6, 7, 8, 13, 16])
@pytest.mark.parametrize("per_node", [1, 2, 8])
def test_trees_span_the_group(nodes: int, per_node: int) -> None:
    for number in range(4):
        parents = tree(group_of(nodes, per_node), number)
        assert parents.count(ROOT) == 1
        for position in range(len(parents)):
            seen = [position]
            while parents[seen[-1]] != ROOT:
                seen.append(parents[seen[-1]])
                assert len(seen) <= len(parents)
            hops = [
                (low, high) for low, high in pairwise(seen) if low // per_node != high // per_node
            ]
            assert len(hops) <= nodes.bit_length() + 1


def test_a_leaf_of_one_tree_is_no_leaf_of_the_other() -> None:
    """Double binary trees: of 8 nodes each is inside one tree at most."""
    inside = [set(tree(group_of(8, 1), number)) - {ROOT} for number in (0, 1)]
    assert inside[0] == {0, 2, 4, 6}
    assert inside[1] == {7, 5, 3, 1}


# Whole jobs --------------------------------------------------------------------------------------


def test_every_collective_runs(tmp_path: Path) -> None:
    calls = [call_of(kind, group, 4096) for kind in SUPPORTED for group in ("tp", "dp", "")]
    graph = step_of(TP2_DP2, *calls)
    for gpus_per_node in (1, 2, 8):
        exported = export_goal(graph, tmp_path / "job.goal", gpus_per_node=gpus_per_node)
        assert run(parse(tmp_path / "job.goal")) == [1500] * 4
        assert sum(exported.algorithms.values()) == len(calls)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved:2", "zbv"])
def test_pipelines_take_the_time_of_the_closed_form(schedule: str, tmp_path: Path) -> None:
    """(M + P - 1) (f + b) of equal stages; interleaved: the bubble over V."""
    kind = PipelineSchedule.parse(schedule)
    ranks, batches = 4 // kind.chunks, 8
    rank_graphs = expand(captures(), kind, batches)
    export_goal_ranks(rank_graphs, tmp_path / "job.goal")
    ends = run(parse(tmp_path / "job.goal"))
    both = FORWARD_NS + INPUT_NS + WEIGHT_NS
    update = kind.chunks * OPTIMIZER_NS
    small = 2 * batches * kind.chunks  # the embedding's gradients, 1 ns each
    busy = batches * kind.chunks * both + update
    bubble = (ranks - 1) * both
    assert busy <= max(ends) <= busy + bubble + small
    if schedule in ("gpipe", "1f1b"):
        assert max(ends) >= busy + bubble


def test_stages_of_two_jobs_are_refused(tmp_path: Path) -> None:
    rank_graphs = expand(captures(), PipelineSchedule.parse("1f1b"), 4)
    with raises_code("goal-unmatched-p2p"):
        export_goal_ranks(rank_graphs[:3], tmp_path / "job.goal")
    others = expand(captures(captured=2), PipelineSchedule.parse("1f1b"), 6)
    mixed: list[RankGraph] = [*rank_graphs[:2], *others[2:]]
    with raises_code("goal-unmatched-p2p"):
        export_goal_ranks(mixed, tmp_path / "job.goal")
    assert not [*tmp_path.iterdir()]


def test_graphs_that_cannot_represent_all_ranks_are_refused(tmp_path: Path) -> None:
    with raises_code("ranks-single-stage"):
        export_goal(captures()[0], tmp_path / "job.goal")
    unknown = step_of(TP2_DP2, call_of(Collective.NONE, "tp", 8))
    with raises_code("export-unknown-collective"):
        export_goal(unknown, tmp_path / "job.goal")
    cpu, _ = convert_directory(TRACES / "cpu-llama-2l-tp4")
    with raises_code("graph-no-gpu-time"):
        export_goal(cpu, tmp_path / "job.goal")
    assert not [*tmp_path.iterdir()]


@pytest.fixture(scope="module", params=["h200-llama-8b-4l-tp4", "cpu-llama-2l-tp4"])
def real(request: pytest.FixtureRequest) -> Graph:
    graph, _ = convert_directory(TRACES / request.param)
    return recost(graph, target="H100") if request.param.startswith("cpu") else graph


def test_real_captures_run(real: Graph, tmp_path: Path) -> None:
    """Without a network each rank takes its kernels' time; with a network, the replayed time."""
    exported = export_goal(real, tmp_path / "job.goal")
    ranks = parse(tmp_path / "job.goal")
    compute = int(real.nodes.duration_ns[real.gpu_compute].sum())
    assert exported.gpu_time_ns == compute
    assert run(ranks) == [compute] * 4
    simulated = run(ranks, Fraction(1, 450))[0]
    exposed = replay(real, bandwidth_gb_per_s=450).exposed_communication_ns
    messages_of_a_rank = sum(op.kind == "send" for op in ranks[0])
    # each message rounds its time down, and begins with a byte that takes none
    assert simulated - compute == pytest.approx(exposed, abs=messages_of_a_rank)
    assert exposed > 0


def test_host_delays_have_a_separate_cpu(tmp_path: Path) -> None:
    """Busy for 1.5 of 4 us; a step of 3 us leaves three fifths of the idle time."""
    builder = GraphBuilder()
    newest = -1
    for start, duration in ((0, 1000), (3500, 500)):
        node = builder.add(kind=Kind.KERNEL, stream=7, start_ns=start, duration_ns=duration)
        if newest >= 0:
            builder.edge(newest, node, Reason.STREAM_ORDER)
        newest = node
    measured = Measurement(step_ns=(3000,))
    graph = builder.build(msgspec.structs.replace(TP2_DP2, measurement=measured))
    exported = export_goal(graph, tmp_path / "job.goal", host_time=True)
    assert (tmp_path / "job.goal").read_text().split("}")[0].splitlines()[2:] == [
        "l0: calc 1000 cpu 0",
        "l1: calc 1500 cpu 1",
        "l1 requires l0",
        "l2: calc 500 cpu 0",
        "l2 requires l1",
    ]
    note_of(exported.notes, "host-delays", "1.500 us", "1 nodes")
    assert codes(exported.notes) == ["host-delays", "goal-payload-only", "goal-node-placement"]


def test_with_host_delays_the_step_lasts_as_measured(tmp_path: Path) -> None:
    """Without a network: the H200 capture's median step; the replay shows the profiled one's."""
    graph, _ = convert_directory(TRACES / "h200-llama-8b-4l-tp4")
    export_goal(graph, tmp_path / "job.goal", host_time=True)
    measured = graph.job.measurement
    ends = run(parse(tmp_path / "job.goal"))
    assert measured.median_step_ns
    assert measured.profiled_step_ns
    assert ends == [pytest.approx(measured.median_step_ns, rel=0.01)] * 4
    replayed = replay(graph).step_time_ns
    assert replayed == pytest.approx(measured.profiled_step_ns, rel=0.02)
    assert ends[0] < replayed


def test_the_output_is_reproducible(real: Graph, tmp_path: Path) -> None:
    first, second = (export_goal(real, tmp_path / name).path.read_bytes() for name in "ab")
    assert first == second


def test_tags_are_unique_in_the_whole_job(real: Graph, tmp_path: Path) -> None:
    world = World.of(tp=4, dp=2)
    job = msgspec.structs.replace(real.job, world=world)
    graph = Graph(real.nodes, real.edges, real.strings, job)
    export_goal(graph, tmp_path / "job.goal")
    ranks = parse(tmp_path / "job.goal")
    users: defaultdict[int, set[frozenset[int]]] = defaultdict(set)
    for rank, ops in enumerate(ranks):
        for op in ops:
            if op.kind != "calc":
                users[op.tag].add(frozenset({rank // 4, op.peer // 4}))
    assert all(len(replicas) == 1 for replicas in users.values())  # of one group of one replica
    assert run(ranks)


@pytest.mark.skipif(not BINARIES, reason="LOGGOPSIM_DIR is not set: txt2bin and LogGOPSim's place")
@pytest.mark.parametrize("schedule", ["", "1f1b", "zbv"])
def test_loggopsim_agrees(real: Graph, schedule: str, tmp_path: Path) -> None:
    if schedule:
        export_goal_ranks(
            expand(captures(), PipelineSchedule.parse(schedule), 6), tmp_path / "job.goal"
        )
    else:
        export_goal(real, tmp_path / "job.goal")
    ranks: list[list[Operation]] = parse(tmp_path / "job.goal")
    for gap in (0, 450):
        gap_per_byte = f"{1 / gap:.12f}" if gap else "0"
        for tool in (
            ["txt2bin", "-i", "job.goal", "-o", "job.bin"],
            [
                "LogGOPSim",
                "-f",
                "job.bin",
                *"-L 0 -o 0 -g 0 -S 2147483647 -G".split(),
                gap_per_byte,
            ],
        ):
            process = subprocess.run(
                [Path(BINARIES).resolve() / tool[0], *tool[1:]],
                cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300,
            )  # fmt: skip
        ends = [int(end) for end in re.findall(r"Host \d+: (\d+)", process.stdout)]
        expected = run(ranks, Fraction(1, gap) if gap else Fraction(0))
        assert ends == pytest.approx(expected, abs=20)

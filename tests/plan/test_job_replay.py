"""A replayed job takes as long as the expanded graphs of all its ranks."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from kept_traces import kept_graph
from own_process import run_command
from raised import raises_code
from stages import captures, stage

import onerank
from onerank.converters.expand.pipeline import PipelineSchedule, expand
from onerank.converters.expand.ranks import RankGraph
from onerank.ir import Graph, Kind, Phase, World
from onerank.ir.arrays import Mask
from onerank.plan.cluster import ClusterLink, ClusterNetwork
from onerank.plan.job_replay import JobReplay, replay_job

INSTANT = ClusterNetwork(8, ClusterLink(1e9, 0.0), ClusterLink(1e9, 0.0))


def end_of_expanded(rank_graphs: list[RankGraph]) -> int:
    """Return the end of the last node; a receive waits for its send, and messages take no time."""
    graphs = [entry.graph for entry in rank_graphs]
    order = [graph.topological_order().tolist() for graph in graphs]
    ends: list[dict[int, int]] = [{} for _ in graphs]
    sent: dict[tuple[int, int, int], int] = {}
    place = [0] * len(graphs)
    advanced = True
    while advanced:
        advanced = False
        for rank, graph in enumerate(graphs):
            while place[rank] < len(order[rank]):
                index = order[rank][place[rank]]
                node = graph.node(index)
                begin = max((ends[rank][source] for source, _ in graph.edges.of(index)), default=0)
                if node.kind is Kind.RECV:
                    message = node.value("comm_src"), rank, node.value("comm_tag")
                    if message not in sent:
                        break
                    begin = max(begin, sent[message])
                elif node.kind is Kind.SEND:
                    sent[rank, node.value("comm_dst"), node.value("comm_tag")] = begin
                ends[rank][index] = begin + node.value("duration_ns")
                place[rank] += 1
                advanced = True
    assert all(at == len(nodes) for at, nodes in zip(place, order, strict=True))
    return max(max(of_rank.values()) for of_rank in ends)


@pytest.mark.parametrize("micro_batches", [3, 8, 13])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved:2", "zbv"])
def test_blocks_take_as_long_as_all_ranks(schedule: str, micro_batches: int) -> None:
    if schedule == "interleaved:2" and micro_batches == 13:
        micro_batches = 12
    parsed = PipelineSchedule.parse(schedule)
    graphs = captures()
    expanded = expand(graphs, parsed, micro_batches)
    replayed = replay_job(graphs, INSTANT, parsed, micro_batches)
    assert replayed.step_ns == pytest.approx(end_of_expanded(expanded), rel=1e-4)
    assert replayed.compute_ns + replayed.bubble_ns == pytest.approx(replayed.step_ns, rel=1e-4)


def own_order(schedule: str = "1f1b", micro_batches: int = 8) -> list[Graph]:
    """Return graphs of ranks in the order of a schedule, as a script that runs it has."""
    expanded = expand(captures(), PipelineSchedule.parse(schedule), micro_batches)
    # Messages of NCCL have no tags: those between two ranks arrive in the order of their sends.
    return [
        entry.graph.with_columns(comm_tag=np.zeros_like(entry.graph.nodes.comm_tag))
        for entry in expanded
    ]


def replayed(graphs: Sequence[Graph]) -> JobReplay:
    # The named schedule does not count: the traces have their own.
    return replay_job(graphs, INSTANT, PipelineSchedule.parse("gpipe"), None)


@pytest.mark.parametrize("micro_batches", [4, 8])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved:2", "zbv"])
def test_the_order_of_the_traces_decides(schedule: str, micro_batches: int) -> None:
    parsed = PipelineSchedule.parse(schedule)
    expanded = expand(captures(), parsed, micro_batches)
    step = replayed([entry.graph for entry in reversed(expanded)])
    assert step.step_ns == end_of_expanded(expanded)
    laid_out = replay_job(captures(), INSTANT, parsed, micro_batches)
    assert step.step_ns == laid_out.step_ns
    assert (step.ranks, step.compute_ns) == (len(expanded), laid_out.compute_ns)


def test_a_collective_of_several_stages_begins_when_the_last_has_come() -> None:
    graphs = own_order()
    # The first and the last stage sum the gradient of their embedding. The last ends first, and
    # its optimizer takes 50 ms here.
    last = graphs[-1]
    durations = last.nodes.duration_ns.copy()
    optimizer = (last.nodes.phase == Phase.OPTIMIZER) & (durations > 0)
    durations[optimizer] = 50_000_000
    before = replayed(graphs).step_ns
    step = replayed([*graphs[:-1], last.with_columns(duration_ns=durations)])
    assert optimizer.sum() == 1
    assert step.step_ns == pytest.approx(before - 500_000 + 50_000_000, abs=10)


def two_pipelines(axis: str) -> list[Graph]:
    """Return all ranks of two pipelines along `axis`, whose script runs its own schedule.

    The stages of the first pipeline come first.
    """
    world = World.of(pp=4, **{axis: 2})
    graphs = [stage(n, world=world, at={axis: lane}) for lane in range(2) for n in range(4)]
    return [
        replace(graph, job=msgspec.structs.replace(graph.job, pipeline=None, classes=()))
        for graph in graphs
    ]


@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_all_ranks_of_several_pipelines_are_replayed_together(axis: str) -> None:
    graphs = two_pipelines(axis)
    first, second = graphs[:4], graphs[4:]
    equal = replayed(graphs)
    assert (equal.step_ns, equal.ranks) == (replayed(first).step_ns, 8)
    every = np.ones(len(second[1]), dtype=np.bool_)
    second[1] = slowed(second[1], every)
    slow = replayed([*first, *second])
    assert slow.step_ns == replayed(second).step_ns > equal.step_ns
    assert slow == replayed([*reversed(second), *first])
    # The slowest rank does not wait for the other pipeline, so the breakdown is that of a rank
    # that computes.
    assert slow.compute_ns == replayed(second).compute_ns


def test_ranks_of_a_stage_wait_for_each_other_in_their_collectives() -> None:
    graphs = two_pipelines("dp")
    first, second = graphs[:4], graphs[4:]
    second[1] = slowed(second[1], second[1].nodes.phase != Phase.OPTIMIZER)

    def with_long_optimizer(graph: Graph) -> Graph:
        durations = graph.nodes.duration_ns.copy()
        durations[(graph.nodes.phase == Phase.OPTIMIZER) & (durations > 0)] = 50_000_000
        return graph.with_columns(duration_ns=durations)

    # The optimizer follows the gradients' all-reduce, which begins when the slower rank comes.
    first_has_it = [first[0], with_long_optimizer(first[1]), *first[2:]]
    second_has_it = [second[0], with_long_optimizer(second[1]), *second[2:]]
    together = replayed([*first_has_it, *second])
    assert together.step_ns == replayed(second_has_it).step_ns > replayed(first_has_it).step_ns


@pytest.mark.parametrize(
    ("given", "named"),
    [
        # Stages are 0-1, 2-3, 4-5 and 6-7.
        ([0, 1], "[2, 3, 4, 5, 6, 7], or keep"),
        ([0, 2, 4, 6, 1], "[3, 5, 7], or remove those of the ranks [1]"),
        ([1, 3, 5, 7, 0, 4], "[2, 6], or remove those of the ranks [0, 4]"),
        ([0, 2, 3, 5, 7], "[1, 4, 6], or keep"),
    ],
)
def test_incomplete_pipelines_with_several_ranks_of_a_stage_are_refused(
    given: list[int], named: str
) -> None:
    by_rank = {graph.job.rank: graph for graph in two_pipelines("dp")}
    with raises_code("pipeline-duplicate-rank", naming=named):
        replayed([by_rank[rank] for rank in given])


def test_the_messages_of_several_ranks_of_a_stage_decide_whether_a_pipeline_is_complete() -> None:
    """A script whose stages are adjacent ranks, unlike those of the captured world."""
    graphs = own_order()
    world = World.of(pp=4, dp=2)
    adjacent = [
        replace(graph, job=msgspec.structs.replace(graph.job, world=world, pipeline=None))
        for graph in graphs
    ]
    assert [graph.job.rank for graph in adjacent] == [0, 1, 2, 3]
    assert replayed(adjacent).step_ns == replayed(graphs).step_ns
    with raises_code("pipeline-duplicate-rank", naming="ranks [3], or keep"):
        replayed(adjacent[:3])


def without_last(graph: Graph, kind: Kind) -> Graph:
    """Turn the last call of a kind into a kernel."""
    kinds = graph.nodes.kind.copy()
    kinds[np.flatnonzero(kinds == kind)[-1]] = Kind.KERNEL
    return graph.with_columns(kind=kinds)


def tensor_parallel_ranks(tmp_path: Path) -> list[Graph]:
    """Return equal graphs of both ranks of a group."""
    graph = kept_graph("h200-llama-8b-4l-tp2-real/slice.0", tmp_path)
    return [replace(graph, job=msgspec.structs.replace(graph.job, rank=rank)) for rank in (0, 1)]


def slowed(graph: Graph, chosen: Mask) -> Graph:
    factor = np.where(chosen & graph.gpu_compute, 3, 1)
    return graph.with_columns(duration_ns=graph.nodes.duration_ns * factor)


def test_ranks_without_a_pipeline_wait_for_each_other(tmp_path: Path) -> None:
    ranks = tensor_parallel_ranks(tmp_path)
    base = replayed(ranks[:1])
    equal = replayed(ranks)
    assert equal.step_ns == pytest.approx(base.step_ns, rel=0.01)
    assert equal.bubble_ns == 0
    assert equal.idle_ns == pytest.approx(base.idle_ns, rel=0.05)
    # All kernels of one rank are slower: the other waits.
    every = np.ones(len(ranks[0]), dtype=np.bool_)
    slow = [replayed([slowed(ranks[0], every)]).step_ns, *(
        replayed(together).step_ns
        for together in ([slowed(ranks[0], every), ranks[1]], [ranks[0], slowed(ranks[1], every)])
    )]  # fmt: skip
    assert slow[0] > 2 * base.step_ns
    assert slow[1:] == pytest.approx([slow[0]] * 2, rel=0.01)
    # The first half is slower on one rank, the second on the other: each waits for the other.
    calls = np.flatnonzero(ranks[0].communication)
    early = np.arange(len(ranks[0])) < calls[len(calls) // 2]
    alone = [
        replayed([slowed(ranks[0], early)]).step_ns,
        replayed([slowed(ranks[1], ~early)]).step_ns,
    ]
    together = replayed([slowed(ranks[0], early), slowed(ranks[1], ~early)])
    assert together.step_ns == pytest.approx(sum(alone) - base.step_ns, rel=0.02)
    assert together.bubble_ns > 0.9 * (together.step_ns - max(alone))


def test_ranks_in_trace_order_have_the_kernels_of_the_timed_steps(tmp_path: Path) -> None:
    """A factor of 1.25 on the kernels of slices whose GPU sets the pace."""
    graphs = tensor_parallel_ranks(tmp_path)
    paced: list[Graph] = []
    for graph in graphs:
        measurement = graph.job.measurement
        overhead = msgspec.structs.replace(measurement.host_overhead, kernel_factor=1.25)
        measurement = msgspec.structs.replace(measurement, host_overhead=overhead)
        job = msgspec.structs.replace(graph.job, measurement=measurement)
        paced.append(replace(graph, job=job))
    assert replayed(paced).compute_ns == pytest.approx(1.25 * replayed(graphs).compute_ns, rel=1e-3)


def test_ranks_without_a_pipeline_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    ranks = tensor_parallel_ranks(tmp_path)
    with raises_code("replay-duplicate-rank", naming="rank 1"):
        replayed([*ranks, ranks[1]])
    with raises_code("pipeline-unmatched-collective", naming=("21 of rank 0", "20 of rank 1")):
        replayed([ranks[0], without_last(ranks[1], Kind.COLLECTIVE)])


def test_ranks_that_do_not_belong_together_are_refused() -> None:
    graphs = own_order()
    with raises_code("pipeline-own-micro-batches", naming="--micro-batches 4"):
        replay_job(own_order(), INSTANT, PipelineSchedule.parse("1f1b"), 4)
    with raises_code("pipeline-missing-stage", naming="[2]"):
        replayed([*graphs[:2], graphs[3]])
    with raises_code("replay-duplicate-rank", naming="rank 1"):
        replayed([*graphs, graphs[1]])
    with raises_code("pipeline-unmatched-message", naming=("7", "rank 1", "8")):
        replayed([without_last(graphs[0], Kind.SEND), *graphs[1:]])
    with raises_code("pipeline-unmatched-collective", naming=("0 of rank 0", "1 of rank 3")):
        replayed([without_last(graphs[0], Kind.COLLECTIVE), *graphs[1:]])


def test_ranks_that_wait_for_each_other_are_refused() -> None:
    first, second, *others = own_order()
    activations = first.nodes.comm_tag.copy()
    sends = np.flatnonzero(first.nodes.kind == Kind.SEND)
    activations[sends] = range(1, 9)
    # The second stage first expects what the first sends last, after gradients of the second.
    received = second.nodes.comm_tag.copy()
    from_first = np.flatnonzero((second.nodes.kind == Kind.RECV) & (second.nodes.comm_src == 0))
    received[from_first] = [8, *range(2, 8), 1]
    crossed = [first.with_columns(comm_tag=activations), second.with_columns(comm_tag=received)]
    with raises_code("pipeline-deadlock", naming=("rank 1 waits in", "for rank 0")):
        replayed([*crossed, *others])


SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
dist.init_process_group("nccl")
rank, size = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda")
block = nn.Sequential(nn.Linear(2048, 4096), nn.GELU(), nn.Linear(4096, 2048)).to(device)
stage = PipelineStage(block, rank, size, device)
runner = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
for step in range(4):
    x = torch.randn(16384, 2048, device=device)
    first = (x,) if rank == 0 else ()
    last = {"target": x, "losses": []} if rank == size - 1 else {}
    runner.step(*first, **last)
    optimizer.step()
    optimizer.zero_grad()
"""


def test_gradients_leave_a_captured_stage_after_its_backward(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = ("capture", "run", script, "--device", "none", "--like", "H100", "--pp", 2)
    done = run_command(*command, "--ranks", "0,1", "-o", tmp_path / "trace.et")
    assert done.returncode == 0, done.stderr
    graphs = [onerank.read(tmp_path / f"trace.{rank}.et") for rank in (0, 1)]
    graphs = [onerank.recost(graph, "H100") for graph in graphs]

    def spent_ns(rank: int, phase: Phase, micro_batch: int) -> int:
        nodes = graphs[rank].nodes
        chosen = (nodes.phase == phase) & (nodes.micro_batch == micro_batch)
        return int(nodes.duration_ns[chosen & graphs[rank].compute].sum())

    forward = spent_ns(0, Phase.FORWARD, 0)
    of_last = sum(spent_ns(1, phase, i) for phase in (Phase.FORWARD, Phase.BACKWARD)
                  for i in range(4))  # fmt: skip
    backward = spent_ns(0, Phase.BACKWARD, 3)
    # The last stage works without a pause from the first activation on, and the first stage
    # computes the last gradient after it.
    step = replayed(graphs)
    assert step.step_ns == pytest.approx(forward + of_last + backward, rel=0.02)
    assert step.bubble_ns > 0.1 * step.step_ns


def test_a_step_of_inference_keeps_its_order(tmp_path: Path) -> None:
    graph = kept_graph("h100-llama-8b-prefill/8192", tmp_path)
    done = replayed([graph])
    assert done.compute_ns == pytest.approx(graph.nodes.duration_ns[graph.compute].sum(), rel=1e-3)
    assert done.bubble_ns == 0
    # The host is the slower one: its time between two steps counts.
    host_bound = onerank.recost(graph, "H100", host_scale=100)
    steady = onerank.replay(host_bound).steady_state
    assert steady is not None
    assert replayed([host_bound]).step_ns == pytest.approx(steady.step_ns, rel=0.01)
    with raises_code("pipeline-own-micro-batches", naming="--micro-batches"):
        replay_job([graph], INSTANT, PipelineSchedule.parse("gpipe"), 2)


def test_a_capture_without_times_is_refused(tmp_path: Path) -> None:
    with raises_code("replay-no-durations", naming="rank 0"):
        replayed([kept_graph("h100-torchtitan-fsdp4/trace", tmp_path)])


def test_a_cluster_with_fewer_gpus_than_the_job_is_refused(tmp_path: Path) -> None:
    tensor_parallel_ranks(tmp_path)[0].write(tmp_path / "rank.et")
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(
        '[cluster]\ngpu = "H200"\nnodes = 1\ngpus_per_node = 1\n'
        "intra_node = { busbw_gb_per_s = 370 }\n"
    )
    done = run_command("replay", tmp_path / "rank.et", "--cluster", cluster)
    assert done.returncode == 2
    assert "error[replay-cluster-too-small]" in done.stderr
    assert str(cluster) in done.stderr

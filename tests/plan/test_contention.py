"""Kernels and collectives that share a GPU: by hand, and a real job on four H100s."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from kept_traces import kept_graph
from stages import stage

import onerank
from onerank.analysis.contention import SLOWDOWN_BY_ARITHMETIC, CallShape, contention_of
from onerank.analysis.step_time import with_communication
from onerank.annotate import load_gpu
from onerank.converters.sources.kineto import convert_directory
from onerank.ir import Device, Evidence, Graph, GraphBuilder, Job, Kind, Reason
from onerank.ir.contention import Contention, persistent_waves
from onerank.ir.nodes import SYMMETRIC_COPY
from onerank.ir.replay import ReplayedRank, ReplayTimes, schedule
from onerank.ir.steady_state import steady_state_step
from onerank.plan.cluster import Cluster, ClusterLink, ClusterNetwork, network_of
from onerank.plan.joint_replay import JointRanks, Rendezvous, replay_together
from onerank.plan.stage_times import TimedStage, stage_times, with_network

TRACES = Path(__file__).parents[2] / "traces"
US = 1_000


def operations(*rows: tuple[Kind, int, int], sm_count: int = 100) -> Graph:
    """Operations as (kind, stream, us), each stream's one after another, the streams at once."""
    builder, last = GraphBuilder(), dict[int, int]()
    for kind, stream, duration_us in rows:
        node = builder.add(
            name="op",
            kind=kind,
            stream=stream,
            duration_ns=duration_us * US,
            evidence=Evidence.DATASHEET if kind is Kind.KERNEL else Evidence.NONE,
        )
        if stream in last:
            builder.edge(last[stream], node, Reason.STREAM_ORDER)
        last[stream] = node
    return builder.build(Job(device=Device("cuda", "H100", sm_count=sm_count)))


def with_grids(graph: Graph, *blocks: int) -> Graph:
    return graph.with_columns(grid=[f"[{count}, 1, 1]" if count else "" for count in blocks])


def ends_us(graph: Graph, *, channels: int = 20, headroom: float = 1.0) -> list[float]:
    calls = {
        index: CallShape(channels, headroom)
        for index in np.flatnonzero(graph.communication).tolist()
    }
    return (schedule(graph, contention_of(graph, calls)).end_ns / US).tolist()


KERNEL, CALL = Kind.KERNEL, Kind.COLLECTIVE


def test_a_call_holds_multiprocessors_and_progresses_slower() -> None:
    """For 163 us the kernel has 80 of 100 multiprocessors; the other 69.6 us it has all."""
    ends = ends_us(operations((KERNEL, 7, 200), (CALL, 8, 100)))
    assert ends[1] == pytest.approx(100 * SLOWDOWN_BY_ARITHMETIC)
    assert ends[0] == pytest.approx(163 + 200 - 163 * 0.8)


def test_what_overlaps_nothing_keeps_its_time() -> None:
    assert ends_us(operations((KERNEL, 7, 200), (CALL, 7, 100), (KERNEL, 7, 50))) == [
        200,
        300,
        350,
    ]


def test_copies_that_run_at_once_share_the_link() -> None:
    """The second begins after 60 us: both have half of the link until the first ends at 140."""
    graph = operations((CALL, 7, 100), (KERNEL, 8, 60), (CALL, 8, 100), (KERNEL, 7, 50))
    copies = [SYMMETRIC_COPY if is_call else "" for is_call in graph.communication.tolist()]
    ends = schedule(graph := graph.with_columns(op=copies), contention_of(graph, {})).end_ns / US
    assert ends.tolist() == [140, 60, 200, 190]


def test_a_small_kernel_loses_nothing() -> None:
    """40 of 100 multiprocessors are free for the call, and the kernel disturbs it less."""
    graph = with_grids(operations((KERNEL, 7, 200), (CALL, 8, 100)), 60, 0)
    ends = ends_us(graph)
    assert ends[0] == 200
    assert ends[1] == pytest.approx(100 * (1 + (SLOWDOWN_BY_ARITHMETIC - 1) * 0.6))


@pytest.mark.parametrize(("tiles", "ends"), [(95, 400), (400, 250), (401, 240), (0, 250)])
def test_a_product_takes_whole_waves_of_tiles(tiles: int, ends: float) -> None:
    """On 80 of 100 multiprocessors 95 tiles take 2 waves, not 1; 400 take 5, not 4."""
    graph = operations((KERNEL, 7, 200), (CALL, 8, 1000))
    contention = contention_of(graph, {1: CallShape(20, 1.0)})
    assert contention is not None
    times = schedule(graph, replace(contention, tiles=np.array([tiles, 0])))
    assert times.end_ns[0] == pytest.approx(ends * US)


@pytest.mark.parametrize(
    ("tiles", "held", "slower"),
    [
        *((128, 16, 1.88), (256, 16, 1.92), (384, 8, 1.65), (512, 24, 1.46), (768, 16, 1.31)),
        *((1024, 8, 1.23), (1024, 16, 1.22), (1536, 24, 1.20), (1024, 2, 1.12), (128, 2, 1.0)),
    ],
)
def test_blocks_that_wait_for_a_multiprocessor_begin_last(
    tiles: int, held: int, slower: float
) -> None:
    """Products of an H100 next to blocks of NCCL that wait (2026-11-28-waiting-calls-2xh100)."""
    alone = persistent_waves(tiles, 132, 132)
    assert persistent_waves(tiles, 132, 132 - held) / alone == pytest.approx(slower, rel=0.05)


def test_a_call_that_waits_for_other_ranks_holds_multiprocessors() -> None:
    """The kernel has 80 of 100 until its end; the call progresses from 150 us on."""
    graph = operations((KERNEL, 7, 200), (CALL, 8, 100))
    contention = contention_of(graph, {1: CallShape(20, 1.0)})
    late = operations((KERNEL, 7, 150), (CALL, 7, 100))
    job, both = JointRanks([graph, late], {0: 0, 1: 1}), ((0, 1), (1, 1))
    floors = [np.zeros(2, dtype=np.int64)] * 2

    def first_rank(contention: Contention | None) -> ReplayTimes:
        ranks = [ReplayedRank(graph, contention=contention), ReplayedRank(late)]
        return replay_together(job, ranks, floors, [Rendezvous(both, both)])[0].times

    times = first_rank(contention)
    assert times.start_ns[1] == 0
    assert times.end_ns[0] == 250 * US
    assert times.end_ns[1] == pytest.approx((350 - 100 / SLOWDOWN_BY_ARITHMETIC) * US, abs=1)
    assert first_rank(None).end_ns.tolist() == [200 * US, 250 * US]


def test_a_receive_that_waits_holds_its_channels() -> None:
    """Messages of a pipeline take no time, but a receive waits; 8 MiB take 16 channels."""
    node = ClusterLink(338.0)
    network = ClusterNetwork(8, node, node, 90, "H100")
    graph = stage(1)
    device = Device("cuda", "H100", sm_count=132)
    graph = replace(graph, job=msgspec.structs.replace(graph.job, device=device))
    receives = graph.mask(Kind.RECV)
    graph = graph.with_columns(
        comm_bytes=np.where(receives, 8 << 20, graph.nodes.comm_bytes),
        evidence=np.where(graph.communication, Evidence.NONE, Evidence.DATASHEET),
    )
    timed = with_network(graph, network, graph.job.world, receives_wait=True)
    assert timed.contention is not None
    assert timed.contention.held[receives].tolist() == [16 / 132] * int(receives.sum())
    assert not timed.graph.nodes.duration_ns[receives].any()


@pytest.mark.parametrize(("blocks", "starts_us"), [(100, 400), (400, 100), (0, 50)])
def test_a_call_waits_for_a_round_of_blocks(blocks: int, starts_us: float) -> None:
    """A persistent kernel frees its multiprocessors at its end, one of four rounds in between."""
    graph = operations((KERNEL, 7, 400), (KERNEL, 8, 50), (CALL, 8, 10))
    graph = with_grids(graph, blocks, 1, 0)
    contention = contention_of(graph, {2: CallShape(20, 1.0)})
    assert contention is not None
    times = schedule(graph, replace(contention, among_kernels=False))
    assert times.start_ns[2] == starts_us * US
    assert times.blocked_by[2] == (0 if blocks else 1)


def test_a_network_that_limits_a_call_leaves_it_its_rate() -> None:
    """GPUs that reach 4 times the network's rate still do so next to kernels."""
    graph = operations((KERNEL, 7, 200), (CALL, 8, 100))
    assert ends_us(graph, headroom=4.0)[1] == 100
    limited = 100 * SLOWDOWN_BY_ARITHMETIC / 1.2
    assert ends_us(graph, headroom=1.2)[1] == pytest.approx(limited, abs=1e-3)


def test_kernels_of_two_streams_share_unless_they_were_measured_so() -> None:
    """A call of another time makes the schedule one of a shared GPU."""
    graph = operations((KERNEL, 7, 100), (KERNEL, 8, 60), (CALL, 8, 10))
    assert ends_us(graph)[:2] == [pytest.approx(160 + 16.3 * 0.2), 120]
    measured = graph.with_columns(evidence=np.array([7, 7, 0], dtype=np.uint8))
    assert ends_us(measured)[1] == 60


def test_kernels_of_two_streams_share_without_calls() -> None:
    """Asynchronous tensor parallelism multiplies on two streams, and copy engines communicate."""
    assert ends_us(operations((KERNEL, 7, 100), (KERNEL, 8, 60))) == [160, 120]


def test_captured_overlaps_on_a_stream_stay() -> None:
    """A successor that began 5 us before the end still does; both then run slower."""
    graph = operations((KERNEL, 7, 100), (KERNEL, 7, 100), (CALL, 8, 1000))
    graph = graph.with_columns(
        blocked_ns=np.array([0, -5 * US, 0]),
        start_ns=np.array([0, 95 * US, 0]),
        evidence=np.array([7, 7, 0], dtype=np.uint8),
    )
    times = schedule(graph, contention_of(graph, {2: CallShape(20, 1.0)}))
    assert times.end_ns[0] == 125 * US
    assert times.start_ns[1] == times.end_ns[0] - 5 * US


@pytest.mark.parametrize("bandwidth", [None, 100.0])
def test_without_competition_it_is_the_same_schedule(bandwidth: float | None) -> None:
    """Of 4,056 real nodes, with launches, waits and overlaps on one stream."""
    graph = convert_directory(TRACES / "h200-llama-8b-4l-tp4")[0]
    if bandwidth is not None:
        graph = with_communication(graph, bandwidth)
    count, kernels = len(graph), graph.gpu_compute
    free = Contention(
        needed=np.where(kernels, 1.0, 0.0),
        tiles=np.zeros(count, dtype=np.int64),
        rounds=np.zeros(count, dtype=np.int64),
        held=np.where(graph.communication, 1e-12, 0.0),
        headroom=np.full(count, 1e9),
        call_slowdown=np.where(kernels, 1.5, 1.0),
        copies=np.zeros(count, dtype=np.bool_),
        multiprocessors=132,
        persistent=False,
        among_kernels=False,
    )
    alone, shared = schedule(graph), schedule(graph, free)
    for name in ReplayTimes.__slots__:
        assert (getattr(alone, name) == getattr(shared, name)).all()


H100 = Cluster("H100", 1, 4, ClusterLink(338.0), ClusterLink(37.6), 80 * 10**9)


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory: pytest.TempPathFactory) -> TimedStage:
    """FSDP 4 of Llama 3.1 8B by torchtitan, captured without a device, on four H100s."""
    graph = kept_graph("h100-torchtitan-fsdp4/trace", tmp_path_factory.mktemp("fsdp"))
    costed = onerank.recost(graph, "H100", nvlink_active=True)
    return with_network(costed, network_of(H100, load_gpu("H100")), costed.job.world)


def step_ms(timed: TimedStage, contention: Contention | None) -> float:
    step = steady_state_step(timed.graph, contention=contention)
    assert step is not None
    return step.step_ns / 1e6


def test_a_real_job_on_four_h100s(fsdp: TimedStage) -> None:
    """Two machines took 1050.8 and 1039.4 ms a step; without contention it is 2.7 to 3.8% short."""
    contention = fsdp.contention
    assert contention is not None
    calls = fsdp.graph.communication & (fsdp.graph.nodes.comm_bytes > 1 << 20)
    # As in the job's trace.
    assert contention.held[calls].tolist() == pytest.approx([24 / 132] * int(calls.sum()))
    assert step_ms(fsdp, None) < 0.975 * 1039.4
    assert 0.98 * 1039.4 < step_ms(fsdp, contention) < 1.02 * 1050.8


def test_products_have_the_tiles_of_the_kernels_of_h100s(fsdp: TimedStage) -> None:
    """Keys and values, [8192, 4096] x [4096, 1024] and their weights' gradients: 256 x 128."""
    contention, graph = fsdp.contention, fsdp.graph
    assert contention is not None
    products = [place for place, name in enumerate(graph.text("op")) if name == "aten::mm"]
    counts: list[int] = contention.tiles[products].tolist()
    tiles = Counter(counts)
    assert tiles[32 * 8] == 32 * 3  # keys are recomputed
    assert tiles[4 * 32] == 32 * 2
    assert not contention.tiles[graph.communication].any()


def test_half_of_what_is_predicted_is_slower_calls_and_shared_kernels(fsdp: TimedStage) -> None:
    """Each mechanism lengthens the step by itself."""
    contention = fsdp.contention
    assert contention is not None
    whole = step_ms(fsdp, contention)
    for weaker in (
        replace(contention, call_slowdown=np.ones_like(contention.call_slowdown)),
        replace(contention, among_kernels=False),
        replace(contention, held=np.where(contention.held > 0, 1e-9, 0.0)),
    ):
        assert whole - step_ms(fsdp, weaker) > 5


@pytest.mark.parametrize("rank", ["real", "slice"])
def test_durations_that_contain_contention_get_none(rank: str, tmp_path: Path) -> None:
    """NCCL, or kernels in its place, ran during these captures on H200s."""
    graph = kept_graph(f"h200-llama-8b-4l-tp2-real/{rank}.0", tmp_path)
    gpu = load_gpu("H200")
    network = network_of(
        Cluster("H200", 1, 8, ClusterLink(338.0), ClusterLink(37.6), 141 * 10**9), gpu
    )
    assert with_network(graph, network, graph.job.world).contention is None
    recosted = onerank.recost(graph, "H100")
    assert with_network(recosted, network, graph.job.world).contention is None


def test_without_a_compute_capability_nothing_competes() -> None:
    """NCCL's channels are not known, so a call holds no multiprocessors."""
    known = ClusterNetwork(8, ClusterLink(400, 10), ClusterLink(50, 20), 90)
    assert known.call_shape("all_reduce", 1 << 30, tuple(range(4))) == CallShape(24, 1.0)
    across = known.call_shape("all_reduce", 1 << 30, (0, 8))
    assert across is not None
    assert across.headroom == 8
    assert known.call_shape("all_reduce", 1 << 30, (3,)) is None
    unknown = ClusterNetwork(8, ClusterLink(400, 10), ClusterLink(50, 20))
    assert unknown.call_shape("all_reduce", 1 << 30, tuple(range(4))) is None


def test_blocks_of_a_stage_contain_it(fsdp: TimedStage) -> None:
    gpu = load_gpu("H100")
    times = stage_times(fsdp.graph, network_of(H100, gpu), fsdp.graph.job.world)
    assert times.elapsed_ns == pytest.approx(step_ms(fsdp, fsdp.contention) * 1e6, rel=1e-3)

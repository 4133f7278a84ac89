"""`capture run --device none`: streams, and what the host and communication wait for."""

import numpy as np
import pytest
from without_device import captured

import onerank
from onerank.annotate import load_gpu
from onerank.annotate.op_costs.node_costs import op_costs_of
from onerank.converters.targets.lower_step import even_all_to_alls
from onerank.ir import Collective, Graph, Kind, Phase, Reason
from onerank.ir.all_to_all import even_bytes
from onerank.ir.nodes import SYMMETRIC_BARRIER, SYMMETRIC_COPY
from onerank.plan.cluster import Cluster, ClusterLink, network_of
from onerank.plan.stage_times import with_network

READS = """
    import torch
    weight = torch.nn.Parameter(torch.zeros(64, 64, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    counts = torch.arange(8, device="cuda")
    for step in range(5):
        x = torch.ones(64, 64, device="cuda") @ weight
        counts.sum().item()
        x = x.relu()
        counts[:2].tolist()
        x = x.exp()
        torch.nonzero(counts)
        x = x.sin()
        counts[counts > 3]
        x = x.cos()
        torch.ones(4).to("cuda", non_blocking=True)
        x = x.tanh()
        x.new_tensor([counts[0], 1])
        x = x.abs()
        torch.repeat_interleave(counts)
        x = x.neg()
        torch.repeat_interleave(counts, output_size=28)
        x = x.floor()
        torch.equal(counts, counts + 1)
        x = x.ceil()
        torch.cuda.synchronize()
        x.sigmoid().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def waits_of(graph: Graph) -> list[tuple[str, str]]:
    """Return awaited and delayed operator of each wait of the host."""
    edges, nodes = graph.edges, graph.nodes
    chosen = (edges.reason == Reason.SYNC) & (nodes.blocked_ns[edges.target] > 0)
    pairs = zip(edges.source[chosen].tolist(), edges.target[chosen].tolist(), strict=True)
    operators = [name.removeprefix("aten::") for name in graph.text("op")]
    return [(operators[source], operators[target]) for source, target in pairs]


def test_the_host_waits_where_a_script_reads_the_gpu(tmp_path):
    graph = captured(tmp_path, READS, "--like", "H100")
    assert waits_of(graph) == [
        ("_local_scalar_dense", "relu"),
        ("copy_", "exp"),
        ("nonzero", "sin"),
        ("index", "cos"),
        # None after the copy that does not block.
        ("_local_scalar_dense", "copy_"),  # a number of a list, then the list
        ("copy_", "abs"),
        ("repeat_interleave", "neg"),
        ("equal", "ceil"),
        ("ceil", "sigmoid"),
    ]
    predicted = onerank.recost(graph, "H100")
    nodes, edges = predicted.nodes, predicted.edges
    on_host = (nodes.kind == Kind.HOST_OP)[edges.target] & (edges.reason == Reason.SYNC)
    operators = predicted.text("op")
    assert [operators[node] for node in edges.target[on_host].tolist()] == [
        f"aten::{name}"
        for name in ("relu", "exp", "sin", "cos", "copy_", "abs", "neg", "ceil", "sigmoid")
    ]
    assert not nodes.blocked_ns.any()


ASYNCHRONOUS = """
    import torch
    from torch import nn
    from torch.distributed import init_process_group
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel, RowwiseParallel, parallelize_module,
    )
    init_process_group("nccl")
    mesh = init_device_mesh("cuda", (4,))
    N = 1024
    up, down = nn.Linear(N, 4 * N, bias=False), nn.Linear(4 * N, N, bias=False)
    model = nn.Sequential(up, nn.ReLU(), down)
    model.to("cuda", torch.bfloat16)
    columns = ColwiseParallel(input_layouts=Shard(1))
    rows = RowwiseParallel(output_layouts=Shard(1))
    parallelize_module(model, mesh, {"0": columns, "2": rows})
    torch._inductor.config._micro_pipeline_tp = True
    enable_symm_mem_for_group(mesh.get_group().group_name)
    compiled = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        x = torch.randn(2, 512, N, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        compiled(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        rows = DTensor.from_local(torch.ones(8, 16, device="cuda"), mesh, [Shard(0)])
        assert rows.redistribute(placements=[Shard(1)]).to_local().shape == (32, 4)
"""


def test_asynchronous_tensor_parallelism_multiplies_rows_while_others_arrive(tmp_path):
    graph = captured(tmp_path, ASYNCHRONOUS, "--torchrun", "--tp", "4")
    # Products of rows: forward and gradient of the input, each fused with three rounds of copies.
    rounds = np.flatnonzero(graph.nodes.collective == Collective.ALL_TO_ALL)
    sizes = graph.nodes.comm_bytes[rounds].tolist()
    sizes.remove(8 * 16 * 4)  # another dimension is sharded
    assert sizes == [2 * 512 * 1024 * 2] * (4 * 3)
    # Three barriers in each of the two gathers, two a round and two more in each of the two
    # scatters. Those of a round are on its stream.
    barriers = np.flatnonzero(graph.nodes.collective == Collective.BARRIER)
    assert len(barriers) == 2 * 3 + 2 * (2 * 3 + 2)
    assert not graph.nodes.comm_bytes[barriers].any()
    assert sorted(graph.nodes.stream[barriers].tolist()) == [0] * (22 - 2 * 4) + [1] * (2 * 4)
    # Copy engines run the rounds, so they occupy no multiprocessors; no rank keeps a part.
    operators = graph.text("op")
    assert [operators[node] for node in rounds.tolist()].count(SYMMETRIC_COPY) == len(sizes)
    predicted = onerank.recost(graph, "H100")
    cluster = Cluster("H100", 1, 4, ClusterLink(338.0), ClusterLink(37.6), 80 * 10**9)
    timed = with_network(predicted, network_of(cluster, load_gpu("H100")), predicted.job.world)
    operators = timed.graph.text("op")
    calls = np.flatnonzero(timed.graph.communication).tolist()
    copies = [node for node in calls if operators[node] == SYMMETRIC_COPY]
    # 375 GB/s as measured on four H100s, and 4.5 us.
    expected = 4_500 + sizes[0] / (338 * 375 / 332)
    assert timed.graph.nodes.duration_ns[copies] == pytest.approx(expected, abs=1)
    waits = [node for node in calls if operators[node] == SYMMETRIC_BARRIER]
    assert timed.graph.nodes.duration_ns[waits].tolist() == [6_800] * len(barriers)
    # Copies that follow a barrier on the first stream: the second of a scatter's three, and the
    # first of a gather's, since the second stream, which issues it, has run nothing since its wait.
    edges = timed.graph.edges
    synced = edges.reason == Reason.SYNC
    pairs = {*zip(edges.source[synced].tolist(), edges.target[synced].tolist(), strict=True)}
    first = [node for node in waits if timed.graph.nodes.stream[node] == 0]
    assert sum(any((node, copy) in pairs for node in first) for copy in copies) == 2 + 2
    assert timed.contention is not None
    assert not timed.contention.held[copies + waits].any()
    assert timed.contention.held[timed.graph.communication].any()
    costs = op_costs_of(graph)
    products = graph.nodes.op[costs.index] == graph.strings.encode(["aten::mm"])[0]
    assert costs.flops[products].sum() == 6 * 2 * (2 * 4 * 512) * 1024 * 1024
    assert set(graph.nodes.stream[costs.index[products]].tolist()) == {0, 1}


UNEVEN = """
    import torch
    import torch.distributed as dist
    dist.init_process_group("nccl")
    weight = torch.nn.Parameter(torch.zeros(1024, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for step in range(5):
        rows = torch.zeros(10, 1024, device="cuda") * weight
        received = torch.empty(6, 1024, device="cuda")
        dist.all_to_all_single(received, rows.detach(), [1, 5, 0, 0], [1, 2, 3, 4])
        parts = [torch.empty(n, 1024, device="cuda") for n in (3, 9, 9, 9)]
        dist.all_to_all(parts, [rows[:1].detach().contiguous()] * 4)
        dist.all_to_all_single(torch.empty_like(rows[:8]), rows[:8].detach())
        dist.all_to_all_single(torch.empty_like(rows), rows[:8].detach(), [2, 6, 1, 1])
        parts = [torch.empty(3, 1024, device="cuda") for _ in range(4)]
        dist.all_to_all(parts, [rows[:1].detach().contiguous()] * 4)
        received = torch.empty(3, 1024, device="cuda")
        dist.all_to_all_single(received, rows[:0].detach(), [0, 1, 1, 1], [0, 0, 0, 0])
        rows.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_an_all_to_all_takes_as_long_as_its_rank_sends_or_receives(tmp_path):
    graph = captured(tmp_path, UNEVEN, "--torchrun", "--dp", "4")
    calls = np.flatnonzero(graph.nodes.collective == Collective.ALL_TO_ALL)
    row = 4096
    # Nine rows to others and five from them; one to each of three and nine from each; eight, even;
    # two to each and eight from the others; one to each and three from each; none and three.
    assert graph.nodes.comm_bytes[calls].tolist() == [rows * row for rows in (10, 4, 8, 8, 4, 0)]
    exchanged = [9 * row, 27 * row, -1, 8 * row, 9 * row, 3 * row]
    assert graph.nodes.exchanged_bytes[calls].tolist() == exchanged
    even = [even_bytes(graph.node(call), 4) for call in calls.tolist()]
    assert even == [12 * row, 36 * row, 8 * row, -(-32 * row // 3), 12 * row, 4 * row]
    slow = Cluster("H100", 1, 4, ClusterLink(1.0, 0.0), ClusterLink(1.0), 80 * 10**9)
    predicted = onerank.recost(graph, "H100")
    timed = with_network(predicted, network_of(slow, load_gpu("H100")), predicted.job.world)
    times = [9 * row, 27 * row, 6 * row, 8 * row, 9 * row, 3 * row]
    assert timed.graph.nodes.duration_ns[calls].tolist() == pytest.approx(times, abs=1)
    graph.write(tmp_path / "again.et")
    replayed = onerank.read(tmp_path / "again.et")
    assert replayed.nodes.exchanged_bytes[calls].tolist() == exchanged
    lowered, notes = even_all_to_alls(graph, graph.job.world)
    assert lowered.nodes.comm_bytes[calls].tolist() == even
    assert [note.code for note in notes] == ["all-to-all-unequal-parts"]


FSDP = """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, fully_shard
    dist.init_process_group("nccl")
    device = torch.cuda.current_device()
    first = FullyShardedDataParallel(
        nn.Linear(64, 64), device_id=device, mixed_precision=MixedPrecision(torch.bfloat16)
    )
    second = fully_shard(nn.Linear(64, 64, device="cuda"))
    parameters = [*first.parameters(), *second.parameters()]
    optimizer = torch.optim.AdamW(parameters, foreach=False)
    for step in range(5):
        second(first(torch.randn(8, 64, device="cuda")).float()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_fsdp_of_both_kinds_moves_its_parameters(tmp_path):
    graph = captured(tmp_path, FSDP, "--dp", 4)
    nodes = graph.nodes
    # The weight and bias of each layer, gathered in 16 bits and in 32, in forward and backward;
    # a root of FSDP keeps what it gathered in forward.
    gathered = [int(size) for size in nodes.comm_bytes[nodes.comm_bytes > 0]]
    assert {64 * 65 * 2, 64 * 65 * 4} <= set(gathered)


FSDP2 = """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    dist.init_process_group("nccl")
    layers = [nn.Linear(64, 64, bias=False, device="cuda") for _ in range(4)]
    model = nn.Sequential(*layers)
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        model(torch.randn(16, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_streams_of_fsdp_overlap_communication_and_compute(tmp_path):
    graph = captured(tmp_path, FSDP2, "--torchrun", "--dp", 4)
    nodes, edges = graph.nodes, graph.edges
    ops = [graph.strings[int(op or name)] for op, name in zip(nodes.op, nodes.name, strict=True)]
    # FSDP2 copies shards on one stream, gathers on a second and reduces on a third
    products = [i for i, op in enumerate(ops) if op == "aten::mm"]
    assert set(nodes.stream[products].tolist()) == {0}
    of = {
        name: [i for i, op in enumerate(ops) if op == name]
        for name in ("all_gather", "reduce_scatter", "aten::_chunk_cat")
    }
    streams = {name: {int(nodes.stream[i]) for i in rows} for name, rows in of.items()}
    assert streams["aten::_chunk_cat"] == {0}
    assert len(streams["all_gather"] | streams["reduce_scatter"] | {0}) == 3
    # the buffer of a layer's reduction is filled once that of the layer before is sent
    waiting = Reason.SYNC, Reason.STREAM_ORDER
    for reduction, following, fill in zip(
        of["reduce_scatter"], of["reduce_scatter"][1:], of["aten::_chunk_cat"][1:], strict=False
    ):
        after = {
            int(target)
            for source, target, reason in zip(edges.source, edges.target, edges.reason, strict=True)
            if source == reduction and reason in waiting
        }
        plan = fill - 1  # what the host writes for the kernel that fills the buffer
        assert ops[plan] == "aten::copy_"
        assert {following, plan} <= after  # on torch 2.11 its own result is waited for, too
    step = onerank.recost(graph, "H100", host="none")
    assert (
        set(step.nodes.stream.tolist())
        == {0, 1, *streams["all_gather"]} | streams["reduce_scatter"]
    )
    assert not (step.edges.reason == Reason.PROGRAM_ORDER).any()
    # gradients are allocated on the stream that reduces them
    pools = set(graph.job.measurement.memory.blocks.pool)
    assert len(pools) == 3


SUMMED_BY_HAND = """
    import torch
    import torch.distributed as dist
    from torch import nn
    dist.init_process_group("nccl")
    model = nn.Linear(64, 64, bias=False).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        model(torch.randn(8, 64, device="cuda")).sum().backward()
        dist.all_reduce(model.weight.grad)
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_call_after_backward_waits_for_the_thread_of_autograd(tmp_path):
    graph = captured(tmp_path, SUMMED_BY_HAND, "--dp", 4)
    (call,) = np.flatnonzero(graph.communication)
    operators = graph.text("op")
    threads = graph.nodes.thread
    before = [source for source, _ in graph.edges.of(call)]
    # The product for the gradient of the weight is the last of the backward.
    (gradient,) = (source for source in before if operators[source] == "aten::mm")
    assert graph.nodes.phase[gradient] == Phase.BACKWARD
    assert threads[gradient] != threads[call]


SUMS_IN_BACKWARD = """
    import torch

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            zeros = torch.zeros_like(grad)
            return (zeros + torch.exp(ctx.saved_tensors[0])) * grad

    model = torch.nn.Linear(512, 512, device="cuda")
    optimizer = torch.optim.SGD(model.parameters())
    for step in range(4):
        hidden = model(torch.randn(512, 512, device="cuda"))
        (Scaled.apply(hidden) + torch.sin(hidden)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_sums_of_python_code_in_the_backward_have_memory(tmp_path):
    graph = captured(tmp_path, SUMS_IN_BACKWARD)
    backward = np.flatnonzero(graph.nodes.phase == Phase.BACKWARD)
    operators = graph.text("op")
    allocated = {
        name: [int(graph.nodes.bytes_allocated[i]) for i in backward if operators[i] == name]
        for name in ("aten::add", "aten::add_")
    }
    # The function's sum, and autograd's of the two gradients of `hidden`.
    assert allocated == {"aten::add": [512 * 512 * 4], "aten::add_": [0]}


def test_a_stage_that_torch_cuts_from_a_model_runs_on_the_gpu(tmp_path):
    graph = captured(
        tmp_path,
        """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline
    dist.init_process_group("nccl")
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    example = torch.zeros(2, 64)
    pipe = pipeline(model, (example,), split_spec={"2": SplitPoint.BEGINNING})
    stage = pipe.build_stage(dist.get_rank(), torch.device("cuda", 0))
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(stage.submod.parameters())
    for step in range(4):
        schedule.step(torch.zeros(8, 64, device="cuda"))
        optimizer.step()
    """,
        *("--torchrun", "--pp", 2),
    )
    products = [graph.strings[int(op)] for op in graph.nodes.op].count("aten::addmm")
    assert products == 2 * 4


FUNCTIONAL = """
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional
    dist.init_process_group("nccl")
    weight = torch.nn.Parameter(torch.zeros(64, 64, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    computing, communicating = torch.cuda.Stream(), torch.cuda.Stream()
    for step in range(5):
        x = torch.ones(8, 64, device="cuda")
        with torch.cuda.stream(computing):
            x.neg()
        with torch.cuda.stream(communicating):
            dist.broadcast(x, 0)
        reduced = functional.all_reduce(x, "sum", dist.group.WORLD)
        assert type(reduced) is functional.AsyncCollectiveTensor
        other = x.exp()
        part = reduced[:4]
        assert type(part) is functional.AsyncCollectiveTensor
        used = reduced.sin()
        assert not isinstance(used, functional.AsyncCollectiveTensor)
        (used @ weight + other).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_functional_collective_waits_at_its_first_use(tmp_path):
    graph = captured(tmp_path, FUNCTIONAL, "--dp", 2, "--torchrun")
    operators = graph.text("op")
    broadcast, collective = np.flatnonzero(graph.nodes.kind == Kind.COLLECTIVE).tolist()
    # The asynchronous call has its group's stream, not one where the script only communicates.
    assert graph.nodes.stream[[broadcast, collective]].tolist() == [2, 3]
    edges = graph.edges
    users = [operators[node] for node in edges.target[edges.source == collective].tolist()]
    assert users == ["aten::sin"]

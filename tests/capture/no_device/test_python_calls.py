"""`capture run --device none`: what Python does on the host besides operators, in counts."""

import textwrap
from collections import Counter

from notes import has_note
from own_process import run_command
from without_device import captured

import onerank
from onerank.ir import Graph, MemoryClass, Phase
from onerank.ir.python_calls import MARKS, python_calls_of

DTENSORS = """
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.utils._pytree import tree_map_only

    class Wrapper(Tensor):
        @staticmethod
        def __new__(cls, inner):
            made = Tensor._make_wrapper_subclass(cls, inner.shape, device=inner.device)
            made.inner = inner
            return made

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            inner = tree_map_only(Wrapper, lambda each: each.inner, (args, kwargs or {}))
            return tree_map_only(Tensor, Wrapper, func(*inner[0], **inner[1]))

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x + x

        @staticmethod
        def backward(ctx, gradient):
            return gradient + gradient

    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (2,))
    weight = nn.Parameter(torch.ones(64, 64, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    shards = [distribute_tensor(torch.ones(8, 8, device="cuda"), mesh, [Shard(0)]) for _ in "abc"]
    wrapper = Wrapper(torch.ones(8, 8, device="cuda"))
    for step in range(5):
        torch.ones(8, device="cuda").neg()
        with torch.no_grad():
            shards[0].mul_(shards[1]).add_(shards[2])
            shards[0].redistribute(mesh, [Replicate()])
            shards[0].redistribute(mesh, [Shard(0)])
            torch._foreach_neg_(shards)
            wrapper.exp()
        Twice.apply(weight).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        Twice.apply(torch.ones(2))  # on the CPU, so its operators are left out
"""


def calls_of(text: str) -> Counter[str]:
    """Return the counts of a text, without what it says of the operator itself."""
    return Counter({k: n for k, n in python_calls_of(text).items() if k not in MARKS})


def counts_by_operator(graph: Graph) -> dict[str, Counter[str]]:
    """Return the counts of the first node of each operator that has some."""
    found: dict[str, Counter[str]] = {}
    for name, code in zip(graph.text("name"), graph.nodes.python_calls.tolist(), strict=True):
        if calls := calls_of(graph.strings[code]):
            found.setdefault(name.removeprefix("aten::"), calls)
    return found


def test_calls_of_python_count_for_the_operator_that_follows(tmp_path):
    graph = captured(tmp_path, DTENSORS, "--torchrun", "--dp", 2)
    assert counts_by_operator(graph) == {
        "fill_": {"function": 1},  # at the end of the step before
        "mul_": {"dtensor_untracked": 1},
        "add_": {"dtensor_untracked": 1},
        # The second call keeps the placement, and redistributes nothing.
        "all_gather": {"function": 1, "redistribute": 1},
        "_foreach_neg_": {"function": 1, "dtensor_untracked": 1, "dtensor_listed": 3},
        "exp": {"subclass": 1},
        "add": {"function": 1},  # of the forward; the backward's is another node of that name
    }
    total = sum((calls_of(text) for text in graph.text("python_calls")), Counter[str]())
    assert total["function"] == 5


FSDP2 = """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    dist.init_process_group("nccl")
    model = nn.Sequential(*(nn.Linear(64, 64, device="cuda") for _ in range(4)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        model(torch.randn(16, 64, device="cuda")).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
"""


def test_gathers_and_reductions_of_fsdp2_count_their_parameters(tmp_path):
    graph = captured(tmp_path, FSDP2, "--torchrun", "--dp", 4)
    by_phase = {phase: Counter[str]() for phase in Phase}
    for phase, text in zip(graph.nodes.phase.tolist(), graph.text("python_calls"), strict=True):
        by_phase[Phase(phase)] += calls_of(text)
    # Each layer has a weight and a bias. The last layer is not gathered again for the backward.
    assert by_phase[Phase.FORWARD]["fsdp_group"] == 4
    assert by_phase[Phase.FORWARD]["fsdp_parameter"] == 8
    backward = by_phase[Phase.BACKWARD]
    assert (backward["fsdp_group"], backward["fsdp_parameter"]) in ((7, 14), (8, 16))
    # As on an H100 (torch 2.11), one operator computes the norms of all gradients, one scales them.
    names = Counter(graph.text("name"))
    assert (names["aten::_foreach_norm"], names["aten::_foreach_mul_"]) == (1, 1)
    # The whole gradients of four weights, which FSDP frees once it has reduced them.
    memory = graph.job.measurement.memory
    assert memory is not None
    classes = zip(memory.blocks.bytes, memory.blocks.memory_class, strict=True)
    assert [size for size, kind in classes if kind == MemoryClass.GRADIENTS].count(16_384) == 4


FSDP1 = """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    dist.init_process_group("nccl")
    model = nn.Sequential(*(nn.Linear(64, 64, device="cuda") for _ in range(3)), nn.LayerNorm(64))
    policy = ModuleWrapPolicy({nn.Linear})
    model = FullyShardedDataParallel(
        model.cuda(), auto_wrap_policy=policy, use_orig_params=True, device_id=0
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        model(torch.randn(16, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_gathers_and_reductions_of_fsdp1_count_their_parameters(tmp_path):
    graph = captured(tmp_path, FSDP1, "--torchrun", "--dp", 4)
    counts = sum((calls_of(text) for text in graph.text("python_calls")), Counter[str]())
    # Three linear layers and the norm, each with two parameters: four gathers in the forward, three
    # in the backward (the root stays gathered), four reductions.
    assert counts == {"fsdp_group": 11, "fsdp_parameter": 22}


PLAIN = """
    import torch
    from torch import nn
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(5):
        x = torch.randn(16, 64, device="cuda")
        with torch.no_grad():
            target = model[0](x).t().softmax(0)
        (model(x).t() - target).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_plain_script_calls_python_for_nothing(tmp_path):
    """The layer without gradients is marked, the one after it is not, though views precede both."""
    graph = captured(tmp_path, PLAIN)
    assert not any(map(calls_of, graph.text("python_calls")))
    marked = ["untracked" in text for text in graph.text("python_calls")]
    names = [name.removeprefix("aten::") for name in graph.text("name")]
    outside = (graph.nodes.phase != Phase.OPTIMIZER) & (graph.nodes.phase != Phase.BACKWARD)
    rows = zip(names, marked, outside.tolist(), strict=True)
    forward = [(name, mark) for name, mark, kept in rows if kept]
    assert [each for each in forward if each[0] in ("addmm", "_softmax", "relu", "sub")] == [
        ("addmm", True),
        ("_softmax", True),
        ("addmm", False),
        ("relu", False),
        ("addmm", False),
        ("sub", False),
    ]


TENSOR_PARALLEL = """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel, RowwiseParallel, parallelize_module,
    )
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (2,))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).cuda()
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for step in range(5):
        model(torch.randn(256, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_sum_of_tensor_parallel_ranks_reads_nothing_for_the_script(tmp_path):
    graph = captured(tmp_path, TENSOR_PARALLEL, "--torchrun", "--tp", 2)
    assert not has_note(graph.job.measurement.notes, "no-device-stand-ins")
    # Each of the four parameters steps by an operator that DTensor dispatches.
    steps = [name == "aten::add_" for name in graph.text("name")]
    counts = [calls_of(text) for text in graph.text("python_calls")]
    of_steps = [count for count, is_step in zip(counts, steps, strict=True) if is_step]
    assert of_steps[1:] == [{"dtensor_untracked": 1}] * 3
    # The first follows views of the backward, which launch nothing.
    assert of_steps[0]["dtensor"] > 1


def test_a_cpu_capture_counts_the_operators_of_dtensors(tmp_path):
    text = TENSOR_PARALLEL.replace('"cuda"', '"cpu"').replace('"nccl"', '"gloo"')
    (tmp_path / "train.py").write_text(textwrap.dedent(text.replace(".cuda()", "").replace(
        "range(5)", "range(20)")))  # fmt: skip
    options = ("--torchrun", "--tp", 2, "-o", tmp_path / "trace.et")
    done = run_command("capture", "run", tmp_path / "train.py", *options)
    assert done.returncode == 0, done.stderr
    without = captured(tmp_path, TENSOR_PARALLEL, "--torchrun", "--tp", 2)
    assert dispatches(onerank.read(tmp_path / "trace.et")) == dispatches(without) > 10


def dispatches(graph: Graph) -> int:
    """Return how many operators DTensor dispatches in a step."""
    counts = [calls_of(text) for text in graph.text("python_calls")]
    return sum(count["dtensor"] + count["dtensor_untracked"] for count in counts)


SPLIT_BACKWARD = """
    import torch
    from torch import nn
    import torch.distributed as dist
    dist.init_process_group("nccl")
    layers = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(2))).cuda()
    model = nn.parallel.DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        for _ in range(4):
            x = torch.randn(4096, 256, device="cuda", requires_grad=True)
            y = x.exp().exp().sum()
            torch.autograd.grad(y, x, retain_graph=True)
            del x, y
        model(torch.randn(64, 256, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_operators_of_ddps_reducer_are_marked_and_nodes_that_ran_are_freed(tmp_path):
    """A gradient is scaled into its bucket and copied back; a retained graph goes with its loss."""
    graph = captured(tmp_path, SPLIT_BACKWARD, "--torchrun", "--dp", 2, "--like", "H100")
    nodes = graph.nodes
    marked = [
        graph.strings[int(nodes.op[index])]
        for index, code in enumerate(nodes.python_calls.tolist())
        if "reducer" in python_calls_of(graph.strings[code])
    ]
    assert marked == ["aten::mul"] * 2 + ["aten::copy_"] * 2
    # x, its two exponentials and their gradients, of 4 MiB each: those of one of the four.
    measured = graph.job.measurement
    assert measured.peak_memory_bytes - measured.start_memory_bytes < 6 * (4 << 20)


SPLIT_GROUPS = """
    import torch
    from torch import nn
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
    with torch.device("cuda"):
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(5)))
        given = torch.randn(16, 64, requires_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        result = model(given)
        weights = list(model.parameters())
        _, groups = stage_backward_input(
            [result], [torch.ones_like(result)], [given], iter(weights)
        )
        stage_backward_weight(iter(weights), groups)
        optimizer.step()
        optimizer.zero_grad()
        given.grad = None
"""


def test_weights_of_a_split_backward_count_by_group(tmp_path):
    graph = captured(tmp_path, SPLIT_GROUPS)
    counts = sum((calls_of(text) for text in graph.text("python_calls")), Counter[str]())
    assert counts == {"split_group": 5}

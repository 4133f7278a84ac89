"""`capture run --device none`: what scripts create, compute, log and save."""

import textwrap
from collections import Counter
from pathlib import Path

import pytest
from notes import has_note
from without_device import LINEAR, captured, run

from onerank.annotate.op_costs.node_costs import op_costs_of
from onerank.ir.nodes import UNKNOWN


def test_a_script_that_stays_on_the_cpu_or_runs_nothing_backward_is_noted(tmp_path):
    script = textwrap.dedent(LINEAR).format(setup="", statement="")
    forgetful = script.replace(', device="cuda"', "").replace("loss.backward()", "pass")
    notes = captured(tmp_path, forgetful).job.measurement.notes
    assert has_note(notes, "no-device-gpu-unused", "cuda")
    assert has_note(notes, "step-without-backward", "backward()")
    notes = captured(tmp_path, script).job.measurement.notes
    assert not has_note(notes, "no-device-gpu-unused")
    assert not has_note(notes, "step-without-backward")


@pytest.mark.parametrize(("rows", "noted"), [(4, False), (4096, True)])
def test_operators_on_large_cpu_tensors_are_noted(tmp_path: Path, rows: int, noted: bool):
    # An average on the CPU of weights, as of optimizers that offload their states.
    setup = f"average = torch.zeros({rows}, 64, 64, device='cuda').cpu()"
    script = LINEAR.format(setup=setup, statement="average.mul_(0.99)")
    graph = captured(tmp_path, script)
    code = "no-device-cpu-operators"
    assert has_note(graph.job.measurement.notes, code, "aten::mul_") == noted
    assert "aten::mul_" not in graph.text("name")


def test_a_norm_is_the_operator_that_only_a_cuda_build_has(tmp_path):
    """A CPU build of torch computes `rms_norm` by a formula of eight operators."""
    setup, statement = 'norm = nn.RMSNorm(32, device="cuda")', "loss = norm(output).sum()"
    graph = captured(tmp_path, LINEAR.format(setup=setup, statement=statement))
    operators = Counter(graph.strings[int(op)] for op in graph.nodes.op)
    for name in ("aten::_fused_rms_norm", "aten::_fused_rms_norm_backward"):
        assert operators.pop(name) == 1
    assert not {"aten::pow", "aten::mean", "aten::rsqrt"} & {*operators}


def test_torchscript_compiles_functions_that_call_patched_ones(tmp_path):
    setup = """
    import torch.distributed.optim  # its optimizers are classes of TorchScript

    @torch.jit.script
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor(2.0)
    """
    text = textwrap.dedent(LINEAR).format(setup=textwrap.dedent(setup), statement="scaled(output)")
    graph = captured(tmp_path, text)
    operators = Counter(graph.strings[int(op)] for op in graph.nodes.op)
    assert operators["aten::mm"] == 2
    assert operators["aten::mul"] == 1


LOGGING = """
    import io, tempfile, threading
    from torch.distributions import Categorical
    generator = torch.Generator(device="cuda").manual_seed(1)
    moved = []
    thread = threading.Thread(target=lambda: moved.append(torch.ones(4).to("cuda")))
    thread.start(); thread.join()
    assert moved[0].is_cuda and moved[0].tolist() == [1.0] * 4
    assert torch.tensor([1, 2], pin_memory=True).cuda(non_blocking=True).tolist() == [1, 2]
    # As nanotron creates the weights of a model.
    create = torch.empty
    torch.empty = lambda *shape, **options: create(*shape, **options | {"device": "cuda"})
    assert torch.empty(3).is_cuda and torch.arange(4, device="cuda").tolist() == [0, 1, 2, 3]
    torch.empty = create
    dropped = torch.randn(4, device="cuda", generator=generator)
    file = io.BytesIO()
    weights = torch.frombuffer(bytearray(1 << 23), dtype=torch.float32)
    torch.save({"lengths": torch.arange(8), "weights": weights}, file)
    file.seek(0)
    data = torch.load(file)
    assert data["lengths"].tolist() == [*range(8)]
    assert type(data["weights"]) is not torch.Tensor and data["weights"].shape == (1 << 21,)
    assert type(model.weight)(torch.ones(2), requires_grad=False).shape == (2,)
    assert type(model.weight)(torch.ones(2), **vars(model.weight)).shape == (2,)
    tokens = torch.empty(1 << 21, dtype=torch.uint16, pin_memory=True)
    with tempfile.NamedTemporaryFile(buffering=0) as written:
        written.write(bytes([1, 0]) * (1 << 21))
        with open(written.name, "rb", buffering=0) as read:
            assert read.readinto(tokens.numpy()) == 1 << 22
        mapped = torch.from_file(written.name, False, 1 << 21, dtype=torch.int16)
    assert (tokens[-1], mapped[-1]) == (1, 1)
    rows = torch.utils.data.DataLoader(torch.zeros(4, 1 << 20), batch_size=2, num_workers=1)
    assert [batch.shape[0] for batch in rows] == [2, 2]
    pair = torch.tensor([[torch.tensor(2.5, device="cuda")], [4]], device="cuda")
    assert pair.tolist() == [[2.5], [4]] and torch.as_tensor((pair[0, 0], 1)).shape == (2,)
    count = pair[1, 0].long()
    for device in ("cuda", "cpu"):
        both = [count.to(device), 2]
        created = torch.LongTensor(both), count.new_tensor(both), count.new(both)
        assert [each.tolist() for each in created] == [[4, 2]] * 3
        assert torch.asarray(both).tolist() == [4, 2]
        assert torch.FloatTensor([pair[0, 0].to(device)]).tolist() == [2.5]
        assert torch.LongTensor([torch.tensor(3), torch.tensor([4])]).tolist() == [3, 4]
    for dtype in (torch.bool, torch.bfloat16, torch.complex64, torch.uint8):
        assert torch.tensor([torch.ones(1, dtype=dtype)], dtype=dtype).item() == 1
    class Created(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.clone()
        @staticmethod
        def backward(context, gradient):  # in a thread of autograd
            return gradient * torch.tensor(2.0, device="cuda")
    Created.apply(torch.ones(2, device="cuda", requires_grad=True)).sum().backward()
    lists = [[torch.ones(2, device="cuda")] for _ in range(4)]
    rates = dict(beta1=0.9, beta2=0.99, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False)
    torch._fused_adamw_(*lists, [], [torch.ones((), device="cuda")], lr=torch.tensor(0.1), **rates)
    torch.cumsum(torch.ones(2, device="cuda"), 0, out=torch.ones(2, device="cuda"))
    torch.sum(torch.ones(2, device="cuda"), 0, out=torch.ones((), device="cuda"))
    unknown, mask = model(torch.zeros(16, 64, device="cuda")), torch.arange(16, device="cuda") > 3
    assert (unknown > 0).all()
    positive = bool((unknown > 0).all())
    assert not positive
    assert unknown[mask].shape == (12, 32)
    rows = torch.arange(16, device="cuda")[:, None] % 3
    chosen = torch.zeros_like(unknown, dtype=torch.bool).scatter_(1, rows, True)
    assert chosen.sum(0).tolist() == [6, 5, 5, *[0] * 29]
    assert unknown.new_full((2,), 3).tolist() == [3, 3]
    assert torch.ones_like(mask).all()
    copied = [torch.zeros(2, device="cuda", dtype=torch.int64) for _ in range(2)]
    torch._foreach_copy_(copied, [rows[1:3, 0], rows[3:5, 0]])
    assert [each.tolist() for each in copied] == [[1, 2], [0, 1]]
    assert unknown.view(4, 4, 32)[mask.view(4, 4), 0].shape == (12,)
    assert unknown.masked_select(mask[:, None]).shape == (12 * 32,)
    with torch.inference_mode():
        assert model(torch.zeros(16, 64).to(device="cuda", non_blocking=True)).is_cuda
"""


STATEMENT = (
    'print(f"{loss:.2f}", output.detach().cpu().numpy().sum()); '
    "Categorical(logits=output).log_prob(torch.zeros(16, device='cuda')); "
    "torch.save(model.state_dict(), '/dev/full'); "
    "torch.cuda.nvtx.range_push('a')"
)


def test_what_scripts_log_draw_and_save(tmp_path):
    text = textwrap.dedent(LINEAR).format(setup=textwrap.dedent(LOGGING), statement=STATEMENT)
    graph = captured(tmp_path, text)
    assert has_note(graph.job.measurement.notes, "no-device-save-skipped")


SHUFFLED = """
    import torch
    torch.set_default_device("cuda")
    model = torch.nn.Linear(8, 4).share_memory()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert torch.tensor(1.0).is_cuda and torch.as_tensor([1.0]).is_cuda
    assert not torch.tensor(1.0, device="cpu").is_cuda
    order = torch.randperm(6)
    assert sorted(order.tolist()) == list(range(6)) and order.tolist() != [1] * 6
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.set_state(generator.get_state())
    for step in range(5):
        output = model(torch.randn(16, 8))
        assert output.sum().tolist() == 1.0
        output.sum().backward()
        optimizer.step()
"""


def test_a_permutation_on_the_default_device_is_one(tmp_path):
    graph = captured(tmp_path, SHUFFLED)
    assert graph.text("op").count("aten::addmm") == 1


STORAGE_PARTS = """
import torch
weight = torch.nn.Parameter(torch.randn(32, 16, device="cuda", dtype=torch.bfloat16))
bias = torch.nn.Parameter(torch.randn(32, device="cuda", dtype=torch.bfloat16))
optimizer = torch.optim.SGD([weight, bias], lr=0.1)
buffer = torch.zeros(544, device="cuda")
whole, gradients = buffer.untyped_storage(), []
held = torch.cuda.memory_allocated()
for first, last, parameter in ((0, 512, weight), (512, 544, bias)):
    part = whole[4 * first : 4 * last]
    gradient = torch.empty([], device=part.device)
    gradient.set_(source=part)
    assert part.nbytes() == 4 * (last - first) and gradient.storage_offset() == first
    assert gradient.data_ptr() == part.data_ptr() == buffer.data_ptr() + 4 * first
    gradients.append(gradient.view_as(parameter))
assert whole[4:12][4:].size() == 4
assert torch.cuda.memory_allocated() == held, "the parts take no memory"
for step in range(5):
    x = torch.randn(8, 16, device="cuda", dtype=torch.bfloat16)
    torch.nn.functional.linear(x, weight, bias).sum().backward()
    for gradient, parameter in zip(gradients, (weight, bias)):
        gradient.add_(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
"""


def test_parts_of_a_storage_share_its_memory(tmp_path):
    # nanotron accumulates gradients in 32 bits so; the script asserts what they share.
    graph = captured(tmp_path, STORAGE_PARTS)
    assert graph.text("op").count("aten::add_") == 2


def test_a_refusal_that_a_launcher_turns_into_an_exit_is_reported(tmp_path):
    # Hydra prints what a script raises, and exits while it handles that.
    text = """
    import sys, torch
    try:
        (torch.randn(8, device="cuda") > 0).nonzero()
    except Exception:
        sys.exit(1)
    """
    done = run(tmp_path, text)
    assert done.returncode == 2
    assert "error[no-device-value]: train.py:4" in done.stderr
    assert "script-exited" not in done.stderr


SPARSE = """
    import torch
    table = torch.nn.EmbeddingBag(10_000, 64, mode="sum", sparse=True).cuda()
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    ids, offsets = torch.arange(300, device="cuda"), torch.arange(0, 300, 3, device="cuda")
    for step in range(5):
        table(ids, offsets).sum().backward()
        assert table.weight.grad.is_sparse
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_sparse_gradient_changes_its_rows_alone(tmp_path):
    graph = captured(tmp_path, SPARSE)
    costs = op_costs_of(graph)
    rows = {graph.strings[int(graph.nodes.op[i])]: n for n, i in enumerate(costs.index.tolist())}
    values = 300 * 64 * 4
    assert costs.bytes_written[rows["aten::_embedding_bag_backward"]] == values
    update = rows["aten::index_add_"]
    assert costs.bytes_read[update] == 2 * values + 300 * 8
    assert costs.bytes_written[update] == values
    assert "aten::clone" not in rows


def test_a_sparse_gradient_grows_with_each_backward(tmp_path):
    script = SPARSE.replace(
        "        optimizer.step()",
        """        table(ids, offsets).sum().backward()
        assert table.weight.grad._nnz() == 600
        optimizer.step()""",
    )
    graph = captured(tmp_path, script)
    costs = op_costs_of(graph)
    ops = [graph.strings[int(graph.nodes.op[i])] for i in costs.index.tolist()]
    joined = [int(costs.bytes_written[row]) for row, op in enumerate(ops) if op == "aten::cat"]
    assert joined == [600 * 8, 600 * 64 * 4]
    assert not {"aten::_indices", "aten::_values"} & set(ops)
    (update,) = (row for row, op in enumerate(ops) if op == "aten::index_add_")
    assert costs.bytes_written[update] == 600 * 64 * 4


@pytest.mark.parametrize(("optimizer", "states"), [("SparseAdam", 2), ("Adagrad", 1)])
def test_an_optimizer_of_sparse_gradients_updates_distinct_rows(tmp_path, optimizer, states):
    script = SPARSE.replace("optim.SGD", f"optim.{optimizer}").replace(
        'torch.arange(300, device="cuda"),', 'torch.arange(300, device="cuda") % 100,'
    )
    graph = captured(tmp_path, script)
    costs = op_costs_of(graph)
    ops = [graph.strings[int(graph.nodes.op[i])] for i in costs.index.tolist()]
    assert not (costs.flops == UNKNOWN).any()
    row = 64 * 4
    (sums,) = (n for n, op in enumerate(ops) if op == "aten::_coalesce")
    # The elements, and two numbers for each: its sorted row, and its place.
    assert costs.bytes_read[sums] == 300 * (row + 2 * 8)
    assert costs.bytes_written[sums] == 100 * row
    taken = [n for n, op in enumerate(ops) if op == "aten::gather"]
    assert [int(costs.bytes_written[n]) for n in taken] == [100 * row] * states
    added = [n for n, op in enumerate(ops) if op == "aten::index_add_"]
    assert [int(costs.bytes_written[n]) for n in added] == [100 * row] * (states + 1)
    assert "aten::is_coalesced" not in ops


def test_states_that_an_optimizer_creates_itself_are_sharded(tmp_path):
    """Adagrad creates a whole `sum` for each parameter, whose equal numbers are unknown here."""
    script = """
        import torch
        from torch import nn
        model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).cuda()
        optimizer = torch.optim.Adagrad(model.parameters())
        for step in range(5):
            model(torch.randn(8, 256, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    """
    graph = captured(tmp_path, script, "--dp", 4, "--fsdp")
    # A quarter of each matrix of 32-bit numbers, and of each bias.
    states = graph.job.measurement.resident_bytes["optimizer"]
    assert [size for size in sorted(states) if size >= 256] == [256] * 2 + [256 * 64 * 4] * 2


def test_how_many_rows_are_distinct_needs_known_ids(tmp_path):
    ids = "table.weight[:300, 0].long(),"
    script = SPARSE.replace("optim.SGD", "optim.SparseAdam")
    script = script.replace('torch.arange(300, device="cuda"),', ids)
    done = run(tmp_path, script)
    assert done.returncode == 2
    assert "error[no-device-value]: train.py:9" in done.stderr


def test_an_operator_that_loses_the_elements_of_a_sparse_tensor_is_refused(tmp_path):
    doubled = "optimizer.step(); table.weight.grad * 2"
    done = run(tmp_path, SPARSE.replace("optimizer.step()", doubled))
    assert done.returncode == 2
    assert "error[no-device-operator]: train.py:9" in done.stderr


def test_a_sparse_gradient_is_not_averaged_over_ranks(tmp_path):
    script = SPARSE.replace(
        "    optimizer = ",
        """    torch.distributed.init_process_group("nccl")
    table = torch.nn.parallel.DistributedDataParallel(table)
    optimizer = """,
    ).replace("table.weight", "table.module.weight")
    done = run(tmp_path, script, "--dp", "2")
    assert done.returncode == 2
    assert "error[collective-unsupported]" in done.stderr


SUBCLASSES = """
    import torch
    from torch import nn

    class Rows(nn.Parameter):
        __slots__ = ("start",)

        def __new__(cls, table, start, stop):
            return table[start:stop].view(-1, 4).as_subclass(cls)

        def __init__(self, table, start, stop):
            self.start = start

    class Image(torch.Tensor):
        pass

    model = nn.Linear(8, 8, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    table = torch.zeros(64, device="cuda")
    rows = Rows(table, 8, 24)
    assert isinstance(rows, Rows) and rows.start == 8 and rows.shape == (4, 4) and rows.is_cuda
    assert rows.untyped_storage().data_ptr() == table.untyped_storage().data_ptr()
    empty = torch.Tensor._make_subclass(Image, torch.zeros(0), require_grad=True)
    assert isinstance(empty, Image) and empty.requires_grad
    # ColossalAI changes classes, and gives tensors without memory that of others.
    model.bias.__class__ = Image
    model.bias.data = model.bias.data + 1
    empty.__class__ = nn.Parameter
    empty.data = torch.randn(8, device="cuda")
    model.register_parameter("scale", empty)
    assert isinstance(model.bias, Image) and type(empty + 1) is type(empty.data)
    lazy = nn.Sequential(nn.LazyLinear(8, device="cuda"), nn.LazyLinear(8)).cuda()
    lazy(torch.randn(2, 8, device="cuda"))
    assert isinstance(lazy[1].weight, nn.Parameter) and lazy[0].weight.shape == (8, 8)
    optimizer = torch.optim.SGD([*model.parameters(), *lazy.parameters()], lr=0.1)
    picked = torch.empty(32, 2, device="cuda")
    for step in range(5):
        torch.index_select(table.view(32, 2), 0, torch.arange(32, device="cuda"), out=picked)
        image = torch.randn(2, 8, device="cuda").as_subclass(Image)
        assert isinstance(image, Image)
        (lazy(model(image)) * model.scale).sum().backward()
        assert model.scale.grad.shape == (8,)
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_tensor_becomes_an_instance_of_a_subclass(tmp_path):
    captured(tmp_path, SUBCLASSES)


def test_a_parameter_that_stayed_on_the_cpu_names_the_line(tmp_path):
    setup = "model.low_rank = nn.Parameter(torch.randn(64, 32))"
    text = LINEAR.format(setup=setup, statement="loss = (output.detach() @ model.low_rank.T).sum()")
    done = run(tmp_path, text)
    assert done.returncode == 2
    assert "error[script-two-devices]" in done.stderr
    assert "train.py line 10" in done.stderr


LOADS_IN_A_THREAD = """
    import sys, threading, torch
    sys.setswitchinterval(1e-5)
    model = torch.nn.Linear(8, 8, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    read, ended = set(), threading.Event()

    def load():
        while not ended.is_set():
            read.add(model.weight.device.type)

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    for step in range(5):
        x = torch.randn(2, 8, device="cuda")
        for _ in range(50):
            x = x.exp()
            assert x.device.type == "cuda"
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert read == {"cuda"}, read
    ended.set()
"""


def test_a_thread_reads_the_device_while_another_computes(tmp_path):
    captured(tmp_path, LOADS_IN_A_THREAD)


def test_a_saved_image_and_a_token_have_made_up_numbers(tmp_path):
    statement = (
        "pixels = output.mul(255).to('cpu', torch.uint8).numpy(); assert pixels.max() == 1; "
        # A token that was drawn among the best ones.
        "best = output.topk(2)[1]; token = best.gather(-1, output.argmax(-1, keepdim=True)); "
        "prompt = torch.zeros_like(token); "
        "assert torch.cat([prompt, token], 1).tolist() == [[1, 1]] * 16"
    )
    graph = captured(tmp_path, LINEAR.format(setup="", statement=statement))
    assert has_note(graph.job.measurement.notes, "no-device-stand-ins")


CHECKS = """
    import torch

    def check(x):
        if not (x >= 0).all():
            raise ValueError
        if (x < 0).any() or not bool((x < 9).all()):
            raise ValueError
        if torch.equal(x, x + 1):
            pass
        else:
            raise ValueError
        assert not (
            torch.isnan(x).any()
        )
        torch.distributions.Normal(x, x)
        return bool((x > 0).all())

    model = torch.nn.Linear(8, 8, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        output = model(torch.randn(2, 8, device="cuda"))
        assert not check(output)
        solved = torch.linalg.lstsq(output.T, output.T[:, :1])
        assert [tuple(each.shape) for each in solved] == [(2, 1), (1,), (0,), (0,)]
        output.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_checks_of_unknown_numbers_pass_and_least_squares_have_shapes(tmp_path):
    captured(tmp_path, CHECKS)


SYNCHRONIZED = """
    import torch
    import torch.distributed as dist
    from torch import nn
    dist.init_process_group("nccl")
    norms = nn.BatchNorm2d(8), nn.BatchNorm2d(4)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norms[0], nn.Conv2d(8, 4, 3), norms[1])
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model).cuda()
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        model(torch.randn(2, 3, 16, 16, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_synchronized_norm_waits_for_the_ranks_that_have_samples(tmp_path):
    graph = captured(tmp_path, SYNCHRONIZED, "--dp", 4)
    names = graph.text("op")
    selections = [i for i, name in enumerate(names) if name == "aten::index"]
    shapes = graph.text("output_shapes")
    # The counts, means and deviations of the ranks, in each of two layers.
    expected = [f"[[4,{columns}]]" for channels in (8, 4) for columns in (1, channels, channels)]
    assert [shapes[i] for i in selections] == expected

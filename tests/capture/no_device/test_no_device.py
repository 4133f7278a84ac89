"""`capture run --device none`: on shapes alone, what a capture on a device records."""

import importlib
import textwrap
from collections import Counter
from pathlib import Path
from threading import Thread
from unittest.mock import Mock

import numpy as np
import pytest
from notes import has_note, note_of
from own_process import run_command

import onerank
from onerank.annotate.op_costs.node_costs import op_costs_of
from onerank.annotate.op_costs.op_classes import CLASSES, OpClass, classify
from onerank.capture.allocator_settings import settings_in
from onerank.capture.no_device.inductor import InductorOnShapes
from onerank.converters.sources.kineto import convert_directory
from onerank.ir import UNKNOWN, AllocatorSettings, Collective, Graph, Kind, Phase

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
H200 = ROOT / "traces" / "h200-llama-8b-4l-tp4"


def capture(script: Path, output: Path, *options: object, args: tuple[object, ...] = ()) -> Graph:
    """Capture without a device, and return the graph."""
    done = run_command(
        "capture", "run", script, "--device", "none", *options, "-o", output, "--", *args
    )
    assert done.returncode == 0, done.stderr
    return onerank.read(output)


def script(directory: Path, text: str) -> Path:
    path = directory / "train.py"
    path.write_text(textwrap.dedent(text))
    return path


def collectives(graph: Graph) -> list[tuple[int, str, int]]:
    """Return kind, group and bytes of the communication, in order."""
    nodes = graph.nodes
    found = np.flatnonzero(graph.communication)
    order = found[np.argsort(nodes.start_ns[found], kind="stable")]
    return [
        (int(nodes.kind[i]), graph.strings[int(nodes.group[i])], int(nodes.comm_bytes[i]))
        for i in order
    ]


def flops_by_operator(graph: Graph) -> Counter[str]:
    costs = op_costs_of(graph)
    flops: Counter[str] = Counter()
    for index, count in zip(costs.index.tolist(), costs.flops.tolist(), strict=True):
        flops[graph.strings[int(graph.nodes.op[index])]] += max(0, count)
    return flops


@pytest.fixture(scope="module")
def llama_8b(tmp_path_factory):
    """The job of the kept H200 capture."""
    output = tmp_path_factory.mktemp("llama") / "trace.et"
    shape = ("--shape", "8b", "--layers", 4, "--seq", 4096, "--batch", 1)
    return capture(EXAMPLES / "train_llama.py", output, "--tp", 4, "--like", "H200", args=shape)


@pytest.fixture(scope="module")
def on_h200():
    return convert_directory(H200)[0]


def test_collectives_are_those_of_the_device(llama_8b, on_h200):
    assert collectives(llama_8b) == collectives(on_h200)


def test_products_and_attention_are_those_of_the_device(llama_8b, on_h200):
    here, there = flops_by_operator(llama_8b), flops_by_operator(on_h200)
    for operator in (
        "aten::mm",
        "aten::_cudnn_attention_forward",
        "aten::_cudnn_attention_backward",
        "aten::add",
        "aten::silu_backward",
        "aten::_foreach_addcdiv_",
    ):
        assert here[operator] == there[operator] > 0, operator
    # torch 2.11 computes the rotary angles by bmm, 2.13 by mul: 0.3 of 9,080 GFLOP
    assert here.total() == pytest.approx(there.total(), rel=1e-6)


def test_bytes_are_those_of_the_device(llama_8b, on_h200):
    totals = []
    for graph in (llama_8b, on_h200):
        costs = op_costs_of(graph)
        totals.append(
            np.maximum(costs.bytes_read, 0).sum() + np.maximum(costs.bytes_written, 0).sum()
        )
    assert totals[0] == pytest.approx(totals[1], rel=1e-4)


def test_strides_are_those_of_the_device(llama_8b, on_h200):
    def strided(graph):
        columns = ("op", "input_shapes", "input_strides")
        calls = {
            tuple(graph.strings[int(getattr(graph.nodes, name)[i])] for name in columns)
            for i in np.flatnonzero(graph.nodes.input_strides)
        }
        # A graph of a device also has the host's views. torch 2.13 gathers in the loss, and
        # computes the rotary angles, by other operators than 2.11.
        compared = {f"aten::{name}" for name in ("mm", "copy_", "mul", "add", "add_", "neg")}
        return {call for call in calls if call[0] in compared}

    assert strided(llama_8b) == strided(on_h200)
    assert len(strided(llama_8b)) == 27


def test_memory_is_that_of_the_device(llama_8b, on_h200):
    here, there = llama_8b.job.measurement, on_h200.job.measurement
    assert here.peak_memory_bytes == pytest.approx(there.peak_memory_bytes, rel=0.001)
    assert here.start_memory_bytes == pytest.approx(there.start_memory_bytes, rel=0.001)
    assert sum(here.activation_bytes) == pytest.approx(sum(there.activation_bytes), rel=0.001)


def test_modules_and_phases_are_those_of_the_device(llama_8b, on_h200):
    def work(graph):
        products = [
            i for i, code in enumerate(graph.nodes.op) if graph.strings[int(code)] == "aten::mm"
        ]
        flops = op_costs_of(graph)
        of = dict(zip(flops.index.tolist(), flops.flops.tolist(), strict=True))
        counted: Counter[tuple[str, int]] = Counter()
        for index in products:
            if index in of:
                module = graph.strings[int(graph.nodes.module[index])]
                counted[module, int(graph.nodes.phase[index])] += max(0, of[index])
        return counted

    assert work(llama_8b) == work(on_h200)


def test_no_time_is_claimed(llama_8b):
    assert not llama_8b.nodes.duration_ns[~llama_8b.communication].any()
    measurement = llama_8b.job.measurement
    assert measurement.step_ns == ()
    assert measurement.profiled_step_ns == 0
    assert llama_8b.job.device.type == "model"


def test_the_capture_is_predicted_for_a_gpu(llama_8b, tmp_path):
    llama_8b.write(tmp_path / "trace.et")
    done = run_command("annotate", "--target", "H200", tmp_path / "trace.et")
    assert done.returncode == 0, done.stderr
    predicted = onerank.read(tmp_path / "trace.H200.et")
    kernels = predicted.mask(Kind.KERNEL)
    assert (predicted.nodes.duration_ns[kernels] > 0).all()


FORMS = {
    "sp": ("--tp", 4, "--sp"),
    "tp of transformers": ("--tp", 2, "--tp-style", "hf"),
    "fsdp": ("--dp", 4, "--fsdp"),
    "zero 2": ("--dp", 4, "--zero", 2),
    "pp": ("--pp", 2, "--rank", 1),
    "cp ring": ("--cp", 2, "--cp-comm", "p2p"),
}

SMALL_LLAMA = """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=128,
    )
    model = LlamaForCausalLM(config).to(device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        for micro_batch in range(2):
            tokens = torch.randint(0, 128, (1, 32), device=device)
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("form", FORMS)
def test_collectives_of_each_form_are_those_of_a_cpu_capture(form, tmp_path):
    path, options = script(tmp_path, SMALL_LLAMA), FORMS[form]
    here = capture(path, tmp_path / "none.et", *options)
    done = run_command(
        *("capture", "run", path, *options),
        *("--warm-up", 1, "--timed-steps", 1, "-o", tmp_path / "cpu.et"),
    )
    assert done.returncode == 0, done.stderr
    there = onerank.read(tmp_path / "cpu.et")
    assert len(collectives(here)) > 0
    assert collectives(here) == collectives(there)
    products = ("aten::mm", "aten::addmm")
    expected = flops_by_operator(there)
    assert expected["aten::mm"] > 0
    assert all(flops_by_operator(here)[name] == expected[name] for name in products)


@pytest.mark.parametrize("name", ["train_llama_ddp", "train_llama_fsdp", "train_llama_pp"])
def test_scripts_that_distribute_themselves(name, tmp_path):
    graph = capture(EXAMPLES / f"{name}.py", tmp_path / "trace.et", "--dp", 4)
    assert len(collectives(graph)) > 0
    assert set(graph.nodes.phase.tolist()) >= {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER}


def test_experts_with_static_routing(tmp_path):
    graph = capture(EXAMPLES / "train_mixtral.py", tmp_path / "trace.et", "--ep", 4, "--dp", 4)
    nodes = graph.nodes
    exchanges = nodes.comm_bytes[nodes.collective == Collective.ALL_TO_ALL].tolist()
    assert exchanges
    assert len(set(exchanges)) == 1  # balanced: every layer sends as much


TRAINING = """
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    assert torch.cuda.is_available()
    assert torch.cuda.get_device_name() == "NVIDIA A100-SXM4-80GB"
    assert torch.cuda.get_device_capability() == (8, 0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(),
        nn.Linear(16 * 64, 10),
    ).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda")
    data = torch.utils.data.TensorDataset(torch.randn(64, 3, 8, 8), torch.arange(64) % 10)
    loader = torch.utils.data.DataLoader(data, batch_size=16, pin_memory=True)
    for epoch in range(5):
        for images, labels in loader:
            images, labels = images.to("cuda", non_blocking=True), labels.to("cuda")
            assert (labels == 3).sum().item() == sum(int(label) == 3 for label in labels.tolist())
            with torch.autocast("cuda", dtype=torch.float16):
                scores = checkpoint(model, images, use_reentrant=False)
                loss = nn.functional.cross_entropy(scores, labels)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if not norm.isfinite() or loss.isnan():
                raise SystemExit("diverged")
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert scaler.get_scale() == 65536.0
            print(loss.item(), torch.cuda.max_memory_allocated())
"""


def test_a_script_that_reads_values_and_scales_its_loss(tmp_path):
    graph = capture(script(tmp_path, TRAINING), tmp_path / "trace.et", "--like", "A100-SXM-80GB")
    operators = Counter(graph.strings[int(code)] for code in graph.nodes.op)
    assert operators["aten::convolution"] == 2  # the forward, and its recomputation
    assert operators["aten::convolution_backward"] == 1
    assert operators["aten::_foreach_mul_"] > 0  # gradients are clipped by foreach kernels
    note_of(graph.job.measurement.notes, "no-device-stand-ins", "train.py")


OF_A_GPU = """
    import threading
    import torch
    from torch import nn

    lengths = []
    thread = threading.Thread(
        target=lambda: lengths.extend(torch.tensor([1, 2], device="cuda").tolist()))
    thread.start()
    thread.join()
    assert lengths == [1, 2]
    table = nn.Parameter(torch.zeros(8, 8, device="cuda"))
    optimizer = torch.optim.SGD([table], lr=0.1, foreach=False)
    tokens = torch.arange(3, device="cuda")
    for step in range(20):
        mask = tokens > 1
        mask.cumsum(0)
        tokens[mask] = 0
        torch.zeros(0, device="cuda")
        tokens.tolist(), mask[:1].all().item()
        tokens.repeat_interleave(tokens + 1, output_size=3), tokens.repeat(2)
        rows = table[tokens]
        rows[:2] += 1.0
        rows.softmax(-1).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_operators_that_a_gpu_runs_within_others(tmp_path):
    """Each was seen in captures on an H100 (torch 2.11)."""
    graph = capture(script(tmp_path, OF_A_GPU), tmp_path / "trace.et", "--like", "H100")
    nodes = graph.nodes
    order = np.argsort(nodes.start_ns, kind="stable")
    operators = [graph.strings[int(code)].removeprefix("aten::") for code in nodes.op[order]]
    shapes = [graph.strings[int(code)] for code in nodes.input_shapes[order]]
    before_backward = "gt copy_ cumsum masked_fill_ copy_ copy_ _local_scalar_dense add cumsum "
    before_backward += "repeat_interleave gather copy_ index add_ _softmax pow sum fill_"
    assert operators[: len(before_backward.split())] == before_backward.split()
    assert shapes[operators.index("masked_fill_")] == "[[3],[3],[]]"
    assert shapes[len(before_backward.split()) - 7] == "[[2,3],[2,3],[]]"  # of `repeat`
    backward = operators[len(before_backward.split()) :]
    # The product of gradient and output precedes the softmax's; the indexed gradient is written in
    # place, into zeros.
    assert backward[backward.index("_softmax_backward_data") - 1] == "mul"
    assert backward[-3:] == ["fill_", "_index_put_impl_", "add_"]
    predicted = onerank.recost(graph, "H100", host="none")
    names = [predicted.strings[int(code)] for code in predicted.nodes.name]
    assert names.count("Memcpy DtoH (Device -> Pinned)") == 1


OTHER_KERNELS = """
    import torch
    from torch import nn
    from torch.nn import functional

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.zeros(64, 32, device="cuda"))

        def forward(self, few, many):
            self.table.repeat(2, 1)
            functional.embedding(few, self.table), functional.embedding(many, self.table)
            return functional.one_hot(few, 8)

    net = Net()
    few = torch.zeros(16, dtype=torch.int64, device="cuda")
    many = torch.zeros(17, dtype=torch.int64, device="cuda")
    with torch.no_grad():
        for step in range(8):
            net(few, many)
"""


def test_kernels_of_few_rows_expanded_copies_and_one_hot(tmp_path):
    """Operators and strides as of an H100 (torch 2.11)."""
    graph = capture(script(tmp_path, OTHER_KERNELS), tmp_path / "trace.et", "--like", "H100")
    nodes = graph.nodes
    order = np.argsort(nodes.start_ns, kind="stable")
    operators = [graph.strings[int(code)].removeprefix("aten::") for code in nodes.op[order]]
    assert operators == ["copy_", "index_select", "gather", "fill_", "scatter_"]
    # Of the repeated rows and of the expanded operand.
    strides = graph.strings[int(nodes.input_strides[order[0]])]
    assert strides == "[[2048,32,32,1],[0,0,32,1],[]]"


TRANSPOSED = """
    import torch
    from torch import nn
    model = nn.Sequential({norm}(32), nn.Softmax(-1)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        images = torch.randn(4, 32, 8, device="cuda", requires_grad=True)
        model(images.transpose(1, 2)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("norm", "operator"), [("LayerNorm", "native_layer_norm"), ("RMSNorm", "_fused_rms_norm")]
)
def test_a_norm_copies_an_operand_that_is_not_contiguous(tmp_path, norm: str, operator: str):
    """As in transformers on H100s, of transposed patches and of parts of heads (torch 2.11)."""
    text = TRANSPOSED.replace("{norm}", f"nn.{norm}")
    graph = capture(script(tmp_path, text), tmp_path / "trace.et", "--like", "H100")
    nodes = graph.nodes
    operators = [
        graph.strings[int(code)].removeprefix("aten::")
        for code in nodes.op[np.argsort(nodes.start_ns, kind="stable")]
    ]
    for each in (operator, f"{operator}_backward"):
        assert operators[operators.index(each) - 1] == "copy_"
    assert operators[operators.index("_softmax") - 1] == operator  # contiguous


CONVOLUTIONS = """
    import torch
    from torch import nn
    images = nn.Sequential(nn.Conv2d(8, 16, 2, 2), nn.Conv2d(16, 16, 7, padding=3, groups=16))
    images = images.cuda().to(memory_format=torch.channels_last)
    tokens = nn.Conv1d(64, 64, 4, groups=64, padding=3).cuda()
    optimizer = torch.optim.SGD([*images.parameters(), *tokens.parameters()], lr=0.1)
    for step in range(5):
        x = torch.randn(4, 8, 8, 8, device="cuda").to(memory_format=torch.channels_last)
        y = torch.randn(2, 32, 64, device="cuda", requires_grad=True)
        images(x).sum().backward()
        tokens(y.transpose(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_convolutions_keep_their_channels_last_and_depthwise_ones_of_torch_copy(tmp_path):
    """Of ConvNeXt by cuDNN, and of gated linear attention by torch's kernel, on H100s."""
    graph = capture(script(tmp_path, CONVOLUTIONS), tmp_path / "trace.et", "--like", "H100")
    nodes = graph.nodes
    order = np.argsort(nodes.start_ns, kind="stable")
    operators = [graph.strings[int(code)].removeprefix("aten::") for code in nodes.op[order]]
    at = [place for place, name in enumerate(operators) if name == "convolution"]
    strides = [graph.strings[int(nodes.input_strides[order[place]])] for place in at]
    assert strides[1].startswith("[[256,1,64,16],")
    assert operators[at[2] - 1] == "copy_"
    # The input for the filter's gradient; the gradient of a sum is expanded, for both.
    backward = len(operators) - 1 - operators[::-1].index("convolution_backward")
    assert operators[backward - 3 : backward] == ["copy_"] * 3
    costs = op_costs_of(graph)
    pairs = zip(costs.index.tolist(), costs.call.tolist(), strict=True)
    cycles = {node: costs.works[call].cycles for node, call in pairs}
    by_cudnn, by_torch = (cycles[int(order[place])] for place in at[1:])
    assert by_cudnn == pytest.approx(0.1 * 4 * 16 * 16 * 49)
    assert by_torch == pytest.approx((2.6 + 0.07 * 4) * 2 * 64 * 35)


COMPILED = """
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.norm = nn.Embedding(1000, 64), nn.LayerNorm(64)
            self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

        def forward(self, tokens):
            x = self.table(tokens)
            return self.down(nn.functional.gelu(self.up(self.norm(x)))) + x

    model = Net().to("cuda")
    compiled = torch.compile(model, backend=BACKEND)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for step in range(20):
        compiled(torch.randint(0, 1000, (32,), device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_inductor_schedules_compiled_code(tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    path = script(tmp_path, COMPILED.replace("BACKEND", "'inductor'"))
    graph = capture(path, tmp_path / "trace.et")
    operators = Counter(graph.strings[int(code)] for code in graph.nodes.op)
    assert operators["aten::mm"] + operators["aten::addmm"] == 6  # two forward, four backward
    assert operators["aten::gelu"] == operators["aten::native_layer_norm"] == 0
    costs = op_costs_of(graph)
    names = [graph.strings[int(code)] for code in graph.nodes.op[costs.index]]
    (gelu,) = (at for at, name in enumerate(names) if name.startswith("triton_poi_fused_gelu"))
    assert (costs.bytes_read[gelu], costs.bytes_written[gelu]) == (32 * 128 * 4, 32 * 128 * 4)
    # x / 2 * (1 + erf(x / sqrt(2)))
    assert costs.flops[gelu] == 5 * 32 * 128
    generated = np.array([name.startswith("triton_") for name in names])
    instructions = graph.nodes.instructions[costs.index]
    # A load, four operations and the error function.
    assert instructions[gelu] == round((2.5 + 4 * 1.2 + 10) * 32 * 128)
    # One kernel reads nothing: it stores zeros, to which the embedding's gradient is added.
    fills = generated & (costs.bytes_read == 0)
    assert fills.sum() == 1
    assert instructions[fills].tolist() == [0]
    assert (instructions[generated & ~fills] > 0).all()
    assert (instructions[~generated] == UNKNOWN).all()
    assert (costs.flops >= 0).all()
    # Of the embedding's table only the rows of the tokens count: tokens, rows, weight and bias.
    first = names.index("triton_per_fused_embedding_native_layer_norm_0")
    assert costs.bytes_read[first] == 32 * 8 + 32 * 64 * 4 + 2 * 64 * 4
    assert graph.nodes.phase[costs.index[first]] == Phase.FORWARD
    predicted = onerank.recost(graph, "H100")
    times = dict(zip(predicted.text("name"), predicted.nodes.duration_ns.tolist(), strict=True))
    assert times["triton_per_fused_embedding_native_layer_norm_0"] > 0
    note_of(graph.job.measurement.notes, "inductor-as-scheduled", 2)
    # The import of Dynamo creates a directory, which stays empty.
    assert not [left for left in temporary.rglob("*") if not left.match("torchinductor_*")]


def test_settings_of_inductor_return_to_those_of_the_script(monkeypatch):
    config = importlib.import_module("torch._inductor.config")
    monkeypatch.setattr(config, "max_autotune", True)
    inductor = InductorOnShapes(Mock(), Mock())
    with inductor.installed():
        # A function may be compiled first in a thread of a backward.
        backward = Thread(target=inductor._configure)
        backward.start()
        backward.join()
        inductor._configure()
        assert not config.max_autotune
    assert config.max_autotune


def test_what_inductor_cannot_compile_is_captured_eager_and_noted(tmp_path):
    text = COMPILED.replace("BACKEND", "'inductor'")
    failing = "torch._inductor.config.post_grad_custom_post_pass = lambda graph: 1 / 0"
    path = script(tmp_path, text.replace("    compiled =", f"    {failing}\n    compiled ="))
    graph = capture(path, tmp_path / "trace.et")
    operators = {graph.strings[int(code)] for code in graph.nodes.op}
    assert {"aten::addmm", "aten::gelu", "aten::_fused_adamw_"} <= operators
    # The functions that forward calls are not tried after it.
    note_of(graph.job.measurement.notes, "compile-failed", 1)


RECOMPUTED = """
    import torch
    from torch.nn import functional
    from torch.utils.checkpoint import checkpoint

    weight = torch.nn.Parameter(torch.randn(3 * 64, 64, device="cuda", dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def attention(x):
        q, k, v = (x @ weight.t()).unflatten(-1, (3, 2, 32)).permute(1, 2, 0, 3).unsqueeze(1)
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    @torch.compile
    def loss_of(x):
        half = torch.tensor(0.5).to(x.device)  # a constant that AOTAutograd computes
        nothing = (0 * x).sum()  # Inductor folds it, by a constant on its device
        return half * checkpoint(attention, x, use_reentrant=False).sum() + nothing

    for step in range(5):
        loss = loss_of(torch.randn(128, 64, device="cuda", dtype=torch.bfloat16))
        assert loss.item() == 1  # what a script reads of unknown numbers
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_compiled_code_recomputes_operators_that_draw_random_numbers(tmp_path):
    graph = capture(script(tmp_path, RECOMPUTED), tmp_path / "trace.et")
    assert not has_note(graph.job.measurement.notes, "compile-failed")
    operators = Counter(graph.strings[int(code)] for code in graph.nodes.op)
    assert operators["aten::_cudnn_attention_forward"] == 2


ATTENTION = """
    import torch
    from torch.nn import functional
    from torch.utils.checkpoint import checkpoint

    weight = torch.nn.Parameter(torch.randn(3 * 64, 64, device="cuda", dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def attention(x):
        q, k, v = (2 * (x @ weight.t())).unflatten(-1, (3, 2, 32)).permute(1, 2, 0, 3).unsqueeze(1)
        return functional.scaled_dot_product_attention(q, k, v)

    @torch.compile
    def loss_of(x):
        return {call}.sum()

    for step in range(5):
        loss_of(torch.randn(128, 64, device="cuda", dtype=torch.bfloat16)).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("recomputed", [False, True])
def test_recomputed_attention_reads_views_of_its_operands(recomputed, tmp_path):
    """Inductor copies operands of attention, but not of operators that torch wraps to recompute.

    Kernels of Llama with context parallelism of 4 on four H100s are those of the wrapped form
    (benchmarks/results/2026-11-27-rings-async-tp-4xh100.txt).
    """
    # Without a gradient: what a backward reads is in memory before attention.
    once = "(attention(x).detach() + weight.sum())"
    call = "checkpoint(attention, x, use_reentrant=False)" if recomputed else once
    graph = capture(script(tmp_path, ATTENTION.replace("{call}", call)), tmp_path / "trace.et")
    assert not has_note(graph.job.measurement.notes, "compile-failed")
    names = graph.text("name")
    first = graph.text("op").index("aten::_cudnn_attention_forward")
    kernel = next(node for node in reversed(range(first)) if names[node].startswith("triton_"))
    assert ("scaled_dot_product" in names[kernel]) == (not recomputed)


def test_other_backends_of_compile_are_captured_eager_and_noted(tmp_path):
    path = script(tmp_path, COMPILED.replace("BACKEND", "'aot_eager'"))
    graph = capture(path, tmp_path / "trace.et")
    operators = {graph.strings[int(code)] for code in graph.nodes.op}
    assert {"aten::addmm", "aten::gelu", "aten::_fused_adamw_"} <= operators
    note_of(graph.job.measurement.notes, "compile-backend-eager", "aot_eager")


SKIPPED = """
    import torch

    class Scaler(torch.amp.GradScaler):
        calls = 0

        def _maybe_opt_step(self, *args, **kwargs):
            self.calls += 1
            return None if self.calls % 2 else super()._maybe_opt_step(*args, **kwargs)

    model = torch.nn.DataParallel(torch.nn.Linear(8, 8)).to("cuda")
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), Scaler("cuda")
    for step in range(20):
        rows = torch.randn(4 if step % 2 else 6, 8)
        scaler.scale(model(rows).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
"""


def test_a_skipped_step_is_not_recorded(tmp_path):
    """Steps 2, 4 and 6 train: the last is recorded. The skipped ones have inputs of six rows."""
    graph = capture(script(tmp_path, SKIPPED), tmp_path / "trace.et", "--like", "H100")
    operators = [graph.strings[int(code)] for code in graph.nodes.op]
    assert operators.count("aten::addmm") == 1
    (forward,) = np.flatnonzero([name == "aten::addmm" for name in operators])
    assert graph.strings[int(graph.nodes.input_shapes[forward])].startswith("[[8],[4,8],[8,8]")
    (note,) = (note for note in graph.job.measurement.notes if note.code == "steps-skipped")
    assert str(note).startswith("3 of 6 steps")


CRITIC_AND_GENERATOR = """
    import torch
    critic, generator = (torch.nn.Linear(8, 8, device="cuda") for _ in range(2))
    optimizers = [torch.optim.SGD(m.parameters()) for m in (critic, generator)]
    for step in range(12):
        critic(generator(torch.randn(2, 8, device="cuda"))).sum().backward()
        optimizers[step % 4 == 3].step()
"""


@pytest.mark.parametrize(("together", "products"), [(1, 5), (3, 20)])
def test_an_optimizer_without_a_step_is_noted(together, products, tmp_path):
    """The critic's optimizer takes all of the three steps, or three of four within each."""
    path = script(tmp_path, CRITIC_AND_GENERATOR)
    graph = capture(path, tmp_path / "trace.et", "--optimizer-steps", together)
    notes = graph.job.measurement.notes
    assert sum(name in ("aten::mm", "aten::addmm") for name in graph.text("op")) == products
    if together == 1:
        note_of(notes, "optimizer-idle", "SGD of 72 parameters")
    else:
        assert not has_note(notes, "optimizer-idle")


DATA_DEPENDENT = """
    import torch
    model = torch.nn.Linear(8, 8, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(20):
        rows = model(torch.randn(4, 8, device="cuda"))
        rows = rows[rows.sum(1) > 0]
        rows.sum().backward()
        optimizer.step()
"""


STEP = """
    import torch
    model = torch.nn.Linear(8, 8, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    INPUT
    model(rows).sum().backward()
    optimizer.step()
"""

NESTED = "rows = torch.nested.nested_tensor([torch.randn(n, 8) for n in (3, 5)]).cuda()"
NESTED_ON_GPU = NESTED.replace(").cuda()", ", device='cuda')")


FAILS_BY_PLACEHOLDER = "rows = torch.ones(4, 8)[:, int(model.weight.max()) :].cuda()"

TOO_LARGE_FOR_CPU = "torch._aminmax(torch.ones(1 << 29, device='cuda'), 0)"

SOLVER = """rows = torch.randn(4, 8, device='cuda')
    while not model(rows).norm() < 1e-3:
        rows = rows / 2"""


@pytest.mark.parametrize(
    ("text", "options", "code"),
    [
        (DATA_DEPENDENT, (), "no-device-value"),
        (STEP.replace("INPUT", SOLVER), (), "no-device-endless-loop"),
        (STEP.replace("INPUT", FAILS_BY_PLACEHOLDER), (), "script-raised"),
        (STEP.replace("INPUT", TOO_LARGE_FOR_CPU), (), "no-device-operator"),
        (STEP.replace("INPUT", NESTED), (), "no-device-nested"),
        (STEP.replace("INPUT", NESTED_ON_GPU), (), "no-device-nested"),
        (
            STEP.replace("INPUT", "rows = torch.randn(4, 8).to('cuda:1')"),
            (),
            "no-device-second-gpu",
        ),
        (DATA_DEPENDENT, ("--like", "H1000"), "gpu-unknown"),
        (DATA_DEPENDENT, ("--dp", 2, "--busbw-gb-s", 300), "no-device-network"),
        (DATA_DEPENDENT, ("--ep", 2, "--moe-routing", "model"), "no-device-routing"),
    ],
)
def test_bad_input_names_its_place(text, options, code, tmp_path):
    path = script(tmp_path, text)
    done = run_command(
        "capture", "run", path, "--device", "none", *options, "-o", tmp_path / "t.et"
    )
    assert done.returncode == 2
    assert f"error[{code}]" in done.stderr
    assert not (tmp_path / "t.et").exists()
    if code == "no-device-value":
        assert "train.py:7" in done.stderr
    if code in ("no-device-nested", "no-device-second-gpu"):
        assert "train.py:5" in done.stderr
    if code == "script-raised":
        assert "train.py:5 read 1" in done.stderr
    if code == "no-device-endless-loop":
        assert "train.py:6" in done.stderr


def test_a_script_in_a_directory_with_the_name_of_a_package(tmp_path):
    """Its checks pass, and its endless loops end, as in any other directory."""
    for package in ("onerank", "torch"):
        directory = tmp_path / package
        directory.mkdir()
        checked = SOLVER.replace("while", "assert (model(rows) > 0).all()\n    while")
        path = script(directory, STEP.replace("INPUT", checked))
        done = run_command(
            "capture", "run", path, "--device", "none", "-o", tmp_path / f"{package}.et"
        )
        assert done.returncode == 2
        assert "error[no-device-endless-loop]" in done.stderr
        assert "train.py:7" in done.stderr


def test_too_few_steps_are_counted_without_windows(tmp_path):
    """There is no warm-up without a device; its option would not help."""
    path = script(
        tmp_path, COMPILED.replace("BACKEND", "'aot_eager'").replace("range(20)", "range(5)")
    )
    options = ("--device", "none", "--optimizer-steps", 2, "--warm-up", 3)
    done = run_command("capture", "run", path, *options, "-o", tmp_path / "t.et")
    assert done.returncode == 2
    assert "error[script-too-few-steps]" in done.stderr
    assert "5 optimizer steps" in done.stderr
    assert "at least 6" in done.stderr
    assert "--optimizer-steps" in done.stderr
    assert "--warm-up" not in done.stderr


def test_launches_by_class_and_their_time_are_those_of_the_device(llama_8b, on_h200):
    """Within 2%; a class also by two, of kernels that the versions of the software add or drop."""
    predicted = onerank.recost(llama_8b, "H200")
    classes: list[Counter[int]] = []
    for graph in (predicted, on_h200):
        index = np.flatnonzero(graph.gpu_compute)
        classes.append(Counter(classify(graph, index).tolist()))
    here, there = classes
    assert (here.total(), there.total()) == (850, 850)
    for code in {*here, *there}:
        assert abs(here[code] - there[code]) <= max(2, 0.02 * there[code]), CLASSES[code]
    for name, launches in (("optimizer", 184), ("attention", 24), ("memset", 101)):
        code = CLASSES.index(OpClass(name))
        assert here[code] == there[code] == launches
    times = [int(g.nodes.duration_ns[g.gpu_compute].sum()) for g in (predicted, on_h200)]
    assert times[0] == pytest.approx(times[1], rel=0.02)


IN_32_BITS = """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes)).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(20):
        tokens = torch.randint(0, 64, (1, 64), device="cuda")
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_attention_of_32_bits_is_memory_efficient(tmp_path):
    graph = capture(script(tmp_path, IN_32_BITS), tmp_path / "trace.et", "--cp", 2)
    operators = Counter(graph.strings[int(code)] for code in graph.nodes.op)
    # Rank 0 of two has the first and the last quarter of the tokens, and attends for each of them.
    assert operators["aten::_efficient_attention_forward"] == 2
    assert operators["aten::_efficient_attention_backward"] == 2
    costs = op_costs_of(graph)
    flops = Counter[str]()
    for node, count in zip(costs.index.tolist(), costs.flops.tolist(), strict=True):
        flops[graph.strings[int(graph.nodes.op[node])]] += count
    # five products of the same sizes after two
    forward = flops["aten::_efficient_attention_forward"]
    assert flops["aten::_efficient_attention_backward"] == 2.5 * forward > 0


def test_fewer_layers_of_a_sharded_model_give_the_whole_capture(tmp_path):
    options = ("--dp", 4, "--fsdp")
    whole, deep = (
        capture(EXAMPLES / "train_llama.py", tmp_path / name, *options, *more, args=("--layers", 4))
        for name, more in (("whole.et", ()), ("deep.et", ("--capture-layers", "2,3")))
    )
    assert len(deep) == len(whole)
    assert collectives(deep) == collectives(whole)
    assert flops_by_operator(deep) == flops_by_operator(whole)
    assert Counter(deep.nodes.stream.tolist()) == Counter(whole.nodes.stream.tolist())
    peaks = [onerank.memory(graph).peak_bytes for graph in (deep, whole)]
    assert peaks[0] == peaks[1]


KEPT = """
    import torch
    weight = torch.nn.Parameter(torch.ones(1 << 20, device="cuda"))  # 4 MiB
    optimizer = torch.optim.SGD([weight], lr=0.1)
    evaluated = torch.ones(64 << 18, device="cuda")  # 64 MiB
    del evaluated
    {before}
    for step in range(5):
        ((weight * 2) ** 2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        print(torch.cuda.memory_reserved(), torch.cuda.memory_allocated())
"""
_MIB = 1 << 20
LIMITED = (
    "torch.cuda.set_per_process_memory_fraction((100 << 20) / torch.cuda.mem_get_info()[1]); "
    "torch.ones(70 << 18, device='cuda')"
)


@pytest.mark.parametrize(
    ("before", "settings", "reserved"),
    [
        # A segment of 20 MiB of the parameter, the evaluation's, and one of small blocks. The
        # gradient and results are parts of the evaluation's.
        ("", "", (20 + 64 + 2) * _MIB),
        # All five blocks of the step are parts of the parameter's segment.
        ("torch.cuda.empty_cache()", "", (20 + 2) * _MIB),
        # The evaluation's block serves no smaller request.
        ("", "max_split_size_mb:32", (20 + 64 + 2) * _MIB),
        ("", "expandable_segments:True", (80 + 2) * _MIB),
        ("", "large_segment_size_mb:12", (12 + 64 + 2) * _MIB),
        # Without a limit, torch collects nothing.
        ("", "garbage_collection_threshold:0.8,backend:native", (20 + 64 + 2) * _MIB),
        ("", "garbage_collection_threshold:0.8,per_process_memory_fraction:0.5", 86 * _MIB),
        # The limit has no room for 70 MiB next to the evaluation's segment, which is freed.
        (LIMITED, "", (20 + 70 + 2) * _MIB),
        ("torch.cuda.set_per_process_memory_fraction(1.0)", "", (20 + 64 + 2) * _MIB),
    ],
)
def test_reserved_memory_follows_the_whole_process(
    before, settings, reserved, tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(KEPT.format(before=before)))
    trace = tmp_path / "trace.et"
    done = run_command("capture", "run", script, "--device", "none", "-o", trace)
    assert done.returncode == 0, done.stderr
    graph = onerank.read(trace)
    log = graph.job.measurement.memory
    assert log.reserved_bytes == reserved
    assert f"{reserved} {4 * _MIB}" in done.stderr + done.stdout
    expected = {"max_split_bytes": 32 * _MIB} if "split" in settings else {}
    expected |= {"expandable_segments": True} if "expandable" in settings else {}
    expected |= {"large_segment_bytes": 12 * _MIB} if "large" in settings else {}
    assert (log.settings or AllocatorSettings()) == AllocatorSettings(**expected)
    noted = has_note(graph.job.measurement.notes, "alloc-conf-not-simulated", 0.8)
    assert noted == ("fraction" in settings)


@pytest.mark.parametrize(
    ("text", "divisions"),
    [
        ("roundup_power2_divisions:4", (4,) * 16),
        ("backend:native, roundup_power2_divisions:[2:8,4:2,>:1]", (8, 8, 2, *[1] * 13)),
    ],
)
def test_settings_of_the_allocator_are_those_of_the_environment(text, divisions):
    assert settings_in(text).roundup_divisions == divisions


@pytest.mark.parametrize(
    "setting",
    [
        "max_split_size_mb:many",
        "expandable_segments:1",
        "roundup_power2_divisions:[256:3]",
        "large_segment_size_mb:10",
        "per_process_memory_fraction:half",
        "per_process_memory_fraction:1.5",
    ],
)
def test_a_malformed_setting_of_the_allocator_is_an_error(setting, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", f"backend:native,{setting}")
    (tmp_path / "train.py").write_text(textwrap.dedent(KEPT.format(before="")))
    trace = tmp_path / "trace.et"
    done = run_command("capture", "run", tmp_path / "train.py", "--device", "none", "-o", trace)
    assert done.returncode == 2
    assert "error[alloc-conf-malformed]" in done.stderr
    assert setting in done.stderr
    assert not trace.exists()

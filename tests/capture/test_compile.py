"""`capture run --compile`: eager and compiled side by side, on a CPU with kernels in C++."""

import json
import shutil
import subprocess
import textwrap
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest
from own_process import COMPILED_IN_TURN, run_command

import onerank
from onerank.analysis.summary import summarise
from onerank.capture.compiled_kernels import sub_module, with_compilation
from onerank.ir import (
    COMPILED_GRAPH,
    GeneratedKernel,
    Graph,
    GraphBuilder,
    Job,
    Kind,
    Phase,
    Reason,
)

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_llama.py"


# Kernels in plain loops: with vectorised ones, four such tests took 93 s of CPU instead of 80 s.
# Each capture would also compile and load test programs of vector instructions.
PLAIN_LOOPS = {
    "ATEN_CPU_CAPABILITY": "default",
    "TORCHINDUCTOR_DEBUG_COMPILE": "1",
    "TORCHINDUCTOR_VEC_ISA_OK": "0",
}


def run(*args: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command, which forks; `tests/test_api.py` compiles in fresh interpreters."""
    environment = {**COMPILED_IN_TURN, **PLAIN_LOOPS}
    return run_command("capture", "run", *args, environment=environment, forks=True)


@pytest.fixture(scope="module", autouse=True)
def _quick_linker(tmp_path_factory: pytest.TempPathFactory) -> Generator[None]:
    """Let g++ link with gold, if it is there: a kernel takes 0.9 s of CPU instead of 1.3 s."""
    gold = shutil.which("ld.gold")
    if gold is None:
        yield
        return
    directory = tmp_path_factory.mktemp("linker")
    (directory / "ld").symlink_to(gold)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPILER_PATH", str(directory))  # where g++ looks for `ld`
        yield


@pytest.fixture(scope="module")
def captured(tmp_path_factory) -> tuple[Graph, Graph, Path]:
    """The eager and the compiled graph of rank 0 of TP=2, and where the latter lies."""
    trace = tmp_path_factory.mktemp("compile") / "trace.et"
    # No instrument of the capture may have dynamo compile the same code again.
    script = tmp_path_factory.mktemp("script") / EXAMPLE.name
    setting = "__import__('torch._dynamo')._dynamo.config.error_on_recompile = True"
    text = EXAMPLE.read_text().replace("import torch\n", f"import torch\n{setting}\n", 1)
    script.write_text(text)
    assert setting in script.read_text()
    options = ["--tp", "2", "--compile", "--warm-up", "2", "--timed-steps", "2", "-o", trace]
    done = run(script, *options, "--", "--layers", "2", "--seq", "16", "--batch", "1")
    assert done.returncode == 0, done.stderr
    assert "Generated kernels" in done.stdout
    assert sorted(p.name for p in trace.parent.iterdir()) == ["trace.eager.et", "trace.et"]
    return onerank.read(trace.with_suffix(".eager.et")), onerank.read(trace), trace


def products(graph: Graph) -> Counter[tuple[str, Phase]]:
    """Matrix products by module and phase; those of one column and one row torch may multiply."""
    return Counter(
        (node.text("module"), node.phase)
        for node in graph
        if node.name in ("aten::mm", "aten::bmm")
        and json.loads(node.text("input_shapes"))[0][-1] > 1
    )


def test_every_matrix_product_keeps_its_module(captured):
    eager, compiled, _ = captured
    assert products(compiled) == products(eager)
    assert products(compiled)["model.layers.1.mlp.down_proj", Phase.BACKWARD] == 2


def test_collectives_stay_what_they_were(captured):
    eager, compiled, _ = captured
    assert summarise(compiled).collectives == summarise(eager).collectives
    places = Counter(node.text("module") for node in compiled if node.kind is Kind.COLLECTIVE)
    assert places.total() == 13  # 4 a layer, 5 at the ends
    assert places["model.layers.1.mlp.down_proj"] == places["lm_head"] == 1


def test_generated_kernels_name_what_they_stand_for(captured):
    _, compiled, _ = captured
    done = compiled.job.compilation
    assert (done.mode, done.graphs, done.unknown_ops, done.shared_ops) == ("default", 2, 0, 0)
    activation = next(
        kernel for kernel in done.fusions if set(kernel.operators) == {"aten.silu", "aten.mul"}
    )
    assert activation.operators == {"aten.silu": 2, "aten.mul": 2}  # one of each per layer
    assert activation.modules == ("model.layers.*.mlp",)
    assert (activation.phase, activation.launches) == ("forward", 2)
    assert activation.time_ns > 0
    modules = {node.text("module") for node in compiled}
    assert not any(module.startswith(COMPILED_GRAPH) for module in modules)
    assert {"LlamaForCausalLM", "model.norm", "model.layers.0.self_attn"} <= modules


def test_time_by_sub_module_adds_up(captured):
    eager, compiled, _ = captured
    rows = compiled.job.compilation.modules
    assert sum(row.eager_ns for row in rows) == summarise(eager).compute_time_ns
    assert sum(row.compiled_ns for row in rows) == summarise(compiled).compute_time_ns
    norm = next(row for row in rows if row.module == "model.norm")
    assert norm.compiled_ops < norm.eager_ops


def test_show_prints_the_comparison(captured):
    shown = run_command("show", captured[2]).stdout
    assert "Compute by sub-module, eager and compiled" in shown
    assert "2 silu" in shown
    output = json.loads(run_command("show", captured[2], "--json").stdout)
    assert output["compilation"]["mode"] == "default"


def script(directory: Path, text: str) -> Path:
    path = directory / "train.py"
    path.write_text(textwrap.dedent(text))
    return path


def test_a_script_that_compiles_by_itself_is_left_to_it(tmp_path):
    path = script(
        tmp_path,
        """
        import torch
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
        optimizer = torch.optim.SGD(model.parameters())
        compiled = torch.compile(model)
        while True:
            compiled(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    )
    output = ("-o", tmp_path / "t.et", "--warm-up", "2", "--timed-steps", "2")
    done = run(path, "--compile", "max-autotune", *output)
    assert done.returncode == 0, done.stderr
    graph = onerank.read(tmp_path / "t.et")
    assert graph.job.compilation.mode == "the script's own"
    kernels = [
        kernel for kernel in graph.job.compilation.fusions if "aten.gelu" in kernel.operators
    ]
    assert kernels[0].modules == ("1",)
    eager = onerank.read(tmp_path / "t.eager.et")
    assert "aten::gelu" in {node.name for node in eager}
    assert not any("cpp_fused" in node.name for node in eager)


def test_a_container_of_torch_as_the_outermost_module_is_compiled(tmp_path):
    path = script(
        tmp_path,
        """
        import torch
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
        optimizer = torch.optim.SGD(model.parameters())
        while True:
            model(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    )
    done = run(path, "--compile", "-o", tmp_path / "t.et", "--warm-up", "2", "--timed-steps", "2")
    assert done.returncode == 0, done.stderr
    compilation = onerank.read(tmp_path / "t.et").job.compilation
    forward = [kernel for kernel in compilation.fusions if kernel.phase == "forward"]
    assert [(kernel.operators, kernel.modules) for kernel in forward] == [
        ({"aten.gelu": 1}, ("1",))
    ]


def test_layers_that_a_script_compiles_and_shards_keep_their_names(tmp_path):
    path = script(
        tmp_path,
        """
        import torch
        import torch.distributed as dist
        from torch import nn
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
        from torch.distributed.fsdp import fully_shard
        dist.init_process_group("gloo")
        mesh = dist.init_device_mesh("cpu", (4,))
        model = nn.Sequential(nn.Linear(8, 16), nn.Sequential(*(
            checkpoint_wrapper(nn.Sequential(nn.Linear(16, 16), nn.GELU())) for _ in range(2)
        )))
        for layer in model[1]:
            layer.compile(backend="aot_eager")
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters())
        while True:
            model(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    )
    done = run(path, "--dp", "4", "-o", tmp_path / "t.et", "--timed-steps", "2")
    assert done.returncode == 0, done.stderr
    graph = onerank.read(tmp_path / "t.et")
    kernel_counts = Counter(
        (node.text("module"), node.phase)
        for node in graph
        if node.name in ("aten::mm", "aten::addmm")
    )
    layers = ("1.0", "1.1")
    assert {key: count for key, count in kernel_counts.items() if key[0] in layers} == {
        **{(layer, Phase.FORWARD): 1 for layer in layers},
        **{(layer, Phase.BACKWARD): 3 for layer in layers},  # recomputed, and two gradients
    }
    assert {time.path for time in graph.job.measurement.scopes} >= set(layers)


def test_a_script_without_a_module_to_compile_is_refused(tmp_path):
    path = script(
        tmp_path,
        """
        import torch
        weight = torch.randn(8, 8, requires_grad=True)
        optimizer = torch.optim.SGD([weight])
        while True:
            (torch.randn(4, 8) @ weight).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    )
    done = run(path, "--compile", "-o", tmp_path / "t.et")
    assert done.returncode == 2
    assert "error[compile-no-kernel]" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["train.py"]


def kernel(name: str, *modules: str, called: bool = True) -> GeneratedKernel:
    operators = tuple("aten.add" for _ in modules)
    return GeneratedKernel(0, name, called, operators, modules)


CODE = [  # a layer's code, as Inductor orders it
    kernel("triton_poi_fused_add_0", "norm", "norm", called=False),
    kernel("triton_poi_fused_add_0", "norm", "norm"),
    kernel("extern_kernels.mm", "q"),
    kernel("extern_kernels.mm", "k"),
    kernel("torch.ops.aten._scaled_dot_product_flash_attention.default", "attention"),
    kernel("triton_poi_fused_add_1", "mlp"),
    kernel("triton_poi_fused_add_0", "last"),
    kernel("triton_red_fused_2", "mixed", called=False),  # Inductor does not report its call
]


def gpu_step(launches: list[tuple[str, list[str]]], *, replayed: bool = False) -> Graph:
    """Kernels of 10 ns in a compiled graph, by the operator that launched them."""
    builder = GraphBuilder()
    time = 0
    graph_launch = builder.add(name="CompiledFxGraph", op="CompiledFxGraph", kind=Kind.HOST_OP)
    for operator, kernels in launches:
        host = builder.add(name=operator, op=operator, kind=Kind.HOST_OP, module="compiled graph 0")
        for name in kernels:
            node = builder.add(
                name=name,
                op="CompiledFxGraph" if replayed else operator,
                kind=Kind.KERNEL,
                module="compiled graph 0",
                phase=Phase.FORWARD,
                start_ns=(time := time + 10),
                duration_ns=10,
            )
            builder.edge(graph_launch if replayed else host, node, Reason.LAUNCH)
    return builder.build(Job())


STEP = [
    ("triton_poi_fused_add_0", ["triton_poi_fused_add_0"]),
    ("aten::mm", ["gemm", "splitk_reduce"]),  # one product, two kernels
    ("aten::mm", ["gemm"]),
    ("aten::_flash_attention_forward", ["flash_fwd"]),
    ("triton_poi_fused_add_1", ["triton_poi_fused_add_1"]),
    ("triton_poi_fused_add_0", ["triton_poi_fused_add_0"]),
    ("triton_red_fused_2", ["triton_red_fused_2"]),
]


def modules_of(graph: Graph) -> list[str]:
    return [node.text("module") for node in graph if node.kind is Kind.KERNEL]


def test_kernels_are_matched_with_the_code_by_name_and_place():
    empty = GraphBuilder().build(Job())
    graph = with_compilation(empty, gpu_step(STEP * 2), CODE, "default")  # two micro-batches
    once = ["norm", "q", "q", "k", "attention", "mlp", "last", "mixed"]
    assert modules_of(graph) == once * 2
    done = graph.job.compilation
    assert (done.unknown_ops, done.shared_ops, done.graphs) == (0, 0, 1)
    assert {(f.kernel, f.launches, f.time_ns) for f in done.fusions} == {
        ("triton_poi_fused_add_0", 4, 40),
        ("triton_poi_fused_add_1", 2, 20),
        ("triton_red_fused_2", 2, 20),
    }
    hosts = [node.text("module") for node in graph if node.kind is Kind.HOST_OP]
    assert hosts[1:8] == ["norm", "q", "k", "attention", "mlp", "last", "mixed"]


def test_of_a_replayed_graph_indistinguishable_calls_share_their_time():
    empty = GraphBuilder().build(Job())
    graph = with_compilation(empty, gpu_step(STEP, replayed=True), CODE, "reduce-overhead")
    done = graph.job.compilation
    assert done.shared_ops == 4  # four kernels between two known ones, for three calls
    times = {row.module: row.compiled_ns for row in done.modules}
    assert sum(times.values()) == 80
    assert (times["norm"], times["mlp"], times["last"]) == (10, 10, 10)
    plain = [(op, kernels[-1:]) for op, kernels in STEP]  # without split-K there is one each
    done = with_compilation(
        empty, gpu_step(plain, replayed=True), CODE, "reduce-overhead"
    ).job.compilation
    assert (done.shared_ops, done.unknown_ops) == (0, 0)


def test_a_kernel_that_matches_nothing_is_counted():
    empty = GraphBuilder().build(Job())
    strange = [*STEP[:1], ("aten::fill_", ["fill"]), *STEP[4:5]]
    code = [kernel("triton_poi_fused_add_0", "norm"), kernel("triton_poi_fused_add_1", "mlp")]
    graph = with_compilation(empty, gpu_step(strange), code, "default")
    assert graph.job.compilation.unknown_ops == 1
    assert modules_of(graph) == ["norm", f"{COMPILED_GRAPH}0", "mlp"]


@pytest.mark.parametrize(
    ("module", "part"),
    [
        ("model.layers.11.self_attn.q_proj", "model.layers.*.self_attn"),
        ("model.layers.3", "model.layers.*"),
        ("transformer.h.0.mlp.c_fc", "transformer.h.*.mlp"),
        ("model.layers.2.mlp.experts.5.w1", "model.layers.*.mlp"),
        ("model.embed_tokens", "model.embed_tokens"),
        ("LlamaForCausalLM", "LlamaForCausalLM"),
        ("0.linear1", "0.linear1"),
    ],
)
def test_sub_modules(module, part):
    assert sub_module(module) == part


@pytest.mark.parametrize(
    ("other", "code"),
    [
        (["--record-real-job"], "compile-with-real-job"),
        (["--capture-layers", "1,2"], "compile-with-layers"),
    ],
)
def test_compiling_goes_with_nothing_else_that_runs_in_turn(tmp_path, other, code):
    done = run(EXAMPLE, "--compile", *other, "-o", tmp_path / "t.et")
    assert done.returncode == 2
    assert f"error[{code}]" in done.stderr
    assert list(tmp_path.iterdir()) == []

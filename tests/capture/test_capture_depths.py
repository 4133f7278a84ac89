"""A model captured with few layers and extrapolated, against the same model captured whole."""

import gc
import json
import textwrap
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from job_options import axes
from notes import has_note, note_of
from own_process import run_command
from raised import raises_code

import onerank
from onerank.analysis.summary import summarise
from onerank.capture import Options, WindowPlan, capture, capture_at_depths
from onerank.capture.parallelize.fewer_layers import Depth
from onerank.converters.expand.layers import Pattern, extrapolate
from onerank.converters.targets.astra_sim.check import check
from onerank.ir import Evidence, Graph, World
from onerank.ir.errors import DepthError

PLAN = WindowPlan(warm_up=1, timed_steps=1)

WHOLE = 6

NUMBER_BYTES = 8
"""A number that Python passes to an operator, recorded for the operator before it.

The last operator of the optimizer's loop has none, so copies of a loop that ends with a layer's
parameter lack one.
"""

SCRIPT = """
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.{kind}Config(
        **{{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6,
           "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, **{changes}}})
    model = transformers.{model}ForCausalLM(config)
    {prepare}
    optimizer = torch.optim.AdamW({groups}, **{optimizer})
    while True:
        for _ in range({batches}):
            tokens = torch.randint(0, 128, (2, 16))
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
"""

CHECKPOINT = "model.train().gradient_checkpointing_enable({'use_reentrant': False})"

TAKES_TURNS = {"head_dim": 16, "sliding_window": 8}

LATENT = {
    "num_key_value_heads": 4, "first_k_dense_replace": 1, "moe_intermediate_size": 32,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}  # fmt: skip


def write(directory: Path, kind: str = "Llama", **script_options: Any) -> Path:
    path = directory / "train.py"
    text = textwrap.dedent(SCRIPT).format(
        kind=kind,
        model=kind.removesuffix("Text"),
        changes=script_options.get("changes", {}),
        prepare=script_options.get("prepare", ""),
        optimizer=script_options.get("optimizer", {}),
        batches=script_options.get("batches", 1),
        groups=script_options.get("groups", "model.parameters()"),
    )
    path.write_text(text)
    return path


def at(script: Path, layers: tuple[int, ...], count: int, **options: Any) -> Any:
    gc.collect()  # lest what an earlier capture left is freed during this one
    return capture(script, [], Options(windows=PLAN, depth=Depth(count, layers), **options))


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, ...], tuple[int, int]]] = {
    "transformers' flavour, checkpointed, foreach": (
        {"prepare": CHECKPOINT, "optimizer": {"foreach": True}},
        {"tp": 2, "tp_style": "hf"},
        (2, 4),
        (0, 1),
    ),
    "layers that take turns, fused": (
        {"kind": "Gemma3Text", "optimizer": {"fused": True},
         "changes": {**TAKES_TURNS, "layer_types": ["sliding_attention", "full_attention"] * 3}},
        {},
        (2, 4),
        (0, 2),
    ),
    "sharded states, fetched ahead of two layers": (
        {},
        {"dp": 2, "fsdp": True},
        (2, 4),
        (0, 1),
    ),
    "buckets of gradients that span layers": (
        {"changes": {"hidden_size": 256, "intermediate_size": 2048}},
        {"dp": 2, "ddp": True},
        (2, 4),
        (0, 1),
    ),
    "flat buffers of gradients, summed once a step": (
        {"batches": 2, "groups": "[{'params': [p for p in model.parameters() if p.ndim > 1]}, "
         "{'params': [p for p in model.parameters() if p.ndim == 1]}]"},
        {"dp": 4, "zero": 1},
        (2, 4),
        (0, 1),
    ),
    "a flat buffer of gradients, summed within the first layer's backward": (
        {"groups": "[{'params': list(model.parameters())[1:]}]"},
        {"dp": 4, "zero": 2},
        (2, 3),
        (0, 1),
    ),
    "a dense layer before the experts": (
        {"kind": "DeepseekV3", "changes": LATENT},
        {},
        (2, 4),
        (1, 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_an_extrapolated_step_is_the_step_captured_whole(tmp_path, case):
    script_options, options, layers, pattern = CASES[case]
    script = write(tmp_path, **script_options)
    extrapolated, whole = extrapolated_and_whole(script, options, layers, WHOLE, Pattern(*pattern))
    compare(extrapolated, whole, layers, WHOLE)
    extrapolated.write(tmp_path / "made.et")
    assert check(tmp_path / "made.et") == []
    assert onerank.read(tmp_path / "made.et").job == extrapolated.job


STAGES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, ...], int, tuple[int, int]]] = {
    "the first of two, with the embedding": (
        {"batches": 2, "changes": {"num_hidden_layers": 11}},
        {"tp": 2, "pp": 2, "rank": 0},
        (2, 4),
        6,
        (0, 1),
    ),
    "the last of two, uneven, with the head, sharded sequence": (
        {"batches": 2, "changes": {"num_hidden_layers": 11}},
        {"tp": 2, "pp": 2, "rank": 2, "sp": True},
        (2, 4),
        5,
        (0, 1),
    ),
    "an inner one of four, by --pp-layers, checkpointed, foreach": (
        {"prepare": CHECKPOINT, "optimizer": {"foreach": True},
         "changes": {"num_hidden_layers": 9}},
        {"pp": 4, "rank": 1, "pp_layers": (1, 6, 1, 1)},
        (2, 4),
        6,
        (0, 1),
    ),
    "the last of four, sharded states": (
        {"batches": 2, "changes": {"num_hidden_layers": 9}},
        {"dp": 2, "pp": 4, "rank": 6, "pp_layers": (1, 1, 1, 6),
         "fsdp": True},
        (2, 4),
        6,
        (0, 1),
    ),
    "an embedding tied to the head": (
        {"batches": 2, "changes": {"num_hidden_layers": 7, "tie_word_embeddings": True}},
        {"pp": 2, "rank": 1, "pp_layers": (2, 5)},
        (2, 4),
        5,
        (0, 1),
    ),
    "buckets of gradients": (
        {"changes": {"num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 2048}},
        {"dp": 2, "pp": 2, "rank": 2, "pp_layers": (2, 6), "ddp": True},
        (2, 4),
        6,
        (0, 1),
    ),
    "layers that take turns, from an odd one": (
        {"kind": "Gemma3Text",
         "changes": {**TAKES_TURNS, "num_hidden_layers": 9, "layer_types":
                     [*["sliding_attention", "full_attention"] * 4, "sliding_attention"]}},
        {"pp": 2, "rank": 1, "pp_layers": (3, 6)},
        (2, 4),
        6,
        (0, 2),
    ),
    "experts behind a dense layer of the stage before": (
        {"kind": "DeepseekV3", "changes": {**LATENT, "num_hidden_layers": 7}},
        {"pp": 2, "rank": 1, "pp_layers": (2, 5)},
        (2, 4),
        5,
        (0, 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STAGES)
def test_an_extrapolated_stage_is_the_stage_captured_whole(tmp_path, case):
    script_options, options, layers, depth, pattern = STAGES[case]
    script = write(tmp_path, **script_options)
    extrapolated, whole = extrapolated_and_whole(script, options, layers, depth, Pattern(*pattern))
    compare(extrapolated, whole, layers, depth, NUMBER_BYTES)
    assert extrapolated.job.pipeline == whole.job.pipeline
    assert extrapolated.job.classes == whole.job.classes
    extrapolated.write(tmp_path / "made.et")
    assert onerank.read(tmp_path / "made.et").job == extrapolated.job


def test_a_shard_of_the_optimizer_grows_with_the_layers_of_the_stage(tmp_path):
    # A quarter of 2, 4 and 6 layers holds parts of 5, 9 and 14 parameters, which are on no line.
    script = write(tmp_path, batches=2, changes={"num_hidden_layers": 8})
    stage = {"dp": 4, "pp": 3, "rank": 4, "pp_layers": (1, 6, 1)}
    options = {**stage, "zero": 1}
    extrapolated, whole = extrapolated_and_whole(script, options, (2, 4), 6, Pattern(0, 1))
    assert calls(extrapolated) == calls(whole)
    difference = (nodes(extrapolated) - nodes(whole)) + (nodes(whole) - nodes(extrapolated))
    assert {key[1] for key in difference} == {"aten::linalg_vector_norm", "aten::cat"}
    assert len(whole) - len(extrapolated) == 5
    note_of(extrapolated.job.measurement.notes, "extrapolated-operators-unmatched", 4)


def test_a_stage_of_too_few_layers_is_refused_by_name(tmp_path):
    script = write(tmp_path, changes={"num_hidden_layers": 8})
    options = {"pp": 2, "rank": 1, "pp_layers": (5, 3)}
    with raises_code("layers-too-deep"):
        at(script, (2, 4), 2, **options)
    with raises_code("pp-layers-malformed"):
        at(script, (2, 4), 2, **{**options, "pp_layers": (5, 4)})


def test_stages_of_a_script_that_distributes_itself_are_refused(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("raise AssertionError('the script ran')")
    options = Options(pp=2, depth=Depth(2, (2, 4)), torchrun=True)
    with raises_code("layers-with-own-pipeline"):
        capture(script, [], options)


def extrapolated_and_whole(
    script: Path, options: dict[str, Any], layers: tuple[int, ...], depth: int, pattern: Pattern
) -> tuple[Graph, Graph]:
    captures = {count: at(script, layers, count, **options) for count in layers}
    assert {captured.layers.depth for captured in captures.values()} == {depth}
    assert {captured.layers.pattern for captured in captures.values()} == {pattern}
    graphs = {n: in_steps_of(captured.graph, (9 - n) * 10**6) for n, captured in captures.items()}
    extrapolated = extrapolate(graphs, depth, pattern)
    gc.collect()
    return extrapolated, capture(script, [], Options(windows=PLAN, **options)).graph


def compare(
    extrapolated: Graph, whole: Graph, layers: tuple[int, ...], depth: int, above_bytes: int = 0
) -> None:
    assert nodes(extrapolated) == nodes(whole)
    assert calls(extrapolated) == calls(whole)
    assert edges(extrapolated) == edges(whole)
    assert extrapolated.job.modules == whole.job.modules
    scopes, expected_scopes = extrapolated.job.measurement.scopes, whole.job.measurement.scopes
    assert {(s.path, s.phase): s.calls for s in scopes} == {
        (s.path, s.phase): s.calls for s in expected_scopes
    }
    summary, expected = summarise(extrapolated), summarise(whole)
    assert (summary.flops, summary.bytes) == (expected.flops, expected.bytes)
    # the rise, since other tests of this process leave live tensors behind
    rise, expected_rise = (t.peak_memory_bytes - t.start_memory_bytes for t in (summary, expected))
    assert rise == pytest.approx(expected_rise, rel=1e-4)
    assert blocks(extrapolated, above_bytes) == blocks(whole, above_bytes)

    falls = "step time", 1_000_000
    assert has_note(extrapolated.job.measurement.notes, "extrapolated-time-falls", *falls)
    depths = extrapolated.job.measurement.depths
    assert depths is not None
    assert depths.comm_bytes.at_depth == expected_bytes(whole)
    assert depths.comm_bytes.at_depth == expected_bytes(extrapolated)
    assert (depths.module, depths.depth) == ("model.layers", depth)
    assert depths.copied == depth - layers[-1]
    added = extrapolated.job.measurement.activation_bytes
    assert added == pytest.approx(whole.job.measurement.activation_bytes, rel=1e-4)


def in_steps_of(graph: Graph, step_ns: int) -> Graph:
    measured = msgspec.structs.replace(graph.job.measurement, step_ns=(step_ns,))
    return replace(graph, job=msgspec.structs.replace(graph.job, measurement=measured))


def nodes(graph: Graph) -> Counter[Any]:
    return Counter(
        (node.kind, node.name, node.phase, node.value("micro_batch"), node.text("module"),
         node.text("input_shapes"), node.text("input_types"), node.text("output_shapes"))
        for node in graph
    )  # fmt: skip


def calls(graph: Graph) -> list[Any]:
    """The communication calls in the order in which they must run."""
    order = [graph.node(index) for index in graph.topological_order().tolist()]
    return [
        (node.collective, node.value("comm_bytes"), node.text("group"), node.text("module"))
        for node in order
        if node.kind.is_communication
    ]


def edges(graph: Graph) -> Counter[Any]:
    def what(index: int) -> tuple[str, str]:
        return graph.node(index).name, graph.node(index).text("module")

    return Counter(
        (what(source), what(target), reason)
        for target in range(len(graph))
        for source, reason in graph.edges.of(target)
    )


def blocks(graph: Graph, above_bytes: int = 0) -> Counter[Any]:
    """The blocks that the step allocates, by what they are for and who does."""
    log = graph.job.measurement.memory
    assert log is not None
    logged, node = log.blocks, {int(id_): place for place, id_ in enumerate(graph.nodes.id)}
    columns = (logged.bytes, logged.memory_class, logged.phase, logged.node, logged.allocated_at)
    return Counter(
        (size, kind, phase, graph.node(node[id_]).name, graph.node(node[id_]).text("module"))
        for size, kind, phase, id_, allocated_at in zip(*columns, strict=True)
        if allocated_at >= 0 and size > above_bytes
    )


def expected_bytes(graph: Graph) -> int:
    return int(graph.nodes.comm_bytes[graph.communication].sum())


def test_the_command_runs_each_depth_and_tells_the_lines(tmp_path):
    script, trace = write(tmp_path), tmp_path / "trace.et"
    more = ["--warm-up", "1", "--timed-steps", "1", "--raw-dir", tmp_path / "raw"]
    done = run_command("capture", "run", script, "--capture-layers", "1,2,3", *more, "-o", trace)
    assert done.returncode == 0, done.stderr
    for built in ("1 layer", "2 layers", "3 layers"):
        assert f"· {built}: linking the traces" in done.stderr
    assert sorted(p.name for p in (tmp_path / "raw").iterdir()) == [
        *("1-layers", "2-layers", "3-layers")
    ]
    graph = onerank.read(trace)
    depths = graph.job.measurement.depths
    assert depths is not None
    assert depths.layers == (1, 2, 3)
    peaks = depths.peak_memory_bytes
    assert peaks.residual is not None
    assert peaks.residual < 1e-3
    parameters = 2 * 128 * 64 + 64 + 6 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64)
    start = graph.job.measurement.start_memory_bytes  # weights, gradients, two moments; fp32
    assert start == pytest.approx(4 * 4 * parameters, rel=0.005)
    assert graph.job.measurement.step_ns == ()
    codes = set(graph.nodes.evidence.tolist())
    assert codes == {Evidence.MEASURED, Evidence.EXTRAPOLATED}
    show = run_command("show", trace).stdout
    assert show.splitlines()[0] == str(trace)
    for part in (
        "Depths captured of model.layers, and the lines through them",
        "line at 6",
        "largest residual",
        "3 of 6 layers",
        "extrapolated to 6 layers from captures with 1, 2 and 3: 3 layers of model.layers",
    ):
        assert part in show, show
    output = json.loads(run_command("show", trace, "--json").stdout)
    assert output["depths"]["peak_memory_bytes"]["values"] == list(peaks.values)
    assert output["evidence"]["extrapolated"] > 0


UNLIKE = {**LATENT, "first_k_dense_replace": 5}

REFUSED: dict[str, tuple[dict[str, Any], tuple[int, ...], str, str]] = {
    "more layers than the model has": (
        {}, (2, 16), "layers-too-deep", "LlamaForCausalLM has 6 layers"),
    "half a period": (
        {"kind": "Gemma3Text",
         "changes": {**TAKES_TURNS, "layer_types": ["sliding_attention", "full_attention"] * 3}},
        (1, 3), "depth-capture-layers", "every 2, and 1"),
    "no layer between others": (
        {}, (1, 2), "depth-capture-layers", "\n  try --capture-layers 2,3"),
    "layers that are all unlike the last": (
        {"kind": "DeepseekV3", "changes": UNLIKE}, (2, 4),
        "layers-not-repeating", "layer 5 differs from layer 4 in mlp (DeepseekV3MoE"),
    "an encoder and a decoder": (
        {"prepare": "transformers.T5ForConditionalGeneration(transformers.T5Config())"},
        (2, 4), "layers-encoder-decoder", "T5ForConditionalGeneration"),
    "two depths in one script": (
        {"prepare": "transformers.GPT2LMHeadModel(transformers.GPT2Config())"},
        (2, 4), "layers-two-depths", "LlamaForCausalLM of 6 layers and GPT2LMHeadModel of 12"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_extrapolated_is_refused_as_the_model_is_built(tmp_path, case):
    script_options, layers, code, name = REFUSED[case]
    with raises_code(code, naming=name):
        at(write(tmp_path, **script_options), layers, layers[0])


def test_a_script_of_its_own_modules_is_refused(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(8, 8)\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        "while True:\n"
        "    model(torch.randn(4, 8)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    with raises_code("layers-no-model"):
        at(script, (2, 4), 2)


@pytest.mark.parametrize(
    ("layers", "world", "code"),
    [
        ((0, 2), World(), "layers-below-one"),
        ((4, 2), World(), "layers-not-ascending"),
        ((2, 2), World(), "layers-not-ascending"),
        ((4,), World(), "layers-one-depth"),
    ],
)
def test_depths_that_make_no_line(tmp_path, layers, world, code):
    script = tmp_path / "train.py"
    script.write_text("raise AssertionError('the script ran')")
    with raises_code(code, DepthError):
        capture_at_depths(script, [], Options(**axes(world), windows=PLAN), layers)


def test_a_failure_at_one_depth_names_it_and_writes_nothing(tmp_path):
    script = write(tmp_path, prepare="assert config.num_hidden_layers != 1, 'one is too few'")
    more = ["--warm-up", "1", "--timed-steps", "1", "--raw-dir", tmp_path / "raw"]
    out = tmp_path / "trace.et"
    done = run_command("capture", "run", script, "--capture-layers", "1,3", *more, "-o", out)
    assert done.returncode == 2
    assert "error[script-raised]: at 1 layer: " in done.stderr
    assert "AssertionError after 0 optimizer steps: one is too few" in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["train.py"]

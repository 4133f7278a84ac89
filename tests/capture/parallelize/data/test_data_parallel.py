"""Data parallelism of a script without distributed code.

A captured Llama is compared with a script that calls DDP or FSDP2 itself, and with arithmetic.
"""

import importlib
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_parallel_job import calls, peak_above_start, run_text
from own_process import run_command
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

import onerank
from onerank.capture.parallelize.data import fsdp as fully_sharded
from onerank.ir import Collective, Graph, Phase, World

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning")

play = importlib.import_module(
    "onerank.capture.run_as_rank"
)  # the package has a function of that name
FORMS = ("ddp", "zero1", "zero2", "fsdp")

LLAMA = """
    import torch
    {imports}
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=256))
    {wrap}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(40):
        for micro in range({micro}):
            tokens = torch.randint(0, 256, (2, 16))
            {sync}
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        {clip}
        optimizer.step()
        optimizer.zero_grad()
"""
LAYER = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64
REST = 2 * 256 * 64 + 64  # embedding, head and last norm
PARAMETERS = 2 * LAYER + REST
CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"


def filled(**parts: Any) -> str:
    known = {"imports": "", "wrap": "", "micro": 1, "sync": "", "clip": "", **parts}
    return textwrap.dedent(LLAMA).format(**known)


def run(directory: Path, form: Any, world: World, **parts: Any) -> Graph:
    return run_text(directory, filled(**parts), form, world)


def operators(graph: Graph) -> list[str]:
    names = zip(graph.text("name"), graph.communication, strict=True)
    return [name for name, communicates in names if not communicates]


def phases_of(graph: Graph) -> list[tuple[Phase, int]]:
    """Return phase and micro-batch of each collective."""
    nodes = map(graph.node, np.flatnonzero(graph.communication).tolist())
    return [(node.phase, node.value("micro_batch")) for node in nodes]


DISTRIBUTED = {
    "ddp": {
        "imports": "import torch.distributed as dist\n"
        "from torch.nn.parallel import DistributedDataParallel",
        "wrap": "dist.init_process_group('gloo'); model = DistributedDataParallel(model)",
    },
    "fsdp": {
        "imports": "import torch.distributed as dist\n"
        "from torch.distributed.fsdp import fully_shard",
        # the model is on the CPU, also on a machine with a GPU
        "wrap": "dist.init_process_group('gloo'); mesh = dist.init_device_mesh('cpu', (4,)); "
        "[fully_shard(x, mesh=mesh) for x in [*model.model.layers, model]]",
    },
}


@pytest.mark.parametrize("form", DISTRIBUTED)
@pytest.mark.parametrize("changes", [{}, {"clip": CLIP, "micro": 3}], ids=["plain", "micro, clip"])
def test_collectives_match_a_script_that_distributes_itself(tmp_path, form, changes):
    explicit = dict(DISTRIBUTED[form])
    if "micro" in changes:
        explicit["sync"] = {
            "ddp": "model.require_backward_grad_sync = micro == 2",
            "fsdp": "model.set_requires_gradient_sync(micro == 2)",
        }[form]
    captured = run(tmp_path, form, World.of(dp=4), **changes)
    reference = run(tmp_path, None, World.of(dp=4), **changes, **explicit)
    assert calls(captured) == calls(reference)
    assert len(calls(captured)) > 0
    assert phases_of(captured) == phases_of(reference)
    assert operators(captured) == operators(reference)
    assert len(operators(captured)) > 400
    assert peak_above_start(captured) == pytest.approx(peak_above_start(reference), rel=1e-3)


# Weights created during sharding -----------------------------------------------------------------


@pytest.mark.parametrize("on_accelerator", [False, True], ids=["called", "built in place"])
def test_weights_created_block_by_block_give_the_same_step(tmp_path, monkeypatch, on_accelerator):
    """A model may exceed a GPU's memory; `on_accelerator` treats this CPU as a GPU."""
    whole: list[int] = []
    shard = fully_sharded.fully_shard

    def record_shard(part: nn.Module, **kwargs: Any) -> Any:
        parameters = {p for p in part.parameters() if not isinstance(p, DTensor)}
        assert not any(p.is_meta for p in parameters)
        whole.append(sum(p.numel() for p in parameters))
        return shard(part, **kwargs)

    monkeypatch.setattr(fully_sharded, "fully_shard", record_shard)
    monkeypatch.setattr(play, "has_accelerator", lambda: True)
    if on_accelerator:
        monkeypatch.setattr(fully_sharded, "on_accelerator", lambda _: True)
    captured = run(tmp_path, "fsdp", World.of(dp=4), clip=CLIP)
    assert whole == [LAYER, LAYER, REST]
    reference = run(tmp_path, None, World.of(dp=4), clip=CLIP, **DISTRIBUTED["fsdp"])
    assert calls(captured) == calls(reference)
    assert operators(captured) == operators(reference)
    assert peak_above_start(captured) == pytest.approx(peak_above_start(reference), rel=1e-3)


def test_deferred_weights_are_initialised_as_the_model_does():
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=256, tie_word_embeddings=True, initializer_range=0.5,
    )  # fmt: skip
    with fully_sharded.DeferredModels(lambda _: None).installed():
        model = LlamaForCausalLM(config)
        assert all(p.is_meta for p in model.parameters())
        assert not any(b.is_meta for b in model.buffers())
        model.to(torch.bfloat16)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert not any(
            p.is_meta for p in load_like_from_pretrained(LlamaForCausalLM, model).parameters()
        )
    fully_sharded.make_weights(model.model.layers[0], model)
    assert [p.is_meta for p in model.model.layers[1].parameters()] == [True] * 9
    fully_sharded.make_weights(model, model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (model.model.norm.weight == 1).all()
    assert model.model.layers[0].mlp.up_proj.weight.float().std().item() == pytest.approx(
        0.5, rel=0.1
    )


def load_like_from_pretrained(kind: Any, model: Any) -> Any:
    """Load a model with `from_pretrained`, from zero weights."""
    weights = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    return kind.from_pretrained(None, config=model.config, state_dict=weights)


def expected_calls(form: str, world: World, rank: int) -> list[tuple[str, int, tuple[int, ...]]]:
    """Return the calls of the data-parallel group, computed from the model's sizes in fp32."""
    ranks, tp = world.line("dp", rank), world.sizes.get("tp", 1)
    norms = 2 * 2 * 64 + 64
    parameter_bytes = (PARAMETERS - norms) // tp + norms
    layer, rest = (LAYER - 128) // tp + 128, (REST - 64) // tp + 64
    n = len(ranks)
    if form == "ddp":  # one bucket, below 25 MiB; the two rotary buffers are broadcast
        return [("broadcast", 2 * 8 * 4, ranks), ("all_reduce", parameter_bytes * 4, ranks)]
    if form.startswith("zero"):
        padded = -(-parameter_bytes // (2 * n)) * 2 * n
        return [("reduce_scatter", padded * 4, ranks), ("all_gather", padded * 4 // n, ranks)]
    gathers = [rest // n, layer // n, layer // n, layer // n, layer // n]
    scatters = [layer, layer, rest]
    return [("all_gather", size * 4, ranks) for size in gathers] + [
        ("reduce_scatter", size * 4, ranks) for size in scatters
    ]


FLAGS = {"ddp": [], "zero1": ["--zero", "1"], "zero2": ["--zero", "2"], "fsdp": ["--zero", "3"]}


def run_in_subprocess(directory: Path, flags: list[str]) -> Graph:
    """Capture rank 5 in a subprocess, in which only this capture allocates tensors."""
    script, trace = directory / "train.py", directory / "t.et"
    script.write_text(filled())
    sizes = ["--tp", "2", "--dp", "4", "--rank", "5", "--warm-up", "2", "--timed-steps", "1"]
    done = run_command("capture", "run", script, *sizes, *flags, "-o", trace)
    assert done.returncode == 0, done.stderr
    return onerank.read(trace)


@pytest.mark.parametrize("form", FORMS)
def test_calls_and_resident_memory_follow_the_sizes(tmp_path, form):
    world = World.of(tp=2, dp=4)
    graph = run_in_subprocess(tmp_path, FLAGS[form])
    ranks = (1, 3, 5, 7)
    dp_calls = [call for call in calls(graph) if call[2] == ranks]
    assert dp_calls == expected_calls(form, world, rank=5)
    assert {(g.name, g.axis, g.ranks) for g in graph.job.groups if g.ranks == ranks} == {
        ("dp", "dp", ranks)
    }
    # resident between steps: parameters, two states, and gradients that DDP and FSDP do not free
    norms = 2 * 2 * 64 + 64
    parameter_bytes = ((PARAMETERS - norms) // 2 + norms) * 4
    resident_bytes = {
        "ddp": parameter_bytes
        + 2 * parameter_bytes
        + parameter_bytes
        + parameter_bytes,  # gradients, and the buckets
        "zero1": parameter_bytes + 2 * parameter_bytes / 4,
        "zero2": parameter_bytes + 2 * parameter_bytes / 4,
        "fsdp": parameter_bytes / 4 + 2 * parameter_bytes / 4 + parameter_bytes / 4,  # gradients
    }[form]
    measured = graph.job.measurement.start_memory_bytes
    assert measured == pytest.approx(
        resident_bytes, abs=2048
    )  # tokens, step counters, rotary buffers


@pytest.mark.parametrize("form", ["zero1", "zero2"])
def test_zero_2_reduces_gradients_in_each_backward(tmp_path, form):
    graph = run(tmp_path, form, World.of(dp=4), micro=2)
    scatters = np.flatnonzero(graph.nodes.collective == Collective.REDUCE_SCATTER)
    phases = [graph.node(int(index)).phase for index in scatters]
    assert phases == ([Phase.OPTIMIZER] if form == "zero1" else [Phase.BACKWARD] * 2)

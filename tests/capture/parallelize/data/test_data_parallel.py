"""Data parallelism that the script knows nothing of.

A captured Llama is held against a script that distributes itself, and against arithmetic.
"""

import importlib
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_parallel_job import calls, risen, run_text
from own_process import run_command
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

import onerank
from onerank.capture.parallelize.data import fsdp as fully_sharded
from onerank.capture.parallelize.data import lazy_init as deferred
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


def when(graph: Graph) -> list[tuple[Phase, int]]:
    """Phase and micro-batch of each collective; DDP sends buffers as a forward begins."""
    found = map(graph.node, np.flatnonzero(graph.communication).tolist())
    return [(node.phase, node.value("micro_batch")) for node in found]


OWN = {
    "ddp": {
        "imports": "import torch.distributed as dist\n"
        "from torch.nn.parallel import DistributedDataParallel",
        "wrap": "dist.init_process_group('gloo'); model = DistributedDataParallel(model)",
    },
    "fsdp": {
        "imports": "import torch.distributed as dist\n"
        "from torch.distributed.fsdp import fully_shard",
        # on the CPU, as the model, GPU or none
        "wrap": "dist.init_process_group('gloo'); mesh = dist.init_device_mesh('cpu', (4,)); "
        "[fully_shard(x, mesh=mesh) for x in [*model.model.layers, model]]",
    },
}


@pytest.mark.parametrize("form", OWN)
@pytest.mark.parametrize("changes", [{}, {"clip": CLIP, "micro": 3}], ids=["plain", "micro, clip"])
def test_the_same_as_a_script_that_distributes_itself(tmp_path, form, changes):
    own = dict(OWN[form])
    if "micro" in changes:
        own["sync"] = {
            "ddp": "model.require_backward_grad_sync = micro == 2",
            "fsdp": "model.set_requires_gradient_sync(micro == 2)",
        }[form]
    asked = run(tmp_path, form, World.of(dp=4), **changes)
    itself = run(tmp_path, None, World.of(dp=4), **changes, **own)
    assert calls(asked) == calls(itself)
    assert len(calls(asked)) > 0
    assert when(asked) == when(itself)
    assert operators(asked) == operators(itself)
    assert len(operators(asked)) > 400
    assert risen(asked) == pytest.approx(risen(itself), rel=1e-3)


# Weights made as they are sharded ----------------------------------------------------------------


@pytest.mark.parametrize("placed", [False, True], ids=["called", "built in place"])
def test_weights_made_block_by_block_give_the_same_step(tmp_path, monkeypatch, placed):
    """As on a GPU, where the model may be too large; `placed` takes this CPU for one."""
    whole: list[int] = []
    shard = fully_sharded.fully_shard

    def counted(part: nn.Module, **kwargs: Any) -> Any:
        parameters = {p for p in part.parameters() if not isinstance(p, DTensor)}
        assert not any(p.is_meta for p in parameters)
        whole.append(sum(p.numel() for p in parameters))
        return shard(part, **kwargs)

    monkeypatch.setattr(fully_sharded, "fully_shard", counted)
    monkeypatch.setattr(play, "has_accelerator", lambda: True)
    if placed:
        monkeypatch.setattr(deferred, "device_of", lambda _: torch.device("cuda"))
    asked = run(tmp_path, "fsdp", World.of(dp=4), clip=CLIP)
    assert whole == [LAYER, LAYER, REST]
    itself = run(tmp_path, None, World.of(dp=4), clip=CLIP, **OWN["fsdp"])
    assert calls(asked) == calls(itself)
    assert operators(asked) == operators(itself)
    assert risen(asked) == pytest.approx(risen(itself), rel=1e-3)


def test_deferred_weights_are_initialised_as_the_model_does():
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        vocab_size=256, tie_word_embeddings=True, initializer_range=0.5,
    )  # fmt: skip
    with deferred.DeferredModels(lambda _: None).installed():
        model = LlamaForCausalLM(config)
        assert all(p.is_meta for p in model.parameters())
        assert not any(b.is_meta for b in model.buffers())
        model.to(torch.bfloat16)
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert not any(p.is_meta for p in copied(LlamaForCausalLM, model).parameters())
    deferred.make_weights(model.model.layers[0], model)
    assert [p.is_meta for p in model.model.layers[1].parameters()] == [True] * 9
    deferred.make_weights(model, model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (model.model.norm.weight == 1).all()
    assert model.model.layers[0].mlp.up_proj.weight.float().std().item() == pytest.approx(
        0.5, rel=0.1
    )


def copied(kind: Any, model: Any) -> Any:
    """Load a model as `from_pretrained` does, from weights at hand."""
    weights = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    return kind.from_pretrained(None, config=model.config, state_dict=weights)


def expected_calls(form: str, world: World, rank: int) -> list[tuple[str, int, tuple[int, ...]]]:
    """Calls of the data-parallel group, from the sizes of the model alone, in fp32."""
    ranks, tp = world.line("dp", rank), world.sizes.get("tp", 1)
    norms = 2 * 2 * 64 + 64
    held = (PARAMETERS - norms) // tp + norms
    layer, rest = (LAYER - 128) // tp + 128, (REST - 64) // tp + 64
    n = len(ranks)
    if form == "ddp":  # under one bucket of 25 MiB; the rotary embedding's two buffers are sent
        return [("broadcast", 2 * 8 * 4, ranks), ("all_reduce", held * 4, ranks)]
    if form.startswith("zero"):
        padded = -(-held // (2 * n)) * 2 * n
        return [("reduce_scatter", padded * 4, ranks), ("all_gather", padded * 4 // n, ranks)]
    gathers = [rest // n, layer // n, layer // n, layer // n, layer // n]
    scatters = [layer, layer, rest]
    return [("all_gather", size * 4, ranks) for size in gathers] + [
        ("reduce_scatter", size * 4, ranks) for size in scatters
    ]


FLAGS = {"ddp": [], "zero1": ["--zero", "1"], "zero2": ["--zero", "2"], "fsdp": ["--zero", "3"]}


def run_alone(directory: Path, flags: list[str]) -> Graph:
    """Capture rank 5 in a process of its own, which holds no tensors but this capture's."""
    script, trace = directory / "train.py", directory / "t.et"
    script.write_text(filled())
    sizes = ["--tp", "2", "--dp", "4", "--rank", "5", "--warm-up", "2", "--timed-steps", "1"]
    done = run_command("capture", "run", script, *sizes, *flags, "-o", trace)
    assert done.returncode == 0, done.stderr
    return onerank.read(trace)


@pytest.mark.parametrize("form", FORMS)
def test_calls_and_states_follow_the_sizes(tmp_path, form):
    world = World.of(tp=2, dp=4)
    graph = run_alone(tmp_path, FLAGS[form])
    own = (1, 3, 5, 7)
    found = [call for call in calls(graph) if call[2] == own]
    assert found == expected_calls(form, world, rank=5)
    assert {(g.name, g.axis, g.ranks) for g in graph.job.groups if g.ranks == own} == {
        ("dp", "dp", own)
    }
    # kept between steps: parameters, two states, and what DDP and FSDP do not free by themselves
    norms = 2 * 2 * 64 + 64
    held = ((PARAMETERS - norms) // 2 + norms) * 4
    kept = {
        "ddp": held + 2 * held + held + held,  # gradients, and the buckets
        "zero1": held + 2 * held / 4,
        "zero2": held + 2 * held / 4,
        "fsdp": held / 4 + 2 * held / 4 + held / 4,  # gradients
    }[form]
    measured = graph.job.measurement.start_memory_bytes
    assert measured == pytest.approx(kept, abs=2048)  # tokens, step counters, rotary buffers


@pytest.mark.parametrize("form", ["zero1", "zero2"])
def test_gradients_of_stage_2_leave_in_each_backward(tmp_path, form):
    graph = run(tmp_path, form, World.of(dp=4), micro=2)
    scatters = np.flatnonzero(graph.nodes.collective == Collective.REDUCE_SCATTER)
    phases = [graph.node(int(index)).phase for index in scatters]
    assert phases == ([Phase.OPTIMIZER] if form == "zero1" else [Phase.BACKWARD] * 2)

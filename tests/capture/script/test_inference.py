"""Capture of scripts that only infer: which forwards are steps, and what their graphs hold."""

import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from own_process import run_command
from raised import raises_code
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import onerank
from onerank.annotate import characterise
from onerank.capture import Options, WindowPlan
from onerank.capture.capture_script import Capture, capture, capture_steps
from onerank.capture.script.forward_tokens import ForwardTokens, forward_tokens
from onerank.capture.script.repeatable_call import RepeatableCall
from onerank.ir import Graph, InferenceStep, MemoryClass, Phase, World

BATCH, PROMPT, HIDDEN, HEADS, KV_HEADS, LAYERS, VOCABULARY = 3, 16, 64, 4, 2, 2, 256
SIZES = f"""hidden_size={HIDDEN}, intermediate_size=128, num_hidden_layers={LAYERS},
    num_attention_heads={HEADS}, num_key_value_heads={KV_HEADS}, vocab_size={VOCABULARY},
    max_position_embeddings=64"""
GENERATE = f"""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig({SIZES})).eval()
    prompt = torch.randint(3, {VOCABULARY}, ({BATCH}, {PROMPT}))
    model.generate(prompt, max_new_tokens=4, do_sample=False, cache_implementation={{cache}})
"""
# Of one layer's matrices, and of the head.
LAYER = HIDDEN * HIDDEN * 2 + HIDDEN * HIDDEN * KV_HEADS // HEADS * 2 + 3 * HIDDEN * 128
SHORT = WindowPlan(warm_up=1, pure=1)


@pytest.fixture(autouse=True)
def gradients_as_before():
    """Restore the mode that a script sets."""
    with torch.enable_grad():
        yield


def captured(directory: Path, text: str, **options: object) -> dict[str, Capture]:
    script = directory / "generate.py"
    script.write_text(textwrap.dedent(text))
    return capture_steps(script, [], Options(windows=SHORT, **options))


@pytest.fixture(scope="module")
def steps(tmp_path_factory) -> dict[str, Graph]:
    """Prefill, first decode and third forward of a generation with a static cache."""
    text = GENERATE.format(cache="'static'")
    done = captured(tmp_path_factory.mktemp("static"), text, steps=("prefill", "decode", 3))
    return {label: characterise(step.graph) for label, step in done.items()}


def flops_of(graph: Graph, name: str) -> int:
    """Return the summed FLOPs of the operators whose name contains `name`."""
    operators = [graph.strings[int(op)] for op in graph.nodes.op]
    return sum(int(graph.nodes.flops[i]) for i, op in enumerate(operators) if name in op)


def test_steps_have_their_tokens(steps):
    contexts = {"prefill": 0, "decode": PROMPT, "3": PROMPT + 1}
    for number, (label, graph) in enumerate(steps.items(), start=1):
        kind = "prefill" if number == 1 else "decode"
        new_tokens = PROMPT if number == 1 else 1
        context = (contexts[label],) * BATCH
        assert graph.job.inference == InferenceStep(kind, number, BATCH, new_tokens, context)


def test_a_step_is_one_forward(steps):
    head = HIDDEN * VOCABULARY
    for label, new_tokens in (("prefill", PROMPT), ("decode", 1), ("3", 1)):
        graph = steps[label]
        # generate computes the head for the last token only.
        expected = 2 * BATCH * (LAYERS * LAYER * new_tokens + head)
        assert flops_of(graph, "aten::mm") == expected
        assert set(graph.nodes.phase[graph.compute].tolist()) == {int(Phase.FORWARD)}
        assert graph.job.measurement.step_ns
        assert not graph.communication.any()


def test_a_dynamic_cache_is_as_long_in_every_repetition(tmp_path):
    graph = captured(tmp_path, GENERATE.format(cache=None), steps=(3,))["3"].graph
    assert graph.job.inference.context_lengths == (PROMPT + 1,) * BATCH
    # Two products of [heads, 1, context + 1, head size] for each sequence and layer.
    expected = LAYERS * 4 * BATCH * HIDDEN * (PROMPT + 2)
    assert flops_of(characterise(graph), "scaled_dot_product") == expected
    # Keys and values of all cached tokens in float32.
    size = LAYERS * 2 * BATCH * (PROMPT + 1) * KV_HEADS * HIDDEN // HEADS * 4
    assert sum(graph.job.measurement.resident_bytes["kv_cache"]) == size
    blocks = graph.job.measurement.memory.blocks
    grown = [
        size
        for size, kind, freed in zip(
            blocks.bytes, blocks.memory_class, blocks.freed_at, strict=True
        )
        if kind == MemoryClass.KV_CACHE and freed < 0
    ]
    assert sum(grown) == size // (PROMPT + 1) * (PROMPT + 2)


LOOP = """
    import torch
    from torch import nn
    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(32, 8), nn.Linear(8, 32, bias=False)
        def forward(self, tokens, past):
            x = self.embed(tokens)
            keys = x if past is None else torch.cat([past[0], x], dim=1)
            x = torch.nn.functional.scaled_dot_product_attention(x, keys, keys)
            return self.head(x), (keys,)
    model, past = Decoder(), None
    tokens = torch.ones(2, 5, dtype=torch.long)
    {mode}
    for _ in range(3):
        logits, past = model(tokens, past)
        tokens = logits[:, -1:].argmax(-1)
    {then}
"""
INFERENCE = "torch.set_grad_enabled(False)"


def test_a_plain_loop_is_recognised(tmp_path):
    """A forward with gradients is no step, but it has a number, as it has for `--steps`."""
    mode = f"model(tokens, None); {INFERENCE}"
    done = captured(tmp_path, LOOP.format(mode=mode, then=""))
    assert done["prefill"].graph.job.inference == InferenceStep("prefill", 2, 2, 5, (0, 0))
    assert done["decode"].graph.job.inference == InferenceStep("decode", 3, 2, 1, (5, 5))
    codes = [note.code for note in done["decode"].graph.job.measurement.notes]
    assert "inference-recognised" in codes


def test_optimizers_of_before_the_script_do_not_count(tmp_path):
    """As in a notebook that trained a model."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    done = captured(tmp_path, LOOP.format(mode=INFERENCE, then=""))
    assert [*done] == ["prefill", "decode"]
    assert optimizer.param_groups


def test_a_plain_loop_is_recognised_without_a_device(tmp_path):
    script = tmp_path / "generate.py"
    script.write_text(textwrap.dedent(LOOP.format(mode=INFERENCE, then="")))
    done = run_command(*("capture", "run", script, "--device", "none", "-o", tmp_path / "trace.et"))
    assert done.returncode == 0, done.stderr
    graph = onerank.read(tmp_path / "trace.decode.et")
    assert graph.job.inference == InferenceStep("decode", 2, 2, 1, (5, 5))


TRAIN = """
    torch.set_grad_enabled(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(30):
        model(torch.ones(2, 5, dtype=torch.long), None)[0].sum().backward()
        optimizer.step()
"""


def test_a_script_that_evaluates_and_then_trains_is_captured_in_training(tmp_path):
    text = textwrap.dedent(LOOP).format(mode=INFERENCE, then=textwrap.dedent(TRAIN))
    assert [*captured(tmp_path, text)] == [""]
    assert [*captured(tmp_path, text, steps=("decode",))] == ["decode"]


@pytest.mark.parametrize(
    ("mode", "steps", "code"),
    [
        (INFERENCE, (9,), "steps-not-reached"),
        (INFERENCE, (0,), "steps-below-one"),
        (INFERENCE, (2, 2), "steps-repeated"),
        ("", None, "script-no-step"),  # with gradients, and without an optimizer
    ],
)
def test_bad_steps(tmp_path, mode, steps, code):
    with raises_code(code):
        captured(tmp_path, LOOP.format(mode=mode, then=""), steps=steps)


def test_one_step_is_expected_where_captures_are_in_turn(tmp_path):
    script = tmp_path / "generate.py"
    script.write_text(textwrap.dedent(LOOP.format(mode=INFERENCE, then="")))
    with raises_code("steps-several", naming=("prefill", "decode")):
        capture(script, [], Options(steps=("prefill", "decode")))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            vocab_size=32,
        )
    ).eval()


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@torch.no_grad()
def test_a_repeated_call_restores_its_cache(model, kind):
    caches = [
        DynamicCache(config=model.config)
        if kind == "dynamic"
        else StaticCache(config=model.config, max_cache_len=16)
        for _ in range(2)
    ]
    prompt, token = torch.arange(5)[None], torch.tensor([[7]])
    for cache in caches:
        model(prompt, past_key_values=cache)
    expected = model(token, past_key_values=caches[0]).logits
    call = RepeatableCall(model, ((token,), {"past_key_values": caches[1]}))
    for number in range(3):
        assert torch.equal(model(token, past_key_values=caches[1]).logits, expected)
        if not number:
            call.after_first_call()
        call.restore()
    assert int(caches[1].get_seq_length()) == 5
    assert torch.equal(model(token, past_key_values=caches[1]).logits, expected)


@dataclass(slots=True)
class Cache:
    """A KV cache whose attributes are in slots."""

    keys: torch.Tensor | None = None


class CachedKeys(Cache):
    """A KV cache with attributes in slots and in a dictionary."""


class GrowingDecoder(nn.Module):
    """Appends its input to the keys."""

    def forward(self, x: torch.Tensor, cache: Cache) -> int:
        """Return the number of keys."""
        cache.keys = x if cache.keys is None else torch.cat([cache.keys, x], dim=1)
        if isinstance(cache, CachedKeys):
            cache.calls = getattr(cache, "calls", 0) + 1
        return cache.keys.shape[1]


@pytest.mark.parametrize("kind", [Cache, CachedKeys])
def test_attributes_in_slots_are_restored(kind):
    decoder, cache, x = GrowingDecoder(), kind(), torch.ones(1, 3, 2)
    assert decoder(x, cache) == 3
    call = RepeatableCall(decoder, ((x,), {"cache": cache}))
    for number in range(3):
        assert decoder(x, cache) == 6
        assert getattr(cache, "calls", 2) == 2
        if not number:
            call.after_first_call()
        call.restore()
    assert torch.equal(cache.keys, x)
    assert [tensor.shape for tensor in call.cache_tensors()] == [x.shape]


def test_padding_counts_as_no_context(model):
    keys = torch.zeros(2, 4, 6, 8)
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, :3] = 0
    named = {"attention_mask": mask, "past_key_values": ((keys, keys),)}
    tokens = torch.ones(2, 1, dtype=torch.long)
    assert forward_tokens(model, ((tokens,), named)) == ForwardTokens(2, 1, (3, 6))


def test_a_model_without_tokens_has_one_forward(tmp_path):
    text = """
        import torch
        model = torch.nn.Linear(4, 4)
        with torch.inference_mode():
            model(torch.ones(2, 4))
    """
    ((label, step),) = captured(tmp_path, text).items()
    assert (label, step.graph.job.inference) == ("1", InferenceStep("forward", 1))


def test_collectives_of_slices_have_the_bytes_of_the_formula(tmp_path):
    world = World.of(tp=4)  # more ranks than key-value heads
    text = GENERATE.format(cache=None)
    done = captured(tmp_path, text, tp=world.size)
    for label, tokens in (("prefill", BATCH * PROMPT), ("decode", BATCH)):
        graph = done[label].graph
        nodes = [graph.node(int(i)) for i in graph.communication.nonzero()[0]]
        reduced = [n.value("comm_bytes") for n in nodes if n.collective.name == "ALL_REDUCE"]
        # The embedding, and two row-parallel products per layer.
        assert reduced == [tokens * HIDDEN * 4] * (1 + 2 * LAYERS)
        # Two ranks have a copy of each key-value head; only the last token's logits are gathered.
        gathered = [n.value("comm_bytes") for n in nodes if n.collective.name == "ALL_GATHER"]
        assert gathered == [BATCH * VOCABULARY // world.size * 4]
        (sliced,) = [sliced for _, sliced in done[label].sliced]
        layer = (2 * HIDDEN * HIDDEN + 3 * HIDDEN * 128) // world.size
        layer += 2 * HIDDEN * HIDDEN // HEADS + 2 * HIDDEN  # one head's keys and values, two norms
        assert (
            sliced.elements_after == LAYERS * layer + 2 * HIDDEN * VOCABULARY // world.size + HIDDEN
        )

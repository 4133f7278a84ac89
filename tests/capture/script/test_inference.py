"""Capture of scripts that only infer: which forwards are steps, and what their graphs hold."""

import gc
import json
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from notes import note_of
from own_process import run_command
from raised import raises_code
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import onerank
from onerank.annotate import characterise
from onerank.capture import Options, WindowPlan
from onerank.capture.capture_script import Capture, capture, capture_steps
from onerank.capture.parallelize.shard_model import key_value_heads
from onerank.capture.script.forward_tokens import ForwardTokens, forward_tokens
from onerank.capture.script.repeatable_call import Growth, RepeatableCall
from onerank.capture.validate_options import names_training
from onerank.ir import Graph, InferenceStep, Kind, MemoryClass, Phase, World

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
SHORT = WindowPlan(warm_up=1, timed_steps=1)


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


SIZED = """class Sized(nn.Module):
        def __init__(self):
            super().__init__()
            with torch.no_grad():
                model(tokens, None)
    Sized()"""


def test_a_plain_loop_is_recognised(tmp_path):
    """Forwards with gradients or in a constructor are no steps, but have numbers for `--steps`."""
    mode = f"{SIZED}; model(tokens, None); {INFERENCE}"
    done = captured(tmp_path, LOOP.format(mode=mode, then=""))
    assert done["prefill"].graph.job.inference == InferenceStep("prefill", 3, 2, 5, (0, 0))
    assert done["decode"].graph.job.inference == InferenceStep("decode", 4, 2, 1, (5, 5))
    codes = [note.code for note in done["decode"].graph.job.measurement.notes]
    assert "inference-recognised" in codes


@pytest.mark.parametrize(("width", "sizes"), [(4, ("288", "544")), (8, ())])
def test_a_step_of_the_smaller_model_has_a_note(tmp_path, width, sizes):
    """As in speculative decoding, where the assistant model is called first."""
    text = f"""
        import torch
        from torch import nn
        class Model(nn.Module):
            def __init__(self, width):
                super().__init__()
                self.embed, self.head = nn.Embedding(32, width), nn.Linear(width, 32)
            def forward(self, input_ids):
                return self.head(self.embed(input_ids))
        models = {{width: Model(width) for width in (4, 8)}}
        lazy = nn.LazyLinear(2)
        with torch.inference_mode():
            models[{width}](torch.ones(2, 5, dtype=torch.long))
    """
    gc.freeze()  # hides the models of other tests
    (step,) = captured(tmp_path, text).values()
    notes = {note.code: note.text for note in step.graph.job.measurement.notes}
    assert ("inference-larger-model" in notes) == bool(sizes)
    assert all(size in notes["inference-larger-model"] for size in sizes)


def test_speculative_decoding_tells_drafts_from_verifications(tmp_path):
    text = """
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
        torch.manual_seed(0)
        def build(width):
            return LlamaForCausalLM(LlamaConfig(hidden_size=width, intermediate_size=2 * width,
                num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, vocab_size=64,
                max_position_embeddings=64)).eval()
        model, assistant = build(64), build(32)
        assistant.generation_config.num_assistant_tokens = 3
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.assistant_confidence_threshold = 0.0
        prompt = torch.randint(3, 64, (1, 7))
        model.generate(prompt, max_new_tokens=6, do_sample=False, assistant_model=assistant)
    """
    done = captured(tmp_path, text)
    assert [*done] == ["draft", "prefill", "verify"]
    steps = {label: each.graph.job.inference for label, each in done.items()}
    # Forward 1 is the assistant's prefill, and the main model's first computes three drafts too.
    assert steps["draft"] == InferenceStep("draft", 2, 1, 1, (7,))
    assert steps["prefill"] == InferenceStep("prefill", 4, 1, 7 + 3, (0,))
    verify = steps["verify"]
    assert (verify.kind, verify.batch, verify.new_tokens) == ("verify", 1, 4)
    assert 7 <= verify.context_lengths[0] <= 7 + 3
    width = {"draft": 32, "prefill": 64, "verify": 64}
    for label, each in done.items():
        shapes = each.graph.text("input_shapes")
        assert any(f"[64,{width[label]}]" in text.replace(" ", "") for text in shapes)
        codes = [note.code for note in each.graph.job.measurement.notes]
        assert "inference-larger-model" not in codes


def test_optimizers_of_before_the_script_do_not_count(tmp_path):
    """As in a notebook that trained a model."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    done = captured(tmp_path, LOOP.format(mode=INFERENCE, then=""))
    assert [*done] == ["prefill", "decode"]
    assert optimizer.param_groups


def test_a_plain_loop_is_recognised_without_a_device(tmp_path):
    script = tmp_path / "generate.py"
    # In inference mode operators arrive whole that autograd decomposes otherwise.
    mode = """
    model.cuda()
    (inference := torch.inference_mode()).__enter__()
    tokens = torch.tensor(tokens.tolist(), device="cuda")
    """
    script.write_text(textwrap.dedent(LOOP.format(mode=mode.strip(), then="")))
    done = run_command(*("capture", "run", script, "--device", "none", "-o", tmp_path / "trace.et"))
    assert done.returncode == 0, done.stderr
    graph = onerank.read(tmp_path / "trace.decode.et")
    assert graph.job.inference == InferenceStep("decode", 2, 2, 1, (5, 5))
    products = [op for op in graph.nodes.op if graph.strings[int(op)] == "aten::mm"]
    assert len(products) == 1


def test_beam_search_without_a_device_lasts_to_its_length(tmp_path):
    """Neither scores nor an end token, which no device computes, end it earlier."""
    text = GENERATE.format(cache="None, num_beams=2")
    script = tmp_path / "generate.py"
    script.write_text(textwrap.dedent(text))
    command = ("capture", "run", script, "--device", "none", "-o", tmp_path / "trace.et")
    done = run_command(*command, "--steps", "decode,4")
    assert done.returncode == 0, done.stderr
    for label, number in (("decode", 2), ("4", 4)):
        step = onerank.read(tmp_path / f"trace.{label}.et").job.inference
        context = (PROMPT + number - 2,) * 2 * BATCH
        assert step == InferenceStep("decode", number, 2 * BATCH, 1, context)
    # The fifth forward of four does not occur, and the search for it ends.
    done = run_command(*command, "--steps", "5")
    assert done.returncode == 2
    assert "steps-not-reached" in done.stderr


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

    def step() -> None:
        assert torch.equal(model(token, past_key_values=caches[1]).logits, expected)

    call = RepeatableCall(model, ((token,), {"past_key_values": caches[1]}))
    call.run_first(step)
    call.restore()
    step()
    call.restore()
    assert int(caches[1].get_seq_length()) == 5
    step()


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

    def step() -> None:
        assert decoder(x, cache) == 6
        assert getattr(cache, "calls", 2) == 2

    call = RepeatableCall(decoder, ((x,), {"cache": cache}))
    call.run_first(step)
    call.restore()
    step()
    call.restore()
    assert torch.equal(cache.keys, x)
    assert [tensor.shape for tensor in call.cache_tensors()] == [x.shape]


# Each keeps its keys outside of the arguments, and returns their number. `x` is [1, 3, 2].
KEPT_ELSEWHERE = {
    "global": """
        KEYS = None
        class Decoder(nn.Module):
            def forward(self, x):
                global KEYS
                KEYS = x if KEYS is None else torch.cat([KEYS, x], dim=1)
                return KEYS.shape[1]
    """,
    "global-dictionary": """
        CACHE = {}
        class Decoder(nn.Module):
            def forward(self, x):
                CACHE[0] = torch.cat([CACHE[0], x], dim=1) if CACHE else x
                return CACHE[0].shape[1]
    """,
    "global-list-of-objects": """
        class Layer:
            def __init__(self):
                self.parts = []
        LAYERS = [Layer(), Layer()]
        class Decoder(nn.Module):
            def forward(self, x):
                LAYERS[1].parts.append(x)
                return torch.cat(LAYERS[1].parts, dim=1).shape[1]
    """,
    "attribute": """
        class Decoder(nn.Module):
            def __init__(self):
                super().__init__()
                self.keys = None
            def forward(self, x):
                self.keys = x if self.keys is None else torch.cat([self.keys, x], dim=1)
                return self.keys.shape[1]
    """,
    "attribute-created": """
        from transformers import DynamicCache
        class Decoder(nn.Module):
            def forward(self, x):
                if not hasattr(self, "cache"):
                    self.cache = DynamicCache()
                return self.cache.update(x[None], x[None], 0)[0].shape[2]
    """,
    "class-attribute": """
        class Decoder(nn.Module):
            keys = []
            def forward(self, x):
                self.keys.append(x)
                return 3 * len(self.keys)
    """,
    "closure": """
        def with_cache():
            keys = []
            def forward(self, x):
                keys.append(x)
                return torch.cat(keys, dim=1).shape[1]
            return forward
        class Decoder(nn.Module):
            forward = with_cache()
    """,
    "counter": """
        POSITION = 0
        KEYS = torch.zeros(1, 64, 2)
        class Decoder(nn.Module):
            def forward(self, x):
                global POSITION
                KEYS[:, POSITION : POSITION + 3] = x
                POSITION += 3
                return POSITION
    """,
}


@pytest.mark.parametrize("place", KEPT_ELSEWHERE)
@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_cache_outside_of_arguments_is_restored(monkeypatch, place, steps_before):
    script = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", script)
    text = "import torch\nfrom torch import nn\n" + textwrap.dedent(KEPT_ELSEWHERE[place])
    exec(text, vars(script))
    decoder, x = script.Decoder(), torch.ones(1, 3, 2)
    for _ in range(steps_before):
        decoder(x)
    expected = 3 * (steps_before + 1)
    call, keys = RepeatableCall(decoder, ((x,), {})), list[int]()
    call.run_first(lambda: keys.append(decoder(x)))
    assert keys[0] == expected
    for _ in range(2):
        call.restore()
        assert decoder(x) == expected
    call.restore()
    assert decoder(x) == expected
    assert decoder(x) == expected + 3


def test_what_the_first_forward_computes_once_is_no_state():
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sines: torch.Tensor | None = None
            self.by_length: dict[int, torch.Tensor] = {}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.sines is None or x.shape[1] not in self.by_length:
                self.sines = torch.sin(x)
                self.by_length[x.shape[1]] = x + 1
            return x * self.sines

    rotary, x = Rotary(), torch.ones(1, 3, 2)
    call = RepeatableCall(rotary, ((x,), {}))
    call.run_first(lambda: rotary(x))
    sines, shifted = rotary.sines, rotary.by_length[3]
    call.restore()
    rotary(x)
    assert rotary.sines is sines
    assert rotary.by_length[3] is shifted


def test_a_cache_that_cannot_be_restored_is_refused(tmp_path):
    text = """
        import torch
        def cache():
            keys = torch.empty(1, 0, 8)
            while True:
                keys = torch.cat([keys, (yield keys)], dim=1)
        class Decoder(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.head, self.cache = torch.nn.Linear(8, 8), cache()
                next(self.cache)
            def forward(self, x):
                return self.head(self.cache.send(x))
        model = Decoder()
        with torch.inference_mode():
            model(torch.ones(1, 4, 8))
    """
    with raises_code("step-state-grows", naming=("128",)):
        captured(tmp_path, text)


@pytest.mark.parametrize(
    ("queries", "keys", "kind", "lengths"),
    [
        ([0, 1, 2, 3], [0, 10, 28, 34], "decode", ()),
        ([0, 9, 26], [0, 9, 26], "prefill", (9, 17)),
        ([0, 1, 18, 18], [0, 10, 27, 27], "mixed", (1, 17)),  # the last sequence is padding
    ],
)
def test_packed_sequences(model, queries, keys, kind, lengths):
    """Continuous batching of transformers; a sliding window limits the keys of other layers."""
    ends, of_keys = torch.tensor(queries), torch.tensor(keys)
    keys_by_layer = {"sliding_attention": ends, "full_attention": of_keys}
    ids = torch.zeros(1, queries[-1], dtype=torch.long)
    named = {"input_ids": ids, "cu_seq_lens_q": ends, "cu_seq_lens_k": keys_by_layer}
    tokens = forward_tokens(model, ((), named))
    context = (of_keys.diff() - ends.diff())[ends.diff() > 0].tolist()
    assert (tokens.kind, tokens.query_lengths, [*tokens.context]) == (kind, lengths, context)
    assert (tokens.batch, tokens.new_tokens) == (len(context), int(ends.diff().max()))


def test_padding_counts_as_no_context(model):
    keys = torch.zeros(2, 4, 6, 8)
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, :3] = 0
    named = {"attention_mask": mask, "past_key_values": ((keys, keys),)}
    tokens = torch.ones(2, 1, dtype=torch.long)
    assert forward_tokens(model, ((tokens,), named)) == ForwardTokens(2, 1, (3, 6))


ENGINE = """
    import torch
    from dataclasses import dataclass
    from torch import nn
    @dataclass
    class Batch:
        input_ids: torch.Tensor
        positions: torch.Tensor
    class Runner:
        def __init__(self):
            self.embed, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)
            self.waiting, self.done, self.keys = [*range(3)], [], None
        def execute(self, batch):
            self.done.append(self.waiting.pop(0))
            x = self.embed(batch.input_ids)
            self.keys = x if self.keys is None else torch.cat([self.keys, x], dim=1)
            x = nn.functional.scaled_dot_product_attention(x, self.keys, self.keys)
            return self.head(x)[:, -1:].argmax(-1)
    runner, tokens, position = Runner(), torch.ones(2, 5, dtype=torch.long), 0
    with torch.inference_mode():
        for _ in range(3):
            following = runner.execute(Batch(tokens, torch.tensor([position])))
            position += tokens.shape[1]
            tokens = following
    assert runner.done == [0, 1, 2] and runner.keys.shape[1] == 7
"""


def test_a_method_is_the_step(tmp_path):
    done = captured(tmp_path, ENGINE, step_of="Runner.execute", steps=("prefill", "decode", 3))
    expected = [("prefill", 1, 5, 0), ("decode", 2, 1, 5), ("decode", 3, 1, 6)]
    for step, (kind, number, new, context) in zip(done.values(), expected, strict=True):
        assert step.graph.job.inference == InferenceStep(kind, number, 2, new, (context,) * 2)
        # Two products of [new tokens, context + new tokens, 8] for each sequence.
        attention = flops_of(characterise(step.graph), "bmm")
        assert attention == 2 * 4 * 8 * new * (context + new)
        assert flops_of(characterise(step.graph), "addmm") == 2 * 2 * new * 8 * 32


def test_the_forward_of_a_model_that_trains_is_a_step(tmp_path):
    text = """
        import torch
        from torch import nn
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(4, 4)
            def forward(self, x):
                return self.layer(x).sin()
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
    """
    ((label, step),) = captured(tmp_path, text, step_of="Model.forward").items()
    assert (label, step.graph.job.inference) == ("1", InferenceStep("forward", 1))
    by_operator = dict(zip(step.graph.text("op"), step.graph.text("module"), strict=True))
    assert by_operator["aten::addmm"] == "layer"
    assert by_operator["aten::sin"] == "Model"
    assert not any("backward" in name.lower() for name in by_operator)


def test_a_method_of_a_class_that_was_imported_before_the_script(tmp_path):
    """The garbage collector does not list torch's classes, which a fork has frozen."""
    text = """
        import torch
        layer = torch.nn.Linear(4, 4)
        with torch.inference_mode():
            layer(torch.ones(2, 4))
    """
    gc.freeze()
    ((label, step),) = captured(tmp_path, text, step_of="Linear.forward").items()
    assert label == "1"
    assert flops_of(characterise(step.graph), "addmm") == 2 * 2 * 4 * 4


@pytest.mark.parametrize(
    ("step_of", "code"),
    [
        ("execute", "step-of-malformed"),
        ("Absent.execute", "step-of-not-called"),
        ("Runner.absent", "step-of-not-called"),
        ("Batch.__hash__", "step-of-not-called"),
    ],
)
def test_bad_methods(tmp_path, step_of, code):
    with raises_code(code, naming=(step_of,)):
        captured(tmp_path, ENGINE, step_of=step_of)


def test_a_model_without_tokens_has_one_forward(tmp_path):
    text = """
        import torch
        model = torch.nn.Linear(4, 4)
        with torch.inference_mode():
            model(torch.ones(2, 4))
    """
    ((label, step),) = captured(tmp_path, text).items()
    assert (label, step.graph.job.inference) == ("1", InferenceStep("forward", 1))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stage_sends_the_hidden_states_of_all_tokens(tmp_path, rank):
    """A generation selects the last token between the layers and the head."""
    done = captured(tmp_path, GENERATE.format(cache=None), pp=2, rank=rank)
    for label, tokens, context in (("prefill", PROMPT, 0), ("decode", 1, PROMPT)):
        graph = done[label].graph
        # On each stage the cache's first layer is the stage's first, which has the context.
        assert graph.job.inference.context_lengths == (context,) * BATCH
        nodes = [graph.node(int(i)) for i in graph.communication.nonzero()[0]]
        (message,) = [(n.kind, n.value("comm_bytes")) for n in nodes]
        assert message == ([Kind.SEND, Kind.RECV][rank], BATCH * tokens * HIDDEN * 4)
        head = HIDDEN * VOCABULARY if rank == 1 else 0
        expected = 2 * BATCH * (tokens * LAYER + head)
        assert flops_of(characterise(graph), "mm") == expected


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


MIXED_LAYERS = """
    import torch
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
    model = Qwen3NextForCausalLM(Qwen3NextConfig(
        hidden_size=32, num_hidden_layers=8, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, vocab_size=64, linear_num_value_heads=2, linear_num_key_heads=1,
        linear_key_head_dim=8, linear_value_head_dim=8, num_experts=0, intermediate_size=32,
    )).eval()
    prompt = torch.randint(3, 64, (2, 5))
    model.generate(prompt, max_new_tokens=3, do_sample=False)
"""


@pytest.mark.parametrize(("rank", "attentions"), [(0, 0), (1, 1)])
def test_a_stage_of_linear_attention_has_the_context_of_the_others(tmp_path, rank, attentions):
    """Two layers of linear attention, whose cache has no length; then one of each kind."""
    done = captured(tmp_path, MIXED_LAYERS, pp=4, rank=rank)
    assert done["prefill"].graph.job.inference == InferenceStep("prefill", 1, 2, 5, (0, 0))
    decode = done["decode"].graph
    assert decode.job.inference == InferenceStep("decode", 2, 2, 1, (5, 5))
    operators = [decode.strings[int(op)] for op in decode.nodes.op]
    assert sum("scaled_dot_product" in op for op in operators) == attentions


def test_a_decode_whose_cache_shows_no_length_has_a_note(tmp_path):
    cache = """
    class Cache:
        def get_seq_length(self):
            return 0
    """
    text = LOOP.replace("(self, tokens, past)", "(self, tokens, past, cache)")
    text = text.replace("(tokens, past)", "(tokens, past, Cache())").format(mode=INFERENCE, then="")
    ((label, step),) = captured(tmp_path, textwrap.dedent(cache) + textwrap.dedent(text)).items()
    assert label == "prefill"
    note_of(step.graph.job.measurement.notes, "inference-no-decode", 2, 3, "--steps")


WITH_IMAGE = """
    import torch
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig
    from transformers import LlavaForConditionalGeneration
    vision = CLIPVisionConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, image_size=8, patch_size=4, projection_dim=16)
    text = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=64)
    model = LlavaForConditionalGeneration(LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=60)).eval()
    prompt = torch.tensor([[5, 6, 60, 60, 60, 60, 7]])
    image = torch.zeros(1, 3, 8, 8)
    {call}
"""
GENERATES = "model.generate(prompt, pixel_values=image, max_new_tokens=3, do_sample=False)"


@pytest.mark.parametrize("tp", [1, 4])
def test_the_encoder_of_images_is_no_prefill(tmp_path, tp):
    """It runs in a forward before the prefill, which only its number selects."""
    done = captured(tmp_path, WITH_IMAGE.format(call=GENERATES), tp=tp)
    assert done["prefill"].graph.job.inference == InferenceStep("prefill", 3, 1, 7, (0,))
    assert done["decode"].graph.job.inference == InferenceStep("decode", 4, 1, 1, (7,))
    # The embedding, two row-parallel products, and the gather of logits.
    assert done["decode"].graph.communication.sum() == (4 if tp > 1 else 0)


def test_the_encoder_of_images_is_a_step_by_its_number(tmp_path):
    ((_, step),) = captured(tmp_path, WITH_IMAGE.format(call=GENERATES), tp=4, steps=(1,)).items()
    assert step.graph.job.inference == InferenceStep("forward", 1)
    assert any(module.type == "CLIPVisionModel" for module in step.graph.job.modules)
    assert not step.graph.communication.any()


def test_a_script_that_only_encodes_images_names_the_step(tmp_path):
    call = "torch.set_grad_enabled(False); model.get_image_features(image)"
    with raises_code("inference-encoder-only", naming=("CLIPVisionModel", "--steps 1")):
        captured(tmp_path, WITH_IMAGE.format(call=call))


CONTINUOUS = f"""
    import torch
    from transformers import ContinuousBatchingConfig, GenerationConfig
    from transformers import LlamaConfig, LlamaForCausalLM
    model = LlamaForCausalLM(LlamaConfig({SIZES})).eval()
    greedy = GenerationConfig(max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=-1)
    few = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    model.generate_batch([[5] * 9, [5] * 17], greedy, few)
"""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_continuous_batching_of_a_slice(tmp_path):
    """Its paged cache has the key-value heads of the rank."""
    ((_, step),) = captured(tmp_path, CONTINUOUS, tp=2, steps=("decode",)).items()
    graph = characterise(step.graph)
    assert graph.job.inference == InferenceStep("decode", 2, 2, 1, (17, 9))
    # Two products of each query with all 28 cached tokens, since a mask separates the sequences.
    assert flops_of(graph, "attention") == LAYERS * 4 * 2 * 28 * HIDDEN // 2
    # Each layer writes the keys and values of two tokens, of one of the two heads.
    writes = [i for i, op in enumerate(graph.text("op")) if op == "aten::index_copy_"]
    assert len(writes) == 2 * LAYERS
    added = {str(json.loads(graph.node(i).text("input_shapes"))[3]) for i in writes}
    assert added == {str([2, KV_HEADS // 2, HIDDEN // HEADS])}


def test_continuous_batching_of_a_model_with_other_projections():
    with raises_code("slice-paged-heads", naming=("Linear",)):
        key_value_heads(nn.Linear(2, 2))


def test_a_tensor_of_symbolic_size_holds_no_memory():
    """Dynamo keeps such tensors of the code that it compiles."""
    kept = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.ones(7, 3))
    assert isinstance(kept.untyped_storage().nbytes(), torch.SymInt)
    growth = Growth(on_gpu=False)
    assert [growth.after_repetition() for _ in range(3)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("text", "trains"),
    [
        ("model.train(); model.train( False )", False),
        ("YOLO('n.yaml').train(data='d.yaml')", True),
        ("PPO('MlpPolicy', env).learn(1000)", True),
    ],
)
def test_the_text_of_a_script_says_whether_it_trains(tmp_path, text, trains):
    (tmp_path / "script.py").write_text(text)
    assert names_training(tmp_path / "script.py", Options()) is trains

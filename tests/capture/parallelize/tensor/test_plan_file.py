"""Plan files for a GPT of plain modules: two Gloo ranks against the whole model, and refusals."""

import contextlib
import subprocess
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from own_process import run_command
from raised import raises_code
from real_ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

from onerank.capture.fake_world.recorder import Recorder
from onerank.capture.parallelize.shard_model import ModelSlicing
from onerank.capture.parallelize.tensor.apply_tensor_parallel import Sliced, slice_model
from onerank.capture.parallelize.tensor.plan_file import (
    ModuleRule,
    ShardingPlan,
    read_plan,
    shipped_plan,
    skeleton,
)
from onerank.capture.parallelize.tensor.shard_parameters import slice_head_bias
from onerank.ir.errors import SliceError

NANOGPT = Path(__file__).parents[4] / "examples" / "plans" / "nanogpt.toml"

SIZE = 2

WIDTH, HEADS, VOCABULARY, CONTEXT = 32, 4, 96, 24

FORMS: Any = {
    "megatron": ("megatron", False),
    "hf": ("hf", False),
    "sequence": ("megatron", True),
    "adapters": ("megatron", False),
    "adapters, hf": ("hf", False),
}


class CausalSelfAttention(nn.Module):
    """One projection for q, k and v, split by the width; head width taken from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)
        self.n_head, self.n_embd = HEADS, WIDTH

    def forward(self, x):
        batch, length, width = x.size()
        shape = (batch, length, self.n_head, width // self.n_head)
        split = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (part.view(shape).transpose(1, 2) for part in split)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.c_proj(functional.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH), CausalSelfAttention()
        self.ln_2, self.mlp = nn.LayerNorm(WIDTH), MLP()

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Tied embedding, learned positions, the loss computed in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(CONTEXT, WIDTH),
                "h": nn.ModuleList([Block(), Block()]),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        places = torch.arange(idx.shape[1])
        x = self.transformer.wte(idx) + self.transformer.wpe(places)
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        if targets is None:
            return logits, None
        flat = logits.view(-1, logits.size(-1))
        return logits, functional.cross_entropy(flat, targets.view(-1), ignore_index=-1)


class Adapted(nn.Linear):
    """LoRA in a linear layer."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__(linear.in_features, linear.out_features)
        self.down = nn.Parameter(torch.zeros(rank, linear.in_features))
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x):
        return super().forward(x) + x @ self.down.T @ self.up.T


class Wrapped(nn.Module):
    """LoRA around a linear layer, with PEFT's names."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base_layer = linear
        down, up = (linear.in_features, rank), (rank, linear.out_features)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(*down, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(*up, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


ADAPTED = {"transformer.h.*.mlp.c_fc": ModuleRule(style="colwise", adapter=("down", "up"))}


def gpt(form: str = "") -> GPT:
    torch.manual_seed(0)
    model = GPT()
    for block in model.transformer.h if "adapters" in form else ():
        block.mlp.c_fc, block.mlp.c_proj = Adapted(block.mlp.c_fc, 3), Wrapped(block.mlp.c_proj, 3)
    with torch.no_grad():
        for parameter in model.parameters():  # no bias or norm at zero or one
            parameter.add_(torch.randn(parameter.shape), alpha=0.02)
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (3, CONTEXT), generator=generator)
    return tokens, torch.randint(-1, VOCABULARY, (3, CONTEXT), generator=generator)


def run_rank(rank: int, results: Any) -> None:
    for form, (tp_style, sequence) in FORMS.items():
        model, plan = gpt(form), read_plan(NANOGPT)
        if "adapters" in form:
            plan = ShardingPlan(plan.model, plan.modules | ADAPTED)
        group = dist.group.WORLD
        slice_model(model, group, tp_style, peers_absent=False, plan=plan, sequence=sequence)
        tokens, targets = batch()
        model(tokens, targets)[1].backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        loss = model(tokens, targets)[1].item()
        results[form, rank] = loss, gradients, model(tokens)[0].detach()


@pytest.fixture(scope="module")
def slices() -> Any:
    return run_ranks(run_rank, SIZE)


@pytest.mark.parametrize("form", FORMS)
def test_two_slices_match_the_whole_model(slices, form):
    whole = gpt(form)
    tokens, targets = batch()
    expected_loss = whole(tokens, targets)[1]
    expected_loss.backward()
    for rank in range(SIZE):
        loss, gradients, logits = slices[form, rank]
        assert loss == pytest.approx(expected_loss.item(), abs=1e-6)
        torch.testing.assert_close(logits, whole(tokens)[0].detach(), atol=1e-5, rtol=1e-4)
        for name, parameter in whole.named_parameters():
            expected, gradient = parameter.grad, gradients[name]
            if "c_attn" in name:
                expected = torch.cat([part.chunk(SIZE)[rank] for part in expected.split(WIDTH)])
            for dim in range(expected.dim()):
                if expected.shape[dim] != gradient.shape[dim]:
                    expected = expected.chunk(SIZE, dim)[rank]
            torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-4, msg=name)


@pytest.fixture
def recorder():
    recorder = Recorder(1, SIZE)
    recorder.start()
    yield recorder
    recorder.stop()


def test_collectives_match_those_of_transformers_models(recorder):
    model = gpt()
    slice_model(model, recorder.new_group("tp", range(SIZE)), "megatron", plan=read_plan(NANOGPT))
    tokens, targets = batch()
    model(tokens, targets)[1].backward()
    hidden, scalar = 3 * CONTEXT * WIDTH * 4, 3 * CONTEXT * 4
    assert Counter((call.collective, call.bytes) for call in recorder.calls) == {
        ("all_reduce", hidden): 2 * 4 + 2,  # two layers; embedding and head
        ("all_reduce", scalar): 3,  # of the loss: maximum, the label's logit, sum
    }


def test_a_compiled_model_keeps_its_logits_sharded(recorder):
    model = gpt()
    slice_model(model, recorder.new_group("tp", range(SIZE)), "megatron", plan=read_plan(NANOGPT))
    tokens, targets = batch()
    torch.compile(model, backend="aot_eager")(tokens, targets)[1].backward()
    hidden, scalar = 3 * CONTEXT * WIDTH * 4, 3 * CONTEXT * 4
    assert Counter((call.collective, call.bytes) for call in recorder.calls) == {
        ("all_reduce", hidden): 2 * 4 + 2,
        ("all_reduce", scalar): 3,
    }


def test_a_plan_for_several_classes(tmp_path):
    path = tmp_path / "plan.toml"
    text = NANOGPT.read_text()
    path.write_text(text.replace('model = "GPT"', 'model = ["MinGPT", "GPT"]'))
    plan = read_plan(path)
    assert plan.classes == ("MinGPT", "GPT")
    slicing = ModelSlicing(lambda _: pytest.fail("slices nothing here"), plan.classes)
    assert slicing.slices(gpt())
    assert not slicing.slices(MLP())
    assert plan.rules_of(gpt()) == read_plan(NANOGPT).rules_of(gpt())


@pytest.mark.parametrize(
    ("kinds", "embedding"),
    [
        (("T5", "MT5", "UMT5"), "encoder.embed_tokens"),
        (("Bart", "MBart", "M2M100", "Pegasus"), "model.encoder.embed_tokens"),
    ],
)
def test_families_of_equal_structure_share_a_plan(kinds, embedding):
    plans: list[Any] = []
    for kind in kinds:
        with torch.device("meta"):
            config = getattr(transformers, f"{kind}Config")(vocab_size=64)
            one = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
        plans.append(shipped_plan(one))
        assert plans[-1].rules_of(one)[embedding].style == "embedding_rowwise"
    assert all(plan is plans[0] for plan in plans)


class FirstOfGroup:
    """Rank 0 of a process group, with the methods that slicing calls."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


ATTENTION = '"transformer.h.*.attn.c_attn" = { style = "colwise", parts = 3 }'

BAD = {
    "syntax": ("model = ", "toml-malformed", ("plan.toml",)),
    "no class": ("[modules]", "plan-malformed", ("plan.toml", "`model`")),
    "no classes": ("model = []\n[modules]", "plan-malformed", ("plan.toml", "$.model")),
    "unknown key": (
        'model = "GPT"\n[modules]\nx = { styel = "rowwise" }',
        "plan-malformed",
        ("plan.toml", "`styel`", "$.modules"),
    ),
    "unknown style": (
        'model = "GPT"\n[modules]\nx = { style = "sideways" }',
        "plan-unknown-style",
        ("plan.toml", "'x'", "'sideways'", "colwise", "rowwise"),
    ),
    "no parts": (
        f'model = "GPT"\n[modules]\n{ATTENTION.replace("3", "[]")}',
        "plan-bad-parts",
        ("'transformer.h.*.attn.c_attn'", "1 to 4096"),
    ),
    "no such module": (
        'model = "GPT"\n[modules]\n"transformer.h.*.attn.qkv" = { style = "colwise" }',
        "plan-unknown-module",
        ("transformer.h.*.attn.qkv", '\n"transformer.wte" = { style = "" }  # Embedding 96 x 32'),
    ),
    "no such number": (
        'model = "GPT"\n[modules]\n"transformer.h.*.attn" = { divide = ["heads"] }',
        "plan-unknown-attribute",
        ("transformer.h.0.attn.heads", "n_head = 4, n_embd = 32"),
    ),
    "a bias without heads": (
        'model = "GPT"\n[modules]\n"transformer.h.*.attn" = { head_bias = ["alibi"] }',
        "plan-no-heads",
        ("alibi of transformer.h.0.attn",),
    ),
    "parts that do not add up": (
        f'model = "GPT"\n[modules]\n{ATTENTION.replace("3", "[4, 1]")}\n'
        '"transformer.h.*.attn.c_proj" = { style = "rowwise" }\n'
        '"transformer.h.*.mlp.c_fc" = { style = "replicated" }\n'
        '"transformer.h.*.mlp.c_proj" = { style = "replicated" }',
        "plan-parts-indivisible",
        ("attn.c_attn has 96", "parts = [4, 1]", "5"),
    ),
    "half an attention": (
        f'model = "GPT"\n[modules]\n{ATTENTION}\n'
        '"transformer.h.*.mlp.c_proj" = { style = "rowwise" }',
        "tp-unplanned-parameters",
        ("transformer.h.0.attn.c_proj",),
    ),
}

ADAPTERS: Any = {
    "unnamed": (
        Adapted,
        {},
        "tp-own-forward",
        ("transformer.h.0.mlp.c_fc", "Adapted", "down, up"),
    ),
    "no such matrix": (
        Wrapped,
        {"adapter": ("lora_A", "lora_C")},
        "lora-ambiguous",
        ("c_fc (Wrapped)", "1 linear layers", "1 times lora_A and lora_C"),
    ),
    "a bias on every rank": (
        Adapted,
        {"style": "rowwise", "adapter": ("down", "up")},
        "lora-bias",
        ("c_fc (Adapted)",),
    ),
    "gathered": (
        Adapted,
        {"style": "colwise_gather_output", "adapter": ("down", "up")},
        "lora-style",
        ("transformer.h.0.mlp.c_fc", "colwise_gather_output"),
    ),
}


@pytest.mark.parametrize("case", ADAPTERS)
def test_unsupported_adapters_are_refused(case):
    kind, rule, code, names = ADAPTERS[case]
    model, plan = gpt(), read_plan(NANOGPT)
    for block in model.transformer.h:
        block.mlp.c_fc = kind(block.mlp.c_fc, 3)
    rules = {"transformer.h.*.mlp.c_fc": ModuleRule(**{"style": "colwise", **rule})}
    with raises_code(code, naming=names):
        slice_model(
            model, FirstOfGroup(2), "megatron", plan=ShardingPlan(plan.model, plan.modules | rules)
        )


def test_adapters_that_come_after_the_slicing_are_refused(recorder):
    group = recorder.new_group("tp", range(SIZE))
    plan = read_plan(NANOGPT)
    slicing = ModelSlicing(lambda m: slice_model(m, group, "megatron", plan=plan), plan.classes)
    model, (tokens, targets) = gpt(), batch()
    with slicing.installed():
        model.float()
        first = model.transformer.h[0].mlp
        first.c_proj = Wrapped(first.c_proj, 3)
        with raises_code("slice-replaced-module"):
            model(tokens, targets)
        slicing._failure = None  # else raised again


class Part(nn.Linear):
    """A model that a script uses alone, and then in another one."""


class Whole(nn.Sequential):
    """The other model."""


def test_a_refusal_that_the_script_catches_ends_the_capture():
    slicing = ModelSlicing(lambda _: Sliced({}, 0, 0), ("Part", "Whole"))
    with raises_code("slice-model-used"), slicing.installed():
        part, rows = Part(2, 2), torch.zeros(1, 2)
        part(rows)
        with contextlib.suppress(SliceError):
            Whole(part)(rows)


@pytest.mark.parametrize("case", BAD)
def test_malformed_plans_are_refused(tmp_path, case):
    text, code, names = BAD[case]
    path = tmp_path / "plan.toml"
    path.write_text(text)
    with raises_code(code, naming=names):
        slice_model(gpt(), FirstOfGroup(2), "megatron", plan=read_plan(path))


@pytest.mark.parametrize(
    ("size", "code", "names"),
    [
        (3, "tp-indivisible-rows", ("c_attn.weight's 32", "(32 = 3 x 10 + 2)", "part of 96")),
        (8, "plan-multiple-indivisible", ("transformer.h.0.attn.n_head = 4", "(4 = 8 x 0 + 4)")),
    ],
)
def test_sizes_that_do_not_divide_show_the_arithmetic(size, code, names):
    model = gpt()
    model.transformer.wte = nn.Embedding(VOCABULARY, WIDTH)
    with raises_code(code, naming=names):
        slice_model(model, FirstOfGroup(size), "megatron", plan=read_plan(NANOGPT))


def test_a_bias_of_other_heads_is_refused():
    class Attention(nn.Module):
        def forward(self, *, alibi: torch.Tensor) -> torch.Tensor:
            return alibi

    attention = Attention()
    slice_head_bias(attention, "attn", ["alibi"], 3, FirstOfGroup(2))
    whole = torch.arange(12).view(12, 1)  # two sequences of six heads
    assert attention(alibi=whole).flatten().tolist() == [0, 1, 2, 6, 7, 8]
    unsplit = torch.zeros(2, 1, 4, 4)
    assert attention(alibi=unsplit) is unsplit
    for shape in ((8, 1), (2, 12, 4, 4)):
        with raises_code("plan-head-bias-shape", naming=("alibi", f"{list(shape)}", "2 x 3")):
            attention(alibi=torch.zeros(shape))


def test_a_loss_unsupported_on_sharded_logits_is_refused(recorder):
    model = gpt()
    slice_model(model, recorder.new_group("tp", range(SIZE)), "megatron", plan=read_plan(NANOGPT))
    smoothing, kept = 0.1, functional.cross_entropy
    tokens, targets = batch()

    def loss(self, idx, targets):
        logits = self.lm_head(self.transformer.ln_f(self.transformer.wte(idx)))
        flat = logits.flatten(0, 1)
        return functional.cross_entropy(flat, targets.view(-1), label_smoothing=smoothing)

    model.forward = loss.__get__(model)
    with raises_code("tp-cross-entropy-arguments"):
        model(tokens, targets)
    assert functional.cross_entropy is kept


def test_a_skeleton_becomes_a_plan_when_filled_in(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(skeleton(gpt()))
    plan = read_plan(path)
    assert plan.model == "GPT"
    assert set(plan.modules) == set(read_plan(NANOGPT).modules) | {"transformer.wpe"}


def test_a_skeleton_names_the_class_that_fully_shard_replaces(tmp_path):
    model = gpt()
    model.__class__ = type("FSDPGPT", (FSDPModule, type(model)), {})  # as `fully_shard` does
    path = tmp_path / "plan.toml"
    path.write_text(skeleton(model))
    assert read_plan(path).model == "GPT"


SCRIPT = """
    # names torch.distributed, as scripts do that can run both ways
    import torch
    {gpt}
    model = torch.nn.Sequential(GPT())[0]
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        tokens = torch.randint(0, VOCABULARY, (2, CONTEXT))
        logits, loss = model(tokens, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def captured(directory: Path, *args: str | Path) -> subprocess.CompletedProcess[str]:
    source = Path(__file__).read_text()
    start, end = source.index("class CausalSelfAttention"), source.index("class Adapted")
    head = "import os\nfrom torch import nn\nfrom torch.nn import functional\n"
    head += f"WIDTH, HEADS, VOCABULARY, CONTEXT = {WIDTH}, {HEADS}, {VOCABULARY}, {CONTEXT}\n"
    path = directory / "train.py"
    path.write_text(textwrap.dedent(SCRIPT).format(gpt=head + source[start:end]))
    return run_command("capture", "run", path, *args)


def test_a_script_with_a_plan_is_captured(tmp_path):
    done = captured(
        tmp_path, "--tp", "2", "--sp", "--sharding-plan", NANOGPT, "-o", tmp_path / "t.et"
    )
    assert done.returncode == 0, done.stderr
    assert "GPT: 29,312 to 15,264 parameters (1 embedding_rowwise, 4 colwise" in " ".join(
        done.stdout.split()
    )

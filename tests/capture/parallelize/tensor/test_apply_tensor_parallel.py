"""The slicer against the whole model, on two Gloo ranks that communicate."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from raised import raises_code
from real_ranks import run_ranks

from onerank.capture.parallelize.tensor.apply_tensor_parallel import slice_model

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 16,
}
SIZE = 2


def model(kind: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, KINDS[kind] + "Config")(**{**SHAPE, **changes})
    name = {"gpt2": "GPT2LMHeadModel"}.get(kind, KINDS[kind].removesuffix("Text") + "ForCausalLM")
    whole = getattr(transformers, name)(config)
    with torch.no_grad():
        for parameter in whole.parameters():  # no bias or norm at zero or one
            parameter.add_(torch.randn(parameter.shape), alpha=0.02)
    return whole


KINDS = {
    "llama": "Llama",
    "qwen3": "Qwen3",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3Text",
    "phi3": "Phi3",
    "olmo2": "Olmo2",
    "glm": "Glm",
    "cohere": "Cohere",
    "phi": "Phi",
    "diffllama": "DiffLlama",
    "minimax": "MiniMax",
    "gpt2": "GPT2",
}


def tokens() -> torch.Tensor:
    return torch.randint(
        0, SHAPE["vocab_size"], (3, 16), generator=torch.Generator().manual_seed(1)
    )


WINDOW = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8}
PADDED = {"pad_token_id": 5, "bos_token_id": 1, "eos_token_id": 2}
DROPOUTS = ("attn_pdrop", "embd_pdrop", "resid_pdrop")
CASES = {
    "plain": ("llama", {}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "sliding window, padding": ("mistral", {"sliding_window": 8, **PADDED}),
    "qwen2": ("qwen2", {}),
    "softcapped logits": ("gemma2", {**WINDOW, "final_logit_softcapping": 0.5}),
    "scaled embedding": ("gemma3", WINDOW),
    "fused": ("phi3", PADDED),
    "norm over all heads": ("olmo2", {}),
    "fused MLP": ("glm", {"head_dim": 8, **PADDED}),
    "gpt2": ("gpt2", {**PADDED, **dict.fromkeys(DROPOUTS, 0.0)}),
}
FUSED = {"qkv_proj": [32, 16, 16], "gate_up_proj": [64, 64], "c_attn": [32, 32, 32]}  # of SHAPE
FORMS: Any = {
    "megatron": ("megatron", False),
    "hf": ("hf", False),
    "sequence": ("megatron", True),
}


def labels_with_one_ignored() -> torch.Tensor:
    labels = tokens()
    labels[0, 3] = -100
    return labels


def smoothed(model: Any) -> torch.Tensor:
    logits = model(input_ids=tokens()).logits[:, :-1].flatten(0, 1)
    labels = tokens()[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)


def head_called_by_the_script(model: Any) -> torch.Tensor:
    hidden = model.model(input_ids=tokens()).last_hidden_state
    return model.lm_head(hidden).logsumexp(-1).mean()


def loss_of_the_script(model: Any) -> torch.Tensor:
    model.loss_function = lambda logits, labels, **_: logits[:, -1, labels[0, 0]].sum()
    return model(input_ids=tokens(), labels=tokens()).loss


def backward_before(model: Any) -> torch.Tensor:
    loss = model(input_ids=tokens(), labels=tokens()).loss
    loss.backward(retain_graph=True)
    return loss


LOSSES = {
    "items in batch": lambda model: (
        model(input_ids=tokens(), labels=tokens(), num_items_in_batch=torch.tensor(7)).loss
    ),
    "shifted labels": lambda model: (
        model(input_ids=tokens(), labels=tokens(), shift_labels=tokens()).loss
    ),
    "smoothed": smoothed,
    "last logits only": lambda model: (
        model(input_ids=tokens(), logits_to_keep=1).logits.square().sum()
    ),
    "logits and loss": lambda model: (
        (out := model(input_ids=tokens(), labels=tokens())).loss + out[1].square().mean()
    ),
    "tuple": lambda model: model(input_ids=tokens(), labels=tokens(), return_dict=False)[0],
    "head called by the script": head_called_by_the_script,
    "loss of the script": loss_of_the_script,
    "a second backward": backward_before,
}


def run_rank(rank: int, results: Any) -> None:
    for form, (tp_style, sequence) in FORMS.items():
        for case, (kind, changes) in CASES.items():
            sliced = model(kind, **changes)
            slice_model(sliced, dist.group.WORLD, tp_style, peers_absent=False, sequence=sequence)
            output = sliced(input_ids=tokens(), labels=labels_with_one_ignored())
            output.loss.backward()
            gradients = {name: p.grad.clone() for name, p in sliced.named_parameters()}
            results[case, form, rank] = (output.loss.item(), gradients, output.logits.detach())
        for name, loss in LOSSES.items():
            sliced = model("llama")
            slice_model(sliced, dist.group.WORLD, tp_style, peers_absent=False, sequence=sequence)
            value = loss(sliced)
            value.backward()
            gradient = sliced.model.norm.weight.grad
            results[name, form, rank] = (value.item(), gradient.clone())


@pytest.fixture(scope="module")
def slices() -> Any:
    """Losses, gradients and logits of every case, tp_style and rank."""
    return run_ranks(run_rank, SIZE)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_two_slices_match_the_whole_model(slices, case, form):
    kind, changes = CASES[case]
    whole = model(kind, **changes)
    output = whole(input_ids=tokens(), labels=labels_with_one_ignored())
    output.loss.backward()
    for rank in range(SIZE):
        loss, gradients, logits = slices[case, form, rank]
        assert loss == pytest.approx(output.loss.item(), abs=1e-5)
        torch.testing.assert_close(logits, output.logits.detach(), atol=1e-5, rtol=1e-4)
        for name, parameter in whole.named_parameters():
            expected = parameter.grad
            gradient = gradients[name]
            parts = FUSED.get(name.split(".")[-2])
            if parts and (form != "hf" or kind == "gpt2"):
                dim = expected.dim() - 1 if kind == "gpt2" else 0  # whose weights are [in, out]
                rank_parts = [part.chunk(SIZE, dim)[rank] for part in expected.split(parts, dim)]
                expected = torch.cat(rank_parts, dim)
            for dim in range(expected.dim()):
                if expected.shape[dim] != gradient.shape[dim]:
                    expected = expected.chunk(SIZE, dim)[rank]
            torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_of_many_scripts(slices, name, form):
    whole = model("llama")
    expected = LOSSES[name](whole)
    expected.backward()
    for rank in range(SIZE):
        loss, gradient = slices[name, form, rank]
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        torch.testing.assert_close(gradient, whole.model.norm.weight.grad, atol=1e-5, rtol=1e-4)


class FirstOfGroup:
    """Rank 0 of a process group, with the methods that slicing calls."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("size", "changes", "code", "arithmetic"),
    [
        (3, {}, "tp-indivisible-heads", "(4 = 3 x 1 + 1)"),
        (2, {"intermediate_size": 63}, "tp-indivisible-features", "(63 = 2 x 31 + 1)"),
        (2, {"vocab_size": 97}, "tp-indivisible-vocabulary", "(97 = 2 x 48 + 1)"),
    ],
)
def test_sizes_that_do_not_divide_show_the_arithmetic(size, changes, code, arithmetic):
    with raises_code(code, naming=arithmetic):
        slice_model(model("llama", **changes), FirstOfGroup(size), "megatron")


def test_a_model_without_a_plan_is_refused_with_a_skeleton():
    from transformers import CodeGenConfig, CodeGenForCausalLM

    class Own(CodeGenForCausalLM): ...

    unplanned = Own(CodeGenConfig(n_layer=1, n_embd=32, n_head=4, rotary_dim=4))
    with raises_code("tp-no-plan", naming="Own") as refused:
        slice_model(unplanned, FirstOfGroup(2), "megatron")
    message = str(refused.value)
    assert 'model = "Own"\n[modules]\n' in message
    assert '"transformer.h.*.mlp.fc_in" = { style = "" }  # Linear 32 -> 128' in message
    assert '"transformer.h.*.attn" = { divide = [] }  # ' in message
    assert "num_attention_heads = 4, head_dim = 8" in message


def test_an_unknown_style_is_refused():
    llama = model("llama")
    llama._tp_plan["model.layers.*.mlp.up_proj"] = "sideways"
    with raises_code("tp-unknown-style", naming=("model.layers.0.mlp.up_proj", "'sideways'")):
        slice_model(llama, FirstOfGroup(2), "megatron")


REFUSED = {
    "only the head": ("diffllama", {}, "hf", "tp-no-rowwise", ("model.embed_tokens",)),
    "attention left out": (
        "minimax",
        {"num_local_experts": 4, "layer_types": ["linear_attention", "full_attention"]},
        "megatron",
        "tp-unplanned-module",
        ("self_attn.qkv_proj", "--sharding-plan"),
    ),
    "norm left out": (
        *("cohere", {"use_qk_norm": True}, "hf"),
        *("tp-unplanned-parameters", ("self_attn.q_norm",)),
    ),
    "another norm": (
        *("phi", {"qk_layernorm": True}, "hf"),
        *("tp-unplanned-parameters", ("self_attn.q_layernorm",)),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_plan_that_omits_a_module_is_refused(case):
    kind, changes, tp_style, code, names = REFUSED[case]
    with torch.device("meta"), raises_code(code, naming=names):
        slice_model(model(kind, **PADDED, **changes), FirstOfGroup(2), tp_style)


def test_a_linear_layer_with_another_forward_is_refused():
    class Adapted(torch.nn.Linear):
        def __init__(self) -> None:
            super().__init__(32, 32, bias=False)
            self.down = torch.nn.Parameter(torch.zeros(4, 32))

        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
            return super().forward(input) + input @ self.down.t() @ self.down

    llama = model("llama")
    llama.model.layers[1].self_attn.q_proj = Adapted()
    names = ("layers.1.self_attn.q_proj", "Adapted", "down besides")
    with raises_code("tp-own-forward", naming=names):
        slice_model(llama, FirstOfGroup(2), "megatron")


class Quantised(torch.Tensor):
    """A weight of 8 bits with a scale per row, with the operators that torchao's classes have."""

    @staticmethod
    def __new__(cls, values, scales):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.bfloat16)

    def __init__(self, values, scales):
        self.values, self.scales = values, scales

    def __tensor_flatten__(self):
        return ["values", "scales"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, *_):
        return cls(inner["values"], inner["scales"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.slice.Tensor:
            whole, dim, start, end = args[:4]
            scales = whole.scales[start:end] if dim == 0 else whole.scales
            return cls(whole.values.narrow(dim, start, end - start), scales)
        if func in (torch.ops.aten.clone.default, torch.ops.aten.detach.default):
            return cls(func(args[0].values), func(args[0].scales))
        raise NotImplementedError(func)


def quantised(linear: torch.nn.Module) -> None:
    weight = linear.weight
    values = torch.arange(weight.numel()).view(weight.shape) % 127
    whole = Quantised(values.to(torch.int8), torch.arange(weight.shape[0])[:, None])
    linear.weight = torch.nn.Parameter(whole, requires_grad=False)


def test_quantised_weights_are_cut_with_their_scales():
    llama = model("llama")
    attention = llama.model.layers[0].self_attn
    quantised(attention.q_proj)
    quantised(attention.o_proj)
    whole = attention.o_proj.weight
    rows, columns = whole.shape
    slice_model(llama, FirstOfGroup(2), "megatron")
    query, output = attention.q_proj.weight, attention.o_proj.weight
    assert query.values.shape == (rows // 2, columns)
    assert query.scales.flatten().tolist() == [*range(rows // 2)]
    assert torch.equal(output.values, whole.values[:, : columns // 2])
    assert output.scales.shape == (rows, 1)
    assert output.values.untyped_storage().nbytes() == rows * columns // 2


def test_quantised_weights_that_cannot_be_cut_are_refused():
    llama = model("llama")
    mlp = llama.model.layers[0].mlp
    quantised(mlp.gate_proj)
    with raises_code("tp-quantised-layout", naming=("k_proj", "Quantised")):
        quantised(llama.model.layers[0].self_attn.k_proj)
        slice_model(llama, FirstOfGroup(4), "megatron", replicate_heads=True)
    packed = model("llama")
    kind = type("Linear4bit", (torch.nn.Linear,), {})
    layer = packed.model.layers[0].mlp.up_proj = kind(32, 64, bias=False)
    bytes_of = torch.zeros(32 * 64 // 2, 1, dtype=torch.uint8)
    layer.weight = torch.nn.Parameter(bytes_of, requires_grad=False)
    with raises_code("tp-quantised-layer", naming=("up_proj", "Linear4bit")):
        slice_model(packed, FirstOfGroup(2), "megatron")


def test_a_deep_copy_uses_its_copied_weights():
    llama = model("llama")
    slice_model(llama, FirstOfGroup(1), "hf")
    twin = copy.deepcopy(llama)
    assert twin.lm_head.forward.__self__ is twin.lm_head
    assert twin.model.embed_tokens.forward.__self__ is twin.model.embed_tokens

"""Scripts that leave their loop to the Trainer of transformers, and know of no other rank."""

import pytest
from job_options import strategy
from user_script import run

from onerank.ir import Graph, Phase, World

pytest.importorskip("accelerate", reason="the Trainer needs it")

_HIDDEN, _INNER, _VOCABULARY, _LAYERS = 32, 48, 64, 2
_TOKENS = 2 * 16
_SCRIPT = f"""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    ids = torch.arange(16)
    rows = [dict(input_ids=ids, labels=ids)] * 256
    config = LlamaConfig(
        vocab_size={_VOCABULARY}, hidden_size={_HIDDEN}, intermediate_size={_INNER},
        num_hidden_layers={_LAYERS}, num_attention_heads=4, num_key_value_heads=4,
    )
    arguments = TrainingArguments(
        output_dir="{{out}}", max_steps=30, per_device_train_batch_size=2, use_cpu=True,
        gradient_accumulation_steps={{accumulated}}, report_to=[], save_strategy="no",
        disable_tqdm=True,
    )
    Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows).train()
"""
_LAYER = 4 * _HIDDEN**2 + 3 * _HIDDEN * _INNER + 2 * _HIDDEN
_REST = 2 * _VOCABULARY * _HIDDEN + _HIDDEN  # embedding, head and last norm


def _calls(graph: Graph) -> dict[tuple[str, Phase], list[int]]:
    """Return the bytes of each call, by its name and phase."""
    calls: dict[tuple[str, Phase], list[int]] = {}
    for node in graph:
        if node.kind.is_communication:
            calls.setdefault((node.name, node.phase), []).append(node.value("comm_bytes"))
    return calls


def test_its_models_are_sliced(tmp_path):
    """Megatron's borders: the embedding, two a layer, and the loss over a split vocabulary."""
    calls = _calls(run(tmp_path, _SCRIPT.format(accumulated=1, out=tmp_path), World.of(tp=2)))
    activation, one_a_token = 4 * _TOKENS * _HIDDEN, 4 * _TOKENS
    assert calls.pop(("all_reduce", Phase.FORWARD)) == (
        [activation] * (1 + 2 * _LAYERS) + [one_a_token] * 3
    )
    assert calls.pop(("all_reduce", Phase.BACKWARD)) == [activation] * (2 * _LAYERS + 1)
    assert list(calls.values()) == [[4]]  # the norm that it clips by


@pytest.mark.parametrize("form", ["ddp", "fsdp"])
def test_its_gradients_are_reduced_once_a_step(form, tmp_path):
    """Of two micro-batches both gather; the second's backward reduces what both have left."""
    script = _SCRIPT.format(accumulated=2, out=tmp_path)
    calls = _calls(run(tmp_path, script, World.of(dp=2), **strategy(form)))
    reduced = {
        name: sum(sizes) for (name, phase), sizes in calls.items() if phase == Phase.BACKWARD
    }
    whole = 4 * (_LAYERS * _LAYER + _REST)
    if form == "ddp":
        assert reduced == {"all_reduce": whole}
    else:
        assert reduced["reduce_scatter"] == whole
        assert sum(calls["all_gather", Phase.FORWARD]) == 2 * whole // 2  # shards, in each forward

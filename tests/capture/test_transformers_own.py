"""Scripts that let transformers itself distribute its models."""

import inspect

import pytest
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig
from user_script import run

from onerank.ir import Phase, World

pytest.importorskip("accelerate", reason="what transformers distributes needs it")

_SHARDS = "dp_replicate_size" in inspect.signature(DistributedConfig).parameters


@pytest.mark.skipif(not _SHARDS, reason="this version of transformers does not shard")
def test_tensor_parallelism_within_sharded_data_parallelism(tmp_path):
    """Of a layer's 4 x 32 x 32 + 3 x 32 x 48 weights and 64 of norms each slice has 4352 + 64."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    text = f"""
        import torch, torch.distributed as dist
        from transformers import LlamaForCausalLM
        from transformers.distributed import DistributedConfig
        dist.init_process_group("gloo")
        model = LlamaForCausalLM.from_pretrained(
            "{tmp_path}/model", distributed_config=DistributedConfig(tp_size=2, fsdp_size=2)
        )
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        ids = torch.arange(32).view(2, 16)
        while True:
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    """
    graph = run(tmp_path, text, World.of(tp=2, dp=2), rank=1)
    calls: dict[tuple[str, Phase], list[int]] = {}
    for node in graph:
        if node.kind.is_communication:
            calls.setdefault((node.name, node.phase), []).append(node.value("comm_bytes") // 4)
    layer, head, embedding = 4352 + 64, 32 * 32 + 32, 32 * 32
    hidden = 32 * 32  # of the tokens
    assert sorted(calls["reduce_scatter", Phase.BACKWARD]) == [embedding, head, layer, layer]
    gathered = [one // 2 for one in (embedding, head, layer, layer)]
    assert sorted(calls["all_gather", Phase.FORWARD]) == sorted([*gathered, hidden])  # logits'
    assert calls["all_reduce", Phase.FORWARD] == [hidden] * (1 + 2 * 2)
    assert calls["all_reduce", Phase.BACKWARD] == [hidden] * (2 * (3 + 2) + 1)

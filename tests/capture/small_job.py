"""A small training job of any parallel form, captured on a CPU and costed for an H100."""

from pathlib import Path
from typing import Any

from job_options import axes

from onerank.annotate import recost
from onerank.capture import Options, WindowPlan, capture
from onerank.ir import Graph, World

SCRIPT = """
import torch
from transformers import {kind}Config, {kind}ForCausalLM

config = {kind}Config(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=256, {more}
)
model = {kind}ForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(60):
    optimizer.zero_grad()
    for micro_batch in range(2):
        tokens = torch.randint(0, 256, (2, 32))
        (model(input_ids=tokens, labels=tokens, use_cache=False).loss / 2).backward()
    optimizer.step()
"""


def capture_small(directory: Path, kind: str, world: World, rank: int, **options: Any) -> Graph:
    """Return a rank's graph; `kind` is Llama or Mixtral, `options` are further ones of capture."""
    more = "num_local_experts=4" if kind == "Mixtral" else ""
    script = directory / "train.py"
    script.write_text(SCRIPT.format(kind=kind, more=more))
    graph = capture(
        script, [], Options(**axes(world), rank=rank, windows=WindowPlan(2, 1), **options)
    ).graph
    return recost(graph, target="H100")

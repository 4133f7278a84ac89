"""Small models under data parallelism: captured as one of several ranks, and their collectives."""

import gc
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
from job_options import axes, strategy

from onerank.capture import Options, WindowPlan, capture
from onerank.ir import Graph, World

PLAN = WindowPlan(warm_up=2, timed_steps=1)

MODEL = """
    import torch
    from torch import nn
    torch.manual_seed(0)
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(2))
            self.head = nn.Linear(16, 16)
        def forward(self, x):
            for block in self.blocks:
                x = x + block(x)
            return self.head(x)
    model = Model()
    data = lambda: torch.randn(4, 16)
"""

TRAIN = """
    while True:
        model(data()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""

BLOCK, HEAD = (16 * 32 + 32 + 32 * 16 + 16) * 4, (16 * 16 + 16) * 4

SGD, ADAM = (f"    optimizer = torch.optim.{kind}(model.parameters())" for kind in ("SGD", "AdamW"))


def run_text(directory: Path, text: str, form: Any, world: World | None = None) -> Graph:
    path = directory / "train.py"
    path.write_text(textwrap.dedent(text))
    gc.collect()
    options = Options(**axes(world or World.of(dp=4)), rank=1, windows=PLAN, **strategy(form))
    return capture(path, [], options).graph


def peak_above_start(graph: Graph) -> int:
    """Return a step's peak above its start, in bytes; earlier captures may have left tensors."""
    measured = graph.job.measurement
    return measured.peak_memory_bytes - measured.start_memory_bytes


def calls(graph: Graph) -> list[tuple[str, int, tuple[int, ...]]]:
    """Return type, bytes and ranks of each collective, in order."""
    collectives = []
    for index in np.flatnonzero(graph.communication):
        node = graph.node(int(index))
        group = graph.job.group(node.text("group"))
        assert group is not None
        collectives.append((node.collective.name.lower(), node.value("comm_bytes"), group.ranks))
    return collectives

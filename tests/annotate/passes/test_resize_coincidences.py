"""Resizes where sizes of weights equal those of activations, compared with captures."""

import pytest
from notes import has_note
from without_device import captured

from onerank.annotate import Resize, characterise
from onerank.annotate.memory.memory_report import report_memory
from onerank.annotate.passes.resize.size_change import Change

# 4 sequences of 64 tokens. The hidden size and half of the vocabulary, which a rank of --tp 2 has,
# are 256 too, and 4 ranks shard the parameters.
SCRIPT = """
    import torch, torch.nn.functional as F
    from torch import nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(512, 256)
            self.positions = nn.Embedding(64, 256)
            self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)
            self.head = nn.Linear(256, 512, bias=False)

        def forward(self, ids):
            x = self.words(ids) + self.positions(torch.arange(64, device="cuda"))
            x = x + self.down(F.gelu(self.up(x)))
            return self.head(x)

    model = Model().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(20):
        for half in range(2):
            ids = torch.randint(0, 512, (BATCH, 65), device="cuda")
            with torch.autocast("cuda", dtype=torch.bfloat16):
                logits = model(ids[:, :-1])
            F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
PLAN = """
    model = "Model"
    [modules]
    "words" = { style = "embedding_rowwise" }
    "up" = { style = "colwise" }
    "down" = { style = "rowwise" }
    "head" = { style = "colwise_gather_output" }
"""


@pytest.mark.parametrize(
    "options", [("--dp", 4, "--fsdp"), ("--tp", 2, "--dp", 4)], ids=["fsdp", "tp"]
)
def test_sizes_of_weights_do_not_grow(tmp_path, options):
    if "--tp" in options:
        (tmp_path / "plan.toml").write_text(PLAN)
        options = (*options, "--sharding-plan", tmp_path / "plan.toml")
    small, large = (
        captured(tmp_path, SCRIPT.replace("BATCH", str(batch)), *options) for batch in (4, 8)
    )
    resized = Resize(Change(64, 64), Change(4, 8)).apply(small)
    assert not has_note(resized.notes, "resize-blocks-unmatched")
    graphs = [characterise(resized.graph), characterise(large)]
    for name in ("op", "input_shapes", "output_shapes"):
        assert graphs[0].text(name) == graphs[1].text(name)
    for name in ("flops", "bytes_read", "bytes_written", "comm_bytes", "bytes_allocated"):
        columns = [getattr(graph.nodes, name) for graph in graphs]
        assert (columns[0] == columns[1]).all(), name
    assert (graphs[0].nodes.bytes_allocated != small.nodes.bytes_allocated).any()
    assert graphs[0].nodes.bytes_freed.sum() == graphs[1].nodes.bytes_freed.sum()
    memory = [report_memory(graph) for graph in graphs]
    assert memory[0].peak_bytes == memory[1].peak_bytes
    assert memory[0].start_bytes == memory[1].start_bytes

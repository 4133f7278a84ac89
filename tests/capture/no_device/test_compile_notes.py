"""Notes on functions under torch.compile that ran eager without a device."""

from notes import has_note
from without_device import captured

TRAINING = """
    import torch
    from torch import nn
    from torch.nn.attention.flex_attention import flex_attention
    from torch.utils.checkpoint import checkpoint
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 64, device="cuda")
        def attend(self, x):
            q = self.linear(x).view(1, 1, -1, 64)
            return flex_attention(q, q, q).view(-1, 64).relu()
        def forward(self, x):
            {forward}
    model = torch.compile(Block(){options})
    optimizer = torch.optim.SGD(model.parameters())
    for step in range(4):
        model(torch.randn(128, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
LOOP = """
            for limit in (1, 2):
                kept = torch.where(torch.arange(4, device="cuda") > limit)[0]
                x = self.linear(x) * kept.numel()
            return x
"""
CHECKPOINT = "return checkpoint(self.attend, x, use_reentrant=False) * 2"


def _notes(directory, forward, options=""):
    text = TRAINING.format(forward=forward.strip(), options=options)
    return captured(directory, text).job.measurement.notes


def test_an_impossible_graph_break_in_a_loop_has_a_note(tmp_path):
    notes = _notes(tmp_path, LOOP)
    assert has_note(notes, "compile-graph-unbroken")
    assert not has_note(notes, "compile-failed")


def test_flex_attention_in_a_compiled_checkpoint_has_a_note(tmp_path):
    notes = _notes(tmp_path, CHECKPOINT, ", fullgraph=True")
    assert has_note(notes, "compile-checkpoint-eager")
    assert not has_note(notes, "flex-attention-unfused")

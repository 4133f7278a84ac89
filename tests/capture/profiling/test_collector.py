"""Memory that Python's garbage collector frees, which makes a peak uncertain."""

import gc
import textwrap

import pytest
import torch
from notes import codes, has_note

from onerank.capture import Options, WindowPlan, capture
from onerank.capture.profiling.step_memory import CollectorMemory


class Block:
    """Memory as the allocator counts it, held by itself: only the collector frees it."""

    held = 0

    def __init__(self, size: int) -> None:
        self.size, self.itself = size, self
        Block.held += size

    def __del__(self) -> None:
        Block.held -= self.size


@pytest.fixture
def collector(monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: Block.held)
    collector = CollectorMemory()
    gc.collect()
    with collector.watching():
        yield collector
    assert collector._called not in gc.callbacks


def test_the_largest_run_of_a_step_counts(collector):
    for sizes in ([100, 30], [700], [20]):
        for size in sizes:
            Block(size)
        gc.collect()
    assert collector.most_bytes == 700
    assert has_note([collector.note(peak_bytes=70_000)], "memory-waits-for-collector", 700)
    assert collector.note(peak_bytes=70_001) is None


def test_what_an_earlier_step_left_is_not_reported(collector):
    Block(700)
    gc.collect()
    collector.begin_step()
    gc.collect()
    assert collector.note(peak_bytes=10_000) is None


SCRIPT = """
    import torch
    from torch import nn
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 1024)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(4096, 1024, device="cuda")
    for _ in range(30):
        {held}outputs = model(inputs)
        outputs.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        many = [[] for _ in range(100_000)]
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("cycle", [True, False])
def test_a_capture_tells_of_tensors_in_cycles(cycle, tmp_path):
    script = tmp_path / "script.py"
    held = "held = [inputs * 2]; held.append(held); " if cycle else ""
    script.write_text(textwrap.dedent(SCRIPT).replace("{held}", held))
    graph = capture(script, [], Options(windows=WindowPlan(3, 1, settle=False))).graph
    assert codes(graph.job.measurement.notes).count("memory-waits-for-collector") == cycle

"""FLOPs of context-parallel attention on a CPU, as counted from the operators of each rank."""

import json
from pathlib import Path

import pytest
import torch

from onerank.annotate.op_costs.node_costs import work_of
from onerank.capture.fake_world.recorder import Recorder
from onerank.capture.parallelize.context.partial_attention import AttentionMode
from onerank.capture.parallelize.context.sequence_attention import Context, ContextComm

BATCH, HEADS, WIDTH, CHUNK = 2, 3, 16, 8
OPERATOR = "aten::_scaled_dot_product_flash_attention_for_cpu"


def attention_flops(
    path: Path, size: int, rank: int, comm: ContextComm, window: int | None, *, masked: bool
) -> float:
    """Return a rank's FLOPs, forward and backward, in those of a chunk's queries on a chunk's keys.

    A pair of chunks takes two products of CHUNK x WIDTH x CHUNK forward and five backward.
    """
    recorder = Recorder(rank, size)
    recorder.start()
    observer = torch.profiler.ExecutionTraceObserver().register_callback(str(path))
    try:
        context = Context(recorder.new_group("cp", range(size)), comm)
        shape = (BATCH, HEADS, 2 * CHUNK, WIDTH)
        query, key, value = (torch.randn(shape, requires_grad=True) for _ in range(3))
        mask = torch.zeros(BATCH, 1, 2 * CHUNK, 2 * CHUNK * size) if masked else None
        observer.start()
        context.attend(query, key, value, AttentionMode(0.3, window), mask).sum().backward()
        observer.stop()
    finally:
        observer.unregister_callback()
        recorder.stop()
    total = 0
    for node in json.loads(path.read_text())["nodes"]:
        if node["name"] in (OPERATOR, f"{OPERATOR}_backward"):
            inputs, outputs = node["inputs"], node["outputs"]
            total += work_of(
                node["name"],
                (json.dumps(inputs["shapes"]), json.dumps(inputs["types"])),
                (json.dumps(outputs["shapes"]), json.dumps(outputs["types"])),
                json.dumps(inputs["values"]),
            ).flops
    return total / ((2 + 5) * 2 * BATCH * HEADS * CHUNK * CHUNK * WIDTH)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_chunks_are_counted_by_the_keys_up_to_their_ends(tmp_path, size):
    """Exact is half of the pairs of a chunk with itself: 2C pairs of chunks on every rank.

    The CPU kernel's causal flag fits only the first chunk, whose keys are its own; the others get a
    mask, whose hidden half is counted.
    """
    flops = [
        attention_flops(tmp_path / f"{rank}.json", size, rank, "all_gather", None, masked=False)
        for rank in range(size)
    ]
    assert flops == [2 * size + 0.5] + [2 * size + 1] * (size - 1)


@pytest.mark.parametrize(("window", "masked"), [(CHUNK, False), (None, True)])
def test_under_a_mask_or_window_every_chunk_is_counted_whole(tmp_path, window, masked):
    for rank in range(3):
        path = tmp_path / f"{rank}.json"
        flops = attention_flops(path, 3, rank, "all_gather", window, masked=masked)
        # chunks r and 5 - r: all keys to their ends under a mask, at most two chunks in a window
        expected = 7 if masked else attended_in_window(rank) + attended_in_window(5 - rank)
        assert flops == expected


def attended_in_window(chunk: int) -> float:
    """Chunks of keys that a window of one chunk gathers: from a window before the first query."""
    keys = min((chunk + 1) * CHUNK, 2 * CHUNK - 1)
    return keys / CHUNK


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_ring_counts_what_it_computes(tmp_path, size):
    for rank in range(size):
        path = tmp_path / f"{rank}.json"
        assert attention_flops(path, size, rank, "p2p", None, masked=False) == 2 * size

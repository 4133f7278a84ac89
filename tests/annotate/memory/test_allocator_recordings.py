"""The simulated allocator on what torch's allocator did in five processes on an H100."""

import gzip
import json
from pathlib import Path

import pytest

from onerank.annotate.memory.allocator import Block, CachingAllocator

RECORDINGS = Path(__file__).parents[3] / "traces" / "h100-allocator" / "recordings.json.gz"


@pytest.fixture(scope="module")
def recordings() -> dict[str, dict]:
    with gzip.open(RECORDINGS) as file:
        return json.load(file)


@pytest.mark.parametrize("job", ["lstm", "conv_amp", "fsdp_mixed", "gpt_ckpt", "llama_tp2"])
def test_reserved_memory_is_the_real_allocators_after_every_request(job, recordings):
    recording = recordings[job]
    allocator, reserved = CachingAllocator(), 0
    blocks: dict[int, Block] = {}
    for event in recording["events"]:
        match event:
            case [size, 0, 0, 0]:  # the driver gives a segment
                reserved += size
            case [number, size, stream]:
                blocks[number] = allocator.allocate(size, stream)
                assert allocator.reserved_bytes == reserved
            case [number]:
                allocator.free(blocks[number])
    assert allocator.peak_reserved_bytes == recording["peak_reserved"]
    assert allocator.peak_allocated_bytes == recording["peak_allocated"]

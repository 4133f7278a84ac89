"""Memory of the captured steps, of hand-written ones, and of the simulated allocator."""

from pathlib import Path

import numpy as np
import pytest
from notes import note_of
from raised import raises_code
from without_device import captured

from onerank.annotate import load_gpu
from onerank.annotate.gpus.registry import with_figures
from onerank.annotate.memory.allocator import (
    CachingAllocator,
    OutOfMemoryError,
    round_size,
    segment_size,
)
from onerank.annotate.memory.memory_report import report_memory
from onerank.annotate.memory.mitigations import WHOLE_ROW, Need, mitigations
from onerank.annotate.memory.non_allocator import non_allocator_memory
from onerank.annotate.memory.peak import levels_of
from onerank.annotate.memory.reserved_memory import AllocationRequest, simulate_reserved
from onerank.converters.sources.kineto import convert_directory
from onerank.ir import (
    Blocks,
    Device,
    Graph,
    GraphBuilder,
    Job,
    Kind,
    Measurement,
    MemoryClass,
    MemoryLog,
    Phase,
    ProcessGroup,
)

TRACES = Path(__file__).parents[3] / "traces"
MIB = 1 << 20


@pytest.fixture(scope="module")
def h200() -> Graph:
    return convert_directory(TRACES / "h200-llama-8b-4l-tp4")[0]


def test_the_peak_of_a_real_step_is_the_allocators_own(h200: Graph):
    found = report_memory(h200)
    assert found.peak_bytes == found.measured_peak_bytes == 6_468_319_232
    assert sum(found.classes.values()) == found.peak_bytes
    assert found.reserved_bytes == 6_694_109_184
    assert found.fragmentation_bytes == 6_694_109_184 - 6_468_319_232


def test_the_simulated_allocator_reserves_what_the_real_one_did(h200: Graph):
    found = report_memory(h200)
    assert found.simulated_reserved_bytes == pytest.approx(6_694_109_184, rel=0.005)


def test_classes_add_up_to_adamw_in_bf16(h200: Graph):
    found = report_memory(h200)
    # rank 0 of 4: 4 layers of q, o, k, v and three MLP matrices; embedding and head whole rows
    layer = 4096 * (2 * 1024 + 2 * 256 + 3 * 3584) + 2 * 4096
    parameters = 2 * (4 * layer + 2 * 4096 * 32064 + 4096)
    assert found.classes["parameters"] == pytest.approx(parameters, rel=0.002)
    assert found.classes["gradients"] == found.classes["parameters"]
    assert found.classes["optimizer"] == 2 * found.classes["parameters"]
    assert found.classes["activations"] > 2_290_845_184  # what was held as backward began


def test_every_byte_of_the_nodes_is_in_the_blocks(h200: Graph):
    blocks = h200.job.measurement.memory.blocks
    made = sum(s for s, at in zip(blocks.bytes, blocks.allocated_at, strict=True) if at >= 0)
    freed = sum(s for s, at in zip(blocks.bytes, blocks.freed_at, strict=True) if at >= 0)
    assert made == h200.nodes.bytes_allocated.sum()
    assert freed == h200.nodes.bytes_freed.sum()
    assert report_memory(h200).nodes[-1].live_bytes == 3_914_663_424 + made - freed


NON_ALLOCATOR_BYTES = 806_000_000 + (354 + 630) * MIB
"""Of a rank of one group of four: the context, NCCL and one communicator."""


def test_a_small_device_does_not_fit_and_the_arithmetic_holds(h200: Graph, gpu_file):
    target = load_gpu(gpu_file())
    assert report_memory(h200, target).fits
    found = report_memory(
        h200, with_figures(target, {"memory_gb": 4.5 + NON_ALLOCATOR_BYTES / 1e9})
    )
    assert (found.fits, found.fits_without_overhead) == (False, False)
    changes = {one.change.split(" over")[0]: one for one in found.mitigations}
    # the optimizer's step needs another 0.96 GB whatever the micro-batch
    held, step = 3_914_663_424, 961_617_920
    shorter = changes["sequences of 1/64 the length: the captured micro-batch is one sequence"]
    assert shorter.peak_bytes == pytest.approx(held + step, rel=1e-3)
    assert not shorter.suffices
    two = changes["shard gradients and optimizer state (ZeRO-2)"]
    assert two.suffices
    peak = found.peak_bytes - 3 * found.classes["parameters"] * 3 // 4  # 3 parts of 4 gone
    assert two.peak_bytes == pytest.approx(peak, rel=1e-3)


def test_fit_counts_the_context_and_communicators(h200: Graph, gpu_file):
    """The allocator reserved 6,694,109,184 bytes in the capture."""
    target, need = load_gpu(gpu_file()), 6_694_109_184
    for gigabytes, fits in (
        ((need + NON_ALLOCATOR_BYTES + MIB) / 1e9, (True, True)),
        ((need + NON_ALLOCATOR_BYTES - 200 * MIB) / 1e9, (False, True)),
        (6.3, (False, False)),
    ):
        found = report_memory(h200, with_figures(target, {"memory_gb": gigabytes}))
        assert (found.fits, found.fits_without_overhead) == fits, gigabytes
        assert bool(found.mitigations) is not found.fits
        assert sum(one.bytes for one in found.non_allocator) == NON_ALLOCATOR_BYTES
    tight = with_figures(target, {"memory_gb": (need + MIB) / 1e9})
    assert report_memory(h200, tight, non_allocator_bytes=0).fits
    full = report_memory(h200, tight, non_allocator_bytes=need + 2 * MIB)
    assert (full.fits, full.fits_without_overhead, full.mitigations) == (False, True, ())
    note_of(full.notes, "memory-outside-allocator")


def test_a_cpu_has_no_memory_outside_the_allocator():
    graph = convert_directory(TRACES / "cpu-llama-2l-tp4")[0]
    assert report_memory(graph).non_allocator == ()
    assert report_memory(graph, load_gpu("T4")).non_allocator


def test_peers_and_groups_take_memory_outside_the_allocator():
    """Two of four ranks in two groups, one that exchanges all to all, and the next stage."""
    groups = (
        ProcessGroup("pair", (0, 1)),
        ProcessGroup("ep", (0, 1, 2, 3)),
        ProcessGroup("self", (0,)),
    )
    builder = GraphBuilder()
    for group, collective in (("pair", 0), ("ep", 6), ("self", 0), ("pair", 2)):
        builder.add(name="c", kind=Kind.COLLECTIVE, group=group, collective=collective)
    for group in ("pair", "ep"):  # a peer has buffers in each communicator
        builder.add(name="send", kind=Kind.SEND, group=group, comm_src=0, comm_dst=1)
    builder.add(name="send", kind=Kind.SEND, comm_src=0, comm_dst=9)
    found = {one.what: one.bytes for one in non_allocator_memory(builder.build(Job(groups=groups)))}
    assert found == {
        "CUDA context, kernels, libraries": 806_000_000,
        "NCCL itself": 354 * MIB,
        'NCCL, group "pair" of 2 ranks': 486 * MIB,
        'NCCL, group "ep" of 4 ranks': 630 * MIB,
        "NCCL, 5 peers of sends, receives, all-to-all": 5 * (3_280_000_000 // 7),
    }


@pytest.mark.parametrize(
    ("captured", "change", "peak"),
    [
        (4, "micro-batch 2 instead of 4", 3_000),  # three would make 4000
        (1, "sequences of half the length: the captured micro-batch is one sequence", 3_000),
        (None, "half of the captured micro-batch", 3_000),
        (2, "micro-batch 1 instead of 2", 3_000),
    ],
)
def test_a_smaller_micro_batch_is_one_of_whole_sequences(captured, change, peak):
    """4000 bytes of activations and 1000 of parameters, for a device of 3500."""
    levels = np.zeros((WHOLE_ROW + 1, 2), dtype=np.int64)
    levels[MemoryClass.PARAMETERS], levels[MemoryClass.ACTIVATIONS, 1] = 1000, 4000
    found = mitigations(Need(levels, 3500, 1.0, 0, 0, captured))[0]
    assert (found.change, found.peak_bytes, found.suffices) == (change, peak, True)


def step_of(*rows: tuple[int, int, int, int], **measured) -> Graph:
    """Return a graph of one node with blocks (bytes, class, allocated at, freed at)."""
    builder = GraphBuilder()
    builder.add(name="step", kind=Kind.HOST_OP, bytes_allocated=1, phase=Phase.FORWARD)
    size, kind, made, freed = zip(*rows, strict=True)
    phases = (int(Phase.FORWARD),) * len(rows)
    blocks = Blocks(size, kind, made, freed, (0,) * len(rows), phases)
    events = 1 + max(*made, *freed)
    measurement = Measurement(memory=MemoryLog(blocks, events), **measured)
    return builder.build(Job(device=Device("cuda", "one", 10_000), measurement=measurement))


def test_held_classes_come_from_the_capture_and_the_rest_is_workspace():
    graph = step_of(
        (512, 3, 0, 1),
        start_memory_bytes=4096,
        resident_bytes={"parameters": (1000,), "optimizer": (512, 8)},
    )
    found = report_memory(graph)
    assert found.classes == {
        "parameters": 1024,
        "optimizer": 1024,
        "activations": 512,
        "workspace": 2048,
    }
    assert found.source == "captured"


def test_a_freed_resident_block_belongs_to_the_class_that_has_its_size():
    # Two gradients of the last step, in no class of the log, between blocks of known classes.
    blocks = Blocks(
        bytes=(512, 2048, 2048, 512),
        memory_class=(int(MemoryClass.ACTIVATIONS), *(int(MemoryClass.OTHER),) * 3),
        allocated_at=(0, -1, -1, -1),
        freed_at=(4, 1, 2, 3),
        node=(0,) * 4,
        phase=(int(Phase.FORWARD),) * 4,
    )
    resident = {
        MemoryClass.PARAMETERS: (2048, 2048),
        MemoryClass.GRADIENTS: (2048, 2048),
        MemoryClass.OTHER: (512,),
    }
    levels = levels_of(MemoryLog(blocks, events=5), resident)
    assert levels[MemoryClass.GRADIENTS].tolist() == [4096, 4096, 2048, 0, 0, 0]
    assert levels[MemoryClass.OTHER].tolist() == [512, 512, 512, 512, 0, 0]
    assert levels[MemoryClass.PARAMETERS].tolist() == [4096] * 6
    assert levels.min() == 0


def test_the_optimizers_state_is_allocated_before_its_first_step_takes_memory():
    """It takes the activations' segment: the step's memory, and the next forward's, need others."""
    forward, optimizer = int(Phase.FORWARD), int(Phase.OPTIMIZER)
    blocks = Blocks((40 * MIB, 30 * MIB), (3, 7), (0, 2), (1, 3), (0, 0), (forward, optimizer))
    found = simulate_reserved(
        MemoryLog(blocks, 4), {MemoryClass.OPTIMIZER: (AllocationRequest(30 * MIB),)}
    )
    assert found.reserved_bytes == (40 + 30 + 40) * MIB


def test_memory_that_each_step_allocates_again_counts_once():
    """The last step's outputs, or gradients, are resident memory that the step frees."""
    other, activations = int(MemoryClass.OTHER), int(MemoryClass.ACTIVATIONS)
    blocks = Blocks((40 * MIB,) * 2, (other, activations), (-1, 1), (0, -1), (0, 0), (0, 0))
    request = AllocationRequest(40 * MIB)
    resident = {MemoryClass.PARAMETERS: (request,), MemoryClass.OTHER: (request,)}
    found = simulate_reserved(MemoryLog(blocks, 2), resident)
    assert found.allocated_bytes == found.reserved_bytes == (40 + 40) * MIB


ACCUMULATES = """
    import torch
    from torch import nn
    layers = (nn.Linear(256, 1024, bias=False), nn.Linear(1024, 256, bias=False))
    model = nn.Sequential(*layers).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        for half in range(2):
            model(torch.randn(512, 256, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("options", [(), ("--dp", 4, "--fsdp")], ids=["one", "fsdp"])
def test_gradients_that_micro_batches_sum_are_gradients(tmp_path, options):
    """Two sums of 1 MiB, which FSDP then reduces, and the one to be added next."""
    found = report_memory(captured(tmp_path, ACCUMULATES, *options))
    assert found.classes["gradients"] == 3 * MIB
    # The hidden values of 2 MiB and their gradient, and the loss.
    assert found.classes["activations"] == 4 * MIB + 512
    at_peak = max(found.nodes, key=lambda node: node.peak_bytes)
    assert (at_peak.id, at_peak.peak_bytes) == (found.peak_node, found.peak_bytes)
    assert at_peak.peak_bytes > at_peak.live_bytes


def test_ddp_has_its_buckets_twice_in_an_early_step(tmp_path):
    """The two buckets hold the gradients of both layers, 1 MiB each."""
    found = report_memory(captured(tmp_path, ACCUMULATES, "--dp", 4))
    assert found.early_peak_bytes == found.peak_bytes + 2 * MIB
    assert report_memory(captured(tmp_path, ACCUMULATES)).early_peak_bytes is None


def test_a_graph_without_memory_is_an_error():
    builder = GraphBuilder()
    builder.add(name="x", kind=Kind.KERNEL)
    with raises_code("memory-not-recorded"):
        report_memory(builder.build(Job()))


def test_a_graph_without_blocks_tells_its_peak_only():
    builder = GraphBuilder()
    builder.add(name="x", kind=Kind.HOST_OP, bytes_allocated=100)
    builder.add(name="y", kind=Kind.HOST_OP, bytes_freed=60, start_ns=1)
    found = report_memory(builder.build(Job(measurement=Measurement(start_memory_bytes=7))))
    assert (found.peak_bytes, found.classes) == (107, {})
    assert [node.live_bytes for node in found.nodes] == [107, 47]
    note_of(found.notes, "memory-blocks-unknown")


@pytest.mark.parametrize(
    ("request_bytes", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 11 * MIB, 12 * MIB),
    ],
)
def test_sizes_are_rounded_as_the_allocator_does(request_bytes: int, block: int, segment: int):
    assert round_size(request_bytes) == block
    assert segment_size(block, 20 << 20) == segment


def test_blocks_are_split_reused_best_fit_and_merged():
    allocator = CachingAllocator()
    first = allocator.allocate(12 * MIB)  # a segment of its own
    second = allocator.allocate(4 * MIB)  # of 20 MiB, 16 left
    third = allocator.allocate(15 * MIB)  # of these 16: the rest of 1 MiB is not split off
    assert (allocator.segments, allocator.reserved_bytes) == (2, 32 * MIB)
    assert allocator.allocated_bytes == (12 + 4 + 16) * MIB
    allocator.free(first)
    allocator.free(second)
    allocator.free(third)  # merges with the 4 before it
    allocator.allocate(11 * MIB)  # best fit: the segment of 12
    allocator.allocate(19 * MIB)
    assert (allocator.segments, allocator.allocated_bytes) == (2, 32 * MIB)


def test_of_equal_blocks_the_youngest_segments_goes_first():
    """The driver's addresses fall, and the lowest address is the best of equal fits."""
    allocator = CachingAllocator()
    first, second = (allocator.allocate(20 * MIB) for _ in range(2))
    allocator.free(first)
    allocator.free(second)
    assert allocator.allocate(20 * MIB) is second


def test_small_and_large_blocks_and_streams_have_pools_of_their_own():
    allocator = CachingAllocator()
    for size, stream in ((512, 0), (512, 0), (2 * MIB, 0), (512, 1)):
        allocator.allocate(size, stream)
    assert (allocator.segments, allocator.reserved_bytes) == (3, (2 + 20 + 2) * MIB)


def test_cached_segments_go_back_before_memory_runs_out():
    allocator = CachingAllocator(capacity_bytes=30 * MIB)
    allocator.free(allocator.allocate(20 * MIB))
    allocator.allocate(22 * MIB)
    assert (allocator.returned, allocator.reserved_bytes) == (1, 22 * MIB)
    with pytest.raises(OutOfMemoryError, match=f"{10 * MIB} .* {22 * MIB} of {30 * MIB}"):
        allocator.allocate(10 * MIB)

"""What a kernel that Inductor generated writes, from its source (excerpts of torch 2.11's)."""

import pytest
import torch

from onerank.capture.no_device.generated_kernels import KernelAccesses

LOOPED = """\
def triton_red_fused_1(in_ptr0, out_ptr1, out_ptr2, xnumel, r0_numel, XBLOCK, R0_BLOCK):
    xnumel = 64
    r0_numel = 32
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        tmp0 = tl.load(in_ptr0 + (r0_1 + 32*x0), r0_mask, other=0.0).to(tl.float32)
        tl.store(out_ptr1 + (x0 + 64*r0_1), tmp35, r0_mask)
        tl.store(out_ptr2 + (r0_1 + 32*x0), tmp61, r0_mask)
"""
ONE_ROW = f"""\
@triton_heuristics.reduction(
    size_hints={{'x': 64, 'r0_': 32}}, reduction_hint=ReductionHint.INNER,
)
@triton.jit
{LOOPED}"""
PERSISTENT = """\
def triton_per_fused_1(in_ptr0, out_ptr1, out_ptr2, xnumel, r0_numel, XBLOCK):
    xnumel = 64
    r0_numel = 32
    tmp0 = tl.load(in_ptr0 + (r0_1 + 32*x0), None).to(tl.float32)
    tl.store(out_ptr1 + (x0 + 64*r0_1), tmp34, None)
    tl.store(out_ptr2 + (r0_1 + 32*x0), tmp49, None)
"""
MIXED_ORDER = PERSISTENT.replace("XBLOCK)", "XBLOCK, RSPLIT_SIZE)")
TILED = """\
def triton_poi_fused_1(in_ptr0, out_ptr1, out_ptr2, ynumel, xnumel, YBLOCK, XBLOCK):
    ynumel = 32
    xnumel = 64
    tmp0 = tl.load(in_ptr0 + (y0 + 32*x1), None).to(tl.float32)
    tl.store(out_ptr1 + (x1 + 64*y0), tmp13, None)
    tl.store(out_ptr2 + (y0 + 32*x1), tmp13, None)
"""


@pytest.mark.parametrize(
    ("source", "scattered"),
    [(LOOPED, 8), (ONE_ROW, 32), (PERSISTENT, 32), (MIXED_ORDER, 64), (TILED, 1)],
    ids=["looped", "one row", "persistent", "mixed order", "tiled"],
)
def test_a_reduction_that_stores_across_its_rows_moves_sectors(source, scattered):
    read = torch.empty(64, 32, dtype=torch.bfloat16)
    across = torch.empty(32, 64, dtype=torch.float8_e4m3fn)
    along = torch.empty(64, 32, dtype=torch.float8_e4m3fn)
    name = source.partition("def ")[2].partition("(")[0]
    reads, writes = KernelAccesses.of(name, source).operands((read, across, along, 64, 32))
    moved = [torch.Size(tensor.shape).numel() for tensor in (*reads, *writes)]
    assert moved == [64 * 32, 64 * 32 * scattered, 64 * 32]


def test_wider_elements_fill_more_of_a_sector():
    written = torch.empty(32, 64, dtype=torch.float32)
    kernel = KernelAccesses.of("triton_red_fused_1", LOOPED)
    _, writes = kernel.operands((torch.empty(64, 32), written, torch.empty(64, 32), 64, 32))
    assert [torch.Size(tensor.shape).numel() * 4 for tensor in writes] == [64 * 32 * 8, 64 * 32 * 4]


ATOMIC = """\
def triton_poi_fused_index_add_1(in_ptr0, in_ptr1, out_ptr0, xnumel, XBLOCK):
    xnumel = 6400
    tmp0 = tl.load(in_ptr0 + (x1), xmask, eviction_policy='evict_last')
    tmp6 = tl.load(in_ptr1 + (x2), xmask)
    tl.atomic_add(out_ptr0 + (x0 + 64*tmp4), tmp6, xmask, sem='relaxed')
"""


def test_an_atomic_addition_reads_what_it_changes():
    # 100 rows of 10,000, by an index that is expanded over the 64 elements of a row.
    index = torch.zeros(100, 1, dtype=torch.int64).expand(100, 64)
    table, rows = torch.empty(10_000, 64), torch.empty(100, 64)
    kernel = KernelAccesses.of("triton_poi_fused_index_add_1", ATOMIC)
    reads, writes = kernel.operands((index, rows, table, 6400))
    moved = [[torch.Size(tensor.shape).numel() for tensor in each] for each in (reads, writes)]
    assert moved == [[100, 6400, 6400], [6400]]

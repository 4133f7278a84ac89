"""What a kernel that Inductor generated writes, from its source (excerpts of torch 2.11's)."""

from math import prod

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


ONE_AXIS = """\
def triton_poi_fused_cat_1(in_ptr0, in_ptr1, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    xnumel = 262144
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:]
    x2 = xindex
    x0 = (xindex % 1024)
    x1 = xindex // 1024
    tmp5 = tl.load(in_ptr0 + (x1 + 256*((x0 % 512)) + 65536*(x0 // 512)), tmp4, other=0.0)
    tmp12 = tl.load(in_ptr0 + (131072 + x1 + 256*((-512) + x0)), tmp9, other=0.0)
    tmp13 = tl.load(in_ptr1 + (x0 + 1024*((x1 % 512))), None)
    tl.store(out_ptr0 + (x2), tmp16, None)
"""


def test_a_kernel_of_one_axis_waits_for_the_sectors_of_transposed_loads():
    """Its threads take the time of 165 instructions for each element; along rows they do not."""
    args = (*(torch.empty(1024, 256) for _ in range(2)), torch.empty(256, 1024), 262144)
    kernel = KernelAccesses.of("triton_poi_fused_cat_1", ONE_AXIS)
    along = ONE_AXIS.replace("x1 + 256*((x0 % 512)) + 65536*(x0 // 512)", "x2")
    along = along.replace("131072 + x1 + 256*((-512) + x0)", "131072 + x2")
    of_rows = KernelAccesses.of("triton_poi_fused_cat_1", along)
    assert (kernel.gathered, of_rows.gathered) == ({"in_ptr0"}, set())
    waits = kernel.instructions + 165 - of_rows.instructions
    assert kernel.work(args).instructions - of_rows.work(args).instructions == round(waits * 262144)


COMBINED = """
def triton_for_fused_1(in_ptr0, in_ptr1, in_ptr2, in_ptr3, out_ptr0, out_ptr1):
    pid = tl.program_id(0)
    XBLOCK: tl.constexpr = 1024
    num_xblocks_0 = tl.cdiv(65536, XBLOCK)
    num_xblocks_1 = num_xblocks_0 + tl.cdiv(256, XBLOCK)
    if pid < num_xblocks_0:
        xnumel = 65536
        r0_numel = 1
        tmp0 = tl.load(in_ptr0 + (x0), None)
        tmp1 = tl.load(in_ptr2 + (0))
        tl.store(out_ptr0 + (x0), tmp0, None)
    elif pid < num_xblocks_1:
        xnumel = 256
        r0_numel = 1
        tmp0 = tl.load(in_ptr1 + (x1), xmask)
        tmp1 = tl.load(in_ptr3 + (0))
        tl.store(out_ptr1 + (x1), tmp0, xmask)
    else:
        pass
"""


def test_each_parameter_of_a_compiled_optimizer_has_its_own_size():
    kernel = KernelAccesses.of("triton_for_fused_1", COMBINED)
    weight, bias, step = (torch.zeros(shape) for shape in ((256, 256), (256,), ()))
    reads, writes = kernel.operands((weight, bias, step, step, weight, bias))
    assert [prod(each.shape) for each in reads] == [65536, 256]  # and two scalars
    assert [prod(each.shape) for each in writes] == [65536, 256]

"""Instructions that a generated kernel executes, from its source (torch 2.11's)."""

import pytest

from onerank.capture.no_device.generated_instructions import instructions_of

# Maxima of an MLP's gradients, without the lines that name its launch. On an H100 Nsight Compute
# counted 52.8 instructions per iteration (2026-11-27-generated-instructions-h100).
MAXIMA = """
@triton.jit
def triton_red_fused_abs_max_mul_silu_silu_backward_view_6(
    in_ptr0, in_ptr1, in_ptr2, out_ptr0, out_ptr1, out_ptr2, xnumel, r0_numel, XBLOCK, R0_BLOCK
):
    xnumel = 1792
    r0_numel = 131072
    rnumel = r0_numel
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:, None]
    xmask = xindex < xnumel
    r0_base = tl.arange(0, R0_BLOCK)[None, :]
    x0 = xindex
    _tmp12 = tl.full([XBLOCK, R0_BLOCK], float("-inf"), tl.float32)
    _tmp18 = tl.full([XBLOCK, R0_BLOCK], float("-inf"), tl.float32)
    _tmp33 = tl.full([XBLOCK, R0_BLOCK], float("-inf"), tl.float32)
    for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
        r0_index = r0_offset + r0_base
        r0_1 = r0_index
        tmp0 = tl.load(in_ptr0 + (r0_1 + 131072*x0), xmask, other=0.0).to(tl.float32)
        tmp8 = tl.load(in_ptr1 + (r0_1 + 131072*x0), xmask, other=0.0).to(tl.float32)
        tmp14 = tl.load(in_ptr2 + (r0_1 + 131072*x0), xmask, other=0.0).to(tl.float32)
        tmp1 = tmp0.to(tl.float32)
        tmp2 = -tmp1
        tmp3 = libdevice.exp(tmp2)
        tmp4 = tl.full([1, 1], 1.0, tl.float32)
        tmp5 = tmp3 + tmp4
        tmp6 = (tmp1 / tmp5)
        tmp7 = tmp6.to(tl.float32)
        tmp9 = tmp7 * tmp8
        tmp10 = tl_math.abs(tmp9)
        tmp11 = tl.broadcast_to(tmp10, [XBLOCK, R0_BLOCK])
        tmp13 = triton_helpers.maximum(_tmp12, tmp11)
        _tmp12 = tl.where(xmask, tmp13, _tmp12)
        tmp15 = tmp14 * tmp7
        tmp16 = tl_math.abs(tmp15)
        tmp17 = tl.broadcast_to(tmp16, [XBLOCK, R0_BLOCK])
        tmp19 = triton_helpers.maximum(_tmp18, tmp17)
        _tmp18 = tl.where(xmask, tmp19, _tmp18)
        tmp20 = tmp14 * tmp8
        tmp21 = tmp20.to(tl.float32)
        tmp22 = tl.full([1, 1], 1, tl.int32)
        tmp23 = (tmp22 / tmp5)
        tmp24 = tmp23 * tmp4
        tmp25 = tmp21 * tmp24
        tmp26 = tmp4 - tmp24
        tmp27 = tmp1 * tmp26
        tmp28 = tmp27 + tmp4
        tmp29 = tmp25 * tmp28
        tmp30 = tmp29.to(tl.float32)
        tmp31 = tl_math.abs(tmp30)
        tmp32 = tl.broadcast_to(tmp31, [XBLOCK, R0_BLOCK])
        tmp34 = triton_helpers.maximum(_tmp33, tmp32)
        _tmp33 = tl.where(xmask, tmp34, _tmp33)
    tmp12 = triton_helpers.max2(_tmp12, 1)[:, None]
    tmp18 = triton_helpers.max2(_tmp18, 1)[:, None]
    tmp33 = triton_helpers.max2(_tmp33, 1)[:, None]
    tl.store(out_ptr0 + (x0), tmp12, xmask)
    tl.store(out_ptr1 + (x0), tmp18, xmask)
    tl.store(out_ptr2 + (x0), tmp33, xmask)
"""


def test_maxima_of_a_backward_have_the_counted_instructions():
    assert instructions_of(MAXIMA) == pytest.approx(52.8, rel=0.15)


POINTWISE = """
@triton.jit
def triton_poi_fused_1(in_ptr0, in_ptr1, out_ptr0, xnumel, XBLOCK):
    xnumel = 58720256
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:]
    x2 = xindex
    x1 = xindex // 14336
    x0 = (xindex % 14336)
    tmp0 = tl.load(in_ptr0 + (x2), None).to(tl.float32)
    tmp1 = tl.load(in_ptr1 + (PLACE)).to(tl.float32)
    tmp2 = tmp1.to(tl.float64)
    tmp3 = (tmp0 / tmp2)
    tl.store(out_ptr0 + (x2), tmp3, None)
"""
QUOTIENTS = POINTWISE.replace("tmp0 / ", "tmp1 / ")


@pytest.mark.parametrize("place", ["0", "x1"])
def test_a_thread_computes_the_number_of_a_row_once(place):
    of_a_row = instructions_of(QUOTIENTS.replace("PLACE", place))
    of_elements = instructions_of(QUOTIENTS.replace("PLACE", "x0"))
    # A quotient in double precision takes 70 instructions, its cast 4, and the load 2.5.
    assert of_elements - of_a_row == pytest.approx((70 + 4) * 15 / 16 + 2.5)


def test_what_depends_on_an_element_counts_for_each():
    # Only the cast is shared.
    of_a_row = instructions_of(POINTWISE.replace("PLACE", "x1"))
    of_elements = instructions_of(POINTWISE.replace("PLACE", "x0"))
    assert of_elements - of_a_row == pytest.approx(4 * 15 / 16 + 2.5)


def test_a_kernel_of_several_rows_has_those_of_its_sizes():
    narrow = MAXIMA.replace("xnumel = 1792", "xnumel = 1")
    # With one row all of a reduction's operations are on elements.
    assert instructions_of(narrow) == instructions_of(MAXIMA)


def test_text_without_a_kernel_has_none():
    assert instructions_of("def call(args): pass") == 0


CONCATENATED = """
@triton.jit
def triton_poi_fused_cat_1(in_ptr0, in_ptr1, out_ptr0, xnumel, XBLOCK):
    xnumel = 58720256
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:]
    x0 = (xindex % 8192)
    x1 = ((xindex // 8192) % 2048)
    x2 = xindex
    tmp0 = PLACE
    tmp1 = tl.full([1], 1024, tl.int64)
    tmp2 = tmp0 < tmp1
    tmp3 = tl.load(in_ptr0 + (x0 + 8192*(x1)), tmp2, other=0.0).to(tl.float32)
    tl.store(out_ptr0 + (x2), tmp3, None)
"""


def test_a_condition_of_a_row_leaves_neighbours_together():
    # A vectorised load takes 2.5 per element, a separate one 3.6; comparing a place takes 1.3.
    of_a_row = instructions_of(CONCATENATED.replace("PLACE", "x1"))
    of_elements = instructions_of(CONCATENATED.replace("PLACE", "x0"))
    assert of_elements - of_a_row == pytest.approx(3.6 - 2.5 + (1.3 + 1.2) * 15 / 16)


MASKED = """
@triton.jit
def triton_poi_fused_1(in_ptr0, in_ptr1, out_ptr0, xnumel, XBLOCK):
    xnumel = 58720256
    x0 = xindex
    tmp0 = tl.load(in_ptr0 + (x0), None).to(tl.int1)
    tmp1 = tl.load(in_ptr1 + (x0), None).to(tl.float32)
    tmp2 = libdevice.isinf(tmp1).to(tl.int1)
    tmp3 = tmp0 | tmp2
    tl.store(out_ptr0 + (x0), tmp3, None)
"""


def test_booleans_are_loaded_and_compared():
    assert instructions_of(MASKED) == pytest.approx(2 * 2.5 + 1.3 + 1.2)

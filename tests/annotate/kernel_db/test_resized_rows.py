"""Rows of two sizes, compared at one clock."""

import msgspec
import pytest
from database_row import ROW

from onerank.annotate.kernel_db.calls import CallKey
from onerank.annotate.kernel_db.node_durations import at_one_clock

KEY = CallKey("aten::mm", (), (), "{}")


def row(**fields):
    return msgspec.structs.replace(ROW, **fields)


def test_a_ratio_of_sizes_is_that_of_replays_at_their_clocks():
    """As measured on an H200: 4096 x 4096 x 14336 and half its rows, 0.50 in captured steps."""
    large = row(kernel_ns=(736, 595_075), median_ns=721_504, sm_clock_mhz=1470)
    small = row(kernel_ns=(768, 329_187), median_ns=338_800, sm_clock_mhz=1575)
    one, two = at_one_clock({KEY: [large, small]})[KEY]
    assert sum(two.kernel_ns) / sum(one.kernel_ns) == pytest.approx(
        338_800 * 1575 / (721_504 * 1470), rel=1e-4
    )
    assert sum(two.kernel_ns) == pytest.approx(338_800, rel=1e-4)  # at the highest clock
    assert one.kernel_ns[0] / one.kernel_ns[1] == pytest.approx(736 / 595_075, rel=1e-2)


def test_short_calls_and_rows_without_a_clock_stay():
    short, dark = row(median_ns=9_000), row(sm_clock_mhz=None)
    assert at_one_clock({KEY: [short, dark, ROW]})[KEY][:2] == [short, dark]
    assert at_one_clock({KEY: [dark]}) == {KEY: [dark]}


def test_what_memory_bounds_takes_as_long_at_any_clock():
    """As measured on an H200: mul of 8192 x 12800, at two clocks."""
    slow = row(operator="aten::mul", kernel_ns=(144_127,), median_ns=144_864, sm_clock_mhz=1605)
    key = CallKey("aten::mul", (), (), "{}")
    (made,) = at_one_clock({key: [slow], KEY: [ROW]})[key]
    assert made.kernel_ns == (144_864,)

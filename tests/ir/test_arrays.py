"""Codes of one byte are found as np.isin finds them."""

import numpy as np
import pytest

from onerank.ir.arrays import membership_mask


@pytest.mark.parametrize("chosen", [(), (3,), (0, 3, 255)])
def test_as_isin_finds_them(chosen: tuple[int, ...]):
    codes = np.arange(256, dtype=np.uint8).repeat(2)
    assert (membership_mask(codes, chosen) == np.isin(codes, chosen)).all()

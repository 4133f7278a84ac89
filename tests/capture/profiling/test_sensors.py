"""The GPU's sensors: what is told where there are none."""

import pytest
import torch

from onerank.capture.profiling.nvml import SensorSampler


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and a driver")
def test_without_a_driver_or_its_library_a_sentence_says_so():
    sampler = SensorSampler()
    ran = False
    with sampler.sampling():
        ran = True
    assert ran
    assert sampler.result() is None
    assert sampler.missing.startswith("clocks, power and temperature are not known: ")

"""A recorder for the tests of what runs on it."""

import gc
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from onerank.capture.fake_world.recorder import Recorder


@pytest.fixture(autouse=True, scope="module")
def _memory_of_tests_before() -> None:
    """Free what modules before left on the GPU, which would be freed within a measured step."""
    if torch.cuda.is_available():
        gc.collect()


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    """Stand for rank 1 of 4."""
    recorder = Recorder(rank=1, world_size=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        recorder.start()
    yield recorder
    recorder.stop()
    assert not dist.is_initialized()

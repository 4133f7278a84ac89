"""A recorder for the tests of what runs on it."""

import warnings
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from onerank.capture.fake_world.recorder import Recorder


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

"""A recorder for the tests of what runs on it."""

import pytest

from onerank.capture.recorder import Recorder


@pytest.fixture
def recorder_of_four():
    """Stand for rank 1 of 4."""
    recorder = Recorder(rank=1, world_size=4)
    recorder.start()
    yield recorder
    recorder.stop()

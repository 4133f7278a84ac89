"""What the tests of captures share: a recorder, and a collector that skips imported modules."""

import gc
import sys
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


_MODULES = pytest.StashKey[int]()


@pytest.fixture(autouse=True)
def _objects_of_imports(request: pytest.FixtureRequest) -> None:
    """Hide what earlier tests of the file imported, as the fixture of all tests does for files.

    The first capture of a file imports the model's module of transformers. The captures after it
    searched what that left, for 15 of the 85 s of twelve captures.
    """
    hidden = request.config.stash.get(_MODULES, 0)
    if len(sys.modules) > hidden:
        gc.collect()
        gc.freeze()
        request.config.stash[_MODULES] = len(sys.modules)

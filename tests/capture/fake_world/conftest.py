"""What the tests of this directory share."""

from collections.abc import Iterator
from typing import Any

import pytest

from onerank.capture.fake_world.recorder import Recorder


class Silent:
    """Messages of a script whose ranks send none."""

    collects_sends = False

    def send(self, to: Any, objects: list[Any]) -> None:
        raise AssertionError

    receive = skip = send

    def next_step(self) -> None:
        pass


@pytest.fixture
def silent() -> Silent:
    return Silent()


@pytest.fixture
def scripts_recorder(silent: Silent) -> Iterator[Recorder]:
    """Rank 1 of 4, of a script that distributes itself."""
    recorder = Recorder(1, 4, silent)
    recorder.start()
    yield recorder
    recorder.stop()

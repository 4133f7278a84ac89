"""What a recorder noted, in short."""

from onerank.capture.fake_world.recorder import Recorder


def summary(recorder: Recorder) -> list[tuple[str, int]]:
    """Return type and bytes of each call, in order."""
    return [(call.collective, call.bytes) for call in recorder.calls]

"""End a script that catches every exception, its end included, and goes on."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_EVERY_S = 1e-4


class Eviction:
    """Raises an exception in the main thread, again and again, until the script has left.

    One exception lands in the script's `except:` and is lost. Of a row of them one comes while
    that handler runs, or between two turns of the loop, where nothing catches it. The alarm's
    handler sees the stack: it raises only below the function that runs the script.

    Args:
        ending: makes the exception.
        below: name of the function that runs the script.
    """

    def __init__(self, ending: Callable[[], BaseException], below: Callable[..., object]) -> None:
        self._ending = ending
        self._below = below.__code__
        self._before: Any = None
        self.begun = False

    def begin(self) -> None:
        """Begin raising; in any other thread than the main one it cannot be done."""
        if self.begun or threading.current_thread() is not threading.main_thread():
            return
        self.begun = True
        self._before = signal.signal(signal.SIGALRM, self._raise)
        signal.setitimer(signal.ITIMER_REAL, _EVERY_S, _EVERY_S)

    def _raise(self, _: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code is self._below:
                raise self._ending()
            frame = frame.f_back

    def __enter__(self) -> "Eviction":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.begun:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self._before)

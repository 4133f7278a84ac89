"""What all tests share."""

import gc
import signal
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples in every run; --hypothesis-profile=default draws others.
settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")


_HERE = Path(__file__).parent

# Most of their tests run captures, for a second each; other tests take milliseconds.
_LONG = ("capture", "docs", "plan", "serving", "test_api.py", "test_benchmarks.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the files of long tests first, so that all workers end together.

    A worker gets whole files. By default xdist starts with those of many tests, so files with a few
    long ones come last: by the CPU time of each file, one of two workers waits 35 s at the end.
    """
    items.sort(key=lambda item: item.path.relative_to(_HERE).parts[0] not in _LONG)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None]:
    """Import the tests without the collector, which finds nothing in what imports leave."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _objects_of_tests_before() -> None:
    """Hide what imports and modules before left, up to a million objects, from the collector.

    A capture searches the collector's objects for models and tensors several times in each step.
    torch.compile leaves so many that captures after it took five times as long. On a GPU, memory of
    tests before would be freed within a measured step.
    """
    gc.collect()
    gc.freeze()


_MAIN = sys.modules["__main__"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None]:
    """Fail the test that leaves an alarm, its handler or a captured script as `__main__` behind.

    A capture's heartbeat and its eviction use SIGALRM. An alarm without their handler ends the
    process of the tests, and a handler without its alarm changes what later captures do.
    multiprocessing runs the file of `__main__` in each process that it starts, so a script that is
    left there would train before each capture of `own_process`.
    """
    yield
    remaining_s, _ = signal.getitimer(signal.ITIMER_REAL)
    handler = signal.getsignal(signal.SIGALRM)
    main = sys.modules["__main__"]
    # Reset, so that later tests do not fail as well.
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    sys.modules["__main__"] = _MAIN
    if main is not _MAIN:
        pytest.fail(f"left {getattr(main, '__file__', main)} as __main__")
    if remaining_s or handler != signal.SIG_DFL:
        pytest.fail(f"left SIGALRM to {handler}, with {remaining_s:.3f} s until the next alarm")

"""What all tests share."""

import gc

import pytest
from hypothesis import settings

# The same examples in every run; --hypothesis-profile=default draws others.
settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")


@pytest.fixture(autouse=True, scope="module")
def _objects_of_tests_before() -> None:
    """Hide what imports and modules before left, up to a million objects, from the collector.

    A capture searches the collector's objects for models and tensors several times in each step.
    torch.compile leaves so many that captures after it took five times as long. On a GPU, memory of
    tests before would be freed within a measured step.
    """
    gc.collect()
    gc.freeze()

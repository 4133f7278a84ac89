"""What all tests share."""

import gc

from hypothesis import settings

# The same examples in every run; --hypothesis-profile=default draws others.
settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")


def pytest_collection_finish() -> None:
    """Let the collector pass over what imports made, half a million objects: captures collect."""
    gc.collect()
    gc.freeze()

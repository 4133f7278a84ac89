"""What all tests share."""

from hypothesis import settings

# The same examples in every run; --hypothesis-profile=default draws others.
settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")

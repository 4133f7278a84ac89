"""`python -m onerank`, for `torchrun -m onerank capture run --record-real-job ...`."""

from onerank.cli import onerank

onerank(prog_name="onerank")

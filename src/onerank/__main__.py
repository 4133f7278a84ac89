"""`python -m onerank`, as torchrun starts it: `torchrun -m onerank capture run --real ...`."""

from onerank.cli import onerank

onerank(prog_name="onerank")

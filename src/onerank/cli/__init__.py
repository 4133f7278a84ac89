"""The commands: `onerank` with everything, `capture` and `annotate` by themselves."""

from onerank.cli.annotate import annotate
from onerank.cli.capture import capture
from onerank.cli.main import onerank

__all__ = ["annotate", "capture", "onerank"]

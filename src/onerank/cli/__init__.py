"""The commands: `onerank` with everything, `capture` and `annotate` by themselves."""

from onerank.cli.annotate import annotate
from onerank.cli.capture import capture
from onerank.cli.main import onerank
from onerank.cli.verify import verify

__all__ = ["annotate", "capture", "onerank", "verify"]

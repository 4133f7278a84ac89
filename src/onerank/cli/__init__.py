"""The commands: `onerank` with all subcommands, and `capture` and `annotate` as entry points."""

from onerank.cli.commands.annotate import annotate
from onerank.cli.commands.capture import capture, verify
from onerank.cli.main import onerank

__all__ = ["annotate", "capture", "onerank", "verify"]

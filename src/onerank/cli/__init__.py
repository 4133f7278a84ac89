"""The commands: `onerank` with all subcommands, and `capture` and `annotate` as entry points."""

from typing import TYPE_CHECKING, Any

from onerank.cli.main import onerank

if TYPE_CHECKING:
    from onerank.cli.commands.annotate import annotate
    from onerank.cli.commands.capture import capture, verify

__all__ = ["annotate", "capture", "onerank", "verify"]


def __getattr__(name: str) -> Any:
    # Importing them takes 20 ms, and no other command of `onerank` needs them.
    if name == "annotate":
        from onerank.cli.commands.annotate import annotate

        return annotate
    if name in ("capture", "verify"):
        from onerank.cli.commands import capture as commands

        return getattr(commands, name)
    raise AttributeError(f"module 'onerank.cli' has no attribute {name!r}")

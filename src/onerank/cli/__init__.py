"""The commands: `onerank` with all subcommands, in the order of its help.

`capture` and `annotate` are also entry points.
"""

from typing import TYPE_CHECKING, Any

import click

from onerank import __version__
from onerank.cli.dataclass_to_click import SectionedGroup

if TYPE_CHECKING:
    from onerank.cli.commands.annotate import annotate
    from onerank.cli.commands.capture import capture, verify

__all__ = ["annotate", "capture", "onerank", "verify"]

SECTIONS = {
    "Make a trace": ("capture", "convert", "coarsen", "storage"),
    "Predict it for another GPU": ("annotate", "predict", "gpus", "bench", "plan"),
    "Read it": ("show", "report", "replay", "diff", "memory", "energy", "cost"),
    "Hand it on": ("export", "check"),
}
"""Heading of the help -> its commands. Each is in the module of its name in `commands`."""


@click.group(
    cls=SectionedGroup,
    sections=SECTIONS,
    modules={name: name for names in SECTIONS.values() for name in names},
)
@click.version_option(__version__, prog_name="onerank")
def onerank() -> None:
    """Capture one rank of a training job, re-cost it, hand it to a network simulator."""


def __getattr__(name: str) -> Any:
    # Importing them takes 20 ms, and no other command of `onerank` needs them.
    if name == "annotate":
        from onerank.cli.commands.annotate import annotate

        return annotate
    if name in ("capture", "verify"):
        from onerank.cli.commands import capture as commands

        return getattr(commands, name)
    raise AttributeError(f"module 'onerank.cli' has no attribute {name!r}")

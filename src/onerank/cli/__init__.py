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
    "Make a trace": {
        "capture": "capture",
        "convert": "convert",
        "coarsen": "coarsen_storage",
        "storage": "coarsen_storage",
    },
    "Predict it for another GPU": {
        "annotate": "annotate",
        "predict": "predict",
        "gpus": "gpus",
        "bench": "bench",
        "plan": "plan",
    },
    "Read it": {
        "show": "show_diff_replay",
        "report": "report",
        "replay": "show_diff_replay",
        "diff": "show_diff_replay",
        "memory": "memory_energy_cost",
        "energy": "memory_energy_cost",
        "cost": "memory_energy_cost",
    },
    "Hand it on": {"export": "export_check", "check": "export_check"},
}
"""Heading of the help -> command -> module of `onerank.cli.commands` that defines it."""


@click.group(
    cls=SectionedGroup,
    sections={heading: tuple(modules) for heading, modules in SECTIONS.items()},
    modules={name: module for modules in SECTIONS.values() for name, module in modules.items()},
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

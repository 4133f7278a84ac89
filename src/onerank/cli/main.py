"""The `onerank` command: the group of all subcommands, in the order of its help."""

import click

from onerank import __version__
from onerank.cli.click_options import SectionedGroup
from onerank.cli.commands.annotate import annotate, gpus
from onerank.cli.commands.bench import bench
from onerank.cli.commands.capture import capture
from onerank.cli.commands.coarsen_storage import coarsen, storage
from onerank.cli.commands.convert import convert
from onerank.cli.commands.export import check, export
from onerank.cli.commands.memory_energy_cost import cost, energy, memory
from onerank.cli.commands.predict import predict
from onerank.cli.commands.report import report
from onerank.cli.commands.show_diff_replay import diff, replay, show

SECTIONS = {
    "Make a trace": (capture, convert, coarsen, storage),
    "Predict it for another GPU": (annotate, predict, gpus, bench),
    "Read it": (show, report, replay, diff, memory, energy, cost),
    "Hand it on": (export, check),
}


@click.group(
    cls=SectionedGroup,
    sections={
        heading: [str(command.name) for command in commands]
        for heading, commands in SECTIONS.items()
    },
)
@click.version_option(__version__, prog_name="onerank")
def onerank() -> None:
    """Capture one rank of a training job, re-cost it, hand it to a network simulator."""


for _commands in SECTIONS.values():
    for _command in _commands:
        onerank.add_command(_command)

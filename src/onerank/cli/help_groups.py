"""Help in groups: options and commands by purpose."""

from collections.abc import Mapping, Sequence
from typing import Any

import click

Sections = Mapping[str, Sequence[str]]
"""Heading -> names of options or commands, in the order in which help shows them."""


class SectionedCommand(click.Command):
    """A command whose options stand under headings; what none names is in the last section."""

    def __init__(self, *args: Any, sections: Sections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a list of options for each section that this command has options of."""
        options = [p for p in self.get_params(ctx) if isinstance(p, click.Option)]
        records = {option.name: option.get_help_record(ctx) for option in options}
        _write_lists(formatter, self.sections, records)


class SectionedGroup(click.Group):
    """A group whose commands stand under headings, each with its first sentence whole."""

    def __init__(self, *args: Any, sections: Sections | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sections = sections or {"Commands": ()}

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a list of commands for each section; what none names is in the last one."""
        told = {
            name: (name, (command.help or "").split("\n\n")[0].replace("\n", " "))
            for name, command in self.commands.items()
        }
        _write_lists(formatter, self.sections, told)


def _write_lists(
    formatter: click.HelpFormatter,
    sections: Sections,
    records: Mapping[Any, tuple[str, str] | None],
) -> None:
    named = {name for names in sections.values() for name in names}
    last = list(sections)[-1]
    for heading, names in sections.items():
        more = [name for name in records if name not in named] if heading == last else []
        rows = [record for name in (*names, *more) if (record := records.get(name)) is not None]
        if rows:
            with formatter.section(heading):
                formatter.write_dl(rows)

"""Options declared once, as dataclass fields, and help that groups them under headings.

The options of a command are the fields of a frozen dataclass. The field's name is the option's name
(`tp_style` is `--tp-style`) and its type is the type in the Python API. Its metadata holds what the
command line adds: help, heading, choices. `with_options` gives a command the options and passes
them as one instance; `headings` groups them for help.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

SIZE = click.IntRange(1)


@dataclass(frozen=True, slots=True)
class OptionSpec:
    """What the command line needs to know of a field.

    Attributes:
        help: one or two sentences.
        heading: the help section that the option stands in.
        names: spellings in place of `--field-name`, such as ("-o", "--output").
        type: click's type; None for flags and plain texts.
        settings: further keywords of `click.option`.
    """

    help: str
    heading: str
    names: tuple[str, ...]
    type: Any
    settings: dict[str, Any]


def option(
    help: str,  # noqa: A002
    *names: str,
    heading: str,
    default: Any = None,
    type: Any = None,  # noqa: A002
    **settings: Any,
) -> Any:
    """Return a dataclass field that is a command-line option.

    Args:
        help: what the option decides.
        names: spellings in place of `--field-name`.
        heading: its section of the help.
        default: value if the option is absent; False makes it a flag.
        type: click's type.
        settings: further keywords of `click.option`, such as metavar.
    """
    spec = OptionSpec(help, heading, names, type, settings)
    return dataclasses.field(default=default, metadata={"option": spec})


def specs(kind: type) -> Iterator[tuple[str, Any, OptionSpec]]:
    """Yield name, default and declaration of each option of a dataclass."""
    for field in dataclasses.fields(kind):
        if "option" in field.metadata:
            yield field.name, field.default, field.metadata["option"]


def with_options(kind: type, parameter: str) -> Callable[[Command], Command]:
    """Return a decorator that gives a command the options of `kind`.

    Args:
        kind: a dataclass whose fields are `option`s.
        parameter: of the command, which gets them as one instance.
    """
    names = [name for name, _, _ in specs(kind)]

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def called(*args: Any, **values: Any) -> Any:
            mine = {name: values.pop(name) for name in names}
            return command(*args, **{parameter: kind(**mine)}, **values)

        decorated: Any = called
        for name, default, spec in reversed(list(specs(kind))):
            spellings = spec.names or (f"--{name.replace('_', '-')}",)
            keywords: dict[str, Any] = {
                "default": default,
                "type": spec.type,
                "help": spec.help,
                **spec.settings,
            }
            if default is False:
                keywords["is_flag"] = True
            if keywords.get("multiple") or keywords.get("required"):
                del keywords["default"]
            decorated = click.option(*spellings, name, **keywords)(decorated)
        return decorated

    return decorate


def headings(*kinds: type) -> dict[str, tuple[str, ...]]:
    """Return heading -> names of the options under it, in the order of declaration."""
    found: dict[str, list[str]] = {}
    for kind in kinds:
        for name, _, spec in specs(kind):
            found.setdefault(spec.heading, []).append(name)
    return {heading: tuple(names) for heading, names in found.items()}


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

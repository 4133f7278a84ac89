"""Options declared once, as dataclass fields, and help that groups them under headings.

The options of a command are the fields of a frozen dataclass. The field's name is the option's name
(`tp_style` is `--tp-style`), its type is the type in Python, and a field without a default is a
required option. Its metadata holds what the command line adds: help, heading, range. `with_options`
adds the options to a command, which receives an instance of the dataclass. `headings` groups them
for help, and `tools/generate_reference.py` writes the reference page from them.

The dataclass stands where it is used. The options of a capture are declared in
`onerank.capture.options`, those of exports to simulators of serving in
`onerank.serving.simulators.options`. These modules do not import click: the
functions of `onerank.option_fields` keep plain data, with the names of `OptionSpec`.
"""

import dataclasses
import difflib
import functools
import importlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin

import click

from onerank.cli.common import (
    INPUT,
    INPUT_DIRECTORY,
    OUTPUT_DIRECTORY,
    POSITIVE,
    InvalidValue,
    ReportingMain,
    UsageError,
)

Command = TypeVar("Command", bound=Callable[..., Any])

SIZE = click.IntRange(1)


class _Integers(click.ParamType[tuple[int | str, ...] | str]):
    """Integers with commas between, or one of some words.

    Args:
        words: values in the place of all integers.
        items: values in the place of one integer.
    """

    name = "integers"

    def __init__(self, words: Sequence[str] = (), items: Sequence[str] = ()) -> None:
        self._words = words
        self._items = items

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int | str, ...] | str:
        if isinstance(value, tuple):  # click converts the default, too
            return cast("tuple[int | str, ...]", value)
        if value in self._words:
            return value
        try:
            parts = str(value).split(",")
            return tuple(part if part in self._items else int(part) for part in parts)
        except ValueError:
            expected = " or ".join([*self._words, *self._items, "integers such as 2,4"])
            raise InvalidValue(
                f"'{value}': expected {expected}", param, ctx, code="option-not-integers"
            ) from None


class Fraction(click.ParamType[float]):
    """A number above 0 and below 1, such as 0.03 or 3%."""

    name = "fraction"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        text = str(value).strip()
        try:
            fraction = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            fraction = math.nan
        if not 0 < fraction < 1:
            raise InvalidValue(
                f"'{value}': expected a share above 0% and below 100%, such as 3% or 0.03",
                param,
                ctx,
                code="option-not-fraction",
            )
        return fraction


Sections = Mapping[str, Sequence[str]]
"""Heading -> names of options or commands, in the order in which help shows them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionSpec:
    """Command-line settings in the metadata of a dataclass field.

    Attributes:
        help: one or two sentences.
        heading: section of the help.
        names: spellings in place of `--field-name`, such as ("-o", "--output").
        minimum: the least whole number; None accepts all.
        positive: whether the value is a number above zero.
        input_file: whether the value names a file, which must exist.
        input_directory: whether the value names a directory, which must exist.
        output_directory: whether the value names a directory to write.
        needs: field of the option without which this one has no effect, and is refused.
        type: click's type; None derives it from the field's type and the five above.
        settings: further keywords of `click.option`.
    """

    help: str
    heading: str = "Options"
    names: tuple[str, ...] = ()
    minimum: int | None = None
    positive: bool = False
    input_file: bool = False
    input_directory: bool = False
    output_directory: bool = False
    needs: str = ""
    type: Any = None
    settings: dict[str, Any]

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> "OptionSpec":
        """Return the specification in a field's metadata; keys of no attribute are settings."""
        attribute_names = {field.name for field in dataclasses.fields(cls)} - {"settings"}
        attributes = {name: value for name, value in metadata.items() if name in attribute_names}
        settings = {name: value for name, value in metadata.items() if name not in attribute_names}
        return cls(**attributes, settings=settings)

    def click_type(self, annotation: Any) -> Any:
        """Return click's type for a field of type `annotation`."""
        if self.type is not None:
            return self.type
        if self.minimum is not None:
            return click.IntRange(self.minimum)
        if self.positive:
            return POSITIVE
        for is_path, path_type in (
            (self.input_file, INPUT),
            (self.input_directory, INPUT_DIRECTORY),
            (self.output_directory, OUTPUT_DIRECTORY),
        ):
            if is_path:
                return path_type
        # With `multiple` click collects the values of a tuple itself.
        members = get_args(annotation) if _is_union(annotation) else (annotation,)
        if any(get_origin(m) is tuple for m in members) and not self.settings.get("multiple"):
            items = [get_args(m)[0] for m in members if get_origin(m) is tuple]
            return _Integers(_words(members), _words(get_args(items[0])))
        return _click_type(annotation)


def _words(members: Sequence[Any]) -> list[str]:
    """Return the values of the Literals among the members of a union."""
    return [word for m in members if get_origin(m) is Literal for word in get_args(m)]


@dataclass(frozen=True, slots=True)
class DeclaredOption:
    """One option of a command.

    Attributes:
        name: of the dataclass field.
        annotation: type of the field.
        default: value of the field; `dataclasses.MISSING` where the option is required.
        spec: what the command line adds.
    """

    name: str
    annotation: Any
    default: Any
    spec: OptionSpec

    @property
    def spellings(self) -> tuple[str, ...]:
        """The option's names on the command line."""
        return self.spec.names or (f"--{self.name.replace('_', '-')}",)

    def click_keywords(self) -> dict[str, Any]:
        """Return the keywords of `click.option`, as the field's type and default decide them."""
        keywords: dict[str, Any] = {"help": self.spec.help, **self.spec.settings}
        if self.annotation is bool:
            # A field that is on by default is an option that switches it off: --no-prefetch.
            return keywords | {
                "is_flag": True,
                "default": self.default,
                "flag_value": not self.default,
            }
        kind = keywords["type"] = self.spec.click_type(self.annotation)
        # click's own are "INTEGER RANGE" and "FLOAT RANGE".
        if kind is int or isinstance(kind, click.IntRange):
            keywords.setdefault("metavar", "N")
        elif kind is float or isinstance(kind, click.FloatRange):
            keywords.setdefault("metavar", "X")
        if self.default is dataclasses.MISSING:
            keywords["required"] = True
        # click gives an absent repeated option an empty tuple.
        elif not keywords.get("multiple"):
            keywords["default"] = self.default
        return keywords


def declared_options(*kinds: type) -> Iterator[DeclaredOption]:
    """Yield the options of dataclasses, those of a base class first."""
    for kind in kinds:
        for field in dataclasses.fields(kind):
            if "help" in field.metadata:
                spec = OptionSpec.of(field.metadata)
                yield DeclaredOption(field.name, field.type, field.default, spec)


def _click_type(annotation: Any) -> Any:
    """Return click's type for a field: of a Literal a choice, of a tuple the type of its items."""
    annotation = _without_none(annotation)
    if get_origin(annotation) is Literal:
        return click.Choice(get_args(annotation))
    if get_origin(annotation) is tuple:
        return _click_type(get_args(annotation)[0])
    if annotation is Path:
        return click.Path(dir_okay=False, path_type=Path)
    return annotation


def _without_none(annotation: Any) -> Any:
    """Return T of `T | None`, and any other annotation unchanged."""
    members = [member for member in get_args(annotation) if member is not type(None)]
    return members[0] if _is_union(annotation) and len(members) == 1 else annotation


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, UnionType)


def with_options(
    kind: type, parameter: str = "options", *, without: Collection[str] = ()
) -> Callable[[Command], Command]:
    """Return a decorator that gives a command the options of `kind`.

    Args:
        kind: a dataclass whose fields are `option`s.
        parameter: name of the command's parameter that receives an instance of `kind`.
        without: fields that this command does not offer; they keep their defaults.
    """
    options = [option for option in declared_options(kind) if option.name not in without]

    def decorate(command: Command) -> Command:
        # `wraps` also copies `__click_params__`, where click keeps the options of decorators below.
        @functools.wraps(command)
        def called(*args: Any, **values: Any) -> Any:
            fields = {option.name: values.pop(option.name) for option in options}
            _refuse_unused(options, fields)
            return command(*args, **{parameter: kind(**fields)}, **values)

        decorated: Any = called
        # Decorators apply from the last to the first, and help lists options in the reverse order.
        for option in reversed(options):
            # The name is passed because click would derive "no_prefetch" from --no-prefetch.
            add_option = click.option(*option.spellings, option.name, **option.click_keywords())
            decorated = add_option(decorated)
        return decorated

    return decorate


def _refuse_unused(options: Sequence[DeclaredOption], fields: Mapping[str, Any]) -> None:
    """Refuse an option on the command line that has no effect without another."""
    by_name = {option.name: option for option in options}
    context = click.get_current_context()
    for option in options:
        needs = option.spec.needs
        # Such an option may have a default, so only click knows whether it was given.
        if (
            needs
            and fields[needs] is None
            and context.get_parameter_source(option.name) is click.core.ParameterSource.COMMANDLINE
        ):
            given = f"{option.spellings[-1]} {fields[option.name]}"
            missing = by_name[needs].spellings[-1]
            values = getattr(
                by_name[needs].spec.click_type(by_name[needs].annotation), "choices", ()
            )
            value = f" {values[0]}" if len(values) == 1 else ""
            raise UsageError(
                f"{given} has no effect without {missing}{value}: give both, or leave it out",
                context,
                code="option-unused",
            )


def choices(kind: type, name: str) -> tuple[Any, ...]:
    """Return the values that an option of `kind` takes, where its field's type is a Literal."""
    (annotation,) = [option.annotation for option in declared_options(kind) if option.name == name]
    return tuple(_click_type(annotation).choices)


def headings(*kinds: type) -> Sections:
    """Return heading -> names of the options under it, in the order of declaration.

    --json and --help, which no dataclass declares, stand with the output, or with the options
    that have no heading of their own.
    """
    sections: dict[str, list[str]] = {}
    for option in declared_options(*kinds):
        sections.setdefault(option.spec.heading, []).append(option.name)
    for heading in ("Output", "Options"):
        if heading in sections:
            sections[heading] += ["as_json", "help"]
            break
    return sections


class SectionedCommand(ReportingMain):
    """A command whose options stand under headings; the last section also has unlisted ones."""

    def __init__(self, *args: Any, sections: Sections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a list of options for each section that this command has options of."""
        options = [p for p in self.get_params(ctx) if isinstance(p, click.Option)]
        records = {option.name: option.get_help_record(ctx) for option in options}
        _write_lists(formatter, self.sections, records)


class SectionedGroup(ReportingMain, click.Group):
    """A group whose commands stand under headings, each with its whole first paragraph.

    click's own list cuts the text to one line.

    Args:
        sections: the headings.
        modules: command -> module of `onerank.cli.commands` that defines it. A module is imported
            when its command runs: importing all of them takes 35 ms, a third of the start.
    """

    def __init__(
        self,
        *args: Any,
        sections: Sections | None = None,
        modules: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.sections = sections or {"Commands": ()}
        self._modules = dict(modules or {})

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, without importing their modules."""
        # A command is in both once its module is imported.
        return list(dict.fromkeys([*self._modules, *self.commands]))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command; import its module if it has one."""
        if cmd_name not in self.commands and cmd_name in self._modules:
            module = importlib.import_module(f"onerank.cli.commands.{self._modules[cmd_name]}")
            self.add_command(getattr(module, cmd_name.replace("-", "_")), cmd_name)
        return super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command; name the closest one if there is no such command."""
        try:
            return super().resolve_command(ctx, args)
        except click.NoSuchOption:
            raise
        except click.UsageError as error:
            message = error.format_message()
            # click itself suggests only commands whose modules are imported.
            if not getattr(error, "possibilities", None):
                close = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
                message += f" Did you mean '{close[0]}'?" if close else ""
            raise UsageError(message, ctx, code="usage-unknown-command") from None

    def all_commands(self) -> dict[str, click.Command]:
        """Return all commands by name; imports their modules."""
        context = click.Context(self)
        commands = {name: self.get_command(context, name) for name in self.list_commands(context)}
        return {name: command for name, command in commands.items() if command}

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a list of commands for each section; the last one also has unlisted ones."""
        records = {
            name: (name, (command.help or "").split("\n\n")[0].replace("\n", " "))
            for name, command in self.all_commands().items()
        }
        _write_lists(formatter, self.sections, records)


def _write_lists(
    formatter: click.HelpFormatter,
    sections: Sections,
    records: Mapping[Any, tuple[str, str] | None],
) -> None:
    listed = {name for names in sections.values() for name in names}
    last = list(sections)[-1]
    for heading, names in sections.items():
        unlisted = [name for name in records if name not in listed] if heading == last else []
        rows = [record for name in (*names, *unlisted) if (record := records.get(name))]
        if rows:
            with formatter.section(heading):
                formatter.write_dl(rows)

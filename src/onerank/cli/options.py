"""Options declared once: a dataclass field with its help becomes a command-line option.

A command's options are the fields of a frozen dataclass. The field's name is the option's name
(`tp_style` is `--tp-style`), its type is that of the Python API, and its metadata holds what the
command line adds: help, heading, choices. `with_options` gives a command the options and passes
them on as one instance; `headings` groups them for help.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
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
    """Return a dataclass field that is an option.

    Args:
        help: what the option decides.
        names: spellings in place of `--field-name`.
        heading: the help section that it stands in.
        default: value where the option is left out; False makes it a flag.
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

"""Dataclass fields that are command-line options, declared without click.

`option` keeps what the command line adds to a field as plain data in the field's metadata.
`onerank.cli.dataclass_to_click` makes click's options of it. A dataclass of options in `capture` or
`serving` is thus also a record of the Python API.
"""

# The command line imports declarations of all packages to print help, so this module imports
# neither click nor torch.
import dataclasses
from typing import Any


def option(
    help: str,  # noqa: A002
    *names: str,
    heading: str = "Options",
    default: Any = dataclasses.MISSING,
    type: Any = None,  # noqa: A002
    **settings: Any,
) -> Any:
    """Return a dataclass field that is a command-line option.

    Args:
        help: what the option decides.
        names: spellings in place of `--field-name`.
        heading: its section of the help.
        default: value if the option is absent; without one it is required.
        type: click's type, where the field's type does not say enough.
        settings: further keywords of `click.option`, such as metavar.
    """
    spec = {"help": help, "names": names, "heading": heading, "type": type, **settings}
    return dataclasses.field(default=default, metadata=spec)


def shared_option(kind: type, name: str, *, required: bool = False, **changes: Any) -> Any:
    """Return a dataclass field that is an option of another command as well.

    Args:
        kind: dataclass that declares the option.
        name: its field.
        required: whether the option loses its default.
        changes: metadata that differs, such as help.
    """
    declared = next(field for field in dataclasses.fields(kind) if field.name == name)
    default = dataclasses.MISSING if required else declared.default
    return dataclasses.field(default=default, metadata={**declared.metadata, **changes})

"""What every command shares: errors as exit code 2, the two consoles, JSON output."""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import click

P = ParamSpec("P")
R = TypeVar("R")

TRACE = click.Path(exists=True, dir_okay=False, path_type=Path)
OUTPUT = click.Path(dir_okay=False, path_type=Path)

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")


def reports_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Turn errors a user can mend into a message and exit code 2."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except Exception as error:
            from onerank.ir.errors import OneRankError, ScriptError  # late: numpy comes with it

            if isinstance(error, ScriptError) and error.script_traceback:
                click.echo(error.script_traceback.rstrip(), err=True)
            if isinstance(error, OSError):
                click.echo(f"error: {error.filename or ''}: {error.strerror}", err=True)
            elif isinstance(error, OneRankError):
                click.echo(f"error: {error}", err=True)
            else:
                raise
            sys.exit(2)
        except KeyboardInterrupt:
            click.echo("interrupted: nothing was written", err=True)
            sys.exit(130)

    return wrapped


def console(*, err: bool = False) -> Any:
    """Return a rich console; on a pipe it is wide enough for every table."""
    from rich.console import Console

    made = Console(stderr=err, highlight=False)
    return made if made.is_terminal else Console(stderr=err, highlight=False, width=120)


def print_json(data: Any) -> None:
    """Print a record as JSON; paths become strings."""
    import msgspec

    click.echo(msgspec.json.format(msgspec.json.encode(data, enc_hook=str)).decode())


def progress(message: str) -> None:
    """Tell what goes on, on stderr, so that a pipe gets the result alone."""
    click.echo(f"· {message}", err=True)

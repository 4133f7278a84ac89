"""Commands on the captures of the repository."""

from collections.abc import Sequence
from pathlib import Path

import click
from click.testing import CliRunner, Result

ROOT = Path(__file__).parents[2]
TRACES = ROOT / "traces"
GPU_NS = 29_865_307
"""What the GPU operations of the capture on an H200 take in all."""


def invoke(command: click.Command, *args: object, code: int = 0) -> Result:
    """Run a command; its exit code must be `code`."""
    result = CliRunner().invoke(command, [str(arg) for arg in args])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result


def refused(
    command: click.Command, *args: object, error: str, naming: str | Sequence[str] = ()
) -> Result:
    """Run a command that must exit with code 2 and the error `error`.

    Args:
        command: the command.
        args: its arguments.
        error: code of the error.
        naming: what the message must name: files, options, numbers. Not its words.
    """
    result = invoke(command, *args, code=2)
    assert f"error[{error}]: " in result.stderr, result.stderr
    message = " ".join(result.stderr.split())
    names = (naming,) if isinstance(naming, str) else naming
    missing = [name for name in names if name not in message]
    assert not missing, f"{missing} not in: {message}"
    return result


def empty(directory: Path) -> Path:
    """Make an empty directory in this one."""
    path = directory / "empty"
    path.mkdir()
    return path

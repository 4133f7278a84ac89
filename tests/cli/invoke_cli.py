"""Commands on the captures of the repository."""

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


def empty(directory: Path) -> Path:
    """Make an empty directory in this one."""
    path = directory / "empty"
    path.mkdir()
    return path

"""The command reference is what the commands declare."""

import sys
from pathlib import Path

import click

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from reference import PAGE, reference  # noqa: E402

from onerank.cli import onerank  # noqa: E402


def _options(command: click.Command) -> set[str]:
    if isinstance(command, click.Group):
        return set().union(*map(_options, command.commands.values()))
    return {name for p in command.params if isinstance(p, click.Option) for name in p.opts}


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == reference(), "run: python tools/reference.py"


def test_the_page_names_every_option_of_every_command():
    page = PAGE.read_text()
    names = _options(onerank) - {"--help"}
    assert len(names) > 80
    assert [name for name in sorted(names) if f"{name}" not in page] == []

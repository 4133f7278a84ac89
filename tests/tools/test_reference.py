"""The generated pages of the reference are what the code declares."""

import re
import sys
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from generate_reference import DIRECTORY, PAGES, PRINTED, leaf_commands  # noqa: E402

from onerank.cli import onerank  # noqa: E402
from onerank.cli.dataclass_to_click import SectionedGroup  # noqa: E402
from onerank.ir.chakra.attributes import FIELDS  # noqa: E402


def _options(command: click.Command) -> set[str]:
    if isinstance(command, SectionedGroup):
        return set().union(*map(_options, command.all_commands().values()))
    return {name for p in command.params if isinstance(p, click.Option) for name in p.opts}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_up_to_date(page: Path):
    assert page.read_text() == PAGES[page](), "run: python tools/generate_reference.py"


def test_every_field_of_the_json_is_described():
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", (DIRECTORY / "json.md").read_text(), re.MULTILINE)
    assert {"peak_bytes", "step_time_ns", "steady_state"} <= {name for name, _ in rows}
    assert [name for name, kind in rows if kind == "value"] == []
    for record, _ in PRINTED.values():
        assert f"\n{(record.__doc__ or '').splitlines()[0]}" in (DIRECTORY / "json.md").read_text()


def test_every_command_with_json_names_its_record():
    described = {" ".join(name for name in key.split() if name.islower()) for key in PRINTED}
    with_json = {path for path, command in leaf_commands("onerank", onerank) if _has_json(command)}
    assert len(with_json) > 20
    assert {path.removesuffix(" measure") for path in with_json} - described == {
        "onerank show",
        "onerank coarsen",
    }


def _has_json(command: click.Command) -> bool:
    return any("--json" in parameter.opts for parameter in command.params)


def test_the_attributes_of_a_trace_are_those_that_are_written():
    page = (DIRECTORY / "traces.md").read_text()
    assert [field.attribute for field in FIELDS if f"| `{field.attribute}` |" not in page] == []


def test_the_page_names_every_option_of_every_command():
    page = (DIRECTORY / "cli.md").read_text()
    names = _options(onerank) - {"--help"}
    assert len(names) > 80
    assert [name for name in sorted(names) if f"{name}" not in page] == []

"""Write the pages of docs/reference that have their content from the code.

`cli.md` has every command and option, `json.md` the fields of `--json`, `traces.md` the attributes
of a trace. `python tools/reference.py` writes the pages. With `--check` it writes nothing, and
exits with code 1 if a page is out of date.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import click
from json_reference import json_reference
from trace_reference import trace_reference

from onerank.cli import annotate, capture, onerank
from onerank.cli.click_options import SectionedCommand

DIRECTORY = Path(__file__).parents[1] / "docs" / "reference"

_HEADER = """# Command reference

`tools/reference.py` writes this page from the declarations of the commands; do not edit it.
`capture` and `annotate` are also installed as separate commands.
"""


def command_reference() -> str:
    """Return the page as Markdown, ending in a newline."""
    parts = [_HEADER]
    for path, command in _leaf_commands("onerank", onerank):
        parts.append(_describe(path, command))
    return "\n".join(parts)


def _leaf_commands(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    """Yield the commands that do something, with their full names, as help lists them."""
    if not isinstance(command, click.Group):
        yield path, command
        return
    if command.invoke_without_command:
        yield path, command
    for name, member in command.commands.items():
        # `capture` and `annotate` are also installed as separate commands, which users type.
        short = member in (capture, annotate)
        yield from _leaf_commands(name if short else f"{path} {name}", member)


def _describe(path: str, command: click.Command) -> str:
    """Return the section of one command: what it does, its usage, a table for each heading."""
    context = click.Context(command, info_name=path)
    lines = [f"## {path}", "", _unwrapped(command.help or ""), ""]
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    lines += ["```text", usage, "```", ""]
    for heading, options in _by_heading(context, command).items():
        lines += [f"| {heading} | |", "|---|---|"]
        for option in options:
            record = option.get_help_record(context)
            if record is not None:
                spelling, text = record
                lines.append(f"| `{_code_cell(spelling)}` | {_cell(text)} |")
        lines.append("")
    return "\n".join(lines)


def _by_heading(context: click.Context, command: click.Command) -> dict[str, list[click.Option]]:
    """Return heading -> options, in the order of the command's help; without --help."""
    options = {
        option.name: option
        for option in command.get_params(context)
        if isinstance(option, click.Option) and "--help" not in option.opts
    }
    sections = command.sections if isinstance(command, SectionedCommand) else {"Options": ()}
    listed = {name for names in sections.values() for name in names}
    grouped = {
        heading: [options[name] for name in names if name in options]
        for heading, names in sections.items()
    }
    grouped[list(sections)[-1]] += [o for name, o in options.items() if name not in listed]
    return {heading: members for heading, members in grouped.items() if members}


def _unwrapped(text: str) -> str:
    """Return help text with one line per paragraph; preformatted blocks keep their lines."""
    paragraphs: list[str] = []
    for paragraph in text.split("\n\n"):
        if paragraph.lstrip().startswith("\b"):
            paragraphs.append("```text\n" + paragraph.replace("\b", "").strip("\n") + "\n```")
        else:
            paragraphs.append(" ".join(paragraph.split()))
    return "\n\n".join(paragraphs)


def _cell(text: str) -> str:
    # Markdown reads the brackets of a range such as [x>=1] as a reference to a link.
    plain = " ".join(text.split()).replace("|", "\\|")
    return plain.replace("[", "\\[").replace("]", "\\]")


def _code_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


PAGES = {
    DIRECTORY / "cli.md": command_reference,
    DIRECTORY / "json.md": json_reference,
    DIRECTORY / "traces.md": trace_reference,
}


def main() -> None:
    """Write the pages, or check them."""
    for page, reference in PAGES.items():
        if "--check" not in sys.argv[1:]:
            page.write_text(reference())
        elif page.read_text() != reference():
            sys.exit(f"{page} is out of date: run python tools/reference.py")


if __name__ == "__main__":
    main()

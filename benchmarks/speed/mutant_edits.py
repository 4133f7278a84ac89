"""Edits of a workload's files, of which mutants are made."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Edit = Callable[[Path], None]
"""Changes a copy of the workload in place."""

SYSTEMS = ("system.json", "system_roofline.json")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of a workload.

    Attributes:
        name: file, field and value.
        edit: makes the change.
        legitimate: whether the changed workload is sound; None if the change is random, so that a
            new time may or may not be a surprise.
    """

    name: str
    edit: Edit
    legitimate: bool | None


REMOVED = object()
ABSENT = "<removed>"

VALUES: tuple[Any, ...] = (
    REMOVED,
    None,
    True,
    False,
    "1",
    "",
    [],
    {},
    0,
    -1,
    0.5,
    1,
    2,
    1e-9,
    2**31,
    2**63,
    1e30,
)


def json_edit(file: str, key: str, value: object) -> Edit:
    """Return an edit that sets a key of a JSON file, or removes it."""

    def edit(folder: Path) -> None:
        path = folder / file
        settings = json.loads(path.read_text())
        if value is REMOVED:
            settings.pop(key, None)
        else:
            settings[key] = value
        path.write_text(json.dumps(settings))

    return edit


def settings_edit(file: str, settings: dict[str, Any]) -> Edit:
    """Return an edit that sets several keys of a JSON file."""

    def edit(folder: Path) -> None:
        for key, value in settings.items():
            json_edit(file, key, value)(folder)

    return edit


def both_systems(edit_of: Callable[[str], Edit]) -> Edit:
    """Return an edit of the system files of both encodings."""
    edits = [edit_of(file) for file in SYSTEMS]

    def edit(folder: Path) -> None:
        for one_edit in edits:
            one_edit(folder)

    return edit


def text_edit(file: str, change: Callable[[str], str | bytes]) -> Edit:
    """Return an edit that changes the text of a file."""

    def edit(folder: Path) -> None:
        path = folder / file
        changed = change(path.read_text())
        path.write_bytes(changed if isinstance(changed, bytes) else changed.encode())

    return edit


def label_of(value: object) -> str:
    """Return a value as the name of a mutant has it."""
    return ABSENT if value is REMOVED else json.dumps(value)[:40]


JSON_TEXTS: dict[str, Callable[[str], str | bytes]] = {
    "byte order mark": lambda text: "\ufeff" + text,
    "text behind the object": lambda text: text + " more",
    "one line": lambda text: text.replace("\n", " "),
    "CRLF": lambda text: text.replace("\n", "\r\n"),
    "tabs": lambda text: text.replace("  ", "\t"),
    "leading blank lines": lambda text: "\n\n " + text,
    "unknown number beyond 64 bits": lambda text: text.replace(
        "{", '{ "x": 123456789012345678901234567890,', 1
    ),
    "escaped key": lambda text: text.replace('"endpoint-delay"', '"endpoint\\u002ddelay"').replace(
        '"memory-type"', '"memory\\u002dtype"'
    ),
    "bad: empty": lambda text: "",
    "bad: list": lambda text: "[]",
    "bad: number": lambda text: "5",
    "bad: null": lambda text: "null",
    "bad: trailing comma": lambda text: text.rstrip()[:-1] + ",}",
    "bad: comment": lambda text: "// note\n" + text,
    "bad: block comment": lambda text: "/* note */\n" + text,
    "bad: NaN": lambda text: text.replace("{", '{ "x": NaN,', 1),
    "bad: Infinity": lambda text: text.replace("{", '{ "x": Infinity,', 1),
    "bad: number out of range": lambda text: text.replace("{", '{ "x": 1e999,', 1),
    "bad: single quotes": lambda text: text.replace('"', "'"),
    "bad: cut": lambda text: text[: len(text) // 2],
    "bad: leading zero": lambda text: text.replace("{", '{ "x": 012,', 1),
    "bad: invalid UTF-8": lambda text: (
        text.replace("{", '{ "x": "@",', 1).encode().replace(b"@", b"\xff")
    ),
    "bad: control character": lambda text: text.replace("{", '{ "x": "a\tb",', 1),
    "bad: NUL": lambda text: "\0" + text,
    "bad: UTF-16": lambda text: text.encode("utf-16"),
    "bad: lone surrogate": lambda text: text.replace("{", '{ "x": "\\ud800",', 1),
    "bad: no braces": lambda text: text.strip()[1:-1],
    "bad: equals": lambda text: text.replace(":", " ="),
    "bad: missing comma": lambda text: text.replace(",", "", 1),
}

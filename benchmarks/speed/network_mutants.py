"""Mutants of network.yml, the network of a workload."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.speed.mutant_edits import ABSENT, SYSTEMS, Edit, Mutant, json_edit, text_edit

_SOUND_VALUES = {
    "npus_count": (
        "[ 4 ]",
        "[4]",
        "[ 0x4 ]",
        "[ 04 ]",
        '[ "4" ]',
        "[ +4 ]",
        "[ 4, ]",
        "\n  - 4",
    ),
    "bandwidth": (
        "[ 100 ]",
        "[ 100. ]",
        "[ 1e2 ]",
        "[ +50.5 ]",
        "['50']",
        "[ .5e3 ]",
        "\n- 50",
        "[ 1 ]",
    ),
    "latency": ("[ 0 ]", "[ 250 ]", "[ 1e3 ]", "[ .5 ]", "[ 2.5E2 ]", "\n  - 100", "[ 0.0 ]"),
    "topology": (
        "[ Ring ]",
        "[ FullyConnected ]",
        "[ 'Switch' ]",
        '["Switch"]',
        "\n  - Switch",
    ),
}

_BROKEN_VALUES = {
    "npus_count": (
        "[ 4.0 ]",
        "[ 2 ]",
        "[ 8 ]",
        "[ 0 ]",
        "[ 1 ]",
        "[ -4 ]",
        "4",
        "[]",
        "[ 08 ]",
        "[ 4e0 ]",
        "[ 4_0 ]",
        "[ four ]",
        "[ ~ ]",
        "[ null ]",
        "[ [4] ]",
        "[ {a: 4} ]",
        "[ 4, 4 ]",
        "[ 2, 2 ]",
        "[ 99999999999 ]",
        "[ 0b100 ]",
        "[ 0o4 ]",
        '[ "" ]',
        "[ ! 4 ]",
        "{ a: 4 }",
        "[ 4 4 ]",
    ),
    "bandwidth": (
        "[ 0 ]",
        "[ -1 ]",
        "[ 1e-9 ]",
        "[ 1e30 ]",
        "[ 1e999 ]",
        "[ inf ]",
        "[ .inf ]",
        "[ .nan ]",
        "[ nan ]",
        "[ 4_50 ]",
        "[ 0x5 ]",
        "[ 5 0 ]",
        "50",
        "[]",
        "[ 50, 50 ]",
        "[ fast ]",
        "[ ~ ]",
        "[ 450GB ]",
        "[ '' ]",
        "[ 1,5 ]",
        "{ a: 50 }",
        "[ [50] ]",
    ),
    "latency": (
        "[ -1 ]",
        "[ 1e30 ]",
        "[ .inf ]",
        "[ nan ]",
        "[ 5us ]",
        "500",
        "[]",
        "[ 5, 5 ]",
        "[ ~ ]",
        "[ 1_0 ]",
        "[ {a: 1} ]",
        "[ 1e14 ]",
    ),
    "topology": (
        "[ ring ]",
        "[ Torus ]",
        "[ Mesh ]",
        "[ '' ]",
        "[ ~ ]",
        "Switch",
        "[]",
        "[ Switch, Switch ]",
        "[ 1 ]",
        "[ SWITCH ]",
        "[ Switch ",
        "{ Switch }",
    ),
}

_TEXTS: dict[str, tuple[bool, Callable[[str], str | bytes]]] = {
    "document start": (True, lambda text: "---\n" + text),
    "document start and end": (True, lambda text: f"---\n{text}...\n"),
    "second document, broken": (True, lambda text: text + "---\na: [\n"),
    "extra keys": (True, lambda text: text + "name: mine\nnotes: [a, {b: c}]\n"),
    "flow mapping": (
        True,
        lambda text: "{topology: [Switch], npus_count: [4], bandwidth: [419.0], latency: [250]}",
    ),
    "byte order mark": (True, lambda text: "\ufeff" + text),
    "CRLF": (True, lambda text: text.replace("\n", "\r\n")),
    "comments only at the end": (True, lambda text: text + "# end"),
    "anchor and alias": (
        True,
        lambda text: text.replace("npus_count: [ 4 ]", "n: &n [ 4 ]\nnpus_count: *n"),
    ),
    "quoted keys": (
        True,
        lambda text: text.replace("topology:", '"topology":').replace("latency:", "'latency':"),
    ),
    "explicit key": (
        True,
        lambda text: text.replace("topology: [ Switch ]", "? topology\n: [ Switch ]"),
    ),
    "UTF-16": (True, lambda text: text.encode("utf-16")),
    "tag on a list": (True, lambda text: text.replace("topology: [", "topology: !!seq [")),
    "indented": (True, lambda text: "".join(f"  {line}\n" for line in text.splitlines())),
    "blank first lines": (True, lambda text: "\n\n\n" + text),
    "YAML directive": (True, lambda text: "%YAML 1.2\n---\n" + text),
    "duplicate bandwidth behind": (False, lambda text: text + "bandwidth: [ 1 ]\n"),
    "duplicate bandwidth before": (False, lambda text: "bandwidth: [ 1 ]\n" + text),
    "duplicate npus_count": (False, lambda text: text + "npus_count: [ 8 ]\n"),
    "duplicate unread key": (True, lambda text: text + "name: a\nname: b\n"),
    "empty": (False, lambda text: ""),
    "comment only": (False, lambda text: "# nothing\n"),
    "a list": (False, lambda text: "- a\n"),
    "a scalar": (False, lambda text: "Switch\n"),
    "tab": (False, lambda text: "\t" + text),
    "unclosed list": (False, lambda text: text.replace("]", "", 1)),
    "no space behind the colon": (False, lambda text: text.replace("topology: ", "topology:")),
    "unknown alias": (False, lambda text: text.replace("[ 4 ]", "*n")),
    "unclosed quote": (False, lambda text: text.replace("Switch", "'Switch")),
    "NUL": (False, lambda text: "\0" + text),
    "keys in capitals": (False, lambda text: text.upper()),
    "cut": (False, lambda text: text[: len(text) * 2 // 3]),
    "merge key": (
        False,
        lambda text: (
            "d: &d {topology: [ Switch ]}\n<<: *d\n" + text.replace("topology: [ Switch ]", "")
        ),
    ),
}
"""Changes of the text, and whether the changed file means the same."""


def network_mutants() -> Iterator[Mutant]:
    file = "network.yml"

    def entry(key: str, text: str) -> Edit:
        def change(text_before: str) -> str:
            lines = [line for line in text_before.splitlines() if not line.startswith(f"{key}:")]
            return "\n".join([*lines, f"{key}: {text}"]) + "\n"

        return text_edit(file, change)

    for legitimate, table in ((True, _SOUND_VALUES), (False, _BROKEN_VALUES)):
        for key, texts in table.items():
            for text in texts:
                # An int of [ 2 ] describes another world; RANKS files are there.
                yield Mutant(f"network.yml {key} {text.strip()}", entry(key, text), legitimate)
    for key in _SOUND_VALUES:
        edit = text_edit(
            file,
            lambda text_before, key=key: (
                "\n".join(
                    line for line in text_before.splitlines() if not line.startswith(f"{key}:")
                )
                + "\n"
            ),
        )
        yield Mutant(f"network.yml {key} {ABSENT}", edit, legitimate=False)
    for label, (legitimate, change) in _TEXTS.items():
        yield Mutant(f"network.yml text: {label}", text_edit(file, change), legitimate)
    for algorithms, legitimate in (
        (["ring", "ring"], True),
        (["ring"], False),
        (["oneRing"], True),
    ):
        yield Mutant(
            f"network.yml two dimensions, {json.dumps(algorithms)}",
            _two_dimensions(algorithms),
            legitimate,
        )


def _two_dimensions(algorithms: list[str]) -> Edit:
    def edit(folder: Path) -> None:
        for file in SYSTEMS:
            for call in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all"):
                json_edit(file, f"{call}-implementation", algorithms)(folder)
        (folder / "network.yml").write_text(
            "topology: [ Switch, Switch ]\nnpus_count: [ 2, 2 ]\n"
            "bandwidth: [ 400, 50 ]\nlatency: [ 250, 1000 ]\n"
        )

    return edit

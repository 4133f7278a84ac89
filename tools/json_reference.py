"""docs/reference/json.md: the fields that commands print with `--json`, from the record classes."""

import dataclasses
import inspect
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union, cast, get_args, get_origin

import msgspec

from onerank.analysis.breakdown import Part
from onerank.analysis.predict_ops import OpPrediction
from onerank.analysis.step_time import Replay, StepChange
from onerank.analysis.summary import Summary
from onerank.analysis.trace_diff import Difference
from onerank.annotate import Explanation, Gpu, Recosting
from onerank.annotate.cost import CostReport
from onerank.annotate.energy import EnergyReport
from onerank.annotate.memory.memory_report import MemoryReport
from onerank.converters.sources.kineto import Conversion
from onerank.converters.sources.onnx import OnnxConversion
from onerank.converters.targets.astra_sim import AstraSimExport
from onerank.converters.targets.astra_sim.check import Finding
from onerank.converters.targets.goal import GoalExport
from onerank.converters.targets.simai import SimaiExport

PRINTED: Mapping[str, tuple[type, str]] = {
    "onerank show": (Summary, "One record. `capture run` and `onerank coarsen` print it too."),
    "onerank show --granularity": (Part, "A list, one record per layer, sub-module or kernel."),
    "onerank replay": (Replay, "One record."),
    "onerank memory": (MemoryReport, "One record."),
    "onerank energy": (EnergyReport, "One record."),
    "onerank cost": (CostReport, "One record."),
    "onerank diff": (Difference, "One record."),
    "annotate": (Recosting, "One record, and `step` in it, a [StepChange](#stepchange)."),
    "annotate --explain": (Explanation, "One record."),
    "onerank predict": (OpPrediction, "A list, one record per operator."),
    "onerank gpus": (Gpu, "A list, one record per GPU."),
    "onerank convert": (Conversion, "One record, for recorded traces."),
    "onerank convert MODEL.onnx": (OnnxConversion, "One record."),
    "onerank export astra-sim": (AstraSimExport, "One record."),
    "onerank export simai": (SimaiExport, "One record."),
    "onerank export goal": (GoalExport, "One record."),
    "onerank check": (Finding, "A list, one record per finding."),
}
"""Command -> the record that it prints with `--json`, and how many of them."""

FURTHER = (StepChange,)
"""Records that a command adds to the fields of another record."""

UNITS = {
    "ns": "ns",
    "us": "µs",
    "bytes": "bytes",
    "flops": "FLOP",
    "uj": "µJ",
    "mw": "mW",
    "mhz": "MHz",
    "c": "°C",
}
"""Last word of a field's name -> its unit."""

_HEADER = """# JSON output

`tools/reference.py` writes this page from the record classes; do not edit it.

A command with `--json` prints one record or a list of records. The functions of
[the Python API](python.md) return the same records. Sizes are powers of ten; a field's name ends
with its unit.
"""

_SCALARS = {int: "integer", float: "number", str: "string", bool: "boolean", Path: "string"}


def json_reference() -> str:
    """Return the page as Markdown, ending in a newline."""
    parts = [_HEADER]
    nested: dict[str, type] = {kind.__name__: kind for kind in FURTHER}
    for command, (kind, count) in PRINTED.items():
        described = f"{first_paragraph(kind)} {count}"
        parts.append(f"## {command}\n\n{described}\n\n{field_table(kind, nested)}")
    return "\n".join([*parts, *nested_records("## Records in records", nested)])


def nested_records(heading: str, nested: dict[str, type]) -> list[str]:
    """Return sections on records that others hold; `nested` receives those that they hold."""
    parts = [f"{heading}\n"]
    described: set[str] = set()
    while waiting := sorted(nested.keys() - described):
        for name in waiting:
            described.add(name)
            text = field_table(nested[name], nested)
            parts.append(f"### {name}\n\n{first_paragraph(nested[name])}\n\n{text}")
    return parts


def first_paragraph(kind: type) -> str:
    return (inspect.getdoc(kind) or "").split("\n\n")[0].replace("\n", " ")


def field_table(kind: type, nested: dict[str, type]) -> str:
    """Return the table of a record's fields; the records that they hold are added to `nested`."""
    descriptions = _descriptions(kind)
    lines = ["| field | type | unit | |", "|---|---|---|---|"]
    for name, annotation in _fields(kind):
        unit = UNITS.get(name.rsplit("_", 1)[-1], "")
        cells = (f"`{name}`", json_type(annotation, nested), unit, _cell(descriptions.get(name)))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _fields(kind: type) -> Iterator[tuple[str, Any]]:
    hints = field_hints(kind)
    names = getattr(kind, "__struct_fields__", None) or [
        field.name for field in dataclasses.fields(kind)
    ]
    encoded = getattr(kind, "__struct_encode_fields__", names)
    for name, written in zip(names, encoded, strict=True):
        yield written, hints[name]


def field_hints(kind: type) -> dict[str, Any]:
    """Return the annotations; names that a module imports for type checkers alone stay texts."""
    module = vars(sys.modules[kind.__module__])
    try:
        return typing.get_type_hints(kind, {**module, kind.__name__: kind})
    except NameError:
        return dict(kind.__annotations__)


def _descriptions(kind: type) -> dict[str, str]:
    """Return field -> its text under `Attributes:` in the docstring."""
    text = inspect.getdoc(kind) or ""
    _, _, attributes = text.partition("Attributes:\n")
    entries: dict[str, str] = {}
    name = ""
    for line in attributes.splitlines():
        entry = re.match(r"    (\w+): (.*)", line)
        if entry:
            name = entry[1]
            entries[name] = entry[2]
        elif name and line.startswith("        "):
            entries[name] += f" {line.strip()}"
        elif line.strip():
            break
    return entries


def json_type(annotation: Any, nested: dict[str, type]) -> str:
    """Return the JSON type of an annotation; a record is a link to its table."""
    origin, members = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        kinds = [m for m in members if m not in (type(None), msgspec.UnsetType)]
        texts = list(dict.fromkeys(json_type(member, nested) for member in kinds))
        return " or ".join([*texts, *(["null"] if type(None) in members else [])])
    if origin is Literal:
        return " or ".join(f'`"{member}"`' for member in members)
    if isinstance(origin, type):
        return _container_type(origin, members, nested)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return _SCALARS[type(next(iter(annotation)).value)]
    if _is_record(annotation):
        nested[annotation.__name__] = annotation
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    return _SCALARS.get(cast("Any", annotation), "value")


def _is_record(annotation: Any) -> bool:
    return hasattr(annotation, "__struct_fields__") or dataclasses.is_dataclass(annotation)


def _container_type(origin: type, members: Sequence[Any], nested: dict[str, type]) -> str:
    if issubclass(origin, Mapping):
        return f"object of {json_type(members[1], nested)}"
    items = [json_type(member, nested) for member in members if member is not Ellipsis]
    return f"array of {' and '.join(dict.fromkeys(items))}"


def _cell(text: str | None) -> str:
    # JSON has null for Python's None. Markdown reads brackets as a reference to a link.
    plain = re.sub(r"\bNone\b", "null", " ".join((text or "").split())).replace("|", "\\|")
    return plain.replace("[", "\\[").replace("]", "\\]")

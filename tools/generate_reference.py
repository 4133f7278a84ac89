"""Write the pages of docs/reference that are made from the code.

`cli.md` has every command and option, `json.md` the fields of `--json`, `traces.md` the attributes
of a trace. `python tools/generate_reference.py` writes the pages. With `--check` it writes nothing,
and exits with code 1 if a page is out of date.
"""

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any, Literal, Union, cast, get_args, get_origin

import click
import msgspec

from onerank.analysis.breakdown import BreakdownRow
from onerank.analysis.predict_ops import OpPrediction
from onerank.analysis.step_time import Replay, StepChange
from onerank.analysis.summary import RankSummaries, StepSummaries, Summary
from onerank.analysis.trace_diff import TraceDiff
from onerank.annotate import Explanation, Gpu, Recosting
from onerank.annotate.cost import CostReport
from onerank.annotate.energy import EnergyReport
from onerank.annotate.memory.memory_report import MemoryReport
from onerank.capture.bench.gpu_limits import Microbenchmarks
from onerank.capture.bench.measure_link import MeasuredLink
from onerank.capture.verify.numerics import Verification
from onerank.cli import annotate, capture, onerank
from onerank.cli.commands.annotate import RecostedTraces
from onerank.cli.commands.bench import Benched, Described, MergedFiles, StoredOperator
from onerank.cli.commands.convert import EtConverted, JsonConverted
from onerank.cli.commands.storage import StorageAdded
from onerank.cli.dataclass_to_click import SectionedCommand, SectionedGroup
from onerank.converters.sources.kineto import Conversion
from onerank.converters.sources.kineto.rank_directory import Converted
from onerank.converters.sources.onnx import OnnxConversion
from onerank.converters.targets.astra_sim.check import Finding
from onerank.converters.targets.astra_sim.exporter import AstraSimExport
from onerank.converters.targets.goal import GoalExport
from onerank.converters.targets.simai.exporter import SimaiExport
from onerank.ir.chakra import Repairs
from onerank.ir.chakra.attributes import FIELDS, IO_COLUMNS, NODE_TYPES
from onerank.ir.chakra.et_def_pb2 import NodeType
from onerank.ir.chakra.metadata import SCHEMA, SECTIONS
from onerank.ir.enums import Collective, Reason
from onerank.ir.job import Job
from onerank.ir.nodes import Nodes
from onerank.ir.notes import Note
from onerank.plan.job_replay import JobReplay
from onerank.plan.make_plan import PlanRecord
from onerank.serving.bundle import BundleRecord
from onerank.serving.recordings.recording import RecordingRecord
from onerank.serving.simulators.aiconfigurator import AiconfiguratorExport
from onerank.serving.simulators.llmservingsim import LLMServingSimExport
from onerank.serving.simulators.sglang_sim import SglangSimExport
from onerank.serving.simulators.vidur import VidurExport

DIRECTORY = Path(__file__).parents[1] / "docs" / "reference"

_COMMAND_HEADER = """# Command reference

`tools/generate_reference.py` writes this page from the commands' declarations; do not edit it.
`capture` and `annotate` are also installed as separate commands.
"""


def command_reference() -> str:
    """Return the page as Markdown, ending in a newline."""
    parts = [_COMMAND_HEADER]
    for path, command in leaf_commands("onerank", onerank):
        parts.append(_describe(path, command))
    return "\n".join(parts)


def leaf_commands(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    """Yield the commands that are not groups, with their full names, in the order of help."""
    if not isinstance(command, SectionedGroup):
        yield path, command
        return
    if command.invoke_without_command:
        yield path, command
    for name, member in command.all_commands().items():
        # `capture` and `annotate` are also installed as separate commands, which users type.
        short = member in (capture, annotate)
        yield from leaf_commands(name if short else f"{path} {name}", member)


def _describe(path: str, command: click.Command) -> str:
    """Return the section of a command: its help, its usage, a table for each heading."""
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
        # click's mark of a paragraph whose lines it must keep.
        if paragraph.lstrip().startswith("\b"):
            block = textwrap.dedent(paragraph.replace("\b", "")).strip()
            paragraphs.append(f"```text\n{block}\n```")
        else:
            paragraphs.append(" ".join(paragraph.split()))
    return "\n\n".join(paragraphs)


def _cell(text: str) -> str:
    # Markdown reads the brackets of a range such as [x>=1] as a reference to a link.
    return _code_cell(text).replace("[", "\\[").replace("]", "\\]")


def _code_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


PRINTED: Mapping[str, tuple[type, str]] = {
    "capture run": (Summary, "One record. `onerank show` and `onerank coarsen` print it too."),
    "capture run --ranks": (RankSummaries, "One record."),
    "capture run --steps": (StepSummaries, "One record, of several steps."),
    "capture serve": (BundleRecord, "One record. `annotate` of a bundle prints it too."),
    "capture verify": (Verification, "One record."),
    "onerank convert": (Conversion, "One record, for recorded traces."),
    "onerank convert DIRECTORY": (Converted, "A list, one record per rank."),
    "onerank convert --engine-steps": (RecordingRecord, "One record."),
    "onerank convert MODEL.onnx": (OnnxConversion, "One record."),
    "onerank convert TRACE.et": (EtConverted, "One record."),
    "onerank convert TRACE.json": (JsonConverted, "One record."),
    "onerank storage": (StorageAdded, "One record."),
    "annotate": (Recosting, "One record, and `step` in it, a [StepChange](#stepchange)."),
    "annotate DIRECTORY": (RecostedTraces, "One record."),
    "annotate --explain": (Explanation, "One record."),
    "onerank predict": (OpPrediction, "A list, one record per operator."),
    "onerank gpus": (Gpu, "A list, one record per GPU."),
    "onerank bench": (Benched, "One record."),
    "onerank bench describe": (Described, "One record."),
    "onerank bench link": (MeasuredLink, "One record."),
    "onerank bench merge": (MergedFiles, "One record."),
    "onerank bench show": (StoredOperator, "A list, one record per operator and data type."),
    "onerank show --granularity": (
        BreakdownRow,
        "A list, one record per layer, sub-module or kernel.",
    ),
    "onerank replay": (Replay, "One record."),
    "onerank replay --cluster": (JobReplay, "One record."),
    "onerank diff": (TraceDiff, "One record."),
    "onerank memory": (MemoryReport, "One record."),
    "onerank energy": (EnergyReport, "One record."),
    "onerank cost": (CostReport, "One record."),
    "onerank export astra-sim": (AstraSimExport, "One record."),
    "onerank export simai": (SimaiExport, "One record."),
    "onerank export goal": (GoalExport, "One record."),
    "onerank export vidur": (VidurExport, "One record."),
    "onerank export llmservingsim": (LLMServingSimExport, "One record."),
    "onerank export sglang-sim": (SglangSimExport, "One record."),
    "onerank export aiconfigurator": (AiconfiguratorExport, "One record."),
    "onerank plan": (PlanRecord, "One record."),
    "onerank check": (Finding, "A list, one record per finding."),
}
"""Command -> the record that it prints with `--json`, and how many of them, in help's order."""

FURTHER = (StepChange,)
"""Records that a command adds to the fields of another record."""

# The commands import these for type checkers only, so that help loads neither numpy nor torch.
_ANNOTATED = {
    kind.__name__: kind for kind in (Gpu, Microbenchmarks, Note, Recosting, Repairs, StepChange)
}

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

_JSON_HEADER = """# JSON output

`tools/generate_reference.py` writes this page from the record classes; do not edit it.

A command with `--json` prints one record or a list of records. The functions of
[the Python API](python.md) return the same records. Sizes are powers of ten; a field's name ends
with its unit.
"""

_SCALARS = {int: "integer", float: "number", str: "string", bool: "boolean", Path: "string"}


def json_reference() -> str:
    """Return the page as Markdown, ending in a newline."""
    parts = [_JSON_HEADER]
    nested: dict[str, type] = {kind.__name__: kind for kind in FURTHER}
    for command, (kind, count) in PRINTED.items():
        described = f"{first_paragraph(kind)} {count}"
        parts.append(f"## {command}\n\n{described}\n\n{field_table(kind, nested)}")
    return "\n".join([*parts, *nested_records("## Records in records", nested)])


def nested_records(heading: str, nested: dict[str, type]) -> list[str]:
    """Return sections on the records in other records; add the records in these to `nested`."""
    parts = [f"{heading}\n"]
    described: set[str] = set()
    # A record can have records that no command prints: until all are described.
    while waiting := sorted(nested.keys() - described):
        for name in waiting:
            described.add(name)
            text = field_table(nested[name], nested)
            parts.append(f"### {name}\n\n{first_paragraph(nested[name])}\n\n{text}")
    return parts


def first_paragraph(kind: type) -> str:
    return (inspect.getdoc(kind) or "").split("\n\n")[0].replace("\n", " ")


def field_table(kind: type, nested: dict[str, type]) -> str:
    """Return the table of a record's fields; add the records in them to `nested`."""
    descriptions = _descriptions(kind)
    lines = ["| field | type | unit | |", "|---|---|---|---|"]
    for name, annotation in _fields(kind):
        unit = UNITS.get(name.rsplit("_", 1)[-1], "")
        # JSON has null for Python's None.
        text = _cell(re.sub(r"\bNone\b", "null", descriptions.get(name, "")))
        cells = (f"`{name}`", json_type(annotation, nested), unit, text)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _fields(kind: type) -> Iterator[tuple[str, Any]]:
    hints = field_hints(kind)
    names = getattr(kind, "__struct_fields__", None) or [
        field.name for field in dataclasses.fields(kind)
    ]
    # msgspec can write a field under another name.
    encoded = getattr(kind, "__struct_encode_fields__", names)
    for name, written in zip(names, encoded, strict=True):
        yield written, hints[name]


def field_hints(kind: type) -> dict[str, Any]:
    """Return the annotations; as strings if a module imports a name for type checkers only."""
    module = vars(sys.modules[kind.__module__])
    try:
        return typing.get_type_hints(kind, {**_ANNOTATED, **module, kind.__name__: kind})
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
        # msgspec leaves an unset field out of the JSON.
        kinds = [m for m in members if m not in (type(None), msgspec.UnsetType)]
        texts = list(dict.fromkeys(json_type(member, nested) for member in kinds))
        return " or ".join([*texts, *(["null"] if type(None) in members else [])])
    if origin is Literal:
        return " or ".join(f'`"{member}"`' for member in members)
    if isinstance(origin, type):
        return _container_type(origin, members, nested)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        # msgspec writes a member of an enum as its value.
        return _SCALARS[type(next(iter(annotation)).value)]
    if _is_record(annotation):
        # A record's heading is the name of its class: two classes of one name would share a table.
        record = cast("type[Any]", annotation)
        if nested.setdefault(record.__name__, record) is not record:
            raise ValueError(f"two records are named {record.__name__}: rename one of them")
        return f"[{record.__name__}](#{record.__name__.lower()})"
    return _SCALARS.get(cast("Any", annotation), "value")


def _is_record(annotation: Any) -> bool:
    return hasattr(annotation, "__struct_fields__") or dataclasses.is_dataclass(annotation)


def _container_type(origin: type, members: Sequence[Any], nested: dict[str, type]) -> str:
    if issubclass(origin, Mapping):
        return f"object of {json_type(members[1], nested)}"
    items = [json_type(member, nested) for member in members if member is not Ellipsis]
    return f"array of {' and '.join(dict.fromkeys(items))}"


_TRACE_HEADER = f"""# Trace attributes

`tools/generate_reference.py` writes this page from the code that writes traces; do not edit it.

A trace is a Chakra `.et` file: length-prefixed protobuf messages, first the metadata, then the
nodes in the order of their ids. Chakra's times are whole microseconds; the attributes `start_ns`
and `duration_ns` are written if microseconds are not exact.

## Metadata

The attribute `schema` is `{SCHEMA}`. The others are JSON texts; absent ones have their default.
"""

_NODES = """
## Nodes

A node has an attribute only if its value differs from the default; -1 is an unknown number.
`graph.nodes` of the Python API has each as a column.
"""

_KINDS = """
## Kinds of nodes

`is_cpu_op` distinguishes the kinds of compute nodes: it is true for operators of the host.
"""

_REASONS = """
## Dependencies

All dependencies are in Chakra's `data_deps`. The attribute `data_dep_reasons` has a byte for each
of them, in their order.
"""


def trace_reference() -> str:
    """Return the page as Markdown, ending in a newline."""
    nested: dict[str, type] = {}
    hints = field_hints(Job)
    lines = [_TRACE_HEADER, "| attribute | type |", "|---|---|"]
    for attribute, (field, _) in SECTIONS.items():
        lines.append(f"| `{attribute}` | {json_type(hints[field], nested)} |")
    lines += [_NODES, "| attribute | type | column | |", "|---|---|---|---|"]
    described = _column_docs()
    for field in FIELDS:
        kind = field.variant.removesuffix("_val")
        words = "" if field.words is None else f"One of {_words(field.words)}. "
        if field.column == "collective":
            words = f"One of {_numbers(Collective)}. "
        text = words + described.get(field.column, "").replace("UNKNOWN", "-1")
        lines.append(f"| `{field.attribute}` | {kind} | `{field.column}` | {text.strip()} |")
    for place, columns in IO_COLUMNS.items():
        for column in columns:
            part = column.split("_")[1]
            lines.append(f"| `{place}.{part}` | string | `{column}` | Chakra's own field. |")
    lines += [_KINDS, "| kind | Chakra's type |", "|---|---|"]
    lines += [f"| {kind.name.lower()} | `{NodeType.Name(n)}` |" for kind, n in NODE_TYPES.items()]
    lines += [_REASONS, "| byte | reason |", "|---|---|"]
    lines += [f"| {int(reason)} | {reason.name.lower()} |" for reason in Reason]
    return "\n".join([*lines, "", *nested_records("## Records in the metadata", nested)])


def _column_docs() -> dict[str, str]:
    """Return column -> the docstring of its field in the class of the columns."""
    # Docstrings of fields are not kept at run time, so they are read from the source.
    (definition,) = ast.parse(inspect.getsource(Nodes)).body
    assert isinstance(definition, ast.ClassDef)
    docs: dict[str, str] = {}
    column = ""
    for statement in definition.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            column = statement.target.id
        elif column and isinstance(statement, ast.Expr):
            docs[column] = " ".join(str(ast.literal_eval(statement.value)).split())
    return docs


def _words(kind: type[IntEnum]) -> str:
    return ", ".join(f"`{member.name.lower()}`" for member in kind)


def _numbers(kind: type[IntEnum]) -> str:
    return ", ".join(f"{int(member)} ({member.name.lower()})" for member in kind if member >= 0)


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
            sys.exit(f"{page} is out of date: run python tools/generate_reference.py")


if __name__ == "__main__":
    main()

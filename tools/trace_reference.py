"""docs/reference/traces.md: what a `.et` file of onerank holds, from the code that writes it."""

import ast
import inspect
from enum import IntEnum

from json_reference import field_hints, json_type, nested_records

from onerank.ir.chakra.attributes import FIELDS, IO_COLUMNS, NODE_TYPES
from onerank.ir.chakra.et_def_pb2 import NodeType
from onerank.ir.chakra.metadata import SCHEMA, SECTIONS
from onerank.ir.enums import Collective, Reason
from onerank.ir.job.job import Job
from onerank.ir.nodes import Nodes

_HEADER = f"""# Trace attributes

`tools/reference.py` writes this page from the code that writes traces; do not edit it.

A trace is a Chakra `.et` file: length-prefixed protobuf messages, first the metadata, then the
nodes in the order of their ids. Chakra's own times are whole microseconds; the attributes
`start_ns` and `duration_ns` are written where microseconds lose something.

## Metadata

The attribute `schema` is `{SCHEMA}`. The others are JSON texts; absent ones have their default.
"""

_NODES = """
## Nodes

A node has an attribute only if its value differs from the default; -1 is a number that is not
known. `graph.nodes` of the Python API has each as a column.
"""

_KINDS = """
## Kinds of nodes

`is_cpu_op` distinguishes the kinds of compute nodes: it is true for operators of the host.
"""

_REASONS = """
## Dependencies

All dependencies stand in Chakra's `data_deps`. The attribute `data_dep_reasons` has one byte for
each of them, in their order.
"""


def trace_reference() -> str:
    """Return the page as Markdown, ending in a newline."""
    nested: dict[str, type] = {}
    hints = field_hints(Job)
    lines = [_HEADER, "| attribute | type |", "|---|---|"]
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
    """Return column -> the text under its field in the class of the columns."""
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

"""How figures, names and records look: in a terminal, in Python and in a notebook.

A record whose class derives from `Displayed` prints as tables and is HTML tables in a notebook. The
labels are the record's fields, which are also the keys of `--json`; the end of a field's name is
its unit. No class describes its tables.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar, cast

T = TypeVar("T")

# C0 and C1 controls except tab and newline; zero-width and bidirectional controls, which hide or
# reorder text; tag characters; lone surrogates, which stand for bytes of a path that are not UTF-8.
# A text and no compiled pattern: compiling it takes time that a program without output saves.
HIDDEN = (
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)

ROWS = 12
"""Rows that a table of a record shows; the record holds all."""

# Items of a tuple of numbers or names that a cell shows.
_ITEMS = 8

# Characters of a name in a row that a table shows; names of kernels have a thousand.
_TEXT = 80


def visible(text: str) -> str:
    r"""Return text with control characters escaped, such as `\x1b`; tabs and newlines stay."""
    return re.sub(HIDDEN, _escape, text)


def visible_line(text: str) -> str:
    r"""Return text as `visible` does, with newlines as `\n`: a name cannot begin a line."""
    return visible(text).replace("\n", r"\n")


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    # Python decodes the bytes 0x80 to 0xff of a path that is not UTF-8 to these surrogates.
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


# Figures -----------------------------------------------------------------------------------------


def time(ns: float | None) -> str:
    """Format a duration."""
    if ns is None:
        return "-"
    for unit, scale in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if abs(ns) >= scale:
            return f"{ns / scale:.3f} {unit}"
    return f"{ns:.0f} ns"


def size(count: float) -> str:
    """Format bytes, in powers of 1000."""
    return _scaled(count, "B")


def flops(count: float) -> str:
    """Format a number of floating-point operations."""
    return _scaled(count, "FLOP")


def joules(micro: float) -> str:
    """Format energy."""
    for unit, scale in (("J", 1e6), ("mJ", 1e3)):
        if abs(micro) >= scale / 10:
            return f"{micro / scale:.3f} {unit}"
    return f"{micro:.3f} uJ" if micro else "0 J"


def _watts(milli: float) -> str:
    return f"{milli / 1e3:.0f} W"


def _scaled(value: float, unit: str) -> str:
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.3f} {prefix}{unit}"
    return f"{value:.0f} {unit}"


# Last word of a field's name -> how its figure is written.
_FORMATS: Mapping[str, Callable[[float], str]] = {
    "ns": time,
    "bytes": size,
    "flops": flops,
    "uj": joules,
    "mw": _watts,
}


# Records -----------------------------------------------------------------------------------------


# A record describes no tables: its fields are the labels, and units follow from their names. So the
# tables in Python, the JSON and the reference page cannot differ.
class Displayed:
    """Base of a record, a dataclass or msgspec Struct, that prints as tables of its fields.

    Attributes:
        units: field -> unit, such as "bytes", of fields whose names do not end with a unit.
    """

    # Otherwise records with `slots=True` would have a `__dict__`.
    __slots__ = ()

    units: ClassVar[Mapping[str, str]] = {}

    def displayed_fields(self) -> Mapping[str, Any]:
        """Return the names and values to show; by default those of all fields."""
        return _fields(self)

    def __repr__(self) -> str:
        return "\n\n".join(table.text() for table in _tables(self, type(self).__name__))

    def _repr_html_(self) -> str:
        return "".join(table.html() for table in _tables(self, type(self).__name__))


class Records(list[T]):
    """A list of records that prints as a table with a row per record."""

    def __repr__(self) -> str:
        return _row_table("", self).text()

    def _repr_html_(self) -> str:
        return _row_table("", self).html()


@dataclasses.dataclass(frozen=True)
class _Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left_out: int = 0

    def text(self) -> str:
        cells = [self.columns, *self.rows] if any(self.columns) else list(self.rows)
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in cells
        ]
        title = [self.title] if self.title else []
        return "\n".join([*title, *(f"  {line}" for line in lines), *self._rest("  ")])

    def html(self) -> str:
        head = f"<caption>{_html(self.title)}</caption>" if self.title else ""
        if any(self.columns):
            head += f"<thead><tr>{_html_cells('th', self.columns)}</tr></thead>"
        rows = "".join(f"<tr>{_html_cells('td', row)}</tr>" for row in self.rows)
        rest = "".join(f"<p>{_html(line)}</p>" for line in self._rest())
        return f"<table>{head}<tbody>{rows}</tbody></table>{rest}"

    def _rest(self, indent: str = "") -> list[str]:
        return [f"{indent}and {self.left_out} more"] if self.left_out else []


def _html(text: str) -> str:
    import html  # not at the top: only notebooks need it

    return html.escape(text)


def _html_cells(tag: str, cells: Iterable[str]) -> str:
    # A notebook aligns cells right, which suits figures but no sentences.
    return "".join(f'<{tag} style="text-align: left">{_html(cell)}</{tag}>' for cell in cells)


def _is_record(value: Any) -> bool:
    return hasattr(value, "__struct_fields__") or dataclasses.is_dataclass(value)


def _fields(record: Any) -> dict[str, Any]:
    names = getattr(record, "__struct_fields__", None) or [
        field.name for field in dataclasses.fields(record)
    ]
    return {name: getattr(record, name) for name in names}


def _displayed_fields(record: Any) -> Mapping[str, Any]:
    return record.displayed_fields() if isinstance(record, Displayed) else _fields(record)


def _tables(record: Any, title: str) -> list[_Table]:
    """Return a table of a record's figures, then a table for each of its records and lists."""
    fields = _displayed_fields(record)
    figures: list[tuple[str, str]] = []
    tables: list[_Table] = []
    for name, value in fields.items():
        if name == "notes":
            figures += [("note", visible_line(str(note))) for note in cast("Sequence[Any]", value)]
        elif _is_record(value):
            tables += _tables(value, name)
        elif isinstance(value, Mapping) and value:
            entries = cast("Mapping[Any, Any]", value)
            unit = record.units.get(name, name) if isinstance(record, Displayed) else name
            rows = [(visible_line(str(key)), _cell(unit, entry)) for key, entry in entries.items()]
            tables.append(_Table(name, ("", ""), rows[:ROWS], max(len(rows) - ROWS, 0)))
        elif isinstance(value, (list, tuple)) and value and _is_record(value[0]):
            tables.append(_row_table(name, cast("Sequence[Any]", value)))
        else:
            figures.append((name, _cell(name, value)))
    return [_Table(title, ("", ""), figures), *tables]


def _row_table(title: str, records: Sequence[Any]) -> _Table:
    """Return a table with a row for each record, without the fields that hold records."""
    rows = [_displayed_fields(record) for record in records]
    names: list[str] = list(rows[0]) if rows else []
    # A column with records in it would need a table in a cell.
    columns = [name for name in names if not any(_nested(row[name]) for row in rows)]
    cells = [[_short(_cell(name, row[name])) for name in columns] for row in rows[:ROWS]]
    return _Table(title, columns or ["none"], cells, max(len(rows) - ROWS, 0))


def _short(text: str) -> str:
    return text if len(text) <= _TEXT else f"{text[: _TEXT - 1]}…"


def _nested(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_nested, cast("Sequence[Any]", value)))
    return isinstance(value, Mapping) or _is_record(value)


def _cell(name: str, value: Any) -> str:
    """Return a value in the unit that ends its field's name."""
    if value is None:
        return "-"
    if isinstance(value, (list, tuple, dict)):
        items = list(cast("Iterable[Any]", value))
        if not items:
            return "none"
        rest = f", ... ({len(items)})" if len(items) > _ITEMS else ""
        return ", ".join(_cell(name, item) for item in items[:_ITEMS]) + rest
    # A bool is an int in Python.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return visible_line(str(value))
    formatted = _FORMATS.get(name.rsplit("_", 1)[-1])
    if formatted is not None:
        return formatted(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)

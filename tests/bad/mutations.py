"""Changes of files that keep most of their structure: bytes, JSON, protobuf messages and lines."""

import copy
import random
import re
from typing import Any, TypeVar

T = TypeVar("T")

NUMBERS: list[Any] = [
    0, 1, 2, -1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30,
    0.5, -0.5, 1e18, 1e300,
]  # fmt: skip
ODD: list[Any] = [
    *NUMBERS, None, True, "", "\u0000", "\x1b[31m", "\u202e", "é", "[/]", "../x", "9" * 40,
    "9" * 5000, "1" * 3000 + "x", "a" * 300, [], {}, [[]], [{}], {"a": 1}, [1, "a"],
]  # fmt: skip
TOKENS = [
    b"0", b"-1", b"1e999", b"nan", b"inf", b"-inf", b"9" * 5000, b"1" + b"0" * 400,
    b"18446744073709551616", b"9223372036854775808", b'""', b'"[/]"', b'"\\u0000"',
    b'"' + b"x" * 300 + b'"', b"[]", b"{}", b"true", b"null", b"[" * 2000, b"[[[[1]]]]", b"'",
    b"\xff\xfe", b"\x00", b"1979-05-27T07:32:00Z", b"0x7f", b"4_50", b"," * 200, b"a" * 140_000,
]  # fmt: skip


class Choices:
    """A source of choices: a seeded generator, or the bytes that a fuzzer guides."""

    def __init__(self, seed: int = 0, data: bytes | None = None) -> None:
        self._random = random.Random(seed)
        self._data = data
        self._at = 0

    def number(self, low: int, high: int) -> int:
        """Return a number from `low` to `high`; `low` once the bytes are used up."""
        if self._data is None:
            return self._random.randint(low, high)
        piece = self._data[self._at : self._at + 2]
        self._at += 2
        return low + int.from_bytes(piece, "little") % (high - low + 1)

    def pick(self, items: list[T]) -> T:
        return items[self.number(0, len(items) - 1)]

    def place(self, size: int) -> int:
        """Return a place in a file, which may have more bytes than two bytes count."""
        return (self.number(0, 65535) * 65536 + self.number(0, 65535)) % (size + 1)


def damaged(choices: Choices, whole: bytes) -> bytes:
    """Return bytes with some cut out, put in, doubled, repeated or changed."""
    data = bytearray(whole)
    for _ in range(max(1, choices.number(0, 3))):
        at = choices.place(len(data))
        to = min(len(data), at + choices.number(0, 40))
        match choices.number(0, 6):
            case 0:
                del data[at:to]
            case 1:
                data[at:at] = bytes(choices.number(0, 255) for _ in range(choices.number(0, 12)))
            case 2:
                data[at:at] = data[at:to]
            case 3 if at < len(data):
                data[at] ^= 1 << choices.number(0, 7)
            case 4 if choices.number(0, 3) == 0:
                del data[at:]
            case 5:
                data[at:at] = data[at:to] * 1000
            case _:
                data[at:to] = choices.pick(TOKENS)
    return bytes(data)


def changed_json(choices: Choices, whole: Any) -> Any:
    """Return a JSON value with some of its parts replaced, dropped, doubled or exchanged."""
    changed = copy.deepcopy(whole)
    for _ in range(max(1, choices.number(0, 3))):
        places = [*_places(changed)]
        if not places:
            break
        parent, key = choices.pick(places)
        match choices.number(0, 5):
            case 0 | 1 | 2:
                parent[key] = copy.deepcopy(choices.pick(ODD))
            case 3:
                del parent[key]
            case 4 if isinstance(parent, list):
                parent.insert(key, copy.deepcopy(parent[key]))
            case _:
                other, there = choices.pick(places)
                if there in other if isinstance(other, dict) else there < len(other):
                    parent[key] = copy.deepcopy(other[there])
    return changed


def _places(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        keys: list[Any] = [*value]
    elif isinstance(value, list):
        keys = [*range(len(value))]
    else:
        return []
    return [(value, key) for key in keys] + [one for key in keys for one in _places(value[key])]


def change_message(choices: Choices, message: Any) -> None:
    """Change a field of a protobuf message, or of a message in it."""
    while True:
        inner = [
            part
            for field, value in message.ListFields()
            if field.message_type is not None
            for part in (value if _repeated(field) else [value])
            if hasattr(part, "ListFields")
        ]
        if not inner or choices.number(0, 2) == 0:
            break
        message = choices.pick(inner)
    field = choices.pick(list(message.DESCRIPTOR.fields))
    if field.message_type is not None:
        if _repeated(field) and len(values := getattr(message, field.name)):
            if choices.number(0, 1):
                values.append(choices.pick(list(values)))
            else:
                del values[choices.number(0, len(values) - 1)]
        else:
            message.ClearField(field.name)
        return
    value = _field_value(choices, field)
    try:
        if not _repeated(field):
            setattr(message, field.name, value)
        elif len(values := getattr(message, field.name)) and choices.number(0, 2):
            values[choices.number(0, len(values) - 1)] = value
        else:
            values.append(value)
    except (ValueError, TypeError, OverflowError):  # the field is narrower than the value
        message.ClearField(field.name)


def _repeated(field: Any) -> bool:
    return bool(field.is_repeated) if hasattr(field, "is_repeated") else field.label == 3


def _field_value(choices: Choices, field: Any) -> Any:
    if field.cpp_type in (field.CPPTYPE_STRING,):
        text = choices.pick([value for value in ODD if isinstance(value, str)])
        return text.encode() if field.type == field.TYPE_BYTES else text
    if field.cpp_type == field.CPPTYPE_BOOL:
        return bool(choices.number(0, 1))
    if field.cpp_type in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
        return choices.pick([0.0, -1.0, 1e30, float("inf"), float("nan")])
    return choices.pick([number for number in NUMBERS if isinstance(number, int)])


_VALUE = re.compile(rb'-?\d[\w.+-]*|"[^"\n]*"|true|false')


def changed_lines(choices: Choices, text: bytes) -> bytes:
    """Return a text with values replaced, and lines dropped, doubled or exchanged."""
    lines = text.split(b"\n")
    for _ in range(choices.number(1, 3)):
        if not lines:
            break
        at = choices.number(0, len(lines) - 1)
        match choices.number(0, 5):
            case 0 | 1 | 2:
                values = [*_VALUE.finditer(lines[at])]
                if values:
                    value = choices.pick(values)
                    token = choices.pick(TOKENS)
                    lines[at] = lines[at][: value.start()] + token + lines[at][value.end() :]
            case 3:
                del lines[at]
            case 4:
                lines.insert(at, lines[at])
            case _:
                other = choices.number(0, len(lines) - 1)
                lines[at], lines[other] = lines[other], lines[at]
    return b"\n".join(lines)

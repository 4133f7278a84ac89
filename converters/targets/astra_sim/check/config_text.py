"""Read configuration files as ASTRA-sim's parsers do: nlohmann json, yaml-cpp and cpptoml."""

import codecs
import json
import math
import re
import tomllib
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import yaml

from onerank.converters.targets.astra_sim.check.findings import Report

# Characters of a value that a message shows.
_SHOWN = 60

_SPACES = " \t\r\n"


def shown(value: Any) -> str:
    """Return a value as text for a message; long values are shortened."""
    if value is None:
        return "not given"
    text = json.dumps(value, default=str)  # TOML has dates and times
    return text if len(text) <= _SHOWN else text[: _SHOWN - 4] + " ..."


def _real(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:_SHOWN]} is out of range")
    return value


def _whole(text: str) -> int | float:
    # nlohmann reads an integer beyond 64 bits as a floating-point number.
    # The length first: Python refuses to convert an integer of more than 4300 digits.
    if len(text) > 20 or not -(2**63) <= int(text) < 2**64:
        return _real(text)
    return int(text)


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


_JSON = json.JSONDecoder(parse_float=_real, parse_int=_whole, parse_constant=_no_constant)


def read_json(path: Path, report: Report, *, any_value: bool = False) -> dict[str, Any] | None:
    """Return a JSON object; None when the file is absent or faulty.

    A byte order mark, and anything after the object, are ignored; the last of equal keys wins.

    Args:
        path: the file.
        report: receives the finding on a faulty file.
        any_value: read a value that is not an object as an empty object, as ASTRA-sim's reader of
            the remote memory's file does.
    """
    if not path.exists():
        return None
    try:
        text = path.read_bytes().removeprefix(codecs.BOM_UTF8).decode()
        # ASTRA-sim reads with `stream >> json`, which leaves what follows the value unread.
        value: Any = _JSON.raw_decode(text.lstrip(_SPACES))[0]
        # Python reads a lone surrogate (\ud800), on which nlohmann throws; it cannot be encoded.
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, OSError, RecursionError) as error:
        _unreadable(path, f"not a JSON object: {error}; expected one as ASTRA-sim reads it", report)
        return None
    if not isinstance(value, dict) and any_value:
        return {}
    if not isinstance(value, dict):
        message = f"not a JSON object but {shown(value)}; expected {{ ... }}"
        _unreadable(path, message, report)
        return None
    return cast("dict[str, Any]", value)


def read_toml(path: Path, report: Report) -> dict[str, Any] | None:
    """Return a TOML table; None when the file is absent or faulty."""
    if not path.exists():
        return None
    try:
        # A byte order mark stays: cpptoml throws on it, as tomllib does.
        return tomllib.loads(path.read_bytes().decode())
    except (ValueError, OSError, RecursionError) as error:
        _unreadable(path, f"not TOML: {error}; spdlog_setup throws on it", report)
        return None


def read_yaml_lists(
    path: Path, keys: Container[str], report: Report
) -> dict[str, list[str | None] | None] | None:
    """Return each key of a YAML mapping with its list; None when the file is absent or faulty.

    An entry is the text of a scalar, or None for another type; a value that is not a list is None.
    Only the first document is read, and of equal keys the first.

    Args:
        path: the file.
        keys: keys that ASTRA-sim reads; a repeated one is a finding.
        report: receives the findings.
    """
    root = _yaml_root(path, report)
    if root is None:
        return None
    values: dict[str, list[str | None] | None] = {}
    pairs = cast("list[tuple[yaml.Node, yaml.Node]]", root.value)
    for key, value in pairs:
        if not isinstance(key, yaml.ScalarNode):
            continue
        name = str(key.value)
        if name in values and name in keys:
            report.add(
                "duplicate-key",
                path.name,
                None,
                f"line {key.start_mark.line + 1} gives {name} again; yaml-cpp takes the first, "
                "other programs the last: keep one",
            )
        if name in values:
            continue
        if isinstance(value, yaml.SequenceNode):
            entries = cast("list[yaml.Node]", value.value)
            values[name] = [
                str(entry.value) if isinstance(entry, yaml.ScalarNode) else None
                for entry in entries
            ]
        else:
            values[name] = None
    return values


def read_yaml_paths(path: Path, report: Report) -> dict[int, str] | None:
    """Return a YAML mapping of integers to texts; None when the file is absent or faulty."""
    root = _yaml_root(path, report)
    if root is None:
        return None
    values: dict[int, str] = {}
    for key, value in cast("list[tuple[yaml.Node, yaml.Node]]", root.value):
        number = yaml_integer(str(key.value)) if isinstance(key, yaml.ScalarNode) else None
        if number is None or not isinstance(value, yaml.ScalarNode):
            line = key.start_mark.line + 1
            _unreadable(path, f"line {line} is not `node id: path`; ASTRA-sim throws on it", report)
            return None
        values[number] = str(value.value)
    return values


def _yaml_root(path: Path, report: Report) -> yaml.MappingNode | None:
    if not path.exists():
        return None
    try:
        octets = path.read_bytes()
        # yaml-cpp detects UTF-16 by its mark, as PyYAML does with bytes.
        wide = octets.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        text = octets if wide else octets.decode("utf-8-sig", errors="replace")
        loader = yaml.SafeLoader(text)
        # The first document only, as `YAML::LoadFile` reads.
        root = loader.get_node() if loader.check_node() else None
    except (yaml.YAMLError, ValueError, OSError, RecursionError) as error:
        place = " ".join(str(error).split())
        _unreadable(path, f"not YAML: {place}; yaml-cpp throws on it", report)
        return None
    if not isinstance(root, yaml.MappingNode):
        _unreadable(path, "not a YAML mapping; expected lines `key: value`", report)
        return None
    return root


def _unreadable(path: Path, message: str, report: Report) -> None:
    report.add("configuration-file", path.name, None, message)


_YAML_INTEGER = re.compile(r"([+-]?)(0[xX][0-9a-fA-F]+|[0-9]+)\s*", re.ASCII)

_YAML_REAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*", re.ASCII)

_YAML_SPECIAL = {
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), math.inf),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), -math.inf),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
}

INT32 = 2**31 - 1


def yaml_integer(text: str) -> int | None:
    """Return what yaml-cpp reads as an `int`; None where it throws. A leading 0 means octal."""
    match = _YAML_INTEGER.fullmatch(text)
    if match is None or len(text) > 64:
        return None
    sign, digits = match[1], match[2]
    octal = digits[0] == "0" and len(digits) > 1 and digits[1] not in "xX"
    try:
        value = int(digits, 8 if octal else 0)
    except ValueError:
        return None
    value = -value if sign == "-" else value
    return value if -INT32 - 1 <= value <= INT32 else None


def yaml_real(text: str) -> float | None:
    """Return what yaml-cpp reads as a `double`; None where it throws."""
    if text in _YAML_SPECIAL:
        return _YAML_SPECIAL[text]
    if _YAML_REAL.fullmatch(text) is None:
        return None
    value = float(text)
    return None if math.isinf(value) else value


_STOI = re.compile(r"[ \t\n\v\f\r]*([+-]?[0-9]+)", re.ASCII)


def stoi(text: str) -> int | None:
    """Return what C++'s `std::stoi` reads at the start of a text; None where it throws."""
    match = _STOI.match(text)
    if match is None or len(match[1]) > 64:
        return None
    value = int(match[1])
    return value if -INT32 - 1 <= value <= INT32 else None


@dataclass(frozen=True, slots=True)
class Script:
    """The options that a run script passes to ASTRA-sim, read from its text.

    Attributes:
        text: the script without comments; "" if there is none.
    """

    text: str

    @classmethod
    def read(cls, path: Path) -> "Script":
        """Read a script; an absent one is empty."""
        if not path.is_file():
            return cls("")
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        # An option that is commented out is not passed.
        return cls("\n".join(line for line in lines if not line.lstrip().startswith("#")))

    @property
    def passes_options(self) -> bool:
        """Whether the script passes any configuration file."""
        return bool(re.search(r"--[\w-]+-configuration[= ]", self.text))

    def argument(self, option: str) -> str | None:
        """Return the text after `--option=`, None if the script does not pass it."""
        match = re.search(rf"--{option}[= ]\s*[\"']?([^\s\"'\\]+)", self.text)
        return match[1] if match else None

    def file_of(self, option: str, directory: Path) -> Path | None:
        """Return the file in the workload's directory that an option names, or None."""
        argument = self.argument(option)
        if argument is None or argument == "empty":
            return None
        path = Path(argument)
        if "$" in path.name or (path.is_absolute() and path.parent != directory.resolve()):
            return None
        return directory / (path.name if "$" in argument else path)

    def system_of(self, prefix: str) -> str | None:
        """Return the name of the system file that a set of traces runs with, None if not shown.

        Args:
            prefix: the set's prefix.
        """
        argument = self.argument("system-configuration")
        if argument is None or "$" not in argument:
            return argument
        names = dict(re.findall(r"^\s*(\w+)=([\w.-]+)\s*$", self.text, re.MULTILINE))
        for workload, system in re.findall(r"\bworkload=(\S+)\s+system=([\w.-]+)", self.text):
            expanded = re.sub(r"\$\{?(\w+)\}?", lambda name: names.get(name[1], ""), workload)
            if expanded == prefix:
                return str(system)
        return None

    @property
    def is_congestion_aware(self) -> bool:
        """Whether the script names the congestion-aware binary, other than to match a pattern."""
        return bool(re.search(r"Congestion_Aware(?![\w*]*\s*[|)])", self.text))

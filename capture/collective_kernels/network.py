"""The network of the emulated job: the duration of each group's collectives.

A network file looks like this. Bandwidths are bus bandwidths in GB/s, as nccl-tests prints them:

    node_size = 8              # GPUs that share NVLink
    nvls = true                # NVSwitches reduce and copy (NVLink SHARP); false by default
    [default]                  # groups without an entry
    busbw_gb_per_s = 40
    [group.tp]                 # a group by name: an axis of the world, or the script's own name
    busbw_gb_per_s = 320
    [size.16]                  # every group of 16 ranks
    busbw_gb_per_s = 45
    latency_us = 60            # default: NCCL's latency model
    all_gather = [[1048576, 31], [67108864, 1450]]   # measured: input bytes of a rank, us

Collectives reach different bus bandwidths on one link, and only at large sizes. So measured times
take precedence over the bandwidth.
"""

import bisect
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onerank.ir.errors import CaptureError
from onerank.ir.input_files import load_toml

# GPUs of a DGX or HGX node.
NODE_SIZE = 8
_KEYS = ("busbw_gb_per_s", "latency_us")
COLLECTIVES = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce"),
    *("gather", "scatter", "send", "recv"),
)


@dataclass(frozen=True)
class Curve:
    """Measured times of a collective.

    Attributes:
        points: (bytes, us), bytes as in `CommCall`, ascending.
    """

    points: tuple[tuple[int, float], ...]

    def time_us(self, count_bytes: int) -> float:
        """Return the time of a size, interpolated linearly in log(bytes) and log(time).

        Smaller sizes take the first point's time; larger sizes have the last point's bandwidth.
        """
        size, time = self.points[-1]
        if count_bytes >= size:
            # Large messages are limited by bandwidth, so the time grows with the bytes.
            return time * count_bytes / size
        index = bisect.bisect(self.points, count_bytes, key=lambda point: point[0])
        if index == 0:
            return self.points[0][1]
        (low, fast), (high, slow) = self.points[index - 1 : index + 1]
        fraction = math.log(count_bytes / low) / math.log(high / low)
        return fast * (slow / fast) ** fraction


@dataclass(frozen=True)
class Link:
    """The performance of a group's collectives.

    Attributes:
        busbw_gb_per_s: bus bandwidth of a large collective, GB/s.
        latency_us: time of an empty collective; None uses NCCL's latency model.
        measured: measured times by collective; they replace bandwidth and latency.
    """

    busbw_gb_per_s: float
    latency_us: float | None = None
    measured: dict[str, Curve] = field(default_factory=dict[str, Curve])


@dataclass(frozen=True)
class Network:
    """Links by group. The order of precedence is: group name, group size, default.

    Attributes:
        default: link of groups without an entry; None makes such groups an error.
        groups: links by the group's name.
        sizes: links by the group's number of ranks.
        node_size: GPUs of one node.
        nvls: whether NCCL may use NVLS, reductions and copies in the NVSwitches of a node.
    """

    default: Link | None = None
    groups: dict[str, Link] = field(default_factory=dict[str, Link])
    sizes: dict[int, Link] = field(default_factory=dict[int, Link])
    node_size: int = NODE_SIZE
    nvls: bool = False

    def link(self, group: str, ranks: int) -> Link:
        """Return the link of a group.

        Raises:
            CaptureError: no entry applies to it.
        """
        link = self.groups.get(group) or self.sizes.get(ranks) or self.default
        if link is None:
            raise CaptureError(
                f"the network has no entry for group {group!r} of {ranks} ranks: add "
                f"[group.{group}], [size.{ranks}] or [default] with busbw_gb_per_s",
                code="network-unknown-group",
            )
        return link


def uniform(busbw_gb_per_s: float) -> Network:
    """Return a network on which every group reaches the same bus bandwidth.

    Raises:
        CaptureError: the bandwidth is not a positive number.
    """
    return Network(Link(_positive("--busbw-gb-s", busbw_gb_per_s)))


def load_network(path: Path) -> Network:
    """Read a network file.

    Raises:
        CaptureError: the file cannot be read, or an entry is invalid.
    """
    content = load_toml(path, error=CaptureError)
    known = ("default", "group", "size", "node_size", "nvls")
    _check_keys(path, "the file", content, known)
    if not any(key in content for key in ("default", "group", "size")):
        raise CaptureError(
            f"--network {path}: has no [default], [group.NAME] or [size.N] entry",
            code="network-empty",
        )
    node_size = content.get("node_size", NODE_SIZE)
    # A boolean of TOML is an int in Python.
    if not isinstance(node_size, int) or isinstance(node_size, bool) or node_size < 1:
        raise CaptureError(
            f"--network {path}: node_size is {node_size!r}; expected a whole number of GPUs, "
            "1 or more",
            code="network-node-size",
        )
    nvls = content.get("nvls", False)
    if not isinstance(nvls, bool):
        raise CaptureError(
            f"--network {path}: nvls is {nvls!r}; expected true or false", code="network-nvls"
        )
    default = _link(path, "[default]", content["default"]) if "default" in content else None
    groups = {
        name: _link(path, f"[group.{name}]", entry)
        for name, entry in _table(path, "[group]", content.get("group", {})).items()
    }
    sizes: dict[int, Link] = {}
    for name, entry in _table(path, "[size]", content.get("size", {})).items():
        # Nine digits exceed any world, and `int` refuses texts of more than 4,300.
        if not name.isdecimal() or len(name) > 9 or int(name) < 2:
            raise CaptureError(
                f"--network {path}: [size.{name}]: expected a number of ranks, 2 or more",
                code="network-bad-size",
            )
        sizes[int(name)] = _link(path, f"[size.{name}]", entry)
    return Network(default, groups, sizes, node_size, nvls)


def _table(path: Path, entry_name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CaptureError(
            f"--network {path}: {entry_name} is {value!r}; expected a table",
            code="network-not-a-table",
        )
    return value


def _link(path: Path, entry_name: str, value: Any) -> Link:
    entry = _table(path, entry_name, value)
    _check_keys(path, entry_name, entry, (*_KEYS, *COLLECTIVES))
    if "busbw_gb_per_s" not in entry:
        raise CaptureError(
            f"--network {path}: {entry_name} has no busbw_gb_per_s (GB/s)",
            code="network-no-bandwidth",
        )
    figures = {
        key: _positive(f"--network {path}: {entry_name} {key}", entry[key])
        for key in _KEYS
        if key in entry
    }
    measured = {
        key: _curve(f"--network {path}: {entry_name} {key}", entry[key])
        for key in COLLECTIVES
        if key in entry
    }
    return Link(**figures, measured=measured)


def _curve(entry_name: str, value: Any) -> Curve:
    points: list[tuple[int, float]] = []
    if not isinstance(value, list) or not value:
        raise CaptureError(
            f"{entry_name} is {value!r}; expected [bytes, us] pairs", code="network-bad-times"
        )
    for pair in value:
        if not isinstance(pair, list) or len(pair) != 2:
            raise CaptureError(
                f"{entry_name} has {pair!r}; expected [bytes, us]", code="network-bad-times"
            )
        size, time = (_positive(f"{entry_name} {pair}", figure) for figure in pair)
        if points and size <= points[-1][0]:
            raise CaptureError(
                f"{entry_name}: {size:g} bytes after {points[-1][0]}; expected ascending sizes",
                code="network-times-not-ascending",
            )
        points.append((int(size), time))
    return Curve(tuple(points))


def _check_keys(path: Path, entry_name: str, table: dict[str, Any], known: tuple[str, ...]) -> None:
    if unknown := sorted(set(table) - set(known)):
        raise CaptureError(
            f"--network {path}: {entry_name} has unknown {', '.join(unknown)}; "
            f"expected {', '.join(known)}",
            code="network-unknown-key",
        )


def _positive(entry_name: str, value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:
        raise CaptureError(
            f"{entry_name} is {value!r}; expected a number above 0", code="network-not-positive"
        )
    return float(value)

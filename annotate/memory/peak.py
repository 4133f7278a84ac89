"""The moment at which a step holds most: how much, of which classes, by whom, and what for."""

import re
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.annotate.memory.held import columns_of
from onerank.annotate.memory.refit import STEP_ROW
from onerank.ir import Graph, MemoryClass, MemoryLog, Phase

I64 = npt.NDArray[np.int64]

_LAYER = re.compile(r"(?:^|.*?\.)\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment of most memory.

    Attributes:
        at: its place among the events; -1: before them.
        bytes: in use then.
        classes: class -> bytes of these; they add up to `bytes`.
    """

    at: int
    bytes: int
    classes: dict[MemoryClass, int]


class ModuleMemory(msgspec.Struct, frozen=True):
    """Blocks of the step that are live at a moment: bytes and number, by module and class."""

    module: str
    memory_class: str
    bytes: int
    blocks: int


def peak_of(levels: I64) -> Peak:
    """Return the moment of most memory of levels as `levels_of` gives them, int64[8, moments]."""
    total = levels.sum(axis=0)
    moment = int(total.argmax())
    classes = {one: int(levels[one, moment]) for one in MemoryClass}
    classes[MemoryClass.WORKSPACE] += int(levels[STEP_ROW, moment])
    shown = {one: size for one, size in classes.items() if size}
    return Peak(moment - 1, int(total[moment]), shown)


def node_at(log: MemoryLog, at: int) -> int | None:
    """Return the id of the node that allocated at event `at`; None where nobody is known to."""
    places = dict(zip(log.blocks.allocated_at, log.blocks.node, strict=True))
    node = places.get(at, -1) if at >= 0 else -1
    return node if node >= 0 else None


def modules_at(graph: Graph, log: MemoryLog, at: int) -> tuple[ModuleMemory, ...]:
    """Return the step's own blocks that are live after event `at`, the largest sum first."""
    module = _module_of(graph)
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for row in _live(log, at):
        kind = MemoryClass(log.blocks.memory_class[row]).label
        key = (module.get(log.blocks.node[row], ""), kind)
        size, count = sums.get(key, (0, 0))
        sums[key] = (size + log.blocks.bytes[row], count + 1)
    rows = [ModuleMemory(*key, *value) for key, value in sums.items()]
    return tuple(sorted(rows, key=lambda row: -row.bytes))


def recomputable(graph: Graph, log: MemoryLog, at: int) -> tuple[int, int]:
    """Return (activations at the peak that recomputing every layer does not hold, layers).

    It holds every layer's input and all of one layer. A layer's input is as large as the last
    block that forward allocated in the layer before.
    """
    module = _module_of(graph)
    activations, last = dict[str, int](), dict[str, int]()
    for row in _live(log, at):
        blocks = log.blocks
        if blocks.memory_class[row] != MemoryClass.ACTIVATIONS:
            continue
        found = _LAYER.match(module.get(blocks.node[row], ""))
        if found is None:
            continue
        layer = found.group()
        activations[layer] = activations.get(layer, 0) + blocks.bytes[row]
        if blocks.phase[row] == Phase.FORWARD:
            last[layer] = blocks.bytes[row]
    most = max(activations.values(), default=0)
    inputs = sum(last.values())
    return max(0, sum(activations.values()) - inputs - most), len(activations)


def _live(log: MemoryLog, at: int) -> list[int]:
    """Return which of the step's own blocks are live after event `at`."""
    _, _, made, freed = columns_of(log)
    live = np.flatnonzero((made >= 0) & (made <= at) & ((freed < 0) | (freed > at)))
    return live.tolist()


def _module_of(graph: Graph) -> dict[int, str]:
    ids: list[int] = graph.nodes.id.tolist()
    return dict(zip(ids, graph.text("module"), strict=True))

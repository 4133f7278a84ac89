"""Memory of a step after eager attention is fused: no score matrices."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec
import numpy as np

from onerank.annotate.memory.allocator import round_size
from onerank.annotate.memory.peak import most_in_use
from onerank.annotate.passes.attention.dataflow import Flow, Operand
from onerank.annotate.passes.attention.eager_kernels import Sizes
from onerank.annotate.passes.attention.match_eager import EagerCall
from onerank.annotate.passes.resize.tensor_locations import calls_of, places_of
from onerank.ir import Blocks, Graph, Measurement, MemoryClass, MemoryLog, Phase

_FLOAT_BYTES = 4
_SOON = 1e-3  # of an event: behind it, before the next


class _Change(NamedTuple):
    """What becomes of the blocks.

    Attributes:
        gone: blocks that are no more.
        made: when each that moves is allocated.
        freed: when each that moves is freed.
        new: (bytes, class, phase, allocated, freed) of each new one.
    """

    gone: set[int]
    made: dict[int, float]
    freed: dict[int, float]
    new: list[tuple[int, MemoryClass, Phase, float, float]]


def without_scores(
    graph: Graph, flow: Flow, found: list[EagerCall], unused: set[int]
) -> tuple[Measurement, str]:
    """Return the measurement without the blocks of eager attention, and a note on the peak.

    What a fused kernel keeps for backward (queries, keys, values, output and a sum per row) lives
    until the last block it replaces was freed. Its gradients are allocated with the first of those
    blocks, together with its workspace (dQ in float32, and dK and dV of all heads if these share
    keys, as in FlashAttention-2 and cuDNN).

    Args:
        graph: captured, with the nodes of `flow`.
        flow: data flow of the step.
        found: the calls of attention.
        unused: other calls that are removed.
    """
    measured = graph.job.measurement
    log = measured.memory
    if log is None:
        none = msgspec.structs.replace(measured, peak_memory_bytes=0, activation_bytes=())
        return none, "the peak of memory is not known."
    block_of = _blocks(graph, flow, log)
    on_gpu = graph.job.device.type == "cuda"
    whole: Callable[[int], int] = round_size if on_gpu else int
    change = _Change(set(), {}, {}, [])
    for at in unused:
        change.gone.update(_of(block_of, (one.content for one in flow.calls[at].writes)))
    for call in found:
        _change(flow, log, call, block_of, change, whole)
    made = _changed(log, change)
    less = most_in_use(log) - most_in_use(made)
    kept = [_kept(log, change, turn) for turn in _turns(log)]
    activations = measured.activation_bytes
    if len(kept) != len(activations):
        kept = kept[:1] * len(activations)
    changed = msgspec.structs.replace(
        measured,
        memory=made,
        peak_memory_bytes=measured.peak_memory_bytes - less,
        activation_bytes=tuple(b + more for b, more in zip(activations, kept, strict=False)),
    )
    return changed, f"the peak of memory falls by {less} bytes."


def _of(block_of: dict[int, list[int]], contents: Iterable[int]) -> list[int]:
    return [block for content in contents for block in block_of.get(content, ())]


def _change(  # noqa: PLR0917
    flow: Flow,
    log: MemoryLog,
    call: EagerCall,
    block_of: dict[int, list[int]],
    change: _Change,
    whole: Callable[[int], int],
) -> None:
    """Take note of what becomes of a call's blocks."""
    blocks = log.blocks
    outputs = call.outputs
    ahead, behind = (
        _of(block_of, (one.content for at in members for one in flow.calls[at].writes
                       if one.content not in outputs))
        for members in (call.forward.members, call.backward.members if call.backward else ())
    )  # fmt: skip
    change.gone.update(ahead, behind)
    if call.backward is None or call.gradients is None or not behind:
        return
    begins = float(min(_events(blocks.allocated_at[one] for one in behind), default=log.events))
    held = [one for one in ahead if blocks.freed_at[one] >= begins]
    ends = float(max(_events(blocks.freed_at[one] for one in (*held, *behind)), default=begins))
    sums = whole(call.sizes.batch * call.sizes.heads * call.sizes.rows * _FLOAT_BYTES)
    for one in _of(block_of, {operand.content for operand in call.tensors}):
        freed = change.freed.get(one, float(blocks.freed_at[one]))
        if 0 <= freed < ends:
            change.freed[one] = ends
    for one in _of(block_of, {operand.content for operand in call.gradients[1:]}):
        if blocks.allocated_at[one] > begins:
            change.made[one] = begins
    first = float(min(_events(blocks.allocated_at[one] for one in ahead), default=begins))
    made = _of(block_of, [call.tensors.out.content])
    first = max([first, *(float(blocks.allocated_at[one]) for one in made)])
    change.new.append((sums, MemoryClass.ACTIVATIONS, Phase.FORWARD, first, ends))
    for size in _workspace(call.sizes, call.gradients.key):
        row = (whole(size), MemoryClass.WORKSPACE, Phase.BACKWARD, begins, begins + _SOON)
        change.new.append(row)


def _turns(log: MemoryLog) -> list[int]:
    """Return the events at which backward begins, one for each micro-batch."""
    blocks, turns, was = log.blocks, list[int](), 0
    for at, phase in sorted(zip(blocks.allocated_at, blocks.phase, strict=True)):
        if at < 0 or phase not in (Phase.FORWARD, Phase.BACKWARD):
            continue
        if phase == Phase.BACKWARD and was == Phase.FORWARD:
            turns.append(at)
        was = phase
    return turns


def _kept(log: MemoryLog, change: _Change, turn: int) -> int:
    """Return the additional bytes in use when backward begins."""
    blocks = log.blocks

    def held(block: int, made: float, freed: float) -> int:
        return blocks.bytes[block] * (0 <= made < turn and not 0 <= freed < turn)

    more = 0
    for one in {*change.gone, *change.made, *change.freed}:
        made, freed = blocks.allocated_at[one], blocks.freed_at[one]
        more -= held(one, made, freed)
        if one not in change.gone:
            more += held(one, change.made.get(one, made), change.freed.get(one, freed))
    return more + sum(
        size for size, _, _, made, freed in change.new if made < turn and not freed < turn
    )


def _events(events: Iterable[int]) -> list[int]:
    return [one for one in events if one >= 0]


def _workspace(s: Sizes, key: Operand) -> list[int]:
    """Return the bytes of the backward pass in addition to its results."""
    rows = s.batch * s.heads * s.rows
    made = [rows * s.d * _FLOAT_BYTES, rows * _FLOAT_BYTES]
    if s.heads != s.key_heads:
        made += [s.batch * s.heads * s.keys * one * key.tensor.item_bytes for one in (s.d, s.dv)]
    return made


def _blocks(graph: Graph, flow: Flow, log: MemoryLog) -> dict[int, list[int]]:
    """Return the blocks of each content: those that its operator, or one before, allocated.

    Who allocates a tensor has its id and its storage, and comes before who writes it. What else
    an operator of a content allocated is of it as well.
    """
    written = dict[tuple[int, int], list[tuple[int, int]]]()
    by_node = dict[int, list[int]]()
    for call in flow.calls:
        for one in call.writes:
            key = one.place.tensor, one.place.storage
            written.setdefault(key, []).append((call.begun_ns, one.content))
            for node in (*call.nodes, call.launcher):
                by_node.setdefault(node, []).append(one.content)
    place = {int(id_): index for index, id_ in enumerate(graph.nodes.id.tolist())}
    call_of = calls_of(graph)
    made = dict[int, list[int]]()
    for block, id_ in enumerate(log.blocks.node):
        node = place.get(id_)
        if node is None or log.blocks.allocated_at[block] < 0:
            continue
        call, begun = call_of(node), int(graph.nodes.start_ns[node])
        text = graph.strings[int(graph.nodes.output_values[node])]
        content = by_node.get(node, [None])[0]
        for at in places_of(call.outputs, text) if call is not None else ():
            later = written.get((at.tensor, at.storage), []) if at is not None else []
            content = next((one for ns, one in later if ns >= begun), content)
        if content is not None:
            made.setdefault(content, []).append(block)
    return made


def _changed(log: MemoryLog, change: _Change) -> MemoryLog:
    """Return the log with the change, its events numbered anew."""
    blocks = log.blocks
    kept = [one for one in range(len(blocks)) if one not in change.gone]
    new = change.new
    moved = {
        "allocated_at": [change.made.get(one, float(blocks.allocated_at[one])) for one in kept]
        + [row[3] for row in new],
        "freed_at": [change.freed.get(one, float(blocks.freed_at[one])) for one in kept]
        + [row[4] for row in new],
    }
    events = np.array([*moved["allocated_at"], *moved["freed_at"]])
    frees = np.repeat([0, 1], len(kept) + len(new))
    order = np.lexsort((frees, events))
    order = order[events[order] >= 0]
    number = np.full(len(events), -1, dtype=np.int64)
    number[order] = np.arange(len(order))
    made, freed = number.reshape(2, -1).tolist()
    columns = {name: [getattr(blocks, name)[one] for one in kept] if getattr(blocks, name) else []
               for name in ("bytes", "memory_class", "node", "phase", "pool", "spare_bytes",
                            "lingers")}  # fmt: skip
    told = {
        "bytes": [row[0] for row in new],
        "memory_class": [int(row[1]) for row in new],
        "node": [-1] * len(new),
        "phase": [int(row[2]) for row in new],
    }
    for name in ("pool", "spare_bytes", "lingers"):
        told[name] = [0] * len(new) if columns[name] else []
    joined = {name: (*columns[name], *told[name]) for name in columns}
    made_blocks = Blocks(allocated_at=tuple(made), freed_at=tuple(freed), **joined)
    return msgspec.structs.replace(log, blocks=made_blocks, events=len(order), reserved_bytes=0)

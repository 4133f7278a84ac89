"""Recompute the memory of a captured stage for another number of replicas."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from onerank.annotate.memory.allocator import round_size
from onerank.ir import UNKNOWN, Graph, MemoryClass, Phase
from onerank.ir.arrays import I64
from onerank.ir.measurement import MemoryLog
from onerank.plan.layouts import PlanError

# An allocation belongs to the node that follows it in the log. FSDP2 allocates the result of a
# collective before it packs the input, and in its stream one more node may lie between.
NEAR_NODES = 3


class ShardError(PlanError):
    """The shards of a capture cannot be derived for another number of replicas."""


def unknown_shards(reason: str) -> ShardError:
    """Return the error that shards cannot be derived for this reason."""
    return ShardError(f"shards of the captured replicas: {reason}", code="plan-unknown-shards")


@dataclass(slots=True)
class ShardMemory:
    """Captured and new bytes of the shards of a step, and of tensors gathered from them.

    Attributes:
        resident: storage -> its bytes, of shards that no node of the step allocates.
        parameters: storages in `resident` that hold parameters; the others hold optimizer states.
        allocations: row of a node, and the bytes of a tensor that it allocates.
        reduced_gradients: bytes of each result of a reduce-scatter.
        sharded_gradients: whether each gradient that outlives a step is such a result.
    """

    resident: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    parameters: set[int] = field(default_factory=set[int])
    allocations: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    reduced_gradients: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    sharded_gradients: bool = False


def with_shard_memory(graph: Graph, shards: ShardMemory) -> Graph:
    """Return the graph with the memory of shards of the new sizes.

    Raises:
        ShardError: an allocation has no block, or a shard no resident memory.
    """
    measured = graph.job.measurement
    log = measured.memory
    if log is None:
        raise unknown_shards("the capture has no log of its memory")
    rows = {number: row for row, number in enumerate(graph.nodes.id.tolist())}
    sizes = np.array(log.blocks.bytes, dtype=np.int64)
    changed = _match_blocks(log, rows, shards, sizes)
    _match_gradients(log, shards, sizes)
    resident = _resident(measured.resident_bytes, shards)
    growth = sum(
        sum(map(round_size, resident[name])) - sum(map(round_size, captured))
        for name, captured in measured.resident_bytes.items()
    )
    blocks = msgspec.structs.replace(log.blocks, bytes=tuple(sizes.tolist()))
    # What the allocator reserved is known for the captured sizes only.
    derived = msgspec.structs.replace(log, blocks=blocks, reserved_bytes=0)
    allocated = graph.nodes.bytes_allocated.copy()
    for block in changed:
        allocated[rows[log.blocks.node[block]]] += sizes[block] - log.blocks.bytes[block]
    peak = measured.peak_memory_bytes + growth + derived.most_in_use - log.most_in_use
    measured = msgspec.structs.replace(
        measured,
        memory=derived,
        resident_bytes=resident,
        start_memory_bytes=measured.start_memory_bytes + growth,
        peak_memory_bytes=peak,
        activation_bytes=kept_activations(graph, log, rows, sizes, changed),
    )
    graph = graph.with_columns(bytes_allocated=allocated)
    return replace(graph, job=msgspec.structs.replace(graph.job, measurement=measured))


def _match_blocks(
    log: MemoryLog, rows: Mapping[int, int], shards: ShardMemory, sizes: I64
) -> list[int]:
    """Set the sizes of blocks that the step allocates for shards; return those blocks.

    Args:
        log: the captured log.
        rows: id of a node -> its row.
        shards: bytes of the shards.
        sizes: bytes of each block, which are set.
    """
    by_row: dict[int, list[int]] = defaultdict(list)
    for block, (node, at) in enumerate(zip(log.blocks.node, log.blocks.allocated_at, strict=True)):
        if at >= 0 and node in rows:
            by_row[rows[node]].append(block)
    changed: list[int] = []
    unmatched = set(range(len(sizes)))
    distances = sorted(range(-NEAR_NODES, NEAR_NODES + 1), key=abs)
    for row, before, after in shards.allocations:
        if round_size(before) == round_size(after):
            continue
        near = (block for distance in distances for block in by_row.get(row + distance, ()))
        block = next(
            (b for b in near if b in unmatched and log.blocks.bytes[b] == round_size(before)), None
        )
        if block is None:
            raise unknown_shards(f"no block of {before} bytes near node {row}")
        unmatched.remove(block)
        sizes[block] = round_size(after)
        changed.append(block)
    return changed


def _match_gradients(log: MemoryLog, shards: ShardMemory, sizes: I64) -> None:
    """Set the sizes of gradients that the previous step left and this one frees."""
    new_sizes = _by_captured_size(shards.reduced_gradients)
    blocks = log.blocks
    for block, (size, kind, at) in enumerate(
        zip(blocks.bytes, blocks.memory_class, blocks.allocated_at, strict=True)
    ):
        if at < 0 and kind == MemoryClass.GRADIENTS:
            if new_sizes[size]:
                sizes[block] = new_sizes[size].pop()
            elif shards.sharded_gradients:
                raise unknown_shards(
                    f"an earlier gradient of {size} bytes is not reduced in the step"
                )


def _by_captured_size(pairs: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    """Return captured size of a block -> new sizes, from captured and new bytes of tensors."""
    sizes: dict[int, list[int]] = defaultdict(list)
    for before, after in pairs:
        sizes[round_size(before)].append(round_size(after))
    return sizes


def _resident(
    captured: Mapping[str, tuple[int, ...]], shards: ShardMemory
) -> dict[str, tuple[int, ...]]:
    """Return the resident bytes by class, with those of shards.

    Raises:
        ShardError: a parameter or optimizer state that is a shard is not resident.
    """
    parameters, states = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for storage, pair in shards.resident.items():
        (parameters if storage in shards.parameters else states)[pair] += 1
    pairs_of_class = {
        MemoryClass.GRADIENTS.name.lower(): Counter(shards.reduced_gradients),
        MemoryClass.PARAMETERS.name.lower(): parameters,
        MemoryClass.OPTIMIZER.name.lower(): states,
    }
    derived: dict[str, tuple[int, ...]] = {}
    for name, sizes in captured.items():
        pairs = pairs_of_class.get(name, Counter[tuple[int, int]]())
        by_size: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for pair in pairs:
            by_size[pair[0]].append(pair)
        new: list[int] = []
        for size in sizes:
            # Memory that matches no shard, such as a buffer, is not sharded.
            pair = next((pair for pair in by_size[size] if pairs[pair] > 0), (size, size))
            pairs[pair] -= 1
            new.append(pair[1])
        derived[name] = tuple(new)
    unmatched = +(parameters + states)
    if any(before != after for before, after in unmatched):
        raise unknown_shards(f"{unmatched.total()} shards are not resident")
    return derived


def kept_activations(
    graph: Graph, log: MemoryLog, rows: Mapping[int, int], sizes: I64, changed: Sequence[int]
) -> tuple[int, ...]:
    """Return the bytes that each micro-batch keeps until its backward."""
    blocks = log.blocks
    micro_batch = graph.nodes.micro_batch
    begins: dict[int, int] = {}
    of_block = [int(micro_batch[rows[node]]) if node in rows else -1 for node in blocks.node]
    for at, phase, number in zip(blocks.allocated_at, blocks.phase, of_block, strict=True):
        if at >= 0 and phase == Phase.BACKWARD:
            begins[number] = min(at, begins.get(number, at))
    activations = [*graph.job.measurement.activation_bytes]
    for block in changed:
        number, freed = of_block[block], blocks.freed_at[block]
        begin = begins.get(number, UNKNOWN)
        # What the script allocates between a backward and the next forward counts to neither: the
        # tokens of the next micro-batch.
        kept = (freed < 0 or freed > begin) and (begin < 0 or blocks.allocated_at[block] < begin)
        if blocks.phase[block] == Phase.FORWARD and kept and 0 <= number < len(activations):
            activations[number] += int(sizes[block]) - blocks.bytes[block]
    return tuple(activations)

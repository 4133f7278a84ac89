"""Data loading and checkpoints as storage nodes of a graph."""

from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec
import numpy as np

from onerank.annotate.memory.peak import resident_blocks
from onerank.ir import Edges, Evidence, Graph, Kind, MemoryClass, Nodes, Reason
from onerank.ir.arrays import I64
from onerank.ir.errors import AnnotateError
from onerank.ir.nodes import default_of, dtype_of, is_text
from onerank.ir.notes import Note

LOAD, STORE = "load the batch", "store a checkpoint"


@dataclass(frozen=True, slots=True)
class StorageTraffic:
    """The storage traffic of a rank.

    Attributes:
        gb_per_s: bandwidth of one rank, in 1e9 bytes per second (gigabytes, not gigabits).
        batch_bytes: bytes read for each step; 0 for none.
        checkpoint_every: steps from one checkpoint to the next; 0 for no checkpoints.
        checkpoint_bytes: bytes of this rank per checkpoint; None for the captured parameters and
            optimizer state.
        prefetch: whether a batch is read during the previous step; otherwise the step waits for it.
    """

    gb_per_s: float
    batch_bytes: int = 0
    checkpoint_every: int = 0
    checkpoint_bytes: int | None = None
    prefetch: bool = True


def with_storage(graph: Graph, storage: StorageTraffic) -> Graph:
    """Return the graph with storage nodes for the batch and for a step's share of a checkpoint.

    A batch without prefetch is read before all other nodes. A checkpoint is written after all other
    nodes, with the bytes and the time of one checkpoint divided by the steps between two.

    Raises:
        AnnotateError: there is nothing to add, a figure is out of range, or the size of a
            checkpoint is unknown.
    """
    _check(storage)
    rows: list[dict[str, Any]] = []
    notes: list[Note] = []
    if storage.batch_bytes:
        rows.append(_row(Kind.MEM_LOAD, LOAD, storage.batch_bytes, storage))
        order = "concurrently with the step" if storage.prefetch else "before the step"
        notes.append(
            Note(
                f"{storage.batch_bytes} bytes are loaded {order} at {storage.gb_per_s:g} GB/s",
                code="storage-load",
            )
        )
    if storage.checkpoint_every:
        checkpoint_bytes = _checkpoint_bytes(graph, storage)
        share = round(checkpoint_bytes / storage.checkpoint_every)
        rows.append(_row(Kind.MEM_STORE, STORE, share, storage))
        notes.append(
            Note(
                f"a checkpoint of {checkpoint_bytes} bytes every {storage.checkpoint_every} steps "
                f"at {storage.gb_per_s:g} GB/s: each step writes {share} bytes",
                code="storage-checkpoint",
            )
        )
    extended = _appended(graph, rows, storage)
    # The measured steps had no such reads and writes, so their times hold no longer.
    measurement = graph.job.measurement
    measurement = msgspec.structs.replace(
        measurement, notes=(*measurement.notes, *notes), step_ns=(), profiled_step_ns=0
    )
    return replace(extended, job=msgspec.structs.replace(graph.job, measurement=measurement))


def _check(storage: StorageTraffic) -> None:
    if not 0 < storage.gb_per_s <= 1e5:
        raise AnnotateError(
            f"storage bandwidth is {storage.gb_per_s:g} GB/s: expected above 0 and up to 100000 "
            "(1e9 bytes per second, for one rank)",
            code="storage-rate-out-of-range",
        )
    for name in ("batch_bytes", "checkpoint_every", "checkpoint_bytes"):
        if (getattr(storage, name) or 0) < 0:
            raise AnnotateError(
                f"{name} is {getattr(storage, name)}: expected 0 or more", code="storage-negative"
            )
    if not storage.batch_bytes and not storage.checkpoint_every:
        raise AnnotateError(
            "nothing to add\n  give the bytes of a batch (`--batch-bytes`) or the steps between "
            "two checkpoints (`--checkpoint-every`), 1 or more",
            code="storage-nothing-to-add",
        )


def _checkpoint_bytes(graph: Graph, storage: StorageTraffic) -> int:
    if storage.checkpoint_bytes is not None:
        return storage.checkpoint_bytes
    log = graph.job.measurement.memory
    resident = resident_blocks(graph, log)[0] if log is not None else {}
    state_bytes = sum(
        sum(resident.get(memory_class, ()))
        for memory_class in (MemoryClass.PARAMETERS, MemoryClass.OPTIMIZER)
    )
    if not state_bytes:
        raise AnnotateError(
            "the trace does not record the memory of parameters and optimizer, so the size of a "
            "checkpoint is unknown\n  give it with `--checkpoint-bytes`",
            code="storage-checkpoint-unknown",
        )
    return state_bytes


def _row(kind: Kind, name: str, size: int, storage: StorageTraffic) -> dict[str, Any]:
    return {
        "kind": int(kind),
        "name": name,
        "op": name,
        # 1 GB/s is 1 byte per ns.
        "duration_ns": round(size / storage.gb_per_s),
        "bytes_read" if kind is Kind.MEM_LOAD else "bytes_written": size,
        "evidence": int(Evidence.DATASHEET),
    }


def _appended(graph: Graph, rows: list[dict[str, Any]], storage: StorageTraffic) -> Graph:
    """Return the graph with the storage nodes of `rows` at its end, tied to its other nodes."""
    nodes, count = graph.nodes, len(graph)
    starts, ends = nodes.start_ns, nodes.start_ns + nodes.duration_ns
    first, last = int(starts.min(initial=0)), int(ends.max(initial=0))
    last_id = int(nodes.id.max(initial=0))
    strings = graph.strings.copy()
    for place, row in enumerate(rows, start=1):
        loads = row["name"] == LOAD
        row["id"] = last_id + place
        row["start_ns"] = first if loads else last
    columns: dict[str, Any] = {}
    for spec in fields(Nodes):
        default = "" if is_text(spec) else default_of(spec)
        values = [row.get(spec.name, default) for row in rows]
        if is_text(spec):
            values_of_rows = strings.encode(values)
        elif spec.name == "foreign":
            values_of_rows = np.full(len(rows), None, dtype=object)
        else:
            values_of_rows = np.array(values, dtype=dtype_of(spec))
        columns[spec.name] = np.concatenate([getattr(nodes, spec.name), values_of_rows])
    source, target, reason = graph.edges.source, graph.edges.target, graph.edges.reason
    for place, row in enumerate(rows):
        loads = row["name"] == LOAD
        tied = _tied_nodes(graph, loads=loads, prefetch=storage.prefetch)
        storage_node = np.full(len(tied), count + place, dtype=np.int64)
        source = np.concatenate([source, storage_node if loads else tied])
        target = np.concatenate([target, tied if loads else storage_node])
        reasons = np.full(len(tied), int(Reason.SYNC), dtype=np.uint8)
        reason = np.concatenate([reason, reasons])
    total = count + len(rows)
    edges = Edges.from_pairs(total, source, target, reason)
    return replace(graph, nodes=Nodes.of(total, **columns), edges=edges, strings=strings)


def _tied_nodes(graph: Graph, *, loads: bool, prefetch: bool) -> I64:
    """Return the nodes that a load precedes (the first ones) or a store follows (the last ones)."""
    count = len(graph)
    if loads:
        has_dependency = np.diff(graph.edges.offsets) > 0
        # A prefetched batch belongs to the next step, so nothing of this one waits for it.
        return np.zeros(0, dtype=np.int64) if prefetch else np.flatnonzero(~has_dependency)
    has_dependents = np.zeros(count, dtype=bool)
    has_dependents[graph.edges.source] = True
    return np.flatnonzero(~has_dependents)

"""Data loading and checkpoints as storage nodes of a graph."""

from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from onerank.annotate.memory.peak import held_blocks
from onerank.ir import Edges, Evidence, Graph, Kind, MemoryClass, Nodes, Reason
from onerank.ir.errors import AnnotateError
from onerank.ir.nodes import default_of, dtype_of, is_text

I64 = npt.NDArray[np.int64]

LOAD, STORE = "load the batch", "store a checkpoint"


@dataclass(frozen=True, slots=True)
class Storage:
    """The storage traffic of a rank.

    Attributes:
        gbps: bandwidth of one rank, in 1e9 bytes per second.
        batch_bytes: read for each step; 0 for none.
        checkpoint_every: steps from one checkpoint to the next; 0 for none.
        checkpoint_bytes: of this rank; None: parameters and optimizer state, as captured.
        prefetch: whether a batch is read during the previous step; otherwise the step waits for it.
    """

    gbps: float
    batch_bytes: int = 0
    checkpoint_every: int = 0
    checkpoint_bytes: int | None = None
    prefetch: bool = True


def with_storage(graph: Graph, storage: Storage) -> Graph:
    """Return the graph with nodes of storage; those of a checkpoint hold a step's share of it.

    A batch that is not prefetched is read before everything else. A checkpoint is written when all
    else has ended: bytes and time of one, divided by the steps between two.

    Raises:
        AnnotateError: there is nothing to add, a figure is out of range, or what a checkpoint
            holds is not known.
    """
    _check(storage)
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    if storage.batch_bytes:
        rows.append(_row(Kind.MEM_LOAD, LOAD, storage.batch_bytes, storage))
        when = "beside the step" if storage.prefetch else "before the step"
        notes.append(f"{storage.batch_bytes} bytes are loaded {when} at {storage.gbps:g} GB/s")
    if storage.checkpoint_every:
        whole = _checkpoint_bytes(graph, storage)
        share = round(whole / storage.checkpoint_every)
        rows.append(_row(Kind.MEM_STORE, STORE, share, storage))
        notes.append(
            f"a checkpoint of {whole} bytes every {storage.checkpoint_every} steps at "
            f"{storage.gbps:g} GB/s: each step bears {share} bytes"
        )
    made = _appended(graph, rows, storage)
    measurement = graph.job.measurement
    measurement = msgspec.structs.replace(
        measurement, notes=(*measurement.notes, *notes), step_ns=(), profiled_step_ns=0
    )
    return replace(made, job=msgspec.structs.replace(graph.job, measurement=measurement))


def _check(storage: Storage) -> None:
    if not 0 < storage.gbps <= 1e5:
        raise AnnotateError(
            f"storage of {storage.gbps:g} GB/s: expected above 0 and up to 100000, in 1e9 bytes "
            "per second for one rank",
            code="storage-rate-out-of-range",
        )
    for name in ("batch_bytes", "checkpoint_every", "checkpoint_bytes"):
        if (getattr(storage, name) or 0) < 0:
            raise AnnotateError(
                f"{name} is {getattr(storage, name)}: expected 0 or more", code="storage-negative"
            )
    if not storage.batch_bytes and not storage.checkpoint_every:
        raise AnnotateError(
            "nothing to add: give the bytes of a batch (`--batch-bytes`) or the steps from one "
            "checkpoint to the next (`--checkpoint-every`), 1 or more",
            code="storage-nothing-to-add",
        )


def _checkpoint_bytes(graph: Graph, storage: Storage) -> int:
    if storage.checkpoint_bytes is not None:
        return storage.checkpoint_bytes
    log = graph.job.measurement.memory
    held = held_blocks(graph, log)[0] if log is not None else {}
    whole = sum(sum(held.get(one, ())) for one in (MemoryClass.PARAMETERS, MemoryClass.OPTIMIZER))
    if not whole:
        raise AnnotateError(
            "the trace does not tell what parameters and optimizer hold, so a checkpoint's size is "
            "not known: give it with `--checkpoint-bytes`",
            code="storage-checkpoint-unknown",
        )
    return whole


def _row(kind: Kind, name: str, size: int, storage: Storage) -> dict[str, Any]:
    return {
        "kind": int(kind),
        "name": name,
        "op": name,
        "duration_ns": round(size / storage.gbps),
        "bytes_read" if kind is Kind.MEM_LOAD else "bytes_written": size,
        "evidence": int(Evidence.DATASHEET),
    }


def _appended(graph: Graph, rows: list[dict[str, Any]], storage: Storage) -> Graph:
    nodes, count = graph.nodes, len(graph)
    starts, ends = nodes.start_ns, nodes.start_ns + nodes.duration_ns
    first, last = int(starts.min(initial=0)), int(ends.max(initial=0))
    top = int(nodes.id.max(initial=0))
    strings = graph.strings.copy()
    for place, row in enumerate(rows, start=1):
        loads = row["name"] == LOAD
        row["id"] = top + place
        row["start_ns"] = first if loads else last
    columns: dict[str, Any] = {}
    for spec in fields(Nodes):
        default = "" if is_text(spec) else default_of(spec)
        values = [row.get(spec.name, default) for row in rows]
        if is_text(spec):
            more = strings.encode(values)
        elif spec.name == "foreign":
            more = np.full(len(rows), None, dtype=object)
        else:
            more = np.array(values, dtype=dtype_of(spec))
        columns[spec.name] = np.concatenate([getattr(nodes, spec.name), more])
    source, target, reason = graph.edges.source, graph.edges.target, graph.edges.reason
    for place, row in enumerate(rows):
        loads = row["name"] == LOAD
        found = _awaited(graph, loads=loads, prefetch=storage.prefetch)
        own = np.full(len(found), count + place, dtype=np.int64)
        source = np.concatenate([source, own if loads else found])
        target = np.concatenate([target, found if loads else own])
        waits = np.full(len(found), int(Reason.SYNC), dtype=np.uint8)
        reason = np.concatenate([reason, waits])
    total = count + len(rows)
    made = Edges.from_pairs(total, source, target, reason)
    return replace(graph, nodes=Nodes.of(total, **columns), edges=made, strings=strings)


def _awaited(graph: Graph, *, loads: bool, prefetch: bool) -> I64:
    """Return the nodes tied to one of storage: those without a wait, or those nothing waits for."""
    count = len(graph)
    if loads:
        waits = np.diff(graph.edges.offsets) > 0
        return np.zeros(0, dtype=np.int64) if prefetch else np.flatnonzero(~waits)
    awaited = np.zeros(count, dtype=bool)
    awaited[graph.edges.source] = True
    return np.flatnonzero(~awaited)

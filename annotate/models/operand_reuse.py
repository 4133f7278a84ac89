"""How many bytes a GPU moves between two uses of an operand, which decides whether a cache has it.

The last-level cache keeps what the kernels before a read moved, up to its size. An operand that the
previous kernel wrote comes from the cache, one of an earlier layer from memory: kernels of a
residual addition or of a backward pass that read both take longer than their bytes alone show.
"""

from typing import NamedTuple

import numpy as np
import polars as pl

from onerank.annotate.op_costs.memory_bound import WRITE_ONLY
from onerank.annotate.op_costs.node_costs import OpCosts
from onerank.annotate.op_costs.op_classes import OpClass, base_name
from onerank.ir import Graph
from onerank.ir.arrays import F64, I32, I64, Mask

READS = 3
"""Operands of a node that are followed: the largest ones, which stand for all."""

# Of a tensor in a column of values: id, storage, offset, elements, bytes of an element, device. A
# tensor on the CPU, as a Python number is, has a device without a number. A number with more digits
# is no address or size and might not fit int64: the tensor has no recorded place.
_STORED = r'\[\d+,(\d{1,18}),\d+,(\d{1,15}),(\d{1,3}),"[^",]*:\d+"\]'


class OperandReuse(NamedTuple):
    """The largest operands that each of n nodes reads.

    Attributes:
        share: their share of the bytes that the node moves, with a part of those that are not
            followed; 0 without a recorded place, float64[n, READS].
        between: bytes that other nodes moved since an operand was last read or written,
            float64[n, READS].
    """

    share: F64
    between: F64

    @classmethod
    def unknown(cls, count: int) -> "OperandReuse":
        """Return the reuse of nodes whose operands have no recorded place."""
        return cls(np.zeros((count, READS)), np.zeros((count, READS)))

    @classmethod
    def of(cls, graph: Graph, costs: OpCosts) -> "OperandReuse":
        """Follow the storages of a step in the order of execution.

        An operand that the step uses once was last used by the step before. The kernels of an
        optimizer's operator divide its lists of tensors among them, and each is recorded with whole
        lists: they count as one use, by the first of them.

        Args:
            graph: one step.
            costs: of its n compute nodes.
        """
        nodes, index, count = graph.nodes, costs.index, len(costs.index)
        moved = _moved_by_operator(costs)
        reads = _places(graph, nodes.input_values[index])
        if not len(reads.node):
            return cls.unknown(count)
        writes = _places(graph, nodes.output_values[index])
        reads = reads.only(~_overwritten(graph, index, reads, writes))
        rank = np.empty(count, dtype=np.int64)
        rank[np.argsort(nodes.start_ns[index], kind="stable")] = np.arange(count)
        before = np.zeros(count + 1)
        before[rank + 1] = np.maximum(costs.bytes_read, 0) + np.maximum(costs.bytes_written, 0)
        before = np.cumsum(before)
        rank = _rank_of_first(rank, costs)
        uses = _Places(*(np.concatenate(pair) for pair in zip(reads, writes, strict=True)))
        order = np.lexsort((rank[uses.node], uses.storage))
        at, storage = rank[uses.node][order], uses.storage[order]
        # Within a node, all uses of a storage have the last use by another node.
        first = np.flatnonzero(np.diff(storage, prepend=-1) | np.diff(at, prepend=-1))
        group = np.repeat(np.arange(len(first)), np.diff(first, append=len(order)))
        begins = np.diff(storage[first], prepend=-1) != 0
        last = np.append(np.flatnonzero(begins)[1:] - 1, len(first) - 1)
        previous = np.roll(at[first], 1)
        since = before[at[first]] - before[previous + 1]
        # Of the first use in the step: what follows the last use, and precedes this one.
        wrapped = before[-1] - before[at[first[last]] + 1] + before[at[first[begins]]]
        since[begins] = wrapped
        between = np.empty(len(order))
        between[order] = since[group]
        return cls._largest(reads, between[: len(reads.node)], moved)

    @classmethod
    def _largest(cls, reads: "_Places", between: F64, moved: F64) -> "OperandReuse":
        order = np.lexsort((-reads.nbytes, reads.node))
        node = reads.node[order]
        starts = np.flatnonzero(np.diff(node, prepend=-1))
        place = np.arange(len(node)) - np.repeat(starts, np.diff(starts, append=len(node)))
        kept = place < READS
        order, at = order[kept], (node[kept], place[kept])
        reuse = cls.unknown(len(moved))
        # The largest stand for all: an optimizer's kernel reads some hundred tensors of a list, all
        # of them last used as long ago as these.
        every, largest = (
            np.bincount(reads.node[rows], reads.nbytes[rows], len(moved))
            for rows in (slice(None), order)
        )
        nbytes = reads.nbytes[order] * (every / np.maximum(largest, 1))[at[0]]
        reuse.share[at] = nbytes / np.maximum(moved[at[0]], 1)
        reuse.between[at] = between[order]
        # A lookup reads some rows of its table, so operands may be larger than what a node moves.
        reuse.share[:] /= np.maximum(reuse.share.sum(axis=1, keepdims=True), 1)
        return reuse

    def select(self, rows: slice | I64) -> "OperandReuse":
        """Return the reuse of the nodes at `rows`."""
        return OperandReuse(self.share[rows], self.between[rows])

    def cached_share(self, moved: F64, cache_bytes: float) -> F64:
        """Return the share of each node's bytes that a cache serves, float64[n].

        Args:
            moved: bytes that each node moves, float64[n].
            cache_bytes: size of the cache. It serves all of what up to half as many bytes separate
                from the last use, nothing beyond its size, and a linear share between.
        """
        own = _kept(moved, cache_bytes)
        lost = own[:, None] - self._of_reads(moved, cache_bytes)
        return own - (self.share * lost).sum(axis=1)

    def kept_share(self, moved: F64, cache_bytes: float) -> F64:
        """Return the least share of a followed operand that a cache has, float64[n].

        1 for nodes without such operands; arguments as for `cached_share`.
        """
        kept = np.where(self.share > 0, self._of_reads(moved, cache_bytes), 1.0)
        return kept.min(axis=1)

    def _of_reads(self, moved: F64, cache_bytes: float) -> F64:
        return _kept(self.between + moved[:, None], cache_bytes)


def _moved_by_operator(costs: OpCosts) -> F64:
    """Return the bytes that each node's operator moves; 0 if not known, float64[n]."""
    moved = [max(work.bytes_read, 0) + max(work.bytes_written, 0) for work in costs.works]
    return np.array(moved, dtype=np.float64)[costs.call]


def _rank_of_first(rank: I64, costs: OpCosts) -> I64:
    """Return ranks with those of an optimizer's operator replaced by its first, int64[n]."""
    first = np.full(int(costs.instance.max(initial=-1)) + 1, len(rank))
    np.minimum.at(first, costs.instance, rank)
    return np.where(costs.is_class(OpClass.OPTIMIZER), first[costs.instance], rank)


def _kept(distance: F64, cache_bytes: float) -> F64:
    return np.clip(2 - 2 * distance / cache_bytes, 0, 1)


class _Places(NamedTuple):
    """Tensors in a column of values: position of the node, storage and size, int64[t]."""

    node: I64
    storage: I64
    nbytes: I64

    def only(self, rows: Mask) -> "_Places":
        return _Places(*(column[rows] for column in self))


def _places(graph: Graph, codes: I32) -> _Places:
    distinct, place = np.unique(codes, return_inverse=True)
    texts = pl.Series("text", graph.strings.decode(distinct), dtype=pl.String)
    tensors = pl.DataFrame({"text": texts, "code": np.arange(len(distinct))}).select(
        "code", tensor=pl.col("text").str.extract_all(_STORED)
    )
    fields = pl.col("tensor").str.extract_groups(_STORED)
    each = (
        tensors.explode("tensor")
        .drop_nulls()
        .select("code", *(fields.struct[at].cast(pl.Int64).alias(f"f{at}") for at in range(3)))
    )
    code, storage, elements, item = (each[name].to_numpy() for name in each.columns)
    # A text that several nodes share is repeated for each.
    order = np.argsort(place, kind="stable")
    nodes_of = np.bincount(place, minlength=len(distinct))
    first = np.cumsum(nodes_of) - nodes_of
    counts = nodes_of[code]
    row = np.repeat(np.arange(len(code)), counts)
    within = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    node = order[first[code[row]] + within]
    return _Places(node.astype(np.int64), storage[row], (elements * item)[row])


def _overwritten(graph: Graph, index: I64, reads: _Places, writes: _Places) -> Mask:
    """Return which operands their node overwrites without reading them, bool[t]."""
    names = np.unique(graph.nodes.op[index])
    unread = names[[base_name(graph.strings[int(name)]) in WRITE_ONLY for name in names]]
    only_written = np.isin(graph.nodes.op[index], unread)
    most = max(reads.storage.max(initial=0), writes.storage.max(initial=0)) + 1
    written = writes.node * most + writes.storage
    return only_written[reads.node] & np.isin(reads.node * most + reads.storage, written)

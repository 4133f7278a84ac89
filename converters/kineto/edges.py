"""Edges of a graph to be, by the numbers of its nodes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from onerank.ir import Edges, Reason
from onerank.ir.edges import topological_order

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]


@dataclass(slots=True)
class EdgeList:
    """Edges in the order in which they were found; the first reason given for a pair stands."""

    _sources: list[I64] = field(default_factory=list[I64])
    _targets: list[I64] = field(default_factory=list[I64])
    _reasons: list[U8] = field(default_factory=list[U8])

    def add(self, source: int, target: int, reason: Reason) -> None:
        """Let `target` wait for `source`."""
        self.extend(np.array([source]), np.array([target]), reason)

    def extend(self, source: I64, target: I64, reason: Reason) -> None:
        """Let each of `target` wait for its `source`."""
        self._sources.append(source)
        self._targets.append(target)
        self._reasons.append(np.full(len(source), reason, dtype=np.uint8))

    def chain(self, members: Sequence[int], reason: Reason) -> None:
        """Let each member wait for the one before."""
        if len(members) > 1:
            lane = np.array(members)
            self.extend(lane[:-1], lane[1:], reason)

    def latest(self, end_ns: I64, at_least: I64, *, of: tuple[Reason, ...]) -> I64:
        """Return when the last of the sources of each node had ended, int64[n].

        Args:
            end_ns: of each node, int64[n].
            at_least: what to return of a node of which no source ended later, int64[n].
            of: reasons whose edges count.
        """
        found = at_least.copy()
        if self._sources:
            counts = np.isin(np.concatenate(self._reasons), of)
            source, target = (np.concatenate(x)[counts] for x in (self._sources, self._targets))
            np.maximum.at(found, target, end_ns[source])
        return found

    def build(self, place: I64) -> tuple[Edges, Counter[Reason], tuple[int, int] | None]:
        """Return the edges of the graph, without those on which the data contradicts itself.

        Where edges make a circle, those of it that lead to a node that started earlier are left
        out.

        Args:
            place: index in the graph of each number; ascending by start, int64[n].

        Returns:
            The edges, how many were left out by reason, and source and target of one.
        """
        count = len(place)
        empty = np.zeros(0, dtype=np.int64)
        source = place[np.concatenate([empty, *self._sources])]
        target = place[np.concatenate([empty, *self._targets])]
        reason = np.concatenate([empty.astype(np.uint8), *self._reasons])
        _, first = np.unique(source * count + target, return_index=True)
        first = np.sort(first)
        first = first[source[first] != target[first]]
        source, target, reason = source[first], target[first], reason[first]
        made = Edges.from_pairs(count, source, target, reason)
        backward = source > target
        if not backward.any():
            return made, Counter(), None
        _, leftover = topological_order(made)
        circular = np.zeros(count, dtype=bool)
        circular[leftover] = True
        out = backward & circular[source] & circular[target]
        if not out.any():
            return made, Counter(), None
        lost = Counter(Reason(value) for value in reason[out].tolist())
        example = int(source[out][0]), int(target[out][0])
        return Edges.from_pairs(count, source[~out], target[~out], reason[~out]), lost, example

"""The graph: nodes and edges as columns, their strings, and the job they belong to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from onerank.ir.arrays import among
from onerank.ir.edges import Edges, topological_order
from onerank.ir.enums import COMMUNICATION, DATA_LOADING, GPU_COMPUTE, Kind, Phase
from onerank.ir.errors import GraphError
from onerank.ir.job.job import Job
from onerank.ir.nodes import TEXT_COLUMNS, Node, Nodes
from onerank.ir.string_table import StringTable

if TYPE_CHECKING:
    import networkx
    import polars

    from onerank.ir.scopes import Grain

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Graph:
    """One rank's step as a directed acyclic graph.

    Attributes:
        nodes: columns of the n nodes.
        edges: dependencies by node index.
        strings: table the text columns point into.
        job: world, groups, device and measurement.
        foreign: serialized metadata of a file from another tool; None for onerank's graphs.
    """

    nodes: Nodes
    edges: Edges
    strings: StringTable
    job: Job = field(default_factory=Job)
    foreign: Any = None

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[Node]:
        return (Node(self.nodes, self.strings, index) for index in range(len(self)))

    def node(self, index: int) -> Node:
        """Return a view of the node at `index`."""
        return Node(self.nodes, self.strings, index)

    def mask(self, *kinds: Kind) -> Mask:
        """Return which nodes are of one of `kinds`, bool[n]."""
        return among(self.nodes.kind, kinds)

    @property
    def gpu_compute(self) -> Mask:
        """Which nodes are kernels, memcpys or memsets, bool[n]."""
        return self.mask(*GPU_COMPUTE)

    @property
    def communication(self) -> Mask:
        """Which nodes are collectives, sends or receives, bool[n]."""
        return self.mask(*COMMUNICATION)

    @property
    def evaluating(self) -> Mask:
        """Which nodes belong to an evaluation forward, bool[n].

        Such a node has no micro-batch, while other forward nodes of the graph have one.
        """
        forward, numbered = self.nodes.phase == Phase.FORWARD, self.nodes.micro_batch >= 0
        return forward & ~numbered & (forward & numbered).any()

    @property
    def data_loading(self) -> Mask:
        """Which nodes are waits of the script for its next input batch, bool[n]."""
        return self.named(DATA_LOADING)

    def named(self, *beginnings: str) -> Mask:
        """Return which nodes have a name that starts with one of `beginnings`, bool[n]."""
        chosen = np.zeros(len(self.strings), dtype=bool)
        codes = np.flatnonzero(np.bincount(self.nodes.name))
        chosen[codes] = [self.strings[code].startswith(beginnings) for code in codes.tolist()]
        return chosen[self.nodes.name]

    def text(self, column: str) -> list[str]:
        """Return a text column as strings."""
        return self.strings.decode(getattr(self.nodes, column))

    def with_columns(self, **columns: npt.NDArray[Any] | list[str]) -> Graph:
        """Return a graph with some columns replaced; text columns may be given as strings."""
        strings = self.strings
        encoded: dict[str, npt.NDArray[Any]] = {}
        for name, values in columns.items():
            if isinstance(values, list):
                assert name in TEXT_COLUMNS, f"{name} is not a text column"
                strings = strings.copy() if strings is self.strings else strings
                encoded[name] = strings.encode(values)
            else:
                encoded[name] = values.astype(getattr(self.nodes, name).dtype, copy=False)
        return replace(self, nodes=replace(self.nodes, **encoded), strings=strings)

    def topological_order(self) -> npt.NDArray[np.int64]:
        """Return the node indices in dependency order; ready nodes come by ascending index.

        Raises:
            GraphError: the graph has a cycle; the message names its nodes.
        """
        order, leftover = topological_order(self.edges)
        if len(leftover):
            raise GraphError(f"the graph has a cycle: {self._name_cycle(leftover)}")
        return order

    def _name_cycle(self, leftover: npt.NDArray[np.int64]) -> str:
        inside = set(leftover.tolist())
        node, seen = int(leftover[0]), list[int]()
        while node not in seen:
            seen.append(node)
            node = next(source for source, _ in self.edges.of(node) if source in inside)
        loop = [*seen[seen.index(node) :], node]
        return " waits for ".join(f"node {self.nodes.id[index]}" for index in loop)

    def coarsen(self, grain: Grain) -> Graph:
        """Return a graph of one node per scope, phase and micro-batch between communications.

        Args:
            grain: "layer" or "submodule".

        Raises:
            GraphError: the graph has a cycle, or records no modules.
        """
        from onerank.ir.coarsen import coarsen

        return coarsen(self, grain)

    def nodes_frame(self) -> polars.DataFrame:
        """Return one row per node: every column, strings and enum names spelled out."""
        from onerank.ir.dataframe import nodes_frame

        return nodes_frame(self)

    def edges_frame(self) -> polars.DataFrame:
        """Return one row per edge: `source` and `target` node ids and the `reason`."""
        from onerank.ir.dataframe import edges_frame

        return edges_frame(self)

    def to_networkx(self) -> networkx.DiGraph[int]:
        """Return a networkx graph keyed by node id; edges point from source to waiter."""
        from onerank.ir.dataframe import to_networkx

        return to_networkx(self)

    def write(self, path: str | Path) -> None:
        """Write a Chakra `.et` file; it appears under its name only when complete.

        Raises:
            ChakraError: a value does not fit Chakra's schema.
            OSError: the file cannot be written.
        """
        from onerank.ir.chakra import write

        write(self, path)

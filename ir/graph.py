"""The graph of one rank (columns of nodes, edges, job), and a builder that adds node by node."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from onerank.display import Displayed
from onerank.ir.arrays import I64, Mask, membership_mask
from onerank.ir.edges import Edges, topological_order
from onerank.ir.enums import (
    COMMUNICATION,
    COMMUNICATION_CALL,
    DATA_LOADING,
    GPU_COMPUTE,
    Collective,
    Evidence,
    Kind,
    Phase,
    Reason,
)
from onerank.ir.errors import GraphError
from onerank.ir.job import Job
from onerank.ir.nodes import TEXT_COLUMNS, Node, Nodes, StringTable, default_of, dtype_of, is_text

if TYPE_CHECKING:
    import networkx
    import polars

    from onerank.ir.coarsen import CoarseGranularity


_ENUM_COLUMNS = {"kind": Kind, "phase": Phase, "collective": Collective, "evidence": Evidence}


@dataclass(frozen=True, slots=True, repr=False)
class Graph(Displayed):
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

    def displayed_fields(self) -> dict[str, Any]:
        """Return what the graph prints: its size, and what was measured of its step."""
        measured = self.job.measurement
        annotations = self.job.annotations
        return {
            "device": self.job.device.name or None,
            "predicted_for": annotations[-1].target if annotations else None,
            "world": " ".join(f"{axis} {n}" for axis, n in self.job.world.sizes.items() if n > 1),
            "rank": self.job.rank,
            "nodes": len(self),
            "edges": len(self.edges),
            "step_ns": measured.median_step_ns,
            "peak_memory_bytes": measured.peak_memory_bytes or None,
        }

    def __iter__(self) -> Iterator[Node]:
        return (Node(self.nodes, self.strings, index) for index in range(len(self)))

    def node(self, index: int) -> Node:
        """Return a view of the node at `index`."""
        return Node(self.nodes, self.strings, index)

    def mask(self, *kinds: Kind) -> Mask:
        """Return which nodes are of one of `kinds`, bool[n]."""
        return membership_mask(self.nodes.kind, kinds)

    @property
    def gpu_compute(self) -> Mask:
        """Which nodes are kernels, memcpys or memsets, bool[n]."""
        return self.mask(*GPU_COMPUTE)

    @property
    def compute(self) -> Mask:
        """Which nodes compute: GPU operations, or the operators of a CPU capture, bool[n].

        Operators that wait for a batch or issue communication do not compute.
        """
        if self.job.device.runs_operators:
            others = self.named(DATA_LOADING, COMMUNICATION_CALL)
            return self.gpu_compute | (self.mask(Kind.HOST_OP) & ~others)
        return self.gpu_compute

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
        # Names are interned and repeat, so each distinct name is compared only once.
        chosen = np.zeros(len(self.strings), dtype=bool)
        codes = np.flatnonzero(np.bincount(self.nodes.name))
        chosen[codes] = [self.strings[code].startswith(beginnings) for code in codes.tolist()]
        return chosen[self.nodes.name]

    def text(self, column: str) -> list[str]:
        """Return a text column as strings."""
        return self.strings.decode(getattr(self.nodes, column))

    def with_columns(self, **columns: npt.NDArray[Any] | list[str]) -> Graph:
        """Return a graph with some columns replaced; text columns may be given as strings.

        New shapes have no strides, unless `input_strides` is given too.
        """
        strings = self.strings
        encoded: dict[str, npt.NDArray[Any]] = {}
        for name, values in columns.items():
            if isinstance(values, list):
                assert name in TEXT_COLUMNS, f"{name} is not a text column"
                # Other graphs share the table, and `encode` may add to it.
                strings = strings.copy() if strings is self.strings else strings
                encoded[name] = strings.encode(values)
            else:
                encoded[name] = values.astype(getattr(self.nodes, name).dtype, copy=False)
        if "input_shapes" in encoded and "input_strides" not in encoded:
            # The strides of the old shape would be wrong for a new one. Code 0 means contiguous.
            kept = encoded["input_shapes"] == self.nodes.input_shapes
            encoded["input_strides"] = np.where(kept, self.nodes.input_strides, 0)
        return replace(self, nodes=replace(self.nodes, **encoded), strings=strings)

    def launchers(self) -> I64:
        """Return the index of the node that launched each node, -1 for none, int64[n]."""
        launcher = np.full(len(self), -1, dtype=np.int64)
        launches = self.edges.reason == Reason.LAUNCH
        launcher[self.edges.target[launches]] = self.edges.source[launches]
        return launcher

    def topological_order(self) -> I64:
        """Return the node indices in dependency order; ready nodes come by ascending index.

        Raises:
            GraphError: the graph has a cycle; the message names its nodes.
        """
        order, leftover = topological_order(self.edges)
        if len(leftover):
            raise GraphError(
                f"the graph has a cycle: {self._name_cycle(leftover)}", code="graph-cycle"
            )
        return order

    def _name_cycle(self, leftover: I64) -> str:
        # Each leftover node waits for another one, so a walk along these edges must return to a
        # visited node.
        inside = set(leftover.tolist())
        node, path = int(leftover[0]), list[int]()
        while node not in path:
            path.append(node)
            node = next(source for source, _ in self.edges.of(node) if source in inside)
        loop = [*path[path.index(node) :], node]
        return " waits for ".join(f"node {self.nodes.id[index]}" for index in loop)

    def coarsen(self, granularity: CoarseGranularity) -> Graph:
        """Return a graph of one node per scope, phase and micro-batch between communications.

        Args:
            granularity: "layer" or "submodule".

        Raises:
            GraphError: the graph has a cycle, or records no modules.
        """
        # Imported by the call: coarsening builds graphs, so its module imports this one.
        from onerank.ir.coarsen import coarsen

        return coarsen(self, granularity)

    def nodes_frame(self) -> polars.DataFrame:
        """Return one row per node, n x columns; enum columns contain lower-case names."""
        # polars and networkx take 0.1 s each to import, so only the methods that need them do.
        import polars as pl

        columns: dict[str, pl.Series] = {}
        for spec in fields(Nodes):
            values = getattr(self.nodes, spec.name)
            if spec.name == "foreign":
                continue
            if spec.name in TEXT_COLUMNS:
                columns[spec.name] = pl.Series(self.strings.decode(values), dtype=pl.String)
            elif spec.name in _ENUM_COLUMNS:
                names = {int(member): member.name.lower() for member in _ENUM_COLUMNS[spec.name]}
                columns[spec.name] = pl.Series([names[v] for v in values.tolist()], dtype=pl.String)
            else:
                columns[spec.name] = pl.Series(values)
        return pl.DataFrame(columns)

    def edges_frame(self) -> polars.DataFrame:
        """Return one row per edge: `source` id, `target` id, `reason` in lower case."""
        import polars as pl

        edges = self.edges
        names = {int(reason): reason.name.lower() for reason in Reason}
        return pl.DataFrame(
            {
                "source": self.nodes.id[edges.source],
                "target": self.nodes.id[edges.target],
                "reason": pl.Series([names[r] for r in edges.reason.tolist()], dtype=pl.String),
            }
        )

    def to_networkx(self) -> networkx.DiGraph[int]:
        """Return a networkx graph keyed by node id, every column a node attribute.

        Edges point from a node to those that wait for it.
        """
        import networkx as nx

        digraph: nx.DiGraph[int] = nx.DiGraph()
        for row in self.nodes_frame().iter_rows(named=True):
            attributes = {name: value for name, value in row.items() if name != "id"}
            digraph.add_node(row["id"], **attributes)
        for source, target, reason in self.edges_frame().iter_rows():
            digraph.add_edge(source, target, reason=reason)
        return digraph

    def write(self, path: str | Path) -> None:
        """Write a Chakra `.et` file; it appears under its name only when complete.

        Raises:
            ChakraError: a value does not fit Chakra's schema.
            OSError: the file cannot be written.
        """
        # Imported by the call: the writer takes graphs, so its module imports this one.
        from onerank.ir.chakra.writer import write

        write(self, path)


class GraphBuilder:
    """Collects nodes and edges by index. `add` takes columns by name, text as plain strings."""

    def __init__(self) -> None:
        self.strings = StringTable()
        self._rows: list[dict[str, Any]] = []
        self._edges: list[tuple[int, int, int]] = []
        self._seen: set[tuple[int, int]] = set()

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, **columns: Any) -> int:
        """Add a node; return its index. `id` defaults to the index."""
        columns.setdefault("id", len(self._rows))
        self._rows.append(columns)
        return len(self._rows) - 1

    def update(self, index: int, **columns: Any) -> None:
        """Set columns of a node added before."""
        self._rows[index].update(columns)

    def row(self, index: int) -> dict[str, Any]:
        """Return the columns set for a node, as a mutable mapping."""
        return self._rows[index]

    def edge(self, source: int, target: int, reason: Reason) -> None:
        """Let `target` wait for `source`; the first reason given for a pair is kept."""
        assert source != target, f"edge from node {source} to itself"
        if (source, target) not in self._seen:
            self._seen.add((source, target))
            self._edges.append((source, target, int(reason)))

    def build(self, job: Job) -> Graph:
        """Return the graph, its nodes in the order they were added."""
        count = len(self._rows)
        names = {name for row in self._rows for name in row}
        unknown = names - {spec.name for spec in fields(Nodes)}
        assert not unknown, f"no such columns: {sorted(unknown)}"
        columns: dict[str, Any] = {}
        for spec in fields(Nodes):
            default = "" if is_text(spec) else default_of(spec)
            values = [row.get(spec.name, default) for row in self._rows]
            if is_text(spec):
                columns[spec.name] = self.strings.encode(values)
            elif spec.name == "foreign":
                # numpy would make fixed-width strings of a list of bytes and drop trailing zeros.
                objects = np.empty(count, dtype=object)
                objects[:] = values
                columns[spec.name] = objects
            else:
                columns[spec.name] = np.array(values, dtype=dtype_of(spec))
        triples = np.array(self._edges, dtype=np.int64).reshape(-1, 3)
        edges = Edges.from_pairs(
            count, triples[:, 0], triples[:, 1], triples[:, 2].astype(np.uint8)
        )
        return Graph(Nodes.of(count, **columns), edges, self.strings, job)

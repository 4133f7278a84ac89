"""Build a graph row by row, for converters whose input is not columnar."""

from dataclasses import fields
from typing import Any

import numpy as np

from onerank.ir.edges import Edges
from onerank.ir.enums import Reason
from onerank.ir.graph import Graph
from onerank.ir.job.job import Job
from onerank.ir.nodes import Nodes, default_of, dtype_of, is_text
from onerank.ir.string_table import StringTable


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
        """Return the columns given for a node so far."""
        return self._rows[index]

    def edge(self, source: int, target: int, reason: Reason) -> None:
        """Let `target` wait for `source`; the first reason given for a pair stands."""
        assert source != target, f"node {source} would wait for itself"
        if (source, target) not in self._seen:
            self._seen.add((source, target))
            self._edges.append((source, target, int(reason)))

    def build(self, job: Job) -> Graph:
        """Return the graph, its nodes in the order they were added."""
        count = len(self._rows)
        given = {name for row in self._rows for name in row}
        unknown = given - {spec.name for spec in fields(Nodes)}
        assert not unknown, f"no such columns: {sorted(unknown)}"
        columns: dict[str, Any] = {}
        for spec in fields(Nodes):
            default = "" if is_text(spec) else default_of(spec)
            values = [row.get(spec.name, default) for row in self._rows]
            if is_text(spec):
                columns[spec.name] = self.strings.encode(values)
            elif spec.name == "foreign":
                made = np.empty(count, dtype=object)
                made[:] = values
                columns[spec.name] = made
            else:
                columns[spec.name] = np.array(values, dtype=dtype_of(spec))
        triples = np.array(self._edges, dtype=np.int64).reshape(-1, 3)
        edges = Edges.from_pairs(
            count, triples[:, 0], triples[:, 1], triples[:, 2].astype(np.uint8)
        )
        return Graph(Nodes.of(count, **columns), edges, self.strings, job)

"""Views of a graph for other libraries: polars frames and a networkx graph."""

from dataclasses import fields

import networkx as nx
import polars as pl

from onerank.ir.enums import Collective, Evidence, Kind, Phase, Reason
from onerank.ir.graph import Graph
from onerank.ir.nodes import TEXT_COLUMNS, Nodes

_ENUMS = {"kind": Kind, "phase": Phase, "collective": Collective, "evidence": Evidence}


def nodes_frame(graph: Graph) -> pl.DataFrame:
    """Return one row per node, n x columns; enum columns hold lower-case names."""
    columns: dict[str, pl.Series] = {}
    for spec in fields(Nodes):
        values = getattr(graph.nodes, spec.name)
        if spec.name == "foreign":
            continue
        if spec.name in TEXT_COLUMNS:
            columns[spec.name] = pl.Series(graph.strings.decode(values), dtype=pl.String)
        elif spec.name in _ENUMS:
            names = {int(member): member.name.lower() for member in _ENUMS[spec.name]}
            columns[spec.name] = pl.Series([names[v] for v in values.tolist()], dtype=pl.String)
        else:
            columns[spec.name] = pl.Series(values)
    return pl.DataFrame(columns)


def edges_frame(graph: Graph) -> pl.DataFrame:
    """Return one row per edge: source id, target id, reason in lower case."""
    edges = graph.edges
    names = {int(reason): reason.name.lower() for reason in Reason}
    return pl.DataFrame(
        {
            "source": graph.nodes.id[edges.source],
            "target": graph.nodes.id[edges.target],
            "reason": pl.Series([names[r] for r in edges.reason.tolist()], dtype=pl.String),
        }
    )


def to_networkx(graph: Graph) -> "nx.DiGraph[int]":
    """Return a DiGraph keyed by node id, with every column as a node attribute."""
    digraph: nx.DiGraph[int] = nx.DiGraph()
    for row in nodes_frame(graph).iter_rows(named=True):
        digraph.add_node(row["id"], **{name: value for name, value in row.items() if name != "id"})
    for source, target, reason in edges_frame(graph).iter_rows():
        digraph.add_edge(source, target, reason=reason)
    return digraph

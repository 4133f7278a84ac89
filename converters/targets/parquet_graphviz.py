"""Export a graph as parquet tables or as a Graphviz drawing."""

from pathlib import Path

from onerank.ir import Graph, Kind, Reason
from onerank.ir.errors import ExportError
from onerank.ir.output_files import created, write_tables

NODES = "nodes.parquet"
EDGES = "edges.parquet"
LARGEST_DRAWING = 5000
"""Nodes of the largest drawing; Graphviz lays out no larger one in reasonable time."""

_SHAPES = {Kind.HOST_OP: "ellipse", Kind.COLLECTIVE: "hexagon", Kind.SEND: "hexagon",
           Kind.RECV: "hexagon"}  # fmt: skip
_STYLES = {Reason.PROGRAM_ORDER: "dotted", Reason.STREAM_ORDER: "solid", Reason.LAUNCH: "dashed"}


def write_parquet(graph: Graph, directory: Path) -> tuple[Path, Path]:
    """Write `nodes.parquet` (one row per node) and `edges.parquet`; return their paths.

    Neither appears before both are complete. Other files of the directory stay; a directory that
    was created for the tables is removed if they cannot be written.

    Raises:
        OSError: the directory cannot be written.
    """
    nodes, edges = directory / NODES, directory / EDGES
    with created(directory):
        write_tables({nodes: graph.nodes_frame(), edges: graph.edges_frame()})
    return nodes, edges


def to_dot(graph: Graph) -> str:
    """Return the graph in Graphviz's DOT language, with edges styled by their reason.

    Raises:
        ExportError: the graph has more than `LARGEST_DRAWING` nodes.
    """
    if len(graph) > LARGEST_DRAWING:
        raise ExportError(
            f"the graph has {len(graph)} nodes and a drawing at most {LARGEST_DRAWING}\n"
            "  coarsen it: onerank coarsen --granularity submodule",
            code="dot-too-large",
        )
    lines = ["digraph step {", "  rankdir=LR; node [shape=box, fontsize=10];"]
    names = graph.text("name")
    for index, (number, kind) in enumerate(
        zip(graph.nodes.id.tolist(), graph.nodes.kind.tolist(), strict=True)
    ):
        time = int(graph.nodes.duration_ns[index]) / 1e3
        # Backslashes first: escaping the quotes adds backslashes.
        label = f"{names[index][:60]}\n{time:.1f} us".replace("\\", "\\\\").replace('"', '\\"')
        label = label.replace("\n", "\\n")
        shape = _SHAPES.get(Kind(kind), "box")
        lines.append(f'  {number} [label="{label}", shape={shape}];')
    ids = graph.nodes.id
    for source, target, reason in zip(
        ids[graph.edges.source].tolist(),
        ids[graph.edges.target].tolist(),
        graph.edges.reason.tolist(),
        strict=True,
    ):
        style = _STYLES.get(Reason(reason), "bold")
        lines.append(
            f'  {source} -> {target} [style={style}, tooltip="{Reason(reason).name.lower()}"];'
        )
    return "\n".join([*lines, "}", ""])

"""onerank: capture one rank of a training job, re-cost it, hand it to a network simulator."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onerank.ir import Graph

__all__ = ["Graph", "read", "recost"]
__version__ = "0.1.0"


def read(path: str | Path) -> Graph:
    """Read a Chakra `.et` file, of onerank or of another tool.

    Groups that another tool keeps in a file beside its traces are read too, and the work it counted
    for nodes without a time.

    Raises:
        ChakraError: the file is truncated, or not Chakra.
        FormatError: the groups are not what the trace's nodes name.
        GraphError: two nodes share an id, or one waits for a node that is not there.
        OSError: the file cannot be read.
    """
    from onerank.ir.chakra import read as read_chakra
    from onerank.ir.chakra.workload_counts import with_counted_work
    from onerank.ir.job.comm_groups import with_groups

    return with_counted_work(with_groups(read_chakra(path), Path(path)))


def recost(graph: Graph, target: str, *, model: str = "auto", source: str | None = None) -> Graph:
    """Return `graph` with the duration of every compute node predicted for another GPU.

    Args:
        graph: a captured or converted graph.
        target: name of a GPU description, or the path of one.
        model: cost model, "ratio", "roofline", "residual", "learned" or "auto".
        source: GPU the graph was measured on, as `target`; None: as its device record names it.

    Raises:
        TargetError: the target is unknown or its description malformed.
        AnnotateError: the graph cannot be re-costed, or its device is not known.
    """
    from onerank.annotate import recost as annotate_recost

    return annotate_recost(graph, target, model=model, source=source)


def __getattr__(name: str) -> object:
    """Import `Graph` when it is asked for, so that `import onerank` stays light."""
    if name == "Graph":
        from onerank.ir import Graph

        return Graph
    raise AttributeError(f"module 'onerank' has no attribute {name!r}")

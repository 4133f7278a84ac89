"""onerank: capture one rank of a training job, re-cost it, hand it to a network simulator."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from onerank.analysis.predict_ops import OpPrediction
    from onerank.ir import Graph

__all__ = ["Graph", "predict", "read", "recost"]
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


@overload
def predict(
    op: str, target: str, *, databases: Sequence[str | Path] = (), **sizes: Any
) -> OpPrediction: ...


@overload
def predict(
    op: Sequence[Mapping[str, Any]], target: str, *, databases: Sequence[str | Path] = ()
) -> list[OpPrediction]: ...


def predict(
    op: str | Sequence[Mapping[str, Any]],
    target: str,
    *,
    databases: Sequence[str | Path] = (),
    **sizes: Any,
) -> OpPrediction | list[OpPrediction]:
    """Predict operators on a GPU without a trace: `predict("gemm", "H100", m=64, n=64, k=64)`.

    Args:
        op: "gemm", "attention", "norm", "elementwise" or "collective" with its `sizes`; or a list
            of mappings, each with "op" and its sizes.
        target: name of a GPU description, or the path of one.
        databases: kernel databases of the target, in addition to the shipped ones.
        sizes: fields of `onerank.analysis.predict_ops.OpCall`.

    Raises:
        AnnotateError: an operator or a size is unknown or missing.
        TargetError: the target is unknown or its description malformed.
    """
    from onerank.analysis.predict_ops import calls_of, predict_calls

    calls = calls_of([{"op": op, **sizes}] if isinstance(op, str) else op)
    predictions = predict_calls(calls, target, databases=databases)
    return predictions[0] if isinstance(op, str) else predictions


def __getattr__(name: str) -> object:
    """Import `Graph` when it is asked for, so that `import onerank` stays light."""
    if name == "Graph":
        from onerank.ir import Graph

        return Graph
    raise AttributeError(f"module 'onerank' has no attribute {name!r}")

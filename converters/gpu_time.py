"""Simulators take GPU time: a graph without any is refused, with what to do."""

from onerank.ir import Graph, Kind
from onerank.ir.counted_work import is_counted
from onerank.ir.errors import ExportError

REMEDY = "If it was captured on a CPU, annotate it for a GPU first: annotate --target H100 ..."


def require_gpu_work(graph: Graph) -> None:
    """Refuse a graph whose compute is all on the host.

    Raises:
        ExportError: it has host operations and no GPU node, or counts of work in place of times.
    """
    if graph.mask(Kind.HOST_OP).any() and not graph.gpu_compute.any():
        raise ExportError(
            "the graph holds no GPU time: it has host operations and no GPU node. " + REMEDY
        )
    if is_counted(graph):
        raise ExportError(
            "the graph's nodes have counts of work (num_ops, tensor_size) and no times: "
            "annotate it for a GPU first: annotate --target H100 ..."
        )

"""Explain one node's predicted duration: the terms that the models returned, and their sources."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.gpus.registry import load_gpu
from onerank.annotate.models.attention_time import attention_tiles, queries_of_tile
from onerank.annotate.models.coefficients import shipped
from onerank.annotate.models.features import KernelFeatures
from onerank.annotate.models.gpu_distance import distance_from_fitted
from onerank.annotate.models.prediction_terms import Operation, Rule, Term, TermRecord
from onerank.annotate.op_costs.cost_record import AttentionSizes
from onerank.annotate.op_costs.node_costs import OpCosts, op_costs_of
from onerank.annotate.op_costs.op_classes import CLASSES
from onerank.annotate.recost.recost import check_measured, recost, source_gpu
from onerank.ir import Graph
from onerank.ir.chakra.third_party_traces import is_counted
from onerank.ir.errors import AnnotateError

Lines = list[tuple[str, str]]
"""(term, its text), each after the terms that it is made of."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The terms of one node's duration.

    Attributes:
        node: its id.
        name: its name.
        duration_ns: the predicted duration.
        lines: (name, text) of the terms and of other inputs, in the order of the formulas.
        terms: the duration as a tree of terms; None for a node that launches nothing.
    """

    node: int
    name: str
    duration_ns: int
    lines: tuple[tuple[str, str], ...]
    terms: Term | None


def explain(
    graph: Graph,
    target: str | Gpu,
    node: int,
    *,
    model: str = "auto",
    source: str | None = None,
    databases: Sequence[str | Path] = (),
) -> Explanation:
    """Return how `recost` predicts the duration of one node of a captured graph.

    The graph is re-costed with `recost`, which records the terms of the node.

    Args:
        graph: as for `recost`, not re-costed yet.
        target: a GPU description, its name or its path.
        node: id of a compute node.
        model: as for `recost`.
        source: GPU the graph was measured on; None: by the name of its device.
        databases: as for `recost`.

    Raises:
        AnnotateError: no compute node has this id, the graph was re-costed before, the model does
            not use the given databases, or they are of other GPUs.
        DatabaseError: a file is no kernel database.
        OSError: a database cannot be read.
        TargetError: target or source is unknown or its description malformed.
    """
    (explanation,) = explain_nodes(
        graph, target, [node], model=model, source=source, databases=databases
    )
    return explanation


def explain_nodes(
    graph: Graph,
    target: str | Gpu,
    nodes: Sequence[int],
    *,
    model: str = "auto",
    source: str | None = None,
    databases: Sequence[str | Path] = (),
) -> list[Explanation]:
    """Return how `recost` predicts the durations of several nodes; see `explain`."""
    check_measured(graph)
    if is_counted(graph):
        raise AnnotateError(
            "the trace's nodes have counts of work and no times: each takes the launch floor plus "
            "the longer of num_ops at the target's rate and tensor_size at its bandwidth, so there "
            "are no other terms",
            code="explain-counted-work",
        )
    gpu = load_gpu(target) if isinstance(target, str) else target
    costs = op_costs_of(graph)
    rows = [_row_of(graph, costs, node) for node in nodes]
    record = TermRecord(np.array(rows, dtype=np.int64))
    recosted = recost(graph, gpu, model=model, source=source, databases=databases, record=record)
    on_cpu = graph.job.device.runs_operators
    gpus = None if on_cpu else source_gpu(graph, source), gpu
    durations = dict(zip(recosted.nodes.id.tolist(), recosted.nodes.duration_ns, strict=True))
    kernels = KernelFeatures.of(graph, costs)
    explanations: list[Explanation] = []
    for node, row in zip(nodes, rows, strict=True):
        view = graph.node(int(costs.index[row]))
        operator = view.text("op") or "-"
        lines: Lines = [("operator", f"{operator} ({CLASSES[int(costs.op_class[row])].value})")]
        # Re-costing a CPU capture removes operators that launch nothing.
        if node not in durations:
            lines.append(("rule", Rule.DROPPED.label))
            explanations.append(Explanation(node, view.name, 0, tuple(lines), None))
            continue
        lines += _lines(kernels, row, record, gpus)
        explanations.append(
            Explanation(node, view.name, int(durations[node]), tuple(lines), record.roots[row])
        )
    return explanations


def _row_of(graph: Graph, costs: OpCosts, node: int) -> int:
    """Return the index of a node among the compute nodes.

    Raises:
        AnnotateError: it is not a compute node.
    """
    rows = np.flatnonzero(graph.nodes.id[costs.index] == np.uint64(node))
    if not len(rows):
        raise AnnotateError(
            f"no compute node has the id {node}; host operators and communication are not "
            "re-costed\n  `onerank show --text` lists the ids",
            code="explain-unknown-node",
        )
    return int(rows[0])


def _lines(
    kernels: KernelFeatures, row: int, record: TermRecord, gpus: tuple[Gpu | None, Gpu]
) -> Lines:
    """Return the recorded terms of a kernel as text, between its work and its figures."""
    source, target = gpus
    rule, root = record.rules[row], record.roots[row]
    lines: Lines = []
    if source is None:
        lines.append(("measured", "on no GPU: the capture was on a CPU or without a device"))
    lines += [*_work_lines(kernels, row), ("rule", rule.label)]
    is_by_tiles = any(term.name in ("by tiles", "by rows") for term in root.named())
    if is_by_tiles:
        lines += [*_shape_line(kernels, row), *_wave_lines(kernels, row, target)]
    facts = record.facts[row]
    lines += [fact for fact in facts if fact[0] != "80% interval"]
    lines += [(term.name, term_text(term)) for term in root.named()]
    lines.append(("predicted", f"{root.value:,.0f} ns on {target.name}"))
    # After the prediction that the interval is of.
    lines += [fact for fact in facts if fact[0] == "80% interval"]
    if is_by_tiles:
        lines += _coefficient_lines(kernels, row, target)
    if source is not None and source != target:
        lines += _figure_lines(kernels, row, source)
    lines += _figure_lines(kernels, row, target, reference=source)
    return lines


def term_text(term: Term) -> str:
    """Return a term as text: its formula, value, unit and note."""
    value = f"{term.figure} {term.unit}".rstrip()
    text = value if term.operation is Operation.QUANTITY else f"{term.formula} = {value}"
    return f"{text}: {term.note}" if term.note else text


def _work_lines(kernels: KernelFeatures, row: int) -> Lines:
    """Return the known bytes, FLOPs and instructions of a kernel."""
    work: list[str] = []
    for amount, unit in ((kernels.bytes[row], "bytes"), (kernels.flops[row], "FLOPs")):
        if np.isfinite(amount):
            work.append(f"{amount:,.0f} {unit}")
    if kernels.instructions[row]:
        work.append(f"{kernels.instructions[row]:,.0f} instructions")
    return [("work", ", ".join(work))] if work else []


# The columns of `KernelFeatures.attention` before its flags.
_SIZES = len(AttentionSizes._fields)


def _shape_line(kernels: KernelFeatures, row: int) -> Lines:
    call = int(kernels.call[row])
    attention = kernels.attention[call][:_SIZES]
    if attention.all():
        return [("shape", f"b, h, key h, sq, sk, d, dv = {_sizes(attention)}")]
    if kernels.gemm[call].any():
        return [("shape", f"batch, m, n, k = {_sizes(kernels.gemm[call][:4])}")]
    return []


def _sizes(values: Sequence[float] | np.ndarray) -> str:
    return ", ".join(f"{size:.0f}" for size in values)


def _wave_lines(kernels: KernelFeatures, row: int, target: Gpu) -> Lines:
    """Return how tiles divide over another number of SMs, if the SM count is overridden."""
    described = target.as_described
    if described.sm_count == target.sm_count:
        return []
    call = int(kernels.call[row])
    if kernels.attention[call, :_SIZES].all():
        shapes = kernels.attention[[call]]
        tiles = attention_tiles(target, shapes).item()
        head_sizes = shapes[:, 5:7]
        what = f"tiles of {queries_of_tile(head_sizes.max(axis=1)).item():.0f} queries"
    else:
        batch, m, n, *_ = kernels.gemm[call]
        tiles = batch * np.ceil(m / 128) * np.ceil(n / 128)
        what = "tiles, if they are of 128 x 128"
    waves = [f"{tiles / gpu.sm_count:.2f} on {gpu.sm_count} SMs" for gpu in (described, target)]
    peaks = [kernels.rates(gpu).peak[row] / 1e12 / gpu.sm_count for gpu in (described, target)]
    return [
        (
            "waves",
            f"{tiles:.0f} {what}: {waves[0]}, {waves[1]}; a partial wave takes as long as a full "
            f"one; an SM does {peaks[1]:.2f} TFLOP/s at the peak, {peaks[0]:.2f} as described",
        )
    ]


def _coefficient_lines(kernels: KernelFeatures, row: int, target: Gpu) -> Lines:
    """Return the data of the tile model's coefficients, and the target's distance from them."""
    provenance = shipped().provenance
    data = "attention" if kernels.attention[int(kernels.call[row])][:_SIZES].all() else "gemm"
    distance = distance_from_fitted(target.as_described, shipped())
    return [
        ("coefficients", f"fitted {provenance['fitted']}: {provenance[data]}"),
        ("distance", f"{target.name} is {distance:.2f} outside the fitted GPUs"),
    ]


def _figure_lines(
    kernels: KernelFeatures, row: int, gpu: Gpu, reference: Gpu | None = None
) -> Lines:
    """Return the figures of a description that enter the terms, with their sources.

    If `reference` is the same GPU without overrides, return only overridden figures.
    """
    if kernels.over_link[row]:
        return []
    names = ["launch_floor_ns"]
    names += gpu.bandwidth_figures if np.isfinite(kernels.bytes[row]) else ()
    if np.nan_to_num(kernels.flops[row]):
        dtype = kernels.matmul_dtypes(gpu)[int(kernels.dtype[row])]
        names += gpu.rate_figures(dtype) if kernels.matmul[row] else gpu.vector_figures
    if reference is not None and reference != gpu and reference == gpu.as_described:
        names = [*gpu.changed]
    figures = [(name, gpu.figures[name]) for name in names]
    return [
        (
            f"{gpu.board} figure",
            f"{name} = {figure.value:g} ({figure.confidence}): {gpu.sources[figure.source]}",
        )
        for name, figure in figures
    ]

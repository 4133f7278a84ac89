"""How one node's duration was predicted: the arithmetic, term by term."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onerank.annotate.explain.lookup import Prediction, database_lines
from onerank.annotate.explain.terms import (
    Lines,
    figure_lines,
    interval_lines,
    least_lines,
    others_lines,
    residual_lines,
    work_lines,
)
from onerank.annotate.explain.tiles import alone_lines, part_lines, tile_lines
from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.gpus.registry import load_gpu
from onerank.annotate.kernel_db.database_set import library_for
from onerank.annotate.kernel_db.interpolate import Basis
from onerank.annotate.kernel_db.node_durations import best_of
from onerank.annotate.models import learned
from onerank.annotate.models.attention_kernels import family_of, resolve
from onerank.annotate.models.coefficients import shipped
from onerank.annotate.models.cost_model import MODELS
from onerank.annotate.models.error_model import Doubt
from onerank.annotate.models.features import F64, U8, Kernels
from onerank.annotate.models.intervals import Others
from onerank.annotate.models.provenance import BY_TILES, Rule
from onerank.annotate.op_costs.node_costs import Characters, characters
from onerank.annotate.op_costs.op_classes import CLASSES, OpClass
from onerank.annotate.passes.pass_config import AS_USUAL
from onerank.annotate.recost.predict import Step, modelled
from onerank.annotate.recost.recost import check_capture_on_cpu, check_measured, source_gpu
from onerank.annotate.recost.target_overrides import with_others
from onerank.ir import Graph
from onerank.ir.errors import AnnotateError
from onerank.ir.workload_counts import is_counted


@dataclass(frozen=True, slots=True)
class Explanation:
    """The arithmetic behind one node.

    Attributes:
        node: its id.
        name: its name.
        duration_ns: the predicted duration.
        lines: (term, its arithmetic), in the order they are worked out.
    """

    node: int
    name: str
    duration_ns: int
    lines: tuple[tuple[str, str], ...]


def explain(
    graph: Graph,
    target: str | Gpu,
    node: int,
    *,
    model: str = "auto",
    source: str | None = None,
    databases: Sequence[str | Path] = (),
) -> Explanation:
    """Return how the duration of one node of a captured graph is predicted.

    Args:
        graph: as for `recost`, not re-costed yet.
        target: a GPU description, its name or its path.
        node: id of a compute node.
        model: "learned", or "auto", which looks up beside.
        source: GPU the graph was measured on; None: by the name of its device.
        databases: as for `recost`.

    Raises:
        AnnotateError: no compute node has this id, the graph was re-costed before, or databases are
            given that the model does not look up in, or that are of other GPUs.
        DatabaseError: a file is no kernel database.
        OSError: a database cannot be read.
        TargetError: target or source is unknown or its description malformed.
    """
    if model not in ("auto", "learned"):
        raise AnnotateError(
            f'the arithmetic shown is the learned model\'s; of "{model}" there is none to show'
        )
    check_measured(graph)
    there = load_gpu(target) if isinstance(target, str) else target
    if is_counted(graph):
        raise AnnotateError(
            "the trace's nodes have counts of work and no times; each takes the launch floor and "
            "the longer of num_ops at the target's rate and tensor_size at its bandwidth, and "
            "nothing else is known to explain"
        )
    on_cpu = graph.job.device.runs_operators
    if on_cpu:
        check_capture_on_cpu(source)
    here = None if on_cpu else source_gpu(graph, source)
    found = characters(graph)
    row = _row_of(graph, found, node)
    view = graph.node(int(found.index[row]))
    about = ("operator", f"{view.text('op') or '-'} ({CLASSES[int(found.op_class[row])].value})")
    if found.is_class(OpClass.NOTHING, OpClass.COMMUNICATION)[row] and here is None:
        return Explanation(node, view.name, 0, (about, ("rule", Rule.DROPPED.label)))
    duration_ns, lines = _explained(graph, found, row, (here, there), model, databases)
    return Explanation(node, view.name, duration_ns, (about, *lines))


def _row_of(graph: Graph, found: Characters, node: int) -> int:
    """Return where the node with an id is among the compute nodes.

    Raises:
        AnnotateError: it is none of them.
    """
    rows = np.flatnonzero(graph.nodes.id[found.index] == np.uint64(node))
    if not len(rows):
        raise AnnotateError(
            f"no compute node has the id {node}; `onerank show --text` lists them, and host "
            "operators and communication are not re-costed"
        )
    return int(rows[0])


def _explained(  # noqa: PLR0917
    graph: Graph,
    found: Characters,
    row: int,
    gpus: tuple[Gpu | None, Gpu],
    model: str,
    databases: Sequence[str | Path],
) -> tuple[int, Lines]:
    """Return the predicted duration in ns of the node at `row` of `found`, and its arithmetic."""
    here, there = gpus
    every = Kernels.of(graph, found)
    kernels = every.only(slice(row, row + 1))
    moved, rules, others = _modelled(graph, found, row, gpus, model)
    name = graph.node(int(found.index[row])).name
    lines = _terms(kernels, name, gpus, (moved, Rule(int(others.rules[0]))))
    doubt = Doubt.none(1)
    library = library_for(MODELS[model], databases, gpus, graph)
    if library is not None and rules[0] != Rule.KEPT:
        lines.append(("modelled", f"{moved[0]:,.0f} ns on {there.name}"))
        described = there.as_described
        before, by, _ = _modelled(graph, found, row, (here, described), model)
        basis = Basis(library, here, described, learned.predict_alone, shipped())
        told, found_ns, found_by, doubt = _looked_up(graph, found, every, row, (before, by), basis)
        lines += told
        if there != described:
            lines += others_lines(found_ns, found_by, before, moved, there)
        looked_up = found_ns, found_by
        moved, rules, others = with_others(looked_up, before, (moved, rules), others)
    lines.append(("predicted", f"{moved[0]:,.0f} ns on {there.name}"))
    if here != there:
        lines += interval_lines(kernels, (moved, rules, doubt), here, there, others)
    if here is not None and here != there:
        lines += figure_lines(kernels, here)
    lines += figure_lines(kernels, there, beside=here)
    return round(float(moved[0])), lines


def _modelled(
    graph: Graph, found: Characters, row: int, gpus: tuple[Gpu | None, Gpu], model: str
) -> tuple[F64, U8, Others]:
    """Return (duration, rule) of a node by the model, and what figures set make of it."""
    here, there = gpus
    if here is None:
        moved, rules = MODELS[model].alone(
            Kernels.of(graph, found).only(slice(row, row + 1)), there
        )
        return moved, rules, Others.none(rules)
    step = Step.as_captured(graph, found)
    made, others = modelled(step, (here, there), MODELS[model], AS_USUAL)
    one = np.array([row])
    return made.moved_ns[one], made.rules[one], others.at(one)


def _terms(
    kernels: Kernels, name: str, gpus: tuple[Gpu | None, Gpu], made: tuple[F64, Rule]
) -> Lines:
    """Return the arithmetic of a duration that the model made by a rule of its own."""
    here, there = gpus
    moved, rule = made
    if here is None:
        return [
            ("measured", "on no GPU: the trace was captured on a CPU"),
            *work_lines(kernels, there),
            *alone_lines(kernels, there, (float(moved[0]), rule)),
        ]
    measured = f"{kernels.duration_ns[0]:,.0f} ns on {here.name}"
    lines: Lines = [("measured", measured), *work_lines(kernels, here)]
    if here == there:
        return lines
    lines += work_lines(kernels, there)
    if rule is Rule.PARTS:
        lines += part_lines(kernels, here, there)
    else:
        lines += (tile_lines if rule in BY_TILES else residual_lines)(kernels, here, there)
    lines += least_lines(kernels, here, there)
    if family := family_of(name):
        lines.append(_attention_line(kernels, family, here, there))
    return lines


def _attention_line(kernels: Kernels, family: str, here: Gpu, there: Gpu) -> tuple[str, str]:
    """Return what becomes of an attention kernel where the target runs another."""
    kernel = resolve(family, here, there)
    share = learned.attention_share(here, there, shipped())
    backward = bool(kernels.attention[int(kernels.call[0])][8])
    factor = kernel.backward if backward else kernel.forward_with(share)
    told = f"{family} -> {kernel.runs}: above the floor x {factor:.4f} ({kernel.reason})"
    return "kernel", told


def _looked_up(  # noqa: PLR0917
    graph: Graph, found: Characters, every: Kernels, row: int, made: tuple[F64, U8], basis: Basis
) -> tuple[Lines, F64, U8, Doubt]:
    """Return (arithmetic, duration, rule, doubt) after the kernel database was asked."""
    moved, rules = made
    one = np.arange(len(found.index)) == row
    predicted = np.where(one, moved, 0.0), np.where(one, rules, Rule.KEPT).astype(np.uint8)
    best = best_of(graph, found, every, predicted, basis, where=one)
    moved, rules = best.moved_ns[[row]], best.rules[[row]]
    lines = database_lines(
        graph, found, row, Prediction(float(moved[0]), Rule(int(rules[0]))), basis
    )
    return lines, moved, rules, best.doubt.at(np.array([row]))

"""How one node's duration was predicted: the arithmetic, term by term."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from onerank.annotate.explain.terms import (
    Lines,
    figure_lines,
    interval_lines,
    lower_bound_lines,
    override_lines,
    part_lines,
    residual_lines,
    tile_lines,
    unmeasured_lines,
    work_lines,
)
from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.gpus.registry import load_gpu
from onerank.annotate.kernel_db.call_keys import CallKey, keys_of
from onerank.annotate.kernel_db.database import VERSIONS, KernelRow
from onerank.annotate.kernel_db.database_set import Match, library_for
from onerank.annotate.kernel_db.interpolate import SOURCE_SHARE, Basis, Between, between
from onerank.annotate.kernel_db.node_durations import best_of
from onerank.annotate.models import learned
from onerank.annotate.models.attention_kernels import family_of, resolve
from onerank.annotate.models.coefficients import shipped
from onerank.annotate.models.cost_model import MODELS
from onerank.annotate.models.error_model import Uncertainty
from onerank.annotate.models.features import F64, U8, KernelFeatures
from onerank.annotate.models.intervals import OverrideEffect
from onerank.annotate.models.provenance import BY_TILES, Rule
from onerank.annotate.op_costs.node_costs import OpCosts, op_costs_of
from onerank.annotate.op_costs.op_classes import CLASSES, OpClass
from onerank.annotate.passes.pass_config import NO_PASSES
from onerank.annotate.recost.predict import Step, apply_overrides, predict_compute
from onerank.annotate.recost.recost import check_capture_on_cpu, check_measured, source_gpu
from onerank.ir import Graph
from onerank.ir.chakra.workload_counts import is_counted
from onerank.ir.errors import AnnotateError

_NARROWER = "the model's interval is the narrower one"


class Prediction(NamedTuple):
    """A node's duration in ns, and the rule that gave it."""

    time_ns: float
    rule: Rule


def database_lines(graph: Graph, found: OpCosts, row: int, made: Prediction, basis: Basis) -> Lines:
    """Describe the database's result for the node at `row` of `found`, or its absence."""
    library, index = basis.library, found.index[row : row + 1]
    keyed = keys_of(graph, index, library.operators)
    if not len(keyed.keys):
        return [("database", f"{basis.target.name} has no row of this operator")]
    key = keyed.keys[0]
    lines: Lines = [("call", _call(key))]
    view = graph.node(int(index[0]))
    match = library.match(key, view.name, _ran(graph, found, row))
    if match is not None:
        return [*lines, *_match(match, view.duration_ns, made, basis)]
    (interpolated,) = between(library, [key], basis.target, basis.from_description)
    if interpolated is None:
        return [*lines, ("database", "no row of this call, and it does not lie between rows")]
    lines += _neighbours(interpolated)
    if made.rule is not Rule.BETWEEN:
        return [*lines, ("database", f"not used: {_NARROWER}")]
    return [*lines, ("part", _part(interpolated.time_ns, made.time_ns))]


def _ran(graph: Graph, found: OpCosts, row: int) -> set[str]:
    """Return the names of all kernels that the calls like a node's launched."""
    nodes, index = graph.nodes, found.index
    like = found.call == found.call[row]
    return set(graph.strings.decode(np.unique(nodes.name[index[like]])))


def _match(match: Match, measured_ns: int, made: Prediction, basis: Basis) -> Lines:
    lines: Lines = []
    for row in match.rows:
        lines += [("row", _row(row)), ("measured", _conditions(row))]
    by_name = not math.isnan(match.kernel_ns)
    there = match.kernel_ns if by_name else match.rest_ns
    what = "the kernel of this name" if by_name else "the call's kernels that the trace has none of"
    if len(match.rows) > 1:
        what += f", geometric mean of {len(match.rows)} rows"
    lines.append(("looked up", f"{there:,.0f} ns: {what}"))
    if made.rule not in (Rule.LOOKED_UP, Rule.LOOKED_UP_ON_BOTH):
        why = _NARROWER if not math.isnan(there) else "the row has no time for this kernel"
        return [*lines, ("database", f"not used: {why}")]
    kept = 1.0
    if made.rule is Rule.LOOKED_UP_ON_BOTH and basis.source is not None:
        here = match.source_ns
        kept = math.exp(SOURCE_SHARE * math.log(measured_ns / here))
        lines += [
            *(("source row", _row(one)) for one in match.source),
            (
                "deviation",
                f"{measured_ns:,} ns measured on {basis.source.name}, {here:,.0f} ns in its row: "
                f"x ({measured_ns:,} / {here:,.0f})^{SOURCE_SHARE} = x {kept:.3f}",
            ),
        ]
    return lines if by_name else [*lines, ("part", _part(there, made.time_ns / kept))]


def _neighbours(call: Between) -> Lines:
    off = math.log(call.time_ns / call.modelled_ns)
    lines: Lines = [
        (
            "near",
            f"{_call(neighbour.key)}: {neighbour.time_ns:,.0f} ns, ln(measured / modelled) = "
            f"{neighbour.off:+.3f}, "
            f"weight {neighbour.weight:.2f}",
        )
        for neighbour in call.neighbours
    ]
    return [
        *lines,
        (
            "between",
            f"{call.modelled_ns:,.0f} ns by the model alone x e^{off:+.3f} = {call.time_ns:,.0f} "
            f"ns; four of five rows left out are within e^+-{call.bound:.3f}",
        ),
    ]


def _part(whole: float, own: float) -> str:
    return f"{own / whole:.1%} of the operator's {whole:,.0f} ns"


def _call(key: CallKey) -> str:
    shapes = " ".join(str(list(shape)).replace(" ", "") for shape in key.shapes[:4])
    more = f" and {len(key.shapes) - 4} more" if len(key.shapes) > 4 else ""
    types = ", ".join(dict.fromkeys(key.dtypes))
    return f"{key.operator} {shapes}{more} {types}"


def _row(row: KernelRow) -> str:
    kernels = row.kernels[0] if row.kernels else ""
    if len(row.kernels) > 1:
        kernels += f" and {len(row.kernels) - 1} more"
    return (
        f"{sum(row.kernel_ns):,} ns ({row.median_ns:,} replayed, {row.p10_ns:,} to {row.p90_ns:,} "
        f"in {row.samples} samples, {row.l2} cache, layout {row.layout}) by "
        f"{kernels}"
    )


def _conditions(row: KernelRow) -> str:
    read = [
        f"{value:,.0f} {unit}"
        for value, unit in ((row.sm_clock_mhz, "MHz"), (row.power_w, "W"), (row.temperature_c, "C"))
        if value is not None
    ]
    versions = [f"{name} {getattr(row, name)}" for name in VERSIONS if getattr(row, name)]
    return ", ".join([f"{row.gpu} {row.date}", *read, *versions])


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
        model: "learned", or "auto", which also looks up measurements.
        source: GPU the graph was measured on; None: by the name of its device.
        databases: as for `recost`.

    Raises:
        AnnotateError: no compute node has this id, the graph was re-costed before, the model does
            not use the given databases, or they are of other GPUs.
        DatabaseError: a file is no kernel database.
        OSError: a database cannot be read.
        TargetError: target or source is unknown or its description malformed.
    """
    if model not in ("auto", "learned"):
        raise AnnotateError(
            f'the arithmetic shown is the learned model\'s; of "{model}" there is none to show',
            code="explain-model-unsupported",
        )
    check_measured(graph)
    there = load_gpu(target) if isinstance(target, str) else target
    if is_counted(graph):
        raise AnnotateError(
            "the trace's nodes have counts of work and no times; each takes the launch floor and "
            "the longer of num_ops at the target's rate and tensor_size at its bandwidth, and "
            "nothing else is known to explain",
            code="explain-counted-work",
        )
    on_cpu = graph.job.device.runs_operators
    if on_cpu:
        check_capture_on_cpu(source)
    here = None if on_cpu else source_gpu(graph, source)
    found = op_costs_of(graph)
    row = _row_of(graph, found, node)
    view = graph.node(int(found.index[row]))
    about = ("operator", f"{view.text('op') or '-'} ({CLASSES[int(found.op_class[row])].value})")
    if found.is_class(OpClass.NOTHING, OpClass.COMMUNICATION)[row] and here is None:
        return Explanation(node, view.name, 0, (about, ("rule", Rule.DROPPED.label)))
    duration_ns, lines = _explained(graph, found, row, (here, there), model, databases)
    return Explanation(node, view.name, duration_ns, (about, *lines))


def _row_of(graph: Graph, found: OpCosts, node: int) -> int:
    """Return the index of a node among the compute nodes.

    Raises:
        AnnotateError: it is not a compute node.
    """
    rows = np.flatnonzero(graph.nodes.id[found.index] == np.uint64(node))
    if not len(rows):
        raise AnnotateError(
            f"no compute node has the id {node}; `onerank show --text` lists them, and host "
            "operators and communication are not re-costed",
            code="explain-unknown-node",
        )
    return int(rows[0])


def _explained(  # noqa: PLR0917
    graph: Graph,
    found: OpCosts,
    row: int,
    gpus: tuple[Gpu | None, Gpu],
    model: str,
    databases: Sequence[str | Path],
) -> tuple[int, Lines]:
    """Return the predicted duration in ns of the node at `row` of `found`, and its arithmetic."""
    here, there = gpus
    every = KernelFeatures.of(graph, found)
    kernels = every.select(slice(row, row + 1))
    moved, rules, overrides = _modelled(graph, found, row, gpus, model)
    name = graph.node(int(found.index[row])).name
    lines = _terms(kernels, name, gpus, (moved, Rule(int(overrides.rules[0]))))
    doubt = Uncertainty.none(1)
    library = library_for(MODELS[model], databases, gpus, graph)
    if library is not None and rules[0] != Rule.KEPT:
        lines.append(("modelled", f"{moved[0]:,.0f} ns on {there.name}"))
        described = there.as_described
        before, by, _ = _modelled(graph, found, row, (here, described), model)
        basis = Basis(library, here, described, learned.predict_from_description, shipped())
        told, found_ns, found_by, doubt = _looked_up(graph, found, every, row, (before, by), basis)
        lines += told
        if there != described:
            lines += override_lines(found_ns, found_by, before, moved, there)
        looked_up = found_ns, found_by
        moved, rules, overrides = apply_overrides(looked_up, before, (moved, rules), overrides)
    lines.append(("predicted", f"{moved[0]:,.0f} ns on {there.name}"))
    if here != there:
        lines += interval_lines(kernels, (moved, rules, doubt), here, there, overrides)
    if here is not None and here != there:
        lines += figure_lines(kernels, here)
    lines += figure_lines(kernels, there, reference=here)
    return round(float(moved[0])), lines


def _modelled(
    graph: Graph, found: OpCosts, row: int, gpus: tuple[Gpu | None, Gpu], model: str
) -> tuple[F64, U8, OverrideEffect]:
    """Return (duration, rule) of a node by the model, and with overridden figures."""
    here, there = gpus
    if here is None:
        moved, rules = MODELS[model].from_description(
            KernelFeatures.of(graph, found).select(slice(row, row + 1)), there
        )
        return moved, rules, OverrideEffect.none(rules)
    step = Step.as_captured(graph, found)
    made, overrides = predict_compute(step, (here, there), MODELS[model], NO_PASSES)
    one = np.array([row])
    return made.predicted_ns[one], made.rules[one], overrides.at(one)


def _terms(
    kernels: KernelFeatures, name: str, gpus: tuple[Gpu | None, Gpu], made: tuple[F64, Rule]
) -> Lines:
    """Return the arithmetic of a duration that the model computed by a special rule."""
    here, there = gpus
    moved, rule = made
    if here is None:
        return [
            ("measured", "on no GPU: the trace was captured on a CPU"),
            *work_lines(kernels, there),
            *unmeasured_lines(kernels, there, (float(moved[0]), rule)),
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
    lines += lower_bound_lines(kernels, here, there)
    if family := family_of(name):
        lines.append(_attention_line(kernels, family, here, there))
    return lines


def _attention_line(kernels: KernelFeatures, family: str, here: Gpu, there: Gpu) -> tuple[str, str]:
    """Return what becomes of an attention kernel where the target runs another."""
    kernel = resolve(family, here, there)
    share = learned.attention_share(here, there, shipped())
    backward = bool(kernels.attention[int(kernels.call[0])][8])
    factor = kernel.backward if backward else kernel.forward_with(share)
    text = f"{family} -> {kernel.runs}: above the floor x {factor:.4f} ({kernel.reason})"
    return "kernel", text


def _looked_up(  # noqa: PLR0917
    graph: Graph,
    found: OpCosts,
    every: KernelFeatures,
    row: int,
    made: tuple[F64, U8],
    basis: Basis,
) -> tuple[Lines, F64, U8, Uncertainty]:
    """Return (arithmetic, duration, rule, uncertainty) after a look-up in the kernel database."""
    moved, rules = made
    one = np.arange(len(found.index)) == row
    predicted = np.where(one, moved, 0.0), np.where(one, rules, Rule.KEPT).astype(np.uint8)
    best = best_of(graph, found, every, predicted, basis, where=one)
    moved, rules = best.moved_ns[[row]], best.rules[[row]]
    lines = database_lines(
        graph, found, row, Prediction(float(moved[0]), Rule(int(rules[0]))), basis
    )
    return lines, moved, rules, best.doubt.at(np.array([row]))

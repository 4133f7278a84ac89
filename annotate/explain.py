"""How one node's duration was predicted: the arithmetic, term by term."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onerank.annotate.counted import is_counted
from onerank.annotate.gpu import Gpu, load_gpu
from onerank.annotate.lookup.explain_rows import Prediction, database_lines
from onerank.annotate.lookup.nodes import Basis, best_of
from onerank.annotate.models import learned, residual
from onerank.annotate.models.attention_kernels import family_of, resolve
from onerank.annotate.models.calibration import calibrated_beside
from onerank.annotate.models.coefficients import shipped
from onerank.annotate.models.intervals import (
    HALF_WIDTH,
    KINDS,
    Doubt,
    Sorts,
    kinds_of,
    node_intervals,
    widening,
)
from onerank.annotate.models.kernels import BY_DATABASE, Kernels, Rule
from onerank.annotate.models.likeness import outside, same_die, trust_in
from onerank.annotate.models.model import MODELS
from onerank.annotate.retarget import check_measured, library_for, source_gpu
from onerank.annotate.work.characters import characters
from onerank.annotate.work.classes import CLASSES
from onerank.ir import Graph
from onerank.ir.errors import AnnotateError

_MEASURED_BY = {
    "looked_up": "of captured steps, looked up in rows of the same versions",
    "looked_up_loosely": "of captured steps, up to 3 us or dependent on data, looked up in rows of "
    "the same versions",
    "looked_up_otherwise": "measured in two campaigns on the same GPU",
}


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
    """Return how the duration of one node of a measured graph is predicted.

    Args:
        graph: as for `recost`, not re-costed yet.
        target: a GPU description, its name or its path.
        node: id of a compute node.
        model: "learned", or "auto", which looks up beside.
        source: GPU the graph was measured on; None: by the name of its device.
        databases: as for `recost`.

    Raises:
        AnnotateError: no compute node has this id, the graph was captured on a CPU or re-costed
            before, or databases are given that the model does not look up in, or that are of other
            GPUs.
        DatabaseError: a file is no kernel database.
        OSError: a database cannot be read.
        TargetError: target or source is unknown or its description malformed.
    """
    if graph.job.device.runs_operators:
        raise AnnotateError(
            "the trace was captured on a CPU: no node was measured on a GPU, so there is no "
            "arithmetic from one GPU to another to show; `annotate` without --explain tells by "
            "which rules its operators are costed"
        )
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
    here = source_gpu(graph, source)
    found = characters(graph)
    rows = np.flatnonzero(graph.nodes.id[found.index] == np.uint64(node))
    if not len(rows):
        raise AnnotateError(
            f"no compute node has the id {node}; `onerank show --text` lists them, and host "
            "operators and communication are not re-costed"
        )
    row = int(rows[0])
    library = library_for(MODELS[model], databases, (here, there), graph)
    view = graph.node(int(found.index[row]))
    every = Kernels.of(graph, found)
    kernels = every.only(row)
    moved, rules = learned.predict(kernels, here, there)
    if here == there:
        moved, rules = kernels.duration_ns, np.array([Rule.KEPT], dtype=np.uint8)
    lines = [
        ("operator", f"{view.text('op') or '-'} ({CLASSES[int(found.op_class[row])].value})"),
        ("measured", f"{kernels.duration_ns[0]:,.0f} ns on {here.name}"),
        *_work(kernels, here),
        *_work(kernels, there),
    ]
    rule = Rule(int(rules[0]))
    if rule in (Rule.GEMM_TILES, Rule.ATTENTION_TILES, Rule.OUTSIDE):
        lines += _tiles(kernels, here, there)
    elif here != there:
        lines.append(("rule", f"residual model: {rule.label}"))
    if family := family_of(view.name):
        kernel = resolve(family, here, there)
        share = learned.attention_share(here, there, shipped())
        backward = bool(kernels.attention[int(kernels.call[0])][8])
        factor = kernel.backward if backward else kernel.forward_with(share)
        moved = moved + np.maximum(moved - there.launch_floor_ns, 0) * (factor - 1)
        lines.append(("kernel", f"{family} -> {kernel.runs}: x {factor:.2f} ({kernel.reason})"))
    doubt = Doubt.none(1)
    if library is not None and rule is not Rule.KEPT:
        lines.append(("modelled", f"{moved[0]:,.0f} ns on {there.name}"))
        basis = Basis(library, here, there, learned.predict_alone, shipped())
        one = np.arange(len(found.index)) == row
        predicted = np.where(one, moved, 0.0), np.where(one, rules, Rule.KEPT).astype(np.uint8)
        best = best_of(graph, found, every, predicted, basis, where=one)
        moved, rules = best.moved_ns[rows[:1]], best.rules[rows[:1]]
        doubt = best.doubt.at(rows[:1])
        made = Prediction(float(moved[0]), Rule(int(rules[0])))
        lines += database_lines(graph, found, row, made, basis)
    lines.append(("predicted", f"{moved[0]:,.0f} ns on {there.name}"))
    if here != there:
        lines += _interval(kernels, (moved, rules, doubt), here, there)
    return Explanation(node, view.name, round(float(moved[0])), tuple(lines))


def _work(kernels: Kernels, gpu: Gpu) -> list[tuple[str, str]]:
    rate, moved, flops = kernels.rates(gpu).sustained[0], kernels.bytes[0], kernels.flops[0]
    bandwidth = gpu.bandwidth_bytes_per_s
    lines = [("floor", f"{gpu.launch_floor_ns:,} ns on {gpu.name}")]
    if np.isfinite(moved):
        took = moved / bandwidth * 1e9
        lines.append(
            ("memory", f"{moved:,.0f} bytes / {bandwidth / 1e9:,.0f} GB/s = {took:,.0f} ns")
        )
    if np.isfinite(flops) and flops and np.isfinite(rate):
        unit = "tensor" if kernels.matmul[0] else "vector"
        took = flops / rate * 1e9
        lines.append((unit, f"{flops:,.0f} FLOPs / {rate / 1e12:,.1f} TFLOP/s = {took:,.0f} ns"))
    return lines


def _tiles(kernels: Kernels, here: Gpu, there: Gpu) -> list[tuple[str, str]]:
    c = shipped()
    measured = calibrated_beside(here, there, c.gemm)
    (before,), (attention,) = learned.by_tiles(kernels, here, c, measured)
    (after,), _ = learned.by_tiles(kernels, there, c)
    whole, own = kernels.operator_ns[0], kernels.duration_ns[0]
    call = int(kernels.call[0])
    sizes = kernels.attention[call][:7] if attention else kernels.gemm[call][:4]
    names = "b, h, key h, sq, sk, d, dv" if attention else "batch, m, n, k"
    bound = residual.predict(kernels, here, there)[0][0]
    weight = trust_in(there, c)
    sort = learned.sorts_of(kernels, np.ones(1, dtype=bool))
    deviation = float(np.log(whole / before))
    carried = float(learned.carried(np.array([deviation]), sort, here, there, c)[0])
    return [
        ("shape", f"{names} = {', '.join(f'{size:.0f}' for size in sizes)}"),
        ("operator time", f"{whole:,.0f} ns in all its kernels; this one {own / whole:.1%}"),
        ("by tiles", f"{before:,.0f} ns on {here.name}, {after:,.0f} ns on {there.name}"),
        ("deviation", f"ln(measured / by tiles) = {deviation:+.3f}; carried over {carried:+.3f}"),
        ("by bound", f"{bound:,.0f} ns by the residual model"),
        (
            "weight",
            f"{weight:.2f} of the tiles, {1 - weight:.2f} of the bound (same die: "
            f"{'yes' if same_die(here, there) else 'no'}; {there.name} is "
            f"{outside(there, c):.2f} outside the GPUs fitted to)",
        ),
        (
            "product",
            f"{own:,.0f} x ({after:,.0f} / {whole:,.0f} x e^{carried:+.3f})^{weight:.2f} x "
            f"({bound:,.0f} / {own:,.0f})^{1 - weight:.2f}",
        ),
    ]


def _interval(
    kernels: Kernels,
    made: tuple[learned.F64, learned.U8, Doubt],
    here: Gpu,
    there: Gpu,
) -> list[tuple[str, str]]:
    moved, rules, doubt = made
    c = shipped()
    kinds = kinds_of(kernels, (moved, rules), here, there, doubt)
    low, high = node_intervals(moved, Sorts.of(kinds), there, c, doubt)
    kind = KINDS[int(kinds[0])]
    if kind == "kept":
        return []
    error, ends = c.errors[kind], f"{low[0]:,.0f} to {high[0]:,.0f} ns: "
    if rules[0] in BY_DATABASE:
        own = HALF_WIDTH * doubt.own[0]
        return [
            (
                "80% interval",
                f"{ends}x e^+-({error.high:.3f}^2 + {own:.3f}^2)^0.5, of {error.count:,} calls "
                f"{_MEASURED_BY[kind]}, and of this one",
            )
        ]
    wide = widening(there, c, kind)
    return [
        (
            "80% interval",
            f"{ends}x e^({wide:.2f} x {error.low:+.3f}) to "
            f"x e^({wide:.2f} x {error.high:+.3f}), the errors of {kind} over {error.count:,} "
            "predictions for GPUs that no fit had seen",
        )
    ]

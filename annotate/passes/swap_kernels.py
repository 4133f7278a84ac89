"""Predicted times with other attention kernels or products in other dtypes."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models import datasheet
from onerank.annotate.models.attention_kernels import AS_IT_RAN, family_of, resolve, resolve_alone
from onerank.annotate.models.coefficients import shipped
from onerank.annotate.models.cost_model import Alone, CostModel
from onerank.annotate.models.features import F64, U8, KernelFeatures, Mask
from onerank.annotate.models.learned import attention_share
from onerank.annotate.models.lower_bounds import no_less
from onerank.annotate.models.provenance import Rule
from onerank.annotate.op_costs.node_costs import OpCosts
from onerank.annotate.passes.change_dtype import retyped
from onerank.annotate.passes.pass_config import PassOptions
from onerank.ir import Graph
from onerank.ir.arrays import membership_mask
from onerank.ir.errors import AnnotateError


class Altered(NamedTuple):
    """The prediction of the compute nodes.

    Attributes:
        found: work of each node.
        kernels: the same as features of cost models, with measured durations.
        moved_ns: predicted durations, float64[n].
        rules: the `Rule` of each, uint8[n].
        changed: whether it differs from the captured kernel or dtype, bool[n].
        notes: one for each kind of change.
    """

    found: OpCosts
    kernels: KernelFeatures
    moved_ns: F64
    rules: U8
    changed: Mask
    notes: tuple[str, ...]

    @property
    def predicted(self) -> tuple[F64, U8]:
        """The predicted durations and their rules."""
        return self.moved_ns, self.rules


def alter(
    graph: Graph,
    predicted: Altered,
    gpus: tuple[Gpu, Gpu],
    passes: PassOptions,
    *,
    model: CostModel,
) -> Altered:
    """Return the predictions with the target's attention kernel and GEMMs in another dtype.

    Args:
        graph: as captured.
        predicted: for kernels and dtypes as captured.
        gpus: source and target.
        passes: the requested changes.
        model: the cost model.

    Raises:
        AnnotateError: a requested change is impossible on the target, or nothing can change.
    """
    found, kernels, moved, rules, changed, notes = predicted
    if model.resolves_kernels:
        moved, changed, notes = _attention(graph, found, moved, gpus, passes.attention)
        here = membership_mask(rules, [Rule.SAME_GPU, Rule.MEASURED_WITH_OTHERS])
        rules = np.where(changed & here, np.uint8(Rule.ATTENTION_TILES), rules)
    elif passes.attention not in ("usual", "eager"):
        check_resolves(model, passes.attention)
    if passes.dtype is not None:
        found, retypes, note = retyped(graph, found, passes.dtype, gpus[1])
        captured, kernels = kernels, KernelFeatures.of(graph, found)
        moved = np.where(retypes, moved * by_roofline(captured, kernels, gpus[1]), moved)
        rules = np.where(retypes, np.uint8(Rule.RETYPED), rules)
        changed, notes = changed | retypes, (*notes, note)
    return Altered(found, kernels, moved, rules.astype(np.uint8), changed, notes)


def reshape(
    to: tuple[OpCosts, KernelFeatures], captured: Altered, reshaped: Mask, target: Gpu, alone: Alone
) -> Altered:
    """Return the predictions for other shapes, see `at_other_size`.

    Args:
        to: work of the nodes with the other shapes, and the same as features of cost models.
        captured: for the shapes as captured.
        reshaped: compute nodes with other shapes, bool[n].
        target: GPU whose description the model uses for both.
        alone: the model of unmeasured kernels.
    """
    found, after = to
    moved = at_other_size(captured.moved_ns, captured.kernels, after, target, alone)
    rules = captured.rules
    rules = np.where(reshaped & (rules == Rule.SAME_GPU), np.uint8(Rule.RESIZED), rules)
    return captured._replace(
        found=found,
        kernels=after,
        moved_ns=np.where(reshaped, moved, captured.moved_ns),
        rules=rules.astype(np.uint8),
    )


SHORTEST_NS = 1000.0
"""A kernel that does next to nothing, without its launch."""


def at_other_size(
    measured_ns: F64, before: KernelFeatures, after: KernelFeatures, target: Gpu, alone: Alone
) -> F64:
    """Return the durations of kernels at another size, from one size on the same GPU.

    GEMMs and attention: multiplied by the ratio of `alone`'s predictions. Everything else by its
    bytes (see `_streamed`). No kernel is faster than the lower bound (see `least`).
    """
    times = [alone(kernels, target)[0] for kernels in (before, after)]
    product = measured_ns * np.divide(times[1], times[0])
    streamed = _streamed(measured_ns, before, after, target)
    made = np.where(before.matmul_class, product, streamed)
    return no_less(made, replace(before, duration_ns=measured_ns), target, after, target)


def _streamed(measured_ns: F64, before: KernelFeatures, after: KernelFeatures, target: Gpu) -> F64:
    """Return the durations of memory-bound kernels with other bytes.

    The part above `SHORTEST_NS` grows in proportion to the bytes. For a short kernel that part is
    latency and noise, so it grows by the time of the additional bytes at the achievable bandwidth
    instead. In between, both are averaged, weighted by the part above. For norms, activations and
    the like of A100 and H100 at 2 to 8 times the tokens and back, the error is 9 to 12%; proportion
    alone has the same, the ratio of floor and bytes 16 to 26%. For pairs of calls in the H200's
    database whose smaller one takes below 1.5 us, the mean error over 100 times the bytes is 1.3
    times, of proportion alone 28 times.
    """
    floor = np.minimum(measured_ns, SHORTEST_NS)
    above = measured_ns - floor
    ratio = np.divide(
        after.bytes, before.bytes, where=before.bytes > 0, out=np.ones(len(measured_ns))
    )
    grown = floor + above * np.nan_to_num(ratio, nan=1.0)
    more = np.nan_to_num((after.bytes - before.bytes) / target.bandwidth_bytes_per_s * 1e9)
    gained = np.maximum(floor, measured_ns + more)
    part = np.divide(above, measured_ns, where=measured_ns > 0, out=np.zeros(len(measured_ns)))
    return grown**part * gained ** (1 - part)


def _attention(
    graph: Graph, found: OpCosts, moved_ns: F64, gpus: tuple[Gpu, Gpu], asked: str
) -> tuple[F64, Mask, tuple[str, ...]]:
    """Return times with the target's attention kernels, which nodes changed, and notes.

    A note names a kernel that becomes another one, or that was requested.
    """
    source, target = gpus
    codes, place = np.unique(graph.nodes.name[found.index], return_inverse=True)
    families = [family_of(graph.strings[int(code)]) for code in codes]
    resolutions = {n: resolve(n, source, target, asked) for n in sorted({*families} - {""})}
    each = [resolutions.get(name, AS_IT_RAN) for name in families]
    share = attention_share(source, target, shipped())
    backward = np.array([w.attention[8] if w.attention else 0 for w in found.works], dtype=bool)
    factor = np.where(
        backward[found.call],
        np.array([one.backward for one in each])[place],
        np.array([one.forward_with(share) for one in each])[place],
    )
    above = np.maximum(moved_ns - target.launch_floor_ns, 0)
    made = moved_ns + above * (factor - 1)
    occurs = np.bincount(place, minlength=len(codes))
    counts = {n: sum(int(c) for c, f in zip(occurs, families, strict=True) if f == n)
              for n in resolutions}  # fmt: skip
    notes = [
        f"Attention: {counts[name]} kernels {name} on {source.name} -> {one.runs} on "
        f"{target.name}, forward x{one.forward:.2f}, backward x{one.backward:.2f} ({one.reason})."
        for name, one in resolutions.items()
        if asked not in ("usual", "eager") or one.runs != name
    ]
    if asked not in ("usual", "eager") and not resolutions:
        notes.append(f"Attention: no kernel is one known here, so none became {asked}.")
    return made, made != moved_ns, tuple(notes)


def attention_alone(
    kernels: KernelFeatures, predicted: tuple[F64, U8], target: Gpu, model: CostModel, asked: str
) -> tuple[F64, tuple[str, ...]]:
    """Return times with the requested kernel for unmeasured attention, and notes.

    Args:
        kernels: of a CPU capture.
        predicted: durations in ns and rules, of the kernel that the target usually runs.
        target: GPU they are predicted for.
        model: the cost model.
        asked: one of `attention_kernels.CHOICES`.

    Raises:
        AnnotateError: it does not run there, or the model does not distinguish kernels.
    """
    moved, rules = predicted
    usual = asked in ("usual", "eager")
    if not usual:
        check_resolves(model, asked)
    kernel = resolve_alone(target, asked)
    own = kernel.forward == kernel.backward == 1
    if usual and (own or not model.resolves_kernels):
        return moved, ()
    fused = membership_mask(rules, (Rule.ATTENTION_TILES, Rule.OUTSIDE))
    fused &= (kernels.attention[:, 0] > 0)[kernels.call]
    if usual and not fused.any():
        return moved, ()
    backward = (kernels.attention[:, 8] > 0)[kernels.call]
    factor = np.where(backward, kernel.backward, kernel.forward)
    above = np.maximum(moved - target.launch_floor_ns, 0)
    note = (
        f"Attention: {int(fused.sum())} calls by {kernel.runs} on {target.name}, forward "
        f"x{kernel.forward:.2f}, backward x{kernel.backward:.2f} ({kernel.reason})."
    )
    return np.where(fused, moved + above * (factor - 1), moved), (note,)


def check_resolves(model: CostModel, asked: str) -> None:
    """Refuse to ask a model for an attention kernel that knows none.

    Raises:
        AnnotateError: so it is.
    """
    if not model.resolves_kernels:
        raise AnnotateError(
            f"only the learned model tells kernels apart; for attention={asked} leave `--model` "
            "out",
            code="kernel-needs-learned-model",
        )


def by_roofline(before: KernelFeatures, after: KernelFeatures, target: Gpu) -> F64:
    """Return the factor that another data type makes, of floor and roofline of both on the target.

    On 28,000 shapes of B200, H100, H200 and L40S over 10 us measured in both types, fp8 is 28 to
    36% off so; by the tiles of both 28 to 38%, by half the time 37 to 50%
    (`benchmarks/accuracy.py`).
    """
    return datasheet.predict(after, target)[0] / datasheet.predict(before, target)[0]

"""Re-cost known times for a GPU with overridden figures."""

import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.features import F64, U8
from onerank.annotate.models.intervals import Others
from onerank.annotate.models.provenance import BY_DATABASE, Rule
from onerank.ir.arrays import among

_ALIKE = 1e-9
_RATIO = "what the model says with the change over without it"


def ratio(after: F64, before: F64) -> F64:
    """Return after / before; 1 where both are the same but for rounding, or before is nothing."""
    made = np.divide(after, before, out=np.ones(len(after)), where=before > 0)
    return np.where(np.abs(made - 1) < _ALIKE, 1.0, made)


def with_others(
    told: tuple[F64, U8], before_ns: F64, after: tuple[F64, U8], others: Others | None = None
) -> tuple[F64, U8, Others]:
    """Return times and rules for a target with figures that are set, where a database told of it.

    A time that was looked up is taken times what the model says with them over what it says
    without; all others are the model's.

    Args:
        told: times and rules for the target as described, n of each.
        before_ns: what the model says of that, float64[n].
        after: times and rules of the model with the figures set.
        others: what these make of what was measured; None where nobody measured.
    """
    others = others or Others.none(after[1])
    looked_up = among(told[1], BY_DATABASE)
    factor = ratio(after[0], before_ns)
    rules = np.where(factor == 1, told[1], np.uint8(Rule.LOOKED_UP_WITH_OTHERS))
    return (
        np.where(looked_up, told[0] * factor, after[0]),
        np.where(looked_up, rules, after[1]).astype(np.uint8),
        others._replace(
            factor=np.where(looked_up, factor, others.factor), known=others.known | looked_up
        ),
    )


def others_note(target: Gpu, rules: U8) -> tuple[str, ...]:
    """Return a sentence on what figures that are set changed, if some are."""
    described = target.as_described
    if target == described:
        return ()
    sorts = (
        (Rule.MEASURED_WITH_OTHERS, f"take what was measured on it, times {_RATIO}"),
        (Rule.LOOKED_UP_WITH_OTHERS, f"take what was looked up for it, times {_RATIO}"),
        (Rule.SAME_GPU, "do not depend on the change and stay as measured"),
    )  # fmt: skip
    counts = [(int((rules == rule).sum()), what) for rule, what in sorts]
    told = [f"{count} of {len(rules)} nodes {what}" for count, what in counts if count]
    peaks = {figure for figure in target.changed if figure.endswith(("_tflops", "_tops"))}
    if "sm_count" in target.changed and not peaks:
        told.append(
            "the peak rates stay, so that of more SMs each has less of them, and products and "
            "attention of few tiles take longer; of a larger chip set its peak rates too"
        )
    return (f"What if {described.name} had {target.changes}: {'; '.join(told)}.",) if told else ()

"""The arithmetic of the interval of one prediction."""

from onerank.annotate.explain.terms import Lines
from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.coefficients import shipped
from onerank.annotate.models.error_kinds import KINDS, Doubt, kinds_of, least_known, widening
from onerank.annotate.models.intervals import HALF_WIDTH, ErrorKinds, Others, node_intervals
from onerank.annotate.models.kernels import F64, U8, Kernels
from onerank.annotate.models.rules import BY_DATABASE

_MEASURED_BY = {
    "composed": "of DeepBench, on a V100 and a T4",
    "looked_up": "of captured steps, looked up in rows of the same versions",
    "looked_up_loosely": "of captured steps, up to 3 us or dependent on data, looked up in rows of "
    "the same versions",
    "looked_up_otherwise": "measured in two campaigns on the same GPU",
}


def interval_lines(
    kernels: Kernels, made: tuple[F64, U8, Doubt], here: Gpu | None, there: Gpu, others: Others
) -> Lines:
    """Return the interval of a prediction; `here` is None where nobody measured the kernel."""
    moved, rules, doubt = made
    c = shipped()
    kinds = kinds_of(kernels, (moved, rules), here, there, doubt)
    errors = ErrorKinds.of(kinds).with_others(kernels, moved, others, there, c)
    unlike = least_known(here, there)
    low, high = node_intervals(moved, errors, unlike, c, doubt)
    kind, other = (KINDS[int(one[0])] for one in (kinds, errors.others))
    if kind == other == "kept":
        return []
    if kind == "kept":
        return [
            (
                "80% interval",
                f"{low[0]:,.0f} to {high[0]:,.0f} ns: {errors.part[0]:.2f} of the errors of "
                f"{other} from one GPU to another of its die, as no more can be wrong than changes",
            )
        ]
    error, ends = c.errors[kind], f"{low[0]:,.0f} to {high[0]:,.0f} ns: "
    if rules[0] in BY_DATABASE:
        own = HALF_WIDTH * doubt.own[0]
        return [
            (
                "80% interval",
                f"{ends}x e^+-({error.high:.4f}^2 + {own:.4f}^2)^0.5, of {error.count:,} calls "
                f"{_MEASURED_BY[kind]}, and of this one"
                + ("" if other == "kept" else "; and those of what the figures set make of it"),
            )
        ]
    wide = widening(unlike, c, kind)
    return [
        (
            "80% interval",
            f"{ends}x e^({wide:.4f} x {error.low:+.4f}) to "
            f"x e^({wide:.4f} x {error.high:+.4f}), the errors of {kind} over {error.count:,} "
            "predictions for GPUs that no fit had seen",
        )
    ]

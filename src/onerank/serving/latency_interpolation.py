"""Interpolate the time of compositions that were not measured.

The kernels of a step fall into parts, most of them once for the prefills and once for the decodes:

- attention;
- scores of the indexers of sparse attention, over all cached tokens;
- updates of states of constant size, such as those of linear attention, whatever the context;
- writes to the KV cache, two in a mixed step;
- the head, by the number of sequences;
- all other modules, by new tokens.

The time of a part is a sum of the terms of its work, such as queries times keys, fitted with
coefficients of at least 0, times a smooth factor of its sizes. Gaussian-process regression of the
logarithm gives the factor. Its kernel is the one with the least leave-one-out error. Attention also
depends on how its kernel divides the work, see `AttentionWaves`.

The step follows from its kernels: as a CUDA graph their sum times a factor; eager, the longer of
kernels and host times a factor of their ratio, since launches overlap kernels.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from onerank.capture.serving.compositions import Composition
from onerank.ir.arrays import F64
from onerank.ir.errors import AnnotateError
from onerank.serving.part_sizes import OF_DECODES, OF_PREFILLS, SIZES, AttentionForm, has_part
from onerank.serving.tables import CrossValidation, KernelRow, Part, StepRow

# Fewer points do not show how a part grows.
_LEAST_POINTS = 3

# Points that a cross-validation needs: with fewer, too few remain.
_LEAST_VALIDATED = 6

# Share of steps inside an interval, as between the 10th and 90th percentile of a measured step.
_INTERVAL = 0.8


def _nonnegative(terms: F64, values: F64) -> F64:
    """Return coefficients of at least 0 that minimise the squared relative error.

    Coordinate descent: each step sets one coefficient to its optimum given the others. onerank does
    not depend on scipy, which has `nnls`.
    """
    scaled = terms / values[:, None]
    norms = (scaled**2).sum(axis=0)
    coefficients = np.zeros(terms.shape[1])
    residual = np.ones(len(values))
    for _ in range(2000):
        largest = 0.0
        for column in range(terms.shape[1]):
            if norms[column] == 0:
                continue
            change = float(scaled[:, column] @ residual) / norms[column]
            new = max(0.0, coefficients[column] + change)
            moved = new - coefficients[column]
            residual -= moved * scaled[:, column]
            coefficients[column] = new
            largest = max(largest, abs(moved) * math.sqrt(norms[column]))
        if largest < 1e-10:
            break
    return coefficients


# Distances in powers of two of the sizes. A short scale follows the tiles of a GPU, a long one a
# smooth trend.
_SCALES = (1.0, 2.0, 4.0, 8.0)

# Variance of a point's noise, if that of the factor is 1: standard deviations of 1% and 5.5%.
_NOISES = (1e-4, 3e-3)


@dataclass(frozen=True)
class _Kernel:
    """A kernel of the regression.

    Attributes:
        scale: distance at which the correlation of two values has dropped to 0.37, or 0.61 if
            Gaussian.
        noise: one of `_NOISES`.
        rough: whether values have kinks at the points (exponential kernel), or none (Gaussian).
    """

    scale: float
    noise: float
    rough: bool

    def between(self, a: F64, b: F64) -> F64:
        """Return the covariance of two sets of sizes."""
        distance = np.sqrt(((a[:, None, :] - b[None, :, :]) ** 2).sum(axis=-1)) / self.scale
        return np.exp(-distance) if self.rough else np.exp(-0.5 * distance**2)


_KERNELS = [
    _Kernel(scale, noise, rough)
    for rough in (True, False)
    for scale in _SCALES
    for noise in _NOISES
]


@dataclass(frozen=True)
class _Smooth:
    """A smooth function of sizes, by Gaussian-process regression around its mean.

    Attributes:
        at: sizes of the points, as powers of two, [points, sizes].
        weights: weight of each point.
        kernel: the kernel.
        mean: value far from all points.
    """

    at: F64
    weights: F64
    kernel: _Kernel
    mean: float

    @classmethod
    def of(cls, at: F64, values: F64, like: "_Smooth | None" = None) -> "_Smooth":
        """Fit values at points.

        Args:
            at: sizes of the points.
            values: values of the points.
            like: a function whose kernel to use; None takes that with the least errors of left-out
                points.
        """
        mean = float(values.mean())
        best: tuple[float, _Smooth] | None = None
        for kernel in _KERNELS if like is None else [like.kernel]:
            covariance = kernel.between(at, at) + kernel.noise * np.eye(len(at))
            inverse = np.linalg.inv(covariance)
            weights = inverse @ (values - mean)
            # The error of a point that the fit does not contain, in closed form.
            error = float(np.abs(weights / np.diag(inverse)).mean())
            if best is None or error < best[0]:
                best = error, cls(at, weights, kernel, mean)
        assert best is not None, "there are kernels to choose from"
        return best[1]

    def __call__(self, at: F64) -> float:
        """Return the value at sizes."""
        covariance = self.kernel.between(at[None, :], self.at)
        return self.mean + float((covariance @ self.weights)[0])


@dataclass(frozen=True)
class _Fit:
    """Time of a part, or of a module, by composition."""

    part: Part
    coefficients: F64
    factor: _Smooth
    form: AttentionForm

    @classmethod
    def of(
        cls,
        part: Part,
        compositions: Sequence[Composition],
        times_ns: Sequence[float],
        form: AttentionForm,
        like: "_Fit | None" = None,
    ) -> "_Fit":
        """Fit times of at least one composition that has the part; `like` as for `_Smooth.of`."""
        sizes = [SIZES[part](c, form) for c in compositions]
        terms, values = np.array([s[0] for s in sizes]), np.maximum(1.0, np.array(times_ns))
        coefficients = _nonnegative(terms, values)
        ratio = np.log(values / np.maximum(1e-9, terms @ coefficients))
        smooth = _Smooth.of(_logs([s[1] for s in sizes]), ratio, like.factor if like else None)
        return cls(part, coefficients, smooth, form)

    def __call__(self, c: Composition) -> float:
        """Return the time in ns; 0 if the step has no such part."""
        if not has_part(self.part, c):
            return 0.0
        terms, sizes = SIZES[self.part](c, self.form)
        base = float(np.array(terms) @ self.coefficients)
        return base * math.exp(self.factor(_logs([sizes])[0]))


def _logs(sizes: Sequence[Sequence[float]]) -> F64:
    return np.log2(np.maximum(1.0, np.array(sizes, dtype=np.float64)))


@dataclass(frozen=True)
class _StepFit:
    """Times of a step, by composition.

    Attributes:
        parts: kernels of each part.
        graph: logarithm of the CUDA graph's time over its kernels', by kernels, from the steps that
            were captured into one; None if none was.
        step: logarithm of the eager step over the longer of kernels and host, by their ratio; None
            if no step has an eager time.
        host: host time by terms of the kind; None if not known.
    """

    parts: tuple[_Fit, ...]
    graph: _Smooth | None
    step: _Smooth | None
    host: F64 | None

    @classmethod
    def of(
        cls,
        rows: Sequence[StepRow],
        parts_ns: Sequence[dict[Part, int]],
        form: AttentionForm,
        like: "_StepFit | None" = None,
    ) -> "_StepFit":
        """Fit steps that fit into memory; `like` as for `_Smooth.of`.

        Raises:
            AnnotateError: there are too few.
        """
        if len(rows) < _LEAST_POINTS:
            raise AnnotateError(
                f"interpolation needs {_LEAST_POINTS} steps that fit into memory, and the bundle "
                f"has {len(rows)}\n  measure a larger grid",
                code="bundle-too-few-points",
            )
        compositions = [row.composition for row in rows]
        parts: list[_Fit] = []
        likes = {fit.part: fit for fit in like.parts} if like is not None else {}
        for part in SIZES:
            index = [
                i for i, c in enumerate(compositions) if has_part(part, c) and part in parts_ns[i]
            ]
            if index:
                times = [float(parts_ns[i][part]) for i in index]
                chosen = [compositions[i] for i in index]
                parts.append(_Fit.of(part, chosen, times, form, likes.get(part)))
        hosts = [float(row.host_ns or 0) for row in rows]
        host = None
        if all(hosts):
            host = _nonnegative(np.array([_host_terms(c) for c in compositions]), np.array(hosts))
        kernels = [float(row.gpu_ns or 1) for row in rows]
        graph = None
        graphs = [(row.graph_ns, k) for row, k in zip(rows, kernels, strict=True) if row.graph_ns]
        if graphs:
            ratio = [math.log(graph_ns / k) for graph_ns, k in graphs]
            graph = _Smooth.of(_logs([[k] for _, k in graphs]), np.array(ratio))
        step = None
        eager = [
            (row.step_ns, k, h) for row, k, h in zip(rows, kernels, hosts, strict=True)
            if row.step_ns
        ]  # fmt: skip
        if eager:
            steps = [math.log(step_ns / max(k, h)) for step_ns, k, h in eager]
            ratios = np.array([[_ratio(k, h)] for _, k, h in eager])
            step = _Smooth.of(ratios, np.array(steps), like.step if like else None)
        return cls(tuple(parts), graph, step, host)

    def __call__(self, c: Composition) -> "_Times":
        """Return the times of a composition."""
        fitted = {fit.part for fit in self.parts}
        for kind, parts in (("prefill", OF_PREFILLS), ("decode", OF_DECODES)):
            if has_part(parts[0], c) and fitted.isdisjoint(parts):
                raise AnnotateError(
                    f"{c}: the bundle has no {kind}s to interpolate between\n  measure some",
                    code="bundle-no-such-steps",
                )
        gpu_ns = sum(fit(c) for fit in self.parts)
        host_ns = None if self.host is None else float(np.array(_host_terms(c)) @ self.host)
        graph_ns = None
        if self.graph is not None:
            graph_ns = gpu_ns * math.exp(self.graph(_logs([[gpu_ns]])[0]))
        step_ns = None
        if self.step is not None:
            longest = max(gpu_ns, host_ns or 0.0)
            step_ns = longest * math.exp(self.step(np.array([_ratio(gpu_ns, host_ns or 0.0)])))
        return _Times(gpu_ns, graph_ns, host_ns, step_ns)


@dataclass(frozen=True)
class _Times:
    """Times of a step in ns; fields as in `StepRow`."""

    gpu_ns: float
    graph_ns: float | None
    host_ns: float | None
    step_ns: float | None


def _host_terms(c: Composition) -> list[float]:
    """Return the terms of host time: a mixed step launches attention twice."""
    return [1.0, float(c.prefills > 0), float(c.kind == "mixed")]


# Kernels that take 64 times as long as the host hide it fully, and the other way around.
_MOST_RATIO = 6.0


def _ratio(kernels_ns: float, host_ns: float) -> float:
    """Return log2 of kernels over host; the kernels' own scale without a host."""
    if not host_ns:
        return math.log2(kernels_ns)
    return max(-_MOST_RATIO, min(_MOST_RATIO, math.log2(kernels_ns / host_ns)))


def _parts_ns(rows: Sequence[StepRow], kernels: Sequence[KernelRow]) -> list[dict[Part, int]]:
    """Return the time of each part of each row."""
    sums: list[dict[Part, int]] = [{} for _ in rows]
    for kernel in kernels:
        of_row = sums[kernel.row - 1]
        if kernel.part is None:
            # Attention of a recorded mixed step, which may be of prefills and of decodes. Both are
            # fitted to the other steps.
            continue
        of_row[kernel.part] = of_row.get(kernel.part, 0) + kernel.time_ns
    return sums


def _errors(
    rows: Sequence[StepRow], parts_ns: Sequence[dict[Part, int]], form: AttentionForm
) -> F64:
    """Return log of predicted over measured, each row fitted without those of as many new tokens.

    A step between the points of a grid has a number of new tokens that no point has. Rows with the
    fewest or the most new tokens have no error: without them, the fit would extrapolate.

    The times are those of CUDA graphs. Only if no row has one are they those of eager steps: the
    two differ too much to be mixed.
    """
    errors: list[float] = []
    whole = _StepFit.of(rows, parts_ns, form)
    every = [row.composition.new_tokens for row in rows]
    for row, tokens in zip(rows, every, strict=True):
        if tokens in (min(every), max(every)):
            continue
        others = [i for i, other in enumerate(rows) if other.composition.new_tokens != tokens]
        try:
            remaining = [rows[i] for i in others], [parts_ns[i] for i in others]
            fit = _StepFit.of(*remaining, form, whole)
            times = fit(row.composition)
        except AnnotateError:  # no other number of new tokens has its kind
            continue
        eager = whole.graph is None
        predicted = times.step_ns if eager else times.graph_ns
        measured = row.step_ns if eager else row.graph_ns
        if predicted and measured:
            errors.append(math.log(predicted / measured))
    return np.array(errors)


def _fitting(
    rows: Sequence[StepRow], kernels: Sequence[KernelRow]
) -> tuple[list[StepRow], list[dict[Part, int]]]:
    """Return the rows of known sequences that fit into memory, and the times of their parts."""
    parts = _parts_ns(rows, kernels)
    index = [i for i, row in enumerate(rows) if row.fits and row.is_composed]
    return [rows[i] for i in index], [parts[i] for i in index]


def cross_validate(
    rows: Sequence[StepRow], kernels: Sequence[KernelRow], form: AttentionForm
) -> CrossValidation | None:
    """Return the errors of interpolated rows; None with fewer than six rows.

    Each row between the fewest and the most new tokens is left out in turn, together with the other
    rows that have as many new tokens.
    """
    fitting, parts = _fitting(rows, kernels)
    if len(fitting) < _LEAST_VALIDATED:
        return None
    errors = np.abs(np.expm1(_errors(fitting, parts, form)))
    if not len(errors):
        return None
    median, p90 = np.percentile(errors, (50, 90))
    return CrossValidation(len(errors), float(median), float(p90))


def interval_of(errors: F64) -> float:
    """Return the bound within which 80% of further errors lie, in absolute value.

    With n errors it is the one of rank ceil(0.8 (n + 1)), as in conformal prediction (Lei et al.
    2018, arXiv 1604.04173, section 2): a further error lies within it with a probability of at
    least 80% if all are equally likely in any order. The empirical quantile of few errors is too
    small. Infinite with fewer than four.
    """
    # Rounded, because a product of floats may lie just above a whole number.
    rank = math.ceil(round(_INTERVAL * (len(errors) + 1), 9))
    return math.inf if rank > len(errors) else float(np.sort(np.abs(errors))[rank - 1])


@dataclass(frozen=True)
class Interpolation:
    """Times of compositions between the rows of a bundle.

    Attributes:
        steps: the fitted steps.
        spread: logarithm within which 80% of left-out rows lie; infinite with too few.
        rows: rows of known sequences that fit into memory.
        kernels: modules of all rows.
        places: number of each of these rows in the bundle.
        form: as for `of`.
    """

    steps: _StepFit
    spread: float
    rows: tuple[StepRow, ...]
    kernels: tuple[KernelRow, ...]
    places: tuple[int, ...]
    form: AttentionForm

    @classmethod
    def of(
        cls,
        rows: Sequence[StepRow],
        kernels: Sequence[KernelRow],
        form: AttentionForm,
    ) -> "Interpolation":
        """Fit the rows of a bundle.

        Args:
            rows: the steps.
            kernels: modules of all rows.
            form: what the time of attention depends on.

        Raises:
            AnnotateError: there are too few.
        """
        fitting, parts = _fitting(rows, kernels)
        steps = _StepFit.of(fitting, parts, form)
        errors = _errors(fitting, parts, form) if len(fitting) >= _LEAST_VALIDATED else np.zeros(0)
        spread = interval_of(errors)
        places = tuple(i for i, row in enumerate(rows, start=1) if row.fits and row.is_composed)
        return cls(steps, spread, tuple(fitting), tuple(kernels), places, form)

    def step(self, composition: Composition) -> StepRow:
        """Return the times of a composition; its memory is not interpolated.

        Raises:
            AnnotateError: the bundle has no step of its kind.
        """
        times = self.steps(composition)
        known = math.isfinite(self.spread)
        low, high = math.exp(-self.spread), math.exp(self.spread) if known else 0.0
        step, graph = times.step_ns, times.graph_ns
        return StepRow.of(
            composition,
            step_ns=None if step is None else round(step),
            p10_ns=round(step * low) if step is not None and known else None,
            p90_ns=round(step * high) if step is not None and known else None,
            graph_ns=None if graph is None else round(graph),
            graph_low_ns=round(graph * low) if graph is not None and known else None,
            graph_high_ns=round(graph * high) if graph is not None and known else None,
            gpu_ns=round(times.gpu_ns),
            host_ns=None if times.host_ns is None else round(times.host_ns),
            peak_bytes=0,
            fits=True,
            source="interpolated",
        )

    def module(self, modules: Sequence[str]) -> Callable[[Composition], float]:
        """Return a function of the summed time of modules, in ns by composition.

        Args:
            modules: paths as in `KernelRow`, all of one part.
        """
        chosen = set(modules)
        times: dict[int, float] = {}
        parts: set[Part] = set()
        for kernel in self.kernels:
            if kernel.module in chosen:
                times[kernel.row] = times.get(kernel.row, 0.0) + kernel.time_ns
                assert kernel.part is not None, "a module of a known path has its part"
                parts.add(kernel.part)
        by_place = dict(zip(self.places, self.rows, strict=True))
        index = [place for place in times if place in by_place]
        if not index:
            return lambda composition: 0.0
        compositions = [by_place[place].composition for place in index]
        return _Fit.of(parts.pop(), compositions, [times[place] for place in index], self.form)

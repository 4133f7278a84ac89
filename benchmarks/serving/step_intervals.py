"""Intervals of steps from shapes against measured steps, and the errors that classes share.

    python -m benchmarks.serving.step_intervals SET/NAME=PREDICTED,MEASURED ...

PREDICTED is a bundle of `capture serve --device none`, MEASURED one of a GPU with the same steps.
Each predicted bundle is re-costed for the GPU of the measured one, so the figures are those of this
version. SET names the models that were measured together.

  half-width  of the 80% interval of a step as a CUDA graph, in ln; median over the steps
  inside      steps inside their interval
  80% of      |ln(predicted / measured)| that 80% of the steps do not exceed

Then, for each class of modules, the median of ln(predicted / measured) of its summed kernels over
the steps of a model, and for each set the root mean square over its models: `shared_in_steps` of
the coefficients is the larger over the sets. Classes of less than a fiftieth of a step are left
out, and states, whose kernels are those of other libraries.
"""

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from benchmarks.harness import parser_of, print_conditions
from onerank.annotate.gpus.registry import find_gpu
from onerank.serving.build_bundle import recost_bundle
from onerank.serving.bundle import Bundle, read_bundle

# End of a module's path, or its part in `kernels.parquet` -> class; the rest is bound by memory.
_PRODUCTS = re.compile(r"(_proj|lm_head|gate_up|router|\.gate|feed_forward\.w\d)$")
_LEAST_SHARE = 0.02


def main() -> None:
    """Print the tables."""
    parser = parser_of(__doc__)
    parser.add_argument("pairs", nargs="+", metavar="SET/NAME=PREDICTED,MEASURED")
    print_conditions()
    of_models: dict[tuple[str, str], dict[str, float]] = {}
    steps: dict[str, list[tuple[float, float, bool]]] = defaultdict(list)
    for pair in parser.parse_args().pairs:
        names, _, folders = pair.partition("=")
        of_set, _, name = names.partition("/")
        predicted, measured = (read_bundle(Path(folder)) for folder in folders.split(","))
        gpu = find_gpu(measured.manifest.device)
        assert gpu is not None, f"{measured.manifest.device} has no description"
        now, _ = recost_bundle(predicted, gpu)
        judged = list(_judged(now, measured))
        steps[f"{of_set}/{name}"] = judged
        steps[of_set] += judged
        steps["all"] += judged
        of_models[of_set, name] = _class_errors(now, measured)
    print(f"{'':24}{'steps':>6}{'half-width':>12}{'inside':>9}{'80% of':>9}")
    for key, rows in steps.items():
        widths, errors, inside = zip(*rows, strict=True)
        print(f"{key:24}{len(rows):6}{statistics.median(widths):12.3f}", end="")
        print(f"{sum(inside):5} {statistics.mean(inside):4.0%}{_quantile(errors):9.3f}")
    classes = list(dict.fromkeys(name for errors in of_models.values() for name in errors))
    print(f"\n{'':24}" + "".join(f"{name:>11}" for name in classes))
    for (of_set, name), errors in of_models.items():
        cells = (f"{errors[c]:+11.3f}" if c in errors else f"{'':11}" for c in classes)
        print(f"{of_set + '/' + name:24}" + "".join(cells))
    for of_set in dict.fromkeys(of_set for of_set, _ in of_models):
        mine = [errors for (other, _), errors in of_models.items() if other == of_set]
        cells = (_root_mean_square(e[c] for e in mine if c in e) for c in classes)
        print(f"{of_set + ', rms':24}" + "".join(f"{cell:11.3f}" for cell in cells))


def _judged(predicted: Bundle, measured: Bundle) -> Iterable[tuple[float, float, bool]]:
    """Yield half-width, error and whether the step is inside, of each step with a CUDA graph."""
    rows = {row.composition: row for row in predicted.rows}
    for row in measured.rows:
        of_shape = rows.get(row.composition)
        if of_shape is None or not (row.graph_ns and of_shape.graph_ns):
            continue
        low, high = of_shape.graph_low_ns or 0, of_shape.graph_high_ns or 0
        error = abs(math.log(of_shape.graph_ns / row.graph_ns))
        yield math.log(high / of_shape.graph_ns), error, low <= row.graph_ns <= high


def _class_errors(predicted: Bundle, measured: Bundle) -> dict[str, float]:
    """Return class -> median of ln(predicted / measured) of its kernels over the steps."""
    numbers = {row.composition: number for number, row in enumerate(predicted.rows, start=1)}
    errors: dict[str, list[float]] = defaultdict(list)
    for number, row in enumerate(measured.rows, start=1):
        if row.composition in numbers and row.fits:
            before = _class_times(measured, number)
            after = _class_times(predicted, numbers[row.composition])
            for name, time in before.items():
                if time > _LEAST_SHARE * sum(before.values()) and after.get(name):
                    errors[name].append(math.log(after[name] / time))
    return {name: statistics.median(values) for name, values in errors.items() if name != "states"}


def _class_times(bundle: Bundle, number: int) -> dict[str, float]:
    times: dict[str, float] = defaultdict(float)
    for kernel in bundle.kernel_rows:
        if kernel.row == number:
            times[_class_of(kernel.module or "", kernel.part or "")] += kernel.time_ns
    return times


def _class_of(module: str, part: str) -> str:
    if part in ("prefill_attention", "decode_attention"):
        return "attention"
    if part in ("prefill_state", "decode_state"):
        return "states"
    if module.endswith(".experts"):
        return "experts"
    return "gemm" if _PRODUCTS.search(module) else "memory"


def _quantile(errors: Iterable[float]) -> float:
    ordered = sorted(errors)
    return ordered[math.ceil(0.8 * len(ordered)) - 1]


def _root_mean_square(values: Iterable[float]) -> float:
    listed = list(values)
    return math.sqrt(statistics.mean(value * value for value in listed)) if listed else math.nan


if __name__ == "__main__":
    main()

"""Operators limited by memory, captured on a GPU and predicted from shapes.

    python -m benchmarks.predictions.small_operators measure TRACE [--sizes unseen]   on a GPU
    python -m benchmarks.predictions.small_operators compare TRACE [--sizes unseen]   anywhere

`measure` captures one forward of a module whose submodules are the cases: embeddings and their
backward, indexing, sorting, scans, small norms, rotary embeddings and gated activations, each three
times. Cold cases have other operands each time, which come from memory; the operands of the others
are those of the call before. `compare` captures the same forward without a device, predicts it for
that GPU, and prints the sum of the kernels of each case: the median of the three calls. The rules
of `annotate` were fixed with the first, the held-out and the unseen sizes in view. The blind sizes
lie between and beyond, with operators that the others have not. Their calls of a case follow each
other in `blind-repeated`, so that the cache has the operands; in all others the calls take turns.
"""

import statistics
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import parser_of, print_conditions, version_of
from benchmarks.predictions.small_operator_cases import SIZES, Call, Sizes, cases

_CALLS = 3


class Repeated(torch.nn.Module):
    """A case: its calls take turns."""

    def __init__(self, calls: list[Call]) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, number: int) -> None:
        """Run one call."""
        self.calls[number % len(self.calls)]()


class Operators(torch.nn.Module):
    """All cases, each as a submodule, so that the capture knows whose a kernel is."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.repeated = sizes.repeated
        self.unused = torch.nn.Parameter(torch.zeros(1, device="cuda"))
        for name, cold, make in cases(sizes):
            calls = [make("cuda") for _ in range(_CALLS if cold else 1)]
            self.add_module(name, Repeated(calls))

    def forward(self, x: Any) -> Any:
        """Run every case three times."""
        cases, numbers = list(self.children()), range(_CALLS)
        if self.repeated:
            order = product(cases, numbers)
        else:
            order = ((case, number) for number in numbers for case in cases)
        for case, number in order:
            case(number)
        return x


def run_steps(sizes: Sizes) -> None:
    """Run the forward as a script's steps: what a capture of this file runs."""
    torch.manual_seed(0)
    model = Operators(sizes)
    with torch.no_grad():
        for _ in range(3):
            model(torch.ones(1, device="cuda"))
            torch.cuda.synchronize()


def captured(device: str | None, like: str, sizes: str) -> Any:
    """Return the graph of one forward."""
    from onerank.capture.capture_script import capture
    from onerank.capture.options import Options
    from onerank.capture.profiling.window_plan import WindowPlan

    options = Options(
        device=device,
        like=like,
        step_of="Operators.forward",
        steps=(2,),
        windows=WindowPlan(warm_up=2, settle=False),
    )
    return capture(Path(__file__), ("steps", sizes), options).graph


def compare(trace: Path, sizes: str) -> None:
    """Print measured and predicted times of each case."""
    import onerank

    measured = onerank.read(trace)
    gpu = measured.job.device.name
    print(f"measured: {gpu}, {measured.job.measurement.versions}; predicted:")
    print_conditions(version_of("torch"))
    predicted = onerank.recost(captured("none", gpu, sizes), gpu)
    ours, theirs = _times(measured), _times(predicted)
    print(f"{'us':44}{'kernels':>8}{'measured':>10}{'kernels':>8}{'predicted':>10}{'error':>9}")
    for name, _, _ in cases(SIZES[sizes]):
        if name not in ours:
            print(f"{name:44} not in the measured trace")
            continue
        count, time_ns = ours[name]
        predicted_count, predicted_ns = theirs.get(name, (0, 0))
        print(f"{name:44}{count:8}{time_ns / 1e3:10.2f}{predicted_count:8}"
              f"{predicted_ns / 1e3:10.2f}{predicted_ns / time_ns - 1:+9.0%}")  # fmt: skip


def _times(graph: Any) -> dict[str, tuple[int, float]]:
    """Return number and time of the kernels of a case's median call, by case."""
    nodes, found = graph.nodes, dict[str, list[int]]()
    for i in np.flatnonzero(graph.compute).tolist():
        case = graph.strings[int(nodes.module[i])]
        found.setdefault(case, []).append(int(nodes.duration_ns[i]))
    calls: dict[str, tuple[int, float]] = {}
    for case, times in found.items():
        each = len(times) // _CALLS
        sums = [sum(times[n * each : (n + 1) * each]) for n in range(_CALLS)]
        calls[case] = each, statistics.median(sums)
    return calls


def main() -> None:
    """Measure, compare, or run the steps that are captured."""
    if sys.argv[1:2] == ["steps"]:
        return run_steps(SIZES[sys.argv[2]])
    parser = parser_of(__doc__)
    parser.add_argument("action", choices=("measure", "compare"))
    parser.add_argument("trace", type=Path, help="Chakra trace of the measured forward")
    parser.add_argument("--sizes", choices=SIZES, default="first")
    args = parser.parse_args()
    if args.action == "measure":
        captured(None, "H100", args.sizes).write(args.trace)
    else:
        compare(args.trace, args.sizes)
    return None


if __name__ == "__main__":
    main()

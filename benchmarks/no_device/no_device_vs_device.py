"""Captures without a device against captures on a GPU, of the same jobs: one table.

    python -m benchmarks.no_device.no_device_vs_device DIRECTORY [--no-device|--compare] [FORM...]

Without an option both captures run, on an H100; with --no-device only those without a device;
--compare prints the table.

For each parallel form: whether the collectives are equal in order (kind, group, bytes); the number
of kernels, copies and fills, those by which the counts of an operator differ, and the class whose
count differs most; the relative differences of FLOPs, bytes moved by kernels, peak memory and
memory at the step's start. Kernels of the capture without a device are those of `annotate`.
"""

import argparse
import multiprocessing
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import print_conditions, version_of

EXAMPLES = Path(__file__).parents[2] / "examples"
_FOUR = ("--shape", "8b", "--layers", "4", "--seq", "4096", "--batch", "1", "--steps", "60")
_TWO = ("--shape", "8b", "--layers", "2", "--seq", "4096", "--batch", "1", "--steps", "60")

FORMS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "TP 4": ("train_llama", {"tp": 4}, _FOUR),
    "TP 4, sp": ("train_llama", {"tp": 4, "sp": True}, _FOUR),
    "FSDP2 of 4": ("train_llama", {"dp": 4, "fsdp": True}, _FOUR),
    "DDP of 4": ("train_llama", {"dp": 4}, _TWO),
    "ZeRO 1 of 4": ("train_llama", {"dp": 4, "zero": 1}, _TWO),
    "ZeRO 2 of 4": ("train_llama", {"dp": 4, "zero": 2}, _TWO),
    "ZeRO 3 of 4": ("train_llama", {"dp": 4, "zero": 3}, _TWO),
    "PP 2, rank 1": ("train_llama", {"pp": 2, "rank": 1}, (*_FOUR, "--accumulate", "2")),
    "CP 2": ("train_llama", {"cp": 2}, _TWO),
    "EP 4": ("train_mixtral", {"ep": 4, "dp": 4}, ("--steps", "60")),
    "TP 2, eager attention": (
        "train_llama",
        {"tp": 2},
        (*_FOUR[:5], "1024", *_FOUR[6:], "--attention", "eager"),
    ),
    "script's own FSDP2": ("train_llama_fsdp", {"dp": 4}, ()),
    "script's own pipeline": ("train_llama_pp", {"dp": 4}, ()),
}


_GPU = "H100"
"""The GPU of both captures."""


def capture_form(form: str, device: str | None, output: Path) -> None:
    """Capture a form in this process; `device` is "none" or None, the GPU."""
    from onerank.capture.capture_script import capture
    from onerank.capture.options import Options
    from onerank.capture.profiling.window_plan import WindowPlan

    name, job, args = FORMS[form]
    options = Options(
        device="none" if device else None,
        like=_GPU,
        windows=WindowPlan(warm_up=3, timed_steps=2),
        collective_kernels="off",
        **job,
    )
    capture(EXAMPLES / f"{name}.py", args, options).graph.write(output)


def collectives(graph: Any) -> list[tuple[int, int, str, int]]:
    """Return kind, collective, group and bytes of the communication, in order."""
    nodes = graph.nodes
    places = np.flatnonzero(graph.communication)
    order = places[np.argsort(nodes.start_ns[places], kind="stable")]
    return [
        (
            int(nodes.kind[i]),
            int(nodes.collective[i]),
            graph.strings[int(nodes.group[i])],
            int(nodes.comm_bytes[i]),
        )
        for i in order
    ]


def totals(graph: Any) -> tuple[int, int]:
    """Return the FLOPs of the compute nodes, and the bytes that they read and write."""
    from onerank.annotate.op_costs.node_costs import op_costs_of

    costs = op_costs_of(graph)
    flops, read, written = (
        int(np.maximum(column, 0).sum())
        for column in (costs.flops, costs.bytes_read, costs.bytes_written)
    )
    return flops, read + written


def kernels(graph: Any) -> tuple[Counter[str], Counter[str]]:
    """Return the numbers of kernels, copies and fills by operator, and by class."""
    from onerank.annotate.op_costs.op_classes import CLASSES, classify

    nodes = np.flatnonzero(graph.gpu_compute)
    operators = Counter(graph.strings[code] for code in graph.nodes.op[nodes].tolist())
    classes = Counter(CLASSES[code].value for code in classify(graph, nodes).tolist())
    return operators, classes


def compare_kernels(here: Any, there: Any) -> str:
    """Return the cells on kernels, of a predicted capture against one on a GPU."""
    (ours, our_classes), (theirs, their_classes) = kernels(here), kernels(there)
    moved = max((ours - theirs).total(), (theirs - ours).total())
    differences = {
        name: our_classes[name] - their_classes[name] for name in {*our_classes, *their_classes}
    }
    worst = max(differences, key=lambda name: abs(differences[name]) / max(1, their_classes[name]))
    cell = f"{worst} {differences[worst]:+d} of {their_classes[worst]}"
    return f"{theirs.total():>8}{moved:>6}  {cell if differences[worst] else 'equal':<18}"


def compare(form: str, directory: Path) -> str:
    """Return a row of the table."""
    import onerank

    there, here = (onerank.read(path(directory, form, device)) for device in (None, "none"))
    predicted = onerank.recost(here, _GPU, host="none")
    ours, theirs = collectives(here), collectives(there)
    order = "equal" if ours == theirs else "DIFFERS"
    if order == "DIFFERS" and Counter(ours) == Counter(theirs):
        order = "other order"
    figures = [
        after / before - 1
        for after, before in (
            *zip(totals(here), totals(there), strict=True),
            (here.job.measurement.peak_memory_bytes, there.job.measurement.peak_memory_bytes),
            (here.job.measurement.start_memory_bytes, there.job.measurement.start_memory_bytes),
        )
    ]
    cells = "".join(f"{figure:>10.3%}" for figure in figures)
    on_kernels = compare_kernels(predicted, there)
    return f"{form:<24}{len(theirs):>6} {order:<12}{on_kernels}{cells}"


def path(directory: Path, form: str, device: str | None) -> Path:
    """Return the file of a capture."""
    stem = form.lower().replace(" ", "-").replace(",", "").replace("'", "")
    return directory / f"{stem}.{device or 'gpu'}.et"


def main() -> None:
    """Capture the forms on the GPU and without a device, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("forms", nargs="*")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--no-device", action="store_true")
    options = parser.parse_args()
    forms = options.forms or list(FORMS)
    if not options.compare:
        options.directory.mkdir(parents=True, exist_ok=True)
        spawned = multiprocessing.get_context("spawn")
        for form in forms:
            for device in ("none",) if options.no_device else (None, "none"):
                output = path(options.directory, form, device)
                process = spawned.Process(target=capture_form, args=(form, device, output))
                process.start()
                process.join()
                print(f"{form}, {device or 'GPU'}: exit {process.exitcode}", flush=True)
    print_conditions(version_of("torch"))
    columns = "".join(f"{name:>10}" for name in ("FLOPs", "bytes", "peak", "at start"))
    on_kernels = f"{'kernels':>8}{'other':>6}  {'worst class':<18}"
    print(f"{'form':<24}{'calls':>6} {'collectives':<12}{on_kernels}{columns}")
    for form in forms:
        if path(options.directory, form, None).exists():
            print(compare(form, options.directory))


if __name__ == "__main__":
    main()

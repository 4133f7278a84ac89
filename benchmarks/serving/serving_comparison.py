"""Errors of interpolated and predicted steps: `compare` and `points` of `serving.py`."""

import dataclasses
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

KINDS = ("", "prefill", "decode", "mixed")


Pairs = Iterable[tuple[float, float]]


def errors(pairs: Pairs) -> tuple[float, float, float]:
    """Return median and 90th percentile of the relative errors, and their mean."""
    relative = [abs(predicted / measured - 1) for predicted, measured in pairs]
    return (*np.quantile(relative, (0.5, 0.9)).tolist(), statistics.mean(relative))


def line(label: str, pairs: Pairs) -> None:
    """Print the errors of pairs of a predicted and a measured figure, and their signed mean."""
    pairs = [*pairs]
    if pairs:
        signed = statistics.mean(predicted / measured - 1 for predicted, measured in pairs)
        figures = "".join(f" {error:8.1%}" for error in errors(pairs))
        print(f"{label:44} {len(pairs):4} {figures} {signed:+8.1%}")


def heading(title: str) -> None:
    """Print a title and the columns of `line`."""
    print(f"\n{title:44} {'':4}  {'median':>8} {'p90':>8} {'mean':>8} {'signed':>8}")


def compare(directory: Path, other: Path | None, more: Path | None) -> None:
    """Print all errors."""
    if (directory / "slice.0.json").exists():
        compare_real(directory)
        return
    for folder in filter(None, (directory, other)):
        measured_on_one_gpu(folder, more)
    if other is not None:
        transfer(directory, other)
        transfer(other, directory)


def default_points(*bundles: Any) -> Any:
    """Return a bundle with the default grid's rows, each from the first bundle that has it."""
    import msgspec

    from onerank.capture.serving.compositions import default_grid

    grid, rows, kernels = {*default_grid(bundles[0].manifest.longest)}, list[Any](), list[Any]()
    for bundle in bundles:
        for number, row in enumerate(bundle.rows, start=1):
            if row.composition not in grid:
                continue
            grid.remove(row.composition)
            rows.append(row)
            modules = [kernel for kernel in bundle.kernel_rows if kernel.row == number]
            kernels += [msgspec.structs.replace(module, row=len(rows)) for module in modules]
    if grid:
        print(f"{len(grid)} compositions of the default grid are missing")
    return dataclasses.replace(bundles[0], rows=tuple(rows), kernel_rows=tuple(kernels)).validated()


def measured_on_one_gpu(directory: Path, more: Path | None) -> None:
    """Print the errors of interpolation, of shapes alone and of memory on one GPU."""
    import onerank
    from onerank.capture.serving.compositions import Composition

    print("\n" + "\n".join(json.loads((directory / "conditions.json").read_text()).values()))
    bundle = onerank.read_bundle(directory / "bundle")
    if more is not None:
        bundle = default_points(bundle, onerank.read_bundle(more))
    print(bundle)
    rows = json.loads((directory / "drawn.json").read_text())
    compositions = [Composition(**row["composition"]) for row in rows]
    graph = [statistics.median(row["graph_ns"] or [0]) for row in rows]
    eager = [statistics.median(row["step_ns"]) for row in rows]
    table = bundle.at(compositions)
    heading(f"Interpolated from {len(bundle.rows)} compositions")
    for name, measured, column in (("CUDA graph", graph, "graph_ns"), ("eager", eager, "step_ns")):
        figures = table[column].to_list()
        for kind in KINDS:
            index = [i for i, c in enumerate(compositions) if kind in ("", c.kind)]
            line(f"{name} {kind}", ((figures[i], measured[i]) for i in index))
    peaks = table["peak_bytes"].to_list()
    line("peak memory", zip(peaks, (row["peak_bytes"] for row in rows), strict=True))
    inside = [
        row["graph_low_ns"] <= g <= row["graph_high_ns"]
        for row, g in zip(table.to_dicts(), graph, strict=True)
    ]
    print(f"inside the 80% interval: {sum(inside)} of {len(inside)}")
    for c, predicted, measured in zip(compositions, table["graph_ns"], graph, strict=True):
        print(f"  {c!s:44} {measured / 1e6:9.3f} ms {predicted / measured - 1:+8.1%}")
    if (file := directory / "capacity.json").is_file():
        tokens = json.loads(file.read_text())
        error = tokens["predicted_tokens"] / tokens["measured_tokens"] - 1
        print(f"\nKV cache that fits next to a prefill of 8,192 tokens: {tokens}, {error:+.2%}")
    if (file := directory / "cuda_graph.json").is_file():
        print(f"decode as a CUDA graph: {json.loads(file.read_text())}")
    from_shapes(directory, bundle, compositions, graph)


WANTED = (0.05, 0.03, 0.025, 0.02, 0.015)


def _timed(file: Path) -> list[tuple[Any, float]]:
    """Return the compositions of a file with their times as CUDA graphs."""
    from onerank.capture.serving.compositions import Composition

    timed: list[tuple[Any, float]] = []
    for row in json.loads(file.read_text()):
        fields = row["composition"]
        composition = Composition(*fields) if isinstance(fields, list) else Composition(**fields)
        timed.append((composition, statistics.median(row["graph_ns"])))
    return timed


def by_points(directory: Path, more: Path | None, others: Path | None) -> None:
    """Print the errors by number of points, and where `capture serve --error` stops."""
    import msgspec

    import onerank
    from onerank.serving.adaptive_grid import BATCH, WantedError, measurement_order

    print("\n".join(json.loads((directory / "conditions.json").read_text()).values()))
    bundle = onerank.read_bundle(directory / "bundle")
    if more is not None:
        bundle = default_points(bundle, onerank.read_bundle(more))
    numbers = {row.composition: number for number, row in enumerate(bundle.rows, start=1)}
    sets = {
        file.name: [(c, graph_ns) for c, graph_ns in _timed(file) if c not in numbers]
        for file in filter(None, (directory / "drawn.json", others))
    }
    titles = "".join(f"   {f'{len(of)} of {name}':>16}{'p90':>8}{'mean':>8}"
                     for name, of in sets.items())  # fmt: skip
    print(f"\npoints  fit   left out  median     p90{titles}")
    order, stops = measurement_order([*numbers]), dict[float, int]()
    for count in range(2 * BATCH, len(order) + 1, BATCH):
        chosen = {numbers[c]: row for row, c in enumerate(order[:count], start=1)}
        rows = tuple(bundle.rows[number - 1] for number in chosen)
        kernels = tuple(
            msgspec.structs.replace(kernel, row=chosen[kernel.row])
            for kernel in bundle.kernel_rows
            if kernel.row in chosen
        )
        part = dataclasses.replace(bundle, rows=rows, kernel_rows=kernels).validated()
        validation = part.manifest.cross_validation
        for wanted in WANTED:
            if WantedError(wanted).shortfall(validation) is None:
                stops.setdefault(wanted, count)
        cells = f"{count:6}{sum(row.fits for row in rows):5}"
        cells += f"{validation.points:11}{validation.median:8.1%}{validation.p90:8.1%}"
        for of in sets.values():
            predicted = part.at([c for c, _ in of])["graph_ns"]
            median, *rest = errors(zip(predicted, (graph_ns for _, graph_ns in of), strict=True))
            cells += f"   {median:16.1%}" + "".join(f"{figure:8.1%}" for figure in rest)
        print(cells, flush=True)
    for wanted in WANTED:
        print(f"--error {wanted:.1%}: {stops.get(wanted, 'not reached')} points")


def from_shapes(
    directory: Path, bundle: Any, compositions: Sequence[Any], graph: Sequence[float]
) -> None:
    """Print the errors of drawn compositions that are predicted without a device."""
    from onerank.annotate import load_gpu
    from onerank.capture.options import Options
    from onerank.capture.serving.measure_grid import loaded_server
    from onerank.serving.points import Target, predicted

    like = load_gpu(bundle.manifest.device)
    # The operator names its kernel, torch's FlashAttention 2.
    target = Target(like, None)
    options = Options(tp=bundle.manifest.tp, device="none", like=like.name)
    shapes = []
    with loaded_server(directory / "config.json", options) as server:
        for number, composition in enumerate(compositions, start=1):
            point = server.measure(composition, number)
            shapes.append(predicted(composition, point.graph, target).row if point.graph else None)
    triples = [
        (row, measured, c)
        for row, measured, c in zip(shapes, graph, compositions, strict=True)
        if row and row.graph_ns and measured
    ]
    heading(f"From shapes alone, {like.name}")
    for kind in KINDS:
        chosen = [(row.graph_ns, g) for row, g, c in triples if kind in ("", c.kind)]
        line(f"CUDA graph {kind}", chosen)
    inside = [row.graph_low_ns <= g <= row.graph_high_ns for row, g, _ in triples]
    print(f"inside the 80% interval: {sum(inside)} of {len(inside)}")
    for row, measured, c in triples:
        print(f"  {c!s:44} {measured / 1e6:9.3f} ms {row.graph_ns / measured - 1:+8.1%}")


def transfer(source: Path, target: Path) -> None:
    """Print the errors of a bundle predicted for the GPU of another, which was measured."""
    import onerank
    from onerank.annotate import PassOptions, load_gpu
    from onerank.serving.build_bundle import recost_bundle

    there = onerank.read_bundle(target / "bundle")
    before = onerank.read_bundle(source / "bundle")
    gpu = load_gpu(there.manifest.device)
    passes = PassOptions(attention="same")
    after, _ = recost_bundle(before, gpu, passes=passes)
    measured = {row.composition: row for row in there.rows if row.fits}
    both = [(row, measured[row.composition]) for row in after.rows
            if row.fits and row.composition in measured]  # fmt: skip
    heading(f"{before.manifest.device} for {there.manifest.device}")
    for name in ("graph_ns", "gpu_ns", "step_ns"):
        for kind in KINDS:
            line(
                f"{name} {kind}",
                (
                    (getattr(row, name), getattr(m, name))
                    for row, m in both
                    if kind in ("", row.composition.kind) and getattr(m, name)
                ),
            )
    inside = [row.graph_low_ns <= m.graph_ns <= row.graph_high_ns for row, m in both]
    print(f"inside the 80% interval: {sum(inside)} of {len(inside)}")
    for row, m in both:
        error = row.graph_ns / m.graph_ns - 1
        print(f"  {row.composition!s:44} {m.graph_ns / 1e6:9.3f} ms {error:+8.1%}")


def compare_real(directory: Path) -> None:
    """Print a slice against the rank of the real job."""
    from onerank.capture.serving.compositions import Composition

    print("\n".join(json.loads((directory / "conditions.json").read_text()).values()))
    runs = {
        name: {
            Composition(**row["composition"]): row
            for row in json.loads((directory / f"{name}.json").read_text())
        }
        for name in ("slice.0", "real.0", "real.1", "again.0")
        if (directory / f"{name}.json").exists()
    }
    columns = ("compute", "NCCL", "graph", "eager")
    print(f"\n{'times in ms; real: rank 0':36}" + "".join(f"{'slice':>9}{'real':>9}{'':>8}"
          if name != "NCCL" else f"{'real':>9}" for name in columns))  # fmt: skip
    pairs: dict[str, list[tuple[Any, float, float]]] = {name: [] for name in columns}
    for c, real_row in runs["real.0"].items():
        slice_row = runs["slice.0"].get(c)
        if slice_row is None:
            continue
        ours, theirs = _sums(slice_row), _sums(real_row)
        cells = ""
        for name in columns:
            if name == "NCCL":
                cells += f"{theirs[name] / 1e6:9.3f}"
                continue
            pairs[name].append((c, ours[name], theirs[name]))
            error = ours[name] / theirs[name] - 1
            cells += f"{ours[name] / 1e6:9.3f}{theirs[name] / 1e6:9.3f}{error:+8.1%}"
        print(f"{c!s:36}{cells}")
    heading("Slice of TP 2 against rank 0 of two GPUs")
    for name, what in (
        ("compute", "kernels but those of collectives, of a replayed CUDA graph"),
        ("graph", "CUDA graph, without kernels of collectives"),
        ("eager", "eager, with NCCL and host"),
    ):
        print(f"{what}")
        for kind in KINDS[:3]:
            line(f"  {kind}", ((a, b) for c, a, b in pairs[name] if kind in ("", c.kind)))
    for label, name in (("rank 1 for rank 0", "real.1"), ("slice again for slice", "again.0")):
        base = runs["real.0" if name == "real.1" else "slice.0"]
        line(
            f"{label}: kernels",
            (
                (_sums(row)["compute"], _sums(base[c])["compute"])
                for c, row in runs.get(name, {}).items()
                if c in base
            ),
        )


# Names of the kernels of collectives: NCCL's, and those that stand for them in a slice.
_COLLECTIVES = ("nccl", "onerank_standin")


def _sums(row: dict[str, Any]) -> dict[str, float]:
    """Return times of a step in ns, those of collectives apart: kernels, CUDA graph, eager."""
    compute, collectives = 0.0, 0.0
    for name, (_, time_ns) in row["kernels"].items():
        if any(part in name for part in _COLLECTIVES):
            collectives += time_ns
        else:
            compute += time_ns
    graph = statistics.median(row["graph_ns"]) - collectives
    eager = statistics.median(row["step_ns"])
    return {"compute": compute, "NCCL": collectives, "graph": graph, "eager": eager}

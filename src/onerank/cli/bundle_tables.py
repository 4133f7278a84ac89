"""The tables of a bundle: its manifest and its steps."""

from collections.abc import Iterator
from pathlib import Path

from onerank.cli.terminal import counted, lines, print_json, table
from onerank.display import size, time
from onerank.serving.bundle import Bundle, BundleRecord
from onerank.serving.tables import Manifest, StepRow

# Steps that a table lists; steps.parquet has all.
_ROWS = 60


def parallel_sizes(manifest: Manifest) -> str:
    """Return the parallel sizes of a bundle, with its pipeline stage and routing of experts."""
    sizes = [f"tp {manifest.tp or 'not known'}"]
    if manifest.pipeline is not None:
        stage, layers = manifest.pipeline.stage, manifest.pipeline.layers
        first = sum(layers[:stage])
        last = first + layers[stage] - 1
        held = f"layers {first} to {last}" if last > first else f"layer {first}"
        sizes.append(f"pp {len(layers)}, stage {stage} with {held}")
    if manifest.ep > 1:
        sizes.append(f"ep {manifest.ep}")
    if manifest.moe_routing is not None:
        sizes.append(f"{manifest.moe_routing} routing")
    if manifest.rank:
        sizes.append(f"rank {manifest.rank}")
    return ", ".join(sizes)


def tokens_that_fit(manifest: Manifest) -> str:
    """Return the number of tokens whose KV cache fits into the device's memory.

    If layers have windows, the number depends on the length of sequences: the text states it for
    sequences up to the shortest window and for the longest ones. If sequences have states, the text
    also states it for the longest ones. "" if the memory of the device or the KV cache is not
    known.
    """
    memory, longest = manifest.memory, manifest.longest
    if not memory.device_bytes or memory.tokens_that_fit is None:
        return ""
    text = f"{memory.tokens_that_fit:,}"
    batch = memory.sequences_that_fit(longest - 1) if longest else None
    if longest is None or batch is None:
        return text
    sequences = f"{batch:,} {'sequence' if batch == 1 else 'sequences'} of {longest:,}"
    if memory.state_bytes_per_sequence:
        sequences += " with their states"
        return f"{text}, or {sequences}" if memory.kv_bytes_per_token else sequences
    if not memory.kv_windows:
        return text
    shortest = min(layers.window.tokens for layers in memory.kv_windows)
    return f"{text} in sequences up to {shortest:,}, {batch * longest:,} in {sequences}"


def _counts(row: StepRow) -> str:
    """Return what is known of a recorded step's sequences."""
    counts = {"sequence": row.batch, "new token": row.new_tokens}
    return ", ".join(counted(count, name) for name, count in counts.items() if count) or "-"


def show_bundle(bundle: Bundle, directory: Path, *, as_json: bool) -> None:
    """Print a bundle's manifest and steps."""
    manifest = bundle.manifest
    if as_json:
        print_json(BundleRecord(manifest, bundle.rows))
        return
    layers = [] if manifest.layers is None else [counted(manifest.layers, "layer")]
    pairs = [
        ("model", ", ".join([manifest.model or "not known", *layers, parallel_sizes(manifest)])),
        ("device", f"{manifest.device}, times {manifest.source}"),
        *_memory_pairs(manifest),
        *_grid_pairs(bundle),
        *(("note", str(note)) for note in manifest.notes),
    ]
    lines(pairs, str(directory))
    rows = [
        (
            row.kind or "-",
            row.composition if row.is_composed else _counts(row),
            *(
                (time(row.step_ns), time(row.graph_ns), time(row.gpu_ns), time(row.host_ns))
                if row.fits
                else ("does not fit", "-", "-", "-")
            ),
            size(row.peak_bytes) if row.peak_bytes else "-",
        )
        for row in bundle.rows[:_ROWS]
    ]
    columns = ("step", "sequences", "eager", "CUDA graph", "kernels", "host", "memory")
    shown = "" if len(bundle.rows) <= _ROWS else f", {_ROWS} of {len(bundle.rows)}"
    table(f"Steps of one rank{shown}", columns, rows, texts=(0, 1))


def _memory_pairs(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield the lines on what fills the memory of the rank, as far as known."""
    memory = manifest.memory
    if memory.weights_bytes is not None:
        tokens = counted(memory.activations_tokens or 0, "new token")
        yield "weights", size(memory.weights_bytes)
        yield "KV cache", f"{size(memory.kv_bytes_per_token or 0)} per token"
        if memory.state_bytes_per_sequence:
            yield "states", f"{size(memory.state_bytes_per_sequence)} per sequence"
        for layers in memory.kv_windows:
            part = f"{size(layers.bytes_per_token)} of it in {counted(layers.layers, 'layer')}"
            yield "", f"{part} with {layers.window}"
        yield "activations", f"{size(memory.activations_bytes or 0)} at {tokens}"
    if fitting := tokens_that_fit(manifest):
        yield "tokens that fit", fitting


def _grid_pairs(bundle: Bundle) -> Iterator[tuple[str, str]]:
    """Yield the lines on interpolation between the measured compositions, and on their choice."""
    validation, extent = bundle.manifest.cross_validation, bundle.manifest.adaptive_grid
    if validation is not None:
        what = "as a CUDA graph" if any(row.graph_ns for row in bundle.rows) else "eager"
        yield (
            "interpolation",
            f"median error {validation.median:.1%}, p90 {validation.p90:.1%} of "
            f"{counted(validation.points, 'step')} left out in turn, {what}",
        )
    if extent is not None:
        reached = "" if extent.reached else "not "
        yield (
            "grid",
            f"{extent.measured} of {extent.offered} compositions measured, median error of "
            f"{100 * extent.wanted_error:g}% {reached}reached",
        )

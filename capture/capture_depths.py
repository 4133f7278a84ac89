"""Capture a script with fewer layers, at several depths, and extrapolate to the full depth.

Each depth runs in a separate process, so that it inherits no memory, cache or tuned kernel.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from onerank.capture.isolation import ProcessRunner, named_errors, named_progress, run_isolated
from onerank.capture.one_rank import Capture, capture
from onerank.capture.options import Options
from onerank.capture.parallelize.fewer_layers import Depth
from onerank.capture.profiling.raw_traces import check_raw_dir, keep
from onerank.capture.profiling.window_plan import Progress
from onerank.capture.validate import check_layers
from onerank.converters.expand.layers import extrapolate
from onerank.ir.scratch import scratch_directory


def capture_at_depths(
    script: Path,
    args: Sequence[str],
    options: Options,
    layers: Sequence[int],
    *,
    progress: Progress = lambda _: None,
    run: ProcessRunner = run_isolated,
) -> Capture:
    """Capture `script` with its Hugging Face model built at several depths, and extrapolate.

    Args:
        script: a training script that steps an optimizer.
        args: arguments of the script.
        options: what to capture; raw traces are kept in a directory per depth.
        layers: depths to capture, ascending.
        progress: receives a short description of each phase.
        run: runs each capture in a separate process.

    Returns:
        The graph at the model's full depth; everything else is that of the deepest capture.

    Raises:
        DepthError: the depths contradict the options, or the layers cannot be extrapolated.
        CaptureError: the script cannot be captured with these options.
    """
    check_layers(layers, options)
    check_raw_dir(options.raw_dir)
    captures: dict[int, Capture] = {}
    with scratch_directory() as directory:
        raw = directory / "raw"
        if options.raw_dir is not None:
            raw.mkdir()  # each capture writes its traces here before it renames them
        for count in layers:
            depth_options = replace(
                options,
                depth=Depth(count, tuple(layers)),
                # Raw traces move to the requested directory only after every depth succeeded, so a
                # failed capture leaves nothing half-written there.
                raw_dir=options.raw_dir and raw / f"{count}-layers",
            )
            label = f"{count} layer" + ("" if count == 1 else "s")
            with named_errors(f"at {label}"):
                captures[count] = run(
                    capture,
                    *(script, list(args), depth_options),
                    progress=named_progress(label, progress),
                )
        deepest = captures[layers[-1]]
        assert deepest.layers is not None
        progress("extrapolating")
        graphs = {count: captured.graph for count, captured in captures.items()}
        graph = extrapolate(graphs, deepest.layers.depth, deepest.layers.pattern)
        if options.raw_dir is not None:
            keep(raw, options.raw_dir)
    return replace(deepest, graph=graph)

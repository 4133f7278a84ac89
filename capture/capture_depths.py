"""Capture a script with fewer layers, at several depths, and extrapolate to the full depth.

Each depth runs in a process of its own, so that it inherits no memory, cache or tuned kernel.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from onerank.capture.isolation import ProcessRunner, named_errors, named_progress, run_isolated
from onerank.capture.options import Options
from onerank.capture.parallelize.fewer_layers import Depth
from onerank.capture.profiling.raw_traces import check_raw_dir, keep
from onerank.capture.profiling.window_plan import Progress
from onerank.capture.run import Capture, capture
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
        args: the script's own arguments.
        options: what to capture; raw traces are kept in a directory per depth.
        layers: depths to capture, ascending.
        progress: told in a few words what goes on.
        run: runs each in a process of its own.

    Returns:
        The graph at the model's own depth, with what the deepest capture tells of itself.

    Raises:
        DepthError: the depths are not fit, or the model's layers cannot be extrapolated.
        CaptureError: the script cannot be captured as asked.
    """
    check_layers(layers, options)
    check_raw_dir(options.raw_dir)
    captures: dict[int, Capture] = {}
    with scratch_directory() as directory:
        raw = directory / "raw"
        for count in layers:
            asked = replace(
                options,
                depth=Depth(count, tuple(layers)),
                raw_dir=options.raw_dir and raw / f"{count}-layers",
            )
            at = f"{count} layer" + ("" if count == 1 else "s")
            with named_errors(f"at {at}"):
                captures[count] = run(
                    capture, script, list(args), asked, progress=named_progress(at, progress)
                )
        deepest = captures[layers[-1]]
        assert deepest.layers is not None
        progress("extrapolating")
        graphs = {count: one.graph for count, one in captures.items()}
        graph = extrapolate(graphs, deepest.layers.depth, deepest.layers.pattern)
        if options.raw_dir is not None:
            keep(raw, options.raw_dir)
    return replace(deepest, graph=graph)

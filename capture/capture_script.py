"""Capture a script: as one rank, at several depths, or as several ranks in turn.

`capture` runs the script as one rank, observes its windows and converts their traces to a graph.
`capture_at_depths` captures it with fewer layers, at several depths, and extrapolates to the full
depth. `capture_ranks` captures several ranks on one device. Each depth and each rank runs in a
separate process, so that it inherits no memory, cache or tuned kernel.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from onerank.annotate.op_costs.node_costs import with_generated_work, with_registered_costs
from onerank.capture.emulate_torchrun import decide_torchrun
from onerank.capture.isolation import ProcessRunner, named_progress, run_isolated
from onerank.capture.job_record import job_of
from onerank.capture.options import Options, SeveralCaptures
from onerank.capture.parallelize.fewer_layers import Depth, Layers
from onerank.capture.parallelize.shard_model import classes_along
from onerank.capture.parallelize.tensor.apply_tensor_parallel import Sliced
from onerank.capture.profiling.profiled_windows import PLAIN_EXECUTION_TRACE, compress
from onerank.capture.profiling.window_observations import Observations
from onerank.capture.profiling.window_plan import Progress
from onerank.capture.run_as_rank import RankRun, run_as_rank
from onerank.capture.script.runner import Script
from onerank.capture.validate_options import (
    check_in_turn,
    check_layers,
    check_ranks,
    check_raw_dir,
    uses_torch_distributed,
    validate_early,
)
from onerank.converters.expand.layers import extrapolate
from onerank.converters.sources.kineto import (
    EXECUTION_TRACE,
    JOB,
    Conversion,
    convert_directory,
)
from onerank.ir import (
    Graph,
    InferenceStep,
    Phase,
    RankClass,
    World,
)
from onerank.ir.errors import CaptureError, errors_at
from onerank.ir.notes import Note
from onerank.ir.output_files import created, scratch_directory


@dataclass(frozen=True)
class Capture:
    """A captured rank.

    Attributes:
        graph: the step that was measured.
        conversion: statistics and notes of the conversion.
        sliced: class name and slice of each sliced model.
        layers: full depth and repetition of a model that was built with fewer layers; otherwise
            None.
    """

    graph: Graph
    conversion: Conversion
    sliced: list[tuple[str, Sliced]]
    layers: Layers | None = None


def capture(
    script: Path, args: Sequence[str], options: Options, progress: Progress = lambda _: None
) -> Capture:
    """Run `script` as one rank of a job whose other ranks do not exist, and return its graph.

    Args:
        script: a script that trains or infers.
        args: arguments of the script.
        options: what to capture.
        progress: receives a short description of each phase.

    Raises:
        CaptureError: the script cannot be captured with these options, or it infers and several
            steps are captured.
    """
    captures = capture_steps(script, args, options, progress)
    if len(captures) > 1:
        raise CaptureError(
            f"{script} infers, and its capture has {len(captures)} steps ({', '.join(captures)}), "
            "where one is expected\n  name one: --steps decode",
            code="steps-several",
        )
    return next(iter(captures.values()))


def capture_steps(
    script: Path, args: Sequence[str], options: Options, progress: Progress = lambda _: None
) -> dict[str, Capture]:
    """Run `script` as one rank of a job whose other ranks do not exist, and return its steps.

    Arguments and errors are those of `capture`.

    Returns:
        "prefill", "decode" or the number of a forward -> its capture, if the script infers. Of a
        script that trains, "" -> its step; with `Options.recorded_steps`, "0", "1", ... -> each.
    """
    with run_as_rank(Script(script, args, options.module), options, progress) as rank_run:
        steps = _raw_steps(rank_run, options)
        progress("linking the traces")
        for step in steps.values():
            job = job_of(rank_run, options, step.observed)
            job = msgspec.structs.replace(job, inference=step.inference)
            if options.emulated_gpu is None:
                compress(step.directory / PLAIN_EXECUTION_TRACE, step.directory / EXECUTION_TRACE)
            # The job is a file next to the traces, so that a directory that --raw-dir kept can be
            # converted again.
            (step.directory / JOB).write_bytes(msgspec.json.format(msgspec.json.encode(job)))
        if options.raw_dir is not None:
            only = next(iter(steps.values())).directory
            keep(rank_run.raw if len(steps) > 1 else only, options.raw_dir)
        captures: dict[str, Capture] = {}
        for label, step in steps.items():
            graph, conversion = convert_raw(step.directory)
            # Only this process knows what Inductor fused.
            graph = with_generated_work(graph, step.observed.generated_work)
            if not rank_run.forwards:
                graph = _noting_absent_backward(graph)
            captures[label] = Capture(
                graph,
                conversion,
                rank_run.models.sliced,
                rank_run.fewer_layers.layers,
            )
        return captures


def _noting_absent_backward(graph: Graph) -> Graph:
    """Return the graph; with a note if its optimizer stepped and nothing ran backward."""
    if (graph.nodes.phase == Phase.BACKWARD).any():
        return graph
    note = Note(
        "no operator of the step runs in a backward pass: the optimizer stepped without new "
        "gradients. Does the script call loss.backward()?",
        code="step-without-backward",
    )
    measured = graph.job.measurement
    measured = msgspec.structs.replace(measured, notes=(*measured.notes, note))
    return replace(graph, job=msgspec.structs.replace(graph.job, measurement=measured))


@dataclass(frozen=True)
class _RawStep:
    """The traces of a step, before their conversion.

    Attributes:
        directory: where they are.
        observed: what was observed of it.
        inference: the forward, of a script that infers.
    """

    directory: Path
    observed: Observations
    inference: InferenceStep | None = None


def _raw_steps(rank_run: RankRun, options: Options) -> dict[str, _RawStep]:
    """Return the steps of a run by their labels, as `capture_steps` returns them."""
    if rank_run.forwards:
        return {f.label: _RawStep(f.raw, f.windows.observed, f.step) for f in rank_run.forwards}
    if options.recorded_steps > 1:
        return {str(n): _RawStep(*step) for n, step in enumerate(rank_run.recorded_steps)}
    return {"": _RawStep(rank_run.raw, rank_run.windows.observed)}


def convert_raw(directory: Path) -> tuple[Graph, Conversion]:
    """Return the graph of the traces and the job in a directory, and the conversion's notes."""
    graph, conversion = convert_directory(directory)
    # The script's process knows the costs that the script registered; later ones do not.
    return with_registered_costs(graph), conversion


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
            # Each capture writes its traces here before it renames them.
            raw.mkdir()
        for count in layers:
            depth_options = replace(
                options,
                depth=Depth(count, tuple(layers)),
                # Raw traces move to the requested directory only after every depth succeeded, so a
                # failed capture leaves nothing half-written there.
                raw_dir=options.raw_dir and raw / f"{count}-layers",
            )
            label = f"{count} layer" + ("" if count == 1 else "s")
            with errors_at(f"at {label}"):
                captures[count] = run(
                    capture,
                    script,
                    list(args),
                    depth_options,
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


@dataclass(frozen=True)
class CapturedRanks:
    """Captured ranks of one job.

    Attributes:
        captures: by rank, ascending.
        represents: captured rank -> the equivalent ranks, including itself.
        missing: ranks that no captured rank represents.
    """

    captures: dict[int, Capture]
    represents: dict[int, tuple[int, ...]]
    missing: tuple[int, ...]


def capture_ranks(
    script: Path,
    args: Sequence[str],
    options: Options,
    ranks: Sequence[int] | None,
    *,
    layers: Sequence[int] | None = None,
    progress: Progress = lambda _: None,
    run: ProcessRunner = run_isolated,
) -> CapturedRanks:
    """Capture `script` as several ranks of one job, or as one of each class of equivalent ranks.

    Args:
        script: a training script that steps an optimizer.
        args: arguments of the script.
        options: what to capture; the rank is ignored. Raw traces are kept in a directory per rank.
        ranks: the ranks to capture; None captures one of each class. If the script distributes its
            model itself, a captured rank represents the ranks that have its coordinates on the axes
            along which the captured ranks differ.
        layers: depths to capture each rank at, as for `capture_at_depths`; None for all layers.
        progress: receives a short description of each phase.
        run: runs each capture in a separate process.

    Raises:
        CaptureError: a rank cannot be captured with these options, the classes of equivalent ranks
            are unknown, or captured ranks disagree on them.
        DepthError: as for `capture_at_depths`.
    """
    in_turn = SeveralCaptures(
        ranks="distinct" if ranks is None else tuple(ranks),
        capture_layers=None if layers is None else tuple(layers),
    )
    check_in_turn(options, in_turn, names_rank=False)
    validate_early(script, options, in_turn)
    options = decide_torchrun(Script(script, args, options.module), options, progress)
    is_distributed = uses_torch_distributed(script, options)
    check_ranks(script, options, ranks, distributed=is_distributed)
    pending = [0] if ranks is None else sorted(ranks)
    captures: dict[int, Capture] = {}
    with scratch_directory() as directory:
        raw = directory / "raw"
        if options.raw_dir is not None:
            raw.mkdir()
        # The loop extends its list: only the capture of rank 0 reports the classes.
        for rank in pending:
            raw_dir = options.raw_dir and raw / f"rank-{rank}"
            of_rank = replace(options, rank=rank, raw_dir=raw_dir)
            capture = _capture_rank(script, args, of_rank, layers, progress=progress, run=run)
            captures[rank], classes = capture, capture.graph.job.classes
            if ranks is None and rank == 0:
                pending += [each.representative for each in classes if each.representative]
                representatives = ", ".join(map(str, pending))
                progress(f"one rank of each class of equivalent ranks: {representatives}")
            _check_classes(rank, classes, pending[0], captures[pending[0]].graph.job.classes)
        if options.raw_dir is not None:
            keep(raw, options.raw_dir)
    if is_distributed:
        # Such a script shards its model itself, so a capture reports no classes.
        captures = _with_classes(captures, classes_along(options.world, pending))
    return _with_represented(captures, options.world)


def _capture_rank(
    script: Path,
    args: Sequence[str],
    options: Options,
    layers: Sequence[int] | None,
    *,
    progress: Progress,
    run: ProcessRunner,
) -> Capture:
    """Capture one of several ranks; its progress and errors begin with its number."""
    label = f"rank {options.rank}"
    progress = named_progress(label, progress)
    with errors_at(label):
        if layers is not None:
            return capture_at_depths(script, args, options, layers, progress=progress, run=run)
        return run(capture, script, list(args), options, progress=progress)


def _check_classes(
    rank: int, classes: Sequence[RankClass], first: int, expected: Sequence[RankClass]
) -> None:
    if classes != expected:
        raise CaptureError(
            f"rank {rank} has other classes of equivalent ranks ({_coordinates(classes)}) than "
            f"rank {first} ({_coordinates(expected)})\n  build the same model on every rank",
            code="ranks-classes-differ",
        )


def _coordinates(classes: Sequence[RankClass]) -> str:
    """Return the coordinates of each class as text."""
    return "; ".join(
        " ".join(f"{axis} {','.join(map(str, at))}" for axis, at in rank_class.where.items())
        or "all"
        for rank_class in classes
    )


def _with_classes(
    captures: dict[int, Capture], classes: tuple[RankClass, ...]
) -> dict[int, Capture]:
    """Return the captures with these classes in their jobs."""
    updated: dict[int, Capture] = {}
    for rank, captured in captures.items():
        job = msgspec.structs.replace(captured.graph.job, classes=classes)
        updated[rank] = replace(captured, graph=replace(captured.graph, job=job))
    return updated


def _with_represented(captures: dict[int, Capture], world: World) -> CapturedRanks:
    """Return the captures with the ranks that each represents."""
    represents: dict[int, tuple[int, ...]] = {}
    for rank, captured in captures.items():
        rank_class = captured.graph.job.rank_class
        represents[rank] = rank_class.members(world) if rank_class else (rank,)
    represented = {member for members in represents.values() for member in members}
    missing = tuple(rank for rank in range(world.size) if rank not in represented)
    return CapturedRanks(dict(sorted(captures.items())), represents, missing)


def keep(raw: Path, directory: Path) -> None:
    """Copy the traces to `directory`, which appears only when complete."""
    # The scratch directory is next to the target: a rename across file systems would fail.
    parent = directory.absolute().parent
    with created(parent), scratch_directory(parent) as scratch:
        copy = scratch / "raw"
        try:
            _copy_files(raw, copy)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(directory)) from error
        # It is empty: `check_raw_dir` refuses any other.
        if directory.exists():
            directory.rmdir()
        copy.rename(directory)


def _copy_files(source: Path, target: Path) -> None:
    """Copy a directory; unlike `shutil.copytree`, end at the first error and keep its number."""
    target.mkdir()
    for each in source.iterdir():
        copy = target / each.name
        if each.is_dir():
            _copy_files(each, copy)
        else:
            shutil.copyfile(each, copy)

"""Capture a script: as one rank, at several depths, or as several ranks in turn.

`capture` runs the script as one rank, observes its windows and converts their traces to a graph.
`capture_at_depths` captures it with fewer layers, at several depths, and extrapolates to the full
depth. `capture_ranks` captures several ranks on one device. Each depth and each rank runs in a
separate process, so that it inherits no memory, cache or tuned kernel.
"""

import contextlib
import importlib.metadata
import os
import platform
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch

from onerank.annotate.op_costs.node_costs import with_generated_work, with_registered_costs
from onerank.capture.emulate_torchrun import decide_torchrun
from onerank.capture.fake_world.recorder import Recorder
from onerank.capture.isolation import ProcessRunner, named_progress, run_isolated
from onerank.capture.no_device.emulated_gpu import EmulatedGpu
from onerank.capture.options import Options, SeveralCaptures
from onerank.capture.parallelize.fewer_layers import Depth, Layers
from onerank.capture.parallelize.shard_model import ModelSlicing, classes_along
from onerank.capture.parallelize.tensor.apply_tensor_parallel import Sliced
from onerank.capture.profiling.profiled_windows import PLAIN_EXECUTION_TRACE, compress
from onerank.capture.profiling.window_observations import Observations
from onerank.capture.profiling.window_plan import Progress
from onerank.capture.run_as_rank import RankRun, run_as_rank
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
    MODEL,
    Conversion,
    convert_directory,
)
from onerank.ir import (
    Device,
    Graph,
    Job,
    Measurement,
    Pipeline,
    ProcessGroup,
    RankClass,
    World,
    axis_of,
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
    with run_as_rank(script, args, options, progress) as rank_run:
        raw = rank_run.raw
        steps = [(f.label, f.raw, f.windows.observed, f.step) for f in rank_run.forwards]
        if not steps and options.recorded_steps > 1:
            recorded = rank_run.recorded_steps
            steps = [(str(n), *result, None) for n, result in enumerate(recorded)]
        elif not steps:
            steps = [("", raw, rank_run.windows.observed, None)]
        progress("linking the traces")
        for _, directory, observed, inference in steps:
            job = msgspec.structs.replace(job_of(rank_run, options, observed), inference=inference)
            if options.emulated_gpu is None:
                compress(directory / PLAIN_EXECUTION_TRACE, directory / EXECUTION_TRACE)
            # The job is a file next to the traces, so that a directory that --raw-dir kept can be
            # converted again.
            (directory / JOB).write_bytes(msgspec.json.format(msgspec.json.encode(job)))
        if options.raw_dir is not None:
            keep(raw if len(steps) > 1 else steps[0][1], options.raw_dir)
        captures: dict[str, Capture] = {}
        for label, directory, observed, _ in steps:
            graph, conversion = convert_raw(directory)
            # Only this process knows what Inductor fused.
            graph = with_generated_work(graph, observed.generated_work)
            captures[label] = Capture(
                graph,
                conversion,
                rank_run.models.sliced,
                rank_run.fewer_layers.layers,
            )
        return captures


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
    options = decide_torchrun(script, args, options, progress)
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
            rank_options = replace(
                options, rank=rank, raw_dir=options.raw_dir and raw / f"rank-{rank}"
            )
            captures[rank] = _capture_rank(
                script, args, rank_options, layers, progress=progress, run=run
            )
            classes = captures[rank].graph.job.classes
            if ranks is None and rank == 0:
                pending += [
                    rank_class.representative for rank_class in classes if rank_class.representative
                ]
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


def job_of(rank_run: RankRun, options: Options, observed: Observations) -> Job:
    """Return the job metadata of a graph: world, groups, device, measurement, modules."""
    peers = rank_run.peers
    # Scripts and torch create groups that a job never uses; a graph names only those with calls.
    used = {call.group for call in peers.calls} if isinstance(peers, Recorder) else peers.groups
    groups = tuple(
        ProcessGroup(name, ranks, axis=axis_of(ranks, options.world, options.rank, name))
        for name, ranks in peers.groups.items()
        if name in used
    )
    several = len(observed.profiled_step_ns) > 1
    gpu = options.emulated_gpu
    return Job(
        world=options.world,
        rank=options.rank,
        groups=groups,
        device=_device(observed) if gpu is None else _emulated_device(gpu),
        measurement=Measurement(
            step_ns=observed.step_ns,
            host_step_ns=tuple(observed.host_step_ns),
            emulated_calls=observed.emulated_calls,
            timed_step_ns=observed.timed_step_ns,
            scopes=observed.scopes,
            profiled_step_ns=round(statistics.median(observed.profiled_step_ns)),
            profiled_steps_ns=tuple(observed.profiled_step_ns) if several else (),
            profiled_host_ns=tuple(observed.profiled_host_ns),
            peak_memory_bytes=max(observed.peak_memory_bytes),
            start_memory_bytes=observed.start_memory_bytes[0],
            resident_bytes=observed.resident_bytes,
            resident_pools=observed.resident_pools,
            input_spread=observed.input_spread,
            versions=_versions(),
            notes=(*observed.notes, *_device_notes(options, observed)),
        ),
        modules=rank_run.modules.table(),
        pipeline=pipeline_of(rank_run.models),
        classes=_classes(rank_run, options.world),
    )


def _device_notes(options: Options, observed: Observations) -> list[Note]:
    """Return notes on what the trace lacks because no GPU ran the step."""
    gpu = options.emulated_gpu
    if gpu is not None:
        notes = [
            Note(
                f"run on no device, on shapes alone, as on a {gpu.name}: no time was measured",
                code="captured-without-device",
            )
        ]
        # A script that never moves to `cuda` runs on the CPU. Its graph looks like one of a GPU.
        if not max(observed.peak_memory_bytes):
            notes.append(
                Note(
                    "the script put no tensor on the GPU: its CPU operators count as the GPU's, "
                    "and no memory is recorded. Create its model and batches on `cuda`.",
                    code="no-device-gpu-unused",
                )
            )
        return notes
    if observed.on_gpu:
        return []
    notes = [
        Note(
            "measured on a CPU: its compute nodes are operators, not kernels",
            code="captured-on-cpu",
        )
    ]
    if options.emulation.network is not None:
        notes.append(
            Note(
                "no kernels emulated the collectives: that needs a GPU",
                code="collectives-not-emulated",
            )
        )
    return notes


def pipeline_of(models: ModelSlicing) -> Pipeline | None:
    """Return the pipeline of the first model that was sliced to a stage; None without one."""
    stages = (sliced.stage for _, sliced in models.sliced)
    return next((stage.pipeline for stage in stages if stage is not None), None)


def _classes(rank_run: RankRun, world: World) -> tuple[RankClass, ...]:
    """Return the classes of equivalent ranks; () if they are unknown."""
    classes = [sliced.classes for _, sliced in rank_run.models.sliced]
    if classes:
        return max(classes, key=len) if all(classes) else ()
    # Without slices every rank has the whole model, or an equal share of it (data parallelism).
    return () if rank_run.script_distributed or world.size == 1 else (RankClass(0),)


def _device(observed: Observations) -> Device:
    if observed.on_gpu:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return Device(
            type="cuda",
            name=properties.name,
            memory_bytes=properties.total_memory,
            sm_count=properties.multi_processor_count,
            sensors=observed.sensors,
        )
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return Device(type="cpu", name=cpu_name(), memory_bytes=pages * size)


def _emulated_device(gpu: EmulatedGpu) -> Device:
    return Device(type=MODEL, name=gpu.name, memory_bytes=gpu.memory_bytes, sm_count=gpu.sm_count)


def cpu_name() -> str:
    """Return the processor's model if Linux reports it, else its architecture."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for package in ("transformers", "onerank"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    return versions


def keep(raw: Path, directory: Path) -> None:
    """Copy the traces to `directory`, which appears only when complete."""
    # The scratch directory is next to the target: a rename across file systems would fail.
    parent = directory.absolute().parent
    with created(parent), scratch_directory(parent) as scratch:
        copy = shutil.copytree(raw, scratch / "raw")
        # It is empty: `check_raw_dir` refuses any other.
        if directory.exists():
            directory.rmdir()
        copy.rename(directory)

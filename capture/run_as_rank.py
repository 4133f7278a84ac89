"""Run a script as one rank of a job whose other ranks do not exist."""

import contextlib
import functools
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onerank.capture.checkpoints import SkippedCheckpoints, skip_checkpoints
from onerank.capture.emulate_torchrun import decide_torchrun, emulated_launch, sender_runner
from onerank.capture.fake_world.c10d_patches import hidden_group
from onerank.capture.fake_world.recorder import Peers, RealPeers, Recorder, peers_of
from onerank.capture.fake_world.sender_processes import SenderProcesses
from onerank.capture.isolation import named_progress
from onerank.capture.no_device.emulated_process import EmulatedProcess
from onerank.capture.no_device.recorded_step import UNRECORDED, StepRecorder
from onerank.capture.options import Options
from onerank.capture.parallelize.data.apply_data_parallel import DataParallelism
from onerank.capture.parallelize.data.data_groups import DataGroups, data_ranks
from onerank.capture.parallelize.data.grad_accumulation import DeferredGradSync
from onerank.capture.parallelize.data.grad_clipping import Clipping
from onerank.capture.parallelize.data.optimizers import cutting_states, note_of_slices
from onerank.capture.parallelize.experts.routing import BALANCED, parse_routing
from onerank.capture.parallelize.fewer_layers import FewerLayers, StageLayers
from onerank.capture.parallelize.shard_model import ModelSlicing, SlicingOptions, slice_to_rank
from onerank.capture.parallelize.tensor.apply_tensor_parallel import REPLICATED_HEADS, Sliced
from onerank.capture.parallelize.tensor.plan_file import class_name, without_plan
from onerank.capture.profiling.cuda_graphs import GraphRecorder, recorded_graphs
from onerank.capture.profiling.measurement_windows import Windows
from onerank.capture.profiling.module_scopes import Modules
from onerank.capture.profiling.window_observations import Observations
from onerank.capture.profiling.window_plan import Progress
from onerank.capture.script.before_first_step import BeforeFirstStep
from onerank.capture.script.error_hints import ModelChanges
from onerank.capture.script.inference_steps import (
    InferenceSteps,
    MeasuredForward,
    WindowsOfForward,
)
from onerank.capture.script.repeatable_call import RepeatableCall
from onerank.capture.script.runner import Script, run_script
from onerank.capture.start_ranks import block_launchers
from onerank.capture.validate_options import names_training, validate
from onerank.ir.errors import CaptureError
from onerank.ir.notes import Note
from onerank.ir.output_files import scratch_directory


@dataclass(frozen=True)
class RankRun:
    """The result of running a script as one rank.

    Attributes:
        raw: directory with the traces of the windows, or a directory for each forward in it;
            removed at the end of `run_as_rank`.
        peers: the other ranks: emulated, or real processes.
        models: the sliced models.
        modules: modules that the script called.
        windows: the measurement windows of a training step, and their observations.
        forwards: the captured forwards of a script that infers; () for a script that trains.
        fewer_layers: number of layers that models were built with.
        script_distributed: whether the script distributes itself.
        recorded_steps: directory and observations of each step, if several were recorded.
    """

    raw: Path
    peers: Recorder | RealPeers
    models: ModelSlicing
    modules: Modules
    windows: Windows
    forwards: tuple[MeasuredForward, ...]
    fewer_layers: FewerLayers
    script_distributed: bool
    recorded_steps: tuple[tuple[Path, Observations], ...] = ()


@contextlib.contextmanager
def run_as_rank(
    script: Script,
    options: Options,
    progress: Progress = lambda _: None,
    make_windows: Callable[..., Any] = Windows,
) -> Generator[RankRun]:
    """Run `script` as one rank of a job whose other ranks do not exist.

    A script that distributes itself runs unchanged in the requested world. In any other script the
    Hugging Face models are sliced. With a sharding plan, the plan's class is sliced in every
    script. The world exists while the context lasts.

    Args:
        script: a script that trains or infers.
        options: what to capture.
        progress: receives a short description of each phase.
        make_windows: creates the windows; takes the arguments of `Windows`.

    Raises:
        CaptureError: the script cannot run with these options.
    """
    path = script.path
    if path.is_file():
        options = decide_torchrun(script, options, progress)
    job = _RankJob(script, options, distributed=validate(path, options))
    emulated = EmulatedProcess.of(options.emulated_gpu, path, parse_routing(options.moe_routing))
    if emulated is not None:
        make_windows = _step_recorders(emulated, options)
    with scratch_directory() as raw, _as_one_rank(job, emulated, raw, progress) as rank:
        training: Any = make_windows(options.windows, raw, rank.modules, progress, rank.peers)
        make_windows_of = functools.partial(make_windows, options.windows)
        inference = _inference_steps(job, rank, raw, make_windows_of, progress)
        progress(f"running {path.name}")
        with emulated.running(rank.peers) if emulated else contextlib.nullcontext():
            run_script(
                script,
                training,
                _StepChecks(job, rank, training, emulated).at_step,
                changes=job.changes,
                before=BeforeFirstStep(path, progress, rank.modules),
                inference=inference,
            )
            forwards = tuple(inference.measured)
            for done in [forward.windows for forward in forwards] or [training]:
                done.observed.notes += rank.notes(done.steps)
            yield RankRun(
                raw=raw,
                peers=rank.peers,
                models=rank.models,
                modules=rank.modules,
                windows=training,
                forwards=forwards,
                fewer_layers=rank.fewer_layers,
                script_distributed=job.distributed,
                recorded_steps=tuple(training.results) if options.recorded_steps > 1 else (),
            )


@dataclass(frozen=True)
class _RankJob:
    """A script, and the job of which it runs one rank.

    Attributes:
        script: the script.
        options: as for `capture`.
        distributed: whether the script distributes itself.
    """

    script: Script
    options: Options
    distributed: bool

    @property
    def copies(self) -> int:
        """Number of data-parallel ranks."""
        return len(data_ranks(self.options.world, self.options.rank))

    @property
    def slices(self) -> bool:
        """Whether the capture slices the script's models."""
        world = self.options.world
        splits = world.size > self.copies or world.ep > 1 or "cp" in world.sizes
        return splits and not self.distributed

    @property
    def changes(self) -> ModelChanges:
        """What the capture changes in the script's models."""
        return ModelChanges(
            fsdp_shards=self.options.data_parallel == "fsdp",
            partial_sequence=self.slices and self.options.world.sizes.get("cp", 1) > 1,
        )

    @property
    def infers(self) -> bool:
        """Whether the script only infers, by its options and its text."""
        named = self.options.steps is not None or self.options.step_of is not None
        return named or not names_training(self.script.path, self.options)


@dataclass(frozen=True)
class _EmulatedRank:
    """The parts that let this process run as one rank of the job, and record what it does.

    Attributes:
        peers: the other ranks.
        models: slices the models, if the job slices any.
        modules: modules that the script calls.
        graphs: CUDA graphs that the script captures.
        fewer_layers: builds the models with fewer layers.
        skipped_checkpoints: checkpoints that the script did not write.
    """

    peers: Recorder | RealPeers
    models: ModelSlicing
    modules: Modules
    graphs: GraphRecorder
    fewer_layers: FewerLayers
    skipped_checkpoints: SkippedCheckpoints

    def notes(self, steps: int) -> list[Note]:
        """Return notes on what differs from the job, after the script has made `steps` steps."""
        peers = self.peers
        sums_note = peers.partial_sums.note() if isinstance(peers, Recorder) else None
        return [
            *self.skipped_checkpoints.notes(steps),
            *filter(None, [sums_note]),
            *self.graphs.notes(),
        ]


@contextlib.contextmanager
def _as_one_rank(
    job: _RankJob, emulated: EmulatedProcess | None, raw: Path, progress: Progress
) -> Generator[_EmulatedRank]:
    """Make this process one rank of the job: its peers, its launch, its part of the models."""
    options = job.options
    with contextlib.ExitStack() as stack:
        peers = stack.enter_context(_running_peers(job, emulated, progress))
        models = slicing_to_rank(peers, options, infers=job.infers)
        skipped_checkpoints = stack.enter_context(_launched(job))
        # Before the hooks of the parallel forms: a collective that such a hook issues as a forward
        # begins must run inside the module's scope.
        modules = Modules()
        stack.enter_context(modules.installed())
        if not job.distributed:
            sliced_models = models if job.slices else None
            stack.enter_context(_parallel(sliced_models, job.copies, peers, options))
        graphs = stack.enter_context(recorded_graphs(modules, raw, on_device=emulated is None))
        fewer_layers = FewerLayers(
            options.depth,
            StageLayers.of(options.world, options.rank, options.pp_layers) if job.slices else None,
        )
        stack.enter_context(fewer_layers.installed())
        yield _EmulatedRank(peers, models, modules, graphs, fewer_layers, skipped_checkpoints)


@contextlib.contextmanager
def _running_peers(
    job: _RankJob, emulated: EmulatedProcess | None, progress: Progress
) -> Generator[Recorder | RealPeers]:
    """Yield the other ranks of the job, started, in a process that shows the emulated GPU."""
    options = job.options
    with contextlib.ExitStack() as stack:
        messages = None
        if job.distributed and not options.record_real_job:
            # Before the script can initialise CUDA: senders are forks, and CUDA works in no fork
            # of a process that has initialised it.
            run_sender = sender_runner(job.script, options)
            senders = SenderProcesses(options.rank, run_sender, progress)
            messages = stack.enter_context(senders.ready())
        peers = peers_of(
            options.rank,
            options.world.size,
            real=options.record_real_job,
            messages=messages,
            emulation=options.emulation,
        )
        stack.enter_context(emulated.installed() if emulated else contextlib.nullcontext())
        peers.start()
        stack.callback(peers.stop)
        yield peers


@contextlib.contextmanager
def _launched(job: _RankJob) -> Generator[SkippedCheckpoints]:
    """Show the script the launch it expects; yield the checkpoints that it did not write.

    A script that distributes itself sees a launch by torchrun, any other a job of one process. A
    recorded real job keeps its own launch and writes its checkpoints.
    """
    if job.options.record_real_job:
        yield SkippedCheckpoints()
        return
    launch = (
        emulated_launch(job.options, job.options.rank) if job.distributed else _single_process()
    )
    with skip_checkpoints() as skipped, launch:
        yield skipped


@contextlib.contextmanager
def _single_process() -> Generator[None]:
    """Show the script a job of one process, for which it was written."""
    with block_launchers(), hidden_group():
        yield


def _step_recorders(emulated: EmulatedProcess, options: Options) -> Callable[..., Any]:
    """Return what creates the windows of a capture without a device."""
    return functools.partial(
        StepRecorder,
        emulated,
        unrecorded=unrecorded_steps(options),
        recorded=options.recorded_steps,
    )


def _inference_steps(
    job: _RankJob,
    rank: _EmulatedRank,
    raw: Path,
    make_windows: Callable[..., Any],
    progress: Progress,
) -> InferenceSteps:
    """Return what measures the forwards of a script that infers, in directories of `raw`."""
    return InferenceSteps(
        rank.modules,
        job.options.steps or (),
        raw,
        _windows_of_forwards(make_windows, rank, progress),
        recognise=job.infers,
        step_of=job.options.step_of,
    )


def _windows_of_forwards(
    make_windows: Callable[..., Any], rank: _EmulatedRank, progress: Progress
) -> WindowsOfForward:
    """Return what creates the windows of each captured forward of a script that infers."""

    def windows_of_forward(directory: Path, *, forward: RepeatableCall, on_gpu: bool) -> Any:
        rank.graphs.directory = directory
        return make_windows(
            directory,
            rank.modules,
            named_progress(directory.name, progress),
            rank.peers,
            forward=forward,
            on_gpu=on_gpu,
        )

    return windows_of_forward


def unrecorded_steps(options: Options) -> int:
    """Return the steps before the first recorded one, of a capture without a device."""
    copies = len(data_ranks(options.world, options.rank))
    settles_late = copies > 1 and options.data_parallel != "fsdp"
    return UNRECORDED if not options.micro_batches or settles_late else 1


@dataclass(frozen=True)
class _StepChecks:
    """Checks at the end of each step that the script is captured as its options say.

    Attributes:
        job: the script and its options.
        rank: lets the process run as one rank of the job.
        training: the windows of training steps; each captured forward has other windows.
        emulated: the process without a device; None on a device.
    """

    job: _RankJob
    rank: _EmulatedRank
    training: Any
    emulated: EmulatedProcess | None

    def at_step(self, windows: Any) -> None:
        """Check the step that ends, which `windows` observed.

        Raises:
            CaptureError: an option had no effect, or a collective cannot be emulated.
        """
        peers, trains = self.rank.peers, windows is self.training
        if self.job.distributed and isinstance(peers, Recorder):
            peers.next_step()
        self.rank.fewer_layers.check_built(self.job.script.path)
        if isinstance(peers, Recorder) and peers.refused is not None:
            raise peers.refused
        self._check_parallel(windows.steps, trains=trains)
        self._check_slices(windows.steps, trains=trains)
        tp = self.job.options.world.sizes.get("tp", 1)
        if windows.steps == 0 and self.job.slices and tp > 1:
            windows.observed.notes += filter(None, [note_of_slices()])

    def _check_parallel(self, steps: int, *, trains: bool) -> None:
        """Raise if a world of several ranks goes unused in the script's first steps.

        `steps` is the number of steps before the one that ends.
        """
        options, models = self.job.options, self.rank.models if self.job.slices else None
        # An encoder of images, which is a step of a generation, is whole on each rank.
        if options.world.size == 1 or (models is not None and models.sliced and not trains):
            return
        # Not after the first step: a script that averages parameters between steps communicates for
        # the first time after it.
        silent = isinstance(self.rank.peers, Recorder) and not self.rank.peers.calls and steps == 1
        whole = models is not None and not models.sliced and steps == 0
        if silent or whole:
            finding = "no model was sliced" if models is not None else "nothing was communicated"
            passed_over = models.passed_over if models is not None else None
            raise nothing_parallel_error(self.job.script.path, options, finding, passed_over)

    def _check_slices(self, steps: int, *, trains: bool) -> None:
        """Raise if `--moe-routing` has no router to apply to, or a slice for inference trains."""
        routed = steps > 0 or (self.emulated is not None and self.emulated.routed)
        script, options = self.job.script.path, self.job.options
        sliced_models = self.rank.models.sliced
        if options.moe_routing != BALANCED and not sliced_models and not routed:
            raise nothing_routed_error(script, options)
        if trains and any(REPLICATED_HEADS in sliced.modules for _, sliced in sliced_models):
            raise CaptureError(
                f"{script} trains, but its text names no optimizer, so its key-value heads were "
                "replicated as in a serving engine\n  import torch.optim in the script",
                code="heads-replicated",
            )


@contextlib.contextmanager
def _parallel(
    models: ModelSlicing | None, copies: int, peers: Peers, options: Options
) -> Generator[None]:
    """Slice a script's models and apply data parallelism to them while the context lasts.

    Args:
        models: slices the models; None leaves them whole.
        copies: number of data-parallel ranks.
        peers: creates the process groups.
        options: as for `capture`.
    """
    world, rank = options.world, options.rank
    with contextlib.ExitStack() as stack:
        if models is not None:
            stack.enter_context(models.installed())
        shards = None
        strategy = options.data_parallel or "ddp"
        # --zero 2 reduces gradients as they arrive, so no sum over micro-batches can be deferred.
        if models is not None and options.tp_style == "megatron" and strategy != "zero2":
            deferred_sums = DeferredGradSync(models.slices_of, options.micro_batches)
            stack.enter_context(deferred_sums.installed())
        if copies > 1:
            deferred = strategy == "fsdp" and models is None and has_accelerator()
            groups = DataGroups(peers.new_group, world, rank)
            data = DataParallelism(
                strategy, groups, deferred=deferred, micro_batches=options.micro_batches
            )
            stack.enter_context(data.installed())
            shards = data.shards
        if models is not None:
            clipping = Clipping(models.slices_of, world, rank, peers.new_group, shards)
            stack.enter_context(clipping.installed())
            stack.enter_context(cutting_states(models.slices_of))
        yield


def has_accelerator() -> bool:
    """Return whether models may be too large for their device before they are sharded.

    False on a CPU: the whole model is built in the same memory anyway.
    """
    return torch.cuda.is_available()


def slicing_to_rank(peers: Peers, options: Options, *, infers: bool = False) -> ModelSlicing:
    """Return the slicing of a script's models for the rank in `options`.

    `infers` is whether the script only infers.
    """
    slicing = SlicingOptions(
        tp_style=options.tp_style,
        plan=options.plan,
        sequence=options.sp,
        routing=parse_routing(options.moe_routing),
        peers_absent=not options.record_real_job,
        pp_layers=options.pp_layers,
        stage_depth=options.depth.layers if options.depth else None,
        cp_comm=options.cp_comm,
        replicate_heads=infers,
    )

    def slice_one(model: nn.Module) -> Sliced:
        return slice_to_rank(model, options.world, options.rank, peers.new_group, slicing)

    return ModelSlicing(slice_one, options.plan.classes if options.plan else None)


def nothing_parallel_error(
    script: Path, options: Options, finding: str, passed_over: nn.Module | None
) -> CaptureError:
    """Return the error of a script whose first steps did not use a world of several ranks.

    Args:
        script: path of the script.
        options: options of the capture.
        finding: "no model was sliced" or "nothing was communicated".
        passed_over: the first model that was called and not sliced.
    """
    if options.torchrun:
        why = (
            "The script ran as torchrun would start it. To slice its models instead, give "
            "--no-torchrun. Without a GPU, accelerate and the HF Trainer communicate only if they "
            "are set to use the CPU: --use_cpu, or ACCELERATE_USE_CPU=true"
        )
    elif passed_over is None:
        why = (
            "onerank slices Hugging Face models (transformers.PreTrainedModel) and, with "
            "--sharding-plan FILE, a class that the script defines. If the script distributes "
            "itself, give --torchrun"
        )
    elif options.plan is None:
        why = without_plan(passed_over)
    else:
        why = (
            f"The plan slices the class {' or '.join(options.plan.classes)}; the script called "
            f"a {class_name(passed_over)}"
        )
    return CaptureError(
        f"{script}: in its first steps in a world of {options.world} {finding}\n"
        f"  to capture the whole model, leave the sizes out. {why}",
        code="nothing-parallel",
    )


def nothing_routed_error(script: Path, options: Options) -> CaptureError:
    """Return the error of --moe-routing for a script without a router that it applies to."""
    return CaptureError(
        f"--moe-routing {options.moe_routing} has no effect: it applies to sliced models (--tp, "
        f"--ep), and in a world of {options.world} no model of {script} was sliced. Without a "
        "device it also applies to routers in the script; a file then needs one line for all "
        "layers\n  leave it out",
        code="routing-unused",
    )

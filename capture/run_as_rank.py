"""Run a script as one rank of a job whose other ranks do not exist."""

import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from onerank.capture.emulate_torchrun import decide_torchrun, emulated_launch, sender_runner
from onerank.capture.fake_world.block_spawn import block_launchers
from onerank.capture.fake_world.checkpoint.dcp import SkippedCheckpoints, skip_checkpoints
from onerank.capture.fake_world.hidden_group import hidden_group
from onerank.capture.fake_world.peers import Peers, RealPeers, peers_of
from onerank.capture.fake_world.recorder import Recorder
from onerank.capture.fake_world.senders import SenderProcesses
from onerank.capture.options import Options
from onerank.capture.parallelize.auto_slicer import ModelSlicing
from onerank.capture.parallelize.data.auto_wrap import DataParallelism
from onerank.capture.parallelize.data.data_groups import Groups, data_ranks
from onerank.capture.parallelize.data.grad_accumulation import DeferredGradSync
from onerank.capture.parallelize.data.grad_clipping import Clipping
from onerank.capture.parallelize.data.optimizers import cutting_states, note_of_slices
from onerank.capture.parallelize.experts.routing import BALANCED, parse_routing
from onerank.capture.parallelize.fewer_layers import FewerLayers, StageLayers
from onerank.capture.parallelize.shard_model import slice_to_rank
from onerank.capture.parallelize.tensor.plan_file import without_plan
from onerank.capture.parallelize.tensor.slicer import Sliced
from onerank.capture.profiling.module_scopes import Modules
from onerank.capture.profiling.window_plan import Progress
from onerank.capture.profiling.window_runner import Windows
from onerank.capture.script.before_first_step import BeforeFirstStep
from onerank.capture.script.runner import run_script
from onerank.capture.validate_options import validate
from onerank.ir.errors import CaptureError
from onerank.ir.scratch import scratch_directory


@dataclass(frozen=True)
class RankRun:
    """A script that was run as one rank.

    Attributes:
        raw: directory that the windows wrote to; it goes with the context.
        peers: the other ranks' stand-ins.
        models: what was sliced.
        modules: what the script called.
        windows: what was watched.
        shallow: how many layers the models were built with.
        script_distributed: whether the script uses torch.distributed itself.
    """

    raw: Path
    peers: Recorder | RealPeers
    models: ModelSlicing
    modules: Modules
    windows: Windows
    shallow: FewerLayers
    script_distributed: bool


@contextlib.contextmanager
def run_as_rank(
    script: Path,
    args: Sequence[str],
    options: Options,
    progress: Progress = lambda _: None,
    watch: Callable[..., Windows] = Windows,
) -> Generator[RankRun]:
    """Run `script` as one rank of a job that is not there; the world lasts as long as the context.

    A script that distributes itself runs as it is, in the requested world; in any other script the
    Hugging Face models are sliced. With a plan its class is sliced in every script.

    Args:
        script: as for `capture`.
        args: as for `capture`.
        options: as for `capture`.
        progress: as for `capture`.
        watch: makes the windows, from what `Windows` takes.

    Raises:
        CaptureError: the script cannot be run as asked.
    """
    if script.is_file():
        options = decide_torchrun(script, args, options, progress)
    script_distributed = validate(script, options)
    world = options.world
    copies = len(data_ranks(world, options.rank))
    slices = not script_distributed and (world.size > copies or world.ep > 1 or "cp" in world.sizes)
    with contextlib.ExitStack() as stack:
        raw = stack.enter_context(scratch_directory())
        messages = None
        if script_distributed and not options.record_real_job:
            rehearsal = SenderProcesses(
                options.rank, sender_runner(script, args, options), progress
            )
            messages = stack.enter_context(rehearsal.ready())
        peers = peers_of(
            options.rank,
            world.size,
            real=options.record_real_job,
            messages=messages,
            emulation=options.emulation,
        )
        peers.start()
        stack.callback(peers.stop)
        models = slicing(peers, options)
        left_out = SkippedCheckpoints()
        if not options.record_real_job:
            left_out = stack.enter_context(skip_checkpoints())
            started = (
                emulated_launch(options, options.rank) if script_distributed else _single_process()
            )
            stack.enter_context(started)
        modules = Modules()  # first, so that what is communicated as a forward begins is in it
        stack.enter_context(modules.installed())
        if not script_distributed:
            stack.enter_context(_parallel(models if slices else None, copies, peers, options))
        shallow = FewerLayers(
            options.depth,
            StageLayers.of(world, options.rank, options.pp_layers) if slices else None,
        )
        stack.enter_context(shallow.installed())
        windows = watch(options.windows, raw, modules, progress, peers)

        def at_step() -> None:
            if script_distributed and isinstance(peers, Recorder):
                peers.next_step()
            shallow.check_built(script)
            if isinstance(peers, Recorder) and peers.refused is not None:
                raise peers.refused
            # after its second step: one may average parameters behind the first
            silent = isinstance(peers, Recorder) and not peers.calls and windows.steps == 1
            whole = slices and not models.sliced and windows.steps == 0
            if world.size > 1 and (silent or whole):
                found = "no model was sliced" if slices else "nothing was communicated"
                raise nothing_parallel_error(script, options, found, models.passed_over)
            if windows.steps == 0 and options.moe_routing != BALANCED and not models.sliced:
                raise nothing_routed_error(script, options)
            cut = slices and world.sizes.get("tp", 1) > 1
            if windows.steps == 0 and cut and (note := note_of_slices()) is not None:
                windows.observed.notes.append(note)

        progress(f"running {script.name}")
        run_script(
            *(script, args, windows, at_step),
            module=options.module,
            sharded=options.data_parallel == "fsdp",
            parted=slices and world.sizes.get("cp", 1) > 1,
            before=BeforeFirstStep(script, progress, modules),
        )
        made_up = peers.partial_sums.note() if isinstance(peers, Recorder) else None
        windows.observed.notes += [*left_out.notes(windows.steps), *filter(None, [made_up])]
        yield RankRun(raw, peers, models, modules, windows, shallow, script_distributed)


@contextlib.contextmanager
def _single_process() -> Generator[None]:
    """Let the script see a job of one process, the form in which it was written."""
    with block_launchers(), hidden_group():
        yield


@contextlib.contextmanager
def _parallel(
    models: ModelSlicing | None, copies: int, peers: Peers, options: Options
) -> Generator[None]:
    """Slice a script's models, and share them among their copies, while the context lasts.

    Args:
        models: what slices them; None leaves them whole.
        copies: ranks that hold the same, and see other data.
        peers: makes the groups.
        options: as for `capture`.
    """
    world, rank = options.world, options.rank
    with contextlib.ExitStack() as stack:
        if models is not None:
            stack.enter_context(models.installed())
        shards = None
        strategy = options.data_parallel or "ddp"
        # --zero 2 takes gradients away as they come
        if models is not None and options.tp_style == "megatron" and strategy != "zero2":
            stack.enter_context(DeferredGradSync(models.slices_of).installed())
        if copies > 1:
            deferred = strategy == "fsdp" and models is None and has_accelerator()
            groups = Groups(peers.new_group, world, rank)
            data = DataParallelism(strategy, groups, deferred=deferred)
            stack.enter_context(data.installed())
            shards = data.shards
        if models is not None:
            clipping = Clipping(models.slices_of, world, rank, peers.new_group, shards)
            stack.enter_context(clipping.installed())
            stack.enter_context(cutting_states(models.slices_of))
        yield


def has_accelerator() -> bool:
    """Whether models may be too large for where they go; a CPU has them whole anyway."""
    return torch.cuda.is_available()


def slicing(peers: Peers, options: Options) -> ModelSlicing:
    """Return what slices a script's models for the rank that `options` names."""
    routing = parse_routing(options.moe_routing)

    def slice_one(model: nn.Module) -> Sliced:
        return slice_to_rank(
            model,
            options.world,
            options.rank,
            peers.new_group,
            tp_style=options.tp_style,
            plan=options.plan,
            sequence=options.sp,
            routing=routing,
            peers_absent=not options.record_real_job,
            pp_layers=options.pp_layers,
            stage_depth=options.depth.layers if options.depth else None,
            cp_comm=options.cp_comm,
        )

    return ModelSlicing(slice_one, options.plan.classes if options.plan else None)


def nothing_parallel_error(
    script: Path, options: Options, found: str, passed_over: nn.Module | None
) -> CaptureError:
    """Return the error of a script that did a first step, and a world of several ranks unused.

    Args:
        script: what ran.
        options: what was asked for.
        found: what was missed.
        passed_over: the first model that was called and not sliced.
    """
    if options.torchrun:
        why = (
            "The script ran as torchrun would start it, and communicated nothing. To slice its "
            "models instead, give --no-torchrun. Where there is no GPU, accelerate and the HF "
            "Trainer communicate only when told to take the CPU: --use_cpu, or "
            "ACCELERATE_USE_CPU=true"
        )
    elif passed_over is None:
        why = (
            "onerank slices Hugging Face models (transformers.PreTrainedModel) and, with "
            "--sharding-plan FILE, a class of the script's own. If the script distributes itself, "
            "give --torchrun"
        )
    elif options.plan is None:
        why = without_plan(passed_over)
    else:
        why = (
            f"The plan slices the class {' or '.join(options.plan.classes)}; the script "
            "called "
            f"a {type(passed_over).__name__}"
        )
    return CaptureError(
        f"{script}: in its first steps in a world of {options.world} {found}. "
        f"To capture it whole, leave the sizes out. {why}",
        code="nothing-parallel",
    )


def nothing_routed_error(script: Path, options: Options) -> CaptureError:
    """Return the error of a script whose tokens are to be routed, and none of whose models is."""
    return CaptureError(
        f"--moe-routing {options.moe_routing}: it holds for models that onerank slices "
        f"(--tp, --ep), and in a world of {options.world} it sliced none of {script}: leave it out",
        code="routing-unused",
    )

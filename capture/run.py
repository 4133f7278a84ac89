"""Capture one rank of a job: run the script, watch its windows, lower the traces to a graph."""

import contextlib
import gzip
import importlib.metadata
import os
import platform
import re
import shutil
import statistics
import tempfile
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from torch import nn

from onerank.capture.context import ContextComm
from onerank.capture.data_groups import Groups, data_ranks
from onerank.capture.data_parallel import DataParallelism, Form
from onerank.capture.models import ModelSlicing
from onerank.capture.peers import Peers, RealPeers, peers_of
from onerank.capture.planfile import SlicingPlan, without_plan
from onerank.capture.rank_slice import slice_to_rank
from onerank.capture.recorder import Recorder
from onerank.capture.rehearsal import Messages, Rehearsal
from onerank.capture.routing import BALANCED, parse_routing
from onerank.capture.scopes import Modules
from onerank.capture.script import environment, play_script, run_script
from onerank.capture.shallow import Depth, Layers, Shallow
from onerank.capture.slicer import Sliced
from onerank.capture.standin import StandIn
from onerank.capture.styles import Flavour
from onerank.capture.windows import PLAIN_EXECUTION_TRACE, Observed, Plan, Progress, Windows
from onerank.converters.kineto import EXECUTION_TRACE, JOB, Conversion, convert_directory
from onerank.ir import (
    Device,
    Graph,
    Job,
    Measurement,
    Module,
    ProcessGroup,
    RankClass,
    World,
    axis_of,
)
from onerank.ir.errors import CaptureError

_DISTRIBUTES_ITSELF = re.compile(r"torch\.distributed|init_process_group|init_device_mesh")


@dataclass(frozen=True)
class Options:
    """What to capture.

    Attributes:
        world: sizes of the parallel axes.
        rank: global rank to stand for.
        flavour: where the slicer places its borders.
        sequence: whether the slicer shards norms and residuals along the sequence.
        slicing: what to slice of the script's own model class; None slices Hugging Face models.
        plan: steps per window.
        keep_raw: directory to keep the traces in, for `onerank convert`; None keeps none.
        data_parallel: how the ranks that see other data share gradients and states, in scripts
            that know nothing of it; None is "ddp".
        depth: how many layers to build Hugging Face models with; None for all.
        real: whether the other ranks are there, launched by torchrun, and the script communicates
            with them; `plan` must then not settle.
        moe_routing: how tokens are routed to the experts of a sliced model: "balanced",
            "zipf:S", "model" (by its own router) or the name of a file (see `routing`).
        pp_layers: layers of each pipeline stage; () splits them evenly.
        standin: what takes the place of collectives on CUDA.
        cp_comm: how keys and values travel between context-parallel ranks of a sliced model.
    """

    world: World = field(default_factory=World)
    rank: int = 0
    flavour: Flavour = "megatron"
    sequence: bool = False
    slicing: SlicingPlan | None = None
    plan: Plan = field(default_factory=Plan)
    keep_raw: Path | None = None
    data_parallel: Form | None = None
    depth: Depth | None = None
    real: bool = False
    moe_routing: str = BALANCED
    pp_layers: tuple[int, ...] = ()
    standin: StandIn = field(default_factory=StandIn)
    cp_comm: ContextComm = "all_gather"


@dataclass(frozen=True)
class Capture:
    """A captured rank: the graph, how it was converted, and what was sliced.

    `layers` tells of a model that was built with fewer layers how many it has, and how they repeat.
    """

    graph: Graph
    conversion: Conversion
    sliced: list[tuple[str, Sliced]]
    layers: Layers | None = None


def capture(
    script: Path, args: Sequence[str], options: Options, progress: Progress = lambda _: None
) -> Capture:
    """Run `script` as one rank of a job that is not there, and lower what was recorded.

    Args:
        script: a training script that steps a torch.optim optimizer.
        args: the script's own arguments.
        options: what to capture.
        progress: told in a few words what goes on.

    Raises:
        CaptureError: the script cannot be captured as asked.
    """
    with play(script, args, options, progress) as played:
        job = _job(options, played.peers, played.windows.observed, played.modules.table())
        job = _with_classes(job, played)
        progress("linking the traces")
        raw = played.raw
        _compress(raw / PLAIN_EXECUTION_TRACE, raw / EXECUTION_TRACE)
        (raw / JOB).write_bytes(msgspec.json.format(msgspec.json.encode(job)))
        if options.keep_raw is not None:
            keep(raw, options.keep_raw)
        graph, conversion = convert_directory(raw)
        return Capture(graph, conversion, played.models.sliced, played.shallow.layers)


@dataclass(frozen=True)
class Played:
    """A script that was run as one rank.

    Attributes:
        raw: directory that the windows wrote to; it goes with the context.
        peers: the other ranks' stand-ins.
        models: what was sliced.
        modules: what the script called.
        windows: what was watched.
        shallow: how many layers the models were built with.
        itself: whether the script distributes itself.
    """

    raw: Path
    peers: Recorder | RealPeers
    models: ModelSlicing
    modules: Modules
    windows: Windows
    shallow: Shallow
    itself: bool


@contextlib.contextmanager
def play(
    script: Path,
    args: Sequence[str],
    options: Options,
    progress: Progress = lambda _: None,
    watch: Callable[..., Windows] = Windows,
) -> Generator[Played]:
    """Run `script` as one rank of a job that is not there; the world lasts as long as the context.

    A script that uses torch.distributed is run as it is, in the world asked for; in any other
    script the Hugging Face models are sliced. With a plan its class is sliced in every script.

    Args:
        script: as for `capture`.
        args: as for `capture`.
        options: as for `capture`.
        progress: as for `capture`.
        watch: makes the windows, from what `Windows` takes.

    Raises:
        CaptureError: the script cannot be run as asked.
    """
    itself = _checked(script, options)
    world = options.world
    copies = len(data_ranks(world, options.rank))
    slices = not itself and (world.size > copies or world.ep > 1 or "cp" in world.sizes)
    with contextlib.ExitStack() as stack:
        raw = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="onerank-")))
        messages = None
        if itself and not options.real:
            messages = Rehearsal(options.rank, _actor(script, args, options), progress)
            stack.enter_context(messages.ready())
        peers = peers_of(
            options.rank,
            world.size,
            real=options.real,
            messages=messages,
            standin=options.standin,
        )
        peers.start()
        stack.callback(peers.stop)
        models = slicing(peers, options)
        modules = Modules()
        if itself and not options.real:
            stack.enter_context(environment(_torchrun(options.rank, world.size)))
        if slices:
            stack.enter_context(models.installed())
        if copies > 1 and not itself:
            groups = Groups(peers.new_group, world, options.rank)
            form = options.data_parallel or "ddp"
            stack.enter_context(DataParallelism(form, groups).installed())
        shallow = Shallow(options.depth)
        stack.enter_context(shallow.installed())
        stack.enter_context(modules.installed())
        windows = watch(options.plan, raw, modules, progress, _pacer(peers))

        def at_step() -> None:
            shallow.check_built(script)
            if isinstance(peers, Recorder) and peers.refused is not None:
                raise peers.refused
            silent = isinstance(peers, Recorder) and not peers.calls
            whole = slices and not models.sliced
            if windows.steps == 0 and world.size > 1 and (silent or whole):
                found = "no model was sliced" if slices else "nothing was communicated"
                raise _nothing_parallel(script, options, found, models.passed_over)
            if windows.steps == 0 and options.moe_routing != BALANCED and not models.sliced:
                raise CaptureError(
                    f"--moe-routing {options.moe_routing}: it holds for models that onerank slices "
                    f"(--tp, --ep), and in a world of {world} it sliced none of {script}: leave "
                    "it out"
                )

        progress(f"running {script.name}")
        run_script(script, args, windows, at_step)
        yield Played(raw, peers, models, modules, windows, shallow, itself)


def distributes_itself(script: Path, options: Options) -> bool:
    """Whether a script uses torch.distributed, and no plan says what of it to slice."""
    text = script.read_text(errors="replace")
    return options.slicing is None and bool(_DISTRIBUTES_ITSELF.search(text))


def _checked(script: Path, options: Options) -> bool:
    """Check the options before any work; return whether the script distributes itself."""
    if not script.is_file():
        raise CaptureError(f"{script}: no such script")
    world = options.world
    if not 0 <= options.rank < world.size:
        raise CaptureError(
            f"--rank {options.rank}: the world has {world}; expected 0 to {world.size - 1}"
        )
    if options.keep_raw is not None and options.keep_raw.exists():
        refuse_filled(options.keep_raw)
    itself = distributes_itself(script, options)
    if options.sequence and (itself or world.sizes.get("tp", 1) < 2):
        raise CaptureError(
            f"--sp shards the sequence over the ranks of --tp, but {script.name} distributes itself"
            if itself
            else f"--sp shards the sequence over the ranks of --tp, and the world has {world}"
        )
    if options.cp_comm != "all_gather" and (itself or "cp" not in world.sizes):
        raise CaptureError(
            f"--cp-comm {options.cp_comm} says how keys and values travel between the ranks of "
            f"--cp, but {script.name} distributes itself"
            if itself
            else f"--cp-comm {options.cp_comm} says how keys and values travel between the ranks "
            f"of --cp, and the world has {world}"
        )
    if itself and options.data_parallel is not None:
        raise CaptureError(
            f"{script} names torch.distributed, so it is run as it is, and --ddp, --fsdp and "
            "--zero are for scripts that do not: leave them out; --dp then gives the world's "
            "shape only"
        )
    return itself


def _pacer(peers: Recorder | RealPeers) -> Recorder | None:
    return peers if isinstance(peers, Recorder) else None


def slicing(peers: Peers, options: Options) -> ModelSlicing:
    """Return what slices a script's models for the rank that `options` names."""
    routing = parse_routing(options.moe_routing)

    def slice_one(model: nn.Module) -> Sliced:
        return slice_to_rank(
            model,
            options.world,
            options.rank,
            peers.new_group,
            flavour=options.flavour,
            plan=options.slicing,
            sequence=options.sequence,
            routing=routing,
            alone=not options.real,
            pp_layers=options.pp_layers,
            cp_comm=options.cp_comm,
        )

    return ModelSlicing(slice_one, options.slicing.model if options.slicing else None)


def _actor(script: Path, args: Sequence[str], options: Options) -> Callable[[int, Messages], None]:
    """Return what runs the script, which distributes itself, as another rank."""
    size = options.world.size

    def act(rank: int, messages: Messages) -> None:
        torch.set_num_threads(1)  # a forked process cannot use threads that its parent made
        Recorder(rank, size, messages).start()
        with environment(_torchrun(rank, size)), Shallow(options.depth).installed():
            play_script(script, args)

    return act


def _torchrun(rank: int, size: int) -> dict[str, str]:
    """Return the environment torchrun would give a rank, all ranks on one host."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


def _nothing_parallel(
    script: Path, options: Options, found: str, passed_over: nn.Module | None
) -> CaptureError:
    if passed_over is None:
        why = (
            "onerank slices Hugging Face models (transformers.PreTrainedModel) and, with --plan "
            "FILE, a class of the script's own. A script that names torch.distributed anywhere is "
            "run as it is, and its models are sliced with --plan alone"
        )
    elif options.slicing is None:
        why = without_plan(passed_over)
    else:
        why = (
            f"The plan slices the class {options.slicing.model}; the script called a "
            f"{type(passed_over).__name__}"
        )
    return CaptureError(
        f"{script}: after its first step in a world of {options.world} {found}. "
        f"To capture it whole, leave the sizes out. {why}"
    )


def _job(
    options: Options,
    peers: Recorder | RealPeers,
    observed: Observed,
    modules: tuple[Module, ...],
) -> Job:
    used = {call.group for call in peers.calls} if isinstance(peers, Recorder) else peers.groups
    groups = tuple(
        ProcessGroup(name, ranks, axis=axis_of(ranks, options.world, options.rank, name))
        for name, ranks in peers.groups.items()
        if name in used
    )
    notes = list(observed.notes)
    if not observed.on_gpu:
        notes.append("measured on a CPU: its compute nodes are operators, not kernels")
    return Job(
        world=options.world,
        rank=options.rank,
        groups=groups,
        device=_device(observed),
        measurement=Measurement(
            step_ns=observed.step_ns,
            timed_step_ns=observed.timed_step_ns,
            scopes=observed.scopes,
            profiled_step_ns=round(statistics.median(observed.profiled_step_ns)),
            peak_memory_bytes=max(observed.peak_memory_bytes),
            start_memory_bytes=observed.start_memory_bytes[0],
            versions=_versions(),
            notes=tuple(notes),
        ),
        modules=modules,
    )


def _with_classes(job: Job, played: Played) -> Job:
    """Add the pipeline stage of the script's first model, and which ranks are alike.

    What is not sliced is whole on every rank, or shared out equally (`data_parallel`).
    """
    sliced = [one for _, one in played.models.sliced]
    stage = next((one.stage.pipeline for one in sliced if one.stage is not None), None)
    classes = () if played.itself or job.world.size == 1 else (RankClass(0),)
    if sliced:
        known = all(one.classes for one in sliced)
        classes = max((one.classes for one in sliced), key=len) if known else ()
    return msgspec.structs.replace(job, pipeline=stage, classes=classes)


def _device(observed: Observed) -> Device:
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
    return Device(type="cpu", name=_cpu_name(), memory_bytes=pages * size)


def _cpu_name() -> str:
    """Return the processor's model where Linux tells it, else its architecture."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for package in ("transformers", "onerank"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def _compress(source: Path, target: Path) -> None:
    with source.open("rb") as plain, gzip.open(target, "wb") as packed:
        shutil.copyfileobj(plain, packed)
    source.unlink()


def refuse_filled(directory: Path) -> None:
    """Check that a directory for raw traces is empty.

    Raises:
        CaptureError: it is not.
    """
    if any(directory.iterdir()):
        raise CaptureError(f"--keep-raw {directory}: the directory is not empty: name another")


def keep(raw: Path, directory: Path) -> None:
    """Copy the traces beside their destination, then rename: never a half-filled directory."""
    beside = directory.with_name(f".{directory.name}.{os.getpid()}")
    try:
        shutil.copytree(raw, beside)
        if directory.exists():
            directory.rmdir()
        beside.rename(directory)
    finally:
        shutil.rmtree(beside, ignore_errors=True)

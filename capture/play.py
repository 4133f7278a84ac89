"""Run a script as one rank of a job that is not there."""

import contextlib
import re
import tempfile
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from onerank.capture.clipping import Clipping
from onerank.capture.data_groups import Groups, data_ranks
from onerank.capture.data_parallel import DataParallelism
from onerank.capture.imports import own_modules
from onerank.capture.messages import Act, Messages
from onerank.capture.models import ModelSlicing
from onerank.capture.options import Options
from onerank.capture.peers import Peers, RealPeers, peers_of
from onerank.capture.planfile import without_plan
from onerank.capture.rank_slice import slice_to_rank
from onerank.capture.raw import check_free
from onerank.capture.recorder import Recorder
from onerank.capture.rehearsal import Rehearsal
from onerank.capture.routing import BALANCED, parse_routing
from onerank.capture.scopes import Modules
from onerank.capture.script import environment, play_script, run_script
from onerank.capture.shallow import Shallow
from onerank.capture.slicer import Sliced
from onerank.capture.spawning import spawning_nobody
from onerank.capture.windows import Progress, Windows
from onerank.ir.errors import CaptureError

_DISTRIBUTES_ITSELF = re.compile(r"torch\.distributed|init_process_group|init_device_mesh")
_SETS_UP = re.compile(r"\b(init_process_group|init_device_mesh)\(")


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
        messages = (
            stack.enter_context(
                Rehearsal(options.rank, _actor(script, args, options), progress).ready()
            )
            if itself and not options.real
            else None
        )
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
            stack.enter_context(spawning_nobody())
        if slices:
            stack.enter_context(models.installed())
        shards = None
        if copies > 1 and not itself:
            groups = Groups(peers.new_group, world, options.rank)
            form = options.data_parallel or "ddp"
            deferred = form == "fsdp" and not slices and has_accelerator()
            data = DataParallelism(form, groups, deferred=deferred)
            stack.enter_context(data.installed())
            shards = data.shards
        if slices:
            clipping = Clipping(models.slices_of, world, options.rank, peers.new_group, shards)
            stack.enter_context(clipping.installed())
        shallow = Shallow(options.depth)
        stack.enter_context(shallow.installed())
        stack.enter_context(modules.installed())
        windows = watch(options.plan, raw, modules, progress, peers)

        def at_step() -> None:
            if messages is not None:
                messages.next_step()
            shallow.check_built(script)
            if isinstance(peers, Recorder) and peers.refused is not None:
                raise peers.refused
            # after its second step: one may average parameters behind the first
            silent = isinstance(peers, Recorder) and not peers.calls and windows.steps == 1
            whole = slices and not models.sliced and windows.steps == 0
            if world.size > 1 and (silent or whole):
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


def has_accelerator() -> bool:
    """Whether models may be too large for where they go; a CPU has them whole anyway."""
    return torch.cuda.is_available()


def distributes_itself(script: Path, options: Options) -> bool:
    """Whether a script uses torch.distributed, and no plan says what of it to slice.

    So does one that imports a module from beside it which sets up process groups.
    """
    if options.slicing is not None:
        return False
    if _DISTRIBUTES_ITSELF.search(script.read_text(errors="replace")):
        return True
    return any(_SETS_UP.search(one.read_text(errors="replace")) for one in own_modules(script))


def _checked(script: Path, options: Options) -> bool:
    """Check the options before any work; return whether the script distributes itself."""
    if not script.is_file():
        raise CaptureError(f"{script}: no such script")
    world = options.world
    if not 0 <= options.rank < world.size:
        raise CaptureError(
            f"--rank {options.rank}: the world has {world}; expected 0 to {world.size - 1}"
        )
    check_free(options.keep_raw)
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
    if options.pp_layers and (itself or "pp" not in world.sizes):
        why = f"{script.name} distributes itself" if itself else f"the world has {world}"
        raise CaptureError(
            f"--pp-layers says how many layers each stage of --pp has, and {why}: leave it out"
        )
    if itself and options.data_parallel is not None:
        raise CaptureError(
            f"{script} names torch.distributed, so it is run as it is, and --ddp, --fsdp and "
            "--zero are for scripts that do not: leave them out; --dp then gives the world's "
            "shape only"
        )
    return itself


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

    return ModelSlicing(slice_one, options.slicing.classes if options.slicing else None)


def _actor(script: Path, args: Sequence[str], options: Options) -> Act:
    """Return what runs the script, which distributes itself, as another rank."""
    size = options.world.size

    def act(rank: int, messages: Messages) -> None:
        def stepped(*_: object) -> None:
            messages.next_step()

        torch.set_num_threads(1)  # a forked process cannot use threads that its parent made
        Recorder(rank, size, messages).start()
        shallow = Shallow(options.depth)
        register_optimizer_step_post_hook(stepped)
        with environment(_torchrun(rank, size)), spawning_nobody(), shallow.installed():
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
            "FILE, a class of the script's own. A script that names torch.distributed anywhere, or "
            "imports a module beside it that sets up process groups, is run as it is, and its "
            "models are sliced with --plan alone"
        )
    elif options.slicing is None:
        why = without_plan(passed_over)
    else:
        why = (
            f"The plan slices the class {' or '.join(options.slicing.classes)}; the script called "
            f"a {type(passed_over).__name__}"
        )
    return CaptureError(
        f"{script}: in its first steps in a world of {options.world} {found}. "
        f"To capture it whole, leave the sizes out. {why}"
    )

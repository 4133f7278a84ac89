"""Options that describe the job of a script: those of `capture run` and `capture verify`."""

import contextlib
import math
import os
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

if TYPE_CHECKING:
    from onerank.capture import Options, Plan


def script_of(module: str) -> tuple[Path, str]:
    """Return the file of a module, and the name to run it by; nothing is imported to find it.

    Raises:
        UsageError: there is none of this name, here or among what is installed.
    """
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        places = _places(module)
    finally:
        sys.path.remove(here)
    for place in places:
        if place.with_suffix(".py").is_file():
            return place.with_suffix(".py"), module
        if (place / "__main__.py").is_file():
            return place / "__main__.py", f"{module}.__main__"
    raise click.UsageError(
        f"-m {module}: no such module, or package with a __main__.py, in {here} or installed; "
        "expected a name with dots, as in python -m package.train"
    )


def _places(module: str) -> list[Path]:
    """Return where a module could lie, without a suffix."""
    first, *rest = module.split(".")
    specs = (finder.find_spec(first, None) for finder in sys.meta_path)
    spec = next((one for one in specs if one is not None), None)
    if spec is None:
        return []
    if spec.submodule_search_locations is None:  # a file
        return [Path(spec.origin).with_suffix("")] if spec.origin and not rest else []
    return [Path(place, *rest) for place in spec.submodule_search_locations]


Command = TypeVar("Command", bound=Callable[..., Any])

SIZE = click.IntRange(1)

SECTIONS = {
    "The script": ("module", "torchrun", "nproc_per_node", "own_local_rank"),
    "The job": (
        *("tp", "sp", "tp_flavour", "plan", "cp", "cp_comm", "pp", "pp_layers", "ep"),
        *("moe_routing", "dp", "ddp", "fsdp", "zero"),
    ),
    "Which of it is captured": ("rank", "ranks", "layers", "compile_mode", "real"),
    "How a step is measured": ("warm_up", "pure_steps", "repeat", "optimizer_steps"),
    "Communication that takes its time (CUDA)": ("network", "busbw_gbps", "standin"),
    "Output": ("output", "keep_raw"),
}


class _Script(click.Path):
    """A file that exists, or with -m the name of a module."""

    def convert(
        self,
        value: Any,
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Any:
        if ctx is not None and ctx.params.get("module"):
            return Path(value)
        return super().convert(value, param, ctx)


_OPTIONS = (
    click.argument("script", type=_Script(exists=True, dir_okay=False, path_type=Path)),
    click.argument("args", nargs=-1, metavar="[-- ARGS]"),
    click.option(
        "-m",
        "--module",
        is_flag=True,
        is_eager=True,
        help="SCRIPT is a module's name, as in python -m.",
    ),
    click.option(
        "--torchrun",
        is_flag=True,
        help="SCRIPT is one that torchrun starts: run it as it is.  [default: where it, or a "
        "module beside it, names torch.distributed]",
    ),
    click.option(
        "--nproc-per-node",
        type=SIZE,
        help="Ranks of a node, for such a script.  [default: up to 8 that divide the world]",
    ),
    click.option(
        "--own-local-rank",
        is_flag=True,
        help="LOCAL_RANK is the rank's place on its node, for such a script.  [default: 0]",
    ),
    click.option("--tp", type=SIZE, default=1, help="Tensor-parallel size."),
    click.option("--pp", type=SIZE, default=1, help="Pipeline-parallel size."),
    click.option("--pp-layers", help="Layers of each stage, as 8,8,7,7.  [default: even]"),
    click.option("--dp", type=SIZE, help="Data-parallel size.  [default: least for --ep]"),
    click.option("--ddp", is_flag=True, help="Replicas: all-reduce gradients.  [default for --dp]"),
    click.option("--fsdp", is_flag=True, help="Shard parameters, gradients and states (FSDP2)."),
    click.option(
        "--zero", type=int, help="Shard states (1), and gradients (2), and all (3, --fsdp)."
    ),
    click.option("--cp", type=SIZE, default=1, help="Context-parallel size."),
    click.option(
        "--cp-comm",
        type=click.Choice(["all_gather", "p2p"]),
        default="all_gather",
        show_default=True,
        help="How keys and values travel under --cp: gathered, or round a ring.",
    ),
    click.option(
        "--ep", type=SIZE, default=1, help="Ranks that share out experts; divides dp * cp."
    ),
    click.option("--rank", type=click.IntRange(0), help="Rank to be.  [default: 0]"),
    click.option(
        "--tp-flavour",
        type=click.Choice(["megatron", "hf"]),
        default="megatron",
        show_default=True,
        help="Where collectives stand: Megatron-LM's places, or transformers' own.",
    ),
    click.option("--sp", is_flag=True, help="Sequence parallelism, as Megatron-LM's."),
    click.option(
        "--plan",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Plan file (TOML): what to slice of a model class of the script's own.",
    ),
    click.option(
        "--moe-routing",
        default="balanced",
        show_default=True,
        metavar="HOW",
        help="How tokens go to the experts of a sliced model: balanced, zipf:S (exponent), a FILE "
        "of tokens per expert (JSON or CSV, one line or one per layer), or model (its own router).",
    ),
    click.option(
        "--network",
        type=click.Path(dir_okay=False, path_type=Path),
        help="On CUDA, hold the GPU for each collective as this network would (TOML: [default], "
        "[group.NAME], [size.N] with busbw_gbps in GB/s and latency_us; node_size).",
    ),
    click.option(
        "--busbw-gbps", type=float, metavar="GB/S", help="Likewise, with one bus bandwidth in GB/s."
    ),
    click.option(
        "--standin",
        type=click.Choice(["on", "off"]),
        help="Whether it does.  [default: on where a network is given]",
    ),
)


def job_options(command: Command) -> Command:
    """Give a command SCRIPT, its arguments, and the options that `AskedJob` takes."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@dataclass(frozen=True, slots=True)
class ParallelismOptions:
    """The job as the command line names it; an attribute for each option."""

    module: bool
    torchrun: bool
    nproc_per_node: int | None
    own_local_rank: bool
    tp: int
    pp: int
    pp_layers: str | None
    dp: int | None
    ddp: bool
    fsdp: bool
    zero: int | None
    cp: int
    cp_comm: Literal["all_gather", "p2p"]
    ep: int
    rank: int | None
    tp_flavour: Literal["megatron", "hf"]
    sp: bool
    plan: Path | None
    moe_routing: str
    network: Path | None
    busbw_gbps: float | None
    standin: str | None

    def located(self, script: Path) -> tuple[Path, str | None]:
        """Return the file of SCRIPT and, of a module, the name to run it by.

        Raises:
            UsageError: there is no such module.
        """
        return script_of(str(script)) if self.module else (script, None)

    def options(
        self,
        steps: "Plan",
        *,
        module: str | None = None,
        keep_raw: Path | None = None,
        real_rank: int | None = None,
    ) -> "Options":
        """Return what to capture.

        Args:
            steps: of each window.
            module: the name to run the script by, as `located` returns it.
            keep_raw: directory to keep the raw traces in.
            real_rank: the rank that torchrun launched, which communicates with the others; None
                where there are none.

        Raises:
            UsageError: a text is not what its option takes.
            CaptureError: the sizes do not go together, or a file cannot be read.
        """
        from onerank.capture import Options, read_plan
        from onerank.capture.collective_kernels import standin_of
        from onerank.capture.parallelize.data.auto_wrap import form_of
        from onerank.ir import World

        dp = self.dp or self.ep // math.gcd(self.ep, self.cp)
        world = World.of(tp=self.tp, cp=self.cp, dp=dp, pp=self.pp, ep=self.ep)
        return Options(
            world=world,
            rank=(self.rank or 0) if real_rank is None else real_rank,
            flavour=self.tp_flavour,
            sequence=self.sp,
            slicing=read_plan(self.plan) if self.plan else None,
            plan=steps,
            keep_raw=keep_raw,
            data_parallel=form_of(world, ddp=self.ddp, fsdp=self.fsdp, zero=self.zero),
            standin=standin_of(self.standin, self.network, self.busbw_gbps),
            real=real_rank is not None,
            moe_routing=self.moe_routing,
            pp_layers=_numbers("--pp-layers", self.pp_layers),
            cp_comm=self.cp_comm,
            module=module,
            torchrun=self.torchrun,
            per_node=self.nproc_per_node,
            own_local_rank=self.own_local_rank,
        )


def _numbers(option: str, text: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in (text or "").split(",") if text)
    except ValueError:
        raise click.UsageError(f"{option} {text}: expected whole numbers, as 8,8,7,7") from None


@contextlib.contextmanager
def loading_capture() -> Generator[None]:
    """Load `onerank.capture` in this context: torch keeps quiet, and its absence is told.

    Raises:
        CaptureError: torch or transformers is not installed.
    """
    # torch reads these on import; the profiler's own log lines would be among the script's output
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers"):
            raise
        from onerank.ir.errors import CaptureError

        raise CaptureError(
            f"capturing needs {error.name}: pip install 'onerank[capture]'"
        ) from error

"""Options that describe the script's job, shared by `capture run` and `capture verify`."""

import contextlib
import math
import os
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from onerank.cli.options import SIZE, Command, SectionedCommand, option, with_options

if TYPE_CHECKING:
    from onerank.capture import Options, WindowPlan


def script_of(module: str) -> tuple[Path, str]:
    """Return the file of a module, and the name to run it by, without importing anything.

    Raises:
        UsageError: no such module in the working directory or among installed packages.
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
    spec = next((spec for spec in specs if spec is not None), None)
    if spec is None:
        return []
    if spec.submodule_search_locations is None:  # a file
        return [Path(spec.origin).with_suffix("")] if spec.origin and not rest else []
    return [Path(place, *rest) for place in spec.submodule_search_locations]


SCRIPT = "The script"
JOB = "The job"
CAPTURED = "Which of it is captured"
STEP = "How a step is measured"
COMMUNICATION = "Communication that takes its time (CUDA)"
OUTPUT = "Output"


class ScriptCommand(SectionedCommand):
    """A command that runs a script, whose own arguments come after `--`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse; an unknown option may be one of the script's."""
        script = next((arg for arg in args if arg.endswith(".py")), "SCRIPT")
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise click.UsageError(
                f"{error.format_message()}\nA script's own arguments come after --: "
                f"{ctx.command_path} {script} ... -- {error.option_name} ...",
                ctx,
            ) from None


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


def job_options(command: Command) -> Command:
    """Give a command SCRIPT, its arguments, and the options of `ParallelismOptions` as `job`."""
    script = _Script(exists=True, dir_okay=False, path_type=Path)
    command = with_options(ParallelismOptions, "job")(command)
    command = click.argument("args", nargs=-1, metavar="[-- ARGS]")(command)
    return click.argument("script", type=script)(command)


@dataclass(frozen=True, kw_only=True)
class ParallelismOptions:
    """The job that a script stands in; an attribute for each option."""

    module: bool = option(
        "SCRIPT is a module's name, as in python -m.",
        *("-m", "--module"),
        heading=SCRIPT,
        default=False,
        is_eager=True,
    )
    torchrun: bool | None = option(
        "Whether SCRIPT distributes itself: it then runs as torchrun would start it, and is not "
        "sliced.  [default: whether it creates a process group before it trains]",
        "--torchrun/--no-torchrun",
        heading=SCRIPT,
        default=None,
    )
    nproc_per_node: int | None = option(
        "Ranks of a node, for such a script.  [default: up to 8 that divide the world]",
        heading=SCRIPT,
        default=None,
        type=SIZE,
    )
    true_local_rank: bool = option(
        "LOCAL_RANK is the rank's place on its node, for such a script.  [default: 0]",
        heading=SCRIPT,
        default=False,
    )
    tp: int = option("Tensor-parallel size.", heading=JOB, default=1, type=SIZE)
    sp: bool = option(
        "Sequence parallelism, as Megatron-LM's; needs --tp.", heading=JOB, default=False
    )
    tp_style: Literal["megatron", "hf"] = option(
        "Where collectives stand: in Megatron-LM's places, or in transformers' own.",
        heading=JOB,
        default="megatron",
        show_default=True,
    )
    sharding_plan: Path | None = option(
        "Plan file (TOML): how to slice a model class of the script's own.",
        heading=JOB,
        default=None,
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
    )
    cp: int = option("Context-parallel size.", heading=JOB, default=1, type=SIZE)
    cp_comm: Literal["all_gather", "p2p"] = option(
        "How keys and values travel under --cp: gathered, or round a ring.",
        heading=JOB,
        default="all_gather",
        show_default=True,
    )
    pp: int = option("Pipeline-parallel size.", heading=JOB, default=1, type=SIZE)
    pp_layers: str | None = option(
        "Layers of each stage, as 8,8,7,7.  [default: even]", heading=JOB, default=None
    )
    ep: int = option(
        "Ranks that share out experts; divides dp * cp.", heading=JOB, default=1, type=SIZE
    )
    moe_routing: str = option(
        "How tokens go to the experts of a sliced model: balanced, zipf:S (exponent), a FILE of "
        "tokens per expert (JSON or CSV, one line or one per layer), or model (its own router).",
        heading=JOB,
        default="balanced",
        show_default=True,
        metavar="HOW",
    )
    dp: int | None = option(
        "Data-parallel size.  [default: least for --ep]", heading=JOB, default=None, type=SIZE
    )
    ddp: bool = option(
        "Replicas: all-reduce gradients.  [default for --dp]", heading=JOB, default=False
    )
    fsdp: bool = option(
        "Shard parameters, gradients and states (FSDP2).", heading=JOB, default=False
    )
    zero: int | None = option(
        "Shard states (1), and gradients (2), and all (3, --fsdp).",
        heading=JOB,
        default=None,
        type=int,
    )
    rank: int | None = option(
        "Rank to capture.  [default: 0]", heading=CAPTURED, default=None, type=click.IntRange(0)
    )
    network: Path | None = option(
        "On CUDA, occupy the GPU for each collective as long as this network takes (TOML: "
        "[default], [group.NAME], [size.N] with busbw_gb_per_s and latency_us; node_size).",
        heading=COMMUNICATION,
        default=None,
        type=click.Path(dir_okay=False, path_type=Path),
    )
    busbw_gb_s: float | None = option(
        "Likewise, with one bus bandwidth in gigabytes per second.",
        heading=COMMUNICATION,
        default=None,
        type=float,
        metavar="GB/S",
    )
    collective_kernels: Literal["on", "off"] | None = option(
        "Whether a kernel occupies the GPU for each collective.  [default: on where a network is "
        "given]",
        heading=COMMUNICATION,
        default=None,
    )

    def located(self, script: Path) -> tuple[Path, str | None]:
        """Return the file of SCRIPT and, of a module, the name to run it by.

        Raises:
            UsageError: there is no such module.
        """
        return script_of(str(script)) if self.module else (script, None)

    def options(
        self,
        windows: "WindowPlan",
        *,
        module: str | None = None,
        raw_dir: Path | None = None,
        real_rank: int | None = None,
    ) -> "Options":
        """Return what to capture.

        Args:
            windows: steps of each measurement window.
            module: the name to run the script by, as `located` returns it.
            raw_dir: directory to keep the raw traces in.
            real_rank: the rank that torchrun launched, which communicates with the others; None
                where there are none.

        Raises:
            UsageError: a text is not what its option takes.
            CaptureError: the sizes do not go together, or a file cannot be read.
        """
        # None of these imports torch, so that a wrong option is reported at once.
        from onerank.capture.collective_kernels import collective_emulation
        from onerank.capture.options import Options
        from onerank.capture.parallelize.data.data_groups import strategy_of
        from onerank.capture.parallelize.tensor.plan_file import read_plan
        from onerank.ir import World

        dp = self.dp or self.ep // math.gcd(self.ep, self.cp)
        world = World.of(tp=self.tp, cp=self.cp, dp=dp, pp=self.pp, ep=self.ep)
        return Options(
            world=world,
            rank=(self.rank or 0) if real_rank is None else real_rank,
            tp_style=self.tp_style,
            sequence_parallel=self.sp,
            sharding_plan=read_plan(self.sharding_plan) if self.sharding_plan else None,
            windows=windows,
            raw_dir=raw_dir,
            data_parallel=strategy_of(world, ddp=self.ddp, fsdp=self.fsdp, zero=self.zero),
            collective_kernels=collective_emulation(
                self.collective_kernels, self.network, self.busbw_gb_s
            ),
            real_job=real_rank is not None,
            moe_routing=self.moe_routing,
            pp_layers=_numbers("--pp-layers", self.pp_layers),
            cp_comm=self.cp_comm,
            module=module,
            torchrun=self.torchrun,
            nproc_per_node=self.nproc_per_node,
            true_local_rank=self.true_local_rank,
        )


def _numbers(option: str, text: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in (text or "").split(",") if text)
    except ValueError:
        raise click.UsageError(f"{option} {text}: expected whole numbers, as 8,8,7,7") from None


@contextlib.contextmanager
def loading_capture() -> Generator[None]:
    """Import `onerank.capture` in this context, with torch's log lines off.

    Raises:
        CaptureError: torch, or a library that the capture extra installs, is missing.
    """
    # torch reads these on import; the profiler's own log lines would be among the script's output
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers", "safetensors"):
            raise
        from onerank.ir.errors import CaptureError

        raise CaptureError(
            f"capturing needs {error.name}: pip install 'onerank[capture]'",
            code="capture-not-installed",
        ) from error

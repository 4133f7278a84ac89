"""`capture run SCRIPT`: run a script as one rank of a job that is not there."""

import contextlib
import math
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any, Literal

import click

from onerank.cli.ending import ends_beside_threads
from onerank.cli.frame import (
    OUTPUT_DIRECTORY,
    TRACE_OUTPUT,
    as_json,
    keep_inputs,
    print_json,
    progress,
    reports_errors,
)
from onerank.cli.sections import SectionedCommand, SectionedGroup

SIZE = click.IntRange(1)

DISTINCT = "distinct"

SECTIONS = {
    "The job": ("tp", "sp", "tp_flavour", "plan", "cp", "cp_comm", "pp", "pp_layers", "ep",
                "moe_routing", "dp", "ddp", "fsdp", "zero"),
    "Which of it is captured": ("rank", "ranks", "layers", "compile_mode", "real"),
    "How a step is measured": ("warm_up", "pure_steps", "repeat"),
    "Communication that takes its time (CUDA)": ("network", "busbw_gbps", "standin"),
    "Output": ("output", "keep_raw"),
}  # fmt: skip

INSTEAD = "onerank.instead_of_capturing"
"""In the context of a command that shares the options of `run`: what it does with them."""


class _Depths(click.ParamType[tuple[int, ...]]):
    """Numbers with commas between; which ones are fit, the capture says."""

    name = "depths"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        try:
            return tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"'{value}': expected numbers with commas between, such as 2,4", param, ctx)


class _Ranks(click.ParamType[tuple[int, ...] | str]):
    """Ranks with commas between, or `distinct`."""

    name = "ranks"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...] | str:
        if value == DISTINCT:
            return DISTINCT
        try:
            return tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"'{value}': expected {DISTINCT}, or ranks such as 0,8,16", param, ctx)


@click.group(cls=SectionedGroup)
def capture() -> None:
    """Capture what ONE rank of a training job does, on one GPU or on a CPU."""


@capture.command(
    cls=SectionedCommand,
    sections=SECTIONS,
    epilog="The script's own arguments come after --: "
    "capture run train.py --tp 4 -o t.et -- --lr 1",
)
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("args", nargs=-1, metavar="[-- ARGS]")
@click.option("-o", "--output", type=TRACE_OUTPUT, required=True, help="Chakra trace to write.")
@click.option("--tp", type=SIZE, default=1, help="Tensor-parallel size.")
@click.option("--pp", type=SIZE, default=1, help="Pipeline-parallel size.")
@click.option("--pp-layers", help="Layers of each stage, as 8,8,7,7.  [default: even]")
@click.option("--dp", type=SIZE, help="Data-parallel size.  [default: least for --ep]")
@click.option("--ddp", is_flag=True, help="Replicas: all-reduce gradients.  [default for --dp]")
@click.option("--fsdp", is_flag=True, help="Shard parameters, gradients and states (FSDP2).")
@click.option("--zero", type=int, help="Shard states (1), and gradients (2), and all (3, --fsdp).")
@click.option("--cp", type=SIZE, default=1, help="Context-parallel size.")
@click.option(
    "--cp-comm",
    type=click.Choice(["all_gather", "p2p"]),
    default="all_gather",
    show_default=True,
    help="How keys and values travel under --cp: gathered, or round a ring.",
)
@click.option("--ep", type=SIZE, default=1, help="Ranks that share out experts; divides dp * cp.")
@click.option("--rank", type=click.IntRange(0), help="Rank to be.  [default: 0]")
@click.option(
    "--ranks",
    type=_Ranks(),
    metavar="distinct|R,R[,...]",
    help="Capture one rank of each class of equal ranks, or these, in turn, each in a process of "
    "its own, and write NAME.RANK.et for each.",
)
@click.option(
    "--tp-flavour",
    type=click.Choice(["megatron", "hf"]),
    default="megatron",
    show_default=True,
    help="Where collectives stand: Megatron-LM's places, or transformers' own.",
)
@click.option("--sp", is_flag=True, help="Sequence parallelism, as Megatron-LM's.")
@click.option(
    "--plan",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Plan file (TOML): what to slice of a model class of the script's own.",
)
@click.option(
    "--moe-routing",
    default="balanced",
    show_default=True,
    metavar="HOW",
    help="How tokens go to the experts of a sliced model: balanced, zipf:S (exponent), a FILE of "
    "tokens per expert (JSON or CSV, one line or one per layer), or model (its own router).",
)
@click.option(
    "--layers",
    type=_Depths(),
    metavar="N,N[,...]",
    help="Capture a Hugging Face model built with this many layers, at each depth in turn, and "
    "extrapolate to its own depth.",
)
@click.option("--warm-up", type=SIZE, default=3, show_default=True,
              help="Steps before anything is measured; on a GPU at least.")  # fmt: skip
@click.option("--pure-steps", type=SIZE, default=5, show_default=True,
              help="Steps timed without a profiler: the step time.")  # fmt: skip
@click.option("--repeat", type=SIZE, default=1, show_default=True, help="Profiled steps; each node "
              "gets the median of its durations, and their spread.")  # fmt: skip
@click.option(
    "--network",
    type=click.Path(dir_okay=False, path_type=Path),
    help="On CUDA, hold the GPU for each collective as this network would (TOML: [default], "
    "[group.NAME], [size.N] with busbw_gbps in GB/s and latency_us; node_size).",
)
@click.option(
    "--busbw-gbps", type=float, metavar="GB/S", help="Likewise, with one bus bandwidth in GB/s."
)
@click.option(
    "--standin",
    type=click.Choice(["on", "off"]),
    help="Whether it does.  [default: on where a network is given]",
)
@click.option(
    "--compile",
    "compile_mode",
    type=click.Choice(["default", "reduce-overhead", "max-autotune"]),
    is_flag=False,
    flag_value="default",
    help="Experiment: capture eager too (NAME.eager.et beside the output), then under "
    "torch.compile in this mode, and tell what each sub-module gained.",
)
@click.option(
    "--keep-raw",
    type=OUTPUT_DIRECTORY,
    help="Keep the raw Kineto and execution traces in this directory.",
)
@click.option(
    "--real",
    is_flag=True,
    help="Communicate with the real ranks: torchrun -m onerank capture run --real ... writes a "
    "trace.RANK.et on each, to hold a slice against.",
)
@as_json
@ends_beside_threads
@reports_errors
def run(
    script: Path,
    args: tuple[str, ...],
    output: Path,
    tp: int,
    pp: int,
    pp_layers: str | None,
    dp: int | None,
    ddp: bool,
    fsdp: bool,
    zero: int | None,
    cp: int,
    cp_comm: Literal["all_gather", "p2p"],
    ep: int,
    rank: int | None,
    ranks: tuple[int, ...] | str | None,
    tp_flavour: str,
    sp: bool,
    plan: Path | None,
    moe_routing: str,
    layers: tuple[int, ...] | None,
    warm_up: int,
    pure_steps: int,
    repeat: int,
    network: Path | None,
    busbw_gbps: float | None,
    standin: str | None,
    compile_mode: str | None,
    keep_raw: Path | None,
    real: bool,
    as_json: bool,
) -> None:
    """Run SCRIPT as rank R of a job, measure one step, write its trace.

    Hugging Face models are sliced; a script that uses torch.distributed runs as it is. Nothing
    is communicated: each collective is recorded. SCRIPT is stopped once its step is measured.
    """
    keep_inputs(output, script, plan)
    if compile_mode is not None and real:
        raise click.UsageError("--compile captures twice in turn, and --real ranks start once")
    if compile_mode is not None and layers is not None:
        raise click.UsageError("--compile and --layers each capture in turn: give one of them")
    if ranks is not None and (rank is not None or compile_mode is not None or real):
        other = "--rank" if rank is not None else "--real" if real else "--compile"
        raise click.UsageError(f"--ranks captures ranks in turn, and goes without {other}")
    _quieten_torch()
    try:
        from onerank.capture import Options, Plan, capture_at_depths, read_plan
        from onerank.capture import capture as capture_script
        from onerank.capture.standin import standin_of
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers"):
            raise
        from onerank.ir.errors import CaptureError

        raise CaptureError(
            f"capturing needs {error.name}: pip install 'onerank[capture]'"
        ) from error
    from onerank.capture.data_parallel import form_of
    from onerank.cli.compiled import capture_side_by_side
    from onerank.cli.ranks import capture_in_turn
    from onerank.cli.render_conversion import render_conversion
    from onerank.cli.render_summary import render_summary
    from onerank.ir import World
    from onerank.summary import summarise

    if real:
        rank = _launched_rank()
        output = output.with_suffix(f".{rank}{output.suffix}")
        keep_raw = keep_raw and keep_raw.with_name(f"{keep_raw.name}.{rank}")
    world = World.of(tp=tp, cp=cp, dp=dp or ep // math.gcd(ep, cp), pp=pp, ep=ep)
    options = Options(
        world=world,
        rank=rank or 0,
        flavour="hf" if tp_flavour == "hf" else "megatron",
        sequence=sp,
        slicing=read_plan(plan) if plan else None,
        plan=Plan(warm_up=warm_up, pure=pure_steps, repeat=repeat, settle=not real),
        keep_raw=keep_raw,
        data_parallel=form_of(world, ddp=ddp, fsdp=fsdp, zero=zero),
        standin=standin_of(standin, network, busbw_gbps),
        real=real,
        moe_routing=moe_routing,
        pp_layers=_numbers("--pp-layers", pp_layers),
        cp_comm=cp_comm,
    )
    if act := click.get_current_context().meta.get(INSTEAD):
        act(script, args, options, as_json)
        return
    if ranks is not None:
        chosen = None if isinstance(ranks, str) else ranks
        capture_in_turn(script, args, options, chosen, layers, output, as_json=as_json)
        return
    with stdout_to_stderr() if as_json else contextlib.nullcontext():
        if layers is not None:
            captured = capture_at_depths(script, args, options, layers, progress)
        elif compile_mode is not None:
            captured = capture_side_by_side(script, args, options, compile_mode, output)
        else:
            captured = capture_script(script, args, options, progress)
    captured.graph.write(output)
    summary = summarise(captured.graph)
    if as_json:
        print_json(summary)
        return
    render_conversion(captured.conversion, captured.sliced)
    render_summary(summary, title=str(output))


def _launched_rank() -> int:
    text = os.environ.get("RANK", "")
    if not text.isdecimal():
        raise click.UsageError(
            f"--real communicates with the ranks that torchrun launched, and RANK is {text!r}: "
            "torchrun --nproc-per-node N -m onerank capture run --real ..."
        )
    return int(text)


def _numbers(option: str, text: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in (text or "").split(",") if text)
    except ValueError:
        raise click.UsageError(f"{option} {text}: expected whole numbers, as 8,8,7,7") from None


@contextlib.contextmanager
def stdout_to_stderr() -> Generator[None]:
    """Let what the script prints, its subprocesses included, go to stderr: stdout is our JSON's."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _quieten_torch() -> None:
    """Keep the profiler's own log lines out of the script's output; torch reads these on import."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")

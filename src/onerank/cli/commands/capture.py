"""`capture run SCRIPT`: run a script as one rank, as several ranks, or eager and compiled."""

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from onerank.cli.common import (
    OUTPUT_DIRECTORY,
    TRACE_OUTPUT,
    as_json,
    ends_beside_threads,
    keep_inputs,
    print_json,
    progress,
    reports_errors,
    stdout_to_stderr,
)
from onerank.cli.help_groups import SectionedCommand, SectionedGroup
from onerank.cli.parallelism_options import (
    SECTIONS,
    SIZE,
    ParallelismOptions,
    job_options,
    loading_capture,
)

if TYPE_CHECKING:
    from onerank.capture import Capture

DISTINCT = "distinct"


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
@job_options
@click.option("-o", "--output", type=TRACE_OUTPUT, required=True, help="Chakra trace to write.")
@click.option(
    "--ranks",
    type=_Ranks(),
    metavar="distinct|R,R[,...]",
    help="Capture one rank of each class of equal ranks, or these, in turn, each in a process of "
    "its own, and write NAME.RANK.et for each.",
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
@click.option("--optimizer-steps", type=SIZE, default=1, show_default=True,
              help="Steps of the first optimizer that make one step.")  # fmt: skip
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
    ranks: tuple[int, ...] | str | None,
    layers: tuple[int, ...] | None,
    warm_up: int,
    pure_steps: int,
    repeat: int,
    optimizer_steps: int,
    compile_mode: str | None,
    keep_raw: Path | None,
    real: bool,
    as_json: bool,
    **job: Any,
) -> None:
    """Run SCRIPT as rank R of a job, measure one step, write its trace.

    Hugging Face models are sliced; a script that uses torch.distributed runs as it is. Nothing
    is communicated: each collective is recorded. SCRIPT is stopped once its step is measured.
    """
    asked = ParallelismOptions(**job)
    script, module = asked.located(script)
    keep_inputs(output, script, asked.plan)
    _check_turns(asked, ranks=ranks, layers=layers, compile_mode=compile_mode, real=real)
    with loading_capture():
        from onerank.capture import Plan, capture_at_depths, capture_ranks
        from onerank.capture import capture as capture_script
        from onerank.capture.isolation import forked_runs

    real_rank = _launched_rank() if real else None
    if real:
        output = output.with_suffix(f".{real_rank}{output.suffix}")
        keep_raw = keep_raw and keep_raw.with_name(f"{keep_raw.name}.{real_rank}")
    steps = Plan(
        warm_up=warm_up,
        pure=pure_steps,
        repeat=repeat,
        optimizer_steps=optimizer_steps,
        settle=not real,
    )
    options = asked.options(steps, module=module, keep_raw=keep_raw, real_rank=real_rank)
    beside = stdout_to_stderr if as_json else contextlib.nullcontext
    if ranks is not None:
        chosen = None if isinstance(ranks, str) else ranks
        with beside(), forked_runs() as alone:
            several = capture_ranks(
                *(script, args, options, chosen), layers=layers, progress=progress, run=alone
            )
        from onerank.cli.commands.capture_ranks import write_in_turn  # imports numpy

        write_in_turn(several, str(options.world), output, as_json=as_json)
        return
    with beside():
        if layers is not None:
            with forked_runs() as alone:
                captured = capture_at_depths(
                    *(script, args, options, layers), progress=progress, run=alone
                )
        elif compile_mode is not None:
            captured = capture_side_by_side(script, args, options, compile_mode, output)
        else:
            captured = capture_script(script, args, options, progress)
    # late: they import polars, whose threads would be beside the script
    from onerank.analysis.summary import summarise
    from onerank.cli.render.conversion_table import render_conversion
    from onerank.cli.render.summary_table import render_summary

    captured.graph.write(output)
    summary = summarise(captured.graph)
    if as_json:
        print_json(summary)
        return
    render_conversion(captured.conversion, captured.sliced)
    render_summary(summary, title=str(output))


def _check_turns(
    asked: ParallelismOptions, *, ranks: Any, layers: Any, compile_mode: str | None, real: bool
) -> None:
    """Refuse two options that each capture several times, or once, in ways that do not mix."""
    if compile_mode is not None and real:
        raise click.UsageError("--compile captures twice in turn, and --real ranks start once")
    if compile_mode is not None and layers is not None:
        raise click.UsageError("--compile and --layers each capture in turn: give one of them")
    if ranks is not None and (asked.rank is not None or compile_mode is not None or real):
        other = "--rank" if asked.rank is not None else "--real" if real else "--compile"
        raise click.UsageError(f"--ranks captures ranks in turn, and goes without {other}")


def _launched_rank() -> int:
    text = os.environ.get("RANK", "")
    if not text.isdecimal():
        raise click.UsageError(
            f"--real communicates with the ranks that torchrun launched, and RANK is {text!r}: "
            "torchrun --nproc-per-node N -m onerank capture run --real ..."
        )
    return int(text)


def capture_side_by_side(
    script: Path, args: Sequence[str], options: Any, mode: Any, output: Path
) -> "Capture":
    """Capture eager and compiled; write the eager trace as `NAME.eager.et` beside `output`."""
    from onerank.analysis.compiled_kernels import fuse
    from onerank.capture.compile_compare import capture_compiled

    both = capture_compiled(script, args, options, mode, progress)
    told = "the script's own" if both.by_script else str(mode)
    graph = fuse(both.eager.graph, both.compiled.graph, both.kernels, told, both.roots)
    both.eager.graph.write(output.with_suffix(f".eager{output.suffix}"))
    return dataclasses.replace(both.compiled, graph=graph)

"""`capture run SCRIPT` captures one rank or several; `capture verify` compares numerics.

`capture serve` is in the module `serve`.
"""

import dataclasses
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onerank.capture.options import OUTPUT, Options, SeveralCaptures
from onerank.capture.profiling.window_plan import WindowPlan
from onerank.cli.common import (
    TRACE_OUTPUT,
    UsageError,
    as_json,
    ends_despite_threads,
    keep_inputs,
    reports_errors,
)
from onerank.cli.dataclass_to_click import SectionedGroup, headings, with_options
from onerank.cli.script import ScriptCommand, ScriptOptions, job_options, script_streams
from onerank.cli.terminal import counted, lines, print_json, say, table
from onerank.display import size, time
from onerank.option_fields import option

if TYPE_CHECKING:
    from onerank.analysis.summary import RankSummary
    from onerank.capture import Capture, CapturedRanks
    from onerank.capture.verify.numerics import Verification
    from onerank.ir import Graph


# Ranges of ranks in a table cell; --json has all.
_RANK_RANGES = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaptureOptions(SeveralCaptures):
    """Options of `capture run`: what is captured in turn, and the output."""

    output: Path | None = option(
        "Chakra trace to write.  [default: the script's name with .et, in this directory]",
        "-o",
        "--output",
        heading=OUTPUT,
        default=None,
        type=TRACE_OUTPUT,
    )


class _CaptureGroup(SectionedGroup):
    """A group that suggests `capture run train.py` for `capture train.py`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command; refuse a script in its place."""
        if args[0].endswith(".py"):
            ctx.fail(
                f"No such command '{args[0]}'. Did you mean '{ctx.command_path} run {args[0]}'?"
            )
        return super().resolve_command(ctx, args)


@click.group(
    cls=_CaptureGroup,
    sections={"Commands": ("run", "verify", "serve")},
    modules={"serve": "serve"},
)
def capture() -> None:
    """Capture what one rank of a job does, on one GPU, on a CPU, or on no device."""


@capture.command(
    cls=ScriptCommand,
    sections=headings(ScriptOptions, Options, CaptureOptions, WindowPlan),
    epilog="The script's own arguments come after --: "
    "capture run train.py --tp 4 -o t.et -- --lr 1",
)
@job_options()
@with_options(CaptureOptions, "how")
@with_options(WindowPlan, "windows")
@as_json
@ends_despite_threads
@reports_errors
def run(
    script: Path,
    args: tuple[str, ...],
    named: ScriptOptions,
    job: Options,
    how: CaptureOptions,
    windows: WindowPlan,
    as_json: bool,
) -> None:
    """Run SCRIPT as rank R of a job, measure one step, write its trace.

    Hugging Face models are sliced. A script that uses torch.distributed runs unchanged.
    Collectives are recorded and not executed. SCRIPT is stopped once its step is measured.
    """
    from onerank.capture.isolated_capture import loading_capture
    from onerank.capture.validate_options import check_in_turn, validate_early

    script, module = named.located(script)
    output = how.output or _default_output(script)
    # All checks come before torch is imported, so that a wrong option is an error within a second.
    keep_inputs(output, script, _plan_file(job))
    # --rank has a default, so only click knows whether it was given.
    source = click.get_current_context().get_parameter_source("rank")
    check_in_turn(job, how, names_rank=source is click.core.ParameterSource.COMMANDLINE)
    options = dataclasses.replace(job, module=module, windows=windows)
    if job.record_real_job:
        options, output = _of_launched_rank(options, output)
    validate_early(script, options, how)
    with loading_capture():
        # This module imports torch and all modules that capture, so a missing library is an error
        # here and not in the functions below.
        importlib.import_module("onerank.capture.compile_compare")

    if how.ranks is not None:
        several = _capture_ranks(script, args, options, how, as_json=as_json)
        _write_ranks(several, str(options.world), output, as_json=as_json)
        return
    captures = _capture_one_rank(script, args, options, how, output, as_json=as_json)
    if len(captures) > 1:
        _write_steps(captures, output, as_json=as_json)
    else:
        _write_step(next(iter(captures.values())), output, as_json=as_json)


def _of_launched_rank(options: Options, output: Path) -> tuple[Options, Path]:
    """Return the options and the output of the rank that torchrun launched, for a real job."""
    rank = _launched_rank()
    raw_dir = options.raw_dir and options.raw_dir.with_name(f"{options.raw_dir.name}.{rank}")
    # Each rank would decide for itself when its steps have settled, and stop at another step than
    # its peers, which then wait for it in a collective.
    windows = dataclasses.replace(options.windows, settle=False)
    options = dataclasses.replace(options, rank=rank, raw_dir=raw_dir, windows=windows)
    return options, output.with_suffix(f".{rank}{output.suffix}")


def _capture_ranks(
    script: Path, args: tuple[str, ...], options: Options, how: CaptureOptions, *, as_json: bool
) -> "CapturedRanks":
    """Capture several ranks in turn."""
    from onerank.capture.capture_script import capture_ranks
    from onerank.capture.isolation import forked_processes, sigterm_interrupts

    with (
        sigterm_interrupts(),
        script_streams(stdout_to_stderr=as_json) as progress,
        forked_processes() as run_process,
    ):
        return capture_ranks(
            script,
            args,
            options,
            how.named_ranks,
            layers=how.capture_layers,
            progress=progress,
            run=run_process,
        )


def _capture_one_rank(
    script: Path,
    args: tuple[str, ...],
    options: Options,
    how: CaptureOptions,
    output: Path,
    *,
    as_json: bool,
) -> "dict[str, Capture]":
    """Capture one rank; return its step, or each forward of a script that infers, by its label.

    With `--compile`, this also writes the trace of the eager step.
    """
    from onerank.capture.capture_script import capture_at_depths, capture_steps
    from onerank.capture.compile_compare import capture_compiled
    from onerank.capture.isolation import forked_processes, frozen_objects, sigterm_interrupts

    with sigterm_interrupts(), script_streams(stdout_to_stderr=as_json) as progress:
        if how.capture_layers is not None:
            with forked_processes() as run_process:
                captured = capture_at_depths(
                    script,
                    args,
                    options,
                    how.capture_layers,
                    progress=progress,
                    run=run_process,
                )
            return {"": captured}
        if how.compile is not None:
            pair = capture_compiled(script, args, options, how.compile, progress)
            pair.eager.graph.write(output.with_suffix(f".eager{output.suffix}"))
            return {"": pair.compiled}
        with frozen_objects():
            return capture_steps(script, args, options, progress)


def _write_step(captured: "Capture", output: Path, *, as_json: bool) -> None:
    """Write the trace of one step, and show its summary."""
    # Imported after the script has run: they import polars, whose threads would run next to it.
    from onerank.analysis.summary import summarise
    from onerank.cli.conversion_tables import render_conversion
    from onerank.cli.summary_tables import render_summary

    captured.graph.write(output)
    summary = summarise(captured.graph)
    if as_json:
        print_json(summary)
        return
    render_conversion(captured.conversion, captured.sliced)
    render_summary(summary, title=str(output))


def _default_output(script: Path) -> Path:
    """Return the trace in the working directory that is named like the script.

    Raises:
        BadParameter: the directory is not writable.
    """
    # A package that runs as `python -m` has the name of its directory.
    name = script.parent.name if script.stem == "__main__" else script.stem
    return TRACE_OUTPUT.convert(f"{name}.et", None, None)


def _plan_file(job: Options) -> Path | None:
    return job.sharding_plan if isinstance(job.sharding_plan, Path) else None


def _launched_rank() -> int:
    text = os.environ.get("RANK", "")
    if not text.isdecimal():
        raise UsageError(
            "--record-real-job communicates with the ranks that torchrun launched, and RANK is "
            f"{text!r}: "
            "torchrun --nproc-per-node N -m onerank capture run --record-real-job ...",
            code="real-job-no-rank",
        )
    return int(text)


def _write_steps(steps: "Mapping[str, Capture]", output: Path, *, as_json: bool) -> None:
    """Write `NAME.STEP.et` next to `output` for each captured forward, and show a table of them."""
    from onerank.analysis.summary import StepSummaries, StepSummary, summarise
    from onerank.cli.conversion_tables import render_conversion
    from onerank.cli.summary_tables import context_text

    traces = {label: output.with_suffix(f".{label}{output.suffix}") for label in steps}
    _write_all({traces[label]: step.graph for label, step in steps.items()})
    summaries = [
        StepSummary(label, traces[label], summarise(step.graph)) for label, step in steps.items()
    ]
    if as_json:
        print_json(StepSummaries(summaries))
        return
    for label, step in steps.items():
        render_conversion(step.conversion, step.sliced, f"Linked, {label}")
    rows: list[tuple[object, ...]] = []
    for done in summaries:
        forward, summary = done.summary.inference, done.summary
        assert forward is not None
        rows.append(
            (
                forward.kind,
                forward.number,
                forward.batch or "-",
                forward.new_tokens or "-",
                context_text(forward.context_lengths),
                summary.nodes,
                size(summary.peak_memory_bytes) if summary.peak_memory_bytes else "-",
                time(summary.measured_step_ns),
                done.trace.name,
            )
        )
    columns = (
        *("step", "forward", "batch", "new tokens", "context"),
        *("nodes", "peak memory", "time", "trace"),
    )
    table("Captured steps, one rank", columns, rows, texts=(0, len(columns) - 1))
    notes = dict.fromkeys(str(note) for done in summaries for note in done.summary.notes)
    lines([("written to", str(output.parent)), *(("note", note) for note in notes)])


def _write_ranks(done: "CapturedRanks", world: str, output: Path, *, as_json: bool) -> None:
    """Write `NAME.RANK.et` next to `output` for each captured rank, and show a table of them.

    Args:
        done: the captures by rank.
        world: sizes of the world's axes, as text.
        output: path from which the names of the traces are derived.
        as_json: whether to print JSON.
    """
    from onerank.analysis.summary import RankSummaries, rank_summary
    from onerank.cli.conversion_tables import render_conversion

    traces = {rank: output.with_suffix(f".{rank}{output.suffix}") for rank in done.captures}
    _write_all({traces[rank]: capture.graph for rank, capture in done.captures.items()})
    captured = [
        rank_summary(capture.graph, rank, done.represents[rank], traces[rank])
        for rank, capture in done.captures.items()
    ]
    if as_json:
        print_json(RankSummaries(captured, done.missing))
        return
    for rank, capture in done.captures.items():
        render_conversion(capture.conversion, capture.sliced, f"Linked, rank {rank}")
    _render_ranks(captured, done.missing, world)


def _write_all(graphs: Mapping[Path, "Graph"]) -> None:
    """Write each graph to its file; no file appears before all are written."""
    from onerank.ir.output_files import moving_into

    with moving_into(next(iter(graphs)).parent) as scratch:
        for path, graph in graphs.items():
            graph.write(scratch / path.name)


def _render_ranks(captured: "Sequence[RankSummary]", missing: tuple[int, ...], world: str) -> None:
    rows = [
        (
            rank.rank,
            _rank_ranges(rank.represents),
            rank.summary.nodes,
            size(rank.summary.peak_memory_bytes) if rank.summary.peak_memory_bytes else "-",
            time(rank.step_ns),
            rank.trace.name,
        )
        for rank in captured
    ]
    columns = ("rank", "represents", "nodes", "peak memory", "step", "trace")
    table(
        f"{counted(len(captured), 'rank')} captured; the world has {world}",
        columns,
        rows,
        texts=(1, 5),
    )
    notes = dict.fromkeys(note for rank in captured for note in rank.summary.notes)
    pairs = [("written to", str(captured[0].trace.parent))] + [
        ("note", str(note)) for note in notes
    ]
    if missing:
        ranks = _rank_ranges(missing)
        text = f"no trace represents the ranks {ranks}: an export to all ranks needs them"
        pairs.append(("missing", text))
    lines(pairs)


def _rank_ranges(ranks: Sequence[int]) -> str:
    """Return ascending ranks as runs: `0-3, 8-11`; many runs are cut, and the ranks counted."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    texts = ["-".join(map(str, run)) for run in runs[:_RANK_RANGES]]
    more = f", ... ({counted(len(ranks), 'rank')})" if len(runs) > _RANK_RANGES else ""
    return ", ".join(texts) + more


_TITLES = {
    "plain": "Steps without a profiler, against those of a plain run",
    "profiled": "Steps under a profiler, against those of a plain run",
    "slices": "Slices that communicate, against the whole model",
}


@capture.command(
    cls=ScriptCommand,
    sections=headings(ScriptOptions, Options),
    epilog="The script's own arguments come after --: capture verify train.py --tp 4 -- --lr 1",
)
# A capture without a device computes no values to compare, and verify writes no traces.
@job_options(without=("raw_dir", "record_real_job", "device", "like", "steps"))
@as_json
@ends_despite_threads
@reports_errors
def verify(
    script: Path, args: tuple[str, ...], named: ScriptOptions, job: Options, as_json: bool
) -> None:
    """Check that measuring and slicing leave SCRIPT's numbers unchanged.

    SCRIPT runs under the instruments of `run` and once more without them: losses, outputs and
    gradients of each step must agree. Then its first batch goes through the whole Hugging Face
    model and through all its slices, in fp32 and with real communication in one process: loss,
    logits and every gradient must agree. Both checks use deterministic kernels.

    Exit code 1: a tensor differs by more than the tolerance.
    """
    from onerank.capture.isolated_capture import loading_capture
    from onerank.capture.validate_options import validate_early

    script, module = named.located(script)
    # The fewest steps that pass through every window.
    windows = WindowPlan(warm_up=1, timed_steps=1, repeat=1)
    options = dataclasses.replace(job, module=module, windows=windows)
    validate_early(script, options)
    with loading_capture():
        from onerank.capture.isolation import sigterm_interrupts
        from onerank.capture.verify.numerics import verify_script
    with sigterm_interrupts(), script_streams(stdout_to_stderr=as_json) as progress:
        verification = verify_script(script, args, options, progress)
    if as_json:
        print_json(verification)
    else:
        _render_verification(verification, f"{script}: {options.world}")
    sys.exit(1 if verification.breaches else 0)


def _render_verification(verification: "Verification", title: str) -> None:
    pairs = [("not checked", text) for text in verification.not_checked]
    pairs += [("note", str(note)) for note in verification.notes]
    lines(pairs, title)
    columns = ("", "tensors", "equal", "largest error", "relative", "too much", "worst")
    for check, heading in _TITLES.items():
        rows = [
            (
                f"{comparison.what} {comparison.module}".strip() + f" ({comparison.dtype})",
                comparison.tensors,
                comparison.equal,
                f"{comparison.max_abs:.2e}",
                f"{comparison.max_rel:.2e}",
                comparison.breaches,
                comparison.worst if comparison.max_rel else "",
            )
            for comparison in verification.comparisons
            if comparison.check == check
        ]
        if rows:
            table(heading, columns, rows, texts=(0, 6))
    if verification.breaches:
        differing = counted(verification.breaches, "tensor")
        say(f"error[verify-differs]: {differing} differ by more than the tolerance", err=True)
    else:
        lines([("verified", "no tensor differs by more than the tolerance")])

"""`annotate --target GPU`: predict the step on another GPU; `gpus`: GPU descriptions."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click

from onerank.cli.click_options import SectionedCommand, headings, option, with_options
from onerank.cli.common import TRACE, TRACE_OUTPUT, as_json, keep_inputs, read_trace, reports_errors
from onerank.cli.terminal import print_json

TARGET = "The target, and what is known of it"

WHAT_IF = "What if"

OUTPUT = "Output"


@dataclass(frozen=True, kw_only=True)
class AnnotateOptions:
    """What `annotate` predicts, for which GPU, by which model."""

    target: str = option(
        "A name of `onerank gpus`, or a description.",
        heading=TARGET,
        metavar="GPU|FILE",
    )
    source: str | None = option(
        "GPU the trace was measured on, if the trace does not name it.",
        heading=TARGET,
        default=None,
        metavar="GPU|FILE",
    )
    database: tuple[Path, ...] = option(
        "Kernel database with rows of the target, as `onerank bench` writes it, in addition to the "
        "shipped ones; may be repeated.",
        heading=TARGET,
        default=(),
        type=click.Path(path_type=Path),
        multiple=True,
        metavar="FILE",
    )
    # Choices are spelled out, so that --help loads no model. Tests compare them with the library's.
    model: Literal["auto", "learned", "residual", "roofline", "ratio"] = option(
        "auto: looked up where the target was measured, else learned; for a CPU capture the "
        "datasheet.",
        heading=TARGET,
        default="auto",
        show_default=True,
    )
    explain: int | None = option(
        "Show the arithmetic of one node, by its id in `onerank show --text`, and write nothing.",
        heading=TARGET,
        default=None,
        type=click.IntRange(0, 2**64 - 1),
        metavar="NODE",
    )
    override: tuple[str, ...] = option(
        "What if a figure of the target (`onerank gpus --schema`) were another, "
        "memory_bandwidth_gb_per_s=6000 for one; may be repeated.",
        heading=WHAT_IF,
        default=(),
        multiple=True,
        metavar="FIGURE=VALUE",
    )
    seq: str | None = option(
        "What if sequences were this long; 4096=8192 names the captured length.",
        heading=WHAT_IF,
        default=None,
        metavar="LENGTH",
    )
    micro_batch: str | None = option(
        "What if a micro-batch had so many sequences; 1=4 names the captured size.",
        heading=WHAT_IF,
        default=None,
        metavar="SIZE",
    )
    dtype: Literal["fp8", "bf16", "fp16", "tf32"] | None = option(
        "What if matrix products in a wider type ran in this one; fp16: bf16 products, too.",
        heading=WHAT_IF,
        default=None,
    )
    kernel: tuple[str, ...] = option(
        "usual (default): what the target's libraries run, eager attention stays; fused: eager "
        "attention as well; flash2, flash3, cudnn, AMD's aotriton, ck or aiter: that one, of both; "
        "same; or eager: no fused kernel.",
        heading=WHAT_IF,
        default=(),
        multiple=True,
        metavar="attention=KERNEL",
    )
    fuse: Literal["elementwise", "norm"] | None = option(
        "What if neighbouring kernels that pass data on were one; norm: reductions as well.",
        heading=WHAT_IF,
        default=None,
    )
    overlap: Literal["as-captured", "on", "off"] = option(
        "on: communication overlaps compute as far as its data allow; off: they wait for each "
        "other, in the order of their issue.",
        heading=WHAT_IF,
        default="as-captured",
        show_default=True,
    )
    nvlink_active: bool = option(
        "Links to peers draw power as in the job, which a slice on one GPU does not see; kernels "
        "at the power limit take longer.",
        heading=WHAT_IF,
        default=False,
    )
    host_scale: float = option(
        "Host operators take this many times as long as measured; 0: no time at all.",
        heading=WHAT_IF,
        default=1.0,
        type=click.FloatRange(0, 1000),
        show_default=True,
        metavar="F",
    )
    output: Path | None = option(
        "Default: TRACE with the target before its suffix.",
        *("-o", "--output"),
        heading=OUTPUT,
        default=None,
        type=TRACE_OUTPUT,
    )


@click.command(cls=SectionedCommand, sections=headings(AnnotateOptions))
@click.argument("trace", type=TRACE)
@with_options(AnnotateOptions)
@as_json
@reports_errors
def annotate(trace: Path, options: AnnotateOptions, as_json: bool) -> None:
    """Predict the duration of every compute node of TRACE, and of the step, on another GPU.

    Writes the trace with the new durations and prints the step before and after. Every predicted
    node records how it was predicted and an interval that holds four of five measured times on GPUs
    that the model had not seen. Communication and the host stay as measured; a network simulator,
    or `onerank replay --busbw-gb-s`, times communication. A CPU capture becomes the GPU step that
    it represents, from the target's datasheet: the weakest evidence.
    """
    from dataclasses import asdict

    import onerank
    from onerank.analysis.step_time import step_change
    from onerank.annotate import PassOptions, explain, load_gpu, recost, summarise, with_figures
    from onerank.annotate.passes.host_scaling import scale_host
    from onerank.annotate.passes.nvlink_active import nvlink_idle_note
    from onerank.annotate.passes.pass_config import parse_kernels, parse_sizes
    from onerank.cli.render.annotation_table import render_explanation, render_recosting

    gpu = with_figures(load_gpu(options.target), figures_of(options.override))
    passes = PassOptions(
        options.dtype,
        parse_kernels(options.kernel),
        parse_sizes(options.seq, options.micro_batch),
        options.fuse,
        options.overlap,
        options.nvlink_active,
    )
    inputs: dict[str, Any] = {
        "model": options.model,
        "source": options.source,
        "databases": options.database,
    }
    if options.explain is not None:
        _check_explains(options, as_captured=passes == PassOptions())
        explanation = explain(read_trace(trace), gpu, options.explain, **inputs)
        print_json(explanation) if as_json else render_explanation(explanation)
        return
    output = options.output or default_output(trace, options.target, gpu.name)
    description = Path(options.target) if Path(options.target).is_file() else None
    keep_inputs(output, trace, description, *options.database)
    before = read_trace(trace) if as_json else onerank.read(trace)
    after = scale_host(recost(before, gpu, passes=passes, **inputs), options.host_scale)
    recosting = summarise(before, after)
    # Replay refuses a graph with a cycle, so it comes before anything is written.
    step = step_change(before, after, recosting.interval)
    after.write(output)
    if as_json:
        print_json({**asdict(recosting), "step": step})
    else:
        idle_links = () if passes.nvlink_active else nvlink_idle_note(after, gpu)
        notes = (*after.job.measurement.notes, *idle_links)
        render_recosting(recosting, step, notes, title=f"{trace} -> {output}")


def _check_explains(options: AnnotateOptions, *, as_captured: bool) -> None:
    """Refuse options that change or write what --explain only shows."""
    if options.output is not None or options.host_scale != 1:
        refused = "--host-scale" if options.output is None else "--output"
        raise click.UsageError(f"--explain writes nothing; leave out {refused}")
    if not as_captured:
        raise click.UsageError(
            "--explain shows the step as captured: leave out --dtype, --kernel, --seq, "
            "--micro-batch, --fuse, --overlap and --nvlink-active"
        )


def figures_of(settings: tuple[str, ...]) -> dict[str, float]:
    """Return the figures that texts of the form `FIGURE=VALUE` set.

    Raises:
        UsageError: a text does not have this form.
    """
    figures: dict[str, float] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        try:
            figures[name.strip()] = float(value)
        except ValueError:
            raise click.UsageError(
                f"--override {setting}: {value!r} is not a number; write --override "
                "memory_bandwidth_gb_per_s=6000"
            ) from None
    return figures


def default_output(trace: Path, target: str, name: str) -> Path:
    """Return `trace.H100.et` for `trace.et` and `H100`; a description file's GPU gives the name."""
    word = name if Path(target).suffix == ".toml" or "/" in target else target
    word = re.sub(r"[^\w.-]+", "-", word)
    return trace.with_name(f"{trace.name.removesuffix('.et')}.{word}.et")


@dataclass(frozen=True, kw_only=True)
class GpusOptions:
    """What `gpus` prints."""

    check: Path | None = option(
        "Print a description instead, or what is wrong with it (exit 2).",
        default=None,
        type=click.Path(path_type=Path),
        metavar="FILE",
    )
    schema: bool = option("Print the JSON Schema of a description instead.", default=False)


@click.command()
@with_options(GpusOptions)
@as_json
@reports_errors
def gpus(options: GpusOptions, as_json: bool) -> None:
    """List the GPU descriptions that ship with onerank."""
    if options.schema and options.check is not None:
        raise click.UsageError("give --check or --schema, not both")
    from onerank.annotate import gpu_names, load_gpu
    from onerank.annotate.gpus.datasheet_estimates import estimate_notes
    from onerank.annotate.gpus.spec_schema import gpu_schema
    from onerank.cli.render.annotation_table import render_gpus
    from onerank.cli.terminal import lines

    if options.schema:
        print_json(gpu_schema())
        return
    names = gpu_names() if options.check is None else [options.check]
    descriptions = [load_gpu(name) for name in names]
    if as_json:
        print_json(descriptions)
    else:
        render_gpus(descriptions)
        if options.check is not None:
            notes = [("estimated", note) for gpu in descriptions for note in estimate_notes(gpu)]
            lines([("checked", "nothing wrong"), *notes], str(options.check))

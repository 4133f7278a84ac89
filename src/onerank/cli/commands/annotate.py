"""`annotate --target GPU trace.et`: what the step costs on a GPU you do not have."""

import re
from pathlib import Path

import click

from onerank.cli.common import TRACE, TRACE_OUTPUT, as_json, keep_inputs, print_json, reports_errors
from onerank.cli.help_groups import SectionedCommand

MODELS = (
    "auto",
    "learned",
    "residual",
    "roofline",
    "ratio",
)  # named here, so that --help loads no model; a test compares
DTYPES = ("fp8", "bf16", "fp16", "tf32")  # as MODELS
FUSIONS = ("elementwise", "norm")
OVERLAPS = ("as-captured", "on", "off")


SECTIONS = {
    "The target, and what is known of it": ("target", "source", "databases", "model", "node"),
    "What if": (
        *("settings", "seq", "micro_batch", "dtype", "kernels"),
        *("fuse", "overlap", "links", "host"),
    ),
    "Output": ("output",),
}


@click.command(cls=SectionedCommand, sections=SECTIONS)
@click.argument("trace", type=TRACE)
@click.option(
    "--target",
    required=True,
    metavar="GPU|FILE",
    help="A name of `onerank gpus`, or a description.",
)
@click.option(
    "-o", "--output", type=TRACE_OUTPUT, help="Default: TRACE with the target before its suffix."
)
@click.option("--model", type=click.Choice(MODELS), default=MODELS[0], show_default=True,
              help="auto: looked up where the target was measured, else learned; for a CPU "
              "capture the datasheet.")  # fmt: skip
@click.option(
    "--source", metavar="GPU|FILE", help="GPU the trace was measured on, where it does not tell."
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="FIGURE=VALUE",
    help="What if a figure of the target (`onerank gpus --schema`) were another, "
    "memory_bandwidth_gbps=6000 for one; may be repeated.",
)
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    help="What if matrix products in a wider type ran in this one; fp16: what is in bf16, too.",
)
@click.option(
    "--kernel",
    "kernels",
    multiple=True,
    metavar="attention=KERNEL",
    help="usual (default): what the target's libraries run, eager attention stays; fused: eager "
    "attention as well; flash2, flash3, cudnn, AMD's aotriton, ck or aiter: that one, of both; "
    "same; or eager: no fused kernel.",
)
@click.option(
    "--seq",
    metavar="LENGTH",
    help="What if sequences were this long; 4096=8192 names the captured length.",
)
@click.option(
    "--micro-batch",
    metavar="SIZE",
    help="What if a micro-batch had so many sequences; 1=4 names the captured size.",
)
@click.option(
    "--fuse",
    type=click.Choice(FUSIONS),
    help="What if neighbouring kernels that pass data on were one; norm: reductions as well.",
)
@click.option(
    "--overlap",
    type=click.Choice(OVERLAPS),
    default=OVERLAPS[0],
    show_default=True,
    help="on: communication runs beside compute as far as its data allow; off: they wait for each "
    "other, in the order of their issue.",
)
@click.option(
    "--links",
    type=click.Choice(("as-captured", "awake")),
    default="as-captured",
    show_default=True,
    help="awake: links to peers draw power as in the job, which a slice on one GPU does not see; "
    "kernels at the power limit take longer.",
)
@click.option(
    "--database",
    "databases",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Kernel database with rows of the target, as `onerank bench` writes it, beside the "
    "shipped ones; may be repeated.",
)
@click.option(
    "--host",
    default="keep",
    show_default=True,
    metavar="keep|scale:F|none",
    help="Host operators: as measured, F times as long, or free.",
)
@click.option(
    "--explain",
    "node",
    type=click.IntRange(0, 2**64 - 1),
    metavar="NODE",
    help="Show the arithmetic of one node, by its id in `onerank show --text`, and write nothing.",
)
@as_json
@reports_errors
def annotate(
    trace: Path,
    target: str,
    output: Path | None,
    model: str,
    source: str | None,
    settings: tuple[str, ...],
    dtype: str | None,
    kernels: tuple[str, ...],
    seq: str | None,
    micro_batch: str | None,
    fuse: str | None,
    overlap: str,
    links: str,
    databases: tuple[Path, ...],
    host: str,
    node: int | None,
    as_json: bool,
) -> None:
    """Predict the duration of every compute node of TRACE, and of the step, on another GPU.

    Writes the trace with the new durations, and tells the step before and after. Every predicted
    node says how it was predicted, and between what its time lies in four of five cases, as
    measured on GPUs that the model had not seen. Communication and the host stay as measured; a
    network simulator, or `onerank replay --busbw-gbps`, times the former. A CPU capture becomes the
    GPU step it stands for, from the target's datasheet: the weakest evidence.
    """
    from dataclasses import asdict

    import onerank
    from onerank.analysis.step_prediction import step_change
    from onerank.annotate import PassOptions, explain, load_gpu, recost, summarise, with_figures
    from onerank.annotate.host_scaling import parse_host, rehost
    from onerank.annotate.passes.nvlink_active import asleep_note
    from onerank.annotate.passes.pass_config import parse_kernels, parse_sizes
    from onerank.cli.render.annotation_table import render_explanation, render_recosting

    gpu, factor = with_figures(load_gpu(target), figures_of(settings)), parse_host(host)
    passes = PassOptions(
        dtype,
        parse_kernels(kernels),
        parse_sizes(seq, micro_batch),
        fuse,
        overlap,
        links == "awake",
    )
    if node is not None:
        if output is not None or factor != 1:
            given = "--host" if output is None else "--output"
            raise click.UsageError(f"--explain writes nothing; leave out {given}")
        if passes != PassOptions():
            raise click.UsageError(
                "--explain shows what was captured: leave --dtype, --kernel, --seq, --micro-batch, "
                "--fuse, --overlap and --links out"
            )
        if model not in ("auto", "learned"):
            raise click.UsageError(f"--explain shows the learned model's arithmetic, not {model}'s")
        explanation = explain(
            onerank.read(trace), gpu, node, model=model, source=source, databases=databases
        )
        print_json(explanation) if as_json else render_explanation(explanation)
        return
    output = output or default_output(trace, target, gpu.name)
    keep_inputs(output, trace, Path(target) if Path(target).is_file() else None, *databases)
    before = onerank.read(trace)
    made = recost(before, gpu, model=model, source=source, passes=passes, databases=databases)
    after = rehost(made, factor)
    after.write(output)
    recosting = summarise(before, after)
    step = step_change(before, after, recosting.interval)
    if as_json:
        print_json({**asdict(recosting), "step": step})
    else:
        asleep = () if passes.nvlink_active else asleep_note(after, gpu)
        notes = (*after.job.measurement.notes, *asleep)
        render_recosting(recosting, step, notes, title=f"{trace} -> {output}")


def figures_of(settings: tuple[str, ...]) -> dict[str, float]:
    """Read `FIGURE=VALUE`s.

    Raises:
        UsageError: one is not of this form.
    """
    figures: dict[str, float] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        try:
            figures[name.strip()] = float(value)
        except ValueError:
            form = "the form is --set memory_bandwidth_gbps=6000"
            raise click.UsageError(f"--set {setting}: {value!r} is no number; {form}") from None
    return figures


def default_output(trace: Path, target: str, name: str) -> Path:
    """Return `trace.H100.et` for `trace.et` and `H100`; of a description file its GPU's name."""
    word = name if Path(target).suffix == ".toml" or "/" in target else target
    word = re.sub(r"[^\w.-]+", "-", word)
    return trace.with_name(f"{trace.name.removesuffix('.et')}.{word}.et")

"""`annotate --target GPU` predicts a step on another GPU."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from onerank.cli.common import (
    INPUT_OR_DIRECTORY,
    OUTPUT_DIRECTORY,
    TRACE_OUTPUT,
    Number,
    UsageError,
    as_json,
    keep_inputs,
    read_trace,
    reports_errors,
)
from onerank.cli.dataclass_to_click import (
    SectionedCommand,
    declared_options,
    headings,
    with_options,
)
from onerank.cli.terminal import (
    advancing_parts,
    counted,
    counts_of_evidence,
    evidence,
    lines,
    parts,
    print_json,
    ratio,
    table,
)
from onerank.display import flops, size, time
from onerank.option_fields import option

if TYPE_CHECKING:
    from onerank.analysis.step_time import StepBreakdown, StepChange
    from onerank.annotate import Explanation, Gpu, Recosting
    from onerank.ir import Graph
    from onerank.ir.notes import Note


TARGET = "The target, and what is known of it"

WHAT_IF = "What if"

OUTPUT = "Output"


@dataclass(frozen=True, kw_only=True)
class AnnotateOptions:
    """What `annotate` predicts, for which GPU, by which model."""

    target: str = option(
        "GPU to predict: a name of `onerank gpus`, or a description.",
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
        "Kernel database with rows of the target, which `onerank bench` writes, in addition to the "
        "shipped ones; may be repeated.",
        heading=TARGET,
        default=(),
        type=click.Path(path_type=Path),
        multiple=True,
        metavar="FILE",
    )
    # Choices are spelled out, so that --help loads no model. Tests compare them with the library's.
    model: Literal["auto", "learned", "residual", "roofline", "ratio"] = option(
        "Cost model. auto: looked up in kernel databases of the target, else learned. learned: "
        "GEMMs and attention by their tiles, other kernels as residual. residual: each part of a "
        "kernel's time by its own resource. roofline, ratio: by peak rates, for comparison.",
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
        "What if a figure of the target (`onerank gpus --schema`) had this value, such as "
        "memory_bandwidth_gb_per_s=6000; may be repeated.",
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
        "What if a micro-batch had this many sequences; 1=4 names the captured size.",
        heading=WHAT_IF,
        default=None,
        metavar="SIZE",
    )
    dtype: Literal["fp8", "fp4", "bf16", "fp16", "tf32"] | None = option(
        "What if GEMMs in wider types ran in this type; fp16 applies to bf16, too.",
        heading=WHAT_IF,
        default=None,
    )
    kernel: tuple[str, ...] = option(
        "usual (default): fused attention runs the target's usual kernel. fused: eager attention, "
        "too. flash2, flash3, cudnn, AMD's aotriton, ck or aiter: both run this kernel. same: the "
        "captured kernel. eager: no fused kernel.",
        heading=WHAT_IF,
        default=(),
        multiple=True,
        metavar="attention=KERNEL",
    )
    fuse: Literal["elementwise", "norm"] | None = option(
        "What if neighbouring elementwise kernels were fused; norm: reductions, too.",
        heading=WHAT_IF,
        default=None,
    )
    overlap: Literal["as-captured", "on", "off"] = option(
        "on: communication overlaps compute as far as data dependencies allow. off: they run one "
        "after the other, in the order of issue.",
        heading=WHAT_IF,
        default="as-captured",
        show_default=True,
    )
    nvlink_active: bool = option(
        "Count the power of active NVLinks, which a capture on one GPU does not draw; kernels at "
        "the power limit take longer.",
        heading=WHAT_IF,
        default=False,
    )
    host: str = option(
        "Host of a capture without a GPU: typical, or a description; none: kernels only. A step on "
        "another GPU than the captured one gets an interval of these hosts.",
        heading=TARGET,
        default="typical",
        show_default=True,
        metavar="HOST|FILE",
    )
    host_scale: float = option(
        "Multiply the durations of host operators by this factor.",
        heading=WHAT_IF,
        default=1.0,
        type=Number(min=0, max=1000),
        show_default=True,
        metavar="F",
    )
    output: Path | None = option(
        "Trace or directory to write.  [default: TRACE with the target before its suffix]",
        "-o",
        "--output",
        heading=OUTPUT,
        default=None,
        # A trace needs a file and a bundle a directory, so the command checks the type.
        type=click.Path(path_type=Path),
    )


@click.command(cls=SectionedCommand, sections=headings(AnnotateOptions))
@click.argument("trace", type=INPUT_OR_DIRECTORY)
@with_options(AnnotateOptions)
@as_json
@reports_errors
def annotate(trace: Path, options: AnnotateOptions, as_json: bool) -> None:
    """Predict the duration of every compute node of TRACE, and of the step, on another GPU.

    Writes the trace with the new durations and prints the step before and after. Every predicted
    node records how it was predicted, and an 80% interval: it held four of five measured times on
    GPUs that the model had not seen. Communication and the host stay as measured. A network
    simulator, or `onerank replay --busbw-gb-s`, times communication.

    A CPU capture becomes the GPU step that it represents, predicted from the target's datasheet,
    which is the weakest evidence.

    TRACE may be a directory of several ranks' traces (`capture run --ranks`): every trace in it is
    predicted. It may be a bundle, the directory that `capture serve` writes: its tables are
    predicted, and its traces remain those of the capture, from which a later prediction starts.
    """
    from dataclasses import asdict

    import onerank

    if trace.is_dir():
        if any(trace.glob("*.et")):
            _annotate_traces(trace, options, as_json=as_json)
        else:
            _annotate_bundle(trace, options, as_json=as_json)
        return
    prediction = _Prediction.of(options)
    if options.explain is not None:
        _explain(trace, options, prediction, as_json=as_json)
        return
    output = options.output or default_output(trace, options.target, prediction.gpu.name)
    output = TRACE_OUTPUT.convert(output, None, click.get_current_context())
    _keep_inputs(output, [trace], options)
    # The tables end with the notes; with --json they go to stderr.
    graph = read_trace(trace) if as_json else onerank.read(trace)
    recosting, step, notes = prediction.write(graph, output)
    if as_json:
        print_json({**asdict(recosting), "step": step})
    else:
        render_recosting(recosting, step, notes, title=f"{trace} -> {output}")


@dataclass(frozen=True)
class _Prediction:
    """How traces are predicted: the target, and the arguments of `onerank.recost` by topic.

    Attributes:
        gpu: the target, with the figures that `--override` sets.
        what_if: changes of the step.
        model_inputs: the model, and what it reads; also arguments of `explain`.
        machine: the GPU and the host that the step is predicted for.
    """

    gpu: "Gpu"
    what_if: Mapping[str, Any]
    model_inputs: Mapping[str, Any]
    machine: Mapping[str, Any]

    @classmethod
    def of(cls, options: AnnotateOptions) -> "_Prediction":
        """Read the target and the what-ifs."""
        from onerank.annotate import load_gpu, with_figures
        from onerank.annotate.passes.pass_options import parse_kernels

        override = figures_of(options.override)
        return cls(
            gpu=with_figures(load_gpu(options.target), override),
            what_if={
                "seq": options.seq,
                "micro_batch": options.micro_batch,
                "dtype": options.dtype,
                "attention": parse_kernels(options.kernel),
                "fuse": options.fuse,
                "overlap": options.overlap,
                "nvlink_active": options.nvlink_active,
            },
            model_inputs={
                "model": options.model,
                "source": options.source,
                "databases": options.database,
            },
            machine={
                "target": options.target,
                "override": override,
                "host": options.host,
                "host_scale": options.host_scale,
            },
        )

    def write(
        self, before: "Graph", output: Path
    ) -> "tuple[Recosting, StepChange, tuple[Note, ...]]":
        """Predict a graph and write it; return what changed, and the notes of the new graph."""
        import onerank
        from onerank.analysis.step_time import step_change
        from onerank.annotate import summarise
        from onerank.annotate.passes.nvlink_power import nvlink_idle_note

        after = onerank.recost(before, **self.machine, **self.what_if, **self.model_inputs)
        recosting = summarise(before, after)
        # Replay refuses a graph with a cycle, so it runs before anything is written.
        step = step_change(before, after, recosting.interval)
        after.write(output)
        # A slice runs without its peers, so its NVLinks are idle, and real ranks draw more power.
        idle_links = () if self.what_if["nvlink_active"] else nvlink_idle_note(after, self.gpu)
        return recosting, step, (*after.job.measurement.notes, *idle_links)


def _explain(
    trace: Path, options: AnnotateOptions, prediction: _Prediction, *, as_json: bool
) -> None:
    """Print the arithmetic of one node."""
    from onerank.annotate import explain

    assert options.explain is not None
    _check_explains(options, prediction.what_if)
    explanation = explain(
        read_trace(trace), prediction.gpu, options.explain, **prediction.model_inputs
    )
    print_json(explanation) if as_json else render_explanation(explanation)


def _keep_inputs(output: Path, traces: Sequence[Path], options: AnnotateOptions) -> None:
    """Refuse an output that would replace an input; target and host may be files."""
    described = [Path(name) for name in (options.target, options.host) if Path(name).is_file()]
    keep_inputs(output, *traces, *described, *options.database)


@dataclass(frozen=True)
class RecostedTrace:
    """One of several re-costed traces.

    Attributes:
        rank: its rank.
        trace: file that was written.
        recosting: the re-costing in figures.
        step: the step before and after.
    """

    rank: int
    trace: Path
    recosting: "Recosting"
    step: "StepChange"


@dataclass(frozen=True)
class RecostedTraces:
    """All re-costed traces of a directory.

    Attributes:
        traces: one record each.
    """

    traces: list[RecostedTrace]


def _annotate_traces(directory: Path, options: AnnotateOptions, *, as_json: bool) -> None:
    """Predict all traces of a directory for another GPU, and write a directory of traces."""
    import onerank
    from onerank.export import trace_files
    from onerank.ir.output_files import moving_into

    if options.explain is not None:
        raise UsageError(
            f"{directory} holds several traces, and --explain shows a node of one: name its trace",
            code="explain-several-traces",
        )
    files = trace_files((directory,))
    prediction = _Prediction.of(options)
    output = _output_directory(directory, options)
    for file in files:
        _keep_inputs(output / file.name, files, options)
    seen: set[Note] = set()
    notes: dict[Note, None] = {}
    done: list[RecostedTrace] = []
    with moving_into(output) as scratch:
        for file in files:
            graph = read_trace(file, seen=seen) if as_json else onerank.read(file)
            recosting, step, notes_of_rank = prediction.write(graph, scratch / file.name)
            done.append(RecostedTrace(graph.job.rank, output / file.name, recosting, step))
            notes |= dict.fromkeys(notes_of_rank)
    if as_json:
        print_json(RecostedTraces(done))
    else:
        render_recosted_traces(done, [*notes], title=f"{directory} -> {output}")


def _output_directory(directory: Path, options: AnnotateOptions) -> Path:
    """Return the directory to write for a directory: the given one, or `stages.H100`."""
    word = re.sub(r"[^\w.-]+", "-", Path(options.target).stem)
    # "." and ".." have no name to add to.
    whole = directory.resolve() if directory.name in ("", "..") else directory
    output = options.output or whole.with_name(f"{whole.name}.{word}")
    return OUTPUT_DIRECTORY.convert(output, None, click.get_current_context())


def _annotate_bundle(directory: Path, options: AnnotateOptions, *, as_json: bool) -> None:
    """Predict all steps of a bundle for another GPU, and write a bundle."""
    from onerank.annotate import PassOptions, load_gpu, with_figures
    from onerank.annotate.passes.pass_options import parse_kernels
    from onerank.cli.bundle_tables import show_bundle
    from onerank.serving.build_bundle import recost_bundle
    from onerank.serving.bundle import check_replaceable, holds_bundle, read_bundle

    if not holds_bundle(directory):
        raise UsageError(
            f"{directory} holds no .et file and no bundle\n  name a trace, a directory of "
            "traces, or one that `capture serve` wrote",
            code="annotate-no-traces",
        )
    single = ("explain", "seq", "micro_batch", "source", "overlap", "host_scale")
    refused = [
        declared.spellings[0]
        for declared in declared_options(AnnotateOptions)
        if declared.name in single and getattr(options, declared.name) != declared.default
    ]
    if refused:
        raise UsageError(
            f"{directory} is a bundle: leave out {', '.join(refused)}, which need a single trace",
            code="bundle-option",
        )
    output = _output_directory(directory, options)
    passes = PassOptions(
        dtype=options.dtype,
        attention=parse_kernels(options.kernel),
        fuse=options.fuse,
        nvlink_active=options.nvlink_active,
    )
    bundle = read_bundle(directory)
    check_replaceable(output)
    gpu = with_figures(load_gpu(options.target), figures_of(options.override))
    with advancing_parts() as progress:
        recosted, traces = recost_bundle(
            bundle,
            gpu,
            host=options.host,
            model=options.model,
            databases=options.database,
            passes=passes,
            progress=progress,
        )
    recosted.write(output, traces)
    show_bundle(recosted, output, as_json=as_json)


def _check_explains(options: AnnotateOptions, what_if: Mapping[str, Any]) -> None:
    """Refuse options that have no effect with --explain."""
    if options.output is not None or options.host_scale != 1:
        refused = "--host-scale" if options.output is None else "--output"
        raise UsageError(
            f"--explain writes nothing; leave out {refused}", code="explain-writes-nothing"
        )
    # The values of what-ifs that change nothing.
    as_captured = {None, False, "usual", "as-captured"}
    if not as_captured.issuperset(what_if.values()):
        raise UsageError(
            "--explain shows the step as captured: leave out --dtype, --kernel, --seq, "
            "--micro-batch, --fuse, --overlap and --nvlink-active",
            code="explain-with-passes",
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
            raise UsageError(
                f"--override {setting}: {value!r} is not a number; write --override "
                "memory_bandwidth_gb_per_s=6000",
                code="override-not-a-number",
            ) from None
    return figures


def default_output(trace: Path, target: str, name: str) -> Path:
    """Return `trace.H100.et` for `trace.et` and `H100`, or the name in a description file."""
    # A path cannot be part of a file name; a shipped GPU keeps the spelling that the user chose.
    word = name if Path(target).suffix == ".toml" or "/" in target else target
    # The name of a GPU with overrides has spaces, brackets and "=".
    word = re.sub(r"[^\w.-]+", "-", word)
    return trace.with_name(f"{trace.name.removesuffix('.et')}.{word}.et")


# Names of unknown kernels that are listed.
_MOST_NAMES = 12


def render_recosting(
    recosting: "Recosting", step: "StepChange", notes: "Sequence[Note]", title: str
) -> None:
    """Print what a re-costing changed, and the notes of the new graph."""
    before, after = recosting.before_ns, recosting.after_ns
    # A capture without a device has no times before.
    earlier = f"{time(before)} on {recosting.source} -> " if before else ""
    pairs = [
        *_step(recosting, step),
        ("compute", f"{earlier}{time(after)} on {recosting.target}"),
        *_interval(recosting.interval),
        ("model", recosting.model),
        ("evidence", counts_of_evidence(recosting.evidence, recosting.evidence_ns)),
    ]
    pairs += [("rule", f"{counted(n, 'node')}: {rule}") for rule, n in recosting.rules.items()]
    pairs += [("dropped", f"{n} {op}: launches nothing") for op, n in recosting.dropped.items()]
    if recosting.unknown:
        count = sum(kernel.count for kernel in recosting.unknown)
        names = [*dict.fromkeys(kernel.op or kernel.name for kernel in recosting.unknown)]
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        names = ", ".join(names[:_MOST_NAMES]) + more
        spent = time(sum(kernel.after_ns for kernel in recosting.unknown))
        nodes = counted(count, "node")
        pairs.append(("unknown", f"{nodes} without a class or formula ({spent}): {names}"))
    pairs += [("note", str(note)) for note in notes]
    lines(pairs, title)
    _where(recosting, step)
    rows = [
        (
            row.op_class.value,
            row.count,
            time(row.before_ns) if row.before_ns else "-",
            time(row.after_ns),
            ratio(row.after_ns, row.before_ns),
            flops(row.flops),
            size(row.bytes_read + row.bytes_written),
            _shares(row.evidence_ns),
        )
        for row in recosting.classes
    ]
    columns = ("", "nodes", "before", "after", "ratio", "FLOPs", "bytes", "evidence by time")
    title = f"Compute by class, on {recosting.source} and on {recosting.target}"
    table(title, columns, rows, texts=(0, len(columns) - 1))


def render_recosted_traces(
    traces: Sequence[RecostedTrace], notes: "Sequence[Note]", title: str
) -> None:
    """Print a row for each re-costed trace, and the notes of all."""
    rows = [
        (
            row.rank,
            row.trace.name,
            row.recosting.source,
            time(row.step.before.step_ns) if row.step.before else "-",
            time(row.step.after.step_ns) if row.step.after else "-",
            time(row.recosting.after_ns),
            row.step.untimed,
        )
        for row in traces
    ]
    target = traces[0].recosting.target
    columns = ("rank", "trace", "from", "step before", f"step on {target}", "compute", "untimed")
    table(title, columns, rows, texts=(1, 2))
    lines([("note", str(note)) for note in notes])


def _step(recosting: "Recosting", step: "StepChange") -> list[tuple[str, str]]:
    """Return the lines on the step before and after."""
    if step.after is None:
        return []
    how = "steady state" if step.source == "steady_state" else "replayed"
    text = f"{time(step.after.step_ns)} on {recosting.target}"
    if step.before is not None:
        # In steady state the step before is the measured one, and stands there already.
        another = step.measured_ns not in {None, step.before.step_ns}
        measured = f" ({time(step.measured_ns)} without the profiler)" if another else ""
        text = f"{time(step.before.step_ns)} on {recosting.source}{measured} -> {text}"
    ends = () if step.p10_ns is None else (step.p10_ns, step.p90_ns)
    pairs = [(f"step, {how}", text), *_interval(ends)]
    if step.untimed:
        calls = counted(step.untimed, "call")
        pairs.append(("communication", f"{calls} without a time; the step does not include them"))
    return pairs


def _interval(ends: Sequence[int | None]) -> list[tuple[str, str]]:
    return [("80% interval", " to ".join(time(end) for end in ends))] if ends else []


def _where(recosting: "Recosting", step: "StepChange") -> None:
    """Print the parts of the step: before, if its nodes have times, and after."""
    if step.after is None:
        return
    columns = [(recosting.target, step.after)]
    if step.before is not None:
        columns.insert(0, (recosting.source, step.before))
    untimed = f", {step.untimed} calls not timed" if step.untimed else ""
    labels = ("compute", f"exposed communication{untimed}", "idle", "  waiting for a launch", "all")
    figures = [
        [f"{time(ns)} {ns / parts.step_ns:6.1%}" for ns in _times(parts)] for _, parts in columns
    ]
    rows = list(zip(labels, *figures, strict=True))
    host = "steady state" if step.source == "steady_state" else "replayed with its host as profiled"
    table(f"The step, {host}", ("", *(gpu for gpu, _ in columns)), rows)


def _times(parts: "StepBreakdown") -> tuple[int, ...]:
    return (
        parts.compute_ns,
        parts.exposed_communication_ns,
        parts.idle_ns,
        parts.host_bound_ns,
        parts.step_ns,
    )


def _shares(times_ns: dict[str, int]) -> str:
    """Return the shares of a class's time by evidence, the largest first."""
    shares = parts(times_ns)
    if len(shares) < 2:
        return "".join(evidence(name) for name in shares)
    ordered = sorted(times_ns, key=lambda name: -times_ns[name])
    return ", ".join(f"{shares[name]} {evidence(name)}" for name in ordered)


def render_explanation(explanation: "Explanation") -> None:
    """Print how one node's duration was predicted."""
    lines(list(explanation.lines), f"node {explanation.node}: {explanation.name}")

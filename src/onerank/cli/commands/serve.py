"""`capture serve` measures a rank of an engine; `export` writes bundles for simulators."""

import contextlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click

from onerank.capture.options import CAPTURED, OUTPUT, Options
from onerank.capture.profiling.window_plan import WindowPlan
from onerank.cli.common import (
    INPUT_OR_DIRECTORY,
    OUTPUT_DIRECTORY,
    UsageError,
    as_json,
    ends_despite_threads,
    interrupted,
    reports_errors,
)
from onerank.cli.dataclass_to_click import Fraction, SectionedCommand, headings, with_options
from onerank.cli.script import ScriptCommand, script_streams
from onerank.cli.terminal import advancing_parts, lines, print_json
from onerank.option_fields import option, shared_option
from onerank.serving.simulators.options import (
    AiconfiguratorOptions,
    LinkedSimulatorOptions,
    VidurOptions,
)


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The rank to measure, the grid, and where the bundle goes."""

    tp: int = shared_option(Options, "tp", show_default=True)
    sharding_plan: Path | None = shared_option(
        Options,
        "sharding_plan",
        help="Plan file (TOML): how --tp slices the model, or which of its modules stay whole.",
    )
    pp: int = shared_option(
        Options,
        "pp",
        help="Pipeline-parallel size: --rank selects the stage, which is measured with its layers, "
        "their KV cache, and a receive and a send of hidden states.",
        show_default=True,
    )
    pp_layers: tuple[int, ...] = shared_option(Options, "pp_layers")
    ep: int = shared_option(
        Options,
        "ep",
        help="Expert-parallel size. Each rank of the group computes the compositions, so attention "
        "is data-parallel.",
        show_default=True,
    )
    moe_routing: str = shared_option(
        Options,
        "moe_routing",
        help="Distribution of tokens over experts: balanced, zipf:S (exponent), a FILE of tokens "
        "per expert (JSON or CSV, one line or one per layer), or model (the model's router).",
    )
    rank: int = shared_option(
        Options,
        "rank",
        help="Rank to measure, of tp times ep times pp; tp is innermost, pp outermost. Stages, and "
        "ranks with skewed routing, differ.  [default: 0]",
    )
    grid: str | None = option(
        "Compositions to measure: a TOML file, or a text such as 'decode: batch=1,8,64 "
        "context=512,4096; prefill: tokens=128,2048 context=0,4096; mixed: tokens=512 context=0 "
        "batch=32 decode_context=1024'.  [default: at most 60, up to the model's context]",
        heading=CAPTURED,
        default=None,
        metavar="FILE|TEXT",
    )
    error: float | None = option(
        "Measure only as much of the grid as the interpolation needs for this median error of its "
        "cross-validation. The points then have an order in which the first ones cover the grid.  "
        "[default: the whole grid]",
        heading=CAPTURED,
        default=None,
        type=Fraction(),
        metavar="SHARE",
    )
    device: Literal["none"] | None = shared_option(
        Options,
        "device",
        help="none: on shapes alone, with times predicted for --like.  [default: a GPU, else the "
        "CPU]",
    )
    like: str = shared_option(
        Options, "like", help="With --device none: the GPU, a name of `onerank gpus` or a file."
    )
    host: str = option(
        "With --device none: the host, typical or a description.",
        heading=CAPTURED,
        default="typical",
        show_default=True,
        metavar="HOST|FILE",
    )
    timed_steps: int = shared_option(WindowPlan, "timed_steps", heading=CAPTURED)
    output: Path = option(
        "Directory to write: the bundle.", "-o", "--output", heading=OUTPUT, type=OUTPUT_DIRECTORY
    )
    store: Path | None = option(
        "Directory of results, which later runs reuse.  [default: next to the output, until the "
        "bundle is complete]",
        heading=OUTPUT,
        default=None,
        type=OUTPUT_DIRECTORY,
    )


@click.command(cls=ScriptCommand, sections=headings(ServeOptions))
@click.argument("source", type=INPUT_OR_DIRECTORY, metavar="CONFIG|SCRIPT")
@click.argument("args", nargs=-1, metavar="[-- ARGS]")
@with_options(ServeOptions)
@as_json
@ends_despite_threads
@reports_errors
def serve(source: Path, args: tuple[str, ...], options: ServeOptions, as_json: bool) -> None:
    """Measure the steps of an inference engine's rank over a grid of compositions.

    CONFIG is the config.json of a transformers model, which is built with random weights. SCRIPT
    (.py) builds a transformers model itself; it is stopped at its first call of the model, which
    then computes the steps. The model is sliced for the sizes. Prefills and decodes of a step share
    its linear layers; attention runs for each against a KV cache. The bundle has tables of times,
    kernels per module and memory, and a trace of each step. After a kill, the same command
    continues where it stopped.
    """
    from onerank.capture.isolation import sigterm_interrupts
    from onerank.capture.serving.compositions import parse_grid
    from onerank.capture.validate_options import check_job, unused_plan_error
    from onerank.cli.bundle_tables import show_bundle
    from onerank.plan.tasks import Store
    from onerank.serving.adaptive_grid import WantedError
    from onerank.serving.build_bundle import measure_bundle
    from onerank.serving.bundle import check_replaceable

    is_script = source.suffix == ".py"
    if args and not is_script:
        raise UsageError(
            f"{source} is no script (.py), so it takes no arguments: {' '.join(args)}\n"
            "  leave them out",
            code="serve-arguments-unused",
        )
    grid = parse_grid(options.grid) if options.grid is not None else None
    check_replaceable(options.output)
    windows = WindowPlan(warm_up=2, timed_steps=options.timed_steps)
    job = Options(
        tp=options.tp,
        sharding_plan=options.sharding_plan,
        pp=options.pp,
        pp_layers=options.pp_layers,
        ep=options.ep,
        moe_routing=options.moe_routing,
        rank=options.rank,
        device=options.device,
        like=options.like,
        windows=windows,
    )
    check_job(job)
    # A model of transformers needs no plan to become a stage, or to have its experts divided.
    if options.sharding_plan is not None and options.tp == 1:
        raise unused_plan_error(job)
    name = options.output.absolute().name
    results = options.store or options.output.absolute().with_name(f".{name}.results")
    store = Store(results)
    wanted = None if options.error is None else WantedError(options.error)
    streams = script_streams(stdout_to_stderr=as_json) if is_script else contextlib.nullcontext()
    with sigterm_interrupts(), advancing_parts() as progress, streams:
        try:
            bundle, traces = measure_bundle(
                *(source, job, grid, store),
                args=args,
                host=options.host,
                wanted=wanted,
                progress=progress,
            )
        except KeyboardInterrupt as interrupt:
            raise interrupted(results) from interrupt
        except Exception:
            # Empty if the model could not be built.
            with contextlib.suppress(OSError):
                results.rmdir()
            raise
    bundle.write(options.output, traces)
    if options.store is None:
        shutil.rmtree(results)
    show_bundle(bundle, options.output, as_json=as_json)


def _show_export(
    written: Any, pairs: Sequence[tuple[str, str]], title: str, *, as_json: bool
) -> None:
    """Print what an export wrote: as JSON, or as lines of names and values under a title."""
    if as_json:
        print_json(written)
    else:
        lines([*pairs, *(("note", str(note)) for note in written.notes)], title)


@click.command(cls=SectionedCommand, sections=headings(VidurOptions))
@click.argument("bundle", type=INPUT_OR_DIRECTORY)
@with_options(VidurOptions)
@as_json
@reports_errors
def vidur(bundle: Path, options: VidurOptions, as_json: bool) -> None:
    """Write the profiles that Vidur, a simulator of inference clusters, reads.

    BUNDLE is the directory of `capture serve`. Times are those of kernels, per layer, interpolated
    to the rows that Vidur trains on. Network profiles are Vidur's. The output may be Vidur's
    directory data/profiling.
    """
    from onerank.serving.bundle import read_bundle
    from onerank.serving.simulators.vidur import export_vidur

    written = export_vidur(read_bundle(bundle), options)
    pairs = [
        ("files", f"{written.mlp}, {written.attention}"),
        ("rows", str(written.rows)),
        ("run", "python -m vidur.main " + " ".join(written.options)),
    ]
    _show_export(written, pairs, f"{written.model} on {written.device}, for Vidur", as_json=as_json)


@click.command(cls=SectionedCommand, sections=headings(LinkedSimulatorOptions))
@click.argument("bundle", type=INPUT_OR_DIRECTORY)
@with_options(LinkedSimulatorOptions)
@as_json
@reports_errors
def llmservingsim(bundle: Path, options: LinkedSimulatorOptions, as_json: bool) -> None:
    """Write the profile that LLMServingSim 2, a simulator of serving clusters, reads.

    BUNDLE is the directory of `capture serve`. The layers of a step take as long as the step
    replayed as a CUDA graph. Collectives are ASTRA-sim's. The output has the layout of a checkout
    of LLMServingSim and a cluster with one instance for each rank of --ep; exports of other bundles
    to the same directory add to it. The model is named after its class unless --model names it.
    """
    from onerank.serving.bundle import read_bundle
    from onerank.serving.simulators.llmservingsim import export_llmservingsim

    written = export_llmservingsim(read_bundle(bundle), options)
    pairs = [
        ("cluster", str(written.cluster)),
        ("model", str(written.model_config)),
        ("rows", str(written.rows)),
        ("run", "python -m serving " + " ".join(written.options)),
    ]
    _show_export(written, pairs, f"{written.profile}, for LLMServingSim", as_json=as_json)


@click.command(cls=SectionedCommand, sections=headings(LinkedSimulatorOptions))
@click.argument("bundle", type=INPUT_OR_DIRECTORY)
@with_options(LinkedSimulatorOptions)
@as_json
@reports_errors
def sglang_sim(bundle: Path, options: LinkedSimulatorOptions, as_json: bool) -> None:
    """Write the steps as a replay table of SGLang Simulator, which runs SGLang's scheduler.

    BUNDLE is the directory of `capture serve` or `convert --engine-steps`. The table has whole
    steps, replayed as CUDA graphs, with collectives that take NCCL's latency and the time of their
    bytes on the link; recorded steps contain theirs. --model is a local directory with the model's
    configuration and tokenizer; by default the export writes one without a tokenizer.
    """
    from onerank.serving.bundle import read_bundle
    from onerank.serving.simulators.sglang_sim import export_sglang_sim

    written = export_sglang_sim(read_bundle(bundle), options)
    server = "python -m sglang_simulator.simulation.sglang.launch_server "
    pairs = [
        ("config", str(written.config)),
        ("rows", str(written.rows)),
        ("run", server + " ".join(written.options)),
    ]
    _show_export(written, pairs, f"{written.table}, for SGLang Simulator", as_json=as_json)


@click.command(cls=SectionedCommand, sections=headings(AiconfiguratorOptions))
@click.argument("bundle", type=INPUT_OR_DIRECTORY)
@with_options(AiconfiguratorOptions)
@as_json
@reports_errors
def aiconfigurator(bundle: Path, options: AiconfiguratorOptions, as_json: bool) -> None:
    """Write the steps as forward-pass data of aiconfigurator, which compares deployments.

    BUNDLE is the directory of `capture serve` or `convert --engine-steps`. The table has whole
    steps, replayed as CUDA graphs, with collectives that take NCCL's latency and the time of their
    bytes on the link; recorded steps contain theirs. The output is a directory
    for aiconfigurator's --systems-paths. --model is a name, or a directory with a config.json; by
    default the export writes such a directory.
    """
    from onerank.serving.bundle import read_bundle
    from onerank.serving.simulators.aiconfigurator import export_aiconfigurator

    written = export_aiconfigurator(read_bundle(bundle), options)
    pairs = [
        ("system", str(written.system)),
        ("rows", str(written.rows)),
        ("run", "aiconfigurator cli estimate " + " ".join(written.options)),
    ]
    _show_export(written, pairs, f"{written.table}, for aiconfigurator", as_json=as_json)

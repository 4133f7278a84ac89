"""`capture serve` measures the steps of an inference engine's rank."""

import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

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
from onerank.cli.dataclass_to_click import Fraction, headings, with_options
from onerank.cli.script import ScriptCommand, script_streams
from onerank.cli.terminal import advancing_parts
from onerank.option_fields import option, shared_option

if TYPE_CHECKING:
    from onerank.capture.serving.compositions import Composition
    from onerank.serving.bundle import Bundle


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
        needs="device",
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
    from onerank.capture.serving.compositions import parse_grid
    from onerank.capture.validate_options import check_job, unused_plan_error
    from onerank.cli.bundle_tables import show_bundle
    from onerank.serving.bundle import check_replaceable

    if args and not _is_script(source):
        raise UsageError(
            f"{source} is no script (.py), so it takes no arguments: {' '.join(args)}\n"
            "  leave them out",
            code="serve-arguments-unused",
        )
    grid = parse_grid(options.grid) if options.grid is not None else None
    check_replaceable(options.output)
    job = _job(options)
    check_job(job)
    # A model of transformers needs no plan to become a stage, or to have its experts divided.
    if options.sharding_plan is not None and options.tp == 1:
        raise unused_plan_error(job)
    bundle = _measured(source, args, job, grid, options, as_json=as_json)
    show_bundle(bundle, options.output, as_json=as_json)


def _is_script(source: Path) -> bool:
    return source.suffix == ".py"


def _job(options: ServeOptions) -> Options:
    """Return the options of a capture of the rank that is measured."""
    return Options(
        tp=options.tp,
        sharding_plan=options.sharding_plan,
        pp=options.pp,
        pp_layers=options.pp_layers,
        ep=options.ep,
        moe_routing=options.moe_routing,
        rank=options.rank,
        device=options.device,
        like=options.like,
        windows=WindowPlan(warm_up=2, timed_steps=options.timed_steps),
    )


def _measured(
    source: Path,
    args: tuple[str, ...],
    job: Options,
    grid: "tuple[Composition, ...] | None",
    options: ServeOptions,
    *,
    as_json: bool,
) -> "Bundle":
    """Measure the grid, and write the bundle; the results of an interrupted run stay.

    Args:
        source: configuration of a model, or a script.
        args: arguments of the script.
        job: the rank to measure.
        grid: the compositions; None for the usual ones.
        options: of the command.
        as_json: whether stdout is for JSON alone.
    """
    from onerank.capture.isolation import sigterm_interrupts
    from onerank.plan.tasks import Store
    from onerank.serving.adaptive_grid import WantedError
    from onerank.serving.build_bundle import measure_bundle

    name = options.output.absolute().name
    results = options.store or options.output.absolute().with_name(f".{name}.results")
    store = Store(results)
    wanted = None if options.error is None else WantedError(options.error)
    streams = (
        script_streams(stdout_to_stderr=as_json) if _is_script(source) else contextlib.nullcontext()
    )
    with sigterm_interrupts(), advancing_parts() as progress, streams:
        try:
            bundle, traces = measure_bundle(
                source,
                job,
                grid,
                store,
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
    return bundle

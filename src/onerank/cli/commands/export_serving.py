"""`onerank export` of a bundle to simulators of serving."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from onerank.cli.common import INPUT_OR_DIRECTORY, as_json, reports_errors
from onerank.cli.dataclass_to_click import SectionedCommand, headings, with_options
from onerank.cli.terminal import lines, print_json
from onerank.serving.simulators.options import (
    AiconfiguratorOptions,
    LinkedSimulatorOptions,
    VidurOptions,
)


def _bundle_command(options: type) -> Callable[[Callable[..., None]], click.Command]:
    """Return a decorator for a command that exports BUNDLE."""

    def decorate(function: Callable[..., None]) -> click.Command:
        bundle = click.argument("bundle", type=INPUT_OR_DIRECTORY)
        command = click.command(cls=SectionedCommand, sections=headings(options))
        return command(bundle(with_options(options)(as_json(reports_errors(function)))))

    return decorate


def _show_export(
    written: Any, pairs: Sequence[tuple[str, str]], title: str, *, as_json: bool
) -> None:
    """Print what an export wrote: as JSON, or as lines of names and values under a title."""
    if as_json:
        print_json(written)
    else:
        lines([*pairs, *(("note", str(note)) for note in written.notes)], title)


@_bundle_command(VidurOptions)
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


@_bundle_command(LinkedSimulatorOptions)
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


@_bundle_command(LinkedSimulatorOptions)
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


@_bundle_command(AiconfiguratorOptions)
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

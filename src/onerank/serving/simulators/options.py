"""Options of exports to simulators of serving, each declared once for Python and the command line.

This module imports nothing heavy, because the command line reads it to print help.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from onerank.option_fields import option


@dataclass(frozen=True, kw_only=True)
class SimulatorOptions:
    """Where an export is written, for which version of a simulator, under which model name."""

    model: str | None = option(
        "Name of the model in the simulator.  [default: by the bundle]",
        default=None,
        metavar="NAME",
    )
    checkout: Path | None = option(
        "Checkout of the simulator, or the directory of its installed package: refuse if it reads "
        "another format.",
        default=None,
        input_directory=True,
    )
    output: Path = option(
        "Directory to write, in the layout that the simulator reads.",
        "-o",
        "--output",
        output_directory=True,
    )


@dataclass(frozen=True, kw_only=True)
class LinkedSimulatorOptions(SimulatorOptions):
    """Options for simulators that need the memory bandwidth and links of the GPUs."""

    gpu: str | None = option(
        "Description of the bundle's GPU: a name of `onerank gpus` or a file.  [default: by the "
        "bundle's device]",
        default=None,
        metavar="GPU",
    )
    link_gb_per_s: float | None = option(
        "Bandwidth between the GPUs of an instance, one way.  [default: by the GPU's description]",
        default=None,
        positive=True,
    )


@dataclass(frozen=True, kw_only=True)
class VidurOptions(SimulatorOptions):
    """Vidur's names of the model and the GPU."""

    # Vidur has a fixed set of models, so no name follows from a bundle.
    model: str = option(
        "Name of the model in Vidur, such as meta-llama/Meta-Llama-3-8B.", metavar="NAME"
    )
    device: str | None = option(
        "Name of the GPU in Vidur.  [default: by the bundle's device]", default=None, metavar="NAME"
    )


@dataclass(frozen=True, kw_only=True)
class AiconfiguratorOptions(LinkedSimulatorOptions):
    """The engine that aiconfigurator models, and the name of its table."""

    backend: Literal["vllm", "sglang", "trtllm"] = option(
        "Engine whose memory and scheduling aiconfigurator models.",
        default="vllm",
        show_default=True,
    )
    version: str = option(
        "Name of the table, which aiconfigurator calls the engine's version.",
        default="onerank",
        show_default=True,
        metavar="NAME",
    )

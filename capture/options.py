"""Options of a capture, each declared once: for Python, the command line and its reference page.

A field made by `option` is also an option of `capture run` and `capture verify`. This module
imports neither click nor torch, because the command line reads the declarations to print help.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from onerank.capture.profiling.window_plan import StepChoice, WindowPlan
from onerank.option_fields import option

if TYPE_CHECKING:
    from onerank.capture.collective_kernels import CollectiveEmulation
    from onerank.capture.no_device.emulated_gpu import EmulatedGpu
    from onerank.capture.parallelize.data.data_groups import DataParallelStrategy
    from onerank.capture.parallelize.fewer_layers import Depth
    from onerank.capture.parallelize.tensor.plan_file import ShardingPlan
    from onerank.ir import World

SCRIPT = "The script"
JOB = "The job"
CAPTURED = "The captured rank"
COMMUNICATION = "Emulated collectives (CUDA)"
OUTPUT = "Output"

_SIZE: Mapping[str, Any] = {"minimum": 1}

# GPUs of a DGX or HGX node, the largest common node.
_MOST_RANKS_PER_NODE = 8


@dataclass(frozen=True, kw_only=True)
class Options:
    """The job that a script belongs to, and what to capture of it.

    The help of each option says what its field means. The other fields are:

    Attributes:
        module: the script's name as a module, to run it by; None runs it by its path.
        windows: steps of each measurement window.
        depth: number of layers to build Hugging Face models with; None builds all.
        micro_batches: micro-batches of each step after the script's first; the last number is that
            of all further steps. Empty if they are not known: then the first two steps show them.
        recorded_steps: successive steps to record, of a training script without a device.
    """

    torchrun: bool | None = option(
        "Whether SCRIPT distributes itself: it then runs as torchrun would start it, and is not "
        "sliced.  [default: whether it creates a process group before it trains]",
        "--torchrun/--no-torchrun",
        heading=SCRIPT,
        default=None,
    )
    nproc_per_node: int | None = option(
        "Ranks per node, for a script that distributes itself.  [default: the largest divisor of "
        "the world up to 8]",
        heading=SCRIPT,
        default=None,
        **_SIZE,
    )
    true_local_rank: bool = option(
        "Set LOCAL_RANK to the rank's index on its node, for such a script.  [default: 0]",
        heading=SCRIPT,
        default=False,
    )
    tp: int = option("Tensor-parallel size.", heading=JOB, default=1, **_SIZE)
    sp: bool = option(
        "Sequence parallelism as in Megatron-LM; needs --tp.", heading=JOB, default=False
    )
    tp_style: Literal["megatron", "hf"] = option(
        "Where collectives are issued: as in Megatron-LM, or as in transformers.",
        heading=JOB,
        default="megatron",
        show_default=True,
    )
    sharding_plan: "Path | ShardingPlan | None" = option(
        "Plan file (TOML): how to slice a model class that the script defines.",
        heading=JOB,
        default=None,
        input_file=True,
    )
    cp: int = option("Context-parallel size.", heading=JOB, default=1, **_SIZE)
    cp_comm: Literal["all_gather", "p2p"] = option(
        "Exchange of keys and values under --cp: all-gather, or send and receive in a ring.",
        heading=JOB,
        default="all_gather",
        show_default=True,
    )
    pp: int = option("Pipeline-parallel size.", heading=JOB, default=1, **_SIZE)
    pp_layers: tuple[int, ...] = option(
        "Layers of each stage, such as 8,8,7,7.  [default: even]",
        heading=JOB,
        default=(),
        metavar="N,N[,...]",
    )
    ep: int = option("Expert-parallel size; divides dp * cp.", heading=JOB, default=1, **_SIZE)
    moe_routing: str = option(
        "Distribution of tokens over the experts of a sliced model: balanced, zipf:S (exponent), a "
        "FILE of tokens per expert (JSON or CSV, one line or one per layer), or model (the model's "
        "router).",
        heading=JOB,
        default="balanced",
        show_default=True,
        metavar="HOW",
    )
    dp: int | None = option(
        "Data-parallel size.  [default: the smallest for --ep]", heading=JOB, default=None, **_SIZE
    )
    ddp: bool = option(
        "All-reduce gradients between replicas.  [default for --dp]", heading=JOB, default=False
    )
    fsdp: bool = option(
        "Shard parameters, gradients and optimizer states (FSDP2).", heading=JOB, default=False
    )
    zero: int | None = option(
        "Shard optimizer states (1), also gradients (2), or all (3, as --fsdp).",
        heading=JOB,
        default=None,
        metavar="1|2|3",
    )
    rank: int = option("Rank to capture.  [default: 0]", heading=CAPTURED, default=0, minimum=0)
    steps: tuple[StepChoice, ...] | None = option(
        "Steps to capture of a script that infers, each a forward of its model: the first prefill "
        "or decode, in speculative decoding the first draft or verify, or forwards by number, from "
        "1. Several write NAME.STEP.et each.  [default: prefill,decode, or prefill,draft,verify, "
        "if the script does not train]",
        heading=CAPTURED,
        default=None,
        metavar="prefill|decode|draft|verify|N[,...]",
    )
    step_of: str | None = option(
        "The method whose calls are the steps, instead of the forward of a model: of an engine's "
        "runner, or of a model in a script that trains. --steps selects calls.",
        heading=CAPTURED,
        default=None,
        metavar="CLASS.METHOD",
    )
    record_real_job: bool = option(
        "Capture a real job: torchrun -m onerank capture run --record-real-job ... communicates, "
        "and writes a trace.RANK.et on each rank, to compare slices with.",
        heading=CAPTURED,
        default=False,
    )
    device: Literal["none"] | None = option(
        "none: run the script on shapes alone, on no device: operators, collectives and memory, "
        "no times.  [default: the device that the script chooses]",
        heading=CAPTURED,
        default=None,
    )
    like: str = option(
        "With --device none: the GPU that the script sees, a name of `onerank gpus` or a file.",
        heading=CAPTURED,
        default="H100",
        needs="device",
        show_default=True,
        metavar="GPU",
    )
    network: Path | None = option(
        "On CUDA, occupy the GPU for each collective as long as this network takes (TOML: "
        "[default], [group.NAME], [size.N] with busbw_gb_per_s and latency_us; node_size).",
        heading=COMMUNICATION,
        default=None,
    )
    busbw_gb_s: float | None = option(
        "The same with a single bus bandwidth, in gigabytes per second.",
        heading=COMMUNICATION,
        default=None,
        metavar="GB/S",
    )
    collective_kernels: Literal["on", "off"] | None = option(
        "Whether a kernel occupies the GPU for each collective.  [default: on with a network]",
        heading=COMMUNICATION,
        default=None,
    )
    raw_dir: Path | None = option(
        "Keep the raw Kineto and execution traces in this directory.",
        heading=OUTPUT,
        default=None,
        output_directory=True,
    )
    module: str | None = None
    windows: WindowPlan = field(default_factory=WindowPlan)
    depth: "Depth | None" = None
    micro_batches: tuple[int, ...] = ()
    recorded_steps: int = 1

    # Cached in the instance's __dict__, which a frozen dataclass allows.
    @cached_property
    def world(self) -> "World":
        """The world that the sizes span.

        Raises:
            JobError: a size is below 1, or `ep` does not divide cp * dp.
        """
        from onerank.ir import World

        # The smallest dp with which ep divides cp * dp.
        dp = self.dp or self.ep // math.gcd(self.ep, self.cp)
        return World.of(tp=self.tp, cp=self.cp, dp=dp, pp=self.pp, ep=self.ep)

    @cached_property
    def data_parallel(self) -> "DataParallelStrategy | None":
        """The strategy by which data-parallel ranks share gradients and states; None selects "ddp".

        It applies to scripts that do not create process groups.

        Raises:
            CaptureError: the options exclude each other, or the world has no data-parallel ranks.
        """
        from onerank.capture.parallelize.data.data_groups import strategy_of

        return strategy_of(self.world, ddp=self.ddp, fsdp=self.fsdp, zero=self.zero)

    @cached_property
    def plan(self) -> "ShardingPlan | None":
        """The plan for a model class that the script defines; None slices Hugging Face models.

        Raises:
            SliceError: the file cannot be read, or is not a plan.
        """
        from onerank.capture.parallelize.tensor.plan_file import read_plan

        given = self.sharding_plan
        return read_plan(given) if isinstance(given, Path) else given

    @cached_property
    def emulation(self) -> "CollectiveEmulation":
        """The kernels that replace collectives on CUDA.

        Raises:
            CaptureError: two networks are given, or none for "on", or the network is invalid.
        """
        from onerank.capture.collective_kernels import collective_emulation

        return collective_emulation(self.collective_kernels, self.network, self.busbw_gb_s)

    @cached_property
    def emulated_gpu(self) -> "EmulatedGpu | None":
        """The GPU that the script sees in a capture without a device; None with a device.

        Raises:
            TargetError: there is no such description, or it is malformed.
        """
        from onerank.capture.no_device.emulated_gpu import emulated_gpu

        return emulated_gpu(self.like) if self.device == "none" else None

    def resolve(self) -> None:
        """Read the plan and the network and combine the sizes, so that errors come early.

        Raises:
            OneRankError: options exclude each other, or a file is invalid.
        """
        _ = self.data_parallel, self.plan, self.emulation, self.emulated_gpu

    def in_world(self, world: "World") -> Self:
        """Return the options with the sizes of another world."""
        sizes = {axis: world.sizes.get(axis, 1) for axis in ("tp", "cp", "dp", "pp")}
        return replace(self, **sizes, ep=world.ep)


CompileMode = Literal["default", "reduce-overhead", "max-autotune"]


@dataclass(frozen=True, kw_only=True)
class SeveralCaptures:
    """Captures of one script in turn, each in a separate process."""

    ranks: tuple[int, ...] | Literal["distinct"] | None = option(
        "Capture one rank of each class of equivalent ranks, or these ranks, in turn, each in a "
        "separate process, and write NAME.RANK.et for each.",
        heading=CAPTURED,
        default=None,
        metavar="distinct|R,R[,...]",
    )
    capture_layers: tuple[int, ...] | None = option(
        "Build a Hugging Face model with each of these numbers of layers in turn, capture it, and "
        "extrapolate to its full depth. With --pp: layers of the captured stage.",
        heading=CAPTURED,
        default=None,
        metavar="N,N[,...]",
    )
    compile: CompileMode | None = option(
        "Capture the step eager (NAME.eager.et next to the output), then under torch.compile in "
        "this mode, and report the gain of each sub-module.",
        heading=CAPTURED,
        default=None,
        is_flag=False,
        flag_value="default",
    )

    @property
    def named_ranks(self) -> tuple[int, ...] | None:
        """The ranks to capture; None for one of each class of equivalent ranks."""
        return None if self.ranks == "distinct" else self.ranks


def ranks_per_node(size: int, requested: int | None) -> int:
    """Return the number of ranks per node in a world of `size` ranks.

    Args:
        size: ranks of the world.
        requested: ranks per node; None takes the largest divisor of `size` up to 8.

    Raises:
        CaptureError: `requested` does not divide `size`.
    """
    if requested is None:
        most = min(size, _MOST_RANKS_PER_NODE)
        return max(n for n in range(1, most + 1) if size % n == 0)
    if size % requested:
        from onerank.ir.errors import CaptureError

        raise CaptureError(
            f"--nproc-per-node {requested} does not divide the world of {size} ranks: choose a "
            f"divisor of {size}",
            code="nodes-indivisible",
        )
    return requested

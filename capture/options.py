"""Options of a capture.

The command line builds and checks options before it imports torch, which takes seconds. This module
and what it imports therefore name torch's classes in annotations alone.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from onerank.capture.collective_kernels import CollectiveEmulation
from onerank.capture.parallelize.data.data_groups import DataParallelStrategy
from onerank.capture.parallelize.experts.routing import BALANCED
from onerank.capture.parallelize.tensor.plan_file import ShardingPlan
from onerank.capture.profiling.window_plan import WindowPlan
from onerank.ir import World
from onerank.ir.errors import CaptureError

if TYPE_CHECKING:
    from onerank.capture.parallelize.context.sequence_shards import ContextComm
    from onerank.capture.parallelize.fewer_layers import Depth
    from onerank.capture.parallelize.tensor.module_styles import TensorParallelStyle

_MOST_RANKS_PER_NODE = 8
"""GPUs of a DGX or HGX node, the largest that torchrun is commonly given."""


@dataclass(frozen=True)
class Options:
    """What to capture.

    Attributes:
        world: sizes of the parallel axes.
        rank: global rank to run as.
        tp_style: where the slicer places its collectives.
        sequence_parallel: whether the slicer shards norms and residuals along the sequence.
        sharding_plan: what to slice of the script's own model class; None slices Hugging Face
            models.
        windows: steps per window.
        raw_dir: directory to keep the traces in, for `onerank convert`; None keeps none.
        data_parallel: how data-parallel ranks share gradients and states in a script that does
            not distribute itself; None is "ddp".
        depth: how many layers to build Hugging Face models with; None for all.
        real_job: whether torchrun launched the other ranks, and the script communicates with
            them; `windows.settle` must then be False.
        moe_routing: how tokens are routed to the experts of a sliced model: "balanced",
            "zipf:S", "model" (by its own router) or the name of a file (see `routing`).
        pp_layers: layers of each pipeline stage; () splits them evenly.
        collective_kernels: what takes the place of collectives on CUDA.
        cp_comm: how keys and values travel between context-parallel ranks of a sliced model.
        module: the script's name as a module, by which it is then run; None runs it by its path.
        torchrun: whether the script distributes itself, and so runs as torchrun would start it;
            None leaves it to `emulate_torchrun.decide_torchrun`.
        nproc_per_node: ranks per node, for a script that distributes itself; None: see
            `ranks_per_node`.
        true_local_rank: whether LOCAL_RANK is the rank's place on its node, in a script that
            distributes itself; otherwise it is 0, the only GPU of this host.
    """

    world: World = field(default_factory=World)
    rank: int = 0
    tp_style: "TensorParallelStyle" = "megatron"
    sequence_parallel: bool = False
    sharding_plan: ShardingPlan | None = None
    windows: WindowPlan = field(default_factory=WindowPlan)
    raw_dir: Path | None = None
    data_parallel: DataParallelStrategy | None = None
    depth: "Depth | None" = None
    real_job: bool = False
    moe_routing: str = BALANCED
    pp_layers: tuple[int, ...] = ()
    collective_kernels: CollectiveEmulation = field(default_factory=CollectiveEmulation)
    cp_comm: "ContextComm" = "all_gather"
    module: str | None = None
    torchrun: bool | None = None
    nproc_per_node: int | None = None
    true_local_rank: bool = False


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
        raise CaptureError(
            f"--nproc-per-node {requested} does not divide the world of {size} ranks: choose a "
            f"divisor of {size}",
            code="nodes-indivisible",
        )
    return requested

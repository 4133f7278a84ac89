"""Options of a capture."""

from dataclasses import dataclass, field
from pathlib import Path

from onerank.capture.collective_kernels import CollectiveEmulation
from onerank.capture.parallelize.context.sequence_shards import ContextComm
from onerank.capture.parallelize.data.auto_wrap import DataParallelStrategy
from onerank.capture.parallelize.experts.routing import BALANCED
from onerank.capture.parallelize.fewer_layers import Depth
from onerank.capture.parallelize.tensor.module_styles import TensorParallelStyle
from onerank.capture.parallelize.tensor.plan_file import ShardingPlan
from onerank.capture.profiling.window_plan import WindowPlan
from onerank.ir import World


@dataclass(frozen=True)
class Options:
    """What to capture.

    Attributes:
        world: sizes of the parallel axes.
        rank: global rank to stand for.
        tp_style: where the slicer places its collectives.
        sequence_parallel: whether the slicer shards norms and residuals along the sequence.
        sharding_plan: what to slice of the script's own model class; None slices Hugging Face
            models.
        windows: steps per window.
        raw_dir: directory to keep the traces in, for `onerank convert`; None keeps none.
        data_parallel: how the ranks that see other data share gradients and states, in scripts
            that know nothing of it; None is "ddp".
        depth: how many layers to build Hugging Face models with; None for all.
        real_job: whether the other ranks are there, launched by torchrun, and the script
            communicates
            with them; `plan` must then not settle.
        moe_routing: how tokens are routed to the experts of a sliced model: "balanced",
            "zipf:S", "model" (by its own router) or the name of a file (see `routing`).
        pp_layers: layers of each pipeline stage; () splits them evenly.
        collective_kernels: what takes the place of collectives on CUDA.
        cp_comm: how keys and values travel between context-parallel ranks of a sliced model.
        module: the script's name as a module, by which it is then run; None runs it by its path.
        torchrun: whether the script distributes itself, and so runs as torchrun would start it;
            None leaves it to `emulate_torchrun.decide_torchrun`.
        nproc_per_node: ranks of a node of the job, for scripts that distribute themselves; None:
            see
            `onerank.capture.fake_world.device_remap`.
        true_local_rank: whether such a script finds its rank's place on the node as LOCAL_RANK,
            and not 0, the one GPU that is here.
    """

    world: World = field(default_factory=World)
    rank: int = 0
    tp_style: TensorParallelStyle = "megatron"
    sequence_parallel: bool = False
    sharding_plan: ShardingPlan | None = None
    windows: WindowPlan = field(default_factory=WindowPlan)
    raw_dir: Path | None = None
    data_parallel: DataParallelStrategy | None = None
    depth: Depth | None = None
    real_job: bool = False
    moe_routing: str = BALANCED
    pp_layers: tuple[int, ...] = ()
    collective_kernels: CollectiveEmulation = field(default_factory=CollectiveEmulation)
    cp_comm: ContextComm = "all_gather"
    module: str | None = None
    torchrun: bool | None = None
    nproc_per_node: int | None = None
    true_local_rank: bool = False

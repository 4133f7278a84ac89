"""Options of a capture."""

from dataclasses import dataclass, field
from pathlib import Path

from onerank.capture.collective_kernels import StandIn
from onerank.capture.parallelize.context.sequence_shards import ContextComm
from onerank.capture.parallelize.data.auto_wrap import Form
from onerank.capture.parallelize.experts.routing import BALANCED
from onerank.capture.parallelize.fewer_layers import Depth
from onerank.capture.parallelize.tensor.module_styles import Flavour
from onerank.capture.parallelize.tensor.plan_file import SlicingPlan
from onerank.capture.profiling.window_plan import Plan
from onerank.ir import World


@dataclass(frozen=True)
class Options:
    """What to capture.

    Attributes:
        world: sizes of the parallel axes.
        rank: global rank to stand for.
        flavour: where the slicer places its borders.
        sequence: whether the slicer shards norms and residuals along the sequence.
        slicing: what to slice of the script's own model class; None slices Hugging Face models.
        plan: steps per window.
        keep_raw: directory to keep the traces in, for `onerank convert`; None keeps none.
        data_parallel: how the ranks that see other data share gradients and states, in scripts
            that know nothing of it; None is "ddp".
        depth: how many layers to build Hugging Face models with; None for all.
        real: whether the other ranks are there, launched by torchrun, and the script communicates
            with them; `plan` must then not settle.
        moe_routing: how tokens are routed to the experts of a sliced model: "balanced",
            "zipf:S", "model" (by its own router) or the name of a file (see `routing`).
        pp_layers: layers of each pipeline stage; () splits them evenly.
        standin: what takes the place of collectives on CUDA.
        cp_comm: how keys and values travel between context-parallel ranks of a sliced model.
        module: the script's name as a module, by which it is then run; None runs it by its path.
        torchrun: whether the script distributes itself though it does not name torch.distributed.
        per_node: ranks of a node of the job, for scripts that distribute themselves; None: see
            `onerank.capture.fake_world.device_remap`.
        own_local_rank: whether such a script finds its rank's place on the node as LOCAL_RANK,
            and not 0, the one GPU that is here.
    """

    world: World = field(default_factory=World)
    rank: int = 0
    flavour: Flavour = "megatron"
    sequence: bool = False
    slicing: SlicingPlan | None = None
    plan: Plan = field(default_factory=Plan)
    keep_raw: Path | None = None
    data_parallel: Form | None = None
    depth: Depth | None = None
    real: bool = False
    moe_routing: str = BALANCED
    pp_layers: tuple[int, ...] = ()
    standin: StandIn = field(default_factory=StandIn)
    cp_comm: ContextComm = "all_gather"
    module: str | None = None
    torchrun: bool = False
    per_node: int | None = None
    own_local_rank: bool = False

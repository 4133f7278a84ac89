"""Slice a model to one rank along every parallel axis."""

import functools
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import nn

from onerank.capture.parallelize.context.context_model import apply_context_parallel
from onerank.capture.parallelize.context.sequence_shards import ContextComm
from onerank.capture.parallelize.experts.expert_parallel import (
    apply_static_routing,
    expert_loads,
    shard_experts,
)
from onerank.capture.parallelize.experts.routing import Routing
from onerank.capture.parallelize.model_structure import is_encoder_decoder
from onerank.capture.parallelize.pipeline.encoder_decoder_stages import stage_encoder_decoder
from onerank.capture.parallelize.pipeline.stage import stage_model
from onerank.capture.parallelize.rank_classes import Loads, rank_classes
from onerank.capture.parallelize.tensor.module_styles import TensorParallelStyle
from onerank.capture.parallelize.tensor.plan_file import ShardingPlan
from onerank.capture.parallelize.tensor.slicer import Sliced, slice_model
from onerank.ir import World


def slice_to_rank(
    model: nn.Module,
    world: World,
    rank: int,
    new_group: Callable[[str, Sequence[int]], dist.ProcessGroup],
    *,
    tp_style: TensorParallelStyle,
    plan: ShardingPlan | None = None,
    sequence: bool = False,
    routing: Routing | None = None,
    peers_absent: bool = True,
    pp_layers: Sequence[int] = (),
    stage_depth: int | None = None,
    cp_comm: ContextComm = "all_gather",
) -> Sliced:
    """Reduce a model to the slice of one rank and insert its communication.

    Experts are sharded first, because tensor parallelism then cuts the remaining experts.

    Args:
        model: a model whose parameters are whole, on any device.
        world: sizes of the parallel axes.
        rank: the rank whose slice to keep.
        new_group: creates the process group of an axis from its name and ranks.
        tp_style: where the tensor-parallel collectives stand.
        plan: tensor-parallel plan; None selects the model's default plan.
        sequence: whether norms and residuals are sharded along the sequence.
        routing: how tokens are routed to experts; None leaves it to the model's router.
        peers_absent: whether the other ranks do not exist, so that collectives return no data.
        pp_layers: layers of each pipeline stage; () splits them evenly.
        stage_depth: layers of its stage to keep (`--capture-layers`); None keeps all.
        cp_comm: how keys and values travel between context-parallel ranks.

    Raises:
        SliceError: the model does not support this slicing.
    """
    before = sum(p.numel() for p in model.parameters())
    modules: dict[str, int] = {}
    duplicates: set[str] = set()
    loads: Loads | None = {}
    if routing is not None:
        apply_static_routing(model, routing)
    has_stages, has_context = "pp" in world.sizes, "cp" in world.sizes
    tensor = None
    if "tp" in world.sizes or (world.ep == 1 and not has_stages and not has_context):
        tensor = new_group("tp", world.line("tp", rank))
    if world.ep > 1:
        loads = expert_loads(model, routing, world.ep) if routing else None
        group = new_group("ep", world.line("ep", rank))
        modules |= shard_experts(model, group, tensor if sequence else None)
    if tensor is not None:
        sliced = slice_model(
            model, tensor, tp_style, peers_absent=peers_absent, plan=plan, sequence=sequence
        )
        modules |= sliced.modules
        duplicates |= sliced.duplicates
    stage = None
    if has_stages:
        line = world.line("pp", rank)
        shards = tensor.size() if tensor is not None and sequence else 1
        reduce_to_stage = (
            stage_encoder_decoder
            if is_encoder_decoder(model)
            else functools.partial(stage_model, depth=stage_depth)
        )
        stage = reduce_to_stage(
            model, new_group("pp", line), line, new_group, pp_layers, shards=shards
        )
        modules["layer"] = stage_depth or stage.pipeline.layers[stage.pipeline.stage]
        for tied in stage.tied:
            if tied.is_copy:
                duplicates |= {n for n, p in model.named_parameters() if p is tied.weight}
    if has_context:
        last = stage is None or stage.pipeline.stage == len(stage.pipeline.layers) - 1
        group = new_group("cp", world.line("cp", rank))
        apply_context_parallel(model, group, comm=cp_comm, has_loss=last, peers_absent=peers_absent)
    # With the model's own router (`loads` is None) a rank's work depends on data: no classes.
    classes = () if loads is None else rank_classes(world, stage, loads)
    after = sum(p.numel() for p in model.parameters())
    return Sliced(modules, before, after, stage, classes, frozenset(duplicates))

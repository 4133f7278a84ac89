"""Train a Llama-shaped model with torch's own parallelism: tensor, pipeline, HSDP and FSDP2.

JOB=benchmarks/jobs/llama_parallel.py
torchrun --nproc-per-node 4 $JOB --tp 2 --pp 2
torchrun --nproc-per-node 4 $JOB --shard 2  # HSDP 2 x 2
capture run $JOB --tp 2 --pp 2 --ranks 0,1,2,3 -o ranks/trace.et -- --tp 2 --pp 2

Ranks that --tp, --pp and --shard leave are replicas. The vocabulary is split over the
tensor-parallel ranks, and so is the loss. Weights are random.
"""

import argparse
import contextlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from transformers import LlamaConfig

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import train_llama_pp
from train_llama import SHAPES

LAYER_PLAN = {
    "self_attn.q_proj": ColwiseParallel(),
    "self_attn.k_proj": ColwiseParallel(),
    "self_attn.v_proj": ColwiseParallel(),
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}


class Stage(train_llama_pp.Stage):
    """A stage that returns logits in place of the loss, which torch's schedules compute."""

    def forward(self, given):
        """Return hidden states, or the logits of the last stage."""
        named = {"input_ids": given} if self.first else {"inputs_embeds": given}
        hidden = self.trunk(**named, use_cache=False).last_hidden_state
        return self.head(hidden) if self.last else hidden


def parallelize(stage, mesh, args):
    """Apply tensor parallelism, recomputation, compilation and FSDP2, in torchtitan's order."""
    layers = stage.trunk.layers
    if args.tp > 1:
        if stage.first:
            embedding = RowwiseParallel(input_layouts=Replicate())
            parallelize_module(stage.trunk, mesh["tp"], {"embed_tokens": embedding})
        if stage.last:
            head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
            parallelize_module(stage, mesh["tp"], {"head": head})
        for layer in layers:
            parallelize_module(layer, mesh["tp"], LAYER_PLAN)
    for place in range(len(layers)):
        if args.recompute:
            layers[place] = checkpoint_wrapper(layers[place])
        if args.compile:
            layers[place].compile()
    if mesh["replicate"].size() * args.shard > 1:
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        dp = mesh["replicate", "shard"] if mesh["replicate"].size() > 1 else mesh["shard"]
        for layer in layers:
            fully_shard(layer, mesh=dp, mp_policy=policy)
        fully_shard(stage, mesh=dp, mp_policy=policy)


def loss_of(logits, labels):
    """Return the mean cross-entropy; labels are not shifted, which changes no time."""
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))


def main() -> None:
    """Train for a number of steps on random tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=8, help="with --pp")
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--shard", type=int, default=1, help="ranks that share weights (FSDP2)")
    parser.add_argument("--chunks", type=int, default=1, help="stages of a rank (interleaved)")
    parser.add_argument("--recompute", action="store_true", help="recompute layers in the backward")
    parser.add_argument("--compile", action="store_true", help="compile each layer")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    replicas = dist.get_world_size() // (args.tp * args.pp * args.shard)
    sizes = (args.pp, replicas, args.shard, args.tp)
    mesh = init_device_mesh(device, sizes, mesh_dim_names=("pp", "replicate", "shard", "tp"))
    place, stages = mesh["pp"].get_local_rank(), args.pp * args.chunks
    if args.layers % stages:
        parser.error(f"{stages} stages must divide --layers")
    # The ranks of a pipeline or a tensor-parallel group draw the same tokens, replicas others.
    torch.manual_seed(
        mesh["replicate"].get_local_rank() * args.shard + mesh["shard"].get_local_rank()
    )
    config = LlamaConfig(
        num_hidden_layers=args.layers // stages,
        max_position_embeddings=args.seq,
        **SHAPES[args.shape],
    )
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
    with torch.device(device):
        parts = [Stage(config, chunk * args.pp + place, stages) for chunk in range(args.chunks)]
    for part in parts:
        parallelize(part, mesh, args)
    schedule = None
    if args.pp > 1:
        group = mesh.get_group("pp")
        piped = [
            PipelineStage(part, chunk * args.pp + place, stages, torch.device(device), group=group)
            for chunk, part in enumerate(parts)
        ]
        schedule = (
            Schedule1F1B(piped[0], args.micro_batches, loss_fn=loss_of)
            if args.chunks == 1
            else ScheduleInterleaved1F1B(piped, args.micro_batches, loss_fn=loss_of)
        )
    weights = [weight for part in parts for weight in part.parameters()]
    # AdamW's foreach kernels take DTensors or plain tensors (norms under tensor parallelism), not
    # both, so each kind has a parameter group.
    groups = [
        [w for w in weights if isinstance(w, DTensor) == sharded] for sharded in (True, False)
    ]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups if group], lr=1e-4)

    batch = args.batch * (args.micro_batches if args.pp > 1 else 1)
    for _ in range(args.steps):
        tokens = torch.randint(0, config.vocab_size, (batch, args.seq), device=device)
        optimizer.zero_grad()
        with loss_parallel() if args.tp > 1 else contextlib.nullcontext():
            if schedule is None:
                loss_of(parts[0](tokens), tokens).backward()
            else:
                given = (tokens,) if parts[0].first else ()
                schedule.step(*given, **({"target": tokens} if parts[-1].last else {}))
        optimizer.step()


if __name__ == "__main__":
    main()

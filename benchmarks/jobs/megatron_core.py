"""A Llama-shaped GPTModel of megatron-core with random weights, trained by its own schedules.

torchrun --nproc-per-node 2 benchmarks/jobs/megatron_core.py --tp 2 --sp
capture run benchmarks/jobs/megatron_core.py --tp 2 -o trace.et -- --tp 2 --sp

Needs a GPU and `pip install megatron-core`, no Apex and no TransformerEngine: layers are those of
get_gpt_layer_local_spec. Its norms refuse sequence parallelism without either, so torch's stand in
their place. As Megatron-LM asks for, set CUDA_DEVICE_MAX_CONNECTIONS=1 for --tp and --cp.
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import transformer_block
from megatron.core.transformer.transformer_config import TransformerConfig


def main() -> None:
    """Train for a number of steps on random tokens."""
    args = arguments()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    parallel_state.initialize_model_parallel(
        args.tp,
        args.pp,
        args.vp or None,
        context_parallel_size=args.cp,
        expert_model_parallel_size=args.ep,
    )
    model_parallel_cuda_manual_seed(123)
    config = configured(args)
    chunks = [chunk(config, args, i if args.vp else None) for i in range(args.vp or 1)]
    sharing = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=args.overlap,
        overlap_param_gather=args.overlap and args.dist_opt,
        use_distributed_optimizer=args.dist_opt,
    )
    model = [
        DistributedDataParallel(
            config=config, ddp_config=sharing, module=part, disable_bucketing=i > 0
        )
        for i, part in enumerate(chunks)
    ]
    # Megatron multiplies gradients only where their norm exceeds clip_grad. The norm of a slice is
    # not that of the job, so the default is far away: its reduction is there, and mostly no
    # multiplication in one alone.
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-6,  # gradients of absent ranks differ: more would diverge
            bf16=True,
            params_dtype=torch.bfloat16,
            clip_grad=args.clip,
            use_distributed_optimizer=args.dist_opt,
            overlap_param_gather=args.overlap and args.dist_opt,
        ),
        model,
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if args.overlap:
        no_sync, start = [m.no_sync for m in model], [m.start_grad_sync for m in model]
        config.no_sync_func = no_sync if args.vp else no_sync[0]
        config.grad_sync_func = start if args.vp else start[0]
    train(args, model, optimizer)


def arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    sizes = {"tp": 1, "pp": 1, "vp": 0, "cp": 1, "ep": 1}
    sizes |= {"layers": 8, "hidden": 4096, "ffn": 11008, "heads": 32, "vocab": 32000}
    sizes |= {"experts": 0, "topk": 2, "seq": 2048, "batch": 1, "micro-batches": 2, "steps": 1000}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sp", action="store_true", help="sequence parallel")
    parser.add_argument("--dist-opt", action="store_true", help="the distributed optimizer")
    parser.add_argument("--overlap", action="store_true", help="reduce and gather during compute")
    parser.add_argument(
        "--overlap-p2p", action="store_true", help="no batches of sends and receives"
    )
    parser.add_argument("--recompute", action="store_true", help="layers, in the backward")
    parser.add_argument("--clip", type=float, default=1e9, help="norm of gradients")
    return parser.parse_args()


def configured(args: argparse.Namespace) -> TransformerConfig:
    """Return the shape of the model, and how it is split."""
    more: dict[str, Any] = {}
    if args.experts:
        more |= {
            "num_moe_experts": args.experts,
            "moe_router_topk": args.topk,
            "moe_token_dispatcher_type": "alltoall",
            "moe_ffn_hidden_size": args.ffn,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 0.01,
        }
    if args.recompute:
        more |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    return TransformerConfig(
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_attention_heads=args.heads,
        ffn_hidden_size=args.ffn,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        add_bias_linear=False,
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        virtual_pipeline_model_parallel_size=args.vp or None,
        context_parallel_size=args.cp,
        expert_model_parallel_size=args.ep,
        sequence_parallel=args.sp,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        overlap_p2p_comm=args.overlap_p2p,
        batch_p2p_comm=not args.overlap_p2p,
        gradient_accumulation_fusion=False,  # what Apex and TransformerEngine bring
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **more,
    )


class Norm(torch.nn.RMSNorm):
    """torch's norm, called and marked as Megatron's."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel


def chunk(config: TransformerConfig, args: argparse.Namespace, place: int | None) -> GPTModel:
    """Return this rank's layers, or those of one of its chunks of an interleaved schedule."""
    if place is not None:
        parallel_state.set_virtual_pipeline_model_parallel_rank(place)
    layer = get_gpt_layer_local_spec(num_experts=args.experts or None, normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    count = transformer_block.get_num_layers_to_build(config, place)
    edge = {"ignore_virtual": False, "vp_stage": place}
    model = GPTModel(
        config=config,
        transformer_layer_spec=transformer_block.TransformerBlockSubmodules(
            layer_specs=[layer] * count, layer_norm=Norm
        ),
        vocab_size=args.vocab,
        max_sequence_length=args.seq,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        pre_process=parallel_state.is_pipeline_first_stage(**edge),
        post_process=parallel_state.is_pipeline_last_stage(**edge),
        vp_stage=place,
    )
    return model.cuda().bfloat16()


def train(args: argparse.Namespace, model: list[Any], optimizer: Any) -> None:
    """Step on the same random tokens, this rank's part of each sequence."""
    length = args.seq // args.cp
    tokens, labels = torch.randint(args.vocab, (2, args.batch, length), device="cuda")
    positions = torch.arange(length, device="cuda").expand(args.batch, -1)
    causal = torch.ones(1, 1, length, length, dtype=torch.bool, device="cuda").triu(1)

    def mean(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = losses.float().mean()
        return loss, {"loss": loss.detach()}

    def forward(_: Any, part: Any) -> tuple[torch.Tensor, Any]:
        return part(tokens, positions, causal, labels=labels), mean

    run = get_forward_backward_func()
    for step in range(args.steps):
        for part in model:
            part.zero_grad_buffer()
        optimizer.zero_grad()
        losses = run(
            forward_step_func=forward,
            data_iterator=[iter([])] * len(model) if args.vp else iter([]),
            model=model if args.vp else model[0],
            num_microbatches=args.micro_batches,
            seq_length=args.seq,
            micro_batch_size=args.batch,
            forward_only=False,
        )
        optimizer.step()
        if losses and step == 0:
            print(f"loss {losses[-1]['loss'].item():.3f}")


if __name__ == "__main__":
    main()

r"""Layers of a GPT as one tensor-parallel rank of Megatron-LM of 2022 computes them, in fp16.

    onerank capture run benchmarks/jobs/megatron_gpt.py --torchrun --tp 8 --device none \
        --like A100 -o layers.et -- --hidden 6144 --heads 64 --sequence 2048 --micro-batch 4

Megatron's extensions need a CUDA compiler, so each is declared as an operator with its shapes:

- the scaled, masked softmax of `megatron/fused_kernels`, and Apex's fused Adam,
- bias with GELU, and bias with dropout and residual, which TorchScript fuses into one kernel.

Attention is products, softmax and dropout. Collectives overlap as in Megatron's
`LinearWithGradAccumulationAndAsyncCommunication`: the backward reduces the gradient of an input
during the product for the weight; with sequence parallelism it gathers the input again during the
product for the input.

`--vtrain` captures what vTrain profiles instead (VIA-Research/vTrain at f8dda84, `src/model`): no
collectives, the vocabulary of GPT-2 without padding, torch's cross-entropy over the wrong
dimension, and Adam on fp16 parameters without those of the head.
"""

import argparse
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import onerank

VOCABULARY = 50257  # GPT-2's
DROPOUT = 0.1


def custom_op(name: str, flops: Any, read: Any = None, written: Any = None) -> Any:
    """Declare an operator of Megatron's; `flops`, `read` and `written` count its work."""
    onerank.register_operator_cost(
        f"megatron::{name}", flops, bytes_read=read, bytes_written=written
    )
    return torch.library.custom_op(f"megatron::{name}", mutates_args=())


# scaled_upper_triang_masked_softmax.h reads a row of scores up to its diagonal and writes it whole.
@custom_op(
    "scaled_upper_triang_masked_softmax",
    lambda inputs, outputs: 5 * prod(inputs[0]) // 2,
    lambda inputs, outputs: prod(inputs[0]),  # half the elements, two bytes each
)
def masked_softmax(scores: Tensor, scale: float) -> Tensor:
    raise NotImplementedError


@custom_op(
    "scaled_upper_triang_masked_softmax_backward",
    lambda inputs, outputs: 4 * prod(inputs[0]) // 2,
    lambda inputs, outputs: 2 * prod(inputs[0]),
)
def masked_softmax_backward(grad: Tensor, shares: Tensor, scale: float) -> Tensor:
    raise NotImplementedError


@custom_op("bias_gelu", lambda inputs, outputs: 8 * prod(inputs[0]))
def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    raise NotImplementedError


@custom_op("bias_gelu_backward", lambda inputs, outputs: 16 * prod(inputs[0]))
def bias_gelu_backward(grad: Tensor, x: Tensor, bias: Tensor) -> Tensor:
    raise NotImplementedError


@custom_op("bias_dropout_add", lambda inputs, outputs: 4 * prod(inputs[0]))
def bias_dropout_add(
    x: Tensor, bias: Tensor, residual: Tensor, share: float
) -> tuple[Tensor, Tensor]:
    raise NotImplementedError


@custom_op("bias_dropout_add_backward", lambda inputs, outputs: 2 * prod(inputs[0]))
def bias_dropout_add_backward(grad: Tensor, mask: Tensor, share: float) -> Tensor:
    raise NotImplementedError


@bias_dropout_add.register_fake
def _(x: Tensor, bias: Tensor, residual: Tensor, share: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


# Apex's kernel reads gradient, parameter and two moments of 32 bits, and writes the last three. On
# fp16 parameters (--vtrain) gradient and parameter have 16 bits.
@custom_op(
    "multi_tensor_adam",
    lambda inputs, outputs: 14 * prod(inputs[0]),
    lambda inputs, outputs: 16 * prod(inputs[0]),
    lambda inputs, outputs: 12 * prod(inputs[0]),
)
def adam(grads: Tensor) -> Tensor:
    raise NotImplementedError


@custom_op(
    "multi_tensor_adam_fp16",
    lambda inputs, outputs: 14 * prod(inputs[0]),
    lambda inputs, outputs: 12 * prod(inputs[0]),
    lambda inputs, outputs: 10 * prod(inputs[0]),
)
def adam_of_fp16(grads: Tensor) -> Tensor:
    raise NotImplementedError


for operator, like in (
    (masked_softmax, 0),
    (masked_softmax_backward, 0),
    (bias_gelu, 0),
    (bias_gelu_backward, 0),
    (bias_dropout_add_backward, 0),
    (adam, 0),
    (adam_of_fp16, 0),
):
    operator.register_fake(lambda *operands, like=like: torch.empty_like(operands[like]))


class MaskedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> Tensor:
        shares = masked_softmax(scores, 1.0)
        ctx.save_for_backward(shares)
        return shares

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return masked_softmax_backward(grad, *ctx.saved_tensors, 1.0)


class BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, bias)
        return bias_gelu(x, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, bias = ctx.saved_tensors
        changed = bias_gelu_backward(grad, x, bias)
        return changed, changed.sum((0, 1))


class BiasDropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        output, mask = bias_dropout_add(x, bias, residual, DROPOUT)
        ctx.save_for_backward(mask)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        changed = bias_dropout_add_backward(grad, *ctx.saved_tensors, DROPOUT)
        return changed, changed.sum((0, 1)), grad


def all_reduced(x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
    if ranks() > 1:
        dist.all_reduce(x, op=op)
    return x


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


class ColumnLinear(torch.autograd.Function):
    """`LinearWithGradAccumulationAndAsyncCommunication` without fused accumulation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sequence_parallel: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sequence_parallel = sequence_parallel
        return (gathered(x)[0] if sequence_parallel else x).matmul(weight.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        work = None
        if ctx.sequence_parallel:
            x, work = gathered(x, asynchronous=True)
        grad_x = grad.matmul(weight)
        if work is not None:
            work.wait()
        if ctx.sequence_parallel:
            grad_x, work = scattered(grad_x, asynchronous=True)
        elif ranks() > 1:
            work = dist.all_reduce(grad_x, async_op=True)
        grad_weight = grad.flatten(0, 1).t().matmul(x.flatten(0, 1))
        if work is not None:
            work.wait()
        return grad_x, grad_weight, None


class Reduce(torch.autograd.Function):
    """Reduce what a row-parallel product left in parts: whole, or a part of the sequence each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sequence_parallel: bool) -> Tensor:
        ctx.sequence_parallel = sequence_parallel
        return scattered(x)[0] if sequence_parallel else all_reduced(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (gathered(grad)[0] if ctx.sequence_parallel else grad), None


def gathered(x: Tensor, *, asynchronous: bool = False) -> tuple[Tensor, Any]:
    output = x.new_empty(x.shape[0] * ranks(), *x.shape[1:])
    return output, dist.all_gather_into_tensor(output, x.contiguous(), async_op=asynchronous)


def scattered(x: Tensor, *, asynchronous: bool = False) -> tuple[Tensor, Any]:
    output = x.new_empty(x.shape[0] // ranks(), *x.shape[1:])
    return output, dist.reduce_scatter_tensor(output, x.contiguous(), async_op=asynchronous)


class CrossEntropy(torch.autograd.Function):
    """`_VocabParallelCrossEntropy`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        largest = all_reduced(torch.max(logits, dim=-1)[0], dist.ReduceOp.MAX)
        logits.sub_(largest.unsqueeze(-1))
        absent = (target < 0) | (target >= logits.shape[-1])
        place = target.clone().masked_fill_(absent, 0).view(-1)
        rows = torch.arange(len(place), device=place.device)
        picked = logits.view(-1, logits.shape[-1])[rows, place].view_as(target)
        all_reduced(picked.masked_fill_(absent, 0.0))
        torch.exp(logits, out=logits)
        total = all_reduced(logits.sum(-1))
        loss = torch.log(total) - picked
        logits.div_(total.unsqueeze(-1))
        ctx.save_for_backward(logits, absent, place, rows)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        shares, absent, place, rows = ctx.saved_tensors
        shares.view(-1, shares.shape[-1])[rows, place] -= 1.0 - absent.view(-1).float()
        return shares.mul_(grad.unsqueeze(-1)), None


class MixedPrecisionAdam(torch.optim.Optimizer):
    """`Float16OptimizerWithFloat16Params` with contiguous fp32 gradients: unscale, clip, step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})
        count = sum(parameter.numel() for parameter in model.parameters())
        self.parameters = torch.zeros(count, dtype=torch.float16, device="cuda")
        self.main = torch.zeros(count, dtype=torch.float32, device="cuda")
        self.grads = torch.zeros_like(self.main)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.grads.mul_(0.5)
        torch.linalg.vector_norm(self.grads)
        self.grads.mul_(0.5)
        adam(self.grads)
        self.parameters.copy_(self.main)
        self.grads.zero_()


class VtrainAdam(torch.optim.Optimizer):
    """Apex's FusedAdam over a layer's fp16 parameters, then over the embeddings'."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})
        parts = ([*model.layers.parameters()], [*model.tokens.parameters(), model.positions.weight])
        self.counts = [sum(parameter.numel() for parameter in part) for part in parts]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for count in self.counts:
            adam_of_fp16(torch.empty(count, dtype=torch.float16, device="cuda"))


class Layer(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args, hidden, part = args, args.hidden, args.hidden // args.tp
        self.heads = args.heads // args.tp
        self.input_layernorm = nn.LayerNorm(hidden)
        self.post_attention_layernorm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * part)
        self.dense = nn.Linear(part, hidden)
        self.dense_h_to_4h = nn.Linear(hidden, 4 * part)
        self.dense_4h_to_h = nn.Linear(4 * part, hidden)

    def forward(self, x: Tensor) -> Tensor:
        y = self.column(self.input_layernorm(x), self.qkv) + self.qkv.bias
        parts = y.view(*y.shape[:2], self.heads, -1).chunk(3, dim=3)
        if self.args.recompute == "selective":
            y = checkpoint(self.attention, *parts, use_reentrant=True)
        else:
            y = self.attention(*parts)
        x = BiasDropoutAdd.apply(self.row(y, self.dense), self.dense.bias, x)
        y = self.column(self.post_attention_layernorm(x), self.dense_h_to_4h)
        y = self.row(BiasGelu.apply(y, self.dense_h_to_4h.bias), self.dense_4h_to_h)
        return BiasDropoutAdd.apply(y, self.dense_4h_to_h.bias, x)

    def attention(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        length, batch, heads, size = query.shape
        query, key, value = (x.reshape(length, batch * heads, size) for x in (query, key, value))
        scores = torch.baddbmm(
            query.new_empty(batch * heads, length, length),
            query.transpose(0, 1),
            key.permute(1, 2, 0),
            beta=0.0,
            alpha=size**-0.5,
        )
        shares = functional.dropout(MaskedSoftmax.apply(scores), DROPOUT)
        context = torch.bmm(shares, value.transpose(0, 1)).view(batch, heads, length, size)
        return context.permute(2, 0, 1, 3).contiguous().view(length, batch, -1)

    def column(self, x: Tensor, linear: nn.Linear) -> Tensor:
        return ColumnLinear.apply(x, linear.weight, self.args.sequence_parallel)

    def row(self, x: Tensor, linear: nn.Linear) -> Tensor:
        return Reduce.apply(x.matmul(linear.weight.t()), self.args.sequence_parallel)


class Gpt(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args = args
        rows = VOCABULARY // args.tp if args.vtrain else padded_vocabulary(args.tp) // args.tp
        self.tokens = nn.Embedding(rows, args.hidden)
        self.positions = nn.Embedding(args.sequence, args.hidden)
        self.layers = nn.ModuleList(Layer(args) for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.hidden)
        self.head = nn.Linear(args.hidden, rows, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        places = torch.arange(self.args.sequence, device=tokens.device)
        absent = tokens >= self.tokens.num_embeddings
        words = self.tokens(tokens.clone().masked_fill_(absent, 0))
        if not self.args.vtrain and self.args.tp > 1:
            words = words.masked_fill(absent.unsqueeze(-1), 0.0)
            words = Reduce.apply(words, False)
        x = functional.dropout(words + self.positions(places), DROPOUT)
        x = x.transpose(0, 1).contiguous()
        if self.args.sequence_parallel:
            x = x.chunk(self.args.tp)[0].contiguous()
        for layer in self.layers:
            if self.args.recompute == "full":
                x = checkpoint(layer, x, use_reentrant=True)
            else:
                x = layer(x)
        if self.args.vtrain:
            return functional.cross_entropy(self.head(self.norm(x.transpose(0, 1))), labels)
        logits = ColumnLinear.apply(self.norm(x), self.head.weight, self.args.sequence_parallel)
        logits = logits.transpose(0, 1).contiguous().float()
        return CrossEntropy.apply(logits, labels).mean()


def padded_vocabulary(tp: int) -> int:
    """Return the vocabulary as Megatron pads it, to a multiple of 128 for each rank."""
    return -(-VOCABULARY // (128 * tp)) * 128 * tp


def main() -> None:
    """Train on random tokens."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    for name, default in {"hidden": 0, "heads": 16, "micro-batch": 0, "tp": 0, "sequence": 1024,
                          "layers": 2}.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, required=not default)
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--vtrain", action="store_true", help="what vTrain profiles")
    args = parser.parse_args()
    if args.tp > 1 and not args.vtrain:
        dist.init_process_group("nccl")
    torch.set_default_dtype(torch.float16)
    model = Gpt(args).cuda()
    optimizer = VtrainAdam(model) if args.vtrain else MixedPrecisionAdam(model)
    shape = args.micro_batch, args.sequence
    tokens = torch.randint(VOCABULARY, shape, device="cuda")
    labels = tokens
    if args.vtrain:
        labels = torch.zeros(
            args.micro_batch, model.head.out_features, dtype=torch.long, device="cuda"
        )
    for _ in range(20):
        model(tokens, labels).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()

"""Models that no data-parallel form can train: refused, with what to do."""

from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from onerank.ir.errors import SliceError

_RUN_AS_IT_IS = (
    "give --torchrun, which lets the script run as it is, and leave --ddp, --fsdp and --zero out: "
    "--dp then gives the world's shape only"
)


def refuse_transforms(module: nn.Module) -> None:
    """Refuse a call whose gradients torch.func computes: no parameter gets one in its backward."""
    if any(is_functorch_wrapped_tensor(tensor) for tensor in module.parameters()):
        raise SliceError(
            f"{type(module).__name__} is called under torch.func (grad, vmap), which gives "
            "gradients to nobody but the script, and --ddp and --fsdp communicate as parameters "
            "get them: use --zero 1, which works on the optimizer"
        )


def refuse_scalars(module: nn.Module) -> None:
    """Refuse parameters that have no rows, which FSDP2 shards."""
    for name, parameter in module.named_parameters():
        if parameter.dim() == 0:
            raise SliceError(
                f"{name} of {type(module).__name__} is a scalar, which torch's fully_shard cannot "
                "shard: make it a tensor of one element, or use --ddp, --zero 1 or --zero 2"
            )


def refuse_model(module: nn.Module) -> None:
    """Refuse a model that is distributed already, or whose gradients have no size known ahead."""
    for name, part in module.named_modules():
        if isinstance(part, DistributedDataParallel):
            raise SliceError(
                f"{name or type(module).__name__} is wrapped in DistributedDataParallel by the "
                f"script, or by a library of its own: {_RUN_AS_IT_IS}"
            )
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise SliceError(
                f"{name or type(module).__name__} has sparse gradients, whose size is not known "
                "ahead: make it with sparse=False"
            )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise SliceError(
                f"{name} is a DTensor, so the script, or a library of its own, distributes its "
                f"model: {_RUN_AS_IT_IS}"
            )

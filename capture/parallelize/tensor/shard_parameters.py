"""Shard a module's parameters in place, and map a slice's elements to the whole model."""

import copy
import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from onerank.capture.parallelize.hugging_face import Conv1D
from onerank.ir.errors import SliceError, division


def fill_with_positions(model: nn.Module, starts: dict[str, int]) -> None:
    """Set every parameter element to its 1-based position in the whole model."""
    for name, parameter in model.named_parameters():
        count = parameter.numel()
        # float64 holds every integer up to 2**53; float32 would merge positions from 2**24.
        values = torch.arange(count, dtype=torch.float64, device=parameter.device)
        parameter.data = (values + starts[name]).view(parameter.shape)


def origin_of(name: str, places: Tensor, starts: dict[str, int]) -> tuple[str, Tensor]:
    """Return a slice's source parameter in the whole model, and its elements' positions there.

    Positions are -1 where the slice was padded.

    Raises:
        SliceError: slicing changed values, or the slice mixes several parameters.
    """
    rounded = places.round()
    if not torch.equal(rounded, places):
        raise SliceError(
            f"{name}: slicing changed values instead of only moving them, so the slice cannot be "
            "compared with the whole model",
            code="slice-changes-values",
        )
    first = int(rounded.max()) if rounded.numel() else starts.get(name, 1)
    origin = max((n for n, start in starts.items() if start <= first), key=starts.__getitem__)
    # Positions count from 1, so 0 is padding.
    positions = torch.where(rounded > 0, rounded - starts[origin], -1).long()
    if bool((positions < -1).any()):
        raise SliceError(
            f"{name}: its slice contains elements of several parameters of the whole model, so it "
            "cannot be compared with that model",
            code="slice-mixes-parameters",
        )
    return origin, positions


_LOCAL_HEADS = "_onerank_local_heads"

LARGEST_SIZE = 128  # largest tensor-parallel size that an error suggests


def divisors_of(count: int) -> str:
    """Return the sizes that divide a number, as text for an error."""
    return ", ".join(str(n) for n in range(1, LARGEST_SIZE + 1) if count % n == 0)


def cut_module(
    module: nn.Module,
    name: str,
    group: dist.ProcessGroup,
    *,
    output: bool,
    cut: set[int],
    blocks: Sequence[int] = (),
) -> None:
    """Slice a linear layer's or an embedding's parameters in place.

    Args:
        module: the layer. An embedding's entries count as its output features.
        name: its qualified name.
        group: the tensor-parallel group.
        output: whether to slice along output features, else input features; the bias then stays.
        cut: ids of the parameters sliced already, so that tied weights are sliced once; updated.
        blocks: output features of each fused part, sliced separately; () for a single part.
    """
    for key, parameter in list(module.named_parameters(recurse=False)):
        if id(parameter) in cut or (key == "bias" and not output):
            continue
        transposed = isinstance(module, Conv1D) and key == "weight"
        dim = int(output == transposed)  # weights are [out, in], transposed ones [in, out]
        parts = blocks or (parameter.shape[dim],)
        if is_quantised(parameter):
            share = _quantised_share(parameter, f"{name}.{key}", group, dim, parts)
            setattr(module, key, share)
        else:
            cut_blocks(parameter, f"{name}.{key}", group, dim, parts)
        cut.add(id(module.get_parameter(key)))
    attributes = ("out_features", "num_embeddings", "nf") if output else ("in_features", "nx")
    for attribute in attributes:
        if hasattr(module, attribute):
            dim = int(output == isinstance(module, Conv1D))
            setattr(module, attribute, module.get_parameter("weight").shape[dim])


def cut_blocks(
    parameter: nn.Parameter, name: str, group: dist.ProcessGroup, dim: int, parts: Sequence[int]
) -> None:
    """Cut a parameter along a dimension, each of its fused parts separately."""
    _check_divisible(name, group, dim, parts)
    _keep_shares(parameter, parameter.data.split(list(parts), dim), group, dim)


def _keep_shares(
    parameter: nn.Parameter, parts: Sequence[Tensor], group: dist.ProcessGroup, dim: int
) -> None:
    """Keep this rank's share of each fused part of a parameter."""
    with torch.no_grad():
        shares = [part.chunk(group.size(), dim)[group.rank()] for part in parts]
        # A copy, because a view of the whole parameter would keep its memory.
        parameter.data = torch.cat(shares, dim).contiguous()
        # It would have the whole parameter's shape.
        parameter.grad = None


def _check_divisible(name: str, group: dist.ProcessGroup, dim: int, parts: Sequence[int]) -> None:
    for length in parts:
        if length % group.size():
            raise SliceError(
                f"--tp {group.size()} must divide {name}'s {length} "
                f"{'rows' if dim == 0 else 'columns'} "
                f"({division(length, group.size())})"
                + (f", a fused part of {sum(parts)}" if len(parts) > 1 else "")
                + f"\n  sizes that divide them: --tp {divisors_of(length)}",
                code="tp-indivisible-rows",
            )


def is_quantised(weight: Tensor) -> bool:
    """Return whether a weight is of a class that holds values and scales, such as torchao's."""
    return is_traceable_wrapper_subclass(weight)


def _quantised_share(
    weight: Tensor, name: str, group: dist.ProcessGroup, dim: int, parts: Sequence[int]
) -> nn.Parameter:
    """Return this rank's share of a quantised weight, as `cut_blocks` cuts a plain one.

    The weight's class cuts its values and scales: torchao's classes implement slices. The share is
    a new parameter, because setting `data` would leave the values and scales as they are.

    Raises:
        SliceError: the class does not, because its values are packed in tiles.
    """
    _check_divisible(name, group, dim, parts)
    ends = itertools.accumulate(parts)
    shares = [
        (end - length, length // group.size()) for end, length in zip(ends, parts, strict=True)
    ]
    try:
        # In inference mode `narrow` arrives whole at the class, which implements its parts.
        with torch.inference_mode(mode=False), torch.no_grad():
            pieces = [
                weight.narrow(dim, start + group.rank() * share, share) for start, share in shares
            ]
            # A copy, because a view of the whole parameter would keep its memory.
            piece = pieces[0].clone() if len(pieces) == 1 else torch.cat(pieces, dim=dim)
            return nn.Parameter(piece, requires_grad=False)
    except NotImplementedError as error:
        raise quantised_layout_error(name, weight) from error


def quantised_layout_error(name: str, weight: Tensor) -> SliceError:
    """Return the error for a quantised weight whose layout cannot be cut."""
    return SliceError(
        f"--tp: {name} is quantised as {type(weight).__name__}, whose layout cannot be cut "
        "into shares\n  quantise after the model is sliced, at its first .to() or cast: "
        "model.to(device), then torchao's quantize_(model, ...)",
        code="tp-quantised-layout",
    )


def reorder_rows(parameters: Iterable[nn.Parameter], order: Tensor | None) -> None:
    """Reorder the first dimension of whole parameters; None keeps the order."""
    if order is None:
        return
    for parameter in parameters:
        parameter.data = parameter.data[order.to(parameter.device)]


def cut_heads(module: nn.Module, name: str, group: dist.ProcessGroup) -> None:
    """Cut the parameters of a module, whose first dimension counts heads or channels."""
    for key, parameter in module.named_parameters(recurse=False):
        cut_parameter(parameter, f"{name}.{key}", group, "heads")


def cut_parameter(
    parameter: nn.Parameter,
    name: str,
    group: dist.ProcessGroup,
    what: str,
    *,
    dim: int = 0,
    fused: int = 1,
) -> None:
    """Cut a parameter along a dimension of `what`, each of its fused parts separately."""
    if is_quantised(parameter):
        raise quantised_layout_error(name, parameter)
    count, size = parameter.shape[dim] // fused, group.size()
    if count % size:
        raise SliceError(
            f"--tp {size} must divide {name}'s {count} {what} "
            f"({division(count, size)})\n"
            f"  sizes that divide them: --tp {divisors_of(count)}",
            code="tp-indivisible-features",
        )
    _keep_shares(parameter, parameter.data.chunk(fused, dim), group, dim)


def divide_attributes(
    module: nn.Module, name: str, attributes: Collection[str], size: int, multiple: int = 1
) -> None:
    """Divide the numbers by which a module counts what is sliced, into multiples of a number."""
    for attribute in attributes:
        value, unit = getattr(module, attribute), size * multiple
        if value % unit:
            times = f"--tp {size} times {multiple}" if multiple > 1 else f"--tp {size}"
            raise SliceError(
                f"{times} must divide {name}.{attribute} = {value} "
                f"({division(value, unit)})\n"
                f"  sizes that fit: --tp {divisors_of(value // multiple)}",
                code="plan-multiple-indivisible",
            )
        setattr(module, attribute, value // size)


def slice_head_bias(
    module: nn.Module, name: str, arguments: Collection[str], heads: int, group: dist.ProcessGroup
) -> None:
    """Pass an attention module only this rank's heads of its attention-score biases.

    Args:
        module: the attention module, or the one that calls it.
        name: its qualified name.
        arguments: names of keyword arguments with shape [heads, ...], [batch x heads, ...] or, in
            four dimensions, [batch, heads or 1, ...].
        heads: number of heads on this rank.
        group: the tensor-parallel group.
    """
    size, rank = group.size(), group.rank()

    def local_heads(bias: Tensor, argument: str) -> Tensor:
        if (cached := getattr(bias, _LOCAL_HEADS, None)) is not None:
            return cached
        four = bias.dim() == 4
        if four and bias.shape[1] == 1:
            return bias  # one bias for all heads
        rows = bias.shape[1] if four else bias.shape[0]
        if rows % (size * heads) or (four and rows > size * heads):
            raise SliceError(
                f"{name} is given {argument} of shape {list(bias.shape)}, whose {rows} rows are "
                f"not those of {size} x {heads} heads, or of several sequences of them",
                code="plan-head-bias-shape",
            )
        if four:
            local_bias = bias.narrow(1, rank * heads, heads)
        else:
            local_bias = bias.view(-1, size, heads, *bias.shape[1:])[:, rank].reshape(
                -1, *bias.shape[1:]
            )
        # All layers receive the same tensor, so its slice is cached on it.
        if not torch.compiler.is_compiling():
            setattr(bias, _LOCAL_HEADS, local_bias)
        return local_bias

    def slice_arguments(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        biases = {key: kwargs[key] for key in arguments if isinstance(kwargs.get(key), Tensor)}
        return args, kwargs | {key: local_heads(bias, key) for key, bias in biases.items()}

    module.register_forward_pre_hook(slice_arguments, with_kwargs=True)


def keep_heads(attention: Any, size: int) -> None:
    """Divide the head counts by which an attention module splits q, k and v."""
    # All layers share the model's configuration, and each of them divides the counts.
    attention.config = copy.copy(attention.config)
    attention.config.num_attention_heads //= size
    heads = max(1, attention.num_key_value_heads // size)  # one where ranks share it
    attention.config.num_key_value_heads = attention.num_key_value_heads = heads

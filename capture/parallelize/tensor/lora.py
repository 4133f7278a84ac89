"""Low-rank adapters of linear layers under tensor parallelism (LoRA, arXiv:2106.09685).

A layer computes W x + B(A(x)) in its own forward, which stays. In a column-parallel layer A is
replicated and B is sliced by output features, like W. In a row-parallel layer A is sliced by input
features, like W, and B is replicated; its partial result is added to W's before the all-reduce.
Each rank computes a part of the replicated matrix's gradient, and the parts are all-reduced.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from onerank.capture.parallelize.autograd_collectives import copy_to_group, reduce_from_group
from onerank.capture.parallelize.hugging_face import Conv1D
from onerank.capture.parallelize.tensor.linear import matrix_of, replace_forward
from onerank.capture.parallelize.tensor.replicated_grads import sum_gradients
from onerank.capture.parallelize.tensor.shard_parameters import (
    cut_blocks,
    cut_module,
    reorder_rows,
)
from onerank.ir.errors import SliceError

_PEFT = ("lora_A", "lora_B")  # its LoraLayer's names (peft/tuners/lora/layer.py)


@dataclass(frozen=True)
class _Matrix:
    """A or B of an adapter: a parameter of `owner`, whose dimension `dim` is the layer's."""

    owner: nn.Module
    key: str
    dim: int

    def cut(self, name: str, group: dist.ProcessGroup, parts: Sequence[int]) -> None:
        """Keep this rank's share along the layer's dimension."""
        cut_blocks(self.owner.get_parameter(self.key), name, group, self.dim, parts)
        attribute = ("out_features", "in_features")[self.dim]
        if isinstance(self.owner, nn.Linear) and self.key == "weight":
            setattr(self.owner, attribute, self.owner.weight.shape[self.dim])


@dataclass(frozen=True)
class LoraLinear:
    """A linear layer with adapters.

    Attributes:
        module: the module that the model calls.
        name: its qualified name.
        base: the linear layer with W and its bias: `module` or a submodule.
        downs: matrix A of each adapter.
        ups: matrix B of each adapter.
    """

    module: nn.Module
    name: str
    base: nn.Module
    downs: Sequence[_Matrix]
    ups: Sequence[_Matrix]

    def _cut_base(self, group: dist.ProcessGroup, cut: set[int], **options: Any) -> None:
        adapters = {
            id(matrix.owner.get_parameter(matrix.key)) for matrix in (*self.downs, *self.ups)
        }
        # If the layer is a subclass of nn.Linear, A and B are its parameters next to W.
        cut_module(self.base, self.name, group, cut=cut | adapters, **options)

    @property
    def inner(self) -> list[str]:
        """Qualified names of the modules in it."""
        return [f"{self.name}.{key}" for key, _ in self.module.named_modules() if key]

    def cut_column(
        self,
        group: dist.ProcessGroup,
        cut: set[int],
        blocks: Sequence[int],
        *,
        copy: bool,
        row_order: Tensor | None = None,
        finish: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Keep this rank's output features.

        Args:
            group: the tensor-parallel group.
            cut: as for `cut_module`.
            blocks: as for `cut_module`.
            copy: whether this layer is the boundary.
            row_order: order of the whole layer's output features before the cut; None keeps it.
            finish: maps this rank's output features to the layer's output; None returns them.
        """
        rows = matrix_of(self.base).shape[0]
        reorder_rows(self.base.parameters(recurse=False), row_order)
        reorder_rows((up.owner.get_parameter(up.key) for up in self.ups), row_order)
        # After the reordering: `row_order` indexes the whole layer's rows.
        self._cut_base(group, cut, output=True, blocks=blocks)
        for up in self.ups:
            up.cut(f"{self.name}'s B", group, blocks or (rows,))
        for down in self.downs:
            sum_gradients(down.owner, group, [down.key])
        if copy:
            self.module.register_forward_pre_hook(_copy_hook(group))
        if finish is not None:
            self.module.register_forward_hook(_map_output_hook(finish))

    def cut_row(self, group: dist.ProcessGroup, cut: set[int]) -> None:
        """Keep this rank's input features; sum the layer's output over the group."""
        columns = matrix_of(self.base).shape[1]
        biased = any(key == "bias" for key, _ in self.base.named_parameters(recurse=False))
        if biased and self.base is self.module:
            raise SliceError(
                f"{self.name} ({type(self.module).__name__}) adds its bias in its own forward, so "
                "each rank of a row-parallel layer would add it\n  build it without a bias, or "
                "make the linear layer a submodule (base_layer)",
                code="lora-bias",
            )
        self._cut_base(group, cut, output=False)
        for down in self.downs:
            down.cut(f"{self.name}'s A", group, (columns,))
        for up in self.ups:
            sum_gradients(up.owner, group, [up.key])
        if self.base is not self.module:
            replace_forward(self.base, _without_bias)
        inner = next(key for key, part in self.module.named_modules() if part is self.base)
        self.module.register_forward_hook(_reduce_hook(group, inner))


def lora_linear_of(
    module: nn.Module, name: str, adapter_names: Sequence[str] = ()
) -> LoraLinear | None:
    """Return a layer with its adapters, PEFT's or those that a plan names; None without adapters.

    Args:
        module: the layer.
        name: its qualified name.
        adapter_names: attribute names of A and B in it; () for PEFT's.

    Raises:
        SliceError: the layer is not exactly W, its bias, A and B.
    """
    if not adapter_names and not all(
        isinstance(getattr(module, key, None), nn.ModuleDict) for key in _PEFT
    ):
        return None
    matrices = [_matrices(module, key) for key in adapter_names or _PEFT]
    owners = {id(owner) for parameters in matrices for owner, _ in parameters}
    children = [
        child for child in module.children() if _is_linear(child) and id(child) not in owners
    ]
    bases = [module] if _is_linear(module) else children
    if len(bases) != 1 or not all(matrices):
        raise SliceError(
            f"{name} ({type(module).__name__}) has {len(bases)} linear layers and "
            f"{len(matrices[0])} times {' and '.join(adapter_names or _PEFT)}; expected one "
            "layer, itself or a part of it, and A and B that are parameters, "
            "linear layers or lists of these",
            code="lora-ambiguous",
        )
    base = bases[0]
    rows, columns = matrix_of(base).shape
    # A reads the layer's input, B writes its output.
    downs = [_with_dimension(*matrix, columns, 1, f"{name}'s A") for matrix in matrices[0]]
    ups = [_with_dimension(*matrix, rows, 0, f"{name}'s B") for matrix in matrices[1]]
    known = [matrix.owner.get_parameter(matrix.key) for matrix in (*downs, *ups)]
    known += [p for key in ("weight", "bias") if (p := getattr(base, key)) is not None]
    known_ids = {id(parameter) for parameter in known}
    extra = [key for key, parameter in module.named_parameters() if id(parameter) not in known_ids]
    if extra or getattr(module, "lora_variant", None):
        raise SliceError(
            f"{name} ({type(module).__name__}) has {', '.join(extra) or 'a variant of LoRA'} "
            "in addition to W, its bias, A and B\n  use LoRA without biases and variants, or "
            "leave --tp out",
            code="lora-extra-parameters",
        )
    return LoraLinear(module, name, base, downs, ups)


def _matrices(module: nn.Module, key: str) -> list[tuple[nn.Module, str]]:
    """Return the owner and name of each parameter behind an attribute name."""
    value = getattr(module, key, None)
    if isinstance(value, nn.Parameter):
        return [(module, key)]
    is_container = isinstance(value, nn.ModuleDict | nn.ModuleList)
    parts: list[Any] = list(value.children()) if is_container else [value]
    return [(part, "weight") for part in parts if isinstance(part, nn.Linear)]


def _with_dimension(
    owner: nn.Module, key: str, features: int, dim_of_linear: int, label: str
) -> _Matrix:
    """Return a matrix with the dimension that has the layer's features.

    Args:
        owner: holds the matrix.
        key: its name in the owner.
        features: input features of the layer for A, output features for B.
        dim_of_linear: the dimension if the owner is a linear layer, whose shape would not tell it
            where it is square.
        label: the matrix in an error.
    """
    shape = tuple(owner.get_parameter(key).shape)
    if isinstance(owner, nn.Linear) and key == "weight":
        return _Matrix(owner, key, dim_of_linear)
    if len(shape) != 2 or shape.count(features) != 1:
        raise SliceError(
            f"{label} is a parameter of shape {list(shape)}, expected two dimensions, one of them "
            f"{features}, the layer's features",
            code="lora-shape",
        )
    return _Matrix(owner, key, shape.index(features))


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Conv1D)


def _without_bias(base: Any, x: Tensor) -> Tensor:
    return nn.functional.linear(x, matrix_of(base))


def _copy_hook(group: dist.ProcessGroup) -> Callable[..., Any]:
    def hook(_: nn.Module, args: Any) -> Any:
        return (copy_to_group(args[0], group), *args[1:])

    return hook


def _map_output_hook(finish: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def hook(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return finish(output)

    return hook


def _reduce_hook(group: dist.ProcessGroup, inner: str) -> Callable[..., Tensor]:
    def hook(module: nn.Module, _: Any, output: Tensor) -> Tensor:
        total = reduce_from_group(output, group)
        # `_without_bias` left the bias out of the partial results, so it is added once here.
        bias: Any = getattr(module.get_submodule(inner), "bias", None)
        return total if bias is None else total + bias

    return hook

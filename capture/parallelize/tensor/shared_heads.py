"""Key-value heads that several tensor-parallel ranks share, where --tp exceeds their number.

Each of the n key-value heads is needed by tp / n ranks, with different query heads. Megatron-LM
(core 0.16 and later, get_query_key_value_tensors in megatron/core/transformer/attention.py) splits
the rows of its fused projection evenly, within heads, and all-gathers the output over the
tensor-parallel group. Each rank keeps its query heads and their key-value head. The backward
reduce-scatters the gradients, so no weight is replicated and no gradient of a weight is summed.

The same happens here. Separate projections have a gather each, of the same bytes in total. The `hf`
style gathers only keys and values, because transformers shards no heads in this case
(`get_kv_heads_per_rank` in transformers/distributed/tensor_parallel.py).

Serving engines instead keep a copy of a head's weights on each of its ranks (vLLM's
QKVParallelLinear, `num_kv_head_replicas`), and so does a capture of a script that infers. Training
with copies would add a sum of their gradients over these ranks, which Megatron-LM does not have.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onerank.capture.parallelize.autograd_collectives import all_gather_last_dim
from onerank.capture.parallelize.module_names import parent_of
from onerank.capture.parallelize.tensor.linear import matrix_of
from onerank.capture.parallelize.tensor.lora import LoraLinear
from onerank.capture.parallelize.tensor.module_styles import (
    COLUMN,
    TensorParallelStyle,
    parts_of,
    qkv_widths,
)
from onerank.capture.parallelize.tensor.plan_file import GROUPED, ModuleRule
from onerank.capture.parallelize.tensor.replicated_grads import sum_gradients
from onerank.capture.parallelize.tensor.shard_parameters import divisors_of
from onerank.ir.errors import SliceError, division

_KEY_VALUE = ("k_proj", "v_proj")


@dataclass(frozen=True)
class SharedHeads:
    """A projection whose gathered output is reduced to the heads of this rank.

    Attributes:
        group: the tensor-parallel group.
        ranks_per_head: consecutive ranks that share a key-value head.
        widths: output features of each fused part, of all ranks.
        is_shared: for each part, whether it has keys or values; else it has queries.
        row_order: output features in the order of the parts; None if they are in this order.
        replicated: whether each rank has the weights of its head, so that nothing is gathered.
    """

    group: dist.ProcessGroup
    ranks_per_head: int
    widths: Sequence[int]
    is_shared: Sequence[bool]
    row_order: Tensor | None = None
    replicated: bool = False

    @property
    def cut_widths(self) -> list[int]:
        """Output features of each part that an even cut divides, copies of heads included."""
        copies = self.ranks_per_head if self.replicated else 1
        pairs = zip(self.widths, self.is_shared, strict=True)
        return [width * copies if shared else width for width, shared in pairs]

    def repeat_heads(self, parameters: Iterable[nn.Parameter]) -> None:
        """Repeat the rows of each shared head, so that an even cut gives every rank whole heads."""
        copies = self.ranks_per_head
        heads = self.group.size() // copies
        for parameter in parameters:
            parts = parameter.data.split([*self.widths])
            rows = [
                part.unflatten(0, (heads, -1)).repeat_interleave(copies, 0).flatten(0, 1)
                if shared
                else part
                for part, shared in zip(parts, self.is_shared, strict=True)
            ]
            parameter.data = rows[0] if len(rows) == 1 else torch.cat(rows)

    def select(self, features: Tensor) -> Tensor:
        """Gather [..., features / size]; return this rank's heads, [..., features of them]."""
        rank, size = self.group.rank(), self.group.size()
        shards = all_gather_last_dim(features, self.group).unflatten(-1, (size, -1))
        # The shards of the ranks that share a head are the head: all its features, in order.
        first = rank // self.ranks_per_head * self.ranks_per_head
        parts = shards.split([width // size for width in self.widths], dim=-1)
        kept = [
            part[..., first : first + self.ranks_per_head, :] if shared else part[..., rank, :]
            for part, shared in zip(parts, self.is_shared, strict=True)
        ]
        flat = [
            part.flatten(-2) if shared else part
            for part, shared in zip(kept, self.is_shared, strict=True)
        ]
        return flat[0] if len(flat) == 1 else torch.cat(flat, dim=-1)


@dataclass(frozen=True)
class _Projection:
    """A column-parallel layer of an attention.

    Attributes:
        name: qualified name.
        attention: the module with the layer.
        linear: the layer, or the linear layer inside a layer with adapters.
        style: its style.
        rule: its rule in a plan; None without one.
        attention_rule: the attention's rule.
    """

    name: str
    attention: Any
    linear: nn.Module
    style: str
    rule: ModuleRule | None
    attention_rule: ModuleRule

    @property
    def features(self) -> int:
        return matrix_of(self.linear).shape[0]

    def key_value_heads(self) -> int | None:
        """Return the key-value heads that the layer computes; None if it computes none."""
        if self.rule is not None:
            return getattr(self.attention, self.rule.kv_heads) if self.rule.kv_heads else None
        if self.style == "fused_qkv":
            return self.attention.num_key_value_heads
        leaf = self.name.rpartition(".")[2]
        keys = getattr(self.attention, _KEY_VALUE[0], None)
        head_dim = getattr(self.attention, "head_dim", None)
        if leaf not in _KEY_VALUE or keys is None or not isinstance(head_dim, int):
            return None
        # From the features of the keys, not from the configuration: layers may differ, and values
        # may have another width than keys (MiMo-V2-Flash).
        keys = self.linear if leaf == _KEY_VALUE[0] else getattr(keys, "base_layer", keys)
        return matrix_of(keys).shape[0] // head_dim

    def shared(self, heads: int, group: dist.ProcessGroup) -> SharedHeads:
        """Return how ranks share `heads` key-value heads of the layer."""
        rule = self.rule or ModuleRule()
        ranks = group.size() // heads
        if self.style == "fused_qkv":
            return SharedHeads(group, ranks, qkv_widths(self.attention), [False, True, True])
        if rule.parts == GROUPED:
            queries = getattr(self.attention, self.attention_rule.divide[0]) // heads
            # Rows are grouped by key-value head: its queries, its key, its value.
            rows = torch.arange(self.features).view(heads, queries + 2, -1)
            parts = [part.flatten() for part in rows.split([queries, 1, 1], dim=1)]
            widths = [len(part) for part in parts]
            return SharedHeads(group, ranks, widths, [False, True, True], torch.cat(parts))
        widths = parts_of(self.name, self.features, rule.proportions, "output")
        if len(widths) not in (1, 3):
            raise SliceError(
                f"{self.name}: the plan gives kv_heads for a layer of {len(widths)} parts; "
                "expected only keys, only values, or queries, keys and values",
                code="plan-kv-heads-parts",
            )
        is_shared = [True] if len(widths) == 1 else [False, True, True]
        return SharedHeads(group, ranks, widths, is_shared)


def shared_heads(
    model: nn.Module,
    styles: Mapping[str, str],
    rules: Mapping[str, ModuleRule],
    adapters: Mapping[str, LoraLinear],
    *,
    group: dist.ProcessGroup,
    tp_style: TensorParallelStyle,
    replicated: bool = False,
) -> dict[str, SharedHeads]:
    """Return name -> shared heads, for the projections of attentions with fewer heads than ranks.

    Args:
        model: a model whose parameters are whole.
        styles: style of each planned module.
        rules: rules of a plan, by module.
        adapters: layers with low-rank adapters.
        group: the tensor-parallel group.
        tp_style: `megatron` also gathers the queries.
        replicated: as in `SharedHeads`; layers with adapters are gathered.

    Raises:
        SliceError: the group size is no multiple of an attention's key-value heads.
    """
    size = group.size()
    projections = [
        _Projection(
            name,
            model.get_submodule(parent_of(name)),
            adapters[name].base if name in adapters else model.get_submodule(name),
            style,
            rules.get(name),
            rules.get(parent_of(name), ModuleRule()),
        )
        for name, style in styles.items()
        if style in COLUMN
    ]
    shared: dict[str, SharedHeads] = {}
    for projection in projections:
        heads = projection.key_value_heads()
        # With a head or more per rank, an even cut gives every rank whole heads.
        if heads is None or heads >= size:
            continue
        if size % heads:
            raise SliceError(
                f"--tp {size} must divide or be a multiple of the {heads} key-value heads of "
                f"{parent_of(projection.name)} ({division(size, heads)})\n"
                f"  use --tp {divisors_of(heads)} or a multiple of {heads}",
                code="tp-indivisible-heads",
            )
        adapted = projection.name in adapters
        of_projection = projection.shared(heads, group)
        shared[projection.name] = replace(of_projection, replicated=replicated and not adapted)
    blocks = {parent_of(name): heads.ranks_per_head for name, heads in shared.items()}
    for projection in projections if tp_style == "megatron" and not replicated else ():
        ranks = blocks.get(parent_of(projection.name))
        if projection.name not in shared and ranks is not None:
            shared[projection.name] = SharedHeads(group, ranks, [projection.features], [False])
    return shared


def count_one_head(attention: Any, ranks_per_head: int) -> None:
    """Set the number of query heads that attend to a key-value head on this rank."""
    if isinstance(groups := getattr(attention, "num_key_value_groups", None), int):
        attention.num_key_value_groups = groups // ranks_per_head


def apply_row_of_head(module: nn.Module, heads: int, group: dist.ProcessGroup) -> None:
    """Make a norm [heads, width] apply the row of this rank's shared key-value head.

    The parameters stay whole, since the ranks that share a head contribute to its row's gradient.
    """
    row = group.rank() * heads // group.size()

    def apply(module: nn.Module, _: Any) -> None:
        for key, parameter in module.named_parameters(recurse=False):
            # An instance attribute shadows the registered parameter of the same name.
            module.__dict__[key] = parameter.narrow(0, row, 1)

    def restore(module: nn.Module, *_: Any) -> None:
        for key, _parameter in module.named_parameters(recurse=False):
            module.__dict__.pop(key, None)

    sum_gradients(module, group)
    module.register_forward_pre_hook(apply)
    module.register_forward_hook(restore, always_call=True)

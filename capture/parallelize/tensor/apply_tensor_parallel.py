"""Slice a model to one tensor-parallel rank, in place and with plain tensors.

A plan lists the modules to slice: the Hugging Face model's tensor-parallel plan, a plan that ships
with onerank, or the user's plan file. The style determines where the collectives are placed:

- `megatron`: one all-reduce per block and direction (4 per layer and step); embedding, head and
  loss parallel over the vocabulary; fused projections sliced part by part. With sequence
  parallelism, all-gathers and reduce-scatters replace the all-reduces (see `sequence_parallel`).
- `hf`: as in transformers' tensor parallelism. Every column-parallel layer has a separate
  collective (7 per layer and step); fused projections and the head's logits are gathered.

Both styles gather outputs if a plan requires it (OLMo2 normalises queries over all heads).

Parameters are plain tensors, not DTensors, because scripts written for one GPU fail on DTensors:
`clip_grad_norm_` and foreach optimizers refuse a mixture of both.
"""

import functools
from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from onerank.capture.parallelize.autograd_collectives import (
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    split_to_group,
)
from onerank.capture.parallelize.hugging_face import Conv1D, PreTrainedModel
from onerank.capture.parallelize.module_names import parent_of
from onerank.capture.parallelize.pipeline.stage import PipelineStage
from onerank.capture.parallelize.tensor.gathered_attention import NORM_OF_RANKS, slice_norm
from onerank.capture.parallelize.tensor.layer_stack import (
    TwoStacks,
    shard_sequence,
    shard_sequences,
)
from onerank.capture.parallelize.tensor.linear import (
    column_linear,
    matrix_of,
    row_linear,
)
from onerank.capture.parallelize.tensor.lm_head import (
    HeadSharding,
    computes_loss_in_forward,
    cross_entropy_head,
    parallel_head,
    refuse_unused_head,
)
from onerank.capture.parallelize.tensor.mla import rotary_width, sum_rotary_gradient
from onerank.capture.parallelize.tensor.module_styles import (
    COLUMN,
    EMBEDDING,
    EXPERTS,
    GATHERED,
    HEAD,
    HEADS,
    IDENTITY,
    LATENT,
    REPLICATED,
    ROW,
    SPLIT,
    SPLIT_OUTPUT,
    UP,
    WHOLE,
    TensorParallelStyle,
    blocks_of,
    parts_of,
)
from onerank.capture.parallelize.tensor.moe import cut_experts
from onerank.capture.parallelize.tensor.plan_file import ModuleRule, ShardingPlan, rules_for
from onerank.capture.parallelize.tensor.replicated_grads import sum_gradients
from onerank.capture.parallelize.tensor.resolved_plan import ResolvedPlan, resolve_plan
from onerank.capture.parallelize.tensor.sequence_parallel import scatter_sum_to_sequence
from onerank.capture.parallelize.tensor.shard_parameters import (
    cut_heads,
    cut_module,
    divide_attributes,
    is_quantised,
    keep_heads,
    quantised_layout_error,
    reorder_rows,
    slice_head_bias,
)
from onerank.capture.parallelize.tensor.shared_heads import apply_row_of_head, count_one_head
from onerank.capture.parallelize.tensor.stateful_layers import (
    STATEFUL,
    SUMMED,
    cut_stateful,
    fused_widths,
    mark_as_cut,
    repeat_only_group,
)
from onerank.capture.parallelize.tensor.vocab_parallel import parallel_embedding
from onerank.ir import RankClass
from onerank.ir.errors import SliceError

REPLICATED_HEADS = "replicated_kv_heads"
"""Name under which `Sliced.modules` counts layers of which several ranks have a copy of a head."""


@dataclass(frozen=True)
class Sliced:
    """Summary of a sliced model.

    Attributes:
        modules: counts of modules by style.
        elements_before: parameter elements of the model.
        elements_after: parameter elements of the slice.
        stage: the pipeline stage; None without pipeline parallelism.
        classes: classes of equivalent ranks; () if a rank's work depends on data.
        duplicates: names of parameters that an earlier rank of the same model replica holds too.
    """

    modules: dict[str, int]
    elements_before: int
    elements_after: int
    stage: PipelineStage | None = None
    classes: tuple[RankClass, ...] = ()
    duplicates: frozenset[str] = frozenset()


def slice_model(
    model: nn.Module,
    group: dist.ProcessGroup,
    tp_style: TensorParallelStyle,
    *,
    peers_absent: bool = True,
    plan: ShardingPlan | None = None,
    sequence: bool = False,
    replicate_heads: bool = False,
) -> Sliced:
    """Keep this rank's share of every planned module and insert the collectives.

    Args:
        model: a model whose parameters are whole, on any device.
        group: the tensor-parallel group.
        tp_style: where the collectives are placed.
        peers_absent: whether the group's other ranks do not exist to add partial sums.
        plan: what to slice; None selects transformers' plan, or a plan that ships with onerank.
        sequence: whether norms and residuals are sharded along the sequence.
        replicate_heads: whether each rank has the weights of its key-value head, where ranks share
            one; otherwise they are sharded, and their output is gathered. The same for the only
            group of a layer of Mamba 2, which is refused otherwise.

    Raises:
        SliceError: the model has no plan, the plan omits a module or has an unknown style, or
            the group size does not divide a dimension.
    """
    rules = rules_for(model, plan)
    resolved = resolve_plan(
        model, rules, group, tp_style, sequence=sequence, replicate_heads=replicate_heads
    )
    whole_sizes = {name: p.numel() for name, p in model.named_parameters()}
    slicer = _Slicer(
        model,
        group,
        rules,
        resolved,
        peers_absent=peers_absent,
        parallel_loss=tp_style == "megatron",
    )
    for name, style in resolved.styles.items():
        slicer.cut(name, style)
    slicer.cut_stateful()
    # After all cuts: hooks of a boundary wrap the forwards that slicing installs.
    for name, boundary in resolved.boundaries.items():
        boundary.place_before(model.get_submodule(name))
    for name, rule in rules.items():
        heads = (child for child in resolved.shared_heads if parent_of(child) == name)
        shared = {rules[child].kv_heads for child in heads if child in rules}
        _divide_heads(model.get_submodule(name), name, rule, group, shared)
    for name, ranks in resolved.ranks_per_head.items():
        count_one_head(model.get_submodule(name), ranks)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    whole = (name for name, size in sizes.items() if size == whole_sizes[name])
    # Rank 0 of the group owns what all of them hold, so that a count over ranks has it once.
    duplicates = frozenset(whole if group.rank() > 0 else ())
    before, after = sum(whole_sizes.values()), sum(sizes.values())
    return Sliced(_sliced_modules(resolved), before, after, duplicates=duplicates)


def _sliced_modules(resolved: ResolvedPlan) -> dict[str, int]:
    """Return the number of modules by the style of their slices."""
    modules = Counter(style for style in resolved.styles.values() if style not in WHOLE)
    if copies := sum(heads.replicated for heads in resolved.shared_heads.values()):
        modules[REPLICATED_HEADS] = copies
    return dict(modules)


class _Slicer:
    """Slices the modules of one model.

    Args:
        model: the model; other axes may have cut it already.
        group: the tensor-parallel group.
        rules: rules of the plan, by module name.
        resolved: style and boundary of each module.
        peers_absent: as for `slice_model`.
        parallel_loss: whether logits stay sharded up to the loss.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup,
        rules: dict[str, ModuleRule],
        resolved: ResolvedPlan,
        *,
        peers_absent: bool,
        parallel_loss: bool,
    ) -> None:
        self._model, self._group, self._rules, self._resolved = model, group, rules, resolved
        self._peers_absent, self._parallel_loss = peers_absent, parallel_loss
        self._stack = stack = resolved.stack
        self._head_boundary = None
        if isinstance(stack, TwoStacks):
            self._head_boundary = shard_sequences(
                model, stack, group, resolved.cuts, peers_absent=peers_absent
            )
        elif stack is not None:
            self._head_boundary = shard_sequence(
                model, stack, group, resolved.cuts, peers_absent=peers_absent
            )
        # ids of parameters that are cut already: a tied parameter occurs in two modules
        self._cut: set[int] = set()
        self._stateful: list[str] = []

    def cut(self, name: str, style: str) -> None:
        """Keep this rank's share of a module and insert the collectives of its style."""
        module = self._model.get_submodule(name)
        if name == self._resolved.head:
            refuse_unused_head(self._model, module, name)
        if name == self._resolved.head and self._parallel_loss:
            cut_module(_checked_linear(module, name), name, self._group, output=True, cut=self._cut)
            sharding = HeadSharding(self._group, self._peers_absent, self._head_boundary)
            _place_head(self._model, module, sharding)
        elif style in (*COLUMN, *GATHERED, *UP, HEAD):
            self._cut_column(module, name, style)
        elif style in (*ROW, *SPLIT, SUMMED):
            self._cut_row(module, name, style)
        elif style in EMBEDDING:
            self._cut_embedding(module, name, style)
        elif style in REPLICATED:
            sum_gradients(module, self._group)
        elif style in EXPERTS:
            cut_experts(module, name, self._group, sequence=self._stack is not None)
        elif style in IDENTITY:
            module.register_forward_hook(_divide_hook(self._group))
        elif style == STATEFUL:
            # The layer comes before its projections, whose parts then have the copies.
            repeat_only_group(module, self._group.size())
            self._stateful.append(name)
        elif style in (*HEADS, NORM_OF_RANKS):
            self._cut_heads(module, name, style)
        elif style in SPLIT_OUTPUT:
            module.register_forward_hook(_split_hook(self._group))
        elif style in LATENT and self._stack is None:
            sum_rotary_gradient(module, rotary_width(self._model, parent_of(name)), self._group)

    def cut_stateful(self) -> None:
        """Keep this rank's heads of the layers with states, after their projections."""
        for name in self._stateful:
            cut_stateful(self._model.get_submodule(name), name, self._group)

    def _cut_heads(self, module: nn.Module, name: str, style: str) -> None:
        if style == NORM_OF_RANKS:
            slice_norm(module, name, self._group)
            return
        ranks = self._resolved.ranks_per_head.get(parent_of(name))
        shapes = {parameter.shape[0] for parameter in module.parameters(recurse=False)}
        if ranks is not None and shapes == {self._group.size() // ranks}:
            apply_row_of_head(module, self._group.size() // ranks, self._group)
        else:
            cut_heads(module, name, self._group)
            mark_as_cut(module)

    def _cut_column(self, module: nn.Module, name: str, style: str) -> None:
        model, group = self._model, self._group
        proportions = self._rules.get(name, ModuleRule()).proportions
        resolved = self._resolved
        boundary = resolved.layer_inputs.get(name) or resolved.boundaries.get(parent_of(name))
        adapted = resolved.adapted.get(name)
        linear = module if adapted is None else adapted.base
        block, _, leaf = name.rpartition(".")
        fused = fused_widths(model.get_submodule(block), leaf)
        fused = fused or blocks_of(model, linear, name, style, proportions)
        # () for a single part: a tied head's weight may be cut already, so `cut_module` reads its
        # size.
        blocks = fused if len(fused) > 1 else ()
        shared = resolved.shared_heads.get(name)
        if shared is not None:
            blocks = shared.cut_widths
        if style == "fused_qkv":
            keep_heads(model.get_submodule(parent_of(name)), group.size())
        # An adapter's low-rank matrices are cut together with its base, or their products would not
        # match.
        if adapted is not None:
            adapted.cut_column(
                group,
                self._cut,
                blocks,
                copy=boundary is None,
                row_order=None if shared is None else shared.row_order,
                finish=None if shared is None else shared.select,
            )
            return
        if shared is not None:
            weight = module.get_parameter("weight")
            if is_quantised(weight):
                raise quantised_layout_error(name, weight)
            reorder_rows(module.parameters(recurse=False), shared.row_order)
            if shared.replicated:
                shared.repeat_heads(module.parameters(recurse=False))
        cut_module(
            _checked_linear(module, name), name, group, output=True, blocks=blocks, cut=self._cut
        )
        finish = None if shared is None or shared.replicated else shared.select
        if style in (*GATHERED, HEAD):
            finish = functools.partial(gather_from_group, group=group)
        column_linear(
            module,
            group,
            copy=boundary is None,
            linear=nn.functional.linear if boundary is None else boundary.linear,
            finish=finish,
        )

    def _cut_row(self, module: nn.Module, name: str, style: str) -> None:
        if (adapted := self._resolved.adapted.get(name)) is not None:
            adapted.cut_row(self._group, self._cut)
            return
        columns = matrix_of(_checked_linear(module, name)).shape[1]
        proportions = self._rules.get(name, ModuleRule()).proportions
        blocks = parts_of(name, columns, proportions, "input")
        cut_module(module, name, self._group, output=False, blocks=blocks, cut=self._cut)
        if style == SUMMED:
            # The layer has the whole sequence already, with sequence parallelism too.
            reduce = _sum_both_ways
        elif self._stack:
            reduce = scatter_sum_to_sequence
            sum_gradients(module, self._group, ["bias"])
        else:
            reduce = reduce_from_group
        row_linear(module, self._group, split=style in SPLIT, reduce=reduce)

    def _cut_embedding(self, module: nn.Module, name: str, style: str) -> None:
        if not isinstance(module, nn.Embedding):
            raise SliceError(
                f"{name} is planned as {style} but is a {_qualified_class(module)}",
                code="tp-module-type",
            )
        cut_module(module, name, self._group, output=True, cut=self._cut)
        reduces = self._stack is None or self._stack.learns_positions
        parallel_embedding(module, self._group, peers_absent=self._peers_absent, reduce=reduces)


def _divide_heads(
    module: nn.Module,
    name: str,
    rule: ModuleRule,
    group: dist.ProcessGroup,
    shared: Set[str],
) -> None:
    """Divide a module's head counts, and slice bias arguments to this rank's heads.

    Attributes in `shared` count heads of which each rank has one.
    """
    divided = [attribute for attribute in rule.divide if attribute not in shared]
    divide_attributes(module, name, divided, group.size(), rule.multiple)
    for attribute in shared - {""}:
        setattr(module, attribute, 1)
    if rule.head_bias:
        slice_head_bias(module, name, rule.head_bias, getattr(module, rule.divide[0]), group)


def _sum_both_ways(partial: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over the ranks; its gradient is the sum of theirs."""
    return copy_to_group(reduce_from_group(partial, group), group)


def _split_hook(group: dist.ProcessGroup) -> Callable[..., Tensor]:
    def hook(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return split_to_group(output, group)

    return hook


def _divide_hook(group: dist.ProcessGroup) -> Callable[..., Tensor]:
    """Return a hook that divides an output by the group size.

    Every rank computes the whole output, and a later sum over the ranks would multiply it.
    """

    def hook(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        return output / group.size()

    return hook


def _place_head(model: nn.Module, head: nn.Module, sharding: HeadSharding) -> None:
    if isinstance(model, PreTrainedModel) and not computes_loss_in_forward(model):
        parallel_head(model, head, sharding)
    else:
        cross_entropy_head(model, head, sharding)
    if sharding.boundary is not None:
        sharding.boundary.leave_after(head)


def _qualified_class(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _checked_linear(module: nn.Module, name: str) -> nn.Module:
    if not isinstance(module, nn.Linear | Conv1D):
        raise SliceError(
            f"{name} is planned as a sliced linear layer but is a {_qualified_class(module)}",
            code="tp-not-linear",
        )
    weight = module.weight
    if not is_quantised(weight) and weight.element_size() == 1:
        raise SliceError(
            f"--tp: {name} is a {_qualified_class(module)}, whose {weight.dtype} weight its own "
            "forward unpacks, and its scales would stay whole\n  load the model in 16 bits, move "
            "it to the device, where it is sliced, and quantise the slice with torchao's "
            "quantize_(model, ...); or leave --tp out",
            code="tp-quantised-layer",
        )
    # Subclasses in transformers compute the same product in their own forward (Falcon). Other
    # forwards (adapters, quantised weights) would be lost in the slice.
    from_transformers = type(module).__module__.startswith("transformers.")
    if not from_transformers and type(module).forward is not nn.Linear.forward:
        extra = [key for key, _ in module.named_parameters() if key not in ("weight", "bias")]
        raise SliceError(
            f"{name} is a {_qualified_class(module)} with its own forward"
            + (f" (it has {', '.join(extra)} besides weight and bias)" if extra else "")
            + ", which a slice would replace by a plain linear layer\n  use nn.Linear, name its "
            'low-rank matrices in a plan file, adapter = ["lora_A", "lora_B"], or leave --tp out',
            code="tp-own-forward",
        )
    return module

"""Tensor parallelism of multi-head latent attention.

Projections down to the latents are replicated; projections up from them are sliced, each with a
separate collective, as in Megatron-LM (megatron/core/transformer/multi_latent_attention.py). The
rotary part of the keys bypasses the up projections, so its gradient has another all-reduce.

With sequence parallelism the down projections and latent norms run on a shard of the sequence. Each
up projection gathers its latents and the rotary part is gathered separately: 3 all-gathers per
block, where other attention has 1. Attention reads the sequence length from its input, so it gets a
placeholder of the whole length.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onerank.capture.parallelize.autograd_collectives import copy_to_group
from onerank.capture.parallelize.hugging_face import PreTrainedModel
from onerank.capture.parallelize.tensor.linear import with_hidden_states
from onerank.capture.parallelize.tensor.module_styles import COLUMN, LATENT, UP, WHOLE
from onerank.capture.parallelize.tensor.sequence_parallel import (
    SequenceInput,
    SequencePlaceholder,
    gather_sequence,
)
from onerank.ir.errors import SliceError

_DOWN, _UP, _OUT = "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"
_HEAD_GATE = "g_proj"  # a factor for each head
_QUERY_DOWN, _QUERY_NORM, _NORM = "q_a_proj", "q_a_layernorm", "kv_a_layernorm"


def latent_styles(model: nn.Module, planned: dict[str, str], *, complete: bool) -> dict[str, str]:
    """Return module name -> style in every latent attention, if `complete` unplanned ones too."""
    styles: dict[str, str] = {}
    for name, module in model.named_modules():
        children = dict(module.named_children())
        if not {_DOWN, _UP, _OUT} <= children.keys():
            continue
        if not complete and f"{name}.{_UP}" not in planned:
            continue
        for key in ("q_proj", "q_b_proj", _UP):
            if isinstance(children.get(key), nn.Linear):
                styles[f"{name}.{key}"] = UP[0]
        styles |= {f"{name}.{_DOWN}": LATENT[0], f"{name}.{_OUT}": "rowwise"}
        for key in (_QUERY_DOWN, _QUERY_NORM, _NORM):
            if children.get(key) is not None:
                styles[f"{name}.{key}"] = WHOLE[0]
        # vLLM replicates the indexer of sparse attention: each rank chooses the tokens itself.
        indexer = children.get("indexer")
        for key, child in indexer.named_children() if indexer is not None else ():
            if any(True for _ in child.parameters(recurse=False)):
                styles[f"{name}.indexer.{key}"] = WHOLE[0]
        for key in children:
            gates = key == _HEAD_GATE and complete
            if gates or planned.get(f"{name}.{key}") in COLUMN:  # of the hidden states
                styles[f"{name}.{key}"] = UP[0]
    return styles


def rotary_width(model: nn.Module, name: str) -> int:
    """Return the features of the rotary part of the keys in the latent attention `name`."""
    width = getattr(model.get_submodule(name), "qk_rope_head_dim", None)
    if width is None and isinstance(model, PreTrainedModel):
        width = getattr(model.config.get_text_config(), "qk_rope_head_dim", None)
    if not isinstance(width, int):
        raise SliceError(
            f"{type(model).__name__} has latent attention, but its configuration has no "
            "qk_rope_head_dim, the width of the rotary part of its keys\n"
            "  set it, or leave --tp out",
            code="mla-no-rope-width",
        )
    return width


def sum_rotary_gradient(module: nn.Module, width: int, group: dist.ProcessGroup) -> None:
    """Sum the gradient of the last `width` features of a module's output over the group."""

    def split(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        # Inference has no gradient, and engines no copy for it.
        if not torch.is_grad_enabled():
            return output
        latent, rotary = output.split([output.shape[-1] - width, width], dim=-1)
        return torch.cat([latent, copy_to_group(rotary, group)], dim=-1)

    module.register_forward_hook(split)


class LatentSequence:
    """Gathers the inputs of a latent attention that runs on a shard of the sequence.

    Args:
        attention: the module; its submodules have the names of DeepSeek's.
        name: its qualified name.
        width: features of the rotary part of its keys.
        group: the tensor-parallel group.

    Raises:
        SliceError: the latents have no norm; they are gathered after it.
    """

    def __init__(
        self, attention: nn.Module, name: str, width: int, group: dist.ProcessGroup
    ) -> None:
        self._group, self._width = group, width
        self._latents: SequenceInput | None = None
        children = dict(attention.named_children())
        if _NORM not in children:
            raise SliceError(
                f"--sp: {name} has no {_NORM}, after which its latents are gathered\n"
                "  leave --sp out",
                code="mla-no-norm",
            )
        attention.register_forward_pre_hook(self._enter, with_kwargs=True)
        attention.register_forward_hook(self._leave, always_call=True)
        for key in (_QUERY_DOWN, _QUERY_NORM, _DOWN, _NORM):
            if isinstance(child := children.get(key), nn.Module):
                child.register_forward_pre_hook(_unwrap_shard)
                # Keys and values share the gather after their latent norm; queries are gathered by
                # their up projection, from the placeholder.
                child.register_forward_hook(self._gather if key == _NORM else self._replace_output)

    def __deepcopy__(self, _: Any) -> "LatentSequence":
        # Hooks of a deep-copied model keep sharing one object, as functions do.
        return self

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Apply an up projection; gathers its input unless the latents are gathered already."""
        if isinstance(x, LatentPlaceholder):
            source = SequenceInput(x.shard, self._group)
            return source.linear(source.whole, weight, bias)
        if self._latents is None:
            return nn.functional.linear(x, weight, bias)
        return self._latents.linear(x, weight, bias)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return with_hidden_states(module, args, kwargs, self._placeholder)

    def _placeholder(self, shard: Tensor) -> Tensor:
        return LatentPlaceholder.with_rotary(shard, self._group, self._width)

    def _replace_output(self, _: nn.Module, __: Any, output: Tensor) -> Tensor:
        return self._placeholder(output)

    def _gather(self, _: nn.Module, __: Any, output: Tensor) -> Tensor:
        self._latents = SequenceInput(output, self._group)
        return self._latents.whole

    def _leave(self, *_: Any) -> None:
        self._latents = None


class LatentPlaceholder(SequencePlaceholder):
    """Placeholder for the hidden states of a latent attention.

    Splitting it returns a placeholder for the latents and the gathered rotary part.
    """

    rotary: int
    what = "a latent attention computes {} of hidden states, outside its projections"

    @staticmethod
    def with_rotary(shard: Tensor, group: dist.ProcessGroup, rotary: int) -> "LatentPlaceholder":
        """Return the placeholder of a shard [batch, sequence / size, features]."""
        placeholder = LatentPlaceholder.of(shard, group)
        # An attribute of the instance, since torch's `as_subclass` takes no arguments for it.
        placeholder.rotary = rotary
        return placeholder

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Split off the rotary part, or run a function that reads only metadata."""
        if func in _SPLITS and isinstance(args[0], LatentPlaceholder):
            return _without_rotary(args[0], *args[1:], **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def _without_rotary(
    placeholder: LatentPlaceholder, split_size_or_sections: Any, dim: int = 0
) -> tuple[Tensor, Tensor]:
    features = placeholder.shape[-1]
    expected = [features - placeholder.rotary, placeholder.rotary]
    if dim not in (-1, 2) or list(split_size_or_sections) != expected:
        raise SliceError(
            f"--sp: a latent attention splits its latents by {split_size_or_sections} along "
            f"dimension {dim}; expected {expected} along the last, latents and the rotary part: "
            "leave --sp out",
            code="mla-split",
        )
    latents, rotary = placeholder.shard.split(expected, dim=-1)
    return (
        LatentPlaceholder.with_rotary(latents, placeholder.group, placeholder.rotary),
        gather_sequence(rotary, placeholder.group),
    )


def _unwrap_shard(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(value.shard if isinstance(value, LatentPlaceholder) else value for value in args)


_SPLITS: tuple[Any, ...] = (torch.split, Tensor.split)

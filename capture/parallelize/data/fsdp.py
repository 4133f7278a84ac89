"""Shard a model with FSDP2 (`fully_shard`), and clip the gradients of its shards."""

import contextlib
import functools
import inspect
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from onerank.capture.parallelize.data.data_groups import DENSE, EXPERT, Groups, group_kind_of
from onerank.capture.parallelize.data.lazy_init import device_of, make_weights
from onerank.capture.parallelize.data.optimizers import expand_state, pop_uniform_state
from onerank.capture.parallelize.pipeline.stage import move_before_fsdp
from onerank.capture.patches import patched
from onerank.ir.errors import SliceError

_REPLACED = "_onerank_sharded"


class FullyShardedModel:
    """A model with `fully_shard` on each repeated block and on the rest.

    A block is an element of an outermost `nn.ModuleList`. Parameters keep the script's dtype:
    mixed precision is left to the script's autocast. Deferred weights are created block by block,
    so that at most one block is whole at a time.

    As in torchtitan, each block has separate all-gathers and a separate reduce-scatter. Those of
    the root cover the other parameters: embedding, last norm and head.

    Args:
        module: the model.
        groups: its data-parallel groups.
        called: whether its first forward has begun.
    """

    def __init__(self, module: nn.Module, groups: Groups, *, called: bool = True) -> None:
        self._called_before_sharding = called
        self._called = module
        # torch.compile's wrapper has the module as _orig_mod.
        self._root: Any = getattr(module, "_orig_mod", module)
        device = device_of(self._root)
        whole_parameters = _parameters_by_owner(self._root)
        meshes: dict[str, DeviceMesh] = {}

        def shard(module_part: nn.Module, kind: str) -> None:
            if kind not in meshes:
                group = groups.of(kind)
                meshes[kind] = DeviceMesh.from_group(group, device.type, mesh_dim_names=("dp",))
            make_weights(module_part, self._root)
            sharded: Any = fully_shard(module_part, mesh=meshes[kind])
            move_before_fsdp(module_part)
            if kind != DENSE:
                sharded.set_gradient_divide_factor(float(groups.size))

        # Inner modules come first: fully_shard skips parameters that an earlier call shards.
        for experts in _expert_modules(self._root):
            shard(experts, EXPERT)
        for block in [*_blocks(self._root), self._root]:
            shard(block, DENSE)
        # FSDP's hook reads every output tensor, so it must run before the hook that makes logits
        # gather, or raise an error, when read.
        handle = self._root._get_fsdp_state()._post_forward_hook_handle
        self._root._forward_hooks.move_to_end(handle.id, last=False)
        for (owner, name), whole in whole_parameters.items():
            replacement = getattr(owner, name)
            if replacement is not whole and not hasattr(whole, _REPLACED):
                replacement.__dict__.update(whole.__dict__)  # attributes that other modules set
                # An optimizer, or the script, may still refer to the whole parameter.
                whole.data = torch.empty(0, dtype=whole.dtype, device=whole.device)
                setattr(whole, _REPLACED, replacement)

    def replace_in(self, optimizers: Sequence[Optimizer]) -> None:
        """Replace whole parameters by their shards in the optimizers."""
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                parameters: list[Tensor] = group["params"]
                group["params"] = list(current(parameters))
                for whole, shard in zip(parameters, group["params"], strict=True):
                    if whole in optimizer.state and shard is not whole:
                        state = pop_uniform_state(optimizer, whole)
                        optimizer.state[shard] = expand_state(state, shard)

    def before_forward(self, args: tuple[Any, ...], *, communicates: bool) -> None:
        """Set whether FSDP communicates in this backward."""
        self._root.set_requires_gradient_sync(communicates)
        missed_by_hooks = self._called_before_sharding and self._called is self._root
        if missed_by_hooks and not self._root._get_fsdp_state()._is_root:
            # FSDP's hooks were registered while torch ran those of the first call, so this call
            # misses them. On CUDA FSDP moves the inputs and fails without any.
            self._root._get_fsdp_state()._pre_forward(self._root, args or (None,), {})

    def prepare_repeated_reduction(self) -> None:
        """Do nothing: FSDP adds each backward's reduced gradients to its shards."""

    def after_forward(self, output: Any) -> None:
        """Do nothing: FSDP's hook handles the end of the forward."""

    @staticmethod
    @contextlib.contextmanager
    def clipping() -> Generator[None]:
        """Patch clipping to accept lists of the parameters from before sharding."""
        original: Any = nn.utils.clip_grad_norm_
        clip_value: Any = nn.utils.clip_grad_value_

        def clip_grad_value_(parameters: Any, *args: Any, **kwargs: Any) -> None:
            listed = [parameters] if isinstance(parameters, Tensor) else parameters
            clip_value(list(current(listed)), *args, **kwargs)

        def clip_grad_norm_(parameters: Any, *args: Any, **kwargs: Any) -> Tensor:
            listed = [parameters] if isinstance(parameters, Tensor) else parameters
            shards = list(current(listed))
            meshes = by_mesh(shards)
            if len(meshes) < 2:
                return original(shards, *args, **kwargs)
            return _clip(meshes, *args, **kwargs)

        replacements = {"clip_grad_norm_": clip_grad_norm_, "clip_grad_value_": clip_grad_value_}
        with patched("torch.nn.utils", replacements):
            yield


@contextlib.contextmanager
def refuse_double_backward() -> Generator[None]:
    """Refuse double backward (create_graph): FSDP frees its weights after the first backward."""
    grad, backward = torch.autograd.grad, torch.autograd.backward

    def refusing(original: Any) -> Any:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            if signature.bind(*args, **kwargs).arguments.get("create_graph"):
                raise SliceError(
                    "--fsdp: the script calls backward with create_graph=True, but FSDP frees its "
                    "weights after the first backward\n  use --ddp or --zero 1",
                    code="fsdp-double-backward",
                )
            return original(*args, **kwargs)

        return run

    with patched("torch.autograd", {"grad": refusing(grad), "backward": refusing(backward)}):
        yield


def current(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the shard that replaced each parameter, or the parameter itself."""
    for parameter in parameters:
        yield getattr(parameter, _REPLACED, parameter)


def by_mesh(parameters: Iterable[Any]) -> list[list[Any]]:
    """Return the parameters with gradients, grouped by the device mesh that shards them."""
    groups: dict[Any, list[Any]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(groups.values())


def norm_on_mesh(
    gradients: list[Any],
    norm_type: float,
    foreach: bool | None,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Return the norm of gradients of one device mesh, summed over its ranks if it shards them."""
    utils: Any = nn.utils
    norm: Any = utils.get_total_norm(gradients, norm_type, error_if_nonfinite, foreach)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _clip(
    meshes: list[list[Any]],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip gradients on several meshes (experts and the rest), which one operator cannot mix."""
    utils: Any = nn.utils
    norms: list[Tensor] = []
    for parameters in meshes:
        gradients = [parameter.grad for parameter in parameters]
        norms.append(norm_on_mesh(gradients, norm_type, foreach, error_if_nonfinite))
    linalg: Any = torch.linalg
    total: Tensor = linalg.vector_norm(torch.stack(norms), norm_type)
    for parameters in meshes:
        utils.clip_grads_with_norm_(parameters, max_norm, total, foreach)
    return total


def _parameters_by_owner(root: nn.Module) -> dict[tuple[nn.Module, str], nn.Parameter]:
    return {
        (owner, name): parameter
        for owner in root.modules()
        for name, parameter in owner.named_parameters(recurse=False)
    }


def _blocks(root: nn.Module) -> list[nn.Module]:
    """Return the elements of the outermost module lists that hold parameters.

    Frozen layers are blocks too: otherwise the root's all-gather would include them.
    """
    blocks: list[nn.Module] = []
    pending = list(root.children())
    for module in pending:  # the list grows during the loop
        if not isinstance(module, nn.ModuleList):
            pending += module.children()
            continue
        blocks += [block for block in module if any(True for _ in block.parameters())]
    return blocks


def _expert_modules(root: nn.Module) -> list[nn.Module]:
    """Return the outermost modules that hold only parameters of experts.

    They are sharded over the ranks with the same experts, the other parameters over all
    data-parallel ranks.
    """
    experts: list[nn.Module] = []
    pending = [root]
    for module in pending:  # the list grows during the loop
        marks = {group_kind_of(p) for p in module.parameters()}
        if marks == {EXPERT}:
            experts.append(module)
        elif EXPERT in marks:
            pending += module.children()
    return experts

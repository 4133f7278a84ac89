"""Shard a model with FSDP2 (`fully_shard`), create its weights sharded, and clip their gradients.

A model that will be sharded need never be whole on a device: torchtitan builds on the meta device,
shards, and initialises the shards. Here, each parameter of a Hugging Face model under construction
goes to the meta device and records its intended device; buffers are real. The weights are created
part by part when the model is moved to an accelerator, built on one, or called.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from onerank.capture.fake_tensors import script_attributes
from onerank.capture.parallelize.data.data_groups import DataGroups, group_kind_of
from onerank.capture.parallelize.data.optimizers import expand_state, pop_uniform_state
from onerank.capture.parallelize.hugging_face import MODELING, PreTrainedModel
from onerank.capture.parallelize.model_structure import uncompiled
from onerank.capture.parallelize.parameter_kinds import DENSE, EXPERT
from onerank.capture.parallelize.pipeline.stage import move_before_fsdp
from onerank.capture.patches import after_import, patched
from onerank.ir.errors import SliceError

_DEVICE = "_onerank_device"
_DEFERRED = "_onerank_deferred"
_INITIALISED = "_is_hf_initialized"  # transformers skips parameters with this mark
_STD = 0.02  # transformers' default, for parameters that _init_weights does not fill


class DeferredModels:
    """Defers the weights of Hugging Face models that a script builds; loaded models are exempt.

    Args:
        needed: called with a module when its deferred weights are needed; creates them.
    """

    def __init__(self, needed: Callable[[nn.Module], None]) -> None:
        self._needed = needed
        self._loading = 0
        self._building: PreTrainedModel | None = None
        self._moving = False

    @contextlib.contextmanager
    def installed(self) -> Generator[None]:
        """Patch construction and moves of models for the duration of the context."""
        module: Mapping[str, Any] = vars(nn.Module)
        register, apply = module["register_parameter"], module["_apply"]

        def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            if self._building is not None and parameter is not None and not parameter.is_meta:
                parameter = _on_meta(parameter)
            register(module, name, parameter)

        def moved(module: nn.Module, fn: Callable[[Tensor], Tensor], *args: Any, **kw: Any) -> Any:
            # `_apply` calls itself on every submodule; only the outermost call creates weights.
            if self._moving or not is_deferred(module):
                return apply(module, fn, *args, **kw)
            self._moving = True
            try:
                apply(module, functools.partial(_moved, fn), *args, **kw)
            finally:
                self._moving = False
            self._create_if_placed(module)
            return module

        with (
            after_import(MODELING, self._construction_patched),
            patched("torch.nn.Module", {"register_parameter": registered, "_apply": moved}),
        ):
            yield

    @contextlib.contextmanager
    def _construction_patched(self) -> Generator[None]:
        """Defer the weights of each model that transformers constructs without loading them."""
        from transformers.modeling_utils import PreTrainedModel

        model: Mapping[str, Any] = vars(PreTrainedModel)
        init, post_init, load = model["__init__"], model["post_init"], model["from_pretrained"]

        @functools.wraps(init)  # transformers reads the signature
        def built(model: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
            init(model, *args, **kwargs)
            if self._building is None and not self._loading:
                self._building = model
                # An attribute, so that a deep copy has it too.
                setattr(model, _DEFERRED, True)

        def complete(model: PreTrainedModel) -> None:
            post_init(model)
            if model is self._building:
                self._building = None
                self._create_if_placed(model)

        def loaded(kind: Any, *args: Any, **kwargs: Any) -> Any:
            self._loading += 1
            try:
                return load.__func__(kind, *args, **kwargs)
            finally:
                self._loading -= 1

        replacements = {
            "__init__": built,
            "post_init": complete,
            "from_pretrained": classmethod(loaded),
        }
        with patched(f"{MODELING}.PreTrainedModel", replacements):
            yield

    def _create_if_placed(self, module: nn.Module) -> None:
        """Create the weights of a module whose device is now an accelerator."""
        whole = any(getattr(part, _DEFERRED, False) for part in module.modules())
        if whole and is_deferred(module) and on_accelerator(module):
            self._needed(module)


def is_deferred(module: nn.Module) -> bool:
    """Return whether a module has weights that are not created yet."""
    return any(hasattr(parameter, _DEVICE) for parameter in module.parameters())


def on_accelerator(module: nn.Module) -> bool:
    """Return whether a module's trained weights are, or will be, on an accelerator."""
    return device_of(module).type != "cpu"


def device_of(module: nn.Module) -> torch.device:
    """Return the current or intended device of a module's trained weights."""
    parameters = list(module.parameters())
    first = next((p for p in parameters if p.requires_grad), parameters[0])
    return getattr(first, _DEVICE, first.device)


def make_weights(part: nn.Module, whole: nn.Module) -> None:
    """Create the deferred weights of a part on their device, as its model initialises them.

    Parameters are replaced; a parameter with two names stays one parameter.

    Args:
        part: the module to fill.
        whole: the model that contains `part`.
    """
    created: dict[nn.Parameter, nn.Parameter] = {}
    filled: list[nn.Module] = []
    for module in part.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if not hasattr(parameter, _DEVICE):
                continue
            if parameter not in created:
                created[parameter] = _real(parameter)
            setattr(module, name, created[parameter])
            filled += [module] if module not in filled[-1:] else []
    if not created:
        return
    models = [module for module in whole.modules() if isinstance(module, PreTrainedModel)]
    # Outer models come first, so the innermost model's _init_weights fills a module.
    inside: dict[nn.Module, Any] = {module: model for model in models for module in model.modules()}
    with torch.no_grad():
        for module in filled:
            if module in inside:
                inside[module]._init_weights(module)


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    deferred = nn.Parameter(parameter.data.to("meta"), requires_grad=parameter.requires_grad)
    # A new Parameter object has none of the attributes that the script or a library set.
    vars(deferred).update(script_attributes(parameter))
    setattr(deferred, _DEVICE, parameter.device)
    return deferred


def _real(parameter: nn.Parameter) -> nn.Parameter:
    data = torch.empty_like(parameter, device=getattr(parameter, _DEVICE))
    if data.is_floating_point():
        data.normal_(std=_STD)
    else:
        # normal_ does not take integers.
        data.zero_()
    created = nn.Parameter(data, requires_grad=parameter.requires_grad)
    kept = script_attributes(parameter).items()
    vars(created).update({k: v for k, v in kept if k not in (_DEVICE, _INITIALISED)})
    return created


def _moved(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Apply `fn`, a move or cast, to a tensor that may be deferred."""
    device = getattr(tensor, _DEVICE, None)
    if device is None:
        return fn(tensor)
    # `fn` is torch's closure of a move or cast: its effect shows on an empty tensor.
    probe = fn(torch.empty((0,) * tensor.dim(), dtype=tensor.dtype, device=device))
    setattr(tensor, _DEVICE, probe.device)
    return torch.empty_like(tensor, dtype=probe.dtype)


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

    def __init__(self, module: nn.Module, groups: DataGroups, *, called: bool = True) -> None:
        self._called_before_sharding = called
        self._called = module
        self._root = uncompiled(module)
        device = device_of(self._root)
        whole_parameters = _parameters_by_owner(self._root)
        meshes: dict[str, DeviceMesh] = {}

        def shard(module_part: nn.Module, kind: str) -> Any:
            if kind not in meshes:
                group = groups.of(kind)
                meshes[kind] = DeviceMesh.from_group(group, device.type, mesh_dim_names=("dp",))
            make_weights(module_part, self._root)
            sharded: Any = fully_shard(module_part, mesh=meshes[kind])
            move_before_fsdp(module_part)
            if kind != DENSE:
                # By all data-parallel ranks, not only those with the same experts: the experts get
                # the tokens of all.
                sharded.set_gradient_divide_factor(float(groups.size))
            return sharded

        # Inner modules come first: fully_shard skips parameters that an earlier call shards.
        for experts in _expert_modules(self._root):
            shard(experts, EXPERT)
        for block in _blocks(self._root):
            shard(block, DENSE)
        # The module, which now has the methods of FSDPModule.
        self._sharded = shard(self._root, DENSE)
        # FSDP's hook reads every output tensor, so it must run before the hook that makes logits
        # gather, or raise an error, when read.
        handle = self._sharded._get_fsdp_state()._post_forward_hook_handle
        self._sharded._forward_hooks.move_to_end(handle.id, last=False)
        for (owner, name), whole in whole_parameters.items():
            replacement = getattr(owner, name)
            if replacement is not whole and not hasattr(whole, _REPLACED):
                replacement.__dict__.update(
                    script_attributes(whole)
                )  # attributes that other modules set
                # An optimizer, or the script, may still refer to the whole parameter.
                whole.data = whole.detach().new_empty(0)
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
        self._sharded.set_requires_gradient_sync(communicates)
        missed_by_hooks = self._called_before_sharding and self._called is self._root
        if missed_by_hooks and not self._sharded._get_fsdp_state()._is_root:
            # FSDP's hooks were registered while torch ran those of the first call, so this call
            # misses them. On CUDA FSDP moves the inputs and fails without any.
            self._sharded._get_fsdp_state()._pre_forward(self._root, args or (None,), {})

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

"""Hugging Face models whose weights are created when they are sharded, one part at a time.

A model that will be sharded need never be whole on a device: torchtitan builds on the meta device,
shards, and initialises the shards. Here, each parameter of a model under construction goes to the
meta device and records its intended device; buffers are real. The weights are created when the
model is moved to an accelerator, built on one, or called.
"""

import contextlib
import functools
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from onerank.capture.parallelize.hugging_face import MODELING, PreTrainedModel
from onerank.capture.patches import after_import, patched

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
                setattr(model, _DEFERRED, True)  # an attribute, so that a deep copy has it too

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
        if whole and is_deferred(module) and device_of(module).type != "cpu":
            self._needed(module)


def is_deferred(module: nn.Module) -> bool:
    """Return whether a module has weights that are not created yet."""
    return any(hasattr(parameter, _DEVICE) for parameter in module.parameters())


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
    vars(deferred).update(vars(parameter))
    setattr(deferred, _DEVICE, parameter.device)
    return deferred


def _real(parameter: nn.Parameter) -> nn.Parameter:
    data = torch.empty_like(parameter, device=getattr(parameter, _DEVICE))
    if data.is_floating_point():
        data.normal_(std=_STD)
    else:
        data.zero_()
    created = nn.Parameter(data, requires_grad=parameter.requires_grad)
    kept = vars(parameter).items()
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

"""Let a torch without a GPU answer as one with a GPU: patches that need no state of a capture."""

import contextlib
import functools
import sys
from collections.abc import Generator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _foreach_utils, _python_dispatch
from torch.utils._pytree import tree_map_only
from torch.utils.data import dataloader

from onerank.capture.no_device.operators.functional_collectives import (
    FUNCTIONAL_COLLECTIVES,
    SYMMETRIC_MEMORY,
    fused_products,
    waits_at_first_use,
)
from onerank.capture.patches import after_import, overridden_kernels, patched, rebound, resolve

_torch: Any = torch
_determine_layout: Any = _torch._C._conv_determine_backend_memory_format
_dataloader: Any = dataloader
_distributed: Any = torch.distributed
_modes: Any = _python_dispatch
_foreach: Any = _foreach_utils
# torch.optim hides the name of this module.
_optimizers: Any = sys.modules[torch.optim.Optimizer.__module__]

_SHARDING = "torch.distributed.tensor._sharding_prop"

_TRACED_STAGE = "torch.distributed.pipelining.stage._PipelineStage"

_TRANSFORMERS_IMPORTS = "transformers.utils.import_utils"

_XFORMERS = "xformers.ops.fmha.common"
_XFORMERS_MASKED = "xformers.ops.fmha.cutlass"


@contextlib.contextmanager
def torch_without_gpu() -> Generator[None]:
    """Patch torch inside the context so that it takes the paths that it takes on a GPU."""
    with contextlib.ExitStack() as stack:
        for context in (*_dispatch(), *_modules(), *_distributed_jobs(), *_optimizer_steps()):
            stack.enter_context(context)
        yield


def _dispatch() -> list[contextlib.AbstractContextManager[None]]:
    """Return patches that decide which kernel runs an operator, and on which device."""
    return [
        # torch decides this by `torch.cuda.is_available`, which answers as on the GPU.
        patched(
            "torch._subclasses.fake_tensor.FakeTensorMode",
            {
                "avoid_device_init": property(_yes),
                "in_kernel_invocation": property(_is_in_kernel, _set_by_thread),
            },
        ),
        patched("torch._C", {"_get_accelerator": _accelerator}),
        patched("torch._C", {"_cuda_getCurrentRawStream": _default_stream}),
        patched("torch._C", {"_conv_determine_backend_memory_format": _layout_of_convolution}),
        _gpu_kernels(),
    ]


def _modules() -> list[contextlib.AbstractContextManager[None]]:
    """Return patches of modules, data loaders and distributions."""
    return [
        patched("torch.nn.DataParallel", {"scatter": _moved}),
        patched("torch.utils.data.DataLoader", {"_get_iterator": _load_in_this_process}),
        # Distributions check their arguments by comparing numbers.
        patched("torch.distributions.Distribution", {"_validate_args": False}),
        # torch moves the weights of recurrent layers into one buffer for cuDNN, by addresses.
        patched("torch", {"_use_cudnn_rnn_flatten_weight": _never}),
        # transformers builds masks for fake tensors, which it cannot read, and none on a device.
        after_import(
            _TRANSFORMERS_IMPORTS,
            lambda: patched(_TRANSFORMERS_IMPORTS, {"is_fake_tensor": _no}),
        ),
        after_import(_XFORMERS, lambda: patched(_XFORMERS, {"_built_with_cuda": True})),
        after_import(_XFORMERS_MASKED, _masks_of_xformers),
    ]


@contextlib.contextmanager
def _masks_of_xformers() -> Generator[None]:
    """Let xformers' attention take a fake tensor as a mask: it compares classes."""
    name = "SUPPORTED_ATTN_BIAS_TYPES"
    with contextlib.ExitStack() as stack:
        for operator in (f"{_XFORMERS_MASKED}.FwOp", f"{_XFORMERS_MASKED}.BwOp"):
            types = (*getattr(resolve(operator), name), FakeTensor)
            stack.enter_context(patched(operator, {name: types}))
        yield


def _distributed_jobs() -> list[contextlib.AbstractContextManager[None]]:
    """Return patches of process groups, DDP, DTensor and pipeline stages."""
    return [
        rebound("torch.distributed.distributed_c10d", {"is_nccl_available": _nccl}),
        *_nccl_class(),
        patched("torch.distributed", {"Logger": _Logger}),
        rebound("torch.distributed.utils", {"_verify_param_shape_across_processes": _agreed}),
        patched(_TRACED_STAGE, {"_move_submod_to_device": _stage_moved}),
        after_import(_SHARDING, _shapes_inferred_apart),
        after_import(FUNCTIONAL_COLLECTIVES, waits_at_first_use),
        after_import(SYMMETRIC_MEMORY, lambda: patched(SYMMETRIC_MEMORY, fused_products())),
    ]


def _optimizer_steps() -> list[contextlib.AbstractContextManager[None]]:
    """Return patches that let optimizers use foreach kernels for fake tensors."""
    return [
        rebound("torch.utils._foreach_utils", {"_has_foreach_support": _has_foreach}),
        _multi_tensor_optimizers(),
    ]


@functools.cache
def operators_of_a_gpu() -> tuple[str, ...]:
    """Return the operators of aten with a formula that a CUDA build has a kernel for as well."""
    private = _torch._C
    names: set[str] = {*private._dispatch_get_all_op_names()}

    def has_kernel_of_a_gpu(name: str) -> bool:
        has_kernel = functools.partial(private._dispatch_has_kernel_for_dispatch_key, name)
        # The only operator (torch 2.11) that a CUDA build has a kernel for and a CPU build has not.
        # torch 2.9 added its backward; before that, a GPU ran the formula.
        on_gpu_only = name == "aten::_fused_rms_norm" and f"{name}_backward" in names
        runs_on_gpu = has_kernel("CPU") or on_gpu_only
        return runs_on_gpu and has_kernel("CompositeImplicitAutograd") and not has_kernel("CUDA")

    of_aten = (name for name in names if name.startswith("aten::"))
    return tuple(name.removeprefix("aten::") for name in of_aten if has_kernel_of_a_gpu(name))


def _gpu_kernels() -> contextlib.AbstractContextManager[None]:
    """Let operators count as kernels of a GPU that only a CUDA build has.

    Without a CUDA kernel the dispatcher takes the operator's formula instead (for `silu_backward`
    five operators), before it asks the mode.
    """
    return overridden_kernels("aten", [(name, "CUDA", _not_here) for name in operators_of_a_gpu()])


def _has_foreach(tensors: Sequence[Tensor | None], device: torch.device) -> bool:
    """Return whether torch has foreach kernels for tensors; its check asks for exact classes."""
    # DTensor adds itself to torch's list.
    supported = (FakeTensor, *_foreach._foreach_supported_types)
    return device.type == "cuda" and all(t is None or type(t) in supported for t in tensors)


def _no(_: object) -> bool:
    return False


def _never() -> bool:
    return False


def _agreed(*_: object) -> None:
    """DDP compares the shapes of parameters with those of other ranks, in numbers."""


class _Logger(_distributed.Logger):
    """DDP's log, without the times of steps: only a CUDA build can take them."""

    def set_runtime_stats_and_log(self) -> None:
        """Do nothing."""


def _not_here(*_: object, **__: object) -> None:
    raise NotImplementedError("an operator ran on a GPU that is not there")


def _moved(_: Any, inputs: Any, kwargs: Any, device_ids: Sequence[Any]) -> Any:
    """Move the inputs of `DataParallel` to the one GPU of a rank, as its C++ code does."""
    device = torch.device("cuda", device_ids[0])
    moved = tree_map_only(Tensor, lambda tensor: tensor.to(device), (inputs, kwargs or {}))
    return (moved[0],), (moved[1],)


def _stage_moved(stage: Any) -> None:
    """Move to the GPU a stage that `torch.distributed.pipelining.pipeline` cut."""
    # torch leaves a stage with fake parameters where it is, as one on the meta device.
    if not any(parameter.is_meta for parameter in stage.submod.parameters()):
        stage.submod.to(stage.device)


def _load_in_this_process(loader: Any) -> Any:
    """Return the iterator of a `DataLoader`, without worker processes."""
    # Workers inherit the modes by a fork. A batch that is large there is fake, and a fake tensor
    # cannot be sent to the captured process: the script would wait for it without end.
    kept = loader.num_workers, loader.timeout
    loader.num_workers = loader.timeout = 0
    try:
        return _dataloader._SingleProcessDataLoaderIter(loader)
    finally:
        loader.num_workers, loader.timeout = kept


def _is_in_kernel(_: object) -> bool:
    """Return whether this thread runs a meta kernel: fake tensors are on the meta device then."""
    return _torch._C._meta_in_tls_dispatch_include()


def _set_by_thread(_: object, __: bool) -> None:
    """Ignore the flag of the mode: torch sets one of the thread along with it."""


def _yes(_: object) -> bool:
    return True


def _nccl() -> bool:
    return True


_BackendOptions: Any = _torch._C._distributed_c10d.Backend.Options


class _OptionsOfNCCL(_BackendOptions):
    """What a script requests of NCCL; an emulated group uses the priority of its stream alone."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        _BackendOptions.__init__(self, "nccl")
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace()
        """Fields of NCCL's own configuration, such as `max_ctas`, that the script sets."""


class _ProcessGroupNCCL:
    """The class of no backend: emulated groups have none of NCCL's."""

    Options = _OptionsOfNCCL


def _nccl_class() -> list[contextlib.AbstractContextManager[None]]:
    """Return the patches that give a CPU build the class; none for a CUDA build."""
    owner = "torch.distributed.distributed_c10d"
    if hasattr(resolve(owner), "ProcessGroupNCCL"):
        return []
    return [
        patched(owner, {"ProcessGroupNCCL": _ProcessGroupNCCL}),
        patched("torch.distributed", {"ProcessGroupNCCL": _ProcessGroupNCCL}),
    ]


def _layout_of_convolution(image: Tensor, weight: Tensor, backend: Any) -> torch.memory_format:
    """Return the layout of a convolution's result, as `cudnn_conv_suggest_memory_format` does.

    A build without cuDNN has other backends, whose results are contiguous.
    """
    if not image.is_cuda:
        return _determine_layout(image, weight, backend)
    axes = weight.dim()
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(axes)
    if last is None or image.dtype == torch.float64:
        return torch.contiguous_format
    either = any(
        each.is_contiguous(memory_format=last) and not each.is_contiguous()
        for each in (image, weight)
    )
    return last if either else torch.contiguous_format


def _default_stream(_: int) -> int:
    return 0


def _accelerator(*_: object) -> torch.device:
    return torch.device("cuda")


@contextlib.contextmanager
def _shapes_inferred_apart() -> Generator[None]:
    """Let DTensor infer the shapes of results without the modes of the capture.

    It runs the operator on fake tensors of the global shape, which is no work of this rank.
    """
    propagator = resolve(f"{_SHARDING}.ShardingPropagator")
    infer = propagator._propagate_tensor_meta_non_cached

    def infer_apart(*args: Any, **kwargs: Any) -> Any:
        with _modes._disable_current_modes():
            return infer(*args, **kwargs)

    names = {"_propagate_tensor_meta_non_cached": infer_apart}
    with patched(f"{_SHARDING}.ShardingPropagator", names):
        yield


@contextlib.contextmanager
def _multi_tensor_optimizers() -> Generator[None]:
    """Let torch choose foreach implementations of optimizers for fake parameters too."""
    supported: list[Any] = _optimizers._foreach_supported_types
    supported.append(FakeTensor)
    try:
        yield
    finally:
        supported.remove(FakeTensor)

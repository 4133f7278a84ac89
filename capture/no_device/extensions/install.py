"""Provide the extensions that have counterparts, and let their packages import without a GPU."""

import contextlib
import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from onerank.capture.no_device.extensions import fused_kernels
from onerank.capture.no_device.extensions.emulated_modules import (
    EmulatedExtensions,
    Extension,
    launch_in,
)
from onerank.capture.no_device.extensions.expert_exchange import expert_exchange
from onerank.capture.no_device.extensions.products import GROUPED_GEMM, recorded_deep_gemm
from onerank.capture.no_device.extensions.transformer_engine import TRANSFORMER_ENGINE
from onerank.capture.no_device.operators.triton_kernels import KernelLaunch
from onerank.capture.no_device.tensor_values import Known, UnknownValues
from onerank.capture.patches import after_import, patched, resolve
from onerank.capture.script.runner import environment

_EXTENSIONS = (
    TRANSFORMER_ENGINE,
    GROUPED_GEMM,
    *fused_kernels.EXTENSIONS,
    # Their packages call these from operators with a fake implementation, which runs instead.
    Extension("flash_attn_2_cuda", "flash_attn", "flash_attn"),
    Extension("causal_conv1d_cuda", "causal_conv1d", "causal_conv1d"),
)

_TE_LIBRARIES = "transformer_engine.common"

# TransformerEngine's own setup sets it, to import the package before its libraries are there.
_WITHOUT_LIBRARIES = "NVTE_PROJECT_BUILDING"

_TE_ATTENTION = "transformer_engine.pytorch.attention.dot_product_attention.utils"

_JIT = "torch.utils.cpp_extension"

_DEEPSPEED = "deepspeed.ops.op_builder.builder"


@contextlib.contextmanager
def recorded_extensions(
    record: Callable[[KernelLaunch], None], unknown: UnknownValues, known: Known
) -> Generator[None]:
    """Record calls of extensions' functions inside the context.

    Args:
        record: records a launch.
        unknown: knows the line of the script that runs.
        known: numbers of tensors.
    """
    exchange = expert_exchange(launch_in("deep_ep", record), known, unknown)
    modules = {each.module: each for each in (*_EXTENSIONS, *exchange)}
    extensions = EmulatedExtensions(record, unknown, modules)

    def load_nothing(_: str) -> None:
        """Stand in for the loading of a library, whose module is provided already."""

    def transformer_engine() -> AbstractContextManager[None]:
        return patched(_TE_LIBRARIES, {"load_framework_extension": load_nothing})

    def te_attention() -> AbstractContextManager[None]:
        choose = resolve(_TE_ATTENTION).get_attention_backend

        def get_attention_backend(parameters: Any) -> Any:
            # It compares the exact class of queries with those of tensors.
            if issubclass(parameters.qkv_type, FakeTensor):
                parameters = replace(parameters, qkv_type=Tensor)
            return choose(parameters)

        return patched(_TE_ATTENTION, {"get_attention_backend": get_attention_backend})

    def compiled(name: str, *_: Any, is_python_module: bool = True, **__: Any) -> Any:
        if not is_python_module:
            unknown.refuse_library(name)
        # Python keeps a loaded extension under its name: StyleGAN compiles one, and imports it.
        sys.modules[name] = extensions.module(name)
        return sys.modules[name]

    def deepspeed() -> AbstractContextManager[None]:
        def load(builder: Any, verbose: bool = True) -> Any:
            del verbose
            return extensions.module(builder.name)

        return patched(f"{_DEEPSPEED}.OpBuilder", {"load": load})

    with (
        extensions.installed(),
        recorded_deep_gemm(record),
        environment({_WITHOUT_LIBRARIES: "1"}),
        after_import(_TE_LIBRARIES, transformer_engine),
        after_import(_TE_ATTENTION, te_attention),
        after_import(_JIT, lambda: patched(_JIT, {"load": compiled, "load_inline": compiled})),
        after_import(_DEEPSPEED, deepspeed),
    ):
        yield

"""FlashAttention 3 that a script activates in torch, without its package.

`torch.nn.attention.activate_flash_attention_impl("FA3")` imports the package, and registers Python
functions as CUDA kernels of torch's attention operators. They check their operands, and call
`flash_attn_3::fwd` and `flash_attn_3::bwd`. A capture runs these functions on fake tensors, so a
trace has the operators, allocations and errors of a GPU. Schemas, shapes of results and sizes of
tiles are those of flash-attention at 0251105a (2026-08): hopper/flash_api.cpp.
"""

import contextlib
import sys
from collections.abc import Callable, Generator
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._library import custom_ops
from torch.nn import attention

from onerank.capture.no_device.operators.operator_calls import OperatorCall, is_on_gpu
from onerank.capture.patches import patched, resolve

_torch: Any = torch
_attention: Any = attention
_custom: Any = custom_ops

_OWNER = "torch.nn.attention._fa3"

_FORWARD = """fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None,
    Tensor(v_new!)? v_new=None, Tensor? q_v=None, Tensor(out!)? out=None,
    Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None,
    Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None,
    int? max_seqlen_k=None, Tensor? page_table=None, Tensor? kv_batch_idx=None,
    Tensor? leftpad_k=None, Tensor? rotary_cos=None, Tensor? rotary_sin=None,
    Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None,
    Tensor? v_descale=None, float? softmax_scale=None, bool is_causal=False,
    int window_size_left=-1, int window_size_right=-1, int attention_chunk=0, float softcap=0.0,
    bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, int num_splits=0,
    bool? pack_gqa=None, int sm_margin=0) -> (Tensor(out!), Tensor, Tensor, Tensor)"""

_BACKWARD = """bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse,
    Tensor(dq!)? dq=None, Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, Tensor? cu_seqlens_q=None,
    Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None,
    int? max_seqlen_q=None, int? max_seqlen_k=None, float? softmax_scale=None,
    bool is_causal=False, int window_size_left=-1, int window_size_right=-1, float softcap=0.0,
    bool deterministic=False, int sm_margin=0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"""

# Custom operators whose implementation calls an operator that activation replaces.
_CALLERS = frozenset(f"torch_attn::_varlen_attn{suffix}" for suffix in ("", "_out", "_backward"))


@contextlib.contextmanager
def flash_attention_3() -> Generator[None]:
    """Let a script activate FlashAttention 3 inside the context, if its package is not built."""
    import_built: Callable[[str], None] = resolve(_OWNER)._fa3_import_module
    library: Any = _torch.library.Library("flash_attn_3", "FRAGMENT")

    def import_module(module_path: str) -> None:
        try:
            import_built(module_path)
        except ImportError:
            for name, schema in (("fwd", _FORWARD), ("bwd", _BACKWARD)):
                if not hasattr(_torch.ops.flash_attn_3, name):
                    library.define(schema)
            # For this import alone: a script that looks for the package itself does not find it.
            sys.modules[module_path] = ModuleType(module_path)
            try:
                import_built(module_path)
            finally:
                del sys.modules[module_path]

    active = _attention.current_flash_attention_impl()
    try:
        with patched(_OWNER, {"_fa3_import_module": import_module}):
            yield
    finally:
        if _attention.current_flash_attention_impl() != active:
            _attention.restore_flash_attention_impl()
        # This function caches the capability of the emulated GPU.
        resolve(_OWNER)._get_device_major.cache_clear()
        library._destroy()


def python_kernel(call: OperatorCall) -> Callable[..., Any] | None:
    """Return the function by which FlashAttention 3 runs an operator of torch on the GPU.

    Returns:
        None while FlashAttention 3 is not active, and for a call that it does not replace.
    """
    active: Any = _attention._registry._FLASH_ATTENTION_ACTIVE
    if active is None or active[0] != "FA3" or not any(map(is_on_gpu, call.tensors)):
        return None
    name: str = call.func.name()
    if name in _CALLERS:
        # A call through its dispatch key would come back to the mode that runs it.
        return _custom.OPDEFS[name]._init_fn
    # Which overloads are replaced depends on the version of torch.
    if f"{name.replace('::', '/')}/CUDA" not in active[1].library._op_impls:
        return None
    return partial(call.func._op_dk, _torch._C.DispatchKey.CUDA)


class _Arguments(dict[str, Any]):
    """Arguments of a call by name; the dispatcher drops those that have their default."""

    def __init__(self, operator: str, given: tuple[Any, ...]) -> None:
        schema = getattr(_torch.ops.flash_attn_3, operator).default._schema
        names = [argument.name for argument in schema.arguments]
        super().__init__({a.name: a.default_value for a in schema.arguments})
        self.update(zip(names, given, strict=False))


def results_of_forward(*operands: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return output, log-sums of the softmax, and partial results of divided keys.

    The kernel divides keys by a heuristic where `num_splits` is 0, the default. Its partial results
    are counted only where a script gives the number of parts.
    """
    args = _Arguments("fwd", operands)
    query, out = args["q"], args["out"]
    heads, width = query.shape[-2], args["v"].shape[-1]
    if out is None:
        dtype = torch.bfloat16 if query.dtype == torch.float8_e4m3fn else query.dtype
        out = query.new_empty((*query.shape[:-1], width), dtype=dtype)
    rows = (heads, query.shape[0])
    if args["cu_seqlens_q"] is None:
        rows = (query.shape[0], heads, query.shape[1])
    log_sums = query.new_empty(rows, dtype=torch.float32)
    splits = args["num_splits"]
    parts = ((splits, *rows, width), (splits, *rows)) if splits > 1 else (0, 0)
    of_parts = [query.new_empty(shape, dtype=torch.float32) for shape in parts]
    return out, log_sums, of_parts[0], of_parts[1]


def results_of_backward(*operands: Any) -> tuple[Tensor, ...]:
    """Return the sums in float32 that the kernels keep: of rows, of the query, key and value."""
    args = _Arguments("bwd", operands)
    query, key, value, boundaries = (args[name] for name in ("q", "k", "v", "cu_seqlens_q"))
    rows, keys = query.shape[1], key.shape[1]
    if boundaries is not None:
        rows, keys = args["max_seqlen_q"], args["max_seqlen_k"]
    left, right = args["window_size_left"], args["window_size_right"]
    masked = args["is_causal"] or 0 <= left < keys - 1 or 0 <= right < rows - 1
    head = _rounded_head(max(query.shape[-1], value.shape[-1]))
    query_tile, key_tile = _backward_tiles(head, masked=masked)
    heads, key_heads = query.shape[-2], key.shape[-2]

    def sums(tensor: Tensor, heads: int, tile: int, width: int | None) -> Tensor:
        if boundaries is None:
            rows = _round_up(tensor.shape[1], tile)
            shape = (tensor.shape[0], heads, rows * (width or 1))
        else:
            rows = _round_up(tensor.shape[0] + (boundaries.shape[0] - 1) * tile, tile)
            shape = (heads, rows * (width or 1))
        return query.new_empty(shape, dtype=torch.float32)

    of_rows = [sums(query, heads, query_tile, None) for _ in range(2)]
    of_query = sums(query, heads, query_tile, head)
    if key_heads != heads:
        of_keys = [sums(tensor, key_heads, key_tile, head) for tensor in (key, value)]
    else:
        of_keys = [query.new_empty(0, dtype=torch.float32) for _ in range(2)]
    return *of_rows, of_query, *of_keys


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _rounded_head(size: int) -> int:
    """Return the head size that the kernel is compiled for (`round_up_headdim`)."""
    return next(most for most in (64, 96, 128, 192, 256) if size <= most)


def _backward_tiles(head: int, *, masked: bool) -> tuple[int, int]:
    """Return rows of the query and of the key that a thread block takes on Hopper."""
    if head <= 64:
        return 128, 128
    if head <= 96:
        return 64, 128
    if head <= 128:
        return (64 if masked else 80), 128
    return 64, (96 if head <= 192 else 80)

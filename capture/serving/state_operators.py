"""Operators of layers with a state of constant size per sequence, as engines' kernels compute them.

Engines run Triton kernels of flash-linear-attention (fla), mamba_ssm and causal_conv1d here, or
copies of them. transformers computes the same by many small operators where these packages are not
installed, which no engine does. So a layer calls one operator of this file for a convolution, a
scan or a state update:

- without a device, the operator is recorded with its operands, and its work follows from them
  (`annotate/op_costs/state_operators.py`);
- on a GPU, it runs the package's kernels, and refuses to run without the package;
- on a CPU, it runs transformers' reference.

Shapes: n sequences, t tokens of each, h heads and g groups or key heads.
"""

import contextlib
import importlib
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from onerank.capture.fake_tensors import on_gpu
from onerank.ir.errors import CaptureError

# torch's dispatcher has no types.
_torch: Any = torch

_library = _torch.library.Library("onerank_serving", "FRAGMENT")

CHUNK = 64
"""Tokens of a chunk of fla's delta rules. Equal to annotate's `DELTA_CHUNK`, which capture may not
import."""

_LIGHTNING_BLOCK = 256  # tokens, of vLLM's kernels

_REFERENCES = "transformers.models"


def _package(module: str, name: str, distribution: str) -> Any:
    """Return a function of a package with kernels.

    Raises:
        CaptureError: it is not installed, or another version.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise CaptureError(
            f"layers with a state per sequence run {name} of {distribution} on a GPU, as engines "
            f"do, and {module} is not installed ({error})\n"
            f"  pip install {distribution}, or leave the GPU out: --device none",
            code="serve-kernels-missing",
        ) from error


def _reference(module: str, name: str) -> Any:
    """Return transformers' reference of an operator."""
    return getattr(importlib.import_module(f"{_REFERENCES}.{module}"), name)


def define_operator(
    schema: str, fake: Callable[..., Any], cpu: Callable[..., Any], gpu: Any
) -> None:
    """Register an operator with its results on shapes, on a CPU and on a GPU."""
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, cpu, "CPU")
    _library.impl(name, gpu, "CUDA")
    _torch.library.register_fake(f"onerank_serving::{name}", fake, lib=_library)


# Convolutions over the last tokens: rows [n, t, channels], weight [channels, width], and the state
# [n, channels, width - 1], the inputs of the tokens before.


def _convolve(
    rows: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, silu: bool
) -> Tensor:
    inputs = torch.cat((state, rows.transpose(1, 2).to(state.dtype)), dim=-1)
    state.copy_(inputs[..., inputs.shape[-1] - state.shape[-1] :])
    # In float32: torch's CPU convolution of single channels takes a hundred times as long in bf16.
    filters = weight.float().unsqueeze(1)
    offset = None if bias is None else bias.float()
    out = functional.conv1d(inputs.float(), filters, offset, groups=weight.shape[0])
    out = (functional.silu(out) if silu else out).to(weight.dtype)
    return out.transpose(1, 2).contiguous()


def convolution_state(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the state of convolutions with random inputs, [n, channels, width - 1].

    fla's kernels take a tensor with one more input, which they do not read. On a GPU the state is a
    part of such a tensor, so that no step copies it.
    """
    n, channels, inputs = shape
    if not on_gpu(like):
        return like.new_empty(shape).normal_()
    return like.new_empty(n, channels, inputs + 1).normal_()[..., 1:]


def _state_of_fla(state: Tensor) -> Tensor:
    """Return the tensor that the state of `convolution_state` is a part of, on a GPU."""
    n, channels, inputs = state.shape
    return state.as_strided((n, channels, inputs + 1), state.stride(), state.storage_offset() - 1)


# Triton tunes a convolution of fla at its first call, and keeps the configuration for all calls
# with as many channels. With few rows it would measure the host that launches the kernel, and often
# choose blocks of few channels, with which many sequences take up to eight times as long. Engines'
# kernels have one configuration. With 8,192 channels, these rows take 100 us or more.
_TUNED_ROWS = {"prefill": (1, 8192), "decode": (2048,)}
_tuned: set[tuple[str, torch.Size]] = set()


def _tune(
    part: str, convolve: Callable[[Tensor, Tensor], Tensor], rows: Tensor, weight: Tensor
) -> None:
    """Let Triton tune a convolution, unless it has done so.

    Args:
        part: whether the convolution is that of prefills or of decodes.
        convolve: computes it from rows and a state.
        rows: the rows of a call, which give the data type and the device.
        weight: its filters, [channels, width].
    """
    if (part, weight.shape) in _tuned:
        return
    _tuned.add((part, weight.shape))
    shape = _TUNED_ROWS[part]
    channels, width = weight.shape
    state = convolution_state(rows, (shape[0], channels, width - 1))
    convolve(rows.new_zeros(*shape, channels), state)


def _convolve_fla(
    rows: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, silu: bool
) -> Tensor:
    kernel = _package("fla.modules.causal_conv1d", "causal_conv1d", "flash-linear-attention")

    def convolve(rows: Tensor, state: Tensor) -> Tensor:
        # Engines' kernel writes the new state over the old one. fla's writes it elsewhere, in as
        # long a time; copying it back would take another.
        out, _ = kernel(
            rows,
            weight,
            bias,
            initial_state=_state_of_fla(state),
            output_final_state=True,
            activation="silu" if silu else None,
        )
        return out

    _tune("prefill", convolve, rows, weight)
    return convolve(rows, state)


def _convolve_update(
    rows: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, silu: bool
) -> Tensor:
    return _convolve(rows.unsqueeze(1), weight, bias, state, silu)[:, 0].contiguous()


def _convolve_update_fla(
    rows: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, silu: bool
) -> Tensor:
    update = _package("fla.modules.causal_conv1d", "causal_conv1d_update", "flash-linear-attention")

    def convolve(rows: Tensor, state: Tensor) -> Tensor:
        out, _ = update(
            rows,
            _state_of_fla(state),
            weight=weight,
            bias=bias,
            activation="silu" if silu else None,
        )
        return out

    _tune("decode", convolve, rows, weight)
    return convolve(rows, state)


def _like_rows(rows: Tensor, *_: Any) -> Tensor:
    return rows.new_empty(rows.shape)


_CONVOLUTION = "(Tensor rows, Tensor weight, Tensor? bias, Tensor(a!) state, bool silu) -> Tensor"
define_operator("causal_conv1d" + _CONVOLUTION, _like_rows, _convolve, _convolve_fla)
define_operator(
    "causal_conv1d_update" + _CONVOLUTION, _like_rows, _convolve_update, _convolve_update_fla
)


def delta_scratch_bytes(q: Tensor, v: Tensor) -> int:
    """Return the bytes that fla's chunked kernels allocate, besides results.

    For each head and token: two vectors of the WY representation and the corrected value; the
    chunk's inverse; the decay's sum in float32. For each chunk its first state. For each key head
    and token: normalised queries and keys.

    Args:
        q: [n, t, g, k].
        v: [n, t, h, v].
    """
    (n, t, h, value), (groups, width) = v.shape, q.shape[2:]
    chunks = -(-t // CHUNK)
    of_heads = t * (width + 2 * value + CHUNK) + chunks * width * value
    of_keys = 2 * t * groups * width
    return n * ((h * of_heads + of_keys) * v.element_size() + 4 * h * t)


def mamba_scratch_bytes(x: Tensor, b: Tensor, chunk: int) -> int:
    """Return the bytes that mamba_ssm's chunked kernels allocate, besides results.

    In float32: dt and the sums of the decay for each head and token, a state for each chunk
    before and after the chunks before are added, and the scores of a chunk for each group.

    Args:
        x: [n, t, h, p].
        b: [n, t, g, s].
        chunk: tokens of a chunk.
    """
    (n, t, h, p), (groups, s) = x.shape, b.shape[2:]
    chunks = -(-t // chunk)
    return 4 * n * (2 * h * t + 2 * chunks * h * p * s + chunks * groups * chunk * chunk)


# The gated delta rule: q and k [n, t, g, k], v [n, t, h, v], beta [n, t, h], state [n, h, k, v].
# The decay, as a logarithm, is one number of a head [n, t, h], or one of each of its channels
# [n, t, h, k], as in Kimi Delta Attention (KDA).


def _delta(prefill: bool, gpu: bool, by_channel: bool) -> Any:
    if gpu:
        module, name = {
            (True, False): ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
            (False, False): ("fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule"),
            (True, True): ("fla.ops.kda", "chunk_kda"),
            (False, True): ("fla.ops.kda", "fused_recurrent_kda"),
        }[prefill, by_channel]
        return _package(module, name, "flash-linear-attention")
    module, name = {
        (True, False): ("qwen3_next.modeling_qwen3_next", "torch_chunk_gated_delta_rule"),
        (False, False): ("qwen3_next.modeling_qwen3_next", "torch_recurrent_gated_delta_rule"),
        (True, True): ("kimi_linear.modeling_kimi_linear", "chunk_kimi_delta_attention"),
        (False, True): ("kimi_linear.modeling_kimi_linear", "recurrent_kimi_delta_attention"),
    }[prefill, by_channel]
    return _reference(module, name)


def _delta_rule(prefill: bool, gpu: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(  # noqa: PLR0917
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        out, after = _delta(prefill, gpu, g.dim() == 4)(
            q,
            k,
            v,
            g=g,
            beta=beta,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return out, after

    return run


def _chunked(gpu: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    run = _delta_rule(True, gpu)

    def scan(*operands: Tensor) -> tuple[Tensor, Tensor]:
        out, after = run(*operands)
        return out, after.float()

    return scan


@contextlib.contextmanager
def _written_over(state: Tensor) -> Generator[None]:
    """Let fla's kernels of decodes write the new state over the old one, as engines' copies do.

    fla allocates the new state in float32, whatever the old one is in. For the states of
    OLMo-Hybrid in bf16, that is 6 bytes for each element in place of 4, and the update takes 1.8
    times as long. A program of the kernel reads its part of the old state before it writes the same
    part of the new one, and converts to the type of what it writes.
    """

    def new_empty(like: Tensor, *size: Any, **options: Any) -> Tensor:
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        return state if tuple(shape) == state.shape else allocate(like, *size, **options)

    allocate = _torch.Tensor.new_empty
    _torch.Tensor.new_empty = new_empty
    try:
        yield
    finally:
        del _torch.Tensor.new_empty


def _recurrent(gpu: bool) -> Callable[..., Tensor]:
    run = _delta_rule(False, gpu)

    def update(  # noqa: PLR0917
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
    ) -> Tensor:
        with _written_over(state) if gpu else contextlib.nullcontext():
            out, after = run(q, k, v, g, beta, state)
        if not gpu:
            state.copy_(after)
        return out

    return update


def _fake_delta_rule(  # noqa: PLR0917
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), state.new_empty(state.shape, dtype=torch.float32)


def _fake_recurrent(  # noqa: PLR0917
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> Tensor:
    return v.new_empty(v.shape)


_DELTA = "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor"
define_operator(
    f"chunk_gated_delta_rule{_DELTA} state) -> (Tensor, Tensor)",
    _fake_delta_rule,
    _chunked(False),
    _chunked(True),
)
define_operator(
    f"recurrent_gated_delta_rule{_DELTA}(a!) state) -> Tensor",
    _fake_recurrent,
    _recurrent(False),
    _recurrent(True),
)


# Lightning attention (arXiv:2401.04658), linear attention with a decay of each head: q and k
# [n, t, h, d], v [n, t, h, e], slopes [h], state [n, h, d, e].


def _lightning(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, state: Tensor) -> Tensor:
    decay = torch.exp(-slopes.float())[:, None, None]
    current, outputs = state.float(), list[Tensor]()
    for token in range(q.shape[1]):
        added = k[:, token, :, :, None].float() * v[:, token, :, None].float()
        current = decay * current + added
        outputs.append((q[:, token, :, None].float() @ current)[:, :, 0])
    state.copy_(current)
    return torch.stack(outputs, dim=1).to(v.dtype)


def _lightning_fla(name: str, *, in_place: bool) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, state: Tensor) -> Tensor:
        attend = _package("fla.ops.simple_gla", name, "flash-linear-attention")
        # As for a convolution, the state that a prefill returns is not copied back.
        with _written_over(state) if in_place else contextlib.nullcontext():
            out, _ = attend(
                q,
                k,
                v,
                g_gamma=-slopes.float(),
                scale=1.0,
                initial_state=state,
                output_final_state=True,
            )
        return out

    return run


def _like_values(_: Tensor, __: Tensor, v: Tensor, *___: Any) -> Tensor:
    return v.new_empty(v.shape)


_LIGHTNING = "(Tensor q, Tensor k, Tensor v, Tensor slopes, Tensor(a!) state) -> Tensor"
define_operator(
    f"lightning_attention{_LIGHTNING}",
    _like_values,
    _lightning,
    _lightning_fla("chunk_simple_gla", in_place=False),
)
define_operator(
    f"lightning_attention_update{_LIGHTNING}",
    _like_values,
    _lightning,
    _lightning_fla("fused_recurrent_simple_gla", in_place=True),
)


def lightning_scratch_bytes(v: Tensor, state: Tensor) -> int:
    """Return the bytes that vLLM's kernels of lightning attention allocate, besides results.

    In float32: a state for each block of 256 tokens, and all of them again with the last one.

    Args:
        v: [n, t, h, e].
        state: [n, h, d, e].
    """
    blocks = -(-v.shape[1] // _LIGHTNING_BLOCK)
    return 4 * state.numel() * (2 * blocks + 1)


# Mamba 2 (arXiv:2405.21060): x [n, t, h, p], dt [n, t, h], a, d and dt_bias [h], b and c
# [n, t, g, s], state [n, h, p, s].
# Mamba 1 (arXiv:2312.00752): x, dt and the gate z [n, t, channels], a [channels, s], d and dt_bias
# [channels], b and c [n, t, s], state [n, channels, s].
# An update has no axis t.


def _mamba_scan(gpu: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(  # noqa: PLR0917
        x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None,
        dt_bias: Tensor | None, state: Tensor, chunk: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if gpu:
            scan = _package(
                "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined", "mamba-ssm"
            )
        else:
            scan = _reference("bamba.modeling_bamba", "mamba2_chunk_scan")
        out, after = scan(
            x,
            dt,
            a,
            b,
            c,
            chunk_size=chunk,
            D=d,
            dt_bias=dt_bias,
            initial_states=state,
            dt_softplus=True,
            return_final_states=True,
        )
        return out.to(x.dtype), after.float()

    return run


def _selective_scan(  # noqa: PLR0917
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None,
    dt_bias: Tensor | None, state: Tensor, z: Tensor | None,
) -> Tensor:  # fmt: skip
    # Not transformers' reference, which starts with a state of zeros.
    step = functional.softplus(dt.float() if dt_bias is None else dt.float() + dt_bias.float())
    current, outputs = state.float(), list[Tensor]()
    for token in range(x.shape[1]):
        of_token = step[:, token, :, None]
        added = of_token * b[:, token, None].float() * x[:, token, :, None].float()
        current = torch.exp(of_token * a) * current + added
        outputs.append((current * c[:, token, None].float()).sum(-1))
    state.copy_(current)
    out = torch.stack(outputs, dim=1)
    out = out if d is None else out + x.float() * d.float()
    return (out if z is None else out * functional.silu(z.float())).to(x.dtype)


def _selective_scan_gpu(  # noqa: PLR0917
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None,
    dt_bias: Tensor | None, state: Tensor, z: Tensor | None,
) -> Tensor:  # fmt: skip
    scan = _package("mamba_ssm.ops.selective_scan_interface", "selective_scan_fn", "mamba-ssm")
    u, delta, keys, queries = (tensor.transpose(1, 2) for tensor in (x, dt, b, c))
    # The package's kernel starts with a state of zeros and returns the last one. That of engines
    # reads the state of the sequence and writes it in place: as many bytes.
    out, after = scan(
        u,
        delta,
        a,
        keys,
        queries,
        D=None if d is None else d.float(),
        z=None if z is None else z.transpose(1, 2),
        delta_bias=None if dt_bias is None else dt_bias.float(),
        delta_softplus=True,
        return_last_state=True,
    )
    state.copy_(after)
    return out.transpose(1, 2)


def _state_update(gpu: bool) -> Callable[..., Tensor]:
    def run(  # noqa: PLR0917
        x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None,
        dt_bias: Tensor | None, state: Tensor, z: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if gpu:
            update = _package(
                "mamba_ssm.ops.triton.selective_state_update", "selective_state_update", "mamba-ssm"
            )
        else:
            module, name = {
                1: ("bamba.modeling_bamba", "mamba2_selective_state_update"),
                2: ("jamba.modeling_jamba", "mamba_selective_state_update"),
            }[a.dim()]
            update = _reference(module, name)
        if a.dim() == 2:
            return update(state, x, dt, a, b, c, d, z=z, dt_bias=dt_bias, dt_softplus=True)
        size, width = x.shape[-1], b.shape[-1]
        # One number of a head is a view of stride 0: the kernel reads it once.
        return update(
            state,
            x,
            dt[..., None].expand(-1, -1, size),
            a[:, None, None].expand(-1, size, width),
            b,
            c,
            None if d is None else d[:, None].expand(-1, size),
            z=None,
            dt_bias=None if dt_bias is None else dt_bias[:, None].expand(-1, size),
            dt_softplus=True,
        )

    return run


def _fake_mamba_scan(x: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    state: Tensor = others[6]
    return x.new_empty(x.shape), state.new_empty(state.shape, dtype=torch.float32)


_MAMBA = "(Tensor x, Tensor dt, Tensor a, Tensor b, Tensor c, Tensor? d, Tensor? dt_bias, "
define_operator(
    f"mamba_chunk_scan{_MAMBA}Tensor state, int chunk) -> (Tensor, Tensor)",
    _fake_mamba_scan,
    _mamba_scan(False),
    _mamba_scan(True),
)
define_operator(
    f"selective_state_update{_MAMBA}Tensor(a!) state, Tensor? z=None) -> Tensor",
    _like_rows,
    _state_update(False),
    _state_update(True),
)
define_operator(
    f"selective_scan{_MAMBA}Tensor(a!) state, Tensor? z) -> Tensor",
    _like_rows,
    _selective_scan,
    _selective_scan_gpu,
)


# The gated linear recurrence of Griffin (arXiv:2402.19427), state = decay * state + x: x and decay
# [n, t, channels], state [n, channels] in float32.


def _recurrence(x: Tensor, decay: Tensor, state: Tensor) -> Tensor:
    current, outputs = state.float(), list[Tensor]()
    for token in range(x.shape[1]):
        current = decay[:, token].float() * current + x[:, token].float()
        outputs.append(current)
    state.copy_(current)
    return torch.stack(outputs, dim=1).to(x.dtype)


def _recurrence_fla(x: Tensor, decay: Tensor, state: Tensor) -> Tensor:
    scan = _package("fla.ops.hgrn", "fused_recurrent_hgrn", "flash-linear-attention")
    # As for a convolution, the state that fla returns is not copied back. fla's scan takes the
    # logarithm, from which the layer has computed the decay.
    out, _ = scan(x, decay.log(), initial_state=state, output_final_state=True)
    return out


define_operator(
    "linear_recurrence(Tensor x, Tensor decay, Tensor(a!) state) -> Tensor",
    _like_rows,
    _recurrence,
    _recurrence_fla,
)

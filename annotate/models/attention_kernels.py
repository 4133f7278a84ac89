"""Kernels of fused attention: the captured one, the one that the target runs, and its factors.

A kernel's name shows its family. Libraries pick another family on another architecture: PyTorch
runs FlashAttention-2 on Ampere and Ada, cuDNN on Hopper and Blackwell; FlashAttention-3 exists for
Hopper only. `attention_time` predicts the kernel that is written for the architecture: such kernels
reach about the same share of the geometric mean of the sustained and the peak GEMM rate, 0.73
(A100), 0.68 (H100), 0.70 (H200) and 0.74 (L40S) in the benchmark set of `coefficients.toml` at 2
TFLOP and more.

A kernel of an older generation has a factor on that time, which was measured or published. cuDNN's
kernel is written for the architecture that it runs on: 0.53 to 0.58 of the peak on an H200, where
FlashAttention-3 reaches 0.56. On a B200, 0.88 of cuDNN's published rates is predicted. Where cuDNN
was not measured, it is assumed to reach the same share of the peak as the measured kernel.

On AMD GPUs PyTorch runs AOTriton's kernels; Composable Kernel's and AITER's assembly kernels come
with libraries. The time model was fitted to none of them, and all are slower than it predicts.
Their factors are published times over predicted times (`attention_published.py` in
`benchmarks/predictions/` and its TOML file, with sources).
"""

import re
from dataclasses import dataclass
from functools import cache

import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.attention_time import (
    AttentionTerms,
    decode_terms,
    has_few_queries,
)
from onerank.annotate.models.coefficients import Coefficients, Decode
from onerank.annotate.models.flash2_decode import (
    FLASH2_DECODE,
    FLASH2_PREFILL,
    WaveTerms,
    divides_keys,
    flash2_decode_terms,
    flash2_prefill_terms,
)
from onerank.annotate.models.flash2_prefill import is_scheduled
from onerank.annotate.models.flash_mla import flash_mla_terms, runs_flash_mla
from onerank.ir.arrays import F64, Mask
from onerank.ir.errors import AnnotateError

CHOICES = (
    *("usual", "fused", "flash2", "flash3", "cudnn", "aotriton", "ck", "aiter", "same", "eager"),
)
"""Choices of the attention kernel on the target.

"usual": the kernel that libraries run there. "same": the captured one. "eager": separate kernels
instead of a fused one (see `unfuse`). "fused": eager attention becomes the kernel that PyTorch runs
there (see `fuse`). A kernel's name: that kernel, for fused and eager attention.
"""
FUSED = frozenset(CHOICES) - {"usual", "same", "eager"}
"""Choices with which eager attention becomes a fused kernel."""

# (family, pattern of kernel names); the first match wins. Helpers that only move data match the
# first pattern and belong to no family.
_NAMES = (
    # First, because helpers of FlashAttention-2 also
    # match its pattern: `flash_bwd_dot_do_o_kernel`.
    ("", r"dot_?do_?o|convert_?[dq]|clear_d|combine|preprocess|postprocess|reduce_head|shuffle"),
    ("flash3", r"flashattn(fwd|bwd)sm90"),
    ("cudnn", r"cudnn.*(sdpa|flash_[fb]prop|fmha)"),
    ("flash2", r"flash_(fwd|bwd)\w*kernel"),
    ("aotriton", r"^(attn_fwd|bwd_kernel_(dk_dv|dq|fuse)|attn_bwd)"),
    ("ck", r"ck_tile.*fmha(fwd|bwd|batchprefill)"),
    ("aiter", r"fmha_(fwd|bwd)_hd\d"),
)

# architecture -> families that libraries run on it; the first replaces any other family.
# A captured kernel of a listed family stays: users of
# Hopper choose between FlashAttention-3 and cuDNN.
_USUAL = {
    "ampere": ("flash2",),
    "ada": ("flash2",),
    "hopper": ("flash3", "cudnn"),
    "blackwell": ("cudnn",),
    **dict.fromkeys(("cdna2", "cdna3", "cdna4"), ("aotriton", "ck", "aiter")),
}
# architecture -> family of `scaled_dot_product_attention`, if it is not the first in `_USUAL`.
_BY_TORCH = {"hopper": "cudnn"}
_SUPPORTED = {
    "flash2": ("ampere", "ada", "hopper", "blackwell"),
    "flash3": ("hopper",),
    "cudnn": ("ampere", "ada", "hopper", "blackwell"),
    "aotriton": ("cdna2", "cdna3", "cdna4"),
    "ck": ("cdna2", "cdna3", "cdna4"),
    "aiter": ("cdna3", "cdna4"),
}
# Families whose code is for one architecture. `_SUPPORTED` is narrower: it lists what a user may
# request, without architectures on which a family was not measured, such as those of V100 and T4.
_ONLY_ON = {"flash3": "hopper"}


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Time of a kernel over that of the kernel written for its architecture.

    Attributes:
        forward: in the forward pass.
        backward: in the backward pass.
        source: where the figures are from.
    """

    forward: float
    backward: float
    source: str


_NATIVE = Slowdown(1.0, 1.0, "the architecture's own")
_MI300X = "published of an MI300X (causal, 1024 to 16384 tokens, heads of 64 and 128)"
_MI355X = "published of an MI355X (2048 to 16384 tokens, heads of 64 and 128, backward of 128)"
_SLOWDOWNS = {
    ("flash2", "ampere"): _NATIVE,
    ("flash2", "ada"): _NATIVE,
    ("flash3", "hopper"): _NATIVE,
    ("cudnn", "hopper"): _NATIVE,
    ("cudnn", "blackwell"): _NATIVE,
    ("flash2", "hopper"): Slowdown(
        1.73,
        1.69,
        "measured on an H200, torch 2.11 and CUDA 13: times cuDNN's, geometric mean of 8 causal "
        "shapes (head size 64: 1.57 and 1.62, 128: 1.91 and 1.75; forward, backward)",
    ),
    ("flash2", "blackwell"): Slowdown(
        2.02, 2.90, "published of a B200 (not causal, 512 to 16384 tokens, heads of 64)"
    ),
    ("aotriton", "cdna2"): Slowdown(
        2.61, 5.46, f"forward {_MI300X}, backward {_MI355X}; neither measured on this architecture"
    ),
    ("aotriton", "cdna3"): Slowdown(2.61, 5.46, f"forward {_MI300X}; backward {_MI355X}"),
    ("aotriton", "cdna4"): Slowdown(2.17, 5.46, _MI355X),
    ("ck", "cdna4"): Slowdown(1.66, 2.85, _MI355X),
    ("aiter", "cdna3"): Slowdown(1.90, 1.32, f"forward {_MI300X}; backward {_MI355X}"),
    ("aiter", "cdna4"): Slowdown(1.60, 1.32, _MI355X),
}


# (family, architecture) -> decoding by the kernels of torch's operators, fitted to 99 calls on one
# H100: time per call of a replayed CUDA graph. These times are 5.0% off, and 5.8% for a pair of
# (heads, key heads) that the fit leaves out (benchmarks/results/2026-11-26-decode-h100.txt). The
# floor is that of the fit, 1.574, without the gap of these graphs, 0.26.
_DECODE = {("cudnn", "hopper"): Decode(1.314, 1305.0, 369.7, 1.189, 1.389, copy_floors=1.0)}

# torch runs the memory-efficient kernel where the others do not apply: in fp32, with a mask, or for
# values of another width. No request names it, so no table but that of `attention_factors` has it.
_OPERATORS = (
    ("flash2", "_flash_attention_"),
    ("flash3", "flash_attn_3::"),
    ("cudnn", "_cudnn_attention_"),
    ("efficient", "_efficient_attention_"),
    ("flash_mla", "onerank_serving::latent_attention"),
    ("flex", "flex_attention"),
)


BY_SCHEDULE = frozenset({"flash2", "flash_mla"})
"""Families whose decodes are predicted by the schedule of their thread blocks.

`named_decode_terms` has terms only on the architectures on which this schedule is known.
"""


def family_of_operator(op: str) -> str:
    """Return the family that an operator of a CUDA GPU runs; "" for any other operator.

    A capture without a device has such operators: it chooses them as torch does on the GPU.
    """
    name = op.removeprefix("aten::")
    return next((family for family, prefix in _OPERATORS if name.startswith(prefix)), "")


def named_decode_terms(family: str, gpu: Gpu, shapes: F64) -> AttentionTerms | WaveTerms | None:
    """Return the durations of decoding by the kernel that an operator names; None if not measured.

    Args:
        family: the kernel.
        gpu: the GPU.
        shapes: as for `attention_time.attention_terms`, float64[d, 10].
    """
    if family == "flash_mla":
        return flash_mla_terms(gpu, shapes) if runs_flash_mla(gpu, shapes).all() else None
    if family == "flash2" and gpu.architecture in FLASH2_DECODE:
        return flash2_decode_terms(gpu, shapes, FLASH2_DECODE[gpu.architecture])
    coefficients = _DECODE.get((family, gpu.architecture))
    return None if coefficients is None else decode_terms(gpu, shapes, coefficients)


def divided_prefills(family: str, gpu: Gpu, shapes: F64) -> Mask:
    """Return which calls are prefills whose keys the kernel divides, bool[d].

    False where `divided_prefill_terms` has no coefficients. Arguments as for `named_decode_terms`.
    """
    if family != "flash2" or gpu.architecture not in FLASH2_PREFILL:
        return np.zeros(len(shapes), dtype=bool)
    _, _, _, rows, _, _, _, _, backward, *_ = shapes.T
    return (rows > 1) & (backward == 0) & divides_keys(gpu, shapes)


def scheduled_forwards(family: str, gpu: Gpu, shapes: F64) -> Mask:
    """Return which calls `flash2_prefill` predicts by the schedule of their tiles, bool[d].

    Arguments as for `named_decode_terms`.
    """
    if family != "flash2":
        return np.zeros(len(shapes), dtype=bool)
    return is_scheduled(gpu, shapes) & ~has_few_queries(shapes) & ~divides_keys(gpu, shapes)


def divided_prefill_terms(gpu: Gpu, shapes: F64) -> WaveTerms:
    """Return the terms of the time of calls that are `divided_prefills`."""
    return flash2_prefill_terms(gpu, shapes, FLASH2_PREFILL[gpu.architecture])


def _usual(gpu: Gpu) -> str:
    """Return the family that libraries run on a GPU; "" if unknown."""
    return _USUAL.get(gpu.architecture, ("",))[0]


def has_figure(gpu: Gpu, c: Coefficients) -> bool:
    """Return whether the time of the kernel that libraries run on a GPU has a figure.

    FlashAttention is fitted on several architectures. Another kernel has a figure where it was
    measured: with the coefficients that leave Blackwell out, none of Blackwell's has.
    """
    usual = _usual(gpu)
    slowdown = slowdown_of(usual, gpu)
    if slowdown is _NATIVE and not usual.startswith("flash"):
        return gpu.architecture in c.attention_floor
    return slowdown is not None


def is_known_by_shape(gpu: Gpu) -> bool:
    """Return whether the kernel that libraries run on a GPU was measured on its architecture."""
    return slowdown_of(_usual(gpu), gpu) is _NATIVE


@dataclass(frozen=True, slots=True)
class Resolution:
    """The replacement of one attention kernel family on the target.

    Attributes:
        ran: the measured family.
        runs: the predicted family.
        forward: factor on the time above the floor, on top of the cost model.
        backward: the same of the backward pass.
        reason: why, with the source of the factor.
        slower: time of the measured family's forward over that of its architecture's usual family.
    """

    ran: str
    runs: str
    forward: float
    backward: float
    reason: str
    slower: float = 1.0

    def forward_with(self, share: float) -> float:
        """Return the forward factor if the model already carried over only `share` of `slower`."""
        return self.forward * self.slower ** (1 - share)


UNRESOLVED = Resolution("", "", 1.0, 1.0, "no attention kernel known here")


@cache
def family_of(name: str) -> str:
    """Return the family of a kernel by its name, one of `_SUPPORTED`; "" if unknown."""
    lowered = name.lower()
    return next((family for family, pattern in _NAMES if re.search(pattern, lowered)), "")


def slowdown_of(family: str, gpu: Gpu) -> Slowdown | None:
    """Return the slowdown of a family on a GPU's architecture; None if unknown."""
    return _SLOWDOWNS.get((family, gpu.architecture))


def runs_on(family: str, gpu: Gpu) -> bool:
    """Return whether a GPU can run a family of kernels; also true of families without figures."""
    return _ONLY_ON.get(family, gpu.architecture) == gpu.architecture


def resolve(ran: str, source: Gpu, target: Gpu, requested: str = "usual") -> Resolution:
    """Return the kernel that replaces `ran` of `source` on `target`.

    Raises:
        AnnotateError: the requested kernel is unknown or does not run on the target.
    """
    if requested not in CHOICES:
        raise AnnotateError(
            f'unknown attention kernel "{requested}"; choose one of {", ".join(CHOICES)}',
            code="attention-kernel-unknown",
        )
    here, there = source.architecture, target.architecture
    if requested == "same":
        return Resolution(
            ran, ran, 1.0, 1.0, "as requested: the part of the peak that was measured"
        )
    if requested in ("usual", "eager"):
        usual = _USUAL.get(there, (ran,))
        runs = ran if here == there or ran in usual else usual[0]
    else:
        _check_supported(requested, target, "same")
        runs = requested
    # H100 to H200: the same architecture runs the same kernel, whatever its slowdown.
    if (runs, there) == (ran, here):
        return Resolution(ran, runs, 1.0, 1.0, "the same kernel")
    before, after = _SLOWDOWNS.get((ran, here)), _SLOWDOWNS.get((runs, there))
    if before is None or after is None:
        lacking = f"{ran} on {here}" if before is None else f"{runs} on {there}"
        why = f"no figure for {lacking}: the part of the peak that was measured"
        return Resolution(ran, runs, 1.0, 1.0, why)
    sources = dict.fromkeys(
        slowdown.source for slowdown in (before, after) if slowdown is not _NATIVE
    )
    why = "; ".join(sources) or "each reaches the part of the peak usual for its architecture"
    forward, backward = after.forward / before.forward, after.backward / before.backward
    return Resolution(ran, runs, forward, backward, why, before.forward)


def resolve_unmeasured(target: Gpu, requested: str) -> Resolution:
    """Return the requested or usual kernel of unmeasured attention on `target`.

    Raises:
        AnnotateError: it does not run on the target, its figure there is not known, or "same" was
            requested.
    """
    if requested in ("usual", "eager", "fused"):
        runs = _usual(target)
        runs = _BY_TORCH.get(target.architecture, runs) if requested == "fused" else runs
        usual = _SLOWDOWNS.get((runs, target.architecture), _NATIVE)
        return Resolution("", runs, usual.forward, usual.backward, usual.source)
    if requested == "same":
        raise AnnotateError(
            "the trace was captured on a CPU and has no attention kernel to keep; omit `--kernel`, "
            "or name a kernel",
            code="attention-kernel-cpu",
        )
    _check_supported(requested, target)
    slowdown = _SLOWDOWNS.get((requested, target.architecture))
    if slowdown is None:
        raise AnnotateError(
            f"{requested} has no measured slowdown on {target.architecture}; omit `--kernel`, or "
            "name another kernel",
            code="attention-kernel-unmeasured",
        )
    return Resolution("", requested, slowdown.forward, slowdown.backward, slowdown.source)


def _check_supported(requested: str, target: Gpu, *alternatives: str) -> None:
    """Refuse a kernel that does not run on the target's architecture.

    Raises:
        AnnotateError: it does not; the message lists the kernels that do, and `alternatives`.
    """
    there = target.architecture
    if there not in _SUPPORTED[requested]:
        names = [family for family, places in _SUPPORTED.items() if there in places]
        names += alternatives
        advice = f"choose {', '.join(names)}" if names else "omit it"
        raise AnnotateError(
            f"{requested} does not run on {target.name} ({there}); {advice}",
            code="attention-kernel-unsupported",
        )

"""Identify the captured attention kernel and the kernel that the target would run, and their rates.

A kernel's name shows its family. Libraries pick another family on another architecture: PyTorch
runs FlashAttention-2 on Ampere and Ada, cuDNN on Hopper and Blackwell; FlashAttention-3 exists for
Hopper only. Kernels written for a generation reach about the same share of the geometric mean of
the sustained and the peak GEMM rate: 0.73 (A100), 0.68 (H100), 0.70 (H200) and 0.74 (L40S) in the
campaign of `coefficients.toml` at 2 TFLOP and more. The learned model uses one share for all.

Kernels of an older generation need separate figures. cuDNN's kernel belongs to its generation:
0.53 to 0.58 of the peak on an H200, where FlashAttention-3 reaches 0.56; on a B200, 0.88 of its
published rates is predicted. Where cuDNN has no figure, its share of the peak is assumed equal to
the measured one.

On AMD GPUs PyTorch runs AOTriton's kernels; Composable Kernel's and AITER's assembly kernels come
with libraries. The model was fitted to none of them and all are slower than predicted: their
figures are published times over the predicted times (`benchmarks/attention_published.py` and its
TOML file, with sources).
"""

import re
from dataclasses import dataclass
from functools import cache

from onerank.annotate.gpus.gpu import Gpu
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

_NAMES = (
    ("", r"dot_?do_?o|convert_?[dq]|clear_d|combine|preprocess|postprocess|reduce_head|shuffle"),
    ("flash3", r"flashattn(fwd|bwd)sm90"),
    ("cudnn", r"cudnn.*(sdpa|flash_[fb]prop|fmha)"),
    ("flash2", r"flash_(fwd|bwd)\w*kernel"),
    ("aotriton", r"^(attn_fwd|bwd_kernel_(dk_dv|dq|fuse)|attn_bwd)"),
    ("ck", r"ck_tile.*fmha(fwd|bwd|batchprefill)"),
    ("aiter", r"fmha_(fwd|bwd)_hd\d"),
)
"""(family, pattern of kernel names); the first match wins.

Helpers that only move data match the first pattern and belong to no family.
"""

_USUAL = {
    "ampere": ("flash2",),
    "ada": ("flash2",),
    "hopper": ("flash3", "cudnn"),
    "blackwell": ("cudnn",),
    **dict.fromkeys(("cdna2", "cdna3", "cdna4"), ("aotriton", "ck", "aiter")),
}
"""architecture -> families that libraries run on it; the first replaces any other family."""
_BY_TORCH = {"hopper": "cudnn"}
"""architecture -> family of `scaled_dot_product_attention`, if it is not the first in `_USUAL`."""
_SUPPORTED = {
    "flash2": ("ampere", "ada", "hopper", "blackwell"),
    "flash3": ("hopper",),
    "cudnn": ("ampere", "ada", "hopper", "blackwell"),
    "aotriton": ("cdna2", "cdna3", "cdna4"),
    "ck": ("cdna2", "cdna3", "cdna4"),
    "aiter": ("cdna3", "cdna4"),
}


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
_SLOWNESS = {
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
    return _SLOWNESS.get((family, gpu.architecture))


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
    before, after = _SLOWNESS.get((ran, here)), _SLOWNESS.get((runs, there))
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
        runs = _USUAL.get(target.architecture, ("",))[0]
        runs = _BY_TORCH.get(target.architecture, runs) if requested == "fused" else runs
        usual = _SLOWNESS.get((runs, target.architecture), _NATIVE)
        return Resolution("", runs, usual.forward, usual.backward, usual.source)
    if requested == "same":
        raise AnnotateError(
            "the trace was captured on a CPU and has no attention kernel to keep; omit `--kernel`, "
            "or name a kernel",
            code="attention-kernel-cpu",
        )
    _check_supported(requested, target)
    slowness = _SLOWNESS.get((requested, target.architecture))
    if slowness is None:
        raise AnnotateError(
            f"{requested} has no measured slowdown on {target.architecture}; omit `--kernel`, or "
            "name another kernel",
            code="attention-kernel-unmeasured",
        )
    return Resolution("", requested, slowness.forward, slowness.backward, slowness.source)


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

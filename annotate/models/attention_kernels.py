"""Identify the captured attention kernel and the kernel that the target would run, and their rates.

A kernel's name shows its family. Libraries pick another family on another architecture: PyTorch
runs FlashAttention-2 on Ampere and Ada, cuDNN on Hopper and Blackwell; FlashAttention-3 exists for
Hopper only. Kernels written for a generation reach about the same share of the geometric mean of
the sustained and the peak GEMM rate: 0.73 (A100), 0.68 (H100), 0.70 (H200) and 0.74 (L40S) in the
campaign of `coefficients.toml` at 2 TFLOP and more. The learned model uses one share for all.

Kernels of an older generation need figures of their own. cuDNN's kernel belongs to its generation:
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
"""With "eager" no fused kernel: what the target would run is taken apart, see `unfused`. With
"fused" what ran without one has the kernel that PyTorch runs on the target, see `fused`; with a
name that one, as what ran with another has."""
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
"""First match wins; helpers that only move data are no family's."""

_USUAL = {
    "ampere": ("flash2",),
    "ada": ("flash2",),
    "hopper": ("flash3", "cudnn"),
    "blackwell": ("cudnn",),
    **dict.fromkeys(("cdna2", "cdna3", "cdna4"), ("aotriton", "ck", "aiter")),
}
"""What libraries run on an architecture; who comes with another one gets the first."""
_BY_TORCH = {"hopper": "cudnn"}
"""What `scaled_dot_product_attention` runs where that is not the first of them."""
_RUN = {
    "flash2": ("ampere", "ada", "hopper", "blackwell"),
    "flash3": ("hopper",),
    "cudnn": ("ampere", "ada", "hopper", "blackwell"),
    "aotriton": ("cdna2", "cdna3", "cdna4"),
    "ck": ("cdna2", "cdna3", "cdna4"),
    "aiter": ("cdna3", "cdna4"),
}


@dataclass(frozen=True, slots=True)
class Slowness:
    """How many times as long a kernel takes as its architecture's own.

    Attributes:
        forward: of the forward pass.
        backward: of the backward pass.
        source: where the figures are from.
    """

    forward: float
    backward: float
    source: str


_OWN = Slowness(1.0, 1.0, "the architecture's own")
_MI300X = "published of an MI300X (causal, 1024 to 16384 tokens, heads of 64 and 128)"
_MI355X = "published of an MI355X (2048 to 16384 tokens, heads of 64 and 128, backward of 128)"
_SLOWNESS = {
    ("flash2", "ampere"): _OWN,
    ("flash2", "ada"): _OWN,
    ("flash3", "hopper"): _OWN,
    ("cudnn", "hopper"): _OWN,
    ("cudnn", "blackwell"): _OWN,
    ("flash2", "hopper"): Slowness(
        1.73,
        1.69,
        "measured on an H200, torch 2.11 and CUDA 13: times cuDNN's, geometric mean of 8 causal "
        "shapes (head size 64: 1.57 and 1.62, 128: 1.91 and 1.75; forward, backward)",
    ),
    ("flash2", "blackwell"): Slowness(
        2.02, 2.90, "published of a B200 (not causal, 512 to 16384 tokens, heads of 64)"
    ),
    ("aotriton", "cdna2"): Slowness(
        2.61, 5.46, f"forward {_MI300X}, backward {_MI355X}; neither measured on this architecture"
    ),
    ("aotriton", "cdna3"): Slowness(2.61, 5.46, f"forward {_MI300X}; backward {_MI355X}"),
    ("aotriton", "cdna4"): Slowness(2.17, 5.46, _MI355X),
    ("ck", "cdna4"): Slowness(1.66, 2.85, _MI355X),
    ("aiter", "cdna3"): Slowness(1.90, 1.32, f"forward {_MI300X}; backward {_MI355X}"),
    ("aiter", "cdna4"): Slowness(1.60, 1.32, _MI355X),
}


@dataclass(frozen=True, slots=True)
class Resolution:
    """How the kernels of one family change on the target.

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
        """Return the forward factor where only `share` of being slower was carried over."""
        return self.forward * self.slower ** (1 - share)


AS_IT_RAN = Resolution("", "", 1.0, 1.0, "no attention kernel known here")


@cache
def family_of(name: str) -> str:
    """Return the family of a kernel by its name, one of `_RUN`; "" if unknown."""
    lowered = name.lower()
    return next((family for family, pattern in _NAMES if re.search(pattern, lowered)), "")


def figure_of(family: str, gpu: Gpu) -> Slowness | None:
    """Return the figure of a kernel on a GPU's architecture; None where it has none."""
    return _SLOWNESS.get((family, gpu.architecture))


def resolve(ran: str, source: Gpu, target: Gpu, asked: str = "usual") -> Resolution:
    """Return the kernel that replaces `ran` of `source` on `target`.

    Raises:
        AnnotateError: the requested kernel is unknown or does not run on the target.
    """
    if asked not in CHOICES:
        raise AnnotateError(
            f'unknown attention kernel "{asked}"; known are {", ".join(CHOICES)}',
            code="attention-kernel-unknown",
        )
    here, there = source.architecture, target.architecture
    if asked == "same":
        return Resolution(ran, ran, 1.0, 1.0, "as asked: the part of the peak that was measured")
    if asked in ("usual", "eager"):
        usual = _USUAL.get(there, (ran,))
        runs = ran if here == there or ran in usual else usual[0]
    else:
        _check_runs(asked, target, "same")
        runs = asked
    if (runs, there) == (ran, here):
        return Resolution(ran, runs, 1.0, 1.0, "the same kernel")
    before, after = _SLOWNESS.get((ran, here)), _SLOWNESS.get((runs, there))
    if before is None or after is None:
        lacking = f"{ran} on {here}" if before is None else f"{runs} on {there}"
        why = f"no figure for {lacking}: the part of the peak that was measured"
        return Resolution(ran, runs, 1.0, 1.0, why)
    sources = dict.fromkeys(one.source for one in (before, after) if one is not _OWN)
    why = "; ".join(sources) or "each reaches the part of the peak usual for its architecture"
    forward, backward = after.forward / before.forward, after.backward / before.backward
    return Resolution(ran, runs, forward, backward, why, before.forward)


def resolve_alone(target: Gpu, asked: str) -> Resolution:
    """Return the effect of the requested or usual kernel on attention that was not measured.

    Raises:
        AnnotateError: it does not run on the target, its figure there is not known, or "same" was
            requested.
    """
    if asked in ("usual", "eager", "fused"):
        runs = _USUAL.get(target.architecture, ("",))[0]
        runs = _BY_TORCH.get(target.architecture, runs) if asked == "fused" else runs
        usual = _SLOWNESS.get((runs, target.architecture), _OWN)
        return Resolution("", runs, usual.forward, usual.backward, usual.source)
    if asked == "same":
        raise AnnotateError(
            "the trace was captured on a CPU, so no attention kernel was measured that could stay "
            "the same; leave `--kernel` out, or name one",
            code="attention-kernel-cpu",
        )
    _check_runs(asked, target)
    slowness = _SLOWNESS.get((asked, target.architecture))
    if slowness is None:
        raise AnnotateError(
            f"how much slower {asked} is on {target.architecture} than the kernel that libraries "
            "run there was measured on no GPU; leave `--kernel` out",
            code="attention-kernel-unmeasured",
        )
    return Resolution("", asked, slowness.forward, slowness.backward, slowness.source)


def _check_runs(asked: str, target: Gpu, *beside: str) -> None:
    """Refuse a kernel that does not run on an architecture.

    Raises:
        AnnotateError: it does not.
    """
    there = target.architecture
    if there not in _RUN[asked]:
        able = [name for name, where in _RUN.items() if there in where]
        advice = f"choose {', '.join([*able, *beside])}" if able or beside else "leave it out"
        raise AnnotateError(
            f"{asked} does not run on {target.name} ({there}); {advice}",
            code="attention-kernel-unsupported",
        )

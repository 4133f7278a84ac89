"""The passes that a user requests."""

from dataclasses import dataclass

from onerank.annotate.models.attention_kernels import CHOICES
from onerank.annotate.passes.resize.resize import Resize
from onerank.annotate.passes.resize.size_change import parse_change
from onerank.ir.errors import AnnotateError


@dataclass(frozen=True, slots=True)
class PassOptions:
    """Requested changes; the default is the attention kernel that the target usually runs.

    Attributes:
        dtype: "fp8", "bf16", "fp16" or "tf32" for GEMMs in a wider dtype, and "fp16" for everything
            in bfloat16; None: as measured.
        attention: one of `attention_kernels.CHOICES`.
        sizes: another sequence length or micro-batch; None: as captured.
        fuse: one of `fuse_kernels.CHOICES`, kernels to fuse; None: as captured.
        overlap: one of `overlap.CHOICES`, the overlap of communication and compute.
        nvlink_active: whether links to peers stay active and draw power, as in the job.
    """

    dtype: str | None = None
    attention: str = "usual"
    sizes: Resize | None = None
    fuse: str | None = None
    overlap: str = "as-captured"
    nvlink_active: bool = False


NO_PASSES = PassOptions()


def parse_sizes(seq: str | None, batch: str | None) -> Resize | None:
    """Return the resize pass that `--seq` and `--micro-batch` request; None for neither.

    Raises:
        AnnotateError: a value is not a size.
    """
    if seq is None and batch is None:
        return None
    return Resize(
        parse_change("--seq", seq) if seq is not None else None,
        parse_change("--micro-batch", batch) if batch is not None else None,
    )


def parse_kernels(settings: tuple[str, ...]) -> str:
    """Return the attention kernel requested by settings of the form `attention=flash2`.

    Raises:
        AnnotateError: a setting has another form, or names an unknown kernel.
    """
    requested = "usual"
    for setting in settings:
        operator, _, kernel = setting.partition("=")
        if operator != "attention" or kernel not in CHOICES:
            raise AnnotateError(
                f'kernel "{setting}": expected attention=KERNEL with KERNEL one of '
                f"{', '.join(CHOICES)}",
                code="kernel-option-malformed",
            )
        requested = kernel
    return requested

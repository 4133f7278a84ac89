"""What a user would have other than it was measured."""

from dataclasses import dataclass

from onerank.annotate.attention_kernels import CHOICES
from onerank.annotate.resize import Resize
from onerank.ir.errors import AnnotateError


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What to change beside the GPU; by default the attention kernel the target usually runs.

    Attributes:
        dtype: "fp8", "bf16" or "tf32" for matrix products in a wider type; None: as measured.
        attention: one of `attention_kernels.CHOICES`.
        sizes: another sequence length or micro-batch; None: as captured.
    """

    dtype: str | None = None
    attention: str = "usual"
    sizes: Resize | None = None


AS_USUAL = WhatIf()


def parse_kernels(settings: tuple[str, ...]) -> str:
    """Return the attention kernel that settings of the form `attention=flash2` ask for.

    Raises:
        AnnotateError: one has another form, or names no kernel known here.
    """
    asked = "usual"
    for setting in settings:
        operator, _, kernel = setting.partition("=")
        if operator != "attention" or kernel not in CHOICES:
            raise AnnotateError(
                f'kernel "{setting}": expected attention=KERNEL with KERNEL one of '
                f"{', '.join(CHOICES)}"
            )
        asked = kernel
    return asked

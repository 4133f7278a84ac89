"""A call that a GPU ran without a pause, as microbenchmarks measure it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeldCall:
    """A call that ran without a pause for two seconds.

    Attributes:
        unit: of a product "bf16", "fp16", "tf32", "fp8" or "fp32"; "" for a call without products.
        sizes: m, n and k of a product.
        flops: of one call; without products its vector operations.
        nbytes: operands and result of one call, each once.
        median_ns: of one call.
        power_w: of the board; None where nothing tells.
        sm_clock_mhz: median over the second half; None where nothing tells.
    """

    unit: str
    sizes: tuple[int, ...]
    flops: int
    nbytes: int
    median_ns: int
    power_w: float | None
    sm_clock_mhz: int | None = None

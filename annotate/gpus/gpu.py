"""A GPU as cost models see it: the figures of its description, in plain units.

Peak rates are dense. Units that a GPU lacks and unknown figures are absent. Keys name their units:
`gb`, `mb` and `gb_per_s` are powers of ten (gigabytes, megabytes, gigabytes per second), and links
count one direction. `Gpu` returns bytes, seconds, nanoseconds, hertz and watts.

Two microbenchmarks of a minute calibrate a description: `measured_gemm_tflops` and
`measured_skinny_gb_per_s`. GEMMs in 16 bits use them directly (see `models.calibration`).
Everything else uses the geometric mean of `measured_gemm_tflops` and the sustained fraction: each
has an independent error of some 5%. `measured_copy_gb_per_s` replaces the memory's achievable
fraction.
"""

import math
from typing import Any

import msgspec

from onerank.annotate.gpus.spec_schema import (
    ESTIMATE_SOURCE,
    FRACTIONS,
    POWER_PARTS,
    SIXTEEN_BIT,
    TENSOR,
    VECTOR,
    Figure,
)
from onerank.display import Displayed

# Largest rate from the last-level cache to an SM (NVIDIA's whitepapers, Volta to Hopper).
_SM_BYTES_PER_CYCLE = 64

# Throughput of a large 16-bit GEMM, measured by `onerank bench describe`.
_GEMM = "measured_gemm_tflops"

_UNIT_OF_DTYPE = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "tfloat32": "tf32",
    "float32": "fp32",
    "float64": "fp64",
    **{f"float8_{kind}": "fp8" for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")},
    "float4_e2m1fn_x2": "fp4",
    "int8": "int8",
}


class Gpu(Displayed, msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A GPU. `figures` holds the description as written; the properties convert units.

    `registry.load_gpu` reads one from a TOML file; `registry.with_figures` changes its figures.

    Attributes:
        name: the name; with changed figures, these follow in parentheses.
        vendor: such as "NVIDIA".
        architecture: such as "hopper"; "other" for one without its own rules.
        sources: short name of a source -> where it is.
        figures: the description's figures by name, as in `onerank gpus --schema`.
        aliases: further names, as drivers and torch report them.
        compute_capability: CUDA's, such as "8.6"; "" if unknown or another vendor's GPU.
        before: the GPU as described, if `--override` (`with_figures`) changed some figures.
    """

    name: str
    vendor: str
    architecture: str
    sources: dict[str, str]
    figures: dict[str, Figure]
    aliases: tuple[str, ...] = ()
    compute_capability: str = ""
    # UNSET rather than None, so that JSON leaves the field out.
    before: "Gpu | msgspec.UnsetType" = msgspec.UNSET

    def displayed_fields(self) -> dict[str, Any]:
        """Return what a row of a table of GPUs shows; `figures` has the rest."""
        flops_per_s = self.peak_tensor_flops_per_s("bfloat16")
        return {
            "name": self.name,
            "architecture": self.architecture,
            "sm_count": self.sm_count,
            "memory_bytes": self.memory_bytes,
            "bandwidth_gb_per_s": self.peak_bandwidth_bytes_per_s / 1e9,
            "bf16_tflop_per_s": None if flops_per_s is None else flops_per_s / 1e12,
            "aliases": self.aliases,
        }

    @property
    def as_described(self) -> "Gpu":
        """The GPU with the figures of its description, whatever `with_figures` changed."""
        return self if isinstance(self.before, msgspec.UnsetType) else self.before

    @property
    def changed(self) -> dict[str, float]:
        """The figures that `with_figures` changed, and what they are now."""
        before = self.as_described.figures
        return {n: f.value for n, f in self.figures.items() if f != before.get(n)}

    @property
    def changes(self) -> str:
        """The overridden figures, as part of the GPU's name; "" if there are none."""
        return self.name.removeprefix(self.as_described.name).strip(" ()")

    @property
    def board(self) -> str:
        """The name without the list of overrides that `with_figures` appends."""
        return self.name.split(" (", 1)[0]

    @property
    def is_nvidia(self) -> bool:
        """Whether the vendor is NVIDIA: the models were fitted only to NVIDIA GPUs."""
        return self.vendor.casefold() == "nvidia"

    @property
    def capability(self) -> int | None:
        """The compute capability as NCCL counts it, 86 for 8.6; None if not known."""
        return int(self.compute_capability.replace(".", "")) if self.compute_capability else None

    @property
    def sm_count(self) -> int:
        return int(self._required("sm_count"))

    @property
    def clock_hz(self) -> float:
        return self._required("boost_clock_mhz") * 1e6

    @property
    def max_clock_hz(self) -> float:
        """The SM clock in kernels below the power limit."""
        return self._scaled("max_clock_mhz", 1e6) or self.clock_hz

    @property
    def memory_bytes(self) -> int:
        return round(self._required("memory_gb") * 1e9)

    @property
    def peak_bandwidth_bytes_per_s(self) -> float:
        return self._required("memory_bandwidth_gb_per_s") * 1e9

    @property
    def issue_rate_hz(self) -> float:
        """SMs x clock; a wide core counts as the SMs that its memory could feed."""
        # A TPU has one or two cores, each as wide as many SMs. Counted as SMs, they made an
        # embedding on a TPU v6e take 69 times as long as on an H200; as SMs that the memory feeds,
        # 6.4 times.
        fed_hz = self.peak_bandwidth_bytes_per_s / _SM_BYTES_PER_CYCLE
        return max(self.sm_count * self.max_clock_hz, fed_hz)

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """The memory bandwidth that a good kernel achieves."""
        measured = self._scaled("measured_copy_gb_per_s", 1e9)
        if measured is not None:
            return measured
        return self.peak_bandwidth_bytes_per_s * self._required("memory_achievable_fraction")

    @property
    def bandwidth_figures(self) -> tuple[str, ...]:
        """Names of the figures in `bandwidth_bytes_per_s`."""
        if "measured_copy_gb_per_s" in self.figures:
            return ("measured_copy_gb_per_s",)
        return ("memory_bandwidth_gb_per_s", "memory_achievable_fraction")

    @property
    def l2_bytes(self) -> int | None:
        size = self._scaled("l2_mb", 1e6)
        return None if size is None else round(size)

    @property
    def l2_partitions(self) -> int:
        """Partitions of the last-level cache that each cache data separately; 1 if not known."""
        return round(self._scaled("l2_partitions", 1) or 1)

    @property
    def calibrated(self) -> bool:
        """Whether both a large GEMM and the memory were measured on this GPU, as described."""
        compute = {"measured_gemm_tflops", "bf16_sustained_fraction", "fp16_sustained_fraction"}
        memory = {
            "measured_skinny_gb_per_s",
            "measured_copy_gb_per_s",
            "memory_achievable_fraction",
        }
        figures = self.as_described.figures
        measured = {n for n, figure in figures.items() if figure.confidence == "measured"}
        return bool(compute & measured and memory & measured)

    @property
    def by_datasheet(self) -> bool:
        """Whether the description has only datasheet figures, and estimates for the rest."""
        figures = self.as_described.figures.values()
        return not self.calibrated and any(f.source == ESTIMATE_SOURCE for f in figures)

    @property
    def launch_floor_ns(self) -> int:
        return round(self._required("launch_floor_ns"))

    @property
    def elementwise_floor_ns(self) -> float | None:
        """Time of the shortest elementwise kernels; None if not described."""
        return self._scaled("elementwise_floor_ns", 1)

    @property
    def tdp_w(self) -> float | None:
        return self._scaled("tdp_w", 1)

    @property
    def idle_w(self) -> float | None:
        return self._scaled("idle_w", 1)

    @property
    def nvlink_active_w(self) -> float | None:
        """Power of active NVLinks to peers, above idle power; None if not described."""
        return self._scaled("nvlink_active_w", 1)

    @property
    def power_coefficients(self) -> tuple[float, ...] | None:
        """`models.power.Coefficients` in order, if the description has all of them."""
        names = [f"power_{part}" for part in POWER_PARTS]
        values = [self.figures[name].value for name in names if name in self.figures]
        return tuple(values) if len(values) == len(names) else None

    @property
    def vector_flops_per_s(self) -> float | None:
        """The sustained float32 rate of the vector units; None if not described."""
        return self._sustained(VECTOR["fp32"])

    def peak_tensor_flops_per_s(self, dtype: str) -> float | None:
        """Return the dense peak of a GEMM in a torch dtype or "tfloat32"; None without units."""
        unit = _UNIT_OF_DTYPE.get(dtype, "")
        matrix = self._scaled(TENSOR.get(unit, ""), 1e12)
        return self._scaled(VECTOR.get(unit, ""), 1e12) if matrix is None else matrix

    def tensor_flops_per_s(self, dtype: str) -> float | None:
        """Return the sustained rate of GEMMs in a torch dtype or "tfloat32"; None without units.

        GEMMs in float32 and float64 run on the vector units of a GPU without such tensor cores.
        """
        unit = _UNIT_OF_DTYPE.get(dtype, "")
        matrix = self._sustained(TENSOR.get(unit, ""))
        return self._sustained(VECTOR.get(unit, "")) if matrix is None else matrix

    def rate_figures(self, dtype: str) -> tuple[str, ...]:
        """Return the names of the figures in `tensor_flops_per_s` of a dtype; () without units."""
        unit = _UNIT_OF_DTYPE.get(dtype, "")
        peaks = (TENSOR.get(unit, ""), VECTOR.get(unit, ""))
        return next(((p, *self._parts_of(p)) for p in peaks if p in self.figures), ())

    @property
    def vector_figures(self) -> tuple[str, ...]:
        """Names of the figures in `vector_flops_per_s`; () without a rate."""
        peak = VECTOR["fp32"]
        return (peak, *self._parts_of(peak)) if peak in self.figures else ()

    def _required(self, name: str) -> float:
        return self.figures[name].value

    def _scaled(self, name: str, scale: float) -> float | None:
        figure = self.figures.get(name)
        return None if figure is None else figure.value * scale

    def _sustained(self, peak: str) -> float | None:
        rate = self._scaled(peak, 1e12)
        if rate is None:
            return None
        known = [
            _measured_fraction(self.figures) if name == _GEMM else self.figures[name].value
            for name in self._parts_of(peak)
        ]
        return rate * math.prod(known) ** (1 / len(known))

    def _parts_of(self, peak: str) -> list[str]:
        """Return the figures whose geometric mean is the sustained fraction of a peak."""
        # The fraction of the data type comes first, then one for all tensor cores.
        specific, *_ = names = FRACTIONS[peak]
        known = [name for name in names if name in self.figures][:1]
        # The benchmark multiplies 16-bit operands. For another data type its figure counts only if
        # no fraction of that type is stated.
        if (
            _GEMM in self.figures
            and peak in TENSOR.values()
            and (peak in SIXTEEN_BIT or specific not in self.figures)
        ):
            known.append(_GEMM)
        return known


def _measured_fraction(figures: dict[str, Figure]) -> float:
    """Return measured over peak rate of a 16-bit GEMM; `check_gpu` ensures that a peak exists."""
    peak = next(figures[name].value for name in SIXTEEN_BIT if name in figures)
    return figures[_GEMM].value / peak

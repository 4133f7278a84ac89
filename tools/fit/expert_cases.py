"""Predictions of the experts of MoE layers, from the table of `public_sets`, and their fit.

The coefficients of a prediction are fitted without the target's die family.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import polars as pl

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.gpus.registry import load_gpu
from onerank.annotate.models.coefficients import Experts, GemmCoefficients, shipped
from onerank.annotate.models.cost_model import PredictFromDescription
from onerank.annotate.models.features import ComponentGemms, KernelFeatures
from onerank.annotate.models.tile_times import part_times
from onerank.annotate.op_costs.cost_record import PartKernel, Work
from onerank.annotate.op_costs.engine_operators import ExpertSizes, expert_parts
from onerank.ir.arrays import F64
from onerank.ir.errors import FormatError
from tools.fit.evaluate_fit import Case
from tools.fit.fit_tiles import fit_robustly
from tools.fit.measured_kernels import Products, family, of_products, read_table

EXPERTS_FILE = "experts.parquet"

LAYER = ["tokens", "hidden", "inner", "chosen", "experts"]
"""Columns with the sizes of a layer."""

# Part of a kernel's name in the table -> the library of its coefficients. TensorRT-LLM's generated
# kernels run on a B200 only, so no other GPU could judge a fit to them.
_LIBRARIES = {
    "trtllm_moe": "",
    "trtllmgen": "",
    "flashinfer_trtllm": "",
    "cutlass": "cutlass",
    "sglang_fused_moe_triton": "sglang",
    "vllm_fused_moe": "vllm",
    "vllm_unquantizedfusedmoe_triton": "vllm",
}

EXPERT_LIBRARIES = {
    "cutlass": PartKernel.CUTLASS_EXPERTS,
    "sglang": PartKernel.SGLANG_EXPERTS,
    "vllm": PartKernel.VLLM_EXPERTS,
}
"""Library with coefficients -> its kernel."""

# Datasets whose layers of Nemotron-H have no gate, as that model (squared ReLU). Earlier ones ran
# the same sizes with a gate: their times are those of first GEMMs of twice the columns.
_NEMOTRON = ((2688, 6, 128), (2048, 22, 512), (8192, 22, 512))  # hidden, chosen, experts
_NEMOTRON_WITHOUT_GATE = ("sglang 0.5.14", "vllm 0.24.0")

UNTUNED = "sglang_flashinfer_cutlass_moe"
"""FlashInfer's kernels on Hopper, measured without their tuner. No fit has them.

Every tile of 128 x 16 results takes 700 to 800 cycles for 64 elements along the inner size, as if
no load overlapped another (`untuned_steps`).
"""

_EVERY = 5  # the fit takes every fifth layer, which saves time

_START = Experts(other_ns=10_000.0, rate=0.8, epilogue=0.5)


@dataclass(frozen=True, slots=True)
class ExpertLayers:
    """The experts of MoE layers in bf16, by one kernel on one GPU.

    Attributes:
        gpu: the GPU.
        dataset: framework and version.
        kernel: name in the table.
        layers: d layers.
        times_ns: with routing, sorting, activation and sum, float64[d].
    """

    gpu: Gpu
    dataset: str
    kernel: str
    layers: list[ExpertSizes]
    times_ns: F64

    @property
    def library(self) -> str:
        """Whose coefficients the kernel has: one of `EXPERT_LIBRARIES`, or "", plain GEMMs'.

        Raises:
            FormatError: no library is known for the kernel.
        """
        for part, library in _LIBRARIES.items():
            if part in self.kernel:
                return library
        raise FormatError(
            f"{EXPERTS_FILE}: no library is known for kernel {self.kernel}; names contain "
            f"{', '.join(_LIBRARIES)}",
            code="fit-unknown-kernel",
        )

    def every(self, step: int) -> "ExpertLayers":
        """Return every `step`-th layer."""
        return replace(self, layers=self.layers[::step], times_ns=self.times_ns[::step])

    def features(self) -> KernelFeatures:
        """Return one operator per layer."""
        works = [Work(parts=expert_parts(sizes, self._kernel(sizes))) for sizes in self.layers]
        parts = ComponentGemms.of(works)
        # One GEMM with the FLOPs of both, for the fields of a product.
        plain = [[1, s.rows, s.first + s.inner, s.hidden, 2, 2] for s in self.layers]
        products = Products("bfloat16", np.array(plain, dtype=np.float64), {})
        kernels = of_products(products, self.times_ns)
        moved: F64 = np.bincount(parts.call, weights=parts.bytes + parts.also_moved).astype(float)
        return replace(kernels, gemm=0 * kernels.gemm, bytes=moved, parts=parts)

    def _kernel(self, sizes: ExpertSizes) -> PartKernel:
        kernel = EXPERT_LIBRARIES.get(self.library, PartKernel.LIBRARY)
        return kernel.for_few_tokens if sizes.tokens <= sizes.experts else kernel


def read_experts(folder: Path) -> list[ExpertLayers]:
    """Read `experts.parquet`, without layers that a cache serves.

    A row repeats one layer with the same routing. If the weights of its active experts fit into the
    last-level cache, only the first repetition reads them from memory.

    Raises:
        FormatError: the file is missing or lacks a column.
        TargetError: it has a GPU without a description.
    """
    columns = ["gpu", "dataset", "kernel", *LAYER, "time_us"]
    rows = read_table(folder / EXPERTS_FILE, columns)
    read: list[ExpertLayers] = []
    for (name, dataset, kernel), of_kernel in rows.sort(columns).group_by(
        "gpu", "dataset", "kernel", maintain_order=True
    ):
        gpu = load_gpu(str(name))
        table = of_kernel.group_by(LAYER).agg(pl.col("time_us").median()).sort(LAYER)
        layers = layers_of(table, str(dataset))
        cold = [
            at
            for at, s in enumerate(layers)
            if 2 * s.active * s.hidden * (s.first + s.inner) > (gpu.l2_bytes or 0)
        ]
        times_ns = table["time_us"].to_numpy().astype(np.float64)[cold] * 1000
        kept = [layers[at] for at in cold]
        read.append(ExpertLayers(gpu, str(dataset), str(kernel), kept, times_ns))
    return read


def layers_of(table: pl.DataFrame, dataset: str) -> list[ExpertSizes]:
    """Return the layers in the columns `LAYER` of a dataset's table."""
    layers: list[ExpertSizes] = []
    for tokens, hidden, inner, chosen, experts in table.select(LAYER).iter_rows():
        nemotron = (hidden, chosen, experts) in _NEMOTRON
        gated = not nemotron or dataset not in _NEMOTRON_WITHOUT_GATE
        first = 2 * inner if gated else inner
        layers.append(ExpertSizes(tokens, chosen, experts, hidden, first, inner))
    return layers


def untuned_steps(measured: ExpertLayers) -> F64:
    """Return the steps of 64 elements along k that an SM takes in tiles of 128 x 16, float64[d]."""
    steps: list[float] = []
    for sizes in measured.layers:
        tiles_high = -(-sizes.rows // sizes.active // 128)
        gemms = (sizes.first, sizes.hidden), (sizes.hidden, sizes.inner)
        of_gemms = sum(-(-n // 16) * -(-k // 64) for n, k in gemms)
        steps.append(sizes.active * tiles_high * of_gemms / measured.gpu.sm_count)
    return np.array(steps)


def fit_experts(measured: Sequence[ExpertLayers], gemm: GemmCoefficients) -> dict[str, Experts]:
    """Return library -> its coefficients, every die family with one weight.

    A library's own fit is shrunk toward the fit to all libraries, which counts as one die family
    more: its logarithms have the weight n / (n + 1) with n families. With the target's family left
    out this lowers the mean error over GPUs and libraries from 15.6 to 15.5%, and that of SGLang's
    kernel from 14.5 to 13.7% on an A100 and from 18.0 to 16.8% on an L40S.
    """
    of_all = _fit_libraries(measured, gemm)
    shrunk: dict[str, Experts] = {}
    for library in EXPERT_LIBRARIES:
        layers = [each for each in measured if each.library == library]
        own = len({family(each.gpu) for each in layers})
        x = (own * _fit_libraries(layers, gemm) + of_all) / (own + 1) if own else of_all
        shrunk[library] = Experts(*np.exp(x).tolist())
    return shrunk


def _fit_libraries(measured: Sequence[ExpertLayers], gemm: GemmCoefficients) -> F64:
    """Return the logarithms of one set of coefficients, those of `Experts`, float64[3]."""
    with_own = [each for each in measured if each.library and each.kernel != UNTUNED]
    chosen = [each.every(_EVERY) for each in with_own]
    families = [family(each.gpu) for each in chosen]
    kernels = [each.features() for each in chosen]

    def residuals(x: F64) -> F64:
        experts = Experts(*np.exp(x).tolist())
        c = msgspec.structs.replace(
            shipped(), gemm=gemm, experts=dict.fromkeys(EXPERT_LIBRARIES, experts)
        )
        parts: list[F64] = []
        for each, features, name in zip(chosen, kernels, families, strict=True):
            error = np.log(part_times(features, each.gpu, c) / each.times_ns)
            # Weights of families, and of datasets whatever their number of layers.
            parts.append((families.count(name) * len(error)) ** -0.5 * error)
        return np.sqrt(len(parts[0])) * np.concatenate(parts)

    return fit_robustly(residuals, np.log(msgspec.structs.astuple(_START)))


def expert_cases(
    measured: Sequence[ExpertLayers], by_shape: Callable[[str], PredictFromDescription]
) -> Iterator[Case]:
    """Yield the experts of MoE layers by their shapes, of the kernels that a fit has.

    Args:
        measured: the layers.
        by_shape: family that is left out -> the model of unmeasured kernels.
    """
    for each in measured:
        if not each.library or each.kernel == UNTUNED:
            continue
        predicted_ns, _ = by_shape(family(each.gpu))(each.features(), each.gpu)
        tokens = np.array([sizes.tokens for sizes in each.layers], dtype=np.float64)
        yield Case("experts_unmeasured", each.gpu, each.gpu, each.times_ns, predicted_ns, tokens)

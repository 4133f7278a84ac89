"""The power of kernels in public tables: what the sensor showed, and which operands were random.

The tables (ai-dynamo/aiconfigurator, vLLM 0.22.0) have the mean reading of NVML over each run. Two
facts separate the reading of a GEMM from its power:

- The sensor shows the mean of the last second, and a run of a GEMM takes about one second. Half of
  a reading is therefore the power of the run before it. Runs follow each other by falling m, n and
  k, so each n begins with the largest k after the smallest one: an H200 ran 8192 x 32 x 51,200 at
  134 TFLOP/s and 0.99 of its limit, and 8192 x 32 x 65,536 at 135 TFLOP/s and 0.73.
  `GemmRuns.readings` returns the readings that given powers cause.
- The program does not initialise the weights. Where the process gets new memory they are zeros, and
  GEMMs with zeros draw less power and run faster under the limit. An H200 ran
  32,768 x 65,536 x 51,200 at 818 TFLOP/s and 510 W; a run takes 9.7 s, so this is not the sensor.
  With random weights it takes 1.2 times as long. `gemm.parquet` has these times.

Experts and attention were measured on several GPUs at once, so the run before each row is unknown.
Attention was run again with a cache in 8 bits. Where that takes within 3% of the same time, the two
readings differ by 17% (H200) and 21% (B200) over whole prompts, and by 16% with one query (H200).
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from onerank.annotate.describe_gpu import Powers
from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.gpus.registry import load_gpu
from onerank.annotate.models.features import KernelFeatures
from onerank.annotate.models.power import utilization, utilization_of
from onerank.ir.arrays import F64, Mask
from onerank.ir.errors import TargetError
from tools.fit.attention_kernel_cases import ATTENTION_SIZES, forward_shapes
from tools.fit.expert_cases import LAYER, ExpertLayers, layers_of
from tools.fit.measured_kernels import GEMM_FILE, Attention, of_attention, read_table

EXPERTS_POWER_FILE, ATTENTION_POWER_FILE = "experts_power.parquet", "attention_power.parquet"

DECODE = "decode attention"
"""Name of attention of one query per sequence."""

LEAST_US = 200
"""Shortest GEMMs used: power samples of shorter runs include the idle time between runs.

A GEMM of m = n = k = 2048 draws 309 W in the table and 705 W when sustained for two seconds on the
same GPU; one of 4096 draws 692 W in both.
"""

FASTER = 1.1
"""Weights count as random unless random ones take more than this times the time.

Two datasets with random weights differ by 6 to 10% on one GPU.
"""

_SENSOR_S = 1.0  # the sensor shows the mean power of this time, and is read every tenth of it

# A run repeats six copies of a GEMM, for a second, or 0.3 s if all six take less than 0.1 ms: at
# least 6 times and at most 3000 times, after 6 repetitions without the sensor.
_COPIES, _FEWEST, _MOST, _WARM_UP = 6, 6, 3000, 6
_RUN_S, _SHORT_RUN_S, _SHORT_S = 1.0, 0.3, 1e-4


@dataclass(frozen=True, slots=True)
class GemmRuns:
    """All bf16 GEMMs of a GPU in the order in which they were measured.

    Attributes:
        powers: utilization, and reading as a share of the power limit.
        sizes: m, n and k, float64[d, 3].
        random_s: times with random weights, nan where `gemm.parquet` has none, float64[d].
    """

    powers: Powers
    sizes: F64
    random_s: F64

    @property
    def long(self) -> Mask:
        """Whether each takes `LEAST_US` or more, bool[d]."""
        return self.powers.duration_s >= LEAST_US * 1e-6

    @property
    def with_random_weights(self) -> Mask:
        """Whether each is as fast as with random weights, bool[d]."""
        return self.random_s <= FASTER * self.powers.duration_s

    def readings(self, shares: F64) -> F64:
        """Return the mean reading over each run if the GEMMs draw `shares`, float64[d]."""
        repetition_s = _COPIES * self.powers.duration_s
        aim_s = np.where(repetition_s < _SHORT_S, _SHORT_RUN_S, _RUN_S)
        times = np.clip(np.floor(aim_s / repetition_s) + 1, _FEWEST, _MOST)
        run_s = times * repetition_s
        ends = np.cumsum(_WARM_UP * repetition_s + run_s)
        moments = np.concatenate([[0.0], ends])
        energy = np.concatenate([[0.0], np.cumsum(shares * np.diff(moments))])
        readings = np.empty(len(shares))
        for at, (end, length) in enumerate(zip(ends, run_s, strict=True)):
            read_at = np.arange(end - length, end, _SENSOR_S / 10)
            before = np.interp(read_at - _SENSOR_S, moments, energy)
            readings[at] = ((np.interp(read_at, moments, energy) - before) / _SENSOR_S).mean()
        # Nothing is known of the time before the first run.
        return np.where(ends - run_s < _SENSOR_S, shares, readings)


def read_gemm_runs(path: Path) -> list[GemmRuns]:
    """Read the bf16 GEMMs of each GPU with their power.

    Args:
        path: the table; `gemm.parquet` in the same folder has the times with random weights.

    Raises:
        FormatError: one of the files is missing or lacks a column.
        TargetError: it has a GPU without a description, or one without power limit.
    """
    rows = read_table(path, ["gpu", "dtype", "m", "n", "k", "time_us", "power_w"])
    rows = rows.filter(pl.col("dtype").cast(pl.String) == "bfloat16")
    index = ["gpu", "m", "n", "k"]
    random = read_table(path.with_name(GEMM_FILE), [*index, "dtype", "time_us"])
    random = random.filter(pl.col("dtype").cast(pl.String) == "bfloat16")
    random = random.select(*index, pl.col("time_us").alias("random_us"))
    rows = rows.join(random, on=index, how="left")
    rows = rows.sort(["m", "n", "k"], descending=True)
    return [
        _runs(load_gpu(str(name)), of_gpu)
        for (name,), of_gpu in rows.group_by("gpu", maintain_order=True)
    ]


def _runs(gpu: Gpu, rows: pl.DataFrame) -> GemmRuns:
    rate = gpu.tensor_flops_per_s("bfloat16")
    if gpu.tdp_w is None or rate is None:
        raise TargetError(
            f"{gpu.name}: the test needs tdp_w and a bf16 rate", code="fit-gpu-incomplete"
        )
    names = ("m", "n", "k", "time_us", "power_w", "random_us")
    m, n, k, time, power, random = (rows[name].cast(pl.Float64).to_numpy() for name in names)
    moved = 2 * (m * k + k * n + m * n)
    use = utilization(time * 1e-6, 2 * m * n * k / rate, moved, np.zeros_like(time), gpu)
    powers = Powers(gpu, use, power / gpu.tdp_w, time * 1e-6, ("gemm",) * len(time))
    return GemmRuns(powers, np.stack([m, n, k], axis=1), random * 1e-6)


def read_expert_powers(path: Path) -> list[Powers]:
    """Read the power of experts from a table of `public_sets`, by GPU, dataset and kernel.

    Raises:
        FormatError: the file is missing or lacks a column, or an unknown kernel ran.
        TargetError: it has a GPU without a description, or one without power limit.
    """
    columns = ["gpu", "dataset", "kernel", *LAYER, "time_us"]
    rows = read_table(path, [*columns, "power_w"]).filter(pl.col("time_us") >= LEAST_US)
    read: list[Powers] = []
    for (name, dataset, kernel), table in rows.sort(columns).group_by(
        "gpu", "dataset", "kernel", maintain_order=True
    ):
        gpu = load_gpu(str(name))
        times_ns = table["time_us"].to_numpy().astype(np.float64) * 1000
        layers = layers_of(table, str(dataset))
        measured = ExpertLayers(gpu, str(dataset), str(kernel), layers, times_ns)
        read.append(_powers("experts", gpu, measured.features(), table))
    return read


def read_attention_powers(path: Path) -> list[Powers]:
    """Read the power of attention from a table of `public_sets`, by GPU and phase.

    Raises:
        FormatError: the file is missing or lacks a column.
        TargetError: it has a GPU without a description, or one without power limit.
    """
    columns = ["gpu", "phase", *ATTENTION_SIZES, "time_us", "power_w"]
    rows = read_table(path, columns).filter(pl.col("time_us") >= LEAST_US).sort("gpu", "phase")
    read: list[Powers] = []
    for (name, phase), table in rows.group_by("gpu", "phase", maintain_order=True):
        prefill = phase == "context"
        shapes = forward_shapes(table, causal=prefill)
        kernels = of_attention(Attention(shapes, {}), table["time_us"].to_numpy() * 1000)
        kind = "attention" if prefill else DECODE
        read.append(_powers(kind, load_gpu(str(name)), kernels, table))
    return read


def _powers(kind: str, gpu: Gpu, kernels: KernelFeatures, table: pl.DataFrame) -> Powers:
    if gpu.tdp_w is None:
        raise TargetError(f"{gpu.name}: the test needs tdp_w", code="fit-gpu-incomplete")
    seconds = table["time_us"].to_numpy().astype(np.float64) * 1e-6
    share = table["power_w"].to_numpy() / gpu.tdp_w
    return Powers(gpu, utilization_of(kernels, gpu), share, seconds, (kind,) * len(table))

"""Compare predicted attention rates with published rates: H100, H20, B200, MI300X, MI355X.

    python -m benchmarks.predictions.attention_published

Prints predicted and published TFLOP/s (sources: attention_published.toml), and the geometric mean
of predicted over published. `usual` predicts for the kernel that the model assumes (on Hopper
flash-attention 3 and cuDNN). `named` predicts for the measured kernel, if `attention_kernels` has a
slowdown for it. The published rates begin at 512 tokens.

The forward pass is fitted to none of these rates. The factor of the backward pass was chosen with
the H100's rates known. The slowdowns of AMD's kernels, and of flash-attention 2 on Blackwell, come
from these same rates.
"""

import math
import tomllib
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import parser_of, print_conditions
from onerank.annotate import load_gpu
from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.models.attention_kernels import slowdown_of
from onerank.annotate.models.features import kernels_of
from onerank.annotate.models.learned import predict_from_description
from onerank.annotate.op_costs.cost_record import AttentionShape, Work

RATES = Path(__file__).with_suffix(".toml")
Row = dict[str, Any]


def main() -> None:
    """Print the table."""
    parser_of(__doc__).parse_args()
    data = tomllib.loads(RATES.read_text(encoding="utf-8"))
    rows = [Row(zip(data["fields"], row, strict=True)) for row in data["rates"]]
    print_conditions()
    print("d: head size; c: causal; b: backward; usual, named: predicted over published")
    heads = f"{'gpu':8}{'kernel':10}{'d':>4}{'c':>2}{'b':>2}{'usual':>7}{'named':>7}"
    print(f"{heads}  tokens: usual/published")
    for row in rows:
        gpu = load_gpu(row["gpu"])
        works = [work(row, length) for length in row["lengths"]]
        usual_ns = predict_from_description(kernels_of(works, np.zeros(len(works))), gpu)[0]
        flops = [flops_of_call.flops for flops_of_call in works]
        usual = [
            flops_of_call / time / 1e3
            for flops_of_call, time in zip(flops, usual_ns.tolist(), strict=True)
        ]
        specific = [
            flops_of_call / time / 1e3
            for flops_of_call, time in zip(flops, slower(usual_ns, gpu, row), strict=True)
        ]
        columns = zip(row["lengths"], usual, row["tflops"], strict=True)
        print(
            f"{gpu.name[:7]:8}{row['kernel']:10}{row['head_size']:4}{row['causal']:2}"
            f"{row['backward']:2}{over(usual, row):7.2f}{over(specific, row):7.2f}  "
            + "  ".join(
                f"{length}: {predicted:.0f}/{published:g}"
                for length, predicted, published in columns
            )
        )


def work(row: Row, length: int) -> Work:
    """Return the work of one call with as many key heads as query heads."""
    batch = row["batch"] or row["tokens"] // length
    heads, size, back = row["heads"], row["head_size"], row["backward"]
    flops = 4 * batch * heads * length**2 * size * 5 // (2 if back else 5)
    tensor = 2 * batch * heads * length * size
    read, written = (5, 3) if back else (3, 1)
    shape = AttentionShape(
        batch, heads, heads, length, length, size, size, int(row["causal"]), int(back)
    )
    return Work(
        flops // (2 if row["causal"] else 1), read * tensor, written * tensor,
        matmul=True, dtype="bfloat16", attention=shape,
    )  # fmt: skip


def slower(usual_ns: np.ndarray, gpu: Gpu, row: Row) -> list[float]:
    """Return the times in ns with the measured kernel's slowdown, if it has one on the GPU."""
    figure = slowdown_of(row["kernel"], gpu)
    factor = 1.0 if figure is None else figure.backward if row["backward"] else figure.forward
    floor = gpu.launch_floor_ns
    return [floor + (time - floor) * factor for time in usual_ns.tolist()]


def over(predicted: list[float], row: Row) -> float:
    """Return the geometric mean of predicted over published rates."""
    logs = [math.log(a / b) for a, b in zip(predicted, row["tflops"], strict=True)]
    return math.exp(sum(logs) / len(logs))


if __name__ == "__main__":
    main()

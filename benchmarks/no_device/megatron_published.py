"""Predict Megatron-LM's published steps on A100s without a GPU.

    python -m benchmarks.no_device.megatron_published [CAPTURES]

CAPTURES keeps the captures of benchmarks/jobs/megatron_gpt.py for a second run. Published:
Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models,
arXiv:2205.05198, table 5: seconds of an iteration of 22B, 175B, 530B and 1T on 8, 64, 280 and 512
A100s of 80 GB, with full recomputation, and with sequence parallelism and selective recomputation.
Calculon's errors of the same eight: its own validation, 3.65% in the mean, 8.87% the worst.

Job: tensor parallelism of 8, pipelines of 1, 8, 35 and 64 stages with 1, 3, 3 and 1 chunks, a
micro-batch of 4, 1, 1 and 1 sequences of 2048, batches of 4, 64, 280 and 512, fp16, one replica;
table 3 of the paper and Calculon's validation files.

Nothing is fitted to the published steps. Assumed: 200 GB/s of bus bandwidth for collectives of 50
to 105 MB within a node, as nccl-tests reports for 8 A100s in vTrain's repository (trace/a100), and
25 GB/s for each GPU between nodes (HDR InfiniBand, one adapter for each GPU). The weight gradient's
fused accumulation in 32 bits counts as a plain product.
"""

import tempfile
from pathlib import Path

from benchmarks.harness import order_agreement, parser_of, print_conditions, version_of
from benchmarks.no_device.megatron_step import Job, Network, parts_of, step_ns

SELENE = Network(node_gb_per_s=200, nic_gb_per_s=25)
MODELS = {
    "22B": Job(6144, 64, 48, 2048, 4, 4, 8),
    "175B": Job(12288, 96, 96, 2048, 1, 64, 8, pp=8, chunks=3),
    "530B": Job(20480, 128, 105, 2048, 1, 280, 8, pp=35, chunks=3),
    "1T": Job(25600, 160, 128, 2048, 1, 512, 8, pp=64),
}
PUBLISHED_S = {
    "full": {"22B": 1.42, "175B": 18.13, "530B": 49.05, "1T": 94.42},
    "selective": {"22B": 1.10, "175B": 13.75, "530B": 37.83, "1T": 71.49},
}


def main() -> None:
    """Print published and predicted steps."""
    parser = parser_of(__doc__)
    parser.add_argument("captures", type=Path, nargs="?")
    folder = parser.parse_args().captures
    print_conditions(version_of("torch"))
    print((__doc__ or "").split("\n\n", 2)[2])
    print(f"{'':22}{'published':>10}{'predicted':>10}{'error':>8}{'80% interval':>18}"
          f"{'layer':>10}{'head':>9}{'optimizer':>11}")  # fmt: skip
    errors: list[float] = []
    held = 0
    steps: dict[str, list[tuple[float, float]]] = {name: [] for name in MODELS}
    with tempfile.TemporaryDirectory() as directory:
        captures = folder or Path(directory)
        captures.mkdir(exist_ok=True)
        for mode, published in PUBLISHED_S.items():
            for name, model in MODELS.items():
                selective = mode == "selective"
                job = Job(**{**vars(model), "recompute": mode, "sequence_parallel": selective})
                parts = parts_of(job, captures, SELENE)
                step = step_ns(job, parts, SELENE) / 1e9
                errors.append(step / published[name] - 1)
                steps[name].append((step, published[name]))
                low, high = step * parts.low, step * parts.high
                held += low <= published[name] <= high
                optimizer = parts.optimizer_ns_per_parameter * (
                    job.layers / job.pp * job.layer_parameters + job.vocabulary_parameters
                )
                print(f"{mode + ' ' + name:22}{published[name]:8.2f} s{step:8.2f} s"
                      f"{errors[-1]:+8.1%}{low:8.2f} to {high:5.2f} s{parts.layer_ns / 1e6:7.2f} ms"
                      f"{parts.head_ns / 1e6:6.2f} ms{optimizer / 1e6:8.2f} ms",
                      flush=True)  # fmt: skip
    worst = max(errors, key=abs)
    print(f"mean absolute error {sum(map(abs, errors)) / len(errors):.2%}, worst {worst:+.2%} "
          f"(Calculon: 3.65%, 8.87%); {held} of {len(errors)} in the interval")  # fmt: skip
    for name, pairs in steps.items():
        print(f"order of the two layouts of {name}: {order_agreement(pairs)}")


if __name__ == "__main__":
    main()

"""Hold captures without a device against torchtitan's published throughput and memory.

    python benchmarks/no_device_vs_torchtitan.py

Published: benchmarks/llama3_h100_202412_torchtitan.md of pytorch/torchtitan. Its bf16 rows are
Llama 3.1 8B under FSDP on 8 and 128 H100s, eager and compiled. The float8 rows, with all of 70B
and 405B, are not covered.

- The job is benchmarks/jobs/llama_fsdp2.py, which repeats torchtitan's choices; it is not
  torchtitan's own script.
- Time: `annotate --nvlink-active` for examples/gpus/torchtitan-h100.toml, then `onerank replay`
  with one bus bandwidth. Compiled rows add `--fuse norm` to the eager capture.
- Memory: the allocator's reserved memory, as torchtitan reports; simulated. Compiled rows have
  none, because `--fuse` leaves the memory of the eager step.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from harness import parser_of

HERE = Path(__file__).parent
JOB = HERE / "jobs" / "llama_fsdp2.py"
GPU = HERE.parent / "examples" / "gpus" / "torchtitan-h100.toml"
TOKENS = 2 * 8192

# An all-gather between two H200s reached 257 GB/s of NVLink's 450 (docs/how-to/measure-network.md).
REACHED = 257 / 450
NVLINK_GB_PER_S = 450
# Eight network interfaces of 400 Gb/s carry what a ring moves between two hosts.
HOST_GB_PER_S = 8 * 50


@dataclass(frozen=True)
class Published:
    name: str
    gpus: int
    compiled: bool
    tokens_per_s: int
    memory_gib: float


ROWS = (
    Published("8B, FSDP 8", 8, False, 5762, 82.4),
    Published("8B, FSDP 8, torch.compile", 8, True, 6667, 77.0),
    Published("8B, FSDP 128", 128, False, 5605, 67.0),
    Published("8B, FSDP 128, torch.compile", 128, True, 6514, 62.0),
)


def main() -> None:
    parser_of(__doc__).parse_args()
    print(f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores; torch {torch.__version__}")
    print((__doc__ or "").split("\n\n", 2)[2])
    for gpus in (8, 128):
        print(f"bus bandwidth assumed for {gpus} GPUs: {bus_bandwidth_gb_per_s(gpus):.0f} GB/s")
    print(f"\n{'':29s}{'tokens/s per GPU':^27s}{'reserved memory, GiB':^27s}")
    columns = f"{'published':>9s}{'predicted':>10s}{'error':>8s}"
    print(f"{'Llama 3.1':29s}{columns}{columns}", flush=True)
    speed_errors: list[float] = []
    memory_errors: list[float] = []
    with tempfile.TemporaryDirectory() as directory:
        for row in ROWS:
            trace = Path(directory) / f"{row.gpus}.et"
            if not trace.exists():
                capture(row.gpus, trace)
            tokens_per_s = TOKENS / step_s(trace, row)
            speed_errors.append(tokens_per_s / row.tokens_per_s - 1)
            line = (
                f"{row.name:29s}{row.tokens_per_s:9,}{tokens_per_s:10,.0f}{speed_errors[-1]:+8.1%}"
            )
            line += f"{row.memory_gib:9.1f}"
            if not row.compiled:
                memory_gib = reserved_gib(trace)
                memory_errors.append(memory_gib / row.memory_gib - 1)
                line += f"{memory_gib:10.1f}{memory_errors[-1]:+8.1%}"
            else:
                line += f"{'-':>10s}{'-':>8s}"
            print(line, flush=True)
    speed, memory = mean_absolute(speed_errors), mean_absolute(memory_errors)
    print(f"{'mean absolute error':48s}{speed:8.1%}{'':19s}{memory:8.1%}")


def bus_bandwidth_gb_per_s(gpus: int) -> float:
    return REACHED * (NVLINK_GB_PER_S if gpus <= 8 else min(NVLINK_GB_PER_S, HOST_GB_PER_S))


def capture(gpus: int, trace: Path) -> None:
    options = ("--torchrun", "--dp", str(gpus), "--device", "none", "--like", str(GPU))
    output_of("capture", "run", str(JOB), *options, "-o", str(trace))


def step_s(trace: Path, row: Published) -> float:
    """Return the predicted steady-state step of a row in seconds, communication included."""
    recosted = trace.with_suffix(".recosted.et")
    fused = ("--fuse", "norm") if row.compiled else ()
    target = ("--target", str(GPU), "--nvlink-active")
    output_of("annotate", *target, *fused, str(trace), "-o", str(recosted))
    bandwidth = ("--busbw-gb-s", f"{bus_bandwidth_gb_per_s(row.gpus):.1f}")
    step: dict[str, Any] = json.loads(output_of("replay", str(recosted), *bandwidth, "--json"))
    return step["steady_state"]["step_ns"] / 1e9


def reserved_gib(trace: Path) -> float:
    memory: dict[str, Any] = json.loads(output_of("memory", str(trace), "--json"))
    return memory["simulated_reserved_bytes"] / 2**30


def output_of(*command: str) -> str:
    """Run an onerank command and return what it prints; exit with its errors if it fails."""
    result = subprocess.run(
        [sys.executable, "-m", "onerank", *command], check=False, capture_output=True, text=True
    )
    if result.returncode:
        raise SystemExit(f"onerank {' '.join(command)}\n{result.stderr}")
    return result.stdout


def mean_absolute(errors: list[float]) -> float:
    return sum(map(abs, errors)) / len(errors)


if __name__ == "__main__":
    main()

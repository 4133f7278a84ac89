"""CPU time and memory of captures without a device, for models that no GPU holds.

    python -m benchmarks.no_device.no_device_scale [JOB ...]

Each job is captured by `onerank capture run --device none` in a separate process. Prints the
nodes of the trace, the CPU seconds of the process (user and system), its wall time and its largest
resident set.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import onerank
from benchmarks.harness import parser_of, print_conditions, version_of

SCRIPT = Path(__file__).parents[1] / "jobs" / "large_models.py"

JOBS = {
    "llama-70b, 20 layers": ((), ("llama-70b", "--layers", "20")),
    "llama-70b, 40 layers": ((), ("llama-70b", "--layers", "40")),
    "llama-70b, 80 layers": ((), ("llama-70b",)),
    "llama-405b, TP8 PP16, rank 0": (("--tp", "8", "--pp", "16"), ("llama-405b",)),
    "llama-405b, TP8 PP16, rank 56": (
        ("--tp", "8", "--pp", "16", "--rank", "56"),
        ("llama-405b",),
    ),
    "deepseek-v3, EP64 PP16, rank 448": (
        ("--ep", "64", "--dp", "64", "--pp", "16", "--rank", "448"),
        ("deepseek-v3", "--seq", "4096"),
    ),
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help="default: all")
    chosen = parser.parse_args().jobs or list(JOBS)
    print_conditions(version_of("torch"), version_of("transformers"))
    print(f"{'job':34s} {'nodes':>8s} {'CPU s':>7s} {'wall s':>7s} {'peak MB':>8s}")
    for job in chosen:
        options, arguments = JOBS[job]
        nodes, cpu_s, wall_s, peak_mb = captured(options, arguments)
        print(f"{job:34s} {nodes:8,} {cpu_s:7.1f} {wall_s:7.1f} {peak_mb:8,.0f}", flush=True)


def captured(
    options: tuple[str, ...], arguments: tuple[str, ...]
) -> tuple[int, float, float, float]:
    """Capture a job; return its nodes, CPU and wall seconds and largest resident set in MB."""
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "trace.et"
        command = [sys.executable, "-m", "onerank", "capture", "run", str(SCRIPT)]
        command += ["--device", "none", *options, "-o", str(output), "--", *arguments]
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        assert process.stderr is not None
        errors = process.stderr.read().decode(errors="replace")
        _, status, usage = os.wait4(process.pid, 0)
        wall_s = time.perf_counter() - began
        if status:
            raise SystemExit(f"{' '.join(command)}\n{errors}")
        nodes = len(onerank.read(output))
    return nodes, usage.ru_utime + usage.ru_stime, wall_s, usage.ru_maxrss * 1024 / 1e6


if __name__ == "__main__":
    main()

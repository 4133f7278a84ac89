"""Hold predictions without a device against data-parallel jobs, whose collectives overlap compute.

    python -m benchmarks.no_device.no_device_vs_jobs predict DIR
    torchrun --nproc-per-node 4 -m benchmarks.no_device.no_device_vs_jobs measure DIR JOB

The jobs are scripts of examples/. `predict` captures each without a device, re-costs it for an H100
with active links, and replays it on one node of four, with and without contention. An all-reduce
among four H100s reached 338 GB/s (results of 2026-11-26). It prints the steps next to those
measured in DIR.

`measure` runs a job on a host with four GPUs and writes DIR/JOB.RANK.json: the step by CUDA events
after each step of the optimizer (median of the 8th to the 24th), peak memory from the 5th step on,
and the kernels of one step under the profiler (name, start, duration, stream).
"""

import itertools
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import parser_of, print_conditions, version_of

EXAMPLES = Path(__file__).parents[2] / "examples"
JOBS = {
    "fsdp-mixed": "train_llama_fsdp.py --shape 8b --layers 10 --seq 4096 --batch 1 --mixed",
    "fsdp-bf16": "train_llama_fsdp.py --shape 8b --layers 12 --seq 4096 --batch 2",
    "fsdp-compiled": "train_llama_fsdp.py --shape 8b --layers 12 --seq 2048 --batch 2"
    " --mixed --recompute --compile",
    "ddp": "train_llama_ddp.py --shape 8b --layers 6 --seq 4096 --batch 2",
}
BUSBW_GB_PER_S = 338.0
FIRST, STEPS = 7, 26


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("action", choices=("predict", "measure"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("job", choices=JOBS, nargs="?", help="of measure")
    args = parser.parse_args()
    if args.action == "predict":
        predict(args.directory)
    elif args.job is None:
        parser.error("measure needs a job")
    else:
        measure(args.directory, args.job)


def predict(directory: Path) -> None:

    import onerank
    from onerank.annotate import load_gpu
    from onerank.ir.steady_state import steady_state_step
    from onerank.plan.cluster import Cluster, ClusterLink, network_of
    from onerank.plan.stage_times import with_network

    print_conditions(version_of("torch"))
    print(f"captured without a device; 4 x H100, {BUSBW_GB_PER_S} GB/s")
    print(f"{'ms':16s}{'predicted':>11s}{'no contention':>15s}{'measured':>11s}")
    link = ClusterLink(BUSBW_GB_PER_S)
    gpu = load_gpu("H100")
    network = network_of(Cluster(gpu.name, 1, 4, link, link, gpu.memory_bytes), gpu)
    for name, job in JOBS.items():
        path = directory / f"{name}.et"
        if not path.exists():
            script, *arguments = job.split()
            options = "--torchrun --device none --like H100 --dp 4".split()
            command = [sys.executable, "-m", "onerank", "capture", "run", script, *options]
            output = ["-o", str(path.resolve())]
            subprocess.run([*command, *output, "--", *arguments], cwd=EXAMPLES, check=True)
        graph = onerank.recost(path, "H100", nvlink_active=True)
        timed = with_network(graph, network, graph.job.world)
        steps = [
            steady_state_step(timed.graph, contention=contention)
            for contention in (timed.contention, None)
        ]
        predicted, alone = (step.step_ns / 1e6 if step else float("nan") for step in steps)
        measured = directory / f"{name}.0.json"
        text = f"{'-':>11s}"
        if measured.exists():
            real = json.loads(measured.read_text())["median_ms"]
            text = f"{real:11.1f}  {predicted / real - 1:+.1%}, {alone / real - 1:+.1%}"
        print(f"{name:16s}{predicted:11.1f}{alone:15.1f}{text}", flush=True)


def measure(directory: Path, name: str) -> None:
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from torch.profiler import ProfilerActivity, profile

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    profiler = profile(activities=[ProfilerActivity.CUDA])
    events: list[torch.cuda.Event] = []
    record: dict[str, Any] = {"job": JOBS[name], "torch": torch.__version__}
    record["gpu"] = torch.cuda.get_device_name()

    def after_step(*_: Any) -> None:
        step = len(events)
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        events.append(event)
        if step == 4:
            torch.cuda.reset_peak_memory_stats()
        elif step == STEPS - 2:
            torch.cuda.synchronize()
            record["peak_bytes"] = torch.cuda.max_memory_allocated()
            profiler.start()
        elif step == STEPS - 1:
            torch.cuda.synchronize()
            profiler.stop()
            times = [begin.elapsed_time(end) for begin, end in itertools.pairwise(events)]
            settled = times[FIRST : STEPS - 2]
            record["median_ms"] = statistics.median(settled)
            record["range_ms"] = [min(settled), max(settled)]
            record["kernels"] = kernels_of(profiler)
            (directory / f"{name}.{rank}.json").write_text(json.dumps(record))
            print(f"{name} rank {rank}: {record['median_ms']:.2f} ms", flush=True)
            # The script would go on training, and a normal exit waits for NCCL's threads.
            os._exit(0)

    register_optimizer_step_post_hook(after_step)
    script, *arguments = JOBS[name].split()
    sys.argv = [script, *arguments, "--steps", str(STEPS + 1)]
    sys.path.insert(0, str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")


def kernels_of(profiler: Any) -> list[tuple[str, float, float, int]]:
    """Return (name, start in us, duration in us, stream) of the GPU operations of a profile."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "trace.json"
        profiler.export_chrome_trace(str(path))
        rows = json.loads(path.read_text())["traceEvents"]
    return [
        (row["name"], row["ts"], row["dur"], row["args"]["stream"])
        for row in rows
        if row.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]


if __name__ == "__main__":
    main()

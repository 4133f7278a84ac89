"""Run the commands of rows of a plan, and compare what they print with the rows.

    python -m benchmarks.plans.plan_rows DIRECTORY [--row N]...

A plan computes a row from captures with 2 and 4 layers that many layouts share. The commands of the
row capture its stages themselves, `onerank replay --cluster` lays them out, and `onerank export
astra-sim` writes the workload. The model is a Llama of 16 layers on 2 nodes of 4 H100s.
"""

import json
import subprocess
import time
from pathlib import Path

from benchmarks.harness import parser_of, print_conditions, version_of
from onerank.plan.captures import plan_captures
from onerank.plan.config import read_config
from onerank.plan.evaluate import evaluate
from onerank.plan.layouts import Layout
from onerank.plan.run_captures import capture_stage

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_llama.py"
LAYERS = 16
CONFIG = f"""
[model]
script = "{SCRIPT}"
arguments = ["--shape", "8b", "--layers", "{LAYERS}", "--seq", "{{seq}}",
             "--batch", "{{micro_batch}}", "--accumulate", "{{micro_batches}}"]
[cluster]
gpu = "H100"
nodes = 2
gpus_per_node = 4
intra_node = {{ busbw_gb_per_s = 300, latency_us = 10 }}
inter_node = {{ busbw_gb_per_s = 45, latency_us = 25 }}
[job]
global_batch = 16
seq = 1024
"""


def layout(
    pp: int, dp: int, schedule: str, sharding: str, *, cp: int = 1, micro_batches: int | None = None
) -> Layout:
    tp, count = 8 // pp // dp // cp, micro_batches or 16 // dp
    return Layout(tp=tp, sp=tp > 1, cp=cp, pp=pp, schedule=schedule, dp=dp, sharding=sharding,
                  ep=1, micro_batch=16 // dp // count, micro_batches=count,
                  recompute="none", seq=1024)  # fmt: skip


LAYOUTS = (
    layout(1, 4, "1f1b", "fsdp"),
    layout(2, 2, "1f1b", "fsdp"),
    layout(2, 2, "interleaved:2", "zero1"),
    layout(2, 4, "zbv", "ddp"),
    layout(1, 4, "1f1b", "fsdp", cp=2),
    layout(1, 4, "1f1b", "zero2", micro_batches=2),
)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--row", type=int, action="append", help="its number; default: all")
    options = parser.parse_args()
    directory: Path = options.directory
    directory.mkdir(parents=True, exist_ok=True)
    config = directory / "plan.toml"
    config.write_text(CONFIG)
    job = read_config(config).job
    print_conditions(version_of("torch"))
    print((__doc__ or "").split("\n\n", 2)[2])
    columns = f"{'row':>10}{'commands':>10}{'error':>9}"
    print(f"{'':62}{'step, ms':^29}{'peak memory, GB':^29}\n{'':62}{columns}{columns}", flush=True)
    chosen = [LAYOUTS[number - 1] for number in options.row] if options.row else LAYOUTS
    for each in chosen:
        # Layouts whose shards are not derived are captured with their own number of replicas.
        for exact in (False, True):
            captures = {}
            for task in plan_captures(job, [each], LAYERS, exact=exact):
                captures[task.key] = capture_stage(*task.arguments)
            start = time.process_time()
            result = evaluate(captures, job, [each], LAYERS, exact)
            spent = time.process_time() - start
            if not result.underived:
                break
        if result.dropped:
            print(f"{each!s:62}{result.dropped[0].code}", flush=True)
            continue
        (row,) = result.outcomes
        replayed = run_commands(row.commands, directory)
        line = f"{each!s:62}"
        for predicted, done, unit in (
            (row.step_ns.value, replayed["step_ns"], 1e6),
            (row.peak_bytes.value, replayed["peak_bytes"], 1e9),
        ):
            line += f"{predicted / unit:10.3f}{done / unit:10.3f}{predicted / done - 1:+9.2%}"
        print(f"{line}  {len(captures)} captures, evaluated in {spent:.1f} s", flush=True)


def run_commands(commands: tuple[str, ...], directory: Path) -> dict[str, float]:
    """Run a row's commands; return what its replay printed as JSON."""
    replayed: dict[str, float] = {}
    for command in commands:
        is_replay = command.startswith("onerank replay")
        text = command.replace("CONFIG", "plan.toml") + (" --json" if is_replay else "")
        done = subprocess.run(
            ["bash", "-c", text], cwd=directory, check=False, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"{text}\n{done.stderr[-2000:]}")
        if is_replay:
            replayed = json.loads(done.stdout)
    return replayed


if __name__ == "__main__":
    main()

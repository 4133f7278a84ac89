"""Time a plan of Llama-3 70B on 512 H100s, and count its layouts and captures.

    python -m benchmarks.plans.plan_scale DIRECTORY [--tp N]... [--sharding NAME]... [--count]

Runs `onerank plan` on the configuration below with two worker processes. `--tp` and `--sharding`
limit it to these values; `--count` only counts.
Results are stored in DIRECTORY, so a second run with the same directory continues the first.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from benchmarks.harness import parser_of, print_conditions, version_of
from onerank.plan.captures import plan_captures
from onerank.plan.config import read_config
from onerank.plan.layouts import enumerate_layouts
from onerank.plan.tasks import Store

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192,
    "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip
GLOBAL_BATCH, SEQ = 1024, 8192
VARY: dict[str, list[int] | list[str]] = {
    "tp": [1, 2, 4, 8], "pp": [1, 2, 4, 8, 16],
    "schedule": ["1f1b", "interleaved:2", "gpipe", "zbv"], "sharding": ["fsdp", "zero1"],
    "micro_batch": [1, 2, 4, 8], "recompute": ["none", "full"],
}  # fmt: skip
CONFIG = f"""\
[model]
config = "config.json"
[cluster]
gpu = "H100"
nodes = 64
gpus_per_node = 8
intra_node = {{ busbw_gb_per_s = 370, latency_us = 10 }}
inter_node = {{ busbw_gb_per_s = 45, latency_us = 25 }}
[job]
global_batch = {GLOBAL_BATCH}
seq = {SEQ}
[vary]
"""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tp", type=int, action="append")
    parser.add_argument("--sharding", action="append")
    parser.add_argument("--count", action="store_true")
    options = parser.parse_args()
    vary = VARY | {name: getattr(options, name) for name in ("tp", "sharding")
                   if getattr(options, name)}  # fmt: skip
    lines = [f"{name} = {msgspec.json.encode(values).decode()}" for name, values in vary.items()]
    directory: Path = options.directory
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_bytes(msgspec.json.encode(MODEL))
    (directory / "plan.toml").write_text(CONFIG + "\n".join(lines))
    print_conditions(version_of("torch"))
    print("\n".join(lines))
    os.chdir(directory)  # paths of the configuration are relative to it
    job = read_config(Path("plan.toml")).job
    layouts, dropped = enumerate_layouts(
        job.choices, gpus=job.cluster.gpus, global_batch=job.global_batch
    )
    captures = plan_captures(job, layouts, int(str(MODEL["num_hidden_layers"])))
    steps = sum(task.amount for task in captures)
    print(f"{len(layouts)} layouts; {len(captures)} captures, of {steps} steps, if all fit; "
          f"{len(dropped)} dropped")  # fmt: skip
    if options.count:
        return
    start = time.monotonic()
    command = [sys.executable, "-m", "onerank", "plan", "plan.toml", "-o", "plan", "--workers", "2"]
    done = subprocess.run(command, check=False)
    print(
        f"exit {done.returncode}: {time.monotonic() - start:.0f} s, load {os.getloadavg()[0]:.0f}"
    )
    if done.returncode:
        return
    plan = msgspec.json.decode(Path("plan/plan.json").read_bytes())
    too_large = sum(each["code"] == "plan-too-large" for each in plan["dropped"])
    stored = Store(Path("plan/store"))
    tasks = plan_captures(job, layouts, plan["layers"], later=layouts)
    ran = sum(task.key in stored for task in tasks)
    print(
        f"{len(plan['fitting'])} fit, {len(plan['misfits'])} do not and rule out {too_large} more; "
        f"{ran} captures ran"
    )


if __name__ == "__main__":
    main()

"""Time a plan of Llama-3 70B on 512 H100s, and count its layouts and captures.

    python benchmarks/plan_scale.py DIRECTORY [--count]

Runs `onerank plan` on the configuration below with two worker processes. `--count` only counts.
Results are stored in DIRECTORY, so a second run with the same directory continues the first.
"""

import os
import resource
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from harness import parser_of

from onerank.plan.captures import plan_captures
from onerank.plan.config import read_config
from onerank.plan.layouts import enumerate_layouts

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
CONFIG = f"""
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
""" + "\n".join(f"{name} = {msgspec.json.encode(values).decode()}" for name, values in VARY.items())


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--count", action="store_true")
    options = parser.parse_args()
    directory: Path = options.directory
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_bytes(msgspec.json.encode(MODEL))
    (directory / "plan.toml").write_text(CONFIG)
    print(f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores, Python {sys.version.split()[0]}")
    job = read_config(directory / "plan.toml").job
    layouts, dropped = enumerate_layouts(
        job.choices, gpus=job.cluster.gpus, global_batch=job.global_batch
    )
    captures = plan_captures(job, layouts, int(str(MODEL["num_hidden_layers"])))
    print(f"{len(layouts)} layouts from {len(captures)} captures; {len(dropped)} dropped")
    if options.count:
        return
    start = time.monotonic()
    command = [sys.executable, "-m", "onerank", "plan", "plan.toml", "-o", "plan"]
    done = subprocess.run(command, cwd=directory, check=False)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"exit {done.returncode}: {time.monotonic() - start:.0f} s, "
          f"{used.ru_utime + used.ru_stime:.0f} s of CPU, {used.ru_maxrss / 1e6:.2f} GB at most "
          "in one process")  # fmt: skip


if __name__ == "__main__":
    main()

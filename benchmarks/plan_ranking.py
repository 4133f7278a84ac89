"""Rank layouts of vTrain's table by `onerank plan`, and compare the order with the published one.

    python benchmarks/plan_ranking.py DATA DIRECTORY --hidden 2048 --layers 24 --gpus 8 --batch 16

DATA holds megatron_a100_iterations.csv, see megatron_iterations.py. The options choose the rows of
one model on a number of GPUs with a global batch, which are alternatives. The planner trains a
GPT-2 of transformers in bf16 with DDP. vTrain's simulator computes the rows from profiles of
Megatron-DeepSpeed's GPT in fp16, under a profiler that slows the host. So the orders are comparable
and the times are not.
"""

import csv
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import torch
from harness import order_agreement, parser_of

AXES = ("tp", "dp", "pp", "micro_batch")

CONFIG = """\
[model]
config = "gpt.json"
[cluster]
gpu = "A100"
nodes = 1
gpus_per_node = {gpus}
intra_node = {{ busbw_gb_per_s = 200 }}
[job]
global_batch = {batch}
seq = {seq}
[vary]
sharding = "ddp"
sp = false
"""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("directory", type=Path)
    for name in ("hidden", "layers", "gpus", "batch"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    with (options.data / "megatron_a100_iterations.csv").open(encoding="utf-8") as file:
        every = [
            {name: float(value) for name, value in row.items()} for row in csv.DictReader(file)
        ]
    wanted = {"hidden": options.hidden, "layers": options.layers, "gpus": options.gpus,
              "global_batch": options.batch}  # fmt: skip
    rows = [row for row in every if all(row[name] == value for name, value in wanted.items())]
    if not rows:
        sys.exit(f"no row of the table has {wanted}")
    measured = {tuple(int(row[axis]) for axis in AXES): row["iteration_ms"] for row in rows}
    options.directory.mkdir(parents=True, exist_ok=True)
    write_plan(options.directory, rows)
    command = [sys.executable, "-m", "onerank", "plan", "plan.toml", "-o", "plan"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=options.directory)
    plan = msgspec.json.decode((options.directory / "plan/plan.json").read_bytes())
    predicted = {tuple(outcome["layout"][axis] for axis in AXES): outcome["step_ns"]["value"] / 1e6
                 for outcome in (*plan["fitting"], *plan["misfits"])}  # fmt: skip
    print(f"{datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}")
    common = len(measured.keys() & predicted.keys())
    print(f"hidden {options.hidden}, {options.layers} layers, {options.gpus} GPUs, batch "
          f"{options.batch}: {len(rows)} rows, {common} planned")  # fmt: skip
    print(f"{'tp':>4}{'dp':>4}{'pp':>4}{'micro-batch':>13}{'published, ms':>16}{'planned, ms':>14}")
    both = sorted(measured.keys() & predicted.keys(), key=lambda key: measured[key])
    for key in both:
        axes = "".join(f"{size:>4}" for size in key[:3])
        print(f"{axes}{key[3]:>13}{measured[key]:>16.1f}{predicted[key]:>14.1f}")
    print(order_agreement([(predicted[key], measured[key]) for key in both]))


def write_plan(directory: Path, rows: list[dict[str, float]]) -> None:
    """Write the model and the plan whose layouts contain the rows."""
    (first, *_) = rows
    hidden, heads, layers, seq, gpus, batch = (
        int(first[name]) for name in ("hidden", "heads", "layers", "seq", "gpus", "global_batch")
    )
    gpt = {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": hidden,
        "n_head": heads, "n_layer": layers, "n_positions": seq, "vocab_size": 51200,
        "tie_word_embeddings": False,
    }  # fmt: skip
    (directory / "gpt.json").write_bytes(msgspec.json.encode(gpt))
    varied = "".join(
        f"{axis} = {sorted({int(row[axis]) for row in rows})}\n"
        for axis in ("tp", "pp", "micro_batch")
    )
    text = CONFIG.format(gpus=gpus, batch=batch, seq=seq) + varied
    (directory / "plan.toml").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

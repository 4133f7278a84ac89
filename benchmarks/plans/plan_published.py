"""Rank published layouts by `onerank plan` itself: of Megatron-LM, and of torchtitan.

    python -m benchmarks.plans.plan_published DIRECTORY [--torchtitan CHECKOUT]

Megatron-LM: 22B, 175B, 530B and 1T on 8 to 512 A100s (megatron_published.py), each with full
recomputation, and with sequence parallelism and recomputed attention. The planner trains a GPT-2 of
transformers in bf16 with unfused attention: mask, scale, softmax and dropout of the scores are
separate kernels, which Megatron-LM fuses. So the orders are comparable and the times are
not. Links: 200 GB/s within a node, 25 GB/s for a GPU between nodes.

torchtitan: Llama 3.1 8B on 8 H100s (no_device_vs_torchtitan.py, table of December 2024): eager,
compiled, and compiled with float8. The plan runs its train.py, which shards itself. CHECKOUT is
torchtitan at 9dec370, and this interpreter has torchao at eab345c.

DIRECTORY keeps the results: the same command continues an interrupted run.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.harness import order_agreement, parser_of, print_conditions, version_of
from benchmarks.no_device.megatron_published import MODELS, PUBLISHED_S
from benchmarks.no_device.megatron_step import NODE, Job
from benchmarks.no_device.no_device_vs_torchtitan import (
    FLOAT8,
    H100,
    NVLINK_GB_PER_S,
    OLDER_TORCH,
    REACHED,
    ROWS,
    write_inputs,
)

MEGATRON = """\
[model]
config = "gpt.json"
[cluster]
gpu = "A100"
nodes = {nodes}
gpus_per_node = {node}
intra_node = {{ busbw_gb_per_s = 200 }}
inter_node = {{ busbw_gb_per_s = 25 }}
[job]
global_batch = {job.global_batch}
seq = {job.sequence}
[vary]
tp = {job.tp}
pp = {job.pp}
schedule = "{schedule}"
micro_batch = {job.micro_batch}
sp = [false, true]
recompute = ["full", "attention"]
"""

TORCHTITAN = """\
[model]
script = "{checkout}/train.py"
torchrun = true
arguments = [
  "--job.config_file", "{checkout}/train_configs/llama3_8b.toml", "--job.dump_folder", "out",
  "--model.tokenizer_path", "inputs/tokenizer.model",
  "--training.dataset", "c4_test", "--training.dataset_path", "inputs/text",
  "--training.batch_size", "{{micro_batch}}", "--training.seq_len", "{{seq}}", "{{variant}}",
]
[cluster]
gpu = "{gpu}"
nodes = 1
gpus_per_node = 8
intra_node = {{ busbw_gb_per_s = {busbw:.1f} }}
[job]
global_batch = 16
seq = 8192
[vary]
micro_batch = 2
variant = {variants}
"""

COMPILED = "--training.compile"
VARIANTS = {
    "8B, FSDP 8": "",
    "8B, FSDP 8, compile": COMPILED,
    "8B, FSDP 8, compile, float8": " ".join((COMPILED, *FLOAT8)),
}
"""Row of the published table -> options of torchtitan."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--torchtitan", type=Path, metavar="CHECKOUT")
    options = parser.parse_args()
    print_conditions(version_of("torch"))
    print((__doc__ or "").split("\n\n", 2)[2])
    for name, job in MODELS.items():
        print_megatron(name, job, options.directory / name)
    if options.torchtitan is not None:
        print_torchtitan(options.torchtitan.resolve(), options.directory / "torchtitan")


def print_megatron(name: str, job: Job, directory: Path) -> None:
    """Plan a model of Megatron-LM; print its published layouts and the others of the plan."""
    gpt = {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": job.hidden,
        "n_head": job.heads, "n_layer": job.layers, "n_positions": job.sequence,
        "vocab_size": 51200, "tie_word_embeddings": False, "attn_implementation": "eager",
    }  # fmt: skip
    schedule = f"interleaved:{job.chunks}" if job.chunks > 1 else "1f1b"
    nodes = job.tp * job.pp // NODE
    text = MEGATRON.format(job=job, nodes=nodes, node=NODE, schedule=schedule)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "gpt.json").write_bytes(msgspec.json.encode(gpt))
    outcomes = outcomes_of(text, directory)
    published = {
        (False, "full"): PUBLISHED_S["full"][name],
        (True, "attention"): PUBLISHED_S["selective"][name],
    }
    print(f"\n{name}, {job.tp * job.pp} A100s{'':14}published, s{'planned, s':>12}{'memory':>10}")
    times: list[tuple[float, float]] = []
    for outcome in outcomes:
        layout = outcome["layout"]
        seconds = outcome["step_ns"]["value"] / 1e9
        measured = published.get((layout["sp"], layout["recompute"]))
        if measured is not None:
            times.append((seconds, measured))
        print(f"  {'sp, ' * layout['sp'] + 'recompute ' + layout['recompute']:30}"
              f"{'-' if measured is None else f'{measured:.2f}':>10}{seconds:12.2f}"
              f"{outcome['peak_bytes']['value'] / 1e9:8.1f} GB")  # fmt: skip
    print(f"  published layouts: {order_agreement(times)}", flush=True)


def print_torchtitan(checkout: Path, directory: Path) -> None:
    """Plan torchtitan's 8B on 8 GPUs; print published and planned tokens per second."""
    inputs = directory / "inputs"
    if not inputs.exists():
        directory.mkdir(parents=True, exist_ok=True)
        write_inputs(inputs)
    text = TORCHTITAN.format(
        checkout=checkout,
        gpu=H100,
        busbw=REACHED * NVLINK_GB_PER_S,
        variants=list(VARIANTS.values()),
    )
    variables = {**os.environ, **OLDER_TORCH}
    outcomes = outcomes_of(text, directory, variables)
    planned = {outcome["layout"]["variant"]: outcome for outcome in outcomes}
    print(f"\ntorchtitan, tokens/s of a GPU{'':12}published{'planned':>10}{'error':>9}")
    times: list[tuple[float, float]] = []
    for row in ROWS:
        if row.name not in VARIANTS or VARIANTS[row.name] not in planned:
            continue
        tokens_per_s = planned[VARIANTS[row.name]]["tokens_per_s_per_gpu"]["value"]
        times.append((1 / tokens_per_s, 1 / row.tokens_per_s))
        print(f"  {row.name:36}{row.tokens_per_s:11,}{tokens_per_s:10,.0f}"
              f"{tokens_per_s / row.tokens_per_s - 1:+9.1%}")  # fmt: skip
    print(f"  {order_agreement(times)}")


def outcomes_of(
    text: str, directory: Path, variables: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """Run a plan; return the outcomes of its layouts, the fastest first."""
    (directory / "plan.toml").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "onerank", "plan", "plan.toml", "-o", "plan"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=directory, env=variables)
    plan = msgspec.json.decode((directory / "plan" / "plan.json").read_bytes())
    outcomes = [*plan["fitting"], *plan["misfits"]]
    return sorted(outcomes, key=lambda outcome: outcome["step_ns"]["value"])


if __name__ == "__main__":
    main()

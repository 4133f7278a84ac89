"""Rows of plans against their own commands, run."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from own_process import run_command

from onerank.annotate.hosts import host as hosts

MODEL = """{
  "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 4,
  "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
  "num_key_value_heads": 4, "vocab_size": 512
}"""

# A Rubin has no compute capability, from which a latency would follow.
CONFIG = """
[model]
config = "llama.json"
[cluster]
gpu = "Rubin"
nodes = 1
gpus_per_node = 2
intra_node = { busbw_gb_per_s = 370, latency_us = 12 }
[job]
global_batch = 2
seq = 128
"""


def run(*command: str, directory: Path) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, "PATH": path},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# It shards its own model, as torchtitan does; without --wide its layers have half the size.
SCRIPT = """
import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("--replicas", type=int)
parser.add_argument("--batch", type=int)
parser.add_argument("--wide", type=int, default=1)
args = parser.parse_args()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
mesh = init_device_mesh("cuda", (args.replicas,))
size = 256 * args.wide
model = torch.nn.Sequential(*(torch.nn.Linear(size, size) for _ in range(3))).cuda()
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(5):
    model(torch.randn(args.batch, size, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

OWN = """
[model]
script = "own.py"
torchrun = true
arguments = ["--replicas", "{dp}", "--batch", "{micro_batch}", "{variant}"]
[cluster]
gpu = "H100"
nodes = 1
gpus_per_node = 4
host = "fast.toml"
intra_node = { busbw_gb_per_s = 370 }
[job]
global_batch = 256
seq = 1
[vary]
micro_batch = 64
variant = ["", "--wide 2"]
"""


def plan_of(directory: Path, config: str) -> dict[str, Any]:
    (directory / "plan.toml").write_text(config)
    done = run_command("plan", "plan.toml", "-o", "plan", "--json", forks=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check_commands(directory: Path, row: dict[str, Any], number: int = 1) -> None:
    """Run the commands of a row, and compare step and memory with it."""
    script = (directory / "plan" / "commands" / f"{number}.sh").read_text()
    script = script.replace("onerank replay", "onerank replay --json")
    # A fork runs the capture, which saves the seconds in which a fresh process imports torch.
    before, capture, after = re.split(r"^(capture run .*)$", script, flags=re.MULTILINE)
    run("bash", "-c", before, directory=directory)
    done = run_command(*shlex.split(capture), forks=True)
    assert done.returncode == 0, done.stderr
    printed = run("bash", "-e", "-c", after, directory=directory)
    replay, _ = json.JSONDecoder().raw_decode(printed[printed.index('{\n  "step_ns"') :])
    assert replay["step_ns"] == pytest.approx(row["step_ns"]["value"], rel=1e-6)
    assert replay["peak_bytes"] == row["peak_bytes"]["value"]


def test_a_row_is_what_its_commands_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("plotly")
    (tmp_path / "llama.json").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    plan = plan_of(tmp_path, CONFIG)
    (row,) = plan["fitting"]
    assert plan["layers"] == json.loads(MODEL)["num_hidden_layers"]
    assert (row["layout"]["dp"], row["layout"]["micro_batches"]) == (2, 1)
    assert row["energy_j"] is None
    assert row["mfu"]["value"] > 0
    check_commands(tmp_path, row)


PLAIN = """
import sys, torch
model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(5):
    model(torch.randn(int(sys.argv[1]), 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_rows_of_a_script_without_a_transformers_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("plotly")
    (tmp_path / "own.py").write_text(PLAIN)
    monkeypatch.chdir(tmp_path)
    config = OWN.replace("torchrun = true\n", "").replace(
        '["--replicas", "{dp}", "--batch", "{micro_batch}", "{variant}"]', '["{micro_batch}"]'
    )
    config = config.replace('variant = ["", "--wide 2"]', "pp = [1, 2]")
    config = config.replace('host = "fast.toml"', "")
    plan = plan_of(tmp_path, config)
    assert plan["layers"] is None
    (row,) = plan["fitting"]
    assert (row["layout"]["pp"], row["layout"]["dp"]) == (1, 4)
    assert {dropped["code"] for dropped in plan["dropped"]} == {"pp-too-many-stages"}


def test_rows_of_a_script_that_distributes_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("plotly")
    (tmp_path / "own.py").write_text(SCRIPT)
    typical = Path(hosts.__file__).with_name("typical.toml").read_text()
    faster = re.sub(r"_ns = (\d+)", lambda figure: f"_ns = {int(figure[1]) / 4}", typical)
    (tmp_path / "fast.toml").write_text(faster)
    monkeypatch.chdir(tmp_path)
    plan = plan_of(tmp_path, OWN)
    rows = plan["fitting"]
    assert plan["layers"] is None
    assert [row["layout"]["variant"] for row in rows] == ["", "--wide 2"]
    assert {row["layout"]["dp"] for row in rows} == {4}
    check_commands(tmp_path, rows[1], number=2)
    # The host decides the step of so small a model.
    (typical_row, _) = plan_of(tmp_path, OWN.replace('host = "fast.toml"', ""))["fitting"]
    assert typical_row["step_ns"]["value"] == pytest.approx(
        4 * rows[0]["step_ns"]["value"], rel=0.1
    )

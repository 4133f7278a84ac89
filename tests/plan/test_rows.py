"""A row of a plan against its own commands, run, for a GPU whose description lacks its power."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from own_process import run_command

MODEL = """{
  "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 4,
  "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
  "num_key_value_heads": 4, "vocab_size": 512
}"""

CONFIG = """
[model]
config = "llama.json"
[cluster]
gpu = "Rubin"
nodes = 1
gpus_per_node = 2
intra_node = { busbw_gb_per_s = 370 }
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


def test_a_row_is_what_its_commands_give(tmp_path, monkeypatch):
    pytest.importorskip("plotly")
    (tmp_path / "llama.json").write_text(MODEL)
    (tmp_path / "plan.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    done = run_command("plan", "plan.toml", "-o", "plan", "--json", forks=True)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["fitting"]
    assert (row["layout"]["dp"], row["layout"]["micro_batches"]) == (2, 1)
    assert row["energy_j"] is None
    assert row["mfu"]["value"] > 0
    script = (tmp_path / "plan" / "commands" / "1.sh").read_text()
    script = script.replace("onerank replay", "onerank replay --json")
    # A fork runs the capture, which saves the seconds in which a fresh process imports torch.
    before, capture, after = re.split(r"^(capture run .*)$", script, flags=re.MULTILINE)
    run("bash", "-c", before, directory=tmp_path)
    done = run_command(*shlex.split(capture), forks=True)
    assert done.returncode == 0, done.stderr
    printed = run("bash", "-e", "-c", after, directory=tmp_path)
    replay, _ = json.JSONDecoder().raw_decode(printed[printed.index('{\n  "step_ns"') :])
    assert replay["step_ns"] == pytest.approx(row["step_ns"]["value"], rel=1e-6)
    assert replay["peak_bytes"] == row["peak_bytes"]["value"]

"""What a script holds between two steps, by class."""

import subprocess
import sys
import textwrap

import pytest
import torch
from own_process import run_code

from onerank.capture.profiling.step_memory import resident_storages

SCRIPT = """
import json, torch
from torch import nn
from onerank.capture.profiling.allocator_snapshots import sizes_of
from onerank.capture.profiling.step_memory import resident_storages

model = nn.Sequential(nn.Linear(64, 32, bias=False), nn.BatchNorm1d(32)).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters())
batch = torch.ones(8, 64, device=DEVICE)
model(batch).sum().backward()
optimizer.step()
rows = nn.Embedding(16, 8, sparse=True, device=DEVICE)
rows(torch.arange(4, device=DEVICE)).sum().backward()
tied = model[0].weight.T  # shares the storage of a parameter
print(json.dumps(sizes_of(resident_storages(DEVICE))))
"""


def held(device: str) -> dict[str, list[int]]:
    """Run the script in a separate process: other tests' tensors are no part of it."""
    import json

    text = textwrap.dedent(SCRIPT).replace("DEVICE", repr(device))
    if device == "cpu":
        done = run_code(text)
    else:  # a fork of a process that called the driver of a GPU cannot use it
        done = subprocess.run(
            [sys.executable, "-c", text], capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
        ),
    ],
)
def test_each_storage_counts_once_for_what_holds_it(device: str):
    found = held(device)
    assert found["parameters"] == [64 * 32 * 4, 16 * 8 * 4, 128, 128]
    sparse = [4 * 8 * 4, 4 * 8]  # values, indices
    assert found["gradients"] == sorted([64 * 32 * 4, 128, 128, *sparse], reverse=True)
    moments = [8192, 8192, 128, 128, 128, 128]
    steps = [4, 4, 4] if device == "cpu" else []  # AdamW keeps its step counts on the host
    assert found["optimizer"] == moments + steps
    assert 8 * 64 * 4 in found["other"]  # the batch
    assert found["other"].count(128) == 2  # running mean and variance


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_simulated_allocator_reserves_what_the_real_one_did(tmp_path):
    """Run along with the script it is exact; the step alone does not know what came before."""
    from pathlib import Path

    import onerank
    from onerank.annotate.memory.memory_report import report_memory

    script = Path(__file__).parents[3] / "examples" / "train_llama.py"

    def captured(name, *options):
        command = [sys.executable, "-m", "onerank", "capture", "run", str(script), "--tp", "2"]
        command += [*options, "-o", str(tmp_path / name)]
        command += ["--", "--shape", "8b", "--layers", "2", "--seq", "2048"]
        subprocess.run(command, check=True, capture_output=True)
        return report_memory(onerank.read(tmp_path / name))

    real, emulated = captured("real.et"), captured("emulated.et", "--device", "none")
    assert real.source == "captured"
    assert real.peak_bytes == pytest.approx(real.measured_peak_bytes, rel=0.01)
    assert emulated.reserved_bytes == pytest.approx(real.reserved_bytes, rel=0.005)
    assert real.simulated_reserved_bytes == pytest.approx(real.reserved_bytes, rel=0.03)


def test_reading_sparse_tensors_leaves_nothing_in_the_profile():
    sparse = torch.eye(3).to_sparse()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = resident_storages("cpu")
        torch.ones(2)
    sizes = [storage.bytes for storages in found.values() for storage in storages]
    # its values and indices, float32[3] and int64[2, 3]
    assert sparse.is_sparse
    assert {3 * 4, 2 * 3 * 8} <= set(sizes)
    names = [event.name for event in profile.events()]
    assert names[0] == "aten::ones"

"""Scripts that ask for what is not there, fork, or will not end."""

import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from notes import has_note
from own_process import CPU_ONLY, run_command
from raised import raises_code

import onerank
from onerank.capture import Options, capture
from onerank.capture.script.error_hints import explained
from onerank.ir.errors import ScriptError

LOOP = """
    import torch
    from torch import nn
    {setup}
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters())
    def step(batch):
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    def main():
        {body}
    if __name__ == "__main__":
        main()
"""

DATASET = """
    class Numbers(torch.utils.data.Dataset):
        def __len__(self):
            return 200
        def __getitem__(self, index):
            return torch.full((8,), float(index))
"""
LOADER = """
        loader = torch.utils.data.DataLoader(
            Numbers(), batch_size=4, num_workers={workers}, multiprocessing_context="{context}"
        )
        for batch in loader:
            step(batch)
"""

FORK = """
        import os
        child = os.fork()
        for turn in range(50):  # both of them train
            step(torch.randn(4, 8))
        if child == 0:
            raise SystemExit(7)
"""

ENDLESS = """
        while True:
            try:
                step(torch.randn(4, 8))
            except:
                pass
"""

TWICE_ENDLESS = """
        def careless():
            try:
                step(torch.randn(4, 8))
            except:
                print("caught inside")
        while True:
            try:
                careless()
            except:
                continue
"""

DAEMON = """
        import threading
        def work():
            while True:
                (torch.randn(200, 200) @ torch.randn(200, 200)).sum().item()
        for _ in range(2):
            threading.Thread(target=work, daemon=True).start()
        while True:
            step(torch.randn(4, 8))
"""

FIT = {
    "forked workers": (DATASET, LOADER.format(context="fork", workers=2)),
    "spawned workers": (DATASET, LOADER.format(context="spawn", workers=1)),
    "a child that trains too": ("", FORK),
    "an endless except": ("", ENDLESS),
    "two of them": ("", TWICE_ENDLESS),
    "threads at work as it ends": ("", DAEMON),
}
ENDS_AS_PYTHON_DOES = "threads at work as it ends"  # as a child of multiprocessing does not


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A short path: the sockets of data-loader workers lie in it, whose names hold 107 bytes."""
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


def captured(
    directory: Path, temporary: Path, setup: str, body: str, *, afresh: bool = False
) -> subprocess.CompletedProcess[str]:
    path = directory / "train.py"
    indented = [
        textwrap.indent(textwrap.dedent(part), " " * depth)
        for part, depth in ((setup, 0), (body, 4))
    ]
    text = textwrap.dedent(LOOP).format(setup=indented[0], body=indented[1].strip())
    path.write_text(text)
    command, place = ["capture", "run", path, "-o", directory / "t.et"], {"TMPDIR": str(temporary)}
    if not afresh:
        return run_command(*command, environment=place)
    return subprocess.run(
        [sys.executable, "-m", "onerank", *command],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, **CPU_ONLY, **place},
    )


@pytest.mark.parametrize("case", FIT)
def test_is_captured_once_and_ends(tmp_path, temporary, case):
    afresh = case == ENDS_AS_PYTHON_DOES
    done = captured(tmp_path, temporary, *FIT[case], afresh=afresh)
    assert done.returncode == 0, done.stderr
    graph = onerank.read(tmp_path / "t.et")
    assert sum(node.name == "aten::addmm" for node in graph) == 1  # one step, not two
    assert done.stderr.count("linking the traces") == 1
    assert "Traceback" not in done.stderr
    assert list(temporary.glob("onerank-*")) == []
    noted = has_note(graph.job.measurement.notes, "script-caught-end", 3)
    assert noted == (case in ("an endless except", "two of them"))


HUGE = "        weights = torch.empty(2**50)\n"
REFUSED = {
    "out of memory": (
        HUGE,
        ["error[script-out-of-memory]", "train.py", "4194304.0 GiB", "--tp", "--capture-layers"],
    ),
    "no GPU": (
        "        model.cuda()\n",
        ["error[script-needs-gpu]", "train.py line 12 (model.cuda())", 'device "cpu"'],
    ),
    "no GPU to set": (
        "        torch.cuda.set_device(0)\n",
        ["error[script-needs-gpu]", "train.py line 12 (torch.cuda.set_device(0))"],
    ),
    "no two GPUs": (
        "        if torch.accelerator.device_count() < 2: raise SystemExit\n",
        ["error[script-exited]", "sys.exit(None) after 0 optimizer steps", "no GPU"],
    ),
    "attention of torch's for GPUs": (
        """        from torch.nn.attention.flex_attention import flex_attention
        heads = torch.randn(1, 1, 128, 16, requires_grad=True)
        flex_attention(heads, heads, heads)
""",
        ["error[script-gpu-only]", "line 14 (flex_attention(heads, heads, heads))"],
    ),
}


@pytest.mark.parametrize(
    "said",
    [
        "FSDP needs a non-CPU accelerator device, but no accelerator device is detected.",
        "SyncBatchNorm layers only work with GPU modules",
        "You selected the FSDP strategy but FSDP is only available on GPU. Set `Trainer(...)`",
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_what_libraries_do_on_a_gpu_alone_is_reported(said):
    explanation = explained(ValueError(said), Path("train.py"))
    assert explanation.code == "script-needs-gpu"
    assert said.rstrip(".") in explanation.message


@pytest.mark.parametrize("case", REFUSED)
def test_the_error_names_what_is_missing(tmp_path, temporary, case):
    body, expected = REFUSED[case]
    done = captured(tmp_path, temporary, "", body)
    assert done.returncode == 2
    for part in expected:
        assert part in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]
    assert list(temporary.glob("onerank-*")) == []


def test_an_unknown_collective_is_reported_even_if_the_script_goes_on(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        textwrap.dedent(LOOP).format(
            setup="import contextlib\nimport torch.distributed as dist\ndist.init_process_group()",
            body="while True:\n"
            "        with contextlib.suppress(Exception):\n"
            "            dist.all_reduce(torch.eye(3).to_sparse())\n"
            "        step(torch.randn(4, 8))",
        )
    )
    done = run_command("capture", "run", path, "--dp", "2", "-o", tmp_path / "t.et")
    assert done.returncode == 2
    assert "error[collective-unsupported]" in done.stderr
    assert "c10d::allreduce_" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_memory_is_reported(tmp_path):
    """Run without CUDA_VISIBLE_DEVICES: see test_cuda for the rest of the GPU's tests."""
    path = tmp_path / "train.py"
    path.write_text(
        "import torch\nlayers = [torch.nn.Linear(2**16, 2**14, device='cuda') for _ in range(999)]"
    )
    done = subprocess.run(
        [sys.executable, "-m", "onerank", "capture", "run", path, "-o", tmp_path / "t.et"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 2
    assert "error[script-out-of-memory]" in done.stderr
    assert "4.0 GiB" in done.stderr
    assert "--tp" in done.stderr


def test_a_loss_of_a_part_of_the_sequence_is_noted(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        "import torch, transformers\n"
        "model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, "
        "hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2))\n"
        "x = torch.randint(64, (2, 16))\n"
        "found = model(input_ids=x, labels=x, output_hidden_states=True).hidden_states[-1]\n"
        "(found.sum(-1) * (x > 8)).sum().backward()\n"
    )
    with raises_code("cp-partial-sequence", ScriptError, naming=("line 5", "--cp")):
        capture(path, [], Options(cp=2))

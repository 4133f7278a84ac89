"""What a capture imports: transformers only where the script brings it."""

import contextlib
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Generator

from onerank.capture.patches import after_import

SCRIPT = """
import json, sys, torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with open("modules.json", "w") as file:
    json.dump(sorted(sys.modules), file)
while True:
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
"""


def test_a_script_without_transformers_is_captured_without_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    # A transformers that cannot be imported, as where torchvision does not match torch.
    (tmp_path / "transformers.py").write_text("raise RuntimeError('operator torchvision::nms')\n")
    # Both captures in one process, which imports torch once.
    code = (
        "from onerank.cli import capture\n"
        "for world in ([], ['--dp', '2', '--fsdp']):\n"
        "    output = f'{len(world)}.et'\n"
        "    short = ['--warm-up', '1', '--timed-steps', '1', '-o', output]\n"
        "    try: capture(['run', 'train.py', *world, *short])\n"
        "    except SystemExit as end: assert end.code == 0, world\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.glob("*.et")} == {"0.et", "3.et"}
    modules = json.loads((tmp_path / "modules.json").read_text())
    assert "torch" in modules
    assert [name for name in modules if name.startswith("transformers")] == []


QUERIES = """
import importlib, pkgutil, torch

def query(*_):
    raise AssertionError("GPUs were queried")

torch.cuda.is_available = torch.accelerator.is_available = torch.cuda.init = query
import onerank.capture
for module in pkgutil.walk_packages(onerank.capture.__path__, "onerank.capture."):
    importlib.import_module(module.name)
"""


def test_imports_query_no_gpu():
    """CUDA works in no fork of a process that has queried GPUs, and message senders are forks."""
    done = subprocess.run([sys.executable, "-c", QUERIES], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


REFUSED = {
    "--rank 3": "rank-out-of-range",
    "--sp": "sp-unused",
    "--cp-comm p2p": "cp-comm-unused",
    "--tp-style hf": "tp-style-unused",
    "--pp-layers 1,2": "pp-layers-unused",
    "--ep 3 --dp 2": "world-ep-indivisible",
    "--ddp --fsdp": "dp-strategy-twice",
    "--raw-dir .": "raw-directory-not-empty",
    "--true-local-rank": "local-rank-unused",
    "--torchrun --dp 4 --nproc-per-node 3": "nodes-indivisible",
    "--moe-routing zipf:x": "routing-bad-exponent",
    "--network missing.toml": "file-unreadable",
    "--sharding-plan train.py": "toml-malformed",
    "--sharding-plan plan.toml": "sharding-plan-unused",
    "--tp 2 --ranks 0,9": "ranks-out-of-range",
    "--ranks distinct": "ranks-of-one",
    "--capture-layers 4,2": "layers-not-ascending",
}


def test_options_are_checked_before_torch_is_imported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "plan.toml").write_text('model = "Net"\n[modules]\n')
    code = (
        "import sys\n"
        "from onerank.cli import capture\n"
        f"for options in {list(REFUSED)!r}:\n"
        "    try: capture(['run', 'train.py', *options.split(), '-o', 'x.et'])\n"
        "    except SystemExit as end: print(end.code, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["2 False"] * len(REFUSED)
    codes = re.findall(r"^error\[([\w-]+)\]", done.stderr, re.MULTILINE)
    assert codes == list(REFUSED.values())


def test_a_context_is_entered_when_its_module_is_imported(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "brought_later.py").write_text("VALUE = 1\n")
    monkeypatch.delitem(sys.modules, "brought_later", raising=False)
    seen: list[str] = []

    def noting(name: str):
        @contextlib.contextmanager
        def context() -> Generator[None]:
            seen.append(f"{name} {sys.modules['brought_later'].VALUE}")
            yield
            seen.append(f"left {name}")

        return context

    finders = list(sys.meta_path)
    with after_import("brought_later", noting("a")), after_import("brought_later", noting("b")):
        assert seen == []
        importlib.import_module("brought_later")
        assert seen == ["a 1", "b 1"]
        with after_import("brought_later", noting("c")):
            assert seen[2:] == ["c 1"]
    assert seen[3:] == ["left c", "left b", "left a"]
    assert sys.meta_path == finders
    with after_import("json.not_there", noting("d")):
        pass
    assert len(seen) == 6

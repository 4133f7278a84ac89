"""`capture verify` and `capture run --compile` on a GPU; skipped where there is none."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import onerank
from onerank.ir import COMPILED_GRAPH, Graph, Kind

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_llama.py"
SMALL = ["--", "--layers", "2", "--seq", "512"]

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def capture(*args: str | Path) -> dict[str, Any]:
    command = [sys.executable, "-c", "from onerank.cli import capture; capture()", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return json.loads(done.stdout)


@pytest.mark.parametrize("tp_style", ["megatron", "hf"])
def test_instruments_and_slices_leave_the_numbers_as_they_are(tp_style):
    options = ["--tp", "4", "--rank", "1", "--tp-style", tp_style, "--json"]
    report = capture("verify", EXAMPLE, *options, *SMALL)
    assert report["not_checked"] == []
    checks = {row["check"] for row in report["comparisons"]}
    assert checks == {"plain", "profiled", "slices"}
    for row in report["comparisons"]:
        if row["check"] != "slices":  # bf16, and not a bit differs
            assert row["equal"] == row["tensors"], row


def gemms(graph: Graph) -> Counter[str]:
    """Matrix products by module, but for the one of rotary embedding, which eager mode lacks."""
    modules = [n.text("module") for n in graph if n.kind is Kind.HOST_OP and n.name == "aten::mm"]
    return Counter(module for module in modules if module != "model.rotary_emb")


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_kernels_are_linked_and_named(mode, tmp_path):
    trace = tmp_path / "t.et"
    report = capture("run", EXAMPLE, "--compile", mode, "-o", trace, "--json", *SMALL)
    eager, compiled = onerank.read(tmp_path / "t.eager.et"), onerank.read(trace)
    done = compiled.job.compilation
    kernels = [node for node in compiled if node.kind is Kind.KERNEL]
    generated = [node for node in kernels if node.name.startswith("triton_")]
    assert len(generated) == sum(fusion.launches for fusion in done.fusions) > 0
    assert done.unknown_ops <= max(3, len(kernels) // 50), report["compilation"]
    assert all(node.text("op") for node in kernels)  # each has the operator that launched it
    modules = Counter(node.text("module") for node in kernels)
    # unknown, too, are the copies into a CUDA graph's inputs, outside the compiled graph
    assert sum(n for m, n in modules.items() if m.startswith(COMPILED_GRAPH)) <= done.unknown_ops
    assert any("aten.silu" in fusion.operators for fusion in done.fusions)
    assert sum(row.compiled_ns for row in done.modules) == report["gpu_time_ns"]
    if mode == "default":
        assert gemms(compiled) == gemms(eager)

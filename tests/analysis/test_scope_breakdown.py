"""Layers and sub-modules of the kept H200 capture, as commands show, write and export them.

The capture is older than the table of modules; the table here is of the same model, whose
structure is what `examples/train_llama.py` makes of it.
"""

import json
from pathlib import Path

import msgspec
import pytest
import torch
from click.testing import CliRunner
from transformers import LlamaConfig, LlamaForCausalLM

import onerank
from onerank.analysis.breakdown import merged, parts
from onerank.capture.profiling.module_roles import describe
from onerank.cli import onerank as command
from onerank.converters.sources.kineto import convert_directory
from onerank.ir import Graph

H200 = Path(__file__).parents[2] / "traces" / "h200-llama-8b-4l-tp4"
GPU_TIME_NS = 29_865_307


@pytest.fixture(scope="module")
def graph() -> Graph:
    config = LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=4,
                         num_attention_heads=32, num_key_value_heads=8)  # fmt: skip
    with torch.device("meta"):
        modules = tuple(module for _, module in describe(LlamaForCausalLM(config)))
    converted, _ = convert_directory(H200)
    job = msgspec.structs.replace(converted.job, modules=modules)
    return Graph(converted.nodes, converted.edges, converted.strings, job)


@pytest.fixture(scope="module")
def trace(graph, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("grain") / "trace.et"
    graph.write(path)
    return path


def run(*args: str | Path) -> str:
    result = CliRunner().invoke(command, list(map(str, args)))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_every_kernel_is_in_one_layer_or_role(graph):
    layers = parts(graph, "layer")
    assert [part.name for part in layers if part.role == "layer"] == [
        f"model.layers.{number}" for number in range(4)
    ]
    assert sum(part.time_ns for part in layers) == GPU_TIME_NS
    assert sum(part.nodes for part in layers) == 850
    kernels = {part.nodes for part in layers if part.role == "layer"}
    assert len(kernels) == 1  # each layer launches the same
    other = sum(part.time_ns for part in layers if part.role == "other")
    assert other < GPU_TIME_NS * 0.001


def test_submodules_by_role(graph):
    by_role = {}
    for part in merged(parts(graph, "submodule")):
        by_role[part.role] = by_role.get(part.role, 0) + part.nodes
    assert sum(by_role.values()) == 850
    assert set(by_role) == {
        *("embedding", "norm", "attention", "layer", "mlp", "head", "loss", "optimizer", "other")
    }
    norms = [part for part in merged(parts(graph, "submodule")) if part.role == "norm"]
    assert [(part.name, part.instances, part.nodes) for part in norms] == [
        ("model.layers.*.input_layernorm", 4, 104),
        ("model.layers.*.post_attention_layernorm", 4, 104),
        ("model.norm", 1, 25),  # no residual whose gradient is to be added
    ]


@pytest.mark.parametrize("grain", ["layer", "submodule"])
def test_coarsening_keeps_time_and_communication(graph, grain):
    coarse = graph.coarsen(grain)
    assert coarse.nodes.duration_ns[coarse.gpu_compute].sum() == GPU_TIME_NS
    assert coarse.communication.sum() == 21
    assert coarse.nodes.bytes_allocated.sum() == graph.nodes.bytes_allocated.sum()
    assert len(coarse.topological_order()) == len(coarse) < 120


def test_commands(trace, tmp_path):
    shown = run("show", trace, "--granularity", "submodule")
    assert "29.865 ms of compute by submodule" in shown
    assert "model.layers.*.self_attn" in shown
    layers = json.loads(run("show", trace, "--granularity", "layer", "--json"))
    assert sum(p["forward_ns"] + p["backward_ns"] + p["other_ns"] for p in layers) == GPU_TIME_NS
    assert "nvjet" in run("show", trace, "--granularity", "kernel")
    run("coarsen", trace, "--granularity", "layer", "-o", tmp_path / "coarse.et")
    coarse = onerank.read(tmp_path / "coarse.et")
    assert coarse.nodes.duration_ns[coarse.gpu_compute].sum() == GPU_TIME_NS
    assert [node.name for node in coarse].count("layer backward") >= 4


def test_export_at_a_grain(trace, tmp_path):
    report = json.loads(
        run("export", "astra-sim", trace, "--granularity", "layer", "-o", tmp_path / "w", "--json")
    )
    assert report["gpu_time_ns"] == GPU_TIME_NS
    assert report["nodes"] < 120
    run("check", tmp_path / "w")


def test_a_trace_without_modules_says_what_to_do(tmp_path):
    convert_directory(H200)[0].write(tmp_path / "old.et")
    result = CliRunner().invoke(
        command, ["show", str(tmp_path / "old.et"), "--granularity", "layer"]
    )
    assert result.exit_code == 2
    assert "error[graph-no-modules]" in result.stderr

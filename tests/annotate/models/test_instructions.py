"""The time of kernels whose instructions are known."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kept_traces import unpack

import onerank
from onerank.annotate import explain, load_gpu
from onerank.annotate.models.features import kernels_of
from onerank.annotate.models.prediction_terms import Rule, TermRecord
from onerank.annotate.models.roofline import predict_from_datasheet
from onerank.annotate.op_costs.cost_record import Work
from onerank.annotate.op_costs.op_classes import base_name
from onerank.converters.sources.kineto import convert_directory
from onerank.ir import UNKNOWN, Graph

# A float8 cast of an MLP's backward: 16,384 x 14,336 elements on an H100 (torch 2.11).
MOVED = 3_288_334_342
CLOCK_HZ = 1.83e9

TRACES = Path(__file__).parents[3] / "traces"


def predicted_us(gpu: str, instructions: float) -> tuple[float, int]:
    """Return the time above the floor of a launch, and the rule."""
    kernels = kernels_of([Work(bytes_read=MOVED, bytes_written=0)], np.zeros(1))
    alone = replace(kernels, bytes=np.zeros(1))
    kernels = replace(kernels, instructions=np.array([instructions]))
    target = load_gpu(gpu)
    (time_ns,), (rule,) = predict_from_datasheet(kernels, target)
    (floor_ns,), _ = predict_from_datasheet(alone, target)
    return (time_ns - floor_ns) / 1e3, int(rule)


def test_instructions_lengthen_a_kernel_that_memory_bounds():
    memory_us, _ = predicted_us("H100", 0)
    us, rule = predicted_us("H100", 715.7e6 * 32)
    issued_us = 715.7e6 * 32 / (132 * 128 * CLOCK_HZ) * 1e6
    assert us == pytest.approx((memory_us**3 + issued_us**3) ** (1 / 3))
    assert rule == Rule.MEMORY
    # Nsight Compute measured 1,190 us at 1.97 GHz, a profiled training step 1,243 us.
    assert us == pytest.approx(1_217, rel=0.03)


def test_instructions_bound_a_kernel_that_moves_little():
    us, rule = predicted_us("H100", 1e12)
    assert us == pytest.approx(1e12 / (132 * 128 * CLOCK_HZ) * 1e6, rel=0.001)
    assert rule == Rule.ISSUE


def test_other_vendors_gpus_were_not_measured():
    assert predicted_us("MI300X", 1e12) == predicted_us("MI300X", 0)


def test_instructions_bound_a_kernel_that_also_computes_longer_than_it_moves():
    kernels = kernels_of([Work(flops=10**12, bytes_read=10**6, bytes_written=0)], np.zeros(1))
    kernels = replace(kernels, instructions=np.array([1e12]))
    _, (rule,) = predict_from_datasheet(kernels, load_gpu("H100"))
    assert rule == Rule.ISSUE


def test_terms_of_a_prediction_name_bytes_and_instructions():
    kernels = kernels_of([Work(bytes_read=MOVED, bytes_written=0)], np.zeros(1))
    kernels = replace(kernels, instructions=np.array([715.7e6 * 32]))
    record = TermRecord(np.array([0]))
    (time_ns,), _ = predict_from_datasheet(kernels, load_gpu("H100"), record=record)
    values = {term.name: term.value for term in record.roots[0].named()}
    assert record.roots[0].evaluate() == pytest.approx(time_ns)
    assert values["memory"] > max(values["bytes"], values["instructions"]) > 0
    assert values["memory"] ** 3 == pytest.approx(
        values["bytes"] ** 3 + values["instructions"] ** 3
    )


@pytest.fixture(scope="module")
def counted() -> Graph:
    """Return a capture of operators in which one node has instructions."""
    graph, _ = convert_directory(TRACES / "cpu-llama-2l-tp4")
    instructions = graph.nodes.instructions.copy()
    assert (instructions == UNKNOWN).all()
    names = [base_name(graph.strings[int(code)]) for code in graph.nodes.op]
    instructions[names.index("silu")] = 10**12
    return graph.with_columns(instructions=instructions)


def test_explain_prints_the_instructions_of_a_node(counted):
    (node,) = counted.nodes.id[counted.nodes.instructions > 0].tolist()
    lines = dict(explain(counted, "H100", node).lines)
    assert lines["work"].endswith("1,000,000,000,000 instructions")
    issued_ns = 10**12 / (132 * 128 * CLOCK_HZ) * 1e9
    assert lines["instructions"].startswith(f"{issued_ns:,.0f} ns")


def test_instructions_survive_a_file_and_a_table(counted, tmp_path):
    path = tmp_path / "trace.et"
    counted.write(path)
    read = onerank.read(path)
    assert read.nodes.instructions.tolist() == counted.nodes.instructions.tolist()
    assert read.nodes_frame()["instructions"].max() == 10**12


def test_a_trace_without_the_column_has_unknown_instructions(tmp_path):
    # Written before the column existed.
    path = unpack("h100-llama-8b-4l-tp4/trace", tmp_path)
    assert b"instructions" not in path.read_bytes()
    assert (onerank.read(path).nodes.instructions == UNKNOWN).all()

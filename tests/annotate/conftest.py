"""Small graphs and GPU descriptions with round figures."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onerank.ir import Device, Evidence, Graph, GraphBuilder, Job, Kind, Measurement, Reason

BF16 = "Tensor(c10::BFloat16)"

DESCRIPTION = """
name = "{name}"
vendor = "{vendor}"
architecture = "other"
[sources]
made = "round figures for tests"
[figures]
sm_count = {{ value = {sm}, source = "made" }}
boost_clock_mhz = {{ value = 1000, source = "made" }}
memory_gb = {{ value = 80, source = "made" }}
memory_bandwidth_gb_per_s = {{ value = {bandwidth}, source = "made" }}
memory_achievable_fraction = {{ value = {achievable}, source = "made" }}
bf16_tensor_tflops = {{ value = {bf16}, source = "made" }}
tensor_sustained_fraction = {{ value = {sustained}, source = "made" }}
fp32_vector_tflops = {{ value = 10, source = "made" }}
vector_sustained_fraction = {{ value = 1, source = "made" }}
launch_floor_ns = {{ value = {floor}, source = "made" }}
"""


@pytest.fixture
def gpu_file(tmp_path: Path) -> Callable[..., str]:
    """Return the path of a GPU with round figures: 1 TB/s, 100 TFLOPS bf16, floor 2 us."""

    def make(
        name: str = "one",
        *,
        bandwidth: float = 1000,
        achievable: float = 1.0,
        bf16: float = 100,
        sustained: float = 1.0,
        floor: int = 2000,
        sm: int = 100,
        vendor: str = "NVIDIA",
    ) -> str:
        path = tmp_path / f"{name}.toml"
        figures = {"bandwidth": bandwidth, "achievable": achievable, "bf16": bf16}
        figures |= {"sustained": sustained, "floor": floor, "sm": sm, "vendor": vendor}
        path.write_text(DESCRIPTION.format(name=name, **figures))
        return str(path)

    return make


@pytest.fixture
def trace() -> Callable[..., Graph]:
    """Return a graph of one stream: for each operator its host op, then the kernels it launched.

    An operator is a dict: op, inputs and outputs as lists of (type, shape), kernels as a list of
    (name, duration_ns) or (name, duration_ns, kind), and input values.
    """

    def make(*operators: dict[str, Any], device: str = "H200") -> Graph:
        builder = GraphBuilder()
        before: int | None = None
        for start, operator in enumerate(operators):
            about = call_columns(operator)
            host = builder.add(kind=Kind.HOST_OP, thread=1, start_ns=start * 1000, **about)
            kernels = operator.get("kernels", [("kernel", operator.get("ns", 10_000))])
            for name, duration, *kind in kernels:
                node = builder.add(
                    kind=kind[0] if kind else Kind.KERNEL,
                    stream=7,
                    duration_ns=duration,
                    evidence=Evidence.MEASURED,
                    **(about | {"name": name}),
                )
                builder.edge(host, node, Reason.LAUNCH)
                if before is not None:
                    builder.edge(before, node, Reason.STREAM_ORDER)
                before = node
        measurement = Measurement(step_ns=(1_000_000,), peak_memory_bytes=5)
        return builder.build(Job(device=Device("cuda", device), measurement=measurement))

    return make


@pytest.fixture
def columns() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the function from an operator dict to the columns that describe its call."""
    return call_columns


def call_columns(operator: dict[str, Any]) -> dict[str, Any]:
    """Return the columns that describe an operator's call."""

    def text(values: list[Any]) -> str:
        return json.dumps(values, separators=(",", ":"))

    inputs, outputs = operator.get("inputs", []), operator.get("outputs", [])
    return {
        "name": operator["op"],
        "op": operator["op"],
        "input_types": text([kind for kind, _ in inputs]),
        "input_shapes": text([shape for _, shape in inputs]),
        "input_values": text(operator.get("values", [])),
        "output_types": text([kind for kind, _ in outputs]),
        "output_shapes": text([shape for _, shape in outputs]),
    }


@pytest.fixture
def mm() -> Callable[..., dict[str, Any]]:
    """Return the operator dict of a bf16 product [m, k] x [k, n]."""

    def make(m: int, n: int, k: int, **more: Any) -> dict[str, Any]:
        return {
            "op": "aten::mm",
            "inputs": [(BF16, [m, k]), (BF16, [k, n])],
            "outputs": [(BF16, [m, n])],
            **more,
        }

    return make


@pytest.fixture
def add() -> Callable[..., dict[str, Any]]:
    """Return the operator dict of a bf16 addition of `numel` elements: 6 bytes each."""

    def make(numel: int, **more: Any) -> dict[str, Any]:
        return {
            "op": "aten::add",
            "inputs": [(BF16, [numel]), (BF16, [numel]), ("Int", [])],
            "outputs": [(BF16, [numel])],
            **more,
        }

    return make

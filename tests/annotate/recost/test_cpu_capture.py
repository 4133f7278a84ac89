"""A CPU capture becomes the GPU graph it stands for."""

from typing import Any

import numpy as np
import pytest
from notes import note_of
from raised import raises_code

from onerank.annotate import PassOptions, load_gpu, recost, summarise
from onerank.annotate.models.flash2_prefill import flash2_schedule_terms
from onerank.ir import Device, Evidence, Graph, GraphBuilder, Job, Kind, Measurement, Reason
from onerank.ir.notes import Note


@pytest.fixture
def capture(columns):
    """Return a CPU graph: operators and "all_reduce" in program order; more edges by index."""

    def make(*operators: dict[str, Any] | str, data: tuple[tuple[int, int], ...] = ()) -> Graph:
        builder = GraphBuilder()
        for place, operator in enumerate(operators):
            times = {"start_ns": 1000 + 100 * place, "duration_ns": 100, "thread": 1}
            if isinstance(operator, str):
                builder.add(kind=Kind.COLLECTIVE, name=operator, **times)
            else:
                about = columns(operator)
                builder.add(kind=Kind.HOST_OP, evidence=Evidence.MEASURED, **about, **times)
            if place:
                builder.edge(place - 1, place, Reason.PROGRAM_ORDER)
        for source, target in data:
            builder.edge(source, target, Reason.DATA)
        measurement = Measurement(step_ns=(7,), notes=(BY_HAND,))
        return builder.build(Job(device=Device("cpu", "Xeon"), measurement=measurement))

    return make


BY_HAND = Note("captured by hand", code="by-hand")

VIEW = {"op": "aten::view", "inputs": [("Tensor(float)", [4])], "outputs": [("Tensor(float)", [4])]}


def edges(graph: Graph) -> list[tuple[int, int, str]]:
    return sorted((s, t, r) for s, t, r in graph.edges_frame().iter_rows())


def test_operators_become_kernels(capture, mm, add, gpu_file):
    graph = capture(mm(10_000, 10_000, 10_000), add(10**8), mm(1, 1, 1))
    made = recost(graph, gpu_file("one", sustained=0.5), model="residual")
    assert made.nodes.kind.tolist() == [Kind.KERNEL] * 3
    assert made.nodes.stream.tolist() == [0, 0, 0]
    assert made.nodes.evidence.tolist() == [Evidence.DATASHEET] * 3
    # floor 2 us; 2e12 FLOPs at 50 TFLOPS; 6e8 bytes at 1 TB/s after 0.35 of it; nothing
    assert made.nodes.duration_ns.tolist() == [40_002_000, 600_700, 2000]
    assert made.nodes.start_ns.tolist() == [1000, 40_003_000, 40_603_700]
    assert edges(made) == [(0, 1, "stream_order"), (1, 2, "stream_order")]
    assert made.nodes.flops.tolist() == [2 * 10**12, 10**8, 2]


def test_float32_products_run_at_the_float32_rate(capture, mm, gpu_file):
    product = mm(10_000, 10_000, 10_000)
    product["inputs"] = [("Tensor(float)", [10_000, 10_000])] * 2
    made = recost(capture(product), gpu_file(), model="residual")
    assert made.nodes.duration_ns.tolist() == [200_002_000]  # 2e12 at 10 TFLOPS
    by_tiles = recost(capture(product), gpu_file()).nodes.duration_ns.item()
    assert 1.04 < by_tiles / 200_002_000 < 1.07
    for tpu, peak in (("TPU-v5p", 459 * 0.85), ("TPU-v6e", 918 * 0.8)):
        made = recost(capture(product), tpu)  # six passes in bf16
        assert made.nodes.duration_ns.tolist() == [pytest.approx(2000 + 12e12 / peak / 1e3, abs=1)]


def test_communication_keeps_its_place_and_time(capture, mm, gpu_file):
    graph = capture(mm(10, 10, 10), "all_reduce", mm(10, 10, 10), data=((0, 2),))
    made = recost(graph, gpu_file())
    assert made.nodes.kind.tolist() == [Kind.KERNEL, Kind.COLLECTIVE, Kind.KERNEL]
    assert edges(made) == [
        (0, 1, "program_order"),
        (0, 2, "data"),
        (1, 2, "program_order"),
    ]
    assert made.nodes.duration_ns[1] == 100
    assert made.nodes.evidence[1] == Evidence.NONE
    first = made.nodes.duration_ns[0]
    assert made.nodes.start_ns.tolist() == [1000, 1000 + first, 1100 + first]


def test_views_are_taken_out_and_counted(capture, mm, gpu_file):
    detach = {"op": "AddBackward0"}
    graph = capture(mm(8, 8, 8), VIEW, VIEW, "all_reduce", detach, mm(8, 8, 8), data=((2, 5),))
    made = recost(graph, gpu_file())
    assert made.nodes.id.tolist() == [0, 3, 5]
    assert edges(made) == [
        (0, 3, "program_order"),
        (0, 5, "stream_order"),
        (3, 5, "program_order"),
    ]
    details = made.job.annotations[-1].details
    assert details["dropped"] == {"aten::view": 2, "AddBackward0": 1}
    assert details["rules"]["dropped: launches nothing"] == 3
    made.topological_order()


def test_times_that_contradict_the_edges(capture, mm, gpu_file):
    graph = capture(*[mm(8, 8, 8)] * 4)
    graph = graph.with_columns(start_ns=np.array([5, 9, 7, 11]))
    assert edges(recost(graph, gpu_file())) == [
        (0, 1, "stream_order"),
        (1, 2, "stream_order"),
        (2, 3, "stream_order"),
    ]


def test_books_say_how_weak_it_is(capture, mm, gpu_file):
    unknown = {"op": "mylib::x"}
    made = recost(capture(mm(8, 8, 8), unknown), gpu_file("one"), model="ratio")
    assert (made.job.device.type, made.job.device.name) == ("cuda", "one")
    assert made.job.measurement.step_ns == ()
    assert made.job.measurement.notes[0] == BY_HAND
    assert made.job.measurement.notes[1].code == "recost-from-shapes"
    last = made.job.annotations[-1]
    assert (last.model, last.source) == ("datasheet", "Xeon")
    assert last.details["rules"]["no shapes: launch floor alone"] == 1
    with raises_code("recost-not-measured"):
        recost(made, gpu_file("two"))


def test_operators_without_shapes_are_refused(capture, mm, gpu_file):
    """A floor for each would make of a second of work some microseconds."""
    graph = capture(mm(64, 64, 64))
    untold = np.zeros(len(graph), dtype=graph.nodes.input_shapes.dtype)
    names = ("input_shapes", "input_types", "output_shapes", "output_types")
    graph = graph.with_columns(**dict.fromkeys(names, untold))
    with raises_code("recost-no-shapes"):
        recost(graph, gpu_file())


def test_no_gpu_measured_a_cpu_capture(capture, mm, gpu_file):
    with raises_code("recost-source-of-cpu"):
        recost(capture(mm(8, 8, 8)), gpu_file(), source="H100-SXM")


def attention(back: bool) -> dict[str, Any]:
    x, sums = ("Tensor(c10::BFloat16)", [2, 16, 4096, 128]), ("Tensor(float)", [2, 16, 4096])
    op = "aten::_scaled_dot_product_flash_attention_for_cpu"
    inputs = [x] * 5 + [sums] if back else [x] * 3
    outputs = [x] * 3 if back else [x, sums]
    values = ["t"] * len(inputs) + [0.0, True]
    inputs = [*inputs, ("Double", []), ("Bool", [])]
    name = f"{op}_backward" if back else op
    return {"op": name, "inputs": inputs, "outputs": outputs, "values": values}


def times_of_operators(graph):
    """Return the time of each distinct operator in the order of its first launch."""
    _, first, operator = np.unique(graph.nodes.op, return_index=True, return_inverse=True)
    times = np.bincount(operator, weights=graph.nodes.duration_ns)
    return times[np.argsort(first)]


def test_attention_may_be_by_a_kernel_that_is_named(capture):
    graph = capture(attention(False), attention(True))
    usual = times_of_operators(recost(graph, "H100"))
    made = recost(graph, "H100", passes=PassOptions(attention="flash2"))
    above = usual - load_gpu("H100").launch_floor_ns
    per_sm = 2 * 16 * (4096 / 128) / 132
    # The factor of heads of 128, the wait for the last tiles of a causal mask, and the boost clock
    # of a step of training, while the kernel was measured at the highest one.
    factor = 1.85 * (1 + 2 * 0.35 / per_sm) * 1980 / 1830
    slower = usual[1] + above[1] * (factor - 1)
    forward, backward = times_of_operators(made)
    # Half a nanosecond of rounding in `usual`, times the factor, and another half in `made`.
    assert backward == pytest.approx(slower, abs=0.5 * factor + 0.5)
    shape = np.array([[2, 16, 16, 4096, 4096, 128, 128, 1, 0]], dtype=float)
    terms = flash2_schedule_terms(load_gpu("H100"), shape, training=True)
    assert forward == pytest.approx(terms.predicted_ns[0], abs=0.5)
    note_of(
        made.job.measurement.notes, "attention-kernel-assumed", 2, "flash2", "H100-SXM", "x2.18"
    )
    own = recost(graph, "H100", passes=PassOptions(attention="flash3"))
    note_of(own.job.measurement.notes, "attention-kernel-assumed", 2, "flash3", "H100-SXM", "x1.00")


def test_attention_on_other_vendors_gpus_is_by_the_kernel_that_they_usually_run(capture):
    graph = capture(attention(False), attention(True))
    usual, named = recost(graph, "MI300X"), PassOptions(attention="aiter")
    above = usual.nodes.duration_ns - load_gpu("MI300X").launch_floor_ns
    faster = recost(graph, "MI300X", passes=named).nodes.duration_ns - usual.nodes.duration_ns
    assert -faster / above == pytest.approx([1 - 1.90 / 2.61, 1 - 1.32 / 5.46], rel=1e-3)
    notes = usual.job.measurement.notes
    note_of(notes, "attention-kernel-assumed", 2, "aotriton", "MI300X", "x2.61")


@pytest.mark.parametrize(
    ("kernel", "target", "code", "names"),
    [
        ("same", "H100", "attention-kernel-cpu", ("--kernel",)),
        (
            *("flash3", "A100", "attention-kernel-unsupported"),
            ("flash3", "A100-SXM-80GB", "ampere", "flash2, cudnn"),
        ),
        ("flash2", "V100", "attention-kernel-unsupported", ("flash2", "V100")),
        ("cudnn", "A100", "attention-kernel-unmeasured", ("cudnn", "ampere")),
    ],
)
def test_attention_kernels_that_nothing_is_known_of_are_refused(
    capture, kernel, target, code, names
):
    with raises_code(code, naming=names):
        recost(capture(attention(False)), target, passes=PassOptions(attention=kernel))


def test_summary(capture, mm, add, gpu_file):
    graph = capture(mm(8, 8, 8), VIEW, add(10))
    found = summarise(graph, recost(graph, gpu_file(), model="residual"))
    assert found.dropped == {"aten::view": 1}
    assert (found.before_ns, found.after_ns) == (300, 2700)
    assert found.evidence == {"datasheet": 2}


def test_a_table_of_gradients_is_filled_with_zeros_too(capture, gpu_file):
    grad, table = ("Tensor(float)", [10, 1000]), ("Tensor(float)", [10**6, 1000])
    inputs = [grad, ("Tensor(long int)", [10])]
    operator = {"op": "aten::embedding_dense_backward", "inputs": inputs, "outputs": [table]}
    made = recost(capture(operator), gpu_file())
    assert made.text("op") == ["aten::fill_", "aten::embedding_dense_backward"]
    assert made.nodes.bytes_written.tolist() == [4 * 10**9, 40_000]
    assert made.nodes.duration_ns[0] > 4_000_000  # at 1 TB/s


INDICES = ("Tensor(long int)", [16384])


@pytest.mark.parametrize(
    ("op", "inputs", "outputs", "launches", "measured_ns"),
    [
        ("sort", [INDICES], [INDICES] * 2, 22, 68_058),
        ("cumsum", [INDICES], [INDICES], 2, 3_454),
        (
            "embedding_dense_backward",
            [("Tensor(c10::BFloat16)", [16384, 512]), INDICES],
            [("Tensor(c10::BFloat16)", [32000, 512])],
            31,
            204_850,
        ),
        (
            "embedding_dense_backward",
            [("Tensor(c10::BFloat16)", [2048, 4096]), ("Tensor(long int)", [2048])],
            [("Tensor(c10::BFloat16)", [32000, 4096])],
            2,
            193_568,
        ),
    ],
)
def test_an_operator_takes_the_time_of_its_launches(  # noqa: PLR0917
    capture, op, inputs, outputs, launches, measured_ns
):
    """Sums of the kernels on an H100, torch 2.11, 2026-11-25. One sort kernel would take 1 us."""
    made = recost(capture({"op": f"aten::{op}", "inputs": inputs, "outputs": outputs}), "H100")
    assert len(made) == launches
    assert 0.5 * measured_ns < made.nodes.duration_ns.sum() < 1.5 * measured_ns

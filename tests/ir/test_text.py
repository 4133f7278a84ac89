"""The text form, line by line."""

import numpy as np
import pytest

from onerank.ir import (
    Annotation,
    Collective,
    Device,
    Evidence,
    GraphBuilder,
    Job,
    Kind,
    LayerExtrapolation,
    Line,
    Measurement,
    Module,
    Phase,
    ProcessGroup,
    Reading,
    Reason,
    ScopeTime,
    Sensors,
    World,
)
from onerank.ir.notes import Note
from onerank.ir.text import to_text


def test_graph_of_three_nodes():
    builder = GraphBuilder()
    builder.add(
        kind=Kind.HOST_OP, name="aten::mm", op="aten::mm", thread=1, start_ns=10, duration_ns=900
    )
    builder.add(
        kind=Kind.KERNEL,
        name="ampere_bf16_gemm",
        op="aten::mm",
        stream=7,
        start_ns=1000,
        duration_ns=1234,
        evidence=Evidence.MEASURED,
        module="model.layers.0.mlp.up_proj",
        phase=Phase.FORWARD,
        micro_batch=0,
        input_shapes="[[8192,4096],[4096,4096]]",
        input_types='["bf16", "bf16"]',
        flops=274877906944,
        grid="[32,4,1]",
    )
    builder.add(
        id=9,
        kind=Kind.COLLECTIVE,
        name="ncclDevKernel AllReduce",
        collective=Collective.ALL_REDUCE,
        comm_bytes=134217728,
        group="tp",
        stream=20,
        start_ns=2500,
        duration_ns=77,
    )
    builder.edge(0, 1, Reason.LAUNCH)
    builder.edge(1, 2, Reason.STREAM_ORDER)
    builder.edge(0, 2, Reason.DATA)
    job = Job(
        world=World({"tp": 4, "dp": 2}),
        rank=1,
        groups=(ProcessGroup("tp", (0, 1, 2, 3), "tp"), ProcessGroup("dp_1", (1, 5))),
        device=Device(type="cuda", name="NVIDIA H200", memory_bytes=150, sm_count=132),
        measurement=Measurement(
            step_ns=(5000, 5100),
            peak_memory_bytes=99,
            versions={"torch": "2.11.0+cu130"},
            notes=(Note("rank 1 stood in for all", code="rank-stood-in"),),
        ),
        annotations=(Annotation("h100", "ratio", "NVIDIA H200", {"scaled": 2}),),
    )
    assert to_text(builder.build(job)).splitlines() == [
        'graph rank=1 world=tp:4,dp:2 device="NVIDIA H200" device_type=cuda memory=150 sms=132',
        "group tp axis=tp ranks=0-3",
        "group dp_1 ranks=1,5",
        "measured steps=5000,5100 peak_memory=99",
        "version torch 2.11.0+cu130",
        'note rank-stood-in "rank 1 stood in for all"',
        'annotated target=h100 model=ratio source="NVIDIA H200" details={"scaled": 2}',
        '0 host_op "aten::mm" op=aten::mm thread=1 start=10 dur=900 deps=[]',
        '1 kernel "ampere_bf16_gemm" op=aten::mm stream=7 start=1000 dur=1234 evidence=measured'
        " module=model.layers.0.mlp.up_proj phase=forward micro_batch=0"
        ' in=[[8192,4096],[4096,4096]] in_types=["bf16", "bf16"] flops=274877906944'
        " grid=[32,4,1] deps=[0:launch]",
        '9 collective all_reduce "ncclDevKernel AllReduce" bytes=134217728 group=tp stream=20'
        " start=2500 dur=77 deps=[1:stream_order, 0:data]",
    ]


def test_modules_times_and_sensors():
    builder = GraphBuilder()
    builder.add(kind=Kind.KERNEL, name="k", duration_ns=50, samples=3, spread_ns=4)
    sensors = Sensors(
        12, Reading(1980, 1965, 1980), power_mw=Reading(5, 4, 6), throttled={"x y": 2}
    )
    job = Job(
        device=Device("cuda", sensors=sensors),
        measurement=Measurement(
            gpu_busy_ns=90,
            timed_step_ns=(100, 110),
            scopes=(ScopeTime("layers.0", "backward", 2, 70, 5, 3),),
        ),
        modules=(Module("layers.0.mlp.up", "Linear", "mlp", "layers.0", "layers.0.mlp"),),
    )
    assert to_text(builder.build(job)).splitlines() == [
        "graph rank=0 device_type=cuda",
        "measured timed_steps=100,110 gpu_busy=90",
        'sensors samples=12 sm_clock_mhz=1980(1965..1980) power_mw=5(4..6) "x y"=2',
        "timed layers.0 phase=backward calls=2 dur=70 spread=5 samples=3",
        "module layers.0.mlp.up type=Linear role=mlp layer=layers.0 scope=layers.0.mlp",
        '0 kernel "k" start=0 dur=50 samples=3 spread=4 deps=[]',
    ]


def test_the_lines_through_captures_with_fewer_layers():
    line = Line((10, 20), 0.0, 5.0, None, 40)
    depths = LayerExtrapolation(
        layers=(2, 4), depth=8, module="h", first=1, period=3, copied=4,
        compute_ns=line, step_ns=Line((10, 20, 31), -0.5, 5.25, 0.0123, 42),
        peak_memory_bytes=line, comm_bytes=line,
        composed_compute_ns=41, replayed_peak_bytes=39, layer_mismatch=0.00123,
    )  # fmt: skip
    text = to_text(GraphBuilder().build(Job(measurement=Measurement(depths=depths))))
    assert text.splitlines()[1:] == [
        "depths 2,4 of=8 module=h first=1 period=3 copied=4 compute=41 replayed_peak=39"
        " layer_mismatch=0.00123",
        "line compute_ns values=10,20 slope=5 intercept=0 at_depth=40",
        "line step_ns values=10,20,31 slope=5.25 intercept=-0.5 residual=0.0123 at_depth=42",
        "line peak_memory_bytes values=10,20 slope=5 intercept=0 at_depth=40",
        "line comm_bytes values=10,20 slope=5 intercept=0 at_depth=40",
    ]


def test_empty_graph_is_one_line():
    assert to_text(GraphBuilder().build(Job())) == "graph rank=0\n"


@pytest.mark.parametrize(
    ("ranks", "shown"),
    [
        ((3,), "3"),
        ((0, 1), "0,1"),
        ((0, 1, 2), "0-2"),
        ((1, 5, 9, 13), "1-13:4"),
        ((0, 1, 4), "0,1,4"),
        ((2, 1, 0), "2,1,0"),
    ],
)
def test_ranks(ranks: tuple[int, ...], shown: str):
    graph = GraphBuilder().build(Job(groups=(ProcessGroup("g", ranks),)))
    assert to_text(graph).splitlines()[1] == f"group g ranks={shown}"


def test_text_that_is_not_one_word_is_quoted_and_stays_on_its_line():
    builder = GraphBuilder()
    builder.add(kind=Kind.KERNEL, name='a "b"\nc', module="x y", group="[1, 2", block="[1]")
    line = to_text(builder.build(Job())).splitlines()[1]
    assert line == (
        '0 kernel "a \\"b\\"\\nc" group="[1, 2" start=0 dur=0 module="x y" block=[1] deps=[]'
    )


def test_number_outside_its_vocabulary_is_shown_as_number():
    builder = GraphBuilder()
    builder.add(kind=99, name="odd", phase=7)
    assert to_text(builder.build(Job())).splitlines()[1] == (
        '0 99 "odd" start=0 dur=0 phase=7 deps=[]'
    )


def test_node_of_another_tool_is_marked():
    builder = GraphBuilder()
    builder.add(kind=Kind.KERNEL, name="k")
    graph = builder.build(Job())
    graph = graph.with_columns(foreign=np.array([b""], dtype=object))
    assert to_text(graph).splitlines()[1] == '0 kernel "k" start=0 dur=0 foreign deps=[]'

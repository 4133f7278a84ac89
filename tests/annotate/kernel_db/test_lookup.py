"""Durations from a kernel database: what is looked up, by what rule, and how sure it is."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import database_row
import msgspec
import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner
from error_width import error_width
from notes import has_note, note_of
from raised import raises_code

from onerank.annotate import PassOptions, explain, load_gpu, recost, summarise
from onerank.annotate.kernel_db import database as library
from onerank.annotate.kernel_db.calls import call_key, modelled_ns, point_of
from onerank.annotate.kernel_db.database import (
    CALL,
    KernelRow,
    read_database,
    table_of,
    write_database,
)
from onerank.annotate.models.learned import predict_from_description
from onerank.cli import annotate
from onerank.ir import Device, Evidence, Graph, GraphBuilder, Job, Kind, StringTable

H200, A100 = "NVIDIA H200", "NVIDIA A100-SXM4-80GB"

ROW = msgspec.structs.replace(
    database_row.ROW,
    gpu=A100,
    shapes=((512, 512), (512, 512)),
    layout="{}",
    kernels=("ampere_gemm",),
    kernel_ns=(20_000,),
    median_ns=20_000,
    p10_ns=20_000,
    p90_ns=20_000,
    sm_clock_mhz=1350,
    power_w=None,
    temperature_c=40,
    energy_mj=None,
)


def ends(median: int, low: int = 0, high: int = 0) -> dict[str, Any]:
    """Return the fields of a row that took so long."""
    return {"median_ns": median, "p10_ns": low or median, "p90_ns": high or median}


def row(operator: dict[str, Any], **fields: Any) -> KernelRow:
    """Return the row of a call given as the fixtures give operators."""
    shapes, types = ([one[at] for one in operator["inputs"]] for at in (1, 0))
    values = json.dumps(operator.get("values", []))
    key = call_key(operator["op"], json.dumps(shapes), json.dumps(types), values)
    assert key is not None
    if "median_ns" in fields:
        fields = {"kernel_ns": (fields["median_ns"],), **ends(fields["median_ns"]), **fields}
    columns = {name: getattr(key, name) for name in CALL}
    return msgspec.structs.replace(ROW, **columns, **fields)


@pytest.fixture
def trace(trace):
    """Return graphs that ran with the versions of `ROW`."""
    return lambda *given, **about: versioned(trace(*given, **about), torch="2.11.0", cuda="13.0")


@pytest.fixture
def database(tmp_path: Path) -> Callable[..., Path]:
    """Return the path of a database of some rows."""

    def make(*rows: KernelRow, name: str = "db.parquet") -> Path:
        write_database(table_of(rows), tmp_path / name)
        return tmp_path / name

    return make


def times(graph: Graph) -> list[int]:
    return graph.nodes.duration_ns[graph.gpu_compute].tolist()


def evidence(graph: Graph) -> list[Evidence]:
    return [Evidence(code) for code in graph.nodes.evidence[graph.gpu_compute].tolist()]


def versioned(graph: Graph, **versions: str) -> Graph:
    """Return a graph that tells its versions."""
    measurement = msgspec.structs.replace(graph.job.measurement, versions=versions)
    return replace(graph, job=msgspec.structs.replace(graph.job, measurement=measurement))


@pytest.mark.parametrize(
    ("versions", "kind", "naming"),
    [
        ({"torch": "2.11.0+cu130", "cuda": "13.0"}, "looked_up", None),
        (
            {"torch": "2.13.0+cu130", "cuda": "13.0"},
            "looked_up_other_versions",
            ("torch 2.13.0", "CUDA 13.0"),
        ),
        ({}, "looked_up_other_versions", ()),
    ],
)
def test_a_row_of_the_call_gives_its_time_and_the_interval_of_look_ups(
    trace, mm, add, *, database, versions, kind, naming
):
    graph = versioned(trace(add(10**6), mm(512, 512, 512)), **versions)
    path = database(row(add(10**6), **ends(23_000, 22_000, 24_000) | {"kernel_ns": (20_000,)}))
    made = recost(graph, "A100", databases=[path])
    learned = recost(graph, "A100", model="learned")
    assert times(made) == [20_000, times(learned)[1]]  # what replays took is another thing
    assert evidence(made) == [Evidence.LOOKED_UP, Evidence.CALIBRATED]
    rules = made.job.annotations[-1].details["rules"]
    assert rules["looked up: this call was measured on this GPU"] == 1
    reach = math.hypot(error_width(kind, "A100", 20_000), math.log(24 / 22) / 2)
    first = np.flatnonzero(made.gpu_compute)[0]
    assert made.nodes.p10_ns[first] == round(20_000 * math.exp(-reach))
    assert made.nodes.p90_ns[first] == round(20_000 * math.exp(reach))
    notes = made.job.measurement.notes
    rows = "NVIDIA A100-SXM4-80GB", "torch 2.11.0", "CUDA 13.0", "2026-11-21", "1 of 2"
    note_of(notes, "kernel-database", *rows)
    code = "kernel-database-other-versions"
    assert has_note(notes, code, *(naming or ())) == (naming is not None)


def test_the_kernels_of_a_call_share_its_row_and_a_fill_has_its_own_time(trace, mm, database):
    kernels = [("Memset (Device)", 1000, Kind.MEMSET), ("gemm", 9000), ("splitk", 3000)]
    graph = trace(mm(512, 512, 512, kernels=kernels))
    there = ("Memset (Device)", "ampere_gemm", "splitKreduce")
    path = database(
        row(mm(512, 512, 512), kernels=there, kernel_ns=(4000, 20_000, 8000), median_ns=32_000)
    )
    assert times(recost(graph, "A100", databases=[path])) == [4000, 21_000, 7000]
    alone = database(row(mm(512, 512, 512), kernels=("ampere_gemm",), median_ns=28_000))
    fill = times(recost(graph, "A100", model="learned"))[0]
    assert times(recost(graph, "A100", databases=[alone])) == [fill, 21_000, 7000]


def test_half_of_the_deviation_from_the_sources_own_row_is_carried_over(trace, mm, database):
    graph = trace(mm(512, 512, 512, kernels=[("nvjet", 12_100)]))
    here = row(mm(512, 512, 512), gpu=H200, kernels=("nvjet",), median_ns=10_000)
    there = row(mm(512, 512, 512), median_ns=20_000)
    path = database(here, there)
    made = recost(graph, "A100", databases=[path])
    assert times(made) == [22_000]  # 20,000 x 1.21 ** 0.5
    assert evidence(made) == [Evidence.LOOKED_UP]
    shown = dict(explain(graph, "A100", int(graph.nodes.id[1]), databases=[path]).lines)
    assert shown["both"] == "20,000 x 1.0000 x (12,100 / 10,000)^0.5000 = 22,000 ns"
    other = msgspec.structs.replace(here, kernels=("cutlass",))
    assert times(recost(graph, "A100", databases=[database(other, there)])) == [20_000]


def test_the_layout_is_that_of_the_kernel_that_ran_and_else_any(trace, mm, database):
    graph = trace(mm(512, 512, 512, kernels=[("nvjet_TNT", 10_000)]))
    turned = '{"1":[1,512]}'
    rows = [
        row(mm(512, 512, 512), median_ns=20_000),
        row(mm(512, 512, 512), median_ns=22_050, layout=turned),
    ]
    unknown = recost(graph, "A100", databases=[database(*rows)])
    assert times(unknown) == [21_000]  # their geometric mean
    other_layout = row(
        mm(512, 512, 512), gpu=H200, kernels=("nvjet_TNT",), median_ns=10_000, layout=turned
    )
    known = recost(graph, "A100", databases=[database(*rows, other_layout)])
    assert times(known) == [22_050]
    width = [
        np.log(one.nodes.p90_ns[one.gpu_compute] / one.nodes.p10_ns[one.gpu_compute])[0]
        for one in (unknown, known)
    ]
    assert width[0] > width[1]
    seen = trace(mm(512, 512, 512, kernels=[("ampere_gemm", 10_000)]))
    named = msgspec.structs.replace(rows[1], kernels=("other",))
    assert times(recost(seen, "A100", databases=[database(rows[0], named)])) == [20_000]


@pytest.mark.parametrize(
    ("fields", "taken"),
    [
        ({"l2": "warm", "date": "2026-11-22", **ends(24_200), "kernel_ns": (24_200,)}, 22_000),
        ({"torch": "2.13.0+cu130"}, 40_000),
        ({"driver": "590.1", "date": "2026-11-20"}, 20_000),
        ({"driver": "590.1", "date": "2026-11-22"}, 40_000),
    ],
)
def test_of_several_rows_those_of_the_traces_versions_come_first_then_the_latest(
    trace, add, database, fields, taken
):
    graph = versioned(trace(add(10**6)), torch="2.13.0")
    other = row(add(10**6), **{"median_ns": 40_000, **fields})
    rows = row(add(10**6)), other
    made = recost(graph, "A100", databases=[database(*rows)])
    assert times(made) == [taken]
    code = "kernel-database-other-versions"
    assert has_note(made.job.measurement.notes, code, "torch 2.13.0") == ("torch" not in fields)


def test_a_kernel_takes_what_the_one_of_its_name_takes(trace, mm, database):
    # the row's fill is another operator's in the trace
    graph = trace(mm(512, 512, 512, kernels=[("nll", 9000), ("reduce", 4000)]))
    there = ("fill", "nll", "reduce", "reduce")
    spent = (90_000, 20_000, 5000, 7000)
    path = database(row(mm(512, 512, 512), kernels=there, kernel_ns=spent, **ends(122_000)))
    assert times(recost(graph, "A100", databases=[path])) == [20_000, 6000]


def test_calls_that_differ_in_tensors_alone_are_one_and_flags_count(trace, database):
    def mean(number: int, dim: int) -> dict[str, Any]:
        return {
            "op": "aten::mean",
            "inputs": [("Tensor(float)", [64, 4096]), ("GenericList[Int]", [[]]), ("Bool", [])],
            "values": [[number, number + 1, 0, 262144, 4, "cuda:0"], [dim], True],
            "outputs": [("Tensor(float)", [64, 1])],
        }

    graph = trace(mean(3, -1), mean(7, -1), mean(9, 0))
    path = database(row(mean(1, -1), median_ns=5000))
    made = recost(graph, "A100", databases=[path])
    learned = recost(graph, "A100", model="learned")
    assert times(made) == [5000, 5000, times(learned)[2]]


def off_by(operators: list[dict[str, Any]], factor: float) -> list[KernelRow]:
    """Return rows that take `factor` as long as the model says."""
    gpu = load_gpu("A100")
    points = [point_of(row(one).key) for one in operators]
    modelled = modelled_ns([point.work for point in points if point], gpu, predict_from_description)
    return [
        row(one, median_ns=round(ns * factor)) for one, ns in zip(operators, modelled, strict=True)
    ]


def test_between_rows_the_model_is_off_as_it_is_around(trace, mm, database):
    sizes = [512, 1024, 2048]
    rows = off_by([mm(m, n, 4096) for m in sizes for n in sizes if (m, n) != (1024, 2048)], 1.3)
    path = database(*rows)
    graph = trace(mm(1024, 2048, 4096), mm(4096, 2048, 4096), mm(1024, 2048, 8192))
    made = recost(graph, "A100", databases=[path])
    learned = recost(graph, "A100", model="learned")
    assert evidence(made) == [Evidence.INTERPOLATED, Evidence.CALIBRATED, Evidence.CALIBRATED]
    (right,) = off_by([mm(1024, 2048, 4096)], 1.3)
    assert times(made) == [pytest.approx(right.median_ns, abs=3), *times(learned)[1:]]
    shown = explain(graph, "A100", int(graph.nodes.id[1]), databases=[path])
    assert shown.duration_ns == times(made)[0]
    lines = [text for name, text in shown.lines if name == "near"]
    assert len(lines) == 8
    assert all("ln(measured / modelled) = +0.262" in line for line in lines)
    outside = dict(explain(graph, "A100", int(graph.nodes.id[3]), databases=[path]).lines)
    assert outside["database"] == "no row of this call, and it does not lie between rows"


def test_what_lies_between_rows_that_do_not_agree_is_left_to_the_model(trace, mm, database):
    grid = [mm(m, n, 4096) for m in (512, 1024, 2048) for n in (512, 1024, 2048)]
    wild = [off_by([one], 3.0 ** (-1) ** at)[0] for at, one in enumerate(grid)]
    graph = trace(mm(768, 1024, 4096))
    path = database(*wild)
    made = recost(graph, "A100", databases=[path])
    assert evidence(made) == [Evidence.CALIBRATED]
    assert times(made) == times(recost(graph, "A100", model="learned"))
    note_of(made.job.measurement.notes, "kernel-database-wider", 1)
    shown = dict(explain(graph, "A100", int(graph.nodes.id[1]), databases=[path]).lines)
    assert shown["database"] == "not used: the model's interval is narrower"


def test_other_versions_tell_less_of_a_kernel_than_a_gpu_of_the_targets_die(
    trace, mm, add, database
):
    graph = versioned(trace(mm(4096, 4096, 4096, ns=250_000), add(10**6)), torch="2.13.0")
    rows = row(mm(4096, 4096, 4096), gpu="NVIDIA H100 80GB HBM3"), row(add(10**6), gpu="H100-SXM")
    made = recost(graph, "H100", databases=[database(*rows)])
    assert evidence(made) == [Evidence.CALIBRATED, Evidence.CALIBRATED]
    assert times(made) == times(recost(graph, "H100", model="learned"))


def test_elementwise_calls_lie_between_those_of_their_own_form(trace, add, database):
    path = database(*off_by([add(10**6 * n) for n in (1, 2, 4, 8, 16)], 1.1))
    spread = add(3 * 10**6)
    spread["inputs"] = [spread["inputs"][0], ("Tensor(c10::BFloat16)", [1]), ("Int", [])]
    graph = trace(add(3 * 10**6, ns=30_000), spread)
    made = recost(graph, "A100", databases=[path])
    assert evidence(made) == [Evidence.INTERPOLATED, Evidence.CALIBRATED]
    (right,) = off_by([add(3 * 10**6)], 1.1)
    assert times(made)[0] == pytest.approx(right.median_ns, rel=0.02)


def test_a_scalar_lies_between_rows_as_a_row_of_one_element(trace, database):
    def total(*shape: int) -> dict[str, Any]:
        inputs, outputs = [("Tensor(float)", [*shape]), ("None", [])], [("Tensor(float)", [])]
        return {"op": "aten::sum", "inputs": inputs, "outputs": outputs}

    path = database(*off_by([total(2**power) for power in range(7)], 1.3))
    made = recost(trace(total(), total(3)), "A100", databases=[path])
    assert evidence(made) == [Evidence.INTERPOLATED] * 2
    (right,) = off_by([total(1)], 1.3)
    assert times(made)[0] == pytest.approx(right.median_ns, abs=3)


def test_a_cpu_captures_operators_are_looked_up_whole(mm, columns, database):
    builder = GraphBuilder()
    for start, one in enumerate([mm(512, 512, 512), mm(64, 64, 64)]):
        builder.add(kind=Kind.HOST_OP, thread=1, start_ns=start, duration_ns=9, **columns(one))
    graph = builder.build(Job(device=Device("cpu", "cpu")))
    there = ("Memset (Device)", "ampere_gemm")
    path = database(row(mm(512, 512, 512), kernels=there, kernel_ns=(1000, 3000), **ends(8000)))
    made = recost(graph, "A100", databases=[path])
    assert times(made)[0] == 4000
    assert evidence(made) == [Evidence.LOOKED_UP, Evidence.DATASHEET]
    wide = strings_with(graph, "c10::BFloat16", "float")  # the same captured in float32
    assert evidence(recost(wide, "A100", databases=[path])) == [Evidence.DATASHEET] * 2
    narrow = recost(wide, "A100", databases=[path], passes=PassOptions(dtype="bf16"))
    assert times(narrow) == times(made)
    assert evidence(narrow) == evidence(made)


def test_rows_in_tf32_are_of_calls_in_tf32(mm, columns, database):
    product = mm(512, 512, 512)
    product["inputs"] = [("Tensor(float)", shape) for _, shape in product["inputs"]]
    builder = GraphBuilder()
    builder.add(kind=Kind.HOST_OP, thread=1, **columns(product))
    graph = builder.build(Job(device=Device("cpu", "cpu")))
    measurement = msgspec.structs.replace(graph.job.measurement, tf32_gemms=True)
    allowing = replace(graph, job=msgspec.structs.replace(graph.job, measurement=measurement))
    path = database(row(product, median_ns=40_000), row(product, median_ns=8_000, layout=TF32))
    for each, ns in ((graph, 40_000), (allowing, 8_000)):
        assert times(recost(each, "A100", databases=[path])) == [ns]
    # A kernel of the other unit is modelled, not taken.
    path = database(row(product, median_ns=8_000, layout=TF32))
    made = recost(graph, "A100", databases=[path])
    assert evidence(made) == [Evidence.DATASHEET]


TF32 = '{"tf32":true}'


def test_the_strides_of_an_operator_select_the_layout(mm, columns, database):
    path = database(
        row(mm(512, 512, 512), median_ns=20_000),
        row(mm(512, 512, 512), median_ns=22_050, layout='{"1":[1,512]}'),
        row(mm(512, 512, 512), median_ns=24_200, layout='{"0":[1,512]}'),
    )
    strides = ["", "[[512,1],[1,512],[]]", "[[1,512],[512,1],[]]"]
    builder = GraphBuilder()
    for start, text in enumerate(strides):
        operator = {**columns(mm(512, 512, 512)), "input_strides": text}
        builder.add(kind=Kind.HOST_OP, thread=1, start_ns=start, **operator)
    graph = builder.build(Job(device=Device("cpu", "cpu")))
    arguments = len(json.loads(graph.text("input_shapes")[0]))
    assert arguments in (2, 3)
    texts = [text.replace(",[]]", "]") if arguments == 2 else text for text in strides]
    graph = graph.with_columns(input_strides=texts)
    assert times(recost(graph, "A100", databases=[path])) == [20_000, 22_050, 24_200]
    # Without strides every layout counts: the geometric mean.
    unknown = recost(graph.with_columns(input_strides=[""] * 3), "A100", databases=[path])
    assert times(unknown) == [round((20_000 * 22_050 * 24_200) ** (1 / 3))] * 3


def test_strided_elementwise_calls_do_not_lie_between_contiguous_ones(add, columns, database):
    path = database(*off_by([add(10**6 * n) for n in (1, 2, 4, 8, 16)], 1.1))
    shape = [1, 32, 732, 128]
    inputs = [("Tensor(c10::BFloat16)", shape), ("Tensor(c10::BFloat16)", shape), ("Int", [])]
    contiguous, strided = "[2998272,93696,128,1]", "[2998272,128,4096,1]"
    builder = GraphBuilder()
    for start, other in enumerate((contiguous, strided)):
        call = columns({"op": "aten::add", "inputs": inputs, "outputs": inputs[:1]})
        call["input_strides"] = f"[{contiguous},{other},[]]"
        builder.add(kind=Kind.HOST_OP, thread=1, start_ns=start, **call)
    graph = builder.build(Job(device=Device("cpu", "cpu")))
    made = recost(graph, "A100", databases=[path])
    assert evidence(made) == [Evidence.INTERPOLATED, Evidence.DATASHEET]
    assert times(made)[1] == times(recost(graph, "A100", model="learned"))[1]


def strings_with(graph: Graph, old: str, new: str) -> Graph:
    texts = [text.replace(old, new) for text in graph.strings.values]
    return replace(graph, strings=StringTable(texts))


def test_nothing_is_looked_up_for_the_gpu_that_measured_nor_for_another_type(trace, mm, database):
    graph = trace(mm(512, 512, 448, ns=9000))
    here = database(row(mm(512, 512, 448), gpu=H200))
    assert times(recost(graph, "H200", databases=[here])) == [9000]
    source = trace(mm(512, 512, 448, ns=9000), device="A100-SXM-80GB")
    made = recost(source, "H200", databases=[here], passes=PassOptions(dtype="fp8"))
    assert evidence(made) == [Evidence.CALIBRATED]
    assert evidence(recost(source, "H200", databases=[here])) == [Evidence.LOOKED_UP]


def test_a_looked_up_graph_is_no_measurement(trace, mm, database):
    graph = trace(mm(512, 512, 512))
    made = recost(graph, "A100", databases=[database(row(mm(512, 512, 512)))])
    with raises_code("recost-not-measured", naming=("1 of 1", "A100-SXM-80GB")):
        recost(made, "H100")


def test_the_summary_tells_evidence_by_count_and_by_time(trace, mm, add, database):
    graph = trace(mm(512, 512, 512), mm(64, 64, 64, ns=3000), add(10**6))
    made = recost(graph, "A100", databases=[database(row(mm(512, 512, 512)))])
    found = summarise(graph, made)
    gemm = next(one for one in found.classes if one.op_class.value == "gemm")
    assert found.evidence == {"calibrated": 2, "looked_up": 1}
    assert gemm.evidence_ns == {"calibrated": times(made)[1], "looked_up": 20_000}
    assert found.evidence_ns == {"calibrated": sum(times(made)[1:]), "looked_up": 20_000}


def test_distinct_calls_are_matched_once(trace, mm, database, monkeypatch):
    graph = trace(*[mm(512, 512, 512)] * 50)
    path = database(row(mm(512, 512, 512)))
    calls: list[object] = []
    match = library.Library.match
    monkeypatch.setattr(
        library.Library, "match", lambda own, *about: calls.append(about) or match(own, *about)
    )
    assert times(recost(graph, "A100", databases=[path])) == [20_000] * 50
    assert len(calls) == 1


class TestShipped:
    def test_one_with_rows_of_the_target_is_used_by_itself(
        self, trace, mm, database, tmp_path, monkeypatch
    ):
        graph = trace(mm(512, 512, 512))
        folder = tmp_path / "databases"
        folder.mkdir()
        database(row(mm(512, 512, 512)), name="databases/A100.parquet")
        monkeypatch.setattr(library, "SHIPPED", folder)
        assert times(recost(graph, "A100")) == [20_000]
        assert evidence(recost(graph, "A100", model="learned")) == [Evidence.CALIBRATED]
        assert evidence(recost(graph, "H100")) == [Evidence.CALIBRATED]
        own = database(row(mm(512, 512, 512), median_ns=30_000, date="2026-11-22"))
        assert times(recost(graph, "A100", databases=[own])) == [30_000]

    def test_a_description_that_was_measured_has_those_of_its_board(
        self, trace, mm, database, tmp_path
    ):
        """What `onerank bench describe` and `measure` wrote on one GPU go together."""
        mine = tmp_path / "mine.toml"
        description = (files("onerank.annotate") / "gpus" / "A100-SXM-80GB.toml").read_text()
        mine.write_text(
            description.replace('"A100-SXM-80GB"', '"A100-SXM-80GB (measured 2026-11-23)"', 1)
        )
        assert load_gpu(str(mine)).name == "A100-SXM-80GB (measured 2026-11-23)"
        own = database(row(mm(512, 512, 512)))
        assert times(recost(trace(mm(512, 512, 512)), str(mine), databases=[own])) == [20_000]

    def test_every_one_can_be_read_and_is_of_one_gpu(self):
        for path in library.SHIPPED.glob("*.parquet"):
            names = read_database(path)["gpu"].unique()
            assert len(names) == 1
            assert library.is_called(load_gpu(path.stem), names[0])


class TestRefused:
    def test_a_database_of_other_gpus(self, trace, mm, database):
        graph = trace(mm(512, 512, 512))
        path = database(row(mm(512, 512, 512), gpu="NVIDIA L40S"))
        with raises_code("database-other-gpu", naming=("NVIDIA L40S", "A100-SXM-80GB")):
            recost(graph, "A100", databases=[path])
        with raises_code("database-other-gpu"):
            recost(graph, "A100", databases=[database()])

    def test_a_database_of_the_source_alone(self, trace, mm, database):
        path = database(row(mm(512, 512, 512), gpu=H200))
        with raises_code("database-source-only"):
            recost(trace(mm(512, 512, 512)), "A100", databases=[path])

    def test_a_model_that_looks_nothing_up(self, trace, mm, database):
        path = database(row(mm(512, 512, 512)))
        with raises_code("database-model-ignores"):
            recost(trace(mm(512, 512, 512)), "A100", model="ratio", databases=[path])

    @pytest.mark.parametrize(
        ("change", "code", "name"),
        [
            (lambda table: table.drop("kernel_ns"), "database-missing-column", "kernel_ns"),
            (
                lambda table: table.with_columns(p10_ns=-table["p10_ns"]),
                *("database-bad-value", "0 < p10_ns"),
            ),
            (
                lambda table: table.with_columns(
                    kernel_ns=pl.col("kernel_ns").list.eval(-pl.element())
                ),
                *("database-bad-value", "row 0 (aten::mm): kernel_ns"),
            ),
        ],
    )
    def test_a_file_that_is_no_database(  # noqa: PLR0917
        self, trace, mm, tmp_path, change, code, name
    ):
        trace(mm(512, 512, 512)).write(tmp_path / "t.et")
        path = tmp_path / "bad.parquet"
        change(table_of([ROW])).write_parquet(path)
        with raises_code(code, naming=("bad.parquet", name)):
            recost(trace(mm(512, 512, 512)), "A100", databases=[path])
        args = ["--target", "A100", "--database", str(path), str(tmp_path / "t.et")]
        result = CliRunner().invoke(annotate, args)
        assert result.exit_code == 2
        assert result.stderr.startswith("error[")
        absent = CliRunner().invoke(annotate, [*args[:3], str(tmp_path / "none"), args[4]])
        assert absent.exit_code == 2
        assert f"error[file-access]: {tmp_path / 'none'}: " in absent.stderr


def test_the_command_looks_up_and_explains(trace, mm, database, tmp_path):
    graph = trace(mm(512, 512, 512), mm(64, 64, 64, ns=3000))
    graph.write(tmp_path / "t.et")
    path = database(row(mm(512, 512, 512)))
    args = ["--target", "A100", "--database", str(path), str(tmp_path / "t.et")]
    shown = CliRunner().invoke(annotate, args)
    assert shown.exit_code == 0, shown.output
    assert re.search(r"1 calibrated \(\d+\.\d% of the time\), 1 looked up \(\d+\.\d%", shown.output)
    assert "% looked up, " in shown.output
    shown = CliRunner().invoke(annotate, [*args, "--explain", str(int(graph.nodes.id[1]))])
    assert shown.exit_code == 0, shown.output
    assert "20,000 ns (20,000 replayed, 20,000 to 20,000 in 20 samples, cold" in shown.output
    assert (
        "NVIDIA A100-SXM4-80GB 2026-11-21T15:00:00Z, 1,350 MHz, 40 C, torch 2.11.0" in shown.output
    )

"""Passes over a capture on an H200 with sequence and hidden size 4096 and micro-batch 1."""

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from error_width import error_width
from notes import has_note, note_of
from raised import raises_code

from onerank.analysis.step_time import replay
from onerank.annotate import OpClass, PassOptions, load_gpu, recost, summarise
from onerank.annotate.kernel_db.calls import CallKey
from onerank.annotate.kernel_db.database import Library, open_library
from onerank.annotate.kernel_db.node_durations import at_one_clock
from onerank.annotate.passes.fuse_kernels import CHOICES, FuseChains
from onerank.annotate.passes.host_time import scale_host
from onerank.annotate.passes.overlap import SerializeOverlap
from onerank.annotate.passes.pass_options import parse_sizes
from onerank.annotate.passes.resize.resize import Resize
from onerank.annotate.passes.resize.size_change import Change, Sizing, parse_change
from onerank.cli.commands.annotate import AnnotateOptions, annotate
from onerank.cli.dataclass_to_click import choices
from onerank.converters.sources.kineto import convert_directory
from onerank.ir import (
    Compilation,
    Evidence,
    Graph,
    Job,
    Kind,
    Module,
    Phase,
    ScopeTime,
    World,
)

TRACES = Path(__file__).parents[3] / "traces"


@pytest.fixture(scope="module")
def h200() -> Graph:
    return convert_directory(TRACES / "h200-llama-8b-4l-tp4")[0]


def longer(graph: Graph, target="H200", model="learned", **more) -> Graph:
    passes = PassOptions(sizes=Resize(Change(0, 8192)), **more)
    return recost(graph, target, model=model, passes=passes)


def by_class(before: Graph, after: Graph):
    return {row.op_class: row for row in summarise(before, after).classes}


class TestTwiceTheSequence:
    def test_products_double_attention_quadruples_and_the_optimizer_stays(self, h200):
        plain, resized = recost(h200, "H200"), longer(h200)
        was, now = by_class(h200, plain), by_class(h200, resized)
        # 6 FLOPs a parameter and token, and rotary embeddings' small product
        assert now[OpClass.GEMM].flops == pytest.approx(2 * was[OpClass.GEMM].flops, rel=1e-5)
        assert now[OpClass.ATTENTION].flops == 4 * was[OpClass.ATTENTION].flops
        assert now[OpClass.OPTIMIZER] == was[OpClass.OPTIMIZER]
        assert now[OpClass.GEMM].after_ns == pytest.approx(2 * was[OpClass.GEMM].after_ns, rel=0.02)
        ratio = now[OpClass.ATTENTION].after_ns / was[OpClass.ATTENTION].after_ns
        assert 3.2 < ratio < 4  # 2.95 forward and 3.1 back by the database's rows

    def test_communication_of_activations_doubles(self, h200):
        resized, calls = longer(h200), h200.communication
        assert calls.sum() == 21
        assert (resized.nodes.comm_bytes[calls] == 2 * h200.nodes.comm_bytes[calls]).all()

    def test_memory_bound_kernels_scale_by_their_bytes(self, h200):
        resized = longer(h200)
        node = next(n.index for n in h200 if n.kind is Kind.KERNEL and n.text("op") == "aten::silu")
        taken = int(h200.nodes.duration_ns[node])
        # twice what is above 1 us; of that 1 us' part, what 4096 x 3584 read and written take
        in_proportion, gained = 1000 + 2 * (taken - 1000), taken + 4 * 4096 * 3584 / 4108.8
        longer_ns = in_proportion ** (1 - 1000 / taken) * gained ** (1000 / taken)
        assert resized.nodes.duration_ns[node] == round(longer_ns)
        assert resized.nodes.bytes_read[node] == 2 * 8192 * 3584
        assert resized.nodes.evidence[node] == Evidence.EXTRAPOLATED
        low, high = (getattr(resized.nodes, name)[node] for name in ("p10_ns", "p90_ns"))
        width = error_width("resized_memory", "H200", longer_ns)
        assert low / resized.nodes.duration_ns[node] == pytest.approx(np.exp(-width), abs=1e-3)
        assert high / resized.nodes.duration_ns[node] == pytest.approx(np.exp(width), abs=1e-3)
        untouched = h200.gpu_compute & (h200.nodes.phase == Phase.OPTIMIZER)
        assert (resized.nodes.evidence[untouched] == Evidence.MEASURED).all()
        assert (resized.nodes.duration_ns == h200.nodes.duration_ns)[untouched].all()

    def test_memory(self, h200):
        before, after = h200.job.measurement, longer(h200).job.measurement
        assert after.activation_bytes[0] == pytest.approx(2 * before.activation_bytes[0], rel=1e-3)
        start_bytes = before.start_memory_bytes
        grown = (after.peak_memory_bytes - start_bytes) / (before.peak_memory_bytes - start_bytes)
        assert grown == pytest.approx(2, rel=0.001)

    def test_resize_with_another_gpu_and_dtype(self, h200):
        resized = longer(h200, "H100", dtype="fp8")
        rules = summarise(h200, resized).rules
        assert rules["GEMM in another data type, by the model's ratio of both"] == 87
        recosted, both = recost(h200, "H100"), longer(h200, "H100")
        silu = next(n.index for n in h200 if n.text("name") and n.text("op") == "aten::silu"
                    and n.kind is Kind.KERNEL)  # fmt: skip
        widths = [
            np.log(g.nodes.p90_ns[silu] / g.nodes.duration_ns[silu]) for g in (recosted, both)
        ]
        # of memory on an SKU of the die, and of memory at another size on top
        sku, longer_sku, size = (
            error_width(kind, "H100", g.nodes.duration_ns[silu])
            for kind, g in (
                *(("memory_same_die", each) for each in (recosted, both)),
                ("resized_memory", both),
            )
        )
        assert widths == pytest.approx([sku, np.hypot(longer_sku, size)], abs=1e-3)
        evidence = both.nodes.evidence[both.gpu_compute]
        assert set(np.unique(evidence)) == {Evidence.CALIBRATED, Evidence.MEASURED}

    def test_database_rows_of_both_sizes_take_precedence(self, h200):
        """The shipped database has this call at both sequence lengths, cold rows and warm ones."""
        resized = longer(h200, model="auto")
        (node, *_) = [
            n.index for n in h200 if n.kind is Kind.KERNEL and n.text("op") == "aten::silu"
        ]
        rows = open_library([], load_gpu("H200"), None, h200.job.measurement.versions)
        assert rows is not None
        rows = Library(at_one_clock(rows.target), {}, rows.versions)
        name, attributes = h200.node(node).text("name"), "{}"
        took = [
            rows.match(CallKey("aten::silu", ((1, length, 3584),), ("bfloat16",), attributes), name)
            for length in (4096, 8192)
        ]
        assert took[0] is not None
        assert took[1] is not None
        ratio = took[1].kernel_ns / took[0].kernel_ns
        assert 1.8 < ratio < 2.3
        assert resized.nodes.duration_ns[node] == round(int(h200.nodes.duration_ns[node]) * ratio)
        assert resized.nodes.evidence[node] == Evidence.LOOKED_UP
        rules = summarise(h200, resized).rules
        assert rules["measured at another size, times the looked-up ratio of both sizes"] > 300
        assert has_note(resized.job.measurement.notes, "kernel-database")
        elsewhere = longer(h200, "H100", model="auto")
        assert elsewhere.nodes.evidence[node] == Evidence.CALIBRATED, "no rows of this GPU ship"

    def test_measured_times_are_dropped_for_another_gpu(self, h200):
        timed = ScopeTime("model.layers.0", "forward", 1, 2_000_000, 1000, 3)
        measurement = msgspec.structs.replace(
            h200.job.measurement,
            scopes=(timed,),
            timed_step_ns=(33_000_000,) * 3,
            gpu_busy_ns=30_000_000,
            step_ns=(32_000_000,) * 5,
        )
        graph = replace(h200, job=msgspec.structs.replace(h200.job, measurement=measurement))
        kept = recost(graph, "H200").job.measurement
        assert (kept.scopes, kept.gpu_busy_ns) == ((timed,), 30_000_000)
        for changed in (recost(graph, "H100"), longer(graph), scale_host(graph, 2.0)):
            changed_measurement = changed.job.measurement
            assert (
                changed_measurement.scopes,
                changed_measurement.timed_step_ns,
                changed_measurement.step_ns,
            ) == ((), (), ())
            assert (changed_measurement.gpu_busy_ns, changed_measurement.profiled_step_ns) == (0, 0)
            assert changed_measurement.peak_memory_bytes > 0

    def test_a_resized_trace_is_no_measurement(self, h200):
        with raises_code("recost-not-measured"):
            recost(longer(h200), "H100")


def test_four_sequences_in_the_micro_batch(h200):
    resized = recost(h200, "H200", passes=PassOptions(sizes=parse_sizes(None, "1=4")))
    was, now = by_class(h200, recost(h200, "H200")), by_class(h200, resized)
    for sort in (OpClass.ATTENTION, OpClass.GEMM):
        assert now[sort].flops == pytest.approx(4 * was[sort].flops, rel=1e-4)
    shapes = {n.text("input_shapes") for n in resized if n.text("op") == "aten::silu"}
    assert shapes == {"[[4,4096,3584]]"}


class TestFused:
    def test_a_norm_is_one_kernel_that_reads_once(self, h200):
        fused = FuseChains("norm").apply(h200)
        norm = next(n for n in fused if n.text("name").startswith("fused: copy_ x2 pow mean add"))
        assert norm.text("module") == "model.layers.0.input_layernorm"
        tokens, hidden = 4096, 4096
        # its input and the weight
        assert norm.value("bytes_read") == tokens * hidden * 2 + hidden * 2
        # for backward the input in float32, one root a token, the normed rows; and the result
        assert norm.value("bytes_written") == tokens * hidden * (4 + 2 + 2) + tokens * 4

    def test_fusion_keeps_the_first_of_a_chain_and_all_other_nodes(self, h200):
        fused = FuseChains("norm").apply(h200)
        named = note_of(fused.job.measurement.notes, "what-if-fused").text
        count = int(named.split("): ")[1].split(" kernels")[0])
        fused_count = int(named.split("become ")[1].split()[0])
        assert len(h200) - len(fused) == count - fused_count > 300
        assert len(fused.topological_order()) == len(fused)
        kept = np.isin(h200.nodes.id, fused.nodes.id)
        same = np.array([not n.startswith("fused") for n in fused.text("name")])
        assert (fused.nodes.duration_ns[same] == h200.nodes.duration_ns[kept][same]).all()
        assert fused.communication.sum() == h200.communication.sum()
        times = [replay(graph, bandwidth_gb_per_s=300) for graph in (h200, fused)]
        saved = times[0].compute_ns - times[1].compute_ns
        columns = [graph.nodes.duration_ns[graph.gpu_compute].sum() for graph in (h200, fused)]
        assert saved == columns[0] - columns[1] > 0

    def test_elementwise_leaves_reductions(self, h200):
        fused = recost(h200, "H200", passes=PassOptions(fuse="elementwise"))
        reductions = [by_class(h200, g)[OpClass.REDUCTION] for g in (recost(h200, "H200"), fused)]
        assert reductions[0].count == reductions[1].count
        assert summarise(h200, fused).interval == ()

    def test_nothing_to_fuse(self, trace, mm):
        with raises_code("fusion-nothing-to-fuse"):
            FuseChains("norm").apply(trace(mm(64, 64, 64), mm(64, 64, 64)))
        with raises_code("fusion-unknown"):
            FuseChains("conv").apply(trace(mm(64, 64, 64)))


def test_eager_attention_writes_its_scores(h200):
    unfused = recost(h200, "H200", passes=PassOptions(attention="eager"))
    scores = 8 * 4096 * 4096
    softmax = [n for n in unfused if n.text("op") == "aten::_softmax"]
    assert len(softmax) == 4
    assert softmax[0].value("bytes_written") == 4 * scores
    assert softmax[0].evidence is Evidence.DATASHEET
    # what an H200 ran of one layer of a bfloat16 model with attn_implementation="eager"
    eager = [n for n in unfused if n.text("name").startswith("eager attention: ")]
    half, single = "Tensor(c10::BFloat16)", "Tensor(float)"
    ran = [
        (n.text("op"), *json.loads(n.text("input_types"))[:2], *json.loads(n.text("output_types")))
        for n in eager
        if json.loads(n.text("output_shapes"))[0] == [1, 8, 4096, 4096]
    ]
    per_pass = len(ran) // (2 * len(softmax))
    assert ran[:per_pass] == [
        ("aten::mul", half, "Tensor(double)", half),
        ("aten::add", half, half, half),
        ("aten::copy_", single, half, single),
        ("aten::_softmax", single, single),
        ("aten::copy_", half, single, half),
    ]
    assert ran[-per_pass:] == [
        ("aten::copy_", single, half, single),
        ("aten::mul", single, single, single),
        ("aten::_softmax_backward_data", single, single, single),
        ("aten::copy_", half, single, half),
        ("aten::mul", half, "Tensor(double)", half),
    ]
    was, now = by_class(h200, recost(h200, "H200")), by_class(h200, unfused)
    assert OpClass.ATTENTION not in now
    # without the causal mask's saving, and without backward's recomputation: 2 x 6 / 7
    products = now[OpClass.GEMM].flops - was[OpClass.GEMM].flops
    assert products / was[OpClass.ATTENTION].flops == pytest.approx(12 / 7)
    peaks = [g.job.measurement.peak_memory_bytes for g in (h200, unfused)]
    assert peaks[1] - peaks[0] > 4 * scores * (4 + 2)


def test_nothing_overlaps_where_collectives_block(h200):
    with raises_code("serialize-already-serial"):
        SerializeOverlap().apply(h200)


@pytest.mark.parametrize("text", ["0", "-1", "8k", "4096=", "=4096", "4096=0", "1=2=3", "9" * 5000])
def test_a_malformed_size(text):
    with raises_code("resize-option-malformed", naming=(f"--seq {text}:",)):
        parse_change("--seq", text)


def test_sizes_follow():
    job = Job(world=World.of(tp=4, cp=2))
    sizing = Sizing.of(Change(4096, 8192), Change(1, 3), job)
    assert sizing.lengths == {4096, 2048, 1024, 512}
    assert sizing.resized(512, (1, 0)) == 1024
    assert sizing.resized(4097, (1, 0)) == 8193  # labels, padded for their shift
    assert sizing.resized(4096, (1, 1)) == 3 * 8192
    assert sizing.resized(32, (0, 1)) == 96
    assert sizing.resized(4096, (0, 0)) == 4096
    odd = Sizing.of(Change(4096, 4100), Change(1, 1), job)
    with raises_code("resize-not-whole", naming=("512 x 4100 / 4096 = 512.50",)):
        odd.resized(512, (1, 0))
    long = Sizing.of(Change(4096, 10**12), Change(1, 10**11), job)
    with raises_code("resize-too-large", naming=("[1, 4096, 32]", "100000000000")):
        long.shape((1, 4096, 32), ((0, 1), (1, 0), (0, 0)))


def test_steps_without_the_sizes_are_refused(trace, mm, add):
    with raises_code("resize-no-tensor-ids"):
        Resize(Change(0, 128)).apply(trace(mm(64, 64, 64)))


def test_an_extrapolated_step_is_refused(h200):
    measured = msgspec.structs.replace(h200.job.measurement, depths=object())
    extrapolated = replace(h200, job=msgspec.structs.replace(h200.job, measurement=measured))
    with raises_code("resize-extrapolated-trace"):
        longer(extrapolated)


def test_equal_sizes_cannot_be_distinguished(h200, monkeypatch):
    monkeypatch.setattr(
        "onerank.annotate.passes.resize.size_change.token_ids", lambda _: [(64, 64)]
    )
    with raises_code("resize-sizes-equal", naming="64"):
        Resize(Change(0, 128)).apply(h200)


def test_a_compiled_step_is_refused(h200):
    compilation = Compilation("default", 1, None, None, (), ())
    compiled = replace(h200, job=msgspec.structs.replace(h200.job, compilation=compilation))
    with raises_code("resize-compiled-trace"):
        longer(compiled)
    module = Module("model", "OptimizedModule", "other")
    by_script = replace(h200, job=msgspec.structs.replace(h200.job, modules=(module,)))
    with raises_code("resize-compiled-script"):
        longer(by_script)
    # `model.compile()` leaves no module of its class, but the kernels.
    fused = {"aten::silu": "triton_poi_fused_silu_0"}
    generated = h200.with_columns(op=[fused.get(op, op) for op in h200.text("op")])
    with raises_code("resize-compiled-script"):
        longer(generated)


def test_kernels_without_operands_are_counted(h200):
    texts = {name: h200.text(name) for name in ("input_shapes", "input_types", "output_shapes",
                                                     "output_types")}  # fmt: skip
    node = next(n.index for n in h200 if n.kind is Kind.KERNEL and n.text("op") == "aten::silu")
    for column in texts.values():
        column[node] = ""
    resized = longer(h200.with_columns(**texts))
    assert resized.nodes.duration_ns[node] == h200.nodes.duration_ns[node]
    figures = 1, int(h200.nodes.duration_ns[node])
    note_of(resized.job.measurement.notes, "resize-operands-unknown", *figures)


def test_the_command(h200, tmp_path):
    assert choices(AnnotateOptions, "fuse") == tuple(CHOICES)
    path, out = tmp_path / "t.et", tmp_path / "o.et"
    h200.write(path)
    options = ["--target", "H200", "--seq", "4096=2048", "--micro-batch", "2", "--fuse", "norm",
               "--kernel", "attention=eager", "-o", str(out), str(path)]  # fmt: skip
    result = CliRunner().invoke(annotate, options)
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    for phrase in ("What if the sequence were 2048 instead of 4096", "What if attention were eager",
                 "What if fused (norm)"):  # fmt: skip
        assert phrase in text
    for options, phrase in (
        (["--overlap", "off"], "error[serialize-already-serial]"),
        (["--seq", "8k"], "error[resize-option-malformed]: --seq 8k"),
        (["--seq", "4096"], "error[resize-nothing-changes]"),
        (["--explain", "57", "--fuse", "norm"], "error[explain-with-passes]"),
    ):
        refused = CliRunner().invoke(annotate, ["--target", "H200", *options, str(path)])
        assert refused.exit_code == 2
        assert phrase in " ".join(refused.output.split())

"""`convert --engine-steps`: recordings of vLLM and SGLang, cut into steps and labelled."""

import gzip
import itertools
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import onerank
from onerank.annotate import characterise
from onerank.annotate.op_costs.engine_operators import paged_cache_work
from onerank.cli import annotate
from onerank.cli import onerank as command
from onerank.converters.sources.kineto.convert_rank import convert_engine_steps
from onerank.converters.sources.kineto.engine_steps import StepContent, parse_annotation
from onerank.ir import InferenceStep
from onerank.ir.errors import TraceError
from onerank.serving.bundle import Bundle
from onerank.serving.recordings.read_recording import read_recording
from onerank.serving.recordings.recorded_bundle import Deployment, bundle_of, with_work
from onerank.serving.recordings.recording import Recording
from onerank.serving.serving_curves import serving_figures
from onerank.serving.tables import RankMemory
from tests.cli.invoke_cli import TRACES, invoke, refused
from tests.converters.small_traces import Trace

VLLM = TRACES / "cpu-vllm-2l" / "rank0.pt.trace.json.gz"
GRAPHS = TRACES / "h100-cuda-graphs"


def events(path: Path) -> list[dict[str, Any]]:
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def in_ns(event: dict[str, Any]) -> int:
    return round(event["dur"] * 1000)


@pytest.fixture(scope="module")
def vllm() -> Recording:
    """Return the kept recording of vLLM on a CPU."""
    return read_recording([VLLM])


# Prompts of 20, 100 and 7 tokens with 6, 4 and 3 tokens of output, at most 64 tokens in a step.
EXPECTED = {
    "kind": ["prefill", "mixed", "decode", "decode", "decode", "decode"],
    "prefills": [2, 2, 0, 0, 0, 0],
    "prefill_new_tokens": [64, 63, 0, 0, 0, 0],
    "prefill_context_tokens": [0, 44, 0, 0, 0, 0],
    "decodes": [0, 1, 3, 3, 2, 1],
    "decode_new_tokens": [0, 1, 3, 3, 2, 1],
    "decode_context_tokens": [0, 20, 128, 131, 125, 24],
    "batch": [2, 3, 3, 3, 2, 1],
    "new_tokens": [64, 64, 3, 3, 2, 1],
    "context_tokens": [0, 64, 128, 131, 125, 24],
}


def test_steps_of_vllm_have_the_sequences_that_were_sent(vllm: Recording) -> None:
    steps = vllm.steps
    assert {name: steps[name].to_list() for name in EXPECTED} == EXPECTED
    (file,) = vllm.manifest.files
    assert (file.engine, file.version, file.rank, file.ranks) == ("vLLM", "0.32.0", 0, 1)
    assert (file.device, file.device_type) == ("cpu", "cpu")
    assert file.steps == {"prefill": 1, "mixed": 1, "decode": 4}


def test_times_of_vllm_are_those_of_the_file(vllm: Recording) -> None:
    marks = [e for e in events(VLLM) if e.get("cat") == "user_annotation"]
    starts = [round(mark["ts"] * 1000) for mark in marks]
    assert vllm.steps["host_ns"].to_list() == [in_ns(mark) for mark in marks]
    between = [after - before for before, after in itertools.pairwise(starts)]
    assert vllm.steps["step_ns"].to_list() == [*between, None]
    # Outermost operators: those that no other operator contains.
    outermost, end = list[dict[str, Any]](), 0.0
    operators = [e for e in events(VLLM) if e.get("cat") == "cpu_op"]
    for event in sorted(operators, key=lambda e: (e["ts"], -e["dur"])):
        if event["ts"] >= end:
            outermost.append(event)
            end = event["ts"] + event["dur"]
    (file,) = vllm.manifest.files
    assert file.operations == {"operator": len(outermost)} == {"operator": 1330}
    assert file.time_ns == sum(map(in_ns, outermost)) == 30_728_903
    assert vllm.steps["gpu_ns"].sum() + file.outside_ns == file.time_ns
    assert vllm.kernels["time_ns"].sum() == file.time_ns


def test_steps_of_equal_batches_are_one_composition(vllm: Recording) -> None:
    table = vllm.compositions
    assert table["steps"].to_list() == [1, 1, 2, 1, 1]
    assert table["decodes"].to_list() == [0, 1, 3, 2, 1]
    assert table["context_low"].to_list() == [0, 64, 128, 125, 24]
    assert table["context_high"].to_list() == [0, 64, 131, 125, 24]
    both = vllm.steps["gpu_ns"].to_list()[2:4]
    assert table["gpu_ns"][2] == round(sum(both) / 2)
    spread = max(both) - min(both)
    assert table["gpu_p10_ns"][2] == round(min(both) + 0.1 * spread)
    assert table["gpu_p90_ns"][2] == round(max(both) - 0.1 * spread)
    # Nothing follows the last step.
    assert table["step_ns"].to_list()[-1] is None


def test_one_step_becomes_a_graph_with_its_label() -> None:
    graph = onerank.convert(VLLM, step="3")
    sums = {"attention_keys": 131, "attention_pairs": 131}
    assert graph.job.inference == InferenceStep("decode", 3, 3, 1, **sums)
    alone = onerank.convert(VLLM, step="6")
    sums = {"attention_keys": 25, "attention_pairs": 25}
    assert alone.job.inference == InferenceStep("decode", 6, 1, 1, (24,), **sums)


@pytest.mark.parametrize(
    ("step", "tokens", "keys", "pairs"),
    [
        ("1", 64, 64, 20 * 21 // 2 + 44 * 45 // 2),
        # 56 tokens after 44, a prompt of 7, and a decode after 20.
        ("2", 64, 128, 56 * 44 + 56 * 57 // 2 + 7 * 8 // 2 + 21),
        ("3", 3, 131, 131),
    ],
)
def test_attention_is_that_of_the_sequences_and_not_of_the_cache(
    step: str, tokens: int, keys: int, pairs: int
) -> None:
    nodes = characterise(onerank.convert(VLLM, step=step)).nodes_frame()
    attention = nodes.filter(pl.col("op") == "_C::cpu_attention_with_kv_cache")
    heads, key_heads, size, item = 8, 4, 32, 2
    assert attention["flops"].to_list() == [4 * pairs * heads * size] * 2
    queries = tokens * heads * size * item
    read = queries + 2 * keys * key_heads * size * item
    assert attention["bytes_read"].to_list() == [read] * 2
    assert attention["bytes_written"].to_list() == [queries] * 2
    writes = nodes.filter(pl.col("op") == "_C::cpu_attn_reshape_and_cache")
    assert set(writes["bytes_written"]) == {2 * tokens * key_heads * size * item}
    linear = nodes.filter(pl.col("op") == "_C::weight_packed_linear")
    # Of both layers: queries, keys and values; results; gate and up; down. The head: 1,024 tokens.
    layer = 512 * 256 + 256 * 256 + 1024 * 256 + 256 * 512
    head = linear["flops"].to_list()[-1]
    assert linear["flops"].sum() - head == 2 * 2 * tokens * layer
    assert head % (2 * 256 * 1024) == 0


def test_attention_of_a_step_without_its_keys_is_unknown() -> None:
    operands = "[[3,8,64],[512,16,2,64]]", '["Tensor(c10::BFloat16)","Tensor(c10::BFloat16)"]'
    known = InferenceStep("decode", 1, 3, 1, attention_keys=300, attention_pairs=300)
    work = paged_cache_work("_vllm_fa3_C::fwd", operands, known)
    assert work.flops == 4 * 300 * 8 * 64
    assert work.bytes_read == (3 * 8 + 2 * 300 * 2) * 64 * 2
    for step in (None, InferenceStep("decode", 1, 3, 1)):
        unknown = paged_cache_work("_vllm_fa3_C::fwd", operands, step)
        assert (unknown.flops, unknown.bytes_read) == (-1, -1)


# NVIDIA -------------------------------------------------------------------------------------------


def test_graph_replays_of_an_h100_belong_to_their_step(tmp_path: Path) -> None:
    path = annotated(tmp_path, "decode")
    content = json.loads(path.read_text())
    recording = read_recording([path])
    (step,) = recording.step_rows
    work = [
        e for e in content["traceEvents"] if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    assert (step.kind, step.decodes, step.context_tokens) == ("decode", 1, 128)
    assert (step.operations, step.by_graph, step.linked) == (len(work), len(work), 0)
    assert step.gpu_ns == sum(map(in_ns, work))
    first, last = min(e["ts"] for e in work), max(e["ts"] + e["dur"] for e in work)
    assert step.gpu_span_ns == pytest.approx((last - first) * 1000, abs=1)
    (file,) = recording.manifest.files
    assert (file.engine, file.device_type) == ("SGLang", "cuda")
    assert file.device == "NVIDIA H100 80GB HBM3"
    assert sum(kernel.count for kernel in recording.manifest.unlinked) == len(work)
    names = {(e["name"]) for e in work}
    assert {kernel.name for kernel in recording.manifest.unlinked} == names


def annotated(directory: Path, name: str) -> Path:
    """Write the replay of a graph on an H100 with the annotation of SGLang around it."""
    content = json.loads(gzip.decompress((GRAPHS / name / "profile.json.gz").read_bytes()))
    mark = next(e for e in content["traceEvents"] if e["name"].startswith("onerank::graph"))
    mark["name"] = "step[DECODE bs=1 g_sq=1 g_sqsq=1 g_sqsk=129 g_sk=129]"
    path = directory / "1-TP-0.trace.json"
    path.write_text(json.dumps(content))
    return path


def test_replayed_kernels_have_the_operators_of_the_capture(tmp_path: Path) -> None:
    capture = GRAPHS / "decode" / "graph.0.json.gz"
    recorded = events(capture)
    begin = next(e["ts"] for e in recorded if e["name"].endswith("BeginCapture"))
    end = next(e["ts"] for e in recorded if e["name"].endswith("EndCapture"))
    operators = [e for e in recorded if e.get("cat") == "cpu_op"]
    expected = Counter[str]()
    for launch in recorded:
        if "LaunchKernel" in launch["name"] and begin < launch["ts"] < end:
            around = [o for o in operators if o["ts"] <= launch["ts"] < o["ts"] + o["dur"]]
            expected[max(around, key=lambda o: o["ts"])["name"]] += 1
    recording = read_recording([annotated(tmp_path, "decode")], [capture])
    (step,) = recording.step_rows
    assert (step.operations, step.linked, step.by_graph) == (125, 125, 125)
    counts = Counter[str]()
    for kernel in recording.kernel_rows:
        counts[kernel.operator] += kernel.count
    assert counts == expected
    assert recording.manifest.unlinked == ()


def test_nodes_of_several_streams_without_ids_stay_unlinked(tmp_path: Path) -> None:
    capture = GRAPHS / "streams" / "graph.0.json.gz"
    recording = read_recording([annotated(tmp_path, "streams")], [capture])
    (step,) = recording.step_rows
    assert (step.operations, step.linked, step.by_graph) == (12, 0, 12)
    assert [note.code for note in recording.manifest.notes] == ["graph-replays-unmatched"]


def captures(directory: Path, *sizes: int) -> Path:
    """Write a recording of captures of two kernels each, annotated with their sizes."""
    trace = Trace()
    for place, size in enumerate(sizes):
        begin = 100.0 * place
        trace.annotation(f"capture_{size}_FULL", begin, 90)
        trace.runtime("hipStreamBeginCapture", 10 * size, begin + 1)
        for number in range(2):
            operator = trace.op(f"mm_{size}", begin + 10 + 20 * number, 15)
            trace.runtime("hipExtModuleLaunchKernel", operator + 1000, begin + 12 + 20 * number)
        trace.runtime("hipStreamEndCapture", 10 * size + 1, begin + 80)
    path, _ = trace.write(directory)
    return path.rename(directory / "captures.json")


@pytest.mark.parametrize(
    ("annotation", "operators"),
    [("step[DECODE bs=9]", {"mm_32"}), ("step[DECODE bs=8]", {"mm_8"}), ("step[DRAFT bs=8]", {""})],
)
def test_replays_are_of_the_least_size_that_holds_the_batch(
    tmp_path: Path, annotation: str, operators: set[str]
) -> None:
    recorded = captures(tmp_path, 8, 32)
    trace = Trace()
    trace.annotation(annotation, 100, 50)
    trace.runtime("hipGraphLaunch", 5, 110)
    trace.kernel(5, 120, 7)
    trace.kernel(5, 130, 9)
    recording = read_recording([trace.write(tmp_path)[0]], [recorded])
    assert {kernel.operator for kernel in recording.kernel_rows} == operators
    assert recording.steps["gpu_ns"].to_list() == [16_000]


def test_a_decode_with_its_graph_has_flops(tmp_path: Path) -> None:
    path = annotated(tmp_path, "decode")
    output = tmp_path / "decode.et"
    capture = GRAPHS / "decode" / "graph.0.json.gz"
    options = ("--kineto", path, "--step", "1", "--graphs", capture, "-o", output, "--json")
    report = json.loads(invoke(command, "convert", *options).stdout)
    assert report["gpu_ops_linked"] == {"graph launch: external id": 125}
    graph = onerank.read(output)
    sums = {"attention_keys": 129, "attention_pairs": 129}
    assert graph.job.inference == InferenceStep("decode", 1, 1, 1, (128,), **sums)


def engine_trace() -> Trace:
    """Return an eager prefill, and a decode as a CUDA graph with an all-reduce, of SGLang.

    A kernel ran before the first step, and one has no launch call.
    """
    trace = Trace()
    trace.launch(1, 5)
    trace.kernel(1, 20, 3, name="init")
    trace.annotation("scheduler.run_batch", 100, 50)
    trace.annotation("step[EXTEND bs=2 toks=300]", 110, 30)
    attention = trace.op("flashinfer::prefill", 112, 10)
    trace.launch(2, 114, external=attention)
    trace.kernel(2, 130, 40.125, name="flashinfer::BatchPrefillWithPagedKVCacheKernel")
    trace.runtime("cuLaunchKernelEx", 3, 125)
    trace.kernel(3, 171, 25, name="fused_moe_kernel")
    trace.launch(4, 145)  # the sampler, after the forward
    trace.kernel(4, 197, 2, name="argmax")
    trace.annotation("scheduler.run_batch", 200, 20)
    trace.annotation("step[DECODE bs=2]", 205, 10)
    trace.runtime("cudaGraphLaunch", 5, 207)
    trace.kernel(5, 215, 7, name="sm90_xmma_gemm")
    trace.kernel(5, 223, 9, name="void sglang::cross_device_reduce_1stage<__nv_bfloat16, 2>(...)")
    trace.kernel(77, 240, 4, name="lost")
    return trace


def test_what_is_not_linked_is_counted_by_name(tmp_path: Path) -> None:
    kineto, _ = engine_trace().write(tmp_path)
    recording = read_recording([kineto])
    prefill, decode = recording.step_rows
    assert (prefill.kind, prefill.batch, prefill.new_tokens) == ("prefill", 2, 300)
    assert (prefill.context_tokens, prefill.prefill_context_tokens) == (None, None)
    assert (prefill.operations, prefill.linked, prefill.gpu_ns) == (3, 1, 67_125)
    assert (prefill.step_ns, prefill.host_ns) == (100_000, 50_000)
    assert (decode.kind, decode.batch, decode.new_tokens) == ("decode", 2, 2)
    assert (decode.operations, decode.by_graph, decode.gpu_ns) == (2, 2, 16_000)
    assert (decode.collective_ns, prefill.collective_ns) == (9_000, 0)
    (file,) = recording.manifest.files
    assert file.operations == {"operator": 1, "CUDA graph": 2, "launch call": 3, "no launch": 1}
    assert (file.outside, file.outside_ns) == (2, 7_000)
    assert file.time_ns == 67_125 + 16_000 + 7_000
    counts = {(kernel.name, kernel.link): kernel.count for kernel in recording.manifest.unlinked}
    assert counts["fused_moe_kernel", "launch call"] == counts["lost", "no launch"] == 1
    assert counts["sm90_xmma_gemm", "CUDA graph"] == 1
    assert "flashinfer::BatchPrefillWithPagedKVCacheKernel" not in {name for name, _ in counts}


def test_frames_mark_the_steps_of_a_recording_without_annotations(tmp_path: Path) -> None:
    trace = Trace()
    for number in range(3):
        begin = 100.0 * number
        for file, ts, dur in (
            ("scheduler.py(20): run_batch", 0, 80),
            ("tp_worker.py(9): forward", 5, 60),
        ):
            name = f"/sgl-workspace/sglang/python/sglang/srt/managers/{file}"
            trace.frame(name, begin + ts, dur)
        trace.launch(number + 1, begin + 10)
        trace.kernel(number + 1, begin + 30, 10)
    kineto, _ = trace.write(tmp_path)
    staged = kineto.rename(tmp_path / "1-TP-0-DECODE.trace.json")
    recording = read_recording([staged])
    assert [row.kind for row in recording.step_rows] == ["decode"] * 3
    assert [row.batch for row in recording.step_rows] == [None] * 3
    assert [row.gpu_ns for row in recording.step_rows] == [10_000] * 3
    whole = staged.rename(tmp_path / "1-TP-0.trace.json")
    unlabelled = read_recording([whole])
    assert [row.kind for row in unlabelled.step_rows] == [None] * 3
    assert [note.code for note in unlabelled.manifest.notes] == ["engine-steps-unlabelled"]


def test_an_empty_step_joins_no_step_of_the_bundle(tmp_path: Path) -> None:
    """A step of vLLM without requests follows the last one; frames do not tell them apart."""
    trace = Trace()
    for number in range(2):
        trace.frame("vllm/v1/worker/gpu_worker.py(263): execute_model", 100.0 * number, 80)
    operator = trace.op("aten::mm", 10, 20)
    trace.launch(1, 12, external=operator)
    trace.kernel(1, 30, 10)
    kineto, _ = trace.write(tmp_path)
    recording = read_recording([kineto])
    assert [row.operations for row in recording.step_rows] == [1, 0]
    bundle, traces = bundle_of(recording, [kineto])
    assert [(row.gpu_ns, row.step_ns) for row in bundle.rows] == [(10_000, 100_000)]
    assert len(traces) == 1
    assert "recording-idle-steps" in {note.code for note in bundle.manifest.notes}


# Annotations --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind", "batch", "new", "context"),
    [
        ("execute_context_1(60)_generation_2(2)", "mixed", 3, 62, None),
        ("execute_context_0(0)_generation_0(0)", "idle", 0, 0, 0),
        # vLLM on a MI300X, from a public recording.
        (
            "execute_8192_context_9(sq8155sk8430sqsq7475785sqsk7671310)_generation_37"
            "(sq37sk34489sqsq37sqsk34489)",
            *("mixed", 46, 8192, 34727),
        ),
        ("execute_new_2_cached_0", "prefill", 2, None, None),
        ("execute_new_1_cached_4", None, 5, None, None),
        ("step[DECODE bs=32]", "decode", 32, 32, None),
        ("step[EXTEND bs=15 toks=15360]", "prefill", 15, 15360, None),
        ("step[EXTEND bs=2 toks=9 c_sq=9 c_sqsq=41 c_sqsk=141 c_sk=29]", "prefill", 2, 9, 20),
        ("step[MIXED bs=4]", "mixed", 4, None, None),
        (
            "step[MIXED bs=3 c=1 g=2 c_sq=64 c_sk=96 c_sqsq=4096 c_sqsk=6144 g_sq=2 g_sk=52 "
            "g_sqsq=2 g_sqsk=52]",
            *("mixed", 3, 66, 82),
        ),
        ("step[VERIFY bs=2 g_sq=8 g_sqsq=32 g_sqsk=400 g_sk=100]", "decode", 2, 8, None),
        ("step[DRAFT bs=2]", None, 2, None, None),
        ("step[IDLE bs=0]", "idle", 0, 0, 0),
    ],
)
def test_annotations(
    name: str, kind: str | None, batch: int | None, new: int | None, context: int | None
) -> None:
    content = parse_annotation(name)
    assert content is not None
    values = content.kind, content.batch, content.new_tokens, content.context_tokens
    assert values == (kind, batch, new, context)


def test_other_annotations_are_no_steps() -> None:
    assert parse_annotation("ProfilerStep#3") is None
    assert parse_annotation("step[DECODE bs=two]") is None


def inference(name: str) -> InferenceStep | None:
    content = parse_annotation(name)
    return content and content.inference(7)


def test_labels_hold_only_what_the_sums_prove() -> None:
    equal = "execute_15360_context_15(sq15360sk15360sqsq15728640sqsk15728640)_generation_0(0)"
    unequal = "execute_64_context_2(sq64sk64sqsq2336sqsk2336)_generation_0(0)"
    # Causal pairs: 15 times 1024 * 1025 / 2, and those of prompts of 20 and 44 tokens.
    sums = {"attention_keys": 15360, "attention_pairs": 15 * 524_800}
    assert inference(equal) == InferenceStep("prefill", 7, 15, 1024, **sums)
    sums = {"attention_keys": 64, "attention_pairs": 20 * 21 // 2 + 44 * 45 // 2}
    assert inference(unequal) == InferenceStep("prefill", 7, 2, **sums)
    mixed = inference("execute_context_1(60)_generation_2(2)")
    assert mixed == InferenceStep("mixed", 7, 3, 60, query_lengths=(60, 1, 1))
    plain = inference("execute_context_2(64)_generation_0(0)")
    assert plain is not None
    assert (plain.attention_keys, plain.attention_pairs) == (None, None)
    verified = inference("step[VERIFY bs=2 g_sq=8 g_sqsq=32 g_sqsk=400 g_sk=100]")
    assert verified is not None
    assert verified.attention_keys is None
    assert StepContent().inference(7) is None


def test_speculative_steps_are_labelled_by_the_target_model(tmp_path: Path) -> None:
    trace = Trace()
    trace.annotation("scheduler.run_batch", 100, 90)
    for name, ts in (("DRAFT bs=2", 110), ("DRAFT bs=2", 120), ("VERIFY bs=2 g_sq=8", 130)):
        trace.annotation(f"step[{name}]", ts, 5)
        trace.launch(ts, ts + 1)
        trace.kernel(ts, ts + 20, 1)
    kineto, _ = trace.write(tmp_path)
    (step,) = read_recording([kineto]).step_rows
    assert (step.kind, step.decodes, step.new_tokens, step.operations) == ("decode", 2, 8, 3)


# Bundle -------------------------------------------------------------------------------------------


def test_a_recording_is_a_bundle_with_null_for_what_it_lacks(vllm: Recording) -> None:
    bundle, traces = bundle_of(vllm, [VLLM])
    steps = bundle.steps
    assert steps["decodes"].to_list() == [0, 1, 3, 2, 1]
    # Means of 44 tokens of two sequences, 128 and 131 of three, and 125 of two.
    assert steps["prefill_context"].to_list() == [0, 22, 0, 0, 0]
    assert steps["decode_context"].to_list() == [0, 20, 43, 62, 24]
    assert steps["context_tokens"].to_list() == [0, 64, 130, 125, 24]
    assert steps["step_ns"].to_list() == vllm.compositions["step_ns"].to_list()
    for column in ("graph_ns", "peak_bytes"):
        assert steps[column].null_count() == len(steps)
    sums = bundle.kernels.group_by("row", maintain_order=True).agg(pl.col("time_ns").sum())
    assert sums["time_ns"].to_list() == steps["gpu_ns"].to_list()
    assert steps["gpu_ns"].to_list()[2] == min(vllm.steps["gpu_ns"].to_list()[2:4])
    # Attention of the mixed step is that of prefills and decodes.
    attention = bundle.kernels.filter(pl.col("part") != "tokens")["part"].to_list()
    assert attention == ["prefill_attention", *["decode_attention"] * 3]
    assert bundle.kernels["part"].null_count() == 1
    manifest = bundle.manifest
    assert (manifest.model, manifest.layers, manifest.tp) == (None, None, 1)
    assert manifest.memory == RankMemory(0)
    assert sorted(traces) == [1, 2, 3, 4, 5]


def test_a_report_counts_the_steps_without_a_time(vllm: Recording) -> None:
    bundle, _ = bundle_of(vllm, [VLLM])
    assert bundle.steps["step_ns"].null_count() == 1
    (note,) = serving_figures(bundle).notes
    assert note.code == "report-steps-untimed"
    assert note.text.startswith("1 of 5 steps")


def test_decodes_of_similar_contexts_are_one_row(tmp_path: Path) -> None:
    trace = Trace()
    contexts = [108, 112, 116, 1000]
    for number, context in enumerate(contexts):
        begin = 100.0 * number
        trace.annotation(
            f"execute_context_0(0)_generation_1(sq1sk{context + 1}sqsq1sqsk1)", begin, 50
        )
        trace.runtime("cudaGraphLaunch", number + 1, begin + 10)
        trace.kernel(number + 1, begin + 20, 10 + number, name="gemm")
        trace.kernel(number + 1, begin + 40, 20, name="flash_fwd_kernel")
        trace.launch(number + 50, begin + 45)
        trace.kernel(number + 50, begin + 90, 3, name="argmax")
    file = trace.write(tmp_path)[0]
    recording = read_recording([file])
    # From the start of the first to the end of the last kernel of the graph, and the sampler's.
    assert recording.steps["graph_ns"].to_list() == [43_000] * 4
    bundle, _ = bundle_of(recording, [file])
    steps = bundle.steps
    assert steps["decode_context"].to_list() == [112, 1000]
    assert steps["gpu_ns"].to_list() == [34_000, 36_000]
    assert steps["graph_ns"].to_list() == [43_000, 43_000]
    assert bundle.kernels.filter(part="decode_attention")["time_ns"].to_list() == [20_000] * 2


def test_several_tokens_for_each_decode_are_no_composition(tmp_path: Path) -> None:
    trace = Trace()
    for number, name in enumerate(("VERIFY bs=2 g_sq=8", "DECODE bs=2 g_sq=2 g_sk=52 g_sqsq=2")):
        trace.annotation(f"step[{name}]", 100.0 * number, 50)
        trace.launch(number + 1, 100.0 * number + 10)
        trace.kernel(number + 1, 100.0 * number + 20, 5)
    file = trace.write(tmp_path)[0]
    bundle, _ = bundle_of(read_recording([file]), [file])
    assert [row.is_composed for row in bundle.rows] == [False, True]
    codes = [note.code for note in bundle.manifest.notes]
    assert codes == ["recording-profiled", "recording-sequences-unknown"]


# vLLM's Triton kernel, and the one of gpt-oss.
EXPERT_KERNELS = ("fused_moe_kernel", "_matmul_ogs_NNT_bf16xbf16xmxfp4_16x128x256x1_swiglu")

MOE = {
    "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
    "num_local_experts": 8, "num_experts_per_tok": 2, "dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize(
    ("op", "changed", "known"),
    [
        ("vllm::moe_forward", {}, True),
        ("sglang::moe_forward_piecewise_cuda_graph_impl", {}, True),
        # A configuration may have the dtype outside its `text_config`.
        (
            "vllm::moe_forward",
            {"text_config": {k: v for k, v in MOE.items() if k != "dtype"}},
            True,
        ),
        ("vllm::moe_forward", {"quantization_config": {"quant_method": "fp8"}}, False),
        # Weights of four bits, with a scale of one byte for 32 of them.
        ("vllm::moe_forward", {"quantization_config": {"quant_method": "mxfp4"}}, True),
        # The tokens may be padded, but not narrower.
        ("vllm::moe_forward", {"hidden_size": 60}, True),
        ("vllm::moe_forward", {"hidden_size": 128}, False),
        ("vllm::moe_forward", None, False),
    ],
)
def test_experts_without_weights_as_operands_have_the_work_of_the_configuration(
    tmp_path: Path, op: str, changed: dict[str, Any] | None, known: bool
) -> None:
    trace = Trace()
    trace.annotation("step[DECODE bs=3 g_sq=3 g_sk=27 g_sqsq=3]", 0, 50)
    # Three tokens, which choose two of eight experts each.
    types = ["c10::BFloat16", "c10::BFloat16", ""]
    operands = {"Input Dims": [[3, 64], [3, 8], []], "Input type": types}
    experts = trace.op(op, 5, 30, **operands)
    for number, duration in enumerate((6, 3)):
        trace.launch(number + 1, 10 + number, external=experts)
        trace.kernel(number + 1, 40 + 10 * number, duration, name=EXPERT_KERNELS[number])
    (tmp_path / "trace").mkdir()
    path, _ = trace.write(tmp_path / "trace")
    config = None
    if changed is not None:
        config = tmp_path / "config.json"
        config.write_text(json.dumps({**MOE, **changed}))
    bundle, traces = bundle_of(read_recording([path]), [path], (), Deployment(config, tp=2))
    (row,) = [row for row in bundle.kernel_rows if row.part == "tokens"]
    codes = [note.code for note in bundle.manifest.notes]
    assert ("recording-experts-unknown" in codes) is not known
    if not known:
        assert (row.flops, row.bytes) == (None, None)
        return
    # Six rows through three matrices, and six of the experts' weights; half of both on each rank.
    assert changed is not None
    expert = 3 * changed.get("hidden_size", 64) * 96
    item = 17 / 32 if "quantization_config" in changed else 2
    assert row.flops == 2 * 6 * expert // 2
    assert row.bytes == int(6 * expert * item) // 2 + 2 * 3 * 64 * 2
    (tmp_path / "step.et").write_bytes(traces[1])
    kernels = onerank.read(tmp_path / "step.et")
    shares = kernels.nodes.flops[kernels.compute].tolist()
    assert shares == [row.flops * 2 // 3, row.flops // 3]


def test_kernels_of_one_call_share_its_work(tmp_path: Path) -> None:
    """A GEMM of two kernels, as split along k, has its FLOPs once."""
    trace = Trace()
    trace.annotation("step[DECODE bs=3 g_sq=3 g_sk=27 g_sqsq=3]", 0, 50)
    types = ["c10::BFloat16", "c10::BFloat16"]
    operands = {"Input Dims": [[3, 64], [64, 32]], "Input type": types}
    for call in range(2):
        product = trace.op("aten::mm", 5 + 15 * call, 12, **operands)
        for number in (2 * call + 1, 2 * call + 2):
            trace.launch(number, 5 + 15 * call + number, external=product)
            trace.kernel(number, 40 + 10 * number, 4, name=f"splitK{number % 2}")
    path, _ = trace.write(tmp_path)
    bundle, _ = bundle_of(read_recording([path]), [path])
    assert [row.flops for row in bundle.kernel_rows] == [2 * 2 * 3 * 64 * 32]


def test_work_of_other_kernels_is_refused(vllm: Recording) -> None:
    first, third = convert_engine_steps(VLLM, [1, 3])
    with pytest.raises(TraceError, match=r"rank0.*step 1 ") as error:
        with_work(first, third, vllm.step_rows[0])
    assert error.value.code == "engine-step-contradictory"
    # The same kernels in the same order get the work.
    worked = characterise(first)
    copied = with_work(first, worked, vllm.step_rows[0])
    assert (copied.nodes.flops == worked.nodes.flops)[first.compute].all()


def test_a_bundle_has_the_steps_of_the_first_rank(tmp_path: Path) -> None:
    files: list[Path] = []
    for rank in (1, 0):
        trace = Trace()
        trace.annotation("step[DECODE bs=1 g_sq=1 g_sk=9 g_sqsq=1]", 0, 50)
        trace.launch(1, 10)
        trace.kernel(1, 20, 5 + rank)
        groups: dict[str, Any] = {"rank": rank, "world_size": 2, "pg_count": 0, "pg_config": []}
        written = trace.write(tmp_path, distributedInfo=groups)[0]
        files.append(written.rename(tmp_path / f"rank{rank}.json"))
    bundle, traces = bundle_of(read_recording(files), files)
    assert bundle.steps["gpu_ns"].to_list() == [5_000]
    assert list(traces) == [1]
    assert bundle.manifest.tp is None
    assert "recording-first-rank" in [note.code for note in bundle.manifest.notes]
    assert bundle_of(read_recording(files), files, (), Deployment(tp=2))[0].manifest.tp == 2


def test_other_commands_read_the_bundle_of_a_recording(tmp_path: Path) -> None:
    bundle, output = tmp_path / "bundle", tmp_path / "exported"
    convert = ("convert", VLLM, "--engine-steps", "-o", bundle)
    invoke(command, *convert)
    export = ("-o", output, "--model", "small/llama")
    for simulator in ("vidur", "llmservingsim"):
        arguments = ("export", simulator, bundle, *export)
        refused(command, *arguments, error="export-modules-missing", naming="capture serve")
    predicted = tmp_path / "bundle.H100"
    aiconfigurator = ("export", "aiconfigurator", predicted, *export)
    invoke(annotate, "--target", "H100", bundle)
    refused(command, *aiconfigurator, error="export-deployment-unknown", naming="--config")
    config = tmp_path / "config.json"
    config.write_text(
        '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2, '
        '"max_position_embeddings": 256, "dtype": "bfloat16"}'
    )
    invoke(command, *convert, "--config", config)
    refused(command, "export", "aiconfigurator", bundle, *export, error="export-memory-unknown")
    invoke(annotate, "--target", "H100", bundle)
    read = onerank.read_bundle(predicted)
    assert read.steps["step_ns"].null_count() == 5
    before = onerank.read_bundle(bundle)
    (profiled,) = (note for note in read.manifest.notes if note.code == "recording-profiled")
    assert str(profiled) not in map(str, before.manifest.notes)
    assert len(read.manifest.notes) == len(before.manifest.notes)
    # A CPU has no CUDA graphs, so the gaps between kernels are those of an H100.
    kernels = read.kernels.group_by("row").agg(pl.col("kernels").sum()).sort("row")["kernels"]
    gaps_ns = read.steps["graph_ns"] - read.steps["gpu_ns"]
    assert gaps_ns.to_list() == [250 * count for count in kernels.to_list()]
    invoke(command, *aiconfigurator)
    (table,) = output.rglob("*.parquet")
    steps = pl.read_parquet(table)
    shape = {"workload_kind": "prefill", "batch_size": 2, "total_prefill_tokens": 64}
    (latency_ms,) = steps.filter(**shape, total_kv_read_tokens=0)["latency_ms"]
    assert latency_ms == pytest.approx(read.steps["graph_ns"][0] / 1e6, rel=0.01)


# Command ------------------------------------------------------------------------------------------


def test_command_writes_the_tables(tmp_path: Path, vllm: Recording) -> None:
    source = tmp_path / "recorded"
    source.mkdir()
    shutil.copy(VLLM, source)
    # A front end has no model: its file has no steps.
    Trace().write(source, schemaVersion=1)[0].rename(source / "host.async_llm.pt.trace.json")
    output = tmp_path / "steps"
    arguments = ("convert", source, "--engine-steps", "-o", output, "--json")
    invoke(command, *arguments)
    result = invoke(command, *arguments)  # replaces the first
    printed = json.loads(result.stdout)
    assert [note["code"] for note in printed["manifest"]["notes"]] == ["engine-files-without-steps"]
    assert len(printed["steps"]) == 6
    tables = output / "recording"
    assert pl.read_parquet(tables / "steps.parquet").equals(vllm.steps)
    assert pl.read_parquet(tables / "kernels.parquet").equals(vllm.kernels)
    assert pl.read_parquet(tables / "compositions.parquet").equals(vllm.compositions)
    assert json.loads((tables / "recording.json").read_text()) == printed["manifest"]
    shown = invoke(command, "convert", VLLM, "--engine-steps", "-o", output).stdout
    assert "1330" in shown
    assert "128 to 131" in shown


def test_bad_recordings_write_nothing(tmp_path: Path) -> None:
    output = tmp_path / "steps"
    training = TRACES / "h200-llama-8b-4l-tp4" / "profile.json.gz"
    engine = ("convert", "--engine-steps", "-o", output)
    refused(command, *engine, training, error="engine-steps-not-found", naming=str(training))
    merged = Trace()
    merged.annotation("step[DECODE bs=1]", 0, 10, tid=1)
    merged.annotation("step[DECODE bs=1]", 5, 10, tid=2)
    refused(command, *engine, merged.write(tmp_path)[0], error="engine-steps-overlap")
    only_gpu = Trace()
    only_gpu.annotation("step[DECODE bs=1]", 0, 10)
    only_gpu.kernel(1, 5, 2)
    refused(command, *engine, only_gpu.write(tmp_path)[0], error="engine-launches-missing")
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(command, *engine, empty, error="recording-empty", naming=str(empty))
    refused(command, *engine, VLLM, "--graphs", VLLM, error="graph-captures-not-found")
    graphs = ("convert", TRACES / "cpu-llama-2l-tp4", "--graphs", VLLM, "-o", tmp_path / "out.et")
    refused(command, *graphs, error="convert-graphs-source", naming="--kineto")
    refused(command, *engine, error="convert-engine-options")
    refused(command, *engine, VLLM, "--step", "2", error="convert-engine-options", naming="--step")
    given = ("convert", "--kineto", VLLM, "--tp", "2", "-o", tmp_path / "out.et")
    refused(command, *given, error="convert-deployment-source", naming="--tp")
    refused(command, *engine, VLLM, "--tp", "2", error="recording-tp-indivisible", naming="2")
    (tmp_path / "config.json").write_text('{"hidden_size": 256}')
    config = ("--config", tmp_path / "config.json")
    refused(command, *engine, VLLM, *config, error="recording-config-unreadable", naming="config")
    idle = Trace()
    idle.annotation("step[DECODE bs=1]", 0, 10)
    idle.launch(1, 20)
    idle.kernel(1, 25, 0)
    refused(command, *engine, idle.write(tmp_path)[0], error="engine-steps-empty")
    broken = tmp_path / "broken.json.gz"
    broken.write_bytes(VLLM.read_bytes()[:30_000])
    assert invoke(command, *engine, broken, code=2).stderr.startswith("error[")
    assert not output.exists()
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("kept")
    refused(
        *(command, "convert", VLLM, "--engine-steps", "-o", foreign),
        error="bundle-not-replaced",
        naming=str(foreign),
    )
    assert [path.name for path in foreign.iterdir()] == ["notes.txt"]
    assert not list(tmp_path.glob(".onerank*"))


QWEN = {
    "model_type": "qwen3", "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "dtype": "bfloat16",
}  # fmt: skip
HALF_WINDOWED = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}


def attention_of_rows(bundle: Bundle) -> list[tuple[int | None, int | None]]:
    """Return the FLOPs and bytes of each row's attention."""
    rows = bundle.kernels.filter(pl.col("part").ne_missing("tokens"))
    return list(zip(rows["flops"].to_list(), rows["bytes"].to_list(), strict=True))


@pytest.mark.parametrize(
    ("changed", "windowed"),
    [
        (HALF_WINDOWED, [True, False]),
        ({"sliding_window": 16, "sliding_window_pattern": 2}, [True, False]),
        ({"sliding_window": 16, "model_type": "mistral"}, [True, True]),
        ({"attention_chunk_size": 16, "layer_types": ["chunked_attention"] * 2}, [True, True]),
        ({"sliding_window": 16, "use_sliding_window": False}, [False, False]),
        ({"sliding_window": None}, [False, False]),
        ({}, [False, False]),
    ],
)
def test_attention_of_a_recorded_layer_sees_its_window(
    tmp_path: Path, changed: dict[str, Any], windowed: list[bool]
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**QWEN, **changed}))
    bundle, traces = bundle_of(read_recording([VLLM]), [VLLM], (), Deployment(config, tp=1))
    number = next(n for n, row in enumerate(bundle.rows, 1) if row.context_tokens == 24)
    flops, moved = attention_of_rows(bundle)[number - 1]
    # One token after 24: it sees 16 keys in a window, and 9 in the second chunk of 16.
    inside = 9 if "attention_chunk_size" in changed else 16
    keys = sum(inside if window else 25 for window in windowed)
    heads, key_heads, size = 8, 4, 32
    assert flops == 4 * keys * heads * size
    assert moved == 2 * keys * key_heads * size * 2 + len(windowed) * 2 * heads * size * 2
    codes = [note.code for note in bundle.manifest.notes]
    assert ("recording-windows-mean" in codes) == any(windowed)
    assert "recording-windows-unknown" not in codes
    # The trace has the same work.
    (tmp_path / "step.et").write_bytes(traces[number])
    nodes = onerank.read(tmp_path / "step.et").nodes_frame()
    of_op = nodes.filter(pl.col("op") == "_C::cpu_attention_with_kv_cache")
    assert of_op["flops"].sum() == flops


def test_sequences_have_the_mean_length_in_a_window(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**QWEN, **HALF_WINDOWED}))
    bundle, _ = bundle_of(read_recording([VLLM]), [VLLM], (), Deployment(config, tp=1))
    flops = [flops for flops, _ in attention_of_rows(bundle)]
    # Prompts of 20 and 44 of 100 tokens, as two of 32: 16 queries see up to 16 keys, 16 see 16.
    pairs = 2 * (16 * 17 // 2 + 16 * 16)
    assert flops[0] == 4 * (20 * 21 // 2 + 44 * 45 // 2 + pairs) * 8 * 32
    # 128 tokens of three sequences: each sees 16 keys and more, by the mean.
    assert flops[2] == 4 * (131 + 3 * 16) * 8 * 32


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        # Gemma 2's layers alternate, which its early configurations do not state.
        ({"sliding_window": 16, "model_type": "gemma2"}, "recording-windows-unknown"),
        (
            {"sliding_window": 16, "layer_types": ["sliding_attention"] * 3},
            "recording-windows-unmatched",
        ),
    ],
)
def test_windows_of_unknown_layers_count_all_keys_and_say_so(
    tmp_path: Path, changed: dict[str, Any], code: str
) -> None:
    config = tmp_path / "config.json"
    figures: list[list[tuple[int | None, int | None]]] = []
    for extra in ({}, changed):
        config.write_text(json.dumps({**QWEN, **extra}))
        bundle, _ = bundle_of(read_recording([VLLM]), [VLLM], (), Deployment(config, tp=1))
        figures.append(attention_of_rows(bundle))
    assert figures[0] == figures[1]
    assert code in [note.code for note in bundle.manifest.notes]


def test_chunks_of_several_sequences_count_all_keys_and_say_so(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    chunked = {"attention_chunk_size": 16, "layer_types": ["chunked_attention"] * 2}
    config.write_text(json.dumps({**QWEN, **chunked}))
    bundle, _ = bundle_of(read_recording([VLLM]), [VLLM], (), Deployment(config, tp=1))
    assert attention_of_rows(bundle)[2][0] == 2 * 4 * 131 * 8 * 32
    (note,) = [n for n in bundle.manifest.notes if n.code == "recording-windows-mean"]
    assert "in 4 rows" in note.text

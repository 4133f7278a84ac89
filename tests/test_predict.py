"""Single operators without a trace: `onerank predict` and `onerank.predict`."""

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from click.testing import CliRunner
from raised import raises_code

import onerank
from onerank.analysis import predict_ops
from onerank.annotate import load_gpu, recost
from onerank.cli import onerank as command
from onerank.cli.commands.predict import PredictOptions
from onerank.cli.dataclass_to_click import choices
from onerank.converters.sources.kineto import convert_directory
from onerank.ir import Graph

TRACES = Path(__file__).parents[1] / "traces"


@pytest.fixture(scope="module")
def cpu_llama() -> Graph:
    return convert_directory(TRACES / "cpu-llama-2l-tp4")[0]


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(command, ["predict", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def as_call(operator: str, shapes: list[list[int]]) -> dict[str, Any] | None:
    """Return the call that is an operator of the kept trace, if `predict` has it."""
    if operator == "aten::mm":
        (m, k), (_, n) = shapes[:2]
        return {"op": "gemm", "m": m, "n": n, "k": k}
    if operator == "aten::_scaled_dot_product_flash_attention_for_cpu":
        (batch, heads, seq, d), (_, kv_heads, _, _) = shapes[:2]
        sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "seq": seq, "head_dim": d}
        return {"op": "attention", **sizes}
    if operator == "aten::silu":
        batch, tokens, width = shapes[0]
        return {"op": "elementwise", "function": "silu", "numel": batch * tokens * width}
    return None


@pytest.mark.parametrize("target", ["H100", "A100", "L40S", "MI300X"])
def test_a_prediction_is_annotates_for_the_same_operator_of_a_kept_trace(cpu_llama, target):
    nodes = recost(cpu_llama, target).nodes
    durations = dict(zip(nodes.id.tolist(), nodes.duration_ns.tolist(), strict=True))
    reaches = dict(zip(nodes.id.tolist(), nodes.p90_ns.tolist(), strict=True))
    calls: dict[str, tuple[dict[str, Any], int]] = {}
    for index in range(len(cpu_llama)):
        view = cpu_llama.node(index)
        text = view.text("input_shapes")
        call = as_call(view.text("op"), json.loads(text)) if text and view.id in durations else None
        if call is not None:
            calls[json.dumps(call)] = ({**call, "dtype": "fp32"}, view.id)
    assert {call["op"] for call, _ in calls.values()} == {"gemm", "attention", "elementwise"}
    predictions = onerank.predict([call for call, _ in calls.values()], target)
    for prediction, (_, node) in zip(predictions, calls.values(), strict=True):
        assert prediction.duration_ns == durations[node]
        assert prediction.p90_ns == reaches[node]
        assert prediction.terms.evaluate() == pytest.approx(prediction.duration_ns, abs=0.5)


def test_gemms_in_fp8_and_fp4_have_their_scales():
    sizes = {"m": 256, "n": 1024, "k": 8192}
    calls = [{"dtype": "bf16"}, {"dtype": "fp8"}, {"dtype": "fp8", "scales": "row"},
             {"dtype": "fp8", "scales": "block"}, {"dtype": "fp4"}]  # fmt: skip
    predictions = onerank.predict([{"op": "gemm", **sizes, **call} for call in calls], "B200")
    times = dict(zip(("bf16", "tensor", "row", "block", "fp4"), predictions, strict=True))
    for prediction in predictions:
        assert prediction.terms.evaluate() == pytest.approx(prediction.duration_ns, abs=0.5)
    assert times["tensor"].duration_ns < times["bf16"].duration_ns < times["row"].duration_ns
    # An H100 takes 22.4 and 25.0 us for 160 x 1280 x 8192 (2026-11-28-fine-scales-h100).
    hopper = onerank.predict([{"op": "gemm", **sizes, **call} for call in calls[2:4]], "H100")
    assert hopper[0].duration_ns < hopper[1].duration_ns
    # The errors of 4 bits.
    assert times["fp4"].call_p90_ns / times["fp4"].call_ns == pytest.approx(1.318, abs=0.005)
    with raises_code("predict-name"):
        onerank.predict("norm", "B200", m=4096, n=4096, dtype="fp8")
    with raises_code("predict-size"):
        onerank.predict("gemm", "B200", **sizes, batch=2, dtype="fp8")


def test_one_gemm_from_python_and_on_the_command_line():
    predicted = onerank.predict("gemm", "H100", m=4096, n=4096, k=4096)
    assert predicted.bound == "compute"
    # 137.4 GFLOP at 989 TFLOP/s are 139 us, at the sustained 73.7% 189 us
    assert 139_000 < predicted.duration_ns < 200_000
    assert predicted.p10_ns < predicted.duration_ns < predicted.p90_ns
    sizes = ("--m", 4096, "--n", 4096, "--k", 4096, "--dtype", "bf16")
    (shown,) = json.loads(run("gemm", *sizes, "--target", "H100", "--json"))
    assert shown["duration_ns"] == predicted.duration_ns
    assert shown["terms"]["name"] == predicted.terms.name
    assert "compute" in run("gemm", *sizes, "--target", "H100")
    assert onerank.predict("gemm", "H100", m=1, n=8192, k=8192).bound == "memory"
    assert onerank.predict("elementwise", "H100", numel=8).bound == "launch"


def test_a_call_has_the_gap_after_its_kernel():
    """0.24 us on an H100; a GEMM's is that of its benchmark set, and 6 x 128 MB are in no cache."""
    calls = [
        {"op": "gemm", "m": 8, "n": 8192, "k": 8192},
        {"op": "attention", "heads": 32, "seq": 512, "head_dim": 128},
        {"op": "norm", "m": 64, "n": 4096},
        {"op": "elementwise", "numel": 1 << 20},
    ]
    gaps = 0.32, 0.43, 0.09, 0.09
    for name in ("H100", "B200"):
        floor_ns = load_gpu(name).launch_floor_ns
        for made, floors in zip(onerank.predict(calls, name), gaps, strict=True):
            assert made.call_ns - made.duration_ns == pytest.approx(floors * floor_ns, abs=1)
            assert made.call_p10_ns < made.call_ns < made.call_p90_ns
            # Off Hopper, where no gap was measured, the interval of a GEMM or of attention also
            # holds times per call, but for the length that chooses its width.
            reaches = made.p90_ns >= 0.99 * made.call_p90_ns
            assert reaches == (name == "B200" and made.call.op in ("gemm", "attention"))


def test_no_interval_of_a_gemm_reaches_far_below_the_datasheets_peak():
    """A TPU is so far from the fitted GPUs that its intervals are the widest: x 1.6 for GEMMs."""
    gpu = load_gpu("TPU-v6e")
    made = onerank.predict("gemm", "TPU-v6e", m=8192, n=8192, k=8192)
    peak_ns = 2e9 * 8192**3 / (gpu.peak_tensor_flops_per_s("bfloat16") or 1)
    assert made.p10_ns == pytest.approx(0.9 * peak_ns, rel=1e-3)
    assert made.p90_ns < 2 * made.duration_ns


def test_a_row_does_not_depend_on_the_others():
    """4095 rows next to a product of 4096 in each direction are no gradient of it."""
    rows = [{"op": "gemm", "m": m, "n": 4096, "k": 4096} for m in (4095, 4096)]
    together, alone = onerank.predict(rows, "A100"), onerank.predict(rows[:1], "A100")
    assert together[0].duration_ns == alone[0].duration_ns > 0.9 * together[1].duration_ns


def test_attention_that_is_not_causal_takes_longer():
    sizes = {"heads": 32, "kv_heads": 8, "seq": 8192, "head_dim": 128}
    causal, whole = (onerank.predict("attention", "H100", causal=c, **sizes) for c in (True, False))
    assert 1.6 < whole.duration_ns / causal.duration_ns < 2
    args = [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
    (shown,) = json.loads(run("attention", *args, "--no-causal", "--target", "H100", "--json"))
    assert shown["duration_ns"] == whole.duration_ns


def test_a_collective_takes_its_wire_bytes_over_the_bus_bandwidth():
    call = {"nbytes": 100_000_000, "ranks": 8}
    made = onerank.predict("collective", "H100", busbw_gb_per_s=300, **call)
    assert onerank.predict("collective", "H100", busbw_gb_s=300, **call) == made
    assert made.duration_ns == round(2 * 7 / 8 * 1e8 / 300)  # all-reduce
    assert (made.p10_ns, made.evidence) == (None, "bandwidth")
    gathered = onerank.predict("collective", "H100", collective="all_gather", **call)
    assert gathered.duration_ns == round(7 * 1e8 / 450)  # NVLink of the description
    without_link = Path(__file__).parent / "annotate" / "gpus" / "data" / "x1.toml"
    with raises_code("predict-no-bandwidth", naming=("X1", "--busbw-gb-s")):
        onerank.predict("collective", str(without_link), **call)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_table_of_operators(tmp_path, suffix):
    rows = [
        {"op": "gemm", "m": 512, "n": 1024, "k": 2048, "ranks": None, "nbytes": None},
        {"op": "norm", "m": 2048, "n": 4096, "k": None, "ranks": None, "nbytes": None},
        {"op": "collective", "m": None, "n": None, "k": None, "ranks": 4, "nbytes": 1 << 20},
    ]
    table, path = pl.DataFrame(rows), tmp_path / f"ops.{suffix}"
    table.write_csv(path) if suffix == "csv" else table.write_parquet(path)
    out = tmp_path / f"out.{suffix}"
    run(path, "--target", "A100", "-o", out)
    made = pl.read_csv(out) if suffix == "csv" else pl.read_parquet(out)
    assert made.columns[: len(table.columns)] == table.columns
    expected = [prediction.duration_ns for prediction in onerank.predict(rows, "A100")]
    assert made["duration_ns"].to_list() == expected
    assert made["call_ns"].to_list()[2] is None
    assert made["p10_ns"].to_list()[2] is None


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ({"op": "gem"}, "predict-name"),
        ({"op": "gemm", "m": 8, "n": 8}, "predict-size"),
        ({"op": "gemm", "m": 8, "n": 8, "k": 8, "dtype": "int4"}, "predict-name"),
        ({"op": "attention", "heads": 6, "kv_heads": 4, "seq": 8, "head_dim": 8}, "predict-size"),
        ({}, "predict-row"),
        ({"op": "norm", "rows": 8}, "predict-column"),
        ({"op": "norm", "m": "a", "n": 8}, "predict-type"),
        ({"op": "norm", "m": 8.5, "n": 8}, "predict-type"),
        ({"op": "attention", "heads": 8, "seq": 8, "head_dim": 8, "causal": "no"}, "predict-type"),
    ],
)
def test_what_is_no_call(call, code):
    with raises_code(code, naming="" if code == "predict-column" else "row 1"):
        onerank.predict([call], "H100")


def test_what_the_command_refuses(tmp_path):
    assert "error[predict-what]" in run("gemn", "--target", "H100", code=2)
    assert "error[predict-size]" in run("gemm", "--m", 8, "--target", "H100", code=2)
    norm = ("norm", "--m", 8, "--n", 8, "--target", "H100")
    assert "error[predict-size-unused]" in run(*norm, "--heads", 4, code=2)
    assert "error[predict-size-unused]" in run(*norm, "--no-causal", code=2)
    path = tmp_path / "bad.parquet"
    path.write_bytes(b"no parquet")
    assert "error[predict-file]" in run(path, "--target", "H100", code=2)
    run(path, "--target", "H100", "--m", 8, code=2)
    sizes = "--m", 8, "--n", 8, "--k", 8, "--target", "H100"
    assert "error[predict-output]" in run("gemm", *sizes, "-o", tmp_path / "p.txt", code=2)
    assert list(tmp_path.iterdir()) == [path]


def test_the_commands_choices_are_the_librarys():
    assert choices(PredictOptions, "dtype") == tuple(predict_ops.DTYPES)
    assert choices(PredictOptions, "function") == predict_ops.FUNCTIONS
    assert choices(PredictOptions, "collective") == predict_ops.COLLECTIVES


@pytest.mark.parametrize("name", ["rows.csv", "rows.parquet"])
def test_a_table_without_rows_is_refused(name, tmp_path):
    table = pl.DataFrame({"op": [], "m": []}, schema={"op": pl.String, "m": pl.Int64})
    path = tmp_path / name
    path.write_bytes(b"op,m\n") if name.endswith("csv") else table.write_parquet(path)
    output = run(path, "--target", "H100", "-o", tmp_path / "out.csv", code=2)
    assert "error[predict-no-rows]" in output
    assert not (tmp_path / "out.csv").exists()

"""Malformed files: the error names the file and the place."""

import gzip
import json
from pathlib import Path

import pytest
from notes import has_note, note_of
from raised import raises_code

from onerank.converters.sources.kineto import Sources, convert, convert_directory
from onerank.ir.errors import TraceError

TRACES = Path(__file__).parents[4] / "traces"
CPU = TRACES / "cpu-llama-2l-tp4"
H200 = TRACES / "h200-llama-8b-4l-tp4"


def refused(code: str, kineto: Path, et: Path, *names: str) -> None:
    with raises_code(code, TraceError, naming=names):
        convert(Sources(kineto, et))


@pytest.fixture
def kineto(tmp_path: Path) -> dict:
    return json.loads(gzip.decompress((CPU / "structure.json.gz").read_bytes()))


def written(tmp_path: Path, content: dict) -> Path:
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(content))
    return path


def test_no_such_file(tmp_path):
    refused("trace-missing", tmp_path / "k.json", CPU / "et.json.gz", "k.json")


def test_truncated_gzip(tmp_path):
    cut = tmp_path / "cut.json.gz"
    cut.write_bytes((CPU / "structure.json.gz").read_bytes()[:5000])
    refused("trace-damaged-gzip", cut, CPU / "et.json.gz", "cut.json.gz")


def test_json_cut_in_the_middle(tmp_path):
    cut = tmp_path / "cut.json"
    cut.write_bytes(gzip.decompress((CPU / "structure.json.gz").read_bytes())[:20000])
    refused("trace-malformed", cut, CPU / "et.json.gz", "cut.json", "byte 661")


def test_not_a_trace(tmp_path):
    other = tmp_path / "other.json"
    other.write_text('{"weather": "fine"}')
    refused("trace-malformed", other, CPU / "et.json.gz", "`traceEvents`", "byte 0")
    refused("et-unknown-schema", CPU / "structure.json.gz", other, "other.json")


def test_files_swapped():
    refused("trace-malformed", CPU / "et.json.gz", CPU / "structure.json.gz", "et.json.gz")


def test_schema_unknown(tmp_path):
    et = json.loads(gzip.decompress((CPU / "et.json.gz").read_bytes()))
    et["schema"] = "9.0.0-chakra"
    refused(
        "et-unknown-schema",
        CPU / "structure.json.gz",
        written(tmp_path, et),
        *("9.0.0-chakra", "1.1.1-"),
    )


def test_the_first_schemas_keep_operands_side_by_side(tmp_path):
    et = json.loads(gzip.decompress((CPU / "et.json.gz").read_bytes()))
    flat = []
    for node in et["nodes"]:
        attrs = {attr["name"]: attr["value"] for attr in node["attrs"]}
        operands = {
            f"{side[:-1]}_{column}" if column != "values" else side: node[side][column]
            for side in ("inputs", "outputs")
            for column in ("values", "shapes", "types")
        }
        known = {"id": node["id"], "name": node["name"], "parent": node["ctrl_deps"]}
        flat.append({**known, **operands, **{k: attrs[k] for k in ("rf_id", "seq_id", "tid")}})
    old = written(tmp_path, {"schema": "1.0.1", "nodes": flat})
    expected, _ = convert(Sources(CPU / "structure.json.gz", CPU / "et.json.gz"))
    graph, _ = convert(Sources(CPU / "structure.json.gz", old))
    columns = ["name", "duration_ns", "module", "phase", "collective"]
    assert graph.nodes_frame().select(columns).equals(expected.nodes_frame().select(columns))
    shapes = [
        [text and json.loads(text) for text in g.text("input_shapes")] for g in (graph, expected)
    ]
    assert shapes[0] == shapes[1]


def without_record_ids(kineto: dict) -> dict:
    for event in kineto["traceEvents"]:
        event.get("args", {}).pop("Record function id", None)
    return kineto


def test_no_record_ids_and_another_model(kineto, tmp_path):
    refused(
        "trace-et-mismatch",
        written(tmp_path, without_record_ids(kineto)),
        H200 / "et.json.gz",
        *("825 of 2513", "32.8%", "95%"),
    )


def test_no_record_ids_but_the_same_operators(kineto, tmp_path):
    """Aligned by order, every operator finds the node that its record id names."""
    expected, _ = convert(Sources(CPU / "structure.json.gz", CPU / "et.json.gz"))
    changed = written(tmp_path, without_record_ids(kineto))
    graph, report = convert(Sources(changed, CPU / "et.json.gz"))
    assert graph.nodes_frame().equals(expected.nodes_frame())
    note_of(report.notes, "operators-aligned-by-order", "2513 of 2513", 100)


@pytest.mark.parametrize("shift", [1, 10**6])
def test_the_execution_trace_of_another_run_of_the_same_operators(kineto, tmp_path, shift):
    """Record ids are shifted: they name other operators or none, so events are aligned by order."""
    for event in kineto["traceEvents"]:
        if event.get("args", {}).get("Record function id"):
            event["args"]["Record function id"] += shift
    expected, _ = convert(Sources(CPU / "structure.json.gz", CPU / "et.json.gz"))
    graph, report = convert(Sources(written(tmp_path, kineto), CPU / "et.json.gz"))
    assert graph.nodes_frame().equals(expected.nodes_frame())
    assert has_note(report.notes, "operators-aligned-by-order")


def test_operators_that_one_file_lacks_are_passed_over(kineto, tmp_path):
    """Every hundredth operator is missing in the Kineto trace: all others still align."""
    without_record_ids(kineto)
    operators = [event for event in kineto["traceEvents"] if event.get("cat") == "cpu_op"]
    gone = {id(event) for event in operators[50::100]}
    kineto["traceEvents"] = [e for e in kineto["traceEvents"] if id(e) not in gone]
    _, report = convert(Sources(written(tmp_path, kineto), CPU / "et.json.gz"))
    left = len(operators) - len(gone)
    note_of(report.notes, "operators-aligned-by-order", f"of {left} operators")
    assert report.host_ops_without_record < 0.01 * left


def test_a_trace_without_events_and_a_directory_in_its_place(tmp_path):
    with raises_code("trace-empty", TraceError, naming="changed.json"):
        convert(Sources(written(tmp_path, {"traceEvents": []})))
    refused("trace-unreadable", tmp_path, CPU / "et.json.gz", str(tmp_path))


def test_files_of_different_runs():
    numbers = ("546 of 3185", "99%")
    refused("trace-et-mismatch", H200 / "structure.json.gz", CPU / "et.json.gz", *numbers)


def test_negative_duration(kineto, tmp_path):
    event = next(e for e in kineto["traceEvents"] if e.get("cat") == "cpu_op")
    event["dur"] = -1
    path = written(tmp_path, kineto)
    refused("trace-negative-duration", path, CPU / "et.json.gz", event["name"], "-1.0 us")


def test_nan_duration(tmp_path, kineto):
    next(e for e in kineto["traceEvents"] if e.get("cat") == "cpu_op")["dur"] = float("nan")
    refused("trace-malformed", written(tmp_path, kineto), CPU / "et.json.gz", "changed.json")


@pytest.mark.parametrize("field", ["External id", "correlation", "Ev Idx"])
def test_an_id_beyond_64_bits(kineto, tmp_path, field):
    category = "cpu_op"
    event = next(e for e in kineto["traceEvents"] if e.get("cat") == category)
    event["args"][field] = 2**63
    if field == "correlation":
        event |= {"cat": "cuda_runtime"}
    path = written(tmp_path, kineto)
    names = (event["name"], field, "2^63")
    refused("trace-number-too-large", path, CPU / "et.json.gz", *names)


def test_a_time_of_no_clock(kineto, tmp_path):
    event = next(e for e in kineto["traceEvents"] if e.get("cat") == "cpu_op")
    event["ts"] = 1e30
    path = written(tmp_path, kineto)
    refused("trace-bad-time", path, CPU / "et.json.gz", event["name"], "1e+30 us", "2^62 ns")


def test_a_stream_that_is_no_number(kineto, tmp_path):
    event = next(e for e in kineto["traceEvents"] if e.get("cat") == "cpu_op")
    event |= {"cat": "kernel", "args": {"stream": "left"}}
    refused("trace-bad-stream", written(tmp_path, kineto), CPU / "et.json.gz", "'left'")


def test_no_operators(kineto, tmp_path):
    kineto["traceEvents"] = [e for e in kineto["traceEvents"] if e.get("cat") != "cpu_op"]
    refused("trace-no-operators", written(tmp_path, kineto), CPU / "et.json.gz", "changed.json")


def test_a_directory_without_a_capture(tmp_path):
    with raises_code("raw-directory-incomplete", TraceError):
        convert_directory(tmp_path)


def profile_without(positions: list[int], tmp_path: Path) -> Sources:
    profile = json.loads(gzip.decompress((CPU / "profile.json.gz").read_bytes()))
    operators = [e for e in profile["traceEvents"] if e.get("cat") == "cpu_op"]
    for position in positions:
        profile["traceEvents"].remove(operators[position])
    return Sources(CPU / "structure.json.gz", CPU / "et.json.gz", (written(tmp_path, profile),))


def test_windows_that_differ_a_little_pair_up_all_the_same(tmp_path):
    """For example, one of the two steps logs its loss."""
    graph, report = convert(profile_without([10, 11, 900], tmp_path))
    assert report.timing == "changed.json"
    # The trace keeps the note, so that every command that reads it repeats it.
    note_of(graph.job.measurement.notes, "host-events-unpaired", "; 3 ")
    assert report.host_ops_without_record == 0


def test_windows_that_differ_much_fall_back_to_the_structure_window_and_say_so(tmp_path):
    graph, report = convert(profile_without(list(range(0, 1500, 5)), tmp_path))
    assert report.timing == "structure.json.gz"
    note_of(graph.job.measurement.notes, "profiled-times-dropped")

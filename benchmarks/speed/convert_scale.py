"""Time and memory of `onerank convert`, compared with mlcommons/chakra's converter.

    python -m benchmarks.speed.convert_scale [--peer DIR] [--quick] [--kineto K --et E]
        [--adversarial]

Inputs are made of the captures in traces/: the window with record ids, repeated one step after
another. Of each copy the times are shifted by the window's length, and the ids (correlation,
External id, Record function id, Ev Idx, Sequence number, nodes, tensors and their storages) so that
none occurs twice. --peer names the directory that holds `chakra_trace_link` and `chakra_converter`.
--kineto and --et name another pair of files instead. --adversarial converts the traces of
`adversarial_traces.py` instead, of 25, 50 and 100 thousand events: time near linear in the events
at most doubles, less the second that a process takes to start. A whole process is timed each time,
imports and the writing of the trace included: the shortest of three runs, its CPU time (user and
system) and its peak resident size. On a machine that does other work, CPU time is the truer figure.
"""

import argparse
import copy
import dataclasses
import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

import onerank
from benchmarks.harness import print_conditions, version_of
from benchmarks.speed import adversarial_traces

TRACES = Path(__file__).parents[2] / "traces"
GPU, CPU = TRACES / "h200-llama-8b-4l-tp4", TRACES / "cpu-llama-2l-tp4"
EVENT_IDS = ("correlation", "External id", "Record function id", "Ev Idx", "Sequence number")
PEER_SECONDS = 300
PUBLISHED = """\
What the peer (mlcommons/chakra 1.0.0) took when the goals were set, on two cores:
  40.6k events + 14k ET nodes (22 MB)   18.7 s, 334 MiB
  116k events                           149 s, 1358 MB
  387k events                           more than 1063 s for the link alone"""


@dataclass(frozen=True)
class Pair:
    """A Kineto trace and an execution trace.

    Attributes:
        gpu_ns: summed durations of its GPU operations.
    """

    kineto: Path
    et: Path
    events: int
    nodes: int
    gpu_ns: int

    @property
    def megabytes(self) -> float:
        return (self.kineto.stat().st_size + self.et.stat().st_size) / 1e6


@dataclass(frozen=True)
class Run:
    seconds: float
    cpu_seconds: float
    mebibytes: float
    code: int
    output: str


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer", type=Path)
    parser.add_argument("--quick", action="store_true", help="leave out the million events")
    parser.add_argument("--kineto", type=Path)
    parser.add_argument("--et", type=Path)
    parser.add_argument("--adversarial", action="store_true")
    options = parser.parse_args()
    print_conditions(version_of("msgspec"))
    if options.adversarial:
        adversarial()
        return
    sizes = f"{'events':>9}{'ET nodes':>9}{'MB':>8}"
    print(f"{'input':<20}{sizes}{'s':>8}{'CPU s':>8}{'MiB':>7}{'events/s':>10}  kernel time")
    with tempfile.TemporaryDirectory() as directory:
        where = Path(directory)
        if options.kineto:
            pair = pair_of(options.kineto.resolve(), options.et.resolve())
            row("given", pair, convert(pair, where))
            peer("given", pair, options.peer, where)
            return
        cases = [("H200 x 5", GPU, 5, 5), ("CPU x 29", CPU, 29, 29)]
        if not options.quick:  # the second execution trace goes on behind the Kineto trace: 942 MB
            cases += [("H200 x 118", GPU, 118, 118), ("H200 x 118, ET x 282", GPU, 118, 282)]
        for name, capture, copies, et_copies in cases:
            pair = repeated(capture, copies, where, et_copies)
            row(name, pair, convert(pair, where, runs=3 if copies < 100 else 1))
            if copies < 100:
                peer(name, pair, options.peer, where)
        before = 0.0
        for copies in (10, 20, 40):
            pair = repeated(GPU, copies, where)
            seconds = row(f"H200 x {copies}", pair, convert(pair, where))
            if before:
                print(f"{'':<20}{seconds / before:.2f} times the CPU time of half the input")
            before = seconds
    if options.peer is None:
        print(PUBLISHED)


def adversarial() -> None:
    """Convert traces that have many of one thing, at three sizes."""
    print(f"{'trace with many':<34}{'events':>9}{'CPU s':>8}{'MiB':>7}  growth of CPU time")
    with tempfile.TemporaryDirectory() as directory:
        where = Path(directory)
        path, output = where / "kineto.json", where / "trace.et"
        command = [sys.executable, "-m", "onerank", "convert", "--kineto", str(path), "--operators"]
        for name, build in adversarial_traces.TRACES.items():
            before = 0.0
            for size in (25_000, 50_000, 100_000):
                events = build(size)
                adversarial_traces.write(path, events)
                run = measured([*command, "-o", str(output)], where)
                growth = f"{run.cpu_seconds / before:.2f} times" if before else ""
                if run.code:
                    growth = run.output.strip().splitlines()[-1]
                before = run.cpu_seconds
                figures = f"{len(events):>9}{run.cpu_seconds:>8.2f}{run.mebibytes:>7.0f}"
                print(f"{name:<34}{figures}  {growth}", flush=True)


def row(name: str, pair: Pair, run: Run) -> float:
    if run.code:
        sys.exit(f"{name}: onerank convert failed:\n{run.output}")
    sizes = f"{pair.events:>9}{pair.nodes:>9}{pair.megabytes:>8.1f}"
    took = f"{run.seconds:>8.2f}{run.cpu_seconds:>8.2f}{run.mebibytes:>7.0f}"
    print(f"{name:<20}{sizes}{took}{pair.events / run.seconds:>10.0f}  {run.output}", flush=True)
    return run.cpu_seconds


def convert(pair: Pair, where: Path, runs: int = 3) -> Run:
    """Convert in a new process `runs` times; return the fastest, and the change of GPU time."""
    output = where / "trace.et"
    command = [sys.executable, "-m", "onerank", "convert", "--kineto", str(pair.kineto)]
    command += ["--et", str(pair.et), "-o", str(output), "--json"]
    fastest = min((measured(command, where) for _ in range(runs)), key=lambda run: run.seconds)
    if fastest.code:
        return fastest
    graph = onerank.read(output)
    converted_ns = int(graph.nodes.duration_ns[graph.gpu_compute | graph.communication].sum())
    verdict = (
        "no GPU" if not pair.gpu_ns else f"{converted_ns - pair.gpu_ns:+d} ns of {pair.gpu_ns}"
    )
    return dataclasses.replace(fastest, output=verdict)


def peer(name: str, pair: Pair, peer: Path | None, where: Path) -> None:
    """Run the peer's two commands on the same files."""
    link_tool = shutil.which("chakra_trace_link", path=peer and peer.resolve())
    if link_tool is None:
        print(f"{name + ', peer':<20}absent: chakra_trace_link is not installed")
        return
    link = [str(link_tool), "--rank", "0", "--chakra-host-trace", str(pair.et)]
    link += ["--chakra-device-trace", str(pair.kineto), "--output-file", str(where / "link.json")]
    convert = [str(Path(link_tool).parent / "chakra_converter"), "PyTorch", "--input"]
    convert += [str(where / "link.json"), "--output", str(where / "peer")]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    runs = [measured(link, where, env)]
    if runs[0].code == 0:
        runs.append(measured(convert, where, env))
    bad = next((run for run in runs if run.code), None)
    size = f"{sum(run.seconds for run in runs):>8.2f}{sum(run.cpu_seconds for run in runs):>8.2f}"
    size += f"{max(run.mebibytes for run in runs):>7.0f}"
    reason = "" if bad is None else f"  failed: {bad.output.strip().splitlines()[-1:]}"
    print(f"{name + ', peer':<20}{'':>26}{size}{reason}", flush=True)


WATCH = """
import json, os, subprocess, sys, time
began = time.perf_counter()
process = subprocess.Popen(sys.argv[3:], stdout=open(sys.argv[1], "w"), stderr=subprocess.STDOUT)
pid = 0
while not pid:
    pid, status, usage = os.wait4(process.pid, os.WNOHANG)
    if not pid:
        time.sleep(0.005)
        if time.perf_counter() - began > float(sys.argv[2]):
            process.kill()
cpu = usage.ru_utime + usage.ru_stime
print(json.dumps([time.perf_counter() - began, cpu, usage.ru_maxrss / 1024,
                  os.waitstatus_to_exitcode(status)]))
"""


def measured(command: list[str], where: Path, env: dict[str, str] | None = None) -> Run:
    """Run a command as the child of a small process.

    After a fork, Linux counts the parent's memory into the child's peak, so the parent is small.
    """
    output = where / "output"
    watch = [sys.executable, "-c", WATCH, str(output), str(PEER_SECONDS), *command]
    done = subprocess.run(watch, cwd=where, env=env, capture_output=True, text=True, check=True)
    seconds, cpu, mebibytes, code = json.loads(done.stdout)
    printed = f"over {PEER_SECONDS} s" if seconds > PEER_SECONDS else output.read_text()
    return Run(seconds, cpu, mebibytes, code, printed)


def pair_of(kineto: Path, et: Path) -> Pair:
    events = loaded(kineto)["traceEvents"]
    return Pair(kineto, et, len(events), len(loaded(et)["nodes"]), gpu_time(events))


def loaded(path: Path) -> Any:
    content = path.read_bytes()
    return json.loads(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content)


def gpu_time(events: list[dict[str, Any]]) -> int:
    """Return the summed durations of GPU operations, nanoseconds."""
    gpu = ("kernel", "gpu_memcpy", "gpu_memset")
    return sum(round(event["dur"] * 1000) for event in events if event.get("cat") in gpu)


def repeated(capture: Path, copies: int, where: Path, et_copies: int = 0) -> Pair:
    """Write the window with record ids of a capture, `copies` times one after another.

    Of the execution trace, whose observer often runs longer than the profiler, `et_copies`.
    """
    et_copies = et_copies or copies
    kineto = loaded(capture / "structure.json.gz")
    trace = loaded(capture / "et.json.gz")
    events, nodes = kineto.pop("traceEvents"), trace.pop("nodes")
    pair = Pair(
        where / "kineto.json",
        where / "et.json",
        len(events) * copies,
        len(nodes) * et_copies,
        gpu_time(events) * copies,
    )
    with pair.kineto.open("wb") as file:
        write(file, kineto, "traceEvents", copied_events(events, copies), indent=2)
    with pair.et.open("wb") as file:
        write(file, trace, "nodes", copied_nodes(nodes, et_copies), indent=0)
    return pair


def write(file: Any, head: dict[str, Any], key: str, rows: Iterator[Any], indent: int) -> None:
    file.write(json.dumps(head).encode()[:-1] + b', "' + key.encode() + b'": [\n')
    for number, element in enumerate(rows):
        text = msgspec.json.encode(element)
        file.write((b",\n" if number else b"") + msgspec.json.format(text, indent=indent))
    file.write(b"\n]}\n")


def copied_events(events: list[dict[str, Any]], copies: int) -> Iterator[dict[str, Any]]:
    timed = [event for event in events if event.get("ph") == "X" and event.get("cat") != "Trace"]
    begin = min(event["ts"] for event in timed)
    length = int(max(event["ts"] + event["dur"] for event in timed) - begin) + 1000
    steps = {
        key: 1 + max(event.get("args", {}).get(key, 0) for event in events) for key in EVENT_IDS
    }
    for copied in range(copies):
        for event in events:
            event_copy = event | {"ts": round(event["ts"] + copied * length, 3)}
            if args := event.get("args"):
                shifted = {
                    key: args[key] + copied * step
                    for key, step in steps.items()
                    if args.get(key, -1) > 0
                }
                event_copy["args"] = args | shifted
            yield event_copy


def copied_nodes(nodes: list[dict[str, Any]], copies: int) -> Iterator[dict[str, Any]]:
    step = 1 + max(node["id"] for node in nodes)
    record_step = 1 + max(
        attr["value"] for node in nodes for attr in node["attrs"] if attr["name"] == "rf_id"
    )
    for copied in range(copies):
        for node in nodes:
            node_copy = node | {"id": node["id"] + copied * step}
            node_copy["ctrl_deps"] += copied * step
            node_copy["attrs"] = [
                attr | {"value": attr["value"] + copied * record_step}
                if attr["name"] == "rf_id" and attr["value"]
                else attr
                for attr in node["attrs"]
            ]
            for side in ("inputs", "outputs"):
                values = copy.deepcopy(node[side]["values"])
                shift_tensors(values, copied * step)
                node_copy[side] = node[side] | {"values": values}
            yield node_copy


def shift_tensors(values: Any, shift: int) -> None:
    """Shift tensor and storage ids in place: `[tensor, storage, offset, numel, bytes, device]`."""
    if not isinstance(values, list):
        return
    if len(values) == 6 and isinstance(values[5], str) and isinstance(values[0], int):
        values[0] += shift
        values[1] += shift
        return
    for value in values:
        shift_tensors(value, shift)


if __name__ == "__main__":
    main()

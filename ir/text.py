"""A graph as text, for golden tests and for review: one line per node.

    graph rank=0 world=tp:4 device="NVIDIA H200"
    group tp axis=tp ranks=0-3
    0 kernel "gemm" op=aten::mm stream=7 start=0 dur=1234 phase=forward deps=[]
    1 collective all_reduce "nccl" bytes=4096 group=tp start=1234 dur=90 deps=[0:stream_order]

Times are nanoseconds, sizes bytes. A node's line starts with its id and kind and always shows
start, duration and dependencies (`id:reason`). Other columns appear only if they differ from their
default. "foreign" marks nodes that keep the message of another tool's file.
"""

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from enum import IntEnum

from onerank.ir.enums import Collective, Evidence, Kind, Phase, Reason
from onerank.ir.graph import Graph
from onerank.ir.measurement import Device, LayerExtrapolation, Line, Measurement, Reading, Sensors
from onerank.ir.nodes import TEXT_COLUMNS, Nodes, default_of

# Column -> its label, in the order within a line.
_LABELS = {
    "comm_bytes": "bytes",
    "exchanged_bytes": "exchanged",
    "group": "group",
    "comm_src": "src",
    "comm_dst": "dst",
    "comm_tag": "tag",
    "op": "op",
    "stream": "stream",
    "thread": "thread",
    "start_ns": "start",
    "duration_ns": "dur",
    "samples": "samples",
    "spread_ns": "spread",
    "uncontended_ns": "uncontended",
    "blocked_ns": "blocked",
    "p10_ns": "p10",
    "p90_ns": "p90",
    "evidence": "evidence",
    "module": "module",
    "phase": "phase",
    "micro_batch": "micro_batch",
    "input_shapes": "in",
    "input_types": "in_types",
    "input_strides": "in_strides",
    "input_values": "in_values",
    "output_shapes": "out",
    "output_types": "out_types",
    "output_values": "out_values",
    "flops": "flops",
    "bytes_read": "bytes_read",
    "bytes_written": "bytes_written",
    "instructions": "instructions",
    "bytes_allocated": "allocated",
    "bytes_freed": "freed",
    "python_calls": "python",
    "grid": "grid",
    "block": "block",
}

_ALWAYS = ("start_ns", "duration_ns")
_ENUMS: dict[str, type[IntEnum]] = {"evidence": Evidence, "phase": Phase}
# No spaces, commas or "=": a line still splits into its words.
_BARE = re.compile(r"[\w.:/+@<>*-]+")


def to_text(graph: Graph) -> str:
    """Return the graph as lines of text, the same for the same graph."""
    return "".join(f"{line}\n" for line in (*_job_lines(graph), *_node_lines(graph)))


def _job_lines(graph: Graph) -> Iterator[str]:
    job = graph.job
    head = f"graph rank={job.rank}"
    if job.world.sizes:
        sizes = {**job.world.sizes, **({"ep": job.world.ep} if job.world.ep > 1 else {})}
        head += " world=" + ",".join(f"{axis}:{size}" for axis, size in sizes.items())
    yield head + _device(job.device) + (" foreign" if graph.foreign is not None else "")
    for group in job.groups:
        axis = f" axis={_text(group.axis)}" if group.axis else ""
        yield f"group {_text(group.name)}{axis} ranks={_ranks(group.ranks)}"
    measured = job.measurement
    figures = {
        "steps": ",".join(str(step) for step in measured.step_ns),
        "host_steps": ",".join(str(step) for step in measured.host_step_ns),
        "profiled_host": sum(measured.profiled_host_ns[:1]),
        "timed_steps": ",".join(str(step) for step in measured.timed_step_ns),
        "profiled_step": measured.profiled_step_ns,
        "gpu_busy": measured.gpu_busy_ns,
        "peak_memory": measured.peak_memory_bytes,
        "start_memory": measured.start_memory_bytes,
    }
    if any(figures.values()):
        shown = " ".join(f"{name}={value}" for name, value in figures.items() if value)
        yield f"measured {shown}"
    yield from _host(measured)
    if job.device.sensors is not None:
        yield from _sensors(job.device.sensors)
    if measured.depths is not None:
        yield from _depths(measured.depths)
    for name, version in measured.versions.items():
        yield f"version {_text(name)} {_text(version)}"
    for note in measured.notes:
        yield f"note {note.code} {_quoted(note.text)}"
    for scope in measured.scopes:
        yield (
            f"timed {_text(scope.path)} phase={scope.phase} calls={scope.calls}"
            f" dur={scope.duration_ns} spread={scope.spread_ns} samples={scope.samples}"
        )
    for module in job.modules:
        layer = f" layer={_text(module.layer)}" if module.layer else ""
        scope = f" scope={_text(module.scope)}" if module.scope else ""
        description = f"{_text(module.path)} type={_text(module.type)} role={module.role}"
        yield f"module {description}{layer}{scope}"
    for annotation in job.annotations:
        details = (
            f" details={json.dumps(annotation.details, default=str)}" if annotation.details else ""
        )
        yield (
            f"annotated target={_text(annotation.target)} model={_text(annotation.model)}"
            f" source={_text(annotation.source)}{details}"
        )
    if job.host_factor != 1:
        yield f"host factor={job.host_factor:g}"


def _device(device: Device) -> str:
    fields_shown = {
        "device": _quoted(device.name) if device.name else "",
        "device_type": device.type,
        "memory": device.memory_bytes,
        "sms": device.sm_count,
    }
    return "".join(f" {name}={value}" for name, value in fields_shown.items() if value)


def _host(measured: Measurement) -> Iterator[str]:
    if (overhead := measured.host_overhead) is not None:
        times = f"inter_step={overhead.inter_step_host_ns} residual={overhead.residual_ns}"
        if overhead.kernel_factor != 1:
            times += f" kernel_factor={overhead.kernel_factor}"
        yield f"host_overhead host_factor={overhead.host_factor} {times}"
    if (calls := measured.emulated_calls) is not None:
        numbers = f"synchronous={calls.synchronous} asynchronous={calls.asynchronous}"
        yield f"emulated_calls {numbers} waits={calls.waits} host={calls.host_ns}"


def _sensors(sensors: Sensors) -> Iterator[str]:
    """Spell each reading as `median(low..high)`."""
    shown = [f"samples={sensors.samples}"]
    for name in ("sm_clock_mhz", "memory_clock_mhz", "power_mw", "temperature_c"):
        reading: Reading | None = getattr(sensors, name)
        if reading is not None:
            shown.append(f"{name}={reading.median}({reading.low}..{reading.high})")
    shown += [f"{_text(reason)}={count}" for reason, count in sensors.throttled.items()]
    yield f"sensors {' '.join(shown)}"


def _depths(depths: LayerExtrapolation) -> Iterator[str]:
    layers = ",".join(map(str, depths.layers))
    figures = (
        f"of={depths.depth} module={_text(depths.module)} first={depths.first}"
        f" period={depths.period} copied={depths.copied} compute={depths.composed_compute_ns}"
        f" replayed_peak={depths.replayed_peak_bytes}"
    )
    mismatch = (
        "" if depths.layer_mismatch is None else f" layer_mismatch={depths.layer_mismatch:.3g}"
    )
    yield f"depths {layers} {figures}{mismatch}"
    for name in ("compute_ns", "step_ns", "peak_memory_bytes", "comm_bytes"):
        line: Line = getattr(depths, name)
        residual = "" if line.residual is None else f" residual={line.residual:.3g}"
        yield (
            f"line {name} values={','.join(map(str, line.values))} slope={line.slope:.6g}"
            f" intercept={line.intercept:.6g}{residual} at_depth={line.at_depth}"
        )


def _ranks(ranks: Sequence[int]) -> str:
    """Spell ranks: `0-3` for a run, `0-12:4` for equal strides, else a list."""
    # Two ranks always have an equal stride, so they are listed.
    if len(ranks) > 2:
        stride = ranks[1] - ranks[0]
        even = all(b - a == stride for a, b in itertools.pairwise(ranks))
        if even and stride > 0:
            return f"{ranks[0]}-{ranks[-1]}" + (f":{stride}" if stride > 1 else "")
    return ",".join(str(rank) for rank in ranks)


def _node_lines(graph: Graph) -> Iterator[str]:
    nodes = graph.nodes
    columns = [_column(graph, name, label) for name, label in _LABELS.items()]
    collectives = nodes.collective.tolist()
    for index, (number, kind, name) in enumerate(
        zip(nodes.id.tolist(), nodes.kind.tolist(), graph.text("name"), strict=True)
    ):
        words = [str(number), _name(Kind, kind)]
        if collectives[index] != Collective.NONE:
            words.append(_name(Collective, collectives[index]))
        words.append(_quoted(name))
        words += [shown[index] for shown in columns if shown[index]]
        if nodes.foreign[index] is not None:
            words.append("foreign")
        words.append(f"deps=[{_dependencies(graph, index)}]")
        yield " ".join(words)


_DEFAULTS = {spec.name: default_of(spec) for spec in fields(Nodes)}


def _column(graph: Graph, name: str, label: str) -> list[str]:
    """Return `label=value` per node, "" where it is not shown."""
    if name in TEXT_COLUMNS:
        return [f"{label}={_text(value)}" if value else "" for value in graph.text(name)]
    # Start and duration show even at 0: a missing number would read as a forgotten column.
    hidden = None if name in _ALWAYS else _DEFAULTS[name]
    words = _ENUMS.get(name)
    return [
        "" if value == hidden else f"{label}={value if words is None else _name(words, value)}"
        for value in getattr(graph.nodes, name).tolist()
    ]


def _dependencies(graph: Graph, index: int) -> str:
    edges, ids = graph.edges, graph.nodes.id
    span = slice(edges.offsets[index], edges.offsets[index + 1])
    return ", ".join(
        f"{ids[source]}:{_name(Reason, reason)}"
        for source, reason in zip(
            edges.source[span].tolist(), edges.reason[span].tolist(), strict=True
        )
    )


def _name(words: type[IntEnum], number: int) -> str:
    """Return a member's name in lower case, or the number itself if no member has it."""
    try:
        return words(number).name.lower()
    except ValueError:
        return str(number)


def _text(value: str) -> str:
    """Return a text unquoted if it is one word or a JSON list, else quoted."""
    if _BARE.fullmatch(value) or _is_list(value):
        return value
    return _quoted(value)


def _is_list(value: str) -> bool:
    # Shapes and types are JSON lists and stay readable unquoted. A name from a trace can also be an
    # invalid list, or be nested deeper than Python's recursion limit.
    if not value.startswith("[") or not value.isprintable():
        return False
    try:
        json.loads(value)
    except (ValueError, RecursionError):
        return False
    return True


def _quoted(value: str) -> str:
    # Control characters are escaped: a name from a trace must not control the terminal.
    return json.dumps(value, ensure_ascii=not value.isprintable())

"""onerank: capture one rank of a training job, re-cost it, hand it to a network simulator."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from onerank import capture, export
    from onerank.analysis.predict_ops import OpPrediction
    from onerank.analysis.step_time import Replay
    from onerank.analysis.trace_diff import TraceDiff
    from onerank.annotate import Gpu
    from onerank.annotate.cost import CostReport
    from onerank.annotate.energy import EnergyReport
    from onerank.annotate.memory.memory_report import MemoryReport
    from onerank.annotate.op_costs.custom_operator_costs import Count
    from onerank.converters.targets.astra_sim.check import Finding
    from onerank.display import Records
    from onerank.ir import Graph
    from onerank.serving.bundle import Bundle

    Trace = Graph | str | Path

__all__ = [
    "Graph",
    "capture",
    "check",
    "convert",
    "cost",
    "diff",
    "energy",
    "export",
    "gpus",
    "memory",
    "predict",
    "read",
    "read_bundle",
    "recost",
    "register_extension_function",
    "register_operator_cost",
    "replay",
]
__version__ = "0.1.0"


def read(path: str | Path) -> Graph:
    """Read a Chakra `.et` file, of onerank or of another tool.

    Of another tool's trace, this also reads the file of process groups in the same directory, and
    the work that the tool counted for nodes without a time.

    Raises:
        ChakraError: the file is truncated, or not Chakra.
        FormatError: the file of groups lacks groups that the nodes name.
        GraphError: two nodes share an id, or a node waits for an absent node.
        OSError: the file cannot be read.

    Examples:
        >>> len(onerank.read("trace.et").nodes)
        4240
    """
    return _read(Path(path), Path(path), repair=False)


def read_bundle(path: str | Path) -> Bundle:
    """Read the bundle of `capture serve`: the steps of an inference engine's rank, as tables.

    Raises:
        FormatError: the directory is no bundle, is incomplete, or has another version.
    """
    from onerank.serving.bundle import read_bundle as read_directory

    return read_directory(path)


def convert(
    source: str | Path,
    *,
    et: str | Path | None = None,
    profiles: Sequence[str | Path] = (),
    step: str = "all",
    operators: bool = False,
    sizes: Mapping[str, int] | None = None,
    batch: int | None = None,
    seq: int | None = None,
    train: bool = False,
    repair: bool = False,
) -> Graph:
    """Lower the recorded traces of a rank, or a model, to a graph.

    Args:
        source: a Kineto trace; a directory of `capture run --raw-dir`; an `.onnx` model; or
            Chakra's `.json` or `.et`.
        et: execution trace of the same window as the Kineto trace; None: GPU operations only.
        profiles: Kineto traces of steps with the same work, for their times.
        step: a step of a Kineto trace: its number, "median" or "all".
        operators: keep the operators of a Kineto trace without `et`; they have no shapes.
        sizes: symbolic sizes of a model, by name.
        batch: size of the first axis of a model's inputs.
        seq: sequence length of a model.
        train: add backward and an AdamW step to a model.
        repair: drop dependencies that break the graph of a Chakra trace.

    Raises:
        FormatError: the source has another format than its name says, or holds several ranks.
        TraceError: the traces cannot be read or linked.
        OnnxError: the model cannot be read, or leaves sizes open.

    Examples:
        >>> onerank.convert("raw").job.world.sizes  # a directory of --raw-dir
        {'tp': 4}
    """
    path = Path(source)
    if path.is_dir():
        return _convert_capture(path)
    if path.suffix == ".onnx":
        from onerank.annotate import characterise
        from onerank.converters.sources.onnx import convert_onnx

        return characterise(convert_onnx(path, sizes=sizes, batch=batch, seq=seq, train=train)[0])
    if path.suffix == ".et":
        return _read(path, path, repair=repair)
    from onerank.converters.sources.kineto import Sources
    from onerank.converters.sources.kineto import convert as convert_traces
    from onerank.converters.sources.kineto.read.json_stream import beginning, kind_of

    # Traces of the profiler and Chakra's JSON share a suffix; the first bytes differ.
    if path.suffix == ".json" and kind_of(beginning(path)) is None:
        return _read_json(path, repair=repair)
    execution_trace = None if et is None else Path(et)
    profiled = tuple(map(Path, profiles))
    sources = Sources(path, execution_trace, profiled, operators=operators)
    return convert_traces(sources, step=step)[0]


def _convert_capture(directory: Path) -> Graph:
    """Convert a directory of `capture run --raw-dir`."""
    from onerank.converters.sources.kineto import convert_directory, is_capture
    from onerank.ir.errors import FormatError

    if not is_capture(directory):
        raise FormatError(
            f"{directory} is not the directory of one capture\n"
            f"  `onerank convert {directory} -o DIRECTORY` converts the traces of several ranks",
            code="convert-not-a-capture",
        )
    return convert_directory(directory)[0]


def _read_json(source: Path, *, repair: bool) -> Graph:
    """Read a Chakra trace in JSON."""
    import tempfile

    from onerank.ir.chakra import from_json

    with tempfile.TemporaryDirectory(prefix="onerank-") as directory:
        trace = Path(directory) / "trace.et"
        from_json(source, trace)
        # The file of groups is next to the JSON, not in the temporary directory.
        return _read(trace, source, repair=repair)


def _read(trace: Path, source: Path, *, repair: bool) -> Graph:
    """Read a Chakra trace; the groups of its job may stand next to `source`."""
    from onerank.ir.chakra import read as read_chakra
    from onerank.ir.chakra import read_repaired
    from onerank.ir.chakra.third_party_traces import with_counted_work, with_groups

    graph = read_repaired(trace)[0] if repair else read_chakra(trace)
    return with_counted_work(with_groups(graph, source))


def recost(
    trace: Trace,
    target: str,
    *,
    model: str = "auto",
    source: str | None = None,
    databases: Sequence[str | Path] = (),
    override: Mapping[str, float] | None = None,
    seq: int | str | None = None,
    micro_batch: int | str | None = None,
    dtype: Literal["fp8", "fp4", "bf16", "fp16", "tf32"] | None = None,
    attention: str = "usual",
    fuse: Literal["elementwise", "norm"] | None = None,
    overlap: Literal["as-captured", "on", "off"] = "as-captured",
    nvlink_active: bool = False,
    host: str | Path = "typical",
    host_scale: float = 1.0,
) -> Graph:
    """Return a graph with the duration of every compute node predicted for another GPU.

    Args:
        trace: a captured or converted graph, or its file.
        target: a GPU description, its name or its path.
        model: cost model: "ratio", "roofline", "residual", "learned" or "auto".
        source: GPU the graph was measured on, as `target`; None: as its device record names it.
        databases: kernel databases of the target, in addition to the shipped ones.
        override: figures of the target to replace: `{"memory_bandwidth_gb_per_s": 6000}`.
        seq: what if sequences were this long; "4096=8192" names the captured length.
        micro_batch: what if a micro-batch had this many sequences.
        dtype: what if GEMMs in wider types ran in this type.
        attention: kernel of attention, such as "flash3"; "usual": what the target's libraries run.
        fuse: what if neighbouring elementwise kernels were fused; "norm": reductions, too.
        overlap: whether communication overlaps compute.
        nvlink_active: count the power of active NVLinks.
        host: a description of a host, its name or its path, for captures without a GPU and for
            intervals on another one; "none": kernels only.
        host_scale: factor on the durations of host operators.

    Raises:
        TargetError: the target or the host is unknown or its description malformed.
        AnnotateError: the graph cannot be re-costed, or its device is not known.

    Examples:
        >>> h100 = onerank.recost("trace.et", "H100", nvlink_active=True)
        >>> onerank.replay(h100).compute_ns > onerank.replay("trace.et").compute_ns
        True
    """
    from onerank.annotate import PassOptions, load_gpu, with_figures
    from onerank.annotate import recost as annotate_recost
    from onerank.annotate.hosts.host import load_host
    from onerank.annotate.passes.host_time import scale_host, with_host
    from onerank.annotate.passes.pass_options import parse_kernels, parse_sizes

    passes = PassOptions(
        dtype,
        parse_kernels((f"attention={attention}",)),
        parse_sizes(_text(seq), _text(micro_batch)),
        fuse,
        overlap,
        nvlink_active,
    )
    gpu = with_figures(load_gpu(target), override or {})
    described_host, before = load_host(host), _graph(trace)
    after = annotate_recost(
        before, gpu, model=model, source=source, passes=passes, databases=databases
    )
    return scale_host(with_host(after, before, described_host), host_scale)


def _text(value: float | str | None) -> str | None:
    return None if value is None else str(value)


def replay(trace: Trace, *, busbw_gb_s: float | None = None) -> Replay:
    """Schedule a graph with its durations and edges, and return the parts of the step.

    Args:
        trace: a graph, or its file.
        busbw_gb_s: bus bandwidth that times communication; None: the times in the trace.

    Raises:
        GraphError: the graph has a cycle, takes no time, or has communication that cannot be timed.

    Examples:
        >>> onerank.replay("trace.et").compute_ns
        50337401
    """
    from onerank.analysis.step_time import replay as replay_graph

    return replay_graph(_graph(trace), bandwidth_gb_per_s=busbw_gb_s)


def memory(
    trace: Trace, target: str | None = None, *, non_allocator_gb: float | None = None
) -> MemoryReport:
    """Return the peak memory of a step by class, what the allocator reserves, and whether it fits.

    Args:
        trace: a graph, or its file.
        target: GPU that it should fit; None: the device of the trace.
        non_allocator_gb: GB of the CUDA context and NCCL, outside the allocator; None: estimated
            from measurements and public reports.

    Raises:
        AnnotateError: the graph has no memory information.
        TargetError: the target is unknown or its description malformed.

    Examples:
        >>> report = onerank.memory("trace.et", "A40")
        >>> report.fits, report.peak_bytes
        (True, 11661916160)
    """
    from onerank.annotate import load_gpu
    from onerank.annotate.memory.memory_report import report_memory

    gpu = None if target is None else load_gpu(target)
    other_bytes = None if non_allocator_gb is None else round(non_allocator_gb * 1e9)
    return report_memory(_graph(trace), gpu, non_allocator_bytes=other_bytes)


def energy(
    trace: Trace, target: str | None = None, *, override: Mapping[str, float] | None = None
) -> EnergyReport:
    """Return the energy of a step by class of work, idle gaps included, between bounds.

    Args:
        trace: a graph, or its file.
        target: GPU to re-cost for first; None: the GPU of the durations.
        override: figures of the GPU to replace: `{"tdp_w": 500}`.

    Raises:
        TargetError: the GPU has no description.
        AnnotateError: the graph cannot be re-costed.

    Examples:
        >>> report = onerank.energy("trace.et")
        >>> report.step_low_uj < report.step_uj < report.step_high_uj
        True
    """
    from onerank.analysis.step_energy import step_energy

    return step_energy(_graph(trace), target, override or {})


def cost(
    trace: Trace,
    prices: str | Path,
    target: str | None = None,
    *,
    override: Mapping[str, float] | None = None,
    gpus: int | None = None,
    tokens: int | None = None,
) -> CostReport:
    """Return what a step and a million trained tokens cost, rented and owned.

    Args:
        trace: a graph, or its file.
        prices: price list (TOML); `examples/prices.toml` is an example.
        target: as for `energy`.
        override: as for `energy`.
        gpus: GPUs to pay for; None: the ranks of the trace's world.
        tokens: tokens that a step trains; None: as many as the embedding looks up.

    Raises:
        OneRankError: as for `energy`, or the price list is malformed or lacks the GPU.

    Examples:
        >>> onerank.cost("trace.et", "prices.toml").tokens
        4096
    """
    from onerank.analysis.step_energy import step_cost

    return step_cost(_graph(trace), Path(prices), target, override or {}, gpus=gpus, tokens=tokens)


def diff(before: Trace, after: Trace) -> TraceDiff:
    """Compare two graphs, or their files, by class, module and kernel name.

    Examples:
        >>> onerank.diff("trace.et", onerank.recost("trace.et", "H100")).same_kernels
        True
    """
    from onerank.analysis.trace_diff import compare_traces

    return compare_traces(_graph(before), _graph(after))


def check(path: str | Path) -> Records[Finding]:
    """Return the findings on an ASTRA-sim workload, or on the structure of one `.et` file.

    Raises:
        OSError: the path cannot be read.

    Examples:
        >>> list(onerank.check("trace.et"))
        []
    """
    from onerank.converters.targets.astra_sim.check import check as check_path
    from onerank.display import Records

    return Records(check_path(Path(path)))


def gpus() -> Records[Gpu]:
    """Return the GPU descriptions that ship with onerank.

    Examples:
        >>> "H100-SXM" in [gpu.name for gpu in onerank.gpus()]
        True
    """
    from onerank.annotate import gpu_names, load_gpu
    from onerank.display import Records

    return Records(load_gpu(name) for name in gpu_names())


def _graph(trace: Trace) -> Graph:
    return read(trace) if isinstance(trace, (str, Path)) else trace


@overload
def predict(
    op: str, target: str, *, databases: Sequence[str | Path] = (), **sizes: Any
) -> OpPrediction: ...


@overload
def predict(
    op: Sequence[Mapping[str, Any]], target: str, *, databases: Sequence[str | Path] = ()
) -> list[OpPrediction]: ...


def predict(
    op: str | Sequence[Mapping[str, Any]],
    target: str,
    *,
    databases: Sequence[str | Path] = (),
    **sizes: Any,
) -> OpPrediction | list[OpPrediction]:
    """Predict operators on a GPU without a trace: `predict("gemm", "H100", m=64, n=64, k=64)`.

    Args:
        op: "gemm", "attention", "norm", "elementwise" or "collective" with its `sizes`; or a list
            of mappings, each with "op" and its sizes.
        target: a GPU description, its name or its path.
        databases: kernel databases of the target, in addition to the shipped ones.
        sizes: fields of `onerank.analysis.predict_ops.OpCall`.

    Raises:
        AnnotateError: an operator or a size is unknown or missing.
        TargetError: the target is unknown or its description malformed.

    Examples:
        >>> gemm = onerank.predict("gemm", "H100", m=4096, n=4096, k=4096)
        >>> gemm.p10_ns < gemm.duration_ns < gemm.p90_ns
        True
    """
    from onerank.analysis.predict_ops import op_calls, predict_calls

    calls = op_calls([{"op": op, **sizes}] if isinstance(op, str) else op)
    predictions = predict_calls(calls, target, databases=databases)
    return predictions[0] if isinstance(op, str) else predictions


def register_extension_function(
    function: str, results: Callable[..., Any], *, writes: Sequence[int] = ()
) -> None:
    """Register a function of a C++ extension, for captures without a device in this process.

    An extension that torch's dispatcher does not know binds its kernels to Python functions. Such a
    capture calls `results` instead, and records an operator of the name `function`:

        onerank.register_extension_function(
            "my_ext::gemm", lambda a, b: a.new_empty(a.shape[0], b.shape[1])
        )
        onerank.register_operator_cost(
            "my_ext::gemm",
            lambda inputs, outputs: 2 * inputs[0][1] * outputs[0][0] * outputs[0][1],
        )

    A module that is not installed then imports. Register before the script imports it.

    Args:
        function: the name by which Python imports the extension, `::` and the function's name; of
            a method `Class.method`.
        results: takes the function's arguments, and returns what it returns. Tensors that it
            creates count as allocated by the function.
        writes: positions of the arguments that the function writes and does not read.

    Raises:
        CaptureError: `function` is no such name.
    """
    from onerank.capture.no_device.extensions import emulated_modules

    emulated_modules.register_extension_function(function, results, writes=writes)


def register_operator_cost(
    operator: str,
    flops: Count,
    *,
    bytes_read: Count | None = None,
    bytes_written: Count | None = None,
) -> None:
    """Register the FLOPs and bytes of a custom operator, in this process.

    A script that `onerank capture run` runs may register those of its operators; the trace keeps
    the counts. Each function takes two lists of shapes, of the arguments and of the results, in
    the schema's order. Arguments that are no tensor are None; for a list of tensors, the shape of
    its first.

        onerank.register_operator_cost(
            "mylib::gemm", lambda inputs, outputs: 2 * inputs[0][1] * math.prod(outputs[0])
        )

    Args:
        operator: name with namespace and without overload.
        flops: returns the floating-point operations, a multiply-add counting two.
        bytes_read: returns the bytes read; None: all tensor arguments, each once.
        bytes_written: returns the bytes written; None: all results, each once.

    Raises:
        AnnotateError: the name has no namespace, or has an overload.
    """
    from onerank.annotate.op_costs import custom_operator_costs

    custom_operator_costs.register_operator_cost(
        operator, flops, bytes_read=bytes_read, bytes_written=bytes_written
    )


def __getattr__(name: str) -> object:
    """Import names on first use, so that `import onerank` loads neither numpy nor torch."""
    if name in ("capture", "export"):
        return importlib.import_module(f"onerank.{name}")
    if name == "Graph":
        from onerank.ir import Graph

        return Graph
    raise AttributeError(f"module 'onerank' has no attribute {name!r}")

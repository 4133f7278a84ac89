"""Predict single operators on a GPU, without a trace.

The calls become a CPU capture of one operator each, which is predicted twice: as kernels, with the
models, kernel databases and intervals of `annotate`, and as calls of a benchmark. Collectives have
no model of a GPU: they take their wire bytes over a bus bandwidth, as in `onerank replay
--busbw-gb-s`.
"""

import json
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.gpus.registry import load_gpu
from onerank.annotate.models.cost_model import MODELS
from onerank.annotate.models.features import Timing
from onerank.annotate.models.prediction_terms import Operation, Term, TermRecord, quantity, quotient
from onerank.annotate.passes.pass_options import NO_PASSES
from onerank.annotate.recost.from_datasheet import UnmeasuredRequest, recost_cpu_capture
from onerank.converters.nccl import wire_bytes
from onerank.display import Displayed
from onerank.ir import Device, Evidence, Graph, GraphBuilder, Job, Kind
from onerank.ir.errors import AnnotateError, errors_at

OPS = ("gemm", "attention", "norm", "elementwise", "collective")

DTYPES = {
    "bf16": "Tensor(c10::BFloat16)",
    "fp16": "Tensor(c10::Half)",
    "fp32": "Tensor(float)",
    "fp8": "Tensor(c10::Float8_e4m3fn)",
    "fp4": "Tensor(c10::Float4_e2m1fn_x2)",
}
"""dtype -> how a trace records a tensor of it; fp8 and fp4 are of GEMMs only."""

SCALES = ("tensor", "row", "block")

_NARROW = ("fp8", "fp4")
_WIDE = tuple(dtype for dtype in DTYPES if dtype not in _NARROW)

# Elements that share a scale: a row of activations by DeepSeek's recipe, and NVFP4's.
_BLOCK, _FOUR_BIT_BLOCK = 128, 16

FUNCTIONS = ("add", "mul", "silu", "gelu", "exp", "copy_")

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")

# Type of a field's default -> types of its values, NumPy's included.
_TYPES: dict[type, tuple[type, str]] = {
    bool: (bool, "true or false"),
    int: (numbers.Integral, "an integer"),
    float: (numbers.Real, "a number"),
    str: (str, "a name"),
}

_BUS_BANDWIDTH_NOTE = "link_bandwidth_gb_per_s of the description: give a measured busbw_gb_per_s"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCall:
    """A call. Each operator reads the sizes in `REQUIRED`, and those in `_OPTIONAL`.

    Attributes:
        op: one of `OPS`.
        dtype: one of `DTYPES`.
        scales: one of `SCALES`: what has a scale in fp8. Blocks are 1 x 128 and 128 x 128; fp4 is
            NVFP4, with a scale for 16 elements.
        batch: GEMMs of a batch, or sequences of attention.
        m: rows of a GEMM's result, or of a norm.
        n: columns of a GEMM's result, or the size that a norm reduces.
        k: inner size of a GEMM.
        heads: query heads of attention.
        kv_heads: key and value heads; 0: as many as query heads.
        seq: query length.
        kv_seq: key length; 0: as long as the queries.
        head_dim: size of a head.
        causal: whether attention is masked to earlier keys.
        numel: elements of an elementwise operator's result.
        function: one of `FUNCTIONS`, of an elementwise operator.
        norm: "rms" or "layer".
        collective: one of `COLLECTIVES`.
        nbytes: input of one rank of a collective.
        ranks: of a collective.
        busbw_gb_per_s: bus bandwidth of a collective in GB/s; 0: the description's link bandwidth.
    """

    op: str
    dtype: str = "bf16"
    scales: str = "tensor"
    batch: int = 1
    m: int = 0
    n: int = 0
    k: int = 0
    heads: int = 0
    kv_heads: int = 0
    seq: int = 0
    kv_seq: int = 0
    head_dim: int = 0
    causal: bool = True
    numel: int = 0
    function: str = "add"
    norm: str = "rms"
    collective: str = "all_reduce"
    nbytes: int = 0
    ranks: int = 0
    busbw_gb_per_s: float = 0.0

    def __post_init__(self) -> None:
        """Check the call.

        Raises:
            AnnotateError: a value has another type, a name is unknown, or a size is missing or
                below 1.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            kind, text = _TYPES[type(field.default) if field.name != "op" else str]
            # bool is a subclass of int.
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise AnnotateError(
                    f"{field.name} is {value!r}\n  give {text}", code="predict-type"
                )
        for name, value, choices in (
            ("op", self.op, OPS),
            ("dtype", self.dtype, tuple(DTYPES) if self.op == "gemm" else _WIDE),
            ("scales", self.scales, SCALES),
            ("function", self.function, FUNCTIONS),
            ("norm", self.norm, ("rms", "layer")),
            ("collective", self.collective, COLLECTIVES),
        ):
            if value not in choices:
                raise AnnotateError(
                    f"{name} is {value!r}\n  give one of {', '.join(choices)}", code="predict-name"
                )
        if self.dtype in _NARROW and self.batch > 1:
            raise AnnotateError(
                f"batch is {self.batch}, and torch has no batched GEMM in {self.dtype}\n"
                "  give batch 1",
                code="predict-size",
            )
        sizes = (*REQUIRED[self.op], "batch")
        if missing := [name for name in sizes if getattr(self, name) < 1]:
            raise AnnotateError(
                f"{self.op} needs {', '.join(sizes[:-1])}, each at least 1; "
                f"missing or smaller: {', '.join(missing)}",
                code="predict-size",
            )
        # The dataclass is frozen, so defaults that depend on other fields need this.
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "kv_seq", self.kv_seq or self.seq)
        # Grouped-query attention: each key and value head serves the same number of query heads.
        if self.op == "attention" and self.heads % self.kv_heads:
            raise AnnotateError(
                f"{self.heads} heads are not a multiple of {self.kv_heads} kv_heads\n"
                "  give kv_heads that divides heads",
                code="predict-size",
            )

    @property
    def sizes(self) -> str:
        """The sizes of the call as text, such as "m=4096 n=4096 k=4096"."""
        names = [*REQUIRED[self.op], *_OPTIONAL.get(self.op, ())]
        names += ["scales"] * (self.dtype == "fp8")
        return " ".join(f"{name}={getattr(self, name)}" for name in names)


REQUIRED: dict[str, tuple[str, ...]] = {
    "gemm": ("m", "n", "k"),
    "attention": ("heads", "seq", "head_dim"),
    "norm": ("m", "n"),
    "elementwise": ("numel",),
    "collective": ("nbytes", "ranks"),
}
"""Operator -> the sizes that it needs."""

_OPTIONAL = {
    "gemm": ("batch",),
    "attention": ("batch", "kv_heads", "kv_seq", "causal"),
    "norm": ("norm",),
    "elementwise": ("function",),
    "collective": ("collective",),
}


def names_of_sizes(op: str) -> set[str]:
    """Return the fields of `OpCall` that an operator reads, as options of `onerank predict`."""
    further = {"gemm": {"scales"}, "collective": {"busbw_gb_s"}}
    return {*REQUIRED[op], *_OPTIONAL[op], "dtype"} | further.get(op, set())


@dataclass(frozen=True, slots=True, repr=False)
class OpPrediction(Displayed):
    """The predicted times of one call.

    Attributes:
        call: the call.
        target: name of the GPU.
        duration_ns: duration of the call's kernel, as a profiler records it.
        p10_ns: lower end of its 80% interval; None without one.
        p90_ns: upper end.
        call_ns: time of the call in a benchmark that replays such calls in a CUDA graph, from the
            start of one to the start of the next; None for collectives.
        call_p10_ns: lower end of its 80% interval.
        call_p90_ns: upper end.
        bound: the part of the time that is longest: "compute", "memory", "cache", "launch",
            "issue", "alignment" or "link".
        evidence: source of the duration, as in a re-costed trace; "bandwidth" for collectives.
        terms: the duration as a tree of terms.
    """

    call: OpCall
    target: str
    duration_ns: int
    p10_ns: int | None
    p90_ns: int | None
    call_ns: int | None
    call_p10_ns: int | None
    call_p90_ns: int | None
    bound: str
    evidence: str
    terms: Term


def predict_calls(
    calls: Sequence[OpCall], target: str | Gpu, *, databases: Sequence[str | Path] = ()
) -> list[OpPrediction]:
    """Return the predicted times of calls on a GPU, in their order.

    Each call is predicted on its own; none counts as the gradient of another.

    Args:
        calls: the calls to predict.
        target: a GPU description, its name or its path.
        databases: kernel databases of the target, in addition to the shipped ones.

    Raises:
        AnnotateError: a database has rows of other GPUs only, or a collective has no bandwidth.
        DatabaseError: a file is not a kernel database.
        TargetError: the target is unknown or its description malformed.
    """
    gpu = load_gpu(target) if isinstance(target, str) else target
    on_gpu = [index for index, call in enumerate(calls) if call.op != "collective"]
    predictions = {
        index: _collective(call, gpu) for index, call in enumerate(calls) if call.op == "collective"
    }
    if on_gpu:
        record = TermRecord(np.arange(len(on_gpu)))
        graph = _cpu_capture([calls[index] for index in on_gpu])
        kernels = UnmeasuredRequest(
            target=gpu,
            model=MODELS["auto"],
            passes=NO_PASSES,
            databases=databases,
            record=record,
            timing=Timing.KERNEL,
        )
        nodes = recost_cpu_capture(graph, kernels).nodes
        per_call = replace(kernels, record=None, timing=Timing.CALL)
        nodes_per_call = recost_cpu_capture(graph, per_call).nodes
        # Rows of the predictions are matched with calls by place.
        assert len(nodes.id) == len(on_gpu), "an operator was dropped"
        for row, index in enumerate(on_gpu):
            predictions[index] = OpPrediction(
                calls[index],
                gpu.name,
                int(nodes.duration_ns[row]),
                int(nodes.p10_ns[row]),
                int(nodes.p90_ns[row]),
                int(nodes_per_call.duration_ns[row]),
                int(nodes_per_call.p10_ns[row]),
                int(nodes_per_call.p90_ns[row]),
                # A time from a database has no parts; the model's time, which it replaced, has.
                _bound(record.modelled.get(row, record.roots[row])),
                Evidence(int(nodes.evidence[row])).name.lower(),
                record.roots[row],
            )
    return [predictions[index] for index in range(len(calls))]


# The option --busbw-gb-s, and tables of earlier versions.
_OTHER_NAMES = {"busbw_gb_s": "busbw_gb_per_s"}


def op_calls(rows: Sequence[Mapping[str, Any]]) -> list[OpCall]:
    """Return calls from rows of a table; empty cells take the default.

    Raises:
        AnnotateError: a column is unknown, or a row is not a valid call.
    """
    columns = {field.name for field in fields(OpCall)}
    sizes = {field.name for field in fields(OpCall) if type(field.default) is int}
    calls: list[OpCall] = []
    for number, given in enumerate(rows, 1):
        row = {_OTHER_NAMES.get(name, name): value for name, value in given.items()}
        if unknown := [name for name in row if name not in columns]:
            raise AnnotateError(
                f"unknown column {unknown[0]!r}\n  known are {', '.join(sorted(columns))}",
                code="predict-column",
            )
        values: dict[str, Any] = {
            # pandas writes integers of a column with empty cells as 128.0.
            name: int(value) if name in sizes and _is_whole(value) else value
            for name, value in row.items()
            if value not in (None, "")
        }
        with errors_at(f"row {number}"):
            try:
                calls.append(OpCall(**values))
            except TypeError as error:
                raise AnnotateError(str(error), code="predict-row") from None
    return calls


def _cpu_capture(calls: Sequence[OpCall]) -> Graph:
    """Return a graph of one operator per call, as a CPU capture records it."""
    builder = GraphBuilder()
    for start, call in enumerate(calls):
        name, inputs, values, outputs = _operator(call)
        builder.add(
            kind=Kind.HOST_OP,
            thread=1,
            start_ns=start,
            name=name,
            op=name,
            input_types=_text([kind for kind, _ in inputs]),
            input_shapes=_text([shape for _, shape in inputs]),
            input_values=_text(values),
            output_types=_text([kind for kind, _ in outputs]),
            output_shapes=_text([shape for _, shape in outputs]),
        )
    return builder.build(Job(device=Device("cpu", "none")))


def _text(values: Sequence[Any]) -> str:
    return json.dumps(values, separators=(",", ":"))


_Operands = list[tuple[str, list[int]]]


def _scalar(kind: str) -> tuple[str, list[int]]:
    """Return an argument that is no tensor, as a trace records it."""
    return kind, []


def _operator(call: OpCall) -> tuple[str, _Operands, list[Any], _Operands]:
    """Return (operator, inputs, their values, outputs) as a trace records them."""
    tensor = DTYPES[call.dtype]
    if call.dtype in _NARROW:
        return _scaled_operator(call)
    if call.op == "gemm":
        # torch calls mm for one GEMM, and only its key finds the rows of a database.
        first = [] if call.batch == 1 else [call.batch]
        inputs = [(tensor, [*first, call.m, call.k]), (tensor, [*first, call.k, call.n])]
        name = "aten::mm" if call.batch == 1 else "aten::bmm"
        return name, inputs, ["", ""], [(tensor, [*first, call.m, call.n])]
    if call.op == "attention":
        query = [call.batch, call.heads, call.seq, call.head_dim]
        keys = [call.batch, call.kv_heads, call.kv_seq, call.head_dim]
        inputs = [
            (tensor, query),
            (tensor, keys),
            (tensor, keys),
            _scalar("Double"),
            _scalar("Bool"),
        ]
        values = ["", "", "", 0.0, call.causal]
        outputs = [(tensor, query), ("Tensor(float)", query[:3])]
        # The second output is the log-sum-exp of each query, in fp32 whatever the operands are.
        return "aten::_scaled_dot_product_flash_attention", inputs, values, outputs
    if call.op == "norm":
        rows, weight = [1, call.m, call.n], [call.n]
        if call.norm == "rms":
            inputs = [(tensor, rows), _scalar("ScalarList"), (tensor, weight), _scalar("Double")]
            outputs = [(tensor, rows), ("Tensor(float)", [1, call.m, 1])]
            return "aten::_fused_rms_norm", inputs, ["", weight, "", 1e-5], outputs
        inputs = [(tensor, rows), _scalar("ScalarList"), (tensor, weight), (tensor, weight)]
        inputs.append(_scalar("Double"))
        moments = ("Tensor(float)", [1, call.m, 1])
        outputs = [(tensor, rows), moments, moments]
        return "aten::native_layer_norm", inputs, ["", weight, "", "", 1e-5], outputs
    operand = (tensor, [call.numel])
    inputs = [operand, operand] if call.function in ("add", "mul", "copy_") else [operand]
    values: list[Any] = [""] * len(inputs)
    if call.function == "add":
        inputs, values = [*inputs, _scalar("Int")], [*values, 1]
    return f"aten::{call.function}", inputs, values, [operand]


def _scaled_operator(call: OpCall) -> tuple[str, _Operands, list[Any], _Operands]:
    """Return a GEMM in 8 or 4 bits as a trace records it: result and scales are wider."""
    tensor, (m, n, k) = DTYPES[call.dtype], (call.m, call.n, call.k)
    scale = DTYPES["fp32"]
    scales: tuple[list[int], list[int]] = [], []
    if call.dtype == "fp4":
        # Two elements in a byte, and scales in fp8.
        scale, blocks = DTYPES["fp8"], -(-k // _FOUR_BIT_BLOCK)
        scales, k = ([m * blocks], [n * blocks]), -(-k // 2)
    elif call.scales == "block":
        blocks = -(-k // _BLOCK)
        scales = [m, blocks], [blocks, -(-n // _BLOCK)]
    elif call.scales == "row":
        scales = [m, 1], [1, n]
    inputs = [(tensor, [m, k]), (tensor, [k, n]), (scale, scales[0]), (scale, scales[1])]
    return "aten::_scaled_mm", inputs, [""] * len(inputs), [(DTYPES["bf16"], [m, n])]


def _collective(call: OpCall, gpu: Gpu) -> OpPrediction:
    """Return the time of a collective: wire bytes over bus bandwidth; it has no interval.

    Raises:
        AnnotateError: neither the call nor the description has a bandwidth.
    """
    link = gpu.figures.get("link_bandwidth_gb_per_s")
    if not call.busbw_gb_per_s and link is None:
        raise AnnotateError(
            f"the description of {gpu.name} has no link_bandwidth_gb_per_s\n"
            "  give the bus bandwidth with --busbw-gb-s",
            code="predict-no-bandwidth",
        )
    bandwidth = call.busbw_gb_per_s or (link.value if link else 0.0)
    wire = wire_bytes(call.collective, call.nbytes, call.ranks)
    note = "as given" if call.busbw_gb_per_s else _BUS_BANDWIDTH_NOTE
    rate = Term("bus bandwidth", bandwidth, "bytes per ns", note=note)
    # Bytes over GB/s are nanoseconds.
    ratio = quotient(quantity("wire bytes", wire, "bytes"), rate, "collective")
    terms = Term("collective", ratio.value, "ns", ratio.operation, ratio.operands)
    return OpPrediction(
        call,
        gpu.name,
        round(terms.value),
        None,
        None,
        None,
        None,
        None,
        bound="link",
        evidence="bandwidth",
        terms=terms,
    )


_BOUNDS = {
    "floor": "launch",
    "compute": "compute",
    "cache": "cache",
    "read": "memory",
    "write": "memory",
    "memory": "memory",
    "helpers": "memory",
    "issue": "issue",
    "rows": "alignment",
}


def _bound(root: Term) -> str:
    """Return the longest part of a modelled time."""
    named_terms = list(root.named())
    tiles = [term for term in named_terms if term.name in ("by tiles", "by rows")]
    timed = (tiles or [term for term in named_terms if term.name == "datasheet"] or [root])[-1]
    parts = [
        term
        for term in timed.named()
        if term.name in _BOUNDS and term.operation is Operation.QUANTITY
    ]
    if not parts:  # the operator runs several GEMMs one after another
        return "compute"
    return _BOUNDS[max(parts, key=lambda term: term.value).name]


def _is_whole(value: object) -> bool:
    return isinstance(value, float) and value.is_integer()

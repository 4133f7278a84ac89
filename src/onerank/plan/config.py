"""The file that `onerank plan` reads: a model, a cluster, a job, and what may vary.

    [model]
    script = "train.py"                       # or config = "llama-70b/config.json"
    arguments = ["--seq", "{seq}", "--micro-batch", "{micro_batch}", "--recompute", "{recompute}"]

    [cluster]
    gpu = "H100"                              # a name of `onerank gpus`, or a description
    nodes = 64
    gpus_per_node = 8
    price_per_gpu_hour = 2.5                  # optional
    memory_gb = 80                            # optional; default: the GPU's
    intra_node = { busbw_gb_per_s = 370, latency_us = 10 }
    inter_node = { busbw_gb_per_s = 45, latency_us = 25 }

    [job]
    global_batch = 1024                       # sequences
    seq = 8192                                # tokens of a sequence

    [vary]                                    # fields of `Layout`; a value, or a list of values
    tp = [1, 2, 4, 8]
    pp = [1, 2, 4]
    recompute = ["none", "full"]

Paths are relative to the file.
"""

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import msgspec

from onerank.annotate import Gpu, load_gpu
from onerank.annotate.gpus.spec_schema import did_you_mean
from onerank.converters.expand.pipeline import Schedule
from onerank.ir.errors import OneRankError
from onerank.ir.input_files import load_toml
from onerank.plan.layouts import REST, SHARDINGS, Choices, Layout, PlanError

_T = TypeVar("_T")


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is trained: a script, or a model that onerank's own training loop runs.

    Attributes:
        script: a training script; None with `config`.
        arguments: its arguments; `{seq}` stands for the value of a layout, as do its other fields.
        config: `config.json` of a transformers model; None with `script`.
    """

    script: str | None = None
    arguments: tuple[str, ...] = ()
    config: str | None = None

    def arguments_for(self, layout: Layout) -> tuple[str, ...]:
        """Return the script's arguments with the values of a layout."""
        values = {name: str(getattr(layout, name)) for name in _PLACEHOLDERS}
        return tuple(_PLACEHOLDER.sub(lambda m: values[m[1]], text) for text in self.arguments)

    @property
    def placeholders(self) -> frozenset[str]:
        """Names in braces in the arguments."""
        return frozenset(_PLACEHOLDER.findall(" ".join(self.arguments)))


class Links(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The network within a node or between nodes, as nccl-tests measures it for one GPU."""

    busbw_gb_per_s: float
    latency_us: float


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The machines of a job; `inter_node` may be absent with one node."""

    gpu: str
    nodes: int
    gpus_per_node: int
    intra_node: Links
    inter_node: Links | None = None
    price_per_gpu_hour: float | None = None
    memory_gb: float | None = None

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.nodes * self.gpus_per_node


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A training step: its sequences on all GPUs, and the tokens of each."""

    global_batch: int
    seq: int


class PlanConfig(msgspec.Struct, frozen=True):
    """A validated configuration.

    Attributes:
        path: the file.
        model: what is trained.
        cluster: the machines.
        job: the step.
        choices: what may vary.
    """

    path: Path
    model: Model
    cluster: Cluster
    job: Job
    choices: Choices

    @property
    def directory(self) -> Path:
        """The directory that the paths of the configuration are relative to."""
        return self.path.absolute().parent

    def load_gpu(self) -> Gpu:
        """Return the description of the cluster's GPU.

        Raises:
            TargetError: the GPU is unknown, or its description is malformed.
        """
        description = self.directory / self.cluster.gpu
        return load_gpu(description if description.is_file() else self.cluster.gpu)

    def model_digest(self) -> str:
        """Return a digest of the files that decide a capture.

        They are the configuration of the model, or the script and the other Python files of its
        directory, which it may import.
        """
        name = self.model.script or self.model.config
        assert name is not None, "checked by `read_config`"
        model = self.directory / name
        files = [model]
        if self.model.script:
            files += sorted(path for path in model.parent.rglob("*.py") if _is_source(path, model))
        digest = hashlib.sha256()
        for file in files:
            content = file.read_bytes()
            digest.update(f"{file.relative_to(model.parent)} {len(content)}\n".encode())
            digest.update(content)
        return digest.hexdigest()


class _Bounds(NamedTuple):
    low: float
    high: float
    meaning: str


_SIZE = _Bounds(1, 1 << 20, "a number of GPUs")

_BOUNDS = {
    "nodes": _Bounds(1, 1 << 20, "the number of nodes"),
    "gpus_per_node": _Bounds(1, 1024, "the number of GPUs of a node"),
    "busbw_gb_per_s": _Bounds(
        1e-3, 1e5, "the bus bandwidth of a large collective, as nccl-tests prints it, in GB/s"
    ),
    "latency_us": _Bounds(0, 1e6, "the time of a collective of a few bytes, in us"),
    "price_per_gpu_hour": _Bounds(0, 1e4, "the price of a GPU for an hour"),
    "memory_gb": _Bounds(1, 1e4, "the memory of a GPU in 1e9 bytes"),
    "global_batch": _Bounds(1, 1 << 31, "the sequences of a step on all GPUs"),
    "seq": _Bounds(1, 1 << 26, "the tokens of a sequence"),
    "micro_batch": _Bounds(1, 1 << 20, "the sequences of a micro-batch"),
    **dict.fromkeys(("tp", "cp", "pp", "dp", "ep"), _SIZE),
}

_PLACEHOLDERS = tuple(field.name for field in dataclasses.fields(Layout))

# Braces around anything but a name, such as JSON's, are the script's.
_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")

# A capture differs by these only through the script's arguments.
_SET_BY_SCRIPT = ("seq", "micro_batch", "recompute")


def read_config(path: Path) -> PlanConfig:
    """Read and validate a configuration.

    Raises:
        PlanError: a field is missing, unknown, of another type or out of range; a file is missing.
        TargetError: the GPU is unknown.
    """
    tables = load_toml(path, error=PlanError)
    _check_names(f"{path}: ", tables, ("model", "cluster", "job", "vary"))
    job = _convert(f"{path}: [job]", tables.get("job"), Job)
    config = PlanConfig(
        path=path,
        model=_convert(f"{path}: [model]", tables.get("model"), Model),
        cluster=_convert(f"{path}: [cluster]", tables.get("cluster"), Cluster),
        job=job,
        choices=_choices(f"{path}: [vary]", tables.get("vary", {}), job.seq),
    )
    _check_model(config)
    _check_cluster(config)
    return config


def _choices(where: str, table: object, seq: int) -> Choices:
    """Return what may vary; a single value stands for a list of one."""
    if not isinstance(table, dict):
        raise PlanError(f"{where} is {table!r}, not a table", code="plan-wrong-type")
    names = [field.name for field in dataclasses.fields(Choices)]
    _check_names(f"{where} ", cast("dict[str, Any]", table), names)
    values: dict[str, Any] = {"seq": [seq]}
    for name, value in cast("dict[str, Any]", table).items():
        single = not isinstance(value, list) and (name, value) != ("dp", REST)
        values[name] = [value] if single else value
        if value == []:
            raise PlanError(
                f"{where} {name} lists no value; name one, or remove the line",
                code="plan-out-of-range",
            )
    choices = _convert(where, values, Choices)
    for sharding in choices.sharding:
        if sharding not in SHARDINGS:
            raise PlanError(
                f'{where} sharding "{sharding}" is unknown{did_you_mean(sharding, SHARDINGS)}',
                code="plan-unknown-sharding",
            )
    for schedule in choices.schedule:
        try:
            Schedule.parse(schedule)
        except OneRankError as error:
            raise PlanError(f"{where} schedule: {error}", code=error.code) from None
    return choices


def _convert(where: str, table: object, kind: type[_T]) -> _T:
    """Return a table as a record; check its fields and the range of each number.

    Raises:
        PlanError: a field is missing, unknown, of another type or out of range.
    """
    if table is None:
        raise PlanError(f"{where} is missing", code="plan-missing-field")
    try:
        record = msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise _of_field(where, str(error), kind) from None
    _check_ranges(where, msgspec.to_builtins(record))
    return record


def _of_field(where: str, message: str, kind: type) -> PlanError:
    """Return msgspec's error with the place as a user writes it: `[cluster] intra_node`."""
    what, _, place = message.partition(" - at `$")
    where = f"{where} {place.rstrip('`').lstrip('.')}".rstrip()
    missing = re.match(r"Object missing required field `(\w+)`", what)
    if missing:
        bounds = _BOUNDS.get(missing[1])
        meaning = f": {bounds.meaning}" if bounds else ""
        return PlanError(f"{where} lacks {missing[1]}{meaning}", code="plan-missing-field")
    unknown = re.match(r"Object contains unknown field `(.*)`", what)
    if unknown:
        fields = Links.__struct_fields__ if place else getattr(kind, "__struct_fields__", ())
        return PlanError(
            f'{where} has an unknown field "{unknown[1]}"{did_you_mean(unknown[1], fields)}',
            code="plan-unknown-field",
        )
    return PlanError(f"{where}: {what[:1].lower()}{what[1:]}", code="plan-wrong-type")


def _check_names(where: str, table: Mapping[str, Any], known: Iterable[str]) -> None:
    for name in table:
        if name not in known:
            raise PlanError(
                f'{where}has an unknown field "{name}"{did_you_mean(name, [*known])}',
                code="plan-unknown-field",
            )


def _check_ranges(where: str, values: Mapping[str, object]) -> None:
    for name, value in values.items():
        if isinstance(value, dict):
            _check_ranges(f"{where} {name}", cast("dict[str, object]", value))
        several = isinstance(value, (list, tuple))
        numbers = cast("Sequence[object]", value if several else (value,))
        for number in numbers:
            if name not in _BOUNDS or not isinstance(number, (int, float)):
                continue
            bounds = _BOUNDS[name]
            # NaN is in no range.
            if not bounds.low <= number <= bounds.high:
                raise PlanError(
                    f"{where} {name} is {number}, outside {bounds.low:g} to {bounds.high:g}: it is "
                    f"{bounds.meaning}",
                    code="plan-out-of-range",
                )


def _check_model(config: PlanConfig) -> None:
    """Check that the model's file exists, and that the script takes what varies."""
    where, model = f"{config.path}: [model]", config.model
    name = model.script or model.config
    if name is None or (model.script and model.config):
        raise PlanError(
            f"{where} names {'both' if name else 'neither'} script and config; name one",
            code="plan-model-source",
        )
    if not (config.directory / name).is_file():
        raise PlanError(
            f"{where} {name}: there is no such file in {config.directory}", code="plan-no-file"
        )
    if model.config:
        if model.arguments:
            raise PlanError(
                f"{where} arguments are those of a script, and config names a model",
                code="plan-model-source",
            )
        return
    for placeholder in model.placeholders:
        if placeholder not in _PLACEHOLDERS:
            raise PlanError(
                f"{where} arguments: {{{placeholder}}} is no field of a layout"
                f"{did_you_mean(placeholder, _PLACEHOLDERS)}",
                code="plan-unknown-placeholder",
            )
    for axis in _SET_BY_SCRIPT:
        varied = getattr(config.choices, axis)
        if len(set(varied)) > 1 and axis not in model.placeholders:
            values = ", ".join(map(str, varied))
            raise PlanError(
                f"{where} {axis} varies ({values}), and no argument of the script has {{{axis}}}\n"
                f'  pass it, such as arguments = ["--{axis.replace("_", "-")}", "{{{axis}}}"]',
                code="plan-no-placeholder",
            )


def _check_cluster(config: PlanConfig) -> None:
    """Check that the GPU is known, and that several nodes have a network."""
    cluster = config.cluster
    if cluster.nodes > 1 and cluster.inter_node is None:
        raise PlanError(
            f"{config.path}: [cluster] has {cluster.nodes} nodes and lacks inter_node, the network "
            "between them\n  write inter_node = { busbw_gb_per_s = 45, latency_us = 25 }, with "
            "figures of nccl-tests",
            code="plan-missing-field",
        )
    config.load_gpu()


def _is_source(path: Path, script: Path) -> bool:
    """Return whether a file may be imported by a script: not hidden, not of an environment."""
    folders = path.relative_to(script.parent).parts[:-1]
    return path != script and not any(
        folder.startswith(".") or folder in ("site-packages", "__pycache__") for folder in folders
    )

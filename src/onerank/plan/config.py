"""The file that `onerank plan` reads: a model, a cluster, a job, and what may vary.

    [model]
    script = "train.py"                       # or config = "llama-70b/config.json"
    arguments = ["--seq", "{seq}", "--micro-batch", "{micro_batch}", "--recompute", "{recompute}"]

    torchrun = true                           # optional: the script distributes itself

    [cluster]
    gpu = "H100"                              # a name of `onerank gpus`, or a description
    nodes = 64
    gpus_per_node = 8
    price_per_gpu_hour = 2.5                  # optional
    memory_gb = 80                            # optional; default: the GPU's
    host = "typical"                          # optional; or a description, see `annotate --host`
    intra_node = { busbw_gb_per_s = 370 }     # of nccl-tests; latency_us is optional
    inter_node = { busbw_gb_per_s = 45 }      # of one GPU's network interface

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import msgspec

from onerank.annotate import load_gpu
from onerank.annotate.gpus.spec_schema import did_you_mean
from onerank.annotate.hosts.host import TYPICAL, load_host
from onerank.converters.expand.pipeline import PipelineSchedule
from onerank.ir.errors import errors_at
from onerank.ir.input_files import load_toml
from onerank.plan.captures import TRAIN_MODEL
from onerank.plan.cluster import (
    PLACEHOLDERS,
    TORCHRUN_PLACEHOLDERS,
    Cluster,
    ClusterLink,
    PlannedJob,
    TrainingScript,
    network_of,
)
from onerank.plan.layouts import BY_SCRIPT, REST, SHARDINGS, Choices, PlanError

_T = TypeVar("_T")


class _Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The table [model]: a script and its arguments, or the `config.json` of a model."""

    script: str | None = None
    arguments: tuple[str, ...] = ()
    config: str | None = None
    torchrun: bool = False


class _Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The network within a node or between nodes, as nccl-tests measures it for one GPU."""

    busbw_gb_per_s: float
    latency_us: float | None = None


class _Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The table [cluster]; `inter_node` may be absent with one node."""

    gpu: str
    nodes: int
    gpus_per_node: int
    intra_node: _Link
    inter_node: _Link | None = None
    price_per_gpu_hour: float | None = None
    memory_gb: float | None = None
    host: str = TYPICAL


class _Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The table [job]: the sequences of a step on all GPUs, and the tokens of each."""

    global_batch: int
    seq: int


@dataclass(frozen=True)
class PlanConfig:
    """A validated configuration.

    Attributes:
        path: the file.
        job: what it describes; its paths are relative to the file.
    """

    path: Path
    job: PlannedJob

    @property
    def directory(self) -> Path:
        """The directory that the paths of the configuration are relative to."""
        return self.path.absolute().parent


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

_LOOP_ARGUMENTS = tuple(
    text
    for name in ("seq", "micro_batch", "micro_batches", "recompute")
    for text in (f"--{name.replace('_', '-')}", f"{{{name}}}")
)
"""Arguments of `train_model` after the model's configuration."""

RECOMPUTATIONS = ("none", "attention", "selective", "full")
"""What `train_model` offers; it imports torch, which reading a configuration does not."""

# Braces around anything but a name, such as JSON's, are the script's.
_PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")

# A capture differs by these only through the script's arguments.
_SET_BY_SCRIPT = ("seq", "micro_batch", "recompute", "variant")

_OF_TORCHRUN = ("tp", "cp", "ep")

# Choices of onerank's own slicing, which a script that distributes itself makes in its arguments.
_NOT_OF_TORCHRUN = ("sp", "pp", "schedule", "sharding")


def read_config(path: Path) -> PlanConfig:
    """Read and validate a configuration.

    Raises:
        PlanError: a field is missing, unknown, of another type or out of range; a file is missing.
        TargetError: the GPU is unknown, or a latency that its description does not give.
    """
    tables = load_toml(path, error=PlanError)
    _check_names(f"{path}: ", tables, ("model", "cluster", "job", "vary"))
    job = _convert(f"{path}: [job]", tables.get("job"), _Job)
    choices = _choices(f"{path}: [vary]", tables.get("vary", {}), job.seq)
    model = _convert(f"{path}: [model]", tables.get("model"), _Model)
    if model.torchrun:
        choices = _of_torchrun(f"{path}: [vary]", tables.get("vary", {}), choices)
    return PlanConfig(
        path,
        PlannedJob(
            model=_model(path, model, choices),
            cluster=_cluster(path, tables.get("cluster")),
            global_batch=job.global_batch,
            choices=choices,
        ),
    )


def read_cluster(path: Path) -> Cluster:
    """Read and validate the table [cluster] of a configuration.

    Raises:
        PlanError: a field is missing, unknown, of another type or out of range.
        TargetError: the GPU is unknown, or a latency that its description does not give.
    """
    return _cluster(path, load_toml(path, error=PlanError).get("cluster"))


def _choices(where: str, table: object, seq: int) -> Choices:
    """Return what may vary; a single value stands for a list of one."""
    if not isinstance(table, dict):
        raise PlanError(f"{where} is {table!r}, not a table", code="plan-wrong-type")
    names = [field.name for field in dataclasses.fields(Choices)]
    _check_names(f"{where} ", cast("dict[str, Any]", table), names)
    # A `seq` of [vary] replaces that of [job].
    values: dict[str, Any] = {"seq": [seq]}
    for name, value in cast("dict[str, Any]", table).items():
        if name == "dp" and isinstance(value, str) and value != REST:
            raise PlanError(
                f'{where} dp is "{value}"; expected sizes, or "{REST}" for the GPUs that the other '
                "axes leave",
                code="plan-wrong-type",
            )
        # "rest" is all of `dp`, not a member of its list.
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
        with errors_at(f"{where} schedule"):
            PipelineSchedule.parse(schedule)
    return choices


def _of_torchrun(where: str, table: Mapping[str, object], choices: Choices) -> Choices:
    """Return the choices for a script that distributes itself.

    Raises:
        PlanError: the table has a choice of onerank's slicing.
    """
    for name in _NOT_OF_TORCHRUN:
        if name in table:
            raise PlanError(
                f"{where} {name}: the script of [model] distributes itself (torchrun = true)\n"
                "  remove the line; pass options of the script in arguments or variant",
                code="plan-of-script",
            )
    return dataclasses.replace(choices, sp=(False,), sharding=(BY_SCRIPT,))


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
        fields = _Link.__struct_fields__ if place else getattr(kind, "__struct_fields__", ())
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
                low, high = (f"{bound:,.12g}" for bound in (bounds.low, bounds.high))
                raise PlanError(
                    f"{where} {name} is {number}, outside {low} to {high}: it is {bounds.meaning}",
                    code="plan-out-of-range",
                )


def _check_model_type(where: str, file: Path) -> None:
    """Refuse a file that is no configuration of transformers, before torch is imported."""
    try:
        record: Any = msgspec.json.decode(file.read_bytes())
    except msgspec.DecodeError:
        record = None
    if not isinstance(record, dict) or "model_type" not in record:
        raise PlanError(
            f"{where} {file.name}: is no JSON object with a model_type\n"
            "  expected the config.json of a transformers model",
            code="plan-no-model-type",
        )


def _model(path: Path, model: _Model, choices: Choices) -> TrainingScript:
    """Return the model; check that its file exists, and that the script takes what varies."""
    where = f"{path}: [model]"
    name = model.script or model.config
    if name is None or (model.script and model.config):
        raise PlanError(
            f"{where} names {'both' if name else 'neither'} script and config; name one",
            code="plan-model-source",
        )
    if not (path.parent / name).is_file():
        raise PlanError(
            f"{where} {name}: there is no such file in {path.absolute().parent}",
            code="plan-no-file",
        )
    if model.config:
        if model.arguments or model.torchrun:
            field = "arguments" if model.arguments else "torchrun"
            raise PlanError(
                f"{where} {field} needs script, and the table has config",
                code="plan-model-source",
            )
        if choices.variant != ("",):
            raise PlanError(
                f"{path}: [vary] variant needs script in [model], which has config",
                code="plan-no-placeholder",
            )
        for recompute in choices.recompute:
            if recompute not in RECOMPUTATIONS:
                raise PlanError(
                    f'{path}: [vary] recompute "{recompute}" is unknown'
                    f"{did_you_mean(recompute, RECOMPUTATIONS)}",
                    code="plan-unknown-recomputation",
                )
        _check_model_type(where, path.parent / name)
        return TrainingScript(TRAIN_MODEL, (name, *_LOOP_ARGUMENTS), _digest([path.parent / name]))
    placeholders = _PLACEHOLDER.findall(" ".join(model.arguments))
    known = PLACEHOLDERS + (TORCHRUN_PLACEHOLDERS if model.torchrun else ())
    for placeholder in placeholders:
        if placeholder not in known:
            raise PlanError(
                f"{where} arguments: {{{placeholder}}} is no field of a layout that the script "
                f"sets{did_you_mean(placeholder, known)}",
                code="plan-unknown-placeholder",
            )
    for axis in _SET_BY_SCRIPT + (_OF_TORCHRUN if model.torchrun else ()):
        varied = getattr(choices, axis)
        if len(set(varied)) > 1 and axis not in placeholders:
            values = ", ".join(map(str, varied))
            raise PlanError(
                f"{where} {axis} varies ({values}), and no argument of the script has {{{axis}}}\n"
                f'  pass it, such as arguments = ["--{axis.replace("_", "-")}", "{{{axis}}}"]',
                code="plan-no-placeholder",
            )
    script = path.parent / name
    # The script may import any of them, so an edit of one ends the reuse of its captures.
    sources = sorted(file for file in script.parent.rglob("*.py") if _is_source(file, script))
    digest = _digest([script, *sources])
    return TrainingScript(Path(name), model.arguments, digest, model.torchrun)


def _digest(files: Sequence[Path]) -> str:
    """Return a digest of the files that decide a capture; the first one's directory is the root."""
    digest = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        # Name and length keep two files apart from one with the content of both.
        digest.update(f"{file.relative_to(files[0].parent)} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _cluster(path: Path, table: object) -> Cluster:
    """Return the cluster; check its GPU, its latencies, and that several nodes have a network."""
    read = _convert(f"{path}: [cluster]", table, _Cluster)
    if read.nodes > 1 and read.inter_node is None:
        raise PlanError(
            f"{path}: [cluster] has {read.nodes} nodes and lacks inter_node, the network between "
            "them\n  write inter_node = { busbw_gb_per_s = ... }, the bus bandwidth of one GPU's "
            "network interface",
            code="plan-missing-field",
        )
    with errors_at(f"{path}: [cluster] gpu"):
        gpu = load_gpu(_file_or_name(path, read.gpu))
    with errors_at(f"{path}: [cluster] host"):
        load_host(_file_or_name(path, read.host))
    # No group of a single node uses it.
    inter_node = read.inter_node or read.intra_node
    cluster = Cluster(
        gpu=read.gpu,
        nodes=read.nodes,
        gpus_per_node=read.gpus_per_node,
        intra_node=ClusterLink(read.intra_node.busbw_gb_per_s, read.intra_node.latency_us),
        inter_node=ClusterLink(inter_node.busbw_gb_per_s, inter_node.latency_us),
        memory_bytes=gpu.memory_bytes if read.memory_gb is None else round(read.memory_gb * 1e9),
        price_per_gpu_hour=read.price_per_gpu_hour,
        host=read.host,
    )
    # An unknown latency is an error here, not after the captures of a plan.
    network_of(cluster, gpu)
    return cluster


def _file_or_name(path: Path, name: str) -> Path | str:
    return path.parent / name if (path.parent / name).is_file() else name


def _is_source(path: Path, script: Path) -> bool:
    """Return whether a file may be imported by a script: not hidden, not of an environment."""
    folders = path.relative_to(script.parent).parts[:-1]
    return path != script and not any(
        folder.startswith(".") or folder in ("site-packages", "__pycache__") for folder in folders
    )

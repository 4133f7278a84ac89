"""The captures without a device that layouts need: as few as differ.

Work of a stage depends on the axes within a replica, the micro-batch and the kind of the stage:
first, inner, last, or a whole model. A deep stage is captured with 2 and with 4 layers, once for
all depths, as `capture run --capture-layers 2,4` does. Schedules share captures. So do all even
numbers of replicas: `shards` derives their shards from the capture with two.
"""

import ast
import contextlib
import hashlib
import importlib
import os
import tempfile
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from onerank.converters.expand.pipeline import Schedule
from onerank.ir import World
from onerank.ir.errors import OneRankError
from onerank.plan.cluster import CAPTURED_MICRO_BATCHES, PlannedJob
from onerank.plan.layouts import Layout, PlanError
from onerank.plan.tasks import Task, content_key

TRAIN_MODEL = Path(__file__).with_name("train_model.py")
"""The training loop for a transformers configuration."""

DEPTHS = (2, 4)
"""Numbers of layers to capture of a deep stage."""

_CAPTURED_REPLICAS = 2
"""Replicas of a capture that stands for all even numbers of them."""

_CANONICAL_STAGES = 3
"""Stages of the pipeline that deep stages are captured in: one of each kind."""


@dataclass(frozen=True, slots=True)
class StageCapture:
    """A capture without a device of one stage, or of a whole model.

    Attributes:
        arguments: arguments of the script.
        tp: as in `Layout`; so are `sp`, `cp`, `ep`, `dp` and `sharding`.
        stages: stages of the pipeline; 1: no pipeline.
        stage: the captured one.
        layers: layers to build; 0: all of the stage.
        micro_batches: captured micro-batches; 0 if the script decides.
    """

    arguments: tuple[str, ...]
    tp: int
    sp: bool
    cp: int
    ep: int
    dp: int
    sharding: str
    stages: int
    stage: int
    layers: int
    micro_batches: int = 0

    @property
    def world(self) -> World:
        """The ranks of the captured job."""
        return World.of(tp=self.tp, cp=self.cp, dp=self.dp, pp=self.stages, ep=self.ep)

    def options(self) -> dict[str, Any]:
        """Return the options of `capture run`, by their names in Python."""
        rank = self.world.at({"pp": self.stage})
        options: dict[str, Any] = {"tp": self.tp, "sp": self.sp, "cp": self.cp, "pp": self.stages,
                                   "ep": self.ep, "dp": self.dp, "rank": rank}  # fmt: skip
        if self.dp > 1:
            options |= {"ddp": {"ddp": True}, "fsdp": {"fsdp": True}, "zero1": {"zero": 1},
                        "zero2": {"zero": 2}}[self.sharding]  # fmt: skip
        return options

    def __str__(self) -> str:
        axes = {"tp": self.tp, "cp": self.cp, "ep": self.ep, "dp": self.dp}
        parts = [f"{axis} {size}" for axis, size in axes.items() if size > 1]
        parts += [self.sharding] if self.dp > 1 else []
        parts += [f"stage {self.stage} of {self.stages}"] if self.stages > 1 else []
        parts += [f"{self.layers} layers"] if self.layers else []
        return ", ".join(parts) or "one GPU"


@dataclass(frozen=True, slots=True)
class StageSource:
    """Where the figures of a pipeline stage come from.

    Attributes:
        captures: one capture with the layers of the stage, or one at each of `DEPTHS`.
        layers: layers of the stage.
    """

    captures: tuple[StageCapture, ...]
    layers: int


def arguments_of(job: PlannedJob, layout: Layout, micro_batches: int) -> tuple[str, ...]:
    """Return the script's arguments for a layout."""
    values = {"seq": layout.seq, "micro_batch": layout.micro_batch, "micro_batches": micro_batches,
              "recompute": layout.recompute}  # fmt: skip
    arguments: list[str] = []
    for argument in job.model.arguments:
        for name, value in values.items():
            argument = argument.replace(f"{{{name}}}", str(value))  # noqa: PLW2901
        arguments.append(argument)
    return tuple(arguments)


def stage_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Return the layers of each stage: an even split, with the remainder first.

    Raises:
        PlanError: there are fewer layers than stages.
    """
    if layers < stages:
        raise PlanError(
            f"{stages} stages of a model of {layers} layers: {stages - layers} would be empty",
            code="pp-too-many-stages",
        )
    return tuple(layers // stages + (stage < layers % stages) for stage in range(stages))


def stage_sources(
    job: PlannedJob, layout: Layout, layers: int, *, exact: bool = False
) -> tuple[StageSource, ...]:
    """Return the source of each pipeline stage of a layout.

    Args:
        job: the job.
        layout: the layout.
        layers: layers of the model.
        exact: whether the captures have the layout's own number of replicas.

    Raises:
        PlanError: the model has fewer layers than the pipeline stages.
    """
    # With one micro-batch nothing accumulates: a new gradient never coexists with an earlier one.
    captured = 1 if layout.micro_batches == 1 else CAPTURED_MICRO_BATCHES
    arguments = arguments_of(job, layout, captured)
    takes_micro_batches = any("{micro_batches}" in each for each in job.model.arguments)
    # Two replicas may have fewer ranks than an expert-parallel group.
    shared_replicas = layout.ep == 1 and layout.dp % _CAPTURED_REPLICAS == 0 and not exact
    dp = _CAPTURED_REPLICAS if shared_replicas else layout.dp
    stages = layout.stages
    by_kind: dict[tuple[int, int], StageSource] = {}
    sources: list[StageSource] = []
    for stage, count in enumerate(stage_layers(layers, stages)):
        kind = 0 if stage == 0 else 2 if stage == stages - 1 else 1
        if (kind, count) not in by_kind:
            canonical = _CANONICAL_STAGES if stages > 1 else 1
            # A stage of the canonical pipeline must hold as many layers as the deepest capture.
            shared = layers // canonical >= DEPTHS[-1]
            depths = ((count,) if count in DEPTHS else DEPTHS) if shared else (0,)
            captures = (
                StageCapture(
                    arguments=arguments,
                    tp=layout.tp,
                    sp=layout.sp,
                    cp=layout.cp,
                    ep=layout.ep,
                    dp=dp,
                    sharding=layout.sharding,
                    stages=canonical if shared else stages,
                    stage=(0, canonical // 2, canonical - 1)[kind] if shared else stage,
                    layers=depth,
                    micro_batches=captured if takes_micro_batches else 0,
                )
                for depth in depths
            )
            by_kind[kind, count] = StageSource(tuple(captures), count)
        sources.append(by_kind[kind, count])
    return tuple(sources)


def capture_key(job: PlannedJob, capture: StageCapture) -> str:
    """Return a key of a capture: equal keys have equal results."""
    script = job.model.digest or hashlib.sha256(job.model.script.read_bytes()).hexdigest()
    return content_key(script, _described(job.cluster.gpu), capture)


def _described(gpu: str) -> str:
    # The content and not the name: a description's file may change.
    path = Path(gpu)
    return path.read_text(encoding="utf-8") if path.is_file() else gpu


def probe_task(job: PlannedJob, layout: Layout) -> Task:
    """Return the task that finds the number of layers of the model; see `layers_of`."""
    arguments = arguments_of(job, layout, 1)
    # A capture counts the layers that the script configures, and needs to build only one.
    capture = StageCapture(arguments, 1, False, 1, 1, 1, "ddp", 1, 0, 1)
    return _task(job, capture, "layers of the model")


def plan_captures(
    job: PlannedJob, layouts: Iterable[Layout], layers: int, *, exact: bool = False
) -> list[Task]:
    """Return the captures that layouts need, each once.

    Args:
        job: the job.
        layouts: the layouts; those with more stages than layers need none.
        layers: layers of the model.
        exact: as for `stage_sources`.
    """
    captures: dict[StageCapture, None] = {}
    for layout in layouts:
        # Other layouts are refused, with a reason, when they are evaluated.
        if layout.stages <= layers:
            for source in stage_sources(job, layout, layers, exact=exact):
                captures |= dict.fromkeys(source.captures)
    return [_task(job, capture, f"capture {capture}") for capture in captures]


def _task(job: PlannedJob, capture: StageCapture, label: str) -> Task:
    # A worker on another machine may have onerank elsewhere.
    script = "" if job.model.script == TRAIN_MODEL else str(job.model.script)
    arguments = (script, job.cluster.gpu, capture)
    return Task(capture_key(job, capture), label, f"{__name__}:capture_stage", arguments)


def layers_of(result: Mapping[str, Any]) -> int:
    """Return the layers of the model, by the result of the probe.

    Raises:
        PlanError: the script cannot be captured.
    """
    if result["code"]:
        raise PlanError(result["message"], code=result["code"])
    return int(result["layers"])


def capture_stage(script: str, gpu: str, capture: StageCapture) -> dict[str, Any]:
    """Run a capture, each in a fork of this process.

    Args:
        script: the script; "" for `TRAIN_MODEL`.
        gpu: the GPU that it sees.
        capture: what to capture.

    Returns:
        "trace": the `.et` file; "layers": layers of the model or of the stage; "code" and
        "message" of the error if the model or the script does not allow the capture.
    """
    from onerank.capture.isolated_capture import loading_capture

    with loading_capture():
        from onerank.capture.capture_script import capture as capture_rank
    from onerank.capture.isolation import forked_processes
    from onerank.capture.options import Options
    from onerank.capture.parallelize.fewer_layers import Depth

    path = Path(script) if script else TRAIN_MODEL
    _import_libraries(path, capture.arguments)
    depth = Depth(capture.layers, tuple(sorted({capture.layers, *DEPTHS})), any_depth=True)
    options = Options(
        device="none",
        like=gpu,
        depth=depth if capture.layers else None,
        micro_batches=capture.micro_batches or None,
        **capture.options(),
    )
    arguments = [*capture.arguments]
    if not script and capture.micro_batches:
        # The first step only creates optimizer states.
        arguments += ["--first-micro-batches", "1"]
    try:
        with _quiet(), forked_processes() as run:
            captured = run(capture_rank, path, arguments, options, progress=lambda _: None)
    except OneRankError as error:
        # A refusal is a result, too: a later run finds it stored and does not try again.
        return {"trace": b"", "layers": 0, "code": error.code, "message": str(error)}
    with tempfile.TemporaryDirectory(prefix="onerank-") as directory:
        trace = Path(directory) / "trace.et"
        captured.graph.write(trace)
        layers = captured.layers.depth if captured.layers else 0
        return {"trace": trace.read_bytes(), "layers": layers, "code": "", "message": ""}


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """Drop what a script and its libraries print, in this process and its forks."""
    # Descriptors and not `sys.stdout`: forks and C++ code write to them.
    kept = {stream: os.dup(stream) for stream in (1, 2)}
    null = os.open(os.devnull, os.O_WRONLY)
    try:
        for stream in kept:
            os.dup2(null, stream)
        yield
    finally:
        for stream, copy in kept.items():
            os.dup2(copy, stream)
            os.close(copy)
        os.close(null)


def _import_libraries(script: Path, arguments: Sequence[str]) -> None:
    """Import what the script imports from transformers, so that forks need not.

    transformers loads a model's module when its name is first looked up, which takes 3 s.
    """
    import transformers

    tree = ast.parse(script.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "transformers":
            for name in node.names:
                getattr(transformers, name.name, None)
    if script == TRAIN_MODEL:
        # A wrong path or model is an error of the script, which the capture reports.
        with contextlib.suppress(OSError, msgspec.DecodeError, KeyError, ModuleNotFoundError):
            config = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=dict[str, Any])
            kind = config["model_type"]
            importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")


def schedule_of(layout: Layout) -> Schedule:
    """Return the schedule of a layout."""
    return Schedule.parse(layout.schedule if layout.pp > 1 else "1f1b")


def keys_of(job: PlannedJob, sources: Sequence[StageSource]) -> list[str]:
    """Return the keys of all captures of a layout."""
    return [*dict.fromkeys(capture_key(job, c) for source in sources for c in source.captures)]

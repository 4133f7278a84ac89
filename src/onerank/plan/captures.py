"""The distinct captures without a device that layouts need; `run_captures.py` runs them.

Work of a stage depends on the axes within a replica, the micro-batch and the kind of the stage:
first, inner, last, or a whole model. A deep stage is captured with 2 and with 4 layers, once for
all depths, as `capture run --capture-layers 2,4` does; one with ZeRO 2 with 12 and with 24.
Schedules share captures. So do all even numbers of replicas: `shards` derives their shards from the
capture with two. Onerank's own loop runs all micro-batches and recomputations of a stage in one
process, as successive steps. A script that distributes itself is captured whole for each layout.
"""

import hashlib
import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onerank.ir import World
from onerank.plan.cluster import (
    CAPTURED_MICRO_BATCHES,
    PLACEHOLDERS,
    TORCHRUN_PLACEHOLDERS,
    PlannedJob,
)
from onerank.plan.layouts import Layout, PlanError
from onerank.plan.micro_batches import captured_sizes
from onerank.plan.tasks import Task, content_key

TRAIN_MODEL = Path(__file__).with_name("train_model.py")
"""The training loop for a transformers configuration."""

DEPTHS = (2, 4)
"""Numbers of layers to capture of a deep stage."""

_ZERO2_DEPTHS = (12, 24)
"""Numbers of layers to capture of a ZeRO 2 stage that is deeper than the last of them; others are
captured whole. Each backward reduces buckets of 500 million elements, which span layers, so
gradients of few layers are reduced at other moments than those of many. For 16 layers, a line
through 2 and 4 layers gave 1.7% more time and 1.6% more memory
(benchmarks/results/2026-11-26-plan-rows.txt)."""

_CAPTURED_REPLICAS = 2
"""Replicas of a capture that stands for all even numbers of them."""

_VARIANT = "{variant}"
"""Argument that stands for any number of arguments."""

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
        step: the captured step, as `train_model --vary` takes it; "" if the arguments say it.
            Captures that differ only in their step run in one process.
        torchrun: whether the script distributes itself.
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
    step: str = ""
    torchrun: bool = False

    @property
    def world(self) -> World:
        """The ranks of the captured job."""
        return World.of(tp=self.tp, cp=self.cp, dp=self.dp, pp=self.stages, ep=self.ep)

    def options(self) -> dict[str, Any]:
        """Return the options of `capture run`, by their names in Python."""
        rank = self.world.at({"pp": self.stage})
        options: dict[str, Any] = {"tp": self.tp, "sp": self.sp, "cp": self.cp, "pp": self.stages,
                                   "ep": self.ep, "dp": self.dp, "rank": rank}  # fmt: skip
        if self.torchrun:
            options["torchrun"] = True
        elif self.dp > 1:
            options |= {"ddp": {"ddp": True}, "fsdp": {"fsdp": True}, "zero1": {"zero": 1},
                        "zero2": {"zero": 2}}[self.sharding]  # fmt: skip
        return options

    def __str__(self) -> str:
        axes = {"tp": self.tp, "cp": self.cp, "ep": self.ep, "dp": self.dp}
        parts = [f"{axis} {size}" for axis, size in axes.items() if size > 1]
        parts += [self.sharding] if self.dp > 1 and not self.torchrun else []
        parts += [f"stage {self.stage} of {self.stages}"] if self.stages > 1 else []
        parts += [f"{self.layers} layers"] if self.layers else []
        return ", ".join(parts) or "one GPU"


@dataclass(frozen=True, slots=True)
class StageSource:
    """Where the figures of a pipeline stage come from.

    Attributes:
        captures: one capture with the layers of the stage, or one at each of two depths.
        layers: layers of the stage.
    """

    captures: tuple[StageCapture, ...]
    layers: int

    @property
    def depths(self) -> tuple[int, ...]:
        """Layers of each capture; 0 for all of the stage."""
        return tuple(capture.layers for capture in self.captures)


def arguments_of(job: PlannedJob, layout: Layout, micro_batches: int) -> tuple[str, ...]:
    """Return the script's arguments for a layout."""
    names = PLACEHOLDERS + (TORCHRUN_PLACEHOLDERS if job.model.torchrun else ())
    values = {name: getattr(layout, name) for name in names} | {"micro_batches": micro_batches}
    arguments: list[str] = []
    for argument in job.model.arguments:
        if argument == _VARIANT:
            arguments += shlex.split(layout.variant)
            continue
        for name, value in values.items():
            argument = argument.replace(f"{{{name}}}", str(value))  # noqa: PLW2901
        arguments.append(argument)
    return tuple(arguments)


def stage_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Return the layers of each stage: an even split, with the remainder first.

    Args:
        layers: layers of the model; 0 if not known, and the model then counts as one.
        stages: stages of the pipeline.

    Raises:
        PlanError: there are fewer layers than stages.
    """
    if not layers and stages == 1:
        return (1,)
    if not layers:
        raise PlanError(
            f"{stages} stages of a model whose layers cannot be counted: --pp splits the repeated "
            "layers of transformers models",
            code="pp-too-many-stages",
        )
    if layers < stages:
        raise PlanError(
            f"{stages} stages of a model of {layers} layers: {stages - layers} would be empty",
            code="pp-too-many-stages",
        )
    return tuple(layers // stages + (stage < layers % stages) for stage in range(stages))


def has_layers(layout: Layout, layers: int) -> bool:
    """Return whether the model has a layer for each stage; `layers` is as for `stage_layers`."""
    return layout.stages <= max(layers, 1)


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
    # One micro-batch is captured as such: a new gradient never coexists with an earlier one. So are
    # two without a pipeline: a ZeRO 2 step of the first and the last of three was 2.2% too long,
    # because the last overlaps communication of the second.
    captured = min(layout.micro_batches, CAPTURED_MICRO_BATCHES)
    if layout.pp > 1 and captured > 1:
        captured = CAPTURED_MICRO_BATCHES
    arguments = arguments_of(job, layout, captured)
    step = ""
    if job.model.script == TRAIN_MODEL:
        arguments = (job.model.arguments[0], "--seq", str(layout.seq))
        step = f"{captured}:{layout.micro_batch}:{layout.recompute}"
    stages = layout.stages
    base = StageCapture(
        arguments=arguments,
        tp=layout.tp,
        sp=layout.sp,
        cp=layout.cp,
        ep=layout.ep,
        dp=_captured_replicas(job, layout, exact=exact),
        sharding=layout.sharding,
        stages=stages,
        stage=0,
        layers=0,
        step=step,
        torchrun=job.model.torchrun,
    )
    by_kind: dict[tuple[int, int], StageSource] = {}
    sources: list[StageSource] = []
    for stage, count in enumerate(stage_layers(layers, stages)):
        kind = 0 if stage == 0 else 2 if stage == stages - 1 else 1
        if (kind, count) not in by_kind:
            by_kind[kind, count] = _stage_source(replace(base, stage=stage), kind, count, layers)
        sources.append(by_kind[kind, count])
    return tuple(sources)


def _captured_replicas(job: PlannedJob, layout: Layout, *, exact: bool) -> int:
    """Return the number of replicas in the captures of a layout."""
    # Two replicas may have fewer ranks than an expert-parallel group. A script that distributes
    # itself may do different work with another number of replicas.
    derives = layout.ep == 1 and not job.model.torchrun and not exact
    if derives and layout.dp % _CAPTURED_REPLICAS == 0:
        return _CAPTURED_REPLICAS
    return layout.dp


def _stage_source(own: StageCapture, kind: int, count: int, layers: int) -> StageSource:
    """Return the source of a stage: captures of few layers in a canonical pipeline, if they serve.

    Args:
        own: capture of the stage in its own pipeline, with all its layers.
        kind: 0 for the first stage, 2 for the last, 1 for those between.
        count: layers of the stage.
        layers: layers of the model.
    """
    canonical = _CANONICAL_STAGES if own.stages > 1 else 1
    zero2 = own.dp > 1 and own.sharding == "zero2"
    depths = _ZERO2_DEPTHS if zero2 and count > DEPTHS[-1] else DEPTHS
    # A stage of the canonical pipeline must hold as many layers as the deepest capture.
    whole = DEPTHS[-1] < count < depths[-1]
    if whole or layers // canonical < depths[-1]:
        return StageSource((own,), count)
    stage = (0, canonical // 2, canonical - 1)[kind]
    shared = replace(own, stages=canonical, stage=stage)
    captured = (count,) if count in depths else depths
    return StageSource(tuple(replace(shared, layers=depth) for depth in captured), count)


def group_key(job: PlannedJob, capture: StageCapture) -> str:
    """Return a key of the captures that run in one process with a capture."""
    script = job.model.digest or hashlib.sha256(job.model.script.read_bytes()).hexdigest()
    return content_key(script, described(job.cluster.gpu), replace(capture, step=""))


def described(name: str) -> str:
    """Return the content of a description that is a file, which may change; else its name."""
    path = Path(name)
    return path.read_text(encoding="utf-8") if path.is_file() else name


def probe_task(job: PlannedJob, layout: Layout) -> Task:
    """Return the task that finds the number of layers of the model; see `layers_of`."""
    arguments = arguments_of(job, layout, 1)
    # A capture counts the layers that the script configures, and needs to build only one.
    capture = StageCapture(arguments, 1, False, 1, 1, 1, "ddp", 1, 0, 1)
    return _task(job, [capture], "layers of the model")


def plan_captures(
    job: PlannedJob,
    layouts: Iterable[Layout],
    layers: int,
    *,
    exact: bool = False,
    later: Iterable[Layout] = (),
) -> list[Task]:
    """Return the captures that layouts need, each once.

    Args:
        job: the job.
        layouts: the layouts; those with more stages than layers need none.
        layers: layers of the model.
        exact: as for `stage_sources`.
        later: layouts of later rounds. A process that captures a stage for `layouts` also captures
            the steps that these need: a further step costs less than half of a further process.
    """
    groups: dict[StageCapture, list[StageCapture]] = {}
    for capture in _captures_of(job, layouts, layers, exact=exact):
        groups.setdefault(replace(capture, step=""), []).append(capture)
    for capture in _captures_of(job, later, layers, exact=exact):
        group = groups.get(replace(capture, step=""), [])
        if group and capture not in group:
            group.append(capture)
    return [
        _task(job, _recorded(group, exact=exact), f"capture {group[0]}")
        for group in groups.values()
    ]


def _recorded(captures: Sequence[StageCapture], *, exact: bool) -> list[StageCapture]:
    """Return the captures of a group whose steps are recorded; the others are derived from these.

    Args:
        captures: captures that differ in their step.
        exact: whether nothing is derived.
    """
    if exact or not captures[0].step:
        return [*captures]
    # The number of micro-batches and the recomputation -> sizes.
    by_kind: dict[tuple[int, str], list[int]] = {}
    for capture in captures:
        count, size, recompute = parse_step(capture.step)
        by_kind.setdefault((count, recompute), []).append(size)
    config, _, seq = captures[0].arguments
    text = Path(config).read_text(encoding="utf-8")
    constants = [int(number) for number in re.findall(r"\d+", text)]
    # Sorted, because the key contains them: later rounds find the result of the first.
    return [
        replace(captures[0], step=f"{count}:{size}:{recompute}")
        for (count, recompute), sizes in sorted(by_kind.items())
        for size in sorted(set(captured_sizes(sizes, int(seq), constants).values()))
    ]


def parse_step(step: str) -> tuple[int, int, str]:
    """Return micro-batches, sequences of each, and recomputation of a step of onerank's loop."""
    count, size, recompute = step.split(":")
    return int(count), int(size), recompute


def _captures_of(
    job: PlannedJob, layouts: Iterable[Layout], layers: int, *, exact: bool
) -> Iterable[StageCapture]:
    captures: dict[StageCapture, None] = {}
    for layout in layouts:
        # Other layouts are refused, with a reason, when they are evaluated.
        if has_layers(layout, layers):
            for source in stage_sources(job, layout, layers, exact=exact):
                captures |= dict.fromkeys(source.captures)
    return captures


def _task(job: PlannedJob, captures: Sequence[StageCapture], label: str) -> Task:
    # A worker on another machine may have onerank elsewhere.
    script = "" if job.model.script == TRAIN_MODEL else str(job.model.script)
    group = group_key(job, captures[0])
    steps = [capture.step for capture in captures]
    arguments = (script, job.cluster.gpu, tuple(captures), group)
    return Task(
        content_key(group, steps),
        label,
        "onerank.plan.run_captures:capture_stage",
        arguments,
        amount=len(captures),
    )

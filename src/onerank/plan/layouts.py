"""Layouts of a job on a cluster: what may vary, which combinations exist, and their outcomes.

Ranks are placed as in Megatron-LM and torchtitan: neighbours along tp are adjacent, then cp, dp and
pp. An expert-parallel group is `ep` consecutive ranks of the plane of cp and dp.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from onerank.converters.expand.pipeline import PipelineSchedule
from onerank.ir import World
from onerank.ir.errors import ExportError, JobError, OneRankError, division
from onerank.ir.notes import Note

SHARDINGS = ("ddp", "zero1", "zero2", "fsdp")
"""State that data-parallel ranks shard: none, optimizer states, also gradients, also parameters."""

BY_SCRIPT = "script"
"""Sharding of a script that distributes itself."""

REST = "rest"
"""Data-parallel size that uses all GPUs which the other axes leave."""


class PlanError(OneRankError):
    """A plan that cannot be made as requested."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a job is divided among GPUs.

    Attributes:
        tp: tensor-parallel size.
        sp: whether the tensor-parallel ranks also split sequences between their layers.
        cp: context-parallel size.
        pp: ranks of a pipeline.
        schedule: order of the pipeline: "gpipe", "1f1b", "interleaved:V" or "zbv". Without a
            pipeline "1f1b", which runs one micro-batch after another.
        dp: data-parallel size.
        sharding: one of `SHARDINGS`; "script" if a script distributes itself.
        ep: ranks that share the experts of a layer, among those of cp and dp.
        micro_batch: sequences of a micro-batch.
        micro_batches: micro-batches of a step on each data-parallel rank.
        recompute: activation checkpointing, as the script names it; "none" for none.
        seq: tokens of a sequence.
        variant: further arguments of the script; "" for none.
    """

    tp: int
    sp: bool
    cp: int
    pp: int
    schedule: str
    dp: int
    sharding: str
    ep: int
    micro_batch: int
    micro_batches: int
    recompute: str
    seq: int
    variant: str = ""

    @property
    def gpus(self) -> int:
        """Number of GPUs."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def world(self) -> World:
        """The ranks."""
        return World.of(tp=self.tp, cp=self.cp, dp=self.dp, pp=self.pp, ep=self.ep)

    @property
    def stages(self) -> int:
        """Stages of the pipeline; several may run on one rank."""
        return self.pp * PipelineSchedule.parse(self.schedule).chunks if self.pp > 1 else 1

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all GPUs train in a step."""
        return self.dp * self.micro_batch * self.micro_batches * self.seq

    def __str__(self) -> str:
        axes = {"tp": self.tp, "cp": self.cp, "ep": self.ep, "pp": self.pp, "dp": self.dp}
        parts = [f"{axis} {size}" for axis, size in axes.items() if size > 1]
        parts += ["sp"] if self.sp else []
        parts += [self.schedule] if self.pp > 1 else []
        parts += [self.sharding] if self.dp > 1 and self.sharding != BY_SCRIPT else []
        parts += [f"{self.micro_batches} micro-batches of {self.micro_batch} x {self.seq}"]
        parts += [f"recompute {self.recompute}"] if self.recompute != "none" else []
        parts += [self.variant] if self.variant else []
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class PredictedRange:
    """A predicted figure with its 80% interval.

    Attributes:
        value: the figure.
        low: lower end of the interval.
        high: upper end of the interval.
    """

    value: float
    low: float
    high: float

    def __mul__(self, factor: float) -> "PredictedRange":
        return PredictedRange(self.value * factor, self.low * factor, self.high * factor)

    def per(self, amount: float) -> "PredictedRange":
        """Return `amount` divided by the figure, as a rate."""
        return PredictedRange(amount / self.value, amount / self.high, amount / self.low)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The predicted step of a layout.

    Attributes:
        layout: the layout.
        gpus: number of GPUs.
        step_ns: duration of a step.
        tokens_per_s_per_gpu: trained tokens per second and GPU.
        mfu: FLOPs of the model, without recomputation, over the peak rate of the GPUs in bfloat16;
            None without that rate.
        peak_bytes: memory of the fullest rank.
        fits: whether that is within the memory of a GPU.
        over_bytes: missing bytes; 0 if it fits.
        energy_j: energy of a step on all GPUs; None if the description of the GPU lacks its power.
        money: price of a step on all GPUs; None without a price.
        compute_ns: time in which the slowest rank computes.
        exposed_communication_ns: time in which it communicates and computes nothing.
        bubble_ns: time in which it waits for other stages.
        commands: commands that reproduce the figures and export the workload.
        notes: statements on the quality of the figures.
    """

    layout: Layout
    gpus: int
    step_ns: PredictedRange
    tokens_per_s_per_gpu: PredictedRange
    mfu: PredictedRange | None
    peak_bytes: PredictedRange
    fits: bool
    over_bytes: int
    energy_j: PredictedRange | None
    money: PredictedRange | None
    compute_ns: float
    exposed_communication_ns: float
    bubble_ns: float
    commands: tuple[str, ...]
    notes: tuple[Note, ...]


@dataclass(frozen=True, slots=True)
class Dropped:
    """A combination of choices that is no layout, or a layout that the model does not allow.

    Attributes:
        choice: the combination, as text.
        code: code of the error that refused it.
        reason: why, with the arithmetic.
    """

    choice: str
    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Underived:
    """A layout whose figures cannot be derived from captures that layouts share.

    Attributes:
        layout: the layout, which needs captures with its own replicas and micro-batches.
        reason: why.
    """

    layout: Layout
    reason: str


@dataclass(frozen=True, slots=True)
class Choices:
    """Values to combine for each field of a `Layout`.

    `dp` may be "rest": all GPUs that the other axes leave. `sp` applies where tp is above 1.
    """

    seq: tuple[int, ...]
    tp: tuple[int, ...] = (1,)
    sp: tuple[bool, ...] = (True,)
    cp: tuple[int, ...] = (1,)
    pp: tuple[int, ...] = (1,)
    schedule: tuple[str, ...] = ("1f1b",)
    dp: tuple[int, ...] | Literal["rest"] = REST
    sharding: tuple[str, ...] = ("fsdp",)
    ep: tuple[int, ...] = (1,)
    micro_batch: tuple[int, ...] = (1,)
    recompute: tuple[str, ...] = ("none",)
    variant: tuple[str, ...] = ("",)


def enumerate_layouts(
    choices: Choices, *, gpus: int, global_batch: int
) -> tuple[list[Layout], list[Dropped]]:
    """Return the layouts that a cluster allows, and the combinations that it does not.

    Combinations that differ only in a choice without effect give one layout: a schedule without a
    pipeline, a sharding without replicas.

    Args:
        choices: what may vary.
        gpus: GPUs of the cluster.
        global_batch: sequences of a step.

    Raises:
        PlanError: no combination is a layout; the message has the first reason.
    """
    # Dicts as ordered sets: several combinations give one layout, and the order of the choices
    # stays.
    layouts: dict[Layout, None] = {}
    dropped: dict[Dropped, None] = {}
    for sizes in product(choices.tp, choices.cp, choices.pp, choices.ep, choices.schedule):
        try:
            of_model = _model_axes(*sizes, gpus=gpus)
            replicas = _replicas(choices, of_model, gpus)
        except OneRankError as error:
            dropped.setdefault(Dropped(_text(sizes), error.code, str(error)))
            continue
        for dp in replicas:
            try:
                _check_world(of_model, dp, gpus)
            except PlanError as error:
                dropped.setdefault(Dropped(f"{_text(sizes)}, dp {dp}", error.code, str(error)))
                continue
            for layout in _layouts_of(choices, of_model, dp, global_batch, dropped):
                layouts.setdefault(layout)
    if not layouts:
        first = next(iter(dropped))
        raise PlanError(
            f"none of the combinations of [vary] is a layout of {gpus} GPUs; "
            f"{first.choice}: {first.reason}\n  change [vary], the cluster or the batch",
            code="plan-no-layout",
        )
    return [*layouts], [*dropped]


@dataclass(frozen=True, slots=True)
class _ModelAxes:
    """Axes that divide one replica of the model, and its schedule."""

    tp: int
    cp: int
    pp: int
    ep: int
    schedule: PipelineSchedule

    @property
    def gpus(self) -> int:
        return self.tp * self.cp * self.pp


def _model_axes(tp: int, cp: int, pp: int, ep: int, schedule: str, *, gpus: int) -> _ModelAxes:
    # Without a pipeline all schedules run the micro-batches one after another.
    parsed = PipelineSchedule.parse(schedule if pp > 1 else "1f1b")
    axes = _ModelAxes(tp, cp, pp, ep, parsed)
    if gpus < axes.gpus:
        raise PlanError(
            f"tp {tp} x cp {cp} x pp {pp} = {axes.gpus} GPUs, more than the {gpus} of the cluster",
            code="plan-too-few-gpus",
        )
    return axes


def _replicas(choices: Choices, axes: _ModelAxes, gpus: int) -> Sequence[int]:
    if choices.dp != REST:
        return choices.dp
    if gpus % axes.gpus:
        raise PlanError(
            f"tp {axes.tp} x cp {axes.cp} x pp {axes.pp} = {axes.gpus} does not divide {gpus} GPUs "
            f"({division(gpus, axes.gpus)})",
            code="plan-indivisible-gpus",
        )
    return (gpus // axes.gpus,)


def _check_world(axes: _ModelAxes, dp: int, gpus: int) -> None:
    """Check that the axes make a world that the cluster has room for.

    Raises:
        PlanError: they need more GPUs, or ep does not divide cp * dp.
    """
    if axes.gpus * dp > gpus:
        raise PlanError(
            f"tp {axes.tp} x cp {axes.cp} x pp {axes.pp} x dp {dp} = {axes.gpus * dp} GPUs, more "
            f"than the {gpus} of the cluster",
            code="plan-too-few-gpus",
        )
    try:
        World.of(tp=axes.tp, cp=axes.cp, dp=dp, pp=axes.pp, ep=axes.ep)
    except JobError as error:
        raise PlanError(str(error), code=error.code) from error


def _layouts_of(
    choices: Choices,
    axes: _ModelAxes,
    dp: int,
    global_batch: int,
    dropped: dict[Dropped, None],
) -> Iterator[Layout]:
    """Yield the layouts with these axes and replicas; add to `dropped` what the batch rules out."""
    by_script = choices.sharding == (BY_SCRIPT,)
    sharding = choices.sharding if dp > 1 or by_script else ("ddp",)
    sp = choices.sp if axes.tp > 1 else (False,)
    for micro_batch in choices.micro_batch:
        try:
            micro_batches = _micro_batches(axes, dp, micro_batch, global_batch)
        except OneRankError as error:
            sizes = (axes.tp, axes.cp, axes.pp, axes.ep, str(axes.schedule))
            where = f"{_text(sizes)}, dp {dp}, micro-batch {micro_batch}"
            dropped.setdefault(Dropped(where, error.code, str(error)))
            continue
        for shared, split, recompute, seq, variant in product(
            sharding, sp, choices.recompute, choices.seq, choices.variant
        ):
            yield Layout(
                tp=axes.tp,
                sp=split,
                cp=axes.cp,
                pp=axes.pp,
                schedule=str(axes.schedule),
                dp=dp,
                sharding=shared,
                ep=axes.ep,
                micro_batch=micro_batch,
                micro_batches=micro_batches,
                recompute=recompute,
                seq=seq,
                variant=variant,
            )


def _micro_batches(axes: _ModelAxes, dp: int, micro_batch: int, global_batch: int) -> int:
    """Return the micro-batches of a rank's step; check that the schedule allows them.

    Raises:
        PlanError: the replicas do not divide the batch.
        ExportError: the schedule does not exist for this number.
    """
    count, rest = divmod(global_batch, dp * micro_batch)
    if rest:
        raise PlanError(
            f"dp {dp} x micro-batch {micro_batch} = {dp * micro_batch} does not divide the global "
            f"batch of {global_batch} sequences ({global_batch} = {dp * micro_batch} x {count} "
            f"+ {rest})",
            code="plan-indivisible-batch",
        )
    if axes.pp > 1 and axes.schedule.kind == "interleaved":
        # The other schedules exist for every number of micro-batches. The rounds of this one are
        # the same on every rank, so one rank's actions show whether they exist.
        rounds = max(1, count // axes.pp)
        if count % rounds:
            raise ExportError(
                f"interleaved: {rounds} rounds do not divide {count} micro-batches on {axes.pp} "
                "ranks",
                code="schedule-unequal-rounds",
            )
    return count


def _text(sizes: tuple[int, int, int, int, str]) -> str:
    tp, cp, pp, ep, schedule = sizes
    axes = {"tp": tp, "cp": cp, "pp": pp, "ep": ep}
    parts = [f"{axis} {size}" for axis, size in axes.items() if size > 1]
    return ", ".join([*parts, *([schedule] if pp > 1 else [])]) or "one GPU per replica"

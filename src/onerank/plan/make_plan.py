"""A plan from its configuration: captures, then the evaluation of each layout."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from shlex import quote

from onerank.display import size
from onerank.ir.notes import Note
from onerank.plan.captures import plan_captures, probe_task
from onerank.plan.config import PlanConfig
from onerank.plan.evaluate import plan_evaluations
from onerank.plan.layouts import (
    Dropped,
    Layout,
    Outcome,
    PlanError,
    Underived,
    enumerate_layouts,
)
from onerank.plan.run_captures import layers_of
from onerank.plan.tasks import Executor, Store, Task, complete_tasks, run_tasks

PRELOAD = ("onerank.capture.capture_script", "onerank.plan.evaluate")
"""Modules that the workers of a plan import."""

TOO_LARGE = "plan-too-large"
"""Code of a layout that a misfit rules out."""

Progress = Callable[[str, int, int], None]
"""Receives the name of a part of the work, how much of it is complete, and the whole."""


@dataclass(frozen=True)
class Plan:
    """Layouts of a job by predicted step time.

    Attributes:
        config: what was planned.
        layers: layers of the model; None if it is captured whole: its script distributes itself, or
            builds no transformers model with repeated layers.
        fitting: outcomes that fit into memory, the shortest step first.
        misfits: outcomes that do not, the nearest first.
        dropped: combinations of choices without figures: no layouts of this cluster or this model,
            or ruled out by a misfit that needs no more memory.
        notes: statements on the captures.
    """

    config: PlanConfig
    layers: int | None
    fitting: tuple[Outcome, ...]
    misfits: tuple[Outcome, ...]
    dropped: tuple[Dropped, ...]
    notes: tuple[Note, ...] = ()

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """All outcomes, those that fit first."""
        return self.fitting + self.misfits

    def record(self) -> "PlanRecord":
        """Return what `onerank plan --json` prints."""
        cluster = self.config.job.cluster
        layouts = self.fitting, self.misfits, self.dropped
        return PlanRecord(cluster.gpu, cluster.gpus, self.layers, *layouts, self.notes)


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """The layouts of a job on a cluster.

    Attributes:
        gpu: the cluster's GPU.
        gpus: number of its GPUs.
        layers: layers of the model; None if it is captured whole: its script distributes itself, or
            builds no transformers model with repeated layers.
        fitting: outcomes that fit into memory, by step time.
        misfits: outcomes that do not, by the bytes that are missing.
        dropped: combinations without figures: no layouts, or ruled out by a misfit.
        notes: statements on the captures.
    """

    gpu: str
    gpus: int
    layers: int | None
    fitting: tuple[Outcome, ...]
    misfits: tuple[Outcome, ...]
    dropped: tuple[Dropped, ...]
    notes: tuple[Note, ...]


def make_plan(config: PlanConfig, store: Store, executor: Executor, progress: Progress) -> Plan:
    """Return the plan of a configuration.

    Call it in the directory of the configuration, to which the paths of the job are relative.

    Args:
        config: the configuration.
        store: results of earlier runs, and of this one.
        executor: runs the captures and evaluations.
        progress: receives the progress.

    Raises:
        PlanError: no combination is a layout, or none fits into memory.
        CaptureError: the script cannot be captured.
        OSError: a result cannot be stored.
    """
    job = config.job
    layouts, dropped = enumerate_layouts(
        job.choices, gpus=job.cluster.gpus, global_batch=job.global_batch
    )
    # Stages of a script that distributes itself are captured whole, whatever their layers.
    layers = 1
    if not job.model.torchrun:
        probe = probe_task(job, layouts[0])
        part = _part("model", [probe], progress)
        layers = layers_of(run_tasks([probe], store, executor, part)[probe.key])
    outcomes: list[Outcome] = []
    underived: list[Underived] = []
    for number, candidates in enumerate(memory_rounds(layouts), start=1):
        pending, too_large = without_too_large(candidates, outcomes)
        dropped += too_large
        # Layouts whose shards cannot be derived are captured with their own number of replicas.
        for exact in (False, True):
            suffix = f", round {number}" if number > 1 else ""
            suffix += " with all replicas: shards unknown" if exact else ""
            later = () if exact else layouts
            captures = plan_captures(job, pending, layers, exact=exact, later=later)
            part = _part(f"captures{suffix}", captures, progress)
            # Evaluations read the captures in their own processes.
            complete_tasks(captures, store, executor, part)
            evaluations = plan_evaluations(job, pending, layers, captures, exact=exact)
            part = _part(f"layouts{suffix}", evaluations, progress)
            results = run_tasks(evaluations, store, executor, part)
            again = [each for result in results.values() for each in result.underived]
            underived += again
            pending = [each.layout for each in again]
            for result in results.values():
                outcomes += result.outcomes
                dropped += result.dropped
            if not pending:
                break
        # A capture with a layout's own number of replicas needs no derivation.
        assert not pending, pending
    plan = replace(
        sorted_plan(config, None if job.model.torchrun else layers or None, outcomes, dropped),
        notes=notes_on_captures(underived),
    )
    check_fits(plan)
    return plan


def notes_on_captures(underived: Sequence[Underived]) -> tuple[Note, ...]:
    """Return why layouts needed captures with all their replicas: a note for each reason."""
    by_reason: dict[str, list[Layout]] = {}
    for each in underived:
        by_reason.setdefault(each.reason, []).append(each.layout)
    return tuple(
        Note(
            f"layouts captured again with all replicas: {len(layouts)}, such as {layouts[0]}: "
            f"{reason}",
            code="plan-captured-again",
        )
        for reason, layouts in by_reason.items()
    )


def memory_rounds(layouts: Sequence[Layout]) -> list[list[Layout]]:
    """Return the layouts of each round; misfits of a round rule out layouts of later rounds.

    The first round has the smallest micro-batch, with recomputation if that varies.
    """
    sizes = sorted({layout.micro_batch for layout in layouts})
    recomputes = any(layout.recompute != "none" for layout in layouts)
    rounds: dict[int, list[Layout]] = {}
    for layout in layouts:
        number = sizes.index(layout.micro_batch) + (recomputes and layout.recompute == "none")
        rounds.setdefault(number, []).append(layout)
    return [rounds[number] for number in sorted(rounds)]


def without_too_large(
    layouts: Sequence[Layout], outcomes: Sequence[Outcome]
) -> tuple[list[Layout], list[Dropped]]:
    """Return the layouts that may fit into memory, and those that earlier misfits rule out.

    A layout that is ruled out is not captured. Two rules decide it:

    - A larger micro-batch needs at least the memory of a smaller one, because it has at least as
      many sequences in flight. tests/plan/test_rounds.py checks this for each schedule.
    - Without recomputation a layout needs at least the memory that it needs with it. This is
      assumed, and no test checks it.
    """
    too_large: dict[Layout, list[Outcome]] = {}
    for outcome in outcomes:
        # Even the low end of its interval does not fit.
        if outcome.over_bytes > outcome.peak_bytes.value - outcome.peak_bytes.low:
            too_large.setdefault(_without_batch(outcome.layout), []).append(outcome)
    kept: list[Layout] = []
    dropped: list[Dropped] = []
    for layout in layouts:
        smaller = [
            outcome
            for outcome in too_large.get(_without_batch(layout), ())
            if outcome.layout.micro_batch <= layout.micro_batch
            and layout.recompute in (outcome.layout.recompute, "none")
            # A single micro-batch accumulates no gradient, so it may need less than two smaller
            # ones.
            and (outcome.layout.micro_batches > 1) == (layout.micro_batches > 1)
        ]
        if not smaller:
            kept.append(layout)
            continue
        most = max(smaller, key=lambda outcome: outcome.peak_bytes.value)
        reason = (
            f"needs at least as much memory as {most.layout}: {size(most.peak_bytes.value)}, "
            f"{size(most.over_bytes)} more than a GPU has"
        )
        dropped.append(Dropped(str(layout), TOO_LARGE, reason))
    return kept, dropped


def _without_batch(layout: Layout) -> Layout:
    """Return a layout that is equal for all micro-batches and recomputations."""
    return replace(layout, micro_batch=0, micro_batches=0, recompute="")


def sorted_plan(
    config: PlanConfig,
    layers: int | None,
    outcomes: Sequence[Outcome],
    dropped: Sequence[Dropped],
) -> Plan:
    """Return the plan with these outcomes; ties keep their order, so that all runs agree."""
    named = [_with_config(outcome, config) for outcome in outcomes]
    return Plan(
        config,
        layers,
        fitting=tuple(sorted((o for o in named if o.fits), key=lambda o: o.step_ns.value)),
        misfits=tuple(sorted((o for o in named if not o.fits), key=lambda o: o.over_bytes)),
        dropped=tuple(dropped),
    )


def _with_config(outcome: Outcome, config: PlanConfig) -> Outcome:
    """Return an outcome whose commands name the configuration's file."""
    name = quote(config.path.name)
    # Stored outcomes have a placeholder: a configuration with another file name may share them.
    commands = tuple(command.replace(" CONFIG ", f" {name} ") for command in outcome.commands)
    return replace(outcome, commands=commands)


def check_fits(plan: Plan) -> None:
    """Check that there is something to choose from.

    Raises:
        PlanError: the model allows no layout, or none fits into memory.
    """
    if not plan.outcomes:
        first = plan.dropped[0]
        raise PlanError(f"no layout is possible; {first.choice}: {first.reason}", code=first.code)
    if not plan.fitting:
        nearest = plan.misfits[0]
        layouts = len(plan.misfits) + sum(each.code == TOO_LARGE for each in plan.dropped)
        raise PlanError(
            f"none of {layouts} layouts fits; the nearest, {nearest.layout}, needs "
            f"{size(nearest.peak_bytes.value)}, {size(nearest.over_bytes)} more than a GPU has\n"
            "  use more GPUs, or vary tp, pp, micro_batch, sharding or recompute further",
            code="plan-nothing-fits",
        )


def _part(name: str, tasks: list[Task], progress: Progress) -> Callable[[int], None]:
    whole = sum(task.amount for task in tasks)
    complete = 0

    def advance(amount: int) -> None:
        nonlocal complete
        complete += amount
        progress(name, complete, whole)

    return advance


def pareto_front(points: list[tuple[float, float]]) -> list[int]:
    """Return the indices of the points that no other beats in both coordinates, lower is better."""
    front: list[int] = []
    best = float("inf")
    # By the first coordinate, so that only earlier points can beat a later one.
    for index in sorted(range(len(points)), key=lambda index: points[index]):
        if points[index][1] < best:
            front.append(index)
            best = points[index][1]
    return front

"""A plan from its configuration: captures, then the evaluation of each layout."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from shlex import quote

from onerank.display import size
from onerank.plan.captures import layers_of, plan_captures, probe_task
from onerank.plan.config import PlanConfig
from onerank.plan.evaluate import outcomes_of, plan_evaluations, underived_of
from onerank.plan.layouts import Dropped, Outcome, PlanError, enumerate_layouts
from onerank.plan.tasks import Executor, Store, Task, run_tasks

PRELOAD = ("onerank.capture.capture_script", "onerank.plan.evaluate")
"""Modules that the workers of a plan import."""

Progress = Callable[[str, int, int], None]
"""Receives the name of a part of the work, how much of it is complete, and the whole."""


@dataclass(frozen=True)
class Plan:
    """Layouts of a job by predicted step time.

    Attributes:
        config: what was planned.
        layers: layers of the model.
        fitting: outcomes that fit into memory, the shortest step first.
        misfits: outcomes that do not, the nearest first.
        dropped: combinations of choices that are no layouts of this cluster or this model.
    """

    config: PlanConfig
    layers: int
    fitting: tuple[Outcome, ...]
    misfits: tuple[Outcome, ...]
    dropped: tuple[Dropped, ...]

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """All outcomes, those that fit first."""
        return self.fitting + self.misfits

    def record(self) -> "PlanRecord":
        """Return what `onerank plan --json` prints."""
        cluster = self.config.job.cluster
        return PlanRecord(
            cluster.gpu, cluster.gpus, self.layers, self.fitting, self.misfits, self.dropped
        )


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """The layouts of a job on a cluster.

    Attributes:
        gpu: the cluster's GPU.
        gpus: number of its GPUs.
        layers: layers of the model.
        fitting: outcomes that fit into memory, by step time.
        misfits: outcomes that do not, by the bytes that are missing.
        dropped: combinations that are no layout.
    """

    gpu: str
    gpus: int
    layers: int
    fitting: tuple[Outcome, ...]
    misfits: tuple[Outcome, ...]
    dropped: tuple[Dropped, ...]


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
    probe = probe_task(job, layouts[0])
    layers = layers_of(
        run_tasks([probe], store, executor, _part("model", [probe], progress))[probe.key]
    )
    outcomes: list[Outcome] = []
    # Layouts whose shards cannot be derived are captured with their own number of replicas.
    for exact in (False, True):
        captures = plan_captures(job, layouts, layers, exact=exact)
        run_tasks(captures, store, executor, _part("captures", captures, progress))
        evaluations = plan_evaluations(job, layouts, layers, exact=exact)
        results = run_tasks(evaluations, store, executor, _part("layouts", evaluations, progress))
        layouts = [*chain.from_iterable(map(underived_of, results.values()))]
        for result in results.values():
            evaluated, refused = outcomes_of(result)
            outcomes += evaluated
            dropped += refused
        if not layouts:
            break
    # A capture with a layout's own number of replicas needs no derivation.
    assert not layouts, layouts
    plan = sorted_plan(config, layers, outcomes, dropped)
    check_fits(plan)
    return plan


def sorted_plan(
    config: PlanConfig, layers: int, outcomes: Sequence[Outcome], dropped: Sequence[Dropped]
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
        raise PlanError(
            f"none of {len(plan.misfits)} layouts fits; the nearest, {nearest.layout}, needs "
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

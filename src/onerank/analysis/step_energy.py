"""Energy and cost of a step: the GPU it runs on, and how long the GPU is busy."""

from collections.abc import Mapping
from pathlib import Path

from onerank.analysis.step_time import replay
from onerank.annotate import Gpu, find_gpu, load_gpu, recost, with_figures
from onerank.annotate.cost import CostReport, PricedJob, load_prices, report_cost
from onerank.annotate.energy import EnergyReport, StepDurations, report_energy
from onerank.annotate.token_count import tokens_of
from onerank.ir import Graph
from onerank.ir.errors import TargetError

# Prefixes of GPU figures that do not change a duration.
_POWER = ("tdp_w", "idle_w", "power_")


def step_energy(graph: Graph, target: str | None, figures: Mapping[str, float]) -> EnergyReport:
    """Return the energy of a step.

    Args:
        graph: a captured or re-costed graph.
        target: GPU to re-cost for first; None: the GPU that the durations hold for.
        figures: figures of the GPU's description to replace.

    Raises:
        TargetError: the GPU has no description, or a figure is unknown.
        AnnotateError: the graph cannot be re-costed.
    """
    return report_energy(*_on_gpu(graph, target, figures))


def step_cost(
    graph: Graph,
    prices: Path,
    target: str | None,
    figures: Mapping[str, float],
    *,
    gpus: int | None = None,
    tokens: int | None = None,
) -> CostReport:
    """Return what a step and a million trained tokens cost.

    Args:
        graph: a captured or re-costed graph.
        prices: price list, a TOML file.
        target: as for `step_energy`.
        figures: as for `step_energy`.
        gpus: GPUs to pay for; None: the ranks of the graph's world.
        tokens: tokens that a step trains; None: as many as the embedding looks up.

    Raises:
        OneRankError: as for `step_energy`, or the price list is malformed or lacks the GPU.
    """
    price_list = load_prices(prices)
    graph, gpu, power_timeline = _on_gpu(graph, target, figures)
    counted, source = tokens_of(graph) if tokens is None else (tokens, "given")
    paid = gpus or max(graph.job.world.size, 1)
    job = PricedJob(paid, power_timeline.step_ns, power_timeline.source, counted, source)
    # Energy is a function, because a price list may not need it: a GPU without power figures can be
    # rented.
    return report_cost(
        gpu, job, price_list, prices, lambda: report_energy(graph, gpu, power_timeline)
    )


def _on_gpu(
    graph: Graph, target: str | None, figures: Mapping[str, float]
) -> tuple[Graph, Gpu, StepDurations]:
    """Return the graph, re-costed if a target is given, its GPU, and the timeline of its step."""
    if target is not None:
        described = load_gpu(target)
        # Overridden power figures would make the target another GPU for the durations, too.
        timed = {name: value for name, value in figures.items() if not name.startswith(_POWER)}
        graph = recost(graph, with_figures(described, timed))
        return graph, with_figures(described, figures), step_durations_of(graph)
    annotations = graph.job.annotations
    device = annotations[-1].target if annotations else graph.job.device.name
    gpu = find_gpu(device)
    if gpu is None:
        raise TargetError(
            f'the durations of the trace hold for "{device}", which has no description; give '
            "`--target` (a name, or the path of a description)",
            code="device-no-description",
        )
    return graph, with_figures(gpu, figures), step_durations_of(graph)


def step_durations_of(graph: Graph) -> StepDurations:
    """Return how long the step takes: as measured without a profiler, else by replay."""
    replayed = replay(graph)
    busy = replayed.compute_ns + replayed.exposed_communication_ns
    step = graph.job.measurement.median_step_ns
    if step is not None:
        # Times of a capture vary: the busy time of the profiled step can exceed the median step.
        return StepDurations(max(step, busy), busy, "median step without a profiler")
    if replayed.steady_state is not None:
        source = "steady-state replay, host overhead as without a profiler"
        return StepDurations(max(replayed.steady_state.step_ns, busy), busy, source)
    source = "replay of the graph, host and gaps as in its edges"
    return StepDurations(replayed.step_time_ns, busy, source)

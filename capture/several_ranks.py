"""Capture several ranks of a job in turn on one device, each in a separate process."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from onerank.capture.capture_depths import capture_at_depths
from onerank.capture.emulate_torchrun import decide_torchrun
from onerank.capture.isolation import ProcessRunner, named_errors, named_progress, run_isolated
from onerank.capture.one_rank import Capture, capture
from onerank.capture.options import Options
from onerank.capture.parallelize.rank_classes import classes_along
from onerank.capture.profiling.raw_traces import keep
from onerank.capture.profiling.window_plan import Progress
from onerank.capture.validate import check_ranks, uses_torch_distributed, validate_early
from onerank.ir import RankClass, World
from onerank.ir.errors import CaptureError
from onerank.ir.scratch import scratch_directory


@dataclass(frozen=True)
class CapturedRanks:
    """Captured ranks of one job.

    Attributes:
        captures: by rank, ascending.
        represents: captured rank -> the equivalent ranks, including itself.
        missing: ranks that no captured rank represents.
    """

    captures: dict[int, Capture]
    represents: dict[int, tuple[int, ...]]
    missing: tuple[int, ...]


def capture_ranks(
    script: Path,
    args: Sequence[str],
    options: Options,
    ranks: Sequence[int] | None,
    *,
    layers: Sequence[int] | None = None,
    progress: Progress = lambda _: None,
    run: ProcessRunner = run_isolated,
) -> CapturedRanks:
    """Capture `script` as several ranks of one job, or as one of each class of equivalent ranks.

    Args:
        script: a training script that steps an optimizer.
        args: arguments of the script.
        options: what to capture; the rank is ignored. Raw traces are kept in a directory per rank.
        ranks: the ranks to capture; None captures one of each class. If the script distributes its
            model itself, a captured rank represents the ranks that have its coordinates on the axes
            along which the captured ranks differ.
        layers: depths to capture each rank at, as for `capture_at_depths`; None for all layers.
        progress: receives a short description of each phase.
        run: runs each capture in a separate process.

    Raises:
        CaptureError: a rank cannot be captured with these options, the classes of equivalent ranks
            are unknown, or captured ranks disagree on them.
        DepthError: as for `capture_at_depths`.
    """
    validate_early(script, options, ranks=ranks, layers=layers, several=True)
    options = decide_torchrun(script, args, options, progress)
    is_distributed = uses_torch_distributed(script, options)
    check_ranks(script, options, ranks, distributed=is_distributed)
    pending = [0] if ranks is None else sorted(ranks)
    captures: dict[int, Capture] = {}
    with scratch_directory() as directory:
        raw = directory / "raw"
        if options.raw_dir is not None:
            raw.mkdir()
        # The loop extends its list: only the capture of rank 0 reports the classes.
        for rank in pending:
            raw_dir = options.raw_dir and raw / f"rank-{rank}"
            rank_options = replace(options, rank=rank, raw_dir=raw_dir)
            rank_progress = named_progress(f"rank {rank}", progress)
            with named_errors(f"rank {rank}"):
                captures[rank] = (
                    capture_at_depths(
                        script, args, rank_options, layers, progress=rank_progress, run=run
                    )
                    if layers is not None
                    else run(capture, script, list(args), rank_options, progress=rank_progress)
                )
            classes = captures[rank].graph.job.classes
            if ranks is None and rank == 0:
                pending += [
                    rank_class.representative for rank_class in classes if rank_class.representative
                ]
                representatives = ", ".join(map(str, pending))
                progress(f"one rank of each class of equivalent ranks: {representatives}")
            _check_classes(rank, classes, pending[0], captures[pending[0]].graph.job.classes)
        if options.raw_dir is not None:
            keep(raw, options.raw_dir)
    if is_distributed:
        # Such a script shards its model itself, so a capture reports no classes.
        captures = _with_classes(captures, classes_along(options.world, pending))
    return _with_represented(captures, options.world)


def _check_classes(
    rank: int, classes: Sequence[RankClass], first: int, expected: Sequence[RankClass]
) -> None:
    if classes != expected:
        raise CaptureError(
            f"rank {rank} has other classes of equivalent ranks ({_coordinates(classes)}) than "
            f"rank {first} ({_coordinates(expected)})\n  build the same model on every rank",
            code="ranks-classes-differ",
        )


def _coordinates(classes: Sequence[RankClass]) -> str:
    """Return the coordinates of each class as text."""
    return "; ".join(
        " ".join(f"{axis} {','.join(map(str, at))}" for axis, at in rank_class.where.items())
        or "all"
        for rank_class in classes
    )


def _with_classes(
    captures: dict[int, Capture], classes: tuple[RankClass, ...]
) -> dict[int, Capture]:
    """Return the captures with these classes in their jobs."""
    updated: dict[int, Capture] = {}
    for rank, captured in captures.items():
        job = msgspec.structs.replace(captured.graph.job, classes=classes)
        updated[rank] = replace(captured, graph=replace(captured.graph, job=job))
    return updated


def _with_represented(captures: dict[int, Capture], world: World) -> CapturedRanks:
    """Return the captures with the ranks that each represents."""
    represents: dict[int, tuple[int, ...]] = {}
    for rank, captured in captures.items():
        rank_class = captured.graph.job.rank_class
        represents[rank] = rank_class.members(world) if rank_class else (rank,)
    represented = {member for members in represents.values() for member in members}
    missing = tuple(rank for rank in range(world.size) if rank not in represented)
    return CapturedRanks(dict(sorted(captures.items())), represents, missing)

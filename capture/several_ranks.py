"""Capture several ranks of a job in turn on one device, each in its own process."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from onerank.capture.capture_depths import capture_at_depths
from onerank.capture.emulate_torchrun import decide_torchrun
from onerank.capture.isolation import ProcessRunner, named_errors, named_progress, run_isolated
from onerank.capture.options import Options
from onerank.capture.parallelize.rank_classes import classes_along
from onerank.capture.profiling.raw_traces import keep
from onerank.capture.profiling.window_plan import Progress
from onerank.capture.run import Capture, capture
from onerank.capture.validate import check_ranks, uses_torch_distributed, validate_early
from onerank.ir import RankClass, World
from onerank.ir.errors import CaptureError
from onerank.ir.scratch import scratch_directory


@dataclass(frozen=True)
class CapturedRanks:
    """Captured ranks of one job.

    Attributes:
        captures: by rank, ascending.
        represents: rank -> the ranks that do the same work, including itself.
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
    """Capture `script` as several ranks of one job, or as one of each class of equal ranks.

    Args:
        script: a training script that steps an optimizer.
        args: the script's own arguments.
        options: what to capture, but for the rank; raw traces are kept in a directory per rank.
        ranks: the ranks; None captures one of each class. Of a script that distributes itself
            each stands for the ranks that agree with it along the axes in which these differ.
        layers: depths to capture each at and to extrapolate from, as for `capture_at_depths`.
        progress: told in a few words what goes on.
        run: runs each in a process of its own.

    Raises:
        CaptureError: a rank cannot be captured as asked, or which ranks are alike is not known.
    """
    validate_early(script, options, ranks=ranks, layers=layers, several=True)
    options = decide_torchrun(script, args, options, progress)
    itself = uses_torch_distributed(script, options)
    check_ranks(script, options, ranks, distributed=itself)
    pending = [0] if ranks is None else sorted(ranks)
    captures: dict[int, Capture] = {}
    with scratch_directory() as directory:
        raw = directory / "raw"
        if options.raw_dir is not None:
            raw.mkdir()
        for rank in pending:  # grows: rank 0 tells the classes
            asked = replace(options, rank=rank, raw_dir=options.raw_dir and raw / f"rank-{rank}")
            tell = named_progress(f"rank {rank}", progress)
            with named_errors(f"rank {rank}"):
                captures[rank] = (
                    capture_at_depths(script, args, asked, layers, progress=tell, run=run)
                    if layers is not None
                    else run(capture, script, list(args), asked, progress=tell)
                )
            classes = captures[rank].graph.job.classes
            if ranks is None and rank == 0:
                pending += [one.representative for one in classes if one.representative]
                told = ", ".join(map(str, pending))
                progress(f"one rank of each class of equal ones: {told}")
            _check_told(rank, classes, pending[0], captures[pending[0]].graph.job.classes)
        if options.raw_dir is not None:
            keep(raw, options.raw_dir)
    if itself:
        captures = _with_classes(captures, classes_along(options.world, pending))
    return _stand(captures, options.world)


def _check_told(
    rank: int, classes: Sequence[RankClass], first: int, expected: Sequence[RankClass]
) -> None:
    if classes != expected:
        raise CaptureError(
            f"rank {rank} tells other classes of equal ranks than rank {first} ({_places(classes)} "
            f"against {_places(expected)}): let the script build the same model on every rank",
            code="ranks-classes-differ",
        )


def _places(classes: Sequence[RankClass]) -> str:
    return "; ".join(
        " ".join(f"{axis} {','.join(map(str, at))}" for axis, at in one.where.items()) or "all"
        for one in classes
    )


def _with_classes(
    captures: dict[int, Capture], classes: tuple[RankClass, ...]
) -> dict[int, Capture]:
    found: dict[int, Capture] = {}
    for rank, one in captures.items():
        job = msgspec.structs.replace(one.graph.job, classes=classes)
        found[rank] = replace(one, graph=replace(one.graph, job=job))
    return found


def _stand(captures: dict[int, Capture], world: World) -> CapturedRanks:
    represents: dict[int, tuple[int, ...]] = {}
    for rank, one in captures.items():
        own = one.graph.job.rank_class
        represents[rank] = own.members(world) if own else (rank,)
    held = {member for members in represents.values() for member in members}
    missing = tuple(rank for rank in range(world.size) if rank not in held)
    return CapturedRanks(dict(sorted(captures.items())), represents, missing)

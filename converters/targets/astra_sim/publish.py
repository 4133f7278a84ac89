"""Publish an export: its directory appears complete and checked, or not at all."""

import os
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from onerank.converters.targets.astra_sim.check import Finding, check_workload
from onerank.ir.atomic_write import replace_file
from onerank.ir.errors import ExportError

_MOST_FINDINGS = 20


MANIFEST = "export.json"
"""Names the files that an export wrote: the only ones that a later export may remove."""


class _Manifest(msgspec.Struct, forbid_unknown_fields=True):
    files: list[str]


def check_target(directory: Path, *, overwrite: bool = False) -> None:
    """Refuse a directory that holds files which no export wrote.

    Args:
        directory: where the export goes.
        overwrite: leave such files where they are; replace those of the export's own names.

    Raises:
        ExportError: a file is there, or a directory with other content.
    """
    if not directory.exists():
        return
    if not directory.is_dir():
        raise ExportError(
            f"{directory} is a file; name a directory to export to", code="export-output-is-file"
        )
    others = sorted({path.name for path in directory.iterdir()} - _written(directory))
    if others and not overwrite:
        more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        raise ExportError(
            f"{directory} holds what no export wrote: {', '.join(others[:_NAMED])}{more}; name "
            "another directory, or give --overwrite to keep these files and write beside them",
            code="export-output-not-ours",
        )


_NAMED = 5


def _written(directory: Path) -> set[str]:
    """Return the names of an earlier export's files that are there, the manifest's included.

    Raises:
        ExportError: the manifest is not one that an export wrote.
    """
    path = directory / MANIFEST
    try:
        names = msgspec.json.decode(path.read_bytes(), type=_Manifest).files
    except FileNotFoundError:
        return set()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ExportError(
            f"{path}: is no list of an export's files ({error}); name another directory",
            code="export-manifest-malformed",
        ) from None
    # A name with a separator would reach outside the directory.
    own = {name for name in names if Path(name).name == name and "\0" not in name}
    return {name for name in (*own, MANIFEST) if (directory / name).is_file()}


@contextmanager
def published(
    directory: Path,
    check: Callable[[Path], list[Finding]] = check_workload,
) -> Generator[Path]:
    """Yield a directory to fill; check it, then move its files to their place.

    `check_target` has allowed the place.

    An existing directory stays, and in it every file that no export wrote. The files of an earlier
    export leave it.

    Raises:
        ExportError: the check has findings; they are listed and nothing is left.
        OSError: nothing can be written there; the error names the directory.
    """
    target = directory.resolve()
    try:
        with _scratch(target) as scratch:
            made = Path(scratch, "made")
            made.mkdir()
            yield made
            names = sorted(path.name for path in made.iterdir())
            manifest = msgspec.json.encode(_Manifest([*names, MANIFEST]))
            replace_file(made / MANIFEST, msgspec.json.format(manifest) + b"\n")
            _require_no_findings(check(made))
            if target.exists():
                _swap(made, target, Path(scratch, "replaced"))
            else:
                os.replace(made, target)
    except OSError as error:
        error.filename, error.filename2 = str(directory), None
        raise


def _scratch(target: Path) -> tempfile.TemporaryDirectory[str]:
    """Return a scratch directory on the target's file system.

    It is beside a target that is yet to be made, and in one that is there: the parent of the latter
    may belong to someone else or to another file system.
    """
    if target.exists():
        return tempfile.TemporaryDirectory(prefix=SCRATCH, dir=target)
    target.parent.mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(prefix=SCRATCH, dir=target.parent)


SCRATCH = ".onerank-export-"


def _swap(made: Path, target: Path, replaced: Path) -> None:
    """Move the files of `made` to `target`, and what they replace to `replaced`.

    Undoes all moves if one fails.

    Raises:
        ExportError: a directory has the name of one of the files.
    """
    replaced.mkdir()
    new = [path.name for path in made.iterdir()]
    if taken := [name for name in sorted(new) if (target / name).is_dir()]:
        raise ExportError(
            f"{target / taken[0]} is a directory, where the export writes a file; move it, or name "
            "another directory",
            code="export-output-not-ours",
        )
    old = _written(target) | {name for name in new if (target / name).exists()}
    moves = [(target / name, replaced / name) for name in sorted(old)]
    moves += [(made / name, target / name) for name in new]
    done: list[tuple[Path, Path]] = []
    try:
        for source, destination in moves:
            os.replace(source, destination)
            done.append((source, destination))
    except OSError:
        for source, destination in reversed(done):
            os.replace(destination, source)
        raise


def _require_no_findings(findings: list[Finding]) -> None:
    if not findings:
        return
    lines = [
        f"  {finding.file}{'' if finding.node is None else f', node {finding.node}'}: "
        f"{finding.message} [{finding.rule}]"
        for finding in findings[:_MOST_FINDINGS]
    ]
    if len(findings) > _MOST_FINDINGS:
        lines.append(f"  and {len(findings) - _MOST_FINDINGS} more")
    raise ExportError(
        "\n".join([f"ASTRA-sim could not run this workload ({len(findings)} findings):", *lines]),
        code="export-check-failed",
    )

"""Publish an export: its directory appears complete and checked, or not at all."""

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from onerank.converters.targets.astra_sim.check import Finding, check_workload
from onerank.ir.errors import ExportError
from onerank.ir.output_files import created, remove_abandoned, scratch_directory

MANIFEST = "export.json"
"""Lists the files that an export wrote. A later export removes no others."""

_MOST_LISTED = 5
_MOST_FINDINGS = 20


class _Manifest(msgspec.Struct, forbid_unknown_fields=True):
    files: list[str]


def check_target(directory: Path, *, overwrite: bool = False) -> None:
    """Check that a directory has no files other than those of an earlier export.

    Args:
        directory: output directory.
        overwrite: allow other files. They stay, unless the export writes a file of their name.

    Raises:
        ExportError: the path is a file, or a directory with other content.
    """
    if not directory.exists():
        return
    if not directory.is_dir():
        raise ExportError(
            f"{directory} is a file\n  name a directory to export to", code="export-output-is-file"
        )
    remove_abandoned(directory)  # a killed export's files are not the user's
    others = sorted({path.name for path in directory.iterdir()} - _written(directory))
    if others and not overwrite:
        more = f" and {len(others) - _MOST_LISTED} more" if len(others) > _MOST_LISTED else ""
        raise ExportError(
            f"{directory} has files that no export wrote: "
            f"{', '.join(others[:_MOST_LISTED])}{more}\n"
            "  name another directory, or give --overwrite to keep these files and add the export",
            code="export-output-not-ours",
        )


def _written(directory: Path) -> set[str]:
    """Return the names of an earlier export's files in a directory, including the manifest.

    Raises:
        ExportError: the manifest is malformed.
    """
    path = directory / MANIFEST
    try:
        names = msgspec.json.decode(path.read_bytes(), type=_Manifest).files
    except FileNotFoundError:
        return set()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ExportError(
            f"{path} is not the list of an export's files ({error})\n  name another directory",
            code="export-manifest-malformed",
        ) from None
    # A name with a separator would reach outside the directory.
    local = {name for name in names if Path(name).name == name and "\0" not in name}
    return {name for name in (*local, MANIFEST) if (directory / name).is_file()}


@contextmanager
def published(
    directory: Path,
    check: Callable[[Path], list[Finding]] = check_workload,
) -> Generator[Path]:
    """Yield a directory to fill; check it, then move its files to the output directory.

    An existing output directory keeps the files that no export wrote. Those of an earlier export
    are removed.

    Args:
        directory: output directory that passes `check_target`.
        check: returns the findings on the filled directory.

    Raises:
        ExportError: the check has findings. The message lists them, and no file remains.
        OSError: the directory cannot be written; the error names it.
    """
    target = directory.resolve()
    # An existing target contains the scratch directory, since the target's parent may be another
    # file system or not writable. os.replace cannot move files between file systems.
    above = target if target.exists() else target.parent
    try:
        with created(above), scratch_directory(above) as scratch:
            filled = scratch / "filled"
            filled.mkdir()
            yield filled
            names = sorted(path.name for path in filled.iterdir())
            manifest = msgspec.json.encode(_Manifest([*names, MANIFEST]))
            (filled / MANIFEST).write_bytes(msgspec.json.format(manifest) + b"\n")
            _require_no_findings(check(filled))
            if target.exists():
                _swap(filled, target, scratch / "replaced")
            else:
                os.replace(filled, target)
    except OSError as error:
        # The failed path lies in the scratch directory, which the user has never seen.
        error.filename, error.filename2 = str(directory), None
        raise


def _swap(filled: Path, target: Path, replaced: Path) -> None:
    """Move the files of `filled` to `target`, and the files that they replace to `replaced`.

    Undoes all moves if one fails.

    Raises:
        ExportError: a directory has the name of one of the files.
        OSError: a file cannot be moved.
    """
    replaced.mkdir()
    new = [path.name for path in filled.iterdir()]
    if taken := [name for name in sorted(new) if (target / name).is_dir()]:
        raise ExportError(
            f"{target / taken[0]} is a directory, and the export writes a file of this name\n"
            "  move it, or name another directory",
            code="export-output-not-ours",
        )
    old = _written(target) | {name for name in new if (target / name).exists()}
    moves = [(target / name, replaced / name) for name in sorted(old)]
    moves += [(filled / name, target / name) for name in new]
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
    findings = [finding for finding in findings if not finding.is_note]
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

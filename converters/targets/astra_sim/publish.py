"""Publish an export: its directory appears complete and checked, or not at all."""

import os
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from onerank.converters.targets.astra_sim.check import Finding, check_workload
from onerank.converters.targets.astra_sim.config_files import GROUPS, SCRIPT
from onerank.ir.errors import ExportError

_MOST_FINDINGS = 20


def check_target(directory: Path) -> None:
    """Check that a directory is absent, empty or an earlier export.

    Raises:
        ExportError: the path is a file, or a directory with other content.
    """
    if not directory.exists():
        return
    if not directory.is_dir():
        raise ExportError(
            f"{directory} is a file\n  name a directory to export to", code="export-output-is-file"
        )
    is_export = (directory / GROUPS).is_file() and (directory / SCRIPT).is_file()
    if not is_export and any(directory.iterdir()):
        raise ExportError(
            f"{directory} is neither empty nor an earlier export (with {GROUPS} and {SCRIPT}), so "
            "it is not replaced\n  name another directory",
            code="export-output-not-ours",
        )


@contextmanager
def published(
    directory: Path, check: Callable[[Path], list[Finding]] = check_workload
) -> Generator[Path]:
    """Yield a directory to fill; check it, then move it to its final name.

    Args:
        directory: the final name; an earlier export there is replaced.
        check: returns the findings on the filled directory.

    Raises:
        ExportError: the check has findings. The message lists them, and no file remains.
        OSError: the directory cannot be written.
    """
    target = directory.resolve()
    with _scratch_directory(target) as scratch:
        written = Path(scratch, "written")
        written.mkdir()
        yield written
        _require_no_findings(check(written))
        # A rename replaces no directory that has files, so the earlier export moves away first.
        replaced = Path(scratch, "replaced")
        if target.exists():
            os.replace(target, replaced)
        try:
            os.replace(written, target)
        except OSError:
            if replaced.exists():
                os.replace(replaced, target)
            raise


def _scratch_directory(target: Path) -> tempfile.TemporaryDirectory[str]:
    """Return a scratch directory next to the target; an error names the target."""
    # The scratch directory must be on the target's file system: os.replace cannot move a directory
    # to another one.
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        error.filename, error.filename2 = str(target), None
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

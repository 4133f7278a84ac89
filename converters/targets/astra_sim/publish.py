"""Publish an export: check the workload, then make its directory appear complete or not at all."""

import os
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from onerank.converters.targets.astra_sim.check import Finding, check_workload
from onerank.converters.targets.astra_sim.config_files import GROUPS, SCRIPT
from onerank.ir.errors import ExportError

_SHOWN = 20


def check_target(directory: Path) -> None:
    """Refuse a place that holds something other than an earlier export.

    Raises:
        ExportError: a file is there, or a directory with other content.
    """
    if not directory.exists():
        return
    if not directory.is_dir():
        raise ExportError(
            f"{directory} is a file; name a directory to export to", code="export-output-is-file"
        )
    is_export = (directory / GROUPS).is_file() and (directory / SCRIPT).is_file()
    if not is_export and any(directory.iterdir()):
        raise ExportError(
            f"{directory} is neither empty nor an earlier export (with {GROUPS} and {SCRIPT}), so "
            "it is not replaced; name another directory",
            code="export-output-not-ours",
        )


@contextmanager
def published(
    directory: Path, check: Callable[[Path], list[Finding]] = check_workload
) -> Generator[Path]:
    """Yield a directory to fill; check it, then move it to its final name.

    Raises:
        ExportError: the check has findings; they are listed and nothing is left.
        OSError: nothing can be written there.
    """
    target = directory.resolve()
    with _beside(target) as scratch:
        made = Path(scratch, "made")
        made.mkdir()
        yield made
        _refuse(check(made))
        replaced = Path(scratch, "replaced")
        if target.exists():
            os.replace(target, replaced)
        try:
            os.replace(made, target)
        except OSError:
            if replaced.exists():
                os.replace(replaced, target)
            raise


def _beside(target: Path) -> tempfile.TemporaryDirectory[str]:
    """Return a scratch directory on the target's file system; an error names the target."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        error.filename, error.filename2 = str(target), None
        raise


def _refuse(findings: list[Finding]) -> None:
    if not findings:
        return
    lines = [
        f"  {finding.file}{'' if finding.node is None else f', node {finding.node}'}: "
        f"{finding.message} [{finding.rule}]"
        for finding in findings[:_SHOWN]
    ]
    if len(findings) > _SHOWN:
        lines.append(f"  and {len(findings) - _SHOWN} more")
    raise ExportError(
        "\n".join([f"ASTRA-sim could not run this workload ({len(findings)} findings):", *lines]),
        code="export-check-failed",
    )

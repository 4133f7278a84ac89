"""`onerank check`: the faults of an ASTRA-sim workload, or of one `.et` file."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from onerank.cli.common import INPUT_OR_DIRECTORY, as_json, reports_errors
from onerank.cli.terminal import counted, counting_files, lines, print_json, table

if TYPE_CHECKING:
    from onerank.converters.targets.astra_sim.check import Finding


@click.command()
@click.argument("path", type=INPUT_OR_DIRECTORY)
@as_json
@reports_errors
def check(path: Path, as_json: bool) -> None:
    """Check a directory as an ASTRA-sim workload, or the structure of one `.et` file.

    Exit code 1: there are findings. Notes on what ASTRA-sim ignores or converts do not count.
    """
    from onerank.converters.targets.astra_sim.check import check as check_path

    with counting_files() as progress:
        findings = check_path(path, progress=progress)
    if as_json:
        print_json(findings)
    else:
        render_findings(findings, str(path), is_file=not path.is_dir())
    sys.exit(1 if any(not finding.is_note for finding in findings) else 0)


def render_findings(findings: "Sequence[Finding]", path: str, *, is_file: bool) -> None:
    """Print the findings of a check.

    Args:
        findings: the findings.
        path: file or directory that was checked.
        is_file: whether it is a single file, of which only the structure is checked.
    """
    if not findings:
        scope = " in its structure; give the directory to check a workload" if is_file else ""
        lines([("checked", f"no findings{scope}")], path)
        return
    rows = [
        (
            f"{finding.rule} (note)" if finding.is_note else finding.rule,
            finding.file,
            "" if finding.node is None else finding.node,
            finding.message,
        )
        for finding in findings
    ]
    notes = sum(finding.is_note for finding in findings)
    counts = [counted(len(findings) - notes, "finding")]
    if notes:
        counts.append(counted(notes, "note"))
    columns = ("rule", "file", "node", "message")
    table(f"{path}: {', '.join(counts)}", columns, rows, texts=(0, 1, 3))

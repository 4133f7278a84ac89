"""Tables of an export and of a check."""

from collections.abc import Sequence

from onerank.cli.terminal import counted, lines, rank_list, table
from onerank.converters.targets.astra_sim import AstraSimExport
from onerank.converters.targets.astra_sim.check import Finding
from onerank.converters.targets.goal import GoalExport
from onerank.converters.targets.simai import SimaiExport
from onerank.display import size, time

_GROUPS = 16


def render_export(done: AstraSimExport) -> None:
    """Print what an export wrote."""
    group_texts = [f"{number}: {rank_list(ranks)}" for number, ranks in done.groups.items()]
    more = [f"and {len(group_texts) - _GROUPS} more"] if len(group_texts) > _GROUPS else []
    groups = "; ".join([*group_texts[:_GROUPS], *more])
    pairs = [
        ("ranks", str(done.ranks)),
        ("nodes per rank", str(done.nodes)),
        ("GPU time per rank", time(done.gpu_time_ns)),
        ("groups", groups),
    ]
    pairs += [
        (f"stage {', '.join(map(str, stages))}", f"{size(peak)} of memory at the peak")
        for stages, peak in done.peak_memory_bytes
    ]
    pairs += [("dropped", f"{count}: {kind}") for kind, count in done.dropped.items()]
    pairs += [("note", note) for note in done.notes]
    pairs.append(("checked", "no findings"))
    pairs.append(
        (
            "run it",
            f"ASTRA_SIM_BIN=.../AstraSim_Analytical_Congestion_Unaware {done.directory}/run.sh",
        )
    )
    lines(pairs, f"{done.directory}: ASTRA-sim workload of {len(done.files)} files")


def render_simai(done: SimaiExport) -> None:
    """Print the contents of a SimAI workload, and what the format cannot express."""
    batches = f"{done.micro_batches} micro-batch{'' if done.micro_batches == 1 else 'es'}"
    pairs = [
        ("ranks", f"{done.all_gpus}; all replay the step of rank {done.rank}"),
        ("rows", f"{done.rows} for {batches}"),
        ("forward", time(done.forward_ns)),
        ("input grad.", time(done.input_gradient_ns)),
        ("weight grad.", time(done.weight_gradient_ns)),
        ("optimizer", time(done.optimizer_ns)),
    ]
    pairs += [("lost", loss) for loss in done.losses]
    pairs += [("note", note) for note in done.notes]
    lines(pairs, f"{done.path}: SimAI workload")


def render_goal(done: GoalExport) -> None:
    """Print the contents of a GOAL schedule."""
    name = done.path.stem
    pairs = [
        ("ranks", str(done.ranks)),
        ("operations", str(done.operations)),
        ("GPU time per rank", time(done.gpu_time_ns)),
        ("cpus", str(done.cpus)),
    ]
    pairs += [
        ("communication", f"{count}: {algorithm}") for algorithm, count in done.algorithms.items()
    ]
    pairs += [("dropped", f"{count}: {algorithm}") for algorithm, count in done.dropped.items()]
    pairs += [("note", note) for note in done.notes]
    pairs.append(("compile it", f"txt2bin -i {done.path} -o {name}.bin"))
    pairs.append(("run it", f"LogGOPSim -f {name}.bin -L 500 -o 0 -g 0 -G 0.0022 -S {2**31 - 1}"))
    lines(pairs, f"{done.path}: GOAL schedule")


def render_findings(findings: Sequence[Finding], path: str, *, is_file: bool) -> None:
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

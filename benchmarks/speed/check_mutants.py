"""Compare the verdicts of `onerank check` with ASTRA-sim's behaviour on mutants of exports.

    ASTRA_SIM_BIN=.../AstraSim_Analytical_Congestion_Unaware \
        python -m benchmarks.speed.check_mutants [--workload DIR] [--only TEXT] [--all] SCRATCH

Exports a step of four ranks (every collective, point to point, two axes), or takes the export of
four ranks in --workload. Each mutant (workload_mutants.py) changes one thing in a copy of that
workload. The program runs `onerank check` and, in both encodings, `run.sh` on the copy, and
compares the verdicts:

    missed       ASTRA-sim stalls, crashes, rejects the workload, or reports another time than the
                 workload means; the check has no finding
    false alarm  ASTRA-sim reports the times of the unchanged workload, or those of a sound change;
                 the check has findings
    intended     a finding on a mutant in INTENDED, which says why it is right all the same

The exit code is 1 if anything was missed or a false alarm. --only runs the mutants whose name
contains TEXT; --all prints every mutant.
"""

import argparse
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import print_conditions
from benchmarks.speed.mutant_edits import Mutant
from benchmarks.speed.workload_mutants import mutants
from onerank.converters.targets.astra_sim.check import check_workload
from onerank.converters.targets.astra_sim.exporter import export_astra_sim
from onerank.ir import Collective, Graph, GraphBuilder, Job, Kind, ProcessGroup, Reason, World
from onerank.ir.errors import OneRankError

LIMIT_S = 15
"""Seconds after which a run counts as hung; the unchanged workload takes under 1 s."""

_MEMORY_BYTES = 3 << 30
"""Address space of a run: some mutants make ASTRA-sim allocate without end."""

INTENDED: dict[str, str] = {
    r"system.json collective-optimization <removed>|memory.json memory-type <removed>"
    r"|memory.json text: bad: (list|number|null|no braces)": "ASTRA-sim reads uninitialised memory",
    r"network.yml text: duplicate (bandwidth behind|npus_count)": (
        "yaml-cpp takes the first of two values, most other programs the last"
    ),
    r"comm_groups.json same key, other ranks": "two groups have one number; ASTRA-sim takes one",
    r"comm_groups.json group 2 real": "ASTRA-sim truncates rank 0.5 to 0",
    r"\.et shorter by": "the last node is cut; ASTRA-sim runs it with bytes of the node before",
    r"rank 4 added": "ASTRA-sim runs 4 of 5 ranks",
    r"compute \d duration_ns|random (12|102|232),": (
        "duration_ns, which ASTRA-sim does not read, says another time than it simulates"
    ),
    r"collective 2 comm_size \w+ 1048576, rank 1": (
        "a rank names another size than its group; the chunks are equal after rounding down"
    ),
    r"collective 2 pg_name string_val (\"\"|\"0\"|<removed>), all ranks": (
        "a collective on the default group can stall once groups were used unequally"
    ),
    r"send repeated": "no rank receives the message",
    r"collective repeated, all ranks": "two collectives of a group have no order",
    r"file of rank 1: bad: (metadata|first node) twice": "two nodes have one id",
    r"random 38,": "ASTRA-sim keeps the low 32 bits of comm_type 2**62",
}
"""Pattern of mutants' names -> why findings are right although ASTRA-sim finishes as before."""


def four_ranks(layers: int = 6) -> Graph:
    """Return the step of rank 1 of tp 2 x dp 2."""
    builder = GraphBuilder()
    kinds = (
        Collective.ALL_REDUCE,
        Collective.ALL_GATHER,
        Collective.REDUCE_SCATTER,
        Collective.ALL_TO_ALL,
    )
    newest: int | None = None
    for layer in range(layers):
        ns = 12_345 + layer * 7
        gemm = builder.add(name="gemm", kind=Kind.KERNEL, stream=7, duration_ns=ns)
        if newest is not None:
            builder.edge(newest, gemm, Reason.STREAM_ORDER)
        collective = builder.add(
            name="nccl",
            kind=Kind.COLLECTIVE,
            collective=kinds[layer % 4],
            comm_bytes=(1 << 20) + layer,
            group=("tp", "dp", "all")[layer % 3],
            stream=20,
        )
        builder.edge(gemm, collective, Reason.SYNC)
        columns = {"comm_tag": layer, "comm_bytes": 4096}
        send = builder.add(name="send", kind=Kind.SEND, comm_dst=3, stream=21, **columns)
        builder.edge(gemm, send, Reason.SYNC)
        receive = builder.add(name="recv", kind=Kind.RECV, comm_src=3, stream=22, **columns)
        newest = builder.add(name="norm", kind=Kind.KERNEL, stream=7, duration_ns=1777)
        builder.edge(gemm, newest, Reason.STREAM_ORDER)
        builder.edge(collective, newest, Reason.SYNC)
        builder.edge(receive, newest, Reason.SYNC)
    groups = (
        ProcessGroup("tp", (0, 1), "tp"),
        ProcessGroup("dp", (1, 3), "dp"),
        ProcessGroup("all", (0, 1, 2, 3), "world"),
    )
    return builder.build(Job(world=World({"tp": 2, "dp": 2}), rank=1, groups=groups))


# Simulator ---------------------------------------------------------------------------------------

OUTCOMES = ("same", "other", "stall", "crash", "reject", "hang")
"""From best to worst: the times of the unchanged workload; other times; ranks that never finish,
with exit status 0; death by a signal; another exit status; no end within `LIMIT_S`."""

_LINES = re.compile(r"sys\[(\d+)\](?: finished, (\d+) cycles|, (?:Wall|GPU|Comm) time: (\d+))")


@dataclass(frozen=True, slots=True)
class Simulated:
    """What ASTRA-sim did with a workload.

    Attributes:
        outcome: one of `OUTCOMES`.
        cycles: the slowest rank's, by encoding; -1 if a rank did not finish.
    """

    outcome: str
    cycles: tuple[int, ...]


class Simulator:
    """ASTRA-sim, with the output of the unchanged workload.

    Args:
        binary: the congestion-unaware analytical binary.
        unchanged: a workload.
    """

    def __init__(self, binary: Path, unchanged: Path) -> None:
        self._binary = binary
        runs = [self._run(unchanged, encoding) for encoding in ("micros", "roofline")]
        if any(outcome != "same" for outcome, *_ in runs):
            sys.exit(f"ASTRA-sim does not finish the unchanged workload: {runs}")
        self._expected = [times for _, times, _ in runs]

    def run(self, workload: Path) -> Simulated:
        """Return the worse outcome of both encodings."""
        worst, cycles = "same", list[int]()
        for expected, encoding in zip(self._expected, ("micros", "roofline"), strict=True):
            outcome, times, slowest = self._run(workload, encoding)
            if outcome == "same" and times != expected:
                outcome = "other"
            worst = max(worst, outcome, key=OUTCOMES.index)
            cycles.append(slowest)
            if worst == "hang":
                break
        return Simulated(worst, tuple(cycles))

    def _run(self, workload: Path, encoding: str) -> tuple[str, list[tuple[str, ...]], int]:
        """Return the outcome of a run that is not compared, its times, and the slowest rank's."""
        environment = {**os.environ, "ASTRA_SIM_BIN": str(self._binary)}
        with subprocess.Popen(
            ["./run.sh", encoding],
            cwd=workload,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process:
            resource.prlimit(process.pid, resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
            try:
                output = process.communicate(timeout=LIMIT_S)[0].decode(errors="replace")
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                return "hang", [], -1
        lines = sorted(_LINES.findall(output))
        finished = [int(cycles) for _, cycles, _ in lines if cycles]
        if process.returncode == 0:
            return "same", lines, max(finished)
        status = re.search(r"ASTRA-sim exited with (\d+)", output)
        if status is None:
            return "stall", lines, -1
        return "crash" if int(status[1]) >= 128 else "reject", lines, -1


# Comparison --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """A mutant's verdicts.

    Attributes:
        mutant: the change.
        simulated: what ASTRA-sim did.
        rules: rules of the check's findings; "traceback" if it failed.
    """

    mutant: Mutant
    simulated: Simulated
    rules: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """`agree`, `missed`, `false alarm` or `intended`."""
        outcome, legitimate = self.simulated.outcome, self.mutant.legitimate
        if "traceback" in self.rules:
            return "missed"
        fails = outcome in OUTCOMES[2:] or (outcome == "other" and legitimate is False)
        if fails:
            return "agree" if self.rules else "missed"
        if not self.rules or (outcome == "other" and legitimate is None):
            return "agree"
        return "false alarm" if self.reason is None else "intended"

    @property
    def reason(self) -> str | None:
        """Why findings are intended though ASTRA-sim finishes, None if they are not."""
        reasons = (why for name, why in INTENDED.items() if re.search(name, self.mutant.name))
        return next(reasons, None)


def rules_of(workload: Path) -> tuple[str, ...]:
    """Return the rules of the check's findings, sorted; an error of ours counts as a finding."""
    try:
        findings = check_workload(workload)
    except OneRankError as error:
        return (f"error {error.code}",)
    except Exception:  # noqa: BLE001 - the program counts whatever escapes the check
        traceback.print_exc()
        return ("traceback",)
    return tuple(sorted({finding.rule for finding in findings if not finding.is_note}))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("scratch", type=Path, help="directory for the copies; emptied")
    parser.add_argument("--workload", type=Path, help="export of four ranks to change")
    parser.add_argument("--only", default="", help="run mutants whose name contains this")
    parser.add_argument("--all", action="store_true", help="print every mutant")
    arguments = parser.parse_args()
    binary = Path(os.environ.get("ASTRA_SIM_BIN", "")).resolve()
    if not binary.is_file():
        sys.exit("ASTRA_SIM_BIN is not set: name AstraSim_Analytical_Congestion_Unaware")
    unchanged, copy = arguments.scratch / "unchanged", arguments.scratch / "copy"
    shutil.rmtree(unchanged, ignore_errors=True)
    if arguments.workload is None:
        export_astra_sim(four_ranks(), unchanged)
    else:
        shutil.copytree(arguments.workload, unchanged)
    simulator = Simulator(binary, unchanged)
    began = time.perf_counter()
    rows: list[Row] = []
    for mutant in mutants():
        if arguments.only not in mutant.name:
            continue
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(unchanged, copy, ignore=shutil.ignore_patterns("micros", "roofline"))
        try:
            mutant.edit(copy)
        except (IndexError, KeyError):  # no such node or group in this workload
            continue
        row = Row(mutant, Simulated("", ()), rules_of(copy))
        row = Row(mutant, simulator.run(copy), row.rules)
        rows.append(row)
        if row.verdict in ("missed", "false alarm") or arguments.all:
            _print(row)
    _summarise(rows, time.perf_counter() - began)
    sys.exit(any(row.verdict in ("missed", "false alarm") for row in rows))


def _print(row: Row) -> None:
    rules = ", ".join(row.rules) or "-"
    sound = {True: "sound", False: "broken", None: "random"}[row.mutant.legitimate]
    print(
        f"{row.verdict:12} {row.simulated.outcome:7} {sound:7} {row.mutant.name}  [{rules}]  "
        f"{row.simulated.cycles}",
        flush=True,
    )


def _summarise(rows: list[Row], seconds: float) -> None:
    print()
    print_conditions()
    print(f"{len(rows)} mutants in {seconds:.0f} s")
    print(f"\n{'ASTRA-sim':10}{'finding':>9}{'none':>9}")
    for outcome in OUTCOMES:
        of_outcome = [row for row in rows if row.simulated.outcome == outcome]
        counts = Counter(bool(row.rules) for row in of_outcome)
        print(f"{outcome:10}{counts[True]:9}{counts[False]:9}")
    verdicts = Counter(row.verdict for row in rows)
    print(
        "\n"
        + ", ".join(f"{verdicts[v]} {v}" for v in ("agree", "intended", "missed", "false alarm"))
    )
    for row in rows:
        if row.verdict == "intended":
            print(f"intended: {row.mutant.name} [{', '.join(row.rules)}]: {row.reason}")


if __name__ == "__main__":
    main()

"""Findings of a check: the rules, their codes, and the report that collects them."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from itertools import islice

# ASTRA-sim's exit status cannot be trusted. `main` ends with 0 as soon as no event is left, even if
# ranks wait for each other. `Sys::call_events` swallows exceptions after tick 0: a mistake that
# aborts at tick 0 is a stall with exit status 0 later. So the files are checked before a run.
RULES: dict[str, str] = {
    # one file
    "unreadable-file": "A file that is not a Chakra trace aborts the simulator.",
    "truncated-file": "A cut-off last node runs with the bytes of the node before it.",
    "empty-file": "An empty file aborts the simulator.",
    "metadata-first": "The first message is always taken as metadata; without it a node vanishes.",
    "no-nodes": "A file without nodes aborts the simulator.",
    "unique-ids": "Of two nodes with one id the last wins; the other vanishes silently.",
    "dangling-edge": "A dependency on a node that is not there aborts the simulator.",
    "self-dependency": "A node that waits for itself is skipped silently, with all nodes after it.",
    "cycle": "Nodes on a cycle are skipped silently and the rank reports a shorter finish.",
    "control-edge": "Older feeders read only data_deps, so ctrl_deps are lost there (a note).",
    # nodes
    "node-type": "A METADATA node aborts, an INVALID node stalls the rank with exit status 0.",
    "host-node": "CPU operations and memory nodes lose the run's statistics.",
    "missing-attribute": "A node without a required attribute throws; after tick 0, it stalls.",
    "attribute-type": "An attribute of another type throws; of integers in older feeders (a note).",
    "ready-width": "Every event rescans all ready nodes: 2000 ready at once took 60 s.",
    "memory-attributes": "track-local-mem reads `inputs` and `outputs` of every node or throws.",
    "roofline-values": "With the roofline on, num_ops and tensor_size of 0 lose or stall the node.",
    "roofline-time": "In the exact encoding num_ops = ns*1000 + 500, or nanoseconds get lost.",
    "time-drift": "Whole microseconds drop remainders unless each is carried to the next node.",
    "duration-range": "A node of more than a day is a mistake; beyond 2**64 ns time wraps around.",
    "zero-at-start": "A node of 0 ns at time 0 asserts.",
    # communication
    "collective-type": "A collective that is not supported throws; after tick 0, it stalls.",
    "collective-replayed": "A broadcast is replayed for its duration: no bytes, no waiting.",
    "comm-size": "A size of 0 aborts, stalls the rank, or is charged as if it were more.",
    "dataset-splits": "preferred-dataset-splits divides every size: 0 crashes, too many stall.",
    "endpoint": "A send or receive whose ends are not its rank and another of the world throws.",
    # process groups
    "group-name": "pg_name is read as an integer; anything else throws.",
    "group-unknown": "A pg_name that the group file does not define ends the simulator.",
    "group-key": "Keys of the group file are int32 >= 1: 0 asserts, a word throws.",
    "group-ranks": "A group lists distinct ranks of the world.",
    "group-member": "A rank may only issue collectives of groups it belongs to.",
    "group-of-one": "A collective on a group of one rank stalls.",
    "group-path": 'A group file whose path holds "empty" is ignored.',
    "default-group": "A collective on the default group can stall once subgroups were used.",
    # files and configuration
    "rank-files": "The simulator opens PREFIX.0.et to PREFIX.N-1.et, N >= 2, and nothing else.",
    "configuration-file": "A configuration file is missing or cannot be read.",
    "duplicate-key": "Of two equal keys in YAML the first counts for ASTRA-sim.",
    "logging-configuration": "spdlog_setup throws on a sink or logger that it cannot set up.",
    "setting-type": "A setting of another type throws.",
    "setting-value": "A setting out of range stalls, or falsifies times, with exit status 0.",
    "setting-name": "A misspelt setting is ignored (a note).",
    "replay-only": "Replayed nodes last their duration_micros: no bytes, no waiting.",
    "network-dimensions": "Each network dimension has a topology, > 1 NPUs, bandwidth, latency.",
    "network-ranks": "The product of npus_count is the number of ranks.",
    "congestion-aware": "The congestion-aware analytical backend has one dimension only.",
    "algorithms": "One algorithm per network dimension: with fewer, a dimension drops silently.",
    "roofline-configuration": "Without peak-perf and local-mem-bw the roofline divides by 0.",
    "system-choice": "scheduling-policy and collective-optimization have no default: set them.",
    "switch-number": "Switches are compared with the number 0: false turns them on.",
    # across ranks
    "collective-sequence": "Members match the collectives of a group by order, type and size.",
    "unordered-collectives": "Without a dependency, arrival times order collectives.",
    "collective-mismatch": "Members in collectives of other type or size stall with exit status 0.",
    "collective-missing": "A collective that a member never issues stalls the others.",
    "deadlock": "One communication runs at a time: ranks waiting in a ring stall.",
    "unmatched-recv": "A receive without a send of equal tag, ranks and size stalls its rank.",
    "unmatched-send": "A send without a receive costs time for bytes that go nowhere.",
}
"""Code of each rule -> what ASTRA-sim does with a workload that violates it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One violation of a rule.

    Attributes:
        rule: name of the rule, a key of `RULES`.
        file: name of the file at fault, the first of equal files.
        node: id of the node at fault, None if it is not a single node.
        message: the problem, what was expected, what to do.
        is_note: whether ASTRA-sim still runs the workload as intended. A workload that has only
            notes passes.
    """

    rule: str
    file: str
    node: int | None
    message: str
    is_note: bool = False


class Report:
    """Collects findings in order.

    Findings with the same cause at many nodes of a file are merged into one, as are findings of
    files that differ only in groups and peers.
    """

    def __init__(self) -> None:
        self._findings: dict[Hashable, Finding] = {}
        self._repetitions: dict[Hashable, int] = {}
        self._other_files: dict[Hashable, list[str]] = {}

    def add(
        self,
        rule: str,
        file: str,
        node: int | None,
        message: str,
        cause: Hashable = None,
        *,
        is_note: bool = False,
    ) -> None:
        """Add a finding.

        Args:
            rule: a key of `RULES`.
            file: name of the file at fault.
            node: id of the node at fault.
            message: as in `Finding`.
            cause: if the file already has a finding of this rule and cause, that finding counts
                one more; by default the node and the message are the cause.
            is_note: as in `Finding`.
        """
        assert rule in RULES, f"{rule} is not a rule"
        key = (rule, file, cause) if cause is not None else (rule, file, node, message)
        if key not in self._findings:
            self._findings[key] = Finding(rule, file, node, message, is_note)
        elif cause is not None:
            self._repetitions[key] = self._repetitions.get(key, 0) + 1

    def keys_since(self, count: int) -> list[Hashable]:
        """Return the keys of the findings after the first `count`."""
        return list(islice(self._findings, count, None))

    def add_file(self, keys: Iterable[Hashable], file: str) -> None:
        """Record that another file has the findings with these keys (`keys_since`) too."""
        for key in keys:
            self._other_files.setdefault(key, []).append(file)

    def __len__(self) -> int:
        return len(self._findings)

    @property
    def rules(self) -> frozenset[str]:
        """The violated rules."""
        return frozenset(finding.rule for finding in self._findings.values())

    @property
    def findings(self) -> list[Finding]:
        """Every finding, in the order in which they were added."""
        return [self._counted(key, finding) for key, finding in self._findings.items()]

    def _counted(self, key: Hashable, finding: Finding) -> Finding:
        counts: list[str] = []
        if repetitions := self._repetitions.get(key, 0):
            counts.append(f"{repetitions} more in this file")
        if files := self._other_files.get(key):
            others = f" and {len(files) - 1} more files" if len(files) > 1 else ""
            counts.append(f"also in {files[0]}{others}, which differ only in groups and peers")
        suffix = f" ({'; '.join(counts)})" if counts else ""
        return replace(finding, message=finding.message + suffix)

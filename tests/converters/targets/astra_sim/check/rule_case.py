"""A bad workload and what `check` must find in it, in few words."""

from collections.abc import Mapping
from typing import Any, NamedTuple

COMP = "0 comp us=5\n"
SCRIPT = (
    "AstraSim_Analytical_Congestion_Unaware --workload-configuration=w "
    "--comm-group-configuration=comm_groups.json --system-configuration=$system "
    "--network-configuration=network.yml --remote-memory-configuration=memory.json\n"
)
CHOICES = {"scheduling-policy": "LIFO", "collective-optimization": "localBWAware"}
SYSTEM = {
    **CHOICES,
    "preferred-dataset-splits": 4,
    "all-reduce-implementation": ["ring"],
    "all-gather-implementation": ["ring"],
    "all-to-all-implementation": ["ring"],
    "local-mem-bw": 50,
    "peak-perf": 1,
}
ROOFLINE = {**SYSTEM, "roofline-enabled": 1}
TIMED = "tensor_size=1 num_ops=5500"


def ranks(*texts: str) -> dict[str, str]:
    return {f"w.{rank}.et": text for rank, text in enumerate(texts)}


def both(text: str) -> dict[str, str]:
    return ranks(text, text)


def coll(node: int, collective: int, size: int, group: str = "1", rest: str = "") -> str:
    return f"{node} coll comm_type={collective} comm_size={size} pg_name={group} {rest}\n"


def network(topology: str, npus: str, bandwidth: str = "50", latency: str = "500") -> str:
    return (
        f"topology: [ {topology} ]\nnpus_count: [ {npus} ]\n"
        f"bandwidth: [ {bandwidth} ]\nlatency: [ {latency} ]\n"
    )


class Case(NamedTuple):
    """What `check` must find in `files`: rule, file, node and a part of the message."""

    rule: str
    file: str
    node: int | None
    part: str
    files: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.rule}: {self.part[:24]}"

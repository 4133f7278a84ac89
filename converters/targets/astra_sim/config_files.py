"""Configuration files of an ASTRA-sim run: system, network, memory, groups and run script."""

import json
from dataclasses import dataclass
from math import inf

from onerank.ir.chakra.third_party_traces import GROUP_FILES
from onerank.ir.errors import ExportError
from onerank.ir.notes import Note

# Names of the files of a workload besides its traces; `check` reads them, too.
GROUPS_FILE = GROUP_FILES[0]
SYSTEM_FILE = "system.json"
ROOFLINE_SYSTEM_FILE = "system_roofline.json"
NETWORK_FILE = "network.yml"
MEMORY_FILE = "memory.json"
LOGGING_FILE = "logging.toml"
SCRIPT_FILE = "run.sh"

# Memory so fast that reductions take no time: a gigabyte in a nanosecond.
_FREE_MEMORY_GB_PER_S = 1e9


@dataclass(frozen=True, slots=True)
class SimulatedNetwork:
    """The network that ASTRA-sim simulates: one switch between all ranks.

    Attributes:
        bandwidth_gb_per_s: 1e9 bytes per second, per rank and direction; by default NVLink of an
            H100 or H200.
        latency_ns: from one rank to another through the switch.
        memory_gb_per_s: 1e9 bytes per second of a GPU's memory, for the reductions of collectives;
            by default that of an H100 SXM. None if the bandwidth is a measured bus bandwidth, which
            includes them.
    """

    bandwidth_gb_per_s: float = 450.0
    latency_ns: float = 500.0
    memory_gb_per_s: float | None = 3350.0

    def check(self) -> None:
        """Check the figures.

        Raises:
            ExportError: a figure is out of range.
        """
        memory = self.memory_gb_per_s
        if not 0 < self.bandwidth_gb_per_s < inf or not (memory is None or 0 < memory < inf):
            raise ExportError(
                f"the bandwidths are {self.bandwidth_gb_per_s} GB/s between ranks and "
                f"{memory} GB/s of memory; both must be more than 0",
                code="export-bandwidth",
            )
        if not 0 <= self.latency_ns < inf:
            raise ExportError(
                f"the latency is {self.latency_ns} ns; it must be 0 or more", code="export-latency"
            )

    @property
    def assumptions(self) -> Note:
        """The network as a note."""
        memory = f"{self.memory_gb_per_s} GB/s of memory"
        if self.memory_gb_per_s is None:
            memory = "reductions included"
        return Note(
            f"Assumed: one switch, {self.bandwidth_gb_per_s} GB/s and {self.latency_ns} ns between "
            f"any two ranks, {memory}.",
            code="assumed-network",
        )


def system_json(memory_gb_per_s: float | None, *, roofline: bool) -> str:
    """Return the system file.

    Args:
        memory_gb_per_s: 1e9 bytes per second at which each step of a reduction reads its bytes
            twice and writes them once; None for reductions that take no time.
        roofline: take compute times from the nodes' operations, one picosecond each.
    """
    # One entry per network dimension: ASTRA-sim drops a dimension without one and reports nothing.
    ring = ["ring"]
    settings: dict[str, object] = {
        "scheduling-policy": "LIFO",
        "endpoint-delay": 10,
        "active-chunks-per-dimension": 1,
        # ASTRA-sim requires 1 or more, and stalls on an all-gather of fewer bytes than splits.
        "preferred-dataset-splits": 1,
        "all-reduce-implementation": ring,
        "all-gather-implementation": ring,
        "reduce-scatter-implementation": ring,
        "all-to-all-implementation": ["direct1"],
        "collective-optimization": "localBWAware",
        "local-mem-bw": memory_gb_per_s or _FREE_MEMORY_GB_PER_S,
        "boost-mode": 0,
        "trace-enabled": 0,
        "roofline-enabled": int(roofline),
        "peak-perf": 1,
    }
    return json.dumps(settings, indent=2) + "\n"


def network_yml(ranks: int, network: SimulatedNetwork) -> str:
    """Return the network file: one switch between all ranks."""
    bandwidth_gb_per_s, latency_ns = network.bandwidth_gb_per_s, network.latency_ns
    # ASTRA-sim reads a "GB" of bandwidth as 2**30 bytes, and adds the latencies of both links of a
    # path.
    return (
        "topology: [ Switch ]\n"
        f"npus_count: [ {ranks} ]\n"
        f"# {bandwidth_gb_per_s} GB/s (10**9 bytes) per rank and direction, "
        "given in GiB/s (2**30)\n"
        f"bandwidth: [ {bandwidth_gb_per_s * 1e9 / 2**30} ]\n"
        f"# {latency_ns} ns from rank to rank, given per link: rank to switch, switch to rank\n"
        f"latency: [ {latency_ns / 2} ]\n"
    )


def memory_json() -> str:
    """Return the remote memory file: no remote memory."""
    return json.dumps({"memory-type": "NO_MEMORY_EXPANSION"}, indent=2) + "\n"


def logging_toml() -> str:
    """Return the logging file, which flushes the lines that show whether a run finished."""
    # ASTRA-sim prints from a thread. A correct run can still crash at its end (two groups of one
    # rank free the same algorithm) and would lose its last lines, "finished" among them.
    sink = '[[sink]]\nname = "nowhere"\ntype = "null_sink_mt"\n'
    return sink + "".join(
        f'\n[[logger]]\nname = "{name}"\nsinks = ["nowhere"]\nlevel = "debug"\n'
        'flush_level = "info"\n'
        for name in ("workload", "statistics", "system")
    )


def groups_json(groups: dict[int, tuple[int, ...]]) -> str:
    """Return the group file: group number -> ranks."""
    lines = ",\n".join(f'  "{number}": {list(ranks)}' for number, ranks in groups.items())
    return f"{{\n{lines}\n}}\n"


def run_script(name: str, ranks: int) -> str:
    """Return the script that runs ASTRA-sim on the workload and checks that it finished."""
    # A stalled rank exits with 0 and a correct run can exit with 134, so the script looks for one
    # "finished" line per rank.
    return (
        _SCRIPT.replace("@NAME@", name)
        .replace("@RANKS@", str(ranks))
        .replace("@GROUPS@", GROUPS_FILE)
    )


_SCRIPT = """\
#!/bin/sh
# Run ASTRA-sim on this workload:  ./run.sh [micros|roofline] [ASTRA_SIM_BIN]
#   micros    compute in whole microseconds, remainders carried forward (the default)
#   roofline  compute to the nanosecond
# ASTRA_SIM_BIN, an argument or set in the environment, is ASTRA-sim's analytical binary,
# for example build/astra_analytical/build/bin/AstraSim_Analytical_Congestion_Unaware.
# ASTRA-sim's exit status says nothing: this script exits with 0 only if every rank finished.
set -eu

name=@NAME@
ranks=@RANKS@
bin=${ASTRA_SIM_BIN:-}
encoding=micros
for argument in "$@"; do
    case $argument in
        micros | roofline) encoding=$argument ;;
        *) bin=$argument ;;
    esac
done
case $bin in
    "") echo "$0: ASTRA_SIM_BIN is not set: name ASTRA-sim's analytical binary" >&2; exit 2 ;;
    /*) ;;
    */*) bin=$PWD/$bin ;;
esac
command -v "$bin" >/dev/null || { echo "$0: $bin is not a program" >&2; exit 2; }
case $encoding in
    micros) workload=$name system=system.json ;;
    roofline) workload=${name}_roofline system=system_roofline.json ;;
esac

cd "$(dirname "$0")"
case $bin in
    *Congestion_Aware)
        ! grep -q Switch network.yml ||
            echo "$0: in the congestion-aware backend a switch receives a message whole before" \\
                "it sends it on, so that communication takes twice its time: use the unaware" >&2
        ;;
esac
output=$encoding.log
{
    "$bin" \\
        --workload-configuration="./$workload" \\
        --comm-group-configuration=@GROUPS@ \\
        --system-configuration="$system" \\
        --remote-memory-configuration=memory.json \\
        --network-configuration=network.yml \\
        --logging-configuration=logging.toml \\
        --logging-folder="$encoding" || echo "ASTRA-sim exited with $?"
} 2>&1 | tee "$output"

unfinished=
rank=0
while [ "$rank" -lt "$ranks" ]; do
    grep -q "sys\\[$rank\\] finished" "$output" || unfinished="$unfinished $rank"
    rank=$((rank + 1))
done
if [ -n "$unfinished" ]; then
    echo "$0: of $ranks ranks these did not finish:$unfinished" >&2
    exit 1
fi
echo "$0: all $ranks ranks finished"
"""

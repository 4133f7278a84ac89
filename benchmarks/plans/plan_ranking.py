"""Rank layouts of vTrain's table by `onerank plan`, and compare the orders with the published ones.

    python -m benchmarks.plans.plan_ranking DATA DIRECTORY [--hidden 2048] [--layers 24] [--gpus 8]

DATA holds megatron_a100_iterations.csv, see megatron_iterations.py. Rows of one model on a number
of GPUs with a global batch are alternatives: a group. The options choose groups, and each may be
given several times. Without them all groups with two rows and more are planned. DIRECTORY keeps the
results: the same command continues an interrupted run.

The planner trains a GPT-2 of transformers in bf16 with DDP, and with unfused attention and dropout
as the rows have. vTrain's simulator computes the rows from profiles of Megatron-DeepSpeed's GPT in
fp16 under a profiler that slows the host (megatron_iterations.py). So the orders are comparable and
the times are not. `--host-factor` multiplies the typical host. Links: 220 GB/s and 50 us, a line
through vTrain's table of all-reduces for 2, 4 and 8 A100s. The simulator has no limit of memory, so
the plan has none.
"""

import csv
import re
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import msgspec
from scipy.stats import kendalltau

from benchmarks.harness import order_agreement, parser_of, print_conditions, version_of
from onerank.annotate.hosts import host as hosts

AXES = ("tp", "dp", "pp", "micro_batch")

OPTIONS = {"hidden": "hidden", "layers": "layers", "gpus": "gpus", "batch": "global_batch"}

CONFIG = """\
[model]
config = "gpt.json"
[cluster]
gpu = "A100"
nodes = 1
gpus_per_node = {gpus}
memory_gb = 1000
host = "host.toml"
intra_node = {{ busbw_gb_per_s = 220, latency_us = 50 }}
[job]
global_batch = {batch}
seq = {seq}
[vary]
sharding = "ddp"
sp = false
"""

Layout = tuple[int, ...]
"""Sizes of `AXES`."""


@dataclass(frozen=True)
class Group:
    """Rows of one model on a number of GPUs with a global batch.

    Attributes:
        rows: the rows.
        measured: ms of each layout.
    """

    rows: list[dict[str, float]]
    measured: dict[Layout, float]

    @property
    def name(self) -> str:
        first = self.rows[0]
        return "-".join(f"{option}{first[column]:.0f}" for option, column in OPTIONS.items())


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("directory", type=Path)
    for name in OPTIONS:
        parser.add_argument(f"--{name}", type=int, action="append", default=[])
    parser.add_argument("--host-factor", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    wanted = {column: getattr(options, option) for option, column in OPTIONS.items()}
    groups = groups_of(options.data / "megatron_a100_iterations.csv", wanted)
    if not groups:
        sys.exit(f"no two rows of the table are alternatives with {wanted}")
    print_conditions(version_of("torch"))
    print((__doc__ or "").split("\n\n", 2)[2])
    print(f"host: typical, times {options.host_factor:g}")
    print(f"{'group':44}{'rows':>5}{'tau':>8}{'best loses':>12}{'median error':>14}")
    compared: dict[str, list[tuple[Layout, float, float]]] = {}
    for number, group in enumerate(groups, start=1):
        begin = time.monotonic()
        planned = planned_ms(group, options.directory, options.host_factor, options.workers)
        pairs = [(key, planned[key], ms) for key, ms in group.measured.items() if key in planned]
        compared[group.name] = pairs
        print(f"{group.name:44}{figures_of(pairs)}", flush=True)
        print(f"group {number} of {len(groups)}: {time.monotonic() - begin:.0f} s", file=sys.stderr)
    print_all(compared)


def groups_of(path: Path, wanted: dict[str, list[int]]) -> list[Group]:
    """Return the groups of the table whose columns have wanted values; none means any."""
    with path.open(encoding="utf-8-sig") as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    by_group: dict[tuple[float, ...], list[dict[str, float]]] = defaultdict(list)
    for row in rows:
        if all(not values or row[column] in values for column, values in wanted.items()):
            by_group[tuple(row[column] for column in OPTIONS.values())].append(row)
    return [
        Group(rows, {tuple(int(row[axis]) for axis in AXES): row["iteration_ms"] for row in rows})
        for _, rows in sorted(by_group.items())
        if len(rows) > 1
    ]


def planned_ms(
    group: Group, directory: Path, host_factor: float, workers: int
) -> dict[Layout, float]:
    """Return the planned step of each layout in ms; plan it unless an earlier run did."""
    folder = directory / group.name
    folder.mkdir(parents=True, exist_ok=True)
    write_plan(folder, group.rows, host_factor)
    output = f"plan-{host_factor:g}"
    plan = folder / output / "plan.json"
    if not plan.is_file():
        command = [sys.executable, "-m", "onerank", "plan", "plan.toml", "-o", output,
                   "--store", str(directory.absolute() / "store"),
                   "--workers", str(workers)]  # fmt: skip
        done = subprocess.run(command, check=False, stdout=subprocess.DEVNULL, cwd=folder)
        if done.returncode:
            sys.exit(f"{group.name}: onerank plan failed")
    decoded = msgspec.json.decode(plan.read_bytes())
    return {tuple(outcome["layout"][axis] for axis in AXES): outcome["step_ns"]["value"] / 1e6
            for outcome in (*decoded["fitting"], *decoded["misfits"])}  # fmt: skip


def write_plan(directory: Path, rows: list[dict[str, float]], host_factor: float) -> None:
    """Write the model, the host and the plan whose layouts contain the rows."""
    (first, *_) = rows
    hidden, heads, layers, seq, gpus, batch = (
        int(first[name]) for name in ("hidden", "heads", "layers", "seq", "gpus", "global_batch")
    )
    gpt = {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": hidden,
        "n_head": heads, "n_layer": layers, "n_positions": seq, "vocab_size": 51200,
        "tie_word_embeddings": False, "attn_implementation": "eager",
    }  # fmt: skip
    (directory / "gpt.json").write_bytes(msgspec.json.encode(gpt))
    typical = Path(hosts.__file__).with_name("typical.toml").read_text(encoding="utf-8")

    def scaled(figure: re.Match[str]) -> str:
        return f"{figure[1]}{int(figure[2]) * host_factor:g}"

    # A word boundary leaves out `residual_p90_ns`: time that the host's calls do not explain.
    slowed = re.sub(r"\b(p\d0_ns = )(\d+)", scaled, typical)
    (directory / "host.toml").write_text(slowed, encoding="utf-8")
    varied = "".join(
        f"{axis} = {sorted({int(row[axis]) for row in rows})}\n"
        for axis in ("tp", "pp", "micro_batch")
    )
    text = CONFIG.format(gpus=gpus, batch=batch, seq=seq) + varied
    (directory / "plan.toml").write_text(text, encoding="utf-8")


def figures_of(pairs: Sequence[tuple[Layout, float, float]]) -> str:
    """Return rows, tau, loss of the best predicted and median error of a group, as text."""
    times = [(planned, measured) for _, planned, measured in pairs]
    tau = float(kendalltau(*zip(*times, strict=True)).statistic)
    error = statistics.median(planned / measured - 1 for planned, measured in times)
    return f"{len(pairs):5}{tau:8.2f}{loss_of(pairs):12.1%}{error:+14.1%}"


def loss_of(pairs: Sequence[tuple[Layout, float, float]]) -> float:
    """Return how much longer the best predicted layout takes than the best measured one."""
    best = min(pairs, key=lambda pair: pair[1])[2]
    return best / min(measured for _, _, measured in pairs) - 1


def print_all(compared: dict[str, list[tuple[Layout, float, float]]]) -> None:
    """Print the summary of all groups, and which pairs of layouts have the wrong order."""
    losses = [loss_of(pairs) for pairs in compared.values()]
    within = sum(loss <= 0.03 for loss in losses)
    print(f"\nbest predicted loses {statistics.mean(losses):.1%} in the mean, "
          f"{statistics.median(losses):.1%} in the median, {max(losses):.1%} at worst; within 3% "
          f"in {within} of {len(losses)} groups")  # fmt: skip
    wrong: Counter[str] = Counter()
    all_pairs: Counter[str] = Counter()
    far = far_wrong = 0
    for pairs in compared.values():
        for one, other in combinations(pairs, 2):
            kind = " and ".join(
                axis
                for index, axis in enumerate(AXES)
                if axis != "dp" and one[0][index] != other[0][index]
            )
            kind = kind or "dp"
            reversed_ = (one[1] - other[1]) * (one[2] - other[2]) < 0
            all_pairs[kind] += 1
            wrong[kind] += reversed_
            if max(one[2], other[2]) > 1.1 * min(one[2], other[2]):
                far += 1
                far_wrong += reversed_
    count = sum(all_pairs.values())
    print(f"{count} pairs of alternatives: tau {1 - 2 * sum(wrong.values()) / count:.3f}; "
          f"of the {far} whose published times differ by more than 10%: "
          f"{1 - 2 * far_wrong / max(1, far):.3f}")  # fmt: skip
    print(f"{'pairs that differ in':32}{'pairs':>7}{'wrong':>7}")
    for kind, amount in all_pairs.most_common():
        print(f"  {kind:30}{amount:7}{wrong[kind]:7}")
    errors: dict[tuple[int, int], list[float]] = defaultdict(list)
    for pairs in compared.values():
        for layout, planned, measured in pairs:
            errors[layout[0], layout[3]].append(planned / measured - 1)
    print("median error by tp and micro-batch")
    for (tp, size), values in sorted(errors.items()):
        print(f"  tp {tp}, micro-batch {size}{statistics.median(values):+9.1%}{len(values):5} rows")
    models: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for name, pairs in compared.items():
        models[name.split("-gpus")[0]] += [(planned, ms) for _, planned, ms in pairs]
    for name, times in models.items():
        print(f"all rows of {name}: {len(times)}, {order_agreement(times)}")


if __name__ == "__main__":
    main()

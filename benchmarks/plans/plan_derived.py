"""Compare layouts of a plan with layouts whose captures are derived from no others.

    python -m benchmarks.plans.plan_derived DIRECTORY [--row N]...

A plan captures two replicas, and micro-batches of 1 and of a prime number of sequences; it derives
the other replicas and micro-batches. Here each layout is also captured with its own. The model is
Llama-3 70B on 512 H100s, as in plan_scale.py.
"""

import os
from pathlib import Path

import msgspec

from benchmarks.harness import parser_of, print_conditions, version_of
from benchmarks.plans.plan_scale import CONFIG, MODEL, VARY
from onerank.plan.captures import plan_captures
from onerank.plan.config import read_config
from onerank.plan.evaluate import evaluate
from onerank.plan.layouts import Layout, enumerate_layouts
from onerank.plan.run_captures import capture_stage

# tp, pp, schedule, sharding, micro-batch, recompute
ROWS = (
    (8, 8, "1f1b", "fsdp", 8, "full"),
    (4, 4, "interleaved:2", "zero1", 4, "none"),
    (2, 1, "1f1b", "fsdp", 2, "full"),
    (1, 16, "zbv", "zero1", 2, "full"),
    (1, 8, "gpipe", "fsdp", 4, "none"),
)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--row", type=int, action="append", help="its number; default: all")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    os.chdir(options.directory)
    Path("config.json").write_bytes(msgspec.json.encode(MODEL))
    lines = [f"{name} = {msgspec.json.encode(values).decode()}" for name, values in VARY.items()]
    Path("plan.toml").write_text(CONFIG + "\n".join(lines))
    job = read_config(Path("plan.toml")).job
    layers = int(str(MODEL["num_hidden_layers"]))
    layouts, _ = enumerate_layouts(
        job.choices, gpus=job.cluster.gpus, global_batch=job.global_batch
    )
    print_conditions(version_of("torch"))
    columns = f"{'derived':>11}{'captured':>11}{'error':>9}"
    print(f"{'':74}{'step, ms':^31}{'peak memory, GB':^31}\n{'':74}{columns}{columns}", flush=True)
    for row in [ROWS[number - 1] for number in options.row] if options.row else ROWS:
        (layout,) = (each for each in layouts if _row(each) == row)
        same_kind = [each for each in layouts if _row(each)[:4] == row[:4]]
        outcomes = []
        for exact in (False, True):
            tasks = plan_captures(
                job, [layout], layers, exact=exact, later=() if exact else same_kind
            )
            captures = {task.key: capture_stage(*task.arguments) for task in tasks}
            result = evaluate(captures, job, [layout], layers, exact)
            if not result.outcomes:
                raise SystemExit(f"{layout}: {result.dropped or 'not derived'}")
            outcomes += result.outcomes
        line = f"{layout!s:74}"
        for name, unit in (("step_ns", 1e6), ("peak_bytes", 1e9)):
            derived, captured = (getattr(outcome, name).value for outcome in outcomes)
            line += f"{derived / unit:11.3f}{captured / unit:11.3f}{derived / captured - 1:+9.3%}"
        print(f"{line}", flush=True)


def _row(layout: Layout) -> tuple[int, int, str, str, int, str]:
    return (layout.tp, layout.pp, layout.schedule, layout.sharding, layout.micro_batch,
            layout.recompute)  # fmt: skip


if __name__ == "__main__":
    main()

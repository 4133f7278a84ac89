"""Tables of a step eager and compiled."""

from onerank.cli.render.tables import lines, table, time
from onerank.ir import Compilation

FUSION_ROWS = 12

_OPERATORS = 8  # a table's; --json has all


def render_compilation(done: Compilation, device: str) -> None:
    """Print the gain of each sub-module and the operators that each generated kernel replaces."""
    pairs = [
        ("torch.compile", f"mode {done.mode}; {done.graphs} compiled graphs in the step"),
        (
            "step, measured",
            f"{time(done.eager_step_ns)} eager, {time(done.compiled_step_ns)} compiled"
            f" ({_gain(done.eager_step_ns, done.compiled_step_ns)})",
        ),
    ]
    if done.shared_ops:
        text = f"{done.shared_ops} operations are one of several library calls; which is not known"
        pairs.append(("shared", text))
    if done.unknown_ops:
        text = f"{done.unknown_ops} operations in compiled graphs are no kernel of the compiler's"
        pairs.append(("unknown", text))
    lines(pairs)
    rows = [
        (
            row.module or "(none)",
            row.eager_ops,
            row.compiled_ops,
            time(row.eager_ns),
            time(row.compiled_ns),
            _gain(row.eager_ns, row.compiled_ns),
        )
        for row in done.modules
    ]
    columns = ("", "ops, eager", "compiled", "time, eager", "compiled", "speed-up")
    table(f"Compute by sub-module, eager and compiled, on {device or 'this device'}", columns, rows)
    made = [
        (
            fusion.kernel,
            fusion.phase or "-",
            fusion.launches,
            time(fusion.time_ns),
            _operators(fusion.operators),
            ", ".join(fusion.modules),
        )
        for fusion in done.fusions[:FUSION_ROWS]
    ]
    columns = ("kernel", "phase", "launches", "time", "replaces", "of")
    table("Generated kernels", columns, made, texts=(0, 1, 4, 5))
    if len(done.fusions) > FUSION_ROWS:
        lines([("", f"and {len(done.fusions) - FUSION_ROWS} more (--json has all)")])


def _operators(counts: dict[str, int]) -> str:
    named = [f"{n} {name.removeprefix('aten.')}" for name, n in counts.items()]
    more = f", {len(named) - _OPERATORS} more" if len(named) > _OPERATORS else ""
    return ", ".join(named[:_OPERATORS]) + more


def _gain(before: int | None, after: int | None) -> str:
    return f"x{before / after:.2f}" if before and after else "-"

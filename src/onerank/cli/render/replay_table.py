"""Table of a replay."""

from onerank.analysis.replay_breakdown import Replay
from onerank.cli.render.tables import MODULE_ROWS, lines, table, time


def render_replay(done: Replay, title: str) -> None:
    """Print where the time of a replayed step goes."""
    total = done.step_time_ns

    def part(ns: int, of_ns: int = total) -> str:
        return f"{time(ns)} ({ns / of_ns:.1%})"

    pairs = [("step, replayed", time(total))]
    if done.measured_ns:
        off = total / done.measured_ns - 1
        pairs.append(
            ("step, profiled", f"{time(done.measured_ns)}; the replay is off by {off:+.2%}")
        )
    if done.row is not None:
        row, what = done.row, "measured" if done.row_measured_ns else "predicted"
        text = f"{time(row.step_ns)}, {what}: without the profiler, the host ahead of the GPU; "
        idle = f"{part(row.idle_ns, row.step_ns)} of it idle"
        text += f"{idle}, {time(row.host_bound_ns)} waiting for a launch"
        pairs.append(("steady-state step", text))
    pairs += [
        ("compute", part(done.compute_ns)),
        ("exposed comm.", part(done.exposed_communication_ns)),
        ("idle", f"{part(done.idle_ns)}, {time(done.host_bound_ns)} of it waiting for a launch"),
    ]
    if done.data_loading_ns:
        pairs.append(("data loading", f"{part(done.data_loading_ns)}, of the idle time"))
    if done.unexplained_ns:
        text = f"{part(done.unexplained_ns)}, of the idle time: gaps that no recorded wait explains"
        pairs.append(("unexplained", text))
    lines(pairs, title)
    rows = [
        (share.name or "(none)", share.kind, str(share.nodes), time(share.time_ns),
         f"{share.time_ns / total:.1%}")
        for share in done.critical_path[:MODULE_ROWS]
    ]  # fmt: skip
    table("Critical path", ("", "what", "nodes", "time", "share"), rows, texts=(0, 1))

"""The shell commands that repeat a row of a plan: capture, re-cost, replay and export a layout."""

import re
import shlex

from onerank.annotate.hosts.host import TYPICAL
from onerank.plan.captures import DEPTHS, arguments_of, stage_layers
from onerank.plan.cluster import CAPTURED_MICRO_BATCHES, Cluster, PlannedJob
from onerank.plan.layouts import Layout


def commands_of(
    job: PlannedJob, layout: Layout, layers: int, *, links_active: bool
) -> tuple[str, ...]:
    """Return shell commands: capture each stage, re-cost them, replay the step, export it.

    Args:
        job: the job.
        layout: the layout.
        layers: layers of the model.
        links_active: whether the re-costing counts the power of active links.
    """
    name = _directory(layout)
    gpu = shlex.quote(job.cluster.gpu)
    pipelined = layout.pp > 1
    several = pipelined and layout.micro_batches > 1
    micro_batches = CAPTURED_MICRO_BATCHES if several else layout.micro_batches
    axes = {"tp": layout.tp, "cp": layout.cp, "pp": layout.stages, "ep": layout.ep,
            "dp": layout.dp}  # fmt: skip
    options = [f"--{axis} {size}" for axis, size in axes.items() if size > 1]
    options += ["--sp"] if layout.sp else []
    if job.model.torchrun:
        options.append("--torchrun")
    elif layout.dp > 1:
        options.append({"ddp": "--ddp", "fsdp": "--fsdp"}.get(layout.sharding, ""))
        options[-1] = options[-1] or f"--zero {layout.sharding.removeprefix('zero')}"
    # A script that distributes itself is captured whole. Calls of ZeRO 1 and 2 span layers:
    # `--capture-layers` refuses them.
    composed = not job.model.torchrun and (layout.dp == 1 or layout.sharding in ("ddp", "fsdp"))
    if composed and min(stage_layers(layers, layout.stages)) > DEPTHS[-1]:
        options.append(f"--capture-layers {','.join(map(str, DEPTHS))}")
    arguments = " ".join(map(shlex.quote, arguments_of(job, layout, micro_batches)))
    script = shlex.quote(str(job.model.script))
    schedule = f" --schedule {layout.schedule} --micro-batches {layout.micro_batches}"
    # One GPU has neither links nor other ranks, and the commands refuse options on these.
    several_gpus = layout.gpus > 1
    recost = " --nvlink-active" if links_active and several_gpus else ""
    if job.cluster.host != TYPICAL:
        recost += f" --host {shlex.quote(job.cluster.host)}"
    # A script that distributes itself has no pipeline stages: rank 0 stands for all ranks.
    options += ["--ranks distinct"] if several_gpus and not job.model.torchrun else []
    commands = (
        f"mkdir -p {name} {name}.target",
        f"capture run {script} --device none --like {gpu} {' '.join(options)} "
        f"-o {name}/trace.et -- {arguments}",
        f"for t in {name}/*.et; do annotate --target {gpu}{recost} $t "
        f"-o {name}.target/$(basename $t); done",
        f"onerank replay {name}.target --cluster CONFIG{schedule}",
    )
    export = (
        f"onerank export astra-sim {name}.target{schedule if pipelined else ''} "
        f"--busbw-gb-s {_bandwidth(layout, job.cluster):g} -o {name}.astra-sim"
    )
    return (*commands, export) if several_gpus else commands


def _directory(layout: Layout) -> str:
    parts = [f"tp{layout.tp}", f"cp{layout.cp}", f"ep{layout.ep}", f"pp{layout.pp}",
             layout.schedule.replace(":", ""), f"dp{layout.dp}", layout.sharding,
             f"mb{layout.micro_batch}", layout.recompute, f"seq{layout.seq}"]  # fmt: skip
    parts += ["sp"] if layout.sp else []
    parts += [re.sub(r"[^a-zA-Z0-9.]+", "-", layout.variant).strip("-")] if layout.variant else []
    return "-".join(parts)


def _bandwidth(layout: Layout, cluster: Cluster) -> float:
    """Return the bus bandwidth of the slowest link; the export has one switch for all groups."""
    if layout.gpus <= cluster.gpus_per_node:
        return cluster.intra_node.busbw_gb_per_s
    return min(cluster.intra_node.busbw_gb_per_s, cluster.inter_node.busbw_gb_per_s)

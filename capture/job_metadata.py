"""Job metadata of a capture."""

import contextlib
import importlib.metadata
import os
import platform
import statistics
from pathlib import Path

import torch

from onerank.capture.fake_world.recorder import Recorder
from onerank.capture.options import Options
from onerank.capture.profiling.observations import Observed
from onerank.capture.run_as_rank import RankRun
from onerank.ir import Device, Job, Measurement, Pipeline, ProcessGroup, RankClass, World, axis_of


def job_of(rank_run: RankRun, options: Options) -> Job:
    """Return the job that a script was run as a rank of, as it is told of in the graph."""
    peers, observed = rank_run.peers, rank_run.windows.observed
    used = {call.group for call in peers.calls} if isinstance(peers, Recorder) else peers.groups
    groups = tuple(
        ProcessGroup(name, ranks, axis=axis_of(ranks, options.world, options.rank, name))
        for name, ranks in peers.groups.items()
        if name in used
    )
    several = len(observed.profiled_step_ns) > 1
    notes = list(observed.notes)
    if not observed.on_gpu:
        notes.append("measured on a CPU: its compute nodes are operators, not kernels")
        if options.emulation.network is not None:
            notes.append("no kernels stood in for collectives: that takes a GPU")
    return Job(
        world=options.world,
        rank=options.rank,
        groups=groups,
        device=_device(observed),
        measurement=Measurement(
            step_ns=observed.step_ns,
            host_step_ns=tuple(observed.host_step_ns),
            timed_step_ns=observed.timed_step_ns,
            scopes=observed.scopes,
            profiled_step_ns=round(statistics.median(observed.profiled_step_ns)),
            profiled_steps_ns=tuple(observed.profiled_step_ns) if several else (),
            profiled_host_ns=tuple(observed.profiled_host_ns),
            peak_memory_bytes=max(observed.peak_memory_bytes),
            start_memory_bytes=observed.start_memory_bytes[0],
            resident_bytes=observed.resident_bytes,
            resident_pools=observed.resident_pools,
            input_spread=observed.input_spread,
            versions=_versions(),
            notes=tuple(notes),
        ),
        modules=rank_run.modules.table(),
        pipeline=_pipeline(rank_run),
        classes=_classes(rank_run, options.world),
    )


def _pipeline(rank_run: RankRun) -> Pipeline | None:
    """Return the pipeline stage of the script's first model that is one."""
    stages = (one.stage for _, one in rank_run.models.sliced)
    return next((stage.pipeline for stage in stages if stage is not None), None)


def _classes(rank_run: RankRun, world: World) -> tuple[RankClass, ...]:
    """Return which ranks are alike.

    What is not sliced is whole on every rank, or shared out equally (`data_parallel`).
    """
    sliced = [one.classes for _, one in rank_run.models.sliced]
    if sliced:
        return max(sliced, key=len) if all(sliced) else ()
    return () if rank_run.script_distributed or world.size == 1 else (RankClass(0),)


def _device(observed: Observed) -> Device:
    if observed.on_gpu:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return Device(
            type="cuda",
            name=properties.name,
            memory_bytes=properties.total_memory,
            sm_count=properties.multi_processor_count,
            sensors=observed.sensors,
        )
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return Device(type="cpu", name=_cpu_name(), memory_bytes=pages * size)


def _cpu_name() -> str:
    """Return the processor's model if Linux reports it, else its architecture."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for package in ("transformers", "onerank"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found

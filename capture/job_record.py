"""The record of a captured job: world, groups, device, measurement, modules, classes of ranks.

A capture writes it next to the raw traces; the conversion puts it into the graph.
"""

import contextlib
import importlib.metadata
import os
import platform
import statistics
from pathlib import Path
from typing import Any

import torch

from onerank.capture.fake_world.recorder import Recorder
from onerank.capture.no_device.emulated_gpu import EmulatedGpu
from onerank.capture.options import Options
from onerank.capture.parallelize.shard_model import ModelSlicing
from onerank.capture.profiling.window_observations import Observations
from onerank.capture.run_as_rank import RankRun
from onerank.converters.sources.kineto import SHAPES_ONLY
from onerank.ir import (
    Device,
    Job,
    Measurement,
    Pipeline,
    ProcessGroup,
    RankClass,
    World,
    axis_of,
)
from onerank.ir.notes import Note

_cudnn: Any = torch.backends.cudnn  # its `conv` has no types


def job_of(rank_run: RankRun, options: Options, observed: Observations) -> Job:
    """Return the job metadata of a graph: world, groups, device, measurement, modules."""
    peers = rank_run.peers
    # Scripts and torch create groups that a job never uses; a graph names only those with calls.
    used = {call.group for call in peers.calls} if isinstance(peers, Recorder) else peers.groups
    groups = tuple(
        ProcessGroup(name, ranks, axis=axis_of(ranks, options.world, options.rank, name))
        for name, ranks in peers.groups.items()
        if name in used
    )
    several = len(observed.profiled_step_ns) > 1
    gpu = options.emulated_gpu
    return Job(
        world=options.world,
        rank=options.rank,
        groups=groups,
        device=_device(observed) if gpu is None else _emulated_device(gpu),
        measurement=Measurement(
            step_ns=observed.step_ns,
            host_step_ns=tuple(observed.host_step_ns),
            emulated_calls=observed.emulated_calls,
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
            # `allow_tf32` raises once a script has set `fp32_precision`, which shows both.
            tf32_gemms=torch.backends.cuda.matmul.fp32_precision == "tf32",
            tf32_convolutions=_cudnn.conv.fp32_precision == "tf32",
            versions=_versions(),
            notes=(*observed.notes, *_device_notes(options, observed)),
        ),
        modules=rank_run.modules.table(),
        pipeline=pipeline_of(rank_run.models),
        classes=_classes(rank_run, options.world),
    )


def _device_notes(options: Options, observed: Observations) -> list[Note]:
    """Return notes on what the trace lacks because no GPU ran the step."""
    gpu = options.emulated_gpu
    if gpu is not None:
        notes = [
            Note(
                f"captured without a device, as on a {gpu.name}: operators ran on shapes, and "
                "no time was measured",
                code="captured-without-device",
            )
        ]
        # A script that never moves to `cuda` runs on the CPU. Its graph looks like one of a GPU.
        if not max(observed.peak_memory_bytes):
            notes.append(
                Note(
                    "the script put no tensor on the GPU: its CPU operators count as the GPU's, "
                    "and no memory is recorded. Create its model and batches on `cuda`.",
                    code="no-device-gpu-unused",
                )
            )
        return notes
    if observed.on_gpu:
        return []
    notes = [
        Note(
            "measured on a CPU: its compute nodes are operators, not kernels",
            code="captured-on-cpu",
        )
    ]
    if options.emulation.network is not None:
        notes.append(
            Note(
                "no kernels emulated the collectives: that needs a GPU",
                code="collectives-not-emulated",
            )
        )
    return notes


def pipeline_of(models: ModelSlicing) -> Pipeline | None:
    """Return the pipeline of the first model that was sliced to a stage; None without one."""
    stages = (sliced.stage for _, sliced in models.sliced)
    return next((stage.pipeline for stage in stages if stage is not None), None)


def _classes(rank_run: RankRun, world: World) -> tuple[RankClass, ...]:
    """Return the classes of equivalent ranks; () if they are unknown."""
    classes = [sliced.classes for _, sliced in rank_run.models.sliced]
    if classes:
        return max(classes, key=len) if all(classes) else ()
    # Without slices every rank has the whole model, or an equal share of it (data parallelism).
    return () if rank_run.script_distributed or world.size == 1 else (RankClass(0),)


def _device(observed: Observations) -> Device:
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
    return Device(type="cpu", name=cpu_name(), memory_bytes=pages * size)


def _emulated_device(gpu: EmulatedGpu) -> Device:
    return Device(
        type=SHAPES_ONLY, name=gpu.name, memory_bytes=gpu.memory_bytes, sm_count=gpu.sm_count
    )


def cpu_name() -> str:
    """Return the processor's model if Linux reports it, else its architecture."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for package in ("transformers", "onerank"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    return versions

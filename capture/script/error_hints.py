"""Hints for torch errors that a script meets under capture."""

import os
import re
import sysconfig
import traceback
from pathlib import Path

import torch
from torch import nn

from onerank.capture.patches import live
from onerank.ir.errors import first_line

_NO_MEMORY = re.compile(r"tried to allocate (\d+) bytes|Tried to allocate ([\d.]+) ([KMGT]iB)")
_NO_GPU = re.compile(
    r"not compiled with CUDA|Found no NVIDIA driver|No CUDA GPUs are available|"
    r"CUDA driver initialization failed|CUDA-capable device|forked subprocess|"
    r"torch\._C' has no attribute '_cuda_|Cannot access accelerator device when none is available|"
    r"needs a non-CPU accelerator device|only work with GPU modules|is only available on GPU"
)
_ON_GPU_ALONE = re.compile(  # torch's own limits of a CPU, which a real job there meets too
    r"_for_cpu\S* does not have a sharding strategy registered|"
    r"FlexAttention does not support backward on CPU|module 'torch\.cpu' has no attribute"
)
_MIXED = re.compile(r"got mixed torch\.Tensor and DTensor")
_NOT_ON_SHARDS = re.compile(  # torch.distributed.tensor's words
    r"in-place operations that require placement changes|"
    r"does not have a sharding strategy registered"
)
_NO_STORAGE = "access the data pointer on an invalid python storage"
_UNLIKE = re.compile(r"must match the size of tensor|shape of the mask .* does not match")
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_ON_META = re.compile(r"\bdevice meta\b|\bmeta tensor|'meta' device")
_PACKAGE = Path(__file__).parents[1]
META_ADVICE = (
    "a model on torch's meta device holds no values: call model.to_empty(device=...) and "
    "initialise the weights before training, or build the model on a real device"
)
_STATES = 4  # weights, gradients and AdamW's two moments


def explained(
    error: BaseException, script: Path, *, sharded: bool = False, parted: bool = False
) -> str:
    """Return an error's message, and what would help where that is known.

    Args:
        error: what the script raised.
        script: its path.
        sharded: whether the shards in it are those of --fsdp, and not the script's own.
        parted: whether --cp cuts the sequences of its models.
    """
    text = str(error)
    if type(error).__name__ == "CheckpointException":
        why = "; ".join(first_line(failed) for failed, _ in getattr(error, "failures", {}).values())
        return (
            f"{place(error, script)}: torch.distributed.checkpoint failed ({why}). A capture "
            "leaves out what the script saves, and reads what it loads: let it load what a run of "
            "the real job has written, or nothing"
        )
    if (found := _NO_MEMORY.search(text)) is not None:
        plain, amount, unit = found.groups()
        asked = int(plain) if plain else round(float(amount) * _UNITS[unit])
        return _without_memory(asked, on_gpu=isinstance(error, torch.OutOfMemoryError))
    if _ON_META.search(text):
        return f"{place(error, script)}: {first_line(error).rstrip('.')}\n  {META_ADVICE}"
    if _NO_GPU.search(text) and not torch.cuda.is_available():
        why = first_line(error).rstrip(".")
        return (
            f"{place(error, script)} asks for a GPU, and there is none: {why}. Capture where "
            'there is one, or let the script take device "cpu"'
        )
    if _ON_GPU_ALONE.search(text):
        return (
            f"{place(error, script)} runs on a GPU alone: {first_line(error).rstrip('.')}. A real "
            "job on CPUs ends so too: capture where there is a GPU, or let the script do without"
        )
    told = (sharded and _of_shards(error, script)) or (parted and _of_parts(error, script))
    return told or text


def _of_shards(error: BaseException, script: Path) -> str | None:
    """Say what --fsdp's shards do not go with, where the error is of that."""
    text = str(error)
    if _MIXED.search(text) and (kind := _stepping(error)) is not None:
        return (
            f"{place(error, script)}: {kind} makes its states without asking what the parameters "
            f"are, and FSDP2's are shards ({first_line(error)}): use another optimizer, or --ddp"
        )
    if _NOT_ON_SHARDS.search(text) and (kind := _stepping(error)) is not None:
        return (
            f"{place(error, script)}: {kind} cannot step on FSDP2's shards, in a real job neither "
            f"({first_line(error)}): use another optimizer, or --ddp"
        )
    if _NO_STORAGE in text:
        return (
            f"{place(error, script)}: under --fsdp a model's parameters are shards, which have no "
            f"storage of their own ({first_line(error)}). Save them by save_pretrained, torch.save "
            "or safetensors' save_file, which write this rank's"
        )
    if _MIXED.search(text) or "FSDP does not support deepcopy" in text:
        return (
            f"{place(error, script)}: under --fsdp a model's parameters are shards from its "
            "first forward on, which go neither with tensors made from whole ones before nor into "
            f"a copy ({first_line(error)}). Copy the model (copy.deepcopy, AveragedModel) before "
            "its first forward, so that the copy is sharded with it, and make other tensors from "
            "its parameters after it; or use --zero 1"
        )
    return None


def _of_parts(error: BaseException, script: Path) -> str | None:
    """Say what --cp's parts of a sequence do not go with, where the error is of that."""
    if _UNLIKE.search(str(error)) is None:
        return None
    return (
        f"{place(error, script)}: {first_line(error)}. Under --cp a model has the rank's part "
        "of the sequence, and so has what it returns of each token, but for logits, which are "
        "gathered where they are read (hidden states, and log-probabilities of the head of "
        "TRL's DPOTrainer, are not). Let the model compute the loss, or leave --cp out"
    )


def _stepping(error: BaseException) -> str | None:
    """Return the class of the optimizer in whose own step it was raised, None for no such step."""
    last = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    steps = [f.f_locals.get("self") for f in last if f.f_code.co_name == "step"]
    kinds = [type(step).__name__ for step in steps if isinstance(step, torch.optim.Optimizer)]
    return kinds[-1] if kinds else None


def _without_memory(asked: int, *, on_gpu: bool) -> str:
    """Say what was needed, and what would fit."""
    weights = sum(
        parameter.numel() * parameter.element_size()
        for parameter in live(nn.Parameter)
        if not parameter.is_meta
    )
    state = _STATES * weights
    used, total, where = _memory(on_gpu=on_gpu)
    needed = used + asked
    parts = [
        f"out of memory: it asked for {_gib(asked)} with {_gib(used)} in use, so it needs more "
        f"than {_gib(needed)} of {where}'s {_gib(total)}",
        f"The slice's weights are {_gib(weights)}; with gradients and AdamW's moments of the same "
        f"type {_gib(state)}",
    ]
    if state > total:
        factor = 2
        while state / factor > total / 2:
            factor *= 2
        parts.append(
            f"Those fit, with as much again left for activations, sliced {factor} times finer "
            f"({_gib(state // factor)}): a larger --tp, or fewer --capture-layers"
        )
    else:
        parts.append(
            f"Those fit; activations and workspaces do not in the other {_gib(total - state)}: "
            "a smaller batch or sequence, activation checkpointing, a larger --tp or fewer "
            "--capture-layers"
        )
    return ". ".join(parts)


def _memory(*, on_gpu: bool) -> tuple[int, int, str]:
    """Return bytes in use, bytes in all, and of what."""
    if on_gpu:
        device = torch.cuda.current_device()
        free, total = torch.cuda.mem_get_info(device)
        return total - free, total, torch.cuda.get_device_name(device)
    text = Path("/proc/meminfo").read_text() if Path("/proc/meminfo").exists() else ""
    sizes = {key: int(kib) * 1024 for key, kib in re.findall(r"(\w+):\s+(\d+) kB", text)}
    total = sizes.get("MemTotal", 0)
    return total - sizes.get("MemAvailable", total), total, "this machine"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def place(error: BaseException, script: Path) -> str:
    """Name the script's own line."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(script)]
    if not frames:
        return script.name
    return f"{script.name} line {frames[-1].lineno} ({(frames[-1].line or '').strip()})"


def library_place(error: BaseException, script: Path) -> str:
    """Return ", in FILE line N (FUNCTION)" if a library raised the error; "" otherwise.

    The standard library does not count, since argparse exits for a wrong argument of the script.
    """
    # Frames of onerank below the script's are hooks, such as the replaced os._exit.
    ours = (str(_PACKAGE), str(_PACKAGE.resolve()), sysconfig.get_path("stdlib") + os.sep, "<")
    stack = traceback.extract_tb(error.__traceback__)
    installed = sysconfig.get_path("purelib")
    frames = [
        frame
        for frame in stack
        if not frame.filename.startswith(ours) or frame.filename.startswith(installed)
    ]
    if not frames or frames[-1].filename == str(script):
        return ""
    return f", in {frames[-1].filename} line {frames[-1].lineno} ({frames[-1].name})"

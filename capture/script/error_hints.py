"""Hints for torch errors that a script meets under capture."""

import os
import re
import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

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
# Limits of torch on a CPU, which a real job on CPUs meets too.
_GPU_ONLY = re.compile(
    r"_for_cpu\S* does not have a sharding strategy registered|"
    r"FlexAttention does not support backward on CPU|module 'torch\.cpu' has no attribute"
)
_ON_TWO_DEVICES = re.compile(  # on a device; on shapes, in torch 2.11
    r"Expected all tensors to be on the same device|found two different devices"
)
_MIXED = re.compile(r"got mixed torch\.Tensor and DTensor")
_UNSUPPORTED_ON_SHARDS = re.compile(  # wording of torch.distributed.tensor
    r"in-place operations that require placement changes|"
    r"does not have a sharding strategy registered"
)
_NO_STORAGE = "access the data pointer on an invalid python storage"
_SIZES_DIFFER = re.compile(r"must match the size of tensor|shape of the mask .* does not match")
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_ON_META = re.compile(r"\bdevice meta\b|\bmeta tensor|'meta' device")
_PACKAGE = Path(__file__).parents[1]
META_ADVICE = (
    "a model on torch's meta device has no values: call model.to_empty(device=...) and "
    "initialise the weights before training, or build the model on a real device"
)

# Memory of training state over that of weights: weights, gradients and AdamW's two moments.
_ADAMW_FACTOR = 4


@dataclass(frozen=True)
class ModelChanges:
    """What a capture changed in a script's models, and may be the cause of the script's errors.

    Attributes:
        fsdp_shards: whether --fsdp shards the models.
        partial_sequence: whether --cp cuts the models' sequences.
    """

    fsdp_shards: bool = False
    partial_sequence: bool = False


UNCHANGED = ModelChanges()


class FailureReason(NamedTuple):
    """Why a script failed.

    Attributes:
        message: the error's message, with advice if the cause is known.
        code: code of the cause; "script-raised" if it is unknown.
    """

    message: str
    code: str


def explained(  # noqa: PLR0911  one cause after another
    error: BaseException, script: Path, changes: ModelChanges = UNCHANGED
) -> FailureReason:
    """Return an error's message with advice and the code of its cause.

    Args:
        error: error that the script raised.
        script: path of the script.
        changes: what the capture changed in the script's models.
    """
    text = str(error)
    if type(error).__name__ == "CheckpointException":
        why = "; ".join(first_line(failed) for failed, _ in getattr(error, "failures", {}).values())
        return FailureReason(
            f"{script_line(error, script)}: torch.distributed.checkpoint failed ({why})\n"
            "  a capture skips saving and reads what the script loads: load a checkpoint that the "
            "real job has written, or none",
            "script-checkpoint",
        )
    if (match := _NO_MEMORY.search(text)) is not None:
        plain, amount, unit = match.groups()
        requested = int(plain) if plain else round(float(amount) * _UNITS[unit])
        on_gpu = isinstance(error, torch.OutOfMemoryError)
        return FailureReason(_without_memory(requested, on_gpu=on_gpu), "script-out-of-memory")
    if _ON_META.search(text):
        why = first_line(error).rstrip(".")
        return FailureReason(
            f"{script_line(error, script)}: {why}\n  {META_ADVICE}", "script-meta-model"
        )
    if _NO_GPU.search(text) and not torch.cuda.is_available():
        why = first_line(error).rstrip(".")
        return FailureReason(
            f"{script_line(error, script)} needs a GPU, and this machine has none: {why}\n"
            '  capture on a machine with a GPU, or let the script use the device "cpu"',
            "script-needs-gpu",
        )
    if _GPU_ONLY.search(text):
        why = first_line(error).rstrip(".")
        return FailureReason(
            f"{script_line(error, script)} runs only on a GPU: {why}\n"
            "  a real job on CPUs fails too: capture on a machine with a GPU",
            "script-gpu-only",
        )
    if _ON_TWO_DEVICES.search(text):
        return FailureReason(
            f"{script_line(error, script)}: {first_line(error)}\n"
            "  move modules, parameters and batches to one device: what is added after "
            'model.to("cuda") stays where it was created',
            "script-two-devices",
        )
    hint = (changes.fsdp_shards and _fsdp_hint(error, script)) or (
        changes.partial_sequence and _sequence_hint(error, script)
    )
    return hint or FailureReason(text + _first_cause(error), "script-raised")


def _first_cause(error: BaseException) -> str:
    """Return a line on the error that a library wrapped in this one; "" if it wrapped none."""
    # Megatron-LM raises "MockGPTDataset failed to build" from the missing module that it needs.
    cause, seen = error, {id(error)}
    # `raise error from error` makes an error its own cause.
    while cause.__cause__ is not None and id(cause.__cause__) not in seen:
        cause = cause.__cause__
        seen.add(id(cause))
    if cause is error:
        return ""
    return f"\n  caused by {type(cause).__name__}: {first_line(cause)}"


def _fsdp_hint(error: BaseException, script: Path) -> FailureReason | None:
    """Explain an operation that FSDP2's shards do not support; return None for others."""
    text, where = str(error), script_line(error, script)
    # An optimizer fails inside its step: then the optimizer is the cause, not the script's line.
    if _MIXED.search(text) and (kind := _failed_optimizer(error)) is not None:
        return FailureReason(
            f"{where}: {kind} creates its states as plain tensors, and FSDP2's "
            f"parameters are shards ({first_line(error)})\n  use another optimizer, or --ddp",
            "fsdp-plain-states",
        )
    if _UNSUPPORTED_ON_SHARDS.search(text) and (kind := _failed_optimizer(error)) is not None:
        return FailureReason(
            f"{where}: {kind} cannot step on FSDP2's shards, in a real job neither "
            f"({first_line(error)})\n  use another optimizer, or --ddp",
            "fsdp-optimizer-unsupported",
        )
    if _NO_STORAGE in text:
        return FailureReason(
            f"{where}: under --fsdp parameters are shards, which have no storage "
            f"({first_line(error)})\n  save them with save_pretrained, torch.save or safetensors' "
            "save_file, which write this rank's shards",
            "fsdp-no-storage",
        )
    if _MIXED.search(text) or "FSDP does not support deepcopy" in text:
        return FailureReason(
            f"{where}: under --fsdp parameters are shards from the first forward "
            f"on; they do not mix with whole tensors and cannot be copied ({first_line(error)})\n"
            "  copy the model (copy.deepcopy, AveragedModel) before its first forward, create "
            "other tensors from its parameters after it, or use --zero 1",
            "fsdp-mixed-tensors",
        )
    return None


def _sequence_hint(error: BaseException, script: Path) -> FailureReason | None:
    """Explain a part of a sequence where the script expects all; return None for others."""
    if _SIZES_DIFFER.search(str(error)) is None:
        return None
    return FailureReason(
        f"{script_line(error, script)}: {first_line(error)}\n"
        "  Under --cp a model sees this rank's part of the sequence. Its logits are gathered when "
        "they are read; other outputs per token (hidden states, log-probabilities of TRL's "
        "DPOTrainer) are not. Let the model compute the loss, or leave --cp out",
        "cp-partial-sequence",
    )


def _failed_optimizer(error: BaseException) -> str | None:
    """Return the class of the innermost optimizer whose step raised the error; None if none did."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    steps = [f.f_locals.get("self") for f in frames if f.f_code.co_name == "step"]
    kinds = [type(step).__name__ for step in steps if isinstance(step, torch.optim.Optimizer)]
    return kinds[-1] if kinds else None


def _without_memory(requested: int, *, on_gpu: bool) -> str:
    """Return the message for an allocation of `requested` bytes that failed."""
    weights = sum(
        parameter.numel() * parameter.element_size()
        for parameter in live(nn.Parameter)
        if not parameter.is_meta
    )
    state = _ADAMW_FACTOR * weights
    used, total, where = _memory(on_gpu=on_gpu)
    needed = used + requested
    text = (
        f"out of memory: {_gib(requested)} requested with {_gib(used)} in use, so the script needs "
        f"more than {_gib(needed)} of {where}'s {_gib(total)}. The slice's weights take "
        f"{_gib(weights)}; with gradients and AdamW's moments of the same dtype {_gib(state)}\n  "
    )
    if state > total:
        # Half of the memory is left for activations.
        factor = 2
        while state / factor > total / 2:
            factor *= 2
        return (
            f"{text}slice {factor} times finer ({_gib(state // factor)}, with as much again for "
            "activations): a larger --tp, or fewer --capture-layers"
        )
    return (
        f"{text}activations and workspaces do not fit in the other {_gib(total - state)}: use a "
        "smaller batch or sequence, activation checkpointing, a larger --tp or fewer "
        "--capture-layers"
    )


def _memory(*, on_gpu: bool) -> tuple[int, int, str]:
    """Return bytes in use, total bytes, and the name of the device."""
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


def script_line(error: BaseException, script: Path) -> str:
    """Return the script's name and the innermost of its lines in the traceback."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(script)]
    if not frames:
        return script.name
    return f"{script.name} line {frames[-1].lineno} ({(frames[-1].line or '').strip()})"


def library_line(error: BaseException, script: Path) -> str:
    """Return ", in FILE line N (FUNCTION)" if a library raised the error; "" otherwise.

    The standard library does not count, since argparse exits for a wrong argument of the script.
    """
    # Frames of onerank below the script's are hooks, such as the replaced os._exit.
    libraries = (str(_PACKAGE), str(_PACKAGE.resolve()), sysconfig.get_path("stdlib"))
    ours = (*(directory + os.sep for directory in libraries), "<")
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

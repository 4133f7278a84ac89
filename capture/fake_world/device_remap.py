"""Map the GPUs of the job's node to the current device, and report the node's GPU count.

Scripts move their model with `.to(rank)` and create tensors with `device=f"cuda:{rank}"`. torch
parses such devices in C++, so every Python function that takes a device is replaced; only for ranks
whose GPU does not exist here, since the replacement costs host time.

Scripts also count GPUs: they compare the count with the world size, exit below two, or derive their
device from it. They get the count of the job's node. torch's own code gets the real count, because
it goes on to query each device.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Generator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import _init_utils

from onerank.capture.patches import patched, rebound, resolve

_INDEX = "_get_device_index"

_FSDP_UTILS = "torch.distributed.fsdp._init_utils"

_fsdp: Any = _init_utils  # it has no public names and no types


@contextlib.contextmanager
def node_sized_groups(ranks: int) -> Generator[None]:
    """Make torch's per-node process groups contain `ranks` ranks.

    torch derives the group size from the number of GPUs of this host.
    """
    subgroups, hybrid = dist.new_subgroups, _fsdp._init_intra_and_inter_node_groups

    def new_subgroups(group_size: int | None = None, *args: Any, **named: Any) -> Any:
        return subgroups(ranks if group_size is None else group_size, *args, **named)

    def intra_and_inter_node_groups(group: dist.ProcessGroup, _: int) -> Any:
        return hybrid(group, ranks)

    with (
        patched("torch.distributed", {"new_subgroups": new_subgroups}),
        patched(_FSDP_UTILS, {"_init_intra_and_inter_node_groups": intra_and_inter_node_groups}),
    ):
        yield


# torch's device constructors have no public names and no types.
_torch: Any = torch

_NAMES = (torch.device, str, int)

_LIKE = ("empty", "full", "ones", "rand", "randint", "randn", "zeros")

_NEW = ("empty", "empty_strided", "full", "ones", "tensor", "zeros")


class DeviceRemap:
    """Map devices that name another GPU of the node to GPU 0 of this host.

    Args:
        present: number of GPUs of this host.
        ranks: number of GPUs of a node of the job.
    """

    def __init__(self, present: int, ranks: int) -> None:
        self._present, self._ranks = present, ranks

    def __call__(self, device: Any) -> Any:
        """Return a device in the form it was given: torch.device, string or index."""
        if isinstance(device, torch.device):
            absent = self._is_absent(device.index) and device.type == "cuda"
            return torch.device("cuda", 0) if absent else device
        if isinstance(device, str):
            name, _, index = device.partition(":")
            absent = name == "cuda" and index.isdecimal() and self._is_absent(int(index))
            return "cuda:0" if absent else device
        return 0 if self._is_absent(device) else device

    def _is_absent(self, index: Any) -> bool:
        """Return whether an index names a GPU of the job's node that this host lacks."""
        # An index beyond the node's GPUs stays, so that torch reports the script's mistake.
        return isinstance(index, int) and 0 < self._present <= index < self._ranks


@contextlib.contextmanager
def remap_devices(remap: DeviceRemap) -> Generator[None]:
    """Apply `remap` to the device of every factory function, `Tensor.to` and `Tensor.cuda`."""
    # Under a default device torch compares the called function with these by identity.
    factories = _torch.utils._device._device_constructors()
    names = [
        name
        for name, function in [*vars(torch).items()]
        if any(function is factory for factory in factories)
    ]
    with contextlib.ExitStack() as undo:

        def patch(owner: str, name: str, position: int | None = None) -> None:
            remapped = _remapped(getattr(resolve(owner), name), remap, position)
            undo.enter_context(patched(owner, {name: remapped}))

        for name in (*names, *(f"{stem}_like" for stem in _LIKE)):
            patch("torch", name)
        for stem in _NEW:
            patch("torch.Tensor", f"new_{stem}")
        patch("torch.Tensor", "to", 1)
        patch("torch.Tensor", "cuda", 1)
        patch("torch.utils._device.DeviceContext", "__init__", 1)  # `with device:` creates one
        patch("torch.accelerator.device_index", "__init__", 1)
        patch(_FSDP_UTILS, "_get_device_from_device_id", 0)
        yield


def _remapped(
    function: Callable[..., Any], remap: DeviceRemap, position: int | None
) -> Callable[..., Any]:
    """Wrap a function: remap its `device` keyword and its positional argument `position`."""

    @functools.wraps(function)
    def wrapped(*args: Any, **named: Any) -> Any:
        if position is not None and len(args) > position:
            device = args[position]
            if isinstance(device, _NAMES) and (present := remap(device)) is not device:
                args = (*args[:position], present, *args[position + 1 :])
        if "device" in named:
            named["device"] = remap(named["device"])
        return function(*args, **named)

    builtin = _torch.jit._builtins._find_builtin(function)
    # Unless the wrapper is registered, torch.jit.script would compile it.
    if builtin is not None:
        _torch.jit._builtins._register_builtin(wrapped, builtin)
    return wrapped


# torch queries each device that it counts; onerank measures the GPUs of this host.
_SEES_PRESENT_GPUS = ("torch", "onerank")

# They refuse a count of a subclass of int, and derive the device from LOCAL_RANK.
_TAKES_PLAIN_COUNT = ("lightning", "lightning_fabric", "pytorch_lightning")


class NodeGpuCount(int):
    """The number of GPUs of the job's node, for scripts that derive a device from it.

    `rank % count` is 0, as LOCAL_RANK is: this host runs the rank on its GPU 0.
    """

    def __rmod__(self, _: int) -> int:
        """Return the index of a rank's GPU, always 0."""
        return 0

    def __rdivmod__(self, rank: int) -> tuple[int, int]:
        """Return a rank's node and the index of its GPU, always 0."""
        return rank // int(self), 0


@contextlib.contextmanager
def report_node_gpus(ranks: int, local_rank: int = 0) -> Generator[None]:
    """Report one GPU per rank of the node to the script, each of them mapped to GPU 0.

    On a host without a GPU the count stays 0.

    Args:
        ranks: ranks of a node.
        local_rank: index of this rank on its node. Factory functions are wrapped only if this host
            lacks the GPU of that index.
    """
    present = torch.cuda.device_count

    def counting(original: Callable[[], int]) -> Callable[[], int]:
        def device_count() -> int:
            # Keep no frame in a local variable: the reference cycle would keep the callers'
            # tensors alive until the garbage collector runs.
            caller = str(sys._getframe(1).f_globals.get("__name__", ""))
            package = caller.partition(".")[0]
            count = original()
            if count == 0 or package in _SEES_PRESENT_GPUS:
                return count
            return ranks if package in _TAKES_PLAIN_COUNT else NodeGpuCount(ranks)

        return device_count

    def remapping(device_index: Callable[..., int]) -> Callable[..., int]:
        def remapped_index(*args: Any, **named: Any) -> int:
            index = device_index(*args, **named)
            return 0 if 0 < index < ranks and 0 < present() <= index else index

        return remapped_index

    installed: list[Callable[..., int]] = []
    gpu_absent = 0 < present() <= local_rank
    with (
        patched("torch.cuda", {"device_count": counting(present)}),
        patched("torch.accelerator", {"device_count": counting(torch.accelerator.device_count)}),
        remap_devices(DeviceRemap(present(), ranks)) if gpu_absent else contextlib.nullcontext(),
        contextlib.ExitStack() as undo,
    ):
        # Without a GPU the replacements would change nothing, and each searches all modules.
        indexed = ("torch._utils", "torch.cuda._utils", "torch.accelerator._utils")
        for owner in indexed if present() > 0 else ():
            device_index = getattr(resolve(owner), _INDEX)
            # torch may export one function under several names, which `rebound` replaces at once.
            if device_index not in installed:
                installed.append(remapping(device_index))
                undo.enter_context(rebound(owner, {_INDEX: installed[-1]}))
        yield

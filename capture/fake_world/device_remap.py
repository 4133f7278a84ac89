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
from torch.distributed import fsdp
from torch.distributed.fsdp import _init_utils

from onerank.capture.patches import patched, rebound, resolve
from onerank.ir.errors import CaptureError

MOST_RANKS = 8

_INDEX = "_get_device_index"

_FSDP_UTILS = "torch.distributed.fsdp._init_utils"

_fsdp: Any = _init_utils  # it has no public names and no types


def ranks_per_node(size: int, asked: int | None) -> int:
    """Return how many ranks of a world of `size` share a node.

    Without `asked` as many as can be, up to 8, so that all nodes have as many.

    Raises:
        CaptureError: nodes of so many do not make up the world.
    """
    if asked is None:
        return max(n for n in range(1, min(size, MOST_RANKS) + 1) if size % n == 0)
    if size % asked:
        raise CaptureError(
            f"--nproc-per-node {asked}: the world has {size} ranks, which are no whole number of "
            "such nodes",
            code="nodes-indivisible",
        )
    return asked


@contextlib.contextmanager
def nodes_of(ranks: int) -> Generator[None]:
    """Let groups that torch makes of the ranks of a node have so many."""
    groups, hybrid = dist.new_subgroups, _fsdp._init_intra_and_inter_node_groups

    def new_subgroups(group_size: int | None = None, *args: Any, **named: Any) -> Any:
        return groups(ranks if group_size is None else group_size, *args, **named)

    def of_nodes(group: dist.ProcessGroup, _: int) -> Any:
        return hybrid(group, ranks)

    with (
        patched("torch.distributed", {"new_subgroups": new_subgroups}),
        patched(_FSDP_UTILS, {"_init_intra_and_inter_node_groups": of_nodes}),
    ):
        yield


_torch: Any = torch  # nothing else that is used here has types or a public name

_fsdp_device_remap: Any = fsdp

_NAMES = (torch.device, str, int)

_LIKE = ("empty", "full", "ones", "rand", "randint", "randn", "zeros")

_NEW = ("empty", "empty_strided", "full", "ones", "tensor", "zeros")


class DeviceRemap:
    """Names the GPU that is here where another of the node is asked for.

    Args:
        there: how many GPUs are here.
        ranks: how many the node has.
    """

    def __init__(self, there: int, ranks: int) -> None:
        self._there, self._ranks = there, ranks

    def __call__(self, asked: Any) -> Any:
        """Map a device in any form that torch takes to the present GPU; keep other values."""
        if isinstance(asked, torch.device):
            other = self._elsewhere(asked.index) and asked.type == "cuda"
            return torch.device("cuda", 0) if other else asked
        if isinstance(asked, str):
            name, _, index = asked.partition(":")
            other = name == "cuda" and index.isdecimal() and self._elsewhere(int(index))
            return "cuda:0" if other else asked
        return 0 if self._elsewhere(asked) else asked

    def _elsewhere(self, index: Any) -> bool:
        return isinstance(index, int) and 0 < self._there <= index < self._ranks


@contextlib.contextmanager
def devices_here(here: DeviceRemap) -> Generator[None]:
    """Let tensors and modules that name another GPU be created on, or moved to, the present one."""
    # torch compares what is called under a default device with these: with those it has itself
    makers = _torch.utils._device._device_constructors()
    names = [name for name, one in [*vars(torch).items()] if any(one is own for own in makers)]
    with contextlib.ExitStack() as undo:

        def place(owner: str, name: str, position: int | None = None) -> None:
            by = _placed(getattr(resolve(owner), name), here, position)
            undo.enter_context(patched(owner, {name: by}))

        for name in (*names, *(f"{made}_like" for made in _LIKE)):
            place("torch", name)
        for made in _NEW:
            place("torch.Tensor", f"new_{made}")
        place("torch.Tensor", "to", 1)
        place("torch.Tensor", "cuda", 1)
        place("torch.utils._device.DeviceContext", "__init__", 1)  # what `with device:` makes
        place("torch.accelerator.device_index", "__init__", 1)
        place(_FSDP_UTILS, "_get_device_from_device_id", 0)
        yield


def _placed(
    function: Callable[..., Any], here: DeviceRemap, position: int | None
) -> Callable[..., Any]:
    """Return a function that takes its device, by name or at a position, from `here`."""

    @functools.wraps(function)
    def placed(*args: Any, **named: Any) -> Any:
        if position is not None and len(args) > position:
            asked = args[position]
            if isinstance(asked, _NAMES) and (found := here(asked)) is not asked:
                args = (*args[:position], found, *args[position + 1 :])
        if "device" in named:
            named["device"] = here(named["device"])
        return function(*args, **named)

    builtin = _torch.jit._builtins._find_builtin(function)
    if builtin is not None:  # torch.jit.script would compile this one
        _torch.jit._builtins._register_builtin(placed, builtin)
    return placed


_COUNT_THOSE_THERE = ("torch", "onerank")


class GpusOfANode(int):
    """How many GPUs a node of the job has.

    `rank % gpus` is which of them a rank has: 0, as LOCAL_RANK is, as there is one GPU here.
    """

    def __rmod__(self, _: int) -> int:
        """Return the place of a rank's GPU."""
        return 0

    def __rdivmod__(self, rank: int) -> tuple[int, int]:
        """Return a rank's node, and the place of its GPU there."""
        return rank // int(self), 0


@contextlib.contextmanager
def gpus_of_a_node(ranks: int, own: int = 0) -> Generator[None]:
    """Let a script that has a GPU find as many as its node has ranks, all of them the one here.

    Args:
        ranks: of a node.
        own: this one's place among them; a script may take the GPU of that number.
    """
    there = torch.cuda.device_count

    def counted(original: Callable[[], int]) -> Callable[[], int]:
        def device_count() -> int:
            # the caller's frame, and in no variable: one that held its own would keep all that
            # the callers hold, tensors too, until the garbage collector runs
            caller = str(sys._getframe(1).f_globals.get("__name__", ""))  # pyright: ignore
            found = original()
            if found == 0 or caller.partition(".")[0] in _COUNT_THOSE_THERE:
                return found
            return GpusOfANode(ranks)

        return device_count

    def in_place(index: Callable[..., int]) -> Callable[..., int]:
        def index_here(*args: Any, **named: Any) -> int:
            asked = index(*args, **named)
            return 0 if 0 < asked < ranks and 0 < there() <= asked else asked

        return index_here

    placed: list[Callable[..., int]] = []
    elsewhere = 0 < there() <= own
    with (
        patched("torch.cuda", {"device_count": counted(there)}),
        patched("torch.accelerator", {"device_count": counted(torch.accelerator.device_count)}),
        devices_here(DeviceRemap(there(), ranks)) if elsewhere else contextlib.nullcontext(),
        contextlib.ExitStack() as undo,
    ):
        for owner in ("torch._utils", "torch.cuda._utils", "torch.accelerator._utils"):
            index = getattr(resolve(owner), _INDEX)
            if index not in placed:  # torch has one function under several names
                placed.append(in_place(index))
                undo.enter_context(rebound(owner, {_INDEX: placed[-1]}))
        yield

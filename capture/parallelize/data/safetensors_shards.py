"""What a script saves of shards through safetensors, which knows plain tensors alone.

Each rank writes its own shards, as `torch.save` does: what the others hold is not there to be
gathered.
"""

import contextlib
import functools
from collections.abc import Callable, Generator, Mapping
from typing import Any

import safetensors.torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from onerank.capture.patches import rebind


@contextlib.contextmanager
def saving_own_shards() -> Generator[None]:
    """Let safetensors save this rank's shards, whoever has imported its functions."""
    original = (safetensors.torch.save_file, safetensors.torch.save)
    ours = tuple(_of_own(function) for function in original)
    rebind(original, ours)
    try:
        yield
    finally:
        rebind(ours, original)


def _of_own(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def save_own(tensors: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        return save({name: _own(tensor) for name, tensor in tensors.items()}, *args, **kwargs)

    return save_own


def _own(tensor: Tensor) -> Tensor:
    return tensor.to_local().contiguous() if isinstance(tensor, DTensor) else tensor

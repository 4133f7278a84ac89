"""Whether a script's numbers stayed finite: how long kernels take depends on what they compute.

Beside absent ranks a script trains on other gradients than its job, and may diverge where that
would not.
"""

from typing import Any

import torch
from torch import Tensor, nn

from onerank.capture.windows.scopes import Modules

_torch: Any = torch  # foreach functions have no public names
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@torch.no_grad()
def note_of_overflow(modules: Modules) -> str:
    """Return what to tell of parameters that are not finite, "" where all are."""
    known = {id(one): one for module, _ in modules for one in module.parameters(recurse=False)}
    shards: list[Any] = [getattr(one, "_local_tensor", one) for one in known.values()]
    held = [shard for shard in shards if _is_held(shard)]
    largest = _torch._foreach_norm(held, ord=float("inf")) if held else []
    infinite = sum(not bool(one.isfinite()) for one in largest)
    if not infinite:
        return ""
    return (
        f"{infinite} of {len(held)} parameters are not finite behind the last step: kernels need "
        "not take as long on such numbers as on the job's. Unless the real job's are neither (its "
        "weights as it makes them, its learning rate), it is that beside absent ranks a script "
        "trains on other gradients: capture with a smaller learning rate"
    )


def _is_held(shard: Any) -> bool:
    """Whether a parameter's numbers are here, in a type that has infinity."""
    plain = type(shard) in (Tensor, nn.Parameter) and shard.dtype in _DTYPES
    return (
        plain and not shard.is_meta and shard.numel() > 0 and shard.untyped_storage().nbytes() > 0
    )

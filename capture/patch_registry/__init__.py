"""The registry of patches: every symbol of torch and other libraries that a capture replaces.

`PATCHES` says for each symbol why it is replaced, and which modules do so in which order. Where
several modules patch one symbol, a later one in `by` wraps an earlier one. `patches.py` installs
the replacements, and refuses a symbol or a module that is not listed here.

Operators of the dispatcher are not listed: `fake_world.c10d_patches.override` registers kernels for
all `c10d` operators with torch.library, torch's own interface for that. Nor are `step` methods of
optimizer classes that a script defines: `patches.replaced` finds these classes at run time.
"""

from onerank.capture.patch_registry.absent_ranks import ABSENT_RANKS
from onerank.capture.patch_registry.compiler import COMPILER
from onerank.capture.patch_registry.no_device import DEEP_GEMM, NO_DEVICE
from onerank.capture.patch_registry.patch import Patch
from onerank.capture.patch_registry.script import SCRIPT

__all__ = ["DEEP_GEMM", "INSTALLED_ELSEWHERE", "PATCHES", "Patch"]

# An entry without names is for all other names of its owner, so it follows the entries with names.
PATCHES: tuple[Patch, ...] = (*NO_DEVICE, *COMPILER, *SCRIPT, *ABSENT_RANKS)

INSTALLED_ELSEWHERE: tuple[Patch, ...] = (
    Patch(
        "torch.nn.functional",
        ("cross_entropy",),
        "The loss of a sharded head. Forward hooks of the model set and undo it: torch.compile "
        "traces their assignments, but not a context manager. Verification runs a rank per thread "
        "and swaps the attribute whenever another thread continues.",
        ("parallelize.tensor.lm_head", "verify.threaded_world"),
    ),
    Patch(
        "torch.nn",
        ("CrossEntropyLoss",),
        "As cross_entropy, while torch.compile traces: it recognises the class by identity and "
        "calls torch's own function for it.",
        ("parallelize.tensor.lm_head",),
    ),
    Patch(
        "torch.distributed._shard.sharded_tensor.api",
        ("_SHARDED_OPS",),
        "The device of a ShardedTensor without a local shard. torch looks it up in this table by "
        "function, so the entry is replaced and no attribute.",
        ("checkpoints.distributed_checkpoint",),
    ),
)
"""Replacements that `patched` cannot install; `why` gives the reason."""

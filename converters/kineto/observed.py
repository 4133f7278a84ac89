"""What the recorded operators tell of the modules that called them."""

import msgspec
import numpy as np

from onerank.converters.kineto.host import HostTimeline
from onerank.ir import Job, Phase

_ATTENTION = ("scaled_dot_product", "flash_attn", "flash_attention", "flex_attention")


def with_attention(job: Job, timeline: HostTimeline) -> Job:
    """Give the role of attention to what was taken for an mlp and itself calls attention."""
    attends = timeline.named(
        lambda name: name.rsplit("::", 1)[-1].lstrip("_").startswith(_ATTENTION)
    )
    chosen = attends & timeline.rows.is_operator & (timeline.phase == Phase.FORWARD)
    callers = set(timeline.strings.decode(np.unique(timeline.module[chosen])))
    scopes = {
        module.scope or module.path
        for module in job.modules
        if module.role == "mlp" and module.path in callers
    }
    if not scopes:
        return job
    modules = tuple(
        msgspec.structs.replace(module, role="attention")
        if module.role == "mlp" and (module.scope or module.path) in scopes
        else module
        for module in job.modules
    )
    return msgspec.structs.replace(job, modules=modules)

"""What the recorded operators tell of the modules that called them."""

import msgspec

from onerank.converters.kineto.host import HostTimeline
from onerank.ir import Job, Phase

_ATTENTION = ("scaled_dot_product", "flash_attn", "flash_attention", "flex_attention")


def with_attention(job: Job, timeline: HostTimeline) -> Job:
    """Give the role of attention to what was taken for an mlp and itself calls attention."""
    callers = {
        op.module
        for op in timeline
        if op.is_operator
        and op.phase is Phase.FORWARD
        and op.name.rsplit("::", 1)[-1].lstrip("_").startswith(_ATTENTION)
    }
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

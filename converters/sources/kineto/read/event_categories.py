"""Categories of Kineto events that conversion reads, in today's and torch 1.8's names."""

from typing import Any

import msgspec

from onerank.converters.sources.kineto.read.schema import Event
from onerank.converters.sources.kineto.read.trace_columns import GPU_CATEGORIES

_BACKENDS = ("cuda", "hip", "xpu", "mtia", "privateuse1")

OPERATOR = "cpu_op"
LAUNCHES = frozenset(
    {f"{name}_{level}" for name in _BACKENDS for level in ("runtime", "driver")} | {"Runtime"}
)
SYNC = "cuda_sync"
MEMORY_EVENT = "[memory]"
GPU = {name: place for place, name in enumerate(GPU_CATEGORIES)} | {
    "Kernel": 0, "Memcpy": 1, "Memset": 2,
}  # fmt: skip
"""Category -> place in GPU_CATEGORIES."""

_FIRST_OPERATOR = "Operator"  # annotations as well
_ANNOTATIONS = ("ProfilerStep#", "Optimizer.", "enumerate(DataLoader)")
HOST = frozenset({OPERATOR, "user_annotation", _FIRST_OPERATOR})

READ = HOST | LAUNCHES | GPU.keys() | {SYNC}
KNOWN = READ | {
    "", "Trace", "python_function", "gpu_user_annotation", "overhead", "cpu_instant_event",
    "cuda_profiler_range",
}  # fmt: skip
"""Those that are read, and those that hold nothing that a graph needs."""


class _Told(msgspec.Struct, omit_defaults=True):
    """What an event says it is, whatever it says that with."""

    ph: Any = ""
    cat: Any = ""
    name: Any = ""


def unread(event: bytes) -> bytes | None:
    """Return what is to be counted of an event that is not read, as JSON; None of one that is."""
    try:
        told = msgspec.json.decode(event, type=_Told)
    except msgspec.ValidationError:
        return None
    if str(told.cat) in READ or told.name == MEMORY_EVENT:
        return None
    return msgspec.json.encode(_Told(ph=str(told.ph), cat=str(told.cat)))


def is_operator(event: Event) -> bool:
    """Return whether an event of the host is an operator, not an annotation."""
    if event.cat == _FIRST_OPERATOR:
        return not event.name.startswith(_ANNOTATIONS)
    return event.cat == OPERATOR

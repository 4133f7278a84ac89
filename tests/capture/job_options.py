"""Options of a capture from a world and from the name of a data-parallel strategy."""

from typing import Any

from onerank.ir import World

_STRATEGIES = {
    "ddp": {"ddp": True},
    "fsdp": {"fsdp": True},
    "zero1": {"zero": 1},
    "zero2": {"zero": 2},
    None: {},
}


def axes(world: World) -> dict[str, int]:
    return {**world.sizes, "ep": world.ep}


def strategy(name: str | None) -> dict[str, Any]:
    return _STRATEGIES[name]

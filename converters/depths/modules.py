"""The table of modules and their times between events, at the model's own depth."""

import statistics
from collections.abc import Iterable
from collections.abc import Set as AbstractSet

import msgspec

from onerank.converters.depths.growth import Stretch
from onerank.converters.depths.plan import Plan, Renaming
from onerank.ir import Module, ScopeTime


def module_table(captured: Iterable[Module], names: Renaming) -> tuple[Module, ...]:
    """Return the modules of all layers, in the order of the layers."""
    before: list[Module] = []
    layers: dict[int, list[Module]] = {}
    after: list[Module] = []
    for module in captured:
        layer = names.layer(module.path)
        if layer is None:
            (after if layers else before).append(module)
            continue
        for _, number in names.instances(layer):
            moved = {part: names.moved(getattr(module, part), number)
                     for part in ("path", "layer", "scope")}  # fmt: skip
            layers.setdefault(number, []).append(msgspec.structs.replace(module, **moved))
    inside = [module for number in sorted(layers) for module in layers[number]]
    return (*before, *inside, *after)


def scope_times(
    shallow: Iterable[ScopeTime],
    deep: Iterable[ScopeTime],
    *,
    whole: AbstractSet[str],
    names: Renaming,
    plan: Plan,
    stretch: Stretch,
) -> tuple[ScopeTime, ...]:
    """Return the times of all layers' modules, layer by layer.

    A copy has the median of the captured layers that do the same, and no samples. The scopes
    `whole`, which hold the layers or work on all of them, are on the line through both captures.
    All else is as captured.
    """
    of = {(time.path, time.phase): time for time in deep}
    few = {(time.path, time.phase): time.duration_ns for time in shallow}
    made: list[tuple[int, ScopeTime]] = []
    for (path, phase), time in of.items():
        layer = names.layer(path)
        if layer is None:
            on_line = path in whole and (path, phase) in few
            made.append((-1, _on_line(few[path, phase], time, stretch) if on_line else time))
            continue
        for copy, number in names.instances(layer):
            moved = msgspec.structs.replace(time, path=names.moved(path, number))
            if copy:
                like = [of.get((names.moved(path, at), phase)) for at in plan.like(layer)]
                median = statistics.median(one.duration_ns for one in like if one is not None)
                moved = _not_measured(moved, round(median))
            made.append((number, moved))
    return tuple(time for _, time in sorted(made, key=lambda one: one[0]))


def holding(modules: Iterable[Module], layers: str) -> set[str]:
    """Return the paths of the modules that hold the layers, the model itself among them."""
    return {m.path for m in modules if layers.startswith(f"{m.path}.") or m.path == m.type}


def _on_line(few_ns: int, time: ScopeTime, stretch: Stretch) -> ScopeTime:
    return _not_measured(time, stretch.number(few_ns, time.duration_ns))


def _not_measured(time: ScopeTime, duration_ns: int) -> ScopeTime:
    return msgspec.structs.replace(time, duration_ns=duration_ns, spread_ns=0, samples=0)

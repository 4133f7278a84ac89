"""The layer or sub-module that each node belongs to."""

from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
import numpy.typing as npt

from onerank.ir.enums import Kind, Phase
from onerank.ir.errors import GraphError
from onerank.ir.graph import Graph
from onerank.ir.job.job import Module

I64 = npt.NDArray[np.int64]
Grain = Literal["layer", "submodule"]
GRAINS: tuple[Grain, ...] = ("layer", "submodule")

_NO_ROLE = ("layer", "other")


@dataclass(frozen=True, slots=True)
class Scope:
    """A layer or a sub-module; what lies outside of any goes by its role.

    Attributes:
        path: qualified name of the module; "" where the scope is no module.
        role: role of the sub-module (see `Module`), "loss", "optimizer" or "other"; at the grain
            of layers "layer" for all that lies in one.
    """

    path: str
    role: str


@dataclass(frozen=True, slots=True)
class Scoping:
    """The scope of each node.

    Attributes:
        scopes: in the order in which the nodes name them first.
        of: position of each node's scope, int64[n].
    """

    scopes: list[Scope]
    of: I64


def scopes_of(graph: Graph, grain: Grain) -> Scoping:
    """Return the scope of every node.

    A node belongs to the layer and the sub-module that `Job.modules` gives for its module. The
    optimizer's phase is the optimizer. What belongs to no sub-module and no layer is the loss
    where it comes after the head in forward, or before all of the model in backward; else other.

    Raises:
        GraphError: the graph does not tell of its modules.
    """
    if not graph.job.modules:
        raise GraphError(
            "the trace holds no table of the model's modules, so their layers and roles are not "
            "known: capture the script again, or leave the grain out"
        )
    table = {module.path: module for module in graph.job.modules}
    unknown = Module(path="")
    codes, place = np.unique(graph.nodes.module, return_inverse=True)
    modules: list[Module] = [table.get(graph.strings[code], unknown) for code in codes.tolist()]
    optimizer = graph.nodes.phase == Phase.OPTIMIZER
    loss = _loss(graph, np.array([module.role for module in modules])[place])
    found: dict[Scope, int] = {}
    of: list[int] = []
    for code, is_optimizer, is_loss in zip(
        cast("list[int]", place.tolist()), optimizer.tolist(), loss.tolist(), strict=True
    ):
        scope = _scope(modules[code], grain, is_optimizer=is_optimizer, is_loss=is_loss)
        of.append(found.setdefault(scope, len(found)))
    return Scoping(list(found), np.array(of, dtype=np.int64))


def _scope(module: Module, grain: Grain, is_optimizer: bool, is_loss: bool) -> Scope:
    if is_optimizer:
        return Scope("", "optimizer")
    if module.layer and (grain == "layer" or module.role == "layer"):
        return Scope(module.layer, "layer")
    if module.role not in _NO_ROLE:
        return Scope(module.scope or module.path, module.role)
    return Scope("", "loss") if is_loss else Scope(module.layer, "other")


def _loss(graph: Graph, roles: npt.NDArray[np.str_]) -> npt.NDArray[np.bool_]:
    """Return which nodes run after the head in forward, or before the model in backward.

    Host operators run ahead of the GPU, so they are told apart by their own times.
    """
    nodes = graph.nodes
    found = np.zeros(len(graph), dtype=bool)
    in_model = ~np.isin(roles, ["other", "loss"])
    host = graph.mask(Kind.HOST_OP)
    for sort in (host, ~host):
        for number in np.unique(nodes.micro_batch[sort]).tolist():
            mine = sort & (nodes.micro_batch == number)
            forward = mine & (nodes.phase == Phase.FORWARD)
            head = forward & (roles == "head")
            if not head.any():
                continue
            last = nodes.start_ns[forward & in_model].max()
            found |= forward & ~in_model & (nodes.start_ns >= last)
            backward = mine & (nodes.phase == Phase.BACKWARD)
            first = nodes.start_ns[backward & in_model].min(initial=np.iinfo(np.int64).max)
            found |= backward & ~in_model & (nodes.start_ns < first)
    return found

"""What a script's own sends and receives are for, as its second step shows.

A pipeline written by hand sends and receives between the calls of its model. Whether that is an
activation or a gradient, and of which micro-batch, a backward tells: an activation that was sent is
in its graph, and one that was received a leaf of that; gradients that were received begin it, and
those to be sent are what it leaves. By then the call is issued: so what the second step shows is
told of every later one, as far as it exchanges alike.
"""

import contextlib
from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from onerank.capture.fake_world.p2p_autograd import Backwards, Key, Purpose
from onerank.capture.patches import replaced
from onerank.capture.script.step_hooks import in_backward, is_traced

_SECOND = 1


class Exchanges:
    """The sends and receives of a script, by their place among those of a step."""

    def __init__(self) -> None:
        self._steps = 0
        self._place = 0
        self._known: list[tuple[Key, Purpose | None]] = []
        self._backwards: Backwards | None = None

    def next_step(self) -> None:
        """Take note that the script has taken a step."""
        if self._backwards is not None:
            self._known, self._backwards = self._backwards.told(), None
        self._steps += 1
        self._place = 0
        if self._steps == _SECOND:
            self._backwards = Backwards()

    def of(self, key: Key, tensors: Sequence[Tensor]) -> Purpose | None:
        """Return what a call is for that is issued now; None where that is not known."""
        if self._backwards is not None:
            self._backwards.add(key, tensors[0], within=in_backward())
        if self._place >= len(self._known):
            return None
        alike, purpose = self._known[self._place]
        self._place = self._place + 1 if alike == key else len(self._known)
        return purpose if alike == key else None

    @contextlib.contextmanager
    def watched(self) -> Generator[None]:
        """See each backward that no other one calls while the context lasts."""
        autograd: Any = torch.autograd
        run = autograd._engine_run_backward

        def watched(outputs: Sequence[Any], gradients: Sequence[Any], *args: Any, **kw: Any) -> Any:
            backwards = None if in_backward() or is_traced() else self._backwards
            begun = None if backwards is None else backwards.begin(outputs, gradients)
            results = run(outputs, gradients, *args, **kw)
            if backwards is not None and begun is not None:
                backwards.end(begun, results)
            return results

        with replaced(autograd, "_engine_run_backward", watched):
            yield

"""Sum the gradients of replicated parameters over --tp once a step, as Megatron-LM does.

One flat all-reduce behind the last backward of a round of micro-batches. Which one that is, is
known from the steps before (`rounds`). Until then, and behind a backward that was not expected,
each gradient is summed as it comes. So it is where nobody reads them behind a backward:
torch.autograd.grad, and optimizers that step within it; and where gradients live on from step to
step, since a sum of them would count again what was summed before.
"""

import contextlib
import functools
from collections.abc import Generator, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from onerank.capture.parallelize.data.grad_accumulation import Rounds, cleared
from onerank.capture.parallelize.data.grad_scaler import scaled_steps
from onerank.capture.parallelize.data.optimizer_state import followed_by
from onerank.capture.parallelize.tensor.replicated_grads import partial_gradients, sum_put_off
from onerank.capture.patches import patched
from onerank.capture.script.step_hooks import after_backward, in_backward


class _Model:
    """A slice, its rounds, and whether the backward to come is the last of one.

    Attributes:
        steps_within: whether an optimizer was seen to step within backward.
        never_clears: whether a step was seen to add to the gradients of the one before.
    """

    def __init__(self, model: nn.Module) -> None:
        self.steps_within = False
        self.never_clears = False
        self._partials = partial_gradients(model)
        self._rounds = Rounds()
        self._last = self._known = self._adds = False

    def begin_forward(self) -> None:
        """Put the sums of the backward to come off, if it is known which one is the last."""
        self._known = self._rounds.knows_next
        self.put_off(self._known and not self.steps_within and not self.never_clears)
        self._last = self._rounds.begin_micro_batch()

    def put_off(self, wanted: bool) -> bool:
        """Set whether sums are put off; return whether they were."""
        before = any(partial.put_off for _, partial in self._partials)
        for _, partial in self._partials:
            partial.put_off = wanted
        return before

    def begin_backward(self) -> None:
        """See, while the rounds are not known, whether a step's first one finds gradients."""
        if not self._known and not self._adds:
            self.never_clears = not all(map(cleared, self._parameters()))
        self._adds = True

    def end_backward(self) -> None:
        """Sum what was put off, behind the last backward."""
        self._rounds.end_backward(self._parameters())
        if self._last:
            self._sum()

    def end_step(self) -> None:
        """Sum what is left by a step with fewer micro-batches than were expected."""
        self._sum()
        self._rounds.end_step()
        self._adds = False

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (p for module, partial in self._partials for p in partial.of(module))

    def _sum(self) -> None:
        if any(partial.pending for _, partial in self._partials):
            sum_put_off(self._partials)
            self.put_off(False)  # another backward of the same forward


class DeferredGradSync:
    """Puts the sums of slices' gradients off to the end of a round of micro-batches.

    Args:
        slices: what was sliced, by model; it may grow.
    """

    def __init__(self, slices: Mapping[nn.Module, Any]) -> None:
        self._slices = slices
        self._models: WeakKeyDictionary[nn.Module, _Model] = WeakKeyDictionary()
        self._asked = False  # whether torch.autograd.grad runs

    @contextlib.contextmanager
    def installed(self) -> Generator[None]:
        """Watch forwards, backwards and steps while the context lasts."""
        with contextlib.ExitStack() as undo:
            undo.callback(register_module_forward_pre_hook(self._before_forward).remove)
            undo.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            undo.enter_context(scaled_steps(self._end_step, lambda _: None))
            undo.enter_context(after_backward(self._end_backward))
            engine = torch.autograd._engine_run_backward  # pyright: ignore
            undo.enter_context(
                patched("torch.autograd", {"_engine_run_backward": self._summing_asked(engine)})
            )
            yield

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        model = getattr(module, "_orig_mod", module)  # what torch.compile wraps
        if model in self._slices:
            if model not in self._models:
                self._models[model] = _Model(model)
            self._models[model].begin_forward()

    def _summing_asked(self, engine: Any) -> Any:
        @functools.wraps(engine)
        def run_backward(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("accumulate_grad", True):
                if not in_backward():
                    for one in self._models.values():
                        one.begin_backward()
                return engine(*args, **kwargs)
            before = {one: one.put_off(False) for one in self._models.values()}
            self._asked = True
            try:
                return engine(*args, **kwargs)  # torch.autograd.grad's: the caller has the result
            finally:
                self._asked = False
                for one, was in before.items():
                    one.put_off(was)

        return run_backward

    def _end_backward(self) -> None:
        if self._asked:
            return
        for one in self._models.values():
            one.end_backward()

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if in_backward():
            for one in self._models.values():
                one.steps_within = True
        given, named, closure = followed_by(lambda: self._end_step(optimizer), args, kwargs)
        if not closure:
            self._end_step(optimizer)
        return given, named

    def _end_step(self, _: Optimizer) -> None:
        for one in self._models.values():
            one.end_step()

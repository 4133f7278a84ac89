"""Which backward passes communicate under gradient accumulation, for --dp and for --tp.

The micro-batches of a round add to the same gradients, and only the last backward of a round
communicates. A round ends with the step, or where the script clears the gradients before the step:
sharpness-aware minimisation has two rounds per step (arXiv:2010.01412). The last micro-batch of a
round is the last forward that a backward followed; a forward that only evaluates the model may
record gradients, but no backward follows. If two successive steps have the same rounds, the next
step is expected to have them too. Until then every backward communicates, which gives the same sum.

Gradients of replicated parameters are summed over --tp once per step, as in Megatron-LM: one flat
all-reduce after the last backward of a round. In these cases each gradient is summed on its own,
during the backward:

- until the rounds are known, and after a backward that was not expected;
- under torch.autograd.grad, and for optimizers that step within the backward, because both use
  gradients before the backward ends;
- if gradients persist between steps, because a flat sum would count earlier sums again.
"""

import contextlib
import functools
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from onerank.capture.fake_tensors import is_zero
from onerank.capture.parallelize.data.optimizers import scaled_steps, with_closure_hook
from onerank.capture.parallelize.model_structure import uncompiled
from onerank.capture.parallelize.tensor.replicated_grads import partial_gradients, reduce_deferred
from onerank.capture.patches import patched
from onerank.capture.script.optimizer_steps import after_backward, in_backward
from onerank.ir.errors import CaptureError


class AccumulationRounds:
    """The micro-batches of a model in the current step, and the pattern of previous steps.

    Args:
        micro_batches: micro-batches of each step after the first, which then make one round; the
            last number is that of all further steps. Empty: the first two steps show the rounds.
    """

    def __init__(self, micro_batches: Sequence[int] = ()) -> None:
        self._later = deque(micro_batches)
        self._ends: list[bool] = []  # whether each forward is the last micro-batch of its round
        self._newest = -1  # index of the last forward that a backward followed
        self._last: list[bool] = []
        self._expected: list[bool] = []
        self._filled: list[nn.Parameter] = []

    @property
    def knows_next(self) -> bool:
        """Whether previous steps had at least one micro-batch more than this step so far."""
        return len(self._ends) < len(self._expected)

    @property
    def within_step(self) -> bool:
        """Whether a micro-batch began since the last step."""
        return bool(self._ends)

    def begin_micro_batch(self) -> bool:
        """Begin a forward; return whether its backward communicates."""
        # Gradients cleared since the last backward show that it ended a round within the step.
        if self._ends and self._filled and all(map(cleared, self._filled)):
            self._ends[self._newest] = True
            self._filled = []
        self._ends.append(False)
        number = len(self._ends) - 1
        return number >= len(self._expected) or self._expected[number]

    def end_backward(self, parameters: Iterable[nn.Parameter]) -> None:
        """Record a backward and, until the rounds are known, the parameters with gradients."""
        self._newest = len(self._ends) - 1
        if not self._expected:
            self._filled = [parameter for parameter in parameters if parameter.grad is not None]

    def refuse_fewer(self) -> None:
        """Refuse a step that ends before the backward that should communicate.

        Raises:
            CaptureError: the step has fewer micro-batches than previous steps.
        """
        count, known = len(self._ends), len(self._expected)
        if 0 < count < known:
            raise CaptureError(
                f"a step of {count} micro-batches followed steps of {known}: only "
                "the last backward of a step communicates, and previous steps predict which it is\n"
                "  give every step the same number of micro-batches",
                code="dp-varying-micro-batches",
            )

    def end_step(self) -> None:
        """Record the rounds of a step, to predict the next step's."""
        if not self._ends:
            return
        count, known = len(self._ends), len(self._expected)
        self._ends[self._newest] = True
        if self._later:
            following = self._later.popleft() if len(self._later) > 1 else self._later[0]
            self._expected = [False] * (following - 1) + [True]
        elif count != known:
            # Two equal steps in succession: a first step may differ, for example by a warm-up.
            self._expected = self._ends if self._ends == self._last else []
            self._last = [] if known else self._ends
        self._ends, self._newest, self._filled = [], -1, []


def cleared(parameter: nn.Parameter) -> bool:
    """Return whether a parameter's gradient is None or zero on this rank."""
    if parameter.grad is None:
        return True
    local = getattr(parameter.grad, "to_local", None)
    gradient: Tensor = parameter.grad if local is None else local()
    return is_zero(gradient)


class _Model:
    """A sliced model, its rounds, and whether the next backward ends a round.

    Attributes:
        steps_within: whether an optimizer stepped during a backward.
        never_clears: whether a step added to the gradients of the previous step.
    """

    def __init__(self, model: nn.Module, micro_batches: Sequence[int]) -> None:
        self.steps_within = False
        self.never_clears = False
        self._partials = partial_gradients(model)
        self._rounds = AccumulationRounds(micro_batches)
        self._last = self._known = self._adds = False

    def begin_forward(self) -> None:
        """Defer the sums of the next backward if the last one of the round is known."""
        self._known = self._rounds.knows_next
        self.defer(self._known and not self.steps_within and not self.never_clears)
        self._last = self._rounds.begin_micro_batch()

    def defer(self, wanted: bool) -> bool:
        """Set whether sums are deferred; return the previous setting."""
        before = any(partial.deferred for _, partial in self._partials)
        for _, partial in self._partials:
            partial.deferred = wanted
        return before

    def begin_backward(self) -> None:
        """Until the rounds are known, check whether a step's first backward finds gradients."""
        if not self._known and not self._adds:
            self.never_clears = not all(map(cleared, self._parameters()))
        self._adds = True

    def end_backward(self) -> None:
        """Sum the deferred gradients after the last backward."""
        self._rounds.end_backward(self._parameters())
        if self._last:
            self._sum()

    def end_step(self) -> None:
        """Sum gradients that a step with fewer micro-batches than expected left deferred."""
        self._sum()
        self._rounds.end_step()
        self._adds = False

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (p for module, partial in self._partials for p in partial.of(module))

    def _sum(self) -> None:
        if any(partial.pending for _, partial in self._partials):
            reduce_deferred(self._partials)
            # A second backward of the same forward sums immediately.
            self.defer(False)


class DeferredGradSync:
    """Defers the sums of replicated gradients to the end of a round of micro-batches.

    Args:
        slices: sliced model -> summary; may grow.
        micro_batches: as for `AccumulationRounds`.
    """

    def __init__(self, slices: Mapping[nn.Module, Any], micro_batches: Sequence[int] = ()) -> None:
        self._slices = slices
        self._micro_batches = micro_batches
        self._models: WeakKeyDictionary[nn.Module, _Model] = WeakKeyDictionary()
        self._in_grad = False  # whether torch.autograd.grad is running

    @contextlib.contextmanager
    def installed(self) -> Generator[None]:
        """Hook forwards, backwards and steps for the duration of the context."""
        with contextlib.ExitStack() as undo:
            undo.callback(register_module_forward_pre_hook(self._before_forward).remove)
            undo.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            undo.enter_context(scaled_steps(self._end_step, lambda _: None))
            undo.enter_context(after_backward(self._end_backward))
            engine = torch.autograd._engine_run_backward
            undo.enter_context(
                patched(
                    "torch.autograd", {"_engine_run_backward": self._sum_at_once_in_grad(engine)}
                )
            )
            yield

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        model = uncompiled(module)
        if model in self._slices:
            if model not in self._models:
                self._models[model] = _Model(model, self._micro_batches)
            self._models[model].begin_forward()

    def _sum_at_once_in_grad(self, engine: Any) -> Any:
        @functools.wraps(engine)
        def run_backward(*args: Any, **kwargs: Any) -> Any:
            # False for torch.autograd.grad, which leaves `.grad` alone.
            if kwargs.get("accumulate_grad", True):
                if not in_backward():
                    for model in self._models.values():
                        model.begin_backward()
                return engine(*args, **kwargs)
            before = {model: model.defer(False) for model in self._models.values()}
            self._in_grad = True
            try:
                # torch.autograd.grad returns gradients to the caller, so they must be summed now.
                return engine(*args, **kwargs)
            finally:
                self._in_grad = False
                for model, deferred in before.items():
                    model.defer(deferred)

        return run_backward

    def _end_backward(self) -> None:
        # `torch.autograd.grad` accumulates nothing, so its end is that of no micro-batch.
        if self._in_grad:
            return
        for model in self._models.values():
            model.end_backward()

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if in_backward():
            for model in self._models.values():
                model.steps_within = True
        new_args, new_kwargs, has_closure = with_closure_hook(
            lambda: self._end_step(optimizer), args, kwargs
        )
        if not has_closure:
            self._end_step(optimizer)
        return new_args, new_kwargs

    def _end_step(self, _: Optimizer) -> None:
        for model in self._models.values():
            model.end_step()

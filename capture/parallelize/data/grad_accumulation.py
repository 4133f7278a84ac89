"""Which backward passes communicate under gradient accumulation, for --dp and for --tp.

Micro-batches of a round add to the same gradients; only the last backward of a round communicates.
A round ends with the step, or where the script clears gradients to compute new ones before it
steps: sharpness-aware minimisation takes two rounds per step (arXiv:2010.01412). The last
micro-batch of a round is the last forward that a backward followed; evaluations that record
gradients have no backward. If two successive steps have the same rounds, the next step is assumed
to have them too. Until then every backward communicates, which gives the same sum.

Gradients of replicated parameters are summed over --tp once per step, as in Megatron-LM: one flat
all-reduce after the last backward of a round. Each gradient is summed by itself until the rounds
are known, after an unexpected backward, where nothing reads gradients after a backward
(torch.autograd.grad, optimizers that step within it), and where gradients persist between steps,
since a flat sum would count earlier sums again.
"""

import contextlib
import functools
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from onerank.capture.parallelize.data.optimizers import scaled_steps, with_closure_hook
from onerank.capture.parallelize.tensor.replicated_grads import partial_gradients, reduce_deferred
from onerank.capture.patches import patched
from onerank.capture.script.step_hooks import after_backward, in_backward
from onerank.ir.errors import CaptureError


class AccumulationRounds:
    """The micro-batches of a model since its last step, and in the steps before."""

    def __init__(self) -> None:
        self._ends: list[bool] = []  # whether each forward is the last micro-batch of its round
        self._newest = -1  # the last of them that a backward followed
        self._last: list[bool] = []
        self._expected: list[bool] = []
        self._filled: list[nn.Parameter] = []

    @property
    def knows_next(self) -> bool:
        """Whether the steps before had as many micro-batches as this one with the next."""
        return len(self._ends) < len(self._expected)

    @property
    def within_step(self) -> bool:
        """Whether a micro-batch began since the last step."""
        return bool(self._ends)

    def begin_micro_batch(self) -> bool:
        """Return whether the backward of the forward that begins communicates."""
        if self._ends and self._filled and all(map(cleared, self._filled)):
            self._ends[self._newest] = True
            self._filled = []
        self._ends.append(False)
        number = len(self._ends) - 1
        return number >= len(self._expected) or self._expected[number]

    def end_backward(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take note of a backward; see what has gradients, while the rounds are not known."""
        self._newest = len(self._ends) - 1
        if not self._expected:
            self._filled = [one for one in parameters if one.grad is not None]

    def refuse_fewer(self) -> None:
        """Raise where a step ends before the backward that was to communicate.

        Raises:
            CaptureError: it has fewer micro-batches than the steps before.
        """
        taken, known = len(self._ends), len(self._expected)
        if 0 < taken < known:
            raise CaptureError(
                f"a step of {taken} micro-batches followed steps of {known}: gradients are "
                "communicated in a step's last backward, which is known from the steps before. "
                "Let every step take as many micro-batches",
                code="dp-varying-micro-batches",
            )

    def end_step(self) -> None:
        """Learn from a step which rounds the next will have."""
        if not self._ends:
            return
        taken, known = len(self._ends), len(self._expected)
        self._ends[self._newest] = True
        if taken != known:
            self._expected = self._ends if self._ends == self._last else []
            self._last = [] if known else self._ends
        self._ends, self._newest, self._filled = [], -1, []


def cleared(parameter: nn.Parameter) -> bool:
    """Whether a parameter's gradient is gone, or zero in every element of this rank."""
    if parameter.grad is None:
        return True
    local = getattr(parameter.grad, "to_local", None)
    gradient: Tensor = parameter.grad if local is None else local()
    return not gradient.any()


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
        self._rounds = AccumulationRounds()
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
            reduce_deferred(self._partials)
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
        given, named, closure = with_closure_hook(lambda: self._end_step(optimizer), args, kwargs)
        if not closure:
            self._end_step(optimizer)
        return given, named

    def _end_step(self, _: Optimizer) -> None:
        for one in self._models.values():
            one.end_step()

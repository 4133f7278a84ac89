"""A step of an inference engine, computed by a Hugging Face model.

The engines put the new tokens of all sequences into one row, so linear layers see one matrix of
tokens. Attention runs for the prefills and for the decodes of a step, each against its KV cache.
Logits are computed for the last token of each sequence. A model of transformers does the same
through the function that transformers looks up for its attention (`step_attention`) and the object
that it passes as its KV cache (`step_cache`).
"""

import contextlib
import inspect
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from onerank.capture.serving import latent_attention, sequence_states, sparse_attention
from onerank.capture.serving.build_model import first_lines, own_attention_error
from onerank.capture.serving.compositions import Composition
from onerank.capture.serving.step_cache import StepCache, running_step
from onerank.ir.errors import CaptureError, OneRankError


@dataclass(frozen=True)
class RepeatableStep:
    """One step of the engine, which can be repeated.

    Attributes:
        model: the model.
        cache: its KV cache, which is allocated by the first call.
        arguments: arguments of the model.
    """

    model: Any
    cache: StepCache
    arguments: dict[str, Any]

    @classmethod
    def of(
        cls,
        model: Any,
        composition: Composition,
        vocabulary: int,
        device: str,
        *,
        has_head: bool = True,
    ) -> "RepeatableStep":
        """Return the step of a composition, with random tokens.

        Args:
            model: the model.
            composition: sequences of the step.
            vocabulary: number of tokens to draw from.
            device: the model's device.
            has_head: whether the model computes logits; other pipeline stages send all tokens.
        """
        c = composition
        tokens = torch.randint(0, vocabulary, (1, c.new_tokens), device=device)
        chunk = torch.arange(c.prefill_tokens, device=device) + c.prefill_context
        decodes = torch.full((c.decodes,), c.decode_context, device=device)
        positions = torch.cat([chunk.repeat(c.prefills), decodes]).unsqueeze(0)
        ends = torch.arange(1, c.prefills + 1, device=device) * c.prefill_tokens - 1
        first = c.prefills * c.prefill_tokens
        last = torch.cat([ends, torch.arange(first, c.new_tokens, device=device)])
        cache = StepCache(composition)
        # Engines take the logits of the last token of each sequence; of decodes alone, of all.
        keep: dict[str, Any] = {"logits_to_keep": last} if c.prefills and has_head else {}
        # transformers 5.24 renamed the argument, and warns of the old name in each call. Models
        # without attention have the third name.
        named = inspect.signature(model.forward).parameters
        name = next(
            (name for name in ("cache", "past_key_values", "cache_params") if name in named),
            "past_key_values",
        )
        arguments: dict[str, Any] = {"input_ids": tokens, "position_ids": positions}
        arguments[name] = cache
        if sparse_attention.attended_tokens(model) is not None:
            # Layers index their mask, which the indexer and the attention of a step do not read.
            arguments["attention_mask"] = torch.zeros(1, 1, 1, 1, device=device)
        return cls(model, cache, {**arguments, "use_cache": True, **keep})

    def __call__(self) -> None:
        """Compute the step."""
        with torch.no_grad(), running(self.cache), self.cache.states.running():
            self.model(**self.arguments)


@contextlib.contextmanager
def running(cache: StepCache) -> Generator[None]:
    """Let a model read and write the cache of a step."""
    running_step.cache = cache
    try:
        yield
    finally:
        running_step.cache = None


def give_attention_scopes(step: RepeatableStep) -> None:
    """Run a step once and add the modules of attention to the modules that call it.

    Latent attention then passes its vectors to them, as engines cache them. Layers with states get
    theirs.

    Raises:
        CaptureError: the model has layers that neither use transformers' attention interface nor
            call its functions of states, or does not run.
    """
    model = step.model
    latent_attention.keep_latents(model)
    sequence_states.keep_states(model)
    sparse_attention.keep_indices(model)
    running_step.callers = callers = []
    try:
        step()
    except OneRankError:  # a refusal keeps its own code
        raise
    except Exception as error:
        # A model with another kind of cache fails before its attention, with any exception, or asks
        # for what this cache lacks, as the indexer of MiniMax-M3 does.
        other_cache = isinstance(getattr(error, "obj", None), StepCache)
        if other_cache or (not callers and not step.cache.states.tensors):
            raise own_attention_error(type(model).__name__, error) from error
        raise CaptureError(
            f"{type(model).__name__} does not run a step of an engine: {type(error).__name__}: "
            f"{first_lines(error)}",
            code="serve-step-failed",
        ) from error
    finally:
        running_step.callers = None
    if not callers and not step.cache.states.tensors:
        raise own_attention_error(type(model).__name__)


# Types of layers that cache nothing.
_WITHOUT_CACHE = {"mlp", "moe"}


def check_layer_types(step: RepeatableStep) -> None:
    """Refuse a model of which a type of layers has neither attended nor updated a state.

    Such layers keep their states in their modules, for the batch of the last call of the model.

    Args:
        step: a step that has run, of a model with all its layers.
    """
    types: Sequence[str] = getattr(step.model.config.get_text_config(), "layer_types", None) or ()
    tensors = (*step.cache.tensors, *step.cache.states.tensors)
    cached = {types[layer] for layer, *_ in tensors if layer < len(types)}
    left = {*types} - cached - _WITHOUT_CACHE
    if left:
        raise sequence_states.unsupported(
            f"the states of its layers of {', '.join(sorted(left))} in their modules"
        )

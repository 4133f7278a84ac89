"""Build Hugging Face models with fewer layers than their configuration says.

A model reads its depth from its configuration, so the configuration is changed when construction
begins; the omitted layers never exist. Their pattern is read from the whole model on torch's meta
device, which holds shapes and no values.
"""

import contextlib
import functools
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onerank.capture.parallelize.hugging_face import MODELING, PretrainedConfig
from onerank.capture.patches import after_import, patched
from onerank.converters.expand.layers import Pattern, check_depths
from onerank.ir.errors import DepthError, first_line

_SEEN = "_onerank_depth"

_SCALAR = (bool, int, float, str, type(None))

Fingerprint = dict[str, object]
"""Properties that distinguish layers: submodules, parameter shapes, plain attributes."""


@dataclass(frozen=True)
class Depth:
    """How many layers to build, and which depths the whole capture covers.

    Attributes:
        layers: layers to build.
        captured: all depths of the capture, ascending.
    """

    layers: int
    captured: tuple[int, ...]


@dataclass(frozen=True)
class Layers:
    """The layers of a model as its script configured it.

    Attributes:
        depth: how many there are.
        pattern: how they repeat.
    """

    depth: int
    pattern: Pattern


class FewerLayers:
    """Builds every Hugging Face model of a script with `depth.layers` layers; None keeps all.

    Attributes:
        layers: the layers that the script configured; None until a model is built.
    """

    def __init__(self, depth: Depth | None) -> None:
        self.layers: Layers | None = None
        self._depth = depth
        self._model = ""
        self._probing = False
        self._failure: DepthError | None = None

    @contextlib.contextmanager
    def installed(self) -> Generator[None]:
        """Patch the construction of models for the duration of the context."""
        depth = self._depth
        if depth is None:
            yield
            return
        try:
            with after_import(MODELING, lambda: self._patched(depth)):
                yield
        finally:
            if self._failure is not None:  # the script may have caught it where it was raised
                raise self._failure

    @contextlib.contextmanager
    def _patched(self, depth: Depth) -> Generator[None]:
        from transformers.modeling_utils import PreTrainedModel

        original = PreTrainedModel.__init__

        @functools.wraps(original)  # transformers reads the signature
        def built(model: PreTrainedModel, config: Any, *args: Any, **kwargs: Any) -> None:
            if not self._probing and isinstance(config, PretrainedConfig):
                try:
                    self._shrink(depth, type(model).__name__, config)
                except DepthError as error:
                    self._failure = error
                    raise
            original(model, config, *args, **kwargs)

        with patched(f"{MODELING}.PreTrainedModel", {"__init__": built}):
            yield

    def check_built(self, script: Path) -> None:
        """Check that there was a model to build with fewer layers.

        Raises:
            DepthError: the script built none.
        """
        if self._depth is not None and self.layers is None:
            raise DepthError(
                f"{script}: the script ran a step without building a Hugging Face model; "
                "--capture-layers supports transformers.PreTrainedModel only\n"
                "  configure fewer layers in the script, or leave --capture-layers out",
                code="layers-no-model",
            )

    def _shrink(self, requested: Depth, model: str, config: PretrainedConfig) -> None:
        if hasattr(config, _SEEN):
            return
        text: Any = config.get_text_config()
        if config.is_encoder_decoder:
            raise DepthError(
                f"{model} has an encoder and a decoder, each with its own list of layers; "
                "--capture-layers supports models with one list of layers: leave it out",
                code="layers-encoder-decoder",
            )
        depth = getattr(text, "num_hidden_layers", None)
        if not isinstance(depth, int):
            raise DepthError(
                f"{model}: its configuration, {type(text).__name__}, has no num_hidden_layers, so "
                "--capture-layers cannot determine how many layers it has: leave it out",
                code="layers-no-config-key",
            )
        if self.layers is not None and self.layers.depth != depth:
            raise DepthError(
                f"the script builds {self._model} of {self.layers.depth} layers and {model} of "
                f"{depth}: --capture-layers supports one depth: leave it out",
                code="layers-two-depths",
            )
        if self.layers is None:
            self.layers, self._model = self._whole_layers(requested, model, text, depth), model
        _configure(config, text, depth, requested.layers)

    def _whole_layers(self, requested: Depth, model: str, text: Any, depth: int) -> Layers:
        """Return the whole model's layers after checking that the captured depths suffice."""
        captured = ",".join(map(str, requested.captured))
        deepest = requested.captured[-1]
        if deepest > depth:
            raise DepthError(
                f"--capture-layers {captured}: {model} has {depth} layers, fewer than the "
                f"requested {deepest}\n  give depths up to {depth}",
                code="layers-too-deep",
            )
        kinds = self._fingerprints(model, text, depth)
        pattern = Pattern.of([repr(kind) for kind in kinds])
        if deepest < depth and pattern.deepest > depth:
            raise DepthError(
                f"--capture-layers {captured}: the {depth} layers of {model} do not repeat: "
                f"{_layer_differences(kinds)}\n  capture it whole: leave --capture-layers out",
                code="layers-not-repeating",
            )
        check_depths(list(requested.captured), depth, pattern)
        return Layers(depth, pattern)

    def _fingerprints(self, model: str, text: Any, depth: int) -> list[Fingerprint]:
        from transformers.models.auto.modeling_auto import AutoModel

        self._probing = True
        try:
            with torch.device("meta"):
                whole: nn.Module = AutoModel.from_config(text)
        except ValueError as error:
            raise DepthError(
                f"{model}: transformers' AutoModel does not know {type(text).__name__}, so "
                "--capture-layers cannot determine which of its layers are equal "
                f"({first_line(error)}). Leave it out",
                code="layers-unknown-config",
            ) from error
        finally:
            self._probing = False
        lists = [m for m in whole.modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
        if not lists:
            raise DepthError(
                f"{model}: found no nn.ModuleList of {depth} modules (num_hidden_layers of its "
                "configuration), so --capture-layers cannot identify its layers: leave it out",
                code="layers-no-list",
            )
        largest = max(lists, key=lambda layers: sum(p.numel() for p in layers.parameters()))
        return _without_indices([_fingerprint(layer) for layer in largest])


def _configure(config: Any, text: Any, depth: int, layers: int) -> None:
    """Set the number of layers; cut what the configuration lists per layer."""
    for name, value in list(vars(text).items()):
        per_layer = isinstance(value, list | tuple) and len(value) == depth
        if per_layer and ("layer" in name or "block" in name):
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    parts = (getattr(config, name, None) for name in config.sub_configs)
    for part in (config, text, *parts):  # an inner model gets one of these configurations
        if part is not None:
            setattr(part, _SEEN, depth)


def _fingerprint(layer: nn.Module) -> Fingerprint:
    properties: Fingerprint = {}
    for name, module in layer.named_modules():
        properties[name or "layer"] = type(module).__name__
        for key, value in vars(module).items():
            if isinstance(value, _SCALAR) and not key.startswith("_"):
                properties[f"{name}.{key}".lstrip(".")] = value
    properties.update((name, tuple(p.shape)) for name, p in layer.named_parameters())
    return properties


def _without_indices(layers: list[Fingerprint]) -> list[Fingerprint]:
    """Drop attributes that only count the layers (`layer_idx`)."""
    counts = {
        key
        for key, value in layers[0].items()
        if type(value) is int
        and all(layer.get(key) == at + value for at, layer in enumerate(layers))
    }
    return [{key: value for key, value in layer.items() if key not in counts} for layer in layers]


def _layer_differences(kinds: list[Fingerprint]) -> str:
    """Describe which layers differ from the previous layer, and in which property."""
    differences: list[str] = []
    for layer in range(1, len(kinds)):
        before, after = kinds[layer - 1], kinds[layer]
        keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
        if keys:
            differences.append(
                f"layer {layer} differs from layer {layer - 1} in {keys[0]} "
                f"({after.get(keys[0])} against {before.get(keys[0])})"
            )
    more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
    return "; ".join(differences[:3]) + more

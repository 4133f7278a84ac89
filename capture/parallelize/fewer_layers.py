"""Build Hugging Face models, or pipeline stages of them, with fewer layers than configured.

A whole model reads its depth from its configuration, so the configuration is changed when
construction begins; the omitted layers never exist.

A pipeline stage needs its own layers: what a layer is can depend on its index in the whole model
(`first_k_dense_replace`, `mlp_only_layers`). The configuration therefore stays, and the layers that
the stage does not run are built on torch's meta device, which holds shapes and no values. The
slicer drops them with the layers of the other stages (`pipeline.stage.stage_model`).

How the layers repeat is read from the whole model on the meta device.
"""

import contextlib
import functools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onerank.capture.parallelize.hugging_face import MODELING, PretrainedConfig
from onerank.capture.parallelize.model_structure import split_layers
from onerank.capture.patches import after_import, patched, replaced
from onerank.converters.expand.layers import Pattern, check_depths
from onerank.ir import World
from onerank.ir.errors import DepthError, OneRankError, first_line

_SEEN = "_onerank_depth"

_SCALAR = (bool, int, float, str, type(None))

Fingerprint = dict[str, object]
"""Properties that distinguish layers: submodules, parameter shapes, plain attributes."""


@dataclass(frozen=True)
class Depth:
    """How many layers to build, and which depths the whole capture covers.

    Attributes:
        layers: layers to build; under pipeline parallelism, of the stage.
        captured: all depths of the capture, ascending.
        any_depth: whether the capture stands for stages of any depth. If all layers are equal, the
            model then has the deepest captured depth in each stage, which is quicker to build.
    """

    layers: int
    captured: tuple[int, ...]
    any_depth: bool = False


@dataclass(frozen=True)
class Layers:
    """The layers of a model, or of its pipeline stage, as the script configured them.

    Attributes:
        depth: number of layers.
        pattern: how they repeat.
    """

    depth: int
    pattern: Pattern


@dataclass(frozen=True)
class StageLayers:
    """Which pipeline stage of a model is captured.

    Attributes:
        stage: index of the stage.
        stages: number of stages.
        requested: layers of each stage; () splits them evenly.
    """

    stage: int
    stages: int
    requested: tuple[int, ...]

    @classmethod
    def of(cls, world: World, rank: int, requested: tuple[int, ...]) -> "StageLayers | None":
        """Return the stage of a rank; None in a world without a pipeline axis."""
        if "pp" not in world.sizes:
            return None
        return cls(world.point(rank)["pp"], world.sizes["pp"], requested)

    def of_model(self, depth: int) -> range:
        """Return the layers of the stage in a model of `depth` layers."""
        counts = split_layers(depth, self.stages, self.requested)
        first = sum(counts[: self.stage])
        return range(first, first + counts[self.stage])


class FewerLayers:
    """Builds every Hugging Face model of a script with `depth.layers` layers; None keeps all.

    Args:
        depth: layers to build.
        stage: the pipeline stage whose layers are counted; None counts those of the model.

    Attributes:
        layers: the layers that the script configured; None until a model is built.
    """

    def __init__(self, depth: Depth | None, stage: StageLayers | None = None) -> None:
        self.layers: Layers | None = None
        self._depth = depth
        self._stage = stage
        self._model = ""
        self._model_depth = 0
        self._probing = False
        self._failure: OneRankError | None = None
        self._undo = contextlib.ExitStack()
        self._built: range = range(0)  # layers that get memory, of a model with a pipeline stage
        self._constructed = 0  # layers of the current model so far
        self._inside_layer = False

    @contextlib.contextmanager
    def installed(self) -> Generator[None]:
        """Patch the construction of models for the duration of the context."""
        depth = self._depth
        if depth is None:
            yield
            return
        try:
            with self._undo, after_import(MODELING, lambda: self._patched(depth)):
                yield
        finally:
            # The script may have caught it where it was raised.
            if self._failure is not None:
                raise self._failure

    @contextlib.contextmanager
    def _patched(self, depth: Depth) -> Generator[None]:
        from transformers.modeling_utils import PreTrainedModel

        original = PreTrainedModel.__init__

        @functools.wraps(original)  # transformers reads the signature
        def built(model: PreTrainedModel, config: Any, *args: Any, **kwargs: Any) -> None:
            if not self._probing and isinstance(config, PretrainedConfig):
                # A model's layers follow its base class's __init__.
                self._constructed = 0
                try:
                    self._shrink(depth, type(model).__name__, config)
                except OneRankError as error:
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
        # An inner model is built from the configuration of the outer one, which is cut already.
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
        if self.layers is not None and self._model_depth != depth:
            raise DepthError(
                f"the script builds {self._model} of {self._model_depth} layers and {model} of "
                f"{depth}: --capture-layers supports one depth: leave it out",
                code="layers-two-depths",
            )
        built = depth
        if self.layers is None:
            self.layers, kinds = self._whole_layers(requested, model, text, depth)
            self._model, self._model_depth = model, depth
            if requested.any_depth and self.layers.pattern == Pattern(0, 1):
                built = requested.captured[-1] * (self._stage.stages if self._stage else 1)
                _configure(config, text, depth, built)
            if self._stage is not None:
                self._build_on_meta(requested, kinds, built)
        if self._stage is None:
            _configure(config, text, built, requested.layers)

    def _whole_layers(
        self, requested: Depth, model: str, text: Any, depth: int
    ) -> tuple[Layers, set[type[nn.Module]]]:
        """Return the configured layers and the classes of their modules.

        Raises:
            DepthError: the captured depths do not suffice.
        """
        captured = ",".join(map(str, requested.captured))
        deepest = requested.captured[-1]
        members = range(depth) if self._stage is None else self._stage.of_model(depth)
        if self._stage is not None:
            model = f"stage {self._stage.stage} of {model}"
        if deepest > len(members):
            raise DepthError(
                f"--capture-layers {captured}: {model} has {len(members)} layers, fewer than the "
                f"requested {deepest}\n  give depths up to {len(members)}",
                code="layers-too-deep",
            )
        layers = self._meta_layers(model, text, depth)
        kinds = _without_indices([_fingerprint(layer) for layer in layers])
        kinds = kinds[members.start : members.stop]
        pattern = Pattern.of([repr(kind) for kind in kinds])
        if deepest < len(members) and pattern.deepest > len(members):
            raise DepthError(
                f"--capture-layers {captured}: the {len(members)} layers of {model} do not "
                f"repeat: {_layer_differences(kinds, members.start)}\n"
                "  capture it whole: leave --capture-layers out",
                code="layers-not-repeating",
            )
        check_depths(list(requested.captured), len(members), pattern, model)
        return Layers(len(members), pattern), {type(layer) for layer in layers}

    def _build_on_meta(self, requested: Depth, kinds: set[type[nn.Module]], depth: int) -> None:
        """Build the layers outside the requested ones of the stage on the meta device.

        Args:
            requested: the layers to build.
            kinds: classes of the layers.
            depth: layers of the model.
        """
        assert self._stage is not None
        self._built = self._stage.of_model(depth)[: requested.layers]
        for kind in kinds:
            self._undo.enter_context(
                replaced(kind, "__init__", self._layer_init(kind.__init__, depth))
            )

    def _layer_init(self, original: Callable[..., None], depth: int) -> Callable[..., None]:
        """Return a layer's `__init__` that builds layers outside the stage on the meta device."""

        @functools.wraps(original)
        def init(layer: nn.Module, *args: Any, **kwargs: Any) -> None:
            # The __init__ of a base class that is a layer itself is inside a layer too.
            if self._inside_layer or self._probing:
                original(layer, *args, **kwargs)
                return
            # A script may build several models of this depth in turn.
            number = self._constructed % depth
            self._constructed += 1
            self._inside_layer = True
            try:
                with contextlib.nullcontext() if number in self._built else torch.device("meta"):
                    original(layer, *args, **kwargs)
            finally:
                self._inside_layer = False

        return init

    def _meta_layers(self, model: str, text: Any, depth: int) -> Sequence[nn.Module]:
        """Return the layers of the whole model, built on the meta device."""
        from transformers.models.auto.modeling_auto import AutoModel

        # The probe builds the same classes; it must be neither cut nor counted.
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
        # Other lists can be as long by chance, such as one norm per layer.
        return [*max(lists, key=lambda layers: sum(p.numel() for p in layers.parameters()))]


def _configure(config: Any, text: Any, depth: int, layers: int) -> None:
    """Set the number of layers; cut what the configuration lists per layer."""
    for name, value in list(vars(text).items()):
        per_layer = isinstance(value, list | tuple) and len(value) == depth
        if per_layer and ("layer" in name or "block" in name):
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    parts = (getattr(config, name, None) for name in config.sub_configs)
    # An inner model gets one of these configurations.
    for part in (config, text, *parts):
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
        # Not isinstance: a boolean that is False, then True, would look like a count.
        if type(value) is int
        and all(layer.get(key) == at + value for at, layer in enumerate(layers))
    }
    return [{key: value for key, value in layer.items() if key not in counts} for layer in layers]


def _layer_differences(kinds: list[Fingerprint], first: int) -> str:
    """Describe which layers, counted from `first`, differ from the previous one, and in what."""
    differences: list[str] = []
    for layer in range(1, len(kinds)):
        before, after = kinds[layer - 1], kinds[layer]
        keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
        if keys:
            differences.append(
                f"layer {first + layer} differs from layer {first + layer - 1} in {keys[0]} "
                f"({after.get(keys[0])} against {before.get(keys[0])})"
            )
    more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
    return "; ".join(differences[:3]) + more

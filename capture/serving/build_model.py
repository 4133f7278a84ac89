"""Build the transformers model that `capture serve` runs, with random weights."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onerank.capture.serving.compositions import VOCABULARY_MULTIPLE
from onerank.capture.serving.routed_experts import route_tokens
from onerank.capture.serving.step_attention import ATTENTION, step_attention
from onerank.ir.errors import CaptureError, division


def read_config(path: Path) -> Any:
    """Return the configuration of a transformers model.

    Args:
        path: a `config.json`, or the directory with it.

    Raises:
        CaptureError: it is not a configuration of a causal language model that transformers knows,
            or its weights are quantised.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        # Not msgspec, which refuses the `Infinity` that Python writes, as in Nemotron 3's limits.
        record: Any = json.loads(file.read_bytes())
        kind = record["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = getattr(error, "strerror", None) or "is no JSON object with a model_type"
        raise CaptureError(
            f"{file}: {why}\n  expected the config.json of a transformers model",
            code="serve-no-config",
        ) from None
    config_class = _config_class(file, record)
    try:
        config: Any = config_class(**{k: v for k, v in record.items() if k != "model_type"})
    except Exception as error:
        # A configuration checks its values itself, with errors of many classes.
        raise CaptureError(
            f"{file}: transformers does not read this configuration of {kind!r}: "
            f"{first_lines(error)}",
            code="serve-model-unknown",
        ) from error
    if _auto_class(config) is None:
        raise CaptureError(
            f"{file}: transformers has no causal language model for {kind!r}",
            code="serve-model-unknown",
        )
    text = config.get_text_config()
    for name, what in (("num_hidden_layers", "layers"), ("vocab_size", "tokens")):
        if getattr(text, name) < 1:
            raise CaptureError(
                f"{file}: the model has no {what} ({name} is {getattr(text, name)})",
                code="serve-model-unknown",
            )
    _check_heads(file, text)
    if getattr(config, "quantization_config", None) is not None:
        raise CaptureError(
            f"{file}: quantised weights are not served\n  remove quantization_config to measure "
            "the model in the config's dtype",
            code="serve-quantised",
        )
    return config


def _config_class(file: Path, record: dict[str, Any]) -> Any:
    """Return the class of transformers for a configuration.

    Some published configurations name a type of their own and a class of transformers, as that of
    Kimi K2 names `kimi_k2` and DeepseekV3ForCausalLM. vLLM and SGLang read the class.
    """
    import transformers
    from transformers import CONFIG_MAPPING

    kind = str(record["model_type"])
    if kind in CONFIG_MAPPING:
        return CONFIG_MAPPING[kind]
    named = record.get("architectures")
    names = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    classes = (getattr(getattr(transformers, n, None), "config_class", None) for n in names)
    config_class = next(filter(None, classes), None)
    if config_class is None:
        raise CaptureError(
            f"{file}: transformers {transformers.__version__} knows neither the model_type "
            f"{kind!r} nor a class of its architectures ({', '.join(names) or 'none'})\n"
            "  build the model in a script, or install a version of transformers that has it",
            code="serve-model-unknown",
        )
    return config_class


def _auto_class(config: Any) -> Any:
    """Return the class of transformers that builds a causal language model; None if there is none.

    Most vision-language models are listed as models of images and text alone. Called with tokens,
    they compute their language model. Their vision tower is a part of the weights, as in engines.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    classes = (AutoModelForCausalLM, AutoModelForImageTextToText)
    return next((c for c in classes if type(config) in c._model_mapping), None)


def _check_heads(file: Path, config: Any) -> None:
    """Raise if key-value heads do not divide the attention heads; on shapes alone no kernel would.

    Some older models have lists, and latent attention does not read its number.
    """
    # transformers 5.23 refuses to read a size of the whole model that differs between layers, as
    # of Gemma 4's full and sliding attention.
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else (config,)
    names = ("num_attention_heads", "num_key_value_heads", "kv_lora_rank")
    for layer in layers:
        heads, kv_heads, latent = (getattr(layer, name, None) for name in names)
        if latent or not isinstance(heads, int) or not isinstance(kv_heads, int) or not kv_heads:
            continue
        if heads % kv_heads:
            raise CaptureError(
                f"{file}: {kv_heads} key-value heads do not divide {heads} attention heads "
                f"({division(heads, kv_heads)})",
                code="serve-model-unknown",
            )


def pad_vocabulary(config: Any) -> int | None:
    """Pad the vocabulary of a configuration as engines do; return its size if it changes.

    The embedding and the head have a row for each token. Logits of an odd number of tokens are not
    aligned: the head of Granite 3.3, 49,159 tokens, takes 0.5 ms for 32 sequences on an H100, over
    three times as long as reading its weights (2026-11-28-serving-blind-4-h100). Engines pad before
    they divide the rows among tensor-parallel ranks.
    """
    text = config.get_text_config()
    padded = -(-text.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    if padded == text.vocab_size:
        return None
    text.vocab_size = padded
    return padded


def build_model(config: Any, device: str, *, shapes_only: bool) -> Any:
    """Return a causal language model with random weights in the configuration's dtype.

    Its weights have no storage on `meta` yet unless they are fake, so that a model larger than the
    device can be sliced first; `materialise` gives it storage.

    Args:
        config: configuration of the model.
        device: where weights without a device are created.
        shapes_only: whether tensors are fake, which need no memory.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, step_attention)
    config.use_cache = True
    dtype = getattr(config, "dtype", None) or torch.bfloat16
    try:
        with torch.device(device if shapes_only else "meta"):
            model: Any = _auto_class(config).from_config(
                config, dtype=dtype, attn_implementation=ATTENTION
            )
    except Exception as error:
        # Older models have a table of attention classes.
        if isinstance(error, KeyError) and error.args == (ATTENTION,):
            raise own_attention_error(type(config).__name__) from error
        # Models check their configuration themselves, with errors of many classes.
        raise CaptureError(
            f"transformers does not build a model of this {type(config).__name__}: "
            f"{type(error).__name__}: {first_lines(error)}\n"
            "  check the sizes and lists of layers in the configuration",
            code="serve-model-unknown",
        ) from error
    route_tokens(model)
    return model.eval()


def first_lines(error: Exception) -> str:
    """Return the first line of an error, with the next one if the first only introduces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    introduces = bool(lines) and lines[0].endswith(":")
    return " ".join(lines[: 2 if introduces else 1])


def adopt_model(model: Any) -> Any:
    """Return a model that a script built, for inference with the attention of an engine's steps."""
    from transformers import AttentionInterface, PretrainedConfig

    AttentionInterface.register(ATTENTION, step_attention)
    # Not `set_attn_implementation`: a pipeline stage has two copies of the configuration.
    for module in model.modules():
        config = vars(module).get("config")
        if isinstance(config, PretrainedConfig):
            config._attn_implementation = ATTENTION
    return model.eval()


def materialise(model: Any, device: str) -> None:
    """Give a model on `meta` random weights on a device.

    Zeros would draw less power in a GPU's multipliers, and so raise its clocks.
    """
    tied: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            tied.setdefault(id(parameter), []).append((module, name))
    model.to_empty(device=device)
    # `to_empty` creates a parameter for each module that has one.
    for (first, own), *others in tied.values():
        for module, name in others:
            setattr(module, name, getattr(first, own))
    initialisers: dict[int, Any] = {}
    for owner in model.modules():
        if hasattr(owner, "_init_weights"):
            # The innermost model of transformers initialises a module, as in transformers.
            initialisers.update(dict.fromkeys(map(id, owner.modules()), owner))
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 1:
                parameter.data.normal_(0.0, 0.02)
            else:
                parameter.data.fill_(0.0 if name == "bias" else 1.0)
        buffers = list(module.buffers(recurse=False))
        for buffer in buffers:
            # `_init_weights` does not compute all of them, and uninitialised memory may be NaN.
            buffer.fill_(1)
        if buffers:
            # transformers computes the frequencies of rotary embeddings here.
            initialisers[id(module)]._init_weights(module)


def own_attention_error(name: str, error: Exception | None = None) -> CaptureError:
    """Return the error for a model without transformers' attention interface or caches.

    Args:
        name: class of the model or of its configuration.
        error: what the model raised.
    """
    cause = "" if error is None else f" ({type(error).__name__}: {first_lines(error)})"
    return CaptureError(
        f"{name} does not look up its attention in transformers' AttentionInterface, or needs "
        "another cache than one of keys and values, as an indexer and linear attention do, so its "
        f"cache cannot be composed of several sequences{cause}\n"
        "  serve another model, such as Llama",
        code="serve-own-attention",
    )

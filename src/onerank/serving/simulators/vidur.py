"""Export a bundle as profiles of Vidur, a simulator of inference clusters.

Vidur (github.com/microsoft/vidur) reads, for each GPU and model, `mlp.csv` (times of a layer's
operators by number of tokens) and `attention.csv` (by batch, chunk and KV cache), in milliseconds.
It trains a regression, which needs more rows than a bundle has points: the rows are interpolated.
Vidur counts no head and no embedding, and has its own network tables.
"""

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onerank.capture.serving.compositions import Composition
from onerank.ir.errors import ExportError
from onerank.ir.notes import Note
from onerank.ir.output_files import replace_files
from onerank.serving.bundle import Bundle
from onerank.serving.simulators.operator_times import (
    LAYER,
    Extent,
    OperatorTimes,
    ServedRank,
    cache_notes,
    growing,
    token_sizes,
)
from onerank.serving.simulators.options import VidurOptions

# Operator of Vidur -> ends of the paths of our modules, as regular expressions. Vidur's `add` is
# both residual additions of a layer, and its `mlp_act` includes the product with the gate.
_OPERATORS: Mapping[str, str] = {
    "input_layernorm": r"\.input_layernorm",
    "attn_pre_proj": r"\.self_attn\.(q_proj|k_proj|v_proj|qkv_proj)",
    "attn_rope": r"\.self_attn",
    "attn_post_proj": r"\.self_attn\.o_proj",
    "post_attention_layernorm": r"\.post_attention_layernorm",
    "mlp_up_proj": r"\.mlp\.(gate_proj|up_proj|gate_up_proj)",
    "mlp_act": r"\.mlp(\.act_fn)?",
    "mlp_down_proj": r"\.mlp\.down_proj",
    "add": "",
}

_ATTENTION: Mapping[str, str] = {
    "attn_prefill": r"\.self_attn\.step_attention\.prefill",
    "attn_decode": r"\.self_attn\.step_attention\.decode",
    "attn_kv_cache_save": r"\.self_attn\.step_attention\.(prefill|decode)\.cache_write",
}

_STATISTICS = ("min", "max", "mean", "median", "std")

# The GPUs of `vidur/config/device_sku_config.py`, by words in our names.
_DEVICES = ("h100", "a100", "a40")

_PREDICTOR = Path("vidur/execution_time_predictor/sklearn_execution_time_predictor.py")

_MODELS = Path("vidur/config/model_config.py")

# Vidur selects the rows of its scheduler's block size, which is 16 by default. KV caches of
# `capture serve` are contiguous, so their times are the same at any.
_BLOCK_SIZE = 16


@dataclass(frozen=True)
class VidurExport:
    """Profiles written for Vidur.

    Attributes:
        mlp: file of the operators.
        attention: file of attention.
        rows: rows of both.
        model: Vidur's name of the model.
        device: Vidur's name of the GPU.
        options: options of `python -m vidur.main` that use the files.
        notes: how far the simulator's KV cache is that of the model.
    """

    mlp: Path
    attention: Path
    rows: int
    model: str
    device: str
    options: tuple[str, ...]
    notes: tuple[Note, ...] = ()


def export_vidur(bundle: Bundle, options: VidurOptions) -> VidurExport:
    """Write the tables of a bundle for Vidur.

    Args:
        bundle: the bundle.
        options: the output gets `compute/DEVICE/MODEL/`.

    Raises:
        ExportError: the model has other operators, Vidur does not know the device, or the checkout
            reads another format.
        AnnotateError: the bundle has too few points.
    """
    model = options.model
    if options.checkout is not None:
        _check_version(options.checkout, model)
    # Vidur's tables have the operators of one layer, which any stage has.
    served = ServedRank.of(bundle, "Vidur", takes_stage=True)
    device = options.device or _device(bundle.manifest.device)
    extent = Extent.of(bundle, "Vidur")
    times = _Times.of(bundle, served.layers)
    config = _Shape.of(bundle, served)
    mlp = times.mlp_rows(config, token_sizes(extent.new_tokens))
    attention = times.attention_rows(config, extent)
    directory = options.output / "compute" / device / model
    files = directory / "mlp.csv", directory / "attention.csv"
    replace_files({files[0]: _csv(mlp), files[1]: _csv(attention)})
    # Absolute, because Vidur runs in its own checkout.
    prefix = "--random_forrest_execution_time_predictor_config_"
    run_options = (
        *("--replica_config_device", device, "--replica_config_model_name", model),
        *("--replica_config_tensor_parallel_size", str(served.tp)),
        *("--replica_config_num_pipeline_stages", str(served.stages)),
        *(f"{prefix}compute_input_file", str(files[0].absolute())),
        *(f"{prefix}attention_input_file", str(files[1].absolute())),
        # The rows of decodes are those of whole batches already.
        *(f"{prefix}attention_decode_batching_overhead_fraction", "0"),
        *(f"{prefix}prediction_max_batch_size", str(extent.decodes)),
    )
    return VidurExport(
        *files,
        len(mlp) + len(attention),
        model,
        device,
        run_options,
        notes=(
            *cache_notes(
                bundle,
                "Vidur computes the KV cache of a token from its own description of the model",
            ),
            *_stage_notes(bundle),
        ),
    )


def _stage_notes(bundle: Bundle) -> Iterator[Note]:
    """Yield a note on stages of unequal numbers of layers, which Vidur does not have."""
    pipeline = bundle.manifest.pipeline
    if pipeline is not None and len({*pipeline.layers}) > 1:
        yield Note(
            f"the stages have {', '.join(map(str, pipeline.layers))} layers; Vidur divides the "
            "layers of a model evenly, and refuses a number that the stages do not divide",
            code="vidur-uneven-stages",
        )


@dataclass(frozen=True)
class _Shape:
    """Columns by which Vidur selects the rows of a model."""

    heads: int
    kv_heads: int
    hidden: int
    mlp: int
    vocabulary: int
    gated: bool
    tp: int
    longest: int

    @classmethod
    def of(cls, bundle: Bundle, served: ServedRank) -> "_Shape":
        """Return the shape of a bundle's model.

        Raises:
            ExportError: the configuration does not have Llama's names.
        """
        config = bundle.manifest.config
        try:
            heads = int(config["num_attention_heads"])
            return cls(
                heads,
                int(config.get("num_key_value_heads", heads)),
                int(config["hidden_size"]),
                int(config["intermediate_size"]),
                int(config["vocab_size"]),
                any(path.endswith(("gate_proj", "gate_up_proj")) for path in bundle.modules),
                served.tp,
                served.longest,
            )  # fmt: skip
        except KeyError as error:
            raise _unsupported(bundle, f"its configuration has no {error.args[0]}") from error


@dataclass(frozen=True)
class _Times:
    """Times of Vidur's operators per layer, in ms by composition."""

    operators: OperatorTimes
    layers: int

    @classmethod
    def of(cls, bundle: Bundle, layers: int) -> "_Times":
        """Return the times of a bundle.

        Raises:
            ExportError: the model lacks the modules of an operator.
        """
        paths = bundle.modules
        modules = {
            name: [path for path in paths if re.fullmatch(LAYER + end, path)]
            for name, end in (*_OPERATORS.items(), *_ATTENTION.items())
        }
        times = OperatorTimes.of(
            bundle, modules, lambda name: _unsupported(bundle, f"it has no modules for {name}")
        )
        return cls(times, layers)

    def _ms(self, operator: str, composition: Composition) -> float:
        return self.operators.ns(operator, composition) / self.layers / 1e6

    def mlp_rows(self, shape: _Shape, tokens: Sequence[int]) -> list[dict[str, Any]]:
        """Return the rows of `mlp.csv`."""
        rows: list[dict[str, Any]] = []
        for count in tokens:
            composition = Composition(prefills=1, prefill_tokens=count)
            row: dict[str, Any] = {}
            for operator in _OPERATORS:
                row |= _statistics(operator, self._ms(operator, composition))
            rows.append(
                row
                | {
                    "n_head": shape.heads,
                    "n_kv_head": shape.kv_heads,
                    "n_embd": shape.hidden,
                    "n_expanded_embd": shape.mlp,
                    "vocab_size": shape.vocabulary,
                    "use_gated_mlp": shape.gated,
                    "num_tokens": count,
                    "num_tensor_parallel_workers": shape.tp,
                }
            )
        return rows

    def attention_rows(self, shape: _Shape, extent: Extent) -> list[dict[str, Any]]:
        """Return the rows of `attention.csv`: prefills, then decodes, at each context."""
        # Vidur rounds the tokens of a batch up to a multiple of 8, except for writes to the KV
        # cache, and the KV cache up to a multiple of 64. Its forest does not extrapolate, so the
        # contexts end where sequences do, also where those of the grid are shorter.
        prefills = [n for n in token_sizes(extent.new_tokens) if n >= 8]
        decodes = growing(1, extent.decodes, 1.4)
        rows: list[dict[str, Any]] = []
        for context in (0, *growing(64, max(64, extent.longest_context), 1.4)):
            steps = [(Composition(0, 0, 1, n, context), "attn_prefill") for n in prefills]
            if context:
                steps += [(Composition(batch, context), "attn_decode") for batch in decodes]
            rows += [
                self._attention_row(shape, composition, operator)
                for composition, operator in steps
                if extent.holds(composition)
            ]
        return rows

    def _attention_row(self, shape: _Shape, c: Composition, operator: str) -> dict[str, Any]:
        other = "attn_decode" if c.prefills else "attn_prefill"
        return {
            **_statistics(operator, self._ms(operator, c)),
            **dict.fromkeys(_statistics(other, 0.0), ""),
            **_statistics("attn_kv_cache_save", self._ms("attn_kv_cache_save", c)),
            "n_embd": shape.hidden,
            "n_q_head": shape.heads,
            "n_kv_head": shape.kv_heads,
            "block_size": _BLOCK_SIZE,
            "num_tensor_parallel_workers": shape.tp,
            "max_model_len": shape.longest,
            "batch_size": max(1, c.decodes),
            "prefill_chunk_size": c.prefill_tokens,
            "kv_cache_size": c.prefill_context if c.prefills else c.decode_context,
            "is_prefill": bool(c.prefills),
            "attention_backend": "AttentionBackend.ONERANK",
        }


def _statistics(operator: str, value_ms: float) -> dict[str, float]:
    """Return Vidur's statistics of one value: it has no spread."""
    return {
        f"time_stats.{operator}.{name}": 0.0 if name == "std" else value_ms for name in _STATISTICS
    }


def _csv(rows: Sequence[dict[str, Any]]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def _device(name: str) -> str:
    known = next((device for device in _DEVICES if device in name.lower()), None)
    if known is None:
        raise ExportError(
            f"Vidur knows no {name}, only {', '.join(_DEVICES)}\n  name the one whose memory it "
            "should simulate: --device h100",
            code="vidur-device-unknown",
        )
    return known


def _check_version(checkout: Path, model: str) -> None:
    """Refuse a checkout that reads another format than the written one.

    Raises:
        ExportError: it trains on other columns, or does not know the model.
    """
    try:
        predictor = (checkout / _PREDICTOR).read_text(encoding="utf-8")
        models = (checkout / _MODELS).read_text(encoding="utf-8")
    except OSError as error:
        raise ExportError(
            f"{error.filename}: {error.strerror}\n  expected a checkout of microsoft/vidur",
            code="vidur-version-unknown",
        ) from error
    lists = re.findall(r"model_names = \[(.*?)\]", predictor, re.DOTALL)
    trained = {name for names in lists for name in re.findall(r'"(\w+)"', names)}
    trained |= set(re.findall(r'model_name="(attn_\w+)"', predictor))
    # Operators of the network and of the host, whose tables are Vidur's own.
    others = {"schedule", "sampler_e2e", "prepare_inputs_e2e", "process_model_outputs",
              "ray_comm_time"}  # fmt: skip
    written = {*_OPERATORS, *_ATTENTION}
    selects = set(re.findall(r'df\["(\w+)"\]\s*==', predictor))
    sizes = {"n_head", "n_kv_head", "n_embd", "n_expanded_embd", "use_gated_mlp", "vocab_size"}
    sizes |= {"n_q_head", "block_size", "prefill_chunk_size", "num_tensor_parallel_workers"}
    network = {"num_workers", "devices_per_node", "collective"}
    known = sizes | network | {"model_name", "tensor_parallel_degree"}
    differing = sorted((trained - others) ^ written) + sorted(selects - known)
    if differing:
        raise ExportError(
            f"{checkout / _PREDICTOR} reads another format: {', '.join(differing)}\n"
            "  this onerank writes the format of Vidur at 7d47513",
            code="vidur-version-unknown",
        )
    names = re.findall(r'return "([\w./-]+)"', models)
    if model not in names:
        raise ExportError(
            f"Vidur has no model {model}: {', '.join(names)}\n  add a class to "
            f"{checkout / _MODELS} with this name and the sizes of the bundle's model",
            code="vidur-model-unknown",
        )


def _unsupported(bundle: Bundle, why: str) -> ExportError:
    return ExportError(
        f"Vidur's tables describe decoders with Llama's operators, and {bundle.manifest.model} is "
        f"not one: {why}",
        code="vidur-model-unsupported",
    )

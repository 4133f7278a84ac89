"""What the exporters read from a bundle: sizes of its steps, and operators' times at compositions.

The exporters share this module. Each names the simulator's operators by the modules that they
consist of, chooses the compositions of its table, and writes the table.
"""

import bisect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from onerank.annotate.gpus.gpu import Gpu
from onerank.annotate.gpus.registry import find_gpu, load_gpu
from onerank.capture.serving.compositions import Composition
from onerank.ir.errors import ExportError
from onerank.ir.notes import Note
from onerank.serving.bundle import Bundle
from onerank.serving.tables import RankMemory

EXPERTS = r"(mlp|block_sparse_moe)\.experts(\..*)?"
"""Path of the experts in a layer, as a regular expression."""

LAYER = r".*\.layers\.\*"
"""Path of a decoder layer, as a regular expression; kernels of all layers are summed."""


@dataclass(frozen=True)
class Extent:
    """Sizes up to which tables are written.

    Attributes:
        new_tokens: the most new tokens of a step in the bundle.
        decodes: the most decodes of a step in the bundle.
        longest_context: tokens that a sequence may have before a step, by the model and by the KV
            cache.
        cached_tokens: tokens that the KV cache holds in all layers; None if the device's memory is
            not known.
        memory: memory of the rank, by which steps fit.
    """

    new_tokens: int
    decodes: int
    longest_context: int
    cached_tokens: int | None
    memory: RankMemory

    @classmethod
    def of(cls, bundle: Bundle, simulator: str) -> "Extent":
        """Return the sizes of a bundle.

        Raises:
            ExportError: the bundle has no prefill, or no decode, that fits into memory.
        """
        fitting = [row.composition for row in bundle.rows if row.fits and row.is_composed]
        for kind, present in (
            ("prefill", any(step.prefills for step in fitting)),
            ("decode", any(step.decodes for step in fitting)),
        ):
            if not present:
                raise ExportError(
                    f"the bundle has no {kind} with known context that fits into memory, and "
                    f"{simulator} simulates both kinds of steps\n  measure some: --grid "
                    f"'{kind}: ...', or record some with detailed annotations",
                    code="export-steps-missing",
                )
        memory = bundle.manifest.memory
        decodes = max(step.decodes for step in fitting)
        # Engines allocate the states of their largest batch before the KV cache.
        cached = memory.tokens_with_states(decodes) if memory.device_bytes else None
        # A recording without its model's configuration has no longer sequences than it shows.
        longest = bundle.manifest.longest or max(
            max(step.prefill_context + step.prefill_tokens, step.decode_context + 1)
            for step in fitting
        )
        held = bisect.bisect_left(
            range(1, longest + 1), True, key=lambda n: not memory.caches(Composition(1, n - 1))
        )
        return cls(
            max(step.new_tokens for step in fitting),
            decodes,
            max(1, held - 1),
            cached,
            memory,
        )

    def holds(self, composition: Composition) -> bool:
        """Return whether the KV cache holds the sequences of a step."""
        longest = max(
            (composition.prefill_context + composition.prefill_tokens) * bool(composition.prefills),
            (composition.decode_context + 1) * bool(composition.decodes),
        )
        return self.memory.caches(composition) and longest <= self.longest_context + 1


@dataclass(frozen=True)
class ServedRank:
    """What the manifest of a measured rank has, and that of a recording may lack.

    Attributes:
        model: class of the model.
        tp: tensor-parallel size.
        ep: expert-parallel size.
        has_experts: whether its layers have experts.
        layers: decoder layers of the rank: those of its stage with pipeline parallelism.
        stages: pipeline stages of the model.
        longest: tokens that a sequence may have.
        kv_cache_bytes: most bytes of the KV cache that fit into the memory.
        weights_bytes: weights.
    """

    model: str
    tp: int
    ep: int
    has_experts: bool
    layers: int
    stages: int
    longest: int
    kv_cache_bytes: int
    weights_bytes: int

    @classmethod
    def of(cls, bundle: Bundle, simulator: str, *, takes_stage: bool = False) -> "ServedRank":
        """Return the rank of a bundle.

        Args:
            bundle: the bundle.
            simulator: name of the simulator, for errors.
            takes_stage: whether the layers of a pipeline stage suffice.

        Raises:
            ExportError: the bundle is a recording, whose kernels have no modules, or of a stage
                that does not suffice.
        """
        manifest, memory = bundle.manifest, bundle.manifest.memory
        known = (manifest.layers, manifest.longest, memory.weights_bytes)
        layers, longest, weights_bytes = known
        if not bundle.modules or layers is None or longest is None or weights_bytes is None:
            raise ExportError(
                f"the bundle is a recording, whose kernels have no modules, and {simulator} needs "
                "the times of a layer's operators\n  measure the model: capture serve "
                "config.json; or export whole steps: onerank export aiconfigurator",
                code="export-modules-missing",
            )
        model, tp = deployment(bundle, simulator, takes_stage=takes_stage)
        pipeline = manifest.pipeline
        if pipeline is not None:
            layers = pipeline.layers[pipeline.stage]
        cache = (memory.tokens_that_fit or 0) * (memory.kv_bytes_per_token or 0)
        sizes = tp, manifest.ep, has_experts(bundle)
        return cls(model, *sizes, layers, manifest.pp, longest, cache, weights_bytes)


def has_experts(bundle: Bundle) -> bool:
    """Return whether the layers of a bundle's model have experts."""
    return any(re.fullmatch(rf"{LAYER}\.{EXPERTS}", module) for module in bundle.modules)


def model_dtype(bundle: Bundle) -> str:
    """Return the dtype of a bundle's model by torch's name, such as "bfloat16"."""
    config = bundle.manifest.config
    # transformers 5 renamed `torch_dtype`. `capture serve` builds a model whose configuration names
    # no dtype in bfloat16.
    return str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")


def deployment(bundle: Bundle, simulator: str, *, takes_stage: bool = False) -> tuple[str, int]:
    """Return the class of a bundle's model, and its tensor-parallel size.

    Arguments as for `ServedRank.of`.

    Raises:
        ExportError: the bundle is a recording for which they were not given, or of one stage of a
            pipeline that does not suffice.
    """
    if bundle.manifest.pipeline is not None and not takes_stage:
        stage = bundle.manifest.pipeline.stage
        raise ExportError(
            f"the bundle has the steps of stage {stage} of {bundle.manifest.pp}, and {simulator} "
            "reads those of a whole model, with its embedding and head\n  measure the model "
            "without --pp; with --device none it may be larger than a GPU. From a stage: onerank "
            "export vidur, which takes times of layers, and onerank export astra-sim, for a step "
            "of all stages",
            code="export-pipeline-stage",
        )
    model, tp = bundle.manifest.model, bundle.manifest.tp
    if model is None or tp is None:
        given = {"--config": model, "--tp": tp}
        missing = [option for option, value in given.items() if value is None]
        raise ExportError(
            f"the bundle is a recording, which does not contain what {simulator} needs to know of "
            f"its model\n  convert it with {' and '.join(missing)}",
            code="export-deployment-unknown",
        )
    return model, tp


def cache_notes(bundle: Bundle, figure: str) -> Iterator[Note]:
    """Yield notes on layers that have states, or keep a part of the tokens of a sequence.

    Args:
        bundle: the bundle.
        figure: what sizes the KV cache in the simulator, a sentence.
    """
    memory, longest = bundle.manifest.memory, bundle.manifest.longest
    batch = memory.sequences_that_fit(longest - 1) if longest else None
    if memory.state_bytes_per_sequence:
        text = (
            f"{figure}. Each sequence also has states of {memory.state_bytes_per_sequence:,} B, "
            "which simulators do not count"
        )
        if longest is not None and batch is not None:
            text += f": {batch:,} sequences of {longest:,} tokens fit"
        yield Note(text, code="export-sequence-states")
    if not memory.kv_windows or longest is None or batch is None:
        return
    layers = bundle.manifest.layers
    held = " and ".join(f"{w.window} in {w.layers} of {layers} layers" for w in memory.kv_windows)
    whole = (memory.tokens_that_fit or 0) // longest
    text = (
        f"{figure}. Layers keep only a part of a sequence: {held}. {batch:,} sequences of "
        f"{longest:,} tokens fit; only {whole:,} would if all layers kept all of them"
    )
    yield Note(text, code="export-windowed-layers")


def require_memory(bundle: Bundle, simulator: str) -> None:
    """Refuse a bundle without the memory of its device, from which a simulator sizes its KV cache.

    Raises:
        ExportError: the memory is not known, such as that of a CPU.
    """
    if not bundle.manifest.memory.device_bytes:
        raise ExportError(
            f"the memory of {bundle.manifest.device} is not known, and {simulator} computes the "
            "size of its KV cache from it\n  measure on a GPU, or predict for one: "
            "annotate --target H100 BUNDLE",
            code="export-memory-unknown",
        )


def described_gpu(bundle: Bundle, name: str | None) -> Gpu:
    """Return the description of a bundle's GPU, for figures that a simulator needs.

    Args:
        bundle: the bundle.
        name: the description, a shipped one or a file; None: that of the bundle's device.

    Raises:
        ExportError: no name is given, and no shipped description is that of the device.
        TargetError: there is no such description, or it is malformed.
    """
    device = bundle.manifest.device
    if name is None and find_gpu(device) is None:
        raise ExportError(
            f"{device} has no description, and the simulator needs its memory bandwidth\n"
            "  describe it: --gpu NAME, a name of `onerank gpus` or a .toml file",
            code="export-gpu-unknown",
        )
    return load_gpu(name or device)


def link_gb_per_s(gpu: Gpu, given: float | None, gpus: int) -> float | None:
    """Return the bandwidth between GPUs, as given or by their description.

    None is only returned for a single GPU.

    Raises:
        ExportError: it is not known, and the GPUs communicate.
    """
    described = gpu.figures.get("link_bandwidth_gb_per_s")
    link = given or (described.value if described else None)
    if link is None and gpus > 1:
        raise ExportError(
            f"the bandwidth between {gpus} {gpu.name} GPUs is not known\n"
            "  give it: --link-gb-per-s 450",
            code="export-link-unknown",
        )
    return link


@dataclass(frozen=True)
class OperatorTimes:
    """Times of a simulator's operators, in ns by composition, summed over the layers."""

    operators: Mapping[str, Callable[[Composition], float]]

    @classmethod
    def of(
        cls,
        bundle: Bundle,
        modules: Mapping[str, Sequence[str]],
        missing: Callable[[str], Exception],
    ) -> "OperatorTimes":
        """Return the times of a bundle.

        Args:
            bundle: the bundle.
            modules: operator -> paths of its modules, all of one part.
            missing: returns the error for an operator without a module.
        """
        absent = next((operator for operator, paths in modules.items() if not paths), None)
        if absent is not None:
            raise missing(absent)
        module = bundle.interpolation.module
        return cls({operator: module(paths) for operator, paths in modules.items()})

    def ns(self, operator: str, composition: Composition) -> float:
        """Return the time of an operator in a step, of all layers."""
        return self.operators[operator](composition)


def token_sizes(most: int) -> list[int]:
    """Return numbers of tokens up to `most`, ever sparser."""
    # Products of few tokens have steps at the tiles of a GPU.
    sizes = [*range(1, 8), *range(8, 256, 8), *range(256, 1024, 32), *range(1024, most, 128)]
    return [*(size for size in sizes if size < most), most]


def growing(first: int, last: int, factor: float) -> list[int]:
    """Return sizes from `first` to `last`: each `factor` times the one before, or 1 more."""
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(min(last, max(sizes[-1] + 1, round(sizes[-1] * factor))))
    return sizes


def step_ns(bundle: Bundle, composition: Composition) -> int:
    """Return the time of a step as an engine runs it: a CUDA graph, on a CPU the eager step.

    Raises:
        AnnotateError: the bundle has no step of its kind.
    """
    step = bundle.interpolation.step(composition)
    times: Sequence[int | None] = (step.graph_ns, step.step_ns)
    return next(time for time in times if time is not None)

"""The bundle of a served rank: a directory with tables, a manifest and traces.

`capture serve` measures one, and `convert --engine-steps` derives one from a recording.

bundle.json      manifest: model, tensor-parallel size, device, memory, versions
steps.parquet    one row per composition: times, interval, memory
kernels.parquet  one row per composition and module: kernels, time, FLOPs, bytes
traces/N.et      the step of row N, from 1, as a Chakra graph
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from onerank.annotate import find_gpu
from onerank.annotate.gpus.gpu import Gpu
from onerank.capture.no_device.emulated_gpu import MOST_FLASH_HEAD
from onerank.capture.serving.attention_windows import AttentionWindow
from onerank.capture.serving.compositions import Composition, parse_grid
from onerank.display import Displayed
from onerank.ir import Graph
from onerank.ir.errors import FormatError
from onerank.ir.output_files import is_replaceable, replacing_directory, write_tables
from onerank.serving.latency_interpolation import Interpolation, cross_validate
from onerank.serving.part_sizes import AttentionForm, AttentionWaves
from onerank.serving.tables import FORMAT, KernelRow, Manifest, StepRow, data_frame

if TYPE_CHECKING:
    import polars as pl

MANIFEST, STEPS, KERNELS, TRACES = "bundle.json", "steps.parquet", "kernels.parquet", "traces"


@dataclass(frozen=True)
class BundleRecord:
    """A bundle without its traces.

    Attributes:
        manifest: what the bundle describes.
        steps: the steps.
    """

    manifest: Manifest
    steps: tuple[StepRow, ...]


@dataclass(frozen=True, repr=False)
class Bundle(Displayed):
    """Tables of a served rank.

    Attributes:
        manifest: what the bundle describes.
        rows: the steps.
        kernel_rows: modules of the steps.
        directory: contains the traces; None for a bundle that was not read or written.
    """

    manifest: Manifest
    rows: tuple[StepRow, ...]
    kernel_rows: tuple[KernelRow, ...]
    directory: Path | None = None

    @property
    def steps(self) -> "pl.DataFrame":
        """The steps as a table."""
        return data_frame(self.rows, StepRow)

    @property
    def kernels(self) -> "pl.DataFrame":
        """The modules of the steps as a table."""
        return data_frame(self.kernel_rows, KernelRow)

    @property
    def modules(self) -> list[str]:
        """Paths of the modules, in order; [] of a recording."""
        return sorted({row.module for row in self.kernel_rows if row.module is not None})

    @cached_property
    def interpolation(self) -> Interpolation:
        """Times of compositions between the rows."""
        return Interpolation.of(self.rows, self.kernel_rows, self._attention_form())

    def at(self, grid: str | Sequence[Composition]) -> "pl.DataFrame":
        """Return interpolated steps, with the columns of `steps`.

        Args:
            grid: compositions, or a text as for `capture serve --grid`.

        Raises:
            CaptureError: the grid does not parse.
            AnnotateError: the bundle has too few points of a kind.
        """
        compositions = parse_grid(grid) if isinstance(grid, str) else grid
        memory = self.manifest.memory
        rows: list[StepRow] = []
        for composition in compositions:
            row = self.interpolation.step(composition)
            # Only times are interpolated: memory is a sum of weights, cache and activations.
            peak = memory.bytes_of(composition)
            rows.append(msgspec.structs.replace(row, peak_bytes=peak, fits=memory.holds(peak)))
        return data_frame(rows, StepRow)

    def validated(self) -> "Bundle":
        """Return the bundle with the errors of its interpolation."""
        validation = cross_validate(self.rows, self.kernel_rows, self._attention_form())
        manifest = msgspec.structs.replace(self.manifest, cross_validation=validation)
        return replace(self, manifest=manifest)

    def _attention_form(self) -> AttentionForm:
        memory = self.manifest.memory
        every = memory.kv_bytes_per_token or 1
        windows = tuple(
            (layers.window, layers.bytes_per_token / every) for layers in memory.kv_windows
        )
        if self.manifest.attended_tokens is not None:
            # Layers cache all tokens, and a query reads no more than these.
            windows = ((AttentionWindow(self.manifest.attended_tokens), 1.0),)
        return AttentionForm(self._waves(), windows)

    def _waves(self) -> AttentionWaves | None:
        """Return the waves of attention; None if its kernels or their number are not known.

        Only those of FlashAttention 2 are known. A recorded engine may run those of a library.
        """
        manifest = self.manifest
        gpu, heads = find_gpu(manifest.device), manifest.kv_heads
        if manifest.is_recording or gpu is None or heads is None:
            return None
        families = manifest.attention_kernels
        if families is None:
            families = (_served_attention(manifest, gpu),)
        if families != ("flash2",):
            return None
        return AttentionWaves.of(gpu.sm_count, heads)

    def displayed_fields(self) -> dict[str, Any]:
        """Return what the bundle prints."""
        validation = self.manifest.cross_validation
        return {
            "model": self.manifest.model,
            "tp": self.manifest.tp,
            "device": self.manifest.device,
            "source": self.manifest.source,
            "steps": len(self.rows),
            "error": validation and f"{validation.median:.1%} median, {validation.p90:.1%} p90",
        }

    def traces(self) -> Iterator[tuple[int, Path]]:
        """Yield the number of each row with a trace, and its file."""
        assert self.directory is not None, "a bundle in memory has no traces"
        for number, row in enumerate(self.rows, start=1):
            # On a GPU, a step that does not fit into the memory cannot run.
            if row.fits:
                yield number, self.directory / TRACES / f"{number}.et"

    def write(
        self,
        directory: Path,
        traces: Mapping[int, bytes | Path],
        more: Callable[[Path], None] = lambda whole: None,
    ) -> "Bundle":
        """Write the bundle to a directory, which appears only when complete.

        Args:
            directory: replaced if it is a bundle.
            traces: trace of each row that has one, from 1: its content or its file.
            more: writes other files to the directory that it is called with.

        Raises:
            FormatError: the directory exists and is no bundle.
            OSError: it cannot be written.
        """
        check_replaceable(directory)
        with replacing_directory(directory) as whole:
            (whole / TRACES).mkdir()
            for number, trace in traces.items():
                target = whole / TRACES / f"{number}.et"
                if isinstance(trace, Path):
                    shutil.copyfile(trace, target)
                else:
                    target.write_bytes(trace)
            write_tables({whole / STEPS: self.steps, whole / KERNELS: self.kernels})
            manifest = msgspec.json.format(msgspec.json.encode(self.manifest))
            (whole / MANIFEST).write_bytes(manifest)
            more(whole)
        return Bundle(self.manifest, self.rows, self.kernel_rows, directory)


def encoded_trace(graph: Graph) -> bytes:
    """Return a graph as the content of a Chakra file, as `Bundle.write` takes it."""
    with tempfile.TemporaryDirectory(prefix="onerank-") as directory:
        trace = Path(directory) / "trace.et"
        graph.write(trace)
        return trace.read_bytes()


def _served_attention(manifest: Manifest, gpu: Gpu) -> str:
    """Return the kernel of a bundle that does not name it: as `capture serve` chooses it.

    "flash2" where FlashAttention 2 runs all layers; "" for any other kernel.
    """
    config = manifest.config.get("text_config", manifest.config)
    width, heads = (config.get(name) or 0 for name in ("hidden_size", "num_attention_heads"))
    size = config.get("head_dim") or (width // heads if heads else 0)
    windowed = config.get("sliding_window") and config.get("use_sliding_window", True)
    # Latent attention has values that are narrower than its keys.
    latent = config.get("v_head_dim", size) != size or config.get("kv_lora_rank")
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    fits = 0 < size <= MOST_FLASH_HEAD and size % 8 == 0 and dtype in ("bfloat16", "float16")
    runs = gpu.is_nvidia and (gpu.capability or 0) >= 80
    return "flash2" if fits and runs and not windowed and not latent else ""


def check_replaceable(directory: Path) -> None:
    """Refuse to replace a directory that is no bundle.

    Raises:
        FormatError: the path exists, and is neither a bundle nor an empty directory.
    """
    # Writing a bundle removes the directory that it replaces, with all files in it.
    if not is_replaceable(directory, MANIFEST):
        raise FormatError(
            f"{directory} exists and is no bundle: {MANIFEST} is missing\n"
            "  name a new directory, or one that `capture serve` or `convert --engine-steps` wrote",
            code="bundle-not-replaced",
        )


def holds_bundle(directory: Path) -> bool:
    """Return whether a directory holds a bundle, or some of its files."""
    return any((directory / name).exists() for name in (MANIFEST, STEPS, KERNELS))


def read_bundle(path: str | Path) -> Bundle:
    """Read the bundle that `capture serve` or `convert --engine-steps` wrote.

    Raises:
        FormatError: the directory is no bundle, is incomplete, or has another version.
    """
    import polars as pl

    directory = Path(path)
    if not holds_bundle(directory):
        raise FormatError(
            f"{directory} holds no bundle\n  name a directory that `capture serve` or "
            "`convert --engine-steps` wrote",
            code="bundle-missing",
        )
    try:
        manifest = _read_manifest(directory)
        steps, kernels = (pl.read_parquet(directory / name).to_dicts() for name in (STEPS, KERNELS))
        rows = msgspec.convert(steps, tuple[StepRow, ...])
        kernel_rows = msgspec.convert(kernels, tuple[KernelRow, ...])
    except (OSError, pl.exceptions.PolarsError, msgspec.MsgspecError) as error:
        why = getattr(error, "strerror", None) or str(error).splitlines()[0]
        name = getattr(error, "filename", None) or directory
        raise FormatError(
            f"{name}: {why}\n  a bundle has {MANIFEST}, {STEPS}, {KERNELS} and {TRACES}/; "
            "`capture serve` and `convert --engine-steps` write one",
            code="bundle-incomplete",
        ) from error
    bundle = Bundle(manifest, rows, kernel_rows, directory)
    absent = [path for _, path in bundle.traces() if not path.is_file()]
    if absent:
        raise FormatError(
            f"{absent[0]}: no such file, and {len(absent)} traces of {len(bundle.rows)} steps are "
            "missing\n  write the bundle again",
            code="bundle-incomplete",
        )
    return bundle


def _read_manifest(directory: Path) -> Manifest:
    data = (directory / MANIFEST).read_bytes()
    version = msgspec.json.decode(data, type=dict[str, Any]).get("format")
    if version != FORMAT:
        raise FormatError(
            f"{directory / MANIFEST} has format {version}, and this onerank reads {FORMAT}",
            code="bundle-version",
        )
    return msgspec.json.decode(data, type=Manifest)

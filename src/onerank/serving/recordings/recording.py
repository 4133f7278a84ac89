"""Tables of a recording of vLLM or SGLang: the steps of the engine and their kernels.

They are the directory `recording` of the recording's bundle:

recording.json        files of the recording, and what could not be linked
compositions.parquet  one row per file and batch of equal size: medians and percentiles
steps.parquet         one row per step and file
kernels.parquet       one row per step, file, kernel and operator

Columns named as in the tables of a bundle have the same meaning.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from onerank.ir.notes import Note
from onerank.ir.output_files import write_tables
from onerank.serving.tables import data_frame, p10_median_p90

if TYPE_CHECKING:
    import polars as pl

RECORDING = "recording"
"""Directory of the tables in the recording's bundle."""

MANIFEST, COMPOSITIONS = "recording.json", "compositions.parquet"
STEPS, KERNELS = "steps.parquet", "kernels.parquet"

Link = Literal["operator", "CUDA graph", "launch call", "no launch"]
"""Link of an operation on the GPU.

operator     it was launched by this operator, in the recording or in that of a CUDA graph's capture
CUDA graph   it was replayed by a CUDA graph whose capture is not recorded or not certain
launch call  it was launched by a call outside of any operator
no launch    the trace has no launch of it
"""

OUTSIDE = 0
"""Step of operations that were launched before the first step, or have no recorded launch."""


class RecordedStep(msgspec.Struct, frozen=True):
    """A row of `steps.parquet`: a step of the engine on one rank.

    Attributes:
        file: name of the file.
        rank: rank of the file, None if not recorded.
        step: number in the file, from 1.
        annotation: the engine's annotation, or a Python frame.
        kind: "prefill", "decode", "mixed" or "idle"; None if not recorded, as all columns down to
            `context_tokens`.
        batch: sequences of the step.
        prefills: sequences that compute tokens of their prompt.
        prefill_new_tokens: tokens that they compute, summed.
        prefill_context_tokens: their tokens in the KV cache before the step, summed.
        decodes: sequences that have output already.
        decode_new_tokens: as for prefills; more than one for each if they are speculative.
        decode_context_tokens: as for prefills.
        new_tokens: tokens that the step computes.
        context_tokens: tokens in the KV cache before the step.
        step_ns: from the start of the step to that of the next; None for the last one.
        host_ns: time that the host spends in the annotation.
        gpu_ns: summed operations on the GPU; on a CPU, operators.
        gpu_span_ns: from the start of the first operation to the end of the last; None without one.
        graph_ns: spans of the replays of CUDA graphs, plus the other operations; None without one.
        collective_ns: of `gpu_ns`, kernels of collectives, by their names.
        operations: operations on the GPU; on a CPU, operators.
        linked: of these, linked to an operator.
        by_graph: of these, started by the launch of a CUDA graph.
    """

    file: str
    rank: int | None
    step: int
    annotation: str
    kind: str | None
    batch: int | None
    prefills: int | None
    prefill_new_tokens: int | None
    prefill_context_tokens: int | None
    decodes: int | None
    decode_new_tokens: int | None
    decode_context_tokens: int | None
    new_tokens: int | None
    context_tokens: int | None
    step_ns: int | None
    host_ns: int
    gpu_ns: int
    gpu_span_ns: int | None
    graph_ns: int | None
    collective_ns: int
    operations: int
    linked: int
    by_graph: int


class RecordedKernel(msgspec.Struct, frozen=True):
    """A row of `kernels.parquet`: equal kernels of a step.

    Attributes:
        file: name of the file.
        step: number of the step in the file; 0 outside of all steps.
        name: name of the kernel, memcpy or memset; on a CPU, of the operator.
        operator: innermost operator that launched it; "" if not linked to one.
        link: what it is linked to.
        count: number of operations.
        time_ns: their summed durations.
    """

    file: str
    step: int
    name: str
    operator: str
    link: Link
    count: int
    time_ns: int


class RecordedComposition(msgspec.Struct, frozen=True):
    """A row of `compositions.parquet`: the steps of a file with the same sequences and new tokens.

    Times are medians over the steps; of `step_ns` over those that another step follows.

    Attributes:
        file: name of the file.
        kind: as in `steps.parquet`, like the four columns after it.
        batch: sequences.
        prefills: sequences.
        decodes: sequences.
        new_tokens: tokens that a step computes.
        steps: number of steps.
        context_low: the least of their context tokens; None if not recorded.
        context_high: the most of their context tokens; None if not recorded.
        step_ns: as in `steps.parquet`; None if no step follows any.
        p10_ns: 10th percentile of `step_ns`.
        p90_ns: 90th percentile of `step_ns`.
        host_ns: as in `steps.parquet`.
        gpu_ns: as in `steps.parquet`.
        gpu_p10_ns: 10th percentile of `gpu_ns`.
        gpu_p90_ns: 90th percentile of `gpu_ns`.
        gpu_span_ns: as in `steps.parquet`.
    """

    file: str
    kind: str | None
    batch: int | None
    prefills: int | None
    decodes: int | None
    new_tokens: int | None
    steps: int
    context_low: int | None
    context_high: int | None
    step_ns: int | None
    p10_ns: int | None
    p90_ns: int | None
    host_ns: int
    gpu_ns: int
    gpu_p10_ns: int
    gpu_p90_ns: int
    gpu_span_ns: int | None


class RecordedFile(msgspec.Struct, frozen=True):
    """A file of a recording.

    Attributes:
        file: its name.
        engine: "vLLM" or "SGLang".
        version: version of the engine; "" if not recorded.
        rank: rank of the file; None if not recorded.
        ranks: ranks of the run; None if not recorded.
        device: name of the GPU, "" if not recorded; "cpu" if no operation ran on a GPU.
        device_type: "cuda" or "cpu".
        memory_bytes: memory of the GPU; 0 if not recorded.
        steps: number of steps by kind; steps without a kind are "unknown".
        operations: operations on the GPU, or operators, by link.
        time_ns: their summed durations.
        outside: of these operations, those outside of all steps.
        outside_ns: summed durations of those.
    """

    file: str
    engine: str
    version: str
    rank: int | None
    ranks: int | None
    device: str
    device_type: Literal["cuda", "cpu"]
    memory_bytes: int
    steps: dict[str, int]
    operations: dict[str, int]
    time_ns: int
    outside: int
    outside_ns: int

    @property
    def device_text(self) -> str:
        """The device as tables and bundles show it."""
        return self.device or "a GPU"


class Unlinked(msgspec.Struct, frozen=True):
    """Kernels of a name that are not linked to an operator.

    Attributes:
        name: name of the kernel.
        link: what they are linked to.
        count: number of kernels.
        time_ns: their summed durations.
    """

    name: str
    link: Link
    count: int
    time_ns: int


class RecordingManifest(msgspec.Struct, frozen=True):
    """Files of a recording, and the kernels without an operator.

    Attributes:
        files: its files.
        unlinked: kernels that are not linked to an operator, by name; the longest first.
        notes: statements on the quality of the recording.
    """

    files: tuple[RecordedFile, ...]
    unlinked: tuple[Unlinked, ...]
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True)
class RecordingRecord:
    """A recording without the kernels of each step.

    Attributes:
        manifest: its files, and the kernels without an operator.
        compositions: the steps, by their sequences and new tokens.
        steps: the steps.
    """

    manifest: RecordingManifest
    compositions: tuple[RecordedComposition, ...]
    steps: tuple[RecordedStep, ...]


@dataclass(frozen=True)
class Recording:
    """Tables of a recording.

    Attributes:
        manifest: its files, and the kernels without an operator.
        step_rows: the steps.
        kernel_rows: what ran in them.
    """

    manifest: RecordingManifest
    step_rows: tuple[RecordedStep, ...]
    kernel_rows: tuple[RecordedKernel, ...]

    @property
    def record(self) -> RecordingRecord:
        """The steps, without their kernels."""
        return RecordingRecord(self.manifest, self.composition_rows, self.step_rows)

    @cached_property
    def composition_rows(self) -> tuple[RecordedComposition, ...]:
        """The steps of each file, by their sequences and new tokens, in the order of the first."""
        groups: dict[tuple[object, ...], list[RecordedStep]] = {}
        for row in self.step_rows:
            key = row.file, row.kind, row.batch, row.prefills, row.decodes, row.new_tokens
            groups.setdefault(key, []).append(row)
        return tuple(_composition(rows) for rows in groups.values())

    @property
    def compositions(self) -> "pl.DataFrame":
        """The steps by their sequences and new tokens, as a table."""
        return data_frame(self.composition_rows, RecordedComposition)

    @property
    def steps(self) -> "pl.DataFrame":
        """The steps as a table."""
        return data_frame(self.step_rows, RecordedStep)

    @property
    def kernels(self) -> "pl.DataFrame":
        """What ran in the steps, as a table."""
        return data_frame(self.kernel_rows, RecordedKernel)

    def write(self, directory: Path) -> None:
        """Write the tables to a new directory.

        Raises:
            OSError: it cannot be written.
        """
        directory.mkdir()
        write_tables(
            {
                directory / COMPOSITIONS: self.compositions,
                directory / STEPS: self.steps,
                directory / KERNELS: self.kernels,
            }
        )
        manifest = msgspec.json.format(msgspec.json.encode(self.manifest))
        (directory / MANIFEST).write_bytes(manifest)


def _composition(rows: Sequence[RecordedStep]) -> RecordedComposition:
    first = rows[0]
    contexts = [row.context_tokens for row in rows if row.context_tokens is not None]
    between = [row.step_ns for row in rows if row.step_ns is not None]
    spans = [row.gpu_span_ns for row in rows if row.gpu_span_ns is not None]
    gpu_low, gpu_ns, gpu_high = p10_median_p90([row.gpu_ns for row in rows])
    low, step_ns, high = p10_median_p90(between) if between else (None, None, None)
    return RecordedComposition(
        file=first.file,
        kind=first.kind,
        batch=first.batch,
        prefills=first.prefills,
        decodes=first.decodes,
        new_tokens=first.new_tokens,
        steps=len(rows),
        context_low=min(contexts, default=None),
        context_high=max(contexts, default=None),
        step_ns=step_ns,
        p10_ns=low,
        p90_ns=high,
        host_ns=p10_median_p90([row.host_ns for row in rows])[1],
        gpu_ns=gpu_ns,
        gpu_p10_ns=gpu_low,
        gpu_p90_ns=gpu_high,
        gpu_span_ns=p10_median_p90(spans)[1] if spans else None,
    )

"""Which rows of `accuracy.csv` each table of the documentation shows, and in which columns."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_FIGURES = ("predicted", "measured", "error")

Row = dict[str, str]
"""A row of `accuracy.csv`, by column."""

# What a headline row predicts; in the table of a claim the page's heading says it.
TITLES = {
    "step-of-slice": "step of the job, from one slice",
    "step-in-astra-sim": "step in ASTRA-sim, from slices on one GPU",
    "slice-memory": "peak memory of a slice",
    "another-gpu-compute": "compute of a step on another GPU",
    "held-out-datasheet": "single kernels from the datasheet, GPU family not in the fit",
}

# Headings of columns by claim, where a more specific one than the column's name fits.
HEADINGS: dict[str, dict[str, str]] = {
    "replay-in-astra-sim": {"case": "trace", "conditions": "compared", "measured": "replayed"},
    "conversion": {"measured": "kept"},
    "checker": {"case": "ASTRA-sim", "conditions": "onerank check", "measured": "workloads"},
    "another-gpu-compute": {"conditions": "measured time"},
    "published-speeds": {"conditions": "80% interval"},
    "torchtitan": {"predicted": "predicted tokens/s", "measured": "published tokens/s"},
    "intervals-within-a-gpu": {"predicted": "interval"},
    "block-cycles": {"measured": "calls", "error": "median error"},
    "shares-below-65": {"conditions": "cause", "measured": "inside"},
    "decompositions": {"measured": "calls", "error": "mean error"},
    "gemm-durations": {"case": "duration"},
    "fine-scales": {"case": "scales"},
    "fp8-from-bf16": {"error": "mean / median / p90"},
    "step-in-astra-sim-host-bound": {"conditions": "captured on"},
}


@dataclass(frozen=True)
class Column:
    """A column of a wide table: one cell of the rows that `where` selects."""

    heading: str
    cell: str
    where: dict[str, str] = field(default_factory=dict[str, str])
    with_hardware: bool = False
    """Whether the hardware of the row follows the cell."""


@dataclass(frozen=True)
class WideTable:
    """A table with a line for each case: rows with equal `keys` share a line."""

    claims: tuple[str, ...]
    keys: tuple[str, ...]
    columns: tuple[Column, ...]
    hardware: str = ""
    """Prefix of the hardware of the rows that the table shows."""
    omits: tuple[str, ...] = ()
    """Figures that follow from others of the line, such as predicted from measured and error."""
    cases: str = ""
    """Regular expression of the cases that the table shows, from their start."""


def _of_lengths(cases: str, suffix: str = "") -> WideTable:
    """Return the table of errors and of interval coverage over and under 10 us, of some cases."""
    columns: list[Column] = []
    for length in ("over 10 us", "under 10 us"):
        errors = {"claim": f"held-out{suffix}", "conditions": length}
        inside = {"claim": f"intervals{suffix}", "conditions": length}
        lowest = {"claim": f"intervals{suffix}", "conditions": f"{length}, lowest"}
        columns += [
            Column(f"{length}: error", "error", errors),
            Column("inside", "measured", inside),
            Column("lowest", "measured", lowest, with_hardware=True),
        ]
    claims = f"held-out{suffix}", f"intervals{suffix}"
    return WideTable(claims, ("case",), tuple(columns), cases=cases)


_GEMMS = "bf16 GEMMs|8-bit|linear layers|fp32 GEMMs"
_ATTENTION = "attention"
_OTHER_KERNELS = f"(?!{_GEMMS}|{_ATTENTION})"


def _before_and_after(claim: str) -> WideTable:
    """Return the table of kernels predicted before they ran, and after what they showed."""
    columns = [
        Column(heading, cell, {"conditions": when})
        for when in ("before", "after")
        for heading, cell in ((f"error {when}", "error"), ("inside", "measured"))
    ]
    return WideTable((claim,), ("case", "hardware", "file"), tuple(columns))


_ONE, _EACH = "one slice, the median rank", "each slice, the rank of its GPU"
_ACTIVE = "the same, NVLink active"


def _of_slices(claim: str, what: str) -> WideTable:
    """Return the table of a time of the slices, compared in three ways."""
    return WideTable(
        (claim,),
        ("case", "hardware", "file"),
        (
            Column(what, "predicted", {"conditions": _ONE}),
            Column("one slice", "error", {"conditions": _ONE}),
            Column("each slice", "error", {"conditions": _EACH}),
            Column("NVLink active", "error", {"conditions": _ACTIVE}),
        ),
    )


def _in_astra_sim(conditions: str, heading: str = "") -> Column:
    where = {"claim": "step-in-astra-sim", "conditions": conditions}
    return Column(f"ASTRA-sim, {heading or conditions}", "error", where)


def _serving(cases: str) -> WideTable:
    """Return the table of the steps of engines whose case begins so."""
    figures = (Column(name, name, {"claim": "serving"}) for name in _FIGURES)
    inside = Column("in the 80% interval", "measured", {"claim": "serving-inside"})
    keys = ("case", "hardware", "conditions", "file")
    return WideTable(("serving", "serving-inside"), keys, (*figures, inside), cases=cases)


WIDE_TABLES: dict[str, WideTable] = {
    "held-out-gemms": _of_lengths(_GEMMS),
    "held-out-attention": _of_lengths(_ATTENTION),
    "held-out-other": _of_lengths(_OTHER_KERNELS),
    "held-out-gemms-datasheet": _of_lengths(_GEMMS, "-datasheet"),
    "held-out-other-datasheet": _of_lengths(_OTHER_KERNELS, "-datasheet"),
    **{
        name: _before_and_after(name)
        for name in ("hopper-gemms", "hopper-losses", "hopper-attention", "hopper-vectors")
    },
    "engine-attention": WideTable(
        ("engine-kernels",),
        ("case", "hardware", "conditions", "file"),
        (Column("error", "error"),),
        cases="decode|latent",
    ),
    "engine-experts": WideTable(
        ("engine-kernels",),
        ("case", "hardware", "conditions", "file"),
        (Column("error", "error"),),
        cases="MoE|torch",
    ),
    "gemm-durations": WideTable(
        ("gemm-durations",),
        ("case",),
        tuple(
            column
            for sizes in ("all other sizes", "blind sizes")
            for column in (
                Column(sizes, "measured", {"conditions": sizes}),
                Column("error", "error", {"conditions": sizes}),
                Column("as a call", "error", {"conditions": f"{sizes}, as a call"}),
            )
        ),
    ),
    "fine-scales": WideTable(
        ("fine-scales",),
        ("case",),
        (
            Column("GEMMs", "measured"),
            Column("error", "error", {"conditions": "by torch's kernel"}),
            Column("by the tiles of engines", "error", {"conditions": "by those of engines"}),
        ),
    ),
    "norms-sums": WideTable(
        ("norms-sums",),
        ("case",),
        tuple(
            Column(heading, "error", {"conditions": heading})
            for dtype in ("float32", "float16", "bfloat16")
            for heading in (dtype, f"{dtype}, before")
        ),
    ),
    **{
        claim: WideTable(
            (claim,),
            ("case", "hardware"),
            tuple(
                column
                for calls in ("chosen", "held out")
                for column in (
                    Column(calls, "measured", {"conditions": f"{calls}, after"}),
                    Column("error before", "error", {"conditions": f"{calls}, before"}),
                    Column("after", "error", {"conditions": f"{calls}, after"}),
                )
            ),
        )
        for claim in ("single-calls", "float32-convolutions")
    },
    "library-disagreement": WideTable(
        ("library-disagreement",),
        ("case",),
        tuple(
            Column(gpu.partition("-")[0], "error", {"hardware": gpu})
            for gpu in ("A100-SXM-80GB", "H100-SXM", "H200", "L40S", "B200")
        ),
    ),
    "interval-widths": WideTable(
        ("interval-widths",),
        ("case",),
        tuple(
            Column(shares, "measured", {"conditions": shares})
            for shares in ("under 65%", "65 to 75%", "75 to 85%", "85 to 90%", "over 90%", "mean")
        ),
    ),
    "intervals-within-a-gpu": WideTable(
        ("intervals-within-a-gpu",),
        ("case", "predicted"),
        (
            *(
                Column(gpu.partition("-")[0], "measured", {"hardware": gpu})
                for gpu in ("A100-SXM-80GB", "H100-SXM", "H200", "L40S", "B200", "all")
            ),
            Column("in all", "conditions", {"hardware": "all"}),
        ),
    ),
    "decode": WideTable(
        ("decode",),
        ("case", "hardware"),
        (
            Column("kernels", "error", {"conditions": "kernels"}),
            Column("CUDA graph", "error", {"conditions": "CUDA graph"}),
        ),
    ),
    "quantising-kernels": WideTable(
        ("quantising-kernels",),
        ("case", "hardware"),
        (
            Column("over 10 us", "error", {"conditions": "over 10 us"}),
            Column("under 10 us", "error", {"conditions": "under 10 us"}),
        ),
    ),
    "unlike-gpus": WideTable(
        ("unlike-gpus",),
        ("case",),
        tuple(
            column
            for gpu in ("V100", "T4")
            for column in (
                Column(f"{gpu}: predicted / measured", "conditions", {"hardware": gpu}),
                Column("error", "error", {"hardware": gpu}),
            )
        ),
    ),
    "another-vendor": WideTable(
        ("another-vendor",),
        ("case",),
        tuple(
            column
            for pair in ("H100 to MI300X", "MI300X to H100")
            for column in (
                Column(f"{pair}: predicted / measured", "error", {"hardware": pair}),
                Column("80% interval", "conditions", {"hardware": pair}),
            )
        ),
    ),
    "slice-step": _of_slices("slice-step", "step of the slice"),
    "slice-compute": _of_slices("slice-compute", "compute of the slice"),
    "slice-counts": WideTable(
        ("slice-kernels", "slice-memory"),
        ("case", "hardware", "file"),
        (
            Column("operations: slice", "predicted", {"claim": "slice-kernels"}),
            Column("real rank", "measured", {"claim": "slice-kernels"}),
            Column("peak memory: slice", "predicted", {"claim": "slice-memory"}),
            Column("real rank", "measured", {"claim": "slice-memory"}),
            Column("error", "error", {"claim": "slice-memory"}),
        ),
    ),
    "step-of-two-gpus": WideTable(
        ("step-in-astra-sim", "step-in-astra-sim-no-host", "step-in-loggopsim"),
        ("case", "hardware", "measured", "file"),
        (
            _in_astra_sim("NVLink active"),
            _in_astra_sim("as captured"),
            Column("without host delays", "error", {"claim": "step-in-astra-sim-no-host"}),
            Column("LogGOPSim, as captured", "error", {"claim": "step-in-loggopsim"}),
        ),
        hardware="2 x",
        omits=("predicted",),
    ),
    "step-of-four-gpus": WideTable(
        ("step-of-slice", "step-in-astra-sim"),
        ("case", "hardware", "measured", "file"),
        (
            *(
                Column(f"slice, {what}", "error", {"claim": "step-of-slice", "conditions": what})
                for what in ("slowest of 4", "median")
            ),
            _in_astra_sim("NVLink active"),
            _in_astra_sim("as captured"),
            _in_astra_sim("as captured, slowest of 4", "slowest of 4"),
        ),
        hardware="4 x",
        omits=("predicted",),
    ),
    "serving-slices": _serving("slice of TP"),
    "serving-interpolation": _serving("interpolated|measured with"),
    "serving-shapes": _serving("from shapes alone"),
    "serving-another-gpu": _serving(".*(for an|operators of) H[12]00|H[12]00, from"),
    "serving-memory": _serving("peak memory|tokens in|reserved|kernels of a CUDA graph"),
    "new-scripts": WideTable(
        ("new-scripts", "new-scripts-astra-sim", "new-scripts-fixed"),
        ("case", "hardware", "file"),
        (
            Column("measured", "measured", {"claim": "new-scripts"}),
            Column("predicted", "predicted", {"claim": "new-scripts"}),
            Column("error", "error", {"claim": "new-scripts"}),
            Column("ASTRA-sim", "error", {"claim": "new-scripts-astra-sim"}),
            Column("after fixes", "error", {"claim": "new-scripts-fixed"}),
        ),
        omits=("predicted", "measured"),
    ),
    "new-scripts-memory": WideTable(
        ("new-scripts-memory", "new-scripts-memory-fixed"),
        ("case", "hardware", "file"),
        (
            Column("error", "error", {"claim": "new-scripts-memory"}),
            Column("after fixes", "error", {"claim": "new-scripts-memory-fixed"}),
        ),
        omits=("predicted", "measured"),
    ),
}


@dataclass(frozen=True)
class SummaryLine:
    """A line of the summary: the rows of one claim.

    Attributes:
        prediction: what is predicted.
        page: page of `docs/accuracy` that has the rows, or a heading of the same page.
        claim: of the rows.
        where: column -> regular expression that the row's value contains. A case may have a row
            for each of several conditions; the line takes one, so that no case counts twice.
        inside: claim whose rows say how many steps of a case are inside their interval.
    """

    prediction: str
    page: str
    claim: str
    where: Mapping[str, str] = field(default_factory=dict[str, str])
    inside: str = ""

    def rows(self, rows: list[Row]) -> list[Row]:
        """Return the rows that the line sums up."""
        return [
            row
            for row in rows
            if row["claim"] == self.claim
            and all(re.search(pattern, row[column]) for column, pattern in self.where.items())
        ]


_FLOAT8 = {"case": "float8|rowwise"}

# Tables of the pages by name.
SUMMARIES: dict[str, tuple[SummaryLine, ...]] = {
    "job-summary": (
        SummaryLine(
            "ASTRA-sim, two GPUs",
            "#two-gpus",
            "step-in-astra-sim",
            {"hardware": "^2 x", "conditions": "^NVLink active"},
        ),
        SummaryLine(
            "the same without `--include-host-delays`", "#two-gpus", "step-in-astra-sim-no-host"
        ),
        SummaryLine("LogGOPSim, two GPUs, NVLink idle", "#two-gpus", "step-in-loggopsim"),
        SummaryLine(
            "ASTRA-sim, four H200s",
            "#four-gpus",
            "step-in-astra-sim",
            {"hardware": "^4 x H200", "conditions": "^NVLink active"},
        ),
        SummaryLine(
            "ASTRA-sim, four H100s of three hosts",
            "#four-gpus",
            "step-in-astra-sim",
            {"hardware": "^4 x H100", "conditions": "^NVLink active"},
        ),
        SummaryLine(
            "one slice, four H200s",
            "#four-gpus",
            "step-of-slice",
            {"hardware": "^4 x H200", "conditions": "^slowest of 4"},
        ),
        SummaryLine(
            "one slice, four H100s of three hosts",
            "#four-gpus",
            "step-of-slice",
            {"hardware": "^4 x H100", "conditions": "^slowest of 4"},
        ),
    ),
    "serving-summary": (
        SummaryLine(
            "slice of TP 2, kernels of its real rank",
            "#slices",
            "serving",
            {"case": "^slice of TP 2", "conditions": "^kernels"},
        ),
        SummaryLine(
            "interpolated between measured points",
            "#interpolation",
            "serving",
            {
                "case": "^(interpolated|measured with)",
                "conditions": "^replay; (40|20 steps; median)",
            },
            "serving-inside",
        ),
        SummaryLine(
            "from shapes alone, H100, mean of a model's steps",
            "serving-shapes.md",
            "serving",
            {
                "case": "^from shapes alone(?!.*other graphs)",
                "conditions": "^replay;.*mean$",
                "hardware": "H100",
            },
            "serving-inside",
        ),
        SummaryLine(
            "from shapes alone, H200, mean of a model's steps",
            "serving-shapes.md",
            "serving",
            {"case": "^from shapes alone", "conditions": "mean$", "hardware": "H200"},
            "serving-inside",
        ),
        SummaryLine(
            "a bundle for an H200 from an H100, or back, mean of its steps",
            "#another-gpu",
            "serving",
            {"case": " for an H[12]00, from", "conditions": "mean$"},
            "serving-inside",
        ),
        SummaryLine(
            "peak memory from shapes alone, largest of a model",
            "serving-shapes.md",
            "serving",
            {"case": "^peak memory from shapes"},
        ),
    ),
    "slice-summary": (
        SummaryLine("step", "#step-time", "slice-step", {"conditions": f"^{_ONE}"}),
        SummaryLine(
            "compute",
            "#compute-that-overlaps-no-communication",
            "slice-compute",
            {"conditions": f"^{_ONE}"},
        ),
        SummaryLine("peak memory", "slice-memory.md", "slice-memory"),
        SummaryLine(
            "reserved memory, simulated", "slice-memory.md#reserved-memory", "reserved-memory"
        ),
        SummaryLine(
            "step or compute of 8 layers from 2 and 4", "#fewer-layers", "extrapolated-layers"
        ),
    ),
    "another-gpu-summary": (
        SummaryLine("compute", "#compute", "another-gpu-compute"),
        SummaryLine("step", "#step", "another-gpu-step"),
        SummaryLine("energy of a step", "#energy", "another-gpu-energy"),
        SummaryLine("what-if options", "#what-if-options", "what-if"),
    ),
    "kernel-summary": tuple(
        SummaryLine(name, page, "held-out", {"case": cases, "conditions": "^over 10 us"})
        for name, page, cases in (
            ("bf16 GEMMs", "kernel-gemms.md", "^bf16"),
            ("8-bit GEMMs and layers", "kernel-gemms.md", "^8-bit"),
            ("NVFP4 layers, B200 only", "kernel-gemms.md", "NVFP4"),
            ("float32 GEMMs", "kernel-gemms.md", "^fp32 GEMMs"),
            ("attention over prompts", "kernel-attention.md", "^attention, "),
            ("attention of one query", "kernel-attention.md", "^attention of one query"),
            ("norms, softmax and elementwise of PyTorch", "kernel-other.md", "^fp32 norms|torch"),
            ("norms and activations of vLLM", "kernel-other.md", "vLLM|^fp16 norms and"),
            ("PyTorch kernels of captured steps", "kernel-other.md", "^PyTorch"),
        )
    ),
    "power-summary": (
        SummaryLine("mean power of a step", "#figures", "power", {"conditions": "^whole step"}),
        SummaryLine(
            "mean power of bf16 GEMMs with random weights, another GPU",
            "#figures",
            "power",
            {"case": "^bf16 GEMMs, mean power"},
        ),
        SummaryLine(
            "their summed energy",
            "#figures",
            "power",
            {"case": "summed energy", "conditions": "random weights"},
        ),
        SummaryLine(
            "summed energy of all GEMMs, of which some multiply zeros",
            "#figures",
            "power",
            {"conditions": "^all "},
        ),
        SummaryLine("summed energy of experts", "#figures", "power", {"case": "^experts"}),
        SummaryLine("summed energy of decodes", "#figures", "power", {"case": "^decode"}),
        SummaryLine(
            "summed energy of attention over prompts", "#figures", "power", {"case": "^attention"}
        ),
        SummaryLine(
            "mean power, a class of kernels left out", "#figures", "power", {"case": "^each class"}
        ),
    ),
    "training-summary": (
        SummaryLine(
            "torchtitan, published, bf16",
            "training-published.md#torchtitan",
            "torchtitan",
            {"case": "^(?!.*(float8|rowwise))"},
        ),
        SummaryLine(
            "torchtitan, published, float8",
            "training-published.md#torchtitan",
            "torchtitan",
            _FLOAT8,
        ),
        SummaryLine(
            "float8 without context parallelism of 4 and 8",
            "training-published.md#torchtitan",
            "torchtitan",
            {"case": r"^(?!.*CP [48]).*(float8|rowwise)"},
        ),
        SummaryLine(
            "float8 on H100s, without those and asynchronous TP",
            "training-published.md#torchtitan",
            "torchtitan",
            {"case": r"^(?!.*(CP [48]|async|405B)).*(float8|rowwise)", "hardware": "H100"},
        ),
        SummaryLine(
            "Megatron-LM, published", "training-published.md#megatron-lm", "megatron-published"
        ),
        SummaryLine(
            "torchtitan and examples on four H100s",
            "#jobs-measured-on-four-h100s",
            "torchtitan-no-device",
        ),
        SummaryLine(
            "new scripts on one to four GPUs, before they ran",
            "new-scripts.md",
            "new-scripts",
        ),
    ),
    "new-scripts-summary": (
        SummaryLine("step, before the job ran", "#steps", "new-scripts"),
        SummaryLine("the same in ASTRA-sim", "#steps", "new-scripts-astra-sim"),
        SummaryLine("step, after fixes, where captured again", "#steps", "new-scripts-fixed"),
    ),
    "summary": (
        SummaryLine(
            "step of a job on 2 or 4 GPUs in ASTRA-sim, from slices on one GPU, `--nvlink-active`",
            "job-steps.md",
            "step-in-astra-sim",
            {"conditions": "^NVLink active"},
        ),
        SummaryLine(
            "the same from one slice, without a simulator",
            "job-steps.md",
            "step-of-slice",
            {"conditions": "^slowest of 4"},
        ),
        SummaryLine(
            "step of a slice, against the rank that it stands for",
            "slices.md",
            "slice-step",
            {"conditions": f"^{_ONE}"},
        ),
        SummaryLine("peak memory of a slice", "slice-memory.md", "slice-memory"),
        SummaryLine("captured step on another GPU", "other-gpus.md", "another-gpu-step"),
        SummaryLine("its compute", "other-gpus.md", "another-gpu-compute"),
        SummaryLine(
            "kernels over 10 us on a GPU family outside the fit, mean of a class",
            "kernels.md",
            "held-out",
            {"conditions": "^over 10 us"},
        ),
        SummaryLine(
            "training captured without a device: jobs that torchtitan published, bf16",
            "training-published.md",
            "torchtitan",
            {"case": "^(?!.*(float8|rowwise))"},
        ),
        SummaryLine("the same in float8", "training-published.md", "torchtitan", _FLOAT8),
        SummaryLine(
            "the same of new scripts, before they ran on 1 to 4 GPUs",
            "new-scripts.md",
            "new-scripts",
        ),
        SummaryLine(
            "step of a served model between measured points, CUDA graphs, median of its steps",
            "serving.md",
            "serving",
            {
                "case": "^(interpolated|measured with)",
                "conditions": "^replay; (40|20 steps; median)",
            },
        ),
        SummaryLine(
            "step of a served model from shapes alone, mean of its steps",
            "serving-shapes.md",
            "serving",
            {"case": "^from shapes alone,", "conditions": "mean$"},
        ),
        SummaryLine(
            "summed energy of a class of kernels", "energy.md", "power", {"case": "summed energy"}
        ),
    ),
}

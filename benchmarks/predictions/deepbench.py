"""GEMMs, convolutions and recurrent layers of Baidu's DeepBench, measured and predicted.

    git clone https://github.com/baidu-research/DeepBench
    python -m benchmarks.predictions.deepbench DeepBench/results/train

Reads DeepBench_NV_V100.xlsx and DeepBench_NV_T4.xlsx: 16-bit operands, CUDA 10.1, cuDNN 7.6, 2019.
No GEMM of these GPUs is part of a fit; their distance from the fitted GPUs is 2.3 and 3.3 (see
`likeness`). Three constants were chosen on these measurements: the time of a convolution over a
GEMM of its sizes (`tile_kernels`), the time of a recurrent step over its GEMM
(`recurrent.STEP_LAUNCHES`), and the weight of the tile model for so different a GPU.

  one product    the whole operator, from launch floor and roofline
  predicted      as `annotate` predicts an unmeasured call
  residual       from the other GPU's measurement, by the residual model
  from measured  from that measurement, as `annotate` predicts it

Convolutions with one or three input channels are excluded from the errors. DeepBench's recurrent
layers take their input without a GEMM; the gradients of input and weights are timed separately.
"""

import re
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from benchmarks.harness import parser_of, print_conditions
from onerank.annotate import load_gpu
from onerank.annotate.models import learned, roofline, scale_measured
from onerank.annotate.models.features import Timing, kernels_of
from onerank.annotate.op_costs.cost_record import Work
from onerank.annotate.op_costs.node_costs import work_of_call
from onerank.annotate.op_costs.operands import Call, Tensor
from onerank.ir.arrays import F64
from tools.fit.case_errors import errors_of
from tools.fit.evaluate_fit import Case

GPUS = "V100", "T4"
SHEET = "Results - FP16 ip, Mixed math"
MAIN = "{http://schemas.openxmlformats.org/spreadsheetml/2006/main}"
GATES = {"Vanilla": 1, "LSTM": 4, "GRU": 3}
Calls = dict[tuple[str, ...], tuple[Work, float]]
"""Sizes -> work of the call, and its measured time in ns."""


def main() -> None:
    """Print the table, and the errors of operators that consist of several GEMMs."""
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path, help="DeepBench/results/train")
    folder = parser.parse_args().folder
    measured = {name: read(folder / f"DeepBench_NV_{name}.xlsx") for name in GPUS}
    print_conditions()
    print(f"mean error in percent / mean factor off / mean of predicted over measured\n{'':24}"
          f"{'':6}{'calls':>6}{'one product':>20}{'predicted':>20}{'residual':>20}"
          f"{'from measured':>20}")  # fmt: skip
    cases: list[Case] = []
    for sort in measured["V100"]:
        for name, source in (GPUS, GPUS[::-1]):
            if calls := measured[name].get(sort):
                cases += report_class(sort, (name, calls), (source, measured[source].get(sort, {})))
    print('\nerrors of "composed":', errors_of(cases))


def report_class(sort: str, to: tuple[str, Calls], source: tuple[str, Calls]) -> Iterator[Case]:
    """Print the row of a class of calls; yield its predictions if a call is several GEMMs."""
    gpu, other = load_gpu(to[0]), load_gpu(source[0])
    works, times = [work for work, _ in to[1].values()], np.array([ns for _, ns in to[1].values()])
    single_gemm = kernels_of([replace(work, parts=()) for work in works], np.zeros(len(works)))
    # DeepBench times a loop of calls.
    calls = replace(kernels_of(works, np.zeros(len(works))), timing=Timing.CALL)
    predicted, _ = learned.predict_from_description(calls, gpu)
    cells = [
        figures(roofline.predict_from_datasheet(single_gemm, gpu)[0], times),
        figures(predicted, times),
    ]
    if shared_keys := [key for key in to[1] if key in source[1]]:
        before = np.array([source[1][key][1] for key in shared_keys])
        kernels = kernels_of([to[1][key][0] for key in shared_keys], before)
        kernels = replace(kernels, timing=Timing.CALL)
        after = np.array([to[1][key][1] for key in shared_keys])
        for model in (scale_measured.predict_by_residual, learned.predict_learned):
            cells.append(figures(model(kernels, other, gpu)[0], after))
    print(f"{sort:24}{to[0]:6}{len(works):6}" + "".join(f"{cell:>20}" for cell in cells))
    if works[0].parts and "few" not in sort:
        yield Case("composed", gpu, gpu, times, predicted, times)


def figures(predicted: F64, times: F64) -> str:
    """Return mean error, mean factor off and mean ratio, the last two geometric."""
    ratio = np.log(predicted / times)
    off = np.exp(np.abs(ratio).mean())
    return (
        f"{100 * np.abs(predicted / times - 1).mean():.0f} /{off:5.2f} /{np.exp(ratio.mean()):5.2f}"
    )


def read(path: Path) -> dict[str, Calls]:
    """Return the calls of a spreadsheet by class."""
    calls_of: dict[str, Calls] = {}
    section = ""
    for row in rows(path):
        head = row.get("A", "")
        if "Matrix" in head or head.startswith(("Convolution", "Recurrent", "All-Reduce")):
            section = head
            continue
        for sort, work, ms in calls(section, row):
            if time := number(row.get(ms)):
                columns = "CDEFGHIJKLM" if "conv" in sort else "CDEFG"
                key = tuple(row.get(column, "") for column in columns)
                calls_of.setdefault(sort, {})[key] = work, 1e6 * time
    return calls_of


def calls(section: str, row: dict[str, str]) -> Iterator[tuple[str, Work, str]]:
    """Yield (class of call, its work, column of its time in ms) for a row of the sheet."""
    sizes = [int(float(row.get(column, ""))) for column in "CDEFGHIJKLM"
             if number(row.get(column)) is not None]  # fmt: skip
    if "Matrix" in section and len(sizes) >= 3:
        m, n, k = sizes[:3]
        operands = tensor(m, k), tensor(k, n)
        yield "products", work_of_call("mm", Call("mm", operands, (tensor(m, n),), ())), "I"
    elif section.startswith("Convolution") and len(sizes) == 11:
        yield from convolution(*sizes)
    elif section.startswith("Recurrent") and len(sizes) >= 3:
        name = section.rsplit("- ", 1)[1].strip()
        yield from recurrent(name, *sizes[:3])


def convolution(  # noqa: PLR0917
    w: int, h: int, c: int, n: int, k: int, s: int, r: int, pw: int, ph: int, dw: int, dh: int
) -> Iterator[tuple[str, Work, str]]:
    """Yield a convolution of 32 channels and more, or of fewer, and its two gradients."""
    image, filters = tensor(n, c, h, w), tensor(k, c, r, s)
    result = tensor(n, k, (h + 2 * ph - r) // dh + 1, (w + 2 * pw - s) // dw + 1)
    suffix = "" if c >= 32 else ", few in"
    call = Call("convolution", (image, filters), (result,), (None,) * 6 + (False,))
    yield f"conv forward{suffix}", work_of_call("convolution", call), "N"
    values = (None,) * 7 + (False, None, None, [True, True, False])
    for name, results, column in (
        ("input", (image, None), "O"),
        ("filter", (None, filters), "P"),
    ):
        call = Call("convolution_backward", (result, image, filters), results, values)
        yield f"conv {name} gradient{suffix}", work_of_call(call.op, call), column


def recurrent(name: str, size: int, batch: int, steps: int) -> Iterator[tuple[str, Work, str]]:
    """Yield a layer's steps, forward and back, and its weights' gradient."""
    gates = GATES[name] * size
    weights = (*tensor(gates, size), *tensor(gates, size))
    operands = (tensor(steps, batch, size), weights, None, None, tensor(1, batch, size))
    ops = ("_cudnn_rnn", 0, "forward", "G"), ("_cudnn_rnn_backward", 0, "input gradient", "H"), (
        "_cudnn_rnn_backward", 2, "weight gradient", "I")  # fmt: skip
    for op, index, sort, column in ops:
        work = work_of_call(op, Call(op, operands, (), ()))
        part = work.parts[index]
        flops = 2 * gates * size * batch * steps
        moved = 2 * (gates * size + steps * batch * (gates + size))
        step = replace(work, flops=flops, bytes_read=moved, bytes_written=0, parts=(part,))
        yield f"{name} {sort}", step, column


def tensor(*shape: int) -> tuple[Tensor]:
    return (Tensor(shape, "float16", 2),)


def number(text: str | None) -> float | None:
    """Return the number in a cell; None if it contains none."""
    try:
        return float(text or "")
    except ValueError:
        return None


def rows(path: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of the sheet, column -> text."""
    with zipfile.ZipFile(path) as book:
        texts = ["".join(element.text or "" for element in text.iter(f"{MAIN}t"))
                 for text in ElementTree.fromstring(book.read("xl/sharedStrings.xml"))]  # fmt: skip
        workbook = ElementTree.fromstring(book.read("xl/workbook.xml"))
        names = [element.get("name") for element in workbook.iter(f"{MAIN}sheet")]
        sheet = book.read(f"xl/worksheets/sheet{names.index(SHEET) + 1}.xml")
    for row in ElementTree.fromstring(sheet).iter(f"{MAIN}row"):
        cells: dict[str, str] = {}
        for cell in row:
            text = cell.findtext(f"{MAIN}v")
            column = re.match("[A-Z]+", cell.get("r") or "")
            if text is not None and column:
                cells[column[0]] = texts[int(text)] if cell.get("t") == "s" else text
        yield cells


if __name__ == "__main__":
    main()

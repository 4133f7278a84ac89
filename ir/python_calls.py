"""Calls of Python that the host makes before an operator, besides the operator: kinds and counts.

A capture without a device counts them; the text of their counts is a column of the nodes. It also
marks the operators of DDP's reducer (`REDUCER`) and those that autograd does not record
(`UNTRACKED`).
"""

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from onerank.ir.errors import GraphError

PYTHON_CALLS = {
    "dtensor": "an operator that DTensor dispatches in a forward or a backward",
    "dtensor_untracked": "one where autograd records nothing, as in an optimizer",
    "dtensor_listed": "a DTensor in a list that an operator takes, as those of optimizers do",
    "redistribute": "a DTensor that changes its placement, without the collective",
    "subclass": "an operator that another subclass of Tensor dispatches in Python",
    "function": "a forward or a backward of an autograd function in Python",
    "fsdp_group": "a gather or a reduction of a group of FSDP, without the collective",
    "fsdp_parameter": "a parameter of such a group, for each gather and reduction",
    "split_group": "weights whose gradients a split backward of `torch.distributed.pipelining` "
    "computes by a call of autograd of their own",
}
"""Kinds and what they are."""

REDUCER = "reducer"
"""Mark of an operator that DDP's reducer runs in C++, with neither Python nor an autograd node."""

UNTRACKED = "untracked"
"""Mark of an operator where autograd records nothing, as under `no_grad`; none of a backward."""

MARKS = frozenset({REDUCER, UNTRACKED})
"""What the text of a node says of its own operator."""

_decode = msgspec.json.Decoder(dict[str, int]).decode


def python_calls_text(counts: Mapping[str, int]) -> str:
    """Return the text of counts by kind; "" for none."""
    return msgspec.json.encode(counts, order="sorted").decode() if counts else ""


def python_calls_of(text: str) -> Counter[str]:
    """Return the counts by kind of a text of `python_calls_text`.

    Raises:
        GraphError: it is no such text.
    """
    if not text:
        return Counter()
    try:
        counts = _decode(text)
    except msgspec.MsgspecError as error:
        raise GraphError(
            f"the Python calls of a node are {text!r}; expected counts by kind ({error})",
            code="python-calls-malformed",
        ) from None
    unknown = counts.keys() - PYTHON_CALLS.keys() - MARKS
    if unknown or any(count < 0 for count in counts.values()):
        raise GraphError(
            f"the Python calls of a node are {text!r}; expected counts from 0 of the kinds "
            f"{', '.join([*PYTHON_CALLS, *sorted(MARKS)])}",
            code="python-calls-malformed",
        )
    return Counter(counts)


def autograd_functions(names: Iterable[str]) -> set[str]:
    """Return those of a profiler's names that are ranges of autograd functions in Python.

    torch names the range of a forward after the function's class, and of its backward the class
    with "Backward". Functions in C++ end in a number, such as MulBackward0.
    """
    known = set(names)
    forwards = {name for name in known if f"{name}Backward" in known}
    return forwards | {f"{name}Backward" for name in forwards}

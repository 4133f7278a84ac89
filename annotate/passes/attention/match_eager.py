"""Match eager attention and its mask in a step, by data flow.

The softmax reads the scores, which come from the product of queries and keys through kernels that
work on each score (scaling, mask, casts). It produces the probabilities, which reach the product
with the values in the same way (casts, dropout). The softmax backward identifies the backward pass:
its input comes from dP = dO V^T, its result reaches dQ and dK, and the product of the probabilities
with dO is dV.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from onerank.annotate.passes.attention.dataflow import OUTSIDE, Call, Flow, Operand
from onerank.annotate.passes.attention.eager_kernels import Sizes

_COMPARES = frozenset("le lt ge gt".split())

_TRIANGLES = frozenset("tril triu tril_ triu_".split())


def masked(flow: Flow, masks: list[Operand], sizes: Sizes) -> tuple[str, bool]:
    """Return how a mask is known to be causal, and whether there is one that is not."""
    causal, padded = "", False
    for mask in masks:
        shape = mask.tensor.shape
        if len(shape) < 2 or shape[-2:] != (sizes.rows, sizes.keys):
            padded = True
            continue
        if any(_compares(one) for one in origins(flow, (mask,))):
            causal = "made"
        elif _is_of_all(flow, mask):
            causal = causal or "square"
        else:
            padded = True
    return causal, padded


def _is_of_all(flow: Flow, mask: Operand) -> bool:
    """Return whether a square mask, the same for all sequences, was there before the step."""
    shape = mask.tensor.shape
    if shape[-1] != shape[-2] or any(size > 1 for size in shape[:-2]):
        return False
    at = flow.contents[mask.content].maker
    if at == OUTSIDE:
        return True
    return any(_is_of_all(flow, one) for one in flow.calls[at].reads if len(one.tensor.shape) > 1)


def _compares(call: Call) -> bool:
    """Return whether a call compares the positions of rows and keys, or cuts off a triangle."""
    if call.op in _TRIANGLES:
        return True
    several = [one for one in call.reads if one.tensor.numel > 1]
    return call.op in _COMPARES and len(several) > 1


def origins(flow: Flow, operands: Iterable[Operand], since: int = OUTSIDE) -> list[Call]:
    """Return the calls that tensors come from, those later than one."""
    found, seen = list[Call](), set[int]()
    waiting = [one.content for one in operands]
    while waiting:
        content = waiting.pop()
        at = flow.contents[content].maker
        if content in seen or at <= since:
            continue
        seen.add(content)
        found.append(flow.calls[at])
        waiting += [one.content for one in flow.calls[at].reads]
    return found


_PRODUCTS = frozenset({"bmm", "baddbmm"})

_EACH_SCORE = frozenset(
    "copy_ _to_copy mul mul_ div div_ add add_ sub sub_ masked_fill masked_fill_ where "
    "native_dropout native_dropout_backward _masked_scale masked_scale".split()
)

_COPY = "copy_"

_DROPS = frozenset({"native_dropout", "bernoulli_", "_fused_dropout"})


class Pass(NamedTuple):
    """Forward or backward of a call.

    Attributes:
        members: positions of the calls that it is made of, ascending.
        product: the one in whose place a fused kernel runs: of forward the product with the values,
            of backward the first product.
    """

    members: tuple[int, ...]
    product: int


class Forward(NamedTuple):
    """Queries, keys, values and the output, as a fused kernel takes them."""

    query: Operand
    key: Operand
    value: Operand
    out: Operand


class Gradients(NamedTuple):
    """Of the output, the queries, the keys and the values, as a fused kernel has them."""

    out: Operand
    query: Operand
    key: Operand
    value: Operand


@dataclass(frozen=True, slots=True)
class EagerCall:
    """Eager attention: attention without a fused kernel.

    Attributes:
        sizes: heads, rows, keys and widths.
        causal: how causality is known: "made", the mask is made by comparing positions; "square", a
            square mask for all sequences existed before the step; "" for attention to all keys.
        padded: whether there is a mask that is not causal.
        dropout: whether probabilities are dropped.
        forward: calls of the forward pass.
        tensors: its tensors.
        backward: calls of the backward pass, None without backward.
        gradients: its tensors.
    """

    sizes: Sizes
    causal: str
    padded: bool
    dropout: bool
    forward: Pass
    tensors: Forward
    backward: Pass | None
    gradients: Gradients | None

    @property
    def passes(self) -> tuple[Pass, ...]:
        """Forward, and backward where there is one."""
        return (self.forward,) if self.backward is None else (self.forward, self.backward)

    @property
    def members(self) -> set[int]:
        """Positions of all calls."""
        return {member for one in self.passes for member in one.members}

    @property
    def inputs(self) -> set[int]:
        """Contents that fused kernels read: the operands and the gradient of the output."""
        given = (self.gradients.out,) if self.gradients else ()
        return {one.content for one in (*self.tensors[:3], *given)}

    @property
    def outputs(self) -> set[int]:
        """Contents that others read: the output and the gradients of the operands."""
        gradients = self.gradients[1:] if self.gradients else ()
        return {self.tensors.out.content, *(one.content for one in gradients)}


def softmaxes(flow: Flow) -> int:
    """Return how many softmaxes read what comes from a product by way of each score."""
    return sum(_scores(flow, call) is not None for call in flow.calls if call.op == "_softmax")


def eager_calls(flow: Flow) -> list[EagerCall]:
    """Return the calls of attention whose scores nothing else reads."""
    found = [_call(flow, at) for at, call in enumerate(flow.calls) if call.op == "_softmax"]
    return [one for one in found if one is not None]


class _Scores(NamedTuple):
    """The way from a product to a softmax: calls, and what else they read."""

    product: int
    members: tuple[int, ...]
    others: tuple[Operand, ...]


def _scores(flow: Flow, softmax: Call) -> _Scores | None:
    if (
        len(softmax.reads) != 1
        or len(softmax.writes) != 1
        or len(softmax.reads[0].tensor.shape) < 3
    ):
        return None
    return _origin(flow, softmax.reads[0])


def _origin(flow: Flow, operand: Operand) -> _Scores | None:
    """Follow scores back to the product that they come from."""
    at = flow.contents[operand.content].maker
    if at == OUTSIDE:
        return None
    call, elements = flow.calls[at], operand.tensor.numel
    if call.op in _PRODUCTS and call.writes[0].tensor.numel == elements:
        return _Scores(at, (at,), ())
    if call.op not in _EACH_SCORE or call.writes[0].tensor.numel != elements:
        return None
    for place, read in enumerate(call.reads):
        if read.tensor.numel != elements:
            continue
        if (way := _origin(flow, read)) is not None:
            others = (*call.reads[:place], *call.reads[place + 1 :])
            return _Scores(way.product, (*way.members, at), (*way.others, *others))
    return None


def _call(flow: Flow, softmax: int) -> EagerCall | None:
    """Return the attention around a softmax call; None if others read its tensors."""
    scores = _scores(flow, flow.calls[softmax])
    if scores is None:
        return None
    kept = flow.calls[softmax].writes[0]
    way = _to_product(flow, kept, softmax)
    sizes = _sizes(flow, scores, flow.calls[softmax], way) if way else None
    if way is None or sizes is None:
        return None
    masks = [one for one in scores.others if one.tensor.numel > 1]
    if any(len(m.tensor.shape) > 2 and m.tensor.shape[-3] > 1 for m in masks):
        return None  # a bias for each head
    added = flow.calls[scores.product].reads[:-2]
    if any(1 < one.tensor.numel < kept.tensor.numel for one in added):
        return None  # the product is added to one
    undo = next((at for at in flow.readers[kept.content]
                 if flow.calls[at].op == "_softmax_backward_data"), None)  # fmt: skip
    back = None if undo is None else _backward(flow, scores, way, undo)
    if undo is not None and back is None:
        return None
    on_way = [one for at in way[:-1] for one in flow.calls[at].reads]
    dropped = any(flow.calls[at].op in _DROPS for at in way)
    dropped |= any(one.op in _DROPS for one in origins(flow, on_way, since=softmax))
    members = {*scores.members, softmax, *way}
    return _closed(flow, scores, way, members, back, sizes, masks, dropout=dropped)


def _to_product(flow: Flow, operand: Operand, after: int) -> tuple[int, ...] | None:
    """Follow probabilities to the product with the values; return the calls on the way."""
    at = next((one for one in flow.readers[operand.content] if one > after), None)
    if at is None:
        return None
    call = flow.calls[at]
    if call.op in _PRODUCTS:
        return (at,) if _factors(call)[0].content == operand.content else None
    if call.op not in _EACH_SCORE or call.writes[0].tensor.numel != operand.tensor.numel:
        return None
    way = _to_product(flow, call.writes[0], at)
    return (at, *way) if way else None


def _factors(product: Call) -> tuple[Operand, Operand]:
    """Return what a product multiplies; what `baddbmm` adds to comes before."""
    return product.reads[-2], product.reads[-1]


def _sizes(flow: Flow, scores: _Scores, softmax: Call, way: tuple[int, ...]) -> Sizes | None:
    shape = softmax.reads[0].tensor.shape
    batch, heads = shape[:2] if len(shape) == 4 else (1, shape[0])
    query, _ = _factors(flow.calls[scores.product])
    probabilities, value = _factors(flow.calls[way[-1]])
    rows, keys = shape[-2:]
    if probabilities.tensor.shape[-2:] != (rows, keys) or len(shape) > 4:
        return None
    return Sizes(batch, heads, heads, rows, keys, query.tensor.shape[-1], value.tensor.shape[-1])


class _Back(NamedTuple):
    """Backward: its calls, the product of each gradient, and that of the probabilities."""

    members: frozenset[int]
    scores: int
    query: int
    key: int
    value: int


def _backward(flow: Flow, scores: _Scores, way: tuple[int, ...], undo: int) -> _Back | None:
    read = flow.calls[undo].reads
    origin = _origin(flow, read[0])
    if origin is None or not flow.calls[undo].writes:
        return None
    query, key = _factors(flow.calls[scores.product])
    probabilities, value = _factors(flow.calls[way[-1]])
    factors = _factors(flow.calls[origin.product])
    grad = next((one for one in factors if not _same(one, value)), None)
    on, products = _to_gradients(flow, flow.calls[undo].writes[0])
    named = dict[str, int]()
    for at in products:
        others = [one for one in _factors(flow.calls[at]) if not _is_scores(one, flow, on)]
        for name, tensor in (("query", key), ("key", query)):
            if others and _same(others[0], tensor):
                named.setdefault(name, at)
    for at in flow.readers[probabilities.content]:
        call = flow.calls[at]
        if at == way[-1] or call.op not in _PRODUCTS or grad is None:
            continue
        if any(_same(one, grad) for one in _factors(call)):
            named.setdefault("value", at)
    if len(named) != 3 or len(products) != 2:
        return None
    members = frozenset({undo, *origin.members, *on, *named.values()})
    return _Back(members, origin.product, named["query"], named["key"], named["value"])


def _same(one: Operand, other: Operand) -> bool:
    """Return whether two calls read the same part of the same content, however it is viewed."""
    return (one.content, one.place.offset) == (other.content, other.place.offset)


def _is_scores(operand: Operand, flow: Flow, on: tuple[int, ...]) -> bool:
    return operand.content == flow.calls[on[-1]].writes[0].content


def _to_gradients(flow: Flow, operand: Operand) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Follow the scores' gradient to two products; return the calls on the way, and these.

    The first of the calls on the way is the one that wrote it.
    """
    on = [flow.contents[operand.content].maker]
    while True:
        readers = flow.readers[operand.content]
        if len(readers) != 1 or flow.calls[readers[0]].op not in _EACH_SCORE:
            return tuple(on), tuple(at for at in readers if flow.calls[at].op in _PRODUCTS)
        on.append(readers[0])
        operand = flow.calls[readers[0]].writes[0]


def _closed(  # noqa: PLR0917
    flow: Flow,
    scores: _Scores,
    way: tuple[int, ...],
    ahead: set[int],
    back: _Back | None,
    sizes: Sizes,
    masks: list[Operand],
    *,
    dropout: bool,
) -> EagerCall | None:
    """Return the call with the copies around it, None where others read what it keeps to itself."""
    behind = set(back.members) if back else set[int]()
    query, key = _factors(flow.calls[scores.product])
    _, value = _factors(flow.calls[way[-1]])
    behind |= _unread(flow, ahead | behind)
    every = ahead | behind
    query, copies_q, _ = _source(flow, query, every)
    key, copies_k, shared_k = _source(flow, key, every | copies_q)
    value, copies_v, shared_v = _source(flow, value, every | copies_q | copies_k)
    ahead |= copies_q | copies_k | copies_v
    out, copies = _result(flow, flow.calls[way[-1]].writes[0], 1)
    ahead |= copies
    gradients = None
    if back is not None:
        first = _factors(flow.calls[back.scores])
        given = next(one for one in first if not _same(one, _factors(flow.calls[way[-1]])[1]))
        given, copies, _ = _source(flow, given, ahead | behind)
        behind |= copies
        made = list[Operand]()
        for at in (back.query, back.key, back.value):
            repeats = 1 if at == back.query else max(shared_k, shared_v)
            one, copies = _result(flow, flow.calls[at].writes[0], repeats)
            behind |= copies
            made.append(one)
        gradients = Gradients(given, *made)
    group = max(shared_k, shared_v)
    if shared_k != shared_v or sizes.heads % group:
        return None
    causal, padded = masked(flow, masks, sizes)
    found = EagerCall(
        sizes._replace(key_heads=sizes.heads // group),
        causal,
        padded,
        dropout,
        Pass(tuple(sorted(ahead)), way[-1]),
        Forward(query, key, value, out),
        Pass(tuple(sorted(behind)), min(back.scores, back.value)) if back else None,
        gradients,
    )
    return found if _keeps_to_itself(flow, found) else None


def _keeps_to_itself(flow: Flow, call: EagerCall) -> bool:
    """Return whether nothing else reads what its calls write, except its results."""
    members, outputs = call.members, call.outputs
    made = {one.content for at in members for one in flow.calls[at].writes} - outputs
    readers = (at for one in made for at in (*flow.readers[one], *flow.beside[one]))
    return all(at in members for at in readers)


def _unread(flow: Flow, members: set[int]) -> set[int]:
    """Return calls that read what the members wrote, and whose results nothing reads.

    On a GPU the softmax backward has such a kernel; the next kernel reads its result under another
    name.
    """
    readers = {
        at for one in members for w in flow.calls[one].writes for at in flow.readers[w.content]
    }
    return {
        at for at in readers - members
        if flow.calls[at].op in _EACH_SCORE and flow.calls[at].writes
        and not any(flow.readers[one.content] for one in flow.calls[at].writes)
    }  # fmt: skip


def _source(flow: Flow, operand: Operand, members: set[int]) -> tuple[Operand, set[int], int]:
    """Return the original of an operand that was only copied, the copies, and the repetitions.

    A fused kernel takes any strides, and takes shared keys and values once.
    """
    copies, repeats = set[int](), 1
    while True:
        at = flow.contents[operand.content].maker
        call = flow.calls[at] if at != OUTSIDE else None
        if call is None or call.op != _COPY or len(call.reads) != 1:
            break
        read, wrote = call.reads[0], call.writes[0]
        alike = read.type == wrote.type and wrote.tensor.numel == operand.tensor.numel
        if not alike or not set(flow.readers[wrote.content]) <= members | copies:
            break
        copies.add(at)
        repeats = max(repeats, _repeats(flow, read))
        operand = read
    return operand, copies, repeats


def _repeats(flow: Flow, read: Operand) -> int:
    """Return how often a tensor that is read has each element of what it views."""
    elements, there = read.tensor.numel, flow.contents[read.content].tensor.numel
    if there < elements and not elements % there:
        return elements // there
    return read.tensor.shape[2] if len(read.tensor.shape) == 5 else 1


def _result(flow: Flow, operand: Operand, repeats: int) -> tuple[Operand, set[int]]:
    """Return what a result becomes through copies, and sums over heads that share keys."""
    copies = set[int]()
    while len(readers := flow.readers[operand.content]) == 1:
        call = flow.calls[readers[0]]
        if not call.reads or not call.writes or call.reads[0].type != call.writes[0].type:
            break
        whole = call.op == _COPY and call.writes[0].tensor.numel == operand.tensor.numel
        whole &= flow.contents[call.writes[0].content].tensor.numel == operand.tensor.numel
        summed = call.op == "sum" and repeats > 1
        summed &= call.writes[0].tensor.numel * repeats == operand.tensor.numel
        if not whole and not summed:
            break
        copies.add(readers[0])
        repeats = 1 if summed else repeats
        operand = call.writes[0]
    return operand, copies

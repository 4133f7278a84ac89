"""Match eager attention and its mask in a step, by data flow.

The softmax reads the scores, which come from the product of queries and keys through kernels that
work on each score (scaling, mask, casts). It produces the probabilities, which reach the product
with the values in the same way (casts, dropout). The softmax backward identifies the backward pass:
its input comes from dP = dO V^T, its result reaches dQ and dK, and the product of the probabilities
with dO is dV.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from onerank.annotate.op_costs.cost_record import AttentionSizes
from onerank.annotate.passes.dataflow import BEFORE_STEP, DeviceCall, Flow, Operand

_COMPARES = frozenset("le lt ge gt".split())

_TRIANGLES = frozenset("tril triu tril_ triu_".split())


def classify_masks(flow: Flow, masks: Sequence[Operand], sizes: AttentionSizes) -> tuple[str, bool]:
    """Return the evidence of causality (see `EagerCall`), and whether another mask exists."""
    causal, padded = "", False
    for mask in masks:
        shape = mask.tensor.shape
        if len(shape) < 2 or shape[-2:] != (sizes.rows, sizes.keys):
            padded = True
            continue
        # The shape proves nothing: BERT's padding mask has a row per query too.
        if any(_compares(producer) for producer in producers(flow, (mask,))):
            causal = "compared"
        elif _is_shared_square_mask(flow, mask):
            causal = causal or "square"
        else:
            padded = True
    return causal, padded


def _is_shared_square_mask(flow: Flow, mask: Operand) -> bool:
    """Return whether a square mask, shared by all sequences, existed before the step."""
    shape = mask.tensor.shape
    if shape[-1] != shape[-2] or any(size > 1 for size in shape[:-2]):
        return False
    writer = flow.contents[mask.content].writer
    if writer == BEFORE_STEP:
        return True
    return any(
        _is_shared_square_mask(flow, operand)
        for operand in flow.calls[writer].reads
        if len(operand.tensor.shape) > 1
    )


def _compares(call: DeviceCall) -> bool:
    """Return whether a call compares positions of rows and keys, or cuts off a triangle."""
    if call.op in _TRIANGLES:
        return True
    # A comparison with a number makes a padding mask; a causal one compares two tensors of
    # positions.
    tensors = [operand for operand in call.reads if operand.tensor.numel > 1]
    return call.op in _COMPARES and len(tensors) > 1


def producers(
    flow: Flow, operands: Iterable[Operand], since: int = BEFORE_STEP
) -> list[DeviceCall]:
    """Return the calls that directly or indirectly produced the operands, after call `since`."""
    calls, seen = list[DeviceCall](), set[int]()
    queue = [operand.content for operand in operands]
    while queue:
        content = queue.pop()
        writer = flow.contents[content].writer
        if content in seen or writer <= since:
            continue
        seen.add(content)
        calls.append(flow.calls[writer])
        queue += [operand.content for operand in flow.calls[writer].reads]
    return calls


_PRODUCTS = frozenset({"bmm", "baddbmm"})

# What models do to scores between the two products: scale, mask, drop, cast.
_EACH_SCORE = frozenset(
    "copy_ _to_copy mul mul_ div div_ add add_ sub sub_ masked_fill masked_fill_ where "
    "native_dropout native_dropout_backward _masked_scale masked_scale".split()
)

_COPY = "copy_"

# Dropout is one operator, or a mask by `bernoulli_` that a product applies.
_DROPS = frozenset({"native_dropout", "bernoulli_", "_fused_dropout"})


class AttentionPass(NamedTuple):
    """Forward or backward of a call.

    Attributes:
        members: indices of its calls, ascending.
        product: index of the call that the fused kernel replaces: the product with the values in
            forward, the first product in backward.
    """

    members: tuple[int, ...]
    product: int


class Forward(NamedTuple):
    """Queries, keys, values and the output of a fused forward kernel."""

    query: Operand
    key: Operand
    value: Operand
    out: Operand


class Gradients(NamedTuple):
    """Gradients of the output, queries, keys and values of a fused backward kernel."""

    out: Operand
    query: Operand
    key: Operand
    value: Operand


@dataclass(frozen=True, slots=True)
class EagerCall:
    """Eager attention: attention without a fused kernel.

    Attributes:
        sizes: heads, rows, keys and widths.
        causal: evidence of causality: "compared" if the step compares positions to make the mask,
            "square" if a square mask for all sequences existed before; "" if not causal.
        padded: whether there is a mask that is not causal.
        dropout: whether dropout applies to the probabilities.
        forward: calls of the forward pass.
        tensors: its tensors.
        backward: calls of the backward pass, None without backward.
        gradients: its tensors.
    """

    sizes: AttentionSizes
    causal: str
    padded: bool
    dropout: bool
    forward: AttentionPass
    tensors: Forward
    backward: AttentionPass | None
    gradients: Gradients | None

    @property
    def passes(self) -> tuple[AttentionPass, ...]:
        """Forward, and backward where there is one."""
        return (self.forward,) if self.backward is None else (self.forward, self.backward)

    @property
    def members(self) -> set[int]:
        """Indices of all calls."""
        return {member for pass_ in self.passes for member in pass_.members}

    @property
    def inputs(self) -> set[int]:
        """Contents that fused kernels read: the operands and the gradient of the output."""
        out_gradient = (self.gradients.out,) if self.gradients else ()
        return {operand.content for operand in (*self.tensors[:3], *out_gradient)}

    @property
    def outputs(self) -> set[int]:
        """Contents that other calls read: the output and the gradients of the operands."""
        gradients = self.gradients[1:] if self.gradients else ()
        return {self.tensors.out.content, *(operand.content for operand in gradients)}


def softmaxes(flow: Flow) -> int:
    """Return the number of softmaxes over a product that only elementwise calls changed."""
    return sum(
        _match_scores(flow, call) is not None for call in flow.calls if call.op == "_softmax"
    )


def eager_calls(flow: Flow) -> list[EagerCall]:
    """Return the calls of attention whose scores no other call reads."""
    calls = [
        _match_call(flow, index) for index, call in enumerate(flow.calls) if call.op == "_softmax"
    ]
    return [call for call in calls if call is not None]


class _Scores(NamedTuple):
    """The path from a product to a softmax: its calls, and their other operands."""

    product: int
    members: tuple[int, ...]
    others: tuple[Operand, ...]


def _match_scores(flow: Flow, softmax: DeviceCall) -> _Scores | None:
    if (
        len(softmax.reads) != 1
        or len(softmax.writes) != 1
        or len(softmax.reads[0].tensor.shape) < 3
    ):
        return None
    return _path_from_product(flow, softmax.reads[0])


def _path_from_product(flow: Flow, operand: Operand) -> _Scores | None:
    """Return the path from a product to the scores; None if there is none."""
    writer = flow.contents[operand.content].writer
    if writer == BEFORE_STEP:
        return None
    call, elements = flow.calls[writer], operand.tensor.numel
    # Equal elements: a product of other size in the path makes a mask or a bias, not the scores.
    if call.op in _PRODUCTS and call.writes[0].tensor.numel == elements:
        return _Scores(writer, (writer,), ())
    if call.op not in _EACH_SCORE or call.writes[0].tensor.numel != elements:
        return None
    for index, read in enumerate(call.reads):
        if read.tensor.numel != elements:
            continue
        if (path := _path_from_product(flow, read)) is not None:
            others = (*call.reads[:index], *call.reads[index + 1 :])
            return _Scores(path.product, (*path.members, writer), (*path.others, *others))
    return None


def _match_call(flow: Flow, softmax: int) -> EagerCall | None:
    """Return the attention around a softmax call; None if other calls read its tensors."""
    scores = _match_scores(flow, flow.calls[softmax])
    if scores is None:
        return None
    probabilities = flow.calls[softmax].writes[0]
    path = _path_to_product(flow, probabilities, softmax)
    sizes = _sizes(flow, scores, flow.calls[softmax], path) if path else None
    if path is None or sizes is None:
        return None
    masks = [operand for operand in scores.others if operand.tensor.numel > 1]
    if any(len(mask.tensor.shape) > 2 and mask.tensor.shape[-3] > 1 for mask in masks):
        # A bias per head, as in T5, which fused kernels do not support.
        return None
    added = flow.calls[scores.product].reads[:-2]
    if any(1 < operand.tensor.numel < probabilities.tensor.numel for operand in added):
        # `baddbmm` adds a bias per head to the product, as in Bloom.
        return None
    softmax_backward = next((index for index in flow.readers[probabilities.content]
                 if flow.calls[index].op == "_softmax_backward_data"), None)  # fmt: skip
    backward = (
        None if softmax_backward is None else _match_backward(flow, scores, path, softmax_backward)
    )
    # Fusing the forward alone would leave a backward that reads scores which no longer exist.
    if softmax_backward is not None and backward is None:
        return None
    path_reads = [operand for index in path[:-1] for operand in flow.calls[index].reads]
    dropout = any(flow.calls[index].op in _DROPS for index in path)
    dropout |= any(operand.op in _DROPS for operand in producers(flow, path_reads, since=softmax))
    members = frozenset({*scores.members, softmax, *path})
    forward = _ForwardMatch(members, scores.product, path[-1])
    return _complete(flow, _Match(forward, backward, sizes, tuple(masks), dropout))


def _path_to_product(flow: Flow, operand: Operand, after: int) -> tuple[int, ...] | None:
    """Return the calls from the probabilities to the product with the values; None for no path."""
    reader = next(
        (candidate for candidate in flow.readers[operand.content] if candidate > after), None
    )
    if reader is None:
        return None
    call = flow.calls[reader]
    if call.op in _PRODUCTS:
        return (reader,) if _factors(call)[0].content == operand.content else None
    if call.op not in _EACH_SCORE or call.writes[0].tensor.numel != operand.tensor.numel:
        return None
    path = _path_to_product(flow, call.writes[0], reader)
    return (reader, *path) if path else None


def _factors(product: DeviceCall) -> tuple[Operand, Operand]:
    """Return the two factors of a product; the addend of `baddbmm` precedes them."""
    return product.reads[-2], product.reads[-1]


def _sizes(
    flow: Flow, scores: _Scores, softmax: DeviceCall, path: tuple[int, ...]
) -> AttentionSizes | None:
    shape = softmax.reads[0].tensor.shape
    batch, heads = shape[:2] if len(shape) == 4 else (1, shape[0])
    query, _ = _factors(flow.calls[scores.product])
    probabilities, value = _factors(flow.calls[path[-1]])
    rows, keys = shape[-2:]
    if probabilities.tensor.shape[-2:] != (rows, keys) or len(shape) > 4:
        return None
    return AttentionSizes(
        batch, heads, heads, rows, keys, query.tensor.shape[-1], value.tensor.shape[-1]
    )


class _BackwardMatch(NamedTuple):
    """Indices of the calls of backward, and of its products.

    Attributes:
        members: all calls.
        scores: product that gives the gradient of the probabilities, dP = dO V^T.
        query: product that gives dQ.
        key: product that gives dK.
        value: product that gives dV.
    """

    members: frozenset[int]
    scores: int
    query: int
    key: int
    value: int


class _ForwardMatch(NamedTuple):
    """Indices of the calls of forward, and of its products.

    Attributes:
        members: all calls.
        scores: product of queries and keys.
        output: product of probabilities and values.
    """

    members: frozenset[int]
    scores: int
    output: int


class _Match(NamedTuple):
    """The attention around a softmax, without the copies of its tensors.

    Attributes:
        forward: calls of forward.
        backward: calls of backward; None without any.
        sizes: heads, rows, keys and widths.
        masks: what is added to the scores or replaces them.
        dropout: whether dropout applies to the probabilities.
    """

    forward: _ForwardMatch
    backward: _BackwardMatch | None
    sizes: AttentionSizes
    masks: tuple[Operand, ...]
    dropout: bool


def _match_backward(
    flow: Flow, scores: _Scores, path: tuple[int, ...], softmax_backward: int
) -> _BackwardMatch | None:
    read = flow.calls[softmax_backward].reads
    score_gradient = _path_from_product(flow, read[0])
    if score_gradient is None or not flow.calls[softmax_backward].writes:
        return None
    query, key = _factors(flow.calls[scores.product])
    probabilities, value = _factors(flow.calls[path[-1]])
    factors = _factors(flow.calls[score_gradient.product])
    out_gradient = next((factor for factor in factors if not _is_same_view(factor, value)), None)
    path_after, products = _path_to_gradients(flow, flow.calls[softmax_backward].writes[0])
    products_by_name = dict[str, int]()
    for index in products:
        others = [
            factor
            for factor in _factors(flow.calls[index])
            if not _is_score_gradient(factor, flow, path_after)
        ]
        for name, tensor in (("query", key), ("key", query)):
            # dQ = dS K and dK = dS^T Q: the factor that is not dS identifies the product.
            if others and _is_same_view(others[0], tensor):
                products_by_name.setdefault(name, index)
    for index in flow.readers[probabilities.content]:
        call = flow.calls[index]
        if index == path[-1] or call.op not in _PRODUCTS or out_gradient is None:
            continue
        if any(_is_same_view(factor, out_gradient) for factor in _factors(call)):
            products_by_name.setdefault("value", index)
    # All three gradients, or the fused backward would compute some that the step does not.
    if len(products_by_name) != 3 or len(products) != 2:
        return None
    members = frozenset(
        {softmax_backward, *score_gradient.members, *path_after, *products_by_name.values()}
    )
    return _BackwardMatch(
        members,
        score_gradient.product,
        products_by_name["query"],
        products_by_name["key"],
        products_by_name["value"],
    )


def _is_same_view(operand: Operand, other: Operand) -> bool:
    """Return whether two operands view the same content at the same offset."""
    return (operand.content, operand.place.offset) == (other.content, other.place.offset)


def _is_score_gradient(operand: Operand, flow: Flow, path_after: tuple[int, ...]) -> bool:
    return operand.content == flow.calls[path_after[-1]].writes[0].content


def _path_to_gradients(flow: Flow, operand: Operand) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the calls from the scores' gradient to products, and these products.

    The first call is the writer of the scores' gradient.
    """
    path = [flow.contents[operand.content].writer]
    while True:
        readers = flow.readers[operand.content]
        if len(readers) != 1 or flow.calls[readers[0]].op not in _EACH_SCORE:
            return tuple(path), tuple(
                reader for reader in readers if flow.calls[reader].op in _PRODUCTS
            )
        path.append(readers[0])
        operand = flow.calls[readers[0]].writes[0]


def _complete(flow: Flow, match: _Match) -> EagerCall | None:
    """Return the call with the copies around it; None if other calls read its internal tensors."""
    forward, backward = match.forward, match.backward
    forward_members = set(forward.members)
    backward_members = set(backward.members) if backward else set[int]()
    query, key = _factors(flow.calls[forward.scores])
    _, value = _factors(flow.calls[forward.output])
    backward_members |= _unread_results(flow, forward_members | backward_members)
    members = forward_members | backward_members
    query, copies_q, _ = _uncopied(flow, query, members)
    key, copies_k, shared_k = _uncopied(flow, key, members | copies_q)
    value, copies_v, shared_v = _uncopied(flow, value, members | copies_q | copies_k)
    forward_members |= copies_q | copies_k | copies_v
    out, copies = _final_result(flow, flow.calls[forward.output].writes[0], 1)
    forward_members |= copies
    group = max(shared_k, shared_v)
    gradients = None
    if backward is not None:
        others = forward_members | backward_members
        gradients, copies = _gradients(flow, forward, backward, others, group)
        backward_members |= copies
    # Keys and values of grouped heads are repeated equally often, or it is another attention.
    if shared_k != shared_v or match.sizes.heads % group:
        return None
    causal, padded = classify_masks(flow, match.masks, match.sizes)
    call = EagerCall(
        match.sizes._replace(key_heads=match.sizes.heads // group),
        causal,
        padded,
        match.dropout,
        AttentionPass(tuple(sorted(forward_members)), forward.output),
        Forward(query, key, value, out),
        AttentionPass(tuple(sorted(backward_members)), min(backward.scores, backward.value))
        if backward
        else None,
        gradients,
    )
    return call if _is_self_contained(flow, call) else None


def _gradients(
    flow: Flow, forward: _ForwardMatch, backward: _BackwardMatch, others: set[int], group: int
) -> tuple[Gradients, set[int]]:
    """Return the gradients of an attention, and the calls that copy them.

    Args:
        flow: data flow of the step.
        forward: its calls of forward.
        backward: its calls of backward.
        others: its calls so far.
        group: queries' heads that share a head of keys.
    """
    _, value = _factors(flow.calls[forward.output])
    factors = _factors(flow.calls[backward.scores])
    out_gradient = next(factor for factor in factors if not _is_same_view(factor, value))
    out_gradient, copies, _ = _uncopied(flow, out_gradient, others)
    operand_gradients = list[Operand]()
    for product in (backward.query, backward.key, backward.value):
        repeats = 1 if product == backward.query else group
        gradient, copies_after = _final_result(flow, flow.calls[product].writes[0], repeats)
        copies = copies | copies_after
        operand_gradients.append(gradient)
    return Gradients(out_gradient, *operand_gradients), copies


def _is_self_contained(flow: Flow, call: EagerCall) -> bool:
    """Return whether other calls read nothing of a call except its results."""
    members, outputs = call.members, call.outputs
    internal = {
        operand.content for index in members for operand in flow.calls[index].writes
    } - outputs
    readers = (
        index
        for content in internal
        for index in (*flow.readers[content], *flow.remainder_readers[content])
    )
    return all(index in members for index in readers)


def _unread_results(flow: Flow, members: set[int]) -> set[int]:
    """Return calls that read results of the members, and whose results nothing reads.

    The softmax backward of a GPU launches such a kernel: the next kernel reads its result under
    another tensor id.
    """
    readers = {
        reader
        for member in members
        for result in flow.calls[member].writes
        for reader in flow.readers[result.content]
    }
    return {
        reader for reader in readers - members
        if flow.calls[reader].op in _EACH_SCORE and flow.calls[reader].writes
        and not any(flow.readers[member.content] for member in flow.calls[reader].writes)
    }  # fmt: skip


def _uncopied(flow: Flow, operand: Operand, members: set[int]) -> tuple[Operand, set[int], int]:
    """Return the operand before any copies, the copies, and the repetitions of shared heads.

    A fused kernel supports any strides, and reads shared keys and values once.
    """
    copies, repeats = set[int](), 1
    while True:
        writer = flow.contents[operand.content].writer
        call = flow.calls[writer] if writer != BEFORE_STEP else None
        if call is None or call.op != _COPY or len(call.reads) != 1:
            break
        read, wrote = call.reads[0], call.writes[0]
        is_plain_copy = read.type == wrote.type and wrote.tensor.numel == operand.tensor.numel
        if not is_plain_copy or not set(flow.readers[wrote.content]) <= members | copies:
            break
        copies.add(writer)
        repeats = max(repeats, _repetitions(flow, read))
        operand = read
    return operand, copies, repeats


def _repetitions(flow: Flow, read: Operand) -> int:
    """Return how often a view repeats each element of its storage."""
    elements, stored = read.tensor.numel, flow.contents[read.content].tensor.numel
    if stored < elements and not elements % stored:
        return elements // stored
    # transformers' repeat_kv expands [batch, key heads, repetitions, rows, width].
    return read.tensor.shape[2] if len(read.tensor.shape) == 5 else 1


def _final_result(flow: Flow, operand: Operand, repeats: int) -> tuple[Operand, set[int]]:
    """Return a result after copies and after sums over heads that share keys, and those calls."""
    copies = set[int]()
    while len(readers := flow.readers[operand.content]) == 1:
        call = flow.calls[readers[0]]
        if not call.reads or not call.writes or call.reads[0].type != call.writes[0].type:
            break
        is_copy = call.op == _COPY and call.writes[0].tensor.numel == operand.tensor.numel
        is_copy &= flow.contents[call.writes[0].content].tensor.numel == operand.tensor.numel
        is_sum = call.op == "sum" and repeats > 1
        is_sum &= call.writes[0].tensor.numel * repeats == operand.tensor.numel
        if not is_copy and not is_sum:
            break
        copies.add(readers[0])
        repeats = 1 if is_sum else repeats
        operand = call.writes[0]
    return operand, copies

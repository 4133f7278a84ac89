"""Steps of an inference engine in a Kineto trace: where each begins, and which sequences it has.

vLLM annotates each step of a worker, and SGLang each forward of a model, with the sequences and
tokens of the batch. Recordings without annotations have the steps as Python frames, if recorded
with stacks; the frames show where a step begins, and not which sequences it has.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from onerank.converters.sources.kineto.read.kineto_trace import load_kineto
from onerank.converters.sources.kineto.read.trace_columns import HostRows, KinetoTrace
from onerank.ir import InferenceStep
from onerank.ir.arrays import unique_values
from onerank.ir.errors import TraceError

Engine = Literal["vLLM", "SGLang"]

StepKind = Literal["prefill", "decode", "mixed", "idle"]
"""What a step computes; an idle step has no sequences."""


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """The prefills, or the decodes, of a step.

    Attributes:
        count: sequences.
        new_tokens: tokens that they compute, summed; None if not recorded.
        context_tokens: their tokens in the KV cache before the step, summed; None if not recorded.
        equal: whether each computes the same number of tokens, as far as the trace proves it.
        pairs: pairs of a new token and a token that it attends to, itself and all before it; None
            if not recorded.
    """

    count: int
    new_tokens: int | None = None
    context_tokens: int | None = None
    equal: bool = False
    pairs: int | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        """New tokens of each sequence; () if the trace does not prove them."""
        if not self.equal or self.new_tokens is None or not self.count:
            return ()
        return (self.new_tokens // self.count,) * self.count


NO_SEQUENCES = SequenceGroup(0, 0, 0, equal=True, pairs=0)


@dataclass(frozen=True, slots=True)
class StepContent:
    """What an annotation says of a step.

    Attributes:
        kind: None if the annotation does not decide it.
        batch: sequences; None if not recorded.
        prefills: None if not recorded.
        decodes: None if not recorded.
    """

    kind: StepKind | None = None
    batch: int | None = None
    prefills: SequenceGroup | None = None
    decodes: SequenceGroup | None = None

    @classmethod
    def of(cls, prefills: SequenceGroup, decodes: SequenceGroup) -> "StepContent":
        """Return the content of a step whose prefills and decodes are both known."""
        kinds: dict[tuple[bool, bool], StepKind] = {
            (True, True): "mixed", (True, False): "prefill", (False, True): "decode",
        }  # fmt: skip
        kind = kinds.get((prefills.count > 0, decodes.count > 0), "idle")
        return cls(kind, prefills.count + decodes.count, prefills, decodes)

    @property
    def new_tokens(self) -> int | None:
        """Tokens that the step computes, None if not recorded."""
        return self._sum_of(lambda group: group.new_tokens)

    @property
    def context_tokens(self) -> int | None:
        """Tokens in the KV cache before the step, None if not recorded."""
        return self._sum_of(lambda group: group.context_tokens)

    def _sum_of(self, count: Callable[[SequenceGroup], int | None]) -> int | None:
        groups = [group for group in (self.prefills, self.decodes) if group]
        return _sum([count(group) for group in groups]) if len(groups) == 2 else None

    def inference(self, number: int) -> InferenceStep | None:
        """Return the label of a graph of the step; None if the annotation decides no kind.

        `new_tokens`, `query_lengths` and `context_lengths` are those of each sequence, so they are
        set only where the sums determine them.
        """
        if self.kind is None or self.kind == "idle":
            return None
        groups = [group for group in (self.prefills, self.decodes) if group and group.count]
        proven = all(group.lengths for group in groups)
        lengths = tuple(n for group in groups for n in group.lengths) if proven else ()
        context = self.context_tokens if self.batch == 1 else None
        return InferenceStep(
            self.kind,
            number,
            self.batch or 0,
            max(lengths, default=0),
            () if context is None else (context,),
            lengths if len({*lengths}) > 1 else (),
            attention_keys=_sum([self.context_tokens, self.new_tokens]),
            attention_pairs=self._sum_of(lambda group: group.pairs),
        )


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


@dataclass(frozen=True, slots=True)
class EngineStep:
    """A step of an engine. Times are those of the host, in nanoseconds as in the trace.

    Attributes:
        number: from 1, in the order of the trace.
        annotation: name of the annotation or Python frame.
        content: what the annotation says of the step.
        start_ns: start of the annotation.
        host_end_ns: end of the annotation.
        end_ns: start of the next step, or the end of the trace. What the host launches before
            then belongs to this step: vLLM samples tokens after the annotation has ended.
        is_last: whether no step follows.
    """

    number: int
    annotation: str
    content: StepContent
    start_ns: int
    host_end_ns: int
    end_ns: int
    is_last: bool


# Annotations --------------------------------------------------------------------------------------


# vLLM 0.32.0, `Worker.annotate_profile`: requests and their tokens. With
# `detailed_trace_annotation`, and in AMD's patched SGLang, the sums over requests of new tokens q,
# of KV length k with the new tokens, of q*q and of q*k.
_GROUP = r"(\d+)\((?:(\d+)|sq(\d+)sk(\d+)sqsq(\d+)sqsk(\d+))\)"
_VLLM = re.compile(rf"execute_(?:\d+_)?context_{_GROUP}_generation_{_GROUP}")

# Earlier versions of vLLM: new requests, and requests that ran before. The latter may still be in
# prefill, so the annotation decides no kind if there are any.
_VLLM_REQUESTS = re.compile(r"execute_new_(\d+)_cached_(\d+)")

# SGLang 0.5.23, `build_step_span_name`: mode and sequences; with `detailed_annotations` the sums of
# prefills (c_) and decodes (g_), named as vLLM's.
_SGLANG = re.compile(r"step\[(\w+) bs=(\d+)(?: toks=(\d+))?((?: \w+=\d+)*)\]")
_SGLANG_SUM = re.compile(r"(\w+)=(\d+)")
_SGLANG_BATCH = "scheduler.run_batch"
_SGLANG_DRAFT = "step[DRAFT "


def parse_annotation(name: str) -> StepContent | None:
    """Return the content of the step that an annotation names; None for other annotations."""
    if match := _VLLM.fullmatch(name):
        texts = match.groups()
        return StepContent.of(_vllm_group(texts[:6]), _vllm_group(texts[6:]))
    if match := _VLLM_REQUESTS.fullmatch(name):
        new, cached = int(match[1]), int(match[2])
        if cached:
            return StepContent(batch=new + cached)
        return StepContent.of(SequenceGroup(new), NO_SEQUENCES)
    if match := _SGLANG.fullmatch(name):
        sums = {key: int(value) for key, value in _SGLANG_SUM.findall(match[4])}
        tokens = None if match[3] is None else int(match[3])
        return _sglang_content(match[1], int(match[2]), tokens, sums)
    return None


def _vllm_group(texts: Sequence[str | None]) -> SequenceGroup:
    sums = [None if text is None else int(text) for text in texts]
    count, tokens, new, keys, squares, products = sums
    assert count is not None, "the pattern requires it"
    return _group(count, tokens if new is None else new, keys, squares, products)


def _group(
    count: int,
    new_tokens: int | None,
    keys: int | None = None,
    squares: int | None = None,
    products: int | None = None,
) -> SequenceGroup:
    """Return a group by sums over its sequences of q new tokens and k tokens with them.

    Args:
        count: sequences.
        new_tokens: sum of q.
        keys: sum of k.
        squares: sum of q * q.
        products: sum of q * k.
    """
    if not count:
        return NO_SEQUENCES
    if new_tokens is None:
        return SequenceGroup(count)
    # Each sequence has at least one token, so n tokens of n sequences are one each. By the
    # Cauchy-Schwarz inequality n times the sum of squares is at least the square of the sum, and
    # they are the same only if all terms are.
    equal = count in (1, new_tokens)
    equal |= squares is not None and count * squares == new_tokens**2
    context = None if keys is None else keys - new_tokens
    if equal and keys is not None:
        # All q are the same, so each sum of products is the product of q and a sum.
        each = new_tokens // count
        squares, products = each * new_tokens, each * keys
    pairs = None
    if squares is not None and products is not None:
        # The i-th of q new tokens attends to k - q + i tokens.
        pairs = products - (squares - new_tokens) // 2
    return SequenceGroup(count, new_tokens, context, equal, pairs)


def _sglang_content(mode: str, batch: int, tokens: int | None, sums: dict[str, int]) -> StepContent:
    context = sums.get("c_sq", tokens), *(sums.get(f"c_{name}") for name in ("sk", "sqsq", "sqsk"))
    generation = tuple(sums.get(f"g_{name}") for name in ("sq", "sk", "sqsq", "sqsk"))
    prefills, decodes = NO_SEQUENCES, NO_SEQUENCES
    match mode:
        case "EXTEND":
            prefills = _group(batch, *context)
        case "DECODE":
            decodes = _group(batch, generation[0] or batch, *generation[1:])
        case "VERIFY":
            # SGLang does not state whether the lengths of a verification contain drafted tokens.
            decodes = _group(batch, generation[0], None, generation[2])
        case "MIXED" if "c" in sums and "g" in sums:
            prefills, decodes = _group(sums["c"], *context), _group(sums["g"], *generation)
        case "MIXED":
            return StepContent("mixed", batch)
        case "IDLE":
            pass
        case _:
            return StepContent(batch=batch)
    return StepContent.of(prefills, decodes)


# Python frames ------------------------------------------------------------------------------------


_FRAMES = re.compile(
    r".*\b(?:vllm/\S+\.py\(\d+\): execute_model"
    r"|sglang/srt/\S+/scheduler\.py\(\d+\): run_batch"
    r"|sglang/srt/\S+/model_runner\.py\(\d+\): forward)"
)

# SGLang's `profile_by_stage` writes a file for each stage, named after it.
_STAGE = re.compile(r"-(EXTEND|DECODE)\.trace\.json")
_STAGE_KINDS: dict[str, StepKind] = {"EXTEND": "prefill", "DECODE": "decode"}


# Steps --------------------------------------------------------------------------------------------


def find_steps(trace: KinetoTrace) -> list[EngineStep]:
    """Return the steps of an engine, by annotations or else by Python frames; [] of other traces.

    Raises:
        TraceError: the steps of several threads overlap.
    """
    # Frames need a second read of the file: a step has up to 50,000 of them, and recordings with
    # annotations need none.
    return _annotated_steps(trace) or (_framed_steps(trace) if trace.has_unread_frames else [])


def recorded_steps(trace: KinetoTrace) -> tuple[Engine, list[EngineStep]]:
    """Return the engine that was recorded, and its steps.

    Raises:
        TraceError: the trace has no steps of an engine, or those of several ranks.
    """
    steps = find_steps(trace)
    if not steps:
        raise TraceError(
            f"{trace.path}: no engine step found: neither annotations of vLLM "
            "(execute_context_...) or SGLang (step[DECODE ...]) nor their Python frames\n"
            "  record CPU activity with a current vLLM or SGLang, or with stacks "
            "(torch_profiler_with_stack, with_stack)",
            code="engine-steps-not-found",
        )
    # AMD's patched SGLang has vLLM's annotations around its own.
    names = {trace.strings[code] for code in unique_values(trace.host.name).tolist()}
    names.add(steps[0].annotation)
    is_sglang = any(name.startswith("step[") or "sglang/" in name for name in names)
    return ("SGLang" if is_sglang else "vLLM"), steps


def _annotated_steps(trace: KinetoTrace) -> list[EngineStep]:
    host = trace.host
    rows = np.flatnonzero(~host.is_operator)
    codes = unique_values(host.name[rows]).tolist()
    contents = {code: parse_annotation(trace.strings[code]) for code in codes}
    spans = {code: content for code, content in contents.items() if content is not None}
    if not spans:
        return []
    batches = [code for code in codes if trace.strings[code] == _SGLANG_BATCH]
    rows = rows[np.isin(host.name[rows], [*spans, *batches])]
    marks: list[_Mark] = []
    for outer, inner in _outermost(host.take(rows)):
        # A batch of SGLang's scheduler contains the forwards of draft and target model.
        forwards = (
            [outer] if outer.name in spans else _outer_only(m for m in inner if m.name in spans)
        )
        if names := _of_target([trace.strings[mark.name] for mark in forwards]):
            marks.append(replace(outer, text=names[0], content=_content(names)))
    return _numbered(trace, marks)


def _content(names: Sequence[str]) -> StepContent:
    """Return the content of a step with these forwards, unknown if they differ."""
    contents = [parse_annotation(name) for name in names]
    first = contents[0]
    assert first is not None, "only names that parse are passed"
    return first if contents.count(first) == len(contents) else StepContent()


def _of_target(names: Sequence[str]) -> Sequence[str]:
    """Return the forwards of the target model; those of the draft model if there are no others."""
    return [name for name in names if not name.startswith(_SGLANG_DRAFT)] or names


def _framed_steps(trace: KinetoTrace) -> list[EngineStep]:
    frames = load_kineto(trace.path, trace.strings, frames=_FRAMES).frames
    stage = _STAGE.search(trace.path.name)
    content = StepContent(_STAGE_KINDS[stage[1]]) if stage else StepContent()
    names = {code: trace.strings[code] for code in unique_values(frames.name).tolist()}
    # A batch of the scheduler contains a forward, so forwards count only without batches.
    batches = [code for code, name in names.items() if name.endswith(": run_batch")]
    if batches:
        frames = frames.take(np.isin(frames.name, batches))
    marks = [
        replace(outer, text=names[outer.name], content=content) for outer, _ in _outermost(frames)
    ]
    return _numbered(trace, marks)


@dataclass(frozen=True, slots=True)
class _Mark:
    """A host event that marks a step, or part of one."""

    name: int
    start_ns: int
    end_ns: int
    text: str = ""
    content: StepContent = StepContent()


def _outermost(rows: HostRows) -> list[tuple[_Mark, list[_Mark]]]:
    """Return the events that no other event of their thread contains, with those they contain."""
    groups: list[tuple[_Mark, list[_Mark]]] = []
    order = np.lexsort((-rows.end_ns, rows.start_ns, rows.thread))
    columns = (
        column[order].tolist() for column in (rows.thread, rows.name, rows.start_ns, rows.end_ns)
    )
    last_thread = None
    for thread, *values in zip(*columns, strict=True):
        mark = _Mark(*values)
        if thread == last_thread and mark.start_ns < groups[-1][0].end_ns:
            groups[-1][1].append(mark)
        else:
            groups.append((mark, []))
        last_thread = thread
    return groups


def _outer_only(marks: Iterable[_Mark]) -> list[_Mark]:
    """Return the marks, ordered by start, that no mark before them contains."""
    outer: list[_Mark] = []
    for mark in marks:
        if not outer or mark.start_ns >= outer[-1].end_ns:
            outer.append(mark)
    return outer


def _numbered(trace: KinetoTrace, marks: list[_Mark]) -> list[EngineStep]:
    if not marks:
        return []
    marks = sorted(marks, key=lambda mark: mark.start_ns)
    if any(before.end_ns > after.start_ns for before, after in pairwise(marks)):
        raise TraceError(
            f"{trace.path}: engine steps of several threads overlap; expected the recording of one "
            "rank: convert the file of each rank, not a merged one",
            code="engine-steps-overlap",
        )
    last = max(
        trace.host.end_ns.max(initial=0),
        trace.launches.end_ns.max(initial=0),
        *(mark.end_ns for mark in marks),
    )
    ends = [*(mark.start_ns for mark in marks[1:]), int(last) + 1]
    return [
        EngineStep(
            number,
            mark.text,
            mark.content,
            mark.start_ns,
            mark.end_ns,
            end_ns,
            is_last=number == len(marks),
        )
        for number, (mark, end_ns) in enumerate(zip(marks, ends, strict=True), start=1)
    ]

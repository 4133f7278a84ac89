"""Compositions of an engine's step, and grids of them.

A step of an inference engine computes one new token for each sequence that decodes, and a chunk of
new tokens for each sequence in prefill. This module imports no torch: the command line parses a
grid before it loads the model.
"""

import itertools
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from onerank.ir import InferenceStep
from onerank.ir.errors import CaptureError

StepKind = Literal["prefill", "decode", "mixed"]

MOST_TOKENS = 1 << 24
"""Tokens and context that a composition may have at most: 16 million, above any engine's."""

VOCABULARY_MULTIPLE = 64
"""Engines pad the tokens of the vocabulary to a multiple of this: DEFAULT_VOCAB_PADDING_SIZE of
vLLM and SGLang."""

MOST_POINTS = 4096
"""Compositions that a grid may have at most."""


class Composition(msgspec.Struct, frozen=True, order=True):
    """The sequences of one engine step.

    Attributes:
        decodes: sequences that compute one new token each.
        decode_context: tokens of each of them in the KV cache before the step.
        prefills: sequences that compute a chunk of new tokens each.
        prefill_tokens: new tokens of each of them.
        prefill_context: tokens of each of them in the KV cache before the step.
    """

    decodes: int = 0
    decode_context: int = 0
    prefills: int = 0
    prefill_tokens: int = 0
    prefill_context: int = 0

    @property
    def kind(self) -> StepKind:
        """Whether the step has prefills, decodes or both."""
        if self.decodes and self.prefills:
            return "mixed"
        return "prefill" if self.prefills else "decode"

    @property
    def sequences(self) -> int:
        """Sequences of the step."""
        return self.decodes + self.prefills

    @property
    def new_tokens(self) -> int:
        """Tokens that the step computes."""
        return self.decodes + self.prefills * self.prefill_tokens

    @property
    def cached_tokens(self) -> int:
        """Tokens in the KV cache after the step."""
        before = self.decodes * self.decode_context + self.prefills * self.prefill_context
        return before + self.new_tokens

    @property
    def query_lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence that the step computes: prefills first."""
        return (*(self.prefill_tokens,) * self.prefills, *(1,) * self.decodes)

    @property
    def context_lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence in the KV cache before the step: prefills first."""
        return (*(self.prefill_context,) * self.prefills, *(self.decode_context,) * self.decodes)

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence after the step."""
        pairs = zip(self.context_lengths, self.query_lengths, strict=True)
        return max((before + new for before, new in pairs), default=0)

    def parts(self) -> Iterator[tuple[str, int, int]]:
        """Yield name, sequences and new tokens of each, for prefills and decodes of the step."""
        if self.prefills:
            yield "prefill", self.prefills, self.prefill_tokens
        if self.decodes:
            yield "decode", self.decodes, 1

    def __str__(self) -> str:
        parts: list[str] = []
        if self.prefills:
            count = f"{self.prefills} x " if self.prefills > 1 else ""
            parts.append(f"prefill {count}{self.prefill_tokens} at {self.prefill_context}")
        if self.decodes:
            parts.append(f"decode {self.decodes} at {self.decode_context}")
        return " + ".join(parts)

    def forward(self, number: int) -> InferenceStep:
        """Return the record of the step in a graph; `number` is its place in the grid, from 1."""
        lengths = self.query_lengths
        return InferenceStep(
            kind=self.kind,
            number=number,
            batch=self.sequences,
            new_tokens=max(lengths),
            context_lengths=self.context_lengths,
            query_lengths=lengths if len({*lengths}) > 1 else (),
        )


# Key of a grid -> field of `Composition`, by kind. `context` is that of the sequences that the kind
# is named for; of a mixed step, that of its prefill.
_FIELDS: Mapping[str, Mapping[str, str]] = {
    "decode": {"batch": "decodes", "context": "decode_context"},
    "prefill": {"tokens": "prefill_tokens", "context": "prefill_context", "batch": "prefills"},
    "mixed": {
        "tokens": "prefill_tokens",
        "context": "prefill_context",
        "batch": "decodes",
        "decode_context": "decode_context",
    },
}

# Keys whose values may be 0; others count sequences or new tokens.
_CONTEXTS = ("context", "decode_context")

_EXAMPLE = "decode: batch=1,8,64 context=512,4096; prefill: tokens=128,2048 context=0,4096"


def parse_grid(text: str) -> tuple[Composition, ...]:
    """Return the compositions of a grid, each once, in the order of the text.

    Args:
        text: name of a TOML file with the tables `decode`, `prefill` and `mixed`, or a text such as
            "decode: batch=1,8 context=512; prefill: tokens=128,2048 context=0".

    Raises:
        CaptureError: the grid does not parse, or has values that no engine's step has.
    """
    path = Path(text)
    if path.suffix == ".toml":
        try:
            tables = [*tomllib.loads(path.read_text(encoding="utf-8")).items()]
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise CaptureError(
                f"--grid {text}: {why}\n  expected a file with tables such as [decode]",
                code="grid-unreadable",
            ) from None
    else:
        # A kind may have several clauses: the products of each.
        tables = [_clause(clause) for clause in text.split(";") if clause.strip()]
    if not tables:
        raise _malformed("the grid is empty")
    return _unique(itertools.chain.from_iterable(_product(kind, table) for kind, table in tables))


def _clause(clause: str) -> tuple[str, dict[str, Any]]:
    """Return the kind and the values of a clause such as `decode: batch=1,8 context=512`."""
    kind, colon, rest = clause.partition(":")
    values: dict[str, Any] = {}
    for setting in rest.split():
        key, equals, numbers = setting.partition("=")
        try:
            values[key] = [int(number) for number in numbers.split(",")]
        except ValueError:
            equals = ""
        if not equals:
            raise _malformed(f"{setting!r} is not KEY=N[,N...]")
    if not colon:
        raise _malformed(f"{clause.strip()!r} has no kind before a colon")
    return kind.strip(), values


def _product(kind: str, table: Any) -> Iterable[Composition]:
    """Yield the compositions of one kind: the product of its values."""
    fields = _FIELDS.get(kind)
    if fields is None or not isinstance(table, dict):
        raise _malformed(f"{kind!r} is not one of {', '.join(_FIELDS)}")
    values: dict[str, list[int]] = {}
    for key, given in table.items():
        if key not in fields:
            raise _malformed(f"{kind} has no {key!r}: expected {', '.join(fields)}")
        numbers = given if isinstance(given, list) else [given]
        least = 0 if key in _CONTEXTS else 1
        for number in numbers:
            if type(number) is not int or not least <= number <= MOST_TOKENS:
                raise CaptureError(
                    f"--grid: {kind} {key}={number} is not a whole number from {least} to "
                    f"{MOST_TOKENS}",
                    code="grid-out-of-range",
                )
        values[fields[key]] = numbers
    # One sequence in prefill is the usual chunk of an engine.
    values.setdefault("prefills", [1] if kind != "decode" else [0])
    missing = [key for key, field in fields.items() if not values.get(field)]
    if missing:
        raise _malformed(f"{kind} has no {missing[0]}")
    if (count := _size(values)) > MOST_POINTS:
        raise CaptureError(
            f"--grid: {kind} has {count} compositions, and at most {MOST_POINTS} are measured\n"
            "  name fewer values: the steps between are interpolated",
            code="grid-too-large",
        )
    for numbers in itertools.product(*values.values()):
        yield Composition(**dict(zip(values, numbers, strict=True)))


def _size(values: Mapping[str, list[int]]) -> int:
    count = 1
    for numbers in values.values():
        count *= len(numbers)
    return count


def _malformed(why: str) -> CaptureError:
    return CaptureError(
        f"--grid: {why}\n  expected a TOML file, or a text such as '{_EXAMPLE}'",
        code="grid-malformed",
    )


def _unique(compositions: Iterable[Composition]) -> tuple[Composition, ...]:
    return tuple(dict.fromkeys(compositions))


# Longest sequence of the default grid. Attention grows evenly with contexts above it.
_LONGEST_DEFAULT = 32768


def default_grid(longest: int) -> tuple[Composition, ...]:
    """Return at most 60 compositions for a model.

    Decode batches are dense, because products of few tokens have steps at the tiles of a GPU.
    Contexts are sparse, because attention grows evenly with them. Half of the prefills are no
    multiples of a block of the attention kernel: those take longer, and engines mostly have them.
    Some decode batches fill the last wave of thread blocks to a small part. Mixed steps with one
    decode add numbers of tokens just above a tile.

    Args:
        longest: tokens that a sequence of the model may have.
    """
    longest = min(longest, _LONGEST_DEFAULT)
    decodes = [
        *((batch, context)
          for batch in (1, 4, 16, 64, 256) for context in (128, 1024, 4096, 16384)),
        *((batch, 1024) for batch in (2, 8, 32, 48, 100, 192)),
        *((40, 3000), (24, 6000)),
    ]  # fmt: skip
    whole_blocks = [
        *((tokens, 0) for tokens in (256, 1024, 2048, 4096, 8192)),
        *((1024, 2048), (256, 8192), (1024, 8192), (8192, 8192)),
    ]
    partial_blocks = [
        *((tokens, 0) for tokens in (64, 200, 450, 700, 1300, 2200, 5000)),
        *((200, 3000), (1100, 3000), (3000, 3000), (500, 5000)),
    ]
    grid = [
        *(Composition(batch, context) for batch, context in decodes),
        *(Composition(0, 0, 1, tokens, context)
          for tokens, context in whole_blocks + partial_blocks),
        *(Composition(1, 1024, 1, tokens, 0) for tokens in (384, 768, 1536)),
        *(Composition(batch, context, 1, tokens, 2048)
          for tokens in (256, 1024)
          for batch, context in ((16, 1024), (64, 4096), (128, 512), (8, 16384))),
    ]  # fmt: skip

    def fits(c: Composition) -> bool:
        prefill, decode = c.prefill_tokens + c.prefill_context, c.decode_context + 1
        return max(prefill * (c.prefills > 0), decode * (c.decodes > 0)) <= longest

    return _unique(filter(fits, grid))

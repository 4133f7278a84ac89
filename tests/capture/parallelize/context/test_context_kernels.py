"""Attention of a part of the queries to a part of the keys, and its dropout, by kernel."""

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
import transformers
from context_job import GPT2, tokens
from raised import raises_code

from onerank.capture.parallelize.context.packed_sequences import (
    Lengths,
    attend_packed,
    attend_packed_backward,
)
from onerank.capture.parallelize.context.partial_attention import (
    AttentionCall,
    AttentionMode,
    attend,
    attend_backward,
)
from onerank.capture.parallelize.context.sequence_attention import Context
from onerank.capture.parallelize.shard_model import SlicingOptions, slice_to_rank
from onerank.capture.verify.threaded_world import ThreadedPeers, ThreadedWorld
from onerank.ir import World
from onerank.ir.errors import SliceError

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning")

DEVICES = [
    ("cpu", torch.float32),
    *(("cuda", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
]


@dataclass(frozen=True)
class Visibility:
    """Which keys a query attends to."""

    causal: bool = True
    window: int | None = None
    masked: bool = False


VISIBILITIES = [
    Visibility(),
    Visibility(causal=False),
    Visibility(window=9),
    Visibility(window=50),
    Visibility(masked=True),
]


@pytest.mark.parametrize(("device", "dtype"), DEVICES, ids=str)
@pytest.mark.parametrize("values", [16, 8])
@pytest.mark.parametrize(
    "visibility",
    VISIBILITIES,
    ids=str,
)
@pytest.mark.parametrize("queries", [40, 72])
def test_kernels_attend_to_a_part_of_the_keys(device, dtype, values, visibility, queries):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    keys, heads, key_heads, width = 72, 4, 2, 16
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, queries, width), (2, key_heads, keys, width), (2, key_heads, keys, values),
              (2, heads, queries, values)]  # fmt: skip
    q, k, v, gradient = (torch.randn(s, generator=generator).to(device, dtype) for s in shapes)
    rows, columns = torch.arange(keys - queries, keys).unsqueeze(1), torch.arange(keys)
    allowed = torch.ones(queries, keys, dtype=torch.bool)
    if visibility.causal:
        allowed = (columns <= rows) & (columns > rows - (visibility.window or keys))
    mask = None
    if visibility.masked:
        allowed = allowed & (columns >= 30 * torch.arange(2)[:, None, None, None])
        buffer = torch.zeros((2, 1, queries, 80), dtype=dtype)
        mask = buffer.to(device)[..., :keys].masked_fill_(~allowed.to(device), float("-inf"))
    call = AttentionCall(q, k, v, AttentionMode(0.3, visibility.window), visibility.causal, mask)
    result = attend(call)
    gradients = attend_backward(call, result, gradient)

    exact = [x.double().requires_grad_() for x in (q, k, v)]
    wide = [exact[0], *(x.repeat_interleave(heads // key_heads, 1) for x in exact[1:])]
    scores = (wide[0] @ wide[1].mT * 0.3).masked_fill(~allowed.to(device), float("-inf"))
    empty = ~allowed.any(-1, keepdim=True).to(device).expand(*scores.shape[:-1], 1)
    output = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0) @ wide[2]
    expected = torch.autograd.grad(output, exact, gradient.double())
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
    close = {"atol": tolerance, "rtol": tolerance}
    torch.testing.assert_close(result.output.double(), output, **close)
    has_keys = ~empty.squeeze(-1)
    logsumexp = scores.logsumexp(-1)
    torch.testing.assert_close(result.logsumexp.double()[has_keys], logsumexp[has_keys], **close)
    for actual, exact_gradient in zip(gradients, expected, strict=True):
        torch.testing.assert_close(actual.double(), exact_gradient, **close)


@pytest.mark.parametrize(("device", "dtype"), DEVICES, ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_kernels_compute_attention_of_each_packed_sequence(device, dtype, causal):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    queries, keys = (40, 8, 24), (40, 8, 24) if causal else (20, 4, 12)
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, sum(each), 16)
              for heads, each in ((4, queries), (2, keys), (2, keys), (4, queries))]  # fmt: skip
    q, k, v, gradient = (torch.randn(s, generator=generator).to(device, dtype) for s in shapes)
    lengths = Lengths.of(queries, q.device), Lengths.of(keys, q.device)
    mode = AttentionMode(0.3)
    call = AttentionCall(q, k, v, mode, causal)
    if device == "cuda" and dtype == torch.float32:
        with raises_code("cp-ring-packed-kernel", SliceError, naming="torch.float32"):
            attend_packed(call, lengths)
        return
    packed = attend_packed(call, lengths)
    gradients = attend_packed_backward(call, lengths, packed, gradient)
    split = [[x.split(each, dim=2) for x in xs]
               for each, xs in ((queries, (q, gradient)), (keys, (k, v)))]  # fmt: skip
    sequences = [*zip(*split[0], *split[1], strict=True)]
    calls = [AttentionCall(query, *kv, mode, causal) for query, _, *kv in sequences]
    separate = [attend(each) for each in calls]
    tolerance = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    close = {"atol": tolerance, "rtol": tolerance}
    for actual, attribute in ((packed.output, "output"), (packed.logsumexp, "logsumexp")):
        expected = torch.cat([getattr(output, attribute) for output in separate], dim=2)
        torch.testing.assert_close(actual, expected, **close)
    backward = [
        attend_backward(each, forward, grad_output)
        for each, (_, grad_output, *_), forward in zip(calls, sequences, separate, strict=True)
    ]
    for actual, expected in zip(gradients, zip(*backward, strict=True), strict=True):
        torch.testing.assert_close(actual, torch.cat(expected, dim=2), **close)


@pytest.mark.parametrize(("device", "dtype"), DEVICES, ids=str)
@pytest.mark.parametrize("comm", ["all_gather", "p2p"])
@pytest.mark.parametrize("values", [16, 8])
def test_backward_repeats_the_dropout_and_the_mean_is_unbiased(device, dtype, comm, values):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    size, part, rate = 3, 32, 0.25

    def one_rank(peers: ThreadedPeers) -> tuple[float, float, torch.Tensor]:
        torch.manual_seed(peers.rank)
        context = Context(peers.new_group("cp", range(size)), comm)
        q, k = (torch.randn(2, 2, part, 16, device=device, dtype=dtype) for _ in range(2))
        v = torch.randn(2, 2, part, values, device=device, dtype=dtype, requires_grad=True)
        outputs = [context.attend(q, k, v, AttentionMode(0.3, None, rate)) for _ in range(40)]
        gradient = torch.randn_like(outputs[0])
        (for_value,) = torch.autograd.grad(outputs[0], v, gradient)
        whole = context.attend(q, k, v, AttentionMode(0.3))
        mean = torch.stack([result.detach().float() for result in outputs]).mean(0)
        spread = (outputs[0].detach() - whole.detach()).float().square().mean()
        error = (mean - whole.detach().float()).square().mean()
        # linear in the values, however dropout falls
        return (
            float((gradient.double() * outputs[0].detach().double()).sum()),
            float((for_value.double() * v.detach().double()).sum()),
            error / spread,
        )

    results = ThreadedWorld(size).run(one_rank)
    forward, backward = (sum(result[index] for result in results) for index in (0, 1))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert forward == pytest.approx(backward, rel=tolerance, abs=tolerance * 100)
    assert all(0 < result[2] < 0.1 for result in results)  # 1 / 40 but for chance


def test_dropout_by_elementary_operators_has_the_gradients_of_autograd():
    mode, keys = AttentionMode(0.3, None, 0.4), 24
    q, k, v = (torch.randn(2, heads, keys, 16, dtype=torch.double, requires_grad=True)
               for heads in (4, 2, 2))  # fmt: skip
    call = AttentionCall(*(x.detach() for x in (q, k, v)), mode, causal=True)
    result = attend(call)
    (kept,) = result.dropout_state
    assert 0.5 < kept.double().mean() < 0.7
    wide = [q, *(x.repeat_interleave(2, 1) for x in (k, v))]
    hidden = torch.ones(keys, keys, dtype=torch.bool).triu(1)
    weights = (wide[0] @ wide[1].mT * 0.3).masked_fill(hidden, float("-inf")).softmax(-1)
    output = (weights * kept / 0.6) @ wide[2]
    torch.testing.assert_close(result.output, output)
    gradient = torch.randn_like(output)
    actual = attend_backward(call, result, gradient)
    for gradient_part, expected in zip(
        actual, torch.autograd.grad(output, (q, k, v), gradient), strict=True
    ):
        torch.testing.assert_close(gradient_part, expected)


def test_gpt2_trains_with_its_default_dropout(recorder):
    torch.manual_seed(0)
    sliced = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)).train()
    assert sliced.config.attn_pdrop == 0.1
    slice_to_rank(sliced, World.of(cp=4), 1, recorder.new_group, SlicingOptions())
    losses = [sliced(input_ids=tokens(), labels=tokens()).loss for _ in range(2)]
    assert losses[0] != losses[1]
    losses[0].backward()
    assert all(p.grad.isfinite().all() for p in sliced.parameters())
    assert Counter(call.collective for call in recorder.calls) == {
        "all_gather": 2 * 2 * 3,
        "reduce_scatter": 2 * 2,
        "all_reduce": 2,
    }

"""Attention of a part of the queries to a part of the keys, and its dropout, by kernel."""

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
import transformers
from context_job import GPT2, tokens

from onerank.capture.parallelize.context.packed_sequences import (
    Lengths,
    attend_each,
    attend_each_backward,
)
from onerank.capture.parallelize.context.partial_attention import (
    AttentionMode,
    attend,
    attend_backward,
)
from onerank.capture.parallelize.context.sequence_shards import Context
from onerank.capture.parallelize.shard_model import slice_to_rank
from onerank.capture.verify.threaded_world import ThreadedPeers, ThreadedWorld
from onerank.ir import World
from onerank.ir.errors import SliceError

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning")

DEVICES = [
    ("cpu", torch.float32),
    *(("cuda", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
]


@dataclass(frozen=True)
class Seen:
    causal: bool = True
    window: int | None = None
    masked: bool = False


SEEN = [Seen(), Seen(causal=False), Seen(window=9), Seen(window=50), Seen(masked=True)]


@pytest.mark.parametrize(("device", "dtype"), DEVICES, ids=str)
@pytest.mark.parametrize("values", [16, 8])
@pytest.mark.parametrize(
    "seen",
    [Seen(), Seen(causal=False), Seen(window=9), Seen(window=50), Seen(masked=True)],
    ids=str,
)
@pytest.mark.parametrize("queries", [40, 72])
def test_kernels_compute_attention_to_a_part_of_the_keys(device, dtype, values, seen, queries):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    keys, heads, key_heads, width = 72, 4, 2, 16
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, queries, width), (2, key_heads, keys, width), (2, key_heads, keys, values),
              (2, heads, queries, values)]  # fmt: skip
    q, k, v, gradient = (torch.randn(s, generator=generator).to(device, dtype) for s in shapes)
    rows, columns = torch.arange(keys - queries, keys).unsqueeze(1), torch.arange(keys)
    allowed = torch.ones(queries, keys, dtype=torch.bool)
    if seen.causal:
        allowed = (columns <= rows) & (columns > rows - (seen.window or keys))
    mask = None
    if seen.masked:
        allowed = allowed & (columns >= 30 * torch.arange(2)[:, None, None, None])
        buffer = torch.zeros((2, 1, queries, 80), dtype=dtype)
        mask = buffer.to(device)[..., :keys].masked_fill_(~allowed.to(device), float("-inf"))
    how = {"how": AttentionMode(0.3, seen.window), "causal": seen.causal, "mask": mask}
    found = attend(q, k, v, **how)
    gradients = attend_backward(gradient, q, k, v, found, **how)

    exact = [x.double().requires_grad_() for x in (q, k, v)]
    wide = [exact[0], *(x.repeat_interleave(heads // key_heads, 1) for x in exact[1:])]
    scores = (wide[0] @ wide[1].mT * 0.3).masked_fill(~allowed.to(device), float("-inf"))
    empty = ~allowed.any(-1, keepdim=True).to(device).expand(*scores.shape[:-1], 1)
    output = scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0) @ wide[2]
    wanted = torch.autograd.grad(output, exact, gradient.double())
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
    close = {"atol": tolerance, "rtol": tolerance}
    torch.testing.assert_close(found.output.double(), output, **close)
    some = ~empty.squeeze(-1)
    sums = scores.logsumexp(-1)
    torch.testing.assert_close(found.log_sums.double()[some], sums[some], **close)
    for mine, theirs in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(mine.double(), theirs, **close)


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
    how = {"how": AttentionMode(0.3), "causal": causal}
    if device == "cuda" and dtype == torch.float32:
        with pytest.raises(SliceError, match=r"for bfloat16 and float16 .* found torch\.float32"):
            attend_each(q, k, v, lengths=lengths, **how)
        return
    found = attend_each(q, k, v, lengths=lengths, **how)
    gradients = attend_each_backward(gradient, q, k, v, found, lengths=lengths, **how)
    of_each = [[x.split(each, dim=2) for x in xs]
               for each, xs in ((queries, (q, gradient)), (keys, (k, v)))]  # fmt: skip
    alone = [
        (attend(one, *held, **how), one, held, wanted)
        for one, wanted, *held in zip(*of_each[0], *of_each[1], strict=True)
    ]
    tolerance = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    close = {"atol": tolerance, "rtol": tolerance}
    for mine, which in ((found.output, "output"), (found.log_sums, "log_sums")):
        theirs = torch.cat([getattr(one[0], which) for one in alone], dim=2)
        torch.testing.assert_close(mine, theirs, **close)
    backward = [attend_backward(wanted, one, *held, of, **how) for of, one, held, wanted in alone]
    for mine, theirs in zip(gradients, zip(*backward, strict=True), strict=True):
        torch.testing.assert_close(mine, torch.cat(theirs, dim=2), **close)


@pytest.mark.parametrize(("device", "dtype"), DEVICES, ids=str)
@pytest.mark.parametrize("comm", ["all_gather", "p2p"])
@pytest.mark.parametrize("values", [16, 8])
def test_dropout_drops_the_same_backward_and_leaves_the_mean(device, dtype, comm, values):
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
        mean = torch.stack([one.detach().float() for one in outputs]).mean(0)
        spread = (outputs[0].detach() - whole.detach()).float().square().mean()
        error = (mean - whole.detach().float()).square().mean()
        # linear in the values, however dropout falls
        return (
            float((gradient.double() * outputs[0].detach().double()).sum()),
            float((for_value.double() * v.detach().double()).sum()),
            error / spread,
        )

    found = ThreadedWorld(size).run(one_rank)
    forward, backward = (sum(one[place] for one in found) for place in (0, 1))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert forward == pytest.approx(backward, rel=tolerance, abs=tolerance * 100)
    assert all(0 < one[2] < 0.1 for one in found)  # 1 / 40 but for chance


def test_dropout_by_elementary_operators_has_the_gradients_of_autograd():
    how, keys = AttentionMode(0.3, None, 0.4), 24
    q, k, v = (torch.randn(2, heads, keys, 16, dtype=torch.double, requires_grad=True)
               for heads in (4, 2, 2))  # fmt: skip
    found = attend(*(x.detach() for x in (q, k, v)), how=how, causal=True)
    (kept,) = found.random
    assert 0.5 < kept.double().mean() < 0.7
    wide = [q, *(x.repeat_interleave(2, 1) for x in (k, v))]
    hidden = torch.ones(keys, keys, dtype=torch.bool).triu(1)
    weights = (wide[0] @ wide[1].mT * 0.3).masked_fill(hidden, float("-inf")).softmax(-1)
    output = (weights * kept / 0.6) @ wide[2]
    torch.testing.assert_close(found.output, output)
    gradient = torch.randn_like(output)
    mine = attend_backward(gradient, *(x.detach() for x in (q, k, v)), found, how=how, causal=True)
    for one, other in zip(mine, torch.autograd.grad(output, (q, k, v), gradient), strict=True):
        torch.testing.assert_close(one, other)


def test_gpt2_trains_with_the_dropout_it_comes_with(recorder):
    torch.manual_seed(0)
    one = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)).train()
    assert one.config.attn_pdrop == 0.1
    slice_to_rank(one, World.of(cp=4), 1, recorder.new_group, tp_style="megatron")
    losses = [one(input_ids=tokens(), labels=tokens()).loss for _ in range(2)]
    assert losses[0] != losses[1]
    losses[0].backward()
    assert all(p.grad.isfinite().all() for p in one.parameters())
    assert Counter(call.collective for call in recorder.calls) == {
        "all_gather": 2 * 2 * 3,
        "reduce_scatter": 2 * 2,
        "all_reduce": 2,
    }

"""Operators without a fake implementation in torch: CTC losses, samples, fast encoder layers."""

from collections import Counter

from without_device import captured

from onerank.annotate.op_costs.node_costs import op_costs_of

SCRIPT = """
    import torch
    from torch import nn
    from torch.nn import functional
    times, batch, classes, labels = 40, 3, 20, 5
    model = nn.Linear(8, classes).cuda()
    layer = nn.TransformerEncoderLayer(8, 2, 32, batch_first=True).cuda().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        x = torch.randn(batch, times, 8, device="cuda")
        with torch.no_grad():
            x = layer(x)
        scores = model(x).log_softmax(-1).transpose(0, 1)
        targets = torch.randint(1, classes, (batch, labels), device="cuda")
        valid = (targets >= 0).nonzero()  # of drawn numbers, all
        assert len(valid) == batch * labels
        masked = torch.rand(batch, times, device="cuda") < 0.5  # of drawn numbers, too
        assert 0 < x[masked].shape[0] < batch * times
        lengths = [torch.full((batch,), n, device="cuda") for n in (times, labels)]
        loss = functional.ctc_loss(scores, targets, *lengths)
        packed = [each.int() for each in (targets.flatten(), *lengths)]
        loss = loss + functional.ctc_loss(scores, *packed)
        on_host = [each.cpu() for each in lengths]
        loss = loss + functional.ctc_loss(scores, targets, *on_host)
        loss = loss + torch.distributions.Beta(scores.exp(), 1.0).rsample().mean()
        loss = loss + scores.logcumsumexp(0).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_operators_without_a_fake_implementation(tmp_path):
    graph = captured(tmp_path, SCRIPT, "--like", "H100-SXM")
    names = graph.text("op")
    operators = Counter(names)
    assert operators["aten::_ctc_loss"] == operators["aten::_ctc_loss_backward"] == 2
    assert operators["aten::_cudnn_ctc_loss"] == 1
    # The backward of the sum scans twice.
    assert (operators["aten::_sample_dirichlet"], operators["aten::_logcumsumexp"]) == (1, 3)
    # The layer runs as the operators inside it: rows, weights of attention and of two layers.
    products = 2 * 120 * (8 * 3 * 8 + 8 * 8 + 2 * 8 * 32) + 4 * 3 * 40 * 40 * 8
    costs = op_costs_of(graph)
    gemms = [(names[i], int(f)) for i, f in zip(costs.index, costs.flops, strict=True)]
    inference = sum(f for name, f in gemms if name in ENCODER)
    of_script = 2 * 120 * 8 * 20
    assert inference - of_script == products


ENCODER = (
    "aten::addmm",
    "aten::_addmm_activation",
    "aten::_efficient_attention_forward",
)

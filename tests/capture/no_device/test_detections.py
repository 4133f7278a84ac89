"""A detector of torchvision selects as many boxes as its limits allow.

torchvision is no dependency of the tests, so its detector is a module of that name with the
operators of its samplers (references: torchvision.models.detection._utils and roi_heads).
"""

import textwrap

from notes import note_of
from without_device import captured

DETECTOR = """
    import torch

    def balanced(matches, size=16, positive=4):
        found = torch.where(matches >= 1)[0]
        others = torch.where(matches == 0)[0]
        found = found[torch.randperm(found.numel(), device=found.device)[:positive]]
        count = size - found.numel()
        others = others[torch.randperm(others.numel(), device=others.device)[:count]]
        masks = [torch.zeros_like(matches, dtype=torch.uint8) for _ in range(2)]
        for mask, indices in zip(masks, (found, others)):
            mask[indices] = 1
        return masks

    def select(scores, rows):
        kept = torch.where(scores >= 0.5)[0][:40]
        rows, matches = rows[kept], scores[kept].mul(2).long()
        found, others = balanced(matches)
        sampled = torch.where(found | others)[0]
        labels = torch.cat([matches[sampled], matches[sampled]])
        assert torch.where(torch.cat([found, found]))[0].numel() == 8
        return rows[sampled], torch.where(labels > 0)[0]
"""
SCRIPT = """
    import sys, torch
    sys.path.insert(0, {directory!r})
    from torchvision.models.detection import select

    model = torch.nn.Linear(8, 8, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        rows = model(torch.randn(100, 8, device="cuda"))
        sampled, positive = select(rows.sum(1), rows)
        assert (len(sampled), len(positive)) == (16, 8), (len(sampled), len(positive))
        assert torch.gt(sampled, rows[:16]).shape == sampled.shape
        sampled.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_a_detector_samples_as_many_boxes_as_its_limits_allow(tmp_path):
    package = tmp_path / "torchvision" / "models"
    package.mkdir(parents=True)
    for directory in (package.parent, package):
        (directory / "__init__.py").touch()
    (package / "detection.py").write_text(textwrap.dedent(DETECTOR))
    graph = captured(tmp_path, SCRIPT.format(directory=str(tmp_path)))
    note_of(graph.job.measurement.notes, "no-device-detections")

"""Resized micro-batches of a model without sequences."""

import json
import textwrap

import pytest
from own_process import run_command
from raised import raises_code

import onerank
from onerank.annotate import characterise
from onerank.annotate.passes.resize.resize import Resize
from onerank.annotate.passes.resize.size_change import (
    BATCH,
    CONSTANT,
    NO_SEQUENCE,
    Change,
    Sizing,
    readings,
)

# autocast's mean over the image goes by way of a copy of what its result held before
TRAIN = """
    import sys
    import torch
    from torch import nn
    batch = int(sys.argv[1])
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2, groups=16), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(16, 10),
    ).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(50):
        images = torch.randn(batch, 3, 32, 32).to(memory_format=torch.channels_last)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            scores = model(images)
            loss = nn.functional.cross_entropy(scores, torch.randint(0, 10, (batch,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@pytest.fixture(scope="module")
def capture(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    script, out = folder / "train.py", folder / "3.et"
    script.write_text(textwrap.dedent(TRAIN))
    few = ("--warm-up", 1, "--timed-steps", 1)
    done = run_command("capture", "run", script, *few, "-o", out, "--", 3)
    assert done.returncode == 0, done.stderr
    return onerank.read(out)


def test_a_micro_batch_of_images_is_resized_without_a_sequence(capture):
    resized, before = (
        characterise(g) for g in (Resize(batch=Change(3, 5)).apply(capture).graph, capture)
    )
    products = [i for i, op in enumerate(resized.text("op")) if op.endswith("mm") or "conv" in op]
    first = [json.loads(resized.text("input_shapes")[i])[:2] for i in products]
    assert sorted(first) == sorted([
        [[5, 3, 32, 32], [16, 3, 3, 3]], [[5, 16, 32, 32], [16, 1, 3, 3]], [[10], [5, 16]],
        [[10, 5], [5, 16]], [[5, 10], [10, 16]],
        [[5, 16, 15, 15], [5, 16, 32, 32]], [[5, 16, 32, 32], [5, 3, 32, 32]],
    ])  # fmt: skip
    assert (3 * resized.nodes.flops == 5 * before.nodes.flops)[products].all()


def test_what_the_script_keeps_from_step_to_step_grows(capture):
    before, resized = capture.job.measurement, Resize(batch=Change(3, 5)).apply(capture).graph
    after = resized.job.measurement
    kept = 4 * 3 * 32 * 32 + 2 * 10  # bytes of an image and its scores, until the next are made
    assert after.start_memory_bytes - before.start_memory_bytes == 2 * kept
    others = [sum(measurement.resident_bytes["other"]) for measurement in (before, after)]
    assert others[1] - others[0] == 2 * kept
    assert after.resident_bytes["parameters"] == before.resident_bytes["parameters"]


def test_of_two_multiples_of_the_micro_batch_the_first_is_of_it():
    sizing = Sizing(NO_SEQUENCE, Change(4, 8))
    assert readings((4 * 65, 192), sizing, BATCH)[0][1] == (BATCH, CONSTANT)
    assert readings((3, 4 * 65, 192), sizing, BATCH)[0][1] == (CONSTANT, BATCH, CONSTANT)


@pytest.mark.parametrize(
    ("batch", "code", "names"),
    [
        (Change(0, 5), "resize-sizes-unknown", ("--micro-batch 8=64",)),
        (Change(3, 3), "resize-same-batch", ("is 3",)),
        (Change(7, 5), "resize-batch-ambiguous", ("dimension of 7", "have 3, 16, 10")),
    ],
)
def test_the_captured_micro_batch_is_named(capture, batch, code, names):
    with raises_code(code, naming=names):
        Resize(batch=batch).apply(capture)

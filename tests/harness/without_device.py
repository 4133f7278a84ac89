"""Captures of short scripts without a device."""

import textwrap
from pathlib import Path

from own_process import run_command

import onerank
from onerank.ir import Graph

LINEAR = """
    import torch
    from torch import nn
    model = nn.Linear(64, 32, bias=False, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    {setup}
    for step in range(5):
        output = model(torch.randn(16, 64, device="cuda"))
        loss = output.sum()
        {statement}
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
"""A script of one linear layer; `{setup}` stands before its steps, `{statement}` in each."""


def run(directory: Path, text: str, *options: object):
    """Capture a script, and return the completed process; its trace is `trace.et`."""
    (directory / "train.py").write_text(textwrap.dedent(text))
    command = ("capture", "run", directory / "train.py", "--device", "none", *options)
    return run_command(*command, "-o", directory / "trace.et")


def captured(directory: Path, text: str, *options: object) -> Graph:
    """Capture a script, and return its graph."""
    done = run(directory, text, *options)
    assert done.returncode == 0, done.stderr
    return onerank.read(directory / "trace.et")


def write_packages(directory: Path, *packages: str) -> None:
    """Write empty packages: they are there, and their extensions are not."""
    for package in packages:
        (directory / package).mkdir()
        (directory / package / "__init__.py").write_text("")

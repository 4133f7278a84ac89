"""A user's script, captured."""

import textwrap
from pathlib import Path
from typing import Any

from job_options import axes

from onerank.capture import Options, WindowPlan, capture
from onerank.ir import Graph, World


def run(directory: Path, text: str, world: World, **options: Any) -> Graph:
    path = directory / "train.py"
    path.write_text(textwrap.dedent(text))
    return capture(
        path, [], Options(**axes(world), windows=WindowPlan(warm_up=1, timed_steps=1), **options)
    ).graph

"""The notebook of the examples runs, at a small size; its outputs are not kept."""

import ast
import json
import os
from pathlib import Path
from typing import Any

from own_process import call

EXAMPLES = Path(__file__).parents[2] / "examples"

NOTEBOOK = json.loads((EXAMPLES / "notebook.ipynb").read_text())

SMALL = ["--layers", "2", "--seq", "32"]


def _run(source: str, names: dict[str, Any]) -> Any:
    """Run a cell and return the value of its last expression, which a notebook displays."""
    *statements, last = ast.parse(source).body
    exec(compile(ast.Module(statements, []), "cell", "exec"), names)
    assert isinstance(last, ast.Expr), f"the cell displays nothing: {source}"
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names)


def test_outputs_are_stripped():
    assert NOTEBOOK["nbformat"] == 4
    cells = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)


def _run_all(directory: Path) -> tuple[int, dict[str, Any]]:
    """Run the cells in a directory; return how many show a table, and facts of their results."""
    os.chdir(directory)
    names: dict[str, Any] = {}
    shown = 0
    for cell in NOTEBOOK["cells"]:
        if cell["cell_type"] != "code":
            continue
        source = "".join(cell["source"]).replace('"train_llama.py",', f'"train_llama.py", {SMALL},')
        assert "<table" in _run(source, names)._repr_html_()
        shown += 1
    graph = names["graph"]
    return shown, {
        "tp": graph.job.world.sizes["tp"],
        "ranks": names["workload"].ranks,
        "collectives": int(graph.communication.sum()),
        "gpu": names["h200"].job.device.name,
        "fits": names["memory"].fits,
        "findings": names["findings"],
    }


def test_the_notebook_runs_and_each_cell_shows_a_table(tmp_path: Path):
    for name in ("train_llama.py", "prices.toml"):
        (tmp_path / name).symlink_to(EXAMPLES / name)
    shown, facts = call(_run_all, tmp_path)
    assert shown == 9
    # Two layers with two all-reduces each way; five of the parallel embedding, head and loss.
    assert facts == {
        "tp": 4,
        "ranks": 4,
        "collectives": 2 * 2 * 2 + 5,
        "gpu": "H200",
        "fits": True,
        "findings": [],
    }

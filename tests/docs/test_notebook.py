"""The notebook of the examples runs, at a small size; its outputs are not kept."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

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


def test_the_notebook_runs_and_each_cell_shows_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("train_llama.py", "prices.toml"):
        (tmp_path / name).symlink_to(EXAMPLES / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    names: dict[str, Any] = {}
    shown = 0
    for cell in NOTEBOOK["cells"]:
        if cell["cell_type"] != "code":
            continue
        source = "".join(cell["source"]).replace('"train_llama.py",', f'"train_llama.py", {SMALL},')
        assert "<table" in _run(source, names)._repr_html_()
        shown += 1
    assert shown == 9
    assert names["graph"].job.world.sizes["tp"] == names["workload"].ranks == 4
    # Two layers with two all-reduces each way; five of the parallel embedding, head and loss.
    assert int(names["graph"].communication.sum()) == 2 * 2 * 2 + 5
    assert names["h200"].job.device.name == "H200"
    assert names["memory"].fits
    assert names["findings"] == []

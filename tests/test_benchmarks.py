"""Benchmarks run by hand, so that only this test notices a name that has moved."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(f"{name}: {error}")
"""


def test_every_benchmark_imports():
    names = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))
    assert len(names) > 20
    folders = [str(ROOT / "benchmarks"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *names],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr

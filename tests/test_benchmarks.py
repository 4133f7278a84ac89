"""Benchmarks run by hand, so that only this test notices a name that has moved."""

import re
import subprocess
import sys
from pathlib import Path

from own_process import run_code

ROOT = Path(__file__).parents[1]

IMPORT_ALL = """
import importlib, sys
*folders, names = sys.argv[1:]
sys.path[:0] = folders
for name in names.split():
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(f"{name}: {error}")
"""


def test_every_benchmark_imports():
    names = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))
    assert len(names) > 20
    done = run_code(IMPORT_ALL, ROOT / "benchmarks", ROOT, " ".join(names))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_the_index_lists_every_benchmark_and_its_links_exist():
    index = (ROOT / "benchmarks" / "README.md").read_text()
    listed = set(re.findall(r"`(\w+\.py)`", index))
    assert listed == {path.name for path in (ROOT / "benchmarks").glob("*.py")}
    links = re.findall(r"\]\(([^)]+)\)", index)
    assert links
    assert not [link for link in links if not (ROOT / "benchmarks" / link).exists()]


def test_end_leaves_no_worker_in_a_session_of_its_own(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from predicted_vs_real import end

    # As torchrun does it: a worker in another session, which here ignores SIGTERM besides.
    worker = "import os, signal, time; signal.signal(15, signal.SIG_IGN); os.write(1, b'ready\\n')"
    start = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]],"
        " start_new_session=True).wait()"
    )
    worker += "; time.sleep(60)"
    # The pipe is closed when the last process that holds it has ended.
    with subprocess.Popen([sys.executable, "-c", start, worker], stdout=subprocess.PIPE) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == b"ready\n"
        end(job)
        assert job.stdout.read() == b""
        assert job.returncode != 0

"""Benchmarks run by hand, so that only this test notices a name that has moved."""

import re
import subprocess
import sys
from pathlib import Path

from own_process import run_code

ROOT = Path(__file__).parents[1]

BENCHMARKS = ROOT / "benchmarks"
# Scripts that are captured, not imported, stand in jobs/.
SCRIPTS = sorted(
    path
    for path in [*BENCHMARKS.glob("*.py"), *BENCHMARKS.glob("*/*.py")]
    if path.parent.name != "jobs" and path.name != "__init__.py"
)

IMPORT_ALL = """
import importlib, sys
root, names = sys.argv[1:]
sys.path.insert(0, root)
for name in names.split():
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(f"{name}: {error}")
"""


def test_every_benchmark_imports():
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in SCRIPTS]
    assert len(names) > 20
    done = run_code(IMPORT_ALL, ROOT, " ".join(names))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_the_index_lists_every_benchmark_and_its_links_exist():
    index = (BENCHMARKS / "README.md").read_text()
    # A section's heading names the folder of the scripts in its table.
    listed: set[str] = set()
    for section in index.split("\n## "):
        heading, _, body = section.partition("\n")
        folder = re.search(r"`(\w+/)`", heading)
        names = re.findall(r"`((?:\w+/)?\w+\.py)\b", body)
        listed |= {folder[1] + name if folder and "/" not in name else name for name in names}
    assert listed == {str(path.relative_to(BENCHMARKS)) for path in SCRIPTS}
    links = re.findall(r"\]\(([^)]+)\)", index)
    assert links
    assert not [link for link in links if not (BENCHMARKS / link).exists()]


def test_every_result_is_cited():
    """By a page, the code, or a result that is cited itself; others only look as if they count."""
    folder = BENCHMARKS / "results"
    roots = ("annotate", "benchmarks", "capture", "converters", "docs", "ir", "src", "tools")
    suffixes = (".md", ".py", ".toml", ".cu")
    files = [path for root in roots for path in (ROOT / root).rglob("*") if path.suffix in suffixes]
    cited = "".join(path.read_text() for path in files if folder not in path.parents)
    pending = {path for path in folder.iterdir() if path.suffix in (".txt", ".md")}
    assert len(pending) > 50
    while found := {path for path in pending if path.stem in cited}:
        pending -= found
        cited = "".join(path.read_text() for path in found)
    assert sorted(path.name for path in pending) == []


def test_scripts_of_jobs_import_nothing_of_benchmarks():
    # `torchrun` and `capture run` start them as files: the root of the checkout is not on the path.
    scripts = sorted((BENCHMARKS / "jobs").glob("*.py"))
    assert scripts
    imports = re.compile(r"^\s*(?:from|import) benchmarks\b", re.MULTILINE)
    assert not [path.name for path in scripts if imports.search(path.read_text())]


def test_end_leaves_no_worker_in_a_session_of_its_own():
    from benchmarks.slices.predicted_vs_real import end

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

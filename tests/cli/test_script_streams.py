"""Progress on a terminal: one live line for counted steps, below what the script prints."""

import os
import pty
import subprocess
import sys

CODE = """
from onerank.cli.script import script_streams
with script_streams(stdout_to_stderr=False) as progress:
    progress("running train.py")
    progress("warm-up, step 2 of 3")
    progress("warm-up, step 3 of 3")
    print("loss 1.0")
    progress("timed, step 1 of 2")
    print("half", end="")
    progress("timed, step 2 of 2")
    progress("linking the traces")
print("summary")
"""


def test_a_live_line_gives_way_to_the_scripts_output():
    terminal, end = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", CODE], stdout=end, stderr=end, stdin=end) as run:
        run.wait()
        os.close(end)
    text = b""
    try:
        while part := os.read(terminal, 4096):
            text += part
    except OSError:  # the other end is closed
        pass
    os.close(terminal)
    assert run.returncode == 0
    lines = text.decode().replace("\r\n", "\n").split("\n")
    assert lines == [
        "· running train.py",
        "· warm-up, step 2 of 3\r\x1b[K· warm-up, step 3 of 3",
        "loss 1.0",
        "· timed, step 1 of 2",
        "half",
        "· timed, step 2 of 2",
        "· linking the traces",
        "summary",
        "",
    ]


def test_a_log_gets_a_line_per_event():
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert run.stdout == "loss 1.0\nhalfsummary\n"
    assert run.stderr.splitlines() == [
        "· running train.py",
        "· warm-up, step 2 of 3",
        "· warm-up, step 3 of 3",
        "· timed, step 1 of 2",
        "· timed, step 2 of 2",
        "· linking the traces",
    ]

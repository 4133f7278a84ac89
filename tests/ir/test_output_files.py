"""Scratch files and directories: removed at the end, and by the next run after a kill."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from onerank.ir.output_files import (
    remove_abandoned,
    replace_file,
    replacing,
    scratch_directory,
    scratch_file,
)

HOLD = """
import sys, time
from pathlib import Path
from onerank.ir.output_files import replacing
from onerank.ir.output_files import scratch_directory
place = Path(sys.argv[1])
with scratch_directory(place) as directory, replacing(place / "t.et") as file:
    (directory / "raw").mkdir()
    file.write(b"half")
    print("ready", flush=True)
    time.sleep(600)
"""


def hidden(directory: Path) -> list[Path]:
    return sorted(directory.glob(".*"))


def test_a_killed_run_leaves_entries_that_the_next_run_removes(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert len(hidden(tmp_path)) == 2
        remove_abandoned(tmp_path)
        assert len(hidden(tmp_path)) == 2  # a process holds them
        process.send_signal(signal.SIGKILL)
    assert len(hidden(tmp_path)) == 2
    with scratch_directory(tmp_path) as directory:
        assert hidden(tmp_path) == [directory]
    assert hidden(tmp_path) == []


def test_a_fork_of_a_killed_run_still_holds_its_entries(tmp_path):
    read, write = os.pipe()
    child = os.fork()
    if not child:
        with scratch_directory(tmp_path):
            if not os.fork():
                os.close(write)
                os.read(read, 1)
                os._exit(0)
            os._exit(0)  # without leaving the context
    os.close(read)
    os.waitpid(child, 0)
    remove_abandoned(tmp_path)
    assert len(hidden(tmp_path)) == 1
    os.close(write)  # ends the grandchild
    deadline = time.monotonic() + 30
    while hidden(tmp_path) and time.monotonic() < deadline:
        remove_abandoned(tmp_path)
        time.sleep(0.01)
    assert hidden(tmp_path) == []


def test_entries_of_other_programs_stay(tmp_path):
    others = [tmp_path / name for name in (".t.et.1234.tmp", "onerank-data", ".onerank-tmp-x")]
    for path in others:
        path.write_text("")
    replace_file(tmp_path / "t.et", b"1")
    with scratch_directory(tmp_path), scratch_file(tmp_path / "t.et"):
        pass
    assert all(path.exists() for path in others)


def test_a_file_appears_only_when_complete(tmp_path):
    path = tmp_path / "t.et"
    try:
        with replacing(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert list(tmp_path.iterdir()) == []

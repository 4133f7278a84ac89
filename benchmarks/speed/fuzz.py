"""Fuzz the readers by hand, guided by coverage.

    python -m benchmarks.speed.fuzz [FAMILY...] --minutes 60 [--unguided]

Each family of `tests/bad/families.py` (all, if none is named) gets an equal part of the time, in a
process with atheris (`pip install atheris`), which keeps mutants that reach new code; `--unguided`
draws seeds instead and needs nothing. Prints a row for each family and every distinct traceback.
"""

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.harness import print_conditions

HANG_S = 20
MEMORY_FACTOR, MEMORY_MB = 10, 500
_MARK = "FUZZED "
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "bad"))


class Hang(BaseException):
    """A mutant took longer than HANG_S; no `except Exception` of a reader stops it."""


class Watch:
    """Reads mutants of one family, and counts the outcomes."""

    def __init__(self, name: str, minutes: float) -> None:
        from families import FAMILIES
        from mutations import Choices

        self._family, self.choices = FAMILIES[name], Choices
        self.until = time.monotonic() + 60 * minutes
        self.counts = Counter[str]()
        self.bugs: dict[str, str] = {}
        self.slowest_s = 0.0
        self.memory_mb = 0.0
        for seed in range(20):  # so that no mutant is charged for imports and caches
            self.attempt(Choices(seed))
        self.counts.clear()
        self._peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def attempt(self, choices: Any) -> None:
        began, size = time.monotonic(), 0
        signal.setitimer(signal.ITIMER_REAL, HANG_S)
        try:
            read, size = self._family.attempt(choices)
            self.counts["read" if read else "refused"] += 1
        except Hang:
            self.counts["hangs"] += 1
            self._keep("hang")
        except Exception as error:  # noqa: BLE001 - this is what a fuzzer looks for
            self.counts["tracebacks"] += 1
            self._keep(f"{type(error).__name__}: {str(error)[:200]}")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if hasattr(self, "_peak_kib") and peak_kib > self._peak_kib:
            grown_mb = (peak_kib - self._peak_kib) / 1024
            self.memory_mb = max(self.memory_mb, grown_mb)
            if grown_mb > MEMORY_FACTOR * size / 1e6 + MEMORY_MB:
                self.counts["memory"] += 1
                self._keep("memory")
            self._peak_kib = peak_kib

    def _keep(self, target: str) -> None:
        frames = traceback.extract_tb(sys.exc_info()[2])[-3:]
        place = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames))
        self.bugs.setdefault(place or target, target)

    def report(self) -> None:
        fields = {
            "counts": self.counts,
            "bugs": self.bugs,
            "slowest_s": round(self.slowest_s, 2),
            "memory_mb": round(self.memory_mb),
        }
        print(_MARK + json.dumps(fields), flush=True)


def _stop(*_: object) -> None:
    raise Hang


def fuzz_family(name: str, minutes: float, *, guided: bool) -> None:
    """Read mutants of a family for some minutes, and print the outcomes."""
    signal.signal(signal.SIGALRM, _stop)
    if not guided:
        watch, seed = Watch(name, minutes), 1_000_000
        while time.monotonic() < watch.until:
            watch.attempt(watch.choices(seed))
            seed += 1
        watch.report()
        return
    import atheris

    with atheris.instrument_imports(include=["onerank"]):
        watch = Watch(name, minutes)

    def once(data: bytes) -> None:
        if time.monotonic() > watch.until:
            watch.report()
            sys.stdout.flush()
            os._exit(0)  # libFuzzer's own limit would end the process before the report
        watch.attempt(watch.choices(data=data))

    with tempfile.TemporaryDirectory() as corpus:
        for seed in range(200):
            Path(corpus, str(seed)).write_bytes(os.urandom(64))
        options = ["-max_len=512", "-timeout=120", "-rss_limit_mb=8000", "-verbosity=0"]
        atheris.Setup([sys.argv[0], *options, corpus], once)
        atheris.Fuzz()


def main() -> None:
    """Fuzz each family in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--minutes", type=float, default=60, help="for all families together")
    parser.add_argument("--unguided", action="store_true", help="without atheris")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        fuzz_family(options.families[0], options.minutes, guided=not options.unguided)
        return
    from families import FAMILIES

    names = options.families or [*FAMILIES]
    minutes = options.minutes / len(names)
    how = "without guidance" if options.unguided else "guided by coverage (atheris)"
    print_conditions()
    print(
        f"{minutes:.1f} minutes per family, {how}\n"
        f"a hang: over {HANG_S} s; memory: a mutant that takes over {MEMORY_FACTOR} times its "
        f"bytes plus {MEMORY_MB} MB\n"
        f"{'family':<18}{'mutants':>9}{'read':>9}{'refused':>9}{'tracebacks':>11}{'hangs':>7}"
        f"{'memory':>8}{'slowest s':>11}{'grown MB':>10}"
    )
    for name in names:
        command = [sys.executable, __file__, name, "--minutes", str(minutes), "--here"]
        command += ["--unguided"] * options.unguided
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        line = next((x for x in done.stdout.splitlines() if x.startswith(_MARK)), None)
        if line is None:
            print(f"{name:<18}died with {done.returncode}: {done.stderr.strip()[-300:]}")
            continue
        result = json.loads(line.removeprefix(_MARK))
        counts = Counter(result["counts"])
        mutants = counts["read"] + counts["refused"] + counts["tracebacks"] + counts["hangs"]
        print(
            f"{name:<18}{mutants:>9}{counts['read']:>9}{counts['refused']:>9}"
            f"{counts['tracebacks']:>11}{counts['hangs']:>7}{counts['memory']:>8}"
            f"{result['slowest_s']:>11.2f}{result['memory_mb']:>10}",
            flush=True,
        )
        for place, target in result["bugs"].items():
            print(f"    {place}: {target}")


if __name__ == "__main__":
    main()

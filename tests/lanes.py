"""Runs the suite in two lanes side by side: ``python -m tests.lanes [--all] [arguments of pytest]``.

One pytest process runs the tests that use the pools of ranks, a second one all others. A rank often waits for another
one, and the second lane uses the core meanwhile. What is printed looks like one run: dots as tests finish, then the
failures of each lane, the ten slowest tests, and one closing line that counts both lanes.

Without ``--all``, tests marked ``slow`` are left out and randomized tests draw fewer examples (see docs/testing.md).
The wall and CPU time of each test is kept in ``.pytest_cache/durations.json``.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["closing_line", "exit_code", "main"]

_ROOT = Path(__file__).resolve().parent.parent
_LANES = ("ranks", "single")
_DURATIONS = _ROOT / ".pytest_cache" / "durations.json"
_NO_TESTS = 5  # pytest's exit code
_LETTERS = {"passed": ".", "failed": "F", "error": "E", "skipped": "s", "xfailed": "x", "xpassed": "X"}
_CLOSING = re.compile(r"^(=+ )?(\d+ \w+|no tests ran)(, \d+ \w+)* in [\d.]+s( \([\d:]+\))?( =+)?$")
_ORDER = ["failed", "passed", "skipped", "deselected", "xfailed", "xpassed", "warnings", "error"]  # of pytest


class _Lane:
    def __init__(self, name: str, arguments: Sequence[str], folder: Path, environment: dict[str, str]) -> None:
        self.name = name
        self._output, self._record = folder / f"{name}.out", folder / f"{name}.jsonl"
        command = [sys.executable, "-m", "pytest", "--lane", name, "--record", str(self._record), *arguments]
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                command,
                cwd=_ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=_end_with_parent,
            )
        self._read = 0
        self.collected = 0
        self.tests: list[dict[str, Any]] = []
        self.totals: dict[str, Any] = {}

    def poll(self) -> list[dict[str, Any]]:
        """The tests that have finished since the last call."""
        if not self._record.exists():
            return []
        with self._record.open() as file:
            file.seek(self._read)
            text = file.read()
        text = text[: text.rfind("\n") + 1]
        self._read += len(text.encode())
        new = []
        for record in map(json.loads, text.splitlines()):
            if "test" in record:
                new.append(record)
            elif "collected" in record:
                self.collected = record["collected"]
            else:
                self.totals = record
        self.tests += new
        return new

    def report(self) -> str:
        """What pytest printed besides the progress and the closing line."""
        lines = self._output.read_text(errors="replace").rstrip().splitlines()
        if self.process.returncode in (0, 1, 2, _NO_TESTS):
            first = next((i for i, line in enumerate(lines) if line.startswith("===")), len(lines))
            lines = lines[first:]
        if lines and _CLOSING.match(lines[-1]):
            lines.pop()
        return "\n".join(lines)


def _end_with_parent() -> None:
    """In a child: a killed driver leaves no lane behind, and a killed lane no ranks (tests/ranks.py)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both lanes; returns what pytest would return for one run of all tests."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    environment = dict(os.environ)
    if "--all" in arguments:
        arguments.remove("--all")
        environment["VESCALE_NIGHTLY"] = "1"
    else:
        arguments[:0] = ["-m", "not slow"]
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="vescale-tests-") as folder, _terminated_like_interrupted():
        lanes = [_Lane(name, arguments, Path(folder), environment) for name in _LANES]
        interrupted = False
        try:
            _watch(lanes, stop_at_failure=not {"-x", "--exitfirst"}.isdisjoint(arguments))
        except KeyboardInterrupt:
            interrupted = True
        finally:
            _stop(lanes)
        for lane in lanes:
            lane.poll()
        _print_reports(lanes)
        _keep_durations(lanes)
        print(closing_line(_counts(lanes), time.monotonic() - start))
    return 2 if interrupted else exit_code([lane.process.returncode for lane in lanes])


def _watch(lanes: Sequence[_Lane], stop_at_failure: bool) -> None:
    """Print a letter for each test until both lanes have ended."""
    done = 0
    while True:
        ended = all(lane.process.poll() is not None for lane in lanes)
        for lane in lanes:
            for record in lane.poll():
                done += 1
                print(_LETTERS[record["outcome"]], end="", flush=True)
                if done % 72 == 0:
                    print(f" [{100 * done // max(done, sum(lane.collected for lane in lanes)):3d}%]", flush=True)
        if ended or (stop_at_failure and any(lane.process.poll() not in (None, 0, _NO_TESTS) for lane in lanes)):
            print()
            return
        time.sleep(0.1)


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop(lanes: Sequence[_Lane]) -> None:
    """End what still runs; ten seconds for pytest to close its fixtures."""
    for lane in lanes:
        if lane.process.poll() is None:
            lane.process.send_signal(signal.SIGINT)
    for lane in lanes:
        try:
            lane.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            lane.process.kill()
            lane.process.wait()


def _print_reports(lanes: Sequence[_Lane]) -> None:
    for lane in lanes:
        text = lane.report()
        if text:
            print(f"\nlane: {lane.name}\n{text}")
        if lane.process.returncode < 0:
            print(f"\nlane: {lane.name}\npytest was ended by {signal.Signals(-lane.process.returncode).name}")
    tests = [test for lane in lanes for test in lane.tests]
    print("\n" + " slowest 10 tests (seconds, CPU seconds) ".center(80, "="))
    for test in sorted(tests, key=lambda test: -test["seconds"])[:10]:
        print(f"{test['seconds']:7.2f} {test['cpu']:7.2f}  {test['test']}")
    for lane in lanes:
        seconds, cpu = (sum(test[key] for test in lane.tests) for key in ("seconds", "cpu"))
        starts = ", ".join(f"{count} {why}" for why, count in lane.totals.get("rank starts", {}).items())
        ranks = f"; ranks started: {starts}" if starts else ""
        print(f"lane {lane.name}: {len(lane.tests)} tests, {seconds:.0f} s, {cpu:.0f} s of CPU{ranks}")


def _keep_durations(lanes: Sequence[_Lane]) -> None:
    """Update the kept times with those of the tests that ran."""
    kept: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        kept = json.loads(_DURATIONS.read_text())
    for lane in lanes:
        for test in lane.tests:
            kept[test["test"]] = {"lane": lane.name, "seconds": test["seconds"], "cpu": test["cpu"]}
    _DURATIONS.parent.mkdir(exist_ok=True)
    _DURATIONS.write_text(json.dumps(kept, indent=0, sort_keys=True))


def _counts(lanes: Sequence[_Lane]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for lane in lanes:
        if "counts" in lane.totals:
            counts.update(lane.totals["counts"])
        else:  # it was killed before its end
            counts.update(test["outcome"] for test in lane.tests)
    return counts


def closing_line(counts: Mapping[str, int], seconds: float) -> str:
    """As pytest writes it."""
    parts = []
    for name in _ORDER:
        number = counts.get(name, 0)
        if number:
            word = {"warnings": "warning"}.get(name, name) if number == 1 else {"error": "errors"}.get(name, name)
            parts.append(f"{number} {word}")
    clock = f" ({int(seconds) // 3600}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d})" if seconds >= 60 else ""
    return f"{', '.join(parts) or 'no tests ran'} in {seconds:.2f}s{clock}"


def exit_code(codes: Sequence[int]) -> int:
    """Of one run: the worst code, where a lane without tests does not count unless both have none."""
    if all(code == _NO_TESTS for code in codes):
        return _NO_TESTS
    return max((abs(code) for code in codes if code != _NO_TESTS), default=0)


if __name__ == "__main__":
    sys.exit(main())

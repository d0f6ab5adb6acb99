"""Fixtures and options shared by the whole suite."""

import gc
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

# Ranks and sub-processes already fill the cores: a second thread per process only waits. Read when torch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from tests.nightly import is_nightly
from tests.ranks import GARBAGE_THRESHOLDS, SPENT, RankPools
from vescale import csrc

COLLECTED = pytest.StashKey[list[str]]()
"""Names of all collected tests, before any are left out."""


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPools]:
    """Gloo ranks: ``ranks.run(fn, *args, world_size=4)``."""
    pools = RankPools()
    yield pools
    pools.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("vescale")
    group.addoption(
        "--lane", choices=["ranks", "single"], help="only tests that use the pools of ranks, or only the other ones"
    )
    group.addoption("--record", metavar="FILE", help="write one JSON object for each test: outcome, wall and CPU time")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record"):
        config.pluginmanager.register(Recorder(Path(config.getoption("--record"))), "recorder")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        case = getattr(item, "callspec", None)
        if is_nightly(item.path.name, getattr(item, "originalname", item.name), case.id if case else None):
            item.add_marker("slow")
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(
                pytest.mark.skip(reason="compares with the bits of CUDA's own ops: no CUDA device on this machine")
            )
        for marker in item.iter_markers("helper"):
            name = marker.args[0]
            if csrc.load(name) is None:  # tests/csrc/test_build.py tells whether that is an error
                reason = (
                    f"optional accelerator vescale/csrc/{name}.cpp: not built here, or switched off (VESCALE_NO_NATIVE)"
                )
                item.add_marker(pytest.mark.skip(reason=reason))
    config.stash[COLLECTED] = [item.nodeid for item in items]
    lane = config.getoption("--lane")
    if lane:  # not reported as deselected: the other lane counts them, whether it runs or deselects them
        items[:] = [item for item in items if ("ranks" in getattr(item, "fixturenames", ())) == (lane == "ranks")]


def pytest_collection_finish() -> None:
    """What the modules of all tests hold is never searched for garbage: each search would take a second. Other objects are
    searched less often than by default, for a twelfth of the CPU time goes there."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GARBAGE_THRESHOLDS)


class Recorder:
    """Writes a line of JSON for each test while the run goes on, and one for the run at its end.

    CPU time is that of the test process, of its finished sub-processes and of the ranks, so that it hardly depends on
    what else the machine does. The first test that uses a module's or the session's fixtures pays for them.
    """

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("w")
        self._outcome = "passed"
        self._counts: dict[str, int] = {}

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._write({"collected": len(session.items)})

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._outcome = "passed"
        start, cpu = time.monotonic(), _cpu_seconds()
        result = yield
        seconds, cpu = time.monotonic() - start, _cpu_seconds() - cpu
        self._write({"test": item.nodeid, "outcome": self._outcome, "seconds": round(seconds, 3), "cpu": round(cpu, 3)})
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if hasattr(report, "wasxfail"):
            self._outcome = "xpassed" if report.passed else "xfailed"
        elif report.failed:
            self._outcome = "failed" if report.when == "call" else "error"
        elif report.skipped:
            self._outcome = "skipped"

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        stats = terminalreporter.stats
        self._counts = {name: len(reports) for name, reports in stats.items() if name}
        self._write({"counts": self._counts, "rank cpu": round(SPENT.seconds, 1), "rank starts": dict(SPENT.starts)})


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system + SPENT.seconds

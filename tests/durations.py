"""A pytest plugin that measures tests: wall and CPU time of each one, kept in pytest's cache.

The CPU time is that of the process that runs the test, of its finished sub-processes and of forked ones, so that it hardly
depends on what else the machine does. The first test that uses a module's or the session's fixtures pays for them. With
pytest-xdist the workers measure, and the main process collects the results.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.fork_server import cpu_seconds_of_forked
from tests.fresh import cpu_seconds_of_fresh
from tests.ranks import ON_DEVICE, STARTS

__all__ = ["KEPT", "Durations"]

KEPT = "vescale/durations"
"""Where the times are in pytest's cache: the file ``.pytest_cache/v/vescale/durations``."""
_SLOWEST = 10


@dataclass(eq=False)  # plugins are kept in sets
class Durations:
    """Registered by ``tests/conftest.py``; in a worker, and in the main process or the only one."""

    config: pytest.Config
    tests: dict[str, dict[str, float]] = field(default_factory=dict)
    starts: Counter[str] = field(default_factory=Counter)
    on_device: Counter[str] = field(default_factory=Counter)
    _wall: float = 0.0
    _cpu: float = 0.0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        self._wall, self._cpu = time.monotonic(), _cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[None]:
        report: Any = yield
        if call.when == "teardown":
            report.user_properties.append(("wall", round(time.monotonic() - self._wall, 3)))
            report.user_properties.append(("cpu", round(_cpu_seconds() - self._cpu, 3)))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            times: dict[str, Any] = dict(report.user_properties)
            self.tests[report.nodeid] = {"seconds": times["wall"], "cpu": times["cpu"]}

    def pytest_sessionfinish(self) -> None:
        output = getattr(self.config, "workeroutput", None)
        if output is not None:
            output["rank starts"], output["on device"] = dict(STARTS), dict(ON_DEVICE)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        output = getattr(node, "workeroutput", {})
        self.starts.update(output.get("rank starts", {}))
        self.on_device.update(output.get("on device", {}))

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """The slowest tests and the totals, if more tests ran than one looks at; the times are kept in any case."""
        cache = getattr(self.config, "cache", None)  # not with -p no:cacheprovider
        if cache is not None:
            cache.set(KEPT, cache.get(KEPT, {}) | self.tests)
        if len(self.tests) <= _SLOWEST:
            return
        terminalreporter.section(f"slowest {_SLOWEST} tests (seconds, CPU seconds)")
        for name, times in sorted(self.tests.items(), key=lambda item: -item[1]["seconds"])[:_SLOWEST]:
            terminalreporter.write_line(f"{times['seconds']:7.2f} {times['cpu']:7.2f}  {name}")
        cpu = sum(times["cpu"] for times in self.tests.values())
        starts = ", ".join(f"{count} {why}" for why, count in (self.starts or STARTS).items())
        ranks = f"; ranks started: {starts}" if starts else ""
        terminalreporter.write_line(f"{len(self.tests)} tests, {cpu:.0f} s of CPU{ranks}")
        if found := self.on_device or ON_DEVICE:
            counted = ", ".join(f"{count:,} {what}" for what, count in found.items())
            terminalreporter.write_line(f"on the simulated device: {counted}")


def _cpu_seconds() -> float:
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    return own + cpu_seconds_of_forked() + cpu_seconds_of_fresh()

"""Fixtures and options shared by the whole suite."""

import contextlib
import gc
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Ranks and sub-processes already fill the cores: a second thread per process only waits. Read when torch is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Each new connection of torch.distributed looks up the host's name; a lost answer of the resolver would take five seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

from tests.compiler import compiler

# Where no helper can be built, vescale would tell each process so, and tests that allow no warnings would fail.
if compiler() is None and not list(Path(__file__).parents[1].glob("vescale/csrc/*.so")):
    os.environ.setdefault("VESCALE_NO_NATIVE", "1")

import pytest
import torch

from tests.device import DEVICE, set_device_type
from tests.durations import Durations
from tests.file_order import spread_waiting_files
from tests.fork_server import start_fork_server
from tests.fresh import start_fresh_server
from tests.nightly import is_nightly
from tests.ranks import GARBAGE_THRESHOLDS, RankPools
from vescale import csrc

COLLECTED = pytest.StashKey[list[str]]()
"""Names of all collected tests, before any are left out."""


@pytest.fixture(scope="session")
def ranks(pytestconfig: pytest.Config) -> Iterator[RankPools]:
    """Gloo ranks: ``ranks.run(fn, *args, world_size=4)``. With ``--device=sim`` their tensors are on the simulated
    accelerator, and a race fails the test."""
    pools = RankPools(pytestconfig.option.device)
    yield pools
    pools.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    where = "where ranks have their tensors: docs/internals/device.md"
    parser.addoption("--device", choices=("cpu", DEVICE), default="cpu", help=where)


def pytest_configure(config: pytest.Config) -> None:
    set_device_type(config.option.device)
    config.pluginmanager.register(Durations(config), "durations")
    is_worker = hasattr(config, "workerinput")
    if is_worker or getattr(config.option, "dist", "no") == "no":  # a process that runs tests
        start_fresh_server(preload=is_worker)
    if is_worker:
        os.environ.pop("COLUMNS", None)  # set for a worker, whose output is no terminal


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """In a new clone every process of pytest-xdist would compile all test files. Each imports its share first, and then
    finds those of the others compiled."""
    worker: dict[str, Any] | None = getattr(session.config, "workerinput", None)
    if worker is None or session.config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return  # one process, or a choice of files
    number, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    for file in sorted(Path(__file__).parent.rglob("test_*.py"))[number::count]:
        name = ".".join(file.relative_to(session.config.rootpath).with_suffix("").parts)
        # This only compiles. A module that raises, or skips itself, stays out of sys.modules: pytest imports it again when
        # it collects the file, and then reports what it raises, as without this function.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(name)


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
    spread_waiting_files(items)


def pytest_collection_finish() -> None:
    """What the modules of all tests hold is never searched for garbage: each search would take a second. Other objects are
    searched less often than by default, for a twelfth of the CPU time goes there."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GARBAGE_THRESHOLDS)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[Any]:
    if session.items and not session.config.option.collectonly:
        start_fork_server()
    return (yield)

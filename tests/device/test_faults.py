"""Every planted fault of ``tests/device/faults.py`` is found, and the programs without it are clean."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.compiler import needs_compiler
from tests.device.faults import COLLECTIVE, LOCAL
from tests.ranks import RankPools

pytestmark = needs_compiler

TABLES = {"local": LOCAL, "collective": COLLECTIVE}


def outcome(fault: Callable[[bool], None], bad: bool) -> str:
    """What the device says: the error, or the first race; "" where it has nothing to say."""
    sim = torch.sim
    sim.clear()
    sim.synchronize()
    try:
        fault(bad)
        error = ""
    except Exception as raised:
        error = str(raised)
    races = sim.races()
    sim.clear()
    with contextlib.suppress(dist.DistBackendError):  # of the collectives that failed
        sim.synchronize()
    sim.clear()
    return error or "".join(races[:1])


def outcomes(table: str) -> dict[str, tuple[str, str]]:
    found = {name: (outcome(fault, False), outcome(fault, True)) for name, fault in TABLES[table].items()}
    torch.sim.clear()
    return found


@pytest.mark.parametrize(("table", "world_size"), [("local", 1), ("collective", 2)])
def test_planted_faults_are_found(table: str, world_size: int, ranks: RankPools) -> None:
    answers = ranks.run(outcomes, table, world_size=world_size, device="sim")
    clean, planted = ({name: [a[name][which] for a in answers] for name in answers[0]} for which in (0, 1))
    alarms = {name: texts for name, texts in clean.items() if any(texts)}
    assert not alarms, f"{len(alarms)} programs without a fault raise: {alarms}"
    missed = [name for name, texts in planted.items() if not any(texts)]
    assert not missed, f"{len(missed)} of {len(planted)} faults are not found: {missed}"


def test_there_are_many() -> None:
    assert len(LOCAL) + len(COLLECTIVE) >= 60

"""Every entry of the C++ helpers refuses what it cannot use: with a Python exception or an answer, never with a crash."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from tests.fresh import run_fresh
from vescale import csrc

_PROGRAM = """
import sys
from tests.csrc.wrong_arguments import main
main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
"""
_LIBRARIES = ("adamw8bit", "grads", "hook_gate", "mt19937", "philox", "planner")


@pytest.fixture(autouse=True)
def helpers() -> None:
    if csrc.dispatcher() is None:
        pytest.skip(
            "calls entries of the C++ helpers, which VESCALE_NO_NATIVE=1 switches off; test_build.py misses unbuilt ones"
        )


def check(seed: int, calls: int, folder: Path) -> None:
    log = folder / "call"
    finished = run_fresh(_PROGRAM, str(log), str(seed), str(calls))
    assert finished.returncode == 0, f"{log.read_text()}\n{finished.stderr[-2000:]}"
    assert "the program goes on" in log.read_text()


@pytest.mark.parametrize("seed", range(1))
def test_modules(seed: int, tmp_path: Path) -> None:
    check(seed, 4, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 17))
def test_modules_often(seed: int, tmp_path: Path) -> None:
    check(seed, 60, tmp_path)


# Places of numbers among the arguments; the others are addresses.
_ENTRIES = {
    "adamw8bit_step": "1,3,4",
    "take_grads": "0",
    "give_grads": "0",
    "set_access_error": "7",
    "free_gate": "7",
    "state_of": "7",
    "guard": "7",
    "lets_pass": "7",
    "unguard": "7",
    "new_count": "0",
    "free_count": "7",
    "reset_count": "1",
    "start_counting": "7",
    "stop_counting": "7",
    "placed_of": "7",
    "forget_placed": "7",
    "add_arrival": "1",
    "num_missing": "7",
    "count_gradients": "1",
    "is_only_count": "7",
    "place_gradient": "7",
    "mt19937_twist": "1",
    "mt19937_polynomial": "0,2",
    "mt19937_apply": "7",
    "philox_fill": "7",
    "philox_indexed_bits": "0,1,2,4",
    "planner_best_order": "0,4,5",
}


def test_libraries() -> None:
    """Entries that get addresses refuse null, with whatever number of items."""
    program, found = ["import ctypes", "from vescale import csrc"], set()
    for name in _LIBRARIES:
        library: Any = csrc.load(name)
        for entry, numbers in _ENTRIES.items():
            if not hasattr(library, entry):
                continue
            found.add(entry)
            for number in (0, 1, 3):
                given = ", ".join(str(number) if str(place) in numbers.split(",") else "None" for place in range(8))
                kind = "ctypes.PYFUNCTYPE(ctypes.c_int64, *[ctypes.c_void_p] * 8)"
                program.append(
                    f"print({entry!r}, {number}, flush=True); {kind}(({entry!r}, csrc.load({name!r})))({given})"
                )
    assert found == set(_ENTRIES)
    finished = run_fresh("\n".join(program))
    assert finished.returncode == 0, finished.stdout[-200:] + finished.stderr[-2000:]


@pytest.mark.parametrize(
    ("numels", "blocks", "counts", "shard", "limit"),
    [
        ((-4,), (1,), (1,), 8, 8),
        ((4,), (0,), (1,), 8, 8),
        ((4,), (1,), (-1,), 8, 8),
        ((4,), (1,), (1,), 0, 8),
        ((9,), (1,), (1,), 8, 8),
    ],
)
def test_numbers_of_the_planner(numels: Any, blocks: Any, counts: Any, shard: int, limit: int) -> None:
    """They are divided by, and are sizes of its table."""
    library: Any = csrc.load("planner")
    sizes, order = ctypes.c_int64 * len(counts), (ctypes.c_int32 * 8)()
    call = library.planner_best_order
    numbers = ctypes.c_int64(shard), ctypes.c_int64(limit)
    assert call(ctypes.c_int32(len(counts)), sizes(*numels), sizes(*blocks), sizes(*counts), *numbers, order) == -2


@pytest.mark.parametrize("runs", [[(0, 10), (5, -5)], [(-1, 2)], [(0, -1)]])
def test_runs_of_random_bits(runs: list[tuple[int, int]]) -> None:
    """The memory is as long as their sum says."""
    from vescale.rng._stream_spans import indexed_bits

    with pytest.raises(ValueError, match="negative"):
        indexed_bits(0, 0, 0, runs)

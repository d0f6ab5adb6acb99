"""The first step of a record that was read."""

from __future__ import annotations

import gc

from vescale.static._forward import only_recorded_functions


def collected(phase: str, info: dict[str, int]) -> None:
    """Of the garbage collector."""


def test_callbacks_of_the_garbage_collector_are_no_functions_of_a_model() -> None:
    gc.callbacks.append(collected)
    try:
        with only_recorded_functions([], {}):
            made = list(map(list, [()] * 100_000))  # enough for the collector to run
        assert len(made) == 100_000 and gc.isenabled()
    finally:
        gc.callbacks.remove(collected)

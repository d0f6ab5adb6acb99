"""Tables of modules are read while other threads write to them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import nn

from vescale.checks._replaced_parameters import known_names, note_name


def read_while_written(write: Callable[[nn.Module], object], read: Callable[[], object]) -> None:
    done = threading.Event()

    def run() -> None:
        while not done.is_set():
            write(nn.Linear(1, 1))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for _ in range(300):
            read()
    finally:
        done.set()
        thread.join()


def test_names_of_parameters() -> None:
    modules = [nn.Linear(1, 1) for _ in range(300)]
    for module in modules:
        note_name(module, "weight", "layer.weight", "Model")
    wanted = [modules[-1].weight]

    def read() -> None:
        assert known_names(wanted) == {wanted[0]: ("layer.weight", "Model")}

    read_while_written(lambda module: note_name(module, "weight", "other.weight", "Other"), read)

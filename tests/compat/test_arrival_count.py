"""Counts of gradients: the same with and without C++, which calls Python for the last gradient and what is unusual."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from vescale import csrc
from vescale.compat import ArrivalCount, stop_counting_gradients

native = pytest.mark.helper("hook_gate")


class Counted:
    """Leaves whose hooks count; ``seen``: those of which Python was told."""

    def __init__(self, num: int = 3, expected: int = 1) -> None:
        self.seen: list[int] = []
        self.count = ArrivalCount([expected] * num)
        self.leaves = [nn.Parameter(torch.zeros(3)) for _ in range(num)]
        for index, leaf in enumerate(self.leaves):
            leaf.register_post_accumulate_grad_hook(lambda _, index=index: self.told(index))
            self.count.attach(leaf, index)
        self.is_native = csrc.load("hook_gate") is not None
        self.begin()

    def told(self, index: int) -> None:
        self.seen.append(index)
        self.count.add(index)

    def begin(self) -> None:
        self.seen.clear()
        self.count.reset(len(self.leaves))
        self.count.start()

    def backward(self, *indices: int, create_graph: bool = False) -> None:
        for index in indices:
            (2 * self.leaves[index]).sum().backward(create_graph=create_graph)

    def expect(self, *seen: int, missing: int) -> None:
        assert self.seen == list(seen) and self.count.num_missing == missing


@pytest.fixture(params=[pytest.param("native", marks=native), "python"])
def counted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    if request.param == "python":
        monkeypatch.setenv("VESCALE_NO_NATIVE", "1")
    yield Counted()


def test_python_is_told_of_the_last_one(counted: Counted) -> None:
    for order in ((0, 1, 2), (2, 0, 1)):
        counted.begin()
        counted.backward(*order)
        counted.expect(*(order[-1:] if counted.is_native else order), missing=0)
    assert [leaf.grad.tolist() for leaf in counted.leaves] == [[4.0] * 3] * 3


def test_more_often_than_expected(counted: Counted) -> None:
    counted.backward(0, 0, 0)
    counted.expect(*((0, 0) if counted.is_native else (0, 0, 0)), missing=2)
    counted.backward(1, 2, 2)
    assert counted.count.num_missing == 0 and counted.seen[-2:] == [2, 2]


def test_expected_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("0", "1"):
        monkeypatch.setenv("VESCALE_NO_NATIVE", library)
        counted = Counted(num=2, expected=2)
        counted.count.reset(4)
        counted.count.start()
        counted.backward(0, 0, 0, 1)
        assert counted.count.num_missing == 1
        counted.backward(1)
        assert counted.count.num_missing == 0 and counted.seen[-1] == 1


def test_hooks_of_others_are_called(counted: Counted) -> None:
    handle = counted.leaves[0].register_post_accumulate_grad_hook(lambda _: counted.seen.append(-1))
    counted.backward(0, 1)
    counted.expect(*((0, -1) if counted.is_native else (0, -1, 1)), missing=1)
    handle.remove()
    counted.begin()
    counted.backward(0)
    counted.expect(*(() if counted.is_native else (0,)), missing=2)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_graphs_of_gradients_are_told(counted: Counted) -> None:
    counted.backward(0, create_graph=True)
    counted.expect(0, missing=2)


@pytest.mark.parametrize("how", ["stop", "reset", "detach", "gone", "other count"])
def test_python_is_told_of_all(counted: Counted, how: str) -> None:
    if how == "stop":
        counted.count.stop()
    elif how == "reset":
        counted.count.reset(3)
    elif how == "detach":
        for leaf in counted.leaves:
            stop_counting_gradients(leaf)
            stop_counting_gradients(leaf)
    else:
        other = ArrivalCount([1] * 3)
        other.reset(3)
        if how == "gone":
            counted.count = other
            gc.collect()
        else:
            for index, leaf in enumerate(counted.leaves):
                other.attach(leaf, index)
    counted.backward(0, 1, 2)
    counted.expect(0, 1, 2, missing=0)


def test_exceptions_reach_the_caller(counted: Counted) -> None:
    def refuse(_: torch.Tensor) -> None:
        raise KeyError("no")

    counted.leaves[1].register_post_accumulate_grad_hook(refuse)
    with pytest.raises(KeyError, match="no"):
        counted.backward(0, 1)


def test_copies_count_for_themselves(counted: Counted) -> None:
    counted.backward(0)
    twin = copy.deepcopy(counted.count)
    twin.reset(3)
    twin.add(0)
    assert twin.num_missing == counted.count.num_missing == 2
    leaf = copy.deepcopy(counted.leaves[1])
    leaf.sum().backward()
    assert counted.count.num_missing == 2, "copies of leaves have no hooks"


def test_threads(counted: Counted) -> None:
    """Exactly one gradient of each round is the last one, whichever thread it arrives on."""
    counted = Counted(num=8)
    for _ in range(20):
        counted.begin()
        barrier = threading.Barrier(4)

        def run(first: int, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            counted.backward(first, first + 1)

        threads = [threading.Thread(target=run, args=(2 * number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert counted.count.num_missing == 0
        assert len(counted.seen) == (1 if counted.is_native else 8)

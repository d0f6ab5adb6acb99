"""Hooks behind a gate: called as without one while it is open; passed by while it is shut; others' hooks always called."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from vescale import csrc
from vescale.compat import HookGate
from vescale.csrc import _loader

native = pytest.mark.helper("hook_gate")


class Guarded:
    """A parameter with one hook behind a gate, and what its hooks have seen."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.gate = HookGate()
        self.parameter = nn.Parameter(torch.zeros(3))
        self.handle = self.parameter.register_hook(lambda gradient: self.seen.append("own"))
        self.gate.guard(self.parameter)

    def backward(self) -> list[str]:
        """What is seen of one backward."""
        self.seen.clear()
        self.parameter.grad = None
        (2 * self.parameter).sum().backward()
        return list(self.seen)


@pytest.fixture(params=[pytest.param("native", marks=native), "python"])
def guarded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Guarded]:
    if request.param == "python":
        monkeypatch.setenv("VESCALE_NO_NATIVE", "1")
    yield Guarded()


def test_open_gate(guarded: Guarded) -> None:
    assert guarded.backward() == ["own"]
    guarded.gate.shut()
    guarded.gate.open()
    assert guarded.backward() == ["own"]
    assert guarded.parameter.grad.tolist() == [2.0] * 3


@native
def test_shut_gate_passes_by_the_hook() -> None:
    guarded = Guarded()
    guarded.gate.shut()
    assert guarded.backward() == []
    assert guarded.parameter.grad.tolist() == [2.0] * 3
    other = Guarded()
    assert other.backward() == ["own"], "another gate's"


def test_hooks_of_others_are_called(guarded: Guarded) -> None:
    guarded.gate.shut()

    def triple(gradient: torch.Tensor) -> torch.Tensor:
        guarded.seen.append("other")
        return 3 * gradient

    handle = guarded.parameter.register_hook(triple)
    assert "other" in guarded.backward()
    assert guarded.parameter.grad.tolist() == [6.0] * 3
    handle.remove()
    assert "other" not in guarded.backward()
    guarded.gate.open()
    assert guarded.backward() == ["own"]


def test_the_only_hook_is_somebody_elses_after_release(guarded: Guarded) -> None:
    guarded.parameter.register_hook(lambda gradient: guarded.seen.append("other"))
    guarded.gate.shut()
    guarded.gate.release(guarded.parameter)
    guarded.handle.remove()
    assert guarded.backward() == ["other"]


def test_tensors_outlive_their_gate(guarded: Guarded) -> None:
    guarded.gate.shut()
    guarded.gate = HookGate()
    gc.collect()
    assert guarded.backward() == ["own"]


def test_an_exception_of_a_hook_reaches_the_caller(guarded: Guarded) -> None:
    def refuse(gradient: torch.Tensor) -> None:
        raise KeyError("no")

    guarded.parameter.register_hook(refuse)
    for is_shut in (False, True):
        guarded.gate.shut() if is_shut else guarded.gate.open()
        with pytest.raises(KeyError, match="no"):
            guarded.backward()


def test_copies_have_no_hooks(guarded: Guarded) -> None:
    twin = copy.deepcopy(guarded.parameter)
    twin.sum().backward()
    assert guarded.seen == [] and twin.grad.tolist() == [1.0] * 3


def test_guarded_twice_and_gone_before_the_gate(guarded: Guarded) -> None:
    second = HookGate()
    second.guard(guarded.parameter)  # the first stays
    second.shut()
    assert guarded.backward() == ["own"]
    guarded.gate.release(guarded.parameter)
    guarded.gate.release(guarded.parameter)
    guarded.gate.shut()
    assert guarded.backward() == ["own"]
    gate = guarded.gate
    del guarded.parameter, guarded.handle
    gc.collect()
    gate.open()


def test_a_copy_is_a_gate_of_its_own(guarded: Guarded) -> None:
    guarded.gate.shut()
    twin = copy.deepcopy(guarded.gate)
    twin.open()
    while_shut = [] if csrc.load("hook_gate") else ["own"]
    assert guarded.backward() == while_shut
    guarded.gate.release(guarded.parameter)
    del guarded.gate
    gc.collect()
    twin.guard(guarded.parameter)
    assert guarded.backward() == ["own"]
    twin.shut()
    assert guarded.backward() == while_shut


@native
def test_a_library_for_another_torch_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert csrc.load("hook_gate") is not None
    monkeypatch.setattr(_loader, "_open", _loader._open.__wrapped__)  # opens it again
    monkeypatch.setattr(torch, "__version__", "2.0.0")
    assert csrc.load("hook_gate") is None
    assert csrc.load("planner") is not None  # needs no torch
    guarded = Guarded()
    guarded.gate.shut()
    assert guarded.backward() == ["own"]

"""The marks of steps: numbers of what a forward is given, lines of the program, rows of a board, hooks before a backward.
In C++ and in Python."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.utils.flop_counter

from vescale import csrc
from vescale.agreement import Board, CrossWaitError, _board
from vescale.checks import _descriptions
from vescale.checks import _descriptions as _call_site
from vescale.compat import before_backward


@pytest.fixture(params=[pytest.param("C++", marks=pytest.mark.helper("step_marks")), "Python"])
def helper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType | None]:
    found = csrc.step_marks() if request.param == "C++" else None
    monkeypatch.setattr(csrc, "step_marks", lambda: found)
    yield found


def sampled(*args: Any, **kwargs: Any) -> int:
    return _descriptions.digest_of(("site", 1, (), _descriptions.sample(args, kwargs)))


X = torch.arange(24.0).view(4, 6)
DIFFERENT = [
    (X, X + 1),
    (X, X.double()),
    (X, X.view(6, 4)),
    (X.bfloat16(), X.bfloat16() + 1),
    (X.to(torch.complex64), X.to(torch.complex64) + 1j),
    (1, 2), (1, True), (1, 1.0), (0, None), (2**70, 2**71), (0.0, -0.0), ("a", "b"), (float("nan"), 1.0),
    ([X, 1], [X, 2]), ((X,), (X + 1,)), ({"ids": X}, {"ids": X + 1}), ({"ids": X}, {"mask": X}), ([1, [2]], [[1], 2]),
    (X.numpy(), X.numpy() + 1),
]  # fmt: skip


@pytest.mark.parametrize("pair", DIFFERENT, ids=lambda pair: f"{pair[0]!s:.12}")
def test_what_differs_has_another_number(helper: ModuleType | None, pair: tuple[Any, Any]) -> None:
    first, second = pair
    assert sampled(first) != sampled(second)
    assert sampled(x=first) != sampled(x=second)
    copy = first.clone() if isinstance(first, torch.Tensor) else first
    assert sampled(first) == sampled(copy)


def test_strings_in_containers_do_not_count(helper: ModuleType | None) -> None:
    assert sampled(["a"]) == sampled(["b"])
    assert sampled({"file": "a"}) == sampled({"file": "b"})
    assert _descriptions.digest_of(("a",)) != _descriptions.digest_of(("b",))


def test_what_cannot_be_sampled_in_cpp_is_in_python(helper: ModuleType | None) -> None:
    nested: Any = X
    for _ in range(40):
        nested = [nested]
    other: Any = X + 1
    for _ in range(40):
        other = [other]
    assert sampled(nested) != sampled(other)
    assert sampled("\ud800") == sampled("\ud800")
    empty, view = torch.empty(0), torch.ones(4, 4).t()
    assert sampled(empty, view, torch.ones(1, device="meta"), torch.eye(2).to_sparse()) is not None


def test_the_line_of_the_program(helper: ModuleType | None) -> None:
    def line() -> str:
        return _call_site.call_site()

    assert line().startswith("test_step_marks.py:") and line().endswith("(line)")


def test_a_row_of_a_board(helper: ModuleType | None) -> None:
    channels = [[(0, 1), (0, 1)]]
    memory = bytearray(2048)
    first, second = Board([0, 1], 0, memory, channels), Board([0, 1], 1, memory, channels)
    assert not first.post(1, (5, 6, 7), "here é" * 60)
    assert first.rows(1) is None and first.absent(1) == [1]
    assert second.post(1, (5, 6, 7), "there")
    assert first.rows(1) == [[1 << 48 | 5, 1 << 48 | 6, 1 << 48 | 7]] * 2
    assert first.text(1) == "there" and first.text(0).startswith("here é")
    assert not first.post(2, (5, 6, 1 << 47), "x") and not second.post(2, (5, 6, 8), "y")
    assert second.rows(2) is not None and second.rows(1) is not None


def test_a_rank_that_comes_late_learns_which_ranks_have_waited_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """These have raised before."""
    monkeypatch.setattr(_board, "_LIVENESS_SECONDS", 0.01)
    channels: list[list[tuple[int, ...]]] = [[(0, 1, 2)] * 3, [(0, 1), (0, 1), (2,)]]
    memory = bytearray(4096)
    boards = [Board([0, 1, 2], rank, memory, channels) for rank in range(3)]

    def raises(rank: int) -> tuple[int, ...]:
        channel = int(rank == 1)
        boards[rank].post(1, (1, 1, 1), "here", channel)
        with pytest.raises(CrossWaitError) as caught:
            boards[rank].wait(1, 20.0, "here", channel)
        return caught.value.ranks

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(raises, (0, 1))) == [(0, 1)] * 2
    assert raises(2) == (0, 1, 2)


def test_a_rank_that_gives_up_waits_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others would believe that it still waits for them there."""
    monkeypatch.setattr(_board, "_LIVENESS_SECONDS", 0.01)
    monkeypatch.setattr(_board, "_is_paused", lambda: False)
    channels = [[(0, 1), (0, 1)]] * 2
    memory = bytearray(4096)
    boards = [Board([0, 1], rank, memory, channels) for rank in range(2)]
    boards[0].post(1, (1, 1, 1), "here", 0)
    with pytest.raises(TimeoutError):
        boards[0].wait(1, 0.05, "here", 0)
    boards[1].post(1, (1, 1, 1), "there", 1)
    with pytest.raises(TimeoutError):
        boards[1].wait(1, 0.1, "there", 1)


@pytest.mark.helper("step_marks")
def test_forwards_and_backwards_are_posted_in_cpp_as_in_python() -> None:
    native = csrc.step_marks()
    assert native is not None
    memory, channels = bytearray(2048), [[(0, 1), (0, 1)]]
    first, second = Board([0, 1], 0, memory, channels), Board([0, 1], 1, memory, channels)
    steps = native.Steps(first.row, {}, lambda file: False)
    args, kwargs, mode = (X, 1), {"scale": 2.0, "names": ["a"]}, "in training, with gradients"
    site = steps.forward(1, 7, "Net", mode, 3, args, kwargs)
    assert site == f"forward 7 of Net, {mode}" and first.text(0).startswith(f"{site} (test_step_marks.py:")
    seen = _descriptions.sample(args, kwargs)
    assert second.post(1, (_descriptions.digest_of((site, 3, (), seen)), 0, 0), "the same")
    backward = _descriptions.digest_of(("the backward of forward 7 of Net", 3, (), None))
    assert not second.post(2, (backward, 0, 0), "b")
    assert steps.backward(2, 7, "Net", 3) == "" and first.text(0) == "the backward of forward 7 of Net"
    assert steps.backward(3, 7, "Net", 4) != "" and first.rows(3) is None

    # Left to Python, and nothing is posted.
    with torch.autocast("cpu"):
        assert steps.forward(4, 7, "Net", mode, 3, args, kwargs) is None
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        assert steps.forward(4, 7, "Net", mode, 3, args, kwargs) is None
    assert steps.forward(4, 7, "Net", mode, 3, (X.to_sparse(),), {}) is None
    assert first.text(0).startswith("the backward")


def test_before_a_backward(helper: ModuleType | None) -> None:
    leaf, calls = torch.ones(2, requires_grad=True), []
    out = leaf * 2
    before_backward(out, lambda: calls.append(leaf.grad))
    out.sum().backward()
    assert calls == [None] and leaf.grad is not None

    def fails() -> None:
        raise KeyError("stop")

    out = leaf * 2
    before_backward(out, fails)
    with pytest.raises(KeyError, match="stop"):
        out.sum().backward()

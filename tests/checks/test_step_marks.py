"""The marks of steps: numbers of what a forward is given, lines of the program, hooks before a backward. In C++ and in
Python."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from vescale import csrc
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


@pytest.mark.helper("step_marks")
def test_samples_in_cpp_say_what_those_in_python_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Constants are kept, and of all else a number."""
    args, kwargs = (X, 1, None), {"scale": 2.0, "names": ["a"], "kind": "row"}
    found = _descriptions.sample(args, kwargs)
    monkeypatch.setattr(csrc, "step_marks", lambda: None)
    for given, named in (found, _descriptions.sample(args, kwargs)):
        assert given[1:] == ((1,), (None,)) and type(given[0]) is int
        assert named["scale"] == (2.0,) and named["kind"] == ("row",) and type(named["names"]) is int


def test_rows_of_samples_name_what_was_given() -> None:
    def named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
        return [*zip(("x", "mask"), args), *kwargs.items()]

    rows = dict(_descriptions.sampled_rows(_descriptions.sample((X, None), {"kind": "row"}), named))
    assert rows["kind"] == "'row'" and rows["x"].startswith("values with digest ") and "mask" not in rows


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

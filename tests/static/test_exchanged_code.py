"""Functions whose code static forwards exchange: threads share it, or run without."""

from __future__ import annotations

import gc
import sys
from typing import Any
from unittest import mock

import pytest
from torch import nn

from vescale.static._call_tree import CallTree
from vescale.static._exchanged_code import ExchangedFunction, code_of, is_exchanged
from vescale.static._unreached import functions_with


def one() -> int:
    return 1


def two() -> int:
    return 2


def three() -> int:
    return 3


@pytest.fixture
def exchanged() -> Any:
    found = ExchangedFunction(one, one.__code__, two.__code__)
    assert found.use()
    yield found
    found.release()
    assert one() == 1 and not is_exchanged(two.__code__)


def test_users_share_equal_code(exchanged: ExchangedFunction) -> None:
    other = ExchangedFunction(one, exchanged.original, exchanged.code)
    assert other.use() and one() == 2
    other.release()
    assert one() == 2


def test_other_code_has_to_wait(exchanged: ExchangedFunction) -> None:
    other = ExchangedFunction(one, exchanged.original, three.__code__)
    assert not other.use() and one() == 2
    assert not is_exchanged(three.__code__)


def test_the_function_is_found_by_its_own_code(exchanged: ExchangedFunction) -> None:
    assert code_of(one) is exchanged.original is not one.__code__
    assert functions_with(exchanged.original, None, globals()) == [one]


def test_the_function_is_found_among_all_objects(exchanged: ExchangedFunction, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)  # the tests freeze what they have loaded
    monkeypatch.setattr(gc, "get_objects", lambda: [two, one, three])
    assert functions_with(exchanged.original, None, {}) == [one]


@pytest.mark.parametrize("is_filtered", [True, False])
def test_called_functions_are_known(is_filtered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether C++ tells of calls in the files alone that are followed, or Python of all."""
    monkeypatch.setattr("vescale.static._call_tree.is_recorded", lambda file: file == __file__)
    if not is_filtered:
        monkeypatch.setattr("vescale.static._call_tree.native_static", mock.Mock(return_value=None))

    def outer() -> None:
        nn.Identity()(one())
        with tree.paused():
            two()
        three()

    tree = CallTree(lambda: None)
    with tree:
        outer()
        before = sys.gettrace()
    assert [code.co_name for code in tree.functions] == ["outer", "one", "three"]
    (called,) = tree.forwards.values()
    assert len(called.visits) > 10 and [one.code.co_name for one in called.all_below()] == ["outer", "one", "three"]
    assert before is not None and sys.gettrace() is not before


def test_a_record_of_exchanged_code_is_known(exchanged: ExchangedFunction, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vescale.static._call_tree.is_recorded", lambda file: True)
    for function, expected in ((three, False), (one, True)):
        tree = CallTree(lambda: None)
        before = sys.gettrace()
        with tree:
            function()
        assert tree.has_exchanged_code is expected
        assert sys.gettrace() is before

"""What a call of a recorded step is compared by: its arguments, as the cursor in C++ (``csrc/tape.cpp``) reads them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from vescale.compat import own_part

# The kinds of ``csrc/tape.cpp``.
_VALUE, _PLAIN, _INT, _FLOAT, _SAME, _EQUAL, _SEQUENCE, _DICT, _SLICE, _VIEW = range(10)
_EQUAL_TYPES = (str, bytes, complex, torch.device, torch.finfo, torch.iinfo, range, frozenset)


class Arguments:
    """The arguments of a call.

    Args:
        number_of: gives the number of a tensor; None: no recorded call has made it.
        views: of values that are the whole of others, the numbers of these.

    Attributes:
        args, kwargs: what each has to be.
        numbers: the whole numbers and fractions among them; ``sizes``: the same, with the sizes of the local tensors.
        has_whole_numbers: whether there is one.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        number_of: Callable[[torch.Tensor], int | None],
        views: dict[int, int],
    ) -> None:
        self._number_of, self._views = number_of, views
        self.numbers: list[int] = []
        self.sizes: list[int] = []
        self.has_whole_numbers = False
        self.args = tuple(map(self._expected, args))
        self.kwargs = {name: self._expected(value) for name, value in kwargs.items()}
        del self._number_of, self._views

    def taken(self) -> list[int | None]:
        """Of each tensor, in order, its number; None of one that no recorded call has made."""
        return [number for expected in (*self.args, *self.kwargs.values()) for number in _numbers_in(expected)]

    def _note(self, number: int) -> None:
        self.numbers.append(number)
        self.sizes.append(number)

    def _expected(self, value: Any) -> tuple[Any, ...]:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            number = self._number_of(value)
            if number is None:
                return _PLAIN, value.dtype, value.ndim, value.requires_grad
            self.sizes += own_part(value).shape
            base = self._views.get(number)
            return (_VALUE, number) if base is None else (_VIEW, number, base)
        if kind is int:
            self.has_whole_numbers = True
            self._note(value)
            return (_INT,)
        if isinstance(value, float):
            self._note(0 if value == 0.0 else 1 if value == 1.0 else 2)
            return (_FLOAT,)
        if isinstance(value, tuple | list):
            return _SEQUENCE, kind, tuple(map(self._expected, value))
        if kind is dict:
            return _DICT, tuple(value), tuple(map(self._expected, value.values()))
        if kind is slice:
            return _SLICE, None, tuple(map(self._expected, (value.start, value.stop, value.step)))
        if isinstance(value, _EQUAL_TYPES):
            return _EQUAL, value
        try:
            return _SAME, weakref.ref(value)  # what the forward has made ends with it
        except TypeError:
            return _SAME, value


def _numbers_in(expected: tuple[Any, ...]) -> Iterator[int | None]:
    if expected[0] in (_VALUE, _VIEW):
        yield expected[1]
    elif expected[0] == _PLAIN:
        yield None
    elif expected[0] in (_SEQUENCE, _DICT):
        for item in expected[2]:
            yield from _numbers_in(item)

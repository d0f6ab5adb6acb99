"""Arguments that must be integers."""

from __future__ import annotations

import operator
from collections.abc import Iterable

from vescale.errors import ArgumentTypeError, LayoutPlanningError

__all__ = ["integers"]


def integers(name: str, values: Iterable[object], at_least: int = 0) -> tuple[int, ...]:
    """``values`` as Python integers (numpy's and torch's are accepted, bool and float are not).

    Raises:
        TypeError: a value is not an integer.
        ValueError: a value is below ``at_least``.
    """
    found = []
    try:
        items = list(values)
    except TypeError:
        raise ArgumentTypeError(
            f"{name} is {values!r}; expected a sequence of integers. Pass a list or a tuple."
        ) from None
    for i, value in enumerate(items):
        where = name if len(items) == 1 else f"{name}[{i}]"
        try:
            if isinstance(value, bool):
                raise TypeError
            number = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            raise ArgumentTypeError(
                f"{where} is {value!r} of type {type(value).__name__}; expected an integer number of elements. "
                "Convert it with int() where it is computed."
            ) from None
        if number < at_least:
            raise LayoutPlanningError(
                f"{where} is {number}; expected at least {at_least}. Fix the value that is passed."
            )
        found.append(number)
    return tuple(found)

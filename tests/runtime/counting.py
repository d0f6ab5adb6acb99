"""A module of a program, with a number that a function counts."""

from __future__ import annotations

NUMBER = 0


def count() -> int:
    global NUMBER
    NUMBER += 1
    return NUMBER

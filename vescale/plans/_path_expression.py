"""Regular expressions of bounded size, so that compiling one cannot exhaust the memory of the machine.

Matching is bounded in time (:mod:`vescale.ir`), but a compilation cannot be interrupted, and ``((a{1000}){1000}){1000}``
compiles to a thousand million nodes. Therefore the size is estimated from the text first. The estimate is an upper bound,
and exact for the syntax that paths need.
"""

from __future__ import annotations

import functools

import regex

from vescale.errors import PathError

__all__ = ["MAX_EXPRESSION", "compiled"]

MAX_EXPRESSION = 2_000  # characters
_MAX_NODES = 20_000
_MAX_DEPTH = 50

_COUNT = regex.compile(r"\{(\d*)(,?)(\d*)\}")
# What begins a group whose content is read as it stands. Others change how the rest is read (flags, comments), call groups
# again (recursion), or are conditions.
_GROUP = regex.compile(r"\((?:\?(?:[:=!>|]|<[=!]|P?<\w+>|i:|i\)|P=\w+\)))?")


@functools.lru_cache(maxsize=4096)
def compiled(pattern: str) -> regex.Pattern[str]:
    """The compiled expression.

    Raises ValueError for one that does not compile, and for one whose program would be large: more than 2,000 characters,
    50 groups inside of each other, or 20,000 characters once every ``{n}`` is written out.
    """
    _check_size(pattern)
    try:
        return regex.compile(pattern)
    except regex.error as error:
        raise PathError(f"{error}; escape special characters with a backslash") from None


def _check_size(pattern: str) -> None:
    if len(pattern) > MAX_EXPRESSION:
        raise PathError(f"it has {len(pattern)} characters; at most {MAX_EXPRESSION} are read: write several entries")
    sums = [0]  # nodes of each open group, outermost first
    last = 0  # of the part that a count after it repeats
    position = 0
    while position < len(pattern):
        here = pattern[position]
        count = _COUNT.match(pattern, position) if here == "{" else None
        if count is not None:
            times = max(int(digits[:9] or 0) for digits in (count[1], count[3]))
            sums[-1] += last * max(times - 1, 0)
            last *= max(times, 1)
            position = count.end()
        elif here == "(":
            group = _GROUP.match(pattern, position)
            assert group is not None  # "(" alone matches
            if pattern.startswith("?", group.end()) and group.end() == position + 1:
                raise PathError(
                    f"{pattern[position : position + 8]!r} at position {position}: paths have no flags, comments, "
                    "conditions and recursion; groups are (...), (?:...), (?P<name>...), and look-arounds"
                )
            if not group[0].endswith(")"):
                sums.append(1)
            position, last = group.end(), 1
        elif here == ")" and len(sums) > 1:
            last = sums.pop()
            sums[-1] += last
            position += 1
        else:
            position = _class_end(pattern, position) if here == "[" else position + (2 if here == "\\" else 1)
            if here not in "*+?":  # these repeat what is there
                last = 1
                sums[-1] += 1
        if len(sums) > _MAX_DEPTH:
            raise PathError(f"more than {_MAX_DEPTH} groups inside of each other; write several entries")
        if sum(sums) > _MAX_NODES:
            raise PathError(
                f"its repetitions, written out, have more than {_MAX_NODES} characters (up to position {position}); use "
                "+ or * instead of large counts"
            )


def _class_end(pattern: str, start: int) -> int:
    """The position after the character class that begins at ``start``."""
    position = start + 1
    position += pattern.startswith("^", position)
    position += pattern.startswith("]", position)  # the first one is a character
    while position < len(pattern) and pattern[position] != "]":
        if pattern[position] == "[":
            raise PathError(rf"a '[' inside of [...] at position {position}; write \[ for the character")
        position += 2 if pattern[position] == "\\" else 1
    return position + 1

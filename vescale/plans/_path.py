r"""The path grammar: a module path as a regular expression, then a tensor of it.

======================================  =====================================================================
path                                    names
======================================  =====================================================================
``blk\.fc1\.weight``                     parameters and buffers whose full name matches
``blk\.fc1\.weight.grad``                the gradients of those parameters
``blk\.fc1.<in>``, ``blk\.fc1.<out>``     all tensor inputs, outputs of the modules that match
``blk\.fc1.<in:x>``, ``...<in:0>``        the input by name or position; ``<out:0>`` the output by position or key
``<in:input_ids>``                      an input of the model itself
``<in:(input_ids|labels)>``             several of them
======================================  =====================================================================

Expressions are matched whole, with the ``regex`` package. A dot of a module path may be written plain: it matches
itself.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass

import regex

from vescale.errors import PathError, kind_of

# Regular expressions of bounded size, so that compiling one cannot exhaust the memory of the machine. Matching is
# bounded in time (:mod:`vescale.ir`), but a compilation cannot be interrupted, and ``((a{1000}){1000}){1000}`` compiles
# to a thousand million nodes. Therefore the size is estimated from the text first. The estimate is an upper bound, and
# exact for the syntax that paths need.

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
        raise PathError(
            f"it has {len(pattern)} characters; at most {MAX_EXPRESSION} are allowed: write several entries"
        )
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
                    f"{pattern[position : position + 8]!r} at position {position}: paths cannot contain flags, "
                    "comments, conditions or recursion; groups are (...), (?:...), (?P<name>...), and look-arounds"
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
            raise PathError(f"more than {_MAX_DEPTH} nested groups; write several entries")
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
            raise PathError(rf"a '[' inside [...] at position {position}; write \[ for the character")
        position += 2 if pattern[position] == "\\" else 1
    return position + 1


_BOUNDARY = regex.compile(r"(?:(?P<module>.*)\.)?<(?P<side>in|out)(?::(?P<key>[^<>:]+))?>", regex.DOTALL)
_EXPRESSION = regex.compile(r"[\\|()\[\]{}*+?^$]")  # no name of an input or key of an output has these
_NAMES = regex.compile(r"[\w|()]+")  # alternatives
# A "<" that opens none of the regular expression groups (?<name>...), (?P<name>...), (?<=...), (?<!...).
_STRAY = regex.compile(r"(?<!\(\?|\(\?P)<")


class Target(enum.Enum):
    """What kind of tensor a path names."""

    STATE = "state"  # a parameter or buffer
    GRAD = "grad"  # the gradient of a parameter
    IN = "in"
    OUT = "out"


@dataclass(frozen=True)
class Path:
    """A parsed path.

    Attributes:
        text: as written.
        pattern: the regular expression for parameter and buffer names (STATE, GRAD) or for module paths (IN, OUT), the
            empty string being the model itself.
        target: what it names there.
        key: the input or output in ``<in:key>``: an int for a position, a str for a name; None for all.
    """

    text: str
    pattern: str
    target: Target
    key: str | int | None = None

    @classmethod
    def parse(cls, text: str) -> Path:
        """Raises ValueError for an empty path, a bad ``<...>``, or an expression that does not compile."""
        if not isinstance(text, str):
            raise PathError(f"the path is {text!r}, {kind_of(text)}; write a parameter name, or <in> for the inputs")
        if len(text) > MAX_EXPRESSION:
            raise PathError(
                f"the path {text[:40]!r}... has {len(text)} characters; at most {MAX_EXPRESSION} are allowed: write "
                "several entries"
            )
        if not text.strip():
            raise PathError("the path is empty; write a parameter name, or <in> for the model's inputs")
        boundary = _BOUNDARY.fullmatch(text)
        if boundary is not None:
            key = boundary["key"]
            path = cls(
                text,
                (boundary["module"] or "").removesuffix("\\"),  # the dot may be written as an escaped one
                Target.IN if boundary["side"] == "in" else Target.OUT,
                None if key is None else int(key) if key.isdigit() else key,
            )
        elif text.endswith(".grad"):
            path = cls(text, text[: -len(".grad")].removesuffix("\\"), Target.GRAD)
        else:
            path = cls(text, text, Target.STATE)
        if path.key_expression is not None:
            if path.target is Target.OUT:
                raise PathError(
                    f"<out:{path.key}> in the path {text!r} is an expression; outputs are named one by one: write an entry "
                    "for each"
                )
            if not _NAMES.fullmatch(path.key_expression) or _is_unbalanced(path.key_expression):
                raise PathError(
                    f"<in:{path.key}> in the path {text!r} is neither a name nor several; write <in:name>, or <in:(a|b)>"
                )
        stray = _STRAY.search(path.pattern)
        if stray is not None:
            raise PathError(
                f"{text[stray.start() :]!r} in the path {text!r} is not an input or output; end the path with .<in>, "
                ".<in:name>, .<in:0>, .<out> or .<out:0>"
            )
        try:
            compiled(path.pattern)
        except ValueError as error:
            raise PathError(f"the path {text!r} is not a valid regular expression: {error}") from None
        return path

    @property
    def key_expression(self) -> str | None:
        """The expression for names of inputs in ``<in:(input_ids|labels)>``; None where ``key`` is a plain name."""
        return self.key if isinstance(self.key, str) and _EXPRESSION.search(self.key) else None

    def matches_key(self, name: str) -> bool:
        """Whether the whole name of an input matches :attr:`key_expression`, which has no repetitions: this is quick."""
        expression = self.key_expression
        return expression is not None and compiled(expression).fullmatch(name) is not None

    def matches(self, name: str, *, timeout: float | None = None) -> bool:
        """Whether the whole ``name`` matches. Raises TimeoutError after ``timeout`` seconds."""
        return compiled(self.pattern).fullmatch(name, timeout=timeout) is not None

    def __str__(self) -> str:
        return self.text


def _is_unbalanced(expression: str) -> bool:
    try:
        compiled(expression)
    except ValueError:
        return True
    return False

"""The path grammar: a module path as a regular expression, then a tensor of it.

======================================  =====================================================================
path                                    names
======================================  =====================================================================
``blk\\.fc1\\.weight``                     parameters and buffers whose full name matches
``blk\\.fc1\\.weight.grad``                the gradients of those parameters
``blk\\.fc1.<in>``, ``blk\\.fc1.<out>``     all tensor inputs, outputs of the modules that match
``blk\\.fc1.<in:x>``, ``...<in:0>``        the input by name or position; ``<out:0>`` the output by position or key
``<in:input_ids>``                      an input of the model itself
``<in:(input_ids|labels)>``             several of them
======================================  =====================================================================

Expressions are matched whole, with the ``regex`` package. A dot of a module path may be written plain: it matches
itself.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import regex

from vescale.errors import PathError, kind_of
from vescale.plans._path_expression import MAX_EXPRESSION, compiled

__all__ = ["Path", "Target"]

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
                f"the path {text[:40]!r}... has {len(text)} characters; at most {MAX_EXPRESSION} are read: write several "
                "entries"
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
                f"{text[stray.start() :]!r} in the path {text!r} is no input or output; end the path with .<in>, "
                ".<in:name>, .<in:0>, .<out> or .<out:0>"
            )
        try:
            compiled(path.pattern)
        except ValueError as error:
            raise PathError(f"the path {text!r} is not a regular expression that can be used: {error}") from None
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

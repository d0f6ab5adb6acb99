"""The one registry of op behaviour: for each op, where its operands and results are placed and what runs in its place.

An op is an ATen overload (``torch.ops.aten.clone.default``), which DTensor's dispatcher meets in every program, or a
torch function (``torch.nn.functional.embedding``), which is only met inside of a parallelized model's forward. The files
of this package register their family of ops when the package is imported; users add rules with :func:`register_rule`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

__all__ = ["OpEntry", "entries", "entry_of", "register"]


@dataclass(frozen=True)
class OpEntry:
    """What is registered for one op. Fields that an op has no use for are None.

    Attributes:
        rule: ``OpCall -> Decision | None``; asked where an operand has a placement that stock DTensor does not know.
        handler: ``(op, args, kwargs) -> result``; runs in place of an ATen overload on DTensors.
        applies: ``(op, schema) -> bool``, a pure function of specs and other arguments: whether ``handler`` takes this
            call. Where it does not, stock DTensor's decision is used, and cached by its dispatcher. None: always.
        random_handler: a handler that :mod:`vescale.rng` installs while it is enabled, and nothing else.
        function: ``(context, function, args, kwargs) -> result``; runs in place of a torch function in a parallelized
            model's forward, when one of its arguments is a DTensor.
        flow: ``Flow -> Placement | None``; the placement of the result on one mesh axis, as far as it follows from the
            placements of the operands alone. ``explain`` predicts with it.
        backward: how the gradient is computed: ``"autograd"`` (the graph of the ops that run in place of the op) or
            ``"custom"`` (an autograd function with communication of its own).
        communicates: kinds of collectives that the op may start (``"all_reduce"``, ...), forward and backward.
    """

    rule: Callable[..., Any] | None = None
    handler: Callable[..., Any] | None = None
    applies: Callable[..., bool] | None = None
    random_handler: Callable[..., Any] | None = None
    function: Callable[..., Any] | None = None
    flow: Callable[..., Any] | None = None
    backward: str = "autograd"
    communicates: frozenset[str] = frozenset()


_ENTRIES: dict[Any, OpEntry] = {}


def register(op: Any, *, communicates: Iterable[str] = (), **fields: Any) -> None:
    """Add ``fields`` of :class:`OpEntry` to what is registered for ``op``.

    Raises ValueError for a field that is registered already: two families would each believe that theirs runs.
    """
    known = _ENTRIES.get(op, OpEntry())
    taken = sorted(name for name in fields if name != "backward" and getattr(known, name) is not None)
    if taken:
        raise ValueError(f"{op} has {', '.join(taken)} registered already; each op belongs to one file of vescale.ops")
    _ENTRIES[op] = replace(known, communicates=known.communicates | frozenset(communicates), **fields)


def entry_of(op: Any) -> OpEntry | None:
    return _ENTRIES.get(op)


def entries() -> Mapping[Any, OpEntry]:
    """Everything registered, in order of registration; a view that cannot be written to."""
    return MappingProxyType(_ENTRIES)

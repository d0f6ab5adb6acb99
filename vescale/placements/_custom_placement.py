"""The base of our placements: a plain ``Placement`` that stock DTensor carries without knowing it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.distributed.tensor.placement_types import Placement

from vescale.compat import extend_dtensor

# Every wrapper of a stock entry point tests for these types. Placements are C++ objects: isinstance() costs five times as
# much as a lookup in a set.
CUSTOM_TYPES: set[type] = set()


def has_custom(placements: Iterable[Any]) -> bool:
    """Whether any axis has a placement that stock DTensor does not know."""
    for placement in placements:  # noqa: SIM110  # a generator costs more than the whole loop
        if type(placement) in CUSTOM_TYPES:
            return True
    return False


class CustomPlacement(Placement):
    """A frozen, hashable placement outside the stock set.

    It is not a subclass of ``Shard``: stock strategies would take a subclass for a plain ``Shard(dim)``, rebuild it as
    one and return wrong values, while a placement they do not know fails loudly. Subclasses give ``_fields``, the
    constructor's arguments in order; equality, hashing, copying and pickling follow from them.

    Constructing one installs the DTensor extension (:func:`vescale.compat.extend_dtensor`), so that no DTensor can have a
    placement that stock DTensor would mishandle.
    """

    _fields: tuple[str, ...] = ()
    _hash: int

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        CUSTOM_TYPES.add(cls)

    def _freeze(self, *values: Any) -> None:
        # Without Placement.__init__ the C++ holder stays unset and is_shard() crashes the process.
        super().__init__()
        for name, value in zip(self._fields, values, strict=True):
            object.__setattr__(self, name, value)
        # The hash is part of every spec hash, hence of every dispatch.
        object.__setattr__(self, "_hash", hash((type(self).__name__, *values)))
        extend_dtensor()

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen; build a new one instead of setting {name!r}")

    def _key(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self._fields)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return type(self) is type(other) and self._hash == other._hash and self._key() == other._key()

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._key()

    def __copy__(self) -> CustomPlacement:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> CustomPlacement:
        return self

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        return f"{type(self).__name__}{self._key()!r}", {type(self).__name__: type(self)}

    def is_shard(self, dim: int | None = None) -> bool:
        return False

    def is_replicate(self) -> bool:
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return False

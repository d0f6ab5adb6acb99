"""What two checkpoints have different: names, shapes, dtypes and values, in whatever formats; and what is beside tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from vescale.checkpoint._convert import plain_values
from vescale.checkpoint._json_values import encode
from vescale.checkpoint._stored import Stored, StoredTensor
from vescale.checkpoint._stored_blocks import BLOCK_BYTES, block_shapes, block_values
from vescale.compat import bytes_of

__all__ = ["StoredDifference", "ValueDifference", "compare_stored"]


@dataclass(frozen=True)
class ValueDifference:
    """Two tensors of equal shape and dtype.

    Attributes:
        elements: how many differ in any bit (NaNs of equal bits are equal).
        largest: absolute difference; None for not-a-number.
        first: index of the first that differs.
    """

    elements: int
    largest: float | None
    first: tuple[int, ...]


@dataclass
class StoredDifference:
    """By name. ``forms``: (shape and dtype in A, in B). ``plain_values``: beside tensors; compared within one format only,
    because formats hold them differently. The number of a step is not counted."""

    only_in_a: list[str] = field(default_factory=list)
    only_in_b: list[str] = field(default_factory=list)
    forms: dict[str, tuple[str, str]] = field(default_factory=dict)
    values: dict[str, ValueDifference] = field(default_factory=dict)
    plain_values: list[str] = field(default_factory=list)
    equal: int = 0

    def __bool__(self) -> bool:
        return bool(self.only_in_a or self.only_in_b or self.forms or self.values or self.plain_values)


def compare_stored(
    a: Stored, b: Stored, *, values: bool = True, progress: Callable[[int], None] = lambda count: None
) -> StoredDifference:
    """Compare in one process; memory: 128 MiB and the indexes.

    Where one of the two is in vescale's own format and the other is not, the prefix ``model.`` is not counted.
    """
    ours, theirs = _names(a, b), _names(b, a)
    found = StoredDifference(sorted(ours.keys() - theirs.keys()), sorted(theirs.keys() - ours.keys()))
    for name in sorted(ours.keys() & theirs.keys()):
        left, right = a.tensors[ours[name]], b.tensors[theirs[name]]
        if (left.shape, left.dtype) != (right.shape, right.dtype):
            found.forms[name] = (_form(left), _form(right))
            continue
        difference = _compare(a, ours[name], b, theirs[name], progress) if values else None
        if difference is None:
            found.equal += 1
        else:
            found.values[name] = difference
    if values and a.format == b.format:
        one, two = _encoded_values(a), _encoded_values(b)
        found.plain_values = sorted(name for name in one.keys() | two.keys() if one.get(name) != two.get(name))
    return found


def _encoded_values(stored: Stored) -> dict[str, Any]:
    """As JSON, in which not-a-number equals itself."""
    left_out = {"vescale": "step", "safetensors": "metadata"}.get(stored.format)
    return {name: encode(value, name, {}) for name, value in plain_values(stored).items() if name != left_out}


def _names(stored: Stored, other: Stored) -> Mapping[str, str]:
    if (stored.format == "vescale") == (other.format == "vescale"):
        return {name: name for name in stored.tensors}
    return {name.removeprefix("model."): name for name in stored.tensors}


def _form(tensor: StoredTensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _compare(a: Stored, name_a: str, b: Stored, name_b: str, progress: Callable[[int], None]) -> ValueDifference | None:
    tensor = a.tensors[name_a]
    elements, largest, first = 0, 0.0, None
    for offset, sizes in block_shapes(tensor.shape, BLOCK_BYTES // tensor.dtype.itemsize):
        one, two = block_values(a, name_a, offset, sizes), block_values(b, name_b, offset, sizes)
        progress(one.nbytes)
        bits = [bytes_of(values).view(-1, values.element_size()) for values in (one, two)]
        if torch.equal(*bits):
            continue
        differs = (bits[0] != bits[1]).any(1)
        elements += int(differs.sum())
        if first is None:
            first = _index(int(differs.nonzero()[0]), offset, sizes)
        wide = torch.complex128 if one.is_complex() else torch.float64
        gap = (one.reshape(-1)[differs].to(wide) - two.reshape(-1)[differs].to(wide)).abs().max().item()
        largest = max(largest, gap) if not math.isnan(gap) else math.nan
    if first is None:
        return None
    return ValueDifference(elements, None if math.isnan(largest) else largest, first)


def _index(flat: int, offset: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    found = []
    for at, size in zip(reversed(offset), reversed(sizes)):
        flat, index = divmod(flat, size)
        found.append(at + index)
    return tuple(reversed(found))

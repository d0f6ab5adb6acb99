"""Compare what a checkpoint holds with what is to be loaded, and name the differences with the nearest names."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch

from vescale.checkpoint._stored import StoredTensor
from vescale.errors import ContentMismatchError

_SHOWN = 8


@dataclass
class Differences:
    """What does not fit, by name.

    Attributes:
        missing: wanted, but not in the checkpoint; with the nearest names that are.
        surplus: in the checkpoint, but nobody wants it; with the nearest names that are wanted.
        misshapen: (found, expected) as text.
    """

    missing: dict[str, list[str]] = field(default_factory=dict)
    surplus: dict[str, list[str]] = field(default_factory=dict)
    misshapen: dict[str, tuple[str, str]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.missing or self.surplus or self.misshapen)

    def describe(self) -> str:
        lines = []
        for what, names in (("not in the checkpoint", self.missing), ("only in the checkpoint", self.surplus)):
            for name in list(names)[:_SHOWN]:
                near = f" (nearest: {', '.join(names[name])})" if names[name] else ""
                lines.append(f"  {name}: {what}{near}")
            if len(names) > _SHOWN:
                lines.append(f"  and {len(names) - _SHOWN} more {what}")
        for name, (found, expected) in list(self.misshapen.items())[:_SHOWN]:
            lines.append(f"  {name}: the checkpoint has {found}, expected {expected}")
        if len(self.misshapen) > _SHOWN:
            lines.append(f"  and {len(self.misshapen) - _SHOWN} more with other shapes or dtypes")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, object]:
        """Names that are missing and surplus, and (found, expected) of the others."""
        return {
            "missing": sorted(self.missing),
            "surplus": sorted(self.surplus),
            "misshapen": dict(sorted(self.misshapen.items())),
        }

    def refuse(self, where: str) -> None:
        if self:
            raise ContentMismatchError(
                f"{where} does not match the model and optimizer:\n{self.describe()}\nBuild the same model and "
                "optimizer as were saved, or pass strict=False to load the rest; the result lists these differences"
            )


def compare(
    stored: Mapping[str, StoredTensor], wanted: Mapping[str, torch.Tensor], *, cast: bool, surplus: Collection[str] = ()
) -> Differences:
    """``surplus``: names of ``stored`` that somebody should want."""
    found = Differences()
    for name, tensor in wanted.items():
        if name not in stored:
            found.missing[name] = []
            continue
        entry = stored[name]
        same_dtype = cast or entry.dtype == tensor.dtype
        if tuple(entry.shape) != tuple(tensor.shape) or not same_dtype:
            found.misshapen[name] = (_form(entry.shape, entry.dtype), _form(tensor.shape, tensor.dtype))
    found.surplus = {name: [] for name in surplus if name not in wanted}
    for names, others in ((found.missing, list(stored)), (found.surplus, list(wanted))):
        for name in list(names)[:_SHOWN]:
            names[name] = nearest(name, others)
    return found


def nearest(name: str, others: Collection[str]) -> list[str]:
    """At most three names that are like ``name``; those that end alike are found among any number of others."""
    last = name.rsplit(".", 1)[-1]
    near = [other for other in others if other.rsplit(".", 1)[-1] == last] or list(others)
    return difflib.get_close_matches(name, near[:2000], n=3, cutoff=0.6)


def _form(shape: Collection[int], dtype: torch.dtype) -> str:
    return f"shape {tuple(shape)} {str(dtype).removeprefix('torch.')}"

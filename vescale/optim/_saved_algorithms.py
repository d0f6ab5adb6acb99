"""The algorithms of a saved optimizer beside those of the one that loads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vescale.errors import OptimizerStateError

__all__ = ["check_same_algorithms"]


def check_same_algorithms(own: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Compare algorithms and blocks by parameter name, or by place where the groups have no names.

    Raises ValueError that names the first parameter that differs.
    """
    ours, theirs = _by_name(own), _by_name(saved)
    if not ours.keys() & theirs.keys():  # saved without names, or with other ones; torch compares sizes of groups
        ours, theirs = (dict(enumerate(found.values())) for found in (ours, theirs))
    for name, (algorithm, blocks) in ours.items():
        found = theirs.get(name, (algorithm, blocks))
        if found != (algorithm, blocks):
            raise OptimizerStateError(
                f"parameter {name!r} was saved with algorithm={found[0]!r} and blocks={found[1]!r}, and this optimizer has "
                f"algorithm={algorithm!r} and blocks={blocks!r}; make the groups alike, or load the parameters only"
            )


def _by_name(groups: Sequence[Mapping[str, Any]]) -> dict[Any, tuple[Any, Any]]:
    found: dict[Any, tuple[Any, Any]] = {}
    for position, group in enumerate(groups):
        names = group.get("param_names") or [f"group {position}, parameter {i}" for i in range(len(group["params"]))]
        for name in names:
            found[name] = (group.get("algorithm"), _plain(group.get("blocks")))
    return found


def _plain(blocks: Any) -> Any:
    return tuple(map(_plain, blocks)) if isinstance(blocks, list | tuple) else blocks

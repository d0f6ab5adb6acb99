"""What messages, reports and plans of owners call the parameters of an optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from vescale.checks import known_names

__all__ = ["shown_names"]


def shown_names(groups: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The names of each group's parameters: those that the optimizer was given, else those of the model that ``parallelize``
    or ``fully_shard`` knows, else their places. Where layers were sharded without the model around them, several have one
    name, and are told apart by their places."""
    known = known_names(p for group in groups if not group.get("param_names") for p in group["params"])
    count = Counter(name for name, _ in known.values())
    shown = []
    for position, group in enumerate(groups):
        if names := group.get("param_names"):
            shown.append(list(names))
            continue
        found = []
        for place, parameter in enumerate(group["params"]):
            name, model = known.get(parameter, ("", ""))
            at = f"group {position}, parameter {place}"
            found.append(at if not name else name if count[name] == 1 else f"{at} ({name} of {model})")
        shown.append(found)
    return shown

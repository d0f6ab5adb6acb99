"""What messages, reports and plans of owners call the parameters of an optimizer."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from vescale.checks import known_names
from vescale.comm import Consensus, compare_descriptions
from vescale.errors import OptimizerParameterError

__all__ = ["compare_parameters", "shown_names"]


def shown_names(groups: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The names of each group's parameters: those that the optimizer was given, else those of the model that ``parallelize``
    or ``fully_shard`` knows, else their places. Where layers were sharded without the model around them, several have one
    name, and are told apart by their places."""
    known = known_names(p for group in groups if not _has_names(group) for p in group["params"])
    count = Counter(name for name, _ in known.values())
    shown = []
    for position, group in enumerate(groups):
        if _has_names(group):
            shown.append(list(group["param_names"]))
            continue
        found = []
        for place, parameter in enumerate(group["params"]):
            name, model = known.get(parameter, ("", ""))
            at = f"group {position}, parameter {place}"
            found.append(at if not name else name if count[name] == 1 else f"{at} ({name} of {model})")
        shown.append(found)
    return shown


def _has_names(group: Mapping[str, Any]) -> bool:
    """A list of parameters that was edited has other places than its names."""
    return bool(group.get("param_names")) and len(group["param_names"]) == len(group["params"])


def compare_parameters(described: Sequence[tuple[Sequence[int], str, str]]) -> None:
    """Compare an optimizer's parameters, ``(ranks that hold it, name, description)`` in its order, between their ranks.

    Communication: through the store, with each set of ranks.

    Raises OptimizerParameterError on all of them where they differ.
    """
    together: dict[tuple[int, ...], list[tuple[str, str]]] = defaultdict(list)
    for ranks, name, text in described:
        if len(ranks) > 1:
            members = together[tuple(sorted(ranks))]
            members.append((f"{name} ({len(members)})", text))
    for ranks, members in sorted(together.items()):
        consensus = Consensus(ranks, "parameters of an optimizer")
        found = compare_descriptions({"parameters": members}, consensus, lambda: "planning an optimizer")
        if found is not None:
            raise OptimizerParameterError(
                f"the optimizer's {found.text()}; give every rank the same parameters, in the same order and groups, and "
                "freeze the same ones"
            )

"""Short path expressions that match exactly a list of concrete module names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile

import regex
from torch.distributed.tensor.placement_types import Placement

__all__ = ["expressions", "merged_paths", "wildcard"]

_NUMBER = regex.compile(r"(?<=^|\.)\d+(?=\.|$)")


def wildcard(name: str) -> str:
    """``layers.3.mlp`` to ``layers.*.mlp``: numbers between dots, as Hugging Face's plans write them."""
    return _NUMBER.sub("*", name)


def expressions(chosen: Iterable[str], every: Collection[str]) -> list[str]:
    """Path expressions that match all of ``chosen`` and nothing else of ``every``, in the order of ``chosen``.

    Layer numbers become ``\\d+``, or an alternative of numbers; siblings of the same layers become ``(a|b)``.
    """
    groups: dict[str, list[str]] = {}
    for name in chosen:
        groups.setdefault(wildcard(name), []).append(name)
    alike: dict[str, set[str]] = {}
    for name in every:
        alike.setdefault(wildcard(name), set()).add(name)
    children: dict[str, list[str]] = {}
    for generic, names in groups.items():
        for expression in _over_layers(generic, names, alike.get(generic, set()) - set(names)):
            parent, _, child = expression.rpartition(".")
            children.setdefault(parent, []).append(child)
    return [f"{parent}.{_either(names)}" if parent else _either(names) for parent, names in children.items()]


def merged_paths(
    tensors: Mapping[tuple[str, str], Placement], modules: Collection[str]
) -> Iterator[tuple[str, Placement]]:
    """(path expression, placement) for ``{(module, parameter or boundary): placement}``, merged where several agree, in the
    order of ``modules``."""
    order = {path: number for number, path in enumerate(modules)}
    own: dict[str, dict[Placement, list[str]]] = {}
    paths_of: dict[tuple[str, Placement], list[str]] = {}
    for (path, target), placement in tensors.items():
        if target.startswith("<"):
            paths_of.setdefault((target, placement), []).append(path)
        else:
            own.setdefault(path, {}).setdefault(placement, []).append(target)
    states: dict[tuple[str, Placement], list[str]] = {}
    for path, by_placement in own.items():
        for placement, targets in by_placement.items():
            target = targets[0] if len(targets) == 1 else f"({'|'.join(targets)})"
            states.setdefault((target, placement), []).append(path)
    lines = []
    for (target, placement), paths in (*states.items(), *paths_of.items()):
        for expression in expressions(paths, modules):
            first = min(order[path] for path in paths if regex.fullmatch(expression, path))
            lines.append((first, f"{expression}.{target}" if expression else target, placement))
    for _, pattern, placement in sorted(lines, key=lambda line: line[0]):
        yield pattern, placement


def _over_layers(generic: str, names: Sequence[str], others: Collection[str]) -> list[str]:
    """One expression that matches the given names, which differ in numbers only, and none of ``others``; the names
    themselves if no single number distinguishes them from the others."""
    if not others:
        return [generic.replace("*", r"\d+")]
    for position in range(generic.count("*")):
        numbers = list(dict.fromkeys(_NUMBER.findall(name)[position] for name in names))
        if not any(_NUMBER.findall(other)[position] in numbers for other in others):
            before, after = _around(generic, position)
            return [f"{before}{_either(numbers)}{after}".replace("*", r"\d+")]
    return list(names)


def _around(generic: str, position: int) -> tuple[str, str]:
    """The text before and after the star at ``position``."""
    parts = generic.split("*")
    return "*".join(parts[: position + 1]), "*".join(parts[position + 1 :])


def _either(names: Sequence[str]) -> str:
    """``(q|k|v)_proj`` for ``q_proj``, ``k_proj``, ``v_proj``; one name as it is."""
    if len(names) == 1:
        return names[0]
    reversed_parts = [tuple(reversed(name.split("_"))) for name in names]
    shared = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*reversed_parts)))
    shared = min(shared, min(map(len, reversed_parts)) - 1)
    heads = ["_".join(reversed(parts[shared:])) for parts in reversed_parts]
    return f"({'|'.join(heads)})" + "".join(f"_{part}" for part in reversed(reversed_parts[0][:shared]))

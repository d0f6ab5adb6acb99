"""States of an optimizer whose parameters have numbers, as ``optimizer.state_dict()`` has them in ``torch.save`` files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from vescale.checkpoint._json_values import TensorName, encode
from vescale.checkpoint._stored import Stored
from vescale.errors import ContentMismatchError

__all__ = ["numbered_states"]

_STATE = re.compile(r"(?:(.*)\.)?state\.(\d+)\.([^.]+)")
_GROUP = re.compile(r"param_groups\.(\d+)(?:\.([^.]+))?")


def numbered_states(stored: Stored, groups: Sequence[Sequence[tuple[str, torch.Tensor]]]) -> dict[str, Any] | None:
    """Groups and states by names, in the form of a manifest; None if the file has no such optimizer, or several.

    Args:
        groups: (name, parameter) of each group of the optimizer that is loaded. Numbers count them in this order.

    Raises CheckpointError where numbers or sizes of the groups differ, or states do not fit their parameters.
    """
    states = {name: match for name in (*stored.tensors, *stored.values) if (match := _STATE.fullmatch(name))}
    prefixes = {match[1] or "" for match in states.values()}
    if len(prefixes) != 1:
        return None
    prefix = f"{prefixes.pop()}.".removeprefix(".")
    saved = _saved_groups(stored, prefix)
    sizes = [len(group["params"]) for group in saved]
    if sizes != [len(group) for group in groups]:
        raise ContentMismatchError(
            f"{stored.path}: the optimizer that was saved has groups of {sizes} parameters, without names, and this one "
            f"of {[len(group) for group in groups]}; make it with the same groups in the same order"
        )
    members = [member for group in groups for member in group]
    numbers = [number for group in saved for number in group["params"]]
    place = dict(zip(numbers, members))
    state: dict[str, dict[str, Any]] = {}
    for found, match in states.items():
        if int(match[2]) not in place:
            raise ContentMismatchError(f"{stored.path}: {found} is the state of a parameter that no group has")
        name, parameter = place[int(match[2])]
        if found in stored.tensors:
            shape = tuple(stored.tensors[found].shape)
            if len(shape) == parameter.ndim and shape != tuple(parameter.shape):
                raise ContentMismatchError(
                    f"{stored.path}: {found} has shape {shape}, and {name}, the parameter in its place, has shape "
                    f"{tuple(parameter.shape)}; make the optimizer with the parameters in the order in which it was saved"
                )
            state.setdefault(name, {})[match[3]] = {"$tensor": found}
        else:
            state.setdefault(name, {})[match[3]] = encode(stored.values[found], found, {})
    named = [
        {"params": [name for name, _ in group], "options": {k: v for k, v in own.items() if k != "params"}}
        for group, own in zip(groups, saved)
    ]
    return {"param_groups": named, "state": state}


def _saved_groups(stored: Stored, prefix: str) -> list[dict[str, Any]]:
    """The options of each group, encoded; ``params`` are numbers."""
    groups: dict[int, dict[str, Any]] = dict(enumerate(stored.values.get(f"{prefix}param_groups", ())))
    for name in (*stored.values, *stored.tensors):  # groups with tensors among their options are taken apart
        match = _GROUP.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None
        if match is None:
            continue
        if match[2] is None:
            groups[int(match[1])] = stored.values[name]
        else:
            value = TensorName(name) if name in stored.tensors else stored.values[name]
            groups.setdefault(int(match[1]), {})[match[2]] = value
    wrong = ContentMismatchError(f"{stored.path}: {prefix}param_groups do not say which parameters they have")
    if not all(isinstance(group, dict) for group in groups.values()):
        raise wrong
    found = [
        {
            key: {"$tensor": value} if isinstance(value, TensorName) else encode(value, key, {})
            for key, value in groups[number].items()
        }
        for number in sorted(groups)
    ]
    numbers = [group.get("params") for group in found]
    if not all(isinstance(each, list) and all(type(number) is int for number in each) for each in numbers):
        raise wrong
    return found

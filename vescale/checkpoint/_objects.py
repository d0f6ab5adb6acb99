"""Which tensors fill an object that was saved beside the model, and the state that it is given then.

What counts is what the object itself has now. On another mesh, and in other stages of a pipeline, that may be more or less
than this rank's object had when it was saved: tensors are found by name, whichever rank has written them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from vescale.checkpoint._names import nearest
from vescale.checkpoint._step_format import TensorName, decode, encode
from vescale.checkpoint._stored import StoredTensor


@dataclass
class ObjectLoad:
    """How one object is filled.

    Attributes:
        targets: its own tensors that the checkpoint has, by name.
        sources: what the checkpoint has for those whose name is another one there, of a tied parameter.
        state: to give to the object, in JSON: what was saved, with the names of its own tensors.
        homeless: sharded tensors of the checkpoint for which it has no place, with the nearest names that it has.
    """

    targets: dict[str, torch.Tensor] = field(default_factory=dict)
    sources: dict[str, StoredTensor] = field(default_factory=dict)
    state: Any = None
    homeless: dict[str, list[str]] = field(default_factory=dict)


def plan_object(
    key: str,
    value: Any,
    saved: Any,
    tensors: Mapping[str, StoredTensor],
    aliases: Mapping[str, str],
    is_of_others: Callable[[str], bool],
) -> ObjectLoad:
    """No communication. Alike on ranks whose objects have the same tensors, whatever each had in the save.

    Args:
        key, value: the object and its name.
        saved: its state, in JSON.
        tensors: of the checkpoint.
        aliases: names of tied parameters to the first one, in the model or in the checkpoint.
        is_of_others: whether a parameter of this name is in another stage of the model.
    """
    found, own = ObjectLoad(), dict[str, torch.Tensor]()
    present = encode(value.state_dict(), key, own) if hasattr(value, "state_dict") else None
    for name, tensor in own.items():
        source = next((each for each in _also_called(name, aliases) if each in tensors), None)
        if source is not None:
            found.targets[name] = tensor
        if source is not None and source != name:
            found.sources[name] = tensors[source]

    def is_elsewhere(name: str) -> bool:
        parts = name.removeprefix(f"{key}.").split(".")
        if any(is_of_others(".".join(parts[start:])) for start in range(len(parts))):
            return True
        return any(each in found.targets for each in _also_called(name, aliases))

    names: list[TensorName] = []
    decode(saved, names.append)
    dropped = {str(name) for name in names if name not in own and is_elsewhere(name)}
    found.homeless = {
        str(name): nearest(name, list(own))
        for name in names
        if name.is_sharded and name not in own and name not in dropped
    }
    found.state = _completed(saved, present, found.targets, dropped)
    return found


def _also_called(name: str, aliases: Mapping[str, str]) -> Iterator[str]:
    """The name, and those that end in another name of the same parameter."""
    yield name
    for alias, first in aliases.items():
        for here, there in ((alias, first), (first, alias)):
            if name.endswith(f".{here}"):
                yield name.removesuffix(here) + there


def _completed(saved: Any, present: Any, targets: Mapping[str, Any], dropped: set[str]) -> Any:
    """``saved`` without the tensors that are dropped, and with those of ``present`` that are filled."""
    if not _is_plain_dict(saved) or not _is_plain_dict(present):
        return saved
    found = {
        key: _completed(value, present.get(key), targets, dropped)
        for key, value in saved.items()
        if _tensor_of(value) not in dropped
    }
    return found | {key: v for key, v in present.items() if key not in saved and _is_filled(v, targets)}


def _is_filled(value: Any, targets: Mapping[str, Any]) -> bool:
    name = _tensor_of(value)
    if name is not None:
        return name in targets
    return _is_plain_dict(value) and bool(value) and all(_is_filled(each, targets) for each in value.values())


def _is_plain_dict(value: Any) -> bool:
    return isinstance(value, dict) and not any(key.startswith("$") for key in value)


def _tensor_of(value: Any) -> str | None:
    if isinstance(value, dict) and len(value) == 1 and (tag := next(iter(value))) in ("$tensor", "$dtensor"):
        return str(value[tag])
    return None


def differ_beyond_tensors(values: Mapping[str, Any]) -> bool:
    """Whether ranks have saved different numbers and text, and not only tensors of different names."""
    plain = [_without_tensors(value) for value in values.values()]
    return any(each != plain[0] for each in plain)


def _without_tensors(value: Any) -> Any:
    if not _is_plain_dict(value):
        return value
    kept = {key: _without_tensors(each) for key, each in value.items() if _tensor_of(each) is None}
    return {key: each for key, each in kept.items() if each != {}}

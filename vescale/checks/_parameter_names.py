"""Names of parameters in the models that ``parallelize`` or ``fully_shard`` was given, for those who have tensors alone."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import nn

from vescale.compat import living_items

__all__ = ["known_names", "note_name"]

_NAMES: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[str, str]]] = weakref.WeakKeyDictionary()


def note_name(owner: nn.Module, attribute: str, name: str, model: str) -> None:
    """``name``: of the parameter that ``owner`` registers as ``attribute``, in a model of the class ``model``. Where modules
    are given one by one, the last one around it counts."""
    _NAMES.setdefault(owner, {})[attribute] = name, model


def known_names(parameters: Iterable[torch.Tensor]) -> dict[torch.Tensor, tuple[str, str]]:
    """(name, class of the model that it is in) of those that are registered where a name is known."""
    wanted = {id(parameter): parameter for parameter in parameters}
    found: dict[torch.Tensor, tuple[str, str]] = {}
    for owner, attributes in living_items(_NAMES):
        for attribute, named in list(attributes.items()):
            parameter = wanted.get(id(owner._parameters.get(attribute)))
            if parameter is not None:
                found.setdefault(parameter, named)
    return found

"""``Settings``: numbers and buffers of a model that its forward reads, in the copy that is traced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from vescale.compat import own_part, versions
from vescale.pipeline._cut import Cut

_NUMBERS = (bool, int, float, str, type(None))


class Settings:
    """Values that are computed from the batch alone are those of the traced copy: they are computed again where a number
    has changed, and with the buffers as they are. Both of the modules around those that belong to one stage, in which
    nothing is taken from the whole batch."""

    def __init__(self, model: nn.Module, skeleton: nn.Module, cut: Cut) -> None:
        inside = tuple(f"{path}." for path in cut.bound)
        pairs = zip(model.named_modules(), skeleton.modules())
        self._all = [(path, module, twin) for (path, module), twin in pairs]
        self._around = [one for one in self._all if not f"{one[0]}.".startswith(inside)]
        self._ignored: set[tuple[str, str]] = set()
        self._copied: dict[tuple[str, str], tuple[int, tuple[int, ...]]] = {}

    def numbers(self) -> dict[tuple[str, str], Any]:
        return {
            (path, name): value
            for path, module, _ in self._around
            for name, value in module.__dict__.items()
            if type(value) in _NUMBERS and name != "training" and (path, name) not in self._ignored
        }

    def ignore(self, before: dict[tuple[str, str], Any], after: dict[tuple[str, str], Any]) -> None:
        """What differs has changed nothing: a counter of steps."""
        self._ignored |= {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}

    def ignore_written(self) -> list[str]:
        """Ignore numbers that a forward assigns, and not every stage's. Returns their names."""
        found = [
            (path, name)
            for path, module, twin in self._all
            for name, after in twin.__dict__.items()
            for before in [module.__dict__.get(name, ())]  # it may be new
            if (type(before) in _NUMBERS or (before == () and type(after) in _NUMBERS))
            and (type(after) is not type(before) or after != before)
        ]
        self._ignored.update(found)
        return [".".join(filter(None, names)) for names in found]

    def before_trace(self) -> None:
        """The copy has the modes, the numbers and the buffers of the model."""
        for _, module, twin in self._all:
            twin.training = module.training
            twin.__dict__.update({name: v for name, v in module.__dict__.items() if type(v) in _NUMBERS})
        self._copy(self._all)

    def before_step(self) -> None:
        self._copy(self._around)

    @torch.no_grad()
    def _copy(self, modules: list[tuple[str, nn.Module, nn.Module]]) -> None:
        for key, buffer, twin in _buffers(modules):
            state, own = (id(buffer), versions(buffer)), own_part(buffer)
            if self._copied.get(key) != state and own.shape == twin.shape and not own.is_meta and not twin.is_meta:
                twin.copy_(own)
            self._copied[key] = state


def _buffers(
    modules: list[tuple[str, nn.Module, nn.Module]],
) -> Iterator[tuple[tuple[str, str], torch.Tensor, torch.Tensor]]:
    for path, module, twin in modules:
        for name, buffer in module._buffers.items():
            copy = twin._buffers.get(name)
            if buffer is not None and copy is not None:
                yield (path, name), buffer, copy

"""``WrittenTensors``: what a static forward has written to, and holds again what it held before the eager one runs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from vescale.compat import no_torch_function, own_part, tensors_in, versions
from vescale.errors import StaticStepError

# Elements of all tensors that a program writes to, up to which each step keeps what they hold.
_MAX_KEPT = 1 << 16

# The kind, and a path or a position.
_Key = tuple[str, str | int]


class WrittenTensors:
    """Buffers and parameters of a model, and its inputs, before a static forward.

    Args:
        given: args and kwargs.
        writes: which ones the program has written to before; None: it is not known, and all are looked at.
        has_units: whether parameters are gathered around the forward, which writes to them.
    """

    def __init__(self, model: nn.Module, given: Any, writes: Collection[_Key] | None, has_units: bool) -> None:
        self._held: list[tuple[_Key, torch.Tensor, tuple[int, ...], torch.Tensor | None]] = []
        if writes is not None and not writes:
            return
        found = list(_all(model, given, has_units) if writes is None else _those(model, given, writes))
        keeps = writes is None or sum(x.numel() for _, x in found) <= _MAX_KEPT
        with torch.no_grad(), no_torch_function():
            for key, x in found:
                is_kept = keeps and key[0] != "parameter" and not x.requires_grad and not x.is_inference()
                self._held.append((key, x, versions(x), own_part(x).clone() if is_kept else None))

    def written(self) -> frozenset[_Key]:
        """Those that have been written to."""
        return frozenset(key for key, x, before, _ in self._held if versions(x) != before)

    def undo(self, problem: BaseException) -> None:
        """They hold again what they held. Raises StaticStepError where that is not known."""
        for (kind, name), x, before, kept in self._held:
            if versions(x) == before:
                continue
            if kept is None:
                raise StaticStepError(
                    f"the static forward has written to {kind} {name!r} of shape {tuple(x.shape)} before it could not go on "
                    f"({problem}); the step cannot be run again in eager mode, which would write a second time. Expected "
                    "that writes come last, or mode='eager'"
                ) from problem
            with torch.no_grad(), no_torch_function():
                own_part(x).copy_(kept)


def _all(model: nn.Module, given: Any, has_units: bool) -> Iterator[tuple[_Key, torch.Tensor]]:
    for name, x in model.named_buffers():
        yield ("buffer", name), x
    for name, x in () if has_units else model.named_parameters():
        yield ("parameter", name), x
    for number, x in enumerate(tensors_in(given)):
        yield ("input", number), x


def _those(model: nn.Module, given: Any, keys: Collection[_Key]) -> Iterator[tuple[_Key, torch.Tensor]]:
    inputs = list(tensors_in(given)) if any(kind == "input" for kind, _ in keys) else []
    for key in keys:
        kind, name = key
        if isinstance(name, int):
            if name < len(inputs):
                yield key, inputs[name]
        else:
            yield key, model.get_buffer(name) if kind == "buffer" else model.get_parameter(name)

"""Memory without values: what ``to_empty`` gives to tensors on the meta device, until something is written to it.

Such memory is filled with a pattern that no initialization and no checkpoint writes (for floating-point numbers one of the
not-a-numbers), so that whatever writes a tensor, or replaces it, makes it known as filled.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

import torch
from torch import nn

from vescale.compat import own_part
from vescale.errors import MissingValuesError

Place = tuple[nn.Module, str]
"""A module and the name of one of its parameters or buffers."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_UNFILLED: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
_IS_OFF: ContextVar[bool] = ContextVar("values are not used", default=False)
_SHOWN = 5


def places_on_meta(model: nn.Module) -> list[Place]:
    return [
        (module, name)
        for module in model.modules()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None and tensor.is_meta
    ]


@contextlib.contextmanager
def values_are_of_no_interest() -> Iterator[None]:
    """Memory that is given inside is used as it is: by estimates."""
    token = _IS_OFF.set(True)
    try:
        yield
    finally:
        _IS_OFF.reset(token)


@torch.no_grad()
def mark_unfilled(places: Sequence[Place]) -> None:
    """Fill with the pattern what was on the meta device before the model was moved, and has memory now."""
    for module, name in () if _IS_OFF.get() else places:
        tensor = _tensor_at(module, name)
        if tensor is not None and not tensor.is_meta and tensor.dtype != torch.bool:
            bits, pattern = _as_integers(tensor)
            bits.fill_(pattern)
            _UNFILLED.setdefault(module, set()).add(name)


def unfilled(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of the model that have memory, and elements to which nothing was ever written. What is filled is not
    looked at again."""
    if not _UNFILLED:
        return
    for path, module in model.named_modules():
        for name in sorted(_UNFILLED.get(module, ())):
            tensor = _tensor_at(module, name)
            if tensor is not None and not tensor.is_meta and _has_pattern(tensor):
                yield (f"{path}.{name}" if path else name), tensor
            else:
                _UNFILLED[module].discard(name)


def check_filled(model: nn.Module) -> None:
    """Raises MissingValuesError naming parameters and buffers that got memory, and no values."""
    names = [name for name, _ in unfilled(model)]
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise MissingValuesError(
            f"{', '.join(names[:_SHOWN])}{more} of this {type(model).__name__} were allocated by to_empty(), but "
            "nothing has been written to them: load_state_dict does not fill non-persistent buffers (such as "
            "position tables). Build the model under vescale.deferred_init(), which records what the constructor "
            "computes; or, for a model of transformers, call vescale.checkpoint.load_hf(model, folder), which "
            "computes them; or write them yourself"
        )


def _tensor_at(module: nn.Module, name: str) -> torch.Tensor | None:
    return module._parameters.get(name) if name in module._parameters else module._buffers.get(name)


def _as_integers(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """This rank's elements as integers of their size, and the pattern."""
    local = own_part(tensor).detach()
    local = torch.view_as_real(local) if local.is_complex() else local
    if local.is_floating_point():
        return local.view(_INTEGERS[local.itemsize]), -1
    return local.view(_INTEGERS[local.itemsize]), int.from_bytes(b"\xa5" * local.itemsize, "little", signed=True)


def _has_pattern(tensor: torch.Tensor) -> bool:
    bits, pattern = _as_integers(tensor)
    # Of integers of one byte some may have this value.
    found = (
        (bits == pattern).all() if bits.itemsize == 1 and not tensor.is_floating_point() else (bits == pattern).any()
    )
    return bool(found) and bits.numel() > 0

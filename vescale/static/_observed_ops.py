"""The ops of one torch function, as they are observed while a step is recorded."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from vescale.compat import TorchDispatchMode, local_of, runs_on_locals, spec_of, tensors_in
from vescale.compat.devices import is_capturing, random_states, set_random_states


class WithObservedOps(TorchFunctionMode):
    """Runs torch functions as a :class:`Recorder` does: by PyTorch's path for each op."""

    def __torch_function__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with ObservedOps():
            return func(*args, **(kwargs or {}))


class ObservedOps(TorchDispatchMode):
    """Sees the ops of one torch function.

    Args:
        known: answers for kinds of calls, which layers of a model share.

    Attributes:
        changed: why they do not all run on the local tensors as they are; "" if they do.
        draws: whether one may draw random numbers.
        has_plain: whether one runs on plain tensors.
    """

    def __init__(self, known: dict[Any, bool] | None = None) -> None:
        super().__init__()
        self._known = {} if known is None else known
        self.changed = ""
        self.draws = False
        self.has_plain = False

    def __torch_dispatch__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags
        if not any(isinstance(x, DTensor) for x in tensors_in((args, kwargs))):
            self.has_plain = True
        elif not self.changed and not self.runs_on_locals(func, args, kwargs):
            self.changed = f"{func} does not run on the local tensors as they are"
        return func(*args, **kwargs)

    def runs_on_locals(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an op on DTensors runs on the local tensors as they are."""
        if not any(isinstance(x, DTensor) for x in tensors_in((args, kwargs))):
            return True
        key = _kind_of(func, args, kwargs)
        if key is None:
            return runs_on_locals(func, args, kwargs)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = runs_on_locals(func, args, kwargs)
        return found


def _kind_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the answer for a call depends on; None: it cannot be a key."""
    key = func, tuple(map(_part_of_kind, args)), tuple((name, _part_of_kind(value)) for name, value in kwargs.items())
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _part_of_kind(value: Any) -> Any:
    if isinstance(value, DTensor):
        return spec_of(value), local_of(value).shape, local_of(value).stride()
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_part_of_kind, value))
    return type(value), value


def random_state() -> list[torch.Tensor]:
    """The states of the default generators; of the CPU's only while a graph of the device is captured, whose replays count
    draws on the device."""
    return [torch.get_rng_state(), *(() if is_capturing() else random_states().values())]


def host_random_state() -> Any:
    """The states of the generators of Python and numpy."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state(legacy=False)


def has_drawn(before: Any) -> bool:
    """Whether these generators have other states than before."""
    return repr(host_random_state()) != repr(before)


def set_host_random_state(state: Any) -> None:
    random.setstate(state[0])
    if state[1] is not None:
        sys.modules["numpy"].random.set_state(state[1])


def set_random_state(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    set_random_states(dict(zip(random_states(), states[1:])))

"""Calls of modules whose forward hooks keep values for later, as those that collect hidden states or logits of routers do.

A stage answers the calls of other stages' modules, and these hooks see stand-ins then: what they collect has on every stage
as many values as on one device, and what a later stage reads of it is sent.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vescale.compat import forward_hooks
from vescale.compat.tensor_subclasses import tree_flatten


@dataclass(frozen=True)
class TensorLike:
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class HookedCall:
    """A call of a module in a gated one, or of the gated one itself.

    Attributes:
        path: in the gated module; ``""`` is that module.
        occurrence: the number of the call among those of the same path.
        hooks: the code of the forward hooks.
        leaves: of (arguments, keyword arguments, result), with shape and dtype in place of tensors.
        tree: of these.
    """

    path: str
    occurrence: int
    hooks: frozenset[Any]
    leaves: tuple[Any, ...]
    tree: Any

    @property
    def place(self) -> tuple[str, int]:
        return self.path, self.occurrence


def _code(hook: Any) -> Any:
    """What a hook and its copy with another model have in common."""
    function = getattr(hook, "__func__", hook)
    return getattr(function, "__code__", type(hook))


class _Window:
    """What the hooks of a module get, and how often it is referred to before they run. (:meth:`begin` and :meth:`has_left`
    are called from hooks, whose frames hold it alike.)"""

    def __init__(self, args: Any, kwargs: Any, output: Any) -> None:
        self.leaves, self.tree = tree_flatten((args, kwargs, output))
        self._watched = [v for v in (args, output, *self.leaves) if isinstance(v, torch.Tensor | tuple | list | dict)]
        self._num_ops, self._counts = 0, [0]

    def begin(self, num_ops: int) -> None:
        self._num_ops, self._counts = num_ops, self._references()

    def _references(self) -> list[int]:
        return [sys.getrefcount(value) for value in self._watched]

    def has_left(self, num_ops: int) -> bool:
        """Whether hooks have kept something, or computed with it since."""
        return num_ops > self._num_ops or any(now > was for now, was in zip(self._references(), self._counts))


@contextlib.contextmanager
def noting_hooks(
    gated: nn.Module, num_ops: Callable[[], int], note: Callable[[tuple[str, int], int, torch.Tensor], None]
) -> Iterator[list[HookedCall]]:
    """Around a call of a gated module in a trace: the calls in it whose hooks keep or compute something, in their order.

    Args:
        num_ops: how many ops have run.
        note: called with :attr:`HookedCall.place`, the number of a leaf, and the tensor.
    """
    found: list[HookedCall] = []
    occurrences: Counter[str] = Counter()
    windows: list[_Window] = []
    handles: list[Any] = []

    def watch(path: str, module: nn.Module, codes: frozenset[Any]) -> None:
        def before(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            windows.append(_Window(args, kwargs, output))
            windows[-1].begin(num_ops())

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            window = windows.pop()
            occurrence = occurrences[path]
            occurrences[path] += 1
            if not window.has_left(num_ops()):
                return
            like = [TensorLike(tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else v for v in window.leaves]
            call = HookedCall(path, occurrence, codes, tuple(like), window.tree)
            found.append(call)
            for n, value in enumerate(window.leaves):
                if isinstance(value, torch.Tensor):
                    note(call.place, n, value)

        handles.append(module.register_forward_hook(before, prepend=True, with_kwargs=True))
        handles.append(module.register_forward_hook(after, with_kwargs=True))

    for path, module in gated.named_modules():
        hooks = forward_hooks(module)
        if hooks:
            watch(path, module, frozenset(_code(hook) for hook, _ in hooks))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def call_hooks(call: HookedCall, gated: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """Those of the trace, of a module that does not run here."""
    module = gated.get_submodule(call.path)
    for hook, with_kwargs in forward_hooks(module):
        if _code(hook) in call.hooks:
            hook(module, args, kwargs, output) if with_kwargs else hook(module, args, output)


@contextlib.contextmanager
def seeing_values(
    calls: Sequence[HookedCall], gated: nn.Module, see: Callable[[tuple[str, int], int, torch.Tensor], None]
) -> Iterator[None]:
    """Around a call of a gated module that runs here: ``see`` is called as ``note`` of :func:`noting_hooks`."""
    places = {call.place for call in calls}
    occurrences: Counter[str] = Counter()
    handles: list[Any] = []

    def watch(path: str) -> None:
        def before(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            place = path, occurrences[path]
            occurrences[path] += 1
            if place in places:
                for n, value in enumerate(tree_flatten((args, kwargs, output))[0]):
                    if isinstance(value, torch.Tensor):
                        see(place, n, value)

        handles.append(gated.get_submodule(path).register_forward_hook(before, with_kwargs=True))

    for path in {call.path for call in calls}:
        watch(path)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

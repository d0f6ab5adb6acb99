"""What runs at call sites of a static forward in place of a torch function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from vescale.compat import map_tensors, no_torch_function, with_torch_function
from vescale.runtime import Frame, current_activation
from vescale.static._local_functions import LocalFunction
from vescale.static._size_functions import SIZE_READERS
from vescale.static._tensor_type import TensorType, UnrecordedError

Callee = Callable[..., Any]


def read_sizes(function: Any, callee: Callee | None, factors: Sequence[int]) -> Callable[..., Any]:
    """A site that calls one of :data:`SIZE_READERS` on a local tensor; ``callee`` is an attribute's getter, None if the site
    is a call."""
    factors = tuple(factors)
    read = SIZE_READERS[function]
    known: tuple[Any, torch.Size] = None, torch.Size()  # the last local shape, and the global one

    def whole(x: torch.Tensor) -> torch.Size:
        nonlocal known
        part, found = known
        shape = x.shape
        if shape != part:
            if len(shape) != len(factors):
                raise UnrecordedError(f"a tensor of {len(shape)} dims in place of one of {len(factors)}")
            found = torch.Size([size * factor for size, factor in zip(shape, factors)])
            known = shape, found
        return found

    if callee is not None:
        return lambda _, x: whole(x)

    def call(f: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(f, "__self__", None)
        if isinstance(owner, torch.Tensor):  # a method: x.size(0)
            return read(whole(owner), *args, **kwargs)
        return read(whole(args[0]), *args[1:], **kwargs)  # a function: len(x)

    return call


def take_sizes(factors: Sequence[int]) -> Callable[..., Any]:
    """A site that calls one of :data:`SIZE_TAKERS`; ``factors`` are those of the result."""
    factors = tuple(factors)
    known: tuple[Any, tuple[int, ...]] = None, ()  # the last sizes, and the local ones

    def localized(sizes: Sequence[int]) -> tuple[int, ...]:
        made = []
        if len(sizes) != len(factors):
            raise UnrecordedError(f"{len(sizes)} sizes in place of {len(factors)}")
        for size, factor in zip(sizes, factors):
            if factor > 1 and size > 0:
                if size % factor:
                    raise UnrecordedError(f"size {size} is not divisible by {factor}")
                size //= factor
            made.append(size)
        return tuple(made)

    def call(f: Callee, *sizes: Any, **kwargs: Any) -> Any:
        nonlocal known
        if len(sizes) == 1 and not isinstance(sizes[0], int):
            sizes = tuple(sizes[0])  # a list may change
        given, local = known
        if sizes != given:
            local = localized(sizes)
            known = sizes, local
        return f(local, **kwargs)

    return call


class EagerCall:
    """A site that runs its function on DTensors, in the model's eager mode, or a function of local tensors with the same
    collectives and results.

    Args:
        require_mode: called before the function runs on DTensors, in the function mode of the model.
        function: the recorded torch function.
        inputs, outputs: of its tensors, in order.
        callee: for sites that are no calls: what runs there.
        local: what runs on local tensors (:func:`local_function`); None: nothing.
    """

    def __init__(
        self,
        require_mode: Callable[[], None],
        module: nn.Module,
        path: str,
        function: Any,
        inputs: Sequence[TensorType],
        outputs: Sequence[TensorType],
        callee: Callee | None,
        local: LocalFunction | None,
    ) -> None:
        self.require_mode, self.module, self.path, self.function = require_mode, module, path, function
        self.inputs, self.outputs, self.callee = tuple(inputs), tuple(outputs), callee
        self.local = local
        name = getattr(function, "__name__", str(function))
        self._to_global = [functools.partial(kind.to_global, op=name) for kind in inputs]
        self._to_local = [kind.to_local for kind in outputs]

    def __call__(self, f: Callee | None, *args: Any, **kwargs: Any) -> Any:
        activation = current_activation()
        assert activation is not None
        runtime = activation.runtime
        where = runtime.where(self.path)
        activation.frames.append(Frame(self.module, self.path, where=where))
        runtime.timeline.mark(where)
        try:
            if f is self.function:
                return self._direct(f, args, kwargs)
            with with_torch_function(), _Intercept(self) as mode:
                result = (f if self.callee is None else self.callee)(*args, **kwargs)  # type: ignore[misc]
        finally:
            activation.frames.pop()
        if not mode.was_called:
            raise UnrecordedError(f"{self.function} was not called")
        return result

    def _direct(self, f: Callee, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call where the program calls the function itself."""
        found = None if self.local is None else self.local(*args, **kwargs)
        if found is not None:
            return found
        self.require_mode()
        args, kwargs = map_in_order((args, kwargs), self._to_global)
        with with_torch_function():
            result = f(*args, **kwargs)
        return map_in_order(result, self._to_local)


class _Intercept(TorchFunctionMode):
    """Runs the function of an :class:`EagerCall` on DTensors, as it was recorded with."""

    def __init__(self, site: EagerCall) -> None:
        super().__init__()
        self.site = site
        self.was_called = False

    def __torch_function__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        site = self.site
        if func != site.function or self.was_called:
            raise UnrecordedError(f"{func} in place of {site.function}")
        self.was_called = True
        with no_torch_function():
            found = None if site.local is None else site.local(*args, **(kwargs or {}))
            if found is not None:
                return found
            site.require_mode()
            args, kwargs = map_in_order((args, kwargs or {}), site._to_global)
        result = func(*args, **kwargs)
        with no_torch_function():
            return map_in_order(result, site._to_local)


def map_in_order(value: Any, changes: Sequence[Callable[[torch.Tensor], Any]]) -> Any:
    """``value`` with its tensors changed, each by the next of ``changes``; one that occurs twice becomes one."""
    waiting, made = iter(changes), {}
    count = 0

    def change(x: torch.Tensor) -> Any:
        nonlocal count
        count += 1
        function = next(waiting, None)
        if function is None:
            raise UnrecordedError("more tensors than recorded")
        if id(x) not in made:
            made[id(x)] = x, function(x)
        return made[id(x)][1]

    result = map_tensors(change, value)
    if count != len(changes):
        raise UnrecordedError("fewer tensors than recorded")
    return result

"""Torch functions that run on local tensors, if they do so for the arguments of the step."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from vescale.compat import native_static, no_torch_function, with_torch_function
from vescale.ops import entries
from vescale.static._call_site_functions import map_in_order
from vescale.static._local_run import LocalRun, run_on_locals
from vescale.static._observed_ops import ObservedOps, random_state, set_random_state
from vescale.static._tensor_type import TensorType, UnrecordedError

_MAX_KNOWN = 1024


def checked_call(
    where: str,
    function: Any,
    inputs: Sequence[TensorType],
    outputs: Sequence[TensorType],
    callee: Callable[..., Any] | None,
) -> Callable[..., Any]:
    """A site whose arguments other than tensors may differ from those of the recorded step.

    The first time that it gets some, with tensors of these shapes, the function runs on DTensors as well, where it must not
    move anything: arguments of which this is not true belong to another step than the recorded one.

    Args:
        where: the file and line.
        function: the recorded torch function; ``inputs``, ``outputs``: of its tensors, in order.
        callee: for sites that are no calls: what runs there.
    """
    return native_static().CheckedCall(callee, _Arguments(where, function, inputs, outputs, callee).accept)


class _Arguments:
    """Those that a site may get, as of :func:`checked_call`."""

    def __init__(
        self,
        where: str,
        function: Any,
        inputs: Sequence[TensorType],
        outputs: Sequence[TensorType],
        callee: Callable[..., Any] | None,
    ) -> None:
        self.where, self.function, self.callee = where, function, callee
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self._known: set[Any] = set()

    def accept(self, f: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called for arguments that differ from those of the last calls. Raises UnrecordedError."""
        key = _function(f), _described(args), _described(kwargs)
        if key in self._known:
            return
        self._check(f if self.callee is None else self.callee, args, kwargs)
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known.add(key)

    def _check(self, called: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Raises UnrecordedError. No communication."""
        seen = _SeesArguments(self)
        state = random_state()
        try:
            with torch.no_grad(), with_torch_function(), seen:
                called(*args, **kwargs)
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, AssertionError) as problem:
            raise UnrecordedError(f"{self.where}: {problem}") from problem  # eager mode raises it again
        finally:
            set_random_state(state)  # the call itself draws
        if not seen.is_checked:
            raise UnrecordedError(f"{self.where}: {self.function} was not called")


class _SeesArguments(TorchFunctionMode):
    """Checks the one torch function that runs inside of it, and runs it on copies of its tensors."""

    def __init__(self, site: _Arguments) -> None:
        super().__init__()
        self.site = site
        self.is_checked = False

    def __torch_function__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        site = self.site
        if func != site.function or self.is_checked:
            raise UnrecordedError(f"{site.where}: {_name(func)} in place of {_name(site.function)}")
        self.is_checked = True
        with no_torch_function():
            copies = [torch.Tensor.clone] * len(site.inputs)  # the function may write to them
            whole = [lambda x, kind=kind: kind.to_global(x, "check") for kind in site.inputs]
            (given, given_by_name), (again, again_by_name) = (
                map_in_order(map_in_order((args, kwargs or {}), copies), whole) for _ in range(2)
            )
            where = f"{site.where}: {_name(func)}"
            entry = entries().get(func)
            if entry is not None and entry.is_local is not None:
                if not entry.is_local(*given, **given_by_name):
                    raise UnrecordedError(f"{where} gets other arguments than in the recorded step")
                return func(*args, **(kwargs or {}))
            with _OnlyLocalOps(where):
                result = func(*given, **given_by_name)
            local = run_on_locals(func, again, again_by_name, result, False)
            map_in_order(result, [kind.to_local for kind in site.outputs])
        if local is not LocalRun.SAME:
            raise UnrecordedError(f"{where} returns {local.value}, given other arguments")
        return result


class _OnlyLocalOps(ObservedOps):
    """Refuses ops on DTensors that do not run on the local tensors as they are, or draw random numbers."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where

    def __torch_dispatch__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if is_random or not self.runs_on_locals(func, args, kwargs or {}):
            raise UnrecordedError(f"{self._where} gets other arguments than in the recorded step")
        return func(*args, **(kwargs or {}))


def _name(function: Any) -> str:
    return getattr(function, "__name__", str(function))


def _function(f: Any) -> Any:
    """A method of a tensor by what it is, and the sizes of the tensor."""
    if type(f) is types.BuiltinMethodType:
        return f.__name__, type(f.__self__), _described(f.__self__)
    return (f.__func__, _described(f.__self__)) if type(f) is types.MethodType else _described(f)


def _described(value: Any) -> Any:
    """What decides about an argument: shapes of tensors, and fractions only as such."""
    kind = type(value)
    if kind is int or kind is str or value is None:
        return value
    if isinstance(value, torch.Tensor):
        return value.shape
    if kind is float:
        return (float, value if value in (0.0, 1.0) else None)
    if isinstance(value, list | tuple):
        return kind, *map(_described, value)
    if kind is slice:
        return slice, _described(value.start), _described(value.stop), _described(value.step)
    if kind is dict:
        return dict, *((name, _described(item)) for name, item in value.items())
    return kind, value if kind.__hash__ is not None else object()  # which is checked each time

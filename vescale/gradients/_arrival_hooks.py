"""``ArrivalHooks``: the hooks by which autograd reports the gradients of one parameter."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from vescale.compat import ArrivalCount, HookGate, ParameterRow, stop_counting_gradients, versions
from vescale.errors import UnsupportedParameterError

# The attribute of a parameter that owns its ``ArrivalHooks``.
_HOOKS = "_vescale_hooks"


class ArrivalHooks:
    """Two hooks: one before gradients are accumulated, because any parameter may be the first of a backward, and one after.
    What they have nothing to do for costs no call into Python: the first one is behind a gate, the second one can be muted.

    The garbage collector cannot traverse references held by post-accumulate hooks or by gated hooks. If such a hook
    references its parameter, as the hooks of a reducer do, the cycle is never collected. The hooks therefore hold only a
    weak reference to this object; an attribute of the parameter owns it.

    Args:
        parameter: a leaf; a frozen one may be unfrozen later.
        begin: called with each gradient before it is accumulated, or returned by ``torch.autograd.grad``, unless the gate is
            shut.
        take: called with the parameter after its gradient has been accumulated, unless it is muted (:meth:`notify`).
    """

    def __init__(
        self,
        parameter: torch.Tensor,
        begin: Callable[[torch.Tensor], torch.Tensor | None],
        take: Callable[[Any], None],
        gate: HookGate,
    ) -> None:
        self._parameter, self._gate = parameter, gate
        self.begin, self.take = begin, take
        others = getattr(parameter, _HOOKS, None)
        self._others = others if isinstance(others, ArrivalHooks) else None
        setattr(parameter, _HOOKS, self)
        self._handle: Any = None
        with _trainable(parameter):
            self._begin_handle = parameter.register_hook(functools.partial(_begin, weakref.ref(self)))
            gate.guard(parameter)

    def __reduce__(self) -> Any:
        return OrderedDict, ()  # copies have no hooks; a pickled parameter can be loaded without this package

    def notify(self, is_notified: bool) -> None:
        """Set whether ``take`` is called; at first it is not."""
        if not is_notified and self._handle is not None:
            self.count(None)
            self._handle.remove()
            self._handle = None
        elif is_notified and self._handle is None:
            with _trainable(self._parameter):
                hook = functools.partial(_take, weakref.ref(self))
                self._handle = self._parameter.register_post_accumulate_grad_hook(hook)

    def count(self, arrivals: ArrivalCount | None, index: int = 0) -> None:
        """Have the hook after accumulation count in C++, as this slot, what needs no call of ``take``; None: nothing."""
        if arrivals is None:
            stop_counting_gradients(self._parameter)
        elif self._handle is not None:
            arrivals.attach(self._parameter, index)

    def remove(self) -> None:
        self._gate.release(self._parameter)
        self._begin_handle.remove()
        self.notify(False)
        if getattr(self._parameter, _HOOKS, None) is self:
            if self._others is None:
                delattr(self._parameter, _HOOKS)
            else:
                setattr(self._parameter, _HOOKS, self._others)


class HooksOfPrograms(OrderedDict[int, Callable[[torch.Tensor], None]]):
    """The hooks for accumulated gradients of a parameter whose gradient is completed at the end of a backward.

    It takes the place of ``parameter._post_accumulate_grad_hooks``, whose items autograd calls: hooks of this package. Hooks
    of programs (``register_post_accumulate_grad_hook``) are kept aside, and called when the complete gradient is there.

    Args:
        parameter: of which no program has registered such a hook yet.
        waiting: of all parameters whose gradients are completed together: by id, those that have hooks of programs.

    Attributes:
        of_programs: the hooks that are kept aside, by number.
    """

    def __init__(self, parameter: torch.Tensor, waiting: dict[int, HooksOfPrograms]) -> None:
        super().__init__()
        self.of_programs: OrderedDict[int, Callable[[torch.Tensor], None]] = OrderedDict()
        self._parameter, self._waiting = weakref.ref(parameter), waiting
        self._before: tuple[weakref.ref[torch.Tensor] | None, tuple[int, ...]] | None = None

    @classmethod
    def of(cls, parameter: torch.Tensor, waiting: dict[int, HooksOfPrograms]) -> None:
        if not parameter._post_accumulate_grad_hooks:
            with _trainable(parameter):
                parameter._post_accumulate_grad_hooks = cls(parameter, waiting)

    def __setitem__(self, number: int, hook: Callable[[torch.Tensor], None]) -> None:
        if isinstance(hook, functools.partial) and hook.func is _take:
            super().__setitem__(number, hook)
            return
        self.of_programs[number] = hook
        self._waiting[id(self)] = self

    def __contains__(self, number: object) -> bool:
        return number in self.of_programs or super().__contains__(number)

    def __delitem__(self, number: int) -> None:
        if number not in self.of_programs:
            super().__delitem__(number)
            return
        del self.of_programs[number]
        if not self.of_programs:
            self._waiting.pop(id(self), None)

    def __reduce__(self) -> Any:
        return OrderedDict, ()

    def begin(self) -> None:
        """A backward begins, after one whose gradients were completed."""
        parameter = self._parameter()
        if parameter is not None and self._before is None:
            gradient = parameter.grad
            self._before = (None, ()) if gradient is None else (weakref.ref(gradient), versions(gradient))

    def end(self, is_reduced: bool | None) -> None:
        """Gradients are complete: call the hooks if this one was accumulated since. ``is_reduced``: whether it is the result
        of a reduction; None: it is not reduced, and was complete when it arrived."""
        parameter, before = self._parameter(), self._before
        self._before = None
        gradient = parameter.grad if parameter is not None else None
        if parameter is None or before is None or gradient is None:
            return
        known, was = before
        if is_reduced is None:
            is_reduced = known is None or known() is not gradient or was != versions(gradient)
        if is_reduced:
            for hook in tuple(self.of_programs.values()):
                hook(parameter)

    def leave(self) -> None:
        """Autograd calls all of them again."""
        self._waiting.pop(id(self), None)
        for number, hook in self.of_programs.items():
            super().__setitem__(number, hook)
        self.of_programs.clear()


def hooks_of_programs(parameter: torch.Tensor) -> list[Callable[[torch.Tensor], torch.Tensor | None]]:
    """What has been given to ``parameter.register_hook`` by others than this package."""
    return [hook for hook in (parameter._backward_hooks or {}).values() if not _is_own(hook)]


def refuse_hooked_nodes(parameters: ParameterRow, names: Iterable[str], *, before: bool) -> None:
    """Raises UnsupportedParameterError where a program has hooked the node of a parameter in a graph: such a hook runs
    before gradients are reduced over ranks, or, where graphs have the gathered parameter, never. ``before``: those that run
    before the gradient is accumulated are refused, too."""
    index = parameters.first_hooked(before=before)
    if index < 0:
        return
    raise UnsupportedParameterError(
        f"a hook is registered on the AccumulateGrad node of parameter {list(names)[index]!r} of shape "
        f"{tuple(parameters.tensors[index].shape)}: it would run without the complete gradient, or never, because "
        "ranks reduce it later. Expected parameter.register_post_accumulate_grad_hook(hook), which finds it in "
        "parameter.grad, or parameter.register_hook(hook), which may change it"
    )


_OWN = __name__.partition(".")[0] + "."


def _is_own(hook: Any) -> bool:
    return str(getattr(getattr(hook, "func", hook), "__module__", "")).startswith(_OWN)


class StepHooks:
    """The hooks that programs have registered on parameters, before and after their gradients are accumulated: for a step of
    several backwards, at the end of which they run once.

    Attributes:
        parameters: those that have hooks.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.parameters: list[torch.Tensor] = []
        self._found: list[tuple[Any, dict[int, Any]]] = []  # tables of hooks, and the programs' in them
        for parameter in parameters:
            before: Any = parameter._backward_hooks
            after: Any = parameter._post_accumulate_grad_hooks
            if isinstance(after, HooksOfPrograms):
                after = after.of_programs
            if not before and not after:
                continue
            tables = before, after
            found = [{key: hook for key, hook in (table or {}).items() if not _is_own(hook)} for table in tables]
            if any(found):
                self.parameters.append(parameter)
                self._found += zip(tables, found)

    @contextlib.contextmanager
    def muted(self) -> Iterator[None]:
        for table, hooks in self._found:
            for key in hooks:
                del table[key]
        try:
            yield
        finally:
            for table, hooks in self._found:
                if hooks:
                    table.update(hooks)

    @torch.no_grad()
    def run(self, earlier: Sequence[torch.Tensor | None]) -> None:
        """Call them with the gradients of the step, in ``.grad``, which are added to ``earlier`` ones."""
        for parameter, before, (_, hooks), (_, after) in zip(
            self.parameters, earlier, self._found[::2], self._found[1::2], strict=True
        ):
            gradient = parameter.grad
            if gradient is None:
                parameter.grad = before
                continue
            for hook in tuple(hooks.values()):
                changed = hook(gradient)
                gradient = gradient if changed is None else changed
            parameter.grad = gradient if before is None else before.add_(gradient)
            for hook in tuple(after.values()):
                hook(parameter)


def _begin(hooks: weakref.ref[ArrivalHooks], gradient: torch.Tensor) -> torch.Tensor | None:
    found = hooks()
    return None if found is None else found.begin(gradient)


def _take(hooks: weakref.ref[ArrivalHooks], parameter: torch.Tensor) -> None:
    found = hooks()
    if found is not None:
        found.take(parameter)


@contextlib.contextmanager
def _trainable(parameter: torch.Tensor) -> Iterator[None]:
    """Hooks can only be registered while a parameter requires a gradient; they stay when it is frozen again."""
    requires_grad = parameter.requires_grad
    parameter.requires_grad_(True)
    yield
    parameter.requires_grad_(requires_grad)

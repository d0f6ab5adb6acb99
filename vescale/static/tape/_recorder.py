"""``TapeRecorder``: a recorded step as a row of calls, with the values that they take and return."""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.compat import local_of, native_tape, no_torch_function, tensors_in
from vescale.runtime import Frame, Placing, Stages
from vescale.static._hidden_tensors import hidden_slots
from vescale.static._record import Recorder
from vescale.static._repeated_layers import RepeatedLayers
from vescale.static._step_records import Boundary, Call, TensorRecord, Value
from vescale.static.tape._arguments import Arguments


@dataclass(frozen=True)
class CalledIn:
    """Where a call stands in for a function of the model: the module that runs."""

    module: str


@dataclass(eq=False)
class CallEvent:
    """A torch function.

    Attributes:
        settings: of gradients and autocast.
        results: numbers of the tensors that it returned.
        writes: which tensor among the arguments has become which value.
    """

    call: Call
    module: str
    arguments: Arguments
    settings: tuple[bool, ...]
    results: tuple[int, ...] = ()
    writes: tuple[tuple[int, int], ...] = ()


@dataclass(eq=False)
class BoundaryEvent:
    """An entry of the plan that brings a tensor to other placements."""

    boundary: Boundary
    module: str
    arguments: Arguments
    settings: tuple[bool, ...]
    result: int


@dataclass(eq=False)
class ModuleEvent:
    """The call of a module: its own events follow, up to number ``end``."""

    path: str
    arguments: Arguments
    settings: tuple[bool, ...]
    inputs: Sequence[TensorRecord]
    outputs: Sequence[TensorRecord] = ()
    results: tuple[int, ...] = ()
    end: int = -1


Event = CallEvent | BoundaryEvent | ModuleEvent


class _NoTree:
    """In place of a call tree: functions of the model are not followed."""

    def __init__(self, frames: Sequence[Frame]) -> None:
        self._frames = frames
        self.functions: dict[types.CodeType, dict[str, Any]] = {}
        self.forwards: dict[str, Any] = {}
        self.decided: list[Any] = []
        self.applied: list[Any] = []
        self.has_exchanged_code = False
        self.running = None
        self.selections: Any = None
        self.on_function: Any = None

    def site(self, _: types.FrameType) -> tuple[Any, bool]:
        return (CalledIn(self._frames[-1].path), 0, 0), True

    def paused(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def around(self, _: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        pass


class TapeRecorder(Recorder):
    """A :class:`Recorder` that follows no functions of the model, and keeps the order of all calls.

    Attributes:
        events: in order; those of a module follow it.
        input_numbers, output_numbers: of the forward's tensors; -1: a plain tensor that no call has made.
    """

    def __init__(
        self,
        frames: Sequence[Frame],
        names: Callable[[], dict[int, str]],
        is_elsewhere: Callable[[str, Iterable[nn.Module]], bool],
        layers: RepeatedLayers,
    ) -> None:
        super().__init__(frames, names, is_elsewhere, layers)
        self.tree: Any = _NoTree(frames)
        self.events: list[Event] = []
        self.input_numbers: list[int] = []
        self.output_numbers: list[int] = []
        self.numbers: dict[Value, int] = {}
        self._plain: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self.num_values = 0
        self._views: dict[int, int] = {}
        self._by_memory: dict[Any, int] = {}  # the last number of each form of memory
        self._settings = native_tape().settings

    # Numbers of tensors

    def _next(self) -> int:
        self.num_values += 1
        return self.num_values - 1

    def number_of(self, x: torch.Tensor) -> int | None:
        """Of a tensor that is an input, a parameter, or the result of a call."""
        if not isinstance(x, DTensor):
            known = self._plain.get(id(x))
            return known[1] if known is not None and known[0]() is x else None
        is_made = getattr(x, "_vescale_value", None) is not None or bool(self.name_of(x))
        value = self._value(x)
        number = self.numbers.get(value)
        if number is None:
            number = self.numbers[value] = self._next()
            local = local_of(x)
            key = None if local.is_meta else (local.data_ptr(), local.shape, local.stride())
            if not is_made and key in self._by_memory:  # a unit has made it
                self._views[number] = self._by_memory[key]
            self._by_memory[key] = number
        return number

    def _number_of_result(self, x: torch.Tensor) -> int:
        number = self.number_of(x)
        if number is None:
            number = self._next()
            self._plain[id(x)] = weakref.ref(x), number
        return number

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = list(tensors_in((args, kwargs)))
        for x in given:
            if isinstance(x, DTensor):
                self._value_of_result(x)
        self.input_numbers = list(map(self._number_of_result, given))
        result = super().run(forward, args, kwargs)
        with no_torch_function():
            hidden = () if "" in self.problems else (slot.get() for slot in hidden_slots(result))
            numbers = list(map(self.number_of, (*tensors_in(result), *hidden)))
            self.output_numbers = [-1 if number is None else self._views.get(number, number) for number in numbers]
            self._refuse_unseen(tensors_in(result), None)
            if self.recomputes:
                self.problems.setdefault("", "checkpointed functions are not compared call by call")
        return result

    def _value_of_result(self, x: DTensor) -> Value:
        """An input stays the value that it got first."""
        known: Value | None = getattr(x, "_vescale_value", None)
        if known is not None and known in self.numbers and not self.events:
            return known
        return super()._value_of_result(x)

    def _refuse_unseen(self, tensors: Iterable[torch.Tensor], frame: types.FrameType | None) -> None:
        path = self._frames[-1].path
        line = "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}: "
        for x in tensors:
            if isinstance(x, DTensor) and not self._is_seen(x):
                self.problems.setdefault(
                    path, f"{line}a tensor comes from another thread, another step, or compiled code"
                )
            elif isinstance(x, DTensor) and not self._is_made_here(x):
                self.problems.setdefault(path, f"{line}the backward of this function would get local gradients")

    def _is_made_here(self, x: torch.Tensor) -> bool:
        """Whether no function of autograd that Python defines, outside of torch functions, stands behind a tensor."""
        node = x.grad_fn
        return node is None or node in self._nodes or not isinstance(node, torch.autograd.function.BackwardCFunction)

    # Events

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], caller: types.FrameType) -> Any:
        with no_torch_function():
            arguments, settings = Arguments(args, kwargs, self.number_of, self._views), self._settings()
            given = list(tensors_in((args, kwargs)))
            before = list(map(self.number_of, given))
        number, module = len(self.calls), self._frames[-1].path
        try:
            result = super()._call(func, args, kwargs, caller)
        except BaseException:
            self.problems.setdefault(module, f"{getattr(func, '__name__', func)} raised an error")
            raise
        with no_torch_function():
            event = CallEvent(self.calls[number], module, arguments, settings)
            event.results = tuple(map(self._number_of_result, tensors_in(result)))
            event.writes = tuple(
                (place, new)
                for place, (x, old) in enumerate(zip(given, before, strict=True))
                if (new := self.number_of(x)) != old and new is not None
            )
            self.events.append(event)
        return result

    def boundary(self, placing: Placing, x: DTensor, stages: Stages, is_shared: bool) -> DTensor:
        with no_torch_function():
            is_known = getattr(x, "_vescale_value", None) is not None or bool(self.name_of(x))
            arguments = Arguments((x,), {}, self.number_of if is_known else lambda _: None, self._views)
        made = super().boundary(placing, x, stages, is_shared)
        with no_torch_function():
            found = self.boundaries[placing][-1][-1]
            result = self._number_of_result(made)
            path = placing.instruction.path
            self.events.append(BoundaryEvent(found, path, arguments, self._settings(), result))
        return made

    def call_module(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        with no_torch_function():
            arguments = Arguments((args, kwargs), {}, self.number_of, self._views)
            inputs = [self._record(x) for x in tensors_in((args, kwargs))]
        event = ModuleEvent(path, arguments, self._settings(), inputs)
        self.events.append(event)
        result = super().call_module(path, module, args, kwargs)
        with no_torch_function():
            event.outputs = [self._record(x) for x in tensors_in(result)]
            event.results = tuple(map(self._number_of_result, tensors_in(result)))
            event.end = len(self.events)
        return result

    def events_outside(self, paths: frozenset[str]) -> Iterator[Event]:
        """All events but those inside of modules at ``paths``, and the calls of other modules."""
        place = 0
        while place < len(self.events):
            event = self.events[place]
            place += 1
            if not isinstance(event, ModuleEvent):
                yield event
            elif event.path in paths:
                yield event
                place = event.end

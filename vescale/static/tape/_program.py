"""``TapeProgram``: a static forward in which the model's own code runs, and a cursor compares every call."""

from __future__ import annotations

import copy
import functools
import gc
import os
import sys
import time
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from vescale.compat import map_tensors, native_tape, no_torch_function, tensors_in, with_torch_function
from vescale.errors import StaticStepError
from vescale.ir import Redistribute
from vescale.runtime import Placing, Runtime
from vescale.static._actions import Eager, ReadSizes, TakeSizes, name_of
from vescale.static._call_site_functions import EagerCall, map_in_order
from vescale.static._early_inputs import Entered
from vescale.static._gradients import is_whole
from vescale.static._guards import Guards
from vescale.static._hidden_tensors import hidden_slots
from vescale.static._local_parameter import LocalParameter
from vescale.static._local_run import LocalRun
from vescale.static._placing import PlacedTensor, leaf_of
from vescale.static._program import StaticProgram, _in_unit, handed_out, on_dtensors
from vescale.static._tensor_type import UnrecordedError, types_of
from vescale.static._units import UnitForward
from vescale.static.tape._analysis import RecordedTape
from vescale.static.tape._checks import check_of, needs_sizes
from vescale.static.tape._recorder import BoundaryEvent, CallEvent, ModuleEvent

_LOCAL, _READ_SIZES, _TAKE_SIZES, _PYTHON = range(4)
_NOTHING, _NUMBERS, _SIZES = range(3)
_READERS = {
    torch.Tensor.shape.__get__: 0,  # type: ignore[attr-defined]
    torch.Tensor.size: 1,
    torch.Tensor.__len__: 2,
    torch.Tensor.numel: 3,
    torch.Tensor.nelement: 3,
    torch.numel: 3,
}
_PLAIN = frozenset((type(None), bool, int, float, str))


class _Cursor(TorchFunctionMode):
    """The function mode of a static forward, in C++."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        self.__torch_function__ = native_tape().make_cursor(weakref.ref(self), run)  # type: ignore[method-assign]


class _Place:
    """An entry of the plan at a module's boundary: the cursor carries it out, if it is the next one on the tape.

    Attributes:
        index: which input or output, as in the instruction.
    """

    def __init__(self, placing: Placing, program: TapeProgram) -> None:
        self.index = placing.index
        self._placing, self._program = placing, program
        self._moves = isinstance(placing.instruction.op, Redistribute)

    def __call__(self, value: Any, placed: Any = None) -> Any:
        if not self._moves or type(value) in _PLAIN:
            return value
        if isinstance(value, torch.Tensor):
            return self._program.run_of_step.step(self._placing, (value,))
        return map_tensors(lambda x: self._program.run_of_step.step(self._placing, (x,)), value)


class _Unit(UnitForward):
    """A unit whose hooks run aside of the cursor."""

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def inside(*args: Any, **kwargs: Any) -> Any:
            with with_torch_function():
                return forward(*args, **kwargs)

        with no_torch_function():
            return super().run(inside, args, kwargs)


class TapeProgram(StaticProgram):
    """What a recorded step became.

    Attributes:
        run_of_step: the forward that runs, in C++.
    """

    def __init__(self, runtime: Runtime, model: nn.Module, taped: RecordedTape, guards: Guards) -> None:
        self.taped = taped
        # What the tape holds must not hold the program: the garbage collector does not look into C++.
        self._weak = weakref.ref(self)
        self._tape = native_tape().Tape()
        self._tape.num_values = taped.num_values
        self.run_of_step: Any = native_tape().Run(self._tape, _left)
        self._cursor = _Cursor(self.run_of_step)
        self._given_out = frozenset((*taped.inputs, *taped.outputs, *taped.names.values()))
        self._with_boundary: set[str] = set()
        self._on_dtensors: list[tuple[str, str, str]] = []
        super().__init__(runtime, model, taped.recorded, guards)
        if self.is_static:
            self._add_entries()
            self._prepare_names(model)
        self.taped = replace(taped, events=(), actions={})  # which are on the tape now

    def eager_calls(self) -> Iterator[tuple[str, str, str]]:
        yield from self._on_dtensors

    # Building

    def _add_entries(self) -> None:
        conversions: dict[Any, Any] = {}
        checks: dict[Any, Any] = {}
        for event in self.taped.events:
            if isinstance(event, CallEvent):
                self._add_call(event, checks)
            elif isinstance(event, BoundaryEvent):
                self._add_boundary(event, conversions)
            else:
                self._add_module(event)

    def _add(
        self,
        function: Any,
        event: Any,
        action: int,
        results: Sequence[int],
        callable: Any = None,
        reader: int = 0,
        factors: Sequence[int] = (),
        check: int = _NOTHING,
        accept: Any = None,
        writes: Sequence[tuple[int, int]] = (),
    ) -> None:
        found = event.arguments
        numbers = {_NOTHING: None, _NUMBERS: tuple(found.numbers), _SIZES: tuple(found.sizes)}[check]
        self._tape.add(
            function, found.args, found.kwargs, event.settings, action, reader, tuple(factors), callable, check, accept,
            numbers, tuple(results), tuple(writes),
        )  # fmt: skip

    def _add_call(self, event: CallEvent, checks: dict[Any, Any]) -> None:
        call, mesh = event.call, self.runtime.mesh
        action = self.taped.actions.get(call)
        common: dict[str, Any] = {"results": event.results, "writes": event.writes}
        if isinstance(action, ReadSizes):
            self._add(
                call.function, event, _READ_SIZES, reader=_READERS[call.function], factors=action.factors, **common
            )
            return
        inputs, outputs = types_of(call.inputs, mesh), types_of(call.outputs, mesh)
        if isinstance(action, Eager):
            module = self._modules[event.module]
            local = self._local(action, event.module)
            run = EagerCall(
                functools.partial(_require_mode, self._weak),
                module,
                event.module,
                call.function,
                inputs,
                outputs,
                None,
                local,
            )
            if local is None:
                self._on_dtensors.append((event.module, name_of(call.function), action.reason))
                self.needs_mode = self._used_mode = True
            self._add(call.function, event, _PYTHON, callable=functools.partial(_call, run), **common)
            return
        found = event.arguments
        records = (*call.inputs, *call.outputs)
        grads = [p for r in records if r.value is not None for p in r.value.grads | r.grads]
        whole = all(is_whole(p, mesh) for p in [*(r.placements for r in records), *grads])
        check, accept = _NOTHING, None
        of_sizes = needs_sizes(call.function, found.has_whole_numbers)
        if (found.numbers or of_sizes) and not whole:
            check = _SIZES if of_sizes else _NUMBERS
            expected = LocalRun.TAKES_SIZES if isinstance(action, TakeSizes) else LocalRun.SAME
            key = call.function, inputs, outputs, expected
            accept = checks.get(key)
            if accept is None:
                accept = checks[key] = check_of(*key)
        if isinstance(action, TakeSizes):
            self._add(call.function, event, _TAKE_SIZES, factors=action.factors, check=check, accept=accept, **common)
        else:
            self._add(call.function, event, _LOCAL, check=check, accept=accept, **common)

    def _add_boundary(self, event: BoundaryEvent, conversions: dict[Any, Any]) -> None:
        boundary, mesh = event.boundary, self.runtime.mesh
        if event.arguments.args[0][1:] == (event.result,):  # it has these placements
            self._add(boundary.placing, event, _PYTHON, [-1], _unmoved)
            return
        (before,), (after,) = types_of([boundary.input], mesh), types_of([boundary.output], mesh)
        key = boundary.placing, before, after
        leaf = conversions.get(key)
        if leaf is None:
            leaf = conversions[key] = leaf_of(boundary.placing, PlacedTensor(before, after))
        self._add(boundary.placing, event, _PYTHON, [event.result], functools.partial(_place, self._weak, leaf))

    def _add_module(self, event: ModuleEvent) -> None:
        module, mesh = self._modules[event.path], self.runtime.mesh
        types = types_of(event.inputs, mesh), types_of(event.outputs, mesh)
        call = on_dtensors(module, event.path, *types, functools.partial(_as_in_eager_mode, self._weak))
        self._add(module, event, _PYTHON, event.results, functools.partial(_call_module, call))

    def _eager_module(self, path: str, module: nn.Module) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return self.run_of_step.step(module, (args, kwargs))

        return call

    def _unrecorded(self, path: str, module: nn.Module) -> Callable[..., Any] | None:
        """A module that the recorded step did not call may run where only the cursor has to see what it does."""
        instructions = self.runtime.instructions.get(path)
        has_entries = bool(getattr(instructions, "inputs", ()) or getattr(instructions, "outputs", ()))
        if not has_entries and not any((id(module), name) in self.units.parameters for name in module._parameters):
            return None
        return super()._unrecorded(path, module)

    def _unit_forward(self, state: Any, module: nn.Module, shown: list[LocalParameter]) -> UnitForward:
        return _Unit(state, module, shown, self._running_units)

    def _placed(
        self, path: str, module: nn.Module, forward: Callable[..., Any], unit: UnitForward | None
    ) -> Callable[..., Any]:
        instructions = self.runtime.instructions.get(path)
        inputs = [_Place(p, self) for p in getattr(instructions, "inputs", ())]
        outputs = [_Place(p, self) for p in getattr(instructions, "outputs", ())]
        if unit is None and not inputs and not outputs:
            return forward
        if not inputs and not outputs:
            assert unit is not None
            return functools.partial(_in_unit, unit, forward)
        local: Any = copy.copy(instructions)
        local.inputs, local.outputs = inputs, outputs
        is_any = len(inputs) == 1 and inputs[0].index is None
        is_whole_output = len(outputs) == 1 and outputs[0].index is None and not local.hands_out
        place_output: Any = outputs[0] if is_whole_output else local.place_outputs if outputs else None

        def placing_output(*args: Any, **kwargs: Any) -> Any:
            result = forward(*args, **kwargs)
            if is_whole_output:
                return place_output(result)
            with no_torch_function():
                return place_output(result)

        inner = forward if place_output is None else placing_output

        def placed(*args: Any, **kwargs: Any) -> Any:
            if is_any and not kwargs:
                args = tuple(map(inputs[0], args))
            elif inputs:
                with no_torch_function():
                    args, kwargs, _ = local.place_inputs(args, kwargs)
            return inner(*args, **kwargs) if unit is None else unit.run(inner, args, kwargs)

        return placed

    # Values

    def _prepare_names(self, model: nn.Module) -> None:
        """Which tensors that modules show are which values."""
        names, numbers = self.units.names_in(model), self.taped.names
        self._bound_numbers: list[int] = []
        self._bound_entries: list[int] = []
        for x, entry in self._shown.tensors():
            number = numbers.get(names.get(id(x), ""))
            if number is not None:
                self._bound_numbers.append(number)
                self._bound_entries.append(entry)
        at_rest = [(names.get(id(p.sharded), ""), p) for p in dict.fromkeys(self.units.parameters.values())]
        self._at_rest = [(numbers[name], p) for name, p in at_rest if name in numbers]
        for parameters in (self._parameters, *(unit.parameters for unit in self._units_made)):
            for parameter in parameters:
                number = numbers.get(parameter.parameter_name)
                if number is not None:
                    parameter.on_show = functools.partial(_bind, self, number)

    def _bind_parameters(self) -> None:
        shown = self._shown.last
        self.run_of_step.bind_all(self._bound_numbers, [shown[entry] for entry in self._bound_entries])
        for number, parameter in self._at_rest:
            self.run_of_step.bind(number, parameter.sharded)

    # Running

    def run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], compiler: Any = None, entered: Entered | None = None
    ) -> Any:
        assert self._root is not None
        run = self.run_of_step
        with no_torch_function():
            if entered is None:
                args, kwargs = map_in_order((args, kwargs), [t.to_local for t in self._inputs])
            else:
                args, kwargs = entered.local_args, entered.local_kwargs
            run.begin()
            self._show()
            try:
                self._bind_parameters()
                given = list(tensors_in((args, kwargs)))
                if len(given) != len(self.taped.inputs):
                    raise UnrecordedError("the inputs have another number of tensors")
                run.bind_all(list(self.taped.inputs), given)
                with with_torch_function(), self._cursor:
                    result = self._root(*args, **kwargs)
            finally:
                self._hide()
            returned = [*tensors_in(result), *(slot.get() for slot in hidden_slots(result))]
            reason = run.end(returned, list(self.taped.outputs))
            if reason:
                raise UnrecordedError(reason)
            del returned, given
            self._refuse_kept()
            self.steps += 1
            self.needs_mode = self._used_mode
            return handed_out(result, self._outputs, self._hidden)

    def _refuse_kept(self) -> None:
        """A local tensor that outlives its forward, where the model keeps it, would later be taken for a whole one."""
        if not self._kept():
            return
        gc.collect()  # what only a cycle of garbage holds is not kept
        for pause in _PAUSES:  # nor what a thread of gloo is about to release, which waits for the interpreter's lock
            if not self._kept():
                return
            time.sleep(pause)
        kept = self._kept()
        if not kept:
            return
        if not self.is_proven:
            self.fail("its forward keeps tensors, in a place that is not known")
            raise UnrecordedError(self.eager_modules[""])
        raise StaticStepError(
            f"the forward has kept {len(kept)} of its tensors (the first of shape {kept[0][1].shape}, this rank's part) in "
            "this step, and none in the recorded one. Keep them in the first step, too, so that the model runs in eager "
            "mode, return them, or parallelize with mode='eager'"
        )

    def _kept(self) -> list[tuple[int, torch.Tensor]]:
        return [found for found in self.run_of_step.held() if found[0] not in self._given_out]


def _left(position: int, reason: str, function: Any, args: Any, kwargs: Any) -> Any:
    """Where a step differs from the tape."""
    called = name_of(function) if callable(function) else "a function"
    raise UnrecordedError(
        f"{line_of_model(sys._getframe(1))}{called} was not recorded at this place (call {position}): "
        f"{reason or 'the step has left its tape'}"
    )


_PAUSES = [0.001 * 2**number for number in range(11)]  # two seconds: other ranks would run the step statically

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep


def line_of_model(frame: types.FrameType | None) -> str:
    """ "file:line " of the innermost function that runs and is neither PyTorch's nor vescale's; "" if there is none."""
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, _OURS, "<")):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} "


def _call(run: EagerCall, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return run(run.function, *args, **kwargs)


def _call_module(call: Callable[..., Any], _: Any, args: tuple[Any, ...], __: Any) -> Any:
    return call(*args[0], **args[1])


def _unmoved(_: Any, args: tuple[torch.Tensor], __: Any) -> torch.Tensor:
    return args[0]


def _bind(program: TapeProgram, number: int, x: torch.Tensor) -> None:
    program.run_of_step.bind(number, x)


def _require_mode(program: weakref.ref[TapeProgram]) -> None:
    found = program()
    assert found is not None
    found._require_mode()


def _as_in_eager_mode(program: weakref.ref[TapeProgram]) -> AbstractContextManager[None]:
    found = program()
    assert found is not None
    return found._as_in_eager_mode()


def _place(held: weakref.ref[TapeProgram], leaf: Any, _: Any, args: tuple[torch.Tensor], __: Any) -> torch.Tensor:
    """Of a conversion that other entries share, the one result."""
    (x,), program = args, held()
    assert program is not None
    if leaf.shared_key is None:
        made: torch.Tensor = leaf.convert(x)
        return made
    key = id(x), leaf.shared_key, torch.is_grad_enabled()
    known = program.shared.get(key)
    if known is not None and known[0] is x and known[2] == x._version:
        return cast(torch.Tensor, known[1])
    made = leaf.convert(x)
    program.shared[key] = x, made, x._version
    return made

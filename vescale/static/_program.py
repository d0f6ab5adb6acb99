"""``TapeProgram``: a static forward, in which the model's own code runs, and a cursor in C++ compares every call."""

from __future__ import annotations

import copy
import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from vescale.compat import (
    CALL_OVERRIDE,
    call_module,
    map_tensors,
    native_tape,
    no_torch_function,
    tensors_in,
    with_torch_function,
)
from vescale.errors import StaticStepError
from vescale.fsdp import ManagedParameter, state_of
from vescale.ir import Redistribute
from vescale.runtime import Frame, Placing, Runtime, current_activation, resumed
from vescale.static._analysis import (
    OF_TENSOR_ITSELF,
    Action,
    Eager,
    LocalFunction,
    ReadSizes,
    RecordedTape,
    TakeSizes,
    check_of,
    local_function,
    name_of,
    needs_sizes,
)
from vescale.static._early_inputs import Entered
from vescale.static._gradients import is_whole
from vescale.static._hidden_tensors import hidden_slots
from vescale.static._record import (
    BoundaryEvent,
    CallEvent,
    Recorder,
    captured_tensors,
    has_attributes,
    kept_tensors,
    line_of_model,
    still_kept,
)
from vescale.static._shown_entries import PlacedTensor, ShownEntries, handed_out
from vescale.static._state import checkpoint_of, is_inside, own_forward
from vescale.static._step_records import SIZE_READERS, Boundary, LocalRun, random_state, set_random_state
from vescale.static._tensor_type import TensorType, UnrecordedError, map_in_order, types_of
from vescale.static._units import LocalParameter, ModelUnits, UnitForward

_LOCAL, _READ_SIZES, _TAKE_SIZES, _PYTHON = range(4)
_NOTHING, _NUMBERS, _SIZES = range(3)
_PLAIN = frozenset((type(None), bool, int, float, str))
_Place = tuple[dict[str, Any], str]  # a module's attributes, and the name of one


# What runs in a static forward where the model calls something that runs on DTensors. The tape holds it, and the garbage
# collector does not look into C++: it has the program by a weak reference.


def on_dtensors(
    program: weakref.ref[TapeProgram], path: str, inputs: Sequence[TensorType], outputs: Sequence[TensorType]
) -> Callable[..., Any]:
    """A module's call as in eager mode, between local tensors, as ``(module, (args, kwargs), {})``."""
    to_global = [functools.partial(kind.to_global, op=path) for kind in inputs]
    to_local = [kind.to_local for kind in outputs]

    def call(_: Any, given: tuple[Any, ...], __: Any) -> Any:
        found = program()
        assert found is not None
        args, kwargs = map_in_order(given, to_global)
        with found.as_in_eager_mode(), with_torch_function():
            result = call_module(found.modules[path], args, kwargs)
        return map_in_order(result, to_local)

    return call


class EagerCall:
    """Runs a torch function on DTensors, in the model's eager mode, or a function of local tensors with the same collectives
    and results.

    Args:
        local: what runs on local tensors (:func:`local_function`); None: nothing.
    """

    def __init__(
        self,
        program: weakref.ref[TapeProgram],
        path: str,
        function: Any,
        inputs: Sequence[TensorType],
        outputs: Sequence[TensorType],
        local: LocalFunction | None,
    ) -> None:
        self._program, self._path, self._local = program, path, local
        name = getattr(function, "__name__", str(function))
        self._to_global = [functools.partial(kind.to_global, op=name) for kind in inputs]
        self._to_local = [kind.to_local for kind in outputs]

    def __call__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        activation, program = current_activation(), self._program()
        assert activation is not None and program is not None
        runtime = activation.runtime
        where = runtime.where(self._path)
        activation.frames.append(Frame(program.modules[self._path], self._path, where=where))
        runtime.timeline.mark(where)
        try:
            found = None if self._local is None else self._local(*args, **kwargs)
            if found is not None:
                return found
            program.require_mode()
            args, kwargs = map_in_order((args, kwargs), self._to_global)
            with with_torch_function():
                result = function(*args, **kwargs)
            return map_in_order(result, self._to_local)
        finally:
            activation.frames.pop()


def _place(held: weakref.ref[TapeProgram], placed: PlacedTensor, _: Any, args: Any, __: Any) -> torch.Tensor:
    """An entry of the plan; of a conversion that other entries share, the one result."""
    (x,), program = args, held()
    assert program is not None
    if placed.shared_key is None:
        made: torch.Tensor = placed.convert(x)
        return made
    key = id(x), placed.shared_key, torch.is_grad_enabled()
    known = program.shared.get(key)
    if known is not None and known[0] is x and known[2] == x._version:
        return cast(torch.Tensor, known[1])
    made = placed.convert(x)
    program.shared[key] = x, made, x._version
    return made


def _unmoved(_: Any, args: tuple[torch.Tensor], __: Any) -> torch.Tensor:
    return args[0]


def refused(reason: str) -> Callable[..., Any]:
    """The call of a module whose call was not recorded."""

    def call(*args: Any, **kwargs: Any) -> Any:
        raise UnrecordedError(reason)

    return call


# The cursor


class _Cursor(TorchFunctionMode):
    """The function mode of a static forward, in C++."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        self.__torch_function__ = native_tape().make_cursor(weakref.ref(self), run)  # type: ignore[method-assign]


def _left(
    program: weakref.ref[TapeProgram],
    position: int,
    reason: str,
    function: Any,
    args: Any,
    kwargs: Any,
    may_observe: bool,
) -> Any:
    """Where a step differs from the tape: the result of a call that only looks at tensors."""
    found = program()
    assert found is not None
    called = name_of(function) if callable(function) else "a function"
    problem = found.difference = found.difference or (
        f"{line_of_model(sys._getframe(1))}{called} was not recorded at this place (call {position}): "
        f"{reason or 'the step has left its tape'}"
    )
    if may_observe:
        try:
            return found.observe(function, args, kwargs)
        except Exception as error:
            raise UnrecordedError(problem) from error
    raise UnrecordedError(problem)


_MOST_OBSERVED = 32  # calls of a forward
_CHANGING = {"__set__", "__delete__", "__setitem__", "backward", "batch_norm", "instance_norm"}
_IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")}


class _Boundary:
    """An entry of the plan at a module's boundary: the cursor carries it out, if it is the next one on the tape.

    Attributes:
        index: which input or output, as in the instruction.
    """

    def __init__(self, placing: Placing, program: TapeProgram) -> None:
        self.index = placing.index
        self._placing, self._program = weakref.ref(placing), program  # as the tape has it
        self._moves = isinstance(placing.instruction.op, Redistribute)

    def __call__(self, value: Any, placed: Any = None) -> Any:
        if not self._moves or type(value) in _PLAIN:
            return value
        if isinstance(value, torch.Tensor):
            return self._program.run_of_step.step(self._placing, (value,))
        return map_tensors(lambda x: self._program.run_of_step.step(self._placing, (x,)), value)


@dataclass(frozen=True)
class SiteOfTape:
    """A call that does not run the function on the local tensors as it is, or an entry of the plan."""

    module: str
    place: tuple[str, int]
    what: Action | Boundary


class TapeProgram:
    """What a recorded step became.

    Attributes:
        modules: of the model, by path.
        guards: what the program depends on; ``state``: what the forward may change in Python.
        units: of the model.
        eager_modules: why modules run in eager mode, by path.
        sites: what is done in place of calls, in order.
        run_of_step: the forward that runs, in C++.
        needs_mode: whether something runs on DTensors, in the model's function mode.
        steps: how many forwards ran.
        is_proven: whether a static step has come to its end; is_again: whether a part of one is computed again in backward.
        writes: what the recorded forward wrote to (:meth:`WrittenTensors.written`).
    """

    def __init__(self, runtime: Runtime, model: nn.Module, taped: RecordedTape, recorder: Recorder) -> None:
        self.runtime, self.guards, self.state = runtime, recorder.guards, recorder.state
        self._model, self._weak = weakref.ref(model), weakref.ref(self)
        self.units = ModelUnits(model)
        self.modules = dict(model.named_modules())
        self.eager_modules = {path: problem for path, problem in taped.problems.items() if problem}
        self.draws, self.grads = taped.draws, taped.grads
        self.needs_mode = self._used_mode = self.is_proven = self.is_again = False
        self.writes, self._plain = recorder.writes, recorder.plain
        self.steps = 0
        self.shared: dict[Any, Any] = {}
        self.sites: list[SiteOfTape] = []
        self.inputs, self.outputs, self.hidden = taped.inputs, taped.outputs, taped.hidden
        self._handed_out = [kind.with_kept_placements() for kind in taped.outputs]
        self._shown = ShownEntries()
        self._parameters: list[LocalParameter] = []  # of the model's own unit
        self._running_units: list[UnitForward] = []
        self._units_made: list[UnitForward] = []
        self._on_dtensors: list[tuple[str, str, str]] = []
        self._root: Callable[..., Any] | None = None
        self.difference = ""  # the first one of this forward
        self._types: dict[int, TensorType] = {}  # of values
        # What calls have returned that are on no tape, with a graph.
        self._observed: list[weakref.ref[torch.Tensor]] = []
        self._num_observed = 0
        self._tape = native_tape().Tape()
        self._tape.num_values = taped.num_values
        self.run_of_step: Any = native_tape().Run(self._tape, functools.partial(_left, self._weak))
        self._cursor = _Cursor(self.run_of_step)
        self._input_numbers, self._output_numbers = list(taped.input_numbers), list(taped.output_numbers)
        # Of values that may outlive the forward: plain ones are the same on every rank, and units keep their parameters.
        self._expected = {*taped.names.values(), *taped.plain}
        self._captured: set[int] = set()  # ids of tensors that functions hold which run again in backward
        self._static_paths = tuple(path for path, problem in taped.problems.items() if not problem)
        if not taped.problems[""]:
            self._build(model, taped)
            self._add_entries(taped)
            self._prepare_names(model, taped.names)

    def fail(self, reason: str) -> None:
        """Run the model in eager mode from now on."""
        self._root, self.eager_modules[""] = None, reason

    @property
    def is_static(self) -> bool:
        return self._root is not None

    def static_modules(self) -> Iterator[str]:
        """Paths of the modules whose forward runs on local tensors."""
        for path in self._static_paths:
            if not any(is_inside(path, outer) for outer in self.eager_modules):
                yield path

    def eager_calls(self) -> Iterator[tuple[str, str, str]]:
        """(module, function, reason) of each call that runs on DTensors."""
        yield from self._on_dtensors

    # Running

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], entered: Entered | None = None) -> Any:
        """The forward on local tensors; takes and returns DTensors. Raises UnrecordedError.

        Args:
            entered: local tensors in place of ``args`` and ``kwargs``; None: there are none.
        """
        assert self._root is not None
        run = self.run_of_step
        with no_torch_function():
            if entered is None:
                args, kwargs = map_in_order((args, kwargs), [t.to_local for t in self.inputs])
            else:
                args, kwargs = entered.local_args, entered.local_kwargs
            run.begin([x for x in (read() for read in self._plain) if isinstance(x, torch.Tensor)])
            self._captured.clear()
            self._observed.clear()
            self.difference, self._num_observed = "", 0
            self._show()
            try:
                self._bind_parameters()
                given = list(tensors_in((args, kwargs)))
                if len(given) != len(self._input_numbers):
                    raise UnrecordedError("the inputs have another number of tensors")
                run.bind_all(self._input_numbers, given)
                del given
                run.note_counts(*self._held_around)
                with with_torch_function(), self._cursor:
                    result = self._root(*args, **kwargs)
            finally:
                self._hide()
            try:
                returned = [*tensors_in(result), *(slot.get() for slot in hidden_slots(result))]
            except ValueError as problem:
                raise UnrecordedError(f"of an output, {problem}") from problem
            reason = run.end(returned, self._output_numbers)
            reason = reason or self.guards.unseen()
            # The model may have caught that it had left.
            has_more = any(map(has_attributes, returned))
            if reason or run.has_left or has_more or any(x() is not None for x in self._observed):
                raise UnrecordedError(self.difference or reason or "a tensor of the output has attributes")
            del returned
            found = handed_out(result, self._handed_out, self.hidden)
            del result
            self._refuse_kept()
            self.steps += 1
            self.needs_mode = self._used_mode
            return found

    @property
    def has_failed(self) -> bool:
        """Whether a torch function has raised an error in the forward, which eager mode may not."""
        return bool(self.run_of_step.has_left)

    def observe(self, function: Any, args: Any, kwargs: Any) -> Any:
        """A call that was not recorded, on DTensors, as eager mode makes it: in a step that otherwise makes the recorded
        ones, it looks at tensors, on one rank, say, which must not leave the tape alone, because it would communicate once
        more. If anything else comes of it, a recorded call gets another tensor, or the forward returns one, or keeps one
        that requires gradients.

        Raises what the call raises, or UnrecordedError where it changes something.
        """
        name = getattr(function, "__name__", "")
        self._num_observed += 1
        is_torch = not isinstance(function, weakref.ref)
        is_in_place = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE or kwargs.get("inplace")
        is_changing = is_in_place or name in _CHANGING or function in OF_TENSOR_ITSELF or "out" in kwargs
        if not is_torch or is_changing or self._num_observed > _MOST_OBSERVED:
            raise UnrecordedError(self.difference)
        given = list(tensors_in((args, kwargs)))
        if not given:  # it sets gradient mode, say
            raise UnrecordedError(self.difference)
        versions, state = [x._version for x in given], random_state()

        def whole(x: torch.Tensor) -> torch.Tensor:
            return x if isinstance(x, DTensor) else self._types[self.run_of_step.numbers_of(x)[-1]].to_global(x, name)

        args, kwargs = map_tensors(whole, args), map_tensors(whole, kwargs)
        # The text of a DTensor is another one; Tensor's reads all values.
        result = repr(args[0]) if name == "__repr__" else function(*args, **kwargs)
        if versions != [x._version for x in given] or not all(map(torch.equal, random_state(), state)):
            set_random_state(state)
            raise UnrecordedError(self.difference)
        self._observed += [weakref.ref(x) for x in tensors_in(result) if x.requires_grad]
        return result

    def checkpointed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What runs when ``function`` is computed again in backward, which is compared with its part of the tape."""
        units = list(self._running_units)
        is_of_plan = type(function).__module__.startswith("vescale.")
        begun: tuple[Any, int, list[list[int]]] | None = None
        self._captured.update(map(id, captured_tensors(function)))

        def follow(given: Any) -> None:
            nonlocal begun
            of_step = self.run_of_step
            with no_torch_function():
                numbers = list(map(of_step.numbers_of, tensors_in(given)))
                if begun is None:
                    begun = of_step.kept(), of_step.position, numbers
                else:  # views of units are known when they have been used
                    begun = *begun[:2], [before or now for before, now in zip(begun[2], numbers, strict=True)]

        @functools.wraps(function, updated=())
        def run(*args: Any, **kwargs: Any) -> Any:
            assert begun is not None
            kept, position, numbers = begun
            again, before, running = kept.again(position), (self.run_of_step, self.is_again), self._running_units[:]
            self.run_of_step, self.is_again = again, True
            self._running_units += units
            try:
                with self._resumed(), ExitStack() as stack:
                    for unit in units:
                        stack.enter_context(unit.shown())
                    with no_torch_function():
                        self._bind_parameters()
                        for found, x in zip(numbers, tensors_in((args, kwargs)), strict=True):
                            again.bind_all(found, [x] * len(found))
                    # What the runtime does around the forward of a module is on no tape.
                    around = no_torch_function() if is_of_plan else with_torch_function()
                    with _Cursor(again), around:
                        return function(*args, **kwargs)
            except UnrecordedError as problem:
                raise StaticStepError(
                    f"a checkpointed function does something else when it is computed again in backward: {problem}"
                ) from problem
            finally:
                self.run_of_step, self.is_again = before
                self._running_units[:] = running

        run.follow = follow  # type: ignore[attr-defined]
        return run

    @contextmanager
    def _resumed(self) -> Iterator[None]:
        activation, model = current_activation(), self._model()
        if activation is not None and activation.static is self:
            yield
            return
        assert model is not None
        with resumed(self.runtime, model, ""), no_torch_function():
            again = current_activation()
            assert again is not None
            again.static = self
            self._show()
            try:
                yield
            finally:
                self._hide()

    def _show(self) -> None:
        self._shown.show()
        try:
            for parameter in self._parameters:
                parameter.show()
        except BaseException:
            self._hide()
            raise

    def _hide(self) -> None:
        self._hide_entries()
        self.shared.clear()

    def _hide_entries(self) -> None:
        if self.writes:
            self._shown.keep_written()
        self._shown.hide()
        for parameter in self._parameters:
            parameter.hide()

    @contextmanager
    def as_in_eager_mode(self) -> Iterator[None]:
        """All modules are as in eager mode: one that runs so may call any other, and use its parameters."""
        self._hide_entries()
        for unit in self._running_units:
            unit.hide()
        try:
            yield
        finally:
            self.show_again()

    def show_again(self) -> None:
        """What modules show, after somebody has set attributes to others."""
        self._shown.show_again()
        for parameter in self._parameters:
            parameter.show_again()
        for unit in self._running_units:
            unit.show_again()

    def require_mode(self) -> None:
        activation = current_activation()
        self.needs_mode = self._used_mode = True
        if activation is None or activation.contexts is None:
            raise UnrecordedError("a function runs on DTensors that did not in the steps before")

    def _refuse_kept(self) -> None:
        """A local tensor that outlives its forward, where the model keeps it, would later be taken for a whole one."""
        kept = still_kept(self._kept)
        if not kept:
            return
        if not self.is_proven:
            self.fail("its forward keeps tensors, in a place that is not known")
            raise UnrecordedError(self.eager_modules[""])
        raise StaticStepError(
            f"the forward has kept {len(kept)} of its tensors (the first of shape {kept[0][1].shape}, this rank's "
            "part) in this step, but none in the recorded one. Keep them in the first step already, so that the "
            "model runs in eager mode, return them, or parallelize with mode='eager'"
        )

    def _kept(self) -> list[tuple[int, torch.Tensor]]:
        """A tensor that was written to is several values. The result has DTensors by now."""
        found = kept_tensors(self.run_of_step, lambda *_: False)
        known = self._captured.union(id(x) for number, x in found if number in self._expected)
        return [(number, x) for number, x in found if id(x) not in known]

    # Values

    def _prepare_names(self, model: nn.Module, numbers: Mapping[str, int]) -> None:
        """Which tensors that modules show are which values."""
        names = self.units.names_in(model)
        self._bound_numbers: list[int] = []
        self._bound_entries: list[int] = []
        places: list[int] = []
        for x, entries in self._shown.tensors():
            number = numbers.get(names.get(id(x), ""))
            if number is not None:
                self._bound_numbers.append(number)
                self._bound_entries.append(entries[0])
                places.append(len(entries))
        at_rest = [(names.get(id(p.sharded), ""), p) for p in dict.fromkeys(self.units.parameters.values())]
        self._at_rest = [(numbers[name], p) for name, p in at_rest if name in numbers]
        inputs = list(dict.fromkeys(number for number in self._input_numbers if number not in self._expected))
        self._expected -= set(self._bound_numbers)
        self._held_around = [*self._bound_numbers, *inputs], [*places, *(0 for _ in inputs)]
        for parameters in (self._parameters, *(unit.parameters for unit in self._units_made)):
            for parameter in parameters:
                number = numbers.get(parameter.parameter_name)
                if number is not None:
                    parameter.on_show = functools.partial(_bind, self._weak, number)

    def _bind_parameters(self) -> None:
        shown = self._shown.last
        self.run_of_step.bind_all(self._bound_numbers, [shown[entry] for entry in self._bound_entries])
        for number, parameter in self._at_rest:
            self.run_of_step.bind(number, parameter.sharded)

    # Building: what modules show

    def _build(self, model: nn.Module, taped: RecordedTape) -> None:
        parameters: dict[int, tuple[list[_Place], DTensor]] = {}
        of_units: dict[ManagedParameter, list[_Place]] = {}
        running: list[tuple[str, nn.Module]] = []
        aside = [*self.eager_modules, *taped.regions]  # their inputs become DTensors, and nothing is changed in them
        for path, module in self.modules.items():
            held = module.__dict__
            outer = next((outer for outer in aside if path != outer and is_inside(path, outer)), None)
            if outer is not None:
                self._shown.add(held, CALL_OVERRIDE, refused(f"the module {path} is called outside of {outer}"))
            elif path in aside:
                self._shown.add(held, CALL_OVERRIDE, functools.partial(_step, self._weak, module))
                self.needs_mode = self._used_mode = True
            elif path in taped.problems:
                running.append((path, module))
            elif self._has_own_entries(path, module):
                self._shown.add(held, CALL_OVERRIDE, refused(f"the module {path} was not recorded"))
            for name, x in [*module._parameters.items(), *module._buffers.items()]:
                of_unit = self.units.parameters.get((id(module), name))
                if of_unit is not None:
                    of_units.setdefault(of_unit, []).append((held, name))
                elif isinstance(x, DTensor):
                    parameters.setdefault(id(x), ([], x))[0].append((held, name))
        names = self.units.names_in(model)
        # As recorded: since then, parameters may have been frozen, or those of other parts of the model.
        requires_grad = self.guards.requires_grad
        for places, x in parameters.values():
            self._shown.add_tensor(x, places, self.grads.get(names[id(x)]) if requires_grad(x) else None)
        for path, module in running:
            state, shown = state_of(module), []
            for parameter in [p for group in state.groups for p in group.parameters] if state is not None else ():
                trains = requires_grad(parameter.sharded)
                grad = self.grads.get(parameter.name) if trains else None
                gathered, places = functools.partial(_gathered, parameter), of_units.get(parameter, [])
                if places:  # else no module of the model has it any more
                    shown.append(LocalParameter(parameter.name, gathered, places, grad, trains))
            checkpoint, forward = checkpoint_of(module), own_forward(module, path)
            if checkpoint is not None:
                forward = checkpoint.around(functools.partial(_seen, self._weak, forward))
            if path == "":
                self._root = forward
                self._parameters += shown  # the hooks of its unit are around all of this
                continue
            unit = None
            if state is not None:
                unit = UnitForward(
                    state, module, shown, self._running_units, functools.partial(_note_views, self._weak)
                )
            if unit is not None:
                self._units_made.append(unit)
            self._shown.add(module.__dict__, CALL_OVERRIDE, self._placed(path, forward, unit))

    def _has_own_entries(self, path: str, module: nn.Module) -> bool:
        """Whether there is more to a module's call than the cursor sees."""
        instructions = self.runtime.instructions.get(path)
        if getattr(instructions, "inputs", ()) or getattr(instructions, "outputs", ()):
            return True
        return any((id(module), name) in self.units.parameters for name in module._parameters)

    def _placed(self, path: str, forward: Callable[..., Any], unit: UnitForward | None) -> Callable[..., Any]:
        """``forward`` between the entries of the plan at the module's boundary, and the hooks of its unit."""
        # None: of a copy of the model, which copies what there is to do.
        instructions = self.runtime.instructions.get(path)
        inputs = [_Boundary(p, self) for p in getattr(instructions, "inputs", ())]
        outputs = [_Boundary(p, self) for p in getattr(instructions, "outputs", ())]
        if not inputs and not outputs:
            return forward if unit is None else functools.partial(_in_unit, unit, forward)
        local: Any = copy.copy(instructions)
        local.inputs, local.outputs = inputs, outputs
        is_any = len(inputs) == 1 and inputs[0].index is None  # of one entry for all inputs
        is_whole = len(outputs) == 1 and outputs[0].index is None and not local.hands_out

        def placing_output(*args: Any, **kwargs: Any) -> Any:
            result = forward(*args, **kwargs)
            if is_whole:
                return outputs[0](result)
            with no_torch_function():
                return local.place_outputs(result)

        inner = placing_output if outputs else forward

        def placed(*args: Any, **kwargs: Any) -> Any:
            if is_any and not kwargs:
                args = tuple(map(inputs[0], args))
            elif inputs:
                with no_torch_function():
                    args, kwargs, _ = local.place_inputs(args, kwargs)
            return inner(*args, **kwargs) if unit is None else unit.run(inner, args, kwargs)

        return placed

    # Building: the tape

    def _add_entries(self, taped: RecordedTape) -> None:
        conversions: dict[Any, Any] = {}
        checks: dict[Any, Any] = {}
        self._types.update(zip(taped.input_numbers, taped.inputs, strict=False))
        used = {*taped.output_numbers, *taped.names.values()}
        missing: list[int] = []
        for position, event in reversed(list(enumerate(taped.events))):
            taken = event.arguments.taken()
            if isinstance(event, CallEvent) and not event.writes and used.isdisjoint(event.results):
                missing.append(position)
            else:
                used.update(number for number in taken if number is not None)
            self._note_types(taken, event)
        for event in taped.events:
            if isinstance(event, CallEvent):
                self._add_call(event, taped.actions.get(event.call), checks)
            elif isinstance(event, BoundaryEvent):
                self._add_boundary(event, conversions)
            else:
                mesh = self.runtime.mesh
                types = types_of(event.inputs, mesh), types_of(event.outputs, mesh)
                call = on_dtensors(self._weak, event.path, *types)
                # Weak, here and of entries of the plan: they may hold the model, and no garbage collector looks into C++.
                self._add(weakref.ref(self.modules[event.path]), event, _PYTHON, event.results, call)
        for position in missing:
            self._tape.let_be_missing(position)

    def _note_types(self, taken: Sequence[int | None], event: Any) -> None:
        """Of the values that an event takes and makes."""
        if isinstance(event, BoundaryEvent):
            results: Sequence[int] = (event.result,)
            given, made = [event.boundary.input], [event.boundary.output]
        else:
            of = event.call if isinstance(event, CallEvent) else event
            results, given, made = event.results, of.inputs, of.outputs
        for numbers, records in ((taken, given), (results, made)):
            if len(numbers) == len(records):
                kinds = zip(numbers, types_of(records, self.runtime.mesh), strict=True)
                self._types.update((number, kind) for number, kind in kinds if number is not None and number >= 0)

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

    def _add_call(self, event: CallEvent, action: Any, checks: dict[Any, Any]) -> None:
        call, mesh = event.call, self.runtime.mesh
        common: dict[str, Any] = {"results": event.results, "writes": event.writes}
        if action is not None:
            self.sites.append(SiteOfTape(event.module, call.place, action))
        if isinstance(action, ReadSizes):
            reader = SIZE_READERS[call.function]
            self._add(call.function, event, _READ_SIZES, reader=reader, factors=action.factors, **common)
            return
        inputs, outputs = types_of(call.inputs, mesh), types_of(call.outputs, mesh)
        if isinstance(action, Eager):
            local = local_function(call.function, inputs, outputs, self.runtime.attention_methods(event.module))
            if local is None:
                self._on_dtensors.append((event.module, name_of(call.function), action.reason))
                self.needs_mode = self._used_mode = True
            run = EagerCall(self._weak, event.module, call.function, inputs, outputs, local)
            self._add(call.function, event, _PYTHON, callable=run, **common)
            return
        found = event.arguments
        records = (*call.inputs, *call.outputs)
        grads = [p for r in records if r.value is not None for p in r.value.grads | r.grads]
        whole = all(is_whole(p, mesh) for p in [*(r.placements for r in records), *grads])
        check, accept = _NOTHING, None
        of_sizes = needs_sizes(call.function, found.has_whole_numbers)
        may_differ = len(found.numbers) > found.num_tensors or found.num_tensors > 1
        if (may_differ or of_sizes) and not whole:
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
            self._add(weakref.ref(boundary.placing), event, _PYTHON, [-1], _unmoved)
            return
        self.sites.append(SiteOfTape(event.module, ("", 0), replace(boundary)))
        (before,), (after,) = types_of([boundary.input], mesh), types_of([boundary.output], mesh)
        key = boundary.placing, before, after
        placed = conversions.get(key)
        if placed is None:
            placed = conversions[key] = PlacedTensor.of(*key)
        self._add(
            weakref.ref(boundary.placing), event, _PYTHON, [event.result], functools.partial(_place, self._weak, placed)
        )


def _step(program: weakref.ref[TapeProgram], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A module that runs in eager mode, or a region: the cursor carries out its call."""
    found = program()
    assert found is not None
    return found.run_of_step.step(weakref.ref(module), (args, kwargs))


def _bind(program: weakref.ref[TapeProgram], number: int, x: torch.Tensor) -> None:
    found = program()
    assert found is not None
    found.run_of_step.bind(number, x)


def _note_views(program: weakref.ref[TapeProgram], tensors: list[torch.Tensor]) -> None:
    found = program()
    assert found is not None
    found.run_of_step.note_views(tensors)


def _gathered(parameter: ManagedParameter) -> DTensor:
    """A parameter of a unit while that computes."""
    x = parameter.unsharded
    if not isinstance(x, DTensor):
        raise UnrecordedError(f"the parameter {parameter.name} is not gathered")
    return x


def _seen(program: weakref.ref[TapeProgram], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The forward of a module that the plan checkpoints, seen by the cursor."""
    found = program()
    assert found is not None
    if found.is_again:  # attributes are what they were when the forward began, but those that show parameters are not
        found.show_again()
    with with_torch_function():
        return forward(*args, **kwargs)


def _in_unit(unit: UnitForward, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return unit.run(forward, args, kwargs)

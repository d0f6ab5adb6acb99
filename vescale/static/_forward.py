"""``StaticForward``: the forward of a model that runs in static mode where it can, and in eager mode otherwise."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import os
import sys
import threading
import types
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.compat import (
    CALL_OVERRIDE,
    GLOBAL_HOOKS,
    containers,
    hides_tensors,
    in_transform,
    is_native,
    local_of,
    native_static,
    no_torch_function,
    note,
    num_function_modes,
    spec_of,
    tensors_in,
)
from vescale.errors import StaticModeWarning, StaticRecordError, kind_of
from vescale.ir import Precision
from vescale.runtime import Activation, Runtime, current_activation, switch_on, write_back
from vescale.static import _hidden_tensors
from vescale.static._call_tree import is_recorded, makes_context_of_another
from vescale.static._early_inputs import EarlyInputs, Entered
from vescale.static._fingerprint import code_digest, globals_digest
from vescale.static._guards import Guards
from vescale.static._held_values import HeldValues
from vescale.static._observed_ops import (
    has_drawn,
    host_random_state,
    random_state,
    set_host_random_state,
    set_random_state,
)
from vescale.static._program import StaticProgram
from vescale.static._record import Recorder
from vescale.static._record_loading import load_step
from vescale.static._record_values import RecordedFunction, RecordedStep
from vescale.static._recorded import recorded
from vescale.static._repeated_layers import RepeatedLayers
from vescale.static._selections import Selections
from vescale.static._state import ModuleStates, problems_of_modules, regions_of
from vescale.static._tensor_type import UnrecordedError
from vescale.static._units import ModelUnits
from vescale.static._written_tensors import WrittenTensors
from vescale.static.tape import TapeProgram, TapeRecorder, recorded_tape

# What distinguishes calls of a model that are recorded separately.


def quick_shape(value: Any, specs: list[Any]) -> Any:
    """What decides about :func:`shape_of`; DTensors by the addresses of their specs, which are added to ``specs``."""
    kind = type(value)
    if kind is DTensor:
        spec = spec_of(value)
        specs.append(spec)
        return id(spec), value.requires_grad
    if kind is tuple or kind is list:
        return kind, *[quick_shape(item, specs) for item in value]
    return shape_of(value)


def shape_of(value: Any) -> Any:
    """Structure of an argument, without sizes other than 0 and 1."""
    if isinstance(value, DTensor):
        small = tuple(size if size < 2 else -1 for size in value.shape)
        return "DTensor", tuple(value.placements), value.dtype, value.device.type, value.requires_grad, small
    if isinstance(value, torch.Tensor):
        return "Tensor", value.dtype, value.device.type, value.requires_grad, value.ndim
    if isinstance(value, list | tuple):
        return type(value), tuple(map(shape_of, value))
    if isinstance(value, dict):
        return type(value), tuple((key, shape_of(item)) for key, item in value.items())
    if isinstance(value, bool | int | float | str | bytes | type(None)):
        return type(value), value
    return type(value), tuple(map(shape_of, tensors_in(value)))


# The first static step of a record that was read: the Python functions that run are compared with the recorded ones.

_FORWARD = os.path.join(os.path.dirname(__file__), "_forward.py")  # where the forward began
_LOOKS_UP_TENSORS = (containers.__file__, _hidden_tensors.__file__)


def _is_of_the_runtime(frame: FrameType | None, fitting: Collection[int]) -> bool:
    """Whether a function runs because a module is being loaded, which happens once in a process, or because tensors are
    looked up in the model's containers. ``fitting``: ids of the code of the model's functions, which call neither."""
    inside_model = False
    while frame is not None and (file := frame.f_code.co_filename) != _FORWARD:
        if file.startswith("<frozen importlib") or (not inside_model and file in _LOOKS_UP_TENSORS):
            return True
        inside_model |= id(frame.f_code) in fitting
        frame = frame.f_back
    return False


@contextmanager
def only_recorded_functions(
    functions: Iterable[RecordedFunction], originals: Mapping[CodeType, CodeType]
) -> Iterator[None]:
    """Inside, a function of the model's that is none of ``functions``, or finds other things in its globals, raises
    StaticRecordError in place of running.

    Args:
        originals: the code of functions that were changed, by that which runs.
    """
    known = {(function.code, function.found) for function in functions}
    fitting: set[int] = set()  # ids of code that runs, and is kept alive by its function
    problems: list[str] = []

    def called(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if id(code) in fitting or not is_recorded(code.co_filename) or makes_context_of_another(frame):
            return
        original = originals.get(code, code)
        if (code_digest(original), globals_digest(original, frame.f_globals)) in known:
            fitting.add(id(code))
            return
        if _is_of_the_runtime(frame.f_back, fitting):
            return
        problems.append(f"{original.co_qualname} ({original.co_filename}:{original.co_firstlineno}) was not recorded")
        raise StaticRecordError(problems[0])

    before, collects = sys.gettrace(), gc.isenabled()
    note("static._forward:process", "sys.settrace", "gc")
    gc.disable()  # callbacks of the garbage collector are no functions of the model
    sys.settrace(called)
    try:
        yield
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
        if problems:  # also where the model has caught it
            raise StaticRecordError(problems[0])


# ``OtherPrograms``: programs of a model that are not in use.

_MAX_OTHERS = 3  # of each kind of call
_MAX_MISSES = 4  # unrecorded steps in succession, after which a program is replaced


class OtherPrograms:
    """Programs that were replaced: their guards did not hold, or several steps in succession took unrecorded branches.

    Args:
        programs: those in use, by the kind of call. One for which no other is left is removed: the next step of its kind is
            recorded.
    """

    def __init__(self, programs: dict[str, StaticProgram]) -> None:
        self._programs = programs
        self._others: dict[str, list[StaticProgram]] = {}

    def exchanged(self, key: str, program: StaticProgram) -> StaticProgram | None:
        """Replace ``program``, whose guards do not hold. Returns a program whose guards hold, or None if there is none: the
        next step is then recorded. If training and evaluation alternate, each is recorded once."""
        others = self._others.setdefault(key, [])
        others[:] = [other for other in others if not other.guards.have_replaced()]
        fitting = next((other for other in others if not other.guards.broken()), None)
        return self._exchange(key, program, fitting, is_kept=not program.guards.have_replaced())

    def note_miss(self, key: str, program: StaticProgram, may_record: bool) -> None:
        """Count a step that took a branch which ``program`` has not recorded. After several in succession, another program
        is tried. When all have failed, and ``may_record`` is set, the next step is recorded."""
        others = self._others.setdefault(key, [])
        if not program.misses:  # it has succeeded since, so that the others are tried again
            for other in others:
                other.misses = 0
        program.misses += 1
        if program.misses < _MAX_MISSES or self._programs.get(key) is not program:
            return
        fitting = next((other for other in others if not other.misses and not other.guards.broken()), None)
        if fitting is not None or may_record:
            self._exchange(key, program, fitting, is_kept=True)
        if fitting is not None:
            fitting.misses = _MAX_MISSES - 1  # if it fails, the next one is tried at once

    def _exchange(
        self, key: str, program: StaticProgram, fitting: StaticProgram | None, is_kept: bool
    ) -> StaticProgram | None:
        others = self._others[key]
        del self._programs[key]
        if fitting is not None:
            others.remove(fitting)
            self._programs[key] = fitting
        if is_kept:
            others.append(program)
        del others[:-_MAX_OTHERS]
        return fitting


# ``Pauses``: while most steps take ways that were not recorded, they run in eager mode at once.

PAUSED = "most of the last steps took branches, or gave functions arguments, that were not recorded"

_NUM_TRIES = 16
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 1024  # steps


class Pauses:
    """Of each kind of call: if more than two thirds of the last 16 tries had to be repeated in eager mode, the next 16 steps
    are not tried. If that goes on afterwards, the pause is twice as long each time, up to 1024 steps."""

    def __init__(self) -> None:
        self._tries: dict[str, deque[bool]] = {}  # whether each failed, since one has
        self._lengths: dict[str, int] = {}  # of the next pause
        self._left: dict[str, int] = {}

    def is_on(self, key: str) -> bool:
        return key in self._left

    def skips(self, key: str) -> bool:
        """Whether the step that begins is one of a pause."""
        left = self._left.get(key)
        if left is None:
            return False
        if left > 1:
            self._left[key] = left - 1
        else:
            del self._left[key]
        return True

    def note(self, key: str, failed: bool) -> None:
        """After a try."""
        tries = self._tries.get(key)
        if tries is None:
            if not failed:
                return
            tries = self._tries[key] = deque(maxlen=_NUM_TRIES)
        tries.append(failed)
        if len(tries) < _NUM_TRIES:
            return
        if not any(tries):
            del self._tries[key]
            self._lengths.pop(key, None)
        elif 3 * sum(tries) > 2 * _NUM_TRIES:
            length = self._left[key] = self._lengths.get(key, _FIRST_PAUSE)
            self._lengths[key] = min(2 * length, _LONGEST_PAUSE)
            tries.clear()


_UNCHECKED = contextlib.nullcontext()
_MAX_PROGRAMS = 8
# What the model's code may raise because it runs on local tensors.
_MAY_BE_OURS = (AssertionError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError)
_STEPS_BEFORE_WARNING = 3
_MAX_KEYS = 64
_STEPS_OF_A_RECORDING = 20  # that run static in the mean, or what is not recorded yet runs in eager mode
_MAX_WAITING = 3  # forwards without a backward, after which a recording is given up


class StaticForward:
    """The forward of the outermost module of a model.

    Args:
        inner: what an entry of the plan has put around the model's own forward; None: nothing.
        record: steps that another process has recorded.

    Attributes:
        programs: by what distinguishes calls; ``compiled``: those for compilers.
        recordings: how many steps were recorded.
        fallbacks: how many steps ran in eager mode, by reason.
        static_steps: how many did not.
        compares_calls: whether all steps are compared call by call (:mod:`vescale.static.tape`), and not only those of which
            nobody can say in advance what their functions do.
    """

    def __init__(
        self,
        runtime: Runtime,
        model: nn.Module,
        inner: Callable[..., Any] | None = None,
        record: Iterable[RecordedStep] = (),
    ) -> None:
        self.runtime, self.inner = runtime, inner
        self._casts = any(isinstance(instruction.op, Precision) for instruction in runtime.program)
        self.model = weakref.ref(model)
        self.programs: dict[str, StaticProgram] = {}
        self.compiled: dict[str, StaticProgram] = {}
        self.recordings = 0
        self.static_steps = 0
        self.compares_calls = False
        self.fallbacks: Counter[str] = Counter()
        self._record_steps = {step.call: step for step in record}
        self._recorders: dict[str, Recorder] = {}
        self._waiting: Counter[str] = Counter()
        # Kinds of calls whose next step goes on a tape, with the functions that ran in the step before, and their globals.
        self._to_tape: dict[str, Mapping[CodeType, dict[str, Any]]] = {}
        self._others, self._pauses = OtherPrograms(self.programs), Pauses()
        # Keys by what takes less time to find out, with the specs whose addresses that has.
        self._keys: dict[Any, tuple[str, list[Any]]] = {}
        self._lock = threading.RLock()
        self._early = EarlyInputs()
        self._draws_on_host = bool(self._record_steps)  # whether a forward draws from Python's or numpy's generators
        self._has_warned = False
        self._layers_differ = False  # though they were taken for repeated ones
        runtime.compiles = runtime.switches_on_later = True
        # Weak: cached local tensors hold parameters, whose hooks hold the runtime, where the garbage collector cannot look.
        runtime.early_inputs = functools.partial(_enter, weakref.ref(self))
        functools.update_wrapper(self, type(model).forward)
        # Of the bound method, as trainers look at it; the method itself would hold the model.
        self.__signature__ = inspect.signature(types.MethodType(type(model).forward, model))

    def enter(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], None] | None:
        """Before the inputs of the model are placed: what its forward gets in their place; None: they are placed."""
        found = self._early.find(args, kwargs)
        if found is None or current_activation() is not None or num_function_modes() or in_transform():
            return None
        program, model = self.programs.get(found[0]), self.model()
        if program is None or not program.is_static or model is None or not native_static().is_installed():
            return None
        if self._pauses.is_on(found[0]) or any(kind == "input" for kind, _ in program.writes or ()):
            return None  # what is written to is the DTensor that an entry makes
        # What the user calls before the forward gets DTensors.
        if len(model.__dict__["_forward_pre_hooks"]) > 1 or any(GLOBAL_HOOKS) or program.guards.broken():
            return None
        return *self._early.enter(found[0], program, found[1], args, kwargs), None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model, activation = self.model(), current_activation()
        assert model is not None
        entered = self._early.take(args, kwargs)
        with self._lock:
            if entered is not None:
                return self._run_entered(model, activation, entered)
            reason = self._why_eager(model, activation, args, kwargs)
            if reason:
                return self._eager(model, reason, args, kwargs)
            assert activation is not None
            key = self._key(args, kwargs)
            if self._pauses.skips(key):
                return self._eager(model, PAUSED, args, kwargs)
            program = self.programs.get(key) or self._finish(model, key) or self._loaded(model, key)
            if program is None:
                return self._record(model, activation, key, args, kwargs)
            if not program.is_static:
                return self._eager(model, program.eager_modules[""], args, kwargs)
            with no_torch_function():
                broken = program.guards.broken()
            if broken:
                other = self._others.exchanged(key, program)
                if other is None:
                    return self._eager(model, broken, args, kwargs)
                program = other
            if program.has_compiled_parts or activation.frames[0].compiler is not None:
                program = self._compiled(model, key, program)
            return self._run(model, activation, key, program, args, kwargs)

    def _run_entered(self, model: nn.Module, activation: Activation | None, entered: Entered) -> Any:
        assert activation is not None
        program: StaticProgram = entered.program
        if activation.frames[0].compiler is not None:
            program = self._compiled(model, entered.key, program)
        return self._run(model, activation, entered.key, program, (), {}, entered)

    def _records_too_often(self) -> bool:
        return self.recordings >= _MAX_PROGRAMS and self.static_steps < _STEPS_OF_A_RECORDING * self.recordings

    def _run(
        self,
        model: nn.Module,
        activation: Activation,
        key: str,
        program: StaticProgram,
        args: Any,
        kwargs: Any,
        entered: Entered | None = None,
    ) -> Any:
        """``entered``: local tensors in place of ``args`` and ``kwargs``."""
        if program.needs_mode:
            switch_on(activation)
        state = random_state() if program.draws else None
        host_state = host_random_state() if self._draws_on_host else None
        mark, python_state = program.units.mark(), program.guards.changed.saved()
        frame = activation.frames[0]
        given = (args, kwargs) if entered is None else (entered.args, entered.kwargs)
        written = WrittenTensors(model, given, program.writes, bool(program.units.parameters))
        activation.static = program
        try:
            if program.is_proven:
                result = program.run(args, kwargs, frame.compiler, entered)
            else:
                with self._checked(program):
                    result = program.run(args, kwargs, frame.compiler, entered)
        except (Exception, UnrecordedError) as problem:
            if not isinstance(problem, UnrecordedError) and (
                program.is_proven or not isinstance(problem, _MAY_BE_OURS)
            ):
                raise  # of the model's own code, as in eager mode
            failed = ""
            if isinstance(problem, UnrecordedError) and program.recorded.has_repeats and not program.is_proven:
                self._layers_differ = True  # in branches between torch functions; each is recorded in the next step
                self.programs.pop(key, None)
            elif isinstance(problem, UnrecordedError):
                self._others.note_miss(key, program, may_record=not self._records_too_often())
                self._pauses.note(key, True)
            elif program.recorded.step is not None:
                for known in [known for known, other in self.programs.items() if other is program]:
                    del self.programs[known]
            else:
                failed = f"{type(problem).__name__} in its first static step: {problem}"
            if state is not None:
                set_random_state(state)
            if host_state is not None:
                set_host_random_state(host_state)
            for restore in python_state:
                restore()
            written.undo(problem)
            activation.static = None
            program.units.return_to(mark)
            del activation.frames[1:]
            placed = None
            if entered is not None:
                args, kwargs, placed = self.runtime.instructions[""].place_inputs(entered.args, entered.kwargs)
            result = self._eager(model, str(problem), args, kwargs)  # may raise the same, which is the model's own then
            if failed:
                program.fail(failed)
            write_back(placed or ())
            return result
        finally:
            activation.static = None
        if entered is None and not program.has_compiled_parts:
            self._early.remember(key, args, kwargs, frame)
        if program.writes is None:
            program.writes = written.written()
        program.is_proven, program.misses = True, 0
        self._pauses.note(key, False)
        self.static_steps += 1
        return result

    def _compiled(self, model: nn.Module, key: str, program: StaticProgram) -> StaticProgram:
        """The same with functions of which compilers see what they can compile. Itself where that has failed, where parts
        run again in backward, and in the first step of a record that was read, which is compared with it."""
        recorded_step = program.recorded
        if isinstance(program, TapeProgram) or recorded_step.recomputes:
            return program
        if recorded_step.step is not None and not program.is_proven:
            return program
        found = self.compiled.get(key)
        if found is None or found.guards is not program.guards:
            found = StaticProgram(self.runtime, model, program.recorded, program.guards, compiles=True)
            self.compiled[key] = found
        return found if found.is_static else program

    def _checked(self, program: StaticProgram) -> contextlib.AbstractContextManager[None]:
        step = program.recorded.step
        if step is None or program.is_proven or program.compiling.is_on:
            return _UNCHECKED
        return only_recorded_functions(step.functions, program.originals)

    def _why_eager(self, model: nn.Module, activation: Activation | None, args: Any, kwargs: Any) -> str:
        if activation is None or len(activation.frames) != 1 or activation.frames[0].module is not model:
            return "the model runs inside of another forward"
        if activation.recorder is not None or activation.static is not None:
            return "the model runs inside of its own forward"
        if self.inner is not None:
            return "an entry of the plan, for the model itself, is around its forward"
        if not is_native():
            return "vescale has been taken out of PyTorch (vescale.compat.uninstall)"
        if self._casts:
            return "the plan casts parameters, inputs or outputs of modules"
        hidden = next((x for x in (*args, *kwargs.values()) if hides_tensors(x)), None)
        if hidden is not None:
            return f"an input is {kind_of(hidden)}, which may hold tensors"
        if num_function_modes() > (activation.contexts is not None):
            return "a TorchFunctionMode is on, which gets the DTensors (torch.set_default_device, torch.device)"
        if in_transform():
            return "the model runs inside of a function transform (torch.func, torch.vmap)"
        return ""

    def _eager(self, model: nn.Module, reason: str, args: Any, kwargs: Any) -> Any:
        self.fallbacks[reason] += 1
        if not self.static_steps and not self._has_warned and self.fallbacks.total() == _STEPS_BEFORE_WARNING:
            self._has_warned = True
            if self.runtime.is_first_rank:
                warnings.warn(
                    f"{type(model).__name__} was parallelized with mode='static', and has run {_STEPS_BEFORE_WARNING} steps "
                    f"in eager mode: {reason}. vescale.static.report(model) has all reasons; leave out mode= if that is "
                    "meant to be so",
                    StaticModeWarning,
                    stacklevel=2,
                )
        activation = current_activation()
        if activation is not None and activation.runtime is self.runtime and activation.static is None:
            switch_on(activation)
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return type(model).forward(model, *args, **kwargs)

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """What distinguishes calls that are recorded separately."""
        specs: list[Any] = []
        settings, given = native_static().thread_settings(), tuple(kwargs.values())
        quick = settings, quick_shape(args, specs), tuple(kwargs), quick_shape(given, specs)
        known = self._keys.get(quick)
        if known is None:
            if len(self._keys) >= _MAX_KEYS:
                self._keys.clear()
            shapes = tuple((name, shape_of(value)) for name, value in kwargs.items())
            known = self._keys[quick] = repr((quick[0], shape_of(args), shapes)), specs
        return known[0]

    def _record(self, model: nn.Module, activation: Activation, key: str, args: Any, kwargs: Any) -> Any:
        waiting = self._recorders.get(key)
        if waiting is not None and self._waiting[key] < _MAX_WAITING:
            self._waiting[key] += 1
            return self._eager(model, "the backward of the recorded step has not been seen", args, kwargs)
        if len(self.programs) >= _MAX_PROGRAMS:
            return self._eager(model, f"there are {_MAX_PROGRAMS} recordings already", args, kwargs)
        if self._records_too_often():
            return self._eager(model, "steps have to be recorded anew too often", args, kwargs)
        switch_on(activation)
        units = ModelUnits(model)
        ran_before = self._to_tape.get(key)
        layers = RepeatedLayers(model, self.runtime, is_on=not self._layers_differ and ran_before is None)
        names = functools.partial(units.names_in, model)
        made = Recorder if ran_before is None else TapeRecorder
        recorder = made(activation.frames, names, units.is_elsewhere, layers)
        self._recorders[key] = recorder
        self.recordings += 1
        overridden = []
        note("static._forward:instance", model)
        modules = dict(model.named_modules())
        for path, module in modules.items():
            if path:
                overridden.append((module.__dict__, module.__dict__.get(CALL_OVERRIDE)))
                module.__dict__[CALL_OVERRIDE] = functools.partial(_call, recorder, path, module)
        activation.recorder = recorder
        recorder.problems, recorder.regions = problems_of_modules(modules), regions_of(modules)
        states, values = ModuleStates(modules, units.parameters), HeldValues(modules.items())
        for code, held_by_it in (ran_before or {}).items():
            values.add_globals(code, held_by_it)
        recorder.tree.on_function = values.add_globals
        recorder.tree.selections = Selections(recorder._record, lambda: not recorder._is_unrecorded, model)
        host_state, changed = host_random_state(), list[tuple[Any, str]]()
        memory = _memory_of(model) if not units.parameters else []
        try:
            result = recorder.run(functools.partial(type(model).forward, model), args, kwargs)
            for path, name in states.changes():
                recorder.problems.setdefault(path, f"its forward writes to its attribute {name}")
                kind, _, entry = name.rpartition(".")
                recorder.written_names.add(f"{path}.{entry}" if path else entry)
                held = model.get_submodule(path).__dict__
                changed.append((held[kind], entry) if kind else (held, name))
            for name, x, address in memory:
                if local_of(x).data_ptr() != address:
                    owner, _, own_name = name.rpartition(".")
                    recorder.problems.setdefault(owner, f"its forward sets {own_name}.data")
            self._draws_on_host |= has_drawn(host_state)
            container = values.kept_tensors.changed()
            if container:
                recorder.problems[""] = f"its forward keeps tensors in {container}"
            return result
        except BaseException:
            del self._recorders[key]
            raise
        finally:
            activation.recorder = None
            for held, compiled in overridden:
                held.pop(CALL_OVERRIDE, None)
                if compiled is not None:
                    held[CALL_OVERRIDE] = compiled
            values = values.unchanged(recorder.tree.functions if ran_before is None else ran_before)
            recorder.guards = Guards(model.named_modules(), units.parameters, values)
            recorder.changed_names = frozenset(values.changed_names)
            for holder, name in changed:
                values.changed.add(holder, name)
            if values.advanced:
                reason = f"its forward may advance the iterator {values.advanced}, which cannot be repeated"
                recorder.problems.setdefault("", reason)

    def _finish(self, model: nn.Module, key: str) -> StaticProgram | None:
        recorder = self._recorders.get(key)
        if recorder is None or not recorder.is_complete:
            return None
        del self._recorders[key]
        if recorder.tree.has_exchanged_code:
            return None
        if recorder.layers.differs(recorder):
            self._layers_differ = True  # each is recorded in the next step
            return None
        if isinstance(recorder, TapeRecorder):
            taped = recorded_tape(recorder, self.runtime.mesh)
            program: StaticProgram = TapeProgram(self.runtime, model, taped, recorder.guards)
            del self._to_tape[key]
        else:
            program = StaticProgram(self.runtime, model, recorded(recorder, self.runtime.mesh), recorder.guards)
            is_wanted = self.compares_calls or not program.is_static
            if is_wanted and not recorder.recomputes and "" not in recorder.problems:
                # Of what its functions would do in other steps, too little is known: the next step is compared call by call.
                self._to_tape[key] = recorder.tree.functions
                return None
        self.programs[key] = program
        return program

    def finish(self) -> None:
        """Make programs of all steps whose backward has been seen."""
        model = self.model()
        assert model is not None
        for key in list(self._recorders):
            self._finish(model, key)

    def waiting_steps(self) -> list[RecordedStep]:
        """Steps of the record that have not been run yet."""
        return list(self._record_steps.values())

    def _loaded(self, model: nn.Module, key: str) -> StaticProgram | None:
        """The program of the record's step of this kind; None: there is none, or it does not fit."""
        step = self._record_steps.pop(key, None) if self._record_steps else None
        if step is None:
            return None
        try:
            modules = list(model.named_modules())
            guards = Guards(modules, ModelUnits(model).parameters, HeldValues(modules))
            program = StaticProgram(self.runtime, model, load_step(step, model, self.runtime.mesh), guards)
        except (StaticRecordError, UnrecordedError) as problem:
            self.fallbacks[f"the record does not fit: {problem}"] += 1
            return None
        self.programs[key] = program
        return program

    def __deepcopy__(self, memo: dict[int, Any]) -> StaticForward:
        inner, runtime = copy.deepcopy(self.inner, memo), copy.deepcopy(self.runtime, memo)
        return StaticForward(runtime, memo[id(self.model())], inner, self._record_steps.values())


def _memory_of(model: nn.Module) -> list[tuple[str, DTensor, int]]:
    """Where parameters and buffers are: ``p.data = value`` moves one, and is no torch function of DTensors."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return [(name, x, local_of(x).data_ptr()) for name, x in named if isinstance(x, DTensor) and not x.is_meta]


def _enter(forward: weakref.ref[StaticForward], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = forward()
    return None if found is None else found.enter(args, kwargs)


def _call(recorder: Recorder, path: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return recorder.call_module(path, module, args, kwargs)

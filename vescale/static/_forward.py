"""``StaticForward``: the forward of a model that runs in static mode where it can, and in eager mode otherwise."""

from __future__ import annotations

import copy
import functools
import inspect
import threading
import types
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.compat import (
    CALL_OVERRIDE,
    GLOBAL_HOOKS,
    bytes_of,
    compiled_call,
    guard_call,
    has_dispatch_modes,
    has_saved_tensors_hooks,
    hides_tensors,
    in_transform,
    is_native,
    local_of,
    native_static,
    native_tape,
    no_torch_function,
    note,
    num_function_modes,
    own_part,
    require_native_static,
    spec_of,
    tensors_in,
    versions,
)
from vescale.errors import NotParallelizedError, StaticModeWarning, StaticStepError, kind_of
from vescale.ir import Precision
from vescale.rng import has_drawn, host_random_state, set_host_random_state
from vescale.runtime import Activation, Runtime, current_activation, switch_on, warn_of_compiler, write_back
from vescale.static._analysis import recorded_tape
from vescale.static._early_inputs import EarlyInputs, Entered
from vescale.static._guards import Guards, WatchedState
from vescale.static._program import TapeProgram
from vescale.static._record import Recorder, memory_of
from vescale.static._state import ModuleStates, problems_of_modules, regions_of
from vescale.static._step_records import random_state, set_random_state
from vescale.static._tensor_type import UnrecordedError
from vescale.static._units import ModelUnits

# ``WrittenTensors``: what a static forward has written to, and holds again what it held before the eager one runs.


# Elements of all tensors that a program writes to, up to which each step keeps what they hold.
_MAX_KEPT = 1 << 16

# The kind, and a path or a position.
_Key = tuple[str, str | int]


class WrittenTensors:
    """Buffers and parameters of a model, and its inputs, before a forward.

    Args:
        given: args and kwargs.
        writes: which ones the recorded forward wrote to; None: it begins, and all are looked at.
        has_units: whether parameters are gathered around the forward, which writes to them.
        keeps_all: whether what is large is kept as well.
    """

    def __init__(
        self, model: nn.Module, given: Any, writes: Collection[_Key] | None, has_units: bool, keeps_all: bool
    ) -> None:
        self._held: list[tuple[_Key, torch.Tensor, tuple[int, ...], torch.Tensor | None]] = []
        if writes is not None and not writes:
            return
        found = list(_all(model, given, has_units) if writes is None else _those(model, given, writes))
        keeps = keeps_all or sum(x.numel() for _, x in found) <= _MAX_KEPT
        with torch.no_grad(), no_torch_function():
            for key, x in found:
                is_kept = (
                    keeps and not (writes is None and key[0] == "parameter") and not x.is_inference() and not x.is_meta
                )
                self._held.append((key, x, versions(x), own_part(x).clone() if is_kept else None))

    def written(self, memory: Collection[int]) -> frozenset[_Key]:
        """Those that have been written to: not every op counts its writes (those of batch norm, and of ``x.data``).
        ``memory``: the addresses that calls have written to."""
        with no_torch_function():
            return frozenset(
                key
                for key, x, before, kept in self._held
                if versions(x) != before
                or memory_of(x) in memory
                or (kept is not None and not torch.equal(bytes_of(own_part(x)), bytes_of(kept)))
            )

    def undo(self, problem: BaseException) -> None:
        """They hold again what they held. Raises StaticStepError where that is not known."""
        for (kind, name), x, _, kept in self._held:
            if kept is None:
                raise StaticStepError(
                    f"the static forward has written to {kind} {name!r} of shape {tuple(x.shape)} before it failed "
                    f"({problem}); the step cannot be rerun in eager mode, which would write a second time. Expected "
                    "writes at the end of the forward, or mode='eager'"
                ) from problem
            with torch.no_grad(), no_torch_function():
                own_part(x).copy_(kept)


def _all(model: nn.Module, given: Any, has_units: bool) -> Iterator[tuple[_Key, torch.Tensor]]:
    for name, x in model.named_buffers():
        yield ("buffer", name), x
    for name, x in () if has_units else model.named_parameters():
        yield ("parameter", name), x
    for number, x in enumerate(tensors_in(given)):
        yield ("input", number), x


def _those(model: nn.Module, given: Any, keys: Collection[_Key]) -> Iterator[tuple[_Key, torch.Tensor]]:
    inputs = list(tensors_in(given)) if any(kind == "input" for kind, _ in keys) else []
    for key in keys:
        kind, name = key
        if isinstance(name, int):
            if name < len(inputs):
                yield key, inputs[name]
        else:
            yield key, model.get_buffer(name) if kind == "buffer" else model.get_parameter(name)


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


# ``Pauses``: while most steps take ways that were not recorded, they run in eager mode at once.

PAUSED = "most of the recent steps took branches, or passed arguments, that were not recorded"

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


# ``Tapes``: those of one kind of call.

_MAX_TAPES = 4
_MAX_MISSES = 4  # steps in succession that no tape has, after which the one that was used least recently is replaced


class Tapes:
    """Steps with other branches, or in other modes, have tapes of their own: a step is tried on the one that followed the
    last one when that ran before, then on the others, the last ones first.

    Attributes:
        misses: how many steps in succession have left all of them.
    """

    def __init__(self) -> None:
        self._programs: list[TapeProgram] = []  # the last one first
        self._following: dict[int, TapeProgram] = {}  # by id of a program
        self._num_eager = 0  # recorded steps that cannot be static
        self.misses = 0

    def __iter__(self) -> Iterator[TapeProgram]:
        yield from self._programs

    def add(self, program: TapeProgram) -> None:
        """One that was recorded in the last step. If it cannot be static, others of the kind still can."""
        if not program.is_static:
            self._num_eager += 1
            if self._programs:
                return
        self._forget([known for known in self._programs if not known.is_static])
        self._forget(self._programs[_MAX_TAPES - 1 :])
        self._note(program)

    def ran(self, program: TapeProgram) -> None:
        """In the last step."""
        self.misses = 0
        self._note(program)

    def _note(self, program: TapeProgram) -> None:
        if self._programs:
            self._following[id(self._programs[0])] = program
        if program in self._programs:
            self._programs.remove(program)
        self._programs.insert(0, program)

    def first(self) -> TapeProgram | None:
        """What is tried first."""
        if not self._programs:
            return None
        last = self._programs[0]
        return self._following.get(id(last), last)

    def tries(self) -> list[TapeProgram]:
        """In the order in which they are tried."""
        first = self.first()
        found = [] if first is None else [first, *(known for known in self._programs if known is not first)]
        return [known for known in found if known.is_static] or found

    def may_record(self) -> bool:
        return self._num_eager < _MAX_TAPES and (len(self._programs) < _MAX_TAPES or self.misses >= _MAX_MISSES)

    def drop_replaced(self) -> None:
        """Forget those of parameters or parts that the model has no more."""
        self._forget([known for known in self._programs if known.guards.have_replaced()])

    def _forget(self, programs: list[TapeProgram]) -> None:
        gone = set(map(id, programs))
        self._programs = [known for known in self._programs if id(known) not in gone]
        self._following = {
            key: known for key, known in self._following.items() if key not in gone and id(known) not in gone
        }


_MAX_KINDS = 8
# What the model's code may raise because it runs on local tensors.
_MAY_BE_OURS = (AssertionError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError)
_STEPS_BEFORE_WARNING = 3
_MAX_KEYS = 64
_STEPS_OF_A_RECORDING = 20  # that run static in the mean, or what is not recorded yet runs in eager mode
_FREE_RECORDINGS = 8
_MAX_WAITING = 3  # forwards without a backward, after which a recording is given up
_LEFT = object()


class StaticForward:
    """The forward of the outermost module of a model.

    Args:
        inner: what an entry of the plan has put around the model's own forward; None: nothing.

    Attributes:
        tapes: by what distinguishes calls.
        recordings: how many steps were recorded.
        fallbacks: how many steps have left their tapes, or ran in eager mode, by reason.
        static_steps: how many did not.
    """

    def __init__(self, runtime: Runtime, model: nn.Module, inner: Callable[..., Any] | None = None) -> None:
        self.runtime, self.inner = runtime, inner
        self._casts = any(isinstance(instruction.op, Precision) for instruction in runtime.program)
        self.model = weakref.ref(model)
        self.tapes: dict[str, Tapes] = {}
        self.recordings = 0
        self.static_steps = 0
        self.fallbacks: Counter[str] = Counter()
        self._recorders: dict[str, Recorder] = {}
        self._waiting: Counter[str] = Counter()
        self._pauses = Pauses()
        # Keys by what takes less time to find out, with the specs whose addresses that has.
        self._keys: dict[Any, tuple[str, list[Any]]] = {}
        self._lock = threading.RLock()
        self._early = EarlyInputs()
        self._draws_on_host = False  # whether a forward draws from Python's or numpy's generators
        self._has_warned = False
        runtime.switches_on_later = True
        # Weak: cached local tensors hold parameters, whose hooks hold the runtime, where the garbage collector cannot look.
        runtime.early_inputs = functools.partial(_enter, weakref.ref(self))
        functools.update_wrapper(self, type(model).forward)
        # Of the bound method, as trainers look at it; the method itself would hold the model.
        self.__signature__ = inspect.signature(types.MethodType(type(model).forward, model))

    def enter(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], None] | None:
        """Before the inputs of the model are placed: what its forward gets in their place; None: they are placed."""
        model = self.model()
        if model is None:
            return None
        found = self._early.find(args, kwargs, model.training)
        if found is None or current_activation() is not None or num_function_modes() or in_transform():
            return None
        if has_saved_tensors_hooks() or has_dispatch_modes():
            return None
        program = self.tapes[found[0]].first()
        is_known = program is found[1]()
        if program is None or not is_known or not program.is_static or found[0] in self._recorders:
            return None  # there is a new tape, or these inputs have not been given to this one
        if not native_static().is_installed():
            return None
        if self._pauses.is_on(found[0]) or any(kind == "input" for kind, _ in program.writes):
            return None  # what is written to is the DTensor that an entry makes
        # What the user calls before the forward gets DTensors.
        if len(model.__dict__["_forward_pre_hooks"]) > 1 or any(GLOBAL_HOOKS) or program.guards.broken():
            return None
        return *self._early.enter(found[0], program, found[2], args, kwargs), None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model, activation = self.model(), current_activation()
        assert model is not None
        entered = self._early.take(args, kwargs)
        with self._lock:
            if entered is not None:
                assert activation is not None
                return self._run(model, activation, entered.key, (), {}, entered)
            reason = self._why_eager(model, activation, args, kwargs)
            if reason:
                return self._eager(model, reason, args, kwargs)
            assert activation is not None
            key = self._key(args, kwargs, model.training)
            if self._pauses.skips(key):
                return self._eager(model, PAUSED, args, kwargs)
            self._finish(model, key)
            return self._run(model, activation, key, args, kwargs)

    def _run(
        self, model: nn.Module, activation: Activation, key: str, args: Any, kwargs: Any, entered: Entered | None = None
    ) -> Any:
        """A step on the first tape that has it, or in eager mode. ``entered``: local tensors in place of ``args`` and
        ``kwargs``."""
        tapes, placed = self.tapes.setdefault(key, Tapes()), None
        reason, has_left = "", False
        tries = tapes.tries()
        while tries:
            program = tries.pop(0)
            if not program.is_static:
                return self._eager(model, program.eager_modules[""], args, kwargs)
            if entered is None:
                with no_torch_function():
                    broken = program.guards.broken()
                if broken:
                    reason = reason or broken
                    continue
            had_mode = program.needs_mode
            result, left = self._attempt(model, activation, program, args, kwargs, entered)
            if result is not _LEFT:
                tapes.ran(program)
                self._pauses.note(key, False)
                self.static_steps += 1
                if entered is None:
                    self._early.remember(key, program, args, kwargs, activation.frames[0], model.training)
                return result
            if entered is not None:
                args, kwargs, placed = self.runtime.instructions[""].place_inputs(entered.args, entered.kwargs)
                entered = None
            if program.needs_mode and not had_mode:  # a function of local tensors cannot do it this time
                tries.insert(0, program)
                continue
            if not program.is_static:  # it has failed
                return self._eager(model, program.eager_modules[""], args, kwargs)
            reason, has_left = reason or left, True
        if has_left:
            tapes.misses += 1
            self._pauses.note(key, True)
        tapes.drop_replaced()
        result = self._record(model, activation, key, tapes, reason, args, kwargs)
        write_back(placed or ())
        return result

    def _attempt(
        self, model: nn.Module, activation: Activation, program: TapeProgram, args: Any, kwargs: Any, entered: Any
    ) -> tuple[Any, str]:
        """The result of a static forward; or a mark that it has left the tape, and why: all is as before then."""
        if program.needs_mode:
            switch_on(activation)
        state = random_state() if program.draws else None
        host_state = host_random_state() if self._draws_on_host else None
        mark, restore_python = program.units.mark(), program.state.saved()
        given = (args, kwargs) if entered is None else (entered.args, entered.kwargs)
        has_units = bool(program.units.parameters)
        written = WrittenTensors(model, given, program.writes, has_units, keeps_all=not program.is_proven)
        activation.static = program
        try:
            result = program.run(args, kwargs, entered)
        except (Exception, UnrecordedError) as problem:
            is_error = not isinstance(problem, UnrecordedError)
            if is_error and not (isinstance(problem, _MAY_BE_OURS) and (program.has_failed or not program.is_proven)):
                raise  # of the model's own code, as in eager mode
            if state is not None:
                set_random_state(state)
            if host_state is not None:
                set_host_random_state(host_state)
            restore_python()
            program.guards.drop_added_hooks()
            written.undo(problem)
            program.units.return_to(mark)
            del activation.frames[1:]
            if is_error:
                activation.static = None
                return self._tried_again(model, program, problem, given if entered is not None else None, args, kwargs)
            return _LEFT, str(problem)
        finally:
            activation.static = None
        program.is_proven = True
        return result, ""

    def _tried_again(
        self, model: nn.Module, program: TapeProgram, problem: BaseException, entered: Any, args: Any, kwargs: Any
    ) -> tuple[Any, str]:
        """Where the forward has raised an error that local tensors may cause: what it does in eager mode, which may raise
        the same. That is the model's own then, and the tape stays."""
        placed = None
        if entered is not None:
            args, kwargs, placed = self.runtime.instructions[""].place_inputs(*entered)
        reason = f"{type(problem).__name__} in a static step: {problem}"
        result = self._eager(model, reason, args, kwargs)
        write_back(placed or ())
        program.fail(reason)
        return result, ""

    def _why_eager(self, model: nn.Module, activation: Activation | None, args: Any, kwargs: Any) -> str:
        if activation is None or len(activation.frames) != 1 or activation.frames[0].module is not model:
            return "the model runs inside another forward"
        if activation.recorder is not None or activation.static is not None:
            return "the model runs inside its own forward"
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
            return "a TorchFunctionMode is on, which gets the DTensors"
        if has_dispatch_modes():
            return "a TorchDispatchMode is on, which gets the DTensors"
        if has_saved_tensors_hooks():
            return "hooks for saved tensors are on (torch.autograd.graph.saved_tensors_hooks, save_on_cpu)"
        if in_transform():
            return "the model runs inside a function transform (torch.func, torch.vmap)"
        return ""

    def _eager(self, model: nn.Module, reason: str, args: Any, kwargs: Any) -> Any:
        self.fallbacks[reason] += 1
        self._warn_of_eager_steps(model, reason)
        activation = current_activation()
        if activation is not None and activation.runtime is self.runtime and activation.static is None:
            switch_on(activation)
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return type(model).forward(model, *args, **kwargs)

    def _warn_of_eager_steps(self, model: nn.Module, reason: str) -> None:
        if not self.static_steps and not self._has_warned and self.fallbacks.total() == _STEPS_BEFORE_WARNING:
            self._has_warned = True
            if self.runtime.is_first_rank:
                warnings.warn(
                    f"{type(model).__name__} was parallelized with mode='static', and has run {_STEPS_BEFORE_WARNING} "
                    f"steps in eager mode: {reason}. vescale.static.report(model) has all reasons; remove mode= if "
                    "this is intended",
                    StaticModeWarning,
                    stacklevel=2,
                )

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_training: bool) -> str:
        """What distinguishes calls that are recorded separately."""
        specs: list[Any] = []
        settings, given = native_static().thread_settings(), tuple(kwargs.values())
        quick = settings, is_training, quick_shape(args, specs), tuple(kwargs), quick_shape(given, specs)
        known = self._keys.get(quick)
        if known is None:
            if len(self._keys) >= _MAX_KEYS:
                self._keys.clear()
            shapes = tuple((name, shape_of(value)) for name, value in kwargs.items())
            known = self._keys[quick] = repr((quick[:2], shape_of(args), shapes)), specs
        return known[0]

    def _record(
        self, model: nn.Module, activation: Activation, key: str, tapes: Tapes, reason: str, args: Any, kwargs: Any
    ) -> Any:
        """A step in eager mode, which is recorded if there may be a tape of it. ``reason``: why it is on none."""
        refusal = ""
        if key in self._recorders and self._waiting[key] < _MAX_WAITING:
            self._waiting[key] += 1
            refusal = "the backward of the recorded step has not been seen"
        elif sum(map(bool, map(list, self.tapes.values()))) >= _MAX_KINDS and not list(tapes):
            refusal = f"there are recordings of {_MAX_KINDS} kinds of calls already"
        elif self.recordings >= _FREE_RECORDINGS and self.static_steps < _STEPS_OF_A_RECORDING * self.recordings:
            refusal = "steps have to be recorded anew too often"
        elif not tapes.may_record() or (tapes.misses and self._pauses.is_on(key)):
            refusal = reason or f"there are {_MAX_TAPES} tapes already"
        if refusal:
            return self._eager(model, reason or refusal, args, kwargs)
        if reason:
            self.fallbacks[reason] += 1
            self._warn_of_eager_steps(model, reason)
        compiled = next((path for path, module in model.named_modules() if compiled_call(module) is not None), None)
        if compiled is not None:
            warn_of_compiler(self.runtime, compiled)
        tapes.misses = 0
        switch_on(activation)
        self._waiting[key] = 0
        units = ModelUnits(model)
        modules = dict(model.named_modules())
        states, watched = ModuleStates(modules, units.parameters), WatchedState(model)
        names = functools.partial(units.names_in, model)
        recorder = Recorder(activation.frames, names, units.is_elsewhere, watched.add_frame)
        self._recorders[key] = recorder
        self.recordings += 1
        overridden = []
        note("static._forward:instance", model)
        for path, module in modules.items():
            if path:
                overridden.append((module.__dict__, module.__dict__.get(CALL_OVERRIDE)))
                module.__dict__[CALL_OVERRIDE] = functools.partial(_call, recorder, path, module)
        activation.recorder = recorder
        recorder.problems, recorder.regions = problems_of_modules(modules), regions_of(modules)
        host_state, replaced, held_by_modules = host_random_state(), set[tuple[int, str]](), list[torch.Tensor]()
        memory = _memory_of(model) if not units.parameters else []
        written = WrittenTensors(model, (args, kwargs), None, bool(units.parameters), keeps_all=True)
        try:
            result = recorder.run(functools.partial(type(model).forward, model), args, kwargs)
            for path, name in states.changes():
                recorder.problems.setdefault(path, f"its forward writes a tensor to its attribute {name}")
                kind, _, entry = name.rpartition(".")
                recorder.written_names.add(f"{path}.{entry}" if path else entry)
                module = modules[path]
                replaced.add((id(module), entry))
                held_by_modules += tensors_in((module.__dict__[kind] if kind else module.__dict__).get(entry))
            for name, x, address in memory:
                if local_of(x).data_ptr() != address:
                    owner, _, own_name = name.rpartition(".")
                    recorder.problems.setdefault(owner, f"its forward sets {own_name}.data")
            self._draws_on_host |= has_drawn(host_state)
            recorder.refuse_kept(held_by_modules)
            advanced = watched.advanced()
            if advanced:
                reason = f"its forward may advance the iterator {advanced}, which cannot be repeated"
                recorder.problems.setdefault("", reason)
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
            recorder.guards = Guards(model.named_modules(), units.parameters, frozenset(replaced))
            recorder.state, recorder.plain = watched.state(), watched.plain(recorder.used_plain)
            recorder.writes = written.written(recorder.written_memory)

    def _finish(self, model: nn.Module, key: str) -> None:
        """Make a tape of the recorded step, if its backward has been seen."""
        recorder = self._recorders.get(key)
        if recorder is None or not recorder.is_complete:
            return
        del self._recorders[key]
        taped = recorded_tape(recorder, self.runtime.mesh)
        program = TapeProgram(self.runtime, model, taped, recorder)
        self.tapes.setdefault(key, Tapes()).add(program)
        if not program.is_static:
            self.fallbacks[program.eager_modules[""]] += 0  # steps have other reasons, or follow

    def finish(self) -> None:
        """Make tapes of all steps whose backward has been seen."""
        model = self.model()
        assert model is not None
        for key in list(self._recorders):
            self._finish(model, key)

    def programs(self) -> Iterator[tuple[str, TapeProgram]]:
        """All, with what distinguishes their calls."""
        for key, tapes in self.tapes.items():
            for program in tapes:
                yield key, program

    def __deepcopy__(self, memo: dict[int, Any]) -> StaticForward:
        inner, runtime = copy.deepcopy(self.inner, memo), copy.deepcopy(self.runtime, memo)
        return StaticForward(runtime, memo[id(self.model())], inner)


def _memory_of(model: nn.Module) -> list[tuple[str, DTensor, int]]:
    """Where parameters and buffers are: ``p.data = value`` moves one, and is no torch function of DTensors."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return [(name, x, local_of(x).data_ptr()) for name, x in named if isinstance(x, DTensor) and not x.is_meta]


def _enter(forward: weakref.ref[StaticForward], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = forward()
    return None if found is None else found.enter(args, kwargs)


def _call(recorder: Recorder, path: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return recorder.call_module(path, module, args, kwargs)


# Giving a parallelized model its static mode.


class StaticMode:
    """What ``parallelize(mode="static")`` does."""

    def check(self) -> None:
        """Raises StaticHelpersError without the C++ helpers."""
        require_native_static()
        native_tape()

    def install(self, runtime: Runtime, model: nn.Module) -> None:
        runtime.runs_alike = False
        note("static._forward:instance", model)
        model.__dict__["forward"] = StaticForward(runtime, model, model.__dict__.get("forward"))
        guard_call(model)


def static_forward(model: nn.Module) -> StaticForward:
    """The static forward of a model. Raises KeyError for others."""
    forward = model.__dict__.get("forward")
    if not isinstance(forward, StaticForward):
        raise NotParallelizedError(
            f"this {type(model).__name__} does not run in static mode; parallelize it with mode='static'"
        )
    return forward

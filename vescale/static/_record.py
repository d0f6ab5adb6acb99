"""``Recorder``: one recorded step as a row of calls, with their tensors, and the gradients that came."""

from __future__ import annotations

import functools
import gc
import os
import sys
import sysconfig
import time
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from vescale.comm import Ledger, record_comms
from vescale.compat import (
    call_module,
    has_dispatch_modes,
    has_saved_tensors_hooks,
    hides_tensors,
    local_of,
    native_tape,
    no_torch_function,
    own_part,
    spec_of,
    take_moves,
    tensors_in,
    versions,
)
from vescale.ops import entries
from vescale.runtime import Frame, Placing, Stages
from vescale.static._hidden_tensors import hidden_slots
from vescale.static._step_records import (
    Boundary,
    Call,
    LocalRun,
    ModuleCall,
    ObservedOps,
    TensorRecord,
    Value,
    WithObservedOps,
    random_state,
    run_on_locals,
)

# What a call of a recorded step is compared by: its arguments, as the cursor in C++ (``csrc/tape.cpp``) reads them.


# The kinds of ``csrc/tape.cpp``.
_VALUE, _PLAIN, _INT, _FLOAT, _SAME, _EQUAL, _SEQUENCE, _DICT, _SLICE, _VIEW = range(10)
_EQUAL_TYPES = (str, bytes, complex, torch.device, torch.finfo, torch.iinfo, range, frozenset)


class Arguments:
    """The arguments of a call.

    Args:
        number_of: gives the number of a tensor; None: no recorded call has made it.
        views: of values that are the whole of others, the numbers of these.

    Attributes:
        args, kwargs: what each has to be.
        numbers: the whole numbers and fractions among them, and which sizes of tensors are 1; ``sizes``: the same, with all
            sizes of the local tensors.
        has_whole_numbers: whether there is one; num_tensors: how many there are.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        number_of: Callable[[torch.Tensor], int | None],
        views: dict[int, int],
    ) -> None:
        self._number_of, self._views = number_of, views
        self.numbers: list[int] = []
        self.sizes: list[int] = []
        self.has_whole_numbers = False
        self.num_tensors = 0
        self.args = tuple(map(self._expected, args))
        self.kwargs = {name: self._expected(value) for name, value in kwargs.items()}
        del self._number_of, self._views

    def taken(self) -> list[int | None]:
        """Of each tensor, in order, its number; None of one that no recorded call has made."""
        return [number for expected in (*self.args, *self.kwargs.values()) for number in _numbers_in(expected)]

    def _note(self, number: int) -> None:
        self.numbers.append(number)
        self.sizes.append(number)

    def _expected(self, value: Any) -> tuple[Any, ...]:
        kind = type(value)
        if isinstance(value, torch.Tensor):
            number = self._number_of(value)
            own = own_part(value)
            self.sizes += own.shape
            self.num_tensors += 1
            self.numbers.append(functools.reduce(lambda ones, size: 2 * ones + (size == 1), own.shape, 1))
            if number is None:
                return _PLAIN, weakref.ref(value), value.ndim, value.requires_grad
            base = self._views.get(number)
            return (_VALUE, number) if base is None else (_VIEW, number, base)
        if kind is int or isinstance(value, numpy.integer):
            self.has_whole_numbers = True
            self._note(int(value))
            return _INT, kind
        if isinstance(value, float):
            self._note(0 if value == 0.0 else 1 if value == 1.0 else 2)
            return (_FLOAT,)
        if isinstance(value, tuple | list):
            return _SEQUENCE, kind, tuple(map(self._expected, value))
        if kind is dict:
            return _DICT, tuple(value), tuple(map(self._expected, value.values()))
        if kind is slice:
            return _SLICE, None, tuple(map(self._expected, (value.start, value.stop, value.step)))
        if isinstance(value, _EQUAL_TYPES):
            return _EQUAL, value
        try:
            return _SAME, weakref.ref(value)  # what the forward has made ends with it
        except TypeError:
            return _SAME, value


def _numbers_in(expected: tuple[Any, ...]) -> Iterator[int | None]:
    if expected[0] in (_VALUE, _VIEW):
        yield expected[1]
    elif expected[0] == _PLAIN:
        yield None
    elif expected[0] in (_SEQUENCE, _DICT):
        for item in expected[2]:
            yield from _numbers_in(item)


# Places in the model's code.

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARY = tuple({sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib")})
_PACKAGES = tuple({sysconfig.get_paths()[name] + os.sep for name in ("purelib", "platlib")})


@functools.cache
def is_of_model(file: str) -> bool:
    """Whether the functions of a file belong to models rather than to what they are made with."""
    if file.startswith((_OURS, _TORCH, "<")):
        return False
    return file.startswith(_PACKAGES) or not file.startswith(_LIBRARY)


def model_frame(frame: types.FrameType | None) -> types.FrameType | None:
    """Of the innermost function that runs and is the model's."""
    while frame is not None and not is_of_model(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def line_of_model(frame: types.FrameType | None) -> str:
    """ "file:line " of the innermost function that runs and is the model's; "" if there is none."""
    frame = model_frame(frame)
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} "


# Events of a recorded step.


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


# What hooks of a recorded step's graph note about gradients.


def edges_of(tensors: list[torch.Tensor], records: list[TensorRecord]) -> dict[Any, TensorRecord]:
    """Where gradients of the tensors go to: (node, number)."""
    found = {}
    for x, record in zip(tensors, records, strict=True):
        if x.requires_grad and torch.is_grad_enabled():
            edge = get_gradient_edge(x)
            found[edge.node, edge.output_nr] = record
    return found


def forget_moves(_: Any) -> None:
    """Before a node of a call runs: what has moved gradients so far was not this call."""
    take_moves()


def note_sent(call: Call | None, records: dict[int, TensorRecord], sent: Any, arrived: Any) -> None:
    """After a node of ``call`` has run."""
    if take_moves() and call is not None:
        call.moves_gradients = True
    for index, record in records.items():
        if isinstance(sent[index], DTensor):
            record.grads.add(tuple(sent[index].placements))


def note_arrival(problems: dict[str, str], value: Value, number: int, grads: tuple[torch.Tensor | None, ...]) -> None:
    """A gradient has arrived at a tensor, which is output ``number`` of its node."""
    grad = grads[number]
    if torch.is_grad_enabled():  # what the gradients of gradients would move has not been seen
        problems.setdefault("", "its backward makes a graph of its own (create_graph=True), for second derivatives")
    if isinstance(grad, DTensor):
        value.grads.add(tuple(grad.placements))


_READ_DATA: Any = torch.Tensor.data.__get__  # type: ignore[attr-defined]


class Recorder(TorchFunctionMode):
    """Records the forward of a module that runs inside of it, and the backward that follows.

    Hooks of the graph's nodes tell gradients; the step's numbers are those of any other.

    Args:
        frames: the running modules.
        names: gives the names of parameters and buffers by ``id``.
        is_elsewhere: whether the parameter with a name belongs to a unit of which none of some modules is a part.
        on_frame: called with the frames of the model's functions that call torch functions.

    Attributes:
        events: in order; those of a module follow it.
        calls: of torch functions, in order; ``boundaries``: of what entries of the plan have placed.
        module_calls: tensors that the parts of the model got and returned in each call, by path.
        inputs, outputs: tensors of the forward; ``hidden``: those inside of objects in its output.
        input_numbers, output_numbers: of the forward's tensors; -1: a plain tensor that no call has made.
        problems: what rules a static forward out, by the path of the module.
        regions: paths of the modules that run on local tensors by the plan.
        recomputes: whether there are checkpoints, whose recomputations run the ops of recorded functions.
        written_memory: where calls have written to; ``used_plain``: the ``id`` of tensors that no call has made.
        guards: what the step depended on; ``state``: what it may change in Python; ``writes``: which tensors;
            ``plain``: where plain ones were before; ``written_names``: of buffers that modules have replaced. All are set by
            whoever records.
    """

    def __init__(
        self,
        frames: Sequence[Frame],
        names: Callable[[], dict[int, str]],
        is_elsewhere: Callable[[str, Iterable[nn.Module]], bool],
        on_frame: Callable[[types.FrameType], None],
    ) -> None:
        super().__init__()
        self._frames, self._is_elsewhere, self._on_frame = frames, is_elsewhere, on_frame
        self.events: list[Event] = []
        self.calls: list[Call] = []
        self.boundaries: list[Boundary] = []
        self.module_calls: dict[str, list[ModuleCall]] = {}
        self.inputs: list[TensorRecord] = []
        self.outputs: list[TensorRecord] = []
        self.hidden: list[TensorRecord] = []
        self.input_numbers: list[int] = []
        self.output_numbers: list[int] = []
        self.problems: dict[str, str] = {}
        self.regions: frozenset[str] = frozenset()
        self.guards: Any = None
        self.state: Any = None
        self.writes: frozenset[Any] = frozenset()
        self.written_memory: set[int] = set()
        self.used_plain: set[int] = set()
        self.plain: list[Callable[[], Any]] = []
        self.written_names: set[str] = set()
        self.named: dict[str, Value] = {}
        self._read_names = names
        self.names = names()
        self._nodes: set[Any] = set()  # of the graph that are watched
        self._placed: list[tuple[DTensor, tuple[int, ...]]] = []  # by entries of the modules that run
        self._taken_over = ""
        self._is_unrecorded = False  # inside of a module that runs in eager mode, whatever its calls are
        self.recomputes = False
        self._known_ops: dict[Any, bool] = {}
        self.numbers: dict[Value, int] = {}
        self._plain: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self.num_values = 0
        self._views: dict[int, int] = {}
        self._by_memory: dict[Any, tuple[int, Any]] = {}  # the last number of each form of memory, and that
        self._settings = native_tape().settings
        self._alive = native_tape().Run(native_tape().Tape(), None)  # DTensors by number
        # Ids of those that are given, returned, or held by functions that run again in backward.
        self._captured: set[int] = set()

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record ``forward(*args, **kwargs)``."""
        given = list(tensors_in((args, kwargs)))
        for x in given:
            if isinstance(x, DTensor):
                self._value_of_result(x)
        self.input_numbers = list(map(self._number_of_result, given))
        self.inputs = [self._record(x) for x in given]
        held = list(_held_in((args, kwargs)))
        try:
            with self:
                result = forward(*args, **kwargs)
        finally:
            self._nodes.clear()  # they hold those that accumulate gradients of parameters, and hooks of units
        with no_torch_function():
            if list(_held_in((args, kwargs))) != held or any(map(hides_tensors, (*args, *kwargs.values()))):
                self.problems[""] = "its forward changes what an input holds"
            returned = list(tensors_in(result))
            self.outputs = [self._record(x) for x in returned]
            try:
                inside = [slot.get() for slot in hidden_slots(result)]
            except ValueError as problem:
                self.problems[""] = f"of an output, {problem}"
                return result
            self.hidden = [self._record(x) for x in inside]
            if any(map(has_attributes, (*returned, *inside))):
                self.problems[""] = "a tensor of its output has attributes"
            numbers = list(map(self.number_of, (*returned, *inside)))
            self.output_numbers = [-1 if number is None else self._views.get(number, number) for number in numbers]
            self._refuse_unseen(returned, None)
            self._captured.update(map(id, (*given, *returned, *inside)))
        return result

    def refuse_kept(self, known: Iterable[torch.Tensor]) -> None:
        """After :meth:`run`: where DTensors that the forward has made outlive it, a static forward would make local tensors
        of them. ``known``: those in attributes of modules, which run in eager mode."""
        shared = (x for held in self._frames[0].converted.values() for x in held[:2])
        expected = self._is_expected({*map(id, known), *map(id, shared), *self._captured})
        kept = [] if "" in self.problems else still_kept(lambda: kept_tensors(self._alive, expected))
        if kept:
            event = next((e for e in self.events if isinstance(e, CallEvent) and kept[0][0] in e.results), None)
            where = "" if event is None or not event.call.place[0] else "{}:{}: ".format(*event.call.place)
            self.problems[""] = (
                f"{where}its forward keeps tensors in a cache, a global, a closure or an object (the first of shape "
                f"{tuple(kept[0][1].shape)})"
            )

    def _is_expected(self, known: set[int]) -> Callable[[int, torch.Tensor], bool]:
        return lambda _, x: id(x) in known or bool(self.name_of(x))

    @property
    def is_complete(self) -> bool:
        """Whether the backward has been seen, if there is one."""
        linked = [r.value for r in self.outputs if r.requires_grad and r.value is not None]
        return "" in self.problems or not linked or any(value.grads for value in linked)

    # Values

    def _value(self, x: DTensor) -> Value:
        found: Value | None = getattr(x, "_vescale_value", None)
        if found is not None:
            return found
        name = self.name_of(x)
        if not name:  # made around the recorded functions: an input of a unit, which is a view of the module's
            return self._value_of_result(x)
        return self.named.setdefault(name, Value(name, True))

    def name_of(self, x: torch.Tensor) -> str:
        """Of a parameter or a buffer; "" for others."""
        name = self.names.get(id(x))
        if name is None and x.is_leaf and isinstance(x, nn.Parameter):
            self.names = self._read_names()  # a unit has gathered it for the first time
            name = self.names.get(id(x))
        return name or ""

    def _record(self, x: torch.Tensor) -> TensorRecord:
        if not isinstance(x, DTensor):
            strides = x.stride() if x.layout is torch.strided else ()
            return TensorRecord(None, tuple(x.shape), tuple(x.shape), strides, x.dtype, x.requires_grad, None)
        spec, local = spec_of(x), local_of(x)
        shapes = tuple(spec.shape), tuple(local.shape), local.stride()
        return TensorRecord(spec.placements, *shapes, x.dtype, x.requires_grad, self._value(x))

    def _next(self) -> int:
        self.num_values += 1
        return self.num_values - 1

    def number_of(self, x: torch.Tensor) -> int | None:
        """Of a tensor that is an input, a parameter, or the result of a call."""
        if not isinstance(x, DTensor):
            known = self._plain.get(id(x))
            if known is not None and known[0]() is x:
                return known[1]
            self.used_plain.add(id(x))
            return None
        is_made = getattr(x, "_vescale_value", None) is not None or bool(self.name_of(x))
        value = self._value(x)
        number = self.numbers.get(value)
        if number is None:
            number = self.numbers[value] = self._next()
            self._alive.bind(number, x)
            local = local_of(x)
            if not local.is_meta:
                key = local.data_ptr(), local.shape, local.stride()
                same = self._by_memory.get(key)
                if not is_made and same is not None and not same[1].expired():  # a unit has made it
                    self._views[number] = same[0]
                self._by_memory[key] = number, StorageWeakRef(local.untyped_storage())
        return number

    def _number_of_result(self, x: torch.Tensor) -> int:
        number = self.number_of(x)
        if number is None:
            number = self._next()
            self._plain[id(x)] = weakref.ref(x), number
        return number

    def _refuse_unseen(self, tensors: Iterable[torch.Tensor], frame: types.FrameType | None) -> None:
        """Where functions use a DTensor that no torch function of this thread has made in this forward."""
        path = self._frames[-1].path
        for x in tensors:
            if not isinstance(x, DTensor):
                continue
            if not self._is_seen(x):
                why = "a tensor comes from another thread, another step, or compiled code"
            elif not self._is_made_here(x):
                why = "the backward of this function would get local gradients"
            else:
                continue
            place = line_of_model(frame).rstrip()
            self.problems.setdefault(path, f"{place}: {why}" if place else why)

    def _is_made_here(self, x: torch.Tensor) -> bool:
        """Whether no function of autograd that Python defines, outside of torch functions, stands behind a tensor."""
        node = x.grad_fn
        return node is None or node in self._nodes or not isinstance(node, torch.autograd.function.BackwardCFunction)

    def _is_seen(self, x: torch.Tensor) -> bool:
        """Units give their modules views of their inputs."""
        base, node = x._base, x.grad_fn
        if hasattr(x, "_vescale_value") or self.name_of(x):
            return True
        if base is None:
            return False
        # What a recorded function returned may be a view itself, and its base is the base of its views.
        return self._is_seen(base) or (node is not None and all(made in self._nodes for made, _ in node.next_functions))

    def _is_of_other_unit(self, record: TensorRecord) -> bool:
        """Whether it is a parameter of a unit that does not run."""
        name = record.value.name if record.value is not None and record.value.is_parameter else ""
        return bool(name) and self._is_elsewhere(name, (frame.module for frame in self._frames))

    def _watch(self, made: list[torch.Tensor], before: dict[Any, TensorRecord], call: Call | None) -> None:
        """Learn the gradients of results, and those that the nodes that made them send to the tensors given.
        ``before``: these tensors' records, by gradient edge."""
        waiting = [x.grad_fn for x in made if x.grad_fn is not None]
        while waiting:
            node = waiting.pop()
            if node in self._nodes or any(node is known for known, _ in before):
                continue
            self._nodes.add(node)
            edges = node.next_functions
            sent = {i: before[edge] for i, edge in enumerate(edges) if edge in before}
            for record in sent.values():
                record.num_gradients += 1
                if record.value is not None:
                    record.value.num_gradients += 1
            node.register_prehook(forget_moves)
            node.register_hook(functools.partial(note_sent, call, sent))
            waiting += [following for following, _ in edges if following is not None]

    def _value_of_result(self, x: DTensor) -> Value:
        """The value of a new tensor, or of one that was written to; an input stays the value that it got first."""
        known: Value | None = getattr(x, "_vescale_value", None)
        if known is not None and known in self.numbers and not self.events:
            return known
        value = x._vescale_value = Value()  # type: ignore[attr-defined]
        if x.grad_fn is not None:  # behind all hooks of the tensor, which may change the gradient
            x.grad_fn.register_prehook(functools.partial(note_arrival, self.problems, value, x.output_nr))
        elif x.requires_grad:
            problems = self.problems  # the hook must not hold the recorder
            x.register_hook(lambda grad: note_arrival(problems, value, 0, (grad,)))
        return value

    # Torch functions

    def __torch_function__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_unrecorded or ("" in self.problems and not self.recomputes):
            return func(*args, **kwargs)
        with no_torch_function():
            frame = model_frame(sys._getframe(1))
            if frame is not None:
                self._on_frame(frame)
            tensors = list(tensors_in((args, kwargs)))
            self._refuse_unseen(tensors, frame)
            arguments, settings = Arguments(args, kwargs, self.number_of, self._views), self._settings()
            before = list(map(self.number_of, tensors))
            module = self._frames[-1].path
            call = Call(module, func, [self._record(x) for x in tensors])
            call.place = ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
            del frame
            call.reads_other_unit = any(map(self._is_of_other_unit, call.inputs))
        self.calls.append(call)
        if func == _READ_DATA and any(self._is_elsewhere(self.name_of(x), ()) for x in tensors):
            self.problems.setdefault(module, "what it writes to .data of a unit's parameter would not be seen")
        if has_dispatch_modes():
            self.problems.setdefault(module, "it calls torch functions under a TorchDispatchMode, which gets DTensors")
        if has_saved_tensors_hooks(of_checkpoints=False):
            self.problems.setdefault(module, "its hooks for saved tensors get DTensors")
        try:
            result, made = self._run(call, tensors, func, args, kwargs)
        except BaseException:
            self.problems.setdefault(module, f"{getattr(func, '__name__', func)} raised an error")
            raise
        with no_torch_function():
            event = CallEvent(call, module, arguments, settings)
            event.results = tuple(map(self._number_of_result, made))
            event.writes = tuple(
                (place, new)
                for place, (x, old) in enumerate(zip(tensors, before, strict=True))
                if (new := self.number_of(x)) != old and new is not None
            )
            self.events.append(event)
        return result

    def _run(
        self, call: Call, tensors: list[torch.Tensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, list[torch.Tensor]]:
        """Call a torch function, and note what it does. Returns its result, and the tensors in it."""
        with no_torch_function():
            edges = edges_of(tensors, call.inputs)
            before_call = list(map(versions, tensors))
        self._taken_over = ""
        before, own = random_state(), [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Generator)]
        own_before = [generator.get_state() for generator in own]
        observer = ObservedOps(self._known_ops)
        with observer, record_comms() as ledger:
            result = func(*args, **kwargs)
        call.communication = _collectives(ledger)
        is_random = observer.draws and not all(map(torch.equal, random_state(), before))
        is_random |= not all(map(torch.equal, [generator.get_state() for generator in own], own_before))
        with no_torch_function():
            call.changed = observer.changed or self._taken_over
            if self._taken_over == "registered function" and not observer.changed and not observer.has_plain:
                call.changed = ""  # it has only called ops on DTensors, which run on the local tensors
            if call.changed and not is_random and self._is_local(func, args, kwargs):
                call.changed = ""
            call.is_random = is_random
            call.has_gaps = any(isinstance(x, DTensor) and not local_of(x).is_contiguous() for x in tensors)
            if self._taken_over == "plain operand" and not any(
                r.value is None and r.requires_grad for r in call.inputs
            ):
                call.changed = observer.changed  # it is the same on every rank, as are its uses
            written = [x for x, version in zip(tensors, before_call) if versions(x) != version]
            call.writes = bool(written)
            self.written_memory.update(filter(None, map(memory_of, written)))
            if not written:
                call.local_run = run_on_locals(func, args, kwargs, result, is_random)
            elif not is_random and not call.changed:
                call.local_run = LocalRun.SAME  # once is enough
            made = list(tensors_in(result))
            if torch.is_grad_enabled():
                self._watch([*made, *written], edges, call)
            given = set(map(id, tensors)) - set(map(id, written))
            for x in {id(x): x for x in (*made, *written)}.values():
                if isinstance(x, DTensor) and id(x) not in given and not self.name_of(x):
                    self._value_of_result(x)
            call.outputs = [self._record(x) for x in made]
        return result, made

    def give_up(self, why: str) -> None:
        """No static forward comes of this step; nothing is known of its tensors from here on."""
        self.problems.setdefault("", why)
        self._alive = native_tape().Run(native_tape().Tape(), None)

    def take_over(self, what: str) -> None:
        """The runtime runs something in place of the current call."""
        self._taken_over = what

    def _is_local(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether what runs in place of the function is that function of local tensors."""
        entry = entries().get(func)
        is_local = entry.is_local if entry is not None and self._taken_over == "registered function" else None
        return is_local is not None and is_local(*args, **kwargs)

    def checkpointed(self, function: Callable[..., Any], is_reentrant: bool) -> Callable[..., Any]:
        """What the recomputation of ``function`` runs: the ops as they run while they are recorded."""
        if is_reentrant:
            self.problems[""] = "it checkpoints activations with use_reentrant=True"
        if self._is_unrecorded or ("" in self.problems and not self.recomputes):
            return function
        self.recomputes = True
        self._captured.update(map(id, captured_tensors(function)))

        @functools.wraps(function, updated=())
        def run(*args: Any, **kwargs: Any) -> Any:
            with WithObservedOps():
                return function(*args, **kwargs)

        return run

    # Modules

    def boundary(self, placing: Placing, x: DTensor, stages: Stages, is_shared: bool) -> DTensor:
        """A tensor that an entry of the plan brings to other placements at the boundary of a module."""
        path = placing.instruction.path
        with no_torch_function():
            is_known = getattr(x, "_vescale_value", None) is not None or bool(self.name_of(x))
            arguments = Arguments((x,), {}, self.number_of if is_known else lambda _: None, self._views)
            record = self._record(x)
            if self._is_of_other_unit(record):
                self.problems[path] = "the plan places a parameter of a unit that does not run"
            edges = edges_of([x], [record])
            convert = stages.convert_once if is_shared else stages.convert
            with record_comms() as ledger:
                made = convert(x, placing.requester, placing.outdated)
            if getattr(made, "_vescale_value", None) is None:
                self._value_of_result(made)
                if torch.is_grad_enabled():
                    self._watch([made], edges, None)
            found = Boundary(placing, record, self._record(made), _collectives(ledger))
            self.boundaries.append(found)
            self._placed.append((made, versions(made)))
            result = self._number_of_result(made)
            self.events.append(BoundaryEvent(found, path, arguments, self._settings(), result))
        return made

    def call_module(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The call of a part of the model."""
        with no_torch_function():
            given = list(tensors_in((args, kwargs)))
            if not self._is_unrecorded:
                self._refuse_unseen(given, sys._getframe(2))
            arguments = Arguments((args, kwargs), {}, self.number_of, self._views)
            inputs = [self._record(x) for x in given]
            del given
        event = ModuleEvent(path, arguments, self._settings(), inputs)
        self.events.append(event)
        is_unrecorded, num_placed = self._is_unrecorded, len(self._placed)
        self._is_unrecorded = is_unrecorded or path in self.problems
        try:
            result = call_module(module, args, kwargs)
        finally:
            self._is_unrecorded = is_unrecorded
        with no_torch_function():
            if any(versions(x) != before for x, before in self._placed[num_placed:]):
                self.problems[""] = f"{path} writes to an input that the plan places"
            del self._placed[num_placed:]
            made = list(tensors_in(result))
            event.outputs = [self._record(x) for x in made]
            event.results = tuple(map(self._number_of_result, made))
            event.end = len(self.events)
        self.module_calls.setdefault(path, []).append((inputs, list(event.outputs)))
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


def memory_of(x: torch.Tensor) -> int:
    """The address of a tensor's memory; 0: it has none."""
    own = own_part(x)
    return own.untyped_storage().data_ptr() if own.layout is torch.strided and not own.is_meta else 0


def has_attributes(x: torch.Tensor) -> bool:
    """Whether a program has given a tensor attributes."""
    return any(not name.startswith("_") for name in x.__dict__)


def captured_tensors(function: Any) -> Iterator[torch.Tensor]:
    """The tensors that a function holds: arguments of a partial one, and what its closure has."""
    held = [*getattr(function, "args", ()), *getattr(function, "keywords", {}).values()]
    for cell in getattr(function, "__closure__", None) or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # it is empty
            continue
    for value in held:
        if isinstance(value, types.FunctionType | functools.partial):
            yield from captured_tensors(value)
        else:
            yield from tensors_in(value)


def kept_tensors(run: Any, is_expected: Callable[[int, torch.Tensor], bool]) -> list[tuple[int, torch.Tensor]]:
    """Values of a forward that Python objects outside of autograd's graph hold."""
    return [(number, x) for number, x in run.held() if not is_expected(number, x)]


_PAUSES = [0.001 * 2**number for number in range(11)]  # two seconds


def still_kept(find: Callable[[], list[tuple[int, torch.Tensor]]]) -> list[tuple[int, torch.Tensor]]:
    """What ``find`` finds, and does not only because nobody has let go of it yet: a cycle of garbage, or a thread of gloo
    that waits for the interpreter's lock. Other ranks may find nothing, and take the step as a static one."""
    if not find():  # which must not hold them when they are asked again
        return []
    gc.collect()
    for pause in _PAUSES:
        if not find():
            return []
        time.sleep(pause)
    return find()


def _held_in(value: Any) -> Iterator[Any]:
    """What lists and dictionaries hold, in order."""
    if isinstance(value, dict):
        yield tuple(value)
    if isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield id(item) if isinstance(item, torch.Tensor) else type(item)
            yield from _held_in(item)


def _collectives(ledger: Ledger) -> list[str]:
    return [f"{record.op} over {record.axes or f'{record.num_ranks} ranks'}" for record in ledger.records]

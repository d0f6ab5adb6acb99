"""Which functions a recorded forward ran, from where, and which of their instructions."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import logging
import os
import sys
import sysconfig
import types
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.compat import MODULE_CALL, native_static, no_torch_function, note, tensors_in
from vescale.runtime import CheckpointedForward
from vescale.static._decisions import decision_points
from vescale.static._exchanged_code import is_exchanged
from vescale.static._selection_points import selection_points
from vescale.static._source import code_objects, source_of

_TORCH = os.path.dirname(torch.__file__) + os.sep
_MODULES = os.path.join(_TORCH, "nn", "modules") + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARY = tuple({sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib")})
_PACKAGES = tuple({sysconfig.get_paths()[name] + os.sep for name in ("purelib", "platlib")})
_DECORATORS = os.path.join(_TORCH, "utils", "_contextlib.py")  # torch.no_grad() around a forward
# What runs a module's forward.
_MODULE_CALLS = frozenset([*code_objects(MODULE_CALL.__code__), nn.Module.__call__.__code__])
_MODULE_FILE = MODULE_CALL.__code__.co_filename
_IN_CPP = (types.BuiltinFunctionType, types.MethodDescriptorType, types.MethodWrapperType, types.WrapperDescriptorType)

Site = tuple["FunctionCall", int, int]


class FunctionCall:
    """A function, reached by one way from the forward of a module; loops reach the same one several times.

    Attributes:
        module: path of the module whose forward leads here.
        code: of the function.
        callers: (function, part, offset) of each call; None: other code than the model's is between them.
        is_of_module: whether it is the forward of a module, which is called with the module's arguments.
        is_direct: whether the caller's own instruction calls the function, and no other code between them.
        parts: the code objects of the function and of those defined in it; a position in a function is (part, offset).
        visits: how often the instruction at a position ran.
        called: the functions called from here, by position and code object.
        owner: the class of ``self``, if that was one module or several of a class.
        is_of_made_module: whether it is that of a module which the forward has made, whose attributes nobody compares.
        points: where it decides what runs next: nodes of the source, by position.
        selections: where it may choose one of several tensors: nodes, by position.
    """

    def __init__(self, module: str, code: types.CodeType, is_of_module: bool, is_direct: bool) -> None:
        self.module, self.code, self.is_of_module, self.is_direct = module, code, is_of_module, is_direct
        self.parts = {part: number for number, part in enumerate(code_objects(code))}
        self.visits: Counter[tuple[int, int]] = Counter()
        self.called: dict[tuple[int, int, types.CodeType], FunctionCall] = {}
        self.callers: set[Site | None] = set()
        self.owner: type[nn.Module] | None = None
        self.is_of_made_module = False
        self._is_called = False
        source = source_of(code)
        self.points = {} if source is None else decision_points(source)
        self.selections = {} if source is None else selection_points(source)

    def note_owner(self, owner: Any) -> None:
        """Before the function runs; ``owner``: what it calls ``self``."""
        kind = type(owner) if isinstance(owner, nn.Module) else None
        self.owner = None if self.is_of_made_module else kind if not self._is_called or kind is self.owner else None
        self._is_called = True

    def all_below(self) -> Iterator[FunctionCall]:
        """This one and all that are called from it."""
        yield self
        for call in self.called.values():
            yield from call.all_below()


class CallTree:
    """Records the functions that a thread runs while it is entered.

    Args:
        current_module: the running module and its path; None outside of the model.
    """

    def __init__(self, current_module: Callable[[], tuple[nn.Module, str] | None]) -> None:
        self.forwards: dict[str, FunctionCall] = {}  # by the module's path
        self.functions: dict[types.CodeType, dict[str, Any]] = {}  # all that ran, with their globals
        self.on_function: Callable[[types.CodeType, dict[str, Any]], None] = lambda code, held: None
        """Called with the code and the globals of each function before it runs for the first time."""
        self.decided: list[tuple[FunctionCall, tuple[int, ...], str]] = []
        """What ran at ``points`` of functions, in order, and in which module."""
        self.has_exchanged_code = False
        """Whether another thread had exchanged the code of a function that ran, of which nothing is known then."""
        self.selections: Any = None
        """The :class:`Selections` of the step; None: nobody looks at them."""
        self.applied: list[FunctionCall] = []
        """Forwards of the model's own functions of autograd, of which a backward runs later."""
        self._current_module = current_module
        self._is_root, self._is_paused = True, False
        self._running: list[tuple[types.FrameType, FunctionCall]] = []

    def __enter__(self) -> CallTree:
        self._before, self._collects = sys.gettrace(), gc.isenabled()
        note("static._call_tree:process", "sys.settrace", "gc")
        gc.disable()  # callbacks of the garbage collector are no functions of the model
        self._follow()
        return self

    def __exit__(self, *_: Any) -> None:
        sys.settrace(self._before)
        if self._collects:
            gc.enable()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, functions are not followed, and Python runs as fast as without a trace function."""
        is_followed, self._is_paused = not self._is_paused, True
        sys.settrace(None)
        try:
            yield
        finally:
            if is_followed:
                self._is_paused = False
                self._follow()

    @contextlib.contextmanager
    def around(self, function: Any) -> Iterator[None]:
        """Around a call of ``function`` inside of :meth:`paused`. Functions are followed, unless it is one in C++, which
        calls none of the model's."""
        if isinstance(function, _IN_CPP):
            yield
            return
        self._is_paused = False
        self._follow()
        try:
            yield
        finally:
            self._is_paused = True
            sys.settrace(None)

    def _follow(self) -> None:
        sys.settrace(self._called)
        native = native_static()
        if native is not None:  # most functions that run are none of the model's
            native.filter_trace(is_recorded)

    def repeat_decided(self, decided: slice, path: str, other: str) -> None:
        """The module ``other`` has decided what ``path`` had."""
        self.decided += [
            (call, nodes, other + module.removeprefix(path)) for call, nodes, module in self.decided[decided]
        ]

    def site(self, frame: types.FrameType | None) -> tuple[Site, bool] | None:
        """Where the recorded functions are, and whether only PyTorch's own wrappers of functions are between there and
        ``frame``, which runs a torch function; None outside of recorded functions."""
        if not self._running:
            return None
        top, call = self._running[-1]
        is_direct = True
        while frame is not None and frame is not top:
            is_direct &= _is_wrapper(frame.f_code)
            frame = frame.f_back
        if frame is None:
            return None
        return (call, call.parts[top.f_code], top.f_lasti), is_direct

    @property
    def running(self) -> tuple[types.FrameType, FunctionCall] | None:
        """The function that runs; None outside of recorded functions."""
        return self._running[-1] if self._running else None

    def _called(self, frame: types.FrameType, event: str, _: Any) -> Any:
        if not is_recorded(frame.f_code.co_filename) or self._is_of_the_runtime(frame.f_back):
            return None
        if makes_context_of_another(frame):
            return None
        if frame.f_code not in self.functions:
            self.has_exchanged_code |= is_exchanged(frame.f_code)
            self.functions[frame.f_code] = frame.f_globals
            self.on_function(frame.f_code, frame.f_globals)
        call = self._find(frame)
        if call is None:
            return None
        if _is_applied(frame):
            self.applied.append(call)
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if frame.f_code is call.code:
            call.note_owner(frame.f_locals.get("self"))
        self._running.append((frame, call))
        part, visits, points, decided = call.parts[frame.f_code], call.visits, call.points, self.decided
        selections = {} if self.selections is None else call.selections

        def trace(frame: types.FrameType, event: str, _: Any) -> Any:
            if event == "opcode":
                place = part, frame.f_lasti
                visits[place] = visits.get(place, 0) + 1
                if place in points:
                    decided.append((call, points[place], call.module))
                if place in selections:
                    self.selections.note(frame, call, selections[place])
            elif event == "return":
                while self._running and self._running.pop()[0] is not frame:
                    pass
            return trace

        return trace

    def _is_of_the_runtime(self, back: types.FrameType | None) -> bool:
        """Whether the model's function that runs has a module loaded, or a message logged, which may happen once in a
        process."""
        top = self._running[-1][0] if self._running else back
        while back is not None:
            file = back.f_code.co_filename
            if file.startswith("<frozen importlib") or file == logging.__file__:
                return True
            if back is top:
                return False
            back = back.f_back
        return False

    def _find(self, frame: types.FrameType) -> FunctionCall | None:
        code, back = frame.f_code, _without_checkpoint(frame.f_back)
        if self._is_root and not self.forwards:
            root = self.forwards[""] = FunctionCall("", code, True, True)
            root.callers.add(None)
            return root
        if back is not None and back.f_code in _MODULE_CALLS:
            running = self._current_module()
            if running is None:
                return None
            module, path = running
            if back.f_locals.get("self") is module:
                known = self.forwards.get(path)
                if known is None or known.code is not code:
                    known = self.forwards[path] = FunctionCall(path, code, True, True)
                known.callers.add(self._caller(back))
                return known
        if not self._running:
            return None
        for below, call in reversed(self._running):
            if code in call.parts and (code is not call.code or _is_same_function(frame, below)):
                if code is call.code:
                    call.callers.add(self._caller(back))
                return call
        top, call = self._running[-1]
        position = call.parts[top.f_code], top.f_lasti
        key = (*position, code)
        if key not in call.called:
            is_module = back is not None and back.f_code in _MODULE_CALLS
            while back is not None and back is not top and back.f_code in _MODULE_CALLS:
                back = back.f_back  # a module that the function has made for itself
            made = call.called[key] = FunctionCall(call.module, code, is_module, back is top)
            made.is_of_made_module = is_module
        call.called[key].callers.add(self._caller(back))
        return call.called[key]

    def _caller(self, back: types.FrameType | None) -> Site | None:
        """The running function's call, if nothing but a module's call is between it and the function above ``back``."""
        if not self._running:
            return None
        top, call = self._running[-1]
        while back is not None and back is not top and back.f_code.co_filename.startswith((_MODULE_FILE, _OURS)):
            back = back.f_back
        return (call, call.parts[top.f_code], top.f_lasti) if back is top else None


def makes_context_of_another(frame: types.FrameType) -> bool:
    """Whether ``torch.no_grad()`` or the like is called by others than the model: by what runs beside its functions."""
    if frame.f_code.co_filename != _DECORATORS or frame.f_code.co_name != "__new__":
        return False
    return frame.f_back is None or not is_recorded(frame.f_back.f_code.co_filename)


def _is_applied(frame: types.FrameType) -> bool:
    """Whether a frame runs the forward of a ``torch.autograd.Function`` that DTensors with gradients are given.

    Since torch 2.14, ``Function.apply`` is no function of Python, and leaves no frame between the caller and the forward.
    """
    given = list(frame.f_locals.values())
    if given and isinstance(given[0], nn.Module):  # a method of a module
        return False
    tensors = [x for x in tensors_in(given) if isinstance(x, DTensor)]
    has_context = bool(given) and isinstance(given[0], torch.autograd.function.FunctionCtx)
    if not tensors or not (has_context or frame.f_code in _codes_of_functions(torch.autograd.Function)):
        return False
    with no_torch_function():  # what is recorded is the model's, not what is looked at here
        return any(x.requires_grad for x in tensors)


def _codes_of_functions(base: Any) -> Iterator[types.CodeType]:
    """Code of the forwards of all subclasses of ``torch.autograd.Function``."""
    for kind in base.__subclasses__():
        code = getattr(inspect.unwrap(kind.forward), "__code__", None)
        if code is not None:
            yield code
        yield from _codes_of_functions(kind)


def _is_same_function(frame: types.FrameType, other: types.FrameType) -> bool:
    """Whether two frames with the same code run the same function: functions that a decorator returns share their code and
    differ in their free variables."""
    if other.f_code is not frame.f_code:
        return not frame.f_code.co_freevars  # ``other`` runs a part of the function
    own, others = frame.f_locals, other.f_locals
    return all(own.get(name) is others.get(name) for name in frame.f_code.co_freevars)


def _without_checkpoint(frame: types.FrameType | None) -> types.FrameType | None:
    """What called a module's forward: the module's call also where an entry of the plan checkpoints the forward."""
    below, is_checkpointed = frame, False
    while (
        below is not None and below.f_code.co_filename.startswith((_OURS, _TORCH)) and below.f_code not in _MODULE_CALLS
    ):
        is_checkpointed |= below.f_code is CheckpointedForward.forward.__code__
        below = below.f_back
    return below if is_checkpointed else frame


@functools.cache
def is_recorded(file: str) -> bool:
    """Whether the functions of a file belong to models rather than to what they are made with."""
    if file.startswith(_OURS) or not file.endswith(".py") or file == _MODULE_FILE:
        return False
    if file.startswith(_TORCH):
        return file.startswith(_MODULES) or file == _DECORATORS
    return file.startswith(_PACKAGES) or not file.startswith(_LIBRARY)


def is_of_torch(file: str) -> bool:
    """Whether a function is one of PyTorch's modules."""
    return file.startswith(_TORCH)


@functools.cache
def _is_wrapper(code: types.CodeType) -> bool:
    """Whether a function only passes a call to a torch function on, to modes and subclasses."""
    file = code.co_filename
    return file.startswith(
        (_OURS, os.path.join(_TORCH, "overrides.py"), os.path.join(_TORCH, "_tensor.py"))
    ) or file in (
        os.path.join(_TORCH, "_ops.py"),
        os.path.join(_TORCH, "functional.py"),
        os.path.join(_TORCH, "_jit_internal.py"),
        os.path.join(_TORCH, "nn", "functional.py"),
    )

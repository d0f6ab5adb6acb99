"""The autograd engine and this thread's modes: backwards, nodes, hooks, holders of memory, the compiler, the profiler."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd import Variable, forward_ad, profiler
from torch.autograd.graph import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.torch_version import TorchVersion
from torch.utils import checkpoint as checkpointing
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as _push_dispatch_mode

from vescale import csrc
from vescale.compat.devices import running_accelerator
from vescale.compat.ledger import note

P = ParamSpec("P")
R = TypeVar("R")


# Raised inside of a checkpointed function when a recomputation has saved all that the backward needs.
EarlyStop: type[Exception] = checkpointing._StopRecomputationError


def set_versions(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """Let the tensors count as unmodified since they had these versions: their memory holds what it held then."""
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


def version_holder(x: torch.Tensor) -> torch.Tensor:
    """A tensor without elements whose version counts the writes to ``x`` and its views; it does not keep their memory."""
    version = x._version
    with torch.no_grad():
        holder = x.detach()
        holder.set_(torch.empty(0, dtype=x.dtype, device=x.device).untyped_storage())  # counts, too
    set_versions((holder,), (version,))
    return holder


def permit_writes(view: torch.Tensor, source: torch.Tensor) -> None:
    """Let in-place ops write to a view that an autograd function has made of ``source`` where they may write to that.

    After such a write, gradients pass the view unchanged: the function's backward belongs to the values before.
    """
    autograd = torch._C._autograd
    meta = autograd._get_creation_meta(source) if source._is_view() else autograd.CreationMeta.DEFAULT
    autograd._set_creation_meta(view, meta)


_QUEUED: set[int] = set()
"""Those that are there of :class:`_AtEnd`."""


class _AtEnd:
    """What the engine calls at the end of the outermost backward; it alone holds it, and drops it with the backward."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback: Callable[[], None] | None = callback
        _QUEUED.add(id(self))

    def __call__(self) -> None:
        outer, callback = torch._C._current_autograd_node(), self._callback
        assert callback is not None
        if outer is None:
            callback()
            return
        handle: list[Any] = []

        def hand_on(*_: Any) -> None:
            handle[0].remove()
            at_end_of_backward(callback)

        handle.append(outer.register_hook(hand_on))

    def __del__(self) -> None:
        self._callback = None  # first: what follows from the end of a backward happens here
        _QUEUED.discard(id(self))


def await_broken_off_backward() -> None:
    """An exception has left a backward. Autograd's own threads, which run it on a device, hold it for a while after that;
    return when it is gone, so that nothing which follows from its end happens behind the caller's back."""
    deadline = time.monotonic() + 1.0  # another thread may run a backward of its own
    while _QUEUED and current_backward() == -1 and running_accelerator() is not None and time.monotonic() < deadline:
        time.sleep(1e-4)


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` once when the outermost backward that is running has ended, on the thread that called it.

    A backward may run inside another (reentrant activation checkpointing), and the engine ends each with its callbacks.
    An inner one's is handed on to the node of the outer one that started it. RuntimeError outside of any backward.
    """
    Variable._execution_engine.queue_callback(_AtEnd(callback))


def num_storage_users(tensor: torch.Tensor) -> int:
    """How many tensors and Python objects hold the memory of ``tensor``: to compare with what it was before."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def has_saved_tensors_hooks(*, of_checkpoints: bool = True) -> bool:
    """Whether hooks get what ops of this thread save for their backward; ``of_checkpoints``: also those of checkpoints."""
    found = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return found is not None and (of_checkpoints or not found[0].__module__.startswith(("torch.utils.", "vescale.")))


DATA_VIEWS = "_vescale_data_views"
"""The attribute of a parameter with the list that takes ``(id of the parameter, what its .data gave)``, each time."""

_use_count: Callable[[torch.Tensor], int] | None = getattr(torch.Tensor, "_use_count", None)
TELLS_HOLDERS = _use_count is not None
"""Whether :func:`are_unheld` can tell; else it says that they are not."""


def are_unheld(tensors: list[torch.Tensor]) -> bool:
    """Whether nothing holds these very tensors, in Python or in C++, but the list that they are in.
    Who holds their memory by other tensors is :func:`num_storage_users`'s to tell."""
    if not tensors:
        return True
    if _use_count is None:
        return False
    return max(map(sys.getrefcount, tensors)) == _NUM_HOLDERS_OF_UNHELD and max(map(_use_count, tensors)) == 1


def are_dtensors_unheld(dtensors: list[Any], parts: list[torch.Tensor], specs: list[Any]) -> bool:
    """Whether each DTensor has its local tensor and spec, and nothing holds it, or its local tensor, but these lists."""
    if not dtensors:
        return True
    if _use_count is None or any(
        x._local_tensor is not part or x._spec is not spec or x.requires_grad
        for x, part, spec in zip(dtensors, parts, specs, strict=True)
    ):
        return False
    counts = max(map(sys.getrefcount, dtensors)), max(map(sys.getrefcount, parts)) - 1  # the DTensor's own
    return set(counts) == {_NUM_HOLDERS_OF_UNHELD} and max(map(_use_count, [*dtensors, *parts])) == 1


# What counting itself adds differs between versions of Python.
_NUM_HOLDERS_OF_UNHELD = max(map(sys.getrefcount, [torch.empty(0)]))


def is_captured() -> bool:
    """Inside a hook of a leaf: whether ``torch.autograd.grad`` returns the leaf's gradient instead of accumulating it."""
    try:
        torch._C._will_engine_execute_node(torch._C._current_autograd_node())
    except RuntimeError:  # the engine refuses the question for leaves whose gradient it returns
        return True
    return False


def has_dispatch_modes() -> bool:
    """Whether a TorchDispatchMode sees this thread's ops, other than the one that stands in for the C++ dispatcher."""
    return torch._C._len_torch_dispatch_stack() > 0 and not all(
        getattr(mode, "stands_in_for_dispatcher", False) for mode in _get_current_dispatch_mode_stack()
    )


class ThreadValue:
    """A value of a thread, and of the threads on which autograd runs the backwards that it starts: on a device these are
    others, where ``threading.local`` has nothing."""

    def __init__(self, name: str) -> None:
        self._key = f"vescale {name}"

    def get(self) -> Any:
        """None outside of :meth:`within`."""
        return torch._C._get_obj_in_tls(self._key) if torch._C._is_key_in_tls(self._key) else None

    @contextlib.contextmanager
    def within(self, value: Any) -> Iterator[None]:
        before = self.get()
        self._set(value)
        try:
            yield
        finally:
            self._set(before)

    def _set(self, value: Any) -> None:
        if _IS_STOLEN:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
        torch._C._stash_obj_in_tls(self._key, value)


# Before 2.12, PyTorch releases what it stashes without having taken a reference: strings that others use are freed.
_IS_STOLEN = TorchVersion(torch.__version__) < "2.12"


def is_in_dispatch_mode(*kinds: type) -> bool:
    """Whether a TorchDispatchMode of one of these classes sees this thread's ops."""
    return any(isinstance(mode, kinds) for mode in _get_current_dispatch_mode_stack())


def has_function_modes() -> bool:
    """Whether a TorchFunctionMode sees this thread's calls; not while one runs a call that it has seen."""
    return bool(torch._C._len_torch_function_stack() > 0)


def num_function_modes() -> int:
    """How many TorchFunctionModes see this thread's calls; not those of ``torch.set_default_device`` and ``with device:``,
    which leave all calls as they are but those that make tensors of nothing."""
    if not torch._C._len_torch_function_stack():
        return 0
    return sum(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())


@contextlib.contextmanager
def with_default_device() -> Iterator[None]:
    """Inside of ``no_torch_function``, for code of the program: what makes tensors has the device of
    ``torch.set_default_device``, or ``with device:``, again; no other mode sees anything."""
    modes = _get_current_function_mode_stack()
    devices = [mode for mode in modes if type(mode) is DeviceContext]
    if not devices:
        yield
        return
    for _ in modes:
        _pop_mode()
    _push_mode(devices[-1])
    try:
        with torch._C._EnableTorchFunction():
            yield
    finally:
        _pop_mode()
        for mode in modes:
            _push_mode(mode)


class Modes:
    """The modes of the program that see this thread's calls and ops as the forward begins: not those of PyTorch, but the
    default device, nor this library's, but those with an attribute ``sees_recomputations``."""

    def __init__(self) -> None:
        self._found = [[mode for mode in stack if _is_programs(mode)] for stack in _stacks()]

    def again(self) -> AbstractContextManager[None]:
        """Inside, they and no others of a program see calls and ops again, below all other modes."""
        stacks = _stacks()
        if all([m for m in now if _is_programs(m)] == found for now, found in zip(stacks, self._found)):
            return contextlib.nullcontext()
        return _with_stacks(
            stacks, [[*found, *(m for m in now if not _is_programs(m))] for now, found in zip(stacks, self._found)]
        )


def _stacks() -> list[list[Any]]:
    return [
        _get_current_function_mode_stack() if torch._C._len_torch_function_stack() else [],
        _get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else [],
    ]


def _is_programs(mode: Any) -> bool:
    is_others = type(mode).__module__.partition(".")[0] not in ("torch", "vescale")
    return is_others or type(mode) is DeviceContext or getattr(mode, "sees_recomputations", False)


@contextlib.contextmanager
def _with_stacks(before: list[list[Any]], inside: list[list[Any]]) -> Iterator[None]:
    def replace(old: list[list[Any]], new: list[list[Any]]) -> None:
        for pop, push, gone, come in zip(_POPS, _PUSHES, old, new):
            for _ in gone:
                pop()
            for mode in come:
                push(mode)

    replace(before, inside)
    try:
        yield
    finally:
        replace(inside, before)


_POPS: Sequence[Callable[[], Any]] = _pop_mode, _pop_dispatch_mode
_PUSHES: Sequence[Callable[[Any], Any]] = _push_mode, _push_dispatch_mode


def is_tracing() -> bool:
    """Whether ``torch.fx`` traces this thread's ops."""
    return get_proxy_mode() is not None


def in_backward() -> bool:
    """Whether this thread is inside of a backward."""
    return current_backward() != -1


def current_backward() -> int:
    """What tells the running backward from all others; -1 outside of one."""
    return int(torch._C._current_graph_task_id())


PACKED: Any = object()
"""What :func:`saved_operands` gives for what hooks have packed."""


@functools.cache
def _names_of_operands() -> dict[str, set[str]]:
    """The arguments of all ops of PyTorch's, by the name of their derivatives' nodes."""
    found: dict[str, set[str]] = {}
    for schema in torch._C._jit_get_all_schemas():
        op = schema.name.removeprefix("aten::")
        node = "".join(part.title() for part in op.split("_"))  # as PyTorch's code generator names it
        found.setdefault(node, set()).update(argument.name for argument in schema.arguments)
    return found


def saved_operands(node: Node) -> Iterator[tuple[str, Any]]:
    """(name, value) of what a node of PyTorch's keeps for its backward of the arguments of its op, and of numbers and sizes;
    ``PACKED`` for tensors that hooks have packed: unpacking may compute them anew. What has been released, or written to
    since, is left out: its backward tells of it. Tensors that the op has made are left out."""
    operands = _names_of_operands().get(node.name().rstrip("0123456789").removesuffix("Backward"), ())
    for name in dir(node):
        if not name.startswith("_saved_"):
            continue
        try:
            raw = getattr(node, f"_raw{name}", ())
            if any(each.unpack_hook is not None for each in (raw if isinstance(raw, tuple | list) else (raw,))):
                value = PACKED
            else:
                value = getattr(node, name)
        except RuntimeError:
            continue
        name = name.removeprefix("_saved_")
        if name in operands or not (value is PACKED or isinstance(value, torch.Tensor)):
            yield name, value


def is_computed(x: torch.Tensor) -> bool:
    """Whether a tensor is in a graph, and no leaf. False for a view whose base was written to where autograd does not allow
    it: using it raises."""
    try:
        return not x.is_leaf
    except RuntimeError:
        return False


def before_backward(tensor: torch.Tensor, call: Callable[[], None]) -> None:
    """Have the node that has made a tensor call Python before it runs. In C++ (``csrc/step_marks.cpp``), where it is built,
    gradients do not become Python objects for that."""
    native = csrc.step_marks()
    if native is not None:
        native.before_backward(tensor, call)
        return
    node = tensor.grad_fn
    assert node is not None
    node.register_prehook(lambda _: call())


def will_run(node: Node) -> bool:
    """Inside a backward: whether it runs this node of a graph, or has run it. Not of leaves (:func:`is_captured`)."""
    return bool(torch._C._will_engine_execute_node(node))


def has_hooks(tensor: torch.Tensor) -> bool:
    """Whether somebody has registered a hook of a leaf's gradient."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def permit_gradients_of_any_dtype(parameter: torch.Tensor, only: torch.dtype | None = None) -> None:
    """``parameter.grad`` may be of another dtype, where this version of torch can permit it; of ``only`` that one again."""
    if hasattr(torch.Tensor, "grad_dtype"):
        parameter.grad_dtype = only


def run_post_accumulate_hooks(parameter: torch.Tensor) -> None:
    """What autograd does after it has accumulated into ``parameter.grad``, for a gradient that was put there."""
    hooks = parameter._post_accumulate_grad_hooks
    if hooks:
        for hook in tuple(hooks.values()):
            hook(parameter)


def current_autograd_node() -> Any:
    """The autograd node that this thread is evaluating, or None outside backward."""
    return torch._C._current_autograd_node()


def in_transform() -> bool:
    """Whether a function transform (``torch.vmap``, ``torch.func``) is running on this thread."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def in_dual_level() -> bool:
    """Whether tensors may have tangents: inside of ``torch.autograd.forward_ad.dual_level()``."""
    return forward_ad._current_level >= 0


def has_tangent(x: torch.Tensor) -> bool:
    """Whether forward-mode differentiation has given the tensor a tangent."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def without_transforms(x: torch.Tensor) -> torch.Tensor:
    """The tensor that function transforms (``torch.vmap``, ``torch.func``) have wrapped; ``x`` itself outside of them."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        x = functorch.get_unwrapped(x)
    return x


def node_sequence(node: Any) -> int:
    """The number an autograd node got when forward made it; nodes that forward did not make have very large ones."""
    return int(node._sequence_nr())


def sequence_number() -> int:
    """The number that the next autograd node of this thread will get."""
    return int(torch._C._autograd._get_sequence_nr())


# What torch.compile does with this thread's frames; None: it lets them run as they are. Returns what it did before.
set_compiler = torch._C._dynamo.eval_frame.set_eval_frame


def suspend_compiling() -> Any:
    """Let this thread run Python as it is, also in a compiled function. Returns what to resume with; None: nothing."""
    found = set_compiler(None)
    if found is not None:
        note("compat.autograd:process", found)
    return found


def resume_compiling(compiler: Any) -> None:
    if compiler is not None:
        set_compiler(compiler)


def eagerly(function: Callable[P, R]) -> Callable[P, R]:
    """Make ``torch.compile`` call a function as it is: owners, stores, hooks and kernels in C++ are nothing that can be
    traced. (``torch.compiler.disable`` as a decorator loads the compiler, half a second, and costs each call a
    microsecond.)"""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return call


_NOTHING = contextlib.nullcontext()


def profiled(name: str) -> contextlib.AbstractContextManager[Any]:
    """``torch.profiler.record_function``, whose two calls of the dispatcher are left out while no profiler runs."""
    return profiler.record_function(name) if profiler._is_profiler_enabled else _NOTHING


# What the autograd graph of a forward holds until its backward: read from the nodes, without unpacking anything.


def weak_node(tensor: torch.Tensor) -> Callable[[], Any]:
    """A function that returns the node that made the tensor, while the graph exists; without a compiler, while the tensor
    exists. It returns None for a view whose base was written to where autograd does not allow it: using it raises."""
    module: Any = csrc.dispatcher()
    if module is not None:
        try:
            found: Callable[[], Any] = module.WeakNode(tensor)
        except RuntimeError:  # from grad_fn
            return lambda: None
        return found
    reference = weakref.ref(tensor)

    def node() -> Any:
        alive = reference()
        return None if alive is None else alive.grad_fn

    return node


def held_tensors(roots: Iterable[Any], stop: Iterable[Any] = ()) -> Iterator[tuple[Any, torch.Tensor]]:
    """(node, tensor) for all that the graph from the nodes ``roots`` to those of ``stop`` has saved. What hooks have packed
    into something else than a tensor is left out, and so is what a backward has released."""
    module: Any = csrc.dispatcher()
    stack, seen = [node for node in roots if node is not None], {node for node in stop if node is not None}
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for saved in _saved_variables(node):
            data = _data(saved)
            if isinstance(data, torch.Tensor):
                yield node, data
        if module is not None:
            for tensor in module.held_by(node):
                yield node, tensor
        stack.extend(following for following, _ in node.next_functions if following is not None)


def _saved_variables(node: Any) -> Iterator[Any]:
    kind = type(node)
    names = _NAMES.get(kind)
    if names is None:
        names = _NAMES[kind] = tuple(name for name in dir(node) if name.startswith("_raw_saved_"))
    for name in names:
        try:
            value = getattr(node, name)
        except RuntimeError:  # released
            continue
        yield from value if isinstance(value, tuple | list) else (value,)


def _data(saved: Any) -> Any:
    try:
        return getattr(saved, "data", None)
    except RuntimeError:
        return None


# The attributes of each kind of node that hold saved variables.
_NAMES: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()

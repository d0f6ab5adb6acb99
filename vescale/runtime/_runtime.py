"""``Runtime``: the state of one parallelized model beside its parameters."""

from __future__ import annotations

import bisect
import copy
import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.checks import RandomStates, StepChecks, TrainedParameters, start_checks
from vescale.compat import (
    current_autograd_node,
    held_tensors,
    living_items,
    node_sequence,
    note,
    sequence_number,
    storage_of,
    tensors_in,
    weak_node,
)
from vescale.errors import NotPicklableError
from vescale.ir import Attention, Factory, Local, Program
from vescale.plans import AttentionMethod, MeshAxes
from vescale.runtime._gradient_hooks import GradientHooks
from vescale.runtime._implicit_site import ImplicitSite
from vescale.runtime._missing_values import MissingValues

# What a forward holds for its backward, on this rank: bytes by module and op.


_MAX_SIGNATURES = 32


@dataclass(frozen=True)
class Held:
    """Memory that is held: its bytes, the module and op that it is attributed to, and whether it is on the host."""

    num_bytes: int
    module: str
    op: str
    is_offloaded: bool = False


@dataclass
class SavedAccount:
    """The account of a model's last forward with gradients.

    Checkpointed modules enter what they hold while they run. What the rest of the graph holds is read from its nodes, when
    somebody asks; while checkpointed modules exist, also at the end of the first forward with outputs like these.

    Attributes:
        noted: by address of the memory.
        reads_graph: whether the graph is read at the end of forwards.
    """

    noted: dict[int, Held] = field(default_factory=dict)
    reads_graph: bool = False
    _roots: list[Callable[[], Any]] = field(default_factory=list)
    _known: dict[Any, dict[int, Held]] = field(default_factory=dict)
    _signature: Any = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> None:
        """A forward with gradients begins."""
        with self._lock:
            self.noted = {}

    def note(self, tensors: Iterable[Any], module: str, op: str, *, is_offloaded: bool = False) -> None:
        for tensor in tensors:
            storage = storage_of(tensor) if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage.nbytes():
                self.noted.setdefault(storage._cdata, Held(storage.nbytes(), module, op, is_offloaded))

    def end(self, output: Any, model: nn.Module, module_of: Callable[[Any], str | None]) -> None:
        """The outermost module has ended with ``output``."""
        if not torch.is_grad_enabled():
            return
        tensors = (output,) if type(output) is DTensor else tuple(tensors_in(output))
        self._roots = [weak_node(x) for x in tensors if x.requires_grad]
        self._signature = (
            model.training,
            tuple([(x.shape, x.dtype) for x in tensors]),
            tuple(sorted((held.module, held.op, held.num_bytes) for held in self.noted.values())) if self.noted else (),
        )
        if self.reads_graph and self._signature not in self._known:
            self._read(model, module_of)

    def total(self, model: nn.Module, module_of: Callable[[Any], str | None]) -> Sequence[Held] | None:
        """All that the last forward held when it had ended; None if that is not known."""
        if self._signature is None:
            return None
        if not (self.reads_graph and self._signature in self._known) and not self._read(model, module_of):
            return None
        return [*self._known[self._signature].values()]

    def _read(self, model: nn.Module, module_of: Callable[[Any], str | None]) -> bool:
        """Whether the graph is still there, and holds something."""
        roots = [node for root in self._roots if (node := root()) is not None]
        if self._roots and not roots:
            return False
        own = {
            storage._cdata for x in (*model.parameters(), *model.buffers()) if (storage := storage_of(x)) is not None
        }
        found = dict(self.noted)
        has_any = not self._roots
        for node, tensor in held_tensors(roots):
            has_any = True
            storage = storage_of(tensor)
            if storage is not None and storage.nbytes() and storage._cdata not in found:
                found[storage._cdata] = Held(storage.nbytes(), module_of(node) or "", node.name())
        if not has_any and not self.noted:
            return False  # a backward has released it
        if len(self._known) >= _MAX_SIGNATURES:
            self._known.clear()
        self._known[self._signature] = {key: held for key, held in found.items() if key not in own}
        return True


# Which module of a model made an autograd node, by the sequence number of the node.

# Marks that are kept, equal forwards counted once. Nodes of forwards before these belong to no module.
MAX_LENGTH = 4_000_000


@dataclass(frozen=True, slots=True)
class _Forward:
    """Nodes from ``start`` to before ``end``: ``wheres[i]`` made those from ``start + numbers[i]`` on."""

    start: int
    end: int
    marks: tuple[tuple[int, ...], tuple[Any, ...]]


class _Thread:
    def __init__(self) -> None:
        self.numbers: list[int] = []  # of the forward that is running
        self.wheres: list[Any] = []
        self.forwards: list[_Forward] = []


class ModuleTimeline:
    """The sequence numbers at which threads went from one module to another, of all models in the process.

    Each thread counts its nodes by itself. Models that run inside of others, and interleaved ones, need no distinction: a
    thread is in one module at a time. Forwards of a model usually are alike, and then share what is kept of them.

    ``csrc/timeline.h`` is the same in C++, and knows the thread of each node. Python does not: where several threads have
    used a number in forwards, the module is of the model to whose parameters the node's gradients go. Where they go to
    none, the thread that asks comes first, then the one that ran a forward last.
    """

    def __init__(self, max_length: int = MAX_LENGTH) -> None:
        self._max_length = max_length
        self._length = 0
        self._local = threading.local()
        self._threads: list[_Thread] = []
        self._order: deque[_Thread] = deque()  # of the finished forwards, the oldest first
        self._patterns: dict[Any, list[Any]] = {}  # marks -> [the same marks, how many forwards have them]
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._length

    def mark(self, where: Any) -> None:
        """From now on this thread runs the module of ``where``; None: it has left the outermost model."""
        thread = self._thread()
        number = sequence_number()
        if where is None:
            self._close(thread, number)
        elif thread.numbers and thread.numbers[-1] == number:
            thread.wheres[-1] = where
        elif not thread.wheres or thread.wheres[-1] is not where:
            thread.numbers.append(number)
            thread.wheres.append(where)

    def of_current_node(self) -> Any:
        """``where`` of the node that this thread evaluates in backward; None: of no model, or there is no such node."""
        node = current_autograd_node()
        return None if node is None else self.of_node(node)

    def of_node(self, node: Any) -> Any:
        number, own = node_sequence(node), self._thread()
        with self._lock:
            others = [thread for thread in reversed(self._order) if thread is not own]
        mine, threads = _find(own, number), dict.fromkeys((*others, *self._threads))
        found = [where for each in threads if each is not own and (where := _find(each, number)) is not None]
        return _of_model(node, mine, found) if found else mine

    def _thread(self) -> _Thread:
        found: _Thread | None = getattr(self._local, "thread", None)
        if found is None:
            found = self._local.thread = _Thread()
            self._threads.append(found)
        return found

    def _close(self, thread: _Thread, number: int) -> None:
        numbers, wheres = thread.numbers, thread.wheres
        thread.numbers, thread.wheres = [], []
        if not numbers or numbers[0] == number:  # it has made no nodes
            return
        start = numbers[0]
        marks = tuple(each - start for each in numbers), tuple(wheres)
        with self._lock:
            pattern = self._patterns.setdefault(marks, [marks, 0])
            if pattern[1] == 0:
                self._length += len(numbers)
            pattern[1] += 1
            thread.forwards.append(_Forward(start, number, pattern[0]))
            self._order.append(thread)
            self._length += 1
            while self._length > self._max_length and len(self._order) > 1:
                self._forget()

    def _forget(self) -> None:
        marks = self._order.popleft().forwards.pop(0).marks
        self._length -= 1
        pattern = self._patterns[marks]
        pattern[1] -= 1
        if pattern[1] == 0:
            self._length -= len(marks[0])
            del self._patterns[marks]


def _find(thread: _Thread, number: int) -> Any:
    numbers, wheres, start = thread.numbers, thread.wheres, 0
    if not numbers or number < numbers[0]:
        forwards = thread.forwards
        index = bisect.bisect_right(forwards, number, key=lambda forward: forward.start) - 1
        if index < 0 or number >= forwards[index].end:
            return None
        start = forwards[index].start
        numbers, wheres = forwards[index].marks  # type: ignore[assignment]
    elif number == 2**64 - 1:  # of leaves
        return None
    return wheres[bisect.bisect_right(numbers, number - start) - 1]


def _of_model(node: Any, mine: Any, others: list[Any]) -> Any:
    """The one whose model has the nearest parameter of a model that the node's gradients go to. None has it: ``mine``, for
    then the node may be of no module. They go to no parameter: the first."""
    owned = [(root, {id(x) for x in root.parameters()}) for root, _ in living_items(_MODELS)]
    seen = level = {node}
    while level:
        leaves = {id(getattr(each, "variable", None)) for each in level}
        roots = {root for root, parameters in owned if not parameters.isdisjoint(leaves)}
        if roots:
            known = ((where, getattr(where, "runtime", None)) for where in (mine, *others))
            return next((where for where, runtime in known if runtime is not None and runtime.root in roots), mine)
        level = {n for each in level for n, _ in each.next_functions if n is not None} - seen
        seen = seen | level
    return others[0] if mine is None else mine


class Where:
    """A module of a model, as the timeline names it; there is one for each. It does not keep the model."""

    __slots__ = ("_runtime", "path")

    def __init__(self, runtime: Runtime, path: str) -> None:
        self._runtime = weakref.ref(runtime)
        self.path = path

    @property
    def runtime(self) -> Runtime | None:
        """None: there is no such model any more."""
        return self._runtime()


class Runtime:
    """The state of one parallelized model.

    Attributes:
        mesh: the DeviceMesh of every DTensor in the model.
        program: the lowered plan that was installed.
        strict: whether the first implicit communication raises.
        sites: how often each implicit site communicated.
        reported_edits: the tensors for which a warning has proposed an entry: (path of a parameter or module, side).
        gradients: the hooks of its parameters, and their reducer.
        replicated: Replicate on every axis of the mesh.
        native: the module of the forward hooks in C++; None: they are in Python.
        timeline: attributes autograd nodes to modules; all models of a process share it.
        instructions: of each module, by path (:mod:`vescale.runtime._module_hooks`).
        checks: what its ranks compare before they communicate; num_forwards: how many of the model have begun;
            number: of the model among those that were compared there; trained: of its parameters on the mesh.
        compares_made: whether ranks compare the tensors that the running forward makes; runs_alike: False: some ranks may
            run a part on local tensors that others do not, and see none of those it makes.
        switches_on_later: whether the forward of the model itself switches the function mode on, where it needs it.
        early_inputs: ``(args, kwargs)`` of the model to what its forward gets in their place, and None; or to None, where
            the entries of the plan place them. None: there is no such function.
        missing_values: parameters that had none when the model was parallelized; None: not known.
        saved: what the last forward held for its backward.
        num_training_forwards: how many forwards with gradients have begun.
        last_offloaded: the forward that offloaded last, if it is still there.
        budgets: by the number of their entry in the plan.
        warned_of_state: whether the user was told that a checkpointed module writes to an argument that keeps tensors.
        warned_of_compiler: whether the user was told that torch.compile has no effect.
        random_state: of the default generator when a forward began whose values are compared.
        strays: modules, and names of plain parameters, or modules with some, that were registered there later.
    """

    def __init__(
        self, program: Program, mesh: DeviceMesh, gradients: GradientHooks, *, strict: bool, native: Any
    ) -> None:
        self.mesh = mesh
        self.program = program
        self.strict = strict
        self.gradients = gradients
        self.sites: dict[ImplicitSite, int] = {}
        self.reported_edits: set[tuple[str, str]] = set()
        self._lists: set[str] = set()
        self.replicated: tuple[Placement, ...] = (Replicate(),) * mesh.ndim
        self.native = native
        self.timeline = _timeline(native)
        self.warned_of_compiler = False
        self.switches_on_later = False
        self.early_inputs: Callable[..., Any] | None = None
        self.missing_values: MissingValues | None = None
        self.instructions: dict[str, Any] = {}
        self.saved = SavedAccount()
        self.num_training_forwards = 0
        self.last_offloaded: weakref.ref[Any] | None = None
        self.budgets: dict[int, Any] = {}
        self.warned_of_state = False
        self.random_states: RandomStates | None = None
        self.compares_made = False
        self.runs_alike = True
        self.differ_on_purpose: set[int] = set()
        self._local_regions = [f"{i.path}." if i.path else "" for i in program if isinstance(i.op, Local)]
        self.strays: list[tuple[weakref.ref[nn.Module], str]] = []
        self._factories = {i.path: tuple(i.op.placements) for i in program if isinstance(i.op, Factory)}
        self._attention = {i.path: i.op.methods for i in program if isinstance(i.op, Attention)}
        self.checks: StepChecks = start_checks(mesh)
        self.number = self.checks.num_models
        self.trained = TrainedParameters()
        self.one_backward = gradients.one_backward
        if self._local_regions:
            self.checks.names_gradients = False
        gradients.before_finish, gradients.is_compared = self.checks.finish, self.checks.is_comparing
        self.num_forwards = 0
        self._root: weakref.ref[nn.Module] | None = None
        self._adopted: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._wheres: dict[str, Where] = {}

    @staticmethod
    def of(model: nn.Module) -> Runtime | None:
        """The runtime of a parallelized model; None for other modules. A copy is adopted, if it has not run yet."""
        found: Runtime | None = model.__dict__.get(_RUNTIME)
        if found is not None and found._root is None:
            found.adopt(model, "")
        return found if found is not None and found.root is model else None  # a shallow copy has its original's runtime

    @staticmethod
    def around(module: nn.Module) -> Runtime | None:
        """The runtime of the parallelized model that the module is a part of; None for other modules."""
        found = (Runtime.of(model) for model, _ in living_items(_MODELS))
        return next((runtime for runtime in found if runtime is not None and runtime.has_adopted(module)), None)

    @property
    def axes(self) -> MeshAxes:
        return self.program.axes

    @property
    def root(self) -> nn.Module | None:
        """The model; None: a copy that has not run, or a model that is gone."""
        return self._root() if self._root is not None else None

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank has coordinate 0 on every axis of the mesh, and prints warnings."""
        return all(index == 0 for index in self.mesh.get_coordinate() or (1,))

    @property
    def has_local_regions(self) -> bool:
        return bool(self._local_regions)

    def is_in_local_region(self, name: str) -> bool:
        """Whether a tensor's module runs on local tensors."""
        return any(name.startswith(path) for path in self._local_regions)

    def where(self, path: str) -> Where:
        known = self._wheres.get(path)
        return self._wheres.setdefault(path, Where(self, path)) if known is None else known

    def pattern(self, path: str) -> str:
        """An expression for a module and those at its place in the other layers of lists."""
        parts = path.split(".")
        return ".".join(r"\d+" if ".".join(parts[:i]) in self._lists else part for i, part in enumerate(parts))

    # Modules

    def adopt(self, module: nn.Module, path: str) -> None:
        """Take over ``module``, whose path in the model is ``path``, with its submodules: the model, a copy of it, or a
        part of one."""
        self._adopted.update(module.modules())
        if not path:
            module.__dict__[_RUNTIME] = self
            _MODELS[module] = None
            self._root = weakref.ref(module)
            self._lists = {name for name, child in module.named_modules() if isinstance(child, nn.ModuleList)}
        self.gradients.adopt(module, path)
        self.gradients.attach()

    def has_adopted(self, module: Any) -> bool:
        return (self._root is not None and self._root() is module) or module in self._adopted

    def __deepcopy__(self, memo: dict[int, Any]) -> Runtime:
        """A copied model has a runtime of its own; its modules are adopted when they are first called, or asked for."""
        runtime = Runtime(self.program, self.mesh, self.gradients.of_copy(), strict=self.strict, native=self.native)
        memo[id(self)] = runtime
        runtime.saved.reads_graph = self.saved.reads_graph
        runtime.budgets = copy.deepcopy(self.budgets, memo)
        return runtime

    def __reduce__(self) -> NoReturn:
        raise NotPicklableError(
            "a parallelized model cannot be pickled: its hooks belong to this process and its mesh; save "
            "model.state_dict() (torch.distributed.checkpoint), and parallelize a fresh model before loading"
        )

    # Plan entries of a module and all inside of it

    def factory_placements(self, path: str) -> tuple[Placement, ...]:
        """The placements of tensors that the module at ``path`` makes, by the entry of the nearest module around it.

        They follow from the path and not from the running calls, so that a recomputed part of a forward finds the same.
        """
        while path and path not in self._factories:
            path = path.rpartition(".")[0]
        placements = self._factories.get(path, self.replicated)
        return tuple(r if p is None else p for p, r in zip(placements, self.replicated))

    def attention_methods(self, path: str) -> tuple[AttentionMethod | None, ...]:
        """The attention method on each axis in the module at ``path``, by the entry of the nearest module around it."""
        methods: list[AttentionMethod | None] = [None] * self.mesh.ndim
        while True:
            entry = self._attention.get(path, ())
            methods = [own if own is not None else outer for own, outer in zip(methods, entry)] or methods
            if not path:
                return tuple(methods)
            path = path.rpartition(".")[0]


def timelines() -> list[Any]:
    """Of the hooks in C++ and of those in Python, as far as any model has them."""
    return list(_TIMELINES.values())


def _timeline(native: Any) -> Any:
    found = _TIMELINES.get(native is None)
    if found is None:
        made = ModuleTimeline() if native is None else native.Timeline(MAX_LENGTH)
        found = _TIMELINES.setdefault(native is None, made)
    return found


_TIMELINES: dict[bool, Any] = {}
# The attribute of a model that owns its runtime. In a ``WeakKeyDictionary``, the runtime as a value would keep its key
# alive, because it references the modules.
_RUNTIME = "_vescale_runtime"
_MODELS: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()


class BoundMethod:
    """An attribute of a module that takes the place of a method of its class. It is copied with the module, and then belongs
    to the copy and the copy's runtime.

    Args:
        function: of the runtime, the module, and the arguments of the call.
    """

    def __init__(self, function: Callable[..., Any], runtime: Runtime, module: nn.Module, name: str) -> None:
        self.function, self.runtime, self.module = function, runtime, module
        self.__wrapped__ = functools.partial(getattr(type(module), name), module)  # for inspect.signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.runtime, self.module, *args, **kwargs)

    @staticmethod
    def give(runtime: Runtime, module: nn.Module, name: str, function: Callable[..., Any]) -> bool:
        """Let ``module.name(...)`` call ``function``, if its class has a method of this name."""
        if not callable(getattr(type(module), name, None)):
            return False
        note("runtime._runtime:instance", f"{type(module).__qualname__}.{name}")
        vars(module)[name] = BoundMethod(function, runtime, module, name)
        return True

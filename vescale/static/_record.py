"""One recorded step: what each torch function of a forward did to DTensors, and what its backward did to their gradients."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from vescale.comm import Ledger, record_comms
from vescale.compat import (
    call_module,
    hides_tensors,
    local_of,
    no_torch_function,
    spec_of,
    take_moves,
    tensors_in,
    versions,
)
from vescale.ops import entries
from vescale.runtime import Frame, Placing, Stages
from vescale.static._call_tree import CallTree
from vescale.static._given_arguments import held_in, num_values
from vescale.static._hidden_tensors import hidden_slots
from vescale.static._local_run import LocalRun, run_on_locals
from vescale.static._observed_ops import ObservedOps, WithObservedOps, random_state
from vescale.static._repeated_layers import RepeatedLayers
from vescale.static._step_records import Boundary, Call, ModuleCall, TensorRecord, Value

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


class Recorder(TorchFunctionMode):
    """Records the forward of a module that runs inside of it, and the backward that follows.

    Hooks of the graph's nodes tell gradients; the step's numbers are those of any other.

    Args:
        frames: the running modules.
        names: gives the names of parameters and buffers by ``id``.
        is_elsewhere: whether the parameter with a name belongs to a unit of which none of some modules is a part.
        layers: those of which functions are not recorded.

    Attributes:
        tree: the functions that ran.
        calls: in order.
        boundaries: what entries of the plan placed, for each call of each.
        module_calls: tensors that the parts of the model got and returned in each call, by path.
        inputs, outputs: tensors of the forward; ``hidden``: those inside of objects in its output.
        problems: what rules a static forward out, by the path of the module.
        regions: paths of the modules that run on local tensors by the plan.
        recomputes: whether there are checkpoints, whose recomputations run the ops of recorded functions.
        guards: what the step depended on; changed_names: of globals and attributes that it has changed; written_names: of
            buffers that modules have replaced. All are set by whoever records.
    """

    def __init__(
        self,
        frames: Sequence[Frame],
        names: Callable[[], dict[int, str]],
        is_elsewhere: Callable[[str, Iterable[nn.Module]], bool],
        layers: RepeatedLayers,
    ) -> None:
        super().__init__()
        self.layers = layers
        self.tree = CallTree(lambda: (frames[-1].module, frames[-1].path))
        self._frames, self._is_elsewhere = frames, is_elsewhere
        self.calls: list[Call] = []
        self.boundaries: dict[Any, list[list[Boundary]]] = {}
        self.module_calls: dict[str, list[ModuleCall]] = {}
        self.inputs: list[TensorRecord] = []
        self.outputs: list[TensorRecord] = []
        self.hidden: list[TensorRecord] = []
        self.values_by_id: dict[int, Value] = {}
        self.problems: dict[str, str] = {}
        self.regions: frozenset[str] = frozenset()
        self.guards: Any = None
        self.changed_names: frozenset[str] = frozenset()
        self.written_names: set[str] = set()
        self.named: dict[str, Value] = {}
        self._read_names = names
        self.names = names()
        self._nodes: set[Any] = set()  # of the graph that are watched
        self._placed: list[tuple[DTensor, tuple[int, ...]]] = []  # by entries of the modules that run
        self._taken_over = ""
        self._is_unrecorded = False  # inside of a module that runs in eager mode, whatever its calls are
        self._is_repeated = False  # inside of a layer that is compared with another
        self.recomputes = False
        self._known_ops: dict[Any, bool] = {}

    # Values

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record ``forward(*args, **kwargs)``."""
        for x in tensors_in((args, kwargs)):
            if isinstance(x, DTensor):
                self._value_of_result(x)
        self.inputs = [self._record(x) for x in tensors_in((args, kwargs))]
        held = list(held_in((args, kwargs)))
        try:
            with self.tree, self:
                result = forward(*args, **kwargs)
        finally:
            self._nodes.clear()  # they hold those that accumulate gradients of parameters, and hooks of units
        if list(held_in((args, kwargs))) != held or any(map(hides_tensors, (*args, *kwargs.values()))):
            self.problems[""] = "its forward changes what an input holds"
        for call in self.tree.applied:
            where = f"{call.code.co_filename}:{call.code.co_firstlineno}"
            self.problems.setdefault(call.module, f"{where}: the backward of this function would get local gradients")
        self.outputs = [self._record(x) for x in tensors_in(result)]
        try:
            self.hidden = [self._record(slot.get()) for slot in hidden_slots(result)]
        except ValueError as problem:
            self.problems[""] = f"of an output, {problem}"
        return result

    @property
    def is_complete(self) -> bool:
        """Whether the backward has been seen, if there is one."""
        linked = [r.value for r in self.outputs if r.requires_grad and r.value is not None]
        return "" in self.problems or not linked or any(value.grads for value in linked)

    def _value(self, x: DTensor) -> Value:
        found: Value | None = getattr(x, "_vescale_value", None)
        if found is not None:
            return found
        name = self.name_of(x)
        if not name:  # made around the recorded functions: an input of a unit, which is a view of the module's
            return self._value_of_result(x)
        found = self.values_by_id[id(x)] = self.named.setdefault(name, Value(name, True))
        return found

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

    def _refuse_unseen(self, tensors: Iterable[torch.Tensor], frame: types.FrameType) -> None:
        """Where functions use a DTensor that no torch function of this thread has made in this forward."""
        for x in tensors:
            if isinstance(x, DTensor) and not self._is_seen(x):
                call = self.tree.running
                path, where = ("", frame) if call is None else (call[1].module, call[0])
                line = f"{where.f_code.co_filename}:{where.f_lineno}"
                self.problems.setdefault(
                    path, f"{line}: a tensor comes from another thread, another step, or compiled code"
                )

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
        """The value of a new tensor, or of one that was written to."""
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
            return self.layers.note(self.names, func, (args, kwargs), func(*args, **kwargs))
        caller = sys._getframe(1)
        with self.tree.paused():
            result = self._call(func, args, kwargs, caller)
        return self.layers.note(self.names, func, (args, kwargs), result)

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], caller: types.FrameType) -> Any:
        """Call and record a torch function; ``caller``: what calls it."""
        with no_torch_function():
            found = self.tree.site(caller)
            tensors = list(tensors_in((args, kwargs)))
            self._refuse_unseen(tensors, caller)
            site, is_direct = found if found is not None else (None, False)
            call = Call(site, is_direct, func, [self._record(x) for x in tensors])
            call.reads_other_unit = any(map(self._is_of_other_unit, call.inputs))
            call.num_values = num_values(func, args, kwargs)
            call.num_positional, call.num_keywords = len(args), len(kwargs)
            edges = edges_of(tensors, call.inputs)
            versions = list(map(_versions, tensors))
        self._taken_over = ""
        self.calls.append(call)
        before, own = random_state(), [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Generator)]
        own_before = [generator.get_state() for generator in own]
        observer = ObservedOps(self._known_ops)
        with observer, self.tree.around(func), record_comms() as ledger:
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
            written = [x for x, version in zip(tensors, versions) if _versions(x) != version]
            call.writes = bool(written)
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
        return result

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

        @functools.wraps(function, updated=())
        def run(*args: Any, **kwargs: Any) -> Any:
            with WithObservedOps():
                return function(*args, **kwargs)

        return run

    # Modules

    def boundary(self, placing: Placing, x: DTensor, stages: Stages, is_shared: bool) -> DTensor:
        """A tensor that an entry of the plan brings to other placements at the boundary of a module."""
        convert = stages.convert_once if is_shared else stages.convert
        if self._is_repeated:
            with no_torch_function():
                made = convert(x, placing.requester, placing.outdated)
                self.layers.note_part(self.names, placing.name, x, made)
            return made
        record = self._record(x)
        if self._is_of_other_unit(record):
            self.problems[placing.instruction.path] = "the plan places a parameter of a unit that does not run"
        edges = edges_of([x], [record])
        with no_torch_function(), record_comms() as ledger:
            made = convert(x, placing.requester, placing.outdated)
        if getattr(made, "_vescale_value", None) is None:
            self._value_of_result(made)
            if torch.is_grad_enabled():
                self._watch([made], edges, None)
        boundary = Boundary(placing, stages, is_shared, record, self._record(made), _collectives(ledger))
        self.boundaries[placing][-1].append(boundary)
        with no_torch_function():
            self._placed.append((made, versions(made)))
            self.layers.note_part(self.names, placing.name, x, made)
        return made

    def begin_boundary(self, placing: Placing) -> None:
        if not self._is_repeated:
            self.boundaries.setdefault(placing, []).append([])

    def call_module(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The call of a part of the model."""
        if self._is_repeated:
            return self._call_repeated(path, module, args, kwargs)
        with no_torch_function():
            if not self._is_unrecorded:
                self._refuse_unseen(tensors_in((args, kwargs)), sys._getframe(2))
            inputs = [self._record(x) for x in tensors_in((args, kwargs))]
            is_unrecorded = self._is_unrecorded
            is_repeated = not is_unrecorded and self.layers.begin(self, path, (args, kwargs), inputs)
        num_placed = len(self._placed)
        self._is_repeated = is_repeated
        self._is_unrecorded = is_unrecorded or is_repeated or path in self.problems
        try:
            with self.tree.paused() if is_repeated else contextlib.nullcontext():
                result = call_module(module, args, kwargs)
        except BaseException:
            self.layers.abandon(path)
            raise
        finally:
            self._is_unrecorded, self._is_repeated = is_unrecorded, False
        with no_torch_function():
            self.layers.note_part(self.names, (path, ""), (args, kwargs), result)
            self.layers.end(self, path)
            outputs = [self._record(x) for x in tensors_in(result)]
            is_written = any(versions(x) != before for x, before in self._placed[num_placed:])
        if is_written:
            self.problems[""] = f"{path} writes to an input that the plan places"
        del self._placed[num_placed:]
        self.module_calls.setdefault(path, []).append((inputs, outputs))
        return result

    def _call_repeated(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The call of a part of a layer that is compared with another."""
        result = call_module(module, args, kwargs)
        with no_torch_function():
            self.layers.note_part(self.names, (path, ""), (args, kwargs), result)
        self.module_calls.setdefault(path, self.module_calls.get(self.layers.origin(path), []))
        return result


def _collectives(ledger: Ledger) -> list[str]:
    return [f"{record.op} over {record.axes or f'{record.num_ranks} ranks'}" for record in ledger.records]


def _versions(x: torch.Tensor) -> list[int]:
    """Which writes have reached it; what runs in place of a function may write to the local tensor alone."""
    return [y._version for y in ([x, local_of(x)] if isinstance(x, DTensor) else [x]) if not y.is_inference()]

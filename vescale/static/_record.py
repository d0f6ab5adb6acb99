"""One recorded step: what each torch function of a forward did to DTensors, and what its backward did to their gradients."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from vescale.compat import (
    call_module,
    local_of,
    make_dtensor,
    map_tensors,
    no_torch_function,
    runs_on_locals,
    spec_of,
    take_moves,
    tensors_in,
)
from vescale.ops import entries
from vescale.static._call_tree import CallTree, Site
from vescale.static._local_run import LocalRun, run_on_locals

__all__ = ["Boundary", "Call", "Recorder", "TensorRecord", "Value"]

Placements = tuple[Placement, ...]


@dataclass(eq=False)
class Value:
    """A DTensor that the forward computed, or was given.

    Attributes:
        name: of a parameter, buffer or input; "" for others.
        is_parameter: whether it is a parameter or a buffer.
        grads: placements of the gradients that arrived, each the sum over its uses.
    """

    name: str = ""
    is_parameter: bool = False
    grads: set[Placements] = field(default_factory=set)


@dataclass(eq=False)
class TensorRecord:
    """A tensor among the arguments or results of a call.

    Attributes:
        placements: None for a plain tensor, which is the same on every rank.
        shape, local_shape: global and of this rank.
        value: None for a plain tensor.
        grads: placements of the gradients that this use of the value sent back.
    """

    placements: Placements | None
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    value: Value | None
    grads: set[Placements] = field(default_factory=set)


@dataclass(eq=False)
class Call:
    """One call of a torch function.

    Attributes:
        site: where it was called; None if the code around it was not recorded.
        is_direct: whether the site's own instruction calls the function.
        changed: why the call is not that of the function on the local tensors; "" if it is.
        local_run: what the function did on the local tensors.
        moves_gradients: whether its backward moved tensors.
    """

    site: Site | None
    is_direct: bool
    function: Any
    inputs: list[TensorRecord]
    outputs: list[TensorRecord] = field(default_factory=list)
    changed: str = ""
    local_run: LocalRun = LocalRun.DIFFERS
    moves_gradients: bool = False


@dataclass(eq=False)
class Boundary:
    """One tensor that an entry of the plan places at a module's boundary."""

    input: TensorRecord
    output: TensorRecord
    stages: Any
    requester: str
    is_shared: bool


class Recorder(TorchFunctionMode):
    """Records the forward of a module that runs inside of it, and the backward that follows.

    It adds a node to the graph before each use of a DTensor that requires gradients, and after each result, which pass
    gradients on as they are.

    Attributes:
        tree: the functions that ran.
        calls: in order.
        boundaries: what entries of the plan placed, for each call of each.
        module_calls: tensors that the parts of the model got and returned, by path.
        inputs, outputs: tensors of the forward.
        problems: what rules a static forward out, by the path of the module.
    """

    def __init__(self, current_module: Callable[[], tuple[nn.Module, str] | None], names: dict[int, str]) -> None:
        super().__init__()
        self.tree = CallTree(current_module)
        self.calls: list[Call] = []
        self.boundaries: dict[Any, list[list[Boundary]]] = {}
        self.module_calls: dict[str, tuple[list[TensorRecord], list[TensorRecord]]] = {}
        self.inputs: list[TensorRecord] = []
        self.outputs: list[TensorRecord] = []
        self.values_by_id: dict[int, Value] = {}
        self.problems: dict[str, str] = {}
        self.values: dict[int, Value] = {}
        self.named: dict[str, Value] = {}
        self._current_module = current_module
        self._names = names
        self._shared: dict[Any, tuple[Any, Any]] = {}
        self._taken_over = ""

    # Values

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record ``forward(*args, **kwargs)``."""
        made = {id(x): self._after(x, Value()) for x in tensors_in((args, kwargs)) if isinstance(x, DTensor)}
        args, kwargs = _replaced((args, kwargs), made)
        self.inputs = [self._record(x) for x in tensors_in((args, kwargs))]
        with self.tree, self:
            result = forward(*args, **kwargs)
        self._shared.clear()
        self.outputs = [self._record(x) for x in tensors_in(result)]
        return result

    @property
    def is_complete(self) -> bool:
        """Whether the backward has been seen, if there is one."""
        linked = [r.value for r in self.outputs if r.requires_grad and r.value is not None]
        return not linked or any(value.grads for value in linked)

    def _value(self, x: DTensor) -> Value:
        found = getattr(x, "_vescale_value", None)
        if found is None:
            name = self._names.get(id(x), "")
            found = self.named.setdefault(name, Value(name, True)) if name else Value()
            if name:
                self.values_by_id[id(x)] = found
            else:
                x._vescale_value = found  # type: ignore[attr-defined]
        return found

    def _record(self, x: torch.Tensor) -> TensorRecord:
        if not isinstance(x, DTensor):
            return TensorRecord(None, tuple(x.shape), tuple(x.shape), x.dtype, x.requires_grad, None)
        return TensorRecord(
            tuple(x.placements), tuple(x.shape), tuple(local_of(x).shape), x.dtype, x.requires_grad, self._value(x)
        )

    def _before(self, x: DTensor, record: TensorRecord, call: Call | None) -> DTensor:
        """``x`` for one use, which tells the gradient that the use sends back."""
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x

        def sent(grad: torch.Tensor) -> None:
            if call is not None and take_moves():
                call.moves_gradients = True
            if isinstance(grad, DTensor):
                record.grads.add(tuple(grad.placements))

        passed: DTensor = _Pass.apply(x, sent)
        return passed

    def _after(self, x: DTensor, value: Value) -> DTensor:
        """``x`` for its uses, which tells the sum of the gradients that they send back."""
        if x.requires_grad and torch.is_grad_enabled():

            def arrived(grad: torch.Tensor) -> None:
                take_moves()  # made while gradients were added, which the uses' placements tell
                if isinstance(grad, DTensor):
                    value.grads.add(tuple(grad.placements))

            x = _Pass.apply(x, arrived)
        x._vescale_value = value  # type: ignore[attr-defined]
        return x

    # Torch functions

    def __torch_function__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with no_torch_function():
            found = self.tree.site(sys._getframe(1))
            tensors = list(tensors_in((args, kwargs)))
            site, is_direct = found if found is not None else (None, False)
            call = Call(site, is_direct, func, [self._record(x) for x in tensors])
            originals: dict[int, DTensor] = {}
            versions = [x._version for x in tensors if not x.is_inference()]
            if not _writes(func):
                uses = {id(x): self._before(x, record, call) for x, record in zip(tensors, call.inputs) if isinstance(x, DTensor)}
                originals = {id(uses[id(x)]): x for x in tensors if isinstance(x, DTensor)}
                args, kwargs = _replaced((args, kwargs), uses)
        self._taken_over = ""
        self.calls.append(call)
        before = _random_state()
        observer = _Ops()
        with observer:
            result = func(*args, **kwargs)
        is_random = observer.draws and _random_state() != before
        with no_torch_function():
            call.changed = observer.changed or self._taken_over
            if call.changed and not is_random and self._is_local(func, args, kwargs, result):
                call.changed = ""
            written = versions != [x._version for x in tensors if not x.is_inference()]
            if written or _writes(func):
                if any(record.requires_grad for record in call.inputs) and torch.is_grad_enabled():
                    call.changed = "writes in place, with a gradient"
                call.local_run = LocalRun.SAME if not call.changed else LocalRun.DIFFERS
            else:
                call.local_run = run_on_locals(func, args, kwargs, result, is_random)
            return self._results(call, result, written, originals)

    def take_over(self, what: str) -> None:
        """The runtime runs something in place of the current call."""
        self._taken_over = what

    def _is_local(self, func: Any, args: Any, kwargs: Any, result: Any) -> bool:
        """Whether what runs in place of the function, or is communicated, is that of local tensors all the same."""
        if _are_replicated((args, kwargs)) and _are_replicated(result):
            return True
        entry = entries().get(func)
        is_local = entry.is_local if entry is not None and self._taken_over == "registered function" else None
        return is_local is not None and is_local(*args, **kwargs)

    def _results(self, call: Call, result: Any, written: bool, originals: dict[int, DTensor]) -> Any:
        made = {}
        for x in tensors_in(result):
            if isinstance(x, DTensor):
                if id(x) in originals:  # the function returned its argument
                    made[id(x)] = originals[id(x)]
                elif not written:
                    made[id(x)] = self._after(x, Value())
                else:
                    made[id(x)] = x
                x = made[id(x)]
            call.outputs.append(self._record(x))
        return _replaced(result, made)

    # Modules

    def boundary(self, placing: Any, x: DTensor, stages: Any, requester: str, is_shared: bool) -> DTensor:
        """A tensor that an entry of the plan brings to other placements at the boundary of a module."""
        record = self._record(x)
        key = (id(x), stages)
        held = self._shared.get(key) if is_shared else None
        use = self._before(x, record, None) if held is None else held[1]
        use._vescale_value = record.value  # type: ignore[attr-defined]
        if is_shared:
            self._shared[key] = x, use
        made = stages.convert_once(use, requester) if is_shared else stages.convert(use, requester)
        held = self._shared.get(id(made))
        result = self._after(made, Value()) if held is None else held[1]
        self._shared[id(made)] = made, result
        self.boundaries[placing][-1].append(Boundary(record, self._record(result), stages, requester, is_shared))
        return result

    def begin_boundary(self, placing: Any) -> None:
        self.boundaries.setdefault(placing, []).append([])

    def call_module(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The call of a part of the model."""
        with no_torch_function():
            inputs = [self._record(x) for x in tensors_in((args, kwargs))]
        result = call_module(module, args, kwargs)
        with no_torch_function():
            outputs = [self._record(x) for x in tensors_in(result)]
        self.module_calls.setdefault(path, (inputs, outputs))
        return result


class _Pass(torch.autograd.Function):
    """The tensor as it is; tells its gradient."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, tell: Callable[[torch.Tensor], None]) -> DTensor:
        ctx.tell = tell
        ctx.set_materialize_grads(False)
        return make_dtensor(local_of(x), spec_of(x), requires_grad=True)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        if grad is not None:
            ctx.tell(grad)
        return grad, None


class _Ops(TorchDispatchMode):
    """Sees the ops of one torch function.

    Attributes:
        changed: why they do not all run on the local tensors as they are; "" if they do.
        draws: whether one may draw random numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.changed = ""
        self.draws = False

    def __torch_dispatch__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags
        if not self.changed and any(isinstance(x, DTensor) for x in tensors_in((args, kwargs))):
            if not runs_on_locals(func, args, kwargs):
                self.changed = f"{func} does not run on the local tensors as they are"
        return func(*args, **kwargs)


def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or name.startswith("__i") and name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


_IN_PLACE = frozenset(f"__i{name}__" for name in "add sub mul truediv floordiv mod pow and or xor lshift rshift matmul".split())


def _replaced(value: Any, by_id: dict[int, Any]) -> Any:
    return map_tensors(lambda x: by_id.get(id(x), x), value) if by_id else value


def _random_state() -> bytes:
    """The states of the default generators: some ops that may draw numbers do not."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return b"".join(state.numpy().tobytes() for state in states)


def _are_replicated(result: Any) -> bool:
    return all(p.is_replicate() for x in tensors_in(result) if isinstance(x, DTensor) for p in x.placements)

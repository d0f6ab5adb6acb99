"""``GradientHooks``: gives the parameters of a parallelized model to its gradient reducer."""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale.compat import local_of, make_dtensor, make_spec, native_static, no_torch_function
from vescale.errors import UnsupportedParameterError
from vescale.fsdp import ManagedParameter, managed_by, registered_of
from vescale.gradients import GradientReducer, GradientRule, OneBackward
from vescale.ir import Annotate, Instruction, Program, Redistribute
from vescale.ops import convert, wrap_global
from vescale.placements import contiguous_stride, without_partials
from vescale.runtime._executors import Executor, executor_of
from vescale.runtime._plan_units import accumulating, managed_parameters, states_in
from vescale.runtime._precision import reduce_dtypes


class GradientHooks:
    """Gives each parameter that requires a gradient to the model's reducer, once.

    The model is searched for new parameters before each of its forwards, because ``copy.deepcopy`` copies parameters without
    their hooks, and parameters may be unfrozen later.

    Attributes:
        reducer: None on ranks outside the mesh, and before the first forward.
        before_finish, one_backward, is_compared: for the reducer.
    """

    def __init__(
        self,
        instructions: Mapping[str, Sequence[Instruction]],
        mesh: DeviceMesh,
        reduce_dtypes: Mapping[str, torch.dtype],
    ) -> None:
        self.reducer: GradientReducer | None = None
        self.has_accumulated = False
        """Whether a backward has run under ``no_sync``."""
        self.before_finish: Callable[[], None] = lambda: None
        self.one_backward = OneBackward(mesh.device_type)
        self.is_compared: Callable[[], bool] = lambda: False
        self._instructions, self._mesh, self._reduce_dtypes = instructions, mesh, reduce_dtypes
        self._slots: list[tuple[nn.Module, str, str]] = []
        self._managed: dict[tuple[int, str], ManagedParameter] = {}
        self._modules: list[weakref.ref[nn.Module]] = []
        self._hooked: dict[int, weakref.ref[torch.Tensor]] = {}
        # As of the last search, with the dictionaries that they are in, and their names there.
        self._known: list[nn.Parameter | None] = []
        self._places: tuple[list[dict[str, Any]], list[str]] = [], []
        self._frozen: list[nn.Parameter] = []  # or without values

    @classmethod
    def of(cls, program: Program, mesh: DeviceMesh) -> GradientHooks:
        instructions: dict[str, list[Instruction]] = {}
        for instruction in program:
            if executor_of(instruction) is Executor.GRADIENT:
                instructions.setdefault(full_name(instruction), []).append(instruction)
        by_module: dict[str, list[Instruction]] = {}
        for instruction in program:
            by_module.setdefault(instruction.path, []).append(instruction)
        return cls(instructions, mesh, reduce_dtypes(by_module))

    def of_copy(self) -> GradientHooks:
        """The hooks of a copy of the model, without any parameters."""
        return GradientHooks(self._instructions, self._mesh, self._reduce_dtypes)

    def adopt(self, module: nn.Module, path: str) -> None:
        """Add the parameters of ``module``, which is called ``path`` in the model; tied ones get their first name."""
        self._modules.append(weakref.ref(module))
        self._managed.update(managed_parameters(module))
        for state in states_in(module):
            state.iteration.on_backward = self._begin
        prefix = f"{path}." if path else ""
        for name, _ in module.named_parameters():
            owner, _, attribute = name.rpartition(".")
            self._slots.append((module.get_submodule(owner), attribute, prefix + name))

    def attach(self) -> None:
        """Give new parameters to the reducer; called alike on every rank."""
        new = self._search() if self._have_changed() else []
        if self.reducer is None:
            if self._mesh.get_coordinate() is None:
                return
            self.reducer = GradientReducer(nn.Module(), self._mesh)
            # Weak: parameters own the reducer, and are not collected while local tensors of a static forward have them.
            self.reducer.around_no_sync = functools.partial(_accumulating, weakref.ref(self))
            self.reducer.before_finish = self.before_finish
            self.reducer.share_backward(self.one_backward, self.is_compared)
        self.reducer.recover()
        if new:
            self.reducer.add(new)

    def _have_changed(self) -> bool:
        """Whether there may be parameters to give to the reducer: others than before, or unfrozen ones."""
        if self._managed or (self._frozen and any(parameter.requires_grad for parameter in self._frozen)):
            return True
        if len(self._slots) != len(self._known):
            return True
        native = native_static()
        if native is not None:
            return native.first_changed(*self._places, self._known) >= 0
        dicts, names = self._places
        return not all(map(operator.is_, map(dict.get, dicts, names), self._known))

    def _search(self) -> list[tuple[str, nn.Parameter, GradientRule]]:
        new: list[tuple[str, nn.Parameter, GradientRule]] = []
        self._known, self._frozen = [], []
        self._places = [owner._parameters for owner, _, _ in self._slots], [name for _, name, _ in self._slots]
        for owner, attribute, name in self._slots:
            parameter = owner._parameters.get(attribute)
            self._known.append(parameter)
            managed = self._managed.get((id(owner), attribute))
            if managed is not None:  # its unit reduces it over the axes of the unit
                parameter = managed.sharded if _is_replicated_elsewhere(managed) else None
            if (
                parameter is None or not parameter.is_leaf
            ):  # a value with a history, of functional_call: its own leaves have
                continue
            if not parameter.requires_grad or parameter.is_meta:  # with hooks, to_empty could not give it memory
                self._frozen.append(parameter)
                continue
            known = self._hooked.get(id(parameter))
            if known is None or known() is not parameter:
                self._hooked[id(parameter)] = weakref.ref(parameter)
                if isinstance(parameter, DTensor):
                    rule = _rule(self._instructions.get(name, ()), parameter, name, self._reduce_dtypes.get(name))
                    new.append((name, parameter, rule))
        return new

    def _begin(self) -> None:
        """Called when a backward reaches a unit."""
        if self.reducer is not None:
            self.reducer.begin()

    @contextlib.contextmanager
    def _accumulating(self) -> Iterator[None]:
        self.has_accumulated = True
        with contextlib.ExitStack() as stack:
            for module in self._modules:
                found = module()
                if found is not None:
                    stack.enter_context(accumulating(found))
            yield


def _is_replicated_elsewhere(parameter: ManagedParameter) -> bool:
    """Whether the gradient may be a sum along axes that are not its unit's."""
    axes, sharded = parameter.axes, parameter.sharded
    assert isinstance(sharded, DTensor)
    others = (a for a in range(axes.mesh.ndim) if a not in (axes.shard, *axes.replicate) and axes.mesh.size(a) > 1)
    return any(sharded.placements[axis].is_replicate() for axis in others)


def _rule(
    instructions: Sequence[Instruction], parameter: DTensor, name: str, reduce_dtype: torch.dtype | None
) -> GradientRule:
    """``instructions`` are those of the gradient: an annotation gives the placements that it has on every rank, a
    redistribution those that it is brought to."""
    source = next((i.op.placements for i in instructions if isinstance(i.op, Annotate)), None)
    target = next((i.op.dst for i in instructions if isinstance(i.op, Redistribute)), None)
    own, mesh = without_partials(parameter.placements), parameter.device_mesh
    complete = tuple(o if p is None else p for o, p in zip(own, target or own))

    def on_captured(grad: torch.Tensor) -> torch.Tensor:
        """Differentiable; each gradient is reduced by a collective of its own."""
        if not isinstance(grad, DTensor):
            return wrap_global(grad, mesh, complete, name)
        if source is not None:
            placements = tuple(f if s is None else s for f, s in zip(grad.placements, source))
            with no_torch_function():
                spec = make_spec(mesh, placements, grad.shape, contiguous_stride(grad.shape), grad.dtype)
                grad = make_dtensor(local_of(grad), spec)
        return grad if tuple(grad.placements) == complete else convert(grad, complete, requester=f"{name}.grad")

    return GradientRule(source, target, on_captured, reduce_dtype)


def full_name(instruction: Instruction) -> str:
    return f"{instruction.path}.{instruction.target}" if instruction.path else instruction.target


def _accumulating(hooks: weakref.ref[GradientHooks]) -> contextlib.AbstractContextManager[None]:
    found = hooks()
    return contextlib.nullcontext() if found is None else found._accumulating()


def refuse_edge(parameter: DTensor) -> None:
    """Raises UnsupportedParameterError for a parameter in whose place graphs have its gathered form."""
    managed = managed_by(parameter)
    if managed is not None:
        raise UnsupportedParameterError(
            f"torch.autograd.graph.register_multi_grad_hook or get_gradient_edge of parameter {managed.name!r} of shape "
            f"{managed.global_shape}, which fully_shard or a unit of a plan gathers: no graph has it. Expected a hook "
            "of each parameter, parameter.register_hook or parameter.register_post_accumulate_grad_hook, or "
            "torch.autograd.grad(loss, parameter)"
        )


def refuse_derivatives(losses: Sequence[Any]) -> None:
    """After a backward with ``create_graph=True``: the reduction over ranks is not part of the graph, so that what
    differentiates a parameter's ``.grad``, by whatever, raises. It may be written to, as what an op has made."""
    waiting: list[Any] = [loss.grad_fn for loss in losses if isinstance(loss, torch.Tensor)]
    seen: set[Any] = {None}
    gradients: dict[int, torch.Tensor] = {}
    leaves: dict[int, torch.Tensor] = {}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        leaf: torch.Tensor | None = getattr(node, "variable", None)
        if leaf is None:
            continue
        parameter = registered_of(leaf)
        if isinstance(parameter, DTensor) and parameter.grad is not None and not parameter.grad.requires_grad:
            gradients[id(parameter)] = parameter.grad
            # Those that programs know, and those that graphs hold in their places.
            leaves |= {id(parameter): parameter, id(leaf): leaf}
    if gradients:
        with torch.enable_grad(), no_torch_function():
            _Reduced.apply(len(gradients), *gradients.values(), *leaves.values())


class _Reduced(torch.autograd.Function):
    """Makes ``.grad``, as they are, functions of all parameters, which cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, num_gradients: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gradients = tensors[:num_gradients]
        ctx.mark_dirty(*gradients)
        ctx.set_materialize_grads(False)
        ctx.shape = tuple(gradients[0].shape)
        return gradients

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise UnsupportedParameterError(
            f"the .grad of a parameter (the first one is of shape {ctx.shape}) is differentiated after "
            "backward(create_graph=True) has reduced it over ranks: the reduction is not part of the graph. Expected "
            "gradients from torch.autograd.grad(loss, parameters, create_graph=True), for parameters that the plan "
            "replicates (no entry with phase=INIT, no fully_shard)"
        )

"""``StaticProgram``: the functions that run in a static forward, and what modules show meanwhile."""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.compat import (
    CALL_OVERRIDE,
    call_module,
    compiled_call,
    compiled_like,
    no_torch_function,
    run_compiled,
    with_torch_function,
)
from vescale.fsdp import ManagedParameter, state_of
from vescale.runtime import Runtime, current_activation, resumed
from vescale.static._actions import Checked, Eager, ReadSizes, TakeSizes, name_of
from vescale.static._analysis import FunctionPlan, ModulePlan
from vescale.static._call_site_functions import EagerCall, map_in_order, read_sizes, take_sizes
from vescale.static._checked_calls import checked_call
from vescale.static._early_inputs import Entered
from vescale.static._exchanged_code import code_of
from vescale.static._guards import Guards
from vescale.static._hidden_tensors import hidden_slots
from vescale.static._local_functions import local_function
from vescale.static._local_parameter import LocalParameter
from vescale.static._missing_gradients import refuse_second_derivatives, without_gradient
from vescale.static._patch import MARK, REFUSE, SLICE, callee_of, make_function, patched_code, site_name
from vescale.static._placing import LocalPlacing
from vescale.static._recorded import Recorded
from vescale.static._shown_entries import ShownEntries
from vescale.static._source import code_objects
from vescale.static._state import checkpoint_of, is_inside, own_forward
from vescale.static._tensor_type import TensorType, UnrecordedError
from vescale.static._units import ModelUnits, UnitForward
from vescale.static._unreached import GuardedFunctions, UnreachedFunctions

# ``torch.compile`` of models in static mode: forwards of modules are compiled, what moves tensors between them is not.


class Compiling:
    """What compilers see of the functions of a static forward.

    Args:
        is_on: whether a compiler is there; else all functions stay as they are.
    """

    def __init__(self, is_on: bool) -> None:
        self.is_on = is_on
        self._compiler: Any = None  # of the whole model, while it runs

    def run(self, compiler: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``function(*args, **kwargs)``, compiled by what ``suspend_compiling`` returned."""
        if compiler is None or not self.is_on:
            return function(*args, **kwargs)
        self._compiler = compiler
        try:
            return run_compiled(compiler, function, args, kwargs)
        finally:
            self._compiler = None

    def aside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """It is not compiled, nor is what it calls, except :meth:`inside`."""
        if not self.is_on:
            return function
        called: Any = function
        return torch.compiler.disable(called if isinstance(function, types.FunctionType) else called.__call__)

    def inside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """It is compiled, though it is called by what is not."""
        if not self.is_on:
            return function

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._compiler is None:
                return function(*args, **kwargs)
            return run_compiled(self._compiler, function, args, kwargs)

        return run

    def as_the_module(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """``forward`` is compiled if the user has compiled the module, in the same way."""
        compiled = compiled_call(module) if self.is_on else None
        return forward if compiled is None else compiled_like(compiled, forward)


def has_compiled_parts(model: nn.Module) -> bool:
    """Whether the user has compiled a module of the model (``module.compile()``), or the model."""
    return any(compiled_call(module) is not None for module in model.modules())


# What runs in a static forward where the model calls a module that has no static forward.


def on_dtensors(
    module: nn.Module,
    path: str,
    inputs: Sequence[TensorType],
    outputs: Sequence[TensorType],
    as_in_eager_mode: Callable[[], AbstractContextManager[None]],
) -> Callable[..., Any]:
    """The module's call as in eager mode, between local tensors.

    Args:
        as_in_eager_mode: what the call runs in.
    """
    to_global = [functools.partial(kind.to_global, op=path) for kind in inputs]
    to_local = [kind.to_local for kind in outputs]

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = map_in_order((args, kwargs), to_global)
        with as_in_eager_mode(), with_torch_function():
            result = call_module(module, args, kwargs)
        return map_in_order(result, to_local)

    return call


def refused(reason: str) -> Callable[..., Any]:
    """The call of a module whose call was not recorded."""

    def call(*args: Any, **kwargs: Any) -> Any:
        raise UnrecordedError(reason)

    return call


# Outputs of a model in static mode, as DTensors.


def handed_out(result: Any, outputs: Sequence[TensorType], hidden: Sequence[TensorType]) -> Any:
    """What a forward has returned, with DTensors of these types; ``hidden``: of tensors in its objects."""
    if type(result) is torch.Tensor and len(outputs) == 1 and not hidden:
        return _hand_out(outputs[0], result)
    slots = hidden_slots(result)
    if len(slots) != len(hidden):
        raise UnrecordedError("objects in the output hold other tensors than recorded")
    for slot, kind in zip(slots, hidden, strict=True):
        slot.set(_hand_out(kind, slot.get()))
    return map_in_order(result, [functools.partial(_hand_out, kind) for kind in outputs])


def _hand_out(kind: TensorType, local: torch.Tensor) -> torch.Tensor:
    """An output as a DTensor."""
    x = kind.to_global(local, "output")
    if kind.grad is None and x.requires_grad and isinstance(x, DTensor):
        x = without_gradient(x, "an output")
    if x.grad_fn is not None and x is not local:
        x.grad_fn.register_prehook(refuse_second_derivatives)
    return x


# ``Swap``: which changed function runs where the model calls one.


class Swap:
    """Looks up the patched function that is called at a place, where the recorded step called those with ``plans``.
    ``originals``: the code of functions that were changed, by that which runs."""

    def __init__(
        self,
        plans: Mapping[types.CodeType, FunctionPlan | None],
        make: Callable[[Any, FunctionPlan], Any],
        guarded: GuardedFunctions,
        originals: Mapping[types.CodeType, types.CodeType],
    ) -> None:
        self.plans, self.make, self.guarded, self.originals = plans, make, guarded, originals
        self.has_sites = _have_sites(plans)
        self.is_guarded = False  # the functions that something else calls here
        self.made: dict[types.FunctionType, Any] = {}

    def __call__(self, called: Any) -> Any:
        function, own = called, None
        if type(called) is functools.partial and type(called.func) in (types.FunctionType, types.MethodType):
            return functools.partial(self(called.func), *called.args, **called.keywords)
        if type(called) is types.MethodType and type(called.__func__) is types.FunctionType:
            function, own = called.__func__, called.__self__
        elif type(called) is not types.FunctionType:
            if isinstance(called, nn.Module):  # one that the function has made for itself
                function, own = type(called).forward, called
            else:
                function, own = type(called).__call__, called
            if code_of(function) not in self.plans and not self.has_sites:
                if not self.is_guarded and isinstance(self.plans, dict):  # those of a file are not known in advance
                    missing = self.guarded.add(self.plans, called)
                    if missing:
                        raise UnrecordedError(f"the function at {missing[0]} cannot be found")
                    if any(plan is not None and plan.actions for plan in self.plans.values()):
                        raise UnrecordedError(f"{called} calls functions of which the arguments cannot be checked")
                self.is_guarded = True
                return called  # getattr, or a class, which calls the recorded function in turn
        made = self.made.get(function)
        if made is None:
            code = code_of(function)
            if code is not None:  # a changed function has defined this one
                code = self.originals.get(code, code)
            if code is None or code not in self.plans:
                raise UnrecordedError(f"{function} is another function than was recorded")
            plan = self.plans[code]
            made = self.made[function] = function if plan is None else self.make(function, plan)
        return made if own is None else types.MethodType(made, own)


def _have_sites(plans: Mapping[types.CodeType, FunctionPlan | None]) -> bool:
    known: bool | None = getattr(plans, "has_sites", None)  # of functions that are looked up when they are called
    return any(plan is not None and plan.has_sites for plan in plans.values()) if known is None else known


_OTHER_PATH = "branches and loops ran in another order than in the recorded step"
_Place = tuple[dict[str, Any], str]  # a module's attributes, and the name of one


class StaticProgram:
    """What a recorded step became.

    Attributes:
        plans: of the modules that ran, by path.
        guards: what the program depends on.
        units: of the model.
        eager_modules: why modules run in eager mode, by path.
        draws: whether the step drew random numbers.
        needs_mode: whether something runs on DTensors, in the model's function mode.
        steps: how many forwards ran.
        is_proven: whether a static step has come to its end.
        misses: how many steps in succession took branches that are not recorded.
        writes: what a forward writes to (:meth:`WrittenTensors.written`); None: it is not known.
        originals: the code of functions that were changed, by that which runs.
    """

    def __init__(
        self, runtime: Runtime, model: nn.Module, recorded: Recorded, guards: Guards, compiles: bool = False
    ) -> None:
        self.runtime, self.recorded = runtime, recorded
        self._model = weakref.ref(model)
        self.plans = recorded.plans
        self.units = ModelUnits(model)
        self.guards = guards
        self.compiling = Compiling(compiles)
        self._modules = dict(model.named_modules())
        self.eager_modules = {path: plan.problem for path, plan in self.plans.items() if plan.problem}
        # Their inputs become DTensors, and nothing is changed while they run.
        self._regions = frozenset(recorded.module_types) - self.eager_modules.keys()
        self.draws = recorded.draws
        self.needs_mode = self._used_mode = False
        self.is_proven = False
        self.misses = 0
        self.writes: frozenset[Any] | None = None
        self.steps = 0
        self.shared: dict[Any, Any] = {}
        self.has_compiled_parts = has_compiled_parts(model)
        self.originals: dict[types.CodeType, types.CodeType] = {}
        self._inputs, self._hidden = recorded.inputs, recorded.hidden
        self._outputs = [kind.with_kept_placements() for kind in recorded.outputs]
        self._shown = ShownEntries()
        self._guarded = GuardedFunctions(UnreachedFunctions() if compiles else recorded.unreached)
        self._path: list[int] = []  # of the last forward, of branches and loops
        self._expected_path = list(recorded.path)
        self._checks: dict[Any, Callable[..., Any]] = {}
        self._parameters: list[LocalParameter] = []  # of the model's own unit
        self._running_units: list[UnitForward] = []
        self._units_made: list[UnitForward] = []
        self._root: Callable[..., Any] | None = None
        if self._guarded.missing:
            self.fail(
                f"the function at {self._guarded.missing[0]} cannot be found, whose other branches are not recorded"
            )
        elif "" in self.plans and not self.plans[""].problem:
            self._build(model, recorded)

    def fail(self, reason: str) -> None:
        """Run the model in eager mode from now on."""
        self._root, self.eager_modules[""] = None, reason

    @property
    def is_static(self) -> bool:
        return self._root is not None

    def static_modules(self) -> Iterator[str]:
        """Paths of the modules whose forward runs on local tensors."""
        for path, plan in self.plans.items():
            if not plan.problem and not any(is_inside(path, outer) for outer in self.eager_modules):
                yield path

    def eager_calls(self) -> Iterator[tuple[str, str, str]]:
        """(module, function, reason) of each call that runs on DTensors."""

        def of(plan: FunctionPlan, path: str) -> Iterator[tuple[str, str, str]]:
            for action in plan.actions.values():
                if isinstance(action, Eager) and self._local(action, path) is None:
                    yield path, name_of(action.function), action.reason
            for plans in plan.swaps.values():
                for inner in filter(None, plans.values()):
                    yield from of(inner, path)

        for path in self.static_modules():
            forward = self.plans[path].forward
            if forward is not None:
                yield from of(forward, path)

    def run(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], compiler: Any = None, entered: Entered | None = None
    ) -> Any:
        """The forward on local tensors; takes and returns DTensors. Raises UnrecordedError.

        Args:
            compiler: what compiles it, as ``suspend_compiling`` returns it; None: nothing.
            entered: local tensors in place of ``args`` and ``kwargs``; None: there are none.
        """
        assert self._root is not None
        with no_torch_function():
            if entered is None:
                args, kwargs = map_in_order((args, kwargs), [t.to_local for t in self._inputs])
            else:
                args, kwargs = entered.local_args, entered.local_kwargs
            self._show()
            self._path.clear()
            try:
                result = self.compiling.run(compiler, self._root, args, kwargs)
            except Exception as problem:  # on another path, eager mode tells whether it is the model's own
                if self._path != self._expected_path[: len(self._path)]:
                    raise UnrecordedError(_OTHER_PATH) from problem
                raise
            finally:
                self._hide()
            if self._path != self._expected_path:
                raise UnrecordedError(_OTHER_PATH)
            self.steps += 1
            self.needs_mode = self._used_mode
            return handed_out(result, self._outputs, self._hidden)

    def checkpointed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What the recomputation of ``function`` runs, which is part of a static forward, too, inside of the same units."""
        units = list(self._running_units)

        @functools.wraps(function, updated=())
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._resumed(), ExitStack() as stack:
                for unit in units:
                    stack.enter_context(unit.shown())
                return function(*args, **kwargs)

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
        self._guarded.show()
        self._shown.show()
        try:
            for parameter in self._parameters:
                parameter.show()
        except BaseException:
            self._hide()
            raise

    def _hide(self) -> None:
        self._guarded.hide()
        self._hide_entries()
        self.shared.clear()

    def _hide_entries(self) -> None:
        if self.writes is None or self.writes:
            self._shown.keep_written()
        self._shown.hide()
        for parameter in self._parameters:
            parameter.hide()

    @contextmanager
    def _as_in_eager_mode(self) -> Iterator[None]:
        """All modules are as in eager mode: one that runs so may call any other, and use its parameters."""
        self._hide_entries()
        for unit in self._running_units:
            unit.hide()
        try:
            yield
        finally:
            self._shown.show_again()
            for parameter in self._parameters:
                parameter.show_again()
            for unit in self._running_units:
                unit.show_again()

    # Building

    def _build(self, model: nn.Module, recorded: Recorded) -> None:
        parameters: dict[int, tuple[list[_Place], DTensor]] = {}
        of_units: dict[ManagedParameter, list[_Place]] = {}
        running: list[tuple[str, nn.Module, Callable[..., Any]]] = []
        for path, module in self._modules.items():
            plan, held = self.plans.get(path), module.__dict__
            outer = next((o for o in (*self.eager_modules, *self._regions) if path != o and is_inside(path, o)), None)
            if outer is not None:
                self._shown.add(held, CALL_OVERRIDE, refused(f"the module {path} is called outside of {outer}"))
            elif plan is None:
                call = self._unrecorded(path, module)
                if call is not None:
                    self._shown.add(held, CALL_OVERRIDE, call)
            elif plan.problem or path in self._regions:
                self._shown.add(held, CALL_OVERRIDE, self.compiling.aside(self._eager_module(path, module)))
                self.needs_mode = self._used_mode = True
            else:
                running.append((path, module, self._forward(module, plan)))
            for name, x in [*module._parameters.items(), *module._buffers.items()]:
                of_unit = self.units.parameters.get((id(module), name))
                if of_unit is not None:
                    of_units.setdefault(of_unit, []).append((held, name))
                elif isinstance(x, DTensor):
                    parameters.setdefault(id(x), ([], x))[0].append((held, name))
        names = self.units.names_in(model)
        for places, x in parameters.values():
            grad = recorded.grads.get(names[id(x)]) if x.requires_grad else None
            self._shown.add_tensor(x, places, grad)
        for path, module, forward in running:
            state, shown = state_of(module), []
            for parameter in [p for group in state.groups for p in group.parameters] if state is not None else ():
                grad = recorded.grads.get(parameter.name) if parameter.sharded.requires_grad else None
                gathered, places = functools.partial(_gathered, parameter), of_units.get(parameter, [])
                if places:  # else no module of the model has it any more
                    shown.append(
                        LocalParameter(parameter.name, gathered, places, grad, parameter.sharded.requires_grad)
                    )
            if path == "":
                self._root = self.compiling.as_the_module(module, forward)
                self._parameters += shown  # the hooks of its unit are around all of this
            else:
                unit = None if state is None else self._unit_forward(state, module, shown)
                if unit is not None:
                    self._units_made.append(unit)
                call = self._placed(path, module, self.compiling.as_the_module(module, forward), unit)
                self._shown.add(module.__dict__, CALL_OVERRIDE, call)

    def _eager_module(self, path: str, module: nn.Module) -> Callable[..., Any]:
        """What is called where the model calls a module that runs in eager mode."""
        return on_dtensors(module, path, *self.recorded.module_types[path], self._as_in_eager_mode)

    def _unrecorded(self, path: str, module: nn.Module) -> Callable[..., Any] | None:
        """The same for one that the recorded step did not call; None: it may run."""
        return refused(f"the module {path} was not recorded")

    def _unit_forward(self, state: Any, module: nn.Module, shown: list[LocalParameter]) -> UnitForward:
        return UnitForward(state, module, shown, self._running_units)

    def _forward(self, module: nn.Module, plan: ModulePlan) -> Callable[..., Any]:
        checkpoint = checkpoint_of(module)
        forward = own_forward(module, plan.path)
        if plan.forward is not None:
            forward = self._patched(forward, plan.forward, module, plan.path)
        return forward if checkpoint is None else checkpoint.around(forward)

    def _patched(self, function: Any, plan: FunctionPlan, module: nn.Module, path: str) -> Any:
        if isinstance(function, types.MethodType):
            return types.MethodType(self._patched(function.__func__, plan, module, path), function.__self__)
        code = patched_code(plan.source, plan.patch)
        own = code_of(function)
        if code is None or not isinstance(function, types.FunctionType) or own is None:
            raise UnrecordedError(f"{function} is not a function in Python")
        if self.originals.get(own, own) is not plan.code:
            raise UnrecordedError(f"{function} is another function than was recorded")
        self.needs_mode |= plan.runs_on_dtensors  # also in functions that are changed when they are called
        self.originals.update(zip(code_objects(code), code_objects(plan.code), strict=False))
        cells: dict[str, Any] = {REFUSE: functools.partial(_refuse, plan.code.co_filename), SLICE: slice}
        cells[MARK] = self.compiling.aside(self._mark) if self.compiling.is_on else self._path.append
        for node, action in plan.actions.items():
            callee = callee_of(plan.source.nodes[node])
            if isinstance(action, Checked):
                cells[site_name(node)] = self._checked(action, callee, plan, node)
            else:
                cells[site_name(node)] = self._site(action, callee, path, module)
        for node, plans in plan.swaps.items():
            swap = Swap(
                plans, functools.partial(self._patched, module=module, path=path), self._guarded, self.originals
            )
            cells[site_name(node)] = self.compiling.aside(swap)
        return make_function(function, code, cells)

    def _site(self, action: Eager | ReadSizes | TakeSizes, callee: Any, path: str, module: nn.Module) -> Any:
        if isinstance(action, ReadSizes):
            return read_sizes(action.function, callee, action.factors)
        if isinstance(action, TakeSizes):
            return take_sizes(action.factors)
        local = self._local(action, path)
        call = EagerCall(
            self._require_mode, module, path, action.function, action.inputs, action.outputs, callee, local
        )
        return self.compiling.aside(call)

    def _mark(self, node: int) -> None:
        self._path.append(node)

    def _checked(self, action: Checked, callee: Any, plan: FunctionPlan, node: int) -> Any:
        """Layers share what they know about arguments."""
        key = plan.code, node, action
        found = self._checks.get(key)
        if found is None:
            where = f"{plan.code.co_filename}:{getattr(plan.source.nodes[node], 'lineno', 0)}"
            found = self._checks[key] = checked_call(where, action.function, action.inputs, action.outputs, callee)
        return self.compiling.aside(found)

    def _local(self, action: Eager, path: str) -> Any:
        methods = self.runtime.attention_methods(path)
        return local_function(action.function, action.inputs, action.outputs, methods)

    def _require_mode(self) -> None:
        activation = current_activation()
        self.needs_mode = self._used_mode = True
        if activation is None or activation.contexts is None:
            raise UnrecordedError("a function runs on DTensors that did not in the steps before")

    def _placed(
        self, path: str, module: nn.Module, forward: Callable[..., Any], unit: UnitForward | None
    ) -> Callable[..., Any]:
        """``forward`` between the entries of the plan at the module's boundary, and the hooks of its unit."""
        # None: of a copy of the model, which copies what there is to do.
        instructions = self.runtime.instructions.get(path)
        placed_at = self.recorded.boundaries
        inputs = [LocalPlacing.of(p, placed_at.get(p.name, ()), self) for p in getattr(instructions, "inputs", ())]
        outputs = [LocalPlacing.of(p, placed_at.get(p.name, ()), self) for p in getattr(instructions, "outputs", ())]
        if unit is None and not inputs and not outputs:
            return forward
        forward = self.compiling.inside(forward)
        if not inputs and not outputs:
            return self.compiling.aside(functools.partial(_in_unit, unit, forward))
        local: Any = copy.copy(instructions)
        local.inputs, local.outputs = inputs, outputs

        is_any = len(inputs) == 1 and inputs[0].index is None  # of one entry for all inputs
        position = local.position_of(inputs[0].index) if len(inputs) == 1 and not is_any else None
        is_whole = len(outputs) == 1 and outputs[0].index is None and not local.hands_out
        place_output: Any = outputs[0] if is_whole else local.place_outputs if outputs else None

        def placed(*args: Any, **kwargs: Any) -> Any:
            if is_any and not kwargs:
                args = tuple(map(inputs[0], args))
            elif position is not None and position < len(args):
                args = (*args[:position], inputs[0](args[position]), *args[position + 1 :])
            elif inputs:
                args, kwargs, _ = local.place_inputs(args, kwargs)
            return inner(*args, **kwargs) if unit is None else unit.run(inner, args, kwargs)

        def placing_output(*args: Any, **kwargs: Any) -> Any:
            return place_output(forward(*args, **kwargs))

        inner = forward if place_output is None else placing_output
        return self.compiling.aside(inner if unit is None and not inputs else placed)


def _gathered(parameter: ManagedParameter) -> DTensor:
    """A parameter of a unit while that computes."""
    x = parameter.unsharded
    if not isinstance(x, DTensor):
        raise UnrecordedError(f"the parameter {parameter.name} is not gathered")
    return x


def _in_unit(unit: UnitForward | None, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    assert unit is not None
    return unit.run(forward, args, kwargs)


def _refuse(file: str, line: int) -> None:
    activation = current_activation()
    if activation is None or activation.static is None:
        return  # a function that was defined in the forward runs later, as a hook of a tensor
    raise UnrecordedError(f"{file}:{line} was not recorded")

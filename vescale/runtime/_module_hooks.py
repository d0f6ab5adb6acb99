"""The instructions of one module, which its forward hooks carry out."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.overrides import TorchFunctionMode

from vescale.compat import (
    filter_functions,
    in_dual_level,
    in_transform,
    map_tensors,
    no_torch_function,
    note,
    spec_of,
    tensors_in,
)
from vescale.errors import EntryError, NotParallelizedError
from vescale.ir import Instruction, Redistribute
from vescale.ops import convert, enter_local, refuse_transforms, with_cut_gradient, wrap_global
from vescale.placements import shard_dim
from vescale.runtime._activation import THREAD, current_activation, module_of_node
from vescale.runtime._adapters import check_strays
from vescale.runtime._executors import Executor, executor_of
from vescale.runtime._foreign_tools import refuse_tracing
from vescale.runtime._input_checks import check_generate, check_inputs, note_random_state, watch_backward
from vescale.runtime._module_calls import module_hooks
from vescale.runtime._placing import Placed, Placing
from vescale.runtime._precision import Casts
from vescale.runtime._runtime import BoundMethod, Runtime

# ``generate`` of a parallelized model: the model's own method, around a model whose outputs are plain global tensors.
#
# The method computes on plain tensors, the same on every rank: tokens, scores, beams. The model is called with plain tensors
# and, while it generates, returns plain global ones; what it keeps for its next call (keys and values) stays sharded as the
# plan has it. All ranks of the mesh call the method, with the same arguments, and get the same tokens.


def add_generate(runtime: Runtime, module: nn.Module) -> bool:
    """Give a module whose class has a ``generate`` (Hugging Face's) one of its own. False: it has none."""
    if not hasattr(module, "prepare_inputs_for_generation"):
        return False
    BoundMethod.give(runtime, module, "_prepare_cache_for_generation", _prepare_cache)
    return BoundMethod.give(runtime, module, "generate", _generate)


def is_generating(runtime: Runtime) -> bool:
    """Whether this thread is in ``generate`` of the model."""
    return runtime in THREAD.generating


def whole_output(runtime: Runtime, output: Any) -> Any:
    """``output`` of the model with the plain global tensor in place of each DTensor, but for those in caches."""
    return map_tensors(lambda x: _whole(runtime, x), output)


def _whole(runtime: Runtime, x: torch.Tensor) -> torch.Tensor:
    if not isinstance(x, DTensor):
        return x
    return enter_local(convert(x, runtime.replicated, requester="<out> for generate"))


def _generate(runtime: Runtime, module: Any, *args: Any, **kwargs: Any) -> Any:
    """The class's own method, with the tokens and random numbers of one device. All ranks call it alike."""
    method = type(module).generate
    if is_generating(runtime):
        return method(module, *args, **kwargs)
    check_generate(runtime, module, args, kwargs)
    with _generating(runtime):
        return method(module, *args, **kwargs)


@contextlib.contextmanager
def _generating(runtime: Runtime) -> Iterator[None]:
    THREAD.generating.append(runtime)
    try:
        with _BetweenForwards(runtime):
            yield
    finally:
        THREAD.generating.pop()


class _BetweenForwards(TorchFunctionMode):
    """Between two forwards the method selects rows of what the model has kept (beams) by plain indices: these are the same
    on every rank."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self.runtime = runtime
        filter_functions(self, _BetweenForwards.__torch_function__, {})

    def __torch_function__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if current_activation() is None and any(isinstance(x, DTensor) for x in tensors_in((args, kwargs))):
            args, kwargs = map_tensors(self._global, args), map_tensors(self._global, kwargs)
        return func(*args, **kwargs)

    def _global(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, DTensor) or not x.ndim:
            return x
        return wrap_global(x, self.runtime.mesh, self.runtime.replicated, "plain operand")


# Caches that are allocated before they are filled


def _prepare_cache(runtime: Runtime, module: Any, *args: Any, **kwargs: Any) -> Any:
    """The class's own method; layers that allocate zeros for keys and values then do so with the placements of these."""
    result = type(module)._prepare_cache_for_generation(module, *args, **kwargs)
    for value in (v for given in (*args, *kwargs.values()) if isinstance(given, dict) for v in given.values()):
        for cache in (
            value,
            *(getattr(value, name, None) for name in ("self_attention_cache", "cross_attention_cache")),
        ):
            layers = getattr(cache, "layers", None)
            for layer in layers if isinstance(layers, list) else ():
                if hasattr(layer, "max_cache_len") and not getattr(layer, "is_initialized", True):
                    note("runtime._module_hooks:instance", layer)
                    layer.__dict__["lazy_initialization"] = types.MethodType(_allocate_placed, layer)
    return result


def _allocate_placed(self: Any, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
    type(self).lazy_initialization(self, key_states, value_states)
    for name, states in (("keys", key_states), ("values", value_states)):
        made = getattr(self, name)
        if isinstance(states, DTensor) and isinstance(made, DTensor) and made.ndim == states.ndim:
            setattr(self, name, convert(made, _of_cache(states), requester=f"cache of {name}"))


def _of_cache(states: DTensor) -> tuple[Placement, ...]:
    """The placements of the states, but Replicate along their sequence: that of the cache has another length."""
    sequence = states.ndim - 2
    return tuple(p if shard_dim(p) not in (None, sequence) else Replicate() for p in states.placements)


def add_hooks(runtime: Runtime, module: nn.Module, path: str, instructions: Sequence[Instruction]) -> None:
    """Give a module the hooks that carry out its instructions.

    ===============  ===================================================================================================
    before forward   places inputs; enters the module (the outermost one switches the function mode on); shows parameters
                     with a placement of their own for the forward
    after            places outputs; hides these parameters and leaves the module, also after an exception
    ===============  ===================================================================================================
    """
    is_member = runtime.mesh.get_coordinate() is not None
    own = runtime.instructions[path] = _Instructions(runtime, module, path, instructions)
    before, after = module_hooks(
        runtime,
        path,
        (own.begin_forward if is_member else own.refuse_rank)
        if own.is_root
        else own.place_inputs
        if own.inputs or own.casts.param
        else None,
        own.show if own.shown else None,
        own.place_outputs if own.outputs or own.is_root or own.hands_out or own.casts.output else None,
        own.hide if own.shown else None,
        own.entries_of_inputs(),
        own.entries_of_outputs(),
    )
    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after, with_kwargs=True, always_call=True)


class _Instructions:
    """The instructions of a module. What the hooks call runs without torch function modes."""

    def __init__(self, runtime: Runtime, module: nn.Module, path: str, instructions: Sequence[Instruction]) -> None:
        self.runtime = runtime
        self.path = path
        self.is_root = path == ""
        self._model = type(module).__name__
        self.hands_out = add_generate(runtime, module)
        self._module = weakref.ref(module)
        self.inputs = [Placing(runtime, i) for i in instructions if executor_of(i) is Executor.INPUT]
        self.parameters = [i for i in instructions if executor_of(i) is Executor.PARAMETER]
        self.casts = Casts(instructions)
        self.shown = list(dict.fromkeys([*(i.target for i in self.parameters), *self.casts.parameters]))
        self._hidden: list[list[tuple[nn.Module, str, Any]]] = []  # by running call: what was shown before
        self.outputs = [Placing(runtime, i) for i in instructions if executor_of(i) is Executor.OUTPUT]
        self._found: set[Placing] = set()  # those that have named an item
        self._takes_local_parts = any(placing.takes_local_parts for placing in self.inputs)
        self._named = [placing.index for placing in self.inputs if placing.index is not None]
        self._positions = _positions(module) if self.inputs or self.is_root else {}
        self._names = {position: name for name, position in self._positions.items()} if self.is_root else {}

    def __deepcopy__(self, memo: dict[int, Any]) -> _Instructions:
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        copied.runtime.instructions[copied.path] = copied
        return copied

    # Inputs

    def begin_forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[Placed] | None]:
        """Of the model: ranks compare what it is given, which is placed then."""
        refuse_tracing()
        if in_transform() or in_dual_level():
            model = self._module()
            given = tensors_in((args, kwargs, [] if model is None else [*model.parameters()]))
            refuse_transforms(given, f"{self._model}, a parallelized model")
        missing = self.runtime.missing_values
        if missing is not None and missing.places:
            missing.check((args, kwargs))
        if self.runtime.strays:
            check_strays(self.runtime)
        parts = self._takes_local_parts
        check_inputs(self.runtime, self._model, args, kwargs, self._named_inputs, takes_local_parts=parts)
        if not self.inputs and not self.casts.param:
            return args, kwargs, None
        if self.runtime.early_inputs is not None and not parts:
            early = self.runtime.early_inputs(args, kwargs)
            if early is not None:
                found: tuple[tuple[Any, ...], dict[str, Any], None] = early
                return found
        try:
            return self.place_inputs(args, kwargs)
        finally:
            THREAD.global_shapes = None

    def refuse_rank(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
        """Of the model, on a rank outside of its mesh, which has no part of it."""
        raise NotParallelizedError(
            f"this rank is not part of the mesh of {self._model}, {self.runtime.mesh}, and has no part of the model. "
            "Call the model only on the ranks of its mesh, or create a mesh of all ranks: init_device_mesh(device, "
            "sizes)"
        )

    def _named_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any, Placing | None]]:
        """Name, value and entry of each input."""
        entries: dict[tuple[str | None, int | str | None], Placing] = {}
        others = None
        for placing in self.inputs:
            if placing.index is None:
                others = placing
            else:
                entries[self._find(placing.index, args, kwargs)] = placing
        for position, value in enumerate(args):
            yield self._names.get(position, str(position)), value, entries.get(("args", position), others)
        for name, value in kwargs.items():
            yield name, value, entries.get(("kwargs", name), others)

    def place_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[Placed] | None]:
        args, kwargs = self.casts.inputs(args, kwargs)
        placed: list[Placed] = []
        for placing in self.inputs:
            index = placing.index
            if index is None:  # all inputs that no other instruction names
                args, kwargs = self._place_others(placing, args, kwargs, placed)
                continue
            where, key = self._find(index, args, kwargs)
            if where is None:
                continue  # an optional input that this call leaves out
            if where == "args":
                assert isinstance(key, int)
                args = (*args[:key], placing(args[key], placed), *args[key + 1 :])
            else:
                assert isinstance(key, str)
                kwargs = {**kwargs, key: placing(kwargs[key], placed)}
        return args, kwargs, placed or None

    def entries_of_inputs(self) -> tuple[tuple[str | None, int, Any], ...] | None:
        """For hooks in C++: name and position of each input that an entry names, and what is asked about it. Neither name
        nor position: the entry is for all others. None: :meth:`place_inputs` does more than to carry out entries."""
        if self.is_root or self.casts.param or not self.inputs:
            return None
        return tuple([(*self._name_and_position(placing.index), placing.way) for placing in self.inputs])

    def entries_of_outputs(self) -> tuple[tuple[str | None, int, Any], ...] | None:
        """The same of the only entry for a single output; None: there is another one, or more to do."""
        if self.is_root or self.hands_out or self.casts.output or len(self.outputs) != 1:
            return None
        (placing,) = self.outputs
        return ((None, -1, placing.way),) if placing.index in (None, 0, "0") else None

    def _name_and_position(self, index: int | str | None) -> tuple[str | None, int]:
        if index is None:
            return None, -1
        if isinstance(index, str):
            return index, self._positions.get(index, -1)
        return next((name for name, position in self._positions.items() if position == index), None), index

    def _place_others(
        self, placing: Placing, args: tuple[Any, ...], kwargs: dict[str, Any], placed: list[Placed]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        named = {self._find(index, args, kwargs) for index in self._named} if self._named else ()
        return (
            tuple([value if ("args", n) in named else placing(value, placed) for n, value in enumerate(args)]),
            {key: value if ("kwargs", key) in named else placing(value, placed) for key, value in kwargs.items()},
        )

    def _find(
        self, index: int | str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[str | None, int | str | None]:
        """The input in a call: ``("args", position)``, ``("kwargs", name)``, (None, None) if it is left out."""
        if isinstance(index, str):
            if index in kwargs:
                return "kwargs", index
            position = self._positions.get(index)
            return ("args", position) if position is not None and position < len(args) else (None, None)
        if index < len(args):
            return "args", index
        name = next((name for name, position in self._positions.items() if position == index), None)
        return ("kwargs", name) if name in kwargs else (None, None)

    # Outputs

    def place_outputs(self, output: Any) -> Any:
        for placing in self.outputs:
            output = placing(output) if placing.index is None else self._place_item(placing, output)
        if self.casts.output is not None:
            output = self.casts.outputs(output)
        if self.hands_out and is_generating(self.runtime):
            output = whole_output(self.runtime, output)
        elif self.is_root:
            output = self._finished(output) if type(output) is DTensor else map_tensors(self._finished, output)
        if self.is_root:
            note_random_state(self.runtime)
            watch_backward(self.runtime, self._model, output)
            model = self._module()
            if model is not None:
                self.runtime.saved.end(output, model, module_of_node)
        return output

    def _place_item(self, placing: Placing, output: Any) -> Any:
        """One item of an output, by position or name. A field of a dataclass may be missing in a call, and so may an item
        that was there before; an entry that has named none is refused."""
        items = _items(output)
        index = str(placing.index)
        key = next((key for position, key in enumerate(items) if index in (key, str(position))), None)
        if key is not None:
            self._found.add(placing)
            if items[key] is None:
                return output
            placed = placing(items[key])
            return placed if output is items[key] else _with_item(output, key, items[key], placed)
        fields = dataclasses.fields(output) if dataclasses.is_dataclass(output) else ()
        if placing not in self._found and output is not None and index not in {field.name for field in fields}:
            names = f"a {type(output).__name__} with the items {list(items)}" if items else f"a {type(output).__name__}"
            raise EntryError(
                f"the entry {placing.target_text} matches nothing: the module returns {names}. Write <out> for a "
                "single output, or the position or name of one of these items",
                placing.instruction.source,
            )
        return output

    def _finished(self, x: torch.Tensor) -> torch.Tensor:
        """An output of the model. A Partial scalar (a loss) is reduced, so that it is printed correctly; the gradient of a
        sharded output is sharded."""
        if not isinstance(x, DTensor):
            return x
        if not x.ndim:
            for placement in spec_of(x).placements:
                if placement.is_partial():
                    return convert(x, self.runtime.replicated, requester="scalar output")
        return with_cut_gradient(x)

    # Parameters

    def show(self, module: nn.Module) -> None:
        """Hide parameters at rest behind ones with the placements and dtypes of the forward. Their gradients are passed as
        they arrive, for their buckets to reduce, unless the plan gives the placements of the gradient."""
        moves = {instruction.target: instruction.op for instruction in self.parameters}
        hidden: list[tuple[nn.Module, str, Any]] = []
        self._hidden.append(hidden)
        for target in self.shown:
            owner, name = _owner(module, target)
            with no_torch_function():
                shown, op = self.casts.parameter(owner, name, target), moves.get(target)
                if isinstance(op, Redistribute):
                    shown = convert(
                        shown,
                        op.dst,
                        grad_source=op.grad_src,
                        grad_target=op.grad_dst,
                        passes_gradient=op.grad_src is None and op.grad_dst is None,
                        requester=f"{self.path}.{target}" if self.path else target,
                    )
            hidden.append((owner, name, owner.__dict__.get(name)))
            owner.__dict__[name] = shown

    def hide(self, module: nn.Module) -> None:
        for owner, name, before in self._hidden.pop() if self._hidden else ():
            if before is None:
                owner.__dict__.pop(name, None)
            else:  # in a local region, which hides parameters behind local tensors
                owner.__dict__[name] = before


def _positions(module: nn.Module) -> dict[str, int]:
    """Names of the forward's positional parameters."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    return {parameter.name: index for index, parameter in enumerate(parameters) if parameter.kind in kinds}


def _owner(module: nn.Module, target: str) -> tuple[nn.Module, str]:
    """The module that owns the parameter ``target``, a name relative to ``module``, and its name there."""
    path, _, name = target.rpartition(".")
    return (module.get_submodule(path) if path else module), name


def _items(output: Any) -> dict[Any, Any]:
    """The items of an output, by name or position, in order; the only one of a tensor is 0."""
    if isinstance(output, torch.Tensor):
        return {0: output}
    if isinstance(output, Mapping):
        return dict(output)
    if isinstance(output, tuple | list):
        return dict(zip(getattr(output, "_fields", range(len(output))), output))
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        return {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    return {}


def _with_item(output: Any, key: Any, before: Any, value: Any) -> Any:
    """The output with another value for an item, of the same type."""
    if value is before:
        return output
    if isinstance(output, tuple | list):
        items = [value if name == key else item for name, item in _items(output).items()]
        return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
    if isinstance(output, Mapping):
        if isinstance(before, torch.Tensor):
            return map_tensors(lambda x: value if x is before else x, output)
        kind: Any = type(output)
        return kind({name: value if name == key else item for name, item in output.items()})
    changed = copy.copy(output)
    object.__setattr__(changed, key, value)
    return changed

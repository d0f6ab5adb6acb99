"""Tensors whose values are computed later, and what ops on them do while a constructor runs.

Inside :func:`vescale.deferred_init` factories return a :class:`DeferredTensor`, which has a shape, strides, a dtype and a
device, but no memory. Ops on it are recorded (:mod:`vescale.rng._deferred_replay`); random ops advance the generator as if
they had drawn.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vescale.compat.tensor_subclasses import MemorylessTensor, TorchDispatchMode, tree_leaves, tree_map, without_modes
from vescale.errors import Coded, UnsupportedDeferredError
from vescale.rng._deferred_replay import Constant, Initializer, Op, Record, View, next_time, whole_numel, whole_values
from vescale.rng._engine import advance, default_generator, replay_draws, saved_state
from vescale.rng._random_ops import RandomOp, fill_of, fills

aten = torch.ops.aten

# Constructors may look at values (``[x.item() for x in torch.linspace(...)]``) that take this many elements to compute.
_MAX_ELEMENTS_FOR_VALUES = 1 << 20

_VALUE_QUESTIONS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default, aten.item.default}
_UNSUPPORTED = {aten.set_.source_Tensor, aten.set_.source_Storage, aten.resize_.default, aten.resize_as_.default}


class DeferredValueError(Coded, RuntimeError, code="VS1201"):
    """Code inside ``deferred_init()`` reads the values of a tensor that is too large to be computed there."""


class DeferredTensor(MemorylessTensor):
    """A tensor without values."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.prim.device.default:
            return _record_of(args[0]).device
        return record(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DeferredTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        with torch.no_grad():
            clone: Any = self.detach().clone(memory_format=torch.preserve_format)
        result = torch.nn.Parameter(clone, self.requires_grad) if isinstance(self, torch.nn.Parameter) else clone
        if not isinstance(self, torch.nn.Parameter):
            result.requires_grad_(self.requires_grad)
        memo[id(self)] = result
        attributes = {name: copy.deepcopy(value, memo) for name, value in self.__dict__.items() if name != "_is_param"}
        result.__dict__.update(attributes)
        return result

    def tolist(self) -> Any:
        return _values_now(self, "tolist()").tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return _values_now(self, "numpy()").numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        return _values_now(self, "__array__()").__array__(dtype)


def is_deferred(tensor: Any) -> bool:
    """Whether ``tensor`` was created inside :func:`deferred_init` and has no values yet."""
    return isinstance(tensor, DeferredTensor)


def _record_of(tensor: torch.Tensor) -> Record:
    record: Record = tensor.untyped_storage().record  # type: ignore[attr-defined]
    return record


def view_of(tensor: DeferredTensor) -> View:
    """The geometry of a deferred tensor on its record."""
    return _view(tensor, _record_of(tensor))


def _view(tensor: torch.Tensor, record: Record) -> View:
    return View(record, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)


class Recorder(TorchDispatchMode):
    """While active, factories return deferred tensors. Ops on tensors with values run normally."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return _record_of(args[0]).device
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(isinstance(tensor, DeferredTensor) for tensor in tensors):
            return record(func, args, kwargs)
        makes = any(str(returned.type) in ("Tensor", "List[Tensor]") for returned in func._schema.returns)
        device = kwargs.get("device")
        if tensors or not makes or (device is not None and torch.device(device).type == "meta"):
            return func(*args, **kwargs)
        return record(func, args, kwargs)


def record(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One op with a deferred argument, or a factory. The result is deferred unless the code reads values."""
    if func in _VALUE_QUESTIONS:
        return func(*tree_map(_now(func), args), **tree_map(_now(func), kwargs))
    if func in _UNSUPPORTED:
        raise UnsupportedDeferredError(
            f"{func} inside deferred_init() at {_where()}: it replaces the memory of a tensor; expected an op on "
            "values: assign to .data, or build this module outside of deferred_init()"
        )
    if func in fills() and func is not aten.native_dropout.default:
        return _run_fill(func, args, kwargs)
    if torch.Tag.nondeterministic_seeded in func.tags:
        return _run_now(func, args, kwargs)
    return _record_call(func, args, kwargs)


def _record_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mutated = [
        value for argument, value in _bound(func, args, kwargs) if argument.alias_info and argument.alias_info.is_write
    ]
    written: list[Any] = [value for value in tree_leaves(mutated) if isinstance(value, torch.Tensor)]
    if any(not isinstance(value, DeferredTensor) for value in written):
        return _run_now(func, args, kwargs)  # writes real memory
    metas: dict[int, torch.Tensor] = {}

    def as_meta(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in metas:
            looks = leaf.as_meta() if isinstance(leaf, DeferredTensor) else leaf.detach()
            metas[id(leaf)] = looks.to("meta") if looks.device.type != "meta" else looks
        return metas[id(leaf)]

    meta_kwargs = tree_map(as_meta, kwargs)
    device = _result_device(func, args, kwargs)
    if "device" in {argument.name for argument in func._schema.arguments}:
        meta_kwargs["device"] = torch.device("meta")
        meta_kwargs.pop("pin_memory", None)
    meta_args = tree_map(as_meta, args)
    try:
        outputs = func(*meta_args, **meta_kwargs)
    except RuntimeError:
        # The shape of the result depends on values, it has no rule, or the op looks at values on its way (allclose). Any
        # other error is raised again, with real tensors.
        return _run_now(func, args, kwargs)
    originals = {id(metas[id(leaf)]): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
    results: list[View | None] = []

    def wrap(output: Any) -> Any:
        if not isinstance(output, torch.Tensor):
            return output
        storage: Any = output.untyped_storage()
        if hasattr(storage, "record"):
            results.append(None)
        else:
            storage.record = Record(storage.nbytes(), device)
            results.append(_view(output, storage.record))
        if id(output) in originals:
            original = originals[id(output)]
            if torch.Tag.inplace_view in func.tags:
                original.data = DeferredTensor.around(output, device)
            return original
        return DeferredTensor.around(output, storage.record.device)

    wrapped = type(outputs)(wrap(output) for output in outputs) if isinstance(outputs, tuple | list) else wrap(outputs)
    targets = [] if torch.Tag.inplace_view in func.tags else [view_of(value) for value in written]
    if any(result is not None for result in results) or targets:
        kept_kwargs = tree_map(_as_leaf, kwargs)
        if "dtype" in {argument.name for argument in func._schema.arguments} and results and results[0] is not None:
            kept_kwargs["dtype"] = results[0].dtype  # the default dtype may be another when this is replayed
        op = Op(next_time(), func, tree_map(_as_leaf, args), kept_kwargs, tuple(results), tuple(targets))
        for record_ in {id(view.record): view.record for view in [*results, *targets] if view is not None}.values():
            record_.writes.append(op)
    return wrapped


def _bound(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
    """(schema argument, given value) of a call."""
    positional = list(zip(func._schema.arguments, args, strict=False))
    return positional + [(a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs]


def _result_device(func: Any, args: Any, kwargs: Any) -> torch.device:
    if kwargs.get("device") is not None:
        device = torch.device(kwargs["device"])
        if device.type in ("cpu", "meta") or device.index is not None:
            return device
        return torch.device(device.type, torch.get_device_module(device.type).current_device())
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    # A zero-dim CPU tensor goes with tensors of any device.
    ranked = sorted(tensors, key=lambda tensor: tensor.ndim == 0)
    return ranked[0].device if ranked else torch.device("cpu")


def _as_leaf(leaf: Any) -> Any:
    """A tensor argument as the graph keeps it."""
    if isinstance(leaf, DeferredTensor):
        return view_of(leaf)
    if isinstance(leaf, torch.Tensor):
        value = leaf.detach().clone() if leaf.numel() <= 4096 else leaf
        return Constant(value, value._version)
    return leaf


# --- random ops


def _record_fill(target: DeferredTensor, draws: RandomOp, generator: torch.Generator | None, parameter: Any) -> None:
    generator = default_generator(target.device) if generator is None else generator
    state = saved_state(generator)
    view = view_of(target)
    parameter_dtype = None if parameter is None else parameter.dtype
    advance(view.shape, view.strides, draws, view.dtype, generator, parameter_dtype)
    args = (view,) if parameter is None else (view, _as_leaf(parameter))
    op = Op(next_time(), None, args, {}, (), (view,), draws, state)
    view.record.writes.append(op)


def _run_fill(func: Any, args: Any, kwargs: Any) -> Any:
    fill, parameter = fill_of(func, args, kwargs)
    options = {key: value for key, value in kwargs.items() if key != "generator"}
    if func._schema.is_mutable:
        result = args[0]
        parameter = None if parameter is None else parameter.expand(result.shape)
    elif func.overloadpacket is aten.bernoulli:
        result = record(aten.empty_like.default, (args[0],), {"memory_format": torch.contiguous_format})
    elif func.overloadpacket.__name__.endswith("_like"):
        result = record(aten.empty_like.default, (args[0],), options)
    else:
        if options.get("dtype") is None and func.overloadpacket is aten.randint:
            options["dtype"] = torch.int64
        result = record(aten.empty.memory_format, (args[-1],), options)
    _record_fill(result, fill, kwargs.get("generator"), parameter)
    return result


def record_initializer(
    function: Callable[..., Any],
    tensor: Any,
    arguments: tuple[Any, ...],
    generator: torch.Generator | None,
) -> None:
    """Record an elementwise initializer as one op and advance the generator as it would (in the time of one device)."""
    generator = default_generator(tensor.device) if generator is None else generator
    view, state = view_of(tensor), saved_state(generator)
    with without_modes():  # its scratch tensors have values
        replay_draws(function, arguments, view.shape, view.strides, view.dtype, generator)
    op = Op(next_time(), None, (view,), {}, (), (view,), Initializer(function, arguments), state)
    view.record.writes.append(op)


# --- values needed at once


def _run_now(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an op that needs real values; the result has values, too."""
    return func(*tree_map(_now(func), args), **tree_map(_now(func), kwargs))


def _now(func: Any) -> Callable[[Any], Any]:
    return lambda leaf: _values_now(leaf, str(func)) if isinstance(leaf, DeferredTensor) else leaf


def _values_now(tensor: DeferredTensor, what: str) -> torch.Tensor:
    view, time = view_of(tensor), next_time()
    numel = whole_numel(view, time)
    if numel > _MAX_ELEMENTS_FOR_VALUES:
        raise DeferredValueError(
            f"{what} needs the values of a tensor of shape {tuple(tensor.shape)} inside deferred_init() (or before "
            f"materialize()), at {_where()}: they would take {numel:,} elements to compute; expected at most "
            f"{_MAX_ELEMENTS_FOR_VALUES:,}: build this module outside of deferred_init(), or move that line after "
            "materialize()"
        )
    with without_modes():
        return whole_values(view, time)


_SKIPPED = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))


def _where() -> str:
    """The innermost line of the caller's code (or of the model library): file, line number, function."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((*_SKIPPED, "<")) and "contextlib" not in name:
            return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "an unknown line"

"""DTensor's op dispatcher: where an op is taken over.

In C++, PyTorch looks for a handler of the op (``_custom_op_handlers``), then in the thread's cache of sharding decisions.
On a miss it calls ``_propagate_op_sharding_dispatch_slow_path``. That method returns a sharding decision, which is cached
and followed, or the op's result. Ops that PyTorch runs without Python are therefore taken over on a miss: where stock
DTensor's decision is kept, it is cached, and the next call does not reach Python.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._ops import utils
from torch.utils._pytree import tree_leaves, tree_map_only

from vescale.compat.dtensor import StridedShard, make_dtensor, make_spec
from vescale.compat.model_hooks import DispatchListener, ModelHooks, OpHandler, model_hooks, telling
from vescale.compat.op_info import OutputSharding, decompose, is_view, iterate_specs, with_aliasing
from vescale.compat.patching import HOOKS, Changes
from vescale.compat.sharding_caches import REPLICAS

# ``torch.mul(x, y, out=z)``: an empty ``z`` gets the shape of the result, in stock DTensor only its local tensor does.
#
# What runs in place of an op runs in place of the same op with ``out``, too.


@functools.cache
def _out_names(op: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in op._schema.arguments if argument.is_out)


def is_into_empty(op: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether an ``out`` argument has no elements: it takes the shape of the result."""
    outs = (kwargs.get(name) for name in _out_names(op))
    return any(isinstance(out, DTensor) and out.numel() == 0 for out in outs)


def run_into_empty(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The op without ``out``, and its results in the tensors that were given; NotImplemented where these have elements."""
    if not is_into_empty(op, kwargs):
        return NotImplemented
    return _run_into(getattr(torch.ops.aten, op._schema.name.removeprefix("aten::")), op, args, kwargs)


def with_out_variants(handlers: Mapping[Any, OpHandler]) -> dict[Any, OpHandler]:
    """The handlers, and for the overloads with ``out=`` of their ops: these handlers, and a copy of the results."""
    found = dict(handlers)
    for op, handler in handlers.items():
        for out in _out_variants(op):
            found.setdefault(out, OpHandler(functools.partial(_run_into, op), _applies_to(op, handler)))
    return found


def _out_variants(op: Any) -> list[Any]:
    packet = op.overloadpacket
    taken = [(a.name, str(a.type)) for a in op._schema.arguments if not a.is_out]
    overloads = [getattr(packet, name) for name in packet.overloads()]
    return [
        other
        for other in overloads
        if other is not op
        and _out_names(other)
        and [(a.name, str(a.type)) for a in other._schema.arguments if not a.is_out] == taken
    ]


def _applies_to(op: Any, handler: OpHandler) -> Callable[[Any, Any], bool]:
    return lambda _, schema: handler.applies(op, schema)


def _run_into(function: Any, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    names = _out_names(op)
    found = function(*args, **{name: value for name, value in kwargs.items() if name not in names})
    outs: list[Any] = [kwargs[name] for name in names]
    for out, result in zip(outs, found if isinstance(found, tuple) else (found,), strict=True):
        if out.shape == result.shape:
            out.copy_(result)
        else:
            out.data = result
    return outs[0] if len(outs) == 1 else tuple(outs)


# PyTorch's sharding decisions for dims with fewer elements than ranks: a batch of 1 over 2.
#
# PyTorch's rules do not shard a dim of which ranks would hold nothing, although they are the same for any size.

_DECIDING = threading.local()


def let_shards_be_empty(changes: Changes, _: Any) -> None:
    """Within :func:`with_empty_shards`, PyTorch's rules shard any dim."""
    original = utils.is_tensor_shardable

    @changes.in_place_of(original)
    def is_tensor_shardable(*args: Any, **kwargs: Any) -> bool:
        return getattr(_DECIDING, "now", False) or original(*args, **kwargs)


@contextlib.contextmanager
def with_empty_shards() -> Iterator[None]:
    """Decide on this thread as if each sharded dim had an element for each rank. The caller has to see that the op takes
    empty local tensors, and that nothing is computed from a rank's share of elements."""
    _DECIDING.now = True
    try:
        yield
    finally:
        _DECIDING.now = False


def has_empty_shards(spec: DTensorSpec) -> bool:
    """Whether a dim has fewer elements than the axes that shard it have ranks."""
    parts: dict[int, int] = {}
    for axis, placement in enumerate(spec.placements):
        if type(placement) is Shard:
            parts[placement.dim] = parts.get(placement.dim, 1) * spec.mesh.size(axis)
    return any(dim < len(spec.shape) and spec.shape[dim] < number for dim, number in parts.items())


def some_rank_holds_nothing(spec: DTensorSpec) -> bool:
    """Whether a rank has no element of a dim: of fewer elements than ranks, and of 5 over 4, as parts are 2, 2, 1 and 0."""
    smallest = list(spec.shape)
    for axis, placement in enumerate(spec.placements):
        if type(placement) is Shard and placement.dim < len(smallest):
            size, number = smallest[placement.dim], spec.mesh.size(axis)
            smallest[placement.dim] = max(0, size - -(-size // number) * (number - 1))
    return 0 in smallest and 0 not in spec.shape


# Whether an op on the local tensors has results of the shapes that a sharding decision says. A strategy of PyTorch's
# says where dims go and does not run the op. Where an op treats an operand by its sizes (``solve`` takes a matrix for a
# batch of vectors, others broadcast a dim of size 1), the local tensors may mean something else than the global ones.
# So each decision is tried once on tensors without memory, of the sizes of the first and of the last rank: every rank
# comes to the same answer.

_KNOWN = frozenset((Partial, Replicate, Shard))


def has_local_shapes(op: Any, schema: Any, sharding: Any) -> bool:
    """Whether each rank gets the part of the results that the decision says, as far as shapes tell. Also True
    where the op cannot be tried: without a meta kernel, for views, and for other placements than PyTorch's."""
    if not isinstance(sharding, OutputSharding) or sharding.output_spec is None:
        return True
    if sharding.use_val_from_redistribute_schema or op._schema.is_mutable or is_view(op):
        return True
    if torch.Tag.pointwise in op.tags:
        return True
    wanted = sharding.redistribute_schema if sharding.needs_redistribute else schema
    if wanted is None or wanted.op != op:
        return True
    results = [x for x in tree_leaves(sharding.output_spec) if isinstance(x, DTensorSpec)]
    specs = [x for x in tree_leaves((wanted.args_schema, wanted.kwargs_schema)) if isinstance(x, DTensorSpec)]
    if any(type(p) not in _KNOWN for spec in (*specs, *results) for p in spec.placements):
        return True
    if not any(p.is_shard() for spec in specs for p in spec.placements):
        return True
    for shape_of in (_first_shape, _last_shape):
        if not any(spec.tensor_meta is None or 0 in shape_of(spec) for spec in (*specs, *results)):
            shapes = _shapes(op, wanted, shape_of)
            if shapes is None:  # because of these sizes?
                return _shapes(op, wanted, lambda spec: spec.shape) is None
            if len(shapes) == len(results) and shapes != [shape_of(spec) for spec in results]:
                return False
    return True


def _shapes(op: Any, schema: Any, shape_of: Callable[[DTensorSpec], Sequence[int]]) -> list[tuple[int, ...]] | None:
    """Of the op's results; None where it raises."""

    def made(spec: DTensorSpec) -> torch.Tensor:
        assert spec.tensor_meta is not None
        return torch.empty(shape_of(spec), dtype=spec.tensor_meta.dtype, device="meta")

    args, kwargs = tree_map_only(DTensorSpec, made, (schema.args_schema, schema.kwargs_schema))
    try:
        found = op(*args, **kwargs)
    except Exception:  # not lost: it is raised where it is raised on one device, too
        return None
    return [tuple(x.shape) for x in tree_leaves(found) if isinstance(x, torch.Tensor)]


def _first_shape(spec: DTensorSpec) -> tuple[int, ...]:
    return local_shape(spec, [0] * spec.mesh.ndim)


def _last_shape(spec: DTensorSpec) -> tuple[int, ...]:
    return local_shape(spec, [size - 1 for size in spec.mesh.shape])


def local_shape(spec: DTensorSpec, coordinate: Sequence[int]) -> tuple[int, ...]:
    """Of the rank with this coordinate, for PyTorch's placements in the order of the axes."""
    shape = list(spec.shape)
    for axis, placement in enumerate(spec.placements):
        if isinstance(placement, Shard):
            size = shape[placement.dim]
            part = -(-size // spec.mesh.size(axis))
            shape[placement.dim] = max(0, min(part, size - part * coordinate[axis]))
    return tuple(shape)


# Switches __torch_function__ off for modes and subclasses alike: DTensor's ops (which use __torch_dispatch__) still run.
no_torch_function = torch._C.DisableTorchFunction
with_torch_function = torch._C._EnableTorchFunction  # inside of it, on again

_aten = torch.ops.aten
DISPATCHER = "torch.distributed.tensor.DTensor._op_dispatcher"
HANDLERS = f"{DISPATCHER}._custom_op_handlers"
# From so many mesh axes on, stock DTensor takes half a minute and more for one op with a _StridedShard among its operands:
# it searches the cheapest way from it to every candidate placement.
_LONG_SEARCH = 3


def handlers_of_dtensor() -> dict[Any, Any]:
    """PyTorch's table of op handlers; asked for each time, because context parallelism puts another one in its place."""
    table: Any = DTensor._op_dispatcher._custom_op_handlers
    return table


def _by_handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], schema: Any) -> Any:
    """The result of the op's handler; NotImplemented where there is none that takes the call."""
    models = model_hooks()
    handler = models.handlers.get(op) if models is not None else None
    if handler is None or not handler.applies(op, schema):
        return run_into_empty(op, args, kwargs) if models is not None else NotImplemented
    return telling(op, handler.run)(op, args, kwargs)


def _on_placements(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], schema: Any) -> Any:
    placements = HOOKS.get("placements")
    if placements is None:
        return NotImplemented
    for spec in iterate_specs((*schema.args_schema, *schema.kwargs_schema.values())):
        if placements.has_custom(spec.placements):
            return placements.run_op(op, args, kwargs, schema)
    if op is _aten.stack.default and _are_numbers_of_several_meshes(schema.args_schema[0]):
        return placements.run_op(op, args, kwargs, schema)  # PyTorch refuses it
    return NotImplemented


def _are_numbers_of_several_meshes(specs: Any) -> bool:
    if not all(isinstance(spec, DTensorSpec) and spec.ndim == 0 and spec.is_replicated() for spec in specs):
        return False
    return any(spec.mesh != specs[0].mesh for spec in specs)


def take_over_handled_ops(changes: Changes, _: Any) -> None:
    """Ops that PyTorch has a handler of its own for, which would meet placements that it does not know."""
    table = handlers_of_dtensor()
    for op in (
        _aten.argmax.default,
        _aten.argmin.default,
        _aten.as_strided.default,
        _aten.convolution.default,
        _aten.convolution_backward.default,
    ):
        if op in table:
            changes.entry(handlers_of_dtensor, op, functools.partial(_handle, table[op]), HANDLERS)


def take_over_mixed_ops(changes: Changes, hooks: ModelHooks) -> None:
    """Ops that take plain tensors among DTensors, which C++ refuses before it asks for a decision."""
    table = handlers_of_dtensor()
    for op, handler in hooks.handlers.items():
        if handler.takes_plain and op not in table:
            changes.entry(handlers_of_dtensor, op, _handle_mixed, HANDLERS)


def _handle(stock: Callable[..., Any], op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An op that has an entry in PyTorch's table of handlers; ``stock`` runs it as PyTorch would."""
    if _are_replicas(args) and not kwargs and op is not _aten.as_strided.default:
        return stock(op, args, kwargs)
    specs = tuple(x._spec if isinstance(x, DTensor) else x for x in args)
    found = _by_handler(op, args, kwargs, SimpleNamespace(args_schema=specs, kwargs_schema=kwargs))
    placements = HOOKS.get("placements")
    if (
        found is NotImplemented
        and placements
        and any(placements.has_custom(s.placements) for s in iterate_specs(specs))
    ):
        schema = DTensor._op_dispatcher.unwrap_to_op_info(op, args, kwargs).schema
        found = _on_placements(op, args, kwargs, schema)
    return stock(op, args, kwargs) if found is NotImplemented else found


def _handle_mixed(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = _on_replicas(op, args) if not kwargs and _are_replicas(args) else NotImplemented
    if found is not NotImplemented:
        return found
    specs = tuple(x._spec if isinstance(x, DTensor) else x for x in args)
    found = _by_handler(op, args, kwargs, SimpleNamespace(args_schema=specs, kwargs_schema=kwargs))
    return stock_dispatch(op, args, kwargs) if found is NotImplemented else found


def specs_on_replicas(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensorSpec, ...] | None:
    """The specs of the results of an op of :func:`take_over_mixed_ops` that runs on its local tensors as they are, because
    all operands are whole DTensors; None where something else happens. Runs the op."""
    if handlers_of_dtensor().get(op) is not _handle_mixed or kwargs or not _are_replicas(args):
        return None
    results = _on_replicas(op, args)
    found = results if isinstance(results, tuple) else (results,)
    return tuple(x._spec for x in found) if all(type(x) is DTensor for x in found) else None


def _are_replicas(args: tuple[Any, ...]) -> bool:
    """Whether all tensors are DTensors and Replicate; lists are not looked into. DTensors of other code pay for this."""
    for x in args:
        if isinstance(x, torch.Tensor):
            if type(x) is not DTensor:
                return False
            for placement in x._spec.placements:
                if type(placement) is not Replicate:
                    return False
    return True


_MAX_REPLICAS = 4096


def _on_replicas(op: Any, args: tuple[Any, ...]) -> Any:
    """The op on the local tensors of operands that are Replicate, as cheap as PyTorch's own; NotImplemented if it cannot."""
    call: list[Any] = [op]
    locals_ = []
    for x in args:
        if type(x) is DTensor:
            spec = x._spec
            call += (spec, id(spec.mesh))  # equal meshes may belong to destroyed process groups, and to other ranks
            locals_.append(x._local_tensor)
        elif type(x) is list:
            return NotImplemented
        else:
            call.append(x)
            locals_.append(x)
    key = tuple(call)
    specs = REPLICAS.get(key)
    if specs is None:
        meshes = {spec.mesh for spec in call if isinstance(spec, DTensorSpec)}
        if op._schema.is_mutable or len(meshes) > 1 or any(mesh.get_coordinate() is None for mesh in meshes):
            return NotImplemented
    with no_torch_function():
        result = op(*locals_)
    results = result if isinstance(result, tuple) else (result,)
    if specs is None:
        (mesh,) = meshes
        placements = (Replicate(),) * mesh.ndim
        if len(REPLICAS) >= _MAX_REPLICAS:
            REPLICAS.clear()
        specs = REPLICAS[key] = tuple(make_spec(mesh, placements, x.shape, x.stride(), x.dtype) for x in results)
    if len(results) == 1:
        return make_dtensor(results[0], specs[0])
    return tuple(map(make_dtensor, results, specs))


def take_over_undecided_ops(changes: Changes, _: Any) -> None:
    dispatcher: Any = DTensor._op_dispatcher
    original = dispatcher._propagate_op_sharding_dispatch_slow_path

    @functools.wraps(original)
    def propagate(op_call: Any, args: Any, kwargs: Any, op_info: Any, try_cache: bool) -> Any:
        found = decompose(op_call, args, kwargs)  # in inference mode alone, DTensors meet ops that are made of others
        if found is NotImplemented:
            found = _by_handler(op_call, args, kwargs, op_info.schema)
        if found is NotImplemented:
            found = _on_placements(op_call, args, kwargs, op_info.schema)
        if found is not NotImplemented:
            return found
        return _decided(original, op_call, args, kwargs, op_info, try_cache)

    def without_handlers(op_call: Any, args: Any, kwargs: Any, op_info: Any, try_cache: bool) -> Any:
        found = _on_placements(op_call, args, kwargs, op_info.schema)
        if found is not NotImplemented:
            return found
        return _decided(original, op_call, args, kwargs, op_info, try_cache)

    propagate.without_handlers = without_handlers  # type: ignore[attr-defined]
    changes.attribute(dispatcher, "_propagate_op_sharding_dispatch_slow_path", propagate, DISPATCHER)


def _decided(original: Any, op: Any, args: Any, kwargs: Any, op_info: Any, try_cache: bool) -> Any:
    """The decision of :func:`_decide`, for PyTorch to cache and follow, or the op's result. The op has no handler that takes
    the call."""
    found = _decide(op, op_info.schema, lambda: original(op, args, kwargs, op_info, try_cache))
    if not isinstance(found, OutputSharding):
        found = found(args, kwargs)
    # A decision that is returned is cached, and the listener not asked again, where it may answer otherwise.
    moves = isinstance(found, OutputSharding) and found.needs_redistribute
    if moves and (_moves_written(found, op_info.schema) or _has_number(op, args)):
        return _follow(op, args, kwargs, op_info, found)
    return found  # the C++ caller takes anything that is no OutputSharding as the op's own result


def _decide(op: Any, schema: Any, propagate: Callable[[], Any]) -> Any:
    """The sharding decision for a call on stock placements; or a function of ``(args, kwargs)`` that runs it, each time.
    ``propagate``: PyTorch's decision, which is put right here."""
    models = model_hooks()
    # A function mode may be on where no torch function leads here (torch.vmap views its results): none of a model's is for
    # the tensors that shapes are found with.
    with no_torch_function():
        if models is None:
            return _as_found(propagate())
        ask = models.listener
        specs = tuple(iterate_specs((*schema.args_schema, *schema.kwargs_schema.values())))
        has_strided = any(isinstance(placement, StridedShard) for spec in specs for placement in spec.placements)
        keeps = ask.interleaved if has_strided or any(map(has_empty_shards, specs)) else _nothing
        if has_strided and specs[0].mesh.ndim >= _LONG_SEARCH and (kept := keeps(schema)) is not None:
            return kept
        # PyTorch's search for the dims of a view does not end for some sizes without elements.
        if any(0 in spec.shape for spec in specs) and (kept := ask.view_of_parts(schema)) is not None:
            return kept
        try:
            sharding = propagate()
        except RuntimeError as error:
            if not _lacks_rule(error, schema):
                raise
            return keeps(schema) or ask.view_of_parts(schema) or functools.partial(_gathered, ask, op, error)
        if not isinstance(sharding, OutputSharding):
            return _as_found(sharding)
        gathered = functools.partial(_gathered, ask, op, sharding)
        if not has_local_shapes(op, schema, sharding):
            return gathered
        follows_sizes = not sharding.needs_redistribute  # or gives the ranks others
        if not follows_sizes:
            if (kept := keeps(schema) or ask.moves_nothing(schema, sharding)) is not None:
                return kept
            follows_sizes = sharding.use_val_from_redistribute_schema
            if not follows_sizes and (kept := ask.view_of_parts(schema)) is not None:
                return kept
        if follows_sizes and (kept := ask.misjudged_view(schema, sharding)) is not None:
            return gathered if kept is NotImplemented else kept
        return gathered if _moves_written(sharding, schema) else sharding


def _nothing(_: Any) -> None:
    return None


def _as_found(sharding: Any) -> Any:
    """What PyTorch has decided, or the result of the op, which it has run."""
    return sharding if isinstance(sharding, OutputSharding) else lambda args, kwargs: sharding


def _gathered(ask: DispatchListener, op: Any, otherwise: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op's result on gathered operands; where the listener leaves it to PyTorch, its decision or error ``otherwise``."""
    result = ask.no_strategy(op, args, kwargs)
    if result is NotImplemented and isinstance(otherwise, RuntimeError):
        raise otherwise
    return otherwise if result is NotImplemented else result


_OF_NUMBERS = frozenset((torch.float64, torch.int64, torch.bool, torch.complex128))


def _has_number(op: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operand is a number, or a tensor for which PyTorch's cache takes one: a decision for the other would be
    found there. To a pending sum one rank adds a tensor, and every rank would add a number."""
    return any(
        str(argument.type) == "Tensor" and (not isinstance(x, torch.Tensor) or (not x.ndim and x.dtype in _OF_NUMBERS))
        for argument, x in zip(op._schema.arguments, args)
    )


def _follow(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], op_info: Any, sharding: Any) -> Any:
    """The result of an op by a sharding decision, as the C++ code computes it."""
    dispatcher, mesh = DTensor._op_dispatcher, op_info.compute_mesh
    op_info.output_sharding = sharding
    local = dispatcher._dispatch_get_local_results_slow_path(op, args, op_info)
    is_inplace = op._schema.name.endswith("_")
    is_out = not is_inplace and "out" in op._schema.overload_name
    if is_inplace or is_out:
        participating = mesh.get_coordinate() is not None
        return dispatcher._dispatch_fast_path_python_tail(
            op, args, kwargs, mesh, sharding, local, participating, is_inplace, is_out
        )
    result = dispatcher.wrap(local, sharding.output_spec)
    return with_aliasing(op, args, kwargs, result) if is_view(op) else result


def keeps_operands(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, OutputSharding | None]:
    """The call's schema, and the decision to run it on the local tensors of its operands as they are, with local sizes for
    global ones, or on operands that PyTorch moves; None if anything else runs, or if it has to be asked for each time. Runs
    nothing.

    Raises what deciding raises: PyTorch's path raises it too.
    """
    dispatcher: Any = DTensor._op_dispatcher
    schema = dispatcher.unwrap_to_op_info(op, args, kwargs).schema
    models = model_hooks()
    handler = models.handlers.get(op) if models is not None else None
    if handler is not None and handler.applies(op, schema):
        return schema, None
    placements = HOOKS.get("placements")
    specs = tuple(iterate_specs((*schema.args_schema, *schema.kwargs_schema.values())))
    if placements is not None and any(placements.has_custom(spec.placements) for spec in specs):
        return schema, placements.keeps_operands(op, schema)
    if any(spec.mesh is not specs[0].mesh for spec in specs):
        return schema, None
    found = _decide(op, schema, lambda: dispatcher.sharding_propagator.propagate_op_sharding_non_cached(schema))
    return schema, found if isinstance(found, OutputSharding) else None


def stock_dispatch(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op on DTensors by DTensor's own rule, or by those of custom placements; for handlers that decline."""
    dispatcher: Any = DTensor._op_dispatcher
    info = dispatcher.unwrap_to_op_info(op, args, kwargs)
    propagate = dispatcher._propagate_op_sharding_dispatch_slow_path
    sharding = getattr(propagate, "without_handlers", propagate)(op, args, kwargs, info, True)
    return _follow(op, args, kwargs, info, sharding) if isinstance(sharding, OutputSharding) else sharding


def _moves_written(sharding: Any, schema: Any) -> bool:
    """Whether a rule wants what an in-place op writes to elsewhere: stock DTensor would write to a copy, and label the
    tensor, which stays where it is, with the copy's placements."""
    wanted = sharding.redistribute_schema
    if wanted is None or not schema.op._schema.is_mutable or not isinstance(schema.args_schema[0], DTensorSpec):
        return False
    written = schema.op._schema.arguments[0].alias_info
    if written is None or not written.is_write or not isinstance(wanted.args_schema[0], DTensorSpec):
        return False
    return schema.args_schema[0].placements != wanted.args_schema[0].placements


def _lacks_rule(error: BaseException | None, schema: Any) -> bool:
    """Whether propagation failed for want of a rule, and not because of the operands: there is none, the result's shape
    depends on the data (``nonzero``), or the rule refuses these placements (``unbind`` of a sharded dim)."""
    while error is not None:
        if isinstance(error, DynamicOutputShapeException | DataDependentOutputException | NotImplementedError):
            return True
        error = error.__cause__
    if all(spec.is_replicated() for spec in iterate_specs((*schema.args_schema, *schema.kwargs_schema.values()))):
        return False
    try:  # what fails on Replicate, too, is not due to the placements
        args, kwargs = tree_map_only(DTensorSpec, _on_all_ranks, (schema.args_schema, schema.kwargs_schema))
        whole = type(schema)(schema.op, args, kwargs, schema.schema_info)
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding_non_cached(whole)
    except Exception:  # not lost: the caller raises the first one
        return False
    return True


def _on_all_ranks(spec: DTensorSpec) -> DTensorSpec:
    return DTensorSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim, tensor_meta=spec.tensor_meta)

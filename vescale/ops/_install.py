"""Installs the DTensor hooks of :class:`vescale.compat.DTensorHooks` for our placements and the ops on them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import (
    DTensorSpec,
    OpSchema,
    OutputSharding,
    StridedShard,
    TensorMeta,
    begin_world,
    clear_sharding_caches,
    decompose,
    has_results,
    install_part,
    is_installed,
    is_view,
    make_dtensor,
    make_spec,
    observe_redistribution,
    own_part,
    rank_in_mesh,
    sized_locally,
    spec_of_result,
    static_keywords,
    takes_only_tensors,
    tell_move,
    with_aliasing,
)
from vescale.errors import Coded, OpPlacementError, RuleError
from vescale.ops._call import Decision, OpCall, Placements, Rule, placements_text, substitute, with_placements
from vescale.ops._conversion import write_back
from vescale.ops._registry import check_decision, has_user_rules, register_user_rule, rules_of
from vescale.ops._view_copies import remember_copy
from vescale.ops.indexing import index_rule
from vescale.ops.interleaved import interleaved_rule, treats_indices_alike
from vescale.ops.views import VIEWS, holds_the_same, view_rule
from vescale.placements import (
    CustomPlacement,
    contiguous_stride,
    dtensor_hooks,
    has_custom,
    move_local,
    ragged_axis,
    shard_dim,
    split_factor,
)

# The decision about an op call: that of the first rule that returns one, else to give up custom placements; cached.


# Keyword arguments that decide the format of results; others (alpha, value, ...) only do for integers.
_FORMATS = frozenset(["dtype", "layout", "device", "pin_memory", "memory_format"])


def cached(function: Any, *args: Any) -> Any:
    """The result of a function with an ``lru_cache``; computed anew where an argument has no hash."""
    try:
        return function(*args)
    except TypeError:
        if _has_hash(args):
            raise
        return function.__wrapped__(*args)


def _has_hash(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


@functools.lru_cache(maxsize=8192)
def decide(call: OpCall) -> Decision:
    """How the call runs. Raises RuntimeError for an in-place op that would have to move the tensor it writes to, and what
    rules raise."""
    return _written_back(call, _first_decision(call) or _give_up_placements(call))


def _first_decision(call: OpCall) -> Decision | None:
    for rule in rules_of(call.op):
        decision: Decision | None = rule(call)
        if decision is not None:
            return decision
    return None


def forget_decisions() -> None:
    """Decide every call anew, with rules that were added since."""
    decide.cache_clear()
    output_specs.cache_clear()
    clear_sharding_caches()


def _give_up_placements(call: OpCall) -> Decision:
    """The decision without a rule: custom placements become Replicate, and PyTorch's own strategy decides the rest.

    The stock placements of the other mesh axes stay only for ops whose strategies are known to be right on them. For the
    rest everything is gathered, so that the op runs as on one device.
    """
    if treats_indices_alike(call.op) and not call.mutated:
        inputs = tuple(
            tuple(Replicate() if isinstance(placement, CustomPlacement) else placement for placement in spec.placements)
            for spec in call.operands
        )
        return Decision(inputs, redispatch=True, fallback=True)
    inputs = tuple((Replicate(),) * spec.mesh.ndim for spec in call.operands)
    return Decision(inputs, redispatch=not call.mutated, fallback=True)


def _written_back(call: OpCall, decision: Decision) -> Decision:
    """The decision, by which what the op writes to is moved back. Raises OpPlacementError where PyTorch decides the rest."""
    moved = tuple(
        index
        for index in call.mutated
        if call.operands[index].placements != decision.inputs[index] and index not in decision.scratch
    )
    if not moved or not decision.redispatch:
        return dataclasses.replace(decision, write_back=moved) if moved else decision
    index = moved[0]
    raise OpPlacementError(
        f"{call.op} writes to {call.describe(index)}, which it needs as {placements_text(decision.inputs[index])}: it "
        "would write to a copy, and the write would be lost; use the out-of-place op and redistribute its result, or "
        "call redistribute() first"
    )


def cached_sharding(call: OpCall, decision: Decision) -> OutputSharding | None:
    """The decision for DTensor's dispatcher to cache and follow, or None where it cannot: the op itself runs on the local
    tensors as they are, with the given arguments or with local sizes."""
    stays = all(spec.placements == wanted for spec, wanted in zip(call.operands, decision.inputs))
    if stays and runs_by_key(call, decision):
        return OutputSharding(cached(output_specs, call, decision))
    if decision.local_sizes is None or len(call.args) != 2 or call.kwargs or call.schema_info is None:
        return None
    (spec,) = call.operands
    if call.schema_info.static_argnum > 1 or spec.placements != decision.inputs[0]:
        return None  # sizes are not in the dispatcher's key
    return sized_locally(call.op, spec, decision.local_sizes, cached(output_specs, call, decision))


def runs_by_key(call: OpCall, decision: Decision) -> bool:
    """Whether the dispatcher can run the op itself on local tensors, and remember that under the key that it uses."""
    if decision.local is not None or decision.prepare or decision.redispatch:
        return False
    if call.mutated:
        return True  # results are the written operands: nothing depends on other arguments
    # The key leaves numbers out: right as long as they cannot change a dtype.
    are_floating = all(spec.tensor_meta and spec.tensor_meta.dtype.is_floating_point for spec in call.operands)
    if call.schema_info is None:  # it has the tensors alone
        return decision.outputs is None or takes_only_tensors(call.op, factors=are_floating)
    if call.schema_info.needs_pytree:
        return are_floating
    known = static_keywords(call.schema_info)
    others = [name for name in call.kwargs if name not in known]
    return not any(name in _FORMATS for name in others) and (not others or are_floating)


@functools.lru_cache(maxsize=8192)
def output_specs(call: OpCall, decision: Decision) -> Any:
    """Specs in the structure of the op's results; None for results that are not tensors. Equal calls get the same objects,
    which the dispatcher compares faster than equal ones."""
    if decision.outputs is None:
        return None
    meta = call.meta
    metas = [meta] if isinstance(meta, TensorMeta) else list(meta)
    specs = [
        None if one is None or placements is None else _output_spec(call, call.mesh_of_result(index), placements, one)
        for index, (one, placements) in enumerate(zip(metas, decision.outputs, strict=True))
    ]
    return specs[0] if isinstance(meta, TensorMeta) else tuple(specs)


def _output_spec(call: OpCall, mesh: DeviceMesh, placements: Placements, meta: TensorMeta) -> DTensorSpec:
    if ragged_axis(placements) is not None:  # a flat local tensor has the elements in row-major order, whatever the op
        meta = TensorMeta(meta.shape, contiguous_stride(meta.shape), meta.dtype)
    return spec_of_result(mesh, placements, meta, call.operands)


_Overload, _AllOverloads = type(torch.ops.aten.alias.default), type(torch.ops.aten.alias)


def register_rule(op: Any, rule: Rule) -> None:
    """Add a placement rule: how an op runs on DTensors of which at least one has a vescale placement.

    The rule is called before all others for the op, the latest first. It gets an :class:`OpCall` and returns a
    :class:`Decision`, or None to leave the call to the next rule. It must be a pure function of the call: decisions are
    cached, and every rank must come to the same one. Register rules before the op is first called: decisions that other
    threads have cached (autograd's, for backward) stay.

    DTensors with stock placements only are not affected; for an op that they lack a strategy for, use PyTorch's
    ``torch.distributed.tensor.experimental.register_sharding``.

    Args:
        op: an op overload (``torch.ops.aten.flip.default``), or an iterable of them.
        rule: ``OpCall -> Decision | None``.

    Raises:
        TypeError: something other than op overloads, or a rule that is not callable. When the rule has run, the op
            raises TypeError for anything but a Decision or None, and ValueError for placements that do not fit the
            operands and results of the op.
    """
    if isinstance(op, _Overload | _AllOverloads) or not isinstance(op, Iterable):
        ops = [op]
    else:
        ops = list(op)
    for one in ops:
        if isinstance(one, _AllOverloads):
            raise RuleError(
                f"register_rule: found {one}, which has the overloads {', '.join(one.overloads())}; expected one "
                f"overload or an iterable of them: pass {one}.{one.overloads()[0]}"
            )
        if not isinstance(one, _Overload):
            raise RuleError(
                f"register_rule: found {one!r}; expected an op overload such as torch.ops.aten.flip.default, or an iterable "
                "of them: DTensor sees overloads, not the torch functions that call them"
            )
    if not callable(rule):
        raise RuleError(f"register_rule: found the rule {rule!r}; expected a function of an OpCall")
    for one in ops:
        register_user_rule(one, functools.partial(_checked, rule))
    forget_decisions()


def _checked(rule: Rule, call: OpCall) -> Decision | None:
    decision = rule(call)
    check_decision(rule, call, decision)
    return decision


# Reports of ops that have no rule for a placement and gather their operand: one warning a line of code, or an error.


class PlacementFallbackWarning(Coded, UserWarning, code="VS1601"):
    """An op had no rule for a placement, so the whole operand was communicated; correct, but not free."""


class PlacementFallbackError(Coded, RuntimeError, code="VS1601"):
    """The same, in :func:`strict_placements`."""


# Ranks in strict mode, one entry for each open context. Backward may run on another thread and ranks may be threads of one
# process, so neither a context variable nor a thread-local would do.
_STRICT: list[int] = []
_REPORTED: set[tuple[str, int, str, str]] = set()
_LOCK = threading.Lock()
_INTERNAL = (torch.__path__[0], __file__.rpartition("ops")[0])


@contextlib.contextmanager
def strict_placements() -> Iterator[None]:
    """Ops without a rule for a vescale placement raise :class:`PlacementFallbackError` instead of gathering operands.

    The error comes before any communication, and on every rank that runs the op.
    """
    rank = _own_rank()
    with _LOCK:
        _STRICT.append(rank)
    try:
        yield
    finally:
        with _LOCK:
            _STRICT.remove(rank)


def report_fallback(op: str, operand: str, target: str, is_lost: bool) -> None:
    """Report that ``op`` brings ``operand`` to ``target``; warns once for each line of user code, op and operand.
    ``is_lost``: whether what is written to the result does not reach the operand."""
    filename, line = _site()
    found = f"{filename}:{line}: {op} has no rule for {operand}"
    fix = "redistribute the operand before the op is called, or use a placement for which the op has a rule"
    if _STRICT and _own_rank() in _STRICT:
        raise PlacementFallbackError(
            f"{found}; it would be redistributed to {target}, but strict_placements() forbids implicit communication; "
            f"{fix}"
        )
    key = (filename, line, op, operand)
    with _LOCK:
        if key in _REPORTED:
            return
        _REPORTED.add(key)
    note = "; the result is a copy, not a view: writes to it do not reach the operand" if is_lost else ""
    text = f"{found}; it is redistributed to {target}, which communicates on every call{note}; {fix}"
    warnings.warn_explicit(text, PlacementFallbackWarning, filename, line)


def _own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _site() -> tuple[str, int]:
    """File and line of the innermost frame outside torch and this library."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_INTERNAL) and not name.startswith("<"):
            return name, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return "<backward>", 0


# Runs an op by a decision: operands are moved, something runs on the local tensors, results become DTensors.

# Whether this thread runs an assignment to items of a DTensor: views must not become copies then.
_ASSIGNING = threading.local()


@contextlib.contextmanager
def assigning() -> Iterator[None]:
    """While the context is open, a view that would have to be a copy raises RuntimeError: a write to it would be lost."""
    before = getattr(_ASSIGNING, "now", False)
    _ASSIGNING.now = True
    try:
        yield
    finally:
        _ASSIGNING.now = before


def execute(call: OpCall, decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of the op, with DTensors among ``args`` and ``kwargs``. Communication: what ``decision`` moves."""
    tensors = _tensors(args, kwargs)
    moves = [
        (index, spec, with_placements(spec, wanted))
        for index, (spec, wanted) in enumerate(zip(call.operands, decision.inputs))
        if spec.placements != wanted
    ]
    if moves and is_view(call.op) and getattr(_ASSIGNING, "now", False):
        raise OpPlacementError(
            f"{call.op} of {call.describe(moves[0][0])} is a copy, so an assignment to it would be lost; assign through a "
            "mask of the tensor's own shape (x[mask] = value) or to rows of a ragged tensor (x[2:5] = value), use "
            "torch.where, or call redistribute() first"
        )
    locals_ = list(map(own_part, tensors))
    for index, spec, target in moves:  # refuse before the first communication
        tell_move(call.op, call.argument_name(call.positions[index][0]), locals_[index], spec, target)
        if _is_reported(spec, target):
            is_lost = is_view(call.op) and not is_installed("models")  # else writes to the copy reach the operand
            report_fallback(str(call.op), call.describe(index), placements_text(target.placements), is_lost)
        observe_redistribution(spec, target, call.op)
    for index, spec, target in moves:
        before = locals_[index]
        locals_[index] = move_local(before, spec.mesh, spec.shape, spec.placements, target.placements).wait()
        if is_view(call.op):  # of a copy then, to which the program may write
            remember_copy(before, spec, locals_[index], target)
    if decision.redispatch:
        for index, _, target in moves:
            tensors[index] = make_dtensor(locals_[index], target)
        new_args, new_kwargs = substitute(args, kwargs, tensors, torch.Tensor)
        try:
            return call.op(*new_args, **new_kwargs)
        except NotImplementedError:  # PyTorch has no strategy, or the kernel does not take the dtype: that raises again
            if not _all_replicated(decision) or not rank_in_mesh(call.mesh):
                raise
        local_args, local_kwargs = substitute(args, kwargs, locals_, torch.Tensor)
        return _replicated(call.mesh, call.op(*local_args, **local_kwargs))
    specs = cached(output_specs, call, decision)
    if not rank_in_mesh(call.mesh):
        result = _placeholder(specs)
    else:
        for index, function in decision.prepare:
            locals_[index] = function(locals_[index])
        local_args, local_kwargs = substitute(args, kwargs, locals_, torch.Tensor)
        result = (decision.local or call.op)(*local_args, **local_kwargs)
        for index, _, target in moves:
            if index in decision.write_back:
                write_back(tensors[index], locals_[index], target)
    return _results(call, args, kwargs, result, specs)


def _all_replicated(decision: Decision) -> bool:
    return all(placement.is_replicate() for placements in decision.inputs for placement in placements)


def _replicated(mesh: DeviceMesh, result: Any) -> Any:
    """Results that every rank of the mesh has computed from whole operands, as DTensors."""
    if isinstance(result, torch.Tensor):
        spec = make_spec(mesh, (Replicate(),) * mesh.ndim, result.shape, result.stride(), result.dtype)
        return make_dtensor(result, spec)
    return type(result)([_replicated(mesh, one) for one in result]) if isinstance(result, list | tuple) else result


def _results(call: OpCall, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, specs: Any) -> Any:
    if call.mutated:
        if not has_results(call.op):
            return None
        written = [_tensors(args, kwargs)[index] for index in call.mutated]
        return written[0] if len(written) == 1 else tuple(written)
    if specs is None:
        return result
    if isinstance(specs, DTensorSpec):
        wrapped: Any = make_dtensor(result, specs)
    else:
        wrapped = type(result)(
            [one if spec is None else make_dtensor(one, spec) for one, spec in zip(result, specs, strict=True)]
        )
    return with_aliasing(call.op, args, kwargs, wrapped) if is_view(call.op) else wrapped


def _tensors(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    found = []
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, torch.Tensor):
            found.append(arg)
        elif isinstance(arg, list | tuple):
            found += [item for item in arg if isinstance(item, torch.Tensor)]
    return found


def _placeholder(specs: Any) -> Any:
    """The results on a rank outside of the mesh: an empty tensor for each, zero for a number."""
    if isinstance(specs, DTensorSpec):
        assert specs.tensor_meta is not None
        return torch.zeros((0,) if specs.shape else (), dtype=specs.tensor_meta.dtype)
    return [_placeholder(spec) for spec in specs] if specs is not None else None


def _is_reported(source: DTensorSpec, target: DTensorSpec) -> bool:
    """Whether a move gives up a custom placement, over an axis of several ranks, and gathers more than a single number."""
    if math.prod(source.shape) <= 1 or has_custom(target.placements):
        return False
    triples = zip(source.placements, target.placements, source.mesh.shape)
    return any(
        isinstance(before, CustomPlacement) and after.is_replicate() and size > 1 for before, after, size in triples
    )


# The entry points from DTensor's dispatcher: ops and assignments on DTensors with a placement that stock DTensor lacks.
# The dispatcher calls :func:`run_op` on a miss of its C++ cache. When the rules find that the op runs on the local
# tensors as they are, it returns a sharding decision that the dispatcher caches: the next call costs what it costs on
# ``Shard``. Otherwise the op is run here.


def run_op(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], schema: Any) -> Any:
    """The op's result, or a sharding decision (``OutputSharding``) for the dispatcher to cache and follow.

    Raises:
        RuntimeError: an in-place op that would have to move the tensor it writes to, operands on different meshes, a
            random op that :mod:`vescale.rng` does not run.
        PlacementFallbackError: no rule, in strict mode.
    """
    call = OpCall(op, schema.args_schema, schema.kwargs_schema, schema.schema_info)
    decision: Decision = cached(decide, call)
    if decision.fallback and not call.mutated:
        result = decompose(op, args, kwargs)
        if result is not NotImplemented:
            return result
    # PyTorch's key may leave numbers out, which only rules of users read.
    is_cached = not has_user_rules(op) or (takes_only_tensors(op) and not _has_numbers_for_tensors(call))
    return (is_cached and cached_sharding(call, decision)) or execute(call, decision, args, kwargs)


def _has_numbers_for_tensors(call: OpCall) -> bool:
    """Whether a number stands where the op takes a tensor (``x * 2``): no key has its value."""
    return any(
        isinstance(value, float | int | complex) and isinstance(argument.type, torch.TensorType)
        for argument, value in zip(call.op._schema.arguments, call.args)
    )


def keeps_operands(op: Any, schema: Any) -> OutputSharding | None:
    """The decision to run an op on the local tensors as they are, or on moved ones, or None. Runs nothing; the caller's key
    holds the op, the specs of the operands and, where rules may read them, all other arguments.

    Raises what :func:`run_op` raises when it decides.
    """
    call = OpCall(op, schema.args_schema, schema.kwargs_schema, schema.schema_info)
    decision: Decision = cached(decide, call)
    if decision.fallback or (has_user_rules(op) and _has_numbers_for_tensors(call)):
        return None
    return cached_sharding(call, decision) or _on_parts(call, decision)


def _on_parts(call: OpCall, decision: Decision) -> OutputSharding | None:
    """The decision to run an op on the local tensors, and on parts of operands that ranks have whole: of a rotary table
    beside a sequence in chunks. The caller finds out whether it is no other move."""
    if call.mutated or is_view(call.op) or not runs_by_key(call, decision):
        return None
    wanted = [
        spec if spec.placements == placements else with_placements(spec, placements)
        for spec, placements in zip(call.operands, decision.inputs)
    ]
    args, kwargs = substitute(call.args, call.kwargs, wanted, DTensorSpec)
    schema = OpSchema(call.op, args, kwargs, schema_info=call.schema_info)
    return OutputSharding(cached(output_specs, call, decision), schema, needs_redistribute=True)


def _followed(call: OpCall, decision: Decision) -> Any:
    """A decision for DTensor's dispatcher to cache and follow, or a function of ``(args, kwargs)`` that runs the call."""
    return cached_sharding(call, decision) or functools.partial(execute, call, decision)


def decide_interleaved(schema: Any) -> Any:
    """What runs an op on stock placements with a ``_StridedShard``, or empty shards, among them: see :func:`_followed`.

    No communication; None where the op would need some. PyTorch makes a ``_StridedShard`` of a sharded dim that is flattened
    behind another one (tokens of a sharded sequence), and has few strategies that keep it. For ops that treat indices alike
    it is the same as an interleaved placement.
    """
    call = OpCall(schema.op, schema.args_schema, schema.kwargs_schema, schema.schema_info)
    decision: Decision | None = cached(_decide_interleaved, call)
    if decision is None:
        return None
    flattened = {
        axis for spec in call.operands for axis, p in enumerate(spec.placements) if isinstance(p, StridedShard)
    }

    def stock(placements: Sequence[Placement] | None) -> tuple[Placement, ...] | None:
        """The placements with stock types. A shard of one piece becomes a ``_StridedShard`` too, so that equal shards are
        equal placements, except in a view: that may have undone the flattening."""
        return (
            None
            if placements is None
            else tuple(
                StridedShard(dim, split_factor=split_factor(p))
                if axis in flattened and (dim := shard_dim(p)) is not None and (split_factor(p) > 1 or not regroups)
                else p
                for axis, p in enumerate(placements)
            )
        )

    regroups = decision.local is not None
    inputs = []
    for index, (spec, wanted) in enumerate(zip(call.operands, decision.inputs)):
        moves = [
            (a, b)
            for axis, (a, b) in enumerate(zip(spec.placements, wanted))
            if a != b and not _is_same_cut(a, b) and call.mesh.size(axis) > 1
        ]
        # Whole operands may be cut, which is local.
        if moves and (index in call.mutated or not all(a.is_replicate() and not b.is_partial() for a, b in moves)):
            return None
        inputs.append((stock(wanted) if moves else None) or spec.placements)
    outputs = decision.outputs and tuple(map(stock, decision.outputs))
    return _followed(call, replace(decision, inputs=tuple(inputs), outputs=outputs))


@functools.lru_cache(maxsize=1024)
def _decide_interleaved(call: OpCall) -> Decision | None:
    rule = index_rule if call.name == "index" else interleaved_rule if treats_indices_alike(call.op) else None
    decision = rule and rule(call)
    return decision or (view_rule(call) if _is_cut_twice(call.operands[0]) else None)


def _is_cut_twice(spec: DTensorSpec) -> bool:
    """Whether several axes shard one dim. PyTorch's views do not split such dims; it places the views of all others best."""
    dims = [
        dim for axis, p in enumerate(spec.placements) if (dim := shard_dim(p)) is not None and spec.mesh.size(axis) > 1
    ]
    return len(dims) > len(set(dims))


def _is_same_cut(a: Placement, b: Placement) -> bool:
    return shard_dim(a) is not None and (shard_dim(a), split_factor(a)) == (shard_dim(b), split_factor(b))


def view_of_parts(schema: Any) -> Any:
    """What runs a view of stock placements without communication: see :func:`_followed`. None where no placement describes
    what each rank holds.

    PyTorch's rules refuse, or gather, a dim that the ranks do not divide where it is flattened or split, and before 2.12
    each sharded dim that is flattened behind another one.
    """
    if schema.op.overloadpacket.__name__ not in VIEWS:
        return None
    call = OpCall(schema.op, schema.args_schema, schema.kwargs_schema, schema.schema_info)
    decision: Decision | None = cached(_decide_view, call)
    return decision and _followed(call, decision)


_decide_view = functools.lru_cache(maxsize=1024)(view_rule)


def misjudged_view(schema: Any, sharding: Any) -> Any:
    """Where PyTorch's decision for a view gives ranks other elements than the view's placements say: what to do instead, as
    :func:`view_of_parts`; NotImplemented where no placement describes what each rank holds, or nothing can be
    decided. None where the decision is right.

    PyTorch compares the size of a dim with the ranks of one axis after the other, also where several axes cut it, and cuts
    pieces of a view (``_StridedShard``) by its own size, where those of what is viewed have other ones.
    """
    spec = schema.args_schema[0] if schema.args_schema else None
    if schema.op.overloadpacket.__name__ not in VIEWS or not isinstance(spec, DTensorSpec):
        return None
    dims = [p.dim for p in spec.placements if type(p) is Shard]
    is_plain = len(dims) == len(set(dims)) and not any(isinstance(p, StridedShard) for p in spec.placements)
    if is_plain or not isinstance(output := sharding.output_spec, DTensorSpec):
        return None
    call = OpCall(schema.op, schema.args_schema, schema.kwargs_schema, schema.schema_info)
    if cached(_is_right, call, output.placements):
        return None
    decision: Decision | None = cached(_decide_view, call)
    return NotImplemented if decision is None else _followed(call, decision)


@functools.lru_cache(maxsize=1024)
def _is_right(call: OpCall, placements: tuple[Placement, ...]) -> bool:
    spec, shape = call.operands[0], tuple(call.meta.shape)
    numel = math.prod(shape)
    return not numel or numel != math.prod(spec.shape) or holds_the_same(spec, shape, placements, if_too_large=True)


def set_item(original: Callable[..., None], dtensor: DTensor, index: Any, value: Any) -> None:
    """``dtensor[index] = value`` by PyTorch's ``original``: a view of the tensor, then a write to the view.

    Raises RuntimeError when the view would be a copy.
    """
    if type(value) in (bool, int, float, complex):  # PyTorch makes a tensor of them on the device, and broadcasts it
        value = torch.scalar_tensor(value, dtype=dtensor.dtype, device="cpu")
    with assigning():
        original(dtensor, index, value)


def install() -> None:
    """Teach DTensor our placements; does nothing when it has been done. Called by the first placement that is constructed,
    and by what begins with a new default group.

    Programs that use none of our placements are not affected: every hook then calls PyTorch's original.

    Raises UnsupportedTorchError when this torch lacks something that the hooks build on; nothing is changed then.
    """
    install_part("placements", dtensor_hooks(run_op, keeps_operands, set_item, has_user_rules))
    begin_world()

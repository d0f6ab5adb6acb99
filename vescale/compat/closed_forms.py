"""Sharding decisions that hold for all sizes, so that the first call with new sizes is cheap.

PyTorch decides a call by its op, its operands' placements and sizes, and its other arguments. Of the sizes, most decisions
need little: which dims have size 1, whether a sharded dim is large enough or divisible. For the ops whose ``sizes`` is
registered (:mod:`vescale.ops._sizes`), that much is looked up here together with the placements. What is found says where
the results are placed, which of them are operands or views of them, and which parts of whole operands a rank takes; shapes,
strides and dtypes of the results come from a run on meta tensors, which also finds the errors, and local sizes of views from
the global ones.

Entries are made of PyTorch's decisions, when a call is the first of its kind, and hold on all meshes of the same shape.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from vescale.compat.dispatch import no_torch_function
from vescale.compat.meta_shapes import has_meta_kernel, meta_of_result, result_meta, result_rule
from vescale.compat.model_hooks import model_hooks
from vescale.compat.patching import HOOKS
from vescale.compat.sharding_caches import FORMS, INTERNED_SPECS, LAYOUT_OF_SPEC, LAYOUTS, make_room

# Layouts: what specs of one rank, dtype, mesh and placements have in common, whatever the sizes.
#
# Specs that C++ compares by address are *interned* here: of equal ones, one is kept. Each belongs to a layout, so that
# decisions can be looked up without sizes (:mod:`vescale.compat.closed_forms`).

_PLAIN = frozenset([Replicate, Shard, Partial])
_NUMBERS = itertools.count()


class Layout:
    """A mesh with placements on its axes.

    Attributes:
        number: its own, also among layouts that have been forgotten.
        pattern: the placements, and the order of shards as in specs.
        decides: what a decision depends on: of the mesh, only its shape and this rank's place, not its ranks and groups.
        spec: one of this layout, of any sizes.
        is_plain: whether all placements are exactly Replicate, Shard or Partial, in the order of the axes.
        cuts: of each axis that shards: the dim, the axis' size, and this rank's coordinate.
        shards: of each dim that is sharded: the dim, and in how many parts.
    """

    __slots__ = ("cuts", "decides", "is_plain", "number", "pattern", "shards", "spec")

    def __init__(self, spec: DTensorSpec) -> None:
        self.spec = spec
        self.pattern = _pattern(spec)
        self.number = next(_NUMBERS)
        self.is_plain = all(type(p) in _PLAIN for p in spec.placements) and spec.shard_order == (
            DTensorSpec.compute_default_shard_order(spec.placements)
        )
        cuts, shards = [], dict[int, int]()
        coordinate = spec.mesh.get_coordinate()
        if self.is_plain and coordinate is not None:
            for axis, p in enumerate(spec.placements):
                if isinstance(p, Shard):
                    cuts.append((p.dim, spec.mesh.size(axis), coordinate[axis]))
                    shards[p.dim] = shards.get(p.dim, 1) * spec.mesh.size(axis)
        self.cuts, self.shards = tuple(cuts), tuple(shards.items())
        self.decides: Hashable = self.pattern, spec.mesh.device_type, tuple(spec.mesh.shape), coordinate

    def on_mesh(self, mesh: DeviceMesh) -> Layout:
        """The same placements on a mesh of the same shape."""
        if mesh is self.spec.mesh:
            return self
        key = (id(mesh), *self.pattern)
        found = LAYOUTS.get(key)
        if found is None:
            placements, is_order, order = self.pattern
            spec = DTensorSpec(mesh, placements, shard_order=order, use_strided_shard_as_shard_order=is_order)
            found = LAYOUTS.setdefault(key, Layout(spec))
        return found

    def with_meta(self, meta: TensorMeta) -> DTensorSpec:
        """The interned spec of these sizes, made without the checks of a new one."""
        key = (self.number, meta.dtype, meta.shape, meta.stride)
        known = INTERNED_SPECS.get(key)
        if known is None:
            known = object.__new__(DTensorSpec)
            vars(known).update(vars(self.spec), tensor_meta=meta, _hash=None)
            known = _keep(key, known, self)
        return known


def layout_of(spec: DTensorSpec) -> Layout:
    interned = LAYOUT_OF_SPEC.get(id(spec))
    if interned is not None:
        known: Layout = interned[1]
        return known
    key = (id(spec.mesh), *_pattern(spec))
    found = LAYOUTS.get(key)
    return LAYOUTS.setdefault(key, Layout(spec)) if found is None else found


def _pattern(spec: DTensorSpec) -> tuple[Any, ...]:
    return spec.placements, spec.use_strided_shard_as_shard_order, spec.shard_order


def intern(spec: DTensorSpec) -> DTensorSpec:
    """The spec that stands for all equal ones of the same mesh object; its sizes are known."""
    meta = spec.tensor_meta
    assert meta is not None
    layout = layout_of(spec)
    key = (layout.number, meta.dtype, meta.shape, meta.stride)
    known = INTERNED_SPECS.get(key)
    return _keep(key, spec, layout) if known is None else known


def _keep(key: tuple[Any, ...], spec: DTensorSpec, layout: Layout) -> DTensorSpec:
    make_room(INTERNED_SPECS)
    kept = INTERNED_SPECS.setdefault(key, spec)
    if layout.is_plain:  # PyTorch changes others: whether strides stand for an order
        LAYOUT_OF_SPEC[id(kept)] = (kept, layout)
    return kept


def local_sizes(layout: Layout, sizes: Sequence[int]) -> tuple[int, ...]:
    """This rank's sizes of a tensor of plain placements."""
    local = list(sizes)
    for dim, num_parts, coordinate in layout.cuts:
        part = -(-local[dim] // num_parts)
        local[dim] = max(0, min(part, local[dim] - coordinate * part))
    return tuple(local)


# The specs of a result's tensors, and the positions of the arguments that are returned in its place, or whose storage it
# shares; -1 for none.
Result = tuple[tuple[DTensorSpec | None, ...], int, int]
# What ranks take of operands that are whole on an axis: ``(position, dim, number of parts, this rank's, chunks)`` for an
# equal part along a dim, or of each of its chunks; with a dim of -1, one of equal summands.
Part = tuple[int, int, int, int, int]
Parts = tuple[Part, ...]
Replaced = tuple[tuple[int, tuple[int, ...]], ...]
_OWN_RULES = "torch.distributed.tensor._ops."


class FormKey:
    """What decides a call, without its sizes, and the call with specs in place of DTensors, on one mesh."""

    __slots__ = ("args", "key", "kwargs", "mesh", "op")

    def __init__(
        self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh, key: tuple[Any, ...]
    ) -> None:
        self.op, self.args, self.kwargs, self.mesh, self.key = op, args, kwargs, mesh, key


class _Form:
    """The decision for all calls of one key: for each result the layouts of its tensors, one for a list of any length."""

    __slots__ = ("dtype", "parts", "results", "rule", "sized")

    def __init__(
        self, results: tuple[tuple[Layout | None, bool, int, int], ...], sized: int, parts: Parts = ()
    ) -> None:
        self.results = results
        self.sized = sized  # the position of the sizes that have to be local; -1: none
        self.parts = parts
        # How the sizes of the one result are found, and its dtype; None: by a run.
        self.rule: Any = None
        self.dtype: Any = None


# Stands for a decision to communicate operands.
_COMMUNICATES = _Form((), -1)


def form_key(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FormKey | None:
    """The key of a call; None if its sizes decide, or nothing is known about what they decide."""
    sizes = _sizes_of(op)
    if sizes is None:
        return None
    rule = _own_rule(op)
    if rule is None:
        return None
    operands: list[Any] = []
    specs = tuple([_with_specs(x, operands) for x in args])
    named = kwargs and {name: _with_specs(x, operands) for name, x in kwargs.items()}
    if None in operands or not has_meta_kernel(op, named):
        return None
    meshes = [spec.mesh for spec in _specs_in((*specs, *named.values()) if named else specs)]
    if not meshes or any(mesh is not meshes[0] for mesh in meshes):
        return None
    models = model_hooks()
    handler = models.handlers.get(op) if models is not None else None
    if handler is not None and handler.applies(op, SimpleNamespace(args_schema=specs, kwargs_schema=named)):
        return None
    deciding = sizes(specs, named, layout_of)
    if deciding is None:
        return None
    key = (op, rule, deciding, *operands)
    try:
        hash(key)
    except TypeError:
        return None
    return FormKey(op, specs, named, meshes[0], key)


def _sizes_of(op: Any) -> Callable[..., Hashable | None] | None:
    placements = HOOKS.get("placements")
    return None if placements is None else placements.sizes_of(op)


def _own_rule(op: Any) -> Any:
    """PyTorch's function that decides where the op's operands are placed. None: it comes from elsewhere, or a filter of its
    candidates, which 2.14 added, may read more of the sizes."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    single = propagator.op_single_dim_strategy_funcs.get(op)
    if getattr(single, "full_mesh_strategy_filter", None) is not None:
        return None
    rule = propagator.op_strategy_funcs.get(op) if single is None else single.func
    return rule if rule is not None and rule.__module__.startswith(_OWN_RULES) else None


def _with_specs(value: Any, operands: list[Any]) -> Any:
    """The argument with specs in place of DTensors. Of each, ``operands`` gets what decides beside its sizes; None if
    nothing holds for all sizes."""
    if type(value) is DTensor:
        spec = value._spec
        meta, layout = spec.tensor_meta, layout_of(spec)
        if meta is None or not layout.is_plain:
            operands.append(None)
            return spec
        shape = meta.shape
        operands.append((layout.decides, meta.dtype, len(shape), *[_fits(shape, cut) for cut in layout.shards]))
        return spec
    if isinstance(value, torch.Tensor):  # C++ lets none pass that has dims
        operands.append(value.dtype)
        return TensorMeta(value.shape, value.stride(), value.dtype)
    if isinstance(value, list | tuple):
        if value and type(value[0]) is int:
            return value
        return type(value)([_with_specs(x, operands) for x in value])
    return value


def _fits(shape: Any, cut: tuple[int, int]) -> bool:
    return cut[0] < len(shape) and shape[cut[0]] >= cut[1]


def _form_of(call: FormKey) -> _Form | None:
    form = FORMS.get(call.key)
    return form.get(_divisibility(call)) if isinstance(form, dict) else form


def _divisibility(call: FormKey) -> tuple[tuple[bool, bool], ...]:
    """Of each dim of each operand, whether axes of the mesh could cut it, and evenly: what decides which moves are possible,
    beside the placements."""
    specs = list(_specs_in((*call.args, *call.kwargs.values()) if call.kwargs else call.args))
    products = {1}
    for size in call.mesh.shape:
        products |= {size * product for product in products}
    return tuple(
        (n >= parts, n % parts == 0) for spec in specs for n in spec.tensor_meta.shape for parts in sorted(products)
    )


def _specs_in(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, DTensorSpec):
            yield value
        elif isinstance(value, list | tuple) and not isinstance(value, TensorMeta):
            yield from _specs_in(value)


def communicates_operands(call: FormKey) -> bool:
    """Whether PyTorch is known to communicate operands of such calls. Where to, it decides by what that costs for the sizes;
    whether it does follows from the rule, because it prefers to move nothing, and what is free."""
    return _form_of(call) is _COMMUNICATES


def known_form(call: FormKey) -> tuple[tuple[Result, ...], Replaced, Parts] | None:
    """``(results, replaced arguments, parts of arguments)`` of a call, or None if it is the first of its kind.

    Raises what the op raises for these sizes.
    """
    form = _form_of(call)
    if form is None:
        return None
    meta: Any = None if form.rule is None else result_meta(form.rule, call.args, form.dtype)
    metas = _metas(call, len(form.results)) if meta is None else [meta]
    results: list[Result] = []
    for (layout, is_list, written, viewed), meta in zip(form.results, metas, strict=True):
        if layout is None:
            if meta is not None:
                return None
            results.append(((None,), written, viewed))
        elif is_list != isinstance(meta, list) or meta is None:
            return None
        else:
            listed, placed = meta if is_list else [meta], layout.on_mesh(call.mesh)
            results.append((tuple([placed.with_meta(one) for one in listed]), written, viewed))
        if written >= 0 and call.args[written].tensor_meta.shape != meta.shape:
            return None
    if form.sized < 0:
        return tuple(results), (), form.parts
    layout, (spec,) = form.results[0][0], results[0][0]
    assert layout is not None and spec is not None and spec.tensor_meta is not None
    return tuple(results), ((form.sized, local_sizes(layout, spec.tensor_meta.shape)),), ()


def _metas(call: FormKey, num_results: int) -> list[Any]:
    with no_torch_function():
        found = meta_of_result(call.op, call.args, call.kwargs)
    if num_results == 1:
        return [list(found) if not isinstance(found, TensorMeta) and found is not None else found]
    return list(found)


def remember_form(
    call: FormKey, results: Any, replaced: Mapping[int, tuple[int, ...]] = MappingProxyType({}), parts: Parts = ()
) -> None:
    """Keep the decision about a call for all calls of the same kind, where that is possible. ``results``: None if operands
    are communicated.

    PyTorch takes the first placements that cost nothing, where it finds no operands that stay. To take a part of a whole
    operand costs nothing for any sizes, and communication always something, so that the choice follows from the placements
    and from what is divisible.
    """
    if results is None:
        _keep_by_divisibility(call, _COMMUNICATES)
    if not results:
        return
    listed = [isinstance(one.type, torch.ListType) for one in call.op._schema.returns]
    kept: list[tuple[Layout | None, bool, int, int]] = []
    for (specs, written, viewed), is_list in zip(results, listed, strict=True):
        layouts = {None if spec is None else layout_of(spec) for spec in specs}
        if len(layouts) != 1 or (written >= len(call.args)):
            return
        (layout,) = layouts
        if (layout is None and is_list) or (layout is not None and not layout.is_plain):
            return
        if layout is not None and layout.spec.mesh is not call.mesh:
            return
        kept.append((layout, is_list, written, viewed))
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    position, sized = propagator.op_to_shape_and_stride_idx.get(call.op), -1
    layout = kept[0][0]
    if position is not None and layout is not None and layout.shards:
        expected = local_sizes(layout, results[0][0][0].tensor_meta.shape)
        given = call.args[position] if isinstance(position, int) and position < len(call.args) else None
        if given is None or replaced.get(position, tuple(given)) != expected or len(kept) > 1:
            return
        sized = position
    elif replaced:
        return
    if parts and sized >= 0:
        return
    form = _Form(tuple(kept), sized, parts)
    if len(kept) == 1 and not listed[0] and kept[0][2] < 0:
        form.rule, form.dtype = result_rule(call.op, call.kwargs), results[0][0][0].tensor_meta.dtype
    if parts:
        _keep_by_divisibility(call, form)
    else:
        FORMS[call.key] = form


def _keep_by_divisibility(call: FormKey, form: _Form) -> None:
    forms = FORMS.setdefault(call.key, {})
    if isinstance(forms, dict):
        forms[_divisibility(call)] = form

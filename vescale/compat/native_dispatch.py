"""The C++ dispatcher of ops on DTensors (``csrc/dispatch.cpp``), and the decisions that it asks for.

It calls :func:`decide` for each op and arguments once. An op that runs on its local tensors as they are is run by C++ from
then on, without Python. For all others ``decide`` returns None, and PyTorch's own path runs them.

========================================  =======================================================================
the call                                  runs
========================================  =======================================================================
operands stay, no handler applies         on the local tensors, by C++
views whose sizes PyTorch makes local     the same, with the local sizes
parts or summands of whole operands       the same, with this rank's
writes while gathered copies are viewed   by PyTorch's path: writes must reach the originals
other moves, no rule, a handler           by PyTorch's path, with the patches of :mod:`vescale.compat.dispatch`
a mode, a subclass, a trace               by PyTorch's path
========================================  =======================================================================

``VESCALE_DISPATCH=stock``, read when vescale is imported, leaves everything to PyTorch's path, and so does an installation
without the helper. Results are the same; static mode (:mod:`vescale.static`) is refused.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vescale import csrc
from vescale.compat.autograd import current_backward
from vescale.compat.dispatch import (
    handlers_of_dtensor,
    is_into_empty,
    keeps_operands,
    local_shape,
    specs_on_replicas,
)
from vescale.compat.dtensor import DTensorSpec, StridedShard, rank_in_mesh
from vescale.compat.ledger import note
from vescale.compat.model_hooks import model_hooks
from vescale.compat.op_info import OutputSharding, is_view
from vescale.compat.patching import HOOKS, Changes
from vescale.compat.sharding_caches import INTERNED_SPECS, forget_decisions, make_room

# What the C++ dispatcher needs to know of a decision: the operands that change on the local tensors, and the results.


_aten = torch.ops.aten
_PLAIN = frozenset([Replicate, Shard, Partial])
STOCK_PLACEMENTS = frozenset([Replicate, Shard, Partial, StridedShard])
# The specs of a result's tensors, and the positions of the arguments that are returned in its place, or whose storage it
# shares; -1 for none.
Result = tuple[tuple[DTensorSpec | None, ...], int, int]
# What ranks take of operands that are whole on an axis: ``(position, dim, number of parts, this rank's, chunks)`` for an
# equal part along a dim, or of each of its chunks; with a dim of -1, one of equal summands.
Part = tuple[int, int, int, int, int]
Parts = tuple[Part, ...]


def intern_spec(spec: DTensorSpec) -> DTensorSpec | None:
    """The spec that stands for all equal ones, or None where calls with it take PyTorch's path."""
    meta = spec.tensor_meta
    if (
        meta is None
        or not all(type(size) is int for size in (*meta.shape, *meta.stride))
        or not rank_in_mesh(spec.mesh)
    ):
        return None
    placements = HOOKS.get("placements")
    for placement in spec.placements:
        if type(placement) not in STOCK_PLACEMENTS and (
            placements is None or type(placement) not in placements.custom_types
        ):
            return None
    key = (id(spec.mesh), spec.placements, spec.use_strided_shard_as_shard_order, spec.shard_order, *meta)
    known = INTERNED_SPECS.get(key)
    if known is None:
        make_room(INTERNED_SPECS)
        known = INTERNED_SPECS.setdefault(key, spec)
    return known


def parts_of_arguments(op: Any, schema: Any, sharding: OutputSharding) -> Parts | None:
    """What this rank takes of the operands that PyTorch moves, if each is whole on the axes that change: summands, as of the
    bias of a layer with sharded rows, or equal parts, as of embeddings of positions for a sharded sequence. None where one
    is communicated, or cut unevenly.
    """
    wanted = sharding.redistribute_schema
    if wanted is None or wanted.op != op or wanted.kwargs_schema != schema.kwargs_schema:
        return None
    if len(wanted.args_schema) != len(schema.args_schema):
        return None
    parts: list[Part] = []
    for index, (given, target) in enumerate(zip(schema.args_schema, wanted.args_schema)):
        if given == target:
            continue
        if (
            not isinstance(given, DTensorSpec)
            or not isinstance(target, DTensorSpec)
            or op._schema.arguments[index].alias_info is not None
            or (taken := _parts_of(index, given, target)) is None
        ):
            return None
        parts += taken
    return tuple(parts)


def _parts_of(index: int, given: DTensorSpec, target: DTensorSpec) -> list[Part] | None:
    mesh, meta, coordinate = given.mesh, given.tensor_meta, given.mesh.get_coordinate()
    kinds = (*given.placements, *target.placements)
    if meta is None or coordinate is None or not all(type(p) in _PLAIN or hasattr(p, "num_chunks") for p in kinds):
        return None
    parts: list[Part] = []
    for axis, (before, after) in enumerate(zip(given.placements, target.placements)):
        size = mesh.size(axis)
        if before == after or size == 1:
            continue
        if not before.is_replicate():
            return None
        if type(after) is Partial and after.reduce_op == "sum" and meta.dtype.is_floating_point:
            parts.append((index, -1, size, 0, 1))
            continue
        dim = getattr(after, "dim", None)
        cuts = [a for a, p in enumerate(target.placements) if getattr(p, "dim", None) == dim and mesh.size(a) > 1]
        chunks = [getattr(target.placements[a], "num_chunks", 1) for a in cuts]
        num_parts = math.prod(chunks) * math.prod(map(mesh.size, cuts))
        if dim is None or after in given.placements[axis + 1 :] or (len(cuts) > 1 and max(chunks) > 1):
            return None
        if not meta.shape[dim] or meta.shape[dim] % num_parts:
            return None
        parts.append((index, dim, size, coordinate[axis], max(chunks)))
    return parts


def local_arguments(op: Any, schema: Any, sharding: OutputSharding) -> list[tuple[int, tuple[int, ...]]] | None:
    """Arguments that are local sizes where the call has global ones; None where anything else differs."""
    wanted = sharding.redistribute_schema
    if not sharding.use_val_from_redistribute_schema or wanted is None:
        return None
    if op is _aten.squeeze.dim and wanted.op is _aten.squeeze.dims:
        spec, dim = schema.args_schema
        return [] if _squeezes_alike(spec, dim, wanted.args_schema[1]) else None
    if wanted.op != op or len(wanted.args_schema) != len(schema.args_schema):
        return None
    replaced = []
    for index, (given, local) in enumerate(zip(schema.args_schema, wanted.args_schema)):
        if isinstance(given, DTensorSpec):
            if given != local:
                return None
        elif given != local:
            if not isinstance(local, list | tuple) or not all(type(size) is int for size in local):
                return None
            replaced.append((index, tuple(local)))
    return replaced


def _squeezes_alike(spec: DTensorSpec, dim: int, dims: Any) -> bool:
    """Whether ``squeeze(dim)`` of the local tensor removes ``dims``: PyTorch names them, because a part may have one index
    of a dim that has more."""
    coordinate = spec.mesh.get_coordinate()
    is_plain = all(type(p) in _PLAIN for p in spec.placements) and spec.shard_order == (
        DTensorSpec.compute_default_shard_order(spec.placements)
    )
    if coordinate is None or not is_plain or not spec.shape:
        return False
    return bool(dims) == (local_shape(spec, coordinate)[dim] == 1)


def results_of(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], sharding: OutputSharding
) -> tuple[Result, ...] | None:
    """Of each result the specs of its tensors, and the positions of the arguments that are returned in its place, or whose
    storage it shares; None where C++ cannot make them."""
    declared = op._schema.returns
    if not declared:
        return ()
    if sharding.output_spec is None:
        return None
    specs = sharding.output_spec
    per_result = specs if isinstance(specs, tuple | list) and len(declared) > 1 else (specs,)
    if len(per_result) != len(declared):
        return None
    results = []
    for returned, spec in zip(declared, per_result):
        listed = tuple(spec) if isinstance(spec, tuple | list) else (spec,)
        kept = tuple(None if one is None else intern_spec(one) for one in listed)
        if any(a is not None and b is None for a, b in zip(listed, kept)):
            return None
        written = viewed = -1
        alias = returned.alias_info
        if alias is not None and alias.is_write:
            written = _position_of(op, alias)
            argument = args[written] if written < len(args) else kwargs.get(op._schema.arguments[written].name)
            if not isinstance(argument, DTensor) or not _keeps(argument._spec, kept[0]):
                return None
        elif (
            alias is not None and alias.before_set and is_view(op)
        ):  # not lists of views: PyTorch's share nothing either
            viewed = _position_of(op, alias)
        results.append((kept, written, viewed))
    return tuple(results)


def _position_of(op: Any, alias: Any) -> int:
    """Where the argument is that a result is or shares memory with, by their alias sets."""
    for index, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.before_set & alias.before_set:
            return index
    raise AssertionError(f"{op._schema} has a result that aliases no argument")


def _keeps(before: DTensorSpec, after: DTensorSpec | None) -> bool:
    if after is None or before.tensor_meta is None or after.tensor_meta is None:
        return False
    return before.placements == after.placements and before.tensor_meta.shape == after.tensor_meta.shape


# ``HookGate``: hooks of many tensors of which only the first call in a backward matters.

_OPEN, _SHUT = -1, -2  # as in C++


class HookGate:
    """While the gate is shut, the autograd engine skips the hooks of the guarded tensors in backwards that accumulate all
    gradients. Hooks are called in ``torch.autograd.grad`` and ``backward(inputs=...)``.

    Without the helper ``csrc/hook_gate.cpp`` hooks are always called. A gate is therefore for hooks that do nothing when
    they are called in a backward while it is shut; it saves about 1 us per call.
    """

    def __init__(self) -> None:
        self._library = _library()
        self._state = ctypes.c_int64(_OPEN)
        if self._library is not None:
            self._gate = self._library.new_gate()
            self._state = ctypes.c_int64.from_address(self._library.state_of(self._gate))
            weakref.finalize(self, self._library.free_gate, self._gate)

    def __reduce__(self) -> Any:
        return HookGate, ()  # a copy has a gate of its own: the one in C++ goes with this object

    def guard(self, tensor: torch.Tensor) -> None:
        """Put a leaf, which has one hook, behind the gate. Hooks that it gets later are called whether it is shut or not."""
        if self._library is not None:
            note("compat.native_dispatch:torch", tensor)
            self._library.guard(self._gate, tensor._cdata, tensor._backward_hooks)

    def release(self, tensor: torch.Tensor) -> None:
        """The hooks of a tensor are no longer behind any gate."""
        if self._library is not None:
            self._library.unguard(tensor._cdata)

    def shut(self) -> None:
        self._state.value = _SHUT

    def shut_here(self) -> None:
        """For the running backward: hooks are called in one that another thread runs meanwhile."""
        self._state.value = current_backward()

    def open(self) -> None:
        self._state.value = _OPEN


def addresses_about_hooks() -> tuple[int, int, int]:
    """Of the functions by which other C++ code asks whether a hook would be skipped now, whether one only counts gradients
    (:class:`ArrivalCount`), and has that one place a gradient; 0 where there is none."""
    library = _library()
    if library is None:
        return 0, 0, 0
    functions = library.lets_pass, library.is_only_count, library.place_gradient
    found = [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions]
    return found[0], found[1], found[2]


@functools.cache
def _typed(library: ctypes.CDLL) -> ctypes.CDLL:
    library.new_gate.restype = ctypes.c_void_p
    library.free_gate.argtypes = [ctypes.c_void_p]
    library.free_gate.restype = None
    library.state_of.argtypes = [ctypes.c_void_p]
    library.state_of.restype = ctypes.c_void_p
    library.guard.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.py_object]
    library.unguard.argtypes = [ctypes.c_void_p]
    library.unguard.restype = None
    return library


def _library() -> ctypes.CDLL | None:
    library = csrc.load("hook_gate")
    return None if library is None else _typed(library)


# Entries of all ops. Each takes about 500 bytes; a training step of a large model has some hundreds.
_MAX_ENTRIES = 16384
# PyTorch computes something else than the local results.
_NEVER = frozenset([_aten.equal.default])


# When vescale was imported: what is installed at different times has to fit together.
IS_STOCK = os.environ.get("VESCALE_DISPATCH", "") == "stock"


def _loaded() -> Any:
    """The module, or None where it has not been built or ``VESCALE_DISPATCH`` forbids it."""
    return None if IS_STOCK else csrc.dispatcher()


def _installed() -> Any:
    """The module while its kernels are installed, else None."""
    module: Any = csrc.dispatcher()
    return module if module is not None and module.is_installed() else None


def install_native_dispatch(changes: Changes, _: Any) -> None:
    """Put the C++ kernels in front of PyTorch's path; nothing where they have not been built."""
    module = _loaded()
    if module is None:
        return
    module.set_hook_gate(*addresses_about_hooks())
    slots = [DTensor.__dict__[name] for name in ("_spec", "_local_tensor")]
    module.install(
        DTensor, *slots, intern_spec, _decide, _static_arguments, STOCK_PLACEMENTS, forget_decisions, _MAX_ENTRIES
    )
    changes.on_undo(module.uninstall, functools.partial(registered_kernels, False))


def registered_kernels(is_random: bool) -> list[str]:
    """The kernels of the C++ helpers that PyTorch's dispatcher has: those of ops that draw, or of the others."""
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        lines = [line for line in torch._C._dispatch_dump(name).splitlines() if ": vescale ::" in line]
        if lines:
            space, _, op = name.partition("::")
            packet, _, overload = op.partition(".")
            tags = getattr(getattr(getattr(torch.ops, space), packet), overload or "default").tags
            if (torch.Tag.nondeterministic_seeded in tags) == is_random:
                found += [f"kernel {name} @ {line.partition(':')[0]}" for line in lines]
    return sorted(found)


def write_through_python(changes: Changes, live_copies: Any) -> None:
    """While the set has members, let PyTorch's path run ops that write, also random ones."""
    for module in map(csrc.load_module, ("dispatch", "random_fills")):
        if module is not None:
            module.observe_writes(live_copies)
            changes.on_undo(functools.partial(module.observe_writes, None))


def answer_mixed_calls(changes: Changes, answer: Answer, check_sizes: Callable[[str, Any], None]) -> None:
    """Ask ``answer(op, args, kwargs)`` for calls with plain tensors among DTensors, which PyTorch would refuse; its
    NotImplemented leaves them to PyTorch. Without the C++ dispatcher, a dispatch mode asks, and
    ``check_sizes(function name, operands)`` may raise where a function has refused their sizes before any op ran."""
    module = _loaded()
    if module is None:
        install_mixed_calls(changes, answer, check_sizes)
        return

    def asked(name: str, overload: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        op = _op(name, overload)
        return NotImplemented if op in handlers_of_dtensor() else answer(op, args, kwargs)

    module.answer_mixed_calls(asked)
    changes.on_undo(functools.partial(module.answer_mixed_calls, None))


def counts_local_writes() -> bool:
    """Whether ops that write to a DTensor count in the version of its local tensor: where the C++ dispatcher runs them."""
    return _loaded() is not None


def native_require_current() -> Callable[[DTensor], None] | None:
    """What is called before Python reads a DTensor's local tensor: it may be a copy whose source has been written to, see
    ``csrc/links.h``. None where the C++ dispatcher has not been built."""
    module = _loaded()
    return None if module is None else module.require_current


def is_native() -> bool:
    """Whether the C++ dispatcher is installed."""
    return _installed() is not None


class NativeConversions(NamedTuple):
    """What C++ does; all of it answers None where Python has to: always while the C++ dispatcher is not installed.

    Attributes:
        convert: ``(DTensor, target, stages of the gradient, requester, outdated)`` to the DTensor with other placements,
            linked in autograd. Also calls ``move`` where it has no program. With ``outdated``, what one device passes on:
            ``csrc/conversion.h``.
        move: ``(DTensor, target)`` to the DTensor with other placements, outside of autograd.
        enter: ``(DTensors, placements of their gradients or None, always)`` to local tensors, linked in autograd.
        leave: ``(local tensor, mesh, placements, shape, op, placements of the gradient or None)`` to a DTensor, the same.
        wrap: ``(tensor, mesh, placements, requester)`` to a DTensor, the same.
        link_view: ``(local tensor, copy of it to be viewed, update)``: from now on ops that read the copy call
            ``update(tensor with the copy's storage)`` before, if there were writes to the tensor (``csrc/links.h``). True.
        link_copy: ``(DTensor, copy, outdated)``: the copy was made of the tensor in Python, at a boundary.
        share_version: ``(DTensor, tensor)``: writes to one count as writes to both, for autograd.
        settle_view: ``(copy)``: an op has written to the copy, and the values are in its source by now.
        settle_group: ``(local tensor, local tensor)``: the second tensor of a boundary has the values of the first now.
    """

    convert: Callable[..., Any]
    move: Callable[..., Any]
    enter: Callable[..., Any]
    leave: Callable[..., Any]
    wrap: Callable[..., Any]
    link_view: Callable[..., Any]
    link_copy: Callable[..., Any]
    share_version: Callable[..., Any]
    settle_view: Callable[..., Any]
    settle_group: Callable[..., Any]


def native_conversions(
    *,
    plan: Callable[..., Any],
    move: Callable[..., Any],
    differentiate: Callable[..., Any],
    listeners: tuple[list[Any], ...],
    **regions: Callable[..., Any],
) -> NativeConversions:
    """Conversions in C++ (``csrc/conversion.h``, ``csrc/local_regions.h``), of one caller in a process.

    Args:
        plan: ``(spec, target)`` to ``(result's spec, NativeMove)``, ``(spec, None)`` if nothing moves, or None where Python
            moves. Specs are interned. ``target`` has None for axes that keep their placement.
        move: ``(DTensor, target, requester)`` to the DTensor, outside of autograd, for all other changes.
        differentiate: ``(DTensor, stages, requester)`` to the DTensor, with autograd.
        listeners: while one of these lists has members, ``move`` runs all collectives.
        regions: what ``csrc/local_regions.h`` asks.
    """
    module = _loaded()
    if module is None:
        nothing = NativeConversions(*(_nothing,) * len(NativeConversions._fields))
        return nothing._replace(share_version=_share_version)
    module.set_conversions(plan, move, differentiate, listeners)
    module.set_local_regions(**regions)
    return NativeConversions(
        module.convert,
        module.convert_values,
        module.enter_together,
        module.leave_local,
        module.wrap_global,
        module.link_view,
        module.link_copy,
        module.share_version,
        module.settle_view,
        module.settle_group,
    )


def _nothing(*_: Any) -> None:
    return None


# Without C++, by ``id`` of a DTensor: weakly, the DTensor and a plain tensor of the same memory, and the version of the
# plain one that is counted.
_SHARED: dict[int, list[Any]] = {}


def _share_version(copy: DTensor, x: torch.Tensor) -> None:
    """Before a backward, the version of ``copy`` counts the writes to ``x``: autograd refuses what it has saved of it."""
    if x.is_inference() or copy.is_inference():
        return
    _SHARED[id(copy)] = [weakref.ref(copy), weakref.ref(x), x._version]
    weakref.finalize(copy, _SHARED.pop, id(copy), None)


def is_written_back(x: torch.Tensor) -> None:
    """``x`` has got what was written to the DTensor that shares its memory, whose version has counted that."""
    for entry in list(_SHARED.values()):
        if entry[1]() is x:
            entry[2] = x._version


def _count_writes_to_shared() -> None:
    for entry in list(_SHARED.values()):
        copy, x = entry[0](), entry[1]()
        if copy is not None and x is not None and x._version != entry[2]:
            increment_version(copy)
            entry[2] = x._version


def filter_functions(mode: TorchFunctionMode, python: Callable[..., Any], when: dict[Any, Any]) -> None:
    """Let PyTorch call ``python(mode, function, kinds, args, kwargs)`` for a mode only where it does something, see
    ``csrc/function_filter.h``: for plain tensors among DTensors, and for the functions of ``when``, on the operands that
    their values say, or in the calls for which a value that is a function, of ``(function, args, kwargs)``, is true.
    Without the helper, PyTorch calls the mode's method as usual."""
    module = _loaded()
    if module is not None:
        mode.__torch_function__ = module.make_filter(weakref.ref(mode), python, when)  # type: ignore[method-assign]


def native_boundaries() -> Any:
    """What the hooks of modules in C++ call in the C++ dispatcher, in a capsule; None where that has not been built."""
    module = _loaded()
    return None if module is None else module.boundary_functions


def native_passes() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """What makes the descriptors of ``csrc/function_passes.h``, for methods and attributes: ``(class, method, function)``
    and ``(attribute, function)``, with what a mode sees as the function. None without the helper."""
    module = _loaded()
    return None if module is None else (module.pass_method, module.pass_attribute)


@contextlib.contextmanager
def without_native() -> Iterator[None]:
    """Let PyTorch's path run all ops of the process, to compare with it."""
    module = _installed()
    if module is None:
        yield
        return
    before = module.set_active(False)
    try:
        yield
    finally:
        module.set_active(before)


def dispatch_counts() -> dict[str, tuple[int, int, float, dict[str, tuple[int, float]]]]:
    """Since the last reset, by op: hits, misses, seconds in misses, and by reason the calls that took PyTorch's path, with
    their seconds. Empty where the C++ dispatcher is not installed."""
    module = _installed()
    return {} if module is None else dict(module.counts())


def num_entries() -> int:
    """How many kinds of calls the C++ dispatcher remembers."""
    module = _installed()
    return 0 if module is None else int(module.num_entries())


def reset_dispatch_counts() -> None:
    module = _installed()
    if module is not None:
        module.reset_counts()


def take_moves() -> bool:
    """Whether an op on DTensors has run on this thread, since the last call, other than on its local tensors as they are.
    Only what :func:`is_native` kernels exist for is seen."""
    module = _installed()
    return module is None or bool(module.take_other())


def runs_on_locals(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an op on DTensors runs on their local tensors as they are, but for sizes of views."""
    schema = op._schema
    found = _decide(schema.name, schema.overload_name, args, kwargs) if schema.name.startswith("aten::") else None
    return found is not None and not found[2]


@functools.cache
def _op(name: str, overload: str) -> Any:
    return getattr(getattr(_aten, name.removeprefix("aten::")), overload or "default")


def _static_arguments(name: str, overload: str) -> tuple[bool, ...]:
    """Whether a number decides by its value, for each argument: as PyTorch says, and where rules of ours may read it."""
    op = _op(name, overload)
    propagator = DTensor._op_dispatcher.sharding_propagator
    info = propagator.op_to_schema_info.get(op) or propagator.op_to_schema_info_for_single_dim_strategy.get(op)
    models, placements = model_hooks(), HOOKS.get("placements")
    if (models is not None and op in models.handlers) or (placements is not None and placements.has_user_rules(op)):
        return (True,) * len(op._schema.arguments)
    first = len(op._schema.arguments) if info is None else info.static_argnum
    names = () if info is None else info.static_kwargkey or ()
    return tuple(
        argument.name in names if argument.kwarg_only else index >= first
        for index, argument in enumerate(op._schema.arguments)
    )


def _decide(name: str, overload: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``(results, replaced arguments, parts of arguments)`` of a call that runs on the local tensors, or None.

    A result is ``(specs, written, viewed)``: the specs of its tensors, and the positions of the arguments that are returned
    in its place, or whose storage it shares; -1 for none. A replaced argument is ``(position, sizes)``, a part of one
    ``(position, dim, number of parts, this rank's, chunks)``, with a dim of -1 for one of equal summands.
    """
    op = _op(name, overload)
    if op in _NEVER or op in DTensor._op_dispatcher._random_ops or is_into_empty(op, kwargs):
        return None
    if op in handlers_of_dtensor():
        return _decide_on_replicas(op, args, kwargs)
    try:
        schema, sharding = keeps_operands(op, args, kwargs)
    except Exception:  # not lost: PyTorch's path decides again, and raises it
        return None
    if sharding is None:
        return None
    moves = sharding.needs_redistribute and not sharding.use_val_from_redistribute_schema
    parts = parts_of_arguments(op, schema, sharding) if moves else ()
    replaced = local_arguments(op, schema, sharding) if sharding.needs_redistribute and not moves else []
    if parts is None or replaced is None:
        return None
    results = results_of(op, args, kwargs, sharding)
    return None if results is None else (results, tuple(replaced), parts)


def _decide_on_replicas(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """:func:`_decide` for ops with an entry in DTensor's table of handlers: the ones that do nothing on whole tensors."""
    if op is _aten._local_scalar_dense.default:
        whole = all(type(placement) is Replicate for placement in args[0].placements)
        return ((((None,), -1, -1),), (), ()) if whole else None
    try:
        found = specs_on_replicas(op, args, kwargs)
    except Exception:  # not lost: PyTorch's path runs it again, and raises it
        return None
    specs = None if found is None else tuple(map(intern_spec, found))
    if specs is None or None in specs:
        return None
    return tuple(((spec,), -1, -1) for spec in specs), (), ()


# Calls that PyTorch's C++ refuses before it asks anybody, without the C++ dispatcher: plain tensors among DTensors, and
# views in inference mode of DTensors that were made outside of it; and writes that it does not count, by way of ``.data``.
#
# A dispatch mode meets them below autograd, where the C++ dispatcher would: in backwards of DTensors, whose ops no function
# calls, in functions that have one of these among their operands, and in PyTorch's functions in Python, which make tensors
# of their own. PyTorch calls ``DTensor.__torch_function__`` for each function that gets a DTensor.

_without_overrides = torch._C.DisableTorchFunctionSubclass
Answer = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class _Ops(TorchDispatchMode):
    """Asks ``answer`` for the ops of one function or backward."""

    leaves_meta_alone = stands_in_for_dispatcher = True

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        found = [x for x in tensors if type(x) is DTensor]
        if not found:
            return op(*args, **kwargs)
        for x in found:
            _take_strides_of_whole(x)
        if torch.is_inference_mode_enabled() and is_view(op) and not tensors[0].is_inference():
            with torch.inference_mode(False), torch.no_grad():  # the view shares the versions of what it views
                return op(*args, **kwargs)
        if any(type(x) is not DTensor for x in tensors):
            handler = handlers_of_dtensor().get(op)
            with self:  # the calls that make the answer may be mixed, too
                answer = self.answer(op, args, kwargs) if handler is None else handler(op, args, kwargs)
            if handler is not None or answer is not NotImplemented:
                return answer
        return op(*args, **kwargs)


def install_mixed_calls(changes: Changes, answer: Answer, check_sizes: Callable[[str, Any], None]) -> None:
    """See :func:`answer_mixed_calls`."""

    def torch_function(
        cls: type[DTensor], function: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with _without_overrides(), _counted_writes(args, kwargs):
            if function == _READ_DATA:
                return _give_out(args[0], function(*args))
            if getattr(function, "__module__", None) not in _IN_PYTHON and not _is_refused(args, kwargs):
                try:
                    return function(*args, **kwargs)
                except RuntimeError as error:
                    # Composites in C++ make tensors, too. They have only computed before: those that write begin with it,
                    # and an assignment ends with it.
                    if _REFUSAL not in str(error) or re.search(r"[^_]_$", getattr(function, "__name__", "x_")):
                        raise
            try:
                with _Ops(answer):
                    return function(*args, **kwargs)
            except (RuntimeError, ValueError):
                check_sizes(getattr(function, "__name__", str(function)), (args, kwargs))
                raise

    backward = torch.autograd._engine_run_backward

    @functools.wraps(backward)
    def run(losses: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(x, DTensor) for x in losses):
            return backward(losses, *args, **kwargs)
        _count_writes_to_shared()
        with _Ops(answer):
            return backward(losses, *args, **kwargs)

    changes.attribute(DTensor, "__torch_function__", classmethod(torch_function))
    changes.attribute(torch.autograd, "_engine_run_backward", run)


_REFUSAL = "got mixed torch.Tensor and DTensor"  # PyTorch's
_IN_PYTHON = (torch.nn.functional.__name__, torch.functional.__name__)


_READ_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_GIVEN_OUT = "_vescale_given_out"
"""The attribute of a storage with ``(local tensor, .data)`` of each DTensor whose ``.data`` has been read, weakly."""


def _give_out(x: DTensor, data: DTensor) -> DTensor:
    """``data`` has a version of its own, and so do local tensors of its views."""
    storage = data._local_tensor.untyped_storage()
    known = [pair for pair in getattr(storage, _GIVEN_OUT, ()) if pair[1]() is not None]
    note("compat.native_dispatch:instance", storage)
    setattr(storage, _GIVEN_OUT, [*known, (weakref.ref(x._local_tensor), weakref.ref(data))])
    return data


@contextlib.contextmanager
def _counted_writes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """What the call writes to memory that ``.data`` has given out counts in the version of the local tensor, and of the
    ``.data``, as with the C++ dispatcher."""
    listed = [*args[:1], *((kwargs["out"],) if "out" in kwargs else ())]
    flat = [x for one in listed for x in (one if isinstance(one, list | tuple) else (one,))]
    given = [
        (x, x._version)
        for x in flat
        if type(x) is DTensor and not x.is_inference() and hasattr(x._local_tensor.untyped_storage(), _GIVEN_OUT)
    ]
    yield
    for x, version in given:
        if x._version != version:
            for references in getattr(x._local_tensor.untyped_storage(), _GIVEN_OUT):
                increment_version([one for one in (reference() for reference in references) if one is not None])


def _take_strides_of_whole(x: DTensor) -> None:
    """Dims of size 1 may have any stride, and kernels tell memory formats by strides: they get those of the whole tensor, by
    which PyTorch has decided. Below autograd, where this runs, that is no write: the tensor keeps its version."""
    local = x._local_tensor
    if local.layout is not torch.strided or type(local) is not torch.Tensor or 1 not in local.shape:
        return
    whole = x._spec.stride
    if len(whole) == local.ndim:
        strides = [w if n == 1 and w > 0 else s for n, s, w in zip(local.shape, local.stride(), whole)]
        if strides != list(local.stride()):
            local.as_strided_(local.shape, strides)


def _is_refused(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    if torch.is_inference_mode_enabled() and not all(x.is_inference() for x in tensors):
        return True
    return any(type(x) is DTensor for x in tensors) and any(type(x) is not DTensor for x in tensors)

"""``install(model, program, mesh)``: a lowered program becomes DTensor parameters and hooks, in place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.comm import join_axes
from vescale.compat import guard_call, native_hooks, no_torch_function, note, shorten_call
from vescale.errors import NotParallelizedError, kind_of
from vescale.fsdp import FSDPModule
from vescale.gradients import GradientReducer, refuse_reducers_of
from vescale.ir import (
    Annotate,
    Checkpoint,
    Instruction,
    Local,
    Place,
    Program,
    Unit,
    join_placements,
)
from vescale.ops import install as install_placements
from vescale.ops import is_sparse, observe
from vescale.placements import from_local
from vescale.rng import enable as enable_rng
from vescale.rng import has_deferred, is_deferred, materialize
from vescale.runtime._adapters import add_merging, add_save_pretrained
from vescale.runtime._checkpointed_forward import CheckpointedForward
from vescale.runtime._executors import Executor, executor_of
from vescale.runtime._foreign_tools import meet_foreign_tools
from vescale.runtime._gradient_hooks import GradientHooks, full_name
from vescale.runtime._handlers import install_handlers
from vescale.runtime._implicit_report import RuntimeObserver
from vescale.runtime._implicit_site import ImplicitSite
from vescale.runtime._input_checks import check_loaded
from vescale.runtime._local_region import ExpertRegion, LocalRegion
from vescale.runtime._module_hooks import add_hooks
from vescale.runtime._plan_units import Units, states_in
from vescale.runtime._runtime import Runtime
from vescale.runtime._tensor_placement import TensorSlots, load_plain, place_tensor


def install(model: nn.Module, program: Program, mesh: DeviceMesh, *, strict: bool = False) -> Runtime:
    """Carry out a lowered program; nothing of the plan is consulted afterwards. Next, call :func:`run_eagerly` or install
    static mode.

    Communication: none that ranks have to agree on; they have compared their programs before (``preflight``).
    """
    install_placements()
    enable_rng()
    observe(RuntimeObserver())
    install_handlers()
    runtime = Runtime(program, mesh, GradientHooks.of(program, mesh), strict=strict, native=native_hooks())
    units = Units(model, program, mesh)
    units.place(lambda into: _materialize(model, program, mesh, units.deferred, into))
    _place_tensors(model, program, mesh, units.names)
    by_module: dict[str, list[Instruction]] = {}
    for instruction in program:
        by_module.setdefault(instruction.path, []).append(instruction)
    for path, module in model.named_modules():
        instructions = by_module.get(path, [])
        for instruction in instructions:
            if isinstance(instruction.op, Local):
                region = ExpertRegion if instruction.op.kind == "experts" else LocalRegion
                region(runtime, module, path, instruction)
        for instruction in instructions:
            if isinstance(instruction.op, Checkpoint):  # around the region, if there is one
                CheckpointedForward(runtime, module, path, instruction)
        add_hooks(runtime, module, path, instructions)
        add_save_pretrained(runtime, module)
        add_merging(runtime, module)
    units.install()
    meet_foreign_tools(runtime, model)
    runtime.adopt(model, "")
    model.register_load_state_dict_pre_hook(_before_loading)
    runtime.checks.start()
    return runtime


def run_eagerly(runtime: Runtime, model: nn.Module) -> None:
    """Shorten the calls of modules. Static mode does without: it replaces them itself."""
    for module in model.modules():
        if module._forward_hooks:
            guard_call(module)
        if runtime.native is not None:
            shorten_call(module, runtime.native)


def _before_loading(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Of ``load_state_dict``: plain tensors, which are the same on every rank, are compared and cut."""
    with no_torch_function():  # of a forward, where this may happen
        check_loaded(module, state, prefix)
        load_plain(module, state, prefix)


def implicit_communication(model: nn.Module) -> dict[ImplicitSite, int]:
    """How often each site of a parallelized model communicated on this rank so far without a plan entry that requests it.

    Raises KeyError for a model that has not been parallelized.

    Args:
        model: what :func:`~vescale.parallelize` returned.
    """
    runtime = Runtime.of(model)
    if runtime is None:
        raise NotParallelizedError(f"this {type(model).__name__} has not been parallelized")
    return dict(runtime.sites)


def gradient_reducer(model: nn.Module) -> GradientReducer:
    """The reducer of a parallelized model's gradients: for ``no_sync()``, hooks and reports.

    Raises KeyError for a model that has not been parallelized, and on ranks outside of its mesh.

    Args:
        model: what :func:`~vescale.parallelize` returned.
    """
    runtime = Runtime.of(model)
    if runtime is None or runtime.gradients.reducer is None:
        raise NotParallelizedError(
            f"this {type(model).__name__} has not been parallelized, or this rank is not part of its mesh"
        )
    return runtime.gradients.reducer


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backwards inside only accumulate this rank's gradients; the first one outside reduces all of it.

    Communication: none inside but what the forward and backward themselves do, gathers of units among it, unless
    ``reshard_after_backward=False`` keeps those gathered. Inside, ``.grad`` is None, or incomplete.

    Raises KeyError for a model that has not been parallelized, and on ranks outside of its mesh.

    Args:
        model: what :func:`~vescale.parallelize` returned.
    """
    with gradient_reducer(model).no_sync():
        yield


def finish_gradients(model: nn.Module, *, units: bool = True) -> None:
    """Complete what backwards under :func:`no_sync` have accumulated, without another backward; on every rank of the mesh.
    ``units=False``: those of units are complete.

    Communication: that of a backward's end: one reduction for each unit and each bucket.

    Args:
        model: what :func:`~vescale.parallelize` returned.
    """
    states = states_in(model) if units else []
    with torch.no_grad():
        for state in reversed(states):
            state.reduce_accumulated()
        if states:
            states[0].conclude_accumulation()
    gradient_reducer(model).finish()


def _place_tensors(model: nn.Module, program: Program, mesh: DeviceMesh, placed: Collection[str]) -> None:
    slots = TensorSlots(model)
    joint = _joint_cuts(program, slots)
    for instruction in program:
        if executor_of(instruction) is not Executor.STATE:
            continue
        name = full_name(instruction)
        assert isinstance(instruction.op, Place | Annotate)
        if name in placed:
            continue
        old = slots[name]
        own_mesh, stage = _at_rest(mesh, instruction.op, joint.get(id(old), ()))
        if is_sparse(old) and all(p.is_replicate() for p in stage):
            continue  # plain, and the same on every rank
        if isinstance(instruction.op, Annotate):
            new = from_local(old.detach(), own_mesh, stage)
        else:
            new = place_tensor(old, own_mesh, stage, name)
        slots.replace(name, new)


def _joint_cuts(program: Program, slots: TensorSlots) -> dict[int, tuple[int, ...]]:
    """By ``id`` of a parameter, the axes of its unit."""
    units = [(i.path, i.op) for i in program if isinstance(i.op, Unit)]
    return {
        id(slots[f"{path}.{name}" if path else name]): tuple(map(program.axes.index, unit.shard))
        for path, unit in units
        for name in unit.names
    }


def _at_rest(
    mesh: DeviceMesh, op: Place | Annotate, shard: tuple[int, ...]
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Mesh and placements of a parameter or buffer at rest; ``shard``: the axes of its unit, which share a dim."""
    stage = tuple(Replicate() if p is None else p for p in op.placements)
    if len(shard) <= 1:
        return mesh, stage
    return join_axes(mesh, shard), join_placements(stage, tuple(mesh.shape), shard)[0]


def _materialize(
    model: nn.Module,
    program: Program,
    mesh: DeviceMesh,
    planned: Mapping[int, tuple[DeviceMesh, tuple[Placement, ...]]],
    into: Callable[[str], torch.Tensor | None],
) -> None:
    """Compute the values of a model built under ``deferred_init``: each rank those of its local tensors, for parameters of
    units (``planned``: mesh and placements by ``id``) in the memory ``into(name)``.

    Parameters that the plan annotates as local, and tensors that the program does not place, are computed whole.
    """
    if not has_deferred(model):
        return
    slots = TensorSlots(model)
    places, joint = dict(planned), _joint_cuts(program, slots)
    for instruction in program:
        if isinstance(instruction.op, Place):
            tensor = slots[full_name(instruction)]
            if id(tensor) not in places:
                places[id(tensor)] = _at_rest(mesh, instruction.op, joint.get(id(tensor), ()))

    def placements_of(name: str, tensor: torch.Tensor) -> tuple[Placement, ...] | None:
        return places[id(tensor)][1] if is_deferred(tensor) and id(tensor) in places else None

    def mesh_of(name: str) -> DeviceMesh | None:
        found = places.get(id(slots[name]))
        return found[0] if found is not None else None

    materialize(model, mesh, placements_of, into=into, mesh_of=mesh_of)


def _reduced_otherwise(module: nn.Module) -> str | None:
    """For a part of a module that is given to a :class:`GradientReducer`: how its gradients are reduced already."""
    if Runtime.of(module) is not None:
        return "parallelized, so that its gradients are reduced already; use vescale.runtime.gradient_reducer(model)"
    if isinstance(module, FSDPModule):
        return (
            f"{kind_of(module)}, which reduces the gradients of its parameters; pass only modules without such parts "
            "to the reducer"
        )
    return None


refuse_reducers_of(_reduced_otherwise)


class ModuleTables:
    """Classes and attributes of a model's modules, and what is in their tables (parameters, buffers, modules, hooks), to be
    put back when ``parallelize`` fails in the middle.

    Tables are the same objects after :meth:`restore`. What tensors hold is not kept: ``parallelize`` writes to none that the
    model had before.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kept: list[tuple[nn.Module, type[nn.Module], dict[str, Any], list[tuple[Any, Any]]]] = []
        for module in model.modules():
            attributes = dict(vars(module))
            tables = [(value, type(value)(value)) for value in attributes.values() if _is_table(value)]
            self._kept.append((module, type(module), attributes, tables))

    def restore(self) -> None:
        for module, cls, attributes, tables in self._kept:
            if type(module) is not cls:
                note("runtime._install:class", module)
                module.__class__ = cls
            vars(module).clear()
            vars(module).update(attributes)
            for table, before in tables:
                table.clear()
                table.update(before)


def _is_table(value: Any) -> bool:
    """Dicts and sets, also ordered ones, whose copy is made as they are."""
    return type(value).__name__ in ("dict", "OrderedDict", "set")

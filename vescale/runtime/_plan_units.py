"""Units of a plan: parameters that rest sharded and are gathered while a module computes, on the engine of fully_shard."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.comm import outside_of_kept
from vescale.compat import eagerly, in_backward, local_of, make_dtensor, make_spec, no_torch_function, own_part
from vescale.errors import UnitSubclassError
from vescale.fsdp import (
    DataParallelAxes,
    GroupMember,
    ManagedParameter,
    ModuleState,
    ParameterGroup,
    Slot,
    give_methods,
    is_extended,
    state_of,
)
from vescale.ir import Place, Program, Unit
from vescale.placements import RaggedShard, contiguous_stride, local_region, shard_dim
from vescale.rng import is_deferred
from vescale.runtime._tensor_placement import TensorSlots, place_tensor


class Units:
    """The units of a program, from before the model has its values until their hooks are installed.

    ============  ====================================================================================================
    step          what happens
    ============  ====================================================================================================
    constructor   buffers are planned on the meta device; the model is left as it is
    ``place``     every parameter gets its part, in its place in a buffer: computed there for a deferred one
    ``install``   the modules get the engine's hooks
    ============  ====================================================================================================
    """

    def __init__(self, model: nn.Module, program: Program, mesh: DeviceMesh) -> None:
        self.model, self.mesh = model, mesh
        self._slots = TensorSlots(model)
        self._originals: dict[str, torch.Tensor] = {}
        self._groups: dict[str, list[tuple[Unit, ParameterGroup]]] = {}
        if mesh.get_coordinate() is None:
            return
        resting = {_full(i.path, i.target): i.op.placements for i in program if isinstance(i.op, Place)}
        first_names = {id(self._slots[name]): name for name in reversed(resting)}
        for instruction in program:
            if isinstance(instruction.op, Unit):
                names = [first_names[id(self._slots[_full(instruction.path, name)])] for name in instruction.op.names]
                group = self._group(instruction.path, instruction.op, names, resting, program)
                self._groups.setdefault(instruction.path, []).append((instruction.op, group))

    @property
    def names(self) -> set[str]:
        """First names of the parameters that units hold."""
        return set(self._originals)

    def _group(self, path: str, unit: Unit, names: Sequence[str], resting: Any, program: Program) -> ParameterGroup:
        axes = DataParallelAxes.of_named(self.mesh, unit.shard, unit.replicate)
        positions = [program.axes.index(axis) for axis in unit.shard]
        members = []
        for name in names:
            original = self._slots[name]
            if is_extended(own_part(original)):
                raise UnitSubclassError(
                    f"parameter {name!r} of shape {tuple(original.shape)} is a tensor subclass, "
                    f"{type(original).__name__}; a unit of a plan gathers plain tensors, and would lose the class. "
                    "Remove it from the entries that place it at rest, or apply fully_shard to the module instead"
                )
            self._originals[name] = original
            rest: Placement = resting[name][positions[0]]
            run = tuple(Replicate() if a in positions else p for a, p in enumerate(resting[name]))
            twin = _on_meta(original, self.mesh, run)
            slots = [Slot(module, attribute) for module, attribute in self._slots.places(name)]
            block = _block(rest, local_of(twin).shape, run)
            is_planned = isinstance(rest, RaggedShard) and rest.local_units is None
            member = nn.Parameter(twin, requires_grad=original.requires_grad)
            members.append(GroupMember(name, member, slots, block, None if is_planned else rest))
        after_forward = unit.reshard_after_forward
        group = ParameterGroup(
            members,
            axes,
            reshard_after_forward=_kept(True if after_forward is None else after_forward, axes.shard_size),
            mp_policy=unit.mp_policy,
            offload_policy=None if unit.offload_pinned is None else CPUOffloadPolicy(unit.offload_pinned),
            reduce_op="sum",
            path=path,
        )
        for parameter in group.parameters:
            # What is on the host is not where the other axes' collectives run.
            parameter.contribution.leaves_pending = unit.offload_pinned is None
            parameter.register(cast(nn.Parameter, self._originals[parameter.name]))
        return group

    # Values

    @property
    def deferred(self) -> dict[int, tuple[DeviceMesh, tuple[Placement, ...]]]:
        """Mesh and placements of the deferred parameters of units, by ``id``."""
        return {
            id(self._originals[p.name]): _place(p) for p in self._parameters() if is_deferred(self._originals[p.name])
        }

    def place(self, materialize: Callable[[Callable[[str], torch.Tensor | None]], None]) -> None:
        """Fill the buffers. ``materialize(into)`` gives the model's deferred tensors their values, those of units in the
        memory ``into(name)``."""
        memory: dict[str, torch.Tensor] = {}
        groups = [group for found in self._groups.values() for _, group in found]
        for group in groups:
            if not any(
                self._originals[p.name].is_meta and not is_deferred(self._originals[p.name]) for p in group.parameters
            ):
                group.at_rest.fill(group.device, self._write(memory))
            else:
                for parameter in group.parameters:
                    parameter.register(parameter.sharded)
        materialize(memory.get)
        for parameter in self._parameters():
            original = self._originals[parameter.name]
            if is_deferred(original):
                slot = parameter.slots[0]
                made = slot.module._parameters[slot.name]
                assert made is not None
                parameter.sharded = made
            else:
                parameter.sharded.__dict__.update(original.__dict__)
        self._originals = dict.fromkeys(self._originals, torch.empty(0))

    def _write(self, memory: dict[str, torch.Tensor]) -> Callable[[ManagedParameter, torch.Tensor], bool]:
        def write(parameter: ManagedParameter, local: torch.Tensor) -> bool:
            """True where the values are there; of deferred ones the memory is noted, and the original stays registered."""
            original = self._originals[parameter.name]
            if is_deferred(original):
                memory[parameter.name] = local
                return False
            placed = place_tensor(original, *_place(parameter), parameter.name)
            with torch.no_grad():
                local.copy_(local_of(placed))
            return True

        return write

    def _parameters(self) -> Iterator[ManagedParameter]:
        for found in self._groups.values():
            for _, group in found:
                yield from group.parameters

    # Hooks

    def install(self) -> None:
        """Give the modules the engine's hooks, behind those that are there; the model itself, too, when any gets them.

        Raises BufferMismatchError on every rank when the ranks have planned different buffers.
        """
        if not self._groups:
            return
        device = next(self._parameters()).axes.device
        for path in dict.fromkeys(("", *self._groups)):
            found = self._groups.get(path, [])
            after_forward = next(
                (unit.reshard_after_forward for unit, _ in found if unit.reshard_after_forward is not None), None
            )
            state = UnitState(
                [self.model.get_submodule(path)],
                [group for _, group in found],
                mp_policy=next(
                    (unit.mp_policy for unit, _ in found if unit.mp_policy is not None), MixedPrecisionPolicy()
                ),
                device=device,
                reshard_root=None if after_forward is None else bool(after_forward),
                hooks_first=False,
            )
            state.accumulates_gathered = any(not unit.reshard_after_backward for unit, _ in found)
            give_methods(state)
        self.model.register_load_state_dict_pre_hook(_to_rest)
        root = state_of(self.model)
        assert root is not None
        if not any(parameter.sharded.is_meta for parameter in self._parameters()):
            root.become_root()  # also when a part of the model will be the first to run


class UnitState(ModuleState):
    """The hooks of a unit. The function mode is off inside of them: the engine is no part of the model."""

    accumulates_gathered = False
    stays_gathered = False
    """Inside of :func:`kept_gathered`: parameters do not change there."""

    @eagerly
    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with no_torch_function(), outside_of_kept():
            return super().before_forward(module, args, kwargs)

    def _begin_iteration(self, args: Any, kwargs: Any) -> Any:
        """What an earlier forward has left gathered may be older than the parameters, which an optimizer has written since,
        unless gradients are being accumulated: it is gathered anew."""
        begins = self.iteration.forward_root is None and not in_backward() and not self.continues
        args, kwargs = super()._begin_iteration(args, kwargs)
        if begins:
            for group in self._kept_for_nothing():
                if group.is_gathered and not any(bucket.unreduced.has_any for bucket in group.buckets):
                    group.reshard()
        return args, kwargs

    def _kept_for_nothing(self) -> Iterator[ParameterGroup]:
        for state in self.iteration.states:
            if not getattr(state, "stays_gathered", False):
                yield from (group for group in state.groups if not group.is_read_by_graph)

    @eagerly
    def after_forward(self, module: nn.Module | None, args: Any, output: Any) -> Any:
        is_last = self.iteration.forward_root is self
        with no_torch_function(), outside_of_kept():
            output = super().after_forward(module, args, output)
            if is_last and not torch.is_grad_enabled() and not in_backward():
                for group in self._kept_for_nothing():  # no backward will come
                    group.reshard()
            return output

    @eagerly
    def _before_backward(self, *gradients: Any) -> None:
        with no_torch_function():
            super()._before_backward(*gradients)

    @eagerly
    def _after_backward(self, *gradients: Any) -> None:
        with no_torch_function():
            super()._after_backward(*gradients)


def states_in(model: nn.Module) -> list[ModuleState]:
    """The states of all units of a model, the model's own first."""
    found = (state_of(module) for module in model.modules())
    return list(dict.fromkeys(state for state in found if state is not None))


def managed_parameters(model: nn.Module) -> dict[tuple[int, str], ManagedParameter]:
    """The parameters of units, by (``id`` of the module, name in it)."""
    return {
        (id(slot.module), slot.name): parameter
        for state in states_in(model)
        for group in state.groups
        for parameter in group.parameters
        for slot in parameter.slots
    }


@contextlib.contextmanager
def accumulating(model: nn.Module) -> Iterator[None]:
    """Gradients of units accumulate unreduced; parameters stay gathered if their unit does not reshard after backward."""
    states = states_in(model)
    before = [(g, g.reduce_gradients, g.options.all_reduce, g.reshard_after_backward) for s in states for g in s.groups]
    for state in states:
        for group in state.groups:
            group.reduce_gradients = group.options.all_reduce = False
            if isinstance(state, UnitState) and state.accumulates_gathered:
                group.reshard_after_backward = False
    try:
        yield
    finally:
        for group, reduces, sums, reshards in before:
            group.reduce_gradients, group.options.all_reduce, group.reshard_after_backward = reduces, sums, reshards


@contextlib.contextmanager
def kept_gathered(model: nn.Module) -> Iterator[Sequence[ParameterGroup]]:
    """Several forwards and backwards with the same parameters: units whose entry does not ask for ``reshard_after_forward``
    are gathered by the first that uses them, and stay so, with gradients and without. Gives their groups:
    ``group.reshard()`` lets one go earlier. At the end their settings are as before, and the caller reshards them."""
    states = [s for s in states_in(model) if isinstance(s, UnitState) and s.reshard_root in (None, False)]
    groups = [group for state in states for group in state.groups]
    before = [(group.reshard_after_forward, group.reshard_after_backward) for group in groups]
    for state in states:
        state.stays_gathered = True
    for group in groups:
        group.reshard_after_forward = group.reshard_after_backward = False
        group.stays_gathered = True
    try:
        yield groups
    finally:
        for state in states:
            state.stays_gathered = False
        for group, (after_forward, after_backward) in zip(groups, before):
            group.stays_gathered = False
            group.reshard_after_forward, group.reshard_after_backward = after_forward, after_backward


@torch.no_grad()
def reduce_units(model: nn.Module, groups: Sequence[ParameterGroup]) -> None:
    """Under ``no_sync``: reduce what backwards have accumulated in these groups of the model's units, and in no others; on
    every rank of the mesh. The sums are added to ``.grad``."""
    if not groups:
        return
    root = states_in(model)[0]
    before = [(group.reduce_gradients, group.options.all_reduce) for group in groups]
    with no_torch_function():
        root.iteration.expect_conclusion()
        for group in groups:
            group.reduce_gradients = group.options.all_reduce = True
            group.reduce_accumulated()
        for group, (reduces, sums) in zip(groups, before):
            group.reduce_gradients, group.options.all_reduce = reduces, sums
        root.conclude_accumulation()


def unit_groups(model: nn.Module) -> list[ParameterGroup]:
    """The groups of all units of a model."""
    return [group for state in states_in(model) for group in state.groups]


def _to_rest(module: nn.Module, *_: Any) -> None:
    """Before ``load_state_dict`` compares what is given with the parameters: they are the sharded ones."""
    for state in states_in(module):
        state.to_rest()


def _place(parameter: ManagedParameter) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Mesh and placements of the sharded form."""
    assert isinstance(parameter.sharded, DTensor)
    return parameter.sharded.device_mesh, tuple(parameter.sharded.placements)


def _on_meta(tensor: torch.Tensor, mesh: DeviceMesh, run: tuple[Placement, ...]) -> DTensor:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    shape = tuple(tensor.shape)
    local = local_region(shape, run, tuple(mesh.shape), tuple(coordinate)).local_shape
    spec = make_spec(mesh, run, shape, contiguous_stride(shape), tensor.dtype)
    return make_dtensor(torch.empty(local, dtype=tensor.dtype, device="meta"), spec)


def _block(rest: Placement, shape: Sequence[int], run: Sequence[Placement]) -> int | None:
    """Number of elements that are never split between ranks: the granule of the placement."""
    if not isinstance(rest, RaggedShard):
        return None
    inner = [dim for p in run if (dim := shard_dim(p)) is not None and dim > 0]
    return rest.granule(shape, inner)


def _kept(after_forward: bool | int, size: int) -> bool | int:
    """``reshard_after_forward`` as a bool where the size is that of all ranks (True) or of one (False)."""
    if isinstance(after_forward, bool) or after_forward not in (1, size):
        return after_forward
    return after_forward != 1


def _full(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name

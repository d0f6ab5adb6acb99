"""``fully_shard``: FSDP for a module, call-compatible with PyTorch's FSDP2."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from vescale._model_parts import install_model_parts
from vescale.buffer import COLLECTIVE_ALIGNMENT_BYTES
from vescale.checks import RegisteredParameters, adopt_optimizers, check_optimizers, listed_optimizers
from vescale.compat import (
    DataParallelMeshDims,
    FSDP2Module,
    fsdp2_state,
    is_refusing,
    is_replicated,
    mark_as_managed,
    note,
    register_fsdp2_state,
)
from vescale.errors import ArgumentTypeError, FullyShardError, kind_of
from vescale.fsdp._extensions import is_extended
from vescale.fsdp._group import BlockPolicy, ParameterGroup
from vescale.fsdp._module import FSDPModule
from vescale.fsdp._parameter import find_slots
from vescale.fsdp._sharded_parameters import GroupMember
from vescale.fsdp._state import ModuleState, state_of
from vescale.fsdp._step_comparison import watch_draws
from vescale.gradients import DataParallelAxes
from vescale.ops import install as install_placements
from vescale.rng import check_recorded_alike, has_deferred, is_deferred, materialize
from vescale.rng import enable as enable_random_ops

_MANAGED_BY = "_vescale_managed_by"


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
    orig_param_policy: BlockPolicy | None = ...,
    alignment_bytes: int = ...,
    optimizer: Optimizer | Iterable[Optimizer] | None = ...,
) -> FSDPModule: ...


@overload
def fully_shard(
    module: list[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
    orig_param_policy: BlockPolicy | None = ...,
    alignment_bytes: int = ...,
    optimizer: Optimizer | Iterable[Optimizer] | None = ...,
) -> list[FSDPModule]: ...


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  # frozen
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008  # without state
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    orig_param_policy: BlockPolicy | None = None,
    alignment_bytes: int = COLLECTIVE_ALIGNMENT_BYTES,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
) -> Any:
    """Shard the parameters of ``module`` over the data-parallel ranks, in place; call it bottom-up, block by block.

    The parameters of ``module`` that no earlier call on a module below has taken become one group: gathered in one
    collective before forward, freed after it, gathered again before backward, and their gradients reduced in one.

    ==============  ======================================================  =======================================
    of a parameter  at rest                                                 in forward and backward
    ==============  ======================================================  =======================================
    value           ``RaggedShard`` DTensor (``StridedRaggedShard`` where   a view of the gathered buffer: a plain
                    tensor parallelism has cut dim 0), a slice of one       tensor, or a DTensor on the axes that are
                    planned buffer                                          not data-parallel
    gradient        DTensor placed like it; the average over the ranks      one copy into the unreduced buffer
    ==============  ======================================================  =======================================

    Args:
        module: a module, or a list of modules whose parameters form one group.
        mesh: 1 axis (FSDP), or 2 named ones, (replicate, shard) (HSDP); None: all ranks. With ``dp_mesh_dims``: the
            whole mesh, on which the parameters are DTensors.
        reshard_after_forward: True frees parameters after forward; False keeps them until backward; a number keeps a
            piece on each of so many consecutive ranks; None: True, and False for the root.
        shard_placement_fn: may return ``Shard(dim)`` for a parameter that must be sharded on that dim (gathering it
            costs copies), or a ``ShardPlacementResult`` with a separate mesh.
        mp_policy, offload_policy: PyTorch's classes.
        ignored_params: left as they are.
        dp_mesh_dims: names of the data-parallel axes of ``mesh``.
        orig_param_policy: ``policy(name, parameter)`` gives the elements that stay together on one rank (see
            ``vescale.buffer.GranularityTable``); None for "anywhere". Names are relative to ``module``.
        alignment_bytes: shards, and tensors in them, start at multiples of this.
        optimizer: one that was created with parameters which this call or earlier ones have sharded, or several: their
            groups get the new parameters in place, so that existing schedulers continue. States of a parameter's shape
            are sharded as it is. Other holders of the parameters of before, which step, clip or average them, get a
            :class:`~vescale.ReplacedParameterError`.

    A parameter that is a tensor subclass with ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` is gathered by them, as
    FSDP2 does it: at rest a ``Shard(0)`` DTensor over chunks of the subclass, in forward and backward what the second hook
    returns. One exchange of bytes gathers all such parameters of a group that have one dtype and ``requires_grad``. Every
    rank must have tensors of equal shapes and dtypes gathered: a hook pads what a rank with fewer rows has.

    Random ops on DTensors have single-device semantics from then on (``vescale.rng.enable()``), so that initializing shards
    after ``to_empty()`` gives the numbers of one device if all ranks have the same seed.

    A module built inside ``vescale.deferred_init()`` needs no :func:`vescale.materialize`: each rank computes only its part
    of every parameter, and buffers whole. (One all-reduce of 16 bytes on each axis tells whether the ranks recorded alike.)

    Returns ``module``, whose class is now also an :class:`FSDPModule`.

    Raises:
        ValueError: a container without forward; a mesh that is neither FSDP's nor HSDP's; a parameter that a group of
            another module has taken (tied weights); a module that was given before; a tensor subclass with one of the two
            all-gather hooks; an optimizer that holds none of the parameters, or whose states have other shapes.
        NotImplementedError: a tensor subclass that would be sharded in another way than into chunks of dim 0 (the first
            forward raises it for one without hooks).
        RuntimeError: ranks that recorded other constructors or seeds, of a deferred module.
    """
    optimizers = listed_optimizers(optimizer, "fully_shard")
    install_placements()
    install_model_parts()
    enable_random_ops()  # for reset_parameters() on shards, after to_empty()
    modules = _roots(module)
    before = RegisteredParameters(modules)
    axes = _axes(mesh, dp_mesh_dims)
    ignored = {*(ignored_params or ()), *_replicated_parameters(modules)}
    named = _named_parameters(modules, ignored)
    _refuse_plans(modules, axes)
    before.refuse_hooks("fully_shard", ignored)
    check_optimizers(optimizers, named, "fully_shard")
    _move_to_device(modules, [parameter for _, parameter in named], axes.device)
    for name, parameter in named:
        taken = getattr(parameter, _MANAGED_BY, None)
        if taken is not None:
            raise FullyShardError(
                f"parameter {name!r} of {type(modules[0]).__name__} is tied to {taken}, which fully_shard has already "
                "put into another group; pass the modules that share it in a single call, fully_shard([a, b]), or "
                "leave the inner module to the outer call"
            )
    deferred = any(has_deferred(one) for one in modules)
    if deferred:
        check_recorded_alike(axes.mesh, [parameter for _, parameter in named if is_deferred(parameter)])
    groups = []
    for group_axes, members in _by_mesh(modules, named, axes, shard_placement_fn, orig_param_policy):
        after_forward = _checked_reshard(True if reshard_after_forward is None else reshard_after_forward, group_axes)
        groups.append(
            ParameterGroup(
                members,
                group_axes,
                reshard_after_forward=after_forward,
                mp_policy=mp_policy,
                offload_policy=offload_policy,
                alignment_bytes=alignment_bytes,
                path=", ".join(type(m).__name__ for m in modules),
            )
        )
    for name, parameter in named:
        setattr(parameter, _MANAGED_BY, f"{name!r} of {type(modules[0]).__name__}")
    for _, own in _own_modules(modules):
        mark_as_managed(own)
    state = ModuleState(
        modules,
        groups,
        mp_policy=mp_policy,
        device=axes.device,
        reshard_root=None if reshard_after_forward is None else bool(reshard_after_forward),
        ignored=[slot for slots in find_slots(modules, list(ignored)).values() for slot in slots],
    )
    watch_draws(groups)
    give_methods(state, for_torch=True)
    if deferred:
        for one in modules:
            materialize(one, device=axes.device)  # buffers, tensors in attributes, ignored parameters: whole
    del named, groups
    before.mark_replaced("fully_shard")
    adopt_optimizers(optimizers)
    return module


def _state(module: nn.Module) -> ModuleState | None:
    """``fully_shard.state``, as FSDP2 has it: what was made of a module, None for one that ``fully_shard`` was not given.
    The function of PyTorch gives the same."""
    return state_of(module)


fully_shard.state = _state  # type: ignore[attr-defined]


def give_methods(state: ModuleState, *, for_torch: bool = False) -> None:
    """Make the modules of a state :class:`FSDPModule`, with all its methods, beside what they are. ``for_torch``: PyTorch,
    and code that checks its classes, treats them as FSDP2's, whose gradients can be accumulated and then reduced apart."""
    for one in state.modules:
        note("fsdp._api:class", one)
        one.__class__ = _sharded_class(type(one), for_torch)
        if for_torch:
            register_fsdp2_state(one, state)


_CLASSES: dict[tuple[type, bool], type] = {}


def _sharded_class(original: type, for_torch: bool) -> type:
    """One for each class: ``FSDP<name>`` as FSDP2's, else with the name of the original, by which tools know a model."""
    made = _CLASSES.get((original, for_torch))
    if made is None:
        bases = (FSDPModule, FSDP2Module, original) if for_torch else (FSDPModule, original)
        members = {"__module__": original.__module__, "_original": original}
        name = f"FSDP{original.__name__}" if for_torch else original.__name__
        made = _CLASSES[original, for_torch] = _kind_of_class(type(original))(name, bases, members)
    return made


@functools.cache
def _kind_of_class(kind: type) -> type:
    """Of classes whose attributes are the original's: ``type(self).count += 1`` counts for all instances."""

    def put(cls: Any, name: str, value: Any) -> None:
        setattr(cls._original, name, value)

    def drop(cls: Any, name: str) -> None:
        delattr(cls._original, name)

    return type(kind.__name__, (kind,), {"__setattr__": put, "__delattr__": drop})


def _roots(module: Any) -> list[nn.Module]:
    """The given modules without those that are inside of another one."""
    given = [module] if isinstance(module, nn.Module) else list(module)
    if not given:
        raise FullyShardError("fully_shard got an empty list; pass at least one module")
    for one in given:
        if isinstance(one, nn.ModuleList | nn.ModuleDict) and type(one).forward is nn.Module.forward:
            raise FullyShardError(
                f"fully_shard got {kind_of(one)}, which has no forward for which parameters could be gathered; pass "
                "the modules that it contains, one by one or as a list"
            )
        if state_of(one) is not None:
            raise FullyShardError(
                f"fully_shard has already been called for this {type(one).__name__}; pass each module once"
            )
        if is_replicated(one):
            raise FullyShardError(
                f"fully_shard was given {kind_of(one)} to which replicate has been applied; expected only one of the "
                "two: shard the module, or leave it out"
            )
    inside = {id(child) for one in given for child in one.modules() if child is not one}
    return [one for one in dict.fromkeys(given) if id(one) not in inside]


def _axes(mesh: DeviceMesh | None, named: DataParallelMeshDims | None) -> DataParallelAxes:
    if mesh is None:
        if not dist.is_initialized():
            dist.init_process_group()
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        mesh = init_device_mesh(accelerator.type if accelerator is not None else "cpu", (dist.get_world_size(),))
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentTypeError(
            f"mesh is {mesh!r}, {kind_of(mesh)}; pass a DeviceMesh (init_device_mesh), or leave it out to use all ranks"
        )
    if named is None:
        return DataParallelAxes.of_mesh(mesh)
    return DataParallelAxes.of_named(mesh, named.shard_names, named.replicate_names)


def _own_modules(roots: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """The modules whose parameters belong to this call: not below one that was given to an earlier call, or to PyTorch's
    ``replicate``."""
    seen: set[int] = set()

    def visit(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen or state_of(module) is not None or is_replicated(module):
            return
        seen.add(id(module))
        if fsdp2_state(module) is not None:
            where = f"{path!r}, {kind_of(module)}" if path else f"{kind_of(module)}"
            raise FullyShardError(
                f"fully_shard was given {where} that torch.distributed.fsdp.fully_shard has sharded; use one of the "
                "two functions for the whole model"
            )
        yield path, module
        for name, child in module.named_children():
            yield from visit(f"{path}.{name}" if path else name, child)

    for number, root in enumerate(roots):
        yield from visit("" if len(roots) == 1 else str(number), root)


def _refuse_plans(roots: Sequence[nn.Module], axes: DataParallelAxes) -> None:
    """Raises FullyShardError for a model that ``parallelize`` has on a mesh with several of the ranks that share shards:
    both would reduce its gradients."""
    group = set(axes.data_parallel_ranks)
    for path, module in _own_modules(roots):
        parameters: Iterable[nn.Parameter] = module.parameters(recurse=False) if is_refusing(module) else ()
        mesh = next((p.device_mesh for p in parameters if isinstance(p, DTensor)), None)
        if mesh is not None and len(group.intersection(mesh.mesh.flatten().tolist())) > 1:
            where = f"{path!r}, {kind_of(module)}" if path else f"{kind_of(module)}"
            raise FullyShardError(
                f"fully_shard was given {where} of a parallelized model, whose plan distributes it over the ranks of "
                f"{mesh}, and reduces its gradients there: let the plan shard it, {{axis: {{init: Ragged, run: R}}}} "
                "(docs/plans.md, ZeRO); or parallelize on mesh['tp'] alone, and pass mesh['dp'] to fully_shard"
            )


def _replicated_parameters(roots: Sequence[nn.Module]) -> Iterator[nn.Parameter]:
    for root in roots:
        for module in root.modules():
            if is_replicated(module):
                yield from module.parameters()


def _named_parameters(roots: Sequence[nn.Module], ignored: set[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    found: dict[nn.Parameter, str] = {}
    for path, module in _own_modules(roots):
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in ignored and parameter not in found:
                found[parameter] = f"{path}.{name}" if path else name
    return [(name, parameter) for parameter, name in found.items()]


def _move_to_device(roots: Sequence[nn.Module], parameters: Iterable[nn.Parameter], device: torch.device) -> None:
    buffers = (buffer for _, module in _own_modules(roots) for buffer in module.buffers(recurse=False))
    for tensor in itertools.chain(parameters, buffers):
        if tensor.device == device or tensor.is_meta or isinstance(tensor, DTensor):
            continue
        if is_extended(tensor):
            with torch.no_grad():
                moved = nn.Parameter(tensor.to(device), requires_grad=tensor.requires_grad)
            note("fsdp._api:torch", tensor)
            torch.utils.swap_tensors(tensor, moved)
        else:
            tensor.data = tensor.to(device)


def _by_mesh(
    roots: Sequence[nn.Module],
    named: Sequence[tuple[str, nn.Parameter]],
    axes: DataParallelAxes,
    placement_fn: Callable[[nn.Parameter], Any] | None,
    policy: BlockPolicy | None,
) -> list[tuple[DataParallelAxes, list[GroupMember]]]:
    """The parameters by the axes they are sharded over."""
    slots = find_slots(roots, [parameter for _, parameter in named])
    found: dict[DataParallelAxes, list[GroupMember]] = {}
    for name, parameter in named:
        given, own_axes = None, axes
        if placement_fn is not None:
            given, own_axes = _placement(name, parameter, placement_fn(parameter), axes)
        block = policy(name, parameter) if policy is not None else None
        found.setdefault(own_axes, []).append(GroupMember(name, parameter, slots[parameter], block, given))
    return list(found.items())


def _placement(
    name: str, parameter: nn.Parameter, wanted: Any, axes: DataParallelAxes
) -> tuple[Shard | None, DataParallelAxes]:
    """(``Shard(dim)`` or None, axes) from what ``shard_placement_fn`` returned."""
    info = getattr(wanted, "mesh_info", None)
    if info is not None:
        replicate = getattr(info, "replicate_mesh_dim", None)
        if info.shard_mesh_dim is not None:
            axes = DataParallelAxes(info.mesh, info.shard_mesh_dim, () if replicate is None else (replicate,))
        wanted = wanted.placement
    if wanted is None:
        return None, axes
    if not isinstance(wanted, Shard) or not -parameter.ndim <= wanted.dim < parameter.ndim:
        raise FullyShardError(
            f"shard_placement_fn returned {wanted!r} for {name!r} of shape {tuple(parameter.shape)}; expected None, "
            "or Shard(dim) with a dim of that tensor"
        )
    return Shard(wanted.dim % parameter.ndim), axes


def _checked_reshard(wanted: bool | int, axes: DataParallelAxes) -> bool | int:
    if isinstance(wanted, bool):
        return wanted
    size = axes.shard_size
    if not isinstance(wanted, int) or wanted < 1 or size % wanted:
        raise FullyShardError(
            f"reshard_after_forward is {wanted!r}; expected True, False, or a number of ranks that divides the {size} "
            "ranks of the shard axis"
        )
    if wanted == 1:
        return False
    return True if wanted == size else wanted

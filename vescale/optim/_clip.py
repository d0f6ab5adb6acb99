"""``clip_grad_norm_`` for gradients on any meshes, in any placements: the norm and the gradients of one device."""

from __future__ import annotations

import functools
import gc
import inspect
import math
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Placement
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from vescale.comm import AxisGroup, Pending, all_gather_v, all_reduce, axis_group, record
from vescale.compat import (
    AsyncCollectiveTensor,
    DTensorSpec,
    foreach_mul_,
    foreach_norm,
    has_foreach,
    install_part,
    local_of,
    note,
    own_part,
    spec_of,
)
from vescale.errors import ArgumentTypeError, OptimizerError, PipelineCallError, kind_of
from vescale.gradients import StageShare, pipeline_groups, reduce_pending, shares_of, shares_of_gradients

# The norm of the gradients of a model in stages, from the norms of each rank's.


def norm_over_stages(
    shares: Sequence[StageShare | None],
    order: float,
    norm_of: Callable[[Sequence[int]], torch.Tensor],
    groups: Iterable[dist.ProcessGroup] = (),
) -> torch.Tensor:
    """The norm of all gradients, of which some may be a part of models in stages.

    Communication: one number for each such model, over the ranks of its stages.

    Args:
        shares: for each gradient, what it is a part of; None: of no model in stages.
        order: of the norm.
        norm_of: the norm of the gradients with these numbers, as far as this rank's stages have them.
        groups: of the ranks of other models whose other stages may have gradients.
    """
    of_group: dict[dist.ProcessGroup, list[int]] = {group: [] for group in groups}
    others: list[int] = []
    for index, share in enumerate(shares):
        if share is None:
            others.append(index)
        else:
            of_group.setdefault(share.group, []).extend([index] if share.counts else [])
    if not of_group:
        return norm_of(others)
    known = pipeline_groups()
    norms = []
    for group, indices in of_group.items():
        own = norm_of(indices) if indices else torch.tensor(math.inf if order < 0 else 0.0)
        norms.append(_over_ranks(own.to(known[group].device), group, order))
    if others:
        norms.append(norm_of(others))
    return _combined(norms, order)


def stages_that_wait() -> dict[dist.ProcessGroup, torch.Tensor]:
    """For a rank that has no gradient to give: while one model in stages exists, the ranks of its other stages wait for this
    one. Their group, with a parameter of the model.

    Raises OptimizerError where several models in stages exist.
    """
    groups = pipeline_groups()
    if len(groups) > 1:
        gc.collect()  # models that are gone, and only hold each other
        groups = pipeline_groups()
    if len(groups) > 1:
        raise OptimizerError(
            f"no gradients were passed, and there are {len(groups)} models in stages: it is not known whose other "
            "stages wait for this rank. Pass the parameters themselves, including those without a gradient: "
            "vescale.optim.clip_grad_norm_(model.parameters(), ...)"
        )
    return groups


def _over_ranks(norm: torch.Tensor, group: dist.ProcessGroup, order: float) -> torch.Tensor:
    number = norm.double()
    gathered = [torch.empty_like(number) for _ in range(dist.get_world_size(group))]
    with record("all_gather", group.size(), number.nbytes * group.size(), requester="norm over stages", group=group):
        dist.all_gather(gathered, number, group=group)  # a maximum that is reduced may lose nan
    return _combined(gathered, order)


def _combined(norms: Sequence[torch.Tensor], order: float) -> torch.Tensor:
    every = torch.stack([norm.double().to(norms[0].device) for norm in norms])
    if math.isinf(order):
        return every.amax() if order > 0 else every.amin()
    if order == 0:
        return every.sum()
    return every.pow(order).sum().pow(1 / order)


# The norm of tensors whose parts are on different ranks of different meshes.

_REQUESTER = "norm of gradients"


def parts_of(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[AxisGroup | None]]:
    """(this rank's part of each tensor, maybe empty; the ranks that hold the other parts, None where it has all of them)

    Raises ValueError on a rank outside of a tensor's mesh, and for a pending reduction.
    """
    locals_, groups = [], []
    known: dict[tuple[int, tuple[Placement, ...]], AxisGroup | None] = {}
    for tensor in tensors:
        group = None
        if isinstance(tensor, DTensor):
            spec, tensor = spec_of(tensor), local_of(tensor)
            key = id(spec.mesh), spec.placements
            group = known[key] if key in known else known.setdefault(key, _ranks_of(spec))
            if isinstance(tensor, AsyncCollectiveTensor):
                tensor = tensor.wait()
        locals_.append(tensor)
        groups.append(group)
    return locals_, groups


def _ranks_of(spec: DTensorSpec) -> AxisGroup | None:
    mesh, placements = spec.mesh, spec.placements
    if mesh.get_coordinate() is None:
        raise OptimizerError(
            f"a gradient of shape {tuple(spec.shape)} is on {mesh}, which rank {dist.get_rank()} is not part of, so "
            "that it cannot compute that gradient's part of the norm; pass gradients of a rank's own meshes only, "
            "and combine the results of get_total_norm() over all ranks"
        )
    axes = tuple(
        axis for axis, placement in enumerate(placements) if not placement.is_replicate() and mesh.size(axis) > 1
    )
    if any(placements[axis].is_partial() for axis in axes):
        raise OptimizerError(
            f"the norm of a pending reduction {placements} cannot be computed from its parts; reduce it first"
        )
    return axis_group(mesh, axes) if axes else None


def result_dtype(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """The dtype that the norm has on one device: real, and wide enough for all."""
    dtypes = {tensor.dtype for tensor in tensors}
    if not dtypes:
        return torch.get_default_dtype()
    return functools.reduce(torch.promote_types, (dtype.to_real() for dtype in dtypes))


def total_norm(
    locals_: Sequence[torch.Tensor], groups: Sequence[AxisGroup | None], order: float, foreach: bool | None = None
) -> torch.Tensor:
    """The norm of order ``order`` of all parts of all ranks together; the same number on every rank of a group.

    One collective for each distinct set of ranks, all started before the first is waited for: of one number, or for order
    0 of one number a tensor. Numbers are combined in float64, so that meshes do not show. The result is float32, float64 for
    float64 tensors.

    Args:
        locals_: this rank's parts.
        groups: for each part, the ranks that hold the others (:func:`parts_of`).
        order: any number.
        foreach: as in ``clip_grad_norm_``.
    """
    if not locals_:
        return torch.tensor(0.0)
    device = locals_[0].device
    by_ranks: dict[frozenset[int], list[int]] = defaultdict(list)
    for index, group in enumerate(groups):
        by_ranks[group.ranks if group is not None else frozenset()].append(index)
    pending = []
    for indices in by_ranks.values():
        numbers = _contribution([locals_[index] for index in indices], order, foreach)
        pending.append(_combine(numbers, groups[indices[0]], order))
    combined = torch.cat([_finished(p, order).to(device) for p in pending])
    if order == 0:
        total = torch.count_nonzero(combined).double()
    elif math.isinf(order):
        total = combined.amax() if order > 0 else combined.amin()
    else:
        total = combined.sum()
        total = total.sqrt() if order == 2 else total.pow(1 / order)
    return total.to(torch.promote_types(result_dtype(locals_), torch.float32))


def _contribution(locals_: Sequence[torch.Tensor], order: float, foreach: bool | None) -> torch.Tensor:
    """What this rank adds for the tensors of one group, in float64 on the first one's device: a sum of powers, an extremum,
    or for order 0 whether each tensor has an element that is not zero. No list of indices, for which the host would wait for
    the device."""
    device = locals_[0].device
    if order == 0:
        return torch.stack([local.ne(0).any().to(device) for local in locals_]).double()
    norms = _local_norms(locals_, order, foreach)
    if not norms:
        return torch.full((1,), math.inf if order == -math.inf else 0.0, dtype=torch.float64, device=device)
    chosen = norms[0] if len(norms) == 1 else torch.cat(norms)
    if math.isinf(order):
        return (chosen.amax() if order > 0 else chosen.amin()).view(1)
    return chosen.pow(order).sum().view(1)


def _local_norms(locals_: Sequence[torch.Tensor], order: float, foreach: bool | None) -> list[torch.Tensor]:
    """The norms of the parts that are not empty, for which some orders are not defined; computed in at least float32, as
    float64 on the first one's device. One tensor for each kind of parts."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for local in locals_:
        if local.numel():
            kinds[local.device, local.dtype].append(local)
    norms = []
    for (_, dtype), group in kinds.items():
        wide = torch.promote_types(dtype.to_real(), torch.float32)
        if foreach is not False and has_foreach(group):
            found = foreach_norm(group, order, wide)
        elif dtype.is_complex:
            found = [torch.linalg.vector_norm(local, order) for local in group]
        else:
            found = [torch.linalg.vector_norm(local, order, dtype=wide) for local in group]
        norms.append(torch.stack(found).to(locals_[0].device, torch.float64))
    return norms


def _combine(numbers: torch.Tensor, group: AxisGroup | None, order: float) -> Pending:
    if group is None:
        return Pending(numbers)
    if math.isinf(order):  # gathered, because an all-reduced maximum may lose nan
        return all_gather_v(numbers, [1] * group.size, group.group, requester=_REQUESTER)
    return all_reduce(numbers, "sum", group.group, requester=_REQUESTER)


def _finished(pending: Pending, order: float) -> torch.Tensor:
    numbers = pending.wait()
    if not math.isinf(order):
        return numbers
    return (numbers.amax() if order > 0 else numbers.amin()).view(1)


_Tensors = torch.Tensor | Iterable[torch.Tensor]


@torch.no_grad()
def clip_grad_norm_(
    parameters: _Tensors,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale all gradients so that their norm, taken together as one vector, is at most ``max_norm``; in place.

    Does to the gradients what ``torch.nn.utils.clip_grad_norm_`` does to those of the same model on one device. They may
    be on several meshes with any placements; a plain tensor is taken as one that is the same on every rank.

    ====================  =======================================================================================
    gradient              communication
    ====================  =======================================================================================
    plain, Replicate      none
    sharded in any way    one reduction of one number for each distinct set of ranks that hold different parts
    Partial               is reduced first, all over the same ranks with the same op and dtype in one all-reduce, and
                          ``grad`` is then the reduced gradient, Replicate where it was Partial
    of a pipeline         one number more, over the ranks of all stages, all of which call this (also with none, where a
                          rank's stages have no such parameters); a parameter that several stages have counts once
    ====================  =======================================================================================

    The host waits for the device once with ``error_if_nonfinite``, and never without.

    Args:
        parameters: a tensor or an iterable of tensors. A gradient that is missing on all ranks is skipped, one that some
            lack counts as nothing there.
        max_norm: the largest norm that stays as it is.
        norm_type: the order p, any number, or ``inf`` and ``-inf``. As in PyTorch, 0 counts the *gradients* that have an
            element other than zero.
        error_if_nonfinite: raise when the norm is nan or inf; the gradients are then as they were (Partial ones are
            reduced).
        foreach: multi-tensor kernels; None: where there are such.

    Returns the norm before clipping: a plain 0-dim tensor, the same on every rank, that needs no ``full_tensor()``.

    Raises:
        TypeError: something that is no tensor.
        RuntimeError: a norm that is not finite, if asked to; foreach kernels where there are none.
        ValueError: a gradient on a mesh that this rank is not part of, whose part of the norm it could not learn.
    """
    listed = _listed(parameters, "clip_grad_norm_")
    owned = [(parameter, gradient) for parameter in listed if (gradient := parameter.grad) is not None]
    gradients = reduce_pending([gradient for _, gradient in owned])
    for (parameter, before), gradient in zip(owned, gradients):
        if before is not gradient:
            parameter.grad = gradient
    shares = dict(zip(map(id, listed), shares_of(listed)))
    waiting = {} if listed else stages_that_wait()
    of_models = {share.group for share in shares.values() if share is not None} or waiting
    # A gradient that only other ranks have: this one takes part in the reductions of its ranks.
    absent = [p for p in listed if p.grad is None and p.requires_grad and isinstance(p, DTensor)]
    of_gradients = [shares[id(parameter)] for parameter in (*(p for p, _ in owned), *absent)]
    locals_, norm = _norm(gradients, of_gradients, of_models, norm_type, error_if_nonfinite, foreach, absent)
    _scale(locals_, max_norm, norm, foreach)
    return norm.to(result_dtype(gradients or listed or list(waiting.values())))


@torch.no_grad()
def get_total_norm(
    tensors: _Tensors, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
) -> torch.Tensor:
    """The norm of all tensors (gradients, not parameters) together; they stay as they are.

    Arguments, result, errors and communication as in :func:`clip_grad_norm_`. A copy of Partial tensors is reduced.

    Gradients of a model in stages are recognised; the norm is over all stages.

    Args:
        tensors: gradients, for example.
        norm_type, error_if_nonfinite, foreach: as of :func:`clip_grad_norm_`.
    """
    listed = _listed(tensors, "get_total_norm")
    waiting = {} if listed else stages_that_wait()
    shares = shares_of_gradients(listed)
    gradients = reduce_pending(listed)
    _, norm = _norm(gradients, shares, waiting, norm_type, error_if_nonfinite, foreach)
    return norm.to(result_dtype(gradients or list(waiting.values())))


@torch.no_grad()
def clip_grads_with_norm_(
    parameters: _Tensors, max_norm: float, total_norm: torch.Tensor, foreach: bool | None = None
) -> None:
    """Scale gradients by ``min(1, max_norm / (total_norm + 1e-6))`` in place, with a norm taken before.

    Communicates nothing: Partial gradients stay so, scaled. Takes the ``total_norm`` of :func:`get_total_norm`, so that
    one may be computed over several sets of parameters. Raises RuntimeError for foreach kernels where there are none.

    Args:
        parameters: those whose ``.grad`` is scaled.
        foreach: whether kernels take lists of tensors. None: where they can.
    """
    listed = _listed(parameters, "clip_grads_with_norm_")
    if isinstance(total_norm, DTensor):
        total_norm = total_norm.full_tensor()
    gradients = [gradient for parameter in listed if (gradient := parameter.grad) is not None]
    _scale([_local(gradient) for gradient in gradients], max_norm, total_norm, foreach)


def _listed(tensors: _Tensors, caller: str) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    was_iterator = isinstance(tensors, Iterator)
    listed = list(tensors)
    if was_iterator and not listed:
        warnings.warn(
            f"{caller} got an exhausted iterator, so that no gradient would be clipped; call `model.parameters()` "
            "again each time, or pass a list",
            UserWarning,
            stacklevel=4,
        )
    for found in listed:
        if not isinstance(found, torch.Tensor):
            raise ArgumentTypeError(f"{caller} got {kind_of(found)} among its tensors; pass `model.parameters()`")
    return listed


def _local(gradient: torch.Tensor) -> torch.Tensor:
    local = own_part(gradient)
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _norm(
    gradients: Sequence[torch.Tensor],
    shares: Sequence[StageShare | None],
    of_models: Iterable[dist.ProcessGroup],
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
    absent: Sequence[torch.Tensor] = (),
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """(this rank's part of each gradient, the norm); ``absent``: parameters whose gradient this rank does not have, with
    shares behind those of the gradients."""
    order = float(norm_type)
    locals_, groups = parts_of(gradients)
    _check_foreach(locals_, foreach)
    of_absent, their_groups = parts_of(absent)
    parts, ranks = [*locals_, *(local.reshape(-1)[:0] for local in of_absent)], [*groups, *their_groups]

    def norm_of(indices: Sequence[int]) -> torch.Tensor:
        chosen = [n for n in indices if n < len(locals_) or ranks[n] is not None]
        return total_norm([parts[n] for n in chosen], [ranks[n] for n in chosen], order, foreach)

    norm = norm_over_stages(shares, order, norm_of, of_models)
    _refuse_nonfinite(norm, order, error_if_nonfinite)
    return locals_, norm


def _refuse_nonfinite(norm: torch.Tensor, order: float, error_if_nonfinite: bool) -> None:
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise OptimizerError(
            f"The total norm of order {order} for gradients from `parameters` is non-finite, so it cannot be clipped. To "
            "disable this error and scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
        )


def _scale(locals_: Sequence[torch.Tensor], max_norm: float, norm: torch.Tensor, foreach: bool | None) -> None:
    """Multiplies by 1 too, as PyTorch does: asking whether it is needed would make the host wait."""
    factor = torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0)
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for local in locals_:
        kinds[local.device, local.dtype].append(local)
    for (device, _), together in kinds.items():
        _check_foreach(together, foreach)
        if foreach is not False and has_foreach(together):
            foreach_mul_(together, factor.to(device))
        else:
            for local in together:
                local.mul_(factor.to(device))


def _check_foreach(locals_: Sequence[torch.Tensor], foreach: bool | None) -> None:
    if foreach and not has_foreach(locals_):
        kinds = sorted({f"{type(t).__name__} on {t.device.type}" for t in locals_ if not has_foreach([t])})
        raise OptimizerError(f"foreach=True, but there are no multi-tensor kernels for {kinds}; leave foreach out")


# ``clip_grad_norm_``, ``get_total_norm`` and ``GradScaler`` of PyTorch look at the gradients of all stages of a
# model.


# Optimizers whose step of one parameter depends on other parameters: with those of a rank's stages alone they compute
# something else than on one device, without a word. Whether one does is tried, with two small parameters.

_SEEN: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_NUM_STEPS = 3


def refuse_coupled_steps() -> None:
    """From now on, before the first step of an optimizer that has parameters of a model in stages; called once in a process.
    PipelineCallError is raised on every rank."""
    note("optim._clip:torch", "torch.optim.optimizer._global_optimizer_pre_hooks")
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _SEEN:
        return
    _SEEN.add(optimizer)
    if not any(shares_of([p for group in optimizer.param_groups for p in group["params"]])):
        return
    if not getattr(optimizer, "knows_stages", False) and _is_coupled(optimizer):
        name = type(optimizer).__name__
        raise PipelineCallError(
            f"pipeline: {name} computes the step of each parameter from all parameters, but this rank has only those "
            "of its stages, so that the result would differ from one device; use an optimizer that treats parameters "
            f"independently (SGD, AdamW, vescale.optim.Muon), or {name} with a plan without a pipeline"
        )


def _is_coupled(optimizer: Optimizer) -> bool:
    """False for one that cannot be made, or cannot step, like this."""
    own = [torch.tensor([[1.0, -2.0], [0.5, 3.0]]), torch.tensor([[40.0, 10.0], [-20.0, 70.0]])]
    try:
        with torch.random.fork_rng(devices=()):
            together = _stepped(optimizer, own)
            apart = [value for one in own for value in _stepped(optimizer, [one])]
    except (TypeError, ValueError, AttributeError, KeyError, RuntimeError):
        return False
    return not all(torch.allclose(one, other, rtol=1e-9) for one, other in zip(together, apart, strict=True))


def _stepped(optimizer: Optimizer, values: list[torch.Tensor]) -> list[torch.Tensor]:
    kind: Any = type(optimizer)
    taken = inspect.signature(kind.__init__).parameters
    parameters = [nn.Parameter(value.double()) for value in values]
    made = kind(parameters, **{name: value for name, value in optimizer.defaults.items() if name in taken})

    arguments = inspect.signature(made.step).parameters.values()
    needs_closure = any(a.default is a.empty and a.kind is a.POSITIONAL_OR_KEYWORD for a in arguments)

    def closure() -> torch.Tensor:
        made.zero_grad()
        loss = sum((parameter.square() * 0.3 + parameter.sin()).sum() for parameter in parameters)
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        return loss

    with torch.enable_grad():
        for _ in range(_NUM_STEPS):
            closure()
            made.step(*((closure,) if needs_closure else ()))
    return [parameter.detach() for parameter in parameters]


_INSTALLED: list[bool] = []  # hooks of optimizers


class _OverStages:
    """In place of what PyTorch computes of this rank's gradients, for models in stages; none at all may be those of a stage
    without any."""

    total_norm = staticmethod(get_total_norm)

    @staticmethod
    def concern(gradients: Sequence[torch.Tensor]) -> bool:
        return any(shares_of_gradients(gradients)) if gradients else bool(pipeline_groups())

    @staticmethod
    def share_overflow(parameters: Sequence[torch.Tensor], flags: Sequence[torch.Tensor]) -> bool:
        groups = dict.fromkeys(share.group for share in shares_of(parameters) if share is not None)
        known = pipeline_groups()
        for group in groups:
            found = torch.stack([flag.to(known[group].device) for flag in flags]).amax()
            with record("all_reduce", group.size(), found.nbytes, requester="overflow in any stage", group=group):
                dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
            for flag in flags:
                flag.copy_(found)
        return bool(groups)


def extend_torch_for_stages() -> None:
    """Once in a process; see the part ``stages`` of the table of patches."""
    if not _INSTALLED:
        _INSTALLED.append(True)
        refuse_coupled_steps()
    install_part("stages", _OverStages())

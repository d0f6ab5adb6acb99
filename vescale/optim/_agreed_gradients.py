"""The gradients of a step, of which all ranks that hold a parameter have one or none has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

import torch
from torch.distributed.tensor import DTensor

from vescale.comm import all_gather_v, all_reduce_, axis_group, group_of_ranks
from vescale.compat import AsyncCollectiveTensor, local_of, spec_of, without_modes
from vescale.errors import MissingGradientError, kind_of
from vescale.gradients import reduce_pending
from vescale.optim._holders import replica_axes
from vescale.optim._linked_ranks import all_finite
from vescale.optim._matrix_parameters import MatrixParameter, local_tensor

__all__ = ["agreed_gradients"]

# What a rank has of a gradient, in the order in which one hides another when ranks compare.
_NONE, _LIKE_PARAMETER, _ELSEWHERE, _UNUSABLE = range(4)


def agreed_gradients(
    parameters: Sequence[MatrixParameter], *, compare: Collection[frozenset[int]], linked: tuple[int, ...] | None = None
) -> dict[int, torch.Tensor] | None:
    """The local tensor of each gradient, placed like its parameter, by the parameter's number.

    A gradient that is missing on this rank and present on others is one of zeros, or that of a replica; what no rank
    has is left out. None: ``linked``, ranks that take no step if a gradient of one of them is not finite, are given, and
    one has such a gradient.

    Communication: one all-reduce of two bytes a parameter for each set of ranks that parameters are on, as a rule one, if
    it is part of a set in ``compare``, which its ranks know alike. With ``linked`` for all sets, and one of a byte where
    parameters are on no set of just these ranks, or gradients are placed otherwise. Gradients with other placements than
    their parameter are brought to them. Of a gradient that some ranks lack, replicas that have it give it to those that
    lack it.

    Raises:
        RuntimeError: a parameter that is frozen on some ranks only; a gradient that is sparse, complex, of another shape, or
            a plain tensor for a DTensor; one that is placed otherwise than its parameter on some ranks and missing on
            others. With ``compare`` on every rank.
    """
    found = [_status(parameter) for parameter in parameters]
    statuses = [status for status, _ in found]
    agreed, missing = list(statuses), [status == _NONE for status in statuses]
    finite = _are_finite(_gradient_of(p) for p in parameters) if linked is not None else True
    told = False
    if compare or linked is not None:
        agreed, missing, finite, told = _compared(parameters, statuses, finite, linked, compare)
    for parameter, status, (own, problem), lacks in zip(parameters, agreed, found, missing):
        if status == _UNUSABLE:
            raise MissingGradientError(
                f"parameter {parameter.name!r} of shape {parameter.place.shape}: "
                + (
                    problem
                    if own == _UNUSABLE
                    else "another rank reports that its gradient cannot be used; see its error"
                )
            )
        if status == _ELSEWHERE and lacks:
            raise MissingGradientError(
                f"parameter {parameter.name!r}: its gradient is missing on some ranks, and placed otherwise than the "
                f"parameter ({parameter.place.placements}) on others; give every rank a gradient, or place "
                "gradients as parameters"
            )
    if told and not finite:
        return None
    moved = [p for p, status in zip(parameters, agreed) if status == _ELSEWHERE]
    _place_like_parameters(moved)
    if linked is not None and (moved or not told):  # sums may overflow that were of finite numbers
        finite = finite and _are_finite(p.tensor.grad for p in moved)
        device = parameters[0].local.device if parameters else torch.device("cpu")
        if not all_finite(finite, linked, device):
            return None
    gradients = {}
    for parameter, status, lacks in zip(parameters, agreed, missing):
        if status == _NONE:
            continue
        gradient = _gradient_of(parameter)
        local = torch.zeros_like(parameter.local) if gradient is None else local_tensor(gradient)
        local = local.wait() if isinstance(local, AsyncCollectiveTensor) else local
        if lacks and parameter.place.mesh is not None:
            local = _of_replicas(parameter, local, gradient is not None)
        gradients[parameter.number] = local
    return gradients


def _of_replicas(parameter: MatrixParameter, local: torch.Tensor, is_there: bool) -> torch.Tensor:
    """The part that the first replica with a gradient has; zeros if none has one."""
    mesh = parameter.place.mesh
    assert mesh is not None
    axes = replica_axes(parameter.place.placements, tuple(mesh.shape))
    if not axes:
        return local
    group = axis_group(mesh, axes)
    flag = torch.tensor([is_there], dtype=torch.uint8, device=local.device)
    having = all_gather_v(flag, [1] * group.size, group.group, requester="missing gradients").wait().tolist()
    if not any(having):
        return local
    sizes = [local.numel() if index == having.index(1) else 0 for index in range(group.size)]
    own = local.reshape(-1)[: sizes[group.index]]
    return all_gather_v(own, sizes, group.group, requester="missing gradients").wait().view(local.shape)


def _gradient_of(parameter: MatrixParameter) -> torch.Tensor | None:
    """One that was left when the parameter was frozen does not count."""
    return parameter.tensor.grad if parameter.tensor.requires_grad else None


def _status(parameter: MatrixParameter) -> tuple[int, str]:
    """(what this rank has, what is wrong with it)"""
    gradient, tensor = _gradient_of(parameter), parameter.tensor
    if gradient is None:
        return _NONE, ""
    if gradient.layout != torch.strided or gradient.is_complex():
        return _UNUSABLE, f"its gradient is {gradient.layout} {gradient.dtype}; expected a dense real one"
    if gradient.shape != tensor.shape or isinstance(gradient, DTensor) != isinstance(tensor, DTensor):
        return _UNUSABLE, (
            f"its gradient is {kind_of(gradient)} of shape {tuple(gradient.shape)}; expected a "
            f"{'DTensor' if isinstance(tensor, DTensor) else 'plain tensor'} of the parameter's shape"
        )
    if not isinstance(gradient, DTensor):
        return _LIKE_PARAMETER, ""
    spec = spec_of(gradient)
    if spec.mesh != parameter.place.mesh:
        return _UNUSABLE, f"its gradient is on {spec.mesh}, and the parameter on {parameter.place.mesh}"
    return (_LIKE_PARAMETER if tuple(spec.placements) == parameter.place.placements else _ELSEWHERE), ""


def _compared(
    parameters: Sequence[MatrixParameter],
    statuses: Sequence[int],
    finite: bool,
    linked: tuple[int, ...] | None,
    compare: Collection[frozenset[int]],
) -> tuple[list[int], list[bool], bool, bool]:
    """(the highest status on any rank, whether some rank has no gradient, whether all gradients are finite on ``linked``,
    whether that has been found out: it is where parameters are on these very ranks).

    On all sets of ranks that parameters are on, with ``linked``; otherwise on parts of ``compare``."""
    agreed, missing = list(statuses), [status == _NONE for status in statuses]
    together: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, parameter in enumerate(parameters):
        everywhere = linked is not None or any(each.issuperset(parameter.ranks) for each in compare)
        if len(parameter.ranks) > 1 and everywhere:
            together[tuple(sorted(parameter.ranks))].append(index)
    pending = []
    with without_modes():
        for ranks, indices in sorted(together.items()):
            trained = [parameters[i].tensor.requires_grad for i in indices]
            highest = [statuses[i] + 1 if each else 0 for i, each in zip(indices, trained)]
            lacking = [int(missing[i]) if each else 2 for i, each in zip(indices, trained)]
            device = parameters[indices[0]].local.device
            flags = torch.tensor([*highest, *lacking, int(not finite)], dtype=torch.uint8).to(device)
            group = group_of_ranks(ranks)
            pending.append((indices, all_reduce_(flags, "max", group, requester="gradients of an optimizer")))
        differing: list[str] = []
        for indices, reduction in pending:
            *flags_found, is_infinite = reduction.wait().tolist()
            for index, status, lacks in zip(indices, flags_found, flags_found[len(indices) :]):
                agreed[index], missing[index] = max(status - 1, _NONE), bool(lacks)
                if status and lacks == 2:
                    differing.append(parameters[index].name)
            finite = finite and not is_infinite
    if differing:
        raise MissingGradientError(
            f"parameter {differing[0]!r} is frozen (requires_grad=False) on some ranks and trained on others"
            + (f", and so are {len(differing) - 1} more" if len(differing) > 1 else "")
            + "; set requires_grad alike on every rank"
        )
    return agreed, missing, finite, linked in together


def _are_finite(gradients: Iterable[torch.Tensor | None]) -> bool:
    found: list[torch.Tensor] = []
    for gradient in gradients:
        if gradient is not None and gradient.layout == torch.strided:
            local = local_of(gradient) if isinstance(gradient, DTensor) else gradient
            values = local.wait() if isinstance(local, AsyncCollectiveTensor) else local
            found.append(torch.isfinite(values).all())
    return not found or bool(torch.stack([flag.to(found[0].device) for flag in found]).all())


def _place_like_parameters(parameters: Sequence[MatrixParameter]) -> None:
    """Completes pending sums and moves parts; ``grad`` is then what was computed."""
    gradients = [parameter.tensor.grad for parameter in parameters]
    for parameter, gradient in zip(parameters, reduce_pending([g for g in gradients if g is not None])):
        assert isinstance(gradient, DTensor)
        parameter.tensor.grad = gradient.redistribute(placements=parameter.place.placements)

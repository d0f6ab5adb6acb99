"""``clip_grad_norm_`` for gradients on any meshes, in any placements: the norm and the gradients of one device."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from vescale.compat import AsyncCollectiveTensor, foreach_mul_, has_foreach, local_of
from vescale.errors import ArgumentTypeError, TotalNormError, kind_of
from vescale.gradients import StageShare, reduce_pending, shares_of, shares_of_gradients
from vescale.optim._stage_norms import norm_over_stages, stages_that_wait
from vescale.optim._total_norm import parts_of, result_dtype, total_norm

__all__ = ["clip_grad_norm_", "clip_grads_with_norm_", "get_total_norm"]

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
            f"{caller} got an iterator that has nothing left, so that no gradient is clipped; pass "
            "`model.parameters()` anew each time, or a list",
            UserWarning,
            stacklevel=4,
        )
    for found in listed:
        if not isinstance(found, torch.Tensor):
            raise ArgumentTypeError(f"{caller} got {kind_of(found)} among its tensors; pass `model.parameters()`")
    return listed


def _local(gradient: torch.Tensor) -> torch.Tensor:
    local = local_of(gradient) if isinstance(gradient, DTensor) else gradient
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
        raise TotalNormError(
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
        raise TotalNormError(f"foreach=True, but there are no multi-tensor kernels for {kinds}; leave foreach out")

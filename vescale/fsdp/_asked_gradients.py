"""Gradients that programs ask for by parameter: ``torch.autograd.grad(loss, p)`` and ``backward(inputs=[p])``.

Graphs hold the gathered form of a parameter that a group shards, and programs name the registered, sharded one.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Partial

from vescale.comm import all_reduce_
from vescale.compat import make_dtensor, make_spec
from vescale.compat.model_hooks import ASKED_GRADIENTS, AskedGradients
from vescale.errors import UnsupportedParameterError
from vescale.fsdp._parameter import ManagedParameter, managed_by
from vescale.placements import contiguous_stride, redistribute

__all__: list[str] = []


def _leaves(inputs: Sequence[Any], *, returns_graph: bool) -> list[Any] | None:
    """What a graph has in the place of ``inputs``; None where it has these.

    Raises UnsupportedParameterError where gradients with a graph are asked for.
    """
    found = [managed_by(each) for each in inputs]
    asked = next((managed for managed in found if managed is not None), None)
    if asked is None:
        return None
    if returns_graph:
        raise UnsupportedParameterError(
            f"torch.autograd.grad(..., create_graph=True) of parameter {asked.name!r} of shape {asked.global_shape}, "
            "which fully_shard or a unit of a plan gathers: the reduction over ranks is no part of the graph. Expected "
            "gradients of inputs and activations, create_graph=False, or a plan that keeps this parameter whole "
            "(no entry with phase=INIT)"
        )
    return [
        each if managed is None or managed.unsharded is None else managed.unsharded
        for each, managed in zip(inputs, found, strict=True)
    ]


def _answers(inputs: Sequence[Any], gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """The gradients of ``inputs``, each placed as the parameter, from those of this rank. All ranks ask for the same ones:
    one reduction for each, and for each group of data-parallel ranks one of which ones any rank has."""
    asked = [(index, managed) for index, each in enumerate(inputs) if (managed := managed_by(each)) is not None]
    answers = list(gradients)
    for group in dict.fromkeys(managed.axes.data_parallel.group for _, managed in asked):
        own = [(index, managed) for index, managed in asked if managed.axes.data_parallel.group is group]
        has = [gradients[index] is not None for index, _ in own]
        flags = torch.tensor(has, dtype=torch.uint8, device=own[0][1].axes.device)
        flags = all_reduce_(flags, "max", group, requester="which gradients any rank has").wait()
        with torch.no_grad():
            for (index, managed), any_has in zip(own, flags.tolist(), strict=True):
                answers[index] = _reduced(managed, gradients[index]) if any_has else None
    return tuple(answers)


def _reduced(managed: ManagedParameter, gradient: torch.Tensor | None) -> torch.Tensor:
    assert managed.unsharded is not None
    of_one_loss, axes, local = managed.reduce_op == "sum", managed.axes, None
    if gradient is not None:
        contribution = copy.copy(managed.contribution)
        contribution.leaves_pending = False
        local = contribution.of(gradient, None, of_one_loss=of_one_loss)
    if local is None:
        local = torch.zeros(managed.shape, dtype=managed.unsharded.dtype, device=axes.device)
    if not of_one_loss:
        local = local / (axes.shard_size * axes.num_replicas)
    spec = managed.sharded_spec(Partial(), local.dtype)
    placements = [Partial() if axis in axes.replicate else p for axis, p in enumerate(spec.placements)]
    shape = managed.global_shape
    whole = make_spec(spec.mesh, placements, shape, contiguous_stride(shape), local.dtype)
    own = managed.sharded_placements
    return redistribute(make_dtensor(local.contiguous(), whole), spec.mesh, own).to(managed.sharded.dtype)


ASKED_GRADIENTS.append(AskedGradients(_leaves, _answers))

"""Specs of converted tensors, and what C++ asks about conversions once for each kind (``csrc/conversion.h``,
``csrc/local_regions.h``)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import DTensorSpec, intern_spec, local_of, make_dtensor, make_spec, spec_of, spec_of_result
from vescale.placements import (
    NativeMove,
    contiguous_stride,
    move_local,
    native_move,
    own_region,
    stride_like,
    without_partials,
)

Placements = tuple[Placement, ...]
# None for axes that keep their placement.
Stage = tuple[Placement | None, ...]


def cut(x: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
    """The local part of a tensor that every rank has; a copy unless it is the whole tensor. No communication."""
    replicated = (Replicate(),) * mesh.ndim
    if tuple(placements) == replicated:
        return x
    return move_local(x, mesh, x.shape, replicated, placements).wait()


def plan_move(spec: DTensorSpec, target: Stage) -> tuple[DTensorSpec, NativeMove | None] | None:
    """How C++ brings a DTensor with ``spec`` to ``target``, see :func:`vescale.compat.native_conversions`."""
    complete = tuple(f if t is None else t for f, t in zip(spec.placements, target))
    meta = spec.tensor_meta
    if complete == tuple(spec.placements):
        return spec, None
    if len(target) != len(spec.placements) or meta is None:
        return None
    result = intern_spec(make_spec(spec.mesh, complete, meta.shape, contiguous_stride(meta.shape), meta.dtype))
    move = native_move(spec.mesh, meta.shape, spec.placements, complete, meta.dtype)
    return None if result is None or move is None else (result, move)


def as_summand(grad: DTensor, target: Placements) -> DTensor:
    """Convert ``grad`` from Replicate to Partial on the axes where ``target`` is Partial, by dividing it by the size of the
    axis on every rank. Autograd does the same before it adds a Replicate and a Partial gradient."""
    axes = [axis for axis, (g, t) in enumerate(zip(grad.placements, target)) if g.is_replicate() and t == Partial()]
    if not axes:
        return grad
    spec, local = spec_of(grad), local_of(grad)
    for axis in axes:
        local = local / spec.mesh.size(axis)
    placements = [target[axis] if axis in axes else p for axis, p in enumerate(spec.placements)]
    return make_dtensor(local, make_spec(spec.mesh, placements, spec.shape, spec.stride, local.dtype))


def gradient_spec(grad: torch.Tensor, like: DTensorSpec, placements: Placements | None) -> DTensorSpec:
    """The spec of the gradient of a tensor with the spec ``like``, of which ``grad`` is the local part."""
    placements = without_partials(like.placements) if placements is None else placements
    spec = make_spec(like.mesh, placements, like.shape, stride_like(grad, like.shape), grad.dtype)
    return (
        spec_of_result(spec.mesh, placements, spec.tensor_meta, (like,)) if spec.placements == like.placements else spec
    )


def plan_gradient(*given: Any) -> tuple[DTensorSpec] | None:
    spec = intern_spec(gradient_spec(*given))
    return None if spec is None else (spec,)


def plan_leaving(
    local: torch.Tensor, mesh: DeviceMesh, placements: Placements, shape: Sequence[int]
) -> tuple[DTensorSpec, Placements] | None:
    """The spec of the DTensor around a local tensor, and the default placements of its gradient."""
    spec = intern_spec(make_spec(mesh, placements, shape, stride_like(local, shape), local.dtype))
    return None if spec is None else (spec, without_partials(placements))


def whole_spec(x: torch.Tensor, mesh: DeviceMesh, placements: Placements, held: Sequence[int]) -> DTensorSpec:
    """The spec of a DTensor of a tensor that every rank has, if this rank holds a part of shape ``held``."""
    stride = x.stride() if tuple(held) == tuple(x.shape) else contiguous_stride(x.shape)
    return make_spec(mesh, placements, x.shape, stride, x.dtype)


def plan_cut(
    x: torch.Tensor, mesh: DeviceMesh, placements: Placements
) -> tuple[DTensorSpec, Placements, NativeMove | None] | None:
    """The spec of :func:`wrap_global`'s result, the placements of its gradient, and how C++ cuts the tensor."""
    region, replicated = own_region(x.shape, placements, mesh), (Replicate(),) * mesh.ndim
    spec = None if region is None else intern_spec(whole_spec(x, mesh, placements, region.local_shape))
    if spec is None or placements == replicated:
        return None if spec is None else (spec, replicated, None)
    move = native_move(mesh, x.shape, replicated, placements, x.dtype)
    return None if move is None else (spec, replicated, move)


@functools.lru_cache(maxsize=4096)
def stages_between(
    found: Placements, target: Stage, grad_source: Stage | None, grad_target: Stage | None, passes_gradient: bool
) -> tuple[Stage, tuple[Stage, ...]]:
    """The target, and the placements that the gradient is brought to, one after the other. Equal calls get the same objects,
    by whose addresses C++ remembers what to do."""
    back = tuple(None if t is None else g for t, g in zip(target, without_partials(found)))
    last = back if grad_target is None else tuple(b if g is None else g for b, g in zip(back, grad_target))
    if passes_gradient:
        return target, ()
    return target, (last,) if grad_source is None else (grad_source, last)

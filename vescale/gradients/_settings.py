"""Validation of a reducer's arguments."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vescale.comm import BucketBytes, bucket_limits, link_of
from vescale.errors import ArgumentTypeError, GradientReducerError, kind_of

__all__ = ["check_settings"]


def check_settings(
    module: nn.Module, mesh: DeviceMesh, bucket_bytes: BucketBytes, reduce_dtype: torch.dtype | None, op: str | None
) -> None:
    """Raises TypeError and ValueError for invalid arguments of a reducer, before any communication."""
    if not isinstance(module, nn.Module) or not isinstance(mesh, DeviceMesh):
        raise ArgumentTypeError(
            f"GradientReducer of {kind_of(module)} over {kind_of(mesh)}; give it an nn.Module and a DeviceMesh"
        )
    if op not in (None, "avg", "sum"):
        raise GradientReducerError(f"GradientReducer: op={op!r}; use 'avg', 'sum', or None for what the gradients say")
    if reduce_dtype is not None and not (
        isinstance(reduce_dtype, torch.dtype) and (reduce_dtype.is_floating_point or reduce_dtype.is_complex)
    ):
        raise GradientReducerError(
            f"GradientReducer: reduce_dtype={reduce_dtype!r}; use a floating-point or complex torch.dtype, or None for "
            "each gradient's own"
        )
    if mesh.get_coordinate() is None:
        raise GradientReducerError(
            f"GradientReducer over {mesh}, which this rank is not part of; make it on the mesh's ranks"
        )
    bucket_limits(bucket_bytes, 1, link_of(mesh.device_type))

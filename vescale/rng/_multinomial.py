"""``torch.multinomial`` on DTensors: each rank samples its own rows."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from vescale.compat import local_of, make_dtensor, make_spec, spec_of
from vescale.errors import RandomOpError
from vescale.rng._dtensor_fill import empty_like, fill, outside_mesh, region_of, whole_of
from vescale.rng._random_ops import RandomOp

__all__ = ["multinomial"]


def multinomial(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """``multinomial(self, num_samples, replacement=False, *, generator=None)``; the result is sharded over rows like
    ``self``.

    Communication: an all-gather along axes that shard the categories; with replacement, of all of ``self``.
    """
    weights, num_samples = args[0], args[1]
    if not weights.is_floating_point():
        raise RandomOpError(
            f"multinomial on a DTensor of {weights.dtype}; expected floating point weights: convert them"
        )
    replacement = args[2] if len(args) > 2 else kwargs.get("replacement", False)
    generator = kwargs.get("generator")
    spec = spec_of(weights)
    last = weights.ndim - 1
    rows = [p if getattr(p, "dim", last) != last and not p.is_partial() else Replicate() for p in spec.placements]
    if outside_mesh(spec) or all(p.is_replicate() for p in rows) or (replacement and num_samples > 1):
        return _replayed(op, weights, num_samples, replacement, generator)
    weights = weights.redistribute(spec.mesh, rows)
    region = region_of(spec_of(weights), "multinomial")
    assert region is not None
    local = local_of(weights)
    # As on one device: category / exponential noise, the largest wins.
    if not bool(((local >= 0) & (local < torch.inf)).all()) or not bool((local.sum(-1) > 0).all()):
        raise RandomOpError(
            f"multinomial on a DTensor of shape {tuple(weights.shape)}: this rank's rows hold a negative, infinite or "
            "NaN weight, or a row without a positive one; expected finite weights >= 0: clean them first"
        )
    noise = empty_like(weights)
    fill(noise, RandomOp("exponential_", (1.0,)), generator)
    scores = torch.div(local, local_of(noise))
    if num_samples == 1:
        picked = scores.argmax(-1, keepdim=True)
    else:
        picked = scores.topk(num_samples, -1).indices
    shape = (*weights.shape[:-1], num_samples)
    strides = (num_samples, 1)[-len(shape) :]
    return make_dtensor(picked, make_spec(spec.mesh, rows, shape, strides, torch.int64))


def _replayed(op: Any, weights: DTensor, num_samples: int, replacement: bool, generator: Any) -> DTensor:
    """Sample all rows on every rank."""
    spec = spec_of(weights)
    if outside_mesh(spec):
        # The number of draws does not depend on the weights: any valid weights do.
        whole = torch.ones(tuple(spec.shape), dtype=weights.dtype, device=spec.mesh.device_type)
    else:
        whole = whole_of(weights)
    picked = op(whole, num_samples, replacement, generator=generator)
    placements = (Replicate(),) * spec.mesh.ndim
    return make_dtensor(picked, make_spec(spec.mesh, placements, picked.shape, picked.stride(), picked.dtype))

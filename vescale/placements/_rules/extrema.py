"""``argmax`` and ``argmin`` of a whole tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import Replicate

from vescale.compat import DTensorSpec
from vescale.placements._region import local_region
from vescale.placements._rules._call import Decision, OpCall, Placements
from vescale.placements._rules._combine import gather_ranks, reduction_axes, without_partials
from vescale.placements._rules.reductions import neutral_extremum

__all__ = ["extrema_rule"]


def extrema_rule(call: OpCall) -> Decision | None:
    """The position in the row-major flattening, the first one among equals, as on one device; ranks that hold nothing
    take part. Replicate; a value and an index of each rank are communicated."""
    if call.name not in ("argmax", "argmin"):
        return None
    call.try_out()  # with ``dim`` too: stock DTensor takes booleans there, which one device refuses
    spec = call.operands[0]
    if call.argument("dim") is not None or math.prod(spec.shape) == 0:
        return None
    inputs = without_partials(spec.placements)
    where = _Extremum(call.name == "argmax", spec, inputs, call.meta.shape)
    return Decision((inputs,), ((Replicate(),) * spec.mesh.ndim,), where)


@dataclass(frozen=True)
class _Extremum:
    largest: bool
    spec: DTensorSpec
    placements: Placements
    result_shape: torch.Size

    def __call__(self, local: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        mesh = self.spec.mesh
        coordinate = mesh.get_coordinate()
        assert coordinate is not None  # only ranks of the mesh run local functions
        region = local_region(self.spec.shape, self.placements, tuple(mesh.shape), coordinate)
        if local.numel():
            flat = local.reshape(-1)
            index = int((flat.argmax() if self.largest else flat.argmin()).item())
            value, position = flat[index], region.global_offset(index)
        else:  # loses against every element, by position if the values are equal
            value, position = neutral_extremum(local, largest=self.largest), math.prod(self.spec.shape)
        axes = reduction_axes(self.placements)
        values = gather_ranks(value.reshape(1), mesh, axes).view(-1)
        positions = gather_ranks(torch.tensor([position], device=local.device), mesh, axes).view(-1)
        best = values[values.argmax() if self.largest else values.argmin()]  # NaN wins, as on one device
        wins = values.isnan() if best.isnan() else values == best
        return positions[wins].min().view(self.result_shape)

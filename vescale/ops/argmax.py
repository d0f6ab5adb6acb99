"""``argmax`` and ``argmin`` of a whole tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import Replicate

from vescale.compat import DTensorSpec, some_rank_holds_nothing
from vescale.ops._call import OpCall, Placements
from vescale.ops._combine_ranks import gather_ranks, neutral_extremum, reduction_axes
from vescale.ops._conversion import whole
from vescale.ops._decision import Decision
from vescale.ops._registration import handles
from vescale.ops._registry import register_aten
from vescale.ops._row_reductions import dims_of, reduces_a_shard, row_reduction
from vescale.placements import own_region, without_partials

__all__: list[str] = []


def argmax_rule(call: OpCall) -> Decision | None:
    """The position in the row-major flattening, the first one among equals, as on one device. Replicate.

    Ranks that hold nothing take part. Communication: a value and an index of each rank. With ``dim``: see
    :func:`row_reduction`.
    """
    call.try_out()  # with ``dim`` too: stock DTensor takes booleans there, which one device refuses
    spec = call.operands[0]
    if call.argument("dim") is not None or math.prod(spec.shape) == 0:
        return row_reduction(call)
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
        region = own_region(self.spec.shape, self.placements, mesh)
        assert region is not None  # only ranks of the mesh run local functions
        if local.numel():
            flat = local.reshape(-1)
            index = int((flat.argmax() if self.largest else flat.argmin()).item())
            value, position = flat[index], region.global_offset(index)
        else:  # a value that every element beats, by its position where the values are equal
            value, position = neutral_extremum(local, largest=self.largest), math.prod(self.spec.shape)
        axes = reduction_axes(self.placements)
        values = gather_ranks(value.reshape(1), mesh, axes).view(-1)
        positions = gather_ranks(torch.tensor([position], device=local.device), mesh, axes).view(-1)
        best = values[values.argmax() if self.largest else values.argmin()]  # NaN wins, as on one device
        wins = values.isnan() if best.isnan() else values == best
        return positions[wins].min().view(self.result_shape)


def _stock_fails(op: Any, schema: Any) -> bool:
    """PyTorch's combination of what ranks find takes no empty part, and no dim of a vector."""
    x, dim = schema.args_schema[0], dims_of(schema)
    return reduces_a_shard(x, dim) and (some_rank_holds_nothing(x) or (x.ndim == 1 and dim is not None))


@handles(torch.ops.aten.argmax.default, torch.ops.aten.argmin.default, applies=_stock_fails)
def _of_all_rows(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The position among all elements, which every rank gets."""
    return op(whole(args[0], str(op)), *args[1:], **kwargs)


register_aten("argmax argmin", rule=argmax_rule, communicates=("all_gather_v",))

"""A part of a tensor on which elementwise code with random fills runs as if it were the whole tensor.

``nn.init.trunc_normal_`` draws again until no element is rejected. If PyTorch's own function runs on a :class:`Part`, this
rank gets the elements of one device, with the algorithm of the installed version, provided that it consists of elementwise
ops, in-place random fills and conditions on all elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vescale.compat.tensor_subclasses import WrapperTensor, tree_leaves, tree_map_only
from vescale.placements import Region
from vescale.rng._engine import fill_region
from vescale.rng._fill_request import Fill
from vescale.rng._random_ops import RandomOp

__all__ = ["Part"]

aten = torch.ops.aten
_FILLS = {
    aten.uniform_.default: "uniform_",
    aten.normal_.default: "normal_",
    aten.exponential_.default: "exponential_",
    aten.log_normal_.default: "log_normal_",
}


class Part(WrapperTensor):
    """``local`` is the region's part of a whole tensor with ``global_strides``.

    ``anywhere(flag)`` returns whether a flag is set on any part of the whole tensor; it answers every ``bool()`` of a Part.
    """

    local: torch.Tensor
    region: Region
    global_strides: tuple[int, ...]
    anywhere: Callable[[bool], bool]

    @classmethod
    def of(
        cls, local: torch.Tensor, region: Region, global_strides: tuple[int, ...], anywhere: Callable[[bool], bool]
    ) -> Part:
        part = cls.with_looks_of(local)
        part.local, part.region, part.global_strides, part.anywhere = local, region, global_strides, anywhere
        return part

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Part(shape={tuple(self.shape)}, region={self.region})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        first: Part = next(value for value in tree_leaves((args, kwargs)) if isinstance(value, Part))
        if func in _FILLS:
            generator = kwargs.get("generator")
            fill = Fill(RandomOp(_FILLS[func], tuple(args[1:])), first.region, first.global_strides)
            fill_region(first.local, fill, generator)
            return first
        if func is aten._local_scalar_dense.default:
            value = first.local.item()
            return first.anywhere(value) if isinstance(value, bool) else value
        plain_args, plain_kwargs = tree_map_only(Part, lambda part: part.local, (args, kwargs))
        out = func(*plain_args, **plain_kwargs)
        if not isinstance(out, torch.Tensor):
            return out
        return first if out is first.local else cls.of(out, first.region, first.global_strides, first.anywhere)

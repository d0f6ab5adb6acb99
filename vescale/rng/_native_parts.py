"""What the C++ kernels of random ops draw: the parts of fills that ``vescale/csrc/random_parts.h`` can generate.

A kernel asks once for each op, spec and integers among the arguments. Where the answer is None, the handlers of
:mod:`vescale.rng` run instead, with the same results.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from vescale.compat import DTensorSpec, local_of, make_spec, rank_in_mesh, spec_of
from vescale.compat.random_ops import is_symbolic
from vescale.placements import local_region
from vescale.rng._draw_rules import NormalBlocks, WordsPerElement
from vescale.rng._fill_request import Fill
from vescale.rng._random_ops import RandomOp
from vescale.rng._self_checks import rule_holds
from vescale.rng._stream_spans import is_contiguous, owned_dims

__all__ = ["native_part"]

# Random ops that return a tensor, and the fill that they consist of.
_FILLS = {
    "rand_like": "uniform_",
    "randn_like": "normal_",
    "native_dropout": "bernoulli_",
    "dropout": "bernoulli_",
}


def native_part(name: str, overload: str, arguments: tuple[Any, ...], dtensor: DTensor) -> tuple[Any, ...] | None:
    """The part of ``op(dtensor, *arguments)`` that this rank draws; None: PyTorch's path, which may raise.

    Returns ``(is_whole, words, unit, numel, tail_word, final_word, boxes, mask_spec)``: the fields of ``Part`` in
    ``random_parts.h``, and for ``native_dropout`` the spec of its mask.
    """
    spec, local = spec_of(dtensor), local_of(dtensor)
    meta = spec.tensor_meta
    if meta is None or local.device.type != "cpu" or is_symbolic(local) or type(local) is not torch.Tensor:
        return None
    if not rank_in_mesh(spec.mesh) or any(placement.is_partial() for placement in spec.placements):
        return None
    name = name.removeprefix("aten::")
    is_mask = name == "native_dropout"
    dtype = torch.bool if is_mask else local.dtype
    fill = RandomOp(_FILLS.get(name, name), arguments)
    part = _part(fill, dtype, id(spec.mesh), spec, tuple(local.shape), local.stride())
    if part is None:
        return None
    mask = make_spec(spec.mesh, spec.placements, spec.shape, meta.stride, torch.bool) if is_mask else None
    return (*part, mask)


@functools.lru_cache(maxsize=1024)
def _part(
    op: RandomOp, dtype: torch.dtype, mesh: int, spec: DTensorSpec, shape: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[Any, ...] | None:
    """``mesh``: its identity, because equal meshes may belong to destroyed process groups."""
    assert spec.tensor_meta is not None
    coordinate = spec.mesh.get_coordinate()
    assert coordinate is not None
    region = local_region(tuple(spec.shape), spec.placements, tuple(spec.mesh.shape), tuple(coordinate))
    fill = Fill(op, region, tuple(spec.tensor_meta.stride))
    n = fill.numel
    if shape != region.local_shape or n == 0:
        return None
    if region.flat is None and shape == fill.shape and strides == fill.strides:
        return True, 1, 1, n, -1, 0, []
    if dtype.is_complex or not _is_in_memory_order(fill, shape, strides):
        return None
    rule = op.cpu_rule(dtype, n, fill.is_row_major)
    if not isinstance(rule, WordsPerElement | NormalBlocks) or not rule_holds(op, dtype, rule):
        return None
    unit = 1 if isinstance(rule, WordsPerElement) else NormalBlocks.UNIT
    tail = rule.tail_word(n) if isinstance(rule, NormalBlocks) and n % unit else -1
    boxes = [] if region.numel == 0 else list(owned_dims(region, fill.order, strides))
    return False, rule.words, unit, n, tail, rule.num_words(n), boxes


def _is_in_memory_order(fill: Fill, shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the local tensor has no holes, and its dims the memory order of the whole tensor's."""
    if fill.region.flat is not None:  # a range of the elements in row-major order
        return fill.is_row_major and is_contiguous(shape, strides)
    return math.prod(shape) == 0 or is_contiguous([shape[d] for d in fill.order], [strides[d] for d in fill.order])

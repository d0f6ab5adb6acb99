"""Products of sparse matrices (the adjacency of a graph), which are plain and the same on every rank, with DTensors."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import no_torch_function, tensors_in
from vescale.errors import UnsupportedOpError
from vescale.ops._conversion import bring_with_gradient, enter_local, leave_local
from vescale.ops._registry import replaces
from vescale.placements import is_pending

_PRODUCTS = frozenset(
    (
        torch.mm,
        torch.matmul,
        torch.sparse.mm,
        torch.spmm,
        torch.Tensor.mm,
        torch.Tensor.matmul,
        torch.Tensor.__matmul__,
    )
)

_LAYOUTS = "coo csr csc bsr bsc"
_MAKERS = [getattr(torch, f"sparse_{layout}_tensor") for layout in _LAYOUTS.split()]
_CONVERSIONS = [getattr(torch.Tensor, name) for name in ("to_sparse", *(f"to_sparse_{n}" for n in _LAYOUTS.split()))]


@replaces(*_MAKERS, torch.sparse_compressed_tensor, *_CONVERSIONS)
def _refuse(_: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    shapes = [tuple(x.shape) for x in tensors_in((args, kwargs))]
    raise UnsupportedOpError(
        f"{func.__name__} of DTensors of shapes {shapes}: a DTensor is dense. Make a dense tensor of the same values, "
        "x.new_zeros(size).index_put((rows, columns), values, accumulate=True), or stay with the dense one"
    )


def is_sparse(x: object) -> bool:
    """Whether it is a plain tensor that has no strides: of a sparse layout."""
    return isinstance(x, torch.Tensor) and not isinstance(x, DTensor) and x.layout is not torch.strided


def multiply_sparse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function with a sparse matrix among DTensors. Each rank multiplies its part: columns of the other factor, for a
    sparse one in front, or rows; the rest of it is gathered. A pending sum passes.

    Raises UnsupportedOpError for anything but a product of two matrices.
    """
    name = getattr(func, "__name__", str(func))
    other = next((x for x in args if isinstance(x, DTensor)), None)
    is_product = func in _PRODUCTS and len(args) == 2 and not kwargs and other is not None and other.ndim == 2
    found = [x for x in tensors_in((args, kwargs)) if is_sparse(x)]
    if not is_product or other is None or any(x.requires_grad for x in found):
        raise UnsupportedOpError(
            f"{name} of a {found[0].layout} tensor of shape {tuple(found[0].shape)} among DTensors: products of a "
            "sparse matrix without gradients and a dense one run (torch.sparse.mm(adj, x), adj @ x); for anything "
            "else, use a dense tensor, adj.to_dense()"
        )
    (sparse,) = found
    is_first = args[0] is sparse
    kept = 1 if is_first else 0
    placed: list[Placement] = [
        p if (type(p) is Shard and p.dim == kept) or is_pending(p, "sum") else Replicate() for p in other.placements
    ]
    local = enter_local(bring_with_gradient(other, placed, name, "mat2" if is_first else "input"))
    shape = (sparse.shape[0], other.shape[1]) if is_first else (other.shape[0], sparse.shape[1])
    with no_torch_function():
        made = func(sparse, local) if is_first else func(local, sparse)
    return leave_local(made, other.device_mesh, placed, shape, name)

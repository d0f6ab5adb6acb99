"""The initializers of ``torch.nn.init`` and the DTensor factories for which handlers of single ops do not suffice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import DTensorSpec, local_of, no_torch_function, spec_of, tell_draw, tell_write
from vescale.compat.random_ops import is_symbolic
from vescale.rng._deferred_tensor import is_deferred, record_initializer
from vescale.rng._dtensor_fill import count_write, empty, fill, part_of_whole, region_of
from vescale.rng._engine import default_generator
from vescale.rng._random_ops import RandomOp
from vescale.rng._rejection_initializers import fill_part, replay_draws

__all__ = ["INITIALIZERS", "dtensor_factory", "rand", "randint", "randn"]


def _trunc_normal_(
    original: Callable[..., torch.Tensor],
    tensor: torch.Tensor,
    mean: float,
    std: float,
    a: float,
    b: float,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """``nn.init.trunc_normal_`` on a DTensor: PyTorch's own algorithm on this rank's part.

    Communication: an all-reduce of one flag over the mesh for each round of rejections. A rank outside of the mesh finds
    the number of rounds without communication, by generating the whole tensor in chunks.
    """
    if is_deferred(tensor):
        record_initializer(original, tensor, (mean, std, a, b), generator)
        return tensor
    if not isinstance(tensor, DTensor) or is_symbolic(local_of(tensor)):
        return original(tensor, mean, std, a, b, generator=generator)
    spec = spec_of(tensor)
    region = region_of(spec, "trunc_normal_")
    tell_draw(spec, "trunc_normal_", generator)
    assert spec.tensor_meta is not None
    arguments = (mean, std, a, b)
    strides = tuple(spec.tensor_meta.stride)
    if region is None:
        generator = default_generator(torch.device(spec.mesh.device_type)) if generator is None else generator
        replay_draws(original, arguments, tuple(spec.shape), strides, spec.tensor_meta.dtype, generator)
    else:
        local = local_of(tensor).detach()
        fill_part(original, arguments, local, region, strides, generator, lambda flag: _anywhere(flag, spec))
    count_write(tensor)
    tell_write(tensor)
    return tensor


def _anywhere(flag: bool, spec: DTensorSpec) -> bool:
    flags = torch.tensor(int(flag), device=spec.mesh.device_type)
    for axis in range(spec.mesh.ndim):
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=spec.mesh.get_group(axis))
    return bool(flags.item())


def _orthogonal_(
    original: Callable[..., torch.Tensor],
    tensor: torch.Tensor,
    gain: float = 1,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """``nn.init.orthogonal_`` on a DTensor: every rank computes it, because the factorization needs the whole matrix."""
    if not isinstance(tensor, DTensor) or is_symbolic(local_of(tensor)):
        return original(tensor, gain=gain, generator=generator)
    return _whole_on_every_rank(
        tensor, "orthogonal_", generator, lambda whole: original(whole, gain=gain, generator=generator)
    )


def _sparse_(
    original: Callable[..., torch.Tensor],
    tensor: torch.Tensor,
    sparsity: float,
    std: float = 0.01,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """``nn.init.sparse_`` on a DTensor: every rank computes it, because it writes one column at a time."""
    if not isinstance(tensor, DTensor) or is_symbolic(local_of(tensor)):
        return original(tensor, sparsity, std=std, generator=generator)
    return _whole_on_every_rank(
        tensor, "sparse_", generator, lambda whole: original(whole, sparsity, std=std, generator=generator)
    )


def _whole_on_every_rank(
    tensor: DTensor, what: str, generator: torch.Generator | None, initialize: Callable[[torch.Tensor], Any]
) -> DTensor:
    spec = spec_of(tensor)
    region = region_of(spec, what)
    tell_draw(spec, what, generator)
    assert spec.tensor_meta is not None
    device = torch.device(spec.mesh.device_type) if region is None else local_of(tensor).device
    with no_torch_function():  # these are no tensors of a model that runs
        whole = torch.empty_strided(
            tuple(spec.shape), spec.tensor_meta.stride, dtype=spec.tensor_meta.dtype, device=device
        )
        initialize(whole)
        if region is not None:
            local_of(tensor).detach().copy_(part_of_whole(whole, region))
    tell_write(tensor)
    return tensor


INITIALIZERS: dict[str, Callable[..., Any]] = {
    "_no_grad_trunc_normal_": _trunc_normal_,  # looked up by trunc_normal_ when it runs, however it was imported
    "orthogonal_": _orthogonal_,
    "sparse_": _sparse_,
}


def dtensor_factory(
    init_op: Any, size: Any, dtype: torch.dtype | None, requires_grad: bool, mesh: DeviceMesh, placements: Any
) -> DTensor:
    """``torch.distributed.tensor.rand`` and ``randn``."""
    name = "uniform_" if init_op is torch.rand else "normal_"
    return _factory(RandomOp(name, (0.0, 1.0)), size, dtype, requires_grad, mesh, placements, None)


def _factory(
    op: RandomOp,
    size: Sequence[int],
    dtype: torch.dtype | None,
    requires_grad: bool,
    mesh: DeviceMesh,
    placements: Sequence[Placement] | None,
    generator: torch.Generator | None,
) -> DTensor:
    result = empty(tuple(size), dtype or torch.get_default_dtype(), mesh, placements)
    fill(result, op, generator)
    result.requires_grad_(requires_grad)
    return result


def rand(
    *size: int,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement] | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    generator: torch.Generator | None = None,
) -> DTensor:
    """``torch.rand(*size)`` as a DTensor, each rank generating its own part; replicated without ``placements``.

    Works without :func:`enable`. Raises RuntimeError for Partial placements. Communication: none.

    Args:
        size: global.
        device_mesh: the mesh. None: that of the surrounding ``with mesh:``.
        dtype, requires_grad: as of ``torch.rand``.
        generator: draws the numbers, the same on every rank. None: the default one.
    """
    op = RandomOp("uniform_", (0.0, 1.0))
    return _factory(op, size, dtype, requires_grad, device_mesh, placements, generator)


def randn(
    *size: int,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement] | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    generator: torch.Generator | None = None,
) -> DTensor:
    """``torch.randn(*size)`` as a DTensor; see :func:`rand`.

    Args:
        size, device_mesh, placements, dtype, requires_grad, generator: as of :func:`rand`.
    """
    op = RandomOp("normal_", (0.0, 1.0))
    return _factory(op, size, dtype, requires_grad, device_mesh, placements, generator)


def randint(
    low: int,
    high: int,
    size: Sequence[int],
    *,
    device_mesh: DeviceMesh,
    placements: Sequence[Placement] | None = None,
    dtype: torch.dtype = torch.int64,
    generator: torch.Generator | None = None,
) -> DTensor:
    """``torch.randint(low, high, size)`` as a DTensor; see :func:`rand`.

    Args:
        size, device_mesh, placements, dtype, generator: as of :func:`rand`.
    """
    return _factory(RandomOp("random_", (low, high)), size, dtype, False, device_mesh, placements, generator)

"""``enable``, ``disable`` and ``deferred_init``: the switches of this package."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import (
    DTensorSpec,
    install_part,
    is_installed,
    local_of,
    make_spec,
    no_torch_function,
    num_function_modes,
    rank_in_mesh,
    spec_of,
    tell_draw,
    tell_write,
    uninstall_part,
)
from vescale.compat.random_ops import RandomHooks, is_symbolic
from vescale.placements import local_region
from vescale.rng._cpu_engine import rule_holds
from vescale.rng._deferred_tensor import Recorder, is_deferred, record_initializer
from vescale.rng._dtensor_fill import count_write, empty, fill, part_of_whole, region_of
from vescale.rng._engine import default_generator, fill_part, replay_draws
from vescale.rng._mt19937 import characteristic_exponents
from vescale.rng._op_handlers import handlers
from vescale.rng._random_ops import Fill, NormalBlocks, RandomOp, WordsPerElement
from vescale.rng._stream_spans import is_contiguous, owned_dims

# The initializers of ``torch.nn.init`` and the DTensor factories for which handlers of single ops do not suffice.


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
    _count_write(tensor)
    return tensor


def _anywhere(flag: bool, spec: DTensorSpec) -> bool:
    flags = torch.tensor(int(flag), device=spec.mesh.device_type)
    for axis in range(spec.mesh.ndim):
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=spec.mesh.get_group(axis))
    return bool(flags.item())


def _whole(what: str, original: Callable[..., torch.Tensor], tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
    """``nn.init.orthogonal_``, whose factorization needs the whole matrix, and ``sparse_``, which writes one column at a
    time, on a DTensor: every rank computes them."""
    if not isinstance(tensor, DTensor) or is_symbolic(local_of(tensor)):
        return original(tensor, *args, **options)
    generator = options.get("generator")
    return _whole_on_every_rank(tensor, what, generator, lambda whole: original(whole, *args, **options))


def _whole_on_every_rank(
    tensor: DTensor, what: str, generator: torch.Generator | None, initialize: Callable[[torch.Tensor], Any]
) -> DTensor:
    spec = spec_of(tensor)
    region = region_of(spec, what)
    tell_draw(spec, what, generator)
    assert spec.tensor_meta is not None
    device = torch.device(spec.mesh.device_type) if region is None else local_of(tensor).device
    # These are no tensors of a model that runs. What makes tensors, as ``sparse_`` does, has the default device.
    with no_torch_function() if num_function_modes() else contextlib.nullcontext():
        whole = torch.empty_strided(
            tuple(spec.shape), spec.tensor_meta.stride, dtype=spec.tensor_meta.dtype, device=device
        )
        initialize(whole)
        if region is not None:
            local_of(tensor).detach().copy_(part_of_whole(whole, region))
    _count_write(tensor)
    return tensor


def _count_write(tensor: DTensor) -> None:
    """No op on the DTensor has been called: autograd and views of it learn of the write here."""
    if not tensor.is_inference():
        increment_version(tensor)
    count_write(tensor)
    tell_write(tensor)


INITIALIZERS: dict[str, Callable[..., Any]] = {
    "_no_grad_trunc_normal_": _trunc_normal_,  # looked up by trunc_normal_ when it runs, however it was imported
    "orthogonal_": functools.partial(_whole, "orthogonal_"),
    "sparse_": functools.partial(_whole, "sparse_"),
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


# What the C++ kernels of random ops draw: the parts of fills that ``vescale/csrc/random_parts.h`` can generate. A
# kernel asks once for each op, spec and integers among the arguments. Where the answer is None, the handlers of
# :mod:`vescale.rng` run instead, with the same results.

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


def enable() -> None:
    """Give random ops on DTensors, DTensor factories and ``bool(dtensor)`` single-device semantics; idempotent.

    Programs without DTensors are not affected. All ranks must have the same seed; nothing is communicated.
    """
    if not is_enabled():
        hooks = RandomHooks(handlers(), native_part, characteristic_exponents(), dtensor_factory, INITIALIZERS)
        install_part("random", hooks)


def disable() -> None:
    """Restore PyTorch as it was before :func:`enable`; idempotent."""
    uninstall_part("random")


def is_enabled() -> bool:
    """Whether random ops on DTensors draw each rank's part of one device's numbers, see :func:`enable`."""
    return is_installed("random")


@contextlib.contextmanager
def deferred_init() -> Iterator[None]:
    """Construct modules without memory: ``with deferred_init(): model = Model(config)``.

    Tensors that are made inside have a shape, a dtype and a device, and record how their values are computed. Random ops
    draw nothing, but advance the generator, so that code after the constructor draws what it would on one device.
    :func:`materialize` (or ``parallelize``) later computes the values, on each rank those of its part only. They are
    bit-equal to the values without ``deferred_init``, including overwritten, tied and derived tensors.

    Code inside that reads values (``item()``, ``tolist()``, ``numpy()``) gets those of small tensors; for large ones,
    :class:`DeferredValueError` names the line. Also calls :func:`enable`. Communication: none.
    """
    enable()
    with Recorder():
        yield

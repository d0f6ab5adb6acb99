"""Random ops on DTensors: the handler of each ATen overload, which runs instead of the op on the local tensor.

In-place fills call the engine. Ops that return a tensor are composed as on one device: an allocation, a fill, and
arithmetic. Ops whose number of draws depends on values run whole on every rank. All other random ops raise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.comm import requested_by
from vescale.compat import local_of, make_dtensor, make_spec, own_part, spec_of, stock_dispatch, tell_draw, tell_read
from vescale.compat.cuda_kernels import fused_dropout
from vescale.compat.random_ops import Handler, correct_inplace_view, has_composite_kernel, is_symbolic, seeded_ops
from vescale.compat.tensor_subclasses import TorchDispatchMode, tree_map
from vescale.errors import RandomOpError, UnsupportedRandomOpError
from vescale.placements import contiguous_stride, local_region, move_local
from vescale.rng._dtensor_fill import (
    count_write,
    empty,
    empty_like,
    fill,
    outside_mesh,
    part_of_whole,
    region_of,
    whole_of,
)
from vescale.rng._random_ops import DROPOUT_MASK, RandomOp, fill_of, inplace_overloads
from vescale.rng._stream_spans import is_contiguous, stream_order

# ``torch.multinomial`` on DTensors: each rank samples its own rows.


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


aten = torch.ops.aten
_Args = tuple[Any, ...]
_Kwargs = dict[str, Any]


def _numbers_only(handler: Callable[..., Any]) -> Handler:
    """Pass calls on fake, meta and traced tensors, which hold no numbers, to DTensor's own rules."""

    def handle(op: Any, args: _Args, kwargs: _Kwargs) -> Any:
        dtensors = [value for value in (*args, *kwargs.values()) if isinstance(value, DTensor)]
        if any(is_symbolic(local_of(dtensor)) for dtensor in dtensors):
            return stock_dispatch(op, args, kwargs)
        return handler(op, args, kwargs)

    return handle


def _inplace(op: Any, args: _Args, kwargs: _Kwargs) -> DTensor:
    return _filled(args[0], op, args, kwargs)


def _filled(target: Any, op: Any, args: _Args, kwargs: _Kwargs) -> DTensor:
    of_op, probabilities = fill_of(op, args, kwargs)
    if probabilities is None:
        fill(target, of_op, kwargs.get("generator"))
    else:
        _bernoulli_from(target, probabilities, kwargs.get("generator"))
    return target


def _bernoulli_from(target: DTensor, probabilities: Any, generator: torch.Generator | None) -> None:
    """``target.bernoulli_(probabilities)``: probabilities are expanded and redistributed to the target's placements."""
    spec = spec_of(target)
    region = region_of(spec, "bernoulli_")
    if not isinstance(probabilities, DTensor):  # the same on every rank
        whole = probabilities.expand(spec.shape)
        local = whole[:0] if region is None else part_of_whole(whole, region)
        probabilities = make_dtensor(
            local, make_spec(spec.mesh, spec.placements, spec.shape, whole.stride(), whole.dtype)
        )
    elif probabilities.shape != target.shape or probabilities.placements != target.placements:
        expanded: Any = probabilities.expand(target.shape)
        probabilities = expanded.redistribute(spec.mesh, spec.placements)
    fill(target, RandomOp("bernoulli_"), generator, probabilities)


def _like(op: Any, args: _Args, kwargs: _Kwargs) -> Any:
    result = empty_like(args[0], kwargs.get("dtype"), kwargs.get("memory_format") or torch.preserve_format)
    return _filled(result, op, (args[0], *map(whole_of, args[1:])), kwargs)


def _bernoulli(op: Any, args: _Args, kwargs: _Kwargs) -> Any:
    return _filled(empty_like(args[0], memory_format=torch.contiguous_format), op, args, kwargs)


def _native_dropout(op: Any, args: _Args, kwargs: _Kwargs) -> Any:
    source, p, train = args
    region_of(spec_of(source), "dropout")  # refuses Partial
    if source.numel() == 0:
        return source, empty_like(source)
    if train is False:
        mask: Any = torch.ones_like(source, dtype=torch.bool)
        return source.clone(), mask
    spec = spec_of(source)
    if local_of(source).device.type != "cpu":
        return _native_dropout_of_device(source, p)
    if _dropout_mask_keeps_strides():
        mask = empty_like(source, torch.bool)
    else:
        mask = empty(spec.shape, torch.bool, spec.mesh, spec.placements)
    fill(mask, RandomOp("bernoulli_", (1.0 - p,)))
    return source.mul(mask).mul_(0.0 if p == 1 else 1.0 / (1.0 - p)), mask


def _native_dropout_of_device(source: Any, p: float) -> Any:
    """On a device the kernel depends on the strides of the input: element by element in the order of the dims if it cannot
    read adjacent elements together, otherwise in memory order."""
    if p == 1:  # draws nothing
        return torch.zeros_like(source), empty_like(source, torch.bool).fill_(False)
    spec = spec_of(source)
    assert spec.tensor_meta is not None
    shape, strides = tuple(spec.shape), spec.tensor_meta.stride
    order = stream_order(shape, strides)
    has_holes = not is_contiguous([shape[dim] for dim in order], [strides[dim] for dim in order])
    if has_holes or source.numel() % 2:
        mask: Any = empty(shape, torch.bool, spec.mesh, spec.placements)
    else:
        mask = empty_like(source, torch.bool)
    fill(mask, RandomOp(DROPOUT_MASK, (p, has_holes), source.dtype))
    accumulated = torch.float64 if source.dtype == torch.float64 else torch.float32
    return source.mul(mask).mul_(_device_dropout_scale(p, accumulated, local_of(source).device)), mask


@functools.lru_cache(maxsize=64)
def _device_dropout_scale(p: float, dtype: torch.dtype, device: torch.device) -> float:
    """The factor for kept elements, 1 / (1 - p), with the device's rounding."""
    ones = torch.ones(4096, dtype=dtype, device=device)
    kept, _ = fused_dropout(ones, 1.0 - p, torch.Generator(device).manual_seed(0))
    return float(kept.max().item()) or 1.0 / (1.0 - p)


@functools.cache
def _dropout_mask_keeps_strides() -> bool:
    """Whether the mask of ``native_dropout`` on a CPU has the strides of its input; else it is row-major (by version)."""
    state = torch.get_rng_state()
    mask = torch.native_dropout(torch.zeros(2, 3).t(), 0.5, True)[1]
    torch.set_rng_state(state)
    return not mask.is_contiguous()


def _normal_out_of_place(op: Any, args: _Args, kwargs: _Kwargs) -> Any:
    mean: Any = args[0]
    std: Any = args[1] if len(args) > 1 else kwargs.get("std", 1.0)
    if not isinstance(std, torch.Tensor):
        result: Any = empty_like(mean, memory_format=torch.contiguous_format)
        fill(result, RandomOp("normal_", (0.0, float(std))), kwargs.get("generator"))
        return result.add_(mean)
    if isinstance(mean, torch.Tensor):
        # DTensor's own rule decides the placements of the broadcast result.
        added: Any = torch.add(mean, std)
        result = empty_like(added, memory_format=torch.contiguous_format)
    else:
        scale: Any = std
        result = empty_like(scale, memory_format=torch.contiguous_format)
    fill(result, RandomOp("normal_", (0.0, 1.0)), kwargs.get("generator"))
    return result.mul_(std).add_(mean)


def _op_handlers_replayed(op: Any, args: _Args, kwargs: _Kwargs) -> Any:
    """Run the op whole on every rank (communication: all-gather of sharded arguments) and keep this rank's part."""
    first = next(value for value in args if isinstance(value, DTensor))
    spec = spec_of(first)
    if outside_mesh(spec):
        raise RandomOpError(
            f"{op} on a DTensor of shape {tuple(spec.shape)}: the number of draws depends on the values, which this "
            "rank does not have, because it is outside of the mesh; expected a mesh of all ranks: move the tensor "
            "there first"
        )
    tell_draw(spec, str(op), kwargs.get("generator"))
    whole_args = [whole_of(value) for value in args]
    shape = torch.broadcast_shapes(*(value.shape for value in args if isinstance(value, torch.Tensor)))
    placements = spec.placements if tuple(first.shape) == tuple(shape) else (Replicate(),) * spec.mesh.ndim
    if any(placement.is_partial() for placement in placements):
        placements = (Replicate(),) * spec.mesh.ndim
    whole = op(*whole_args, **kwargs)
    result_spec = make_spec(spec.mesh, placements, whole.shape, whole.stride(), whole.dtype)
    region = region_of(result_spec, str(op))
    assert region is not None
    return make_dtensor(part_of_whole(whole, region), result_spec)


def _rrelu_with_noise(op: Any, args: _Args, kwargs: _Kwargs) -> Any:
    """In training it draws for the elements that are not positive, so that every rank runs it whole."""
    names = [argument.name for argument in op._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if not given.get("training", False):
        result = stock_dispatch(op, args, kwargs)
        if op is aten.rrelu_with_noise_.default:
            count_write(given["self"])
        return result
    source, noise = given["self"], given["noise"]
    source_region, noise_region = region_of(spec_of(source), str(op)), region_of(spec_of(noise), str(op))
    if source_region is None or noise_region is None:
        return _op_handlers_replayed(op, args, kwargs)  # raises
    whole, whole_noise = whole_of(source).clone(), whole_of(noise).clone()
    rest = {key: value for key, value in given.items() if key not in ("self", "noise")}
    out = aten.rrelu_with_noise.default(whole, whole_noise, **rest)
    local_of(noise).copy_(part_of_whole(whole_noise, noise_region))
    count_write(noise)
    if op is aten.rrelu_with_noise_.default:
        local_of(source).copy_(part_of_whole(out, source_region))
        count_write(source)
        return source
    spec = make_spec(source.device_mesh, source.placements, out.shape, out.stride(), out.dtype)
    return make_dtensor(part_of_whole(out, source_region), spec)


def _fused_attention(op: Any, args: _Args, kwargs: _Kwargs) -> Any:
    """Fused kernels number dropout by batch and head of the local tensor: allowed only if that is the whole tensor."""
    names = [argument.name for argument in op._schema.arguments]
    dropout_p = {**dict(zip(names, args, strict=False)), **kwargs}.get("dropout_p", 0.0)
    query: DTensor = args[0]
    if dropout_p > 0 and not all(placement.is_replicate() for placement in query.placements):
        raise RandomOpError(
            f"{op} with dropout_p={dropout_p} on a query of shape {tuple(query.shape)} with placements "
            f"{query.placements}: fused kernels draw by local index, so that shards would repeat each other's dropout; "
            "expected the math kernel: wrap the call in torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
        )
    return stock_dispatch(op, args, kwargs)


def _refused(op: Any, args: _Args, kwargs: _Kwargs) -> Any:
    shapes = [(tuple(v.shape), v.placements) for v in (*args, *kwargs.values()) if isinstance(v, DTensor)]
    raise UnsupportedRandomOpError(
        f"{op} on DTensors {shapes}: this random op cannot reproduce the numbers of one device; expected an op that "
        "docs/rng.md lists: express it with one of those (uniform_, normal_, bernoulli_, ...), or call "
        ".full_tensor() first"
    )


def _decomposed(op: Any, args: _Args, kwargs: _Kwargs) -> Any:
    return op.decompose(*args, **kwargs)


def _local_scalar_dense(op: Any, args: _Args, kwargs: _Kwargs) -> Any:
    """``item()``, ``bool()``, ``int()``: the value of the whole tensor (an all-reduce on Partial axes, an all-gather on
    sharded ones; every rank of the mesh must call it). A tensor that is Replicate is read without communication.

    DTensor's own returns each rank's local term: ranks would take different branches at ``if mask.any()``.
    """
    dtensor: DTensor = args[0]
    placements = dtensor.placements
    if outside_mesh(spec_of(dtensor)):
        raise RandomOpError(
            f"the value of a DTensor of shape {tuple(dtensor.shape)} on a rank outside of its mesh: this rank does not "
            "have it; expected a rank of the mesh: guard the call with `mesh.get_coordinate() is not None`"
        )
    for placement in placements:
        if type(placement) is not Replicate:
            break
    else:
        return local_of(dtensor).item()
    if is_symbolic(local_of(dtensor)):
        return stock_dispatch(op, args, kwargs)
    tell_read(dtensor, "item()", for_python=True)
    local, whole = local_of(dtensor).detach(), (Replicate(),) * dtensor.device_mesh.ndim
    if dtensor.dtype == torch.bool:  # sums of booleans overflow into themselves on some backends
        local = local.to(torch.int32)
    with requested_by(f"item() of a DTensor with placements {placements}"):
        value = move_local(local, dtensor.device_mesh, dtensor.shape, placements, whole).wait().item()
    return bool(value) if dtensor.dtype == torch.bool else value


def _t_(op: Any, args: _Args, kwargs: _Kwargs) -> Any:
    """``t_()``, for which DTensor has no rule; ``nn.init.orthogonal_`` needs it."""
    transposed = args[0].t()
    return correct_inplace_view(op, args, kwargs, local_of(transposed), spec_of(transposed))


def _eye_out(op: Any, args: _Args, kwargs: _Kwargs) -> DTensor:
    """``torch.eye(..., out=dtensor)``: DTensor's own writes the rows of rank 0 on every rank."""
    out: DTensor = kwargs["out"]
    spec = spec_of(out)
    region = region_of(spec, str(op))
    if region is not None:
        sizes = tuple(args[:2]) if len(args) > 1 else (args[0], args[0])
        if sizes != tuple(spec.shape):
            raise RandomOpError(
                f"{op} of size {sizes} into a DTensor of shape {tuple(spec.shape)}; expected that shape"
            )
        local = local_of(out)
        local.zero_()
        for box in region.boxes:
            rows, columns = (
                torch.arange(start, start + size, device=local.device)
                for start, size in zip(box.offset, box.sizes, strict=True)
            )
            box.view(local).copy_(rows[:, None] == columns[None, :])
    return out


@functools.cache  # reading the tags of all ops takes as long as a step of a small model
def handlers() -> Mapping[Any, Handler]:
    """The table of handlers by overload. It contains every random op of ATen; unknown ones are refused."""
    table: dict[Any, Handler] = {
        aten.bernoulli_.Tensor: _inplace,
        aten.rand_like.default: _like,
        aten.randn_like.default: _like,
        aten.randint_like.default: _like,
        aten.randint_like.low_dtype: _like,
        aten.randint_like.Tensor: _like,
        aten.bernoulli.default: _bernoulli,
        aten.bernoulli.p: _bernoulli,
        aten.native_dropout.default: _native_dropout,
        aten.normal.Tensor_float: _normal_out_of_place,
        aten.normal.float_Tensor: _normal_out_of_place,
        aten.normal.Tensor_Tensor: _normal_out_of_place,
        aten.multinomial.default: multinomial,
        aten.t_.default: _t_,
        aten.eye.m_out: _eye_out,
        aten.eye.out: _eye_out,
        aten.rrelu_with_noise.default: _rrelu_with_noise,
        aten.rrelu_with_noise_.default: _rrelu_with_noise,
    }
    table.update((op, _inplace) for op in inplace_overloads())
    for packet in (aten.rand_like, aten.randn_like, aten.randint_like):  # torch 2.12 and newer
        for overload in packet.overloads():
            if "generator" in overload and not overload.endswith("out"):
                table[getattr(packet, overload)] = table[packet.default]
    for packet in (aten.poisson, aten.binomial, aten._standard_gamma, aten._sample_dirichlet):
        table[packet.default] = _op_handlers_replayed
    attention = (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
    table.update((getattr(aten, name).default, _fused_attention) for name in attention if hasattr(aten, name))
    # Inference mode does not decompose composite ops, and DTensor has rules for some of them: they must be decomposed.
    composite = ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "rrelu")
    table.update((getattr(aten, name + end).default, _decomposed) for name in composite for end in ("", "_"))
    table.update((op, _decomposed) for op in (aten.item.default, aten.is_nonzero.default))
    for op in seeded_ops():
        if op not in table and "backward" not in op.name():
            table[op] = _decomposed if has_composite_kernel(op) else _refused
    return {op: _numbers_only(handler) for op, handler in table.items()} | {
        aten._local_scalar_dense.default: _local_scalar_dense
    }


# Random ops on plain local tensors that are parts of a global tensor: for kernels that run on local tensors.


class drawing_part_of(TorchDispatchMode):
    """Inside this context, random ops on plain tensors draw this rank's part of a tensor of global ``shape`` on a mesh.

    ``with drawing_part_of(mesh, placements, shape) as draws: ...``: a random op must be called on a tensor of the local
    shape, with or without dims of size 1 before it, with row-major strides; its result is plain, too. ``draws.count`` is the
    number of random ops: code that skips empty tensors must call :meth:`advance` for them, so that generators stay equal.
    Autograd is not affected.
    Communication: none.

    Raises NotImplementedError for a random op on a tensor of another shape, and the errors of the op on a DTensor.
    """

    def __init__(self, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> None:
        super().__init__()
        self.count = 0
        self._mesh, self._placements, self._shape = mesh, tuple(placements), tuple(shape)
        self._handlers = handlers()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        local = args[0]
        if func not in self._handlers or not isinstance(local, torch.Tensor):
            raise UnsupportedRandomOpError(
                f"{func} where a part of a tensor of shape {self._shape} is drawn; expected a random op that "
                "docs/rng.md lists"
            )
        part = self._without_leading_ones(local)
        placed = self._placed(part, str(func))
        result = self._handlers[func](func, (placed, *args[1:]), kwargs)
        self.count += 1
        if result is placed:
            return local
        found = tree_map(own_part, result)
        if part is local:
            return found
        return tree_map(lambda leaf: leaf.view(local.shape) if isinstance(leaf, torch.Tensor) else leaf, found)

    def advance(self, function: Callable[[Any], Any], dtype: torch.dtype, device: torch.device) -> None:
        """Advance the generator as ``function`` of the whole tensor does. For empty parts; called after the context."""
        function(self._placed(torch.empty(self._local_shape(), dtype=dtype, device=device), "advance"))

    def _local_shape(self) -> tuple[int, ...]:
        coordinate = self._mesh.get_coordinate()
        assert coordinate is not None  # ranks outside the mesh have no part
        return local_region(self._shape, self._placements, tuple(self._mesh.shape), tuple(coordinate)).local_shape

    def _without_leading_ones(self, local: torch.Tensor) -> torch.Tensor:
        """The part itself, where an op has put dims of size 1 before its own: attention does, for tensors with three dims,
        since torch 2.14. The numbers of the elements are the same."""
        wanted = self._local_shape()
        extra = local.ndim - len(wanted)
        if extra > 0 and tuple(local.shape) == (*(1,) * extra, *wanted):
            return local.view(wanted)
        return local

    def _placed(self, local: torch.Tensor, what: str) -> DTensor:
        if tuple(local.shape) != self._local_shape():
            raise UnsupportedRandomOpError(
                f"{what} on a local tensor of shape {tuple(local.shape)} where a part of shape {self._local_shape()} "
                f"of {self._shape} is drawn; its numbers cannot match one device: use a kernel that draws for that "
                "shape (attention: torch.nn.attention.sdpa_kernel(SDPBackend.MATH)), or set the dropout to 0"
            )
        spec = make_spec(self._mesh, self._placements, self._shape, contiguous_stride(self._shape), local.dtype)
        return make_dtensor(local, spec)

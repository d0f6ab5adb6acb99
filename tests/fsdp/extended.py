"""Tensor subclasses that are gathered by their own hooks, and models that have them beside plain parameters."""

from __future__ import annotations

import math
from collections import Counter, deque
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

__all__ = ["CALLS", "Codes", "MixedBlock", "Rounded"]

CALLS: Counter[str] = Counter()
"""Of hooks, by this process."""

_KEPT: deque[Any] = deque(maxlen=64)
"""Inputs and results of the last collectives. torch 2.13 lets go of its own references on the backend's thread, which must
not be the last ones: dropping a tensor that Python has seen needs the interpreter's lock, and may abort the process."""

_aten = torch.ops.aten
_MAKES_ANOTHER = {
    _aten.clone.default,
    _aten.detach.default,
    _aten.empty_like.default,
    _aten.new_zeros.default,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten._to_copy.default,
    _aten.view.default,
    _aten.zeros_like.default,
}


def _kept(func: Any, *args: Any, **options: Any) -> Any:
    """Call an op on plain tensors; those of a collective are kept for a while."""
    result = func(*args, **options)
    if func.namespace == "_c10d_functional":
        _KEPT.append((args, result))
    return result


def by_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 codes, and a scale for each row."""
    scales = values.abs().amax(1, keepdim=True).clamp(min=1e-6) / 127
    return (values / scales).round().to(torch.int8), scales


class Rounded(torch.Tensor):
    """A trainable matrix in full precision that is used, and gathered, rounded: ``int8`` by rows, or ``bfloat16``. Its
    gradient is that of the rounded one. What a rank gathers is padded to the first rank's rows, unless ``pads`` is False."""

    master: torch.Tensor
    how: str
    pads: bool

    @staticmethod
    def __new__(cls, values: torch.Tensor, how: str = "int8", pads: bool = True) -> Any:
        made = torch.Tensor._make_wrapper_subclass(
            cls, values.shape, strides=values.stride(), dtype=values.dtype, device=values.device
        )
        made.master, made.how, made.pads = values, how, pads
        return made

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Rounded({self.master}, {self.how})"

    def __tensor_flatten__(self) -> Any:
        return ["master"], (self.how, self.pads)

    @staticmethod
    def __tensor_unflatten__(inner: Any, options: Any, size: Any, stride: Any) -> Any:
        return Rounded(inner["master"], *options)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:  # on one device
            return func(args[0], _Round.apply(args[1]), *args[2:], **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own: list[Rounded] = []

        def inner(tensor: Rounded) -> torch.Tensor:
            own.append(tensor)
            return tensor.master

        plain = tree_map_only(cls, inner, (args, kwargs or {}))
        result = _kept(func, *plain[0], **plain[1])
        if func in _MAKES_ANOTHER:
            return tree_map_only(torch.Tensor, lambda tensor: cls(tensor, own[0].how, own[0].pads), result)
        return (
            args[0] if result is not None and args and isinstance(args[0], cls) and result is own[0].master else result
        )

    def rounded(self) -> torch.Tensor:
        if self.how == "bfloat16":
            return self.master.bfloat16().to(self.dtype)
        codes, scales = by_rows(self.master)
        return codes * scales

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> Any:
        CALLS["pre"] += 1
        assert mesh.ndim == 1 and len(outer_size) == 2 and tuple(outer_stride) == (outer_size[1], 1)
        assert isinstance(module, nn.Linear)
        rows = math.ceil(outer_size[0] / mesh.size())
        inputs = (self.master.bfloat16(),) if self.how == "bfloat16" else by_rows(self.master)
        if self.pads:
            inputs = tuple(nn.functional.pad(one, (0, 0, 0, rows - len(one)), value=1) for one in inputs)
        return inputs, (self.how, outer_size)

    @torch.no_grad()
    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        CALLS["post" if out is None else "refill"] += 1
        assert metadata[0] == self.how and all(type(one) is torch.Tensor for one in outputs)
        full = outputs[0] * outputs[1] if self.how == "int8" else outputs[0]
        full = full[: metadata[1][0]].to(param_dtype, copy=True)
        if out is None:
            return full, (full,)
        assert out.dtype == param_dtype
        out = out.to_local() if isinstance(out, DTensor) else out
        with torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(full)
        return None


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Rounded) -> torch.Tensor:
        return weight.rounded()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient


class Codes(torch.Tensor):
    """A frozen matrix that is nothing but uint8 codes and a float16 scale and offset for each row, also while it is used."""

    codes: torch.Tensor
    affine: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, affine: torch.Tensor, dtype: torch.dtype = torch.float32) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)
        made.codes, made.affine = codes, affine
        return made

    def __init__(self, *_: Any) -> None: ...

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Codes({self.codes}, {self.affine})"

    @classmethod
    def of(cls, values: torch.Tensor) -> Codes:
        low, high = values.aminmax(dim=1, keepdim=True)
        affine = torch.cat([(high - low) / 255, low], 1).half()
        codes = ((values - affine[:, 1:]) / affine[:, :1]).round().clamp(0, 255).to(torch.uint8)
        return cls(codes, affine, values.dtype)

    def __tensor_flatten__(self) -> Any:
        return ["codes", "affine"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: Any, dtype: Any, size: Any, stride: Any) -> Any:
        return Codes(inner["codes"], inner["affine"], dtype)

    def decoded(self) -> torch.Tensor:
        return self.codes.to(self.dtype) * self.affine[:, :1].to(self.dtype) + self.affine[:, 1:].to(self.dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            return func(args[0], args[1].decoded(), *args[2:], **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first, options = args[0], kwargs or {}
        if func is _aten.copy_.default and isinstance(first, cls):
            first.codes.copy_(args[1].codes)
            first.affine.copy_(args[1].affine)
            return first
        if func is _aten.new_zeros.default:
            rows = args[1][0]
            return cls(first.codes.new_zeros(args[1]), first.affine.new_zeros((rows, 2)), first.dtype)
        if func is _aten.as_strided.default:
            assert tuple(args[1]) == tuple(first.shape)
            return cls(first.codes, first.affine, first.dtype)
        if func is _aten.view.default:  # FSDP2's own, to one dim
            return cls(first.codes.view(args[1]), first.affine, first.dtype)
        if func is _aten._to_copy.default:
            moved = {key: value for key, value in options.items() if key != "dtype"}
            dtype = options.get("dtype") or first.dtype
            return cls(first.codes.to(**moved, copy=True), first.affine.to(**moved, copy=True), dtype)
        if func in _MAKES_ANOTHER:
            codes, affine = func(first.codes, *args[1:], **options), func(first.affine, *args[1:], **options)
            if isinstance(codes, torch.Tensor):
                return cls(codes, affine, first.dtype)
            return [cls(*pair, first.dtype) for pair in zip(codes, affine, strict=True)]
        args, options = tree_map_only(cls, cls.decoded, (args, options))
        return _kept(func, *args, **options)

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.codes, self.affine), self.dtype

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        codes, affine = outputs
        assert metadata == self.dtype
        if out is None:
            return Codes(codes, affine, param_dtype), outputs
        assert out.codes.data_ptr() == codes.data_ptr() and out.affine.data_ptr() == affine.data_ptr()
        return None


class MixedBlock(nn.Module):
    """Two trainable subclasses of different kinds, a frozen one, and plain parameters, some of them frozen."""

    def __init__(
        self, dim: int, *, hidden: int = 0, frozen: bool = True, ways: tuple[str, str] = ("int8", "bfloat16")
    ) -> None:
        super().__init__()
        hidden = hidden or 2 * dim
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.up.weight = nn.Parameter(Rounded(self.up.weight.detach(), ways[0]))
        self.down = nn.Linear(hidden, dim, bias=False)
        self.down.weight = nn.Parameter(Rounded(self.down.weight.detach(), ways[1]))
        self.fixed = nn.Linear(dim, dim) if frozen else None
        if self.fixed is not None:
            self.fixed.weight = nn.Parameter(Codes.of(self.fixed.weight.detach()), requires_grad=False)
            self.fixed.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        if self.fixed is not None:
            y = y + self.fixed(y)
        return x + self.down(torch.relu(self.up(y)))

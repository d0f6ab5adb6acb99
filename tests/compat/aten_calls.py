"""Calls of aten ops on small tensors, as PyTorch's own samples of its functions make them, forward and backward.

Ops that no function reaches are called as their siblings are: ``add_`` and ``add.out`` as ``add``, and overloads that take
numbers with numbers in place of tensors. A call that raises is none.
"""

from __future__ import annotations

import functools
import itertools
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["Call", "add_siblings", "by_hand", "record", "samples"]

_MAX_ELEMENTS = 1024
_MAX_TENSORS = 12
_MAX_CALLS = 12
"""Of one op: with other shapes, dtypes or arguments."""


@dataclass(frozen=True, eq=False)
class Call:
    """Arguments of an op. Its tensors are the caller's own."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [x for x in tree_leaves((self.args, self.kwargs)) if isinstance(x, torch.Tensor)]

    def on(self, tensors: Iterable[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with these in place of tensors."""
        left = iter(tensors)
        args, kwargs = tree_map_only(torch.Tensor, lambda _: next(left), (self.args, self.kwargs))
        return args, kwargs

    def written(self) -> list[bool]:
        """Whether the op writes to each of the tensors."""
        named = zip(self.op._schema.arguments, self.args)
        by_name = {argument.name: argument for argument in self.op._schema.arguments}
        given = [*named, *((by_name[name], value) for name, value in self.kwargs.items())]
        return [
            argument.alias_info is not None and argument.alias_info.is_write
            for argument, value in given
            for x in tree_leaves(value)
            if isinstance(x, torch.Tensor)
        ]

    def __str__(self) -> str:
        args, kwargs = self.on(f"{x.dtype}{list(x.shape)}{list(x.stride())}" for x in self.tensors)
        return f"{self.op}{args}{kwargs or ''}"


class _Recorder(TorchDispatchMode):
    def __init__(self, calls: dict[Any, dict[str, Call]], ops: frozenset[Any]) -> None:
        super().__init__()
        self.calls, self.ops = calls, ops

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = Call(op, tuple(args), dict(kwargs or {})) if op in self.ops else None
        new = None if call is None else _new(self.calls.get(op, {}), call)
        result = op(*args, **(kwargs or {}))
        if new is not None:
            self.calls.setdefault(op, {})[str(new)] = new
        return result


def _new(known: dict[str, Call], call: Call) -> Call | None:
    """The call with tensors of its own; None where it is known, or not small."""
    tensors = call.tensors
    if len(known) >= _MAX_CALLS or not tensors or len(tensors) > _MAX_TENSORS or str(call) in known:
        return None
    if any(type(x) is not torch.Tensor and type(x) is not torch.nn.Parameter for x in tensors):
        return None
    if any(x.numel() > _MAX_ELEMENTS or x.layout != torch.strided or x.is_quantized or x.is_meta for x in tensors):
        return None
    return Call(call.op, *call.on(x.detach().clone() for x in tensors))


def record(functions: Iterable[Callable[[], Any]], ops: Iterable[Any]) -> dict[Any, list[Call]]:
    """Calls that the functions make of the ops. A function that raises has made those before."""
    calls: dict[Any, dict[str, Call]] = {}
    recorder = _Recorder(calls, frozenset(ops))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for function in functions:
            torch.manual_seed(0)
            try:
                with recorder:
                    function()
            except Exception:  # a sample that this build has no kernel for
                continue
    return {op: list(found.values()) for op, found in calls.items()}


def samples(chosen: Callable[[Sequence[Any]], Sequence[Any]] = lambda infos: infos) -> Iterator[Callable[[], Any]]:
    """Functions with arguments, of those that PyTorch's tests have samples for."""
    for info in chosen(_infos()):
        supported = info.supported_dtypes("cpu")
        wanted = (torch.float64, torch.float32, torch.int64, torch.bool, torch.complex64, torch.bfloat16)
        dtypes = [dtype for dtype in wanted if dtype in supported]
        # Most ops take floating-point numbers; a few samples of others show which dtypes decide.
        for dtype, limit in [
            *[(dtype, 8) for dtype in dtypes[:1]],
            *[(dtype, 1) for dtype in dtypes[1:] if dtype is torch.int64],
        ]:
            yield from _of(info, dtype, limit)


def by_hand() -> Iterator[Callable[[], Any]]:
    """Calls of ops that no sample reaches."""
    aten = torch.ops.aten
    x, y, z = (torch.randn(4, 6, dtype=torch.float64) for _ in range(3))
    w, step = torch.ones(6, dtype=torch.float64), torch.ones((), dtype=torch.float32)
    positive = y.abs() + 1
    yield lambda: aten.slice_scatter(x, y[:, :2], 1, 1, 3)
    yield lambda: aten.slice_scatter(x, y[:2], 0, 0, 2)
    yield lambda: aten.native_dropout(x, 0.5, True)
    yield lambda: aten.norm(x, 2)
    yield lambda: aten.linalg__powsum(x, 2)
    yield lambda: aten._foreach_powsum([x, y], 2)
    yield lambda: aten.view(x, torch.int64)
    yield lambda: aten.is_same_size(x, y)
    yield lambda: aten._fused_rms_norm(x, [6], w, 1e-5)
    yield lambda: aten._index_put_impl_(x.clone(), [torch.tensor([0, 2])], y[:2])
    yield lambda: aten._native_batch_norm_legit(x, w, w, True, 0.1, 1e-5)
    yield lambda: aten._native_batch_norm_legit_no_training(x, w, w, w, w.abs(), 0.1, 1e-5)
    yield lambda: aten._foreach_addcdiv_([x.clone(), y.clone()], [x, y], [positive, positive], [1.0, 2.0])
    yield lambda: aten._foreach_addcmul_([x.clone(), y.clone()], [x, y], [y, z], [1.0, 2.0])
    yield lambda: aten._foreach_addcdiv([x, y], [x, y], [positive, positive], [1.0, 2.0])
    yield lambda: aten._foreach_addcmul([x, y], [x, y], [y, z], [1.0, 2.0])
    scalars = torch.tensor([1.0, 2.0], dtype=torch.float64)
    yield lambda: aten._foreach_addcdiv_([x.clone(), y.clone()], [x, y], [positive, positive], scalars)
    yield lambda: aten._foreach_addcmul_([x.clone(), y.clone()], [x, y], [y, z], scalars)
    yield lambda: aten._foreach_pow(2.0, [x, y])
    yield lambda: aten._amp_foreach_non_finite_check_and_unscale_(
        [x.clone().float(), y.clone().float()], torch.zeros(1), torch.ones(1)
    )
    for fused in (aten._fused_adam_, aten._fused_adamw_):
        state: Any = [x.clone()], [y], [z.clone()], [positive.clone()], [], [step.clone()]
        numbers = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False, "maximize": False}
        yield functools.partial(fused, *state, lr=0.1, **numbers)
    yield lambda: torch.rand_like(x)
    image = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    for op in (aten._upsample_bilinear2d_aa, aten._upsample_bicubic2d_aa):
        yield functools.partial(op, image, [5, 8], False)
    yield lambda: aten._upsample_bilinear2d_aa_backward(image, [4, 5], [2, 3, 8, 8], False)
    yield lambda: aten._upsample_bicubic2d_aa_backward(image, [4, 5], [2, 3, 8, 8], False)
    whole = torch.arange(24).view(4, 6)
    for name in ("__lshift__", "__rshift__", "__ilshift__", "__irshift__"):
        yield functools.partial(getattr(aten, name), whole.clone(), 1)
        yield functools.partial(getattr(aten, name), whole.clone(), torch.ones_like(whole))
    a, b = (torch.randn(2, 16, 16).bfloat16() for _ in range(2))
    yield lambda: aten._grouped_mm(a, b)
    yield lambda: aten._grouped_mm(a.view(32, 16), b, torch.tensor([16, 32], dtype=torch.int32))


def _infos() -> Sequence[Any]:
    if "expecttest" not in sys.modules:
        try:
            import expecttest  # noqa: F401
        except ImportError:  # of which the samples need nothing but that it is there
            module: Any = types.ModuleType("expecttest")
            module.TestCase = unittest.TestCase
            sys.modules["expecttest"] = module
    from torch.testing._internal import common_methods_invocations as library

    return [*library.op_db, *_foreach(library)]


def _foreach(library: Any) -> Iterator[Any]:
    for name in ("unary", "binary", "pointwise", "reduce", "other"):
        yield from getattr(library, f"foreach_{name}_op_db")


def _of(info: Any, dtype: torch.dtype, limit: int) -> Iterator[Callable[[], Any]]:
    floating = dtype.is_floating_point
    is_foreach = info.name.startswith("_foreach") or "foreach" in type(info).__name__.lower()
    torch.manual_seed(0)
    try:
        extra = {"num_input_tensors": [3]} if is_foreach else {}
        found = info.sample_inputs("cpu", dtype, requires_grad=floating and info.supports_autograd, **extra)
        listed = list(itertools.islice(found, 200))
    except Exception:  # PyTorch's tests skip these
        return
    for sample in listed[:: max(1, len(listed) // limit)][:limit]:
        yield functools.partial(_run, info.op, sample)
        if info.inplace_variant is not None:
            yield functools.partial(_run_in_place, info.inplace_variant, sample)


def _run_in_place(function: Callable[..., Any], sample: Any) -> None:
    copied = tree_map_only(torch.Tensor, lambda x: x.detach().clone(), sample.input)
    function(copied, *sample.args, **sample.kwargs)


def _run(function: Callable[..., Any], sample: Any) -> None:
    results = function(sample.input, *sample.args, **sample.kwargs)
    inputs = [x for x in tree_leaves((sample.input, sample.args, sample.kwargs)) if _learns(x)]
    outputs = [x for x in tree_leaves(results) if _learns(x)]
    if inputs and outputs:
        gradients = [torch.randn_like(x) for x in outputs]
        torch.autograd.grad(outputs, inputs, gradients, allow_unused=True)


def _learns(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad and (x.is_leaf or x.grad_fn is not None)


def add_siblings(calls: dict[Any, list[Call]], ops: Iterable[Any]) -> None:
    """Call the ops that have no call as ops with the same name are called."""
    by_name: dict[str, list[Call]] = {}
    for op, found in calls.items():
        by_name.setdefault(_base_name(op), []).extend(found)
    for op in ops:
        made: dict[str, Call] = {}
        for call in by_name.get(_base_name(op), []):
            if not calls.get(op) and len(made) < _MAX_CALLS // 2:
                _add(made, op, call)
        if made:
            calls[op] = list(made.values())


def _base_name(op: Any) -> str:
    name = str(op.name()).partition(".")[0]
    return name.strip("_").removesuffix("_copy").replace("::_", "::")


def _add(made: dict[str, Call], op: Any, call: Call) -> None:
    declared = call.op._schema.arguments
    given = dict(zip((argument.name for argument in declared), call.args)) | call.kwargs
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    left = {name for name, value in given.items() if isinstance(value, torch.Tensor)}
    for position, argument in enumerate(op._schema.arguments):
        if argument.is_out:
            continue
        name = argument.name
        if name not in given and position < len(declared):
            name = declared[position].name  # as `other` is to `scalar`
        left.discard(name)
        value = _as_type(given.get(name), str(argument.type))
        if value is None and argument.has_default_value():
            value = argument.default_value
        elif value is None and not str(argument.type).startswith("Optional"):
            return
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    if left:  # what the other op takes without it is another computation; some kernels do not check, and crash
        return
    try:
        made_call = _with_results(Call(op, tuple(args), kwargs), call)
        new = _new(made, made_call)
        if new is None:
            return
        trial = Call(op, *new.on(x.clone() for x in new.tensors))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            op(*trial.args, **trial.kwargs)
    except Exception:  # not a way to call it
        return
    made[str(new)] = new


def _with_results(new: Call, call: Call) -> Call:
    """With tensors of zeros in the place of ``out=``."""
    outs = [argument for argument in new.op._schema.arguments if argument.is_out]
    if not outs:
        return new
    tensors = Call(call.op, *call.on(x.clone() for x in call.tensors))
    results = call.op(*tensors.args, **tensors.kwargs)
    zeros = [torch.zeros_like(x) for x in (results if isinstance(results, list | tuple) else [results])]
    is_list = str(outs[0].type).startswith("List")
    named = {outs[0].name: zeros} if is_list else dict(zip((out.name for out in outs), zeros, strict=True))
    return Call(new.op, new.args, new.kwargs | named)


def _as_type(value: Any, kind: str) -> Any:
    """The value, or one like it, for an argument of this type."""
    bare = kind.removeprefix("Optional[").removesuffix("]")
    if bare == "number":
        return 2 if isinstance(value, torch.Tensor) else value
    if bare == "Tensor" and isinstance(value, int | float) and not isinstance(value, bool):
        return torch.tensor(float(value), dtype=torch.float64)
    if bare == "List[number]" and isinstance(value, list):
        return [2.0] * len(value)
    return value

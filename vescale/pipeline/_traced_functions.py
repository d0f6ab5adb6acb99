"""What a trace does about functions that ops do not tell it: means over labels (calls of ``cross_entropy`` and
``nll_loss``), whose number in a micro-batch is not that in the batch; and reads of values that a trace does not have, those
of tensors that depend on parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from vescale.compat.tensor_subclasses import tree_leaves, tree_map, without_modes

_LEAVES = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}


class UnknownValueError(NotImplementedError):
    """Code in a trace asks for a value of a tensor on the meta device."""


class UnknownResultError(NotImplementedError):
    """An op cannot run on the meta device."""

    def __init__(self, op: Any, reason: str) -> None:
        super().__init__(f"{op}: {reason.splitlines()[0][:120]}")
        self.has_unknown_shape = torch.Tag.dynamic_output_shape in op.tags


def refuse_reading(op: Any, tensors: Sequence[torch.Tensor]) -> None:
    """Before an op on these: raises UnknownValueError where it makes a Python value of one without values."""
    if torch.Tag.data_dependent_output in op.tags and any(t.is_meta for t in tensors):
        raise UnknownValueError(f"{op} reads a value that depends on parameters")


def refuse_leaving(func: Any, args: Sequence[Any]) -> None:
    """Before a torch function: raises UnknownValueError where it takes the values of a tensor out of PyTorch. (No op runs
    there, and PyTorch's own errors for it have several classes.)"""
    if func in _LEAVES and args and args[0].is_meta:
        raise UnknownValueError(f"Tensor.{func.__name__} reads values that depend on parameters")


def why_unknown(error: UnknownValueError | UnknownResultError) -> str:
    """What a forward does that raised ``error`` in a trace, and what to do about it, for a message."""
    if isinstance(error, UnknownValueError):
        return (
            f"branches on values of parameters, or reads them in Python ({error}), so that it is not known before the "
            "step what stages send; use torch.where in place of a branch, and return logged values instead of "
            "reading them"
        )
    if not error.has_unknown_shape:
        return (
            f"calls an op that cannot run without values ({error}), so that it is not known before the step what stages "
            "send; register a kernel that computes what it returns without values (PyTorch's register_fake), or use "
            "another op"
        )
    return (
        "has shapes that depend on the values of parameters, so that it is not known before the step what stages "
        f"send ({error}); in place of indexing by a mask, multiply by the mask and divide "
        "by its sum; for experts, add a local entry of kind experts for their module, or use an implementation "
        "without a loop (experts_implementation='grouped_mm')"
    )


_ON_ONE_DEVICE = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu} | {
    getattr(place, name) for place in (torch, torch.Tensor) for name in ("quantile", "nanquantile")
}


def is_mean_of_labels(func: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments by name, of a call of ``cross_entropy`` or ``nll_loss`` that takes a mean over labels."""
    if func not in (F.cross_entropy, F.nll_loss):
        return None
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = {**dict(zip(names, args)), **kwargs}
    return given if given.get("reduction", "mean") == "mean" and not given["target"].is_floating_point() else None


def _on_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) and not value.is_meta else value


class TracedFunctions(TorchFunctionMode):
    """Beside a trace: notes means over labels, by id, with the logits, the labels and the weights of classes.
    Functions that refuse operands on several devices before any op runs get all of them on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.means: dict[int, tuple[torch.Tensor, ...]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        refuse_leaving(func, args)
        if func in _ON_ONE_DEVICE and any(isinstance(v, torch.Tensor) and v.is_meta for v in tree_leaves(args)):
            with without_modes():
                args, kwargs = tree_map(_on_meta, (args, kwargs))
                if len(args) > 1 and isinstance(args[1], float):  # a quantile, of which a tensor would be made
                    args = (args[0], torch.empty((), dtype=args[0].dtype, device="meta"), *args[2:])
        result = func(*args, **kwargs)
        given = is_mean_of_labels(func, args, kwargs)
        if given is not None:
            of = (given["input"], given["target"], given.get("weight"))
            self.means[id(result)] = result, *(v for v in of if v is not None)
        return result

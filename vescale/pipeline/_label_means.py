"""Means over labels, whose number in a micro-batch is not that in the batch: calls of ``cross_entropy`` and ``nll_loss``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from vescale.compat.tensor_subclasses import tree_leaves, tree_map, without_modes
from vescale.pipeline._unknown_values import refuse_leaving

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

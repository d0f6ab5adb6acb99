"""What a script computes of a model's outputs before it calls ``backward``: described, for ranks to compare.

A term that only one rank adds to its loss, a number that each rank has counted for itself, or a row that it picks by its
rank change gradients on that rank alone. Where gradients are summed over ranks, all parameters stay equal nevertheless. So
the graph between the losses and the model is described: its ops, their numbers, and constants that all ranks hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from vescale.checks._descriptions import tensor_text
from vescale.compat import local_of, node_sequence, spec_of

__all__ = ["describe_backward"]

_MAX_NODES = 1000
_NUMBERS = (bool, int, float, complex)
_LOCAL = "_ToTorchTensorBackward"
"""Of ``to_local()``, behind which each rank computes on its own."""
_GLOBAL = "_FromTorchTensorBackward"
"""Of ``DTensor.from_local``, before which it has done so."""


def describe_backward(
    losses: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None], begin: int
) -> list[tuple[str, str]]:
    """(name, text) of gradients that ``backward`` is given, and of each node of the graphs that is numbered ``begin`` or
    later, from the losses down. Empty where a loss is of this rank's own part of a tensor, and for larger graphs."""
    rows = [(f"gradient {n} given to backward()", text) for n, x in enumerate(gradients) if (text := _constant(x))]
    waiting: list[Any] = [loss.grad_fn for loss in reversed(losses) if loss.grad_fn is not None]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node in seen or node_sequence(node) < begin:
            continue
        seen.add(node)
        name = node.name()
        if name == _LOCAL or len(seen) > _MAX_NODES:
            return []
        rows.append(
            (f"op {len(seen)} before the loss", f"{name.removesuffix('0').removesuffix('Backward')}{_saved(node)}")
        )
        if name != _GLOBAL:
            waiting += [each for each, _ in reversed(node.next_functions) if each is not None]
    return rows


def _saved(node: Any) -> str:
    """Numbers and constants that an op keeps for its backward."""
    texts = []
    for name in dir(node):
        if not name.startswith("_saved_"):
            continue
        try:
            value = getattr(node, name)
        except RuntimeError:  # freed, or changed in place, which its backward raises
            continue
        is_number = isinstance(value, _NUMBERS)
        is_list = isinstance(value, tuple) and all(isinstance(x, _NUMBERS) for x in value)
        text = repr(value) if is_number or is_list else _constant(value)
        if text:
            texts.append(f"{name.removeprefix('_saved_')}={text}")
    return f"({', '.join(texts)})"


def _constant(value: Any) -> str:
    """Of a tensor that requires no gradient and is the same on all ranks."""
    if not isinstance(value, torch.Tensor) or value.requires_grad:
        return ""
    if isinstance(value, DTensor):
        if not all(p.is_replicate() for p in spec_of(value).placements):
            return ""
        value = local_of(value)
    if type(value) is not torch.Tensor or not value.is_cpu:  # kernels of other devices may not repeat their bits
        return ""
    return repr(value.item()) if not value.ndim else tensor_text(value, fully=True)

"""What a script computes of a model's outputs before it calls ``backward``: described, for ranks to compare.

A term that only one rank adds to its loss, a number that each rank has counted for itself, or a row that it picks by its
rank change gradients on that rank alone. Where gradients are summed over ranks, all parameters stay equal nevertheless. So
the graph between the losses and the model is described: its ops, their numbers, and constants that all ranks hold. What
an op has made itself is left out: it follows from these, or is memory that the op leaves as it is (padding, workspaces).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from vescale.checks._descriptions import tensor_text
from vescale.checks._mismatches import COMPUTED, UNKNOWN
from vescale.checks._steps import StepChecks, is_unchecked
from vescale.compat import (
    PACKED,
    has_dispatch_modes,
    in_backward,
    in_transform,
    local_of,
    no_torch_function,
    node_sequence,
    saved_operands,
    sequence_number,
    spec_of,
    without_modes,
)

_MAX_NODES = 1000
_NUMBERS = (bool, int, float, complex)
_LOCAL = "_ToTorchTensorBackward"
"""Of ``to_local()``, behind which each rank computes on its own."""
_GLOBAL = "_FromTorchTensorBackward"
"""Of ``DTensor.from_local``, before which it has done so."""
_NOTHING = [(COMPUTED, UNKNOWN)]
_THREAD = threading.local()


class ScriptGraph:
    """What this thread computes from now on, after the forward of a model that ``checks`` compare, until their next one.

    To be held by the graph of the forward: where nothing can call backward any more, nothing is described.
    """

    def __init__(self, checks: StepChecks) -> None:
        self._begin = sequence_number()  # of this thread
        self._rows: list[tuple[str, str]] = []
        self._has_derivatives = False  # of the model, which later losses may be computed of
        graphs = getattr(_THREAD, "graphs", None)
        if graphs is None:
            graphs = _THREAD.graphs = weakref.WeakValueDictionary()
        graphs[checks] = self

    @staticmethod
    def end(checks: StepChecks) -> None:
        """What this thread computes from now on is not compared."""
        graphs = getattr(_THREAD, "graphs", None)
        if graphs is None:
            return
        graphs.pop(checks, None)
        if not graphs:
            _THREAD.graphs = None  # so that most steps have nothing to look at

    def describe(self, losses: Sequence[Any], gradients: Sequence[Any], creates_graph: bool) -> None:
        is_unknown = self._has_derivatives or has_dispatch_modes()  # which would see the ops
        with without_modes():  # a mode gets the numbers that tensors stand for as Python numbers
            self._rows = _NOTHING if is_unknown else _describe(losses, gradients, self._begin)
        self._has_derivatives = self._has_derivatives or creates_graph

    def take(self) -> list[tuple[str, str]]:
        """(name, text) of what the backward that runs has begun from. A second hook of it finds nothing."""
        rows, self._rows = self._rows, []
        return rows


def follows_graphs() -> bool:
    """Whether what this thread computes is described when a backward begins."""
    return getattr(_THREAD, "graphs", None) is not None


def describe_graphs(losses: Sequence[Any], gradients: Sequence[Any], *, creates_graph: bool) -> None:
    """Before a backward that this thread begins."""
    graphs = getattr(_THREAD, "graphs", None)
    if graphs is None or in_backward() or is_unchecked() or in_transform():
        return
    with no_torch_function():
        for graph in tuple(graphs.values()):
            graph.describe(losses, gradients, creates_graph)


def _describe(losses: Sequence[Any], gradients: Sequence[Any], begin: int) -> list[tuple[str, str]]:
    """(name, text) of gradients that ``backward`` is given, and of each node of the graphs that is numbered ``begin`` or
    later, from the losses down. Nothing to compare where a loss is of this rank's own part of a tensor or is no tensor,
    and for larger graphs."""
    if not all(isinstance(loss, torch.Tensor) for loss in losses):
        return _NOTHING
    rows = [
        (f"{COMPUTED}gradient {n} given to backward()", text) for n, x in enumerate(gradients) if (text := _constant(x))
    ]
    waiting: list[Any] = [loss.grad_fn for loss in reversed(losses) if loss.grad_fn is not None]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node in seen or node_sequence(node) < begin:
            continue
        seen.add(node)
        name = node.name()
        if name == _LOCAL or len(seen) > _MAX_NODES:
            return _NOTHING
        op = name.removesuffix("0").removesuffix("Backward")
        rows.append((f"{COMPUTED}op {len(seen)} before the loss", _op_text(op, node)))
        if name != _GLOBAL:
            waiting += [each for each, _ in reversed(node.next_functions) if each is not None]
    return rows


def _op_text(op: str, node: Any) -> str:
    """An op, with the numbers and constants that it keeps for its backward."""
    texts = []
    for name, value in saved_operands(node):
        if value is PACKED:  # maybe on this rank only
            return UNKNOWN
        is_list = isinstance(value, tuple) and all(isinstance(x, _NUMBERS) for x in value)
        text = repr(value) if is_list or isinstance(value, _NUMBERS) else _constant(value)
        if text:
            texts.append(f"{name}={text}")
    return f"{op}({', '.join(texts)})"


def _constant(value: Any) -> str:
    """Of a tensor that requires no gradient and is the same on all ranks."""
    if not isinstance(value, torch.Tensor) or value.requires_grad:
        return ""
    if isinstance(value, DTensor):
        if not all(p.is_replicate() for p in spec_of(value).placements):
            return ""
        value = local_of(value)
    # Kernels of other devices may not repeat their bits, and would have to be waited for.
    if type(value) is not torch.Tensor or not value.is_cpu or value.layout is not torch.strided:
        return ""
    if value.numel() and not value.untyped_storage().nbytes():  # of a unit, whose memory is free until the backward
        return ""
    return repr(value.item()) if not value.ndim else tensor_text(value, fully=True)

"""Collectives among ranks that do not exist: every other rank has what this one has."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from vescale.compat import tree_leaves, tree_map

__all__ = ["follow_collective"]


class _Values(Protocol):
    log: Any

    def is_known(self, tensor: torch.Tensor) -> bool: ...
    def learn(self, tensor: torch.Tensor) -> None: ...
    def forget(self, tensor: torch.Tensor) -> None: ...


def follow_collective(values: _Values, op: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
    """Call a collective, which does nothing on the ``fake`` backend, and give its outputs what ranks with equal data would
    get; unknown values, where they are moved, stay unknown."""
    name = op.overloadpacket.__name__
    values.log.communicated(x.untyped_storage() for x in tensors if x.numel())
    given = _inputs(name, args)  # one without elements says nothing about what the others send
    known = any(x.numel() for x in given) and all(values.is_known(x) for x in given)
    result = op(*args, **kwargs) if known or op.namespace != "c10d" else _call_empty(op, args, kwargs)
    outputs = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)] or _outputs(name, args)
    for x in outputs:
        if not known:
            values.forget(x)
        else:
            values.learn(x)
    if known:
        _fill(name, args, outputs)
    return result


def _call_empty(op: Any, args: Any, kwargs: Any) -> Any:
    """The call on tensors without elements, with the tensors in its result: the backend copies inputs to outputs, which
    would write to memory that nothing else touches."""
    stand_ins: list[tuple[torch.Tensor, torch.Tensor]] = []

    def empty(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        stand_ins.append((x.new_empty(0), x))
        return stand_ins[-1][0]

    def full(x: Any) -> Any:
        return next((own for stand_in, own in stand_ins if stand_in is x), x)

    # Numbers in lists are sizes of the ranks' parts.
    args = [[] if isinstance(a, list) and a and all(type(n) is int for n in a) else tree_map(empty, a) for a in args]
    return tree_map(full, op(*args, **{name: tree_map(empty, value) for name, value in kwargs.items()}))


def _inputs(name: str, args: Any) -> list[torch.Tensor]:
    given = [[x for x in tree_leaves(a) if isinstance(x, torch.Tensor)] for a in args]
    given = [found for found in given if found]
    if not given:
        return []
    return given[-1] if len(given) > 1 else given[0]


def _outputs(name: str, args: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(args[:1]) if isinstance(x, torch.Tensor)]


def _fill(name: str, args: Any, outputs: list[torch.Tensor]) -> None:
    """Outputs of a collective on known values, among ranks that have the same. A rank that gathers for another one has
    none."""
    inputs = _inputs(name, args)
    if len(inputs) != 1 or not outputs or inputs[0] is outputs[0] or not inputs[0].numel():
        return
    source = inputs[0].reshape(-1)
    for target in outputs:
        if target.numel() and target.dtype == source.dtype and target.is_contiguous():
            repeated = source.repeat(-(-target.numel() // source.numel()))
            target.view(-1).copy_(repeated[: target.numel()])

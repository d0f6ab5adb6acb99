"""Ops on lists of tensors, and fused optimizers: elementwise, one list index at a time."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from vescale.ops._alignment import align
from vescale.ops._call import OpCall, Placements, names
from vescale.ops._decision import Decision
from vescale.ops._registry import register, register_family

__all__ = ["is_foreach", "is_listed"]

_REDUCTIONS = names("_foreach_norm _foreach_max _foreach_powsum")
_FUSED = names("_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_")


def is_foreach(op: Any) -> bool:
    """Whether the op does the same elementwise computation on each index of lists of tensors."""
    name = op.overloadpacket.__name__
    return name in _FUSED or (name.startswith("_foreach_") and name not in _REDUCTIONS)


def is_listed(op: Any) -> bool:
    """Whether the op computes something of each index of lists of tensors, by itself."""
    name = op.overloadpacket.__name__
    return name in _FUSED or name.startswith("_foreach_")


def foreach_rule(call: OpCall) -> Decision | None:
    """Each index of the lists is one elementwise computation, aligned with :func:`align`: it follows the tensor that is
    written to, or the first one with a custom placement. Tensors outside of the lists, and one-element ones, are numbers.

    No communication when the operands have the same placements at each index. A fused optimizer's state that has other
    placements than its parameter (made from a gradient that had them) is moved there and back.
    """
    lists: dict[int, list[int]] = defaultdict(list)
    for operand, (argument, index) in enumerate(call.positions):
        if index is not None and call.argument_name(argument) != "state_steps":
            lists[index].append(operand)
    inputs: list[Placements] = [(Replicate(),) * spec.mesh.ndim for spec in call.operands]
    outputs: list[Placements] = []
    for _, operands in sorted(lists.items()):
        specs = [call.operands[operand] for operand in operands]
        written = [place for place, operand in enumerate(operands) if operand in call.mutated]
        alignment = align(call.name, specs, specs[0].shape, written, stock_may_lead=True)
        if alignment is None or alignment.broadcasts or alignment.prepare:
            return None
        for operand, placements in zip(operands, alignment.inputs):
            inputs[operand] = placements
        outputs.append(alignment.leader)
    scratch: tuple[int, ...] = ()
    if call.name in _FUSED:
        arguments = [call.argument_name(argument) for argument, _ in call.positions]
        scratch = tuple(operand for operand, name in enumerate(arguments) if name == "grads")
    return Decision(tuple(inputs), None if call.meta is None else tuple(outputs), scratch=scratch)


def _with_numbers(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An op whose scalars are a tensor, one of each index: their values are needed before anything can be decided."""
    values = kwargs.get("scalars", args[-1])
    scalars = (values.full_tensor() if isinstance(values, DTensor) else values).tolist()
    return op.overloadpacket.ScalarList(*args[:3], scalars)


register_family("foreach", covers=is_foreach, rule=foreach_rule)
for _name in ("addcmul", "addcmul_", "addcdiv", "addcdiv_"):
    register(getattr(torch.ops.aten, f"_foreach_{_name}").Tensor, handler=_with_numbers, takes_plain=True)

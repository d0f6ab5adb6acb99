"""Checks of what a user's placement rule returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor.placement_types import Placement

from vescale.compat import TensorMeta
from vescale.errors import RuleError
from vescale.ops._call import OpCall
from vescale.ops._decision import Decision

__all__ = ["check_decision"]


def check_decision(rule: Any, call: OpCall, found: Any) -> None:
    """Raise where ``found``, which ``rule`` returned for ``call``, is not a decision that the call can be run with.

    Raises:
        TypeError: neither a :class:`Decision` nor None.
        ValueError: inputs or outputs that do not fit the operands and results of the op.
    """
    if found is None:
        return
    of = f"{call.op}: the rule {getattr(rule, '__qualname__', rule)!s} returned"
    if not isinstance(found, Decision):
        raise RuleError(f"{of} {found!r}; expected a Decision, or None to leave the call to the next rule")
    if not isinstance(found.inputs, Sequence) or len(found.inputs) != len(call.operands):
        raise RuleError(
            f"{of} inputs {found.inputs!r}; expected a tuple with the placements of each of the {len(call.operands)} tensor "
            "operands, in the order of call.operands"
        )
    for index, (spec, placements) in enumerate(zip(call.operands, found.inputs)):
        _check_placements(f"{of} inputs[{index}]", placements, spec.mesh.ndim)
    if call.mutated or found.redispatch:
        return  # the results are the operands written to, or what the op returns
    metas = [call.meta] if call.meta is None or isinstance(call.meta, TensorMeta) else list(call.meta)
    tensors = [meta is not None for meta in metas]
    if found.outputs is None:
        if any(tensors):
            raise RuleError(
                f"{of} outputs=None, but the op returns tensors; give the placements of each of its results"
            )
        return
    if not isinstance(found.outputs, Sequence) or not any(tensors) or len(found.outputs) != len(tensors):
        count = len(tensors) if any(tensors) else 0
        expected = (
            f"a tuple with the placements of each of its {count} results" if count else "None: it returns no tensor"
        )
        raise RuleError(f"{of} outputs {found.outputs!r}; expected {expected}")
    for index, (is_tensor, given) in enumerate(zip(tensors, found.outputs)):
        if is_tensor:
            _check_placements(f"{of} outputs[{index}]", given, call.mesh_of_result(index).ndim)


def _check_placements(what: str, placements: Any, ndim: int) -> None:
    if (
        not isinstance(placements, tuple)
        or len(placements) != ndim
        or not all(isinstance(placement, Placement) for placement in placements)
    ):
        raise RuleError(f"{what} = {placements!r}; expected a tuple of {ndim} placements, one for each mesh axis")

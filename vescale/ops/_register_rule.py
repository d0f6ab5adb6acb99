"""``register_rule``: placement rules of users."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from vescale.errors import RuleError
from vescale.ops._call import OpCall
from vescale.ops._decide import forget_decisions
from vescale.ops._decision import Decision, Rule
from vescale.ops._registry import check_decision, register_user_rule

_Overload, _AllOverloads = type(torch.ops.aten.alias.default), type(torch.ops.aten.alias)


def register_rule(op: Any, rule: Rule) -> None:
    """Add a placement rule: how an op runs on DTensors of which at least one has a vescale placement.

    The rule is called before all others for the op, the latest first. It gets an :class:`OpCall` and returns a
    :class:`Decision`, or None to leave the call to the next rule. It must be a pure function of the call: decisions are
    cached, and every rank must come to the same one. Register rules before the op is first called: decisions that other
    threads have cached (autograd's, for backward) stay.

    DTensors with stock placements only are not affected; for an op that they lack a strategy for, use PyTorch's
    ``torch.distributed.tensor.experimental.register_sharding``.

    Args:
        op: an op overload (``torch.ops.aten.flip.default``), or an iterable of them.
        rule: ``OpCall -> Decision | None``.

    Raises:
        TypeError: something else than op overloads, or a rule that cannot be called. When the rule has run, the op raises
            TypeError for something else than a Decision or None, and ValueError for placements that do not fit the
            operands and results of the op.
    """
    if isinstance(op, _Overload | _AllOverloads) or not isinstance(op, Iterable):
        ops = [op]
    else:
        ops = list(op)
    for one in ops:
        if isinstance(one, _AllOverloads):
            raise RuleError(
                f"register_rule: found {one}, which has the overloads {', '.join(one.overloads())}; expected one overload "
                f"or an iterable of them: give {one}.{one.overloads()[0]}"
            )
        if not isinstance(one, _Overload):
            raise RuleError(
                f"register_rule: found {one!r}; expected an op overload such as torch.ops.aten.flip.default, or an iterable "
                "of them: DTensor sees overloads, not the torch functions that call them"
            )
    if not callable(rule):
        raise RuleError(f"register_rule: found the rule {rule!r}; expected a function of an OpCall")
    for one in ops:
        register_user_rule(one, functools.partial(_checked, rule))
    forget_decisions()


def _checked(rule: Rule, call: OpCall) -> Decision | None:
    decision = rule(call)
    check_decision(rule, call, decision)
    return decision

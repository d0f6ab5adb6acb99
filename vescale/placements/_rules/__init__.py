"""What each kind of op does on our placements: a table of small rules, the first that has an answer decides.

A rule is a pure function of an :class:`OpCall`; it returns a :class:`Decision`, or None when the call is not its business.
"""

from collections.abc import Iterable
from typing import Any

from vescale.placements._rules._call import Decision, OpCall, Placements, Rule, substitute
from vescale.placements._rules.chunks import chunk_rule
from vescale.placements._rules.compare import compare_rule
from vescale.placements._rules.elementwise import elementwise_rule
from vescale.placements._rules.extrema import extrema_rule
from vescale.placements._rules.factories import factory_rule
from vescale.placements._rules.foreach import foreach_rule
from vescale.placements._rules.masked import masked_rule
from vescale.placements._rules.norms import foreach_norm_rule, norm_rule
from vescale.placements._rules.random import random_rule
from vescale.placements._rules.reductions import reduction_rule
from vescale.placements._rules.rows import rows_rule
from vescale.placements._rules.rowwise import rowwise_rule
from vescale.placements._rules.slices import slice_gradient_rule
from vescale.placements._rules.stacks import stack_rule
from vescale.placements._rules.stand_ins import stand_in_rule, treats_indices_alike
from vescale.placements._rules.views import view_rule

__all__ = [
    "Decision",
    "OpCall",
    "Placements",
    "Rule",
    "find_decision",
    "register_rule",
    "substitute",
    "treats_indices_alike",
]

_RULES: tuple[Rule, ...] = (
    random_rule,
    compare_rule,
    factory_rule,
    foreach_rule,
    elementwise_rule,
    masked_rule,
    norm_rule,
    foreach_norm_rule,
    extrema_rule,
    reduction_rule,
    rowwise_rule,
    chunk_rule,
    view_rule,
    slice_gradient_rule,
    rows_rule,
    stack_rule,
    stand_in_rule,
)
_REGISTERED: dict[Any, list[Rule]] = {}


def register_rule(ops: Iterable[Any], rule: Rule) -> None:
    """Ask ``rule`` first, before the table and before rules registered earlier, for these op overloads."""
    for op in ops:
        _REGISTERED.setdefault(op, []).insert(0, rule)


def find_decision(call: OpCall) -> Decision | None:
    for rule in (*_REGISTERED.get(call.op, ()), *_RULES):
        decision = rule(call)
        if decision is not None:
            return decision
    return None

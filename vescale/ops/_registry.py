"""The registry of op behaviour: for each op, where its operands and results are placed and what runs in its place.

An op is one of

* an ATen overload (``torch.ops.aten.clone.default``) or all overloads of an ATen op (``torch.ops.aten.clone``), which
  DTensor's dispatcher meets in every program;
* a torch function (``torch.nn.functional.embedding``), which is met only inside of a parallelized model's forward.

The files of this package register the ops of their family when the package is imported. Placement rules of *open* families,
whose ops are recognized by a property instead of being listed (elementwise ops, by their tag), are registered with
:func:`register_family`. Users add placement rules with :func:`vescale.ops.register_rule`.

A placement rule is looked for in this order; the first one that returns a decision counts:

1. rules of users, the latest first;
2. the rule registered for the overload, then the one registered for all overloads;
3. the rules of the families that cover the op, in the order of :data:`FAMILY_ORDER`.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import DTensorSpec, TensorMeta, no_torch_function
from vescale.errors import RuleError
from vescale.ops._call import Decision, OpCall

# Families may cover the same op (dropout is random and elementwise): they are tried in this order.
FAMILY_ORDER = ("random", "foreach", "elementwise", "interleaved")


class When(enum.IntEnum):
    """For which operands a registered torch function does something. The values are those of ``csrc/function_filter.h``."""

    ALWAYS = 0
    PARTIAL = 1  # one is Partial on some axis
    NOT_REPLICATE = 2  # one is not Replicate on some axis
    INDEX = 3  # one has a placement of vescale's, or the index has more than slices and numbers


@dataclass(frozen=True)
class OpEntry:
    """What is registered for one op. Fields that an op has no use for are None.

    Attributes:
        rule: ``OpCall -> Decision | None``; called where an operand has a placement that stock DTensor does not know.
        user_rules: the same, added by users; called before ``rule``.
        handler: ``(op, args, kwargs) -> result``; runs in place of an ATen overload on DTensors.
        applies: ``(op, schema) -> bool``, a pure function of specs and other arguments: whether ``handler`` takes this
            call. Where it does not, stock DTensor's decision is used, and cached by its dispatcher. None: always.
        takes_plain: whether ``handler`` takes plain tensors among its operands for global ones, the same on every rank.
        function: ``(context, function, args, kwargs) -> result``; runs in place of a torch function in a parallelized
            model's forward, when one of its arguments is a DTensor.
        when: the calls on DTensors alone for which ``function`` does something else than the torch function.
        changes: ``(torch function, args, kwargs) -> bool``, the same where ``when`` cannot say it: a pure function of the
            DTensors' specs and of arguments that are no tensors. C++ remembers its answers. None: ``when`` says it.
        is_local: ``(*args, **kwargs) -> bool``; whether ``function`` is the torch function of the local tensors, in forward
            and backward, for such operands. None: it is not.
        backward: how the gradient is computed: ``"autograd"`` (the graph of the ops that run in place of the op) or
            ``"custom"`` (an autograd function with communication of its own).
    """

    rule: Callable[..., Any] | None = None
    user_rules: tuple[Callable[..., Any], ...] = ()
    handler: Callable[..., Any] | None = None
    applies: Callable[..., bool] | None = None
    takes_plain: bool = False
    function: Callable[..., Any] | None = None
    when: When = When.ALWAYS
    changes: Callable[..., bool] | None = None
    is_local: Callable[..., bool] | None = None
    backward: str = "autograd"


@dataclass(frozen=True)
class OpFamily:
    """Ops that share one placement rule and are recognized by ``covers(overload)`` instead of being listed."""

    name: str
    covers: Callable[[Any], bool]
    rule: Callable[..., Any]


# Replaced, not changed: other threads may be reading them.
_ENTRIES: dict[Any, OpEntry] = {}
_FAMILIES: dict[str, OpFamily] = {}
_LOCK = threading.Lock()  # of writers


def register(op: Any, **fields: Any) -> None:
    """Add ``fields`` of :class:`OpEntry` to what is registered for ``op``.

    Raises ValueError for a field that is registered already: two families would each believe that theirs runs.
    """
    global _ENTRIES
    with _LOCK:
        known = _ENTRIES.get(op, OpEntry())
        taken = sorted(
            name
            for name in fields
            if name not in ("backward", "takes_plain", "when") and getattr(known, name) is not None
        )
        if taken:
            raise RuleError(
                f"{op} has {', '.join(taken)} already registered; each op belongs to one file of vescale.ops"
            )
        _ENTRIES = {**_ENTRIES, op: replace(known, **fields)}


def register_aten(names: str, **fields: Any) -> None:
    """:func:`register` for all overloads of the ATen ops of these names, separated by spaces.

    Names that the installed torch does not have are skipped: releases differ by a few ops.
    """
    for name in names.split():
        op = getattr(torch.ops.aten, name, None)
        if op is not None:
            register(op, **fields)


def register_family(name: str, covers: Callable[[Any], bool], rule: Callable[..., Any]) -> None:
    """Register the placement rule of all ops that ``covers(overload)`` recognizes.

    Raises ValueError for a name that is not in :data:`FAMILY_ORDER`, or is registered already.
    """
    global _FAMILIES
    if name not in FAMILY_ORDER or name in _FAMILIES:
        known = "is already registered" if name in _FAMILIES else f"is not in FAMILY_ORDER {FAMILY_ORDER}"
        raise RuleError(f"op family {name!r} {known}; give each family a single place in FAMILY_ORDER")
    with _LOCK:
        _FAMILIES = {**_FAMILIES, name: OpFamily(name, covers, rule)}


def register_user_rule(op: Any, rule: Callable[..., Any]) -> None:
    """Add a rule that is called before all others; :func:`vescale.ops.register_rule` checks the arguments."""
    global _ENTRIES
    with _LOCK:
        known = _ENTRIES.get(op, OpEntry())
        _ENTRIES = {**_ENTRIES, op: replace(known, user_rules=(rule, *known.user_rules))}


def has_user_rules(op: Any) -> bool:
    """Whether a decision for the ATen overload may depend on anything in the call: users' rules read what they like."""
    entry = _ENTRIES.get(op)
    return entry is not None and bool(entry.user_rules)


def entries() -> Mapping[Any, OpEntry]:
    """Everything registered so far, in order of registration; it cannot be written to, and stays as it is."""
    return MappingProxyType(_ENTRIES)


def families() -> tuple[OpFamily, ...]:
    """The registered families, in the order in which they are tried."""
    known = _FAMILIES
    return tuple(known[name] for name in FAMILY_ORDER if name in known)


def rules_of(op: Any) -> Iterator[Callable[..., Any]]:
    """The placement rules for an ATen overload, in the order in which they are tried."""
    found = [entry for key in (op, op.overloadpacket) if (entry := _ENTRIES.get(key)) is not None]
    for entry in found:
        yield from entry.user_rules
    yield from (entry.rule for entry in found if entry.rule is not None)
    yield from (family.rule for family in families() if family.covers(op))


# Decorators with which a file of this package registers what runs in place of its ops.

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
Function = TypeVar("Function", bound=Callable[..., Any])


def handles(
    *ops: Any,
    applies: Callable[[Any, Any], bool] | None = None,
    takes_plain: bool = False,
) -> Callable[[Handler], Handler]:
    """Register a function ``(op, args, kwargs) -> result`` as the handler of ATen overloads; see :class:`OpEntry`.

    It runs without torch function modes: what it calls is not the model's code.
    """

    def decorate(function: Handler) -> Handler:
        def handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            with no_torch_function():
                return function(op, args, kwargs)

        for op in ops:
            register(op, handler=handler, applies=applies, takes_plain=takes_plain)
        return function

    return decorate


def replaces(
    *functions: Any,
    when: When = When.ALWAYS,
    changes: Callable[..., bool] | None = None,
    is_local: Callable[..., bool] | None = None,
    backward: str = "autograd",
) -> Callable[[Function], Function]:
    """Register a function ``(context, function, args, kwargs) -> result`` to run in place of torch functions inside of a
    parallelized model's forward; see :class:`OpEntry`. ``when`` or ``changes``: the calls in which it does something else
    than they."""

    def decorate(function: Function) -> Function:
        for replaced in functions:
            register(
                replaced,
                function=function,
                when=when,
                changes=changes,
                is_local=is_local,
                backward=backward,
            )
        return function

    return decorate


def is_spread(op: Any, schema: Any) -> bool:
    """Whether an operand is not Replicate, or a plain tensor. Stock DTensor runs the op where all operands are Replicate."""
    operands = (*schema.args_schema, *schema.kwargs_schema.values())
    return any(
        not all(p.is_replicate() for p in x.placements) if isinstance(x, DTensorSpec) else isinstance(x, torch.Tensor)
        for x in operands
    )


# Checks of what a user's placement rule returns.


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
                f"{of} outputs=None, but the op returns tensors; return the placements of each of its results"
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


class OpContext(Protocol):
    """A forward of a parallelized model, as the functions in the registry see it: their first argument."""

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of every DTensor of the model."""

    @property
    def axis_names(self) -> Sequence[str]:
        """The plan's names of the mesh axes."""

    @property
    def replicated(self) -> tuple[Placement, ...]:
        """Replicate on every axis of the mesh."""

    def attention_methods(self) -> tuple[str | None, ...]:
        """The method by which the running module attends along each mesh axis that shards the sequence, or None:
        ``"all_gather"``, ``"ring"`` or ``"ulysses"``."""

    def plan_error(self, problem: str) -> Exception:
        """The exception to raise when the plan asks an op for something that cannot be done."""

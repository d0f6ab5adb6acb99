"""What runs and listens for parallelized models where DTensor's op dispatcher is patched."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.compat.dtensor import DTensorSpec
from vescale.compat.patching import HOOKS


class AskedGradients(NamedTuple):
    """For programs that differentiate by tensors which graphs have something else in the place of.

    Attributes:
        leaves: ``(inputs, returns_graph=)`` to what graphs have in their place; None where it is these. ``returns_graph``:
            gradients with a graph of their own are to be returned.
        answers: ``(inputs, gradients)`` to what ``torch.autograd.grad`` returns, where ``leaves`` was not None.
        sees: gets what it returns with a graph.
    """

    leaves: Callable[..., list[Any] | None]
    answers: Callable[[Sequence[Any], Sequence[torch.Tensor | None]], tuple[torch.Tensor | None, ...]]
    sees: Callable[[Sequence[torch.Tensor | None]], None]


@dataclass(frozen=True)
class OpHandler:
    """What runs in place of an op on DTensors.

    Attributes:
        run: ``(op, args, kwargs)`` to the op's result, or to an ``OutputSharding`` that PyTorch caches and follows.
        applies: ``(op, schema) -> bool``, whether it takes the call. It must follow from what PyTorch's cache is keyed by,
            the specs of the operands and the arguments that a placement can depend on: a call that it does not take is
            decided by PyTorch, and ``applies`` is not asked again.
        takes_plain: whether plain tensors among the operands are global ones, the same on every rank. PyTorch refuses them
            before it asks for a decision, so that all calls of the op go through Python.
    """

    run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
    applies: Callable[[Any, Any], bool] = lambda op, schema: True
    takes_plain: bool = False


class DispatchListener:
    """What the dispatcher tells, and asks."""

    # Of the meshes whose DTensors the script may read and move in an order that has to be checked: a set that may grow.
    # ``full_tensor`` and ``redistribute`` of other DTensors call neither ``reads`` nor ``moves``.
    hashes_of_checked_meshes: AbstractSet[int] = frozenset()

    def redistribution(self, op: Any, moves: Sequence[tuple[int, torch.Tensor, DTensorSpec, DTensorSpec]]) -> None:
        """Before an op brings operands (position, local tensor, from, to) to other placements on its own account."""

    def placement_move(
        self, op: Any, operand: str, local: torch.Tensor, source: DTensorSpec, target: DTensorSpec
    ) -> None:
        """The same, for an op on vescale's placements, operand by operand."""

    def viewed_copies(
        self, op: Any, moves: Sequence[tuple[torch.Tensor, DTensorSpec, torch.Tensor, DTensorSpec]]
    ) -> None:
        """After operands of a view were brought elsewhere (local tensor and spec, before and now): the result is a view of
        the new ones, and what is written to it does not reach the old ones by itself."""

    def requires_current(self, tensor: DTensor) -> None:
        """Before Python reads the local tensor, where there is no C++ dispatcher."""

    def hands_out(self, tensor: DTensor) -> None:
        """Before ``to_local()`` returns."""

    def hands_out_memory(self, tensor: DTensor) -> None:
        """Before ``.data`` returns, or is set."""

    def hands_out_summand(self, tensor: DTensor) -> None:
        """Before ``to_local()`` of a pending sum returns."""

    def draws(self, spec: DTensorSpec, what: str, generator: torch.Generator | None) -> None:
        """Before the random op ``what`` draws this rank's part of a tensor of ``spec``, with a generator or the default."""

    def wrote(self, tensor: DTensor) -> None:
        """After an op has written to ``tensor`` in place."""

    def no_strategy(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stock DTensor has no rule for ``op``, or one that refuses: return its result, or NotImplemented to let the error
        out."""
        return NotImplemented

    # The next four return a sharding decision, for the dispatcher to cache, or a function of ``(args, kwargs)`` to the op's
    # result, or None.

    def interleaved(self, schema: Any) -> Any:
        """Stock DTensor would move operands of ``schema.op``, of which one is a ``_StridedShard``, or has empty shards: what
        does not."""

    def view_of_parts(self, schema: Any) -> Any:
        """Stock DTensor would move the operand of ``schema.op``, or refuses it: for a view, what moves nothing."""

    def misjudged_view(self, schema: Any, sharding: Any) -> Any:
        """Stock DTensor would run ``schema.op`` on the operands as they are by the decision ``sharding``: None if that is
        right; for a view after which ranks would hold other elements, what runs instead, or NotImplemented to have it
        gathered."""

    def moves_nothing(self, schema: Any, sharding: Any) -> Any:
        """Stock DTensor would move operands of ``schema.op`` by the decision ``sharding``: what does not."""

    def reads(self, tensor: DTensor, how: str, for_python: bool) -> None:
        """Before the parts of ``tensor`` meet: the value is for Python (``item()``, ``full_tensor()``), or for an op of ours
        that reduces over ranks (a loss)."""

    def swaps(self) -> None:
        """Before two tensors get each other's contents (``torch.utils.swap_tensors``), of which nothing else may know."""

    def exports(self, tool: str, model: Any) -> None:
        """Before ``tool`` (``torch.export``, ``torch.jit.trace``) traces ``model``, a module or a function."""

    def begins_backward(self, losses: Sequence[Any], gradients: Sequence[Any], creates_graph: bool) -> None:
        """Before a backward of the losses, tensors or edges of graphs, with the gradients that it is given."""

    def names_edge(self, tensor: DTensor) -> None:
        """Before a program is given the node at which the gradient of ``tensor`` arrives."""

    def recorded_backward(self, losses: Sequence[Any]) -> None:
        """After a backward of the losses with ``create_graph=True`` that has accumulated gradients."""

    def moves(self, tensor: DTensor, placements: tuple[Any, ...], how: str) -> None:
        """Before ``tensor.redistribute(placements=placements)``, or before an op of ours moves it; ``how``: its name."""

    def plain_value(self, op: Any, name: str, tensor: torch.Tensor, mesh: Any) -> None:
        """A plain tensor among DTensors on ``mesh`` is taken as the same on every rank."""

    def mixed_sizes(self, name: str, operands: Any) -> None:
        """A function of PyTorch has refused the sizes of DTensors and plain tensors; without the C++ dispatcher alone."""

    def mixed(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call with plain tensors among DTensors, which PyTorch would refuse: return its result, or NotImplemented to
        let PyTorch answer."""
        return NotImplemented

    def plain_operand(self, op: Any, tensor: torch.Tensor) -> bool:
        """Whether a plain tensor among DTensors is the global one, the same on every rank; False: stock refuses it."""
        return False


@dataclass(frozen=True)
class ModelHooks:
    """What runs and listens for parallelized models.

    Attributes:
        handlers: by overload.
        listener: what the dispatcher tells and asks.
        view_copies: what writes have to be followed for; the listener's ``wrote`` is called while it is not empty.
        checkpointed: what runs in place of a function that is checkpointed (:mod:`torch.utils.checkpoint`).
        in_backward: ``(function, *args)`` to the function's result, inside of the module whose node a backward runs.
        registered: ``(module, name, child)``, called when a child or parameter is registered in any module of the program.
    """

    handlers: Mapping[Any, OpHandler]
    listener: DispatchListener
    view_copies: AbstractSet[int]
    checkpointed: Callable[[Callable[..., Any], bool], Callable[..., Any]]
    in_backward: Callable[..., Any]
    registered: Callable[[nn.Module, str, Any], None]


def model_hooks() -> ModelHooks | None:
    """The hooks of parallelized models, while they are installed."""
    hooks: ModelHooks | None = HOOKS.get("models")
    return hooks


def telling(op: Any, handler: Callable[..., Any]) -> Callable[..., Any]:
    """A handler that tells the listener when an in-place op has been handled."""
    if not op._schema.is_mutable or op._schema.name.startswith("aten::_foreach"):
        return handler

    @functools.wraps(handler)
    def handle(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = handler(op, args, kwargs)
        if args and isinstance(args[0], DTensor):
            tell_write(args[0])
        return result

    return handle


_NOBODY = DispatchListener()


def _listener() -> DispatchListener:
    models = model_hooks()
    return _NOBODY if models is None else models.listener


def tell_write(tensor: DTensor) -> None:
    """After a write to ``tensor``, which may be a view of a copy."""
    _listener().wrote(tensor)


def tell_handed_out(tensor: DTensor) -> None:
    """Before a program gets the memory of ``tensor``, in which its writes count in no version of that."""
    _listener().hands_out_memory(tensor)


def tell_read(tensor: DTensor, how: str, *, for_python: bool = False) -> None:
    """Before the parts of a value meet: for Python, or in an op of ours."""
    _listener().reads(tensor, how, for_python)


def tell_moved_operand(tensor: DTensor, placements: tuple[Any, ...], op: str) -> None:
    """An op of ours is about to move an operand of its own accord."""
    _listener().moves(tensor, placements, f"an operand of {op}")


def tell_plain_value(op: Any, name: str, tensor: Any, mesh: Any) -> None:
    """An op takes ``tensor``, if it is one, as the same on every rank of ``mesh``."""
    if isinstance(tensor, torch.Tensor) and tensor.ndim:
        _listener().plain_value(op, name, tensor, mesh)


def ask_mixed(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a call with plain tensors among DTensors; NotImplemented where PyTorch answers it."""
    return _listener().mixed(op, args, kwargs)


# Asked when a program checkpoints a function, with the options of ``checkpoint``: a context in which it runs as it is,
# because what it calls is checkpointed there; or None.
CHECKPOINTED_APART: list[Callable[[Mapping[str, Any]], AbstractContextManager[None] | None]] = []
# Asked when a program checkpoints a function by reentrant autograd: whether that is to be done without it, because backwards
# compute gradients of some tensors only, where PyTorch refuses it.
REFUSES_REENTRANT: list[Callable[[], bool]] = []
# Called beside the listener of parallelized models, with what :func:`tell_draw` is given.
ASKED_GRADIENTS: list[AskedGradients] = []
DRAW_LISTENERS: list[Callable[[DTensorSpec, str, torch.Generator | None], None]] = []


def tell_draw(spec: DTensorSpec, what: str, generator: torch.Generator | None) -> None:
    """Before a random op draws this rank's part of a tensor of ``spec``. Also called from C++, with the op's full name."""
    for listener in (*DRAW_LISTENERS, _listener().draws):
        listener(spec, what.removeprefix("aten::"), generator)


def tell_move(op: Any, operand: str, local: torch.Tensor, source: DTensorSpec, target: DTensorSpec) -> None:
    """A rule of ours, not DTensor's own, brings an operand elsewhere; called before anything is communicated."""
    _listener().placement_move(op, operand, local, source, target)

"""How the loss of a batch follows from those of its micro-batches, as seen in a trace of the one and one of the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from vescale.compat.tensor_subclasses import tree_leaves, tree_map, without_modes
from vescale.errors import PipelineLossError
from vescale.pipeline._unknown_values import refuse_leaving

aten = torch.ops.aten
_LINEAR = {
    aten.neg, aten.clone, aten.detach, aten.alias, aten.view, aten._unsafe_view, aten.reshape, aten.squeeze, aten.unsqueeze,
    aten.expand, aten.select, aten.slice, aten.permute, aten.transpose, aten.t, aten._to_copy, aten.to, aten.stack, aten.cat,
    aten.sum, aten.mean, aten.add, aten.add_, aten.sub, aten.sub_, aten.rsub, aten.lift_fresh,
}  # fmt: skip
_SUMS = {aten.sum, aten.dot, aten.vdot, aten.mm, aten.bmm, aten.nansum}
_SCALED = (
    {getattr(torch, name) for name in ("div", "divide", "true_divide", "mul", "multiply")}
    | {getattr(torch.Tensor, name) for name in ("div", "divide", "true_divide", "mul", "multiply", "div_", "mul_")}
    | {getattr(torch.Tensor, name) for name in ("__truediv__", "__mul__", "__rmul__", "__itruediv__", "__imul__")}
)
_ON_ONE_DEVICE = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}


def two_scalars(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a torch function multiplies a tensor without dims by another one, or divides it."""
    if func not in _SCALED:
        return False
    given = (*args, *(kwargs[name] for name in ("other",) if name in kwargs))
    return len(given) == 2 and all(isinstance(value, torch.Tensor) and value.ndim == 0 for value in given)


def is_mean_of_labels(func: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments by name, of a call of ``cross_entropy`` or ``nll_loss`` that takes a mean over labels."""
    if func not in (F.cross_entropy, F.nll_loss):
        return None
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = {**dict(zip(names, args)), **kwargs}
    return given if given.get("reduction", "mean") == "mean" and not given["target"].is_floating_point() else None


@dataclass(frozen=True)
class _Operand:
    """``node``: the op that made it, of a tensor that depends on parameters. ``mean_of``: what it is a mean over labels of.
    Both before the op, which may write to it."""

    tensor: torch.Tensor
    node: int | None
    depends: bool
    of_batch: bool
    mean_of: torch.Tensor | None


@dataclass(frozen=True)
class _Node:
    func: Any
    args: Any
    kwargs: Any
    operands: tuple[_Operand, ...]
    of_batch: bool
    call: tuple[int, int] | None


@dataclass
class LossNodes:
    """The ops of a forward whose results depend on parameters."""

    nodes: list[_Node] = field(default_factory=list)
    of: dict[int, int] = field(default_factory=dict)  # id of a tensor -> its node
    batch: set[int] = field(default_factory=set)  # ids of tensors that depend on the batch
    means: dict[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)  # by id: means over labels, of what
    read: set[float] = field(default_factory=set)  # numbers that were read from tensors of the batch

    def note(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        outs: list[torch.Tensor],
        depends: Callable[[int], bool],
        call: tuple[int, int] | None,
    ) -> None:
        """After an op. ``depends``: whether the tensor with an id depends on parameters, or is one; ``call``: the stage, and
        the number in it, of the multiplication of scalars that the op is a part of."""
        tensors = [v for v in tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
        operands = tuple(
            _Operand(t, self.of.get(id(t)), depends(id(t)), id(t) in self.batch, self.mean_of(t)) for t in tensors
        )
        of_batch = any(operand.of_batch for operand in operands)
        if of_batch and func is aten._local_scalar_dense.default and not tensors[0].is_meta:
            self.read.add(tensors[0].item())
        if of_batch:
            self.batch.update(map(id, outs))
        if any(operand.depends for operand in operands):
            self.nodes.append(_Node(func, args, kwargs, operands, of_batch, call))
            self.of.update((id(out), len(self.nodes) - 1) for out in outs)
        if func._schema.is_mutable:
            for out in outs:
                self.means.pop(id(out), None)

    def mean_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        found = self.means.get(id(tensor))
        return None if found is None else found[1]


class LossCalls(TorchFunctionMode):
    """Beside a trace: numbers the multiplications of scalars of each stage, and notes means over labels.
    Functions that refuse operands on several devices before any op runs get all of them on the meta device."""

    def __init__(self, nodes: LossNodes) -> None:
        super().__init__()
        self._nodes, self._stage, self._next = nodes, 0, 0
        self.current: tuple[int, int] | None = None

    def begin(self, stage: int) -> None:
        self._stage, self._next = stage, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if two_scalars(func, args, kwargs):
            self.current, self._next = (self._stage, self._next), self._next + 1
            try:
                return func(*args, **kwargs)
            finally:
                self.current = None
        refuse_leaving(func, args)
        if func in _ON_ONE_DEVICE and any(isinstance(v, torch.Tensor) and v.is_meta for v in tree_leaves(args)):
            with without_modes():
                args = tree_map(lambda v: v.to("meta") if isinstance(v, torch.Tensor) and not v.is_meta else v, args)
        result = func(*args, **kwargs)
        given = is_mean_of_labels(func, args, kwargs)
        if given is not None:
            self._nodes.means[id(result)] = result, given["input"], given["target"]
        return result


@dataclass(frozen=True)
class LossShare:
    """``weight``: what the losses of micro-batches are multiplied by, to add up to that of the batch, once the
    multiplications in ``scalars`` (by stage and number) have the whole batch's value as the operand at a position, and means
    over labels are sums divided by ``parts`` times the average number of labels in a micro-batch.

    Where the loss is made of means over labels alone, these are divided by the number of labels in the batch, and nothing
    else is multiplied: one rounding, as on one device.
    """

    weight: float
    scalars: Mapping[tuple[int, int], tuple[int, Callable[[Mapping[str, Any]], torch.Tensor]]]
    parts: int = 1


def share_of_microbatches(
    whole: LossNodes,
    part: LossNodes,
    losses: tuple[torch.Tensor, torch.Tensor],
    count: int,
    replay: Callable[[torch.Tensor], Callable[[Mapping[str, Any]], torch.Tensor] | None],
    refuse: Callable[[str], PipelineLossError],
) -> LossShare:
    """Follows the loss back to the sums and means over rows that it is made of.

    Args:
        losses: of the batch and of one of ``count`` micro-batches.
        replay: of the trace of the batch.

    Raises the error that ``refuse`` makes for a loss that is no sum over rows, or where it cannot be seen.
    """
    if count == 1:
        return LossShare(1.0, {})
    found = _Analysis(whole, part, count, replay, refuse)
    scale = found.of_tensor(*losses)
    if scale == 1.0 / count and not found.has_other_means:
        return LossShare(1.0, found.scalars, count)
    return LossShare(1.0 / count if scale is None else scale, found.scalars)


class _Analysis:
    """The value of a tensor for the batch is a number times the sum of those for micro-batches; which number is found for
    each tensor on the way. None: of a tensor that does not depend on the batch."""

    def __init__(self, whole: LossNodes, part: LossNodes, count: int, replay: Any, refuse: Any) -> None:
        self._whole, self._part, self._count, self._replay, self._refuse = whole, part, count, replay, refuse
        self.scalars: dict[tuple[int, int], Any] = {}
        self.has_other_means = False  # than those over labels

    def of_tensor(self, big: torch.Tensor, small: torch.Tensor) -> float | None:
        return self._of_operand(
            *(
                _Operand(tensor, nodes.of.get(id(tensor)), True, True, nodes.mean_of(tensor))
                for nodes, tensor in ((self._whole, big), (self._part, small))
            )
        )

    def _of_node(self, big: int, small: int) -> float | None:
        one, other = self._whole.nodes[big], self._part.nodes[small]
        if not one.of_batch:
            return None
        if one.func is not other.func or len(one.operands) != len(other.operands):
            raise self._refuse(f"is computed by {one.func} for a batch, and by {other.func} for a micro-batch")
        pairs = list(zip(one.operands, other.operands))
        rows = [(a.tensor, b.tensor) for a, b in pairs if a.depends and a.of_batch and a.tensor.shape != b.tensor.shape]
        if rows:
            return self._reduction(one, rows)
        packet = one.func.overloadpacket
        if packet in (aten.mul, aten.mul_, aten.div, aten.div_):
            return self._scaled(one, other, pairs)
        if packet not in _LINEAR:
            raise self._refuse(f"is not a sum over rows: {one.func} is taken of a sum or mean over them")
        scales = [self._of_operand(a, b) for a, b in pairs if a.depends]
        # What does not depend on the batch is the same in each micro-batch, as a mean is on average.
        constant = packet in (aten.add, aten.add_, aten.sub, aten.sub_, aten.rsub) and self._adds_constant(one)
        self.has_other_means |= constant or None in scales
        known = {1.0 / self._count if scale is None else scale for scale in scales}
        known |= {1.0 / self._count} if constant else set()
        if max(known) - min(known) > 1e-9 * max(known):
            raise self._refuse("adds a mean over rows, or what does not depend on them, to a sum")
        return next(iter(known))

    def _adds_constant(self, node: _Node) -> bool:
        for operand in node.operands:
            if not operand.depends:
                if operand.of_batch:
                    raise self._refuse("has a term that does not depend on parameters")
                if operand.tensor.is_meta or bool((operand.tensor != 0).any()):
                    return True
        return any(isinstance(v, int | float) and v != 0 for v in node.args[:2])

    def _of_operand(self, big: _Operand, small: _Operand) -> float | None:
        if big.mean_of is not None and small.mean_of is not None:
            return self._mean(big.mean_of, small.mean_of)
        if big.node is None or small.node is None:
            return None
        return self._of_node(big.node, small.node)

    def _mean(self, big: torch.Tensor, small: torch.Tensor) -> float:
        """Of means over labels of ``big`` and ``small``."""
        if big.shape[1:] != small.shape[1:]:
            self._check_rows("cross_entropy", [(big, small)])
        return 1.0 / self._count

    def _check_rows(self, op: Any, rows: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        if any(big.numel() != self._count * small.numel() for big, small in rows):
            shapes = " and ".join(str(tuple(tensor.shape)) for tensor in rows[0])
            raise self._refuse(f"is made by {op} of tensors of shapes {shapes} for a batch and a micro-batch")

    def _reduction(self, node: _Node, rows: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        self._check_rows(node.func, rows)
        packet = node.func.overloadpacket
        if packet in _SUMS:
            return 1.0
        self.has_other_means = True
        if packet is aten.mean:
            return 1.0 / self._count
        for number, argument in enumerate(node.func._schema.arguments):
            if argument.name == "reduction":
                given = node.args[number] if number < len(node.args) else argument.default_value
                return 1.0 if node.kwargs.get("reduction", given) == 2 else 1.0 / self._count
        raise self._refuse(f"is not a sum over rows: {node.func} is taken of them")

    def _scaled(self, one: _Node, other: _Node, pairs: list[tuple[_Operand, _Operand]]) -> float | None:
        moving = [(a, b) for a, b in pairs if a.depends and a.of_batch]
        divides = one.func.overloadpacket in (aten.div, aten.div_)
        if len(moving) != 1 or (divides and moving[0][0].tensor is not one.args[0]):
            raise self._refuse(f"is not a sum over rows: {one.func} is taken of sums or means over them")
        scale = self._of_operand(*moving[0])
        if scale is None:
            return None
        fixed = [a for a, _ in pairs if a.of_batch and not a.depends]
        if fixed:
            replay = self._replay(fixed[0].tensor)
            position = 0 if fixed[0].tensor is one.args[0] else 1
            if (
                one.call is None
                or one.call != other.call
                or replay is None
                or (position == 0 and one.func._schema.is_mutable)
            ):
                raise self._refuse("is multiplied or divided by a tensor of the batch in a way that cannot be followed")
            self.scalars[one.call] = position, replay
            return scale
        numbers = [[v for v in node.args if isinstance(v, int | float)] for node in (one, other)]
        if numbers[0] and numbers[0] != numbers[1]:
            ratio = numbers[0][0] / numbers[1][0] if numbers[1][0] else 0.0
            if ratio != self._count or numbers[0][0] in self._whole.read:
                raise self._refuse("is multiplied or divided by a number that is read from the batch")
            self.has_other_means = True  # a sum over rows, divided by their number
            return scale / ratio if divides else scale * ratio
        return scale

"""What a forward of the whole model, without its parameters' values, has shown: :class:`Trace`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode

from vescale.compat.tensor_subclasses import tree_flatten, tree_unflatten
from vescale.pipeline._batch_reads import BatchReads
from vescale.pipeline._hooked_calls import HookedCall
from vescale.pipeline._row_flow import RowOps
from vescale.rng import Draw


class Origin(NamedTuple):
    """Where a forward gets a tensor from: leaf ``leaf`` of the result of call ``number`` of a gated module, or (with
    ``function``) of call ``number``, outside of them, of a torch function with results of the same shapes, or (with
    ``inside``) of what hooks in that call see: the :attr:`HookedCall.place`."""

    function: Any
    number: int
    leaf: int
    inside: tuple[str, int] | None = None


class OuterResults(TorchFunctionMode):
    """Tells the origin of each tensor that a torch function returns, where ``is_outside()``."""

    def __init__(self, see: Callable[[Origin, torch.Tensor], None], is_outside: Callable[[], bool]) -> None:
        super().__init__()
        self._see, self._is_outside = see, is_outside
        self._seen: Counter[Any] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._is_outside():
            for origin, value in self._origins(func, tree_flatten(result)[0]):
                self._see(origin, value)
        return result

    def _origins(self, func: Any, leaves: Sequence[Any]) -> list[tuple[Origin, torch.Tensor]]:
        """Of what a function has returned."""
        shapes = tuple(tuple(v.shape) if isinstance(v, torch.Tensor) else None for v in leaves)
        if all(shape is None for shape in shapes):
            return []
        function = func, shapes
        number = self._seen[function]
        self._seen[function] += 1
        return [(Origin(function, number, n), v) for n, v in enumerate(leaves) if shapes[n] is not None]


class WholeValues(OuterResults):
    """Gives values in place of what torch functions return, by origin, where ``is_outside()``."""

    def __init__(self, values: Mapping[Origin, torch.Tensor], is_outside: Callable[[], bool]) -> None:
        super().__init__(lambda origin, value: None, is_outside)
        self._values = values

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._is_outside():
            return result
        leaves, tree = tree_flatten(result)
        taken = [(o.leaf, _as_is(self._values[o], v)) for o, v in self._origins(func, leaves) if o in self._values]
        for n, value in taken:
            leaves[n] = value
        return tree_unflatten(leaves, tree) if taken else result


def _as_is(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The value with the placements of another one, but pending sums. Communication: none."""
    if not isinstance(like, DTensor):
        return value
    placements = [Replicate() if p.is_partial() else p for p in like.placements]
    spread = DTensor.from_local(value, like.device_mesh, [Replicate()] * len(placements), run_check=False)
    return spread.redistribute(like.device_mesh, placements)


@dataclass(frozen=True)
class Boundary:
    """What enters a stage: tensors that earlier stages have made.

    The first of them are arguments of the call of the stage's first module: ``leaves`` are their positions among the leaves
    of its arguments, of which there are ``num_leaves``. Those behind are read later, by this stage or another one.
    ``origins``: where the forward gets each of them from; several, where functions or modules return what they were given.
    ``call``: the number of the call, among those of gated modules, before which the stage begins. ``detached``: the numbers
    of those that require gradients, and that no gradient of the loss reaches.
    """

    leaves: tuple[int, ...]
    origins: tuple[tuple[Origin, ...], ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    requires_grad: tuple[bool, ...]
    num_leaves: int
    call: int
    detached: frozenset[int] = frozenset()

    @property
    def num_tensors(self) -> int:
        return len(self.shapes)

    @property
    def num_bytes(self) -> int:
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes))


NOTHING = Boundary((), (), (), (), (), 0, -1)


@dataclass(frozen=True)
class TracedCall:
    """A call of a gated module: its result as (leaves with (shape, dtype) in place of tensors, tree), and what it draws.
    ``same``: leaves of the result that are leaves of the arguments, by position; ``hooked``: calls in it whose hooks keep
    something; ``is_read``: ops around gated modules read its result, or it is a part of the model's output."""

    path: str
    leaves: tuple[Any, ...]
    tree: Any
    draws: tuple[Draw, ...]
    same: Mapping[int, int]
    hooked: tuple[HookedCall, ...]
    is_read: bool = False


MEAN = 1  # of the reductions of nll_loss


@dataclass
class LossTerm:
    """A call of ``nll_loss``: what its labels and weights of classes are in another batch (None: not known, or no weights),
    and how it adds up. ``stage``: which one calls it."""

    stage: int
    reduction: int
    ignore_index: int
    has_weight: bool
    target: Callable[[Mapping[str, Any]], torch.Tensor] | None
    weight: Callable[[Mapping[str, Any]], torch.Tensor] | None

    @property
    def is_known(self) -> bool:
        return self.target is not None and self.has_weight == (self.weight is not None)

    def count(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """What the sum over all labels is divided by, in float64; the host waits for no device."""
        assert self.target is not None
        target = self.target(batch)
        valid = target != self.ignore_index
        if self.weight is None:
            return valid.sum().double()
        return torch.where(valid, self.weight(batch)[torch.where(valid, target, 0)], 0).sum().double()


@dataclass
class Trace:
    """What is known of a forward.

    Attributes:
        outside: stages that read what they have received elsewhere than among the arguments of their modules.
        writes: stages whose ops write in place to what the stage has received.
        means: over labels, by id: each with the logits, the labels and the weights of classes.
        replay: for a tensor, what computes it from another batch of the same shapes; None where it depends on parameters.
        reads: values that the forward reads from the batch.
        draws_before: of a stage, how many draws earlier ones do.
        of_rows: texts on what depends on the rows of a batch together.
        row_ops: all ops, in order.
        total: the sum that a callable loss returned.
        backward_code: texts on what runs Python in the backward.
        is_cut_short: it has ended behind the last call of a gated module, without an output.
    """

    boundaries: dict[int, Boundary]
    calls: list[TracedCall]
    draws: list[Draw]
    losses: list[LossTerm]
    output: Any
    outside: set[int]
    writes: set[int]
    means: Mapping[int, Sequence[torch.Tensor]]
    replay: Callable[[torch.Tensor], Callable[[Mapping[str, Any]], torch.Tensor] | None]
    reads: BatchReads
    draws_before: Mapping[int, int]
    of_rows: Sequence[str]
    row_ops: RowOps
    total: torch.Tensor | None
    backward_code: Sequence[str]
    is_cut_short: bool = False

    def without_values(self) -> Trace:
        """The same without the tensors that the forward made, as masks of attention, one or several for each layer."""
        return replace(self, means={}, replay=lambda _: None, row_ops=RowOps([]), total=None)

    def looks_like(self, other: Trace) -> bool:
        """Whether stages send, call and draw the same as in another trace."""
        mine, theirs = ((t.boundaries, t.calls, t.draws, len(t.losses), t.outside, t.writes) for t in (self, other))
        return mine == theirs

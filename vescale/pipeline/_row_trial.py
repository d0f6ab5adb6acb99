"""``RowTrial``: what a forward computes of two micro-batches together, compared with what it computes of each.

On one device the rows of a batch are together. A stage has those of one micro-batch, and what it computes is the same only
if no row depends on others. The trial runs the first two micro-batches apart and together, and compares the rows of what
modules return and of what stages send, the loss, and its gradients by what the last stage's modules return.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from vescale.compat import local_of, no_torch_function
from vescale.compat.tensor_subclasses import tree_flatten, tree_unflatten
from vescale.pipeline._batches import Signature
from vescale.pipeline._hooked_calls import TensorLike
from vescale.pipeline._traced import NOTHING, TracedCall
from vescale.placements import CustomPlacement, shard_dim

_Rows = tuple[torch.Tensor, torch.Tensor]  # a projection of each row, and its norm


class RowTrial:
    """``apart`` is of two micro-batches, ``together`` of both as one.

    Places are numbers in the order of the forward: ``2 * n`` is what the n-th call of a gated module returns, and
    ``2 * n - 1`` what is sent where a stage begins with it.
    """

    def __init__(self, apart: Signature, together: Signature, model: nn.Module, *, gradients: bool) -> None:
        self.apart, self.together, self._has_gradients = apart, together, gradients
        self.end = 2 * len(apart.whole.calls) + 1  # the place of the loss
        self._model = model
        self._state = _State(model)
        self._dims = {2 * n: dims for n, dims in enumerate(_dims_of_calls(apart.whole.calls, apart.part.calls))}
        for stage, part in apart.part.boundaries.items():
            whole = apart.whole.boundaries.get(stage, NOTHING)
            if len(whole.shapes) == len(part.shapes) and part.call == whole.call:
                self._dims[2 * part.call - 1] = [_row_dim(a, b) for a, b in zip(whole.shapes, part.shapes)]
        dtypes = {v.dtype for call in apart.part.calls for v in call.leaves if isinstance(v, TensorLike)}
        dtypes |= {p.dtype for p in model.parameters()}
        if torch.is_autocast_enabled(next((p.device.type for p in model.parameters()), "cpu")):
            dtypes.add(torch.bfloat16)
        self.eps = max((torch.finfo(d).eps for d in dtypes if d.is_floating_point), default=2.0**-23)
        self._seen: list[dict[int, list[_Rows | None]]] = [{}, {}, {}]
        self._gradients: list[list[_Rows | None]] = [[], [], []]
        self._leaves: list[tuple[torch.Tensor, int]] = []  # what the loss is computed of, and its dim of the rows
        self._run = 0

    @contextlib.contextmanager
    def around_forward(self, known: Signature, microbatch: int) -> Iterator[None]:
        """All forwards begin with the same state."""
        self._run, self._leaves = microbatch if known is self.apart else 2, []
        self._state.restore()
        with torch.set_grad_enabled(self._has_gradients):
            yield

    def end_runs(self) -> None:
        self._state.restore()

    @staticmethod
    def run(module: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call of a module, without gradients: they are asked for by what it returns."""
        with torch.no_grad(), _WithoutStatistics():
            return module(*args, **kwargs)

    def returned(self, number: int, result: Any, *, changes: bool) -> Any:
        """What a call goes on with after it has returned ``result``. With ``changes``, its rows are changed a little, each
        by itself: where a loss is zero at the first values of parameters, or stationary, it is not after that."""
        leaves, tree = tree_flatten(result)
        dims = self._note(2 * number, leaves)
        if not changes or not any(dim is not None for dim in dims):
            return result
        with no_torch_function():
            return tree_unflatten([v if dim is None else self._changed(v, dim) for v, dim in zip(leaves, dims)], tree)

    def received(self, stage: int, tensors: Sequence[DTensor]) -> list[DTensor]:
        """What the last stage goes on with."""
        dims = self._dims_of_stage(stage)
        return [v if dim is None else self._changed(v, dim) for v, dim in zip(tensors, dims)]

    def given(self, output: Any) -> Any:
        """What a callable loss gets in place of the model's output."""
        whole, part = (tree_flatten(trace.output)[0] for trace in (self.apart.whole, self.apart.part))
        leaves, tree = tree_flatten(output)
        if not len(leaves) == len(whole) == len(part):
            return output
        dims = [_row_dim_of_leaves(a, b) for a, b in zip(whole, part)]
        return tree_unflatten([v if dim is None else self._changed(v, dim) for v, dim in zip(leaves, dims)], tree)

    def _changed(self, tensor: Any, dim: int) -> Any:
        if not self._has_gradients:
            return _changed(tensor)
        leaf = tensor.detach().requires_grad_()
        self._leaves.append((leaf, dim))
        return _changed(leaf)

    def end_forward(self, loss: torch.Tensor) -> None:
        """After the last stage's forward. Communication: of a backward of what is computed around modules."""
        if not self._has_gradients or not loss.requires_grad or not self._leaves:
            return
        found = torch.autograd.grad(loss, [leaf for leaf, _ in self._leaves], allow_unused=True)
        with no_torch_function():
            self._gradients[self._run] = [
                None if gradient is None else _projected(gradient, dim)
                for gradient, (_, dim) in zip(found, self._leaves)
            ]

    def sent(self, stage: int, tensors: Sequence[torch.Tensor]) -> None:
        """What enters a stage."""
        self._note(2 * self.apart.part.boundaries[stage].call - 1, tensors)

    def _dims_of_stage(self, stage: int) -> Sequence[int | None]:
        return self._dims.get(2 * self.apart.part.boundaries.get(stage, NOTHING).call - 1, ())

    def _note(self, place: int, leaves: Sequence[Any]) -> Sequence[int | None]:
        dims = self._dims.get(place, ())
        if len(dims) != len(leaves):
            return ()
        with no_torch_function():
            self._seen[self._run][place] = [None if d is None else _projected(v, d) for v, d in zip(leaves, dims)]
        return dims

    def first_difference(self, apart: Sequence[Any], together: Sequence[Any]) -> int:
        """The first place, of those on this rank, where a row is another one in the two micro-batches together; behind the
        end where there is none.

        Args:
            apart: where losses are computed on this rank, that of each forward, and its count.
            together: the same.
        """
        first, second, both = self._seen
        for place in sorted(both):
            given = first.get(place), second.get(place)
            for a, b, c in zip(given[0] or (), given[1] or (), both[place]):
                if a is not None and b is not None and c is not None and not _agree(a, b, c, self.eps, self.eps):
                    return place
        if not together:
            return self.end + 1
        counts = [sum(float(count) for _, count in losses) for losses in (apart, together)]
        scales = [1.0 / count if count else math.nan for count in counts]
        one, other, whole = (float(v[0]) * scale for v, scale in zip((*apart, *together), (scales[0], *scales)))
        gradients = [[v and (v[0] * s, v[1] * s) for v in run] for run, s in zip(self._gradients, (scales[0], *scales))]
        largest = max((float(v[1].max()) for v in gradients[2] if v is not None and len(v[1])), default=0.0)
        for a, b, c in zip(*gradients):
            floor = self.eps * (10 * largest + 1e-3)
            if a is not None and b is not None and c is not None and not _agree(a, b, c, self.eps, floor):
                return self.end
        limit = self.eps**0.4 * max(abs(one), abs(other), abs(whole)) + self.eps
        differs = abs(one + other - whole) > limit or math.isnan(one + other) != math.isnan(whole)
        return self.end if differs else self.end + 1

    def describe(self, place: int) -> str:
        """What depends on other rows at a place, for a message."""
        if place >= self.end:
            return "the loss of two micro-batches together is not what those of each add up to"
        path = self.apart.part.calls[(place + 1) // 2].path
        what = f"what enters the stage that begins before {path!r}" if place % 2 else f"what {path!r} returns"
        return f"{what} is not the same for the rows of two micro-batches together as for those of each"


def _dims_of_calls(whole: Sequence[TracedCall], part: Sequence[TracedCall]) -> Iterator[list[int | None]]:
    """For each call and each leaf of its result, the dim of the rows. Of calls that differ, none is known."""
    if [call.path for call in whole] != [call.path for call in part]:
        return
    for big, small in zip(whole, part):
        pairs = zip(big.leaves, small.leaves)
        yield [_row_dim_of_leaves(a, b) for a, b in pairs]


def _row_dim_of_leaves(big: Any, small: Any) -> int | None:
    """Of tensors, or what is known of them."""
    are_tensors = all(isinstance(v, TensorLike | torch.Tensor) for v in (big, small))
    return _row_dim(big.shape, small.shape) if are_tensors and small.dtype.is_floating_point else None


def _row_dim(big: Sequence[int], small: Sequence[int]) -> int | None:
    different = [d for d, (a, b) in enumerate(zip(big, small)) if a != b]
    is_cut = len(big) == len(small) and len(different) == 1 and big[different[0]] == 2 * small[different[0]]
    return different[0] if is_cut else None


def _projected(leaf: torch.Tensor, dim: int) -> _Rows:
    """Communication: of a tensor whose rows are on several ranks, or pending sums, an all-gather."""
    leaf = leaf.detach()
    if isinstance(leaf, DTensor):
        moves = any(p.is_partial() or isinstance(p, CustomPlacement) or shard_dim(p) == dim for p in leaf.placements)
        leaf = leaf.full_tensor() if moves else local_of(leaf)
    rows = leaf.movedim(dim, 0)
    rows = rows.reshape(len(rows), -1).to(torch.float64 if leaf.dtype is torch.float64 else torch.float32)
    weights = torch.arange(1, rows.shape[1] + 1, dtype=torch.float64, device=rows.device).mul_(12.9898).sin_()
    return rows @ weights.to(rows.dtype), rows.norm(dim=1)


def _agree(first: _Rows, second: _Rows, both: _Rows, eps: float, floor: float) -> bool:
    """Whether the rows of both are those of the first and the second. Dims before that of the rows may have been merged
    with it (``[tokens, rows]`` made ``[tokens * rows]``): it is enough if they agree in one such order."""
    found, norms = both
    count = len(first[0])
    if len(found) != 2 * count or len(second[0]) != count:
        return True  # not the rows of the trace: what values choose
    limit = eps**0.4 * (norms + 0.01 * norms.max()) + floor if count else norms
    for outer in range(1, count + 1):
        if count % outer:
            continue
        apart = torch.cat([one[0].view(outer, -1) for one in (first, second)], 1).flatten()
        if bool((((apart - found).abs() <= limit) | (apart.isnan() & found.isnan()) | (apart == found)).all()):
            return True
    return not count


def _changed(leaf: torch.Tensor) -> torch.Tensor:
    """Each element made smaller by up to a tenth, by its own value: it keeps its sign, and stays in [0, 1]."""
    if isinstance(leaf, DTensor) and any(p.is_partial() for p in leaf.placements):
        return leaf * 1.0  # its local values are no elements
    bounded = leaf / (1 + leaf.abs())
    return leaf * (1 - 0.1 * (8 * bounded).sin().square())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor


class _State:
    """Buffers and attributes of a model's modules, to be put back."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = [(b, _local(b).detach().clone()) for b in model.buffers() if not b.is_meta]
        self._attributes = [(module, dict(module.__dict__)) for module in model.modules()]
        self._tables = [(module, dict(module._buffers)) for module in model.modules() if module._buffers]

    @torch.no_grad()
    def restore(self) -> None:
        for module, attributes in self._attributes:
            module.__dict__.clear()
            module.__dict__.update(attributes)
        for module, buffers in self._tables:
            module._buffers.update(buffers)
        for buffer, before in self._buffers:
            _local(buffer).copy_(before)


class _WithoutStatistics(TorchFunctionMode):
    """Batch normalization in a module takes no statistics over rows: of that, users are warned."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.batch_norm:
            return func(*args, **kwargs)
        names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
        given = {**dict(zip(names, args)), **kwargs, "training": False}
        return given["input"] if given.get("running_mean") is None else func(**given)

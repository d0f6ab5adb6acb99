"""Finds dims of a model's weights that hold several things one after the other (fused query, key and value; gate and up).

The forward runs on meta tensors, and the features that a weight produces are followed through elementwise ops and views
until the code splits them. Names do not matter. Features that are first viewed as heads, and then split inside of each
head, are not packed: an ordinary shard ends between heads.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.utils.weak import WeakIdKeyDictionary

from vescale.ir._findings import Findings, Repeats, repeats_of
from vescale.ir._model_index import ModelIndex
from vescale.ir._placement_flow import FlowMode, indexed_dims, is_elementwise
from vescale.ir._resolve import Resolution, shown_name
from vescale.plans import Plan


@dataclass(frozen=True)
class Packing:
    """A dim of a parameter that a model takes apart: into so many equal parts; 0: into parts of different sizes."""

    name: str
    dim: int
    num_parts: int


def packed_dims(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[Packing, ...]:
    """The dims that ``model(**inputs)`` splits, in the order of the forward; model and inputs are on the meta device.

    If the forward raises on meta tensors, the dims found until then are returned. Of equal layers that follow each other,
    the first and the last run, and the first stands for the others.
    """
    runs = repeats_of(model)
    # A forward that counts its layers, or has no values: the whole one runs.
    with contextlib.suppress(Exception), _without_repeats(model, runs):
        return _walked(model, inputs).packings(runs)
    walk = _Walk(ModelIndex(model))
    with FlowMode(walk), contextlib.suppress(Exception):  # data-dependent code, for which there are no values
        model(**inputs)
    return walk.packings(())


def _walked(model: nn.Module, inputs: Mapping[str, Any]) -> _Walk:
    walk = _Walk(ModelIndex(model))
    with FlowMode(walk):
        model(**inputs)
    return walk


@contextlib.contextmanager
def _without_repeats(model: nn.Module, runs: Sequence[Repeats]) -> Iterator[None]:
    """Inside, lists lack the layers between the first and the last of each run."""
    lists = [(model.get_submodule(run.path), run) for run in runs]
    before = [dict(modules._modules) for modules, _ in lists]
    try:
        for modules, run in lists:
            for name in run.names[1:-1]:
                del modules._modules[name]
        yield
    finally:
        for (modules, _), kept in zip(reversed(lists), reversed(before)):
            modules._modules.clear()
            modules._modules.update(kept)


def lint_packed(
    plan: Plan, resolution: Resolution, index: ModelIndex, inputs: Mapping[str, Any], findings: Findings
) -> None:
    """Warn of packed dims that are cut as one: a rank would have some of the parts, and the model takes all of each."""
    for packing in packed_dims(index.model, inputs):
        planned = resolution.states[packing.name]
        for axis, placement in zip(plan.axes, planned.running(plan.axes)):
            if type(placement) is not Shard or placement.dim != packing.dim or plan.axes.size(axis) == 1:
                continue
            choice = planned.running_at(axis)
            if choice is None or _is_gathered(packing.name, axis, resolution, index):
                continue
            write = (
                f"'{choice.entry.path}': {{{axis}: Interleaved({packing.dim}, {packing.num_parts})}}, which shards each"
            )
            findings.warning(
                "packed",
                f"{{names}} is sharded S({packing.dim}) over '{axis}', but the model splits its output along that "
                f"dim, into {packing.num_parts or 'unequal'} parts, of which each rank would have only some, and "
                "would have to communicate the others; write "
                f"{write if packing.num_parts else f'{{{axis}: R}}, or use a separate weight for each part'}",
                choice.entry.source,
                shown_name(index.states[packing.name]),
            )


def _is_gathered(name: str, axis: str, resolution: Resolution, index: ModelIndex) -> bool:
    """Whether the module's own ``<out>`` entry brings all parts to every rank."""
    path = index.owner(name)[0]
    outputs = (planned for (at, side, _), planned in resolution.boundaries.items() if (at, side) == (path, "<out>"))
    found = [choice for planned in outputs if (choice := planned.dst.get(axis)) is not None]
    return any(isinstance(choice.placement, Replicate) for choice in found)


@dataclass(frozen=True)
class _Features:
    """Where a tensor has the features that weights make.

    Attributes:
        weights: (name, dim) of each.
        dim: the tensor's dim that runs over them, or over the outermost of the factors that a view has split them into.
        is_factor: whether a view has.
    """

    weights: tuple[tuple[str, int], ...]
    dim: int
    is_factor: bool = False


class _Walk:
    def __init__(self, index: ModelIndex) -> None:
        self._names = WeakIdKeyDictionary()
        for name, state in index.states.items():
            if state.is_parameter:
                path, attribute = index.owner(name)
                self._names[getattr(index.modules[path], attribute)] = name
        self._features = WeakIdKeyDictionary()
        self.found: dict[tuple[str, int], int] = {}

    def packings(self, runs: Sequence[Repeats]) -> tuple[Packing, ...]:
        """What was found, in the layers that ``runs`` have left out, too."""
        packings = []
        for (name, dim), num_parts in self.found.items():
            run = next((run for run in runs if run.holds(name)), None)
            ends = [name] if run is None else [f"{path}{name[len(run.stand_in) :]}" for path in run.paths()]
            packings += [Packing(each, dim, num_parts) for each in ends]
        return tuple(packings)

    def follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """After a torch function: what it made of features."""
        name = name.strip("_")
        if isinstance(result, torch.Tensor):
            made = self._made(name, args, kwargs, result) or self._kept(name, args, kwargs, result)
            if made is not None:
                self._features[result] = made
        features = self._features.get(args[0]) if args and isinstance(args[0], torch.Tensor) else None
        if features is not None:
            self._note(features, _num_parts(name, features, args, kwargs, result))

    def _note(self, features: _Features, num_parts: int | None) -> None:
        if num_parts is None:
            return
        for weight in features.weights:
            is_same = self.found.setdefault(weight, num_parts) == num_parts
            self.found[weight] = num_parts if is_same else 0

    def _made(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor) -> _Features | None:
        """Of a product with a weight, or a convolution: its rows, or columns, are features of the result."""
        where = _PRODUCTS.get(name)
        if where is None:
            return None
        dim, feature = where
        weights = [
            (self._names[tensor], dim % tensor.ndim if tensor.ndim > 1 else 0)
            for tensor in (*args, *kwargs.values())
            if isinstance(tensor, torch.Tensor) and tensor in self._names
        ]
        return _Features(tuple(weights), feature % result.ndim) if weights and result.ndim else None

    def _kept(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor) -> _Features | None:
        """Features of operands, where the result still has them."""
        given = [
            (tensor, features)
            for tensor in args
            if isinstance(tensor, torch.Tensor) and (features := self._features.get(tensor)) is not None
        ]
        if is_elementwise(name) or name in ("layer_norm", "rms_norm"):
            same = [features for tensor, features in given if tensor.shape == result.shape]
            weights = dict.fromkeys(weight for features in same for weight in features.weights)
            return (
                _Features(tuple(weights), same[0].dim, same[0].is_factor) if len({f.dim for f in same}) == 1 else None
            )
        if not given or given[0][0] is not args[0]:
            return None
        tensor, features = given[0]
        if name in ("view", "reshape", "unflatten", "flatten"):
            return _viewed(features, tensor.shape, result.shape)
        moved = _moved_dim(name, features.dim, tensor.ndim, args, kwargs)
        return None if moved is None else _Features(features.weights, moved, features.is_factor)


# Functions that multiply with weights: the dim of a matrix that runs over features, and that of the result.
_PRODUCTS: dict[str, tuple[int, int]] = {
    "linear": (0, -1),
    "addmm": (-1, -1),
    "matmul": (-1, -1),
    "mm": (-1, -1),
    "conv1d": (0, 1),
    "conv2d": (0, 1),
}


def _viewed(features: _Features, before: Sequence[int], after: Sequence[int]) -> _Features | None:
    """The outermost dim that the features have after a view; None when they are merged with other dims."""
    preceding, size = math.prod(before[: features.dim]), before[features.dim]
    for dim, found in enumerate(after):
        if math.prod(after[:dim]) == preceding and size % max(found, 1) == 0 and found <= size:
            if found == 1 and size > 1 and math.prod(after[dim + 1 :]) != math.prod(before[features.dim :]):
                continue
            return _Features(features.weights, dim, features.is_factor or found < size)
    return None


def _moved_dim(name: str, dim: int, ndim: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Where a dim is after a function that changes the order of dims; None for any other."""
    if name in ("transpose", "swapaxes", "swapdims"):
        first, second = (int(value) % ndim for value in (*args[1:], *kwargs.values())[:2])
        return {first: second, second: first}.get(dim, dim)
    if name in ("t", "T", "mT"):
        return 2 * ndim - 3 - dim if dim >= ndim - 2 else dim
    if name == "permute":
        order = args[1] if isinstance(args[1], tuple | list) else args[1:]
        return [int(value) % ndim for value in order].index(dim)
    if name == "unsqueeze":
        at = int((*args[1:], *kwargs.values())[0]) % (ndim + 1)
        return dim + (at <= dim)
    if name == "getitem":
        return next(
            (after for before, item, after in indexed_dims(args[1], ndim) if before == dim and item == slice(None)),
            None,
        )
    return None


def _num_parts(
    name: str, features: _Features, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> int | None:
    """Into how many parts features are taken apart; 0: unequal ones; None: they are not."""
    x = args[0]
    size = x.shape[features.dim]
    if name in ("chunk", "split", "split_with_sizes", "tensor_split", "unbind", "iter"):
        given = args[1:] if name == "unbind" else args[2:]
        dim = kwargs.get("dim", given[0] if given else 0)
        if not isinstance(dim, int) or dim % x.ndim != features.dim:
            return None
        if name in ("unbind", "iter"):
            return size if features.is_factor else None
        sizes = {part.shape[features.dim] for part in result}
        return None if len(result) < 2 else len(result) if len(sizes) == 1 else 0
    if name == "select":
        return size if features.is_factor and int(args[1]) % x.ndim == features.dim else None
    if name == "getitem":
        item = next((item for before, item, _ in indexed_dims(args[1], x.ndim) if before == features.dim), slice(None))
        if isinstance(item, int):
            return size if features.is_factor else None
        if isinstance(item, slice) and item.step in (None, 1):
            length = len(range(*item.indices(size)))
            return None if length in (0, size) else size // length if size % length == 0 else 0
    return None

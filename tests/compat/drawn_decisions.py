"""Placements drawn for calls of ops, what is decided about them, and whether ranks that follow get one device's numbers."""

from __future__ import annotations

import functools
import itertools
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.compat import by_hand
from tests.compat.aten_calls import Call
from vescale.compat import make_dtensor

__all__ = [
    "MESHES",
    "Case",
    "Refused",
    "Wrong",
    "alike",
    "check_numbers",
    "decide",
    "draw",
    "meshes_of",
    "ops_with_rules",
]

MESHES = [(2,), (4,), (5,), (2, 2), (2, 3), (2, 1, 2)]
"""Samples have sizes of 0, 1, 2, 3, 5, 10: even, uneven, and with empty shards."""
# The kernel for CPUs divides an integer by the size of an operand, which is 0 for an empty shard, where forwards raise.
ENDS_THE_PROCESS = frozenset({"aten.native_batch_norm_backward.default"})
_TABLES = ("op_to_rules", "op_strategy_funcs", "op_single_dim_strategy_funcs")


Coordinate = tuple[int, ...]


class Wrong(Exception):
    """Ranks that follow a decision have other numbers than one device."""


class Refused(Wrong):
    """They get an error."""


@dataclass(frozen=True, eq=False)
class Case:
    """A call with placements of its tensors on a mesh."""

    call: Call
    mesh_shape: tuple[int, ...]
    placements: tuple[tuple[Any, ...], ...]

    def specs(self, mesh: DeviceMesh) -> list[DTensorSpec]:
        found = []
        for x, placements in zip(self.call.tensors, self.placements):
            meta = TensorMeta(x.shape, x.stride(), x.dtype)
            strided = any(isinstance(p, _StridedShard) for p in placements)
            found.append(
                DTensorSpec(
                    mesh, placements, tensor_meta=meta, use_strided_shard_as_shard_order=False if strided else None
                )
            )
        return found

    def on(self, mesh: DeviceMesh) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with DTensors."""
        return self.call.on(
            make_dtensor(torch.empty(0, dtype=x.dtype), s) for x, s in zip(self.call.tensors, self.specs(mesh))
        )

    def __str__(self) -> str:
        return f"{self.call} as {[' '.join(map(str, p)) for p in self.placements]} on {self.mesh_shape}"


def ops_with_rules() -> list[Any]:
    """All ops that this version of PyTorch has a rule for."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    return list(dict.fromkeys(itertools.chain.from_iterable(getattr(propagator, name) for name in _TABLES)))


@functools.cache
def meshes_of(world: Any, mesh_shape: tuple[int, ...]) -> dict[Coordinate, DeviceMesh]:
    """For each coordinate a mesh on which this process has it."""
    found = {}
    for index, coordinate in enumerate(itertools.product(*map(range, mesh_shape))):
        ranks = torch.arange(torch.Size(mesh_shape).numel())
        ranks[0], ranks[index] = index, 0
        found[coordinate] = DeviceMesh("cpu", ranks.view(mesh_shape))
    return found


def draw(call: Call, mesh_shape: tuple[int, ...], chance: random.Random) -> Case:
    """On each axis all operands are cut alike (dims count from the end, as broadcasting aligns them), all are pending, all
    are whole, or each is placed by itself."""
    tensors = call.tensors
    placed: list[list[Any]] = [[] for _ in tensors]
    for _ in mesh_shape:
        kind = chance.choice(["whole", "cut", "cut", "pending", "own", "own"])
        dim, from_end = chance.randrange(4), chance.random() < 0.5
        # PyTorch's search takes seconds for strided shards of several operands on several axes.
        strided = chance.random() < {1: 0.15, 2: 0.05 * (len(tensors) == 1), 3: 0.0}[len(mesh_shape)]
        reduce_op = chance.choice(["sum", "sum", "avg", "max", "min"])
        for placements, x in zip(placed, tensors):
            own = chance.choice(["whole", "cut", "pending"]) if kind == "own" else kind
            if kind == "own" and chance.random() < 0.5:
                dim = chance.randrange(4)
            place = x.ndim - 1 - dim if from_end else dim
            if own == "cut" and 0 <= place < x.ndim:
                placements.append(_StridedShard(place, split_factor=2) if strided else Shard(place))
            elif own == "pending" and (allowed := _pending(x, reduce_op, placements)) is not None:
                placements.append(allowed)
            else:
                placements.append(Replicate())
    return Case(call, mesh_shape, tuple(map(tuple, placed)))


def alike(case: Case, calls: Sequence[Call], chance: random.Random) -> Case | None:
    """The same placements of a call with other sizes."""
    kind = [(x.ndim, x.dtype) for x in case.call.tensors]
    others = [c for c in calls if c is not case.call and [(x.ndim, x.dtype) for x in c.tensors] == kind]
    return Case(chance.choice(others), case.mesh_shape, case.placements) if others else None


def _pending(x: torch.Tensor, reduce_op: str, others: Sequence[Any]) -> Any:
    if x.dtype == torch.bool or (x.is_complex() and reduce_op in ("max", "min")) or not (x.abs() < 1e6).all():
        return None
    known = next((p for p in others if p.is_partial()), None)
    return known or Partial(reduce_op)


def decide(case: Case, mesh: DeviceMesh) -> Any:
    """PyTorch's decision, with the patches that are installed; or the error."""
    dispatcher: Any = DTensor._op_dispatcher
    args, kwargs = case.on(mesh)
    try:
        schema = dispatcher.unwrap_to_op_info(case.call.op, args, kwargs).schema
        found = dispatcher.sharding_propagator.propagate_op_sharding_non_cached(schema)
    except Exception as error:
        return error
    return found


def has_numbers(op: Any) -> bool:
    """Whether one device computes the same numbers twice."""
    is_random = torch.Tag.nondeterministic_seeded in op.tags or op in DTensor._op_dispatcher._random_ops
    return not is_random and "empty" not in op.name()


def _held(x: torch.Tensor, spec: DTensorSpec) -> tuple[Any, ...]:
    """Complex numbers have no order: an extremum of them can only be pending of equal ones, as redistribution makes it."""
    return tuple(
        Replicate() if x.is_complex() and (p.is_partial("max") or p.is_partial("min")) else p for p in spec.placements
    )


def check_numbers(case: Case, meshes: dict[Coordinate, DeviceMesh], decided: Callable[[DeviceMesh], Any]) -> str:
    """Compares what ranks have that follow ``decided(mesh)``, an OutputSharding, with what one device has; a word for what
    was found.

    Raises Wrong.
    """
    op = case.call.op
    first = decided(meshes[(0,) * len(case.mesh_shape)])
    if not has_numbers(op):
        return "random"
    wanted = first.redistribute_schema if first.needs_redistribute else None
    specs = _specs_of(wanted) if wanted else case.specs(meshes[(0,) * len(case.mesh_shape)])
    specs += case.specs(meshes[(0,) * len(case.mesh_shape)])[len(specs) :]  # keywords are not moved
    if any(isinstance(p, _MaskPartial) for spec in specs for p in spec.placements):
        return "masked"  # only PyTorch's redistribution fills the mask
    moved = [s.placements != given for s, given in zip(specs, case.placements)]
    if any(one and is_written for one, is_written in zip(moved, case.call.written())):
        return "written moved"
    cuts = [by_hand.cut(x, _held(x, s), case.mesh_shape) for x, s in zip(case.call.tensors, specs)]
    args, kwargs = case.call.on(x.clone() for x in case.call.tensors)
    expected = _run(op, args, kwargs)
    tolerance = max(_tolerance(x.dtype) for x in (*case.call.tensors, *expected) if isinstance(x, torch.Tensor))
    found: dict[Coordinate, list[Any]] = {}
    for where, mesh in meshes.items():
        args, kwargs = case.call.on(parts[where].clone() for parts in cuts)
        if first.use_val_from_redistribute_schema:  # sizes are those of the rank
            schema = decided(mesh).redistribute_schema
            op, args = schema.op, _with_locals(schema.args_schema, [parts[where].clone() for parts in cuts])
        is_empty = any(
            0 in {own for own, size in zip(parts[where].shape, x.shape) if size}
            for parts, x in zip(cuts, case.call.tensors)
        )
        if is_empty and str(op) in ENDS_THE_PROCESS:
            return "empty shard refused"
        try:
            found[where] = _run(op, args, kwargs)
        except Exception as error:
            if is_empty:
                return "empty shard refused"  # an error, and no numbers
            raise Refused(f"raises {type(error).__name__}: {error}"[:300].replace("\n", " ")) from error
    for index, (value, spec) in enumerate(zip(expected, _listed(first.output_spec, len(expected)), strict=True)):
        if not isinstance(value, torch.Tensor) or spec is None or not value.numel():
            continue
        local = {where: values[index] for where, values in found.items()}
        if tuple(spec.shape) != tuple(value.shape):
            raise Wrong(f"result {index} is said to have the shape {list(spec.shape)}")
        try:
            together = by_hand.put_together(local, spec.placements, case.mesh_shape, value.shape)
            if any(p.is_partial("sum") or p.is_partial("avg") for p in spec.placements):
                together = together.where(value.isfinite(), value)  # terms of infinity may be of both signs
            torch.testing.assert_close(together, value, equal_nan=True, rtol=tolerance, atol=tolerance)
        except NotImplementedError:
            if not value.is_complex():
                raise
            return "extremum of complex numbers"  # which nothing reduces: an error, and no numbers
        except AssertionError as error:
            raise Wrong(f"result {index} as {spec.placements}: {error}"[:400].replace("\n", " ")) from error
    return "moved" if any(moved) else "stay"


def _with_locals(args: Any, locals_: Sequence[torch.Tensor]) -> Any:
    left = iter(locals_)
    return tree_map_only(DTensorSpec, lambda _: next(left), args)


def _specs_of(schema: Any) -> list[DTensorSpec]:
    return [x for x in tree_leaves(schema.args_schema) if isinstance(x, DTensorSpec)]


def _tolerance(dtype: torch.dtype) -> float:
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    if dtype in (torch.bfloat16, torch.float16):  # terms are larger than their sums
        return 0.5
    return {torch.float64: 1e-7, torch.complex128: 1e-7, torch.float32: 1e-3, torch.complex64: 1e-3}.get(dtype, 0.1)


def _run(op: Any, args: Any, kwargs: Any) -> list[Any]:
    torch.manual_seed(0)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = op(*args, **kwargs)
    return list(results) if isinstance(results, list | tuple) else [results]


def _listed(outputs: Any, number: int) -> list[Any]:
    if isinstance(outputs, list | tuple):
        return list(outputs)
    return [outputs] * number

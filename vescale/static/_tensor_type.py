"""``TensorType``: what a local tensor is the part of."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import DTensorSpec, local_of, map_tensors, native_static, spec_of
from vescale.ops import convert, cut, enter_local, leave_local
from vescale.static._gradients import local_gradient
from vescale.static._step_records import TensorRecord


class UnrecordedError(BaseException):
    """A static forward met what was not recorded; the step is repeated in eager mode. The model's own handlers of exceptions
    do not catch it."""


@dataclass(frozen=True)
class TensorType:
    """The DTensor that a local tensor is the part of.

    Attributes:
        placements: of the tensor; None for a plain tensor, which is the same on every rank.
        grad: of its gradient. None: unknown.
        factors: global size by local size, for each dim; 0 for a dim that the ranks do not share evenly.
        sizes: (global, local) sizes as recorded, which count where the factor is 0.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...] | None
    grad: tuple[Placement, ...] | None
    factors: tuple[int, ...]
    sizes: tuple[tuple[int, int], ...]
    # The last spec with these placements: most tensors have one, and comparing placements takes long.
    _accepted: list[Any] = field(default_factory=lambda: [None], compare=False, repr=False)

    @property
    def is_even(self) -> bool:
        return all(self.factors)

    @functools.cached_property
    def is_same_shape(self) -> bool:
        """Whether the local tensor has the global shape."""
        return all(factor == 1 for factor in self.factors)

    @functools.cached_property
    def local_grad(self) -> tuple[Placement, ...] | None:
        """Placements of the DTensor whose local part is the local gradient, which has the shape of the local tensor."""
        if self.placements is None or self.grad is None:
            return None
        return local_gradient(self.placements, self.grad, self.mesh)

    @functools.cached_property
    def grad_cut(self) -> tuple[Placement, ...] | None:
        """Placements that make the gradient a shard of the local gradient, whose other elements are zero; None: the local
        gradient is the gradient."""
        if self.grad is None or self.local_grad is None or self.grad == self.local_grad:
            return None
        return tuple(g if g != local else Replicate() for g, local in zip(self.grad, self.local_grad))

    def with_kept_placements(self) -> TensorType:
        """An equal one, of which C++ finds the placements without comparing."""
        kept = native_static().kept
        placements, grad = (p if p is None else kept(p) for p in (self.placements, self.grad))
        return replace(self, placements=placements, grad=grad)

    def global_shape(self, local: torch.Tensor) -> tuple[int, ...]:
        if local.ndim != len(self.factors):
            raise UnrecordedError(f"a tensor of {local.ndim} dims in place of one of {len(self.factors)}")
        if self.is_same_shape:
            return tuple(local.shape)
        shape = []
        for dim, (size, factor) in enumerate(zip(local.shape, self.factors)):
            if factor:
                shape.append(size * factor)
                continue
            whole, part = self.sizes[dim]
            if size != part:
                raise UnrecordedError(f"the uneven size {size} in place of {part}")
            shape.append(whole)
        return tuple(shape)

    def _check_shape(self, shape: tuple[int, ...]) -> None:
        """Raises UnrecordedError, on all ranks alike, where the ranks' parts are to the whole as they were not recorded."""
        if len(shape) != len(self.factors):
            raise UnrecordedError(f"a tensor of {len(shape)} dims in place of one of {len(self.factors)}")
        for dim, (size, factor) in enumerate(zip(shape, self.factors)):
            if factor == 0 and size != self.sizes[dim][0]:
                raise UnrecordedError(f"size {size}, which the ranks share unevenly, in place of {self.sizes[dim][0]}")
            if factor > 1 and size % factor:
                raise UnrecordedError(f"size {size} is not divisible by {factor}")

    def to_global(self, local: torch.Tensor, op: str) -> torch.Tensor:
        """The DTensor with this local tensor, in autograd."""
        if self.placements is None or isinstance(local, DTensor):
            return local
        parts = getattr(local, "_vescale_parts", None)
        if not (local.is_contiguous() or _is_dense(local)):
            local = local.contiguous()  # the strides of a DTensor have no gaps
        made = leave_local(local, self.mesh, self.placements, self.global_shape(local), op, self.local_grad)
        return made if self.grad_cut is None else _with_gradient(made, functools.partial(self._cut_before, parts))

    def to_local(self, x: torch.Tensor) -> torch.Tensor:
        """The local tensor of a DTensor of this type, in autograd."""
        if not isinstance(x, DTensor):
            if self.placements is not None:
                raise UnrecordedError(f"a plain tensor in place of one that is {self.placements}")
            return x
        spec = spec_of(x)
        if self._accepted[0] is not spec:
            self.accept(spec)
            self._accepted[0] = spec
        if self.grad_cut is None:
            return enter_local(x, self.local_grad)
        parts: list[torch.Tensor] = []  # shards as the uses return them; their strides determine the order of sums
        local: Any = enter_local(_with_gradient(x, functools.partial(self._own_part, parts)), self.local_grad)
        local._vescale_parts = parts
        return cast(torch.Tensor, local)

    def _cut_before(self, parts: list[torch.Tensor] | None, grad: torch.Tensor) -> torch.Tensor:
        """Shard an arriving gradient, before it is padded with zeros to the local shape. Keeps the shard in ``parts``."""
        if not isinstance(grad, DTensor):
            return grad
        found = convert(grad, self.grad or (), requester="gradient")
        if parts is not None and not torch.is_grad_enabled():
            parts.append(local_of(found))
        return found

    def _own_part(self, parts: list[torch.Tensor], grad: torch.Tensor) -> torch.Tensor:
        """The shard of a padded gradient. If ``parts`` add up to it, their sum is returned, because it has the strides that
        eager mode has."""
        sent, parts[:] = list(parts), ()
        if self.grad_cut is None or self.grad is None or torch.is_grad_enabled() or not isinstance(grad, DTensor):
            return grad
        spec, local = spec_of(grad), cut(local_of(grad), self.mesh, self.grad_cut)
        if sent:
            total = functools.reduce(torch.add, sent)
            if torch.equal(total, local):  # false if an earlier backward added to them and did not reach this tensor
                local = total
        return leave_local(local, self.mesh, self.grad, spec.shape, "gradient")

    def accept(self, spec: DTensorSpec) -> None:
        """Raises UnrecordedError if DTensors with this spec are not of this type. A mesh of the same ranks in the same order
        is as good as the model's."""
        if spec.mesh is not self.mesh and spec.mesh != self.mesh:
            raise UnrecordedError(f"a tensor on {spec.mesh} in place of one on {self.mesh}")
        if tuple(spec.placements) != self.placements:
            raise UnrecordedError(f"a tensor that is {tuple(spec.placements)} in place of {self.placements}")
        self._check_shape(tuple(spec.shape))


def _with_gradient(x: DTensor, change: Callable[[torch.Tensor], torch.Tensor]) -> DTensor:
    """A view of ``x`` with a hook that changes its gradient; ``x`` itself may have other uses, whose gradients stay."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    view: Any = x.view_as(x)
    view.register_hook(change)
    return cast(DTensor, view)


def _is_dense(x: torch.Tensor) -> bool:
    return x.numel() == 0 or sum((size - 1) * stride for size, stride in zip(x.shape, x.stride())) + 1 == x.numel()


def _type_of(record: TensorRecord, mesh: DeviceMesh, grads: Collection[tuple[Placement, ...]]) -> TensorType:
    """The type of a recorded tensor; ``grads``: recorded placements of its gradient, one at most."""
    grad = next(iter(grads), None)
    if record.placements is None:
        return TensorType(mesh, None, None, (1,) * len(record.shape), ())
    factors = []
    for dim, (whole, part) in enumerate(zip(record.shape, record.local_shape)):
        share = math.prod(mesh.size(axis) for axis, p in enumerate(record.placements) if getattr(p, "dim", None) == dim)
        is_even = all(type(p) is Shard for p in record.placements if getattr(p, "dim", None) == dim)
        factors.append(share if (is_even or share == 1) and part * share == whole else 0)
    sizes = () if all(factors) else tuple(zip(record.shape, record.local_shape))
    return TensorType(mesh, record.placements, grad, tuple(factors), sizes)


def types_of(records: Sequence[TensorRecord], mesh: DeviceMesh) -> tuple[TensorType, ...]:
    """The types of recorded tensors, with the gradients of their values."""
    return tuple(_type_of(r, mesh, r.value.grads if r.value is not None else ()) for r in records)


def map_in_order(value: Any, changes: Sequence[Callable[[torch.Tensor], Any]]) -> Any:
    """``value`` with its tensors changed, each by the next of ``changes``; one that occurs twice becomes one."""
    waiting, made = iter(changes), {}
    count = 0

    def change(x: torch.Tensor) -> Any:
        nonlocal count
        count += 1
        function = next(waiting, None)
        if function is None:
            raise UnrecordedError("more tensors than recorded")
        if id(x) not in made:
            made[id(x)] = x, function(x)
        return made[id(x)][1]

    result = map_tensors(change, value)
    if count != len(changes):
        raise UnrecordedError("fewer tensors than recorded")
    return result

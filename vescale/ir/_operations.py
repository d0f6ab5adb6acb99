"""What an instruction does: small frozen values with a text form.

Placements are complete: one for each axis of the mesh, in mesh order. ``None`` on an axis means "as it arrives": the plan
says nothing there and nothing is changed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.placements import local_region
from vescale.plans import AttentionMethod, CheckpointPolicy, MeshAxes, dtype_name, mp_options, placement_text

# One placement for each mesh axis; None where the plan leaves the axis as it is.
Stage = tuple[Placement | None, ...]


def stage_text(stage: Sequence[Placement | None], axes: MeshAxes) -> str:
    """``dp=R,tp=S(0)``; axes left alone are left out, ``-`` when all are."""
    return ",".join(f"{axis}={placement_text(p)}" for axis, p in zip(axes, stage) if p is not None) or "-"


@dataclass(frozen=True)
class Place:
    """A parameter or buffer becomes a DTensor with these placements at rest; complete, no None.

    The same ragged cut on several axes is one over all their ranks (:mod:`vescale.ir._units`).
    """

    placements: Stage

    def text(self, axes: MeshAxes) -> str:
        return f"place({stage_text(self.placements, axes)})"


@dataclass(frozen=True)
class Wrap:
    """An input of the model becomes a DTensor with these placements; complete, no None.

    ``given``: a plain tensor is the ``global`` one, the same on every rank, and is cut here; or each rank's ``local`` part.
    """

    placements: Stage
    given: Literal["global", "local"] = "global"

    def text(self, axes: MeshAxes) -> str:
        return f"wrap({stage_text(self.placements, axes)}{',given=local' if self.given == 'local' else ''})"


@dataclass(frozen=True)
class Redistribute:
    """A tensor is redistributed to ``dst``, and its gradient to ``grad_dst`` in backward.

    ``src`` is the placement that the plan expects the tensor to have on arrival (checked at run time where it is not
    None). In backward, the gradient is first redistributed to ``grad_src``, if it is not None, and then to ``grad_dst``.
    If ``grad_dst`` is None, as a whole or on one axis, the boundary rule applies: the gradient gets the placement with
    which the tensor arrived, or Replicate if the tensor arrived Partial. On an axis where ``dst`` is None as well, the
    gradient is left unchanged. ``dst == src == Replicate`` has an effect: a Partial gradient is reduced here.

    Of a parameter or buffer (``target`` names it): at FORWARD_PRE ``src`` is its placement at rest and ``dst`` the one that
    the module computes with until its forward ends; the gradient goes back to ``src`` by the same rule.
    """

    dst: Stage
    src: Stage | None = None
    grad_src: Stage | None = None
    grad_dst: Stage | None = None

    def text(self, axes: MeshAxes) -> str:
        before = stage_text(self.src, axes) if self.src is not None else ""
        parts = [f"{before}->{stage_text(self.dst, axes)}"]
        if self.grad_src is not None or self.grad_dst is not None:
            ends = [stage_text(stage, axes) if stage is not None else "" for stage in (self.grad_src, self.grad_dst)]
            parts.append(f"grad:{ends[0]}->{ends[1]}")
        return f"redist({';'.join(parts)})"


@dataclass(frozen=True)
class Annotate:
    """A plain local tensor is labelled with these placements; nothing moves."""

    placements: Stage

    def text(self, axes: MeshAxes) -> str:
        return f"annotate({stage_text(self.placements, axes)})"


@dataclass(frozen=True)
class Factory:
    """Tensors made inside the module's forward get these placements; complete, no None."""

    placements: Stage

    def text(self, axes: MeshAxes) -> str:
        return f"factory({stage_text(self.placements, axes)})"


@dataclass(frozen=True)
class Attention:
    """How attention inside the module's forward works along axes over which the sequence is cut; None: the plan gives no
    method."""

    methods: tuple[AttentionMethod | None, ...]

    def text(self, axes: MeshAxes) -> str:
        parts = (f"{axis}={method}" for axis, method in zip(axes, self.methods) if method is not None)
        return f"attention({','.join(parts)})"


@dataclass(frozen=True)
class Local:
    """The module's forward runs on local tensors; its borders are brought to these placements.

    Of experts: over which axes whole ones are spread, and how many there are; along which axes each of them is cut; biases
    (names relative to the module) that only the first rank of those adds, because the results of the ranks are summed.
    """

    kind: str | None
    dispatch: str | None
    inputs: Stage
    outputs: Stage
    experts: tuple[str, ...] = ()
    num_experts: int = 0
    features: tuple[str, ...] = ()
    biases: tuple[str, ...] = ()

    def text(self, axes: MeshAxes) -> str:
        names = [f"{name}={value}" for name, value in (("kind", self.kind), ("dispatch", self.dispatch)) if value]
        names += [f"experts={self.num_experts} over {','.join(self.experts)}"] if self.experts else []
        names += [f"features over {','.join(self.features)}"] if self.features else []
        names += [f"added once: {','.join(self.biases)}"] if self.biases else []
        names += [f"in={stage_text(self.inputs, axes)}", f"out={stage_text(self.outputs, axes)}"]
        return f"local({';'.join(names)})"


@dataclass(frozen=True)
class Unit:
    """Parameters (``names``, relative to the module) that rest sharded over the axes ``shard`` and are replicated there
    while the module computes: gathered together before its forward and its backward, their gradients reduced together.

    Several axes of ``shard``, in the order of the mesh, shard once over all their ranks (:mod:`vescale.ir._units`).
    ``replicate``: axes of replicas, over which those gradients are summed, too. ``reshard_after_forward``,
    ``reshard_after_backward``: see :meth:`vescale.Plan.unit`; None of the former is the default of the module's position.
    ``mp_policy``, ``offload_pinned``: see :class:`vescale.plans.UnitEntry`.
    """

    names: tuple[str, ...]
    shard: tuple[str, ...]
    replicate: tuple[str, ...] = ()
    reshard_after_forward: bool | int | None = None
    reshard_after_backward: bool = True
    mp_policy: MixedPrecisionPolicy | None = None
    offload_pinned: bool | None = None

    def text(self, axes: MeshAxes) -> str:
        parts = [f"shard={','.join(self.shard)}"]
        parts += [f"replicate={','.join(self.replicate)}"] if self.replicate else []
        parts += [] if self.reshard_after_forward is None else [f"reshard_after_forward={self.reshard_after_forward}"]
        parts += [] if self.reshard_after_backward else ["reshard_after_backward=False"]
        parts += [f"{name}={value}" for name, value in mp_options(self.mp_policy).items()]
        parts += [] if self.offload_pinned is None else [f"offload={'pinned' if self.offload_pinned else 'pageable'}"]
        return f"unit({';'.join([*parts, ','.join(self.names)])})"


@dataclass(frozen=True)
class Precision:
    """Dtypes; None: as it is.

    Of a module (target ``<self>``): its floating inputs are cast to ``param``, its floating outputs to ``output``. Of a
    parameter (``target`` names it): it is cast to ``param`` while the module computes, and its gradient is reduced in
    ``reduce``.
    """

    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None

    def text(self, axes: MeshAxes) -> str:
        dtypes = {"param": self.param, "reduce": self.reduce, "output": self.output}
        return f"precision({','.join(f'{name}={dtype_name(d)}' for name, d in dtypes.items() if d is not None)})"


@dataclass(frozen=True)
class Checkpoint:
    """What the module's forward computes is computed again in backward, but for what ``policy`` saves.

    Paths in ``policy.save`` are those of single modules, relative to this one. ``budget_gib``: what all modules with this
    ``budget`` (the number of the entry in the plan) may save together.
    """

    policy: CheckpointPolicy
    budget_gib: float | None = None
    budget: int = 0

    def text(self, axes: MeshAxes) -> str:
        limit = "" if self.budget_gib is None else f";budget={self.budget_gib:g} GiB of entry {self.budget}"
        return f"checkpoint({self.policy.text()}{limit})"


Op = Place | Precision | Wrap | Redistribute | Annotate | Factory | Attention | Local | Unit | Checkpoint


def part_sizes(size: int, *num_ranks: int) -> tuple[int, ...]:
    """Of a dim that ``Shard`` cuts along axes with ``num_ranks``: what each rank has."""
    cuts = (Shard(0),) * len(num_ranks)
    coordinates = itertools.product(*map(range, num_ranks))
    return tuple(local_region((size,), cuts, num_ranks, at).local_shape[0] for at in coordinates)

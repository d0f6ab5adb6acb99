"""The entries of a plan: frozen values, in the order they were written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.placement_types import Placement

from vescale.errors import Source
from vescale.plans._checkpoint_policy import CheckpointPolicy
from vescale.plans._path import Path
from vescale.plans._phase import ALL, Phase

__all__ = [
    "ATTENTION_METHODS",
    "AnnotateEntry",
    "AttentionEntry",
    "AttentionMethod",
    "AxisPlacements",
    "CheckpointEntry",
    "Entry",
    "FactoryEntry",
    "LocalEntry",
    "PrecisionEntry",
    "RedistributeEntry",
    "ShardEntry",
    "UnitEntry",
]

# (axis name, placement) pairs, in the order of the mesh's axes.
AxisPlacements = tuple[tuple[str, Placement], ...]


@dataclass(frozen=True)
class ShardEntry:
    """During ``phase`` a tensor has these ``placements``, on the axes that they name.

    ``given`` (inputs of the model only): whether a plain tensor that the caller passes is ``global``, the same on every
    rank and sharded by the hook, or ``local``, this rank's own part.
    """

    path: Path
    placements: AxisPlacements
    phase: Phase = ALL
    given: Literal["global", "local"] = "global"
    source: Source | None = field(default=None, compare=False)


@dataclass(frozen=True)
class RedistributeEntry:
    """At a module boundary a tensor goes from ``src`` to ``dst``; its gradient from ``grad_src`` to ``grad_dst``.

    A None gradient placement follows from the forward ones: the gradient of ``dst`` arrives as ``dst`` (Replicate where
    that is Partial) and leaves as ``src``.
    """

    path: Path
    src: AxisPlacements
    dst: AxisPlacements
    grad_src: AxisPlacements | None = None
    grad_dst: AxisPlacements | None = None
    source: Source | None = field(default=None, compare=False)


@dataclass(frozen=True)
class AnnotateEntry:
    """A plain local tensor has these placements already: it becomes a DTensor, and nothing moves."""

    path: Path
    placements: AxisPlacements
    source: Source | None = field(default=None, compare=False)


@dataclass(frozen=True)
class FactoryEntry:
    """The placements of tensors that the matching modules make inside their forward (``arange``, ``zeros``, masks)."""

    path: Path
    placements: AxisPlacements
    source: Source | None = field(default=None, compare=False)


AttentionMethod = Literal["all_gather", "ring", "ulysses"]
ATTENTION_METHODS: tuple[AttentionMethod, ...] = get_args(AttentionMethod)


@dataclass(frozen=True)
class AttentionEntry:
    """The method of scaled dot product attention inside the matching modules, on axes that shard the sequence.

    ``all_gather``: keys and values are gathered, and each rank attends with its own queries. ``ring``: blocks of keys and
    values are passed round the ranks. ``ulysses``: the sharding is moved from the sequence to the heads, and back.
    ``methods`` are (axis name, method) pairs, in the order of the mesh's axes.
    """

    path: Path
    methods: tuple[tuple[str, AttentionMethod], ...]
    source: Source | None = field(default=None, compare=False)


@dataclass(frozen=True)
class LocalEntry:
    """The matching modules run on plain local tensors.

    ``kind`` names a known region (``experts``, with ``dispatch`` ``mask`` or ``all_to_all``). ``inputs`` and ``outputs``
    are the placements of the tensors that enter and leave the region.
    """

    path: Path
    kind: str | None = None
    dispatch: str | None = None
    inputs: AxisPlacements = ()
    outputs: AxisPlacements = ()
    source: Source | None = field(default=None, compare=False)


@dataclass(frozen=True)
class UnitEntry:
    """The parameters of each matching module are gathered, and their gradients reduced, together.

    ``reshard_after_forward``: gathered parameters are freed after forward (True), kept for backward (False), or a piece
    is kept on each of this number of ranks; None: freed, except for the model itself. ``reshard_after_backward``: freed
    after every backward (True or None), or only after a backward that reduces gradients (False). ``mp_policy``: dtypes in
    which parameters are gathered and gradients reduced; None: their own. ``offload_pinned``: parameters are in host
    memory at rest, pinned or not; None: on the device.
    """

    path: Path
    reshard_after_forward: bool | int | None = None
    reshard_after_backward: bool | None = None
    mp_policy: MixedPrecisionPolicy | None = None
    offload_pinned: bool | None = None
    source: Source | None = field(default=None, compare=False)


@dataclass(frozen=True)
class PrecisionEntry:
    """The dtypes of the matching modules and all inside of them; None: as it is.

    ``param``: of parameters, and of the modules' floating inputs, while the modules compute. ``reduce``: in which their
    gradients are reduced (None: ``param``). ``output``: of the modules' floating outputs. Parameters, gradients and
    optimizer state keep their own dtype.
    """

    path: Path
    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    source: Source | None = field(default=None, compare=False)


@dataclass(frozen=True)
class CheckpointEntry:
    """The matching modules do not keep what their forward computes for backward, but compute it again.

    ``budget_gib``: GiB that all matching modules together may save on a rank; the policy is then the one with the least
    memory, and modules that need not have it save more.
    """

    path: Path
    policy: CheckpointPolicy
    budget_gib: float | None = None
    source: Source | None = field(default=None, compare=False)


Entry = (
    ShardEntry
    | RedistributeEntry
    | AnnotateEntry
    | FactoryEntry
    | AttentionEntry
    | LocalEntry
    | UnitEntry
    | PrecisionEntry
    | CheckpointEntry
)

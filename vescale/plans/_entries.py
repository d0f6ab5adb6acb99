"""The entries of a plan: frozen values, in the order they were written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.placement_types import Placement

from vescale.plans._errors import Source
from vescale.plans._path import Path
from vescale.plans._phase import ALL, Phase

__all__ = [
    "ATTENTION_METHODS",
    "AnnotateEntry",
    "AttentionEntry",
    "AttentionMethod",
    "AxisPlacements",
    "Entry",
    "FactoryEntry",
    "LocalEntry",
    "RedistributeEntry",
    "ShardEntry",
    "UnitEntry",
    "as_dict",
]

# (axis name, placement) pairs, in the order of the mesh's axes.
AxisPlacements = tuple[tuple[str, Placement], ...]


def as_dict(placements: AxisPlacements) -> dict[str, Placement]:
    return dict(placements)


@dataclass(frozen=True)
class ShardEntry:
    """A tensor lies as ``placements`` say, during ``phase``, on the axes they name.

    ``given`` (inputs of the model only): what a plain tensor passed by the caller is: ``global``, the same on every rank
    and cut by the hook; ``local``, this rank's own part.
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
    """A plain local tensor *is* already placed so: it is labelled, nothing moves."""

    path: Path
    placements: AxisPlacements
    source: Source | None = field(default=None, compare=False)


@dataclass(frozen=True)
class FactoryEntry:
    """Tensors that the matching modules make inside their forward (``arange``, ``zeros``, masks) are placed so."""

    path: Path
    placements: AxisPlacements
    source: Source | None = field(default=None, compare=False)


AttentionMethod = Literal["all_gather", "ring", "ulysses"]
ATTENTION_METHODS: tuple[AttentionMethod, ...] = get_args(AttentionMethod)


@dataclass(frozen=True)
class AttentionEntry:
    """How scaled dot product attention inside the matching modules works along axes over which the sequence is cut.

    ``all_gather``: keys and values are gathered, and each rank attends with its own queries; ``ring``: they come round in
    blocks, of which a rank has one at a time; ``ulysses``: heads are exchanged for the sequence, and back. ``methods`` are
    (axis name, method) pairs, in the order of the mesh's axes.
    """

    path: Path
    methods: tuple[tuple[str, AttentionMethod], ...]
    source: Source | None = field(default=None, compare=False)


@dataclass(frozen=True)
class LocalEntry:
    """The matching modules run on plain local tensors.

    ``kind`` names a known region (``experts``, with ``dispatch`` ``mask`` or ``all_to_all``); ``inputs`` and ``outputs``
    say how tensors that cross its border are placed.
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

    ``reshard_after_forward``: gathered parameters are freed after forward (True), kept for backward (False), or a piece is
    kept on each of so many ranks; None: freed, but kept for the model itself. ``reshard_after_backward``: freed after every
    backward (True or None), or kept while gradients accumulate, until one that reduces them has run (False).
    ``mp_policy``: dtypes that parameters are gathered in and gradients reduced in; None: their own. ``offload_pinned``:
    parameters rest in host memory, pinned or not; None: on the device.
    """

    path: Path
    reshard_after_forward: bool | int | None = None
    reshard_after_backward: bool | None = None
    mp_policy: MixedPrecisionPolicy | None = None
    offload_pinned: bool | None = None
    source: Source | None = field(default=None, compare=False)


Entry = ShardEntry | RedistributeEntry | AnnotateEntry | FactoryEntry | AttentionEntry | LocalEntry | UnitEntry

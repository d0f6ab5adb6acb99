"""``Header``: what a rank must know of a tensor before it can receive it. Headers travel through the store, once for each
signature of a batch."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import default_store, local_of, make_dtensor, make_spec
from vescale.errors import PipelineCallError

__all__ = ["Header", "HeaderExchange"]


@dataclass(frozen=True)
class Header:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    local_shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: DTensor) -> Header:
        local = local_of(tensor)
        return cls(
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tuple(local.shape),
            tuple(tensor.placements),
            tensor.dtype,
            tensor.requires_grad,
        )

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.local_shape).numel() * self.dtype.itemsize

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.local_shape, dtype=self.dtype, device=device)

    def dtensor(self, local: torch.Tensor, mesh: DeviceMesh, *, requires_grad: bool) -> DTensor:
        spec = make_spec(mesh, self.placements, self.shape, self.stride, self.dtype)
        return make_dtensor(local, spec, requires_grad=requires_grad)


class HeaderExchange:
    """Headers of what enters each stage, for one signature of a batch.

    ``place`` is a prefix of keys that only the ranks of one column of the pipeline use, for this signature.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self.known: dict[int, tuple[Header, ...]] = {}

    def tell(self, stage: int, headers: Sequence[Header]) -> None:
        """Raises RuntimeError if an earlier micro-batch of the same shapes had other headers."""
        told = self.known.get(stage)
        if told is None:
            self.known[stage] = tuple(headers)
            default_store().set(f"{self._place}/{stage}", pickle.dumps(tuple(headers)).hex())
        elif told != tuple(headers):
            raise PipelineCallError(
                f"pipeline: what enters stage {stage} is {headers} for this micro-batch, and was {told} for another one of "
                "the same shapes; between stages, shapes and placements must not depend on values"
            )

    def get(self, stage: int) -> tuple[Header, ...]:
        if stage not in self.known:
            self.known[stage] = pickle.loads(bytes.fromhex(default_store().get(f"{self._place}/{stage}").decode()))
        return self.known[stage]

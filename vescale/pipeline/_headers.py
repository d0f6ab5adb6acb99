"""``Header``: what a rank must know of a tensor before it can receive it. Headers travel through the store, once for each
signature of a batch."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from vescale.agreement import post, posted, read_post
from vescale.compat import local_of, make_dtensor, make_spec
from vescale.errors import PipelineCallError


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

    ``place`` is a prefix of keys that only the ranks of one column of the pipeline use, for this signature. From one step to
    the next, what requires gradients may change, when parameters are frozen or no longer are: the sender sets a new version
    before it sends the step's first message, and the receiver asks for it once that has arrived: on a device, which the host
    is ahead of, it waits for that message, once in a step and stage.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self.known: dict[int, tuple[Header, ...]] = {}
        self._told: set[int] = set()
        self._versions: dict[int, int] = {}
        self._current: set[int] = set()  # told or asked for in this step

    def begin_step(self) -> None:
        self._current.clear()

    def tell(self, stage: int, headers: Sequence[Header] | None) -> None:
        """None: nothing will come. Raises PipelineCallError if an earlier micro-batch of the same shapes had other
        headers."""
        if headers is None:
            post(self._key(stage, 0), "")
            return
        told, new = self.known.get(stage), tuple(headers)
        may_change = stage not in self._current
        self._current.add(stage)
        if told == new:
            return
        if told is not None and not (may_change and _without_gradients(told) == _without_gradients(new)):
            raise PipelineCallError(
                f"pipeline: the input of stage {stage} is {headers} for this micro-batch, but was {told} for another "
                "one with the same shapes; between stages, shapes and placements must not depend on values"
            )
        self.known[stage] = new
        self._told.add(stage)
        self._versions[stage] = self._versions.get(stage, -1) + 1
        post(self._key(stage, self._versions[stage]), pickle.dumps(new).hex())

    def get(self, stage: int) -> tuple[Header, ...] | None:
        """None: nothing comes."""
        if stage not in self.known:
            self._read(stage, 0)
        return self.known.get(stage)

    def of_arrived(self, stage: int, arrived: Sequence[torch.Tensor]) -> tuple[Header, ...]:
        """Of a message that has been waited for, into ``arrived``."""
        if stage not in self._current and stage not in self._told:
            self._current.add(stage)
            for device in {tensor.device for tensor in arrived if tensor.device.type != "cpu"}:
                torch.accelerator.current_stream(device).synchronize()
            later = self._versions.get(stage, 0) + 1
            if posted(self._key(stage, later)) is not None:
                self._read(stage, later)
        return self.get(stage) or ()

    def _key(self, stage: int, version: int) -> str:
        return f"{self._place}/{stage}/{version}"

    def _read(self, stage: int, version: int) -> None:
        text = read_post(self._key(stage, version))
        if not text:
            return
        self.known[stage] = pickle.loads(bytes.fromhex(text))
        self._versions[stage] = version


def _without_gradients(headers: Sequence[Header]) -> list[Header]:
    return [replace(header, requires_grad=False) for header in headers]

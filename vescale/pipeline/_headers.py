"""``Header``: what a rank must know of a tensor before it can receive it. Headers travel through the store, once for each
signature of a batch; what of them requires gradients, which may change, with the first message of each step."""

from __future__ import annotations

import pickle
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from vescale.agreement import post, read_post
from vescale.comm import HostCopy, to_device
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


class Needs:
    """What of the tensors that enter a stage needs gradients. The rank that sends them says so with the first message of a
    step; where the host is ahead of its device, it has that too late to build the stage's graph. While all tensors that can
    have gradients need them, the receiver takes that for granted, for as long as flags of two steps before, which are there,
    say so; what nobody needs is sent in between, and dropped. Else the host waits for the message, once in a step and stage.
    Both sides know all flags, and decide alike.

    Attributes:
        now: in this step.
    """

    def __init__(self) -> None:
        self.now: tuple[bool, ...] | None = None
        self._told: deque[HostCopy] = deque(maxlen=3)

    def follow(self, flags: torch.Tensor, headers: Sequence[Header], *, at_once: bool) -> None:
        self._told.append(HostCopy(flags))
        for told in self._told:
            told.is_there()  # asked in time, it is not waited for
        all_that_can = tuple(header.dtype.is_floating_point or header.dtype.is_complex for header in headers)
        old = self._told[0].read() if len(self._told) == 3 and self.now == all_that_can and not at_once else None
        if at_once or self.now != all_that_can or (old is not None and tuple(old.tolist()) != all_that_can):
            self.now = tuple(self._told[-1].read().tolist())


class HeaderExchange:
    """Headers of what enters each stage, for one signature of a batch.

    ``place`` is a prefix of keys that only the ranks of one column of the pipeline use, for this signature.
    """

    def __init__(self, place: str, device: torch.device | str = "cpu") -> None:
        self._place, self._device = place, torch.device(device)
        self.known: dict[int, tuple[Header, ...]] = {}
        self._needs: defaultdict[int, Needs] = defaultdict(Needs)
        self._told: set[int] = set()  # in this step
        self._moved: set[int] = set()  # stages whose first message of this step has been made

    def begin_step(self) -> None:
        self._told.clear()
        self._moved.clear()

    def forget_step(self) -> None:
        """It has failed, on all ranks; some may have come further in it than others."""
        self._needs.clear()

    def tell(self, stage: int, headers: Sequence[Header] | None, *, follows: bool) -> None:
        """None: nothing will come. ``follows``: a backward does. Raises PipelineCallError if an earlier micro-batch of the
        same shapes had other headers."""
        if headers is None:
            post(self._key(stage), "")
            return
        told, new = self.known.get(stage), tuple(headers)
        if told is None:
            post(self._key(stage), pickle.dumps(new).hex())
        elif told != new and (stage in self._told or _without_gradients(told) != _without_gradients(new)):
            raise PipelineCallError(
                f"pipeline: the input of stage {stage} is {headers} for this micro-batch, but was {told} for another "
                "one with the same shapes; between stages, shapes and placements must not depend on values"
            )
        self.known[stage] = new
        if follows and stage not in self._told:
            self._follow(stage, _flags(new))
        self._told.add(stage)

    def get(self, stage: int) -> tuple[Header, ...] | None:
        """None: nothing comes."""
        if stage not in self.known:
            text = read_post(self._key(stage))
            if text:
                self.known[stage] = pickle.loads(bytes.fromhex(text))
        return self.known.get(stage)

    def message(self, stage: int) -> list[torch.Tensor]:
        """What travels beside the first message of a step that a backward follows, on both sides: one flag for each tensor,
        whether it requires gradients."""
        if stage in self._moved:
            return []
        self._moved.add(stage)
        flags = _flags(self.known[stage])
        return [
            to_device(flags, self._device) if stage in self._told else flags.new_empty(len(flags), device=self._device)
        ]

    def of_arrived(self, stage: int, arrived: list[torch.Tensor]) -> tuple[Header, ...]:
        """Of a message that has been waited for, into ``arrived``, which is left with the tensors alone."""
        headers = self.get(stage) or ()
        if stage in self._told:  # by this rank
            return headers
        if len(arrived) > len(headers):
            self._follow(stage, arrived.pop())
        needs = self._needs[stage].now or [False] * len(headers)
        return tuple(replace(header, requires_grad=need) for header, need in zip(headers, needs))

    def returned(self, stage: int) -> Sequence[bool]:
        """For each tensor that this rank has sent to the stage, whether a gradient comes."""
        return self._needs[stage].now or ()

    def _follow(self, stage: int, flags: torch.Tensor) -> None:
        self._needs[stage].follow(flags, self.known[stage], at_once=self._device.type == "cpu")

    def _key(self, stage: int) -> str:
        return f"{self._place}/{stage}"


def _flags(headers: Sequence[Header]) -> torch.Tensor:
    return torch.tensor([header.requires_grad for header in headers], dtype=torch.bool, device="cpu")


def _without_gradients(headers: Sequence[Header]) -> list[Header]:
    return [replace(header, requires_grad=False) for header in headers]

"""``LocalPart``: the elements of a group's buffer that one rank holds, their memory, and the tensors over it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Self

import torch

from vescale.buffer._allocation import Allocation
from vescale.buffer._layout import ShardSlice
from vescale.buffer._tensor_group import TensorGroup
from vescale.errors import DBufferError
from vescale.placements import contiguous_stride

__all__ = ["LocalPart"]


class LocalPart:
    """The elements [begin, begin + numel) of a group's buffer in local memory, in an ``allocation``.

    ``is_sharded``: views are runs of the tensors, flat and maybe empty, instead of whole tensors.
    """

    def __init__(
        self,
        group: TensorGroup,
        begin: int,
        numel: int,
        dtype: torch.dtype,
        allocation: Allocation,
        *,
        is_sharded: bool,
    ) -> None:
        self.group, self.begin, self.numel, self.dtype, self.is_sharded = group, begin, numel, dtype, is_sharded
        self._allocation = allocation
        self._byte_offset = allocation.reserve(numel * dtype.itemsize)
        self._local: torch.Tensor | None = None
        self._views: list[torch.Tensor] | None = None

    # Memory -----------------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of the local part."""
        return self._allocation.device

    @property
    def is_pinned(self) -> bool:
        """Whether the memory of the local part is page-locked."""
        return self._allocation.pin_memory

    @property
    def num_bytes(self) -> int:
        """Bytes of the local part, padding included."""
        return self.numel * self.dtype.itemsize

    @property
    def is_allocated(self) -> bool:
        """Whether the local part has memory; :meth:`allocate` gets it."""
        return self._allocation.is_allocated

    def allocate(self) -> Self:
        """Get memory for this buffer and all that share its allocation; contents are undefined, padding is zero."""
        if not self._allocation.is_allocated:
            self._allocation.allocate()
        self.zero_padding()
        return self

    def free(self) -> None:
        """Free the memory of this buffer and of all that share its allocation; ``local`` and the views stay the same
        tensors and are usable again after :meth:`allocate`."""
        self._allocation.free()

    @property
    def local(self) -> torch.Tensor:
        """This rank's elements [begin, begin + numel) of the buffer, flat; RuntimeError before :meth:`allocate`."""
        if self._local is None:
            self._local = self.alias(0, (self.numel,))
        return self._local

    def alias(self, offset: int, shape: tuple[int, ...], *, own_storage: bool = False) -> torch.Tensor:
        """A contiguous tensor over the memory, ``offset`` elements in, with its own version counter: when a collective
        writes to the buffer, tensors that autograd has saved do not count as modified.

        With ``own_storage``, its storage begins and ends with it and keeps the memory alive; :meth:`free` does not affect
        it. ``torch.save`` and ``copy.deepcopy`` act on whole storages, and fail on DTensors whose local tensor is a part
        of one.

        Args:
            shape: of the result.
        """
        if self.device.type == "meta":
            return torch.empty(shape, dtype=self.dtype, device="meta")
        storage, itemsize = self._allocation.storage, self.dtype.itemsize
        first = self._byte_offset // itemsize + offset
        if own_storage:
            storage, first = storage[first * itemsize : (first + math.prod(shape)) * itemsize], 0
        with torch.inference_mode(False):  # tensors made in inference mode could not be saved for a backward later
            empty = torch.empty(0, dtype=self.dtype, device=self.device)
            return empty.set_(storage, first, shape, contiguous_stride(shape))

    def zero_padding(self) -> None:
        """Set the elements that belong to no tensor to zero."""
        for begin, end in self._gaps:
            self.local[begin:end].zero_()

    @cached_property
    def _gaps(self) -> list[tuple[int, int]]:
        return self.group.gaps(self.begin, self.begin + self.numel)

    @cached_property
    def slices(self) -> list[ShardSlice]:
        """The parts of tensors in the local part: (tensor, begin, end, local_offset), in buffer order."""
        return self.group.slices(self.begin, self.begin + self.numel)

    @property
    def views(self) -> list[torch.Tensor]:
        """One tensor over the local memory for each tensor of the group, in the group's order: the whole tensor in its
        shape if no axis is sharded, else this rank's run of it, flat and maybe empty. Made once; they keep their
        addresses while the buffer is allocated."""
        if self._views is None:
            if self.is_sharded:
                held = {part.tensor: part for part in self.slices}
                self._views = [
                    self.alias(part.local_offset, (part.end - part.begin,)) if part is not None else self.alias(0, (0,))
                    for part in (held.get(i) for i in range(len(self.group)))
                ]
            else:
                offsets = self.group.layout.offsets
                self._views = [self.alias(*at) for at in zip(offsets, self.group.shapes, strict=True)]
        return self._views

    def __len__(self) -> int:
        return len(self.group)

    def __getitem__(self, tensor: int | str) -> torch.Tensor:
        """The view of one tensor, by index or name."""
        return self.views[self.group.index(tensor) if isinstance(tensor, str) else tensor]

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names of the group's tensors, with the views of what this rank holds of each."""
        return zip(self.group.names, self.views, strict=True)

    def load(self, tensor: int | str, whole: torch.Tensor) -> None:
        """Copy this rank's part of a whole tensor, which it holds, into its place; casts.

        Args:
            tensor: its name, or its number in the group.
            whole: the global values.
        """
        index = self.group.index(tensor) if isinstance(tensor, str) else tensor
        if tuple(whole.shape) != self.group.shapes[index]:
            raise DBufferError(
                f"{self.group.names[index]}: a tensor of shape {tuple(whole.shape)} for a place of shape "
                f"{self.group.shapes[index]}; give the tensor that the group was planned for"
            )
        view = self.views[index]
        with torch.no_grad():
            if not self.is_sharded:
                view.copy_(whole)
            elif view.numel():
                begin = max(0, self.begin - self.group.layout.offsets[index])
                view.copy_(whole.reshape(-1)[begin : begin + view.numel()])

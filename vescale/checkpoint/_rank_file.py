"""The file that a rank writes in a save: where each of its blocks is, and how they get there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vescale.checkpoint import _disk
from vescale.checkpoint._data_file import align, write_data_file
from vescale.checkpoint._local_blocks import LocalBlocks
from vescale.checkpoint._writer import Writer
from vescale.compat import bytes_of
from vescale.placements import Box

__all__ = ["Piece", "RankFile", "fill_image", "layout_of"]

_ROWS_BYTES = 16 << 20


@dataclass(frozen=True)
class Piece:
    """A block of a tensor in this rank's file."""

    name: str
    box: Box
    start: int
    nbytes: int


@dataclass
class RankFile:
    """What a rank writes in one save.

    Attributes:
        part: what it tells the first rank of it.
        values: what it has beside tensors; see :class:`Snapshot`.
    """

    folder: str
    temporary: str
    file: str
    layout: list[Piece]
    part: dict[str, Any]
    values: Mapping[str, Any] = field(default_factory=lambda: {"model": None, "optimizers": {}, "beside": {}})

    @property
    def nbytes(self) -> int:
        return self.layout[-1].start + self.layout[-1].nbytes if self.layout else 0

    @property
    def path(self) -> str:
        return os.path.join(self.folder, self.temporary)

    def write(self, blocks: Mapping[str, LocalBlocks]) -> dict[str, Any]:
        """In this process, from the tensors."""
        _disk.make_folder(self.path)
        pieces = ((p.start, p.nbytes, _chunks(blocks[p.name].view(p.box))) for p in self.layout)
        found = write_data_file(os.path.join(self.path, self.file), pieces, self.nbytes)
        _disk.sync_folder(self.path)
        return found

    def hand_over(self, writer: Writer) -> dict[str, Any]:
        """In the writer process, from the shared memory."""
        boxes = [[piece.start, piece.nbytes] for piece in self.layout]
        job = {"do": "write", "folder": self.path, "name": self.file, "bytes": self.nbytes, "boxes": boxes}
        return writer.run(job)

    def put_checksums(self, written: dict[str, Any]) -> None:
        self.part["file"] = {key: written[key] for key in ("name", "bytes", "crc32")}
        checksums = iter(written["boxes"])
        for _, _, boxes in self.part["tensors"].values():
            for box in boxes:
                box.append(next(checksums))


def layout_of(blocks: Mapping[str, LocalBlocks]) -> Iterator[Piece]:
    position = 0
    for name, entry in blocks.items():
        for box in entry.boxes:
            start, nbytes = align(position), box.numel * entry.dtype.itemsize
            yield Piece(name, box, start, nbytes)
            position = start + nbytes


@torch.no_grad()
def fill_image(writer: Writer, layout: Sequence[Piece], blocks: Mapping[str, LocalBlocks]) -> None:
    """Copy what this rank writes to the shared memory, as it will be in the file."""
    image = writer.image(layout[-1].start + layout[-1].nbytes if layout else 0)
    devices = set()
    for piece in layout:
        source = blocks[piece.name].view(piece.box)
        place = image[piece.start : piece.start + piece.nbytes]
        if source.is_contiguous():  # as bytes: not every dtype has a kernel for copies
            place.copy_(bytes_of(source), non_blocking=source.is_cuda)
        else:
            place.view(source.dtype).view(source.shape).copy_(source, non_blocking=source.is_cuda)
        if source.is_cuda:
            devices.add(source.device)
    for device in devices:
        torch.cuda.synchronize(device)


@torch.no_grad()
def _chunks(view: torch.Tensor) -> Iterator[Any]:
    """The bytes of a block in row-major order; without a copy where they are so in memory."""
    if view.device.type == "cpu" and view.is_contiguous():
        yield bytes_of(view).numpy()
        return
    if view.ndim == 0:
        yield bytes_of(view.cpu()).numpy()
        return
    rows = max(1, _ROWS_BYTES // max(1, view[0].numel() * view.element_size()))
    for start in range(0, len(view), rows):
        yield bytes_of(view[start : start + rows].cpu()).numpy()

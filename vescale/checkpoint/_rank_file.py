"""The file that a rank writes in a save: where each of its blocks is, and how they get there."""

from __future__ import annotations

import json
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import weakref
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vescale.checkpoint import _disk, _writer_process
from vescale.checkpoint._data_file import align, write_data_file
from vescale.checkpoint._local_blocks import LocalBlocks
from vescale.compat import bytes_of
from vescale.compat.devices import pin, unpin
from vescale.errors import SaveFailedError
from vescale.placements import Box

# The other end of the writer process: starts it, shares memory with it, and sends it jobs.


_GRANULE = 2 << 20


class Writer:
    """A long-lived process that writes what is in a shared block of memory. One job at a time.

    The block is made once and grows; between saves it stays, so that the next one allocates nothing. It has no name, and is
    gone when both processes are.
    """

    def __init__(self) -> None:
        self._memory = _anonymous_file()
        self._size = 0
        self._image: torch.Tensor | None = None
        self._is_pinned = False
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._finalizer = weakref.finalize(self, os.close, self._memory)

    def image(self, nbytes: int) -> torch.Tensor:
        """The shared memory as bytes, at least so many; pinned where a device is used. What was in it may be lost."""
        if nbytes > self._size or self._image is None:
            self._unpin()
            self._size = -(-max(nbytes, 1) // _GRANULE) * _GRANULE
            os.ftruncate(self._memory, self._size)
            self._image = torch.frombuffer(mmap.mmap(self._memory, self._size), dtype=torch.uint8)
            # So that copies from a device need no buffer of the driver's; without it they are slower, and nothing else.
            self._is_pinned = pin(self._image)
        return self._image

    def run(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Do a job in the process, which is started if need be, and wait for it. Called by one thread at a time.

        Raises CheckpointError with the reason if it failed, or the process is gone.
        """
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._connection is not None and self._process is not None
        try:
            _writer_process.send(self._connection, dict(job))
            answer = _writer_process.receive(self._connection)
        except ConnectionError:
            answer = None
        if answer is None:
            code = self._process.wait()
            self._process = None
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            raise SaveFailedError(f"the writer process {how}; the next save starts a new one")
        if "error" in answer:
            raise SaveFailedError(answer["error"])
        return answer

    @property
    def pid(self) -> int | None:
        """The process that is there now, or None."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def close(self) -> None:
        """End the process, and wait until it is gone."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.wait()
        self._process = self._connection = None
        self._unpin()

    def _unpin(self) -> None:
        """The driver forgets the memory, before that goes."""
        is_pinned, self._is_pinned = self._is_pinned, False
        if is_pinned:
            assert self._image is not None
            unpin(self._image)
        self._image = None

    def _start(self) -> None:
        if self._connection is not None:
            self._connection.close()
        ours, theirs = socket.socketpair()
        root = str(Path(__file__).parents[2])
        script = str(Path(_writer_process.__file__))
        arguments = [str(theirs.fileno()), str(self._memory), str(os.getpid()), root]
        environment = {key: value for key, value in os.environ.items() if key != "VESCALE_TIMEOUT"}
        with theirs:
            self._process = subprocess.Popen(
                # Neither the user's site nor the environment may import anything; Ctrl-C is for the job, not for the writer.
                [sys.executable, "-I", "-S", script, *arguments],
                pass_fds=(theirs.fileno(), self._memory),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        self._connection = ours


def _anonymous_file() -> int:
    """Memory that is shared by its descriptor."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("vescale checkpoint", os.MFD_CLOEXEC)
    descriptor, path = tempfile.mkstemp(prefix="vescale-checkpoint-")
    os.unlink(path)
    return descriptor


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
            place.copy_(bytes_of(source), non_blocking=True)
        else:
            place.view(source.dtype).view(source.shape).copy_(source, non_blocking=True)
        if source.device.type != "cpu":
            devices.add(source.device)
    for device in devices:
        torch.get_device_module(device.type).synchronize(device)


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


# Values that are no tensors and differ between ranks, as positions of data loaders do: each rank gets its own back.

Values = Mapping[str, Any]
"""``values`` of a manifest: JSON with ``model``, ``optimizers`` and ``beside``."""

_BESIDE, _EXTRA, _OPTIMIZER = "beside", "extra", "optimizer"


def digests_of(values: Values, *, optimizers: bool) -> str:
    """``{kind: {key: checksum of the value}}`` as text that is equal on ranks whose values are equal.

    ``optimizers``: whether all ranks hold the same parameters, so that the options of their optimizers may be compared.
    """
    found: dict[str, dict[str, str]] = {
        _BESIDE: {key: _digest(value) for key, value in values["beside"].items()},
        _EXTRA: {key: _digest(value) for key, value in ((values["model"] or {}).get("extra") or {}).items()},
    }
    if optimizers:
        found[_OPTIMIZER] = {key: _digest(value) for key, value in values["optimizers"].items()}
    return json.dumps(found, separators=(",", ":"), sort_keys=True)


def _digest(value: Any) -> str:
    return f"{zlib.crc32(json.dumps(value, separators=(',', ':'), sort_keys=True).encode()):08x}"


def differing(texts: Sequence[str]) -> dict[str, list[str]]:
    """By kind, the keys whose values are not the same on all ranks, from what :func:`digests_of` gave on each. A module that
    only some ranks have, as in a pipeline, is compared among these."""
    if len(set(texts)) == 1:
        return {}
    ranks = [json.loads(text) for text in texts]
    found = {}
    for kind in (_BESIDE, _EXTRA, _OPTIMIZER):
        keys = sorted({key for rank in ranks for key in rank.get(kind, ())})
        digests = {key: {rank.get(kind, {}).get(key) for rank in ranks} for key in keys}
        if kind != _BESIDE:
            digests = {key: those - {None} for key, those in digests.items()}
        different = [key for key, those in digests.items() if len(those) > 1]
        if different:
            found[kind] = different
    return found


def pick(values: Values, wanted: Mapping[str, Collection[str]]) -> dict[str, dict[str, Any]]:
    """What this rank has of the keys that :func:`differing` found, without optimizers."""
    there = {_BESIDE: values["beside"], _EXTRA: (values["model"] or {}).get("extra") or {}}
    return {
        kind: {key: there[kind][key] for key in keys if key in there[kind]}
        for kind, keys in wanted.items()
        if kind in there
    }


def add_values_of_ranks(values: dict[str, Any], picked: Sequence[Mapping[str, Mapping[str, Any]]]) -> None:
    """Put what the ranks have picked, in rank order, into the first rank's values as ``ranks``: ``{kind: {key: {rank:
    value}}}``. The values themselves stay those of the first rank that has them."""
    ranks: dict[str, dict[str, dict[str, Any]]] = {}
    for rank, kinds in enumerate(picked):
        for kind, held in kinds.items():
            for key, value in held.items():
                ranks.setdefault(kind, {}).setdefault(key, {})[str(rank)] = value
    values["ranks"] = ranks
    for key, held in ranks.get(_BESIDE, {}).items():
        values["beside"].setdefault(key, next(iter(held.values())))


def values_of_rank(values: Values, rank: int, *, same_world: bool) -> tuple[dict[str, Any], list[str]]:
    """(values with those of this rank in place of the first rank's, names of those that differed and now are the first's).

    ``same_world``: there are as many ranks as in the save; otherwise all of them get the first rank's.
    """
    ranks = values.get("ranks") or {}
    if not same_world:
        return dict(values), sorted(key for held in ranks.values() for key in held)
    found = dict(values)
    if _BESIDE in ranks:
        found["beside"] = _own(values["beside"], ranks[_BESIDE], rank)
    if _EXTRA in ranks and values["model"] is not None:
        found["model"] = {**values["model"], "extra": _own(values["model"]["extra"], ranks[_EXTRA], rank, keep=True)}
    return found, []


def _own(common: Values, held: Values, rank: int, *, keep: bool = False) -> dict[str, Any]:
    """``keep``: a value that this rank did not have stays that of another one."""
    found = dict(common)
    for key, values in held.items():
        if str(rank) in values:
            found[key] = values[str(rank)]
        elif not keep:
            found.pop(key, None)
    return found

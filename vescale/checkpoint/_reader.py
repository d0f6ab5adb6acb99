"""Fill local tensors from a checkpoint of any format: only the bytes that a rank needs, read once per replica group."""

from __future__ import annotations

import bisect
import contextlib
import math
import os
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vescale.checkpoint._local_blocks import LocalBlocks, Regions, local_blocks, scratch
from vescale.checkpoint._replicas import Shares, broadcast_shares, plan_shares
from vescale.checkpoint._step_folder import open_regular
from vescale.checkpoint._stored import Stored, StoredBox, StoredTensor, compare
from vescale.compat import bytes_of, note_writes
from vescale.errors import CheckpointError, DamagedFileError, UnsavableError
from vescale.placements import Box, contiguous_stride

# Which bytes of which files a block of a tensor is made of: few, large, sorted reads.

MAX_READ_BYTES = 8 << 20
"""One read is at most this long, unless it goes straight into the tensor's own memory."""

# Elements that are not wanted are read over, rather than skipped, where they are fewer bytes than this: the device and the
# page cache read whole pages anyway.
_PAGE = 4096


@dataclass(frozen=True, slots=True)
class ByteRead:
    """A range of bytes of a file, and where its elements belong.

    Attributes:
        file, start, nbytes: the range.
        target: view of the tensor that the elements are for.
        sizes, strides: the elements within the range, in elements of ``dtype``, as ``as_strided`` takes them.
        dtype: of the file.
    """

    file: str
    start: int
    nbytes: int
    target: torch.Tensor
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_direct(self) -> bool:
        """Whether the bytes can be read into the target's memory as they are."""
        return (
            self.target.is_contiguous()
            and not (self.target.is_conj() or self.target.is_neg())
            and self.target.is_cpu
            and self.target.dtype == self.dtype
            and self.nbytes == self.target.numel() * self.dtype.itemsize
            and _is_row_major(self.sizes, self.strides)
        )


class BoxIndex:
    """Finds the stored boxes of a tensor that overlap a block, without looking at all of them."""

    def __init__(self, name: str, stored: StoredTensor) -> None:
        self.name, self.stored = name, stored
        self._boxes: Sequence[StoredBox] = stored.boxes
        self._firsts: Sequence[tuple[int, ...]] = ()
        self._longest = 0
        if len(self._boxes) > 1:
            self._boxes = sorted(stored.boxes, key=lambda box: box.offset)
            self._firsts = [box.offset[:1] for box in self._boxes]
            self._longest = max((box.sizes[0] for box in self._boxes if box.sizes), default=0)

    def overlapping(self, block: Box) -> Iterator[tuple[StoredBox, Box]]:
        """(stored box, part of ``block`` that it holds). Raises CheckpointError if boxes leave elements out."""
        low, high = 0, len(self._boxes)
        if block.offset and high > 1:
            low = bisect.bisect_right(self._firsts, (block.offset[0] - self._longest,))
            high = bisect.bisect_left(self._firsts, (block.offset[0] + block.sizes[0],))
        found = 0
        for box in self._boxes[low:high]:
            common = block.part_in(box.offset, box.sizes)
            if common is not None:
                found += common.numel
                yield box, common
        if found != block.numel:
            raise DamagedFileError(
                f"{self.name}: the checkpoint's boxes hold {found} of the {block.numel} elements of the block at "
                f"{block.offset} of sizes {block.sizes}; its index is damaged"
            )


def plan_reads(index: BoxIndex, blocks: LocalBlocks) -> Iterator[ByteRead]:
    """The reads that fill the blocks which this rank holds of one tensor."""
    for block in blocks.boxes:
        for box, part in index.overlapping(block):
            yield from _reads(box, part, blocks.view(part), index.stored.dtype)


def _reads(box: StoredBox, part: Box, target: torch.Tensor, dtype: torch.dtype) -> Iterator[ByteRead]:
    strides = box.strides if box.strides is not None else contiguous_stride(box.sizes)
    shift = sum((a - b) * s for a, b, s in zip(part.offset, box.offset, strides))
    yield from _split(box.file, box.start, shift, target, part.sizes, tuple(strides), dtype)


def _split(
    file: str,
    start: int,
    first: int,
    target: torch.Tensor,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
) -> Iterator[ByteRead]:
    """Cut until a read skips no page and is short enough; the dim with the largest stride is cut first."""
    size = dtype.itemsize
    span = sum((n - 1) * s for n, s in zip(sizes, strides)) + 1
    read = ByteRead(file, start + first * size, span * size, target, sizes, strides, dtype)
    if read.is_direct:
        yield read
        return
    outer = max((dim for dim, n in enumerate(sizes) if n > 1), key=lambda dim: strides[dim], default=None)
    if outer is None:
        yield read
        return
    inner = span - (sizes[outer] - 1) * strides[outer]
    if (strides[outer] - inner) * size >= _PAGE:
        rows = 1
    elif span * size > MAX_READ_BYTES:
        rows = max(1, (MAX_READ_BYTES // size - inner) // strides[outer] + 1)
    elif _skips_pages(sizes, strides, size):
        rows = 1
    else:
        yield read
        return
    for at in range(0, sizes[outer], rows):
        length = min(rows, sizes[outer] - at)
        cut = (*sizes[:outer], length, *sizes[outer + 1 :])
        yield from _split(
            file, start, first + at * strides[outer], target.narrow(outer, at, length), cut, strides, dtype
        )


def _skips_pages(sizes: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether somewhere between the elements are pages that nobody wants."""
    span = 1
    for stride, size in sorted((s, n) for s, n in zip(strides, sizes) if n > 1):
        if (stride - span) * itemsize >= _PAGE:
            return True
        span += (size - 1) * stride
    return False


def _is_row_major(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return math.prod(sizes) > 0


# Each thread holds at most one batch of reads, which is at most MAX_READ_BYTES.
_FEWEST_THREADS, _MOST_THREADS = 2, 4  # fewest: of a host
# Short reads that are less than a page apart are fetched together.
_GAP = 4096
_MAX_PIECES = 512
_ALIGNMENT = 64
_STAGE_BYTES = MAX_READ_BYTES + _MAX_PIECES * _ALIGNMENT


def read_tensors(
    stored: Stored, targets: Mapping[str, torch.Tensor], *, cast: bool = False, share: bool = True
) -> None:
    """Fill tensors in place with the values that ``stored`` has under their names.

    A target is a plain tensor, which gets the whole value, or a DTensor in any placement, of which each rank reads the
    blocks that it holds, on any device. Local tensors may be views of larger buffers; nothing outside of them is
    written.

    Every rank of a DTensor's mesh calls this with the same names. Ranks that hold equal parts (replicated axes, and
    plain tensors where all ranks of the job have the same ones) share the reading: one reads, and broadcasts along these
    axes. Extra memory is at most 64 MiB.

    Args:
        stored: the index of the checkpoint.
        targets: by name, each a name of ``stored.tensors`` with an equal global shape.
        cast: convert where dtypes differ; otherwise that is an error.
        share: False: no communication, each rank reads all that it holds.

    Raises:
        CheckpointError: names that are not there (with the nearest ones), other shapes or dtypes, pending reductions,
            tensors without memory; before anything is read. Files that are shorter than the index says.
    """
    compare(stored.tensors, targets, cast=cast).refuse(str(stored.folder))
    regions: Regions = {}
    blocks = {name: local_blocks(name, targets[name], regions) for name in sorted(targets)}
    _refuse_expanded(blocks)
    shares = plan_shares(blocks) if share else Shares(set(blocks))
    shares.agree(
        lambda: _fill_or_failure(stored, blocks, shares.own)
    )  # nobody waits for a broadcast that does not come
    if shares.is_uneven:
        shares.agree(lambda: _fill_or_failure(stored, blocks, shares.plain - shares.own))
    broadcast_shares(shares, blocks)
    note_writes([entry.tensor for entry in blocks.values()])
    written = [entry.local for entry in blocks.values() if entry.local is not None]
    torch.autograd.graph.increment_version([tensor for tensor in written if not tensor.is_inference()])


def _refuse_expanded(blocks: Mapping[str, LocalBlocks]) -> None:
    for name, entry in blocks.items():
        local = entry.local
        if (
            local is not None
            and 0 in local.stride()
            and any(n > 1 and not step for n, step in zip(local.shape, local.stride()))
        ):
            raise UnsavableError(
                f"{name}: several elements of the destination tensor share memory (strides {local.stride()}), as "
                "after expand(); clone() it first"
            )


def read_whole(stored: Stored, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Whole tensors on the CPU, read by each caller; no communication."""
    entries = {name: stored.tensors[name] for name in names}
    found = {name: torch.empty(entry.shape, dtype=entry.dtype, device="cpu") for name, entry in entries.items()}
    read_tensors(stored, found, share=False)
    return found


def _fill_or_failure(
    stored: Stored, blocks: Mapping[str, LocalBlocks], names: Collection[str]
) -> CheckpointError | None:
    try:
        _fill(stored, {name: blocks[name] for name in blocks if name in names})
    except (OSError, CheckpointError) as error:
        return error if isinstance(error, CheckpointError) else DamagedFileError(f"{stored.folder}: {error}")
    return None


@torch.no_grad()
def _fill(stored: Stored, blocks: Mapping[str, LocalBlocks]) -> None:
    reads: list[ByteRead] = []
    for name, entry in blocks.items():
        reads += plan_reads(BoxIndex(name, stored.tensors[name]), entry)
    reads.sort(key=lambda read: (read.file, read.start))
    batches = list(_batches(reads))
    helpers = min(_num_threads(), len(batches)) - 1
    if helpers < 1:
        with _Files(stored.folder) as files:
            _fetch_all(files, batches)
        return
    with _Files(stored.folder) as files, ThreadPoolExecutor(helpers) as threads:
        pending = _Pending(batches)
        others = [threads.submit(_fetch_all, files, pending) for _ in range(helpers)]
        try:
            _fetch_all(files, pending)  # the calling thread is one of them: fewer switches than waiting for all of them
        finally:
            pending.stop()
        for other in others:
            other.result()


def _num_threads() -> int:
    """This rank's share of the processors: with more threads than that, ranks that begin later would wait for the others.
    At least two threads read on a host, so that a storage device that answers late has something to do."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = int(text) if text.isdecimal() else 1
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1 if ranks > 1 else _FEWEST_THREADS, min(_MOST_THREADS, processors // max(1, ranks)))


def _batches(reads: Iterable[ByteRead]) -> Iterator[list[ByteRead]]:
    """Neighbours in a file together, up to the length of one read; long ones alone."""
    batch: list[ByteRead] = []
    stop = 0
    for read in reads:
        first = batch[0] if batch else None
        if first is not None and (
            read.file != first.file
            or not 0 <= read.start - stop < _GAP
            or read.start + read.nbytes - first.start > MAX_READ_BYTES
            or len(batch) == _MAX_PIECES
        ):
            yield batch
            batch = []
        batch.append(read)
        stop = read.start + read.nbytes
    if batch:
        yield batch


class _Pending:
    """Batches that several threads take, each one once, until one of them fails."""

    def __init__(self, batches: Iterable[list[ByteRead]]) -> None:
        self._batches: Iterator[list[ByteRead]] = iter(batches)
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[list[ByteRead]]:
        while True:
            with self._lock:
                batch = next(self._batches, None)
            if batch is None:
                return
            yield batch

    def stop(self) -> None:
        with self._lock:
            self._batches = iter(())


class _Stages:
    """Memory of one thread for bytes on their way, used again for each batch."""

    def __init__(self) -> None:
        self.used = 0
        self._memory: torch.Tensor | None = None

    def next(self, nbytes: int) -> torch.Tensor:
        start = -(-self.used // _ALIGNMENT) * _ALIGNMENT
        if start + nbytes > _STAGE_BYTES:
            return scratch(nbytes)
        if self._memory is None:
            self._memory = scratch(_STAGE_BYTES)
        self.used = start + nbytes
        return self._memory[start : start + nbytes]


class _Files:
    """Files of a checkpoint, each opened once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, int] = {}
        self._of_thread = threading.local()

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def stages(self) -> _Stages:
        """Of the thread that calls this, for its next batch."""
        found: _Stages | None = getattr(self._of_thread, "stages", None)
        if found is None:
            found = self._of_thread.stages = _Stages()
        found.used = 0
        return found

    def descriptor(self, name: str) -> int:
        found = self._open.get(name)
        if found is None:
            opened = open_regular(self._folder / name)
            found = self._open.setdefault(name, opened)
            if found != opened:  # another thread was first
                os.close(opened)
        return found

    def read(self, name: str, start: int, buffers: list[Any]) -> None:
        """Fill the buffers one behind the other. Raises CheckpointError at the end of the file."""
        descriptor = self.descriptor(name)
        waiting = [view for view in (memoryview(buffer).cast("B") for buffer in buffers) if len(view)]
        while waiting:
            count = os.preadv(descriptor, waiting, start)
            if count == 0:
                raise DamagedFileError(
                    f"{self._folder / name} ends at byte {start}, but {sum(map(len, waiting))} more bytes belong to "
                    "the checkpoint; it is truncated: use another step, or another copy of the file"
                )
            start += count
            while waiting and count >= len(waiting[0]):
                count -= len(waiting.pop(0))
            if waiting:
                waiting[0] = waiting[0][count:]


@torch.no_grad()
def _fetch_all(files: _Files, batches: Iterable[list[ByteRead]]) -> None:
    for batch in batches:
        _fetch(files, batch)


def _fetch(files: _Files, batch: list[ByteRead]) -> None:
    """One read system call for all of a batch, unless the system returns less."""
    buffers: list[Any] = []
    staged: list[tuple[ByteRead, torch.Tensor]] = []
    stages = files.stages()
    position = batch[0].start
    for read in batch:
        if read.start > position:
            buffers.append(bytearray(read.start - position))
        if read.is_direct:
            buffers.append(_bytes_of(read.target))
        else:
            stage = stages.next(read.nbytes).view(read.dtype)
            staged.append((read, stage))
            buffers.append(_bytes_of(stage))
        position = read.start + read.nbytes
    files.read(batch[0].file, batch[0].start, buffers)
    for read, stage in staged:
        read.target.copy_(stage.as_strided(read.sizes, read.strides))


def _bytes_of(tensor: torch.Tensor) -> Any:
    """The memory of a contiguous CPU tensor, writable."""
    memory: Any = bytes_of(tensor).numpy()
    return memoryview(memory)

"""Which of the ranks that hold equal parts of a tensor reads or writes it, how the others get it; what ranks agree on."""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import itertools
import json
import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vescale.agreement import Round
from vescale.checkpoint._local_blocks import LocalBlocks, scratch
from vescale.comm import requested_by
from vescale.compat import bytes_of, is_alone
from vescale.errors import CheckpointError, ConsensusError, SaveFailedError

_BUCKET_BYTES = 16 << 20


def has_other_ranks() -> bool:
    """Whether this job has other ranks that really run."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 and not is_alone()


def assign(sizes: Iterable[tuple[str, int]], num_owners: int) -> dict[str, int]:
    """An owner for each name, so that all own about as many bytes. A pure function: equal on ranks that hold equal parts."""
    ordered = sorted(((size, name) for name, size in sizes), key=lambda pair: (-pair[0], pair[1]))
    # Which owner comes first depends on the names, or the first rank would have the largest of every mesh.
    first = zlib.crc32(ordered[0][1].encode()) if ordered else 0
    loads = [(0, order, (first + order) % num_owners) for order in range(num_owners)]
    found = {}
    for size, name in ordered:
        load, order, owner = heapq.heappop(loads)
        found[name] = owner
        heapq.heappush(loads, (load + size, order, owner))
    return found


def repeated_position(mesh: DeviceMesh, repeated: Sequence[int]) -> tuple[int, int]:
    """(this rank's number among the ranks that hold the same, how many they are)."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    number = 0
    for axis in repeated:
        number = number * mesh.size(axis) + coordinate[axis]
    return number, math.prod(mesh.size(axis) for axis in repeated)


@dataclass
class Shares:
    """How the ranks of a job divide reading, as long as all of them have plain tensors of the same names and forms.

    Attributes:
        own: names of the tensors that this rank reads itself.
        received: (name, number of the owner among the ranks that hold the same), in the order of broadcasts.
        plain: names of plain tensors.
        digest: of the names and forms of plain tensors.
        consensus: all ranks of the job; None where ranks do not share.
        is_uneven: ranks turned out to have other plain tensors than each other; each one reads its own, nobody sends them.
    """

    own: set[str]
    received: list[tuple[str, int]] = field(default_factory=list)
    plain: set[str] = field(default_factory=set)
    digest: bytes = b""
    consensus: Round | None = None
    is_uneven: bool = False

    def agree(self, read: Callable[[], CheckpointError | None]) -> None:
        """Read: raises the error that ``read`` returns on some rank, on every rank, and finds out whether ranks are uneven.
        One round through the store; called by all ranks of the job."""
        failure = None

        def message() -> bytes:
            nonlocal failure
            failure = read()
            return self.digest + (as_text(failure).encode() if failure is not None else b"")

        if self.consensus is None:
            failure = read()
        else:
            about = "ranks load a checkpoint; all of them must call this"
            messages = self.consensus.exchange(message, lambda: about)
            size = len(self.digest)
            failed = [(rank, each[size:].decode()) for rank, each in enumerate(messages) if len(each) > size]
            if failure is None and failed:
                failure = from_text(failed[0][1], f"rank {failed[0][0]}: ")
            if len({each[:size] for each in messages}) > 1:
                self.is_uneven = True
                self.received = [(name, owner) for name, owner in self.received if name not in self.plain]
        if failure is not None:
            raise failure


def plan_shares(blocks: Mapping[str, LocalBlocks]) -> Shares:
    """Divide reading among ranks that hold the same. No communication; called by all ranks of the job."""
    if not has_other_ranks():
        return Shares(set(blocks))
    plain = {name: entry for name, entry in blocks.items() if entry.mesh is None}
    text = repr([(name, entry.shape, entry.dtype) for name, entry in sorted(plain.items())])
    own, received = set(), []
    together: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[str]] = defaultdict(list)
    for name, entry in blocks.items():
        if entry.local is not None:
            together[entry.mesh, entry.repeated].append(name)
    for (mesh, repeated), names in together.items():
        number, count = (
            repeated_position(mesh, repeated) if mesh is not None else (dist.get_rank(), dist.get_world_size())
        )
        if count == 1:
            own.update(names)
            continue
        owners = assign(((name, blocks[name].nbytes) for name in names), count)
        own |= {name for name in names if owners[name] == number}
        received += [(name, owners[name]) for name in sorted(names, key=lambda name: (owners[name], name))]
    consensus = Round(range(dist.get_world_size()), "checkpoint read")
    return Shares(own, received, set(plain), hashlib.sha256(text.encode()).digest(), consensus)


@torch.no_grad()
def broadcast_shares(shares: Shares, blocks: Mapping[str, LocalBlocks]) -> None:
    """Each tensor from the rank that has read it to those that hold the same. Broadcasts of at most 16 MiB along axes of
    its mesh, or over the job for plain tensors."""

    def kind(item: tuple[str, int]) -> tuple[DeviceMesh | None, tuple[int, ...], int]:
        entry = blocks[item[0]]
        return entry.mesh, entry.repeated, item[1]

    with requested_by("checkpoint"):
        for (_, _, owner), items in itertools.groupby(shares.received, kind):
            names = [name for name, _ in items]
            hops = _hops(blocks[names[0]], owner)
            for bucket in _buckets([blocks[name] for name in names]):
                _broadcast(bucket, hops)


Hop = tuple[int, dist.ProcessGroup]
"""(global rank that sends, group)"""


def _hops(entry: LocalBlocks, owner: int) -> list[Hop]:
    """The broadcasts along one axis each in which this rank takes part."""
    if entry.mesh is None:
        assert dist.group.WORLD is not None
        return [(owner, dist.group.WORLD)]
    mesh, coordinate = entry.mesh, entry.mesh.get_coordinate()
    assert coordinate is not None
    place = {}
    for axis in reversed(entry.repeated):
        owner, place[axis] = divmod(owner, mesh.size(axis))
    hops = []
    for position, axis in enumerate(entry.repeated):
        if mesh.size(axis) == 1 or any(coordinate[later] != place[later] for later in entry.repeated[position + 1 :]):
            continue
        group = mesh.get_group(axis)
        hops.append((dist.get_global_rank(group, place[axis]), group))
    return hops


def _buckets(entries: Sequence[LocalBlocks]) -> Iterable[list[torch.Tensor]]:
    """Flat pieces of local tensors: small ones together, large ones cut."""
    bucket: list[torch.Tensor] = []
    room = _BUCKET_BYTES
    for entry in entries:
        assert entry.local is not None
        local = entry.local
        if not local.numel():
            continue
        step = max(1, _BUCKET_BYTES // local.dtype.itemsize)
        if not local.is_contiguous() or local.nbytes < _BUCKET_BYTES:
            if bucket and local.nbytes > room:
                yield bucket
                bucket, room = [], _BUCKET_BYTES
            bucket.append(local)
            room -= local.nbytes
            continue
        flat = local.view(-1)
        for start in range(0, flat.numel(), step):
            yield [flat[start : start + step]]
    if bucket:
        yield bucket


def _broadcast(pieces: Sequence[torch.Tensor], hops: Sequence[Hop]) -> None:
    if not hops:
        return
    device = torch.device("cpu")
    if "cpu:" not in dist.get_backend_config(hops[0][1]):
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        device = torch.device(accelerator.type, torch.accelerator.current_device_index())
    one = pieces[0]
    has_own_bits = one.is_contiguous() and not one.is_conj() and not one.is_neg()
    in_place = len(pieces) == 1 and has_own_bits and one.device == device
    if in_place:
        buffer = bytes_of(one)
    else:
        total = sum(piece.nbytes for piece in pieces)
        buffer = scratch(total) if device.type == "cpu" else torch.empty(total, dtype=torch.uint8, device=device)
        if hops[0][0] == dist.get_rank():  # others receive before they send
            _pack(pieces, buffer)
    for source, group in hops:
        dist.broadcast(buffer, source, group=group)
    if in_place:
        return
    start = 0
    for piece in pieces:
        values = buffer[start : start + piece.nbytes]
        if values.storage_offset() % piece.dtype.itemsize:
            values = values.clone()
        piece.copy_(values.view(piece.dtype).view(piece.shape))
        start += piece.nbytes


def _pack(pieces: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
    start = 0
    for piece in pieces:
        values = buffer[start : start + piece.nbytes]
        if values.storage_offset() % piece.dtype.itemsize:
            values.copy_(bytes_of(piece.resolve_conj().resolve_neg()))
        else:
            values.view(piece.dtype).view(piece.shape).copy_(piece)
        start += piece.nbytes


# Errors of checkpoints as text and back, for other ranks: their class is kept.


def as_text(error: BaseException) -> str:
    """Errors of other kinds get the name of their class."""
    if isinstance(error, CheckpointError):
        return f"{type(error).__name__}:{error}"
    return f"{SaveFailedError.__name__}:{type(error).__name__}: {error}"


def from_text(text: str, before: str = "") -> CheckpointError:
    """The inverse of :func:`as_text`; ``before`` is put in front of the message."""
    name, _, message = text.partition(":")
    kind = _classes().get(name, CheckpointError)
    return kind(before + message.removesuffix(f" [{kind.code}]"))


def _classes() -> dict[str, type[CheckpointError]]:
    found = [CheckpointError]
    for kind in found:
        found += kind.__subclasses__()
    return {kind.__name__: kind for kind in found}


# One exchange between the ranks of a job that does not keep their training back: rounds that may run on a thread.


# What a message begins with: of a rank that has something to say, and of one that has failed.
_HAS_COME, _FAILED = "+", "-"

_EVERY_RANK = "every rank must call it, not only some (as in `if rank == 0:`), unless a rank has ended or hangs"


class _Calls(Round):
    """Rounds of all ranks, in calls of the user that need every rank."""

    def late_text(self, about: str, late: Sequence[int], seconds: int) -> str:
        return (
            f"{_late(late, about)} for {seconds} s, and the others wait until {self.timeout} have passed; {_EVERY_RANK}"
        )


class Gathering:
    """Rounds in which the first rank gets a message of each, does something, and tells all how it went.

    Made by all ranks in the same order, on the thread that has their process group; rounds may run on another thread.

    Args:
        call: what the user has called, the same on all ranks: ranks that come by different calls get an error.

    Attributes:
        has_failed: a round has ended with an error, on all ranks that have come to it.
        rounds: of all ranks; None where there is one rank.
    """

    def __init__(self, call: str) -> None:
        self._call = call
        self.has_failed = False
        self.rounds = _Calls(range(dist.get_world_size()), "checkpoint") if has_other_ranks() else None
        self.rank, self.world = (0, 1) if self.rounds is None else (self.rounds.index, len(self.rounds.ranks))

    def round(
        self, message: str | Callable[[], str], first: Callable[[Sequence[str]], dict[str, Any]]
    ) -> dict[str, Any]:
        """``first`` runs on the first rank with all messages, in rank order; every rank gets what it returns.

        ``message``: a function is called once the others can see that this rank has come. Ranks that have not come
        for 3 seconds are named in a warning.

        Raises CheckpointError where ``message`` or ``first`` raised anything, or ranks do not come; on every rank that
        does. What is no Exception (Ctrl-C) is raised at once where it is, and the others hear of it.
        """
        rounds, failure = self.rounds, None
        if rounds is None:
            return self._answer_alone(message, first)

        def own() -> str:
            nonlocal failure
            try:
                found = _HAS_COME + (message if isinstance(message, str) else message())
            except Exception as error:
                failure, found = error, _FAILED + as_text(error)
            return json.dumps([self._call, found])

        try:
            answer = dict(
                json.loads(rounds.lead(own, lambda found: json.dumps(_answered(found, first)), lambda: self._call))
            )
        except ConsensusError as error:
            answer = {"error": as_text(SaveFailedError(self._absence(error, rounds)))}
        except BaseException:
            self.has_failed = True
            raise
        if "error" in answer:
            self.has_failed = True
            raise from_text(answer["error"]) from failure
        return answer

    def _answer_alone(
        self, message: str | Callable[[], str], first: Callable[[Sequence[str]], dict[str, Any]]
    ) -> dict[str, Any]:
        try:
            return first([message if isinstance(message, str) else message()])
        except BaseException as error:
            self.has_failed = True
            if (error is not None and not isinstance(error, Exception)) or isinstance(error, CheckpointError):
                raise
            raise from_text(as_text(error)) from error

    def _absence(self, error: ConsensusError, rounds: Round) -> str:
        if error.failure:
            return f"rank {error.ranks[0]}: {error.failure}"
        if error.elsewhere:
            return (
                f"{_late(error.ranks, self._call)}, because ranks wait for each other: {error.elsewhere}; {_EVERY_RANK}"
            )
        return f"{_late(error.ranks, self._call)} within {rounds.timeout}; {_EVERY_RANK}"


def _late(ranks: Sequence[int], call: str) -> str:
    return f"ranks {sorted(ranks)} did not reach {call}"


def _answered(given: Sequence[str], first: Callable[[Sequence[str]], dict[str, Any]]) -> dict[str, Any]:
    """What ``first`` returns for the messages of all ranks, or ``{"error": ...}``; as JSON has it."""
    calls, messages = zip(*map(json.loads, given))
    if len(set(calls)) > 1:
        places = ", ".join(f"rank {rank} in {call}" for rank, call in enumerate(calls))
        return {"error": as_text(SaveFailedError(f"ranks are in different calls: {places}; {_EVERY_RANK}"))}
    failed = [rank for rank, message in enumerate(messages) if message.startswith(_FAILED)]
    if failed:
        return {"error": as_text(from_text(messages[failed[0]][1:], f"rank {failed[0]}: "))}
    try:
        return dict(json.loads(json.dumps(first([message[1:] for message in messages]))))
    except Exception as error:
        return {"error": as_text(error)}


def first_rank_decides(call: str, decide: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What the first rank's ``decide()`` returns, on every rank; called by all of them, in ``call`` of the user."""
    return Gathering(call).round("", lambda _: decide())


@contextlib.contextmanager
def together(call: str) -> Iterator[None]:
    """What the block raises on one rank, all ranks raise behind it; entered by all of them, in ``call`` of the user."""
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error

    def message() -> str:
        if failure is not None:
            raise failure
        return ""

    try:
        Gathering(call).round(message, lambda _: {})
    except CheckpointError as told:
        if failure is not None and (not isinstance(failure, CheckpointError) or not has_other_ranks()):
            raise failure from None
        raise told from failure

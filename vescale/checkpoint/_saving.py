"""One save after the other: copy, write, agree, commit; in the step or behind it."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import platform
import shutil
import socket
import threading
import time
import uuid
import warnings
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vescale._version import __version__
from vescale.agreement import Round, settle_heartbeats
from vescale.checkpoint import _disk
from vescale.checkpoint._local_blocks import LocalBlocks
from vescale.checkpoint._rank_file import (
    Piece,
    RankFile,
    Writer,
    add_values_of_ranks,
    differing,
    digests_of,
    fill_image,
    layout_of,
    pick,
)
from vescale.checkpoint._replicas import Gathering, assign, has_other_ranks
from vescale.checkpoint._snapshot import MODEL, RANDOM, Snapshot, samples
from vescale.checkpoint._step_folder import Retention, clean, commit, pack_part, remove_unfinished, unpack_part
from vescale.compat import note
from vescale.errors import CheckpointError, CheckpointWarning, FolderInUseError, SaveFailedError

# One job saves to a folder at a time: a lock that ends with the process that holds it, however it ends.

try:
    import fcntl
except ImportError:  # Windows: no lock
    fcntl = None  # type: ignore[assignment]


_NAME = ".lock"
_UNSUPPORTED = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)

# Of this process, by path: descriptor and number of holders, who know of each other.
_HELD: dict[str, tuple[int, int]] = {}
_HELD_LOCK = threading.Lock()


class FolderLock:
    """Held until :meth:`release`. ``is_certain``: False on file systems without locks, where nobody knows who else saves.

    Raises CheckpointError if another process holds it, naming host and process.
    """

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(os.path.realpath(folder), _NAME)
        with _HELD_LOCK:
            descriptor, count = _HELD.get(self._path, (-1, 0))
            if count == 0:
                descriptor = self._open()
            _HELD[self._path] = descriptor, count + 1
        self.is_certain = descriptor >= 0
        self._is_released = False

    def _open(self) -> int:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if fcntl is None:
                raise OSError(errno.ENOSYS, "no locks")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 4096, 0).decode(errors="replace")
            os.close(descriptor)
            raise FolderInUseError(
                f"another job is saving to {os.path.dirname(self._path)}: {holder or 'its name is not known'}; give "
                "each job its own folder, or stop that job"
            ) from None
        except OSError as error:
            os.close(descriptor)
            if error.errno in _UNSUPPORTED:
                return -1
            raise
        with contextlib.suppress(OSError):  # a full disk: the name is for messages only
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps({"host": socket.gethostname(), "process": os.getpid()}).encode(), 0)
        return descriptor

    def release(self) -> None:
        if self._is_released:
            return
        self._is_released = True
        with _HELD_LOCK:
            descriptor, count = _HELD.pop(self._path, (-1, 0))  # none in a forked process
            if count > 1:
                _HELD[self._path] = descriptor, count - 1
            elif descriptor >= 0:
                os.close(descriptor)


def _leave_to_parent() -> None:
    """In a forked process, which may outlive the job (workers of a DataLoader): the lock is not to be held by it, too."""
    global _HELD_LOCK
    _HELD_LOCK = threading.Lock()  # another thread may have held it
    for descriptor, _ in _HELD.values():
        if descriptor >= 0:
            os.close(descriptor)
    _HELD.clear()


if hasattr(os, "register_at_fork"):
    note("checkpoint._saving:process", "os.register_at_fork")
    os.register_at_fork(after_in_child=_leave_to_parent)


# Which rank writes which tensor, decided by every rank for itself from what the ranks have agreed on once.

Holders = dict[str, tuple[int, ...] | None]
"""For each tensor the ranks that have it by this name; None: all of those that should."""


def shared_names(blocks: Mapping[str, LocalBlocks]) -> list[str]:
    """What this rank holds and others may hold as well: not its own random state."""
    return [name for name, entry in blocks.items() if entry.local is not None and not name.startswith(RANDOM + ".")]


def agree_on_holders(blocks: Mapping[str, LocalBlocks], consensus: Round) -> Holders:
    """One round through the store; each rank reads those of the others only where they differ."""
    own = sorted(shared_names(blocks))
    messages = consensus.exchange(
        zlib.compress(json.dumps(own).encode()), lambda: "ranks save a checkpoint; all of them must call save()"
    )
    if len(set(messages)) == 1:
        return dict.fromkeys(own)
    holders = defaultdict(list)
    for rank, message in enumerate(messages):
        for name in json.loads(zlib.decompress(message)):
            holders[name].append(rank)
    return {name: tuple(ranks) for name, ranks in holders.items()}


def owned(blocks: Mapping[str, LocalBlocks], holders: Holders) -> set[str]:
    """The tensors whose blocks this rank writes. Each replica of a block is written by one rank, and all write about as many
    bytes. No communication.

    States of an optimizer that came after the agreement are taken to be where their parameters are; other tensors that
    came later are written by all ranks that have them. Of a tensor that is on several meshes (over the ranks of a
    submesh each, or tied over stages of a pipeline) the mesh with the smallest rank writes.

    Relies on ranks of one replica group having equal blocks.
    """
    if not has_other_ranks():
        return {name for name, entry in blocks.items() if entry.local is not None}
    rank, world = dist.get_rank(), dist.get_world_size()
    found = set()
    together: dict[tuple[DeviceMesh | None, tuple[int, ...], tuple[int, ...] | None], list[str]] = defaultdict(list)
    for name, entry in blocks.items():
        if entry.local is None:
            continue
        known = name if name in holders else _parameter_of(name)
        if known in holders:
            together[entry.mesh, entry.repeated, holders[known]].append(name)
        else:
            found.add(name)
    for (mesh, repeated, among), names in together.items():
        if mesh is not None and not (mesh.mesh == (min(among) if among else 0)).any():
            continue
        ranks = _replicas(mesh, repeated) if mesh is not None else range(world)
        having = [each for each in ranks if among is None or each in set(among)]
        owners = assign(((name, blocks[name].nbytes) for name in names), len(having))
        found |= {name for name in names if having[owners[name]] == rank}
    return found


def _parameter_of(name: str) -> str:
    """Of ``OPTIMIZER.state.PARAMETER.STATE``, the name of the parameter's tensor."""
    return f"{MODEL}.{name.partition('.state.')[2].rpartition('.')[0]}"


def _replicas(mesh: DeviceMesh, repeated: Sequence[int]) -> list[int]:
    """Global ranks that hold the same as this one, itself among them."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    choices = [range(mesh.size(axis)) if axis in repeated else (coordinate[axis],) for axis in range(mesh.ndim)]
    return [int(mesh.mesh[place]) for place in itertools.product(*choices)]


# Ids of the savers of this process whose unfinished folders are not to be removed by another one.
_LIVING: set[str] = set()


@dataclass(frozen=True)
class Target:
    """Where a save goes.

    Attributes:
        name: of the folder within the saver's.
        step, metric: for the manifest.
        retention: which steps stay afterwards; None: all, and there is no pointer.
        replace: an existing folder of that name.
        aside: steps that are put aside afterwards.
    """

    name: str
    step: int | None = None
    metric: dict[str, Any] | None = None
    retention: Retention | None = None
    replace: bool = False
    aside: tuple[int, ...] = ()


class Saver:
    """Saves to one folder. Made, and called, by all ranks in the same order; at most one save is under way.

    A rank writes one file. What ranks hold in common is divided among them; who writes what follows from placements and
    names, which ranks compare in the first save. Later ones exchange one message through the store, when all have
    written, and a second one where values beside tensors differ between ranks.
    """

    def __init__(self, folder: str, call: str, *, asynchronous: bool, locks: bool = True) -> None:
        self.folder, self._call = folder, call
        self._locks = locks
        self._writer = Writer() if asynchronous else None
        self._gathering: Gathering | None = None
        self._consensus: Round | None = None
        self._holders: Holders | None = None
        self._id = ""
        self._forget: Callable[[], Any] = lambda: None  # that this process is saving under this id
        self._lock: FolderLock | None = None
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None
        self._told: list[str] = []
        self.saved: Target | None = None  # the last one that is complete; read it after wait()

    def save(self, prepare: Callable[[], tuple[Snapshot, Target]]) -> Target:
        """Write in the background if the saver is asynchronous; the tensors may be changed when this returns.

        ``prepare``: what goes where; communicates nothing.

        Raises what ``prepare`` does, on this rank, and CheckpointError on the others and if a save has failed: an earlier
        one, or this one.
        """
        self.wait()
        try:
            settle_heartbeats()
            snapshot, target = prepare()
        except BaseException as error:
            self._refuse(error)
            raise
        gathering = self._open()
        holders = self._agree(snapshot.blocks)
        try:
            own = sorted(owned(snapshot.blocks, holders))
            layout = list(layout_of({name: snapshot.blocks[name] for name in own}))
            part = _part(snapshot, own, layout, holders) | {"samples": samples(snapshot)}
            head = _head(snapshot, target) if gathering.rank == 0 else {}
            temporary = f"{target.name}.tmp-{self._id}"
            writing = RankFile(self.folder, temporary, f"data-{gathering.rank:05d}.bin", layout, part, snapshot.values)
            if self._writer is not None:
                fill_image(self._writer, layout, snapshot.blocks)
        except BaseException as error:
            self._refuse(error)
            if not isinstance(error, Exception) or isinstance(error, CheckpointError):
                raise
            raise SaveFailedError(f"{target.name} was not saved: {type(error).__name__}: {error}") from error
        if self._writer is None:
            self._finish(gathering, writing, head, target, lambda: writing.write(snapshot.blocks))
            self.wait()
            return target
        writer = self._writer
        self._thread = threading.Thread(
            target=self._finish,
            args=(gathering, writing, head, target, lambda: writing.hand_over(writer)),
            name=f"saving {target.name}",
        )
        self._thread.start()
        return target

    def _refuse(self, error: BaseException) -> None:
        """The others, which may save, hear of ``error`` in the round in which they are, the first one or that of the files.
        They are waited for, but not after a Ctrl-C."""
        if not has_other_ranks():
            return

        def message() -> str:
            raise error

        has_begun = self._gathering is not None and not self._gathering.has_failed
        if has_begun:
            self._agree({})
        gathering = self._gathering if self._gathering is not None and has_begun else Gathering(self._call)
        try:
            gathering.round(message, lambda _: {})
        except (CheckpointError, type(error)):
            self._remove_unfinished(gathering)

    def _remove_unfinished(self, gathering: Gathering) -> None:
        if gathering.rank == 0:
            with contextlib.suppress(OSError):
                remove_unfinished(self.folder, self._id)

    def _agree(self, blocks: Mapping[str, LocalBlocks]) -> Holders:
        """Which ranks have which names; compared in the first save, and after one that has failed."""
        if self._holders is None and not has_other_ranks():
            self._holders = {}
        elif self._holders is None:
            self._consensus = self._consensus or Round(range(dist.get_world_size()), "checkpoint holders")
            self._holders = agree_on_holders(blocks, self._consensus)
        return self._holders

    def wait(self) -> None:
        """Until nothing is under way. Raises CheckpointError if the save that was has failed; once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        told, self._told = self._told, []
        for text in told:
            warnings.warn(text, CheckpointWarning, stacklevel=3)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def close(self) -> None:
        """Wait, and end the writer process."""
        try:
            self.wait()
        finally:
            if self._writer is not None:
                self._writer.close()
            self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        self._forget()
        self._gathering = None

    @property
    def writer_pid(self) -> int | None:
        return self._writer.pid if self._writer is not None else None

    def _open(self) -> Gathering:
        """Before the first save, and the first one after a failure: the folder is there and can be written to, and what
        was left unfinished is removed."""
        if self._gathering is not None and self._gathering.has_failed:
            self._release()
            self._holders = None
        if self._gathering is None:
            gathering = Gathering(self._call)
            try:
                self._id = gathering.round("", lambda _: {"id": self._prepare()})["id"]
            except CheckpointError as error:
                raise SaveFailedError(f"nothing was saved in {self.folder}: {error}") from error
            self._gathering = gathering
        return self._gathering

    def _prepare(self) -> str:
        own = uuid.uuid4().hex[:16]
        _LIVING.add(own)
        self._forget = weakref.finalize(self, _LIVING.discard, own)
        try:
            _disk.make_folder(self.folder)
            if self._locks:
                self._lock = self._lock or FolderLock(self.folder)
                if self._lock.is_certain:
                    clean(self.folder, set(_LIVING))
            probe = os.path.join(self.folder, f"probe.tmp-{own}")
            _disk.make_folder(probe)
            _disk.remove_tree(probe)
        except OSError as error:
            raise SaveFailedError(f"{self.folder} cannot be written to: {error}") from error
        return own

    def _finish(
        self, gathering: Gathering, writing: RankFile, head: dict[str, Any], target: Target, write: Any
    ) -> None:
        """Write this rank's file, and have the first rank commit what all have written."""
        received: list[str] = []  # on the first rank

        def message() -> str:
            _check_space(self.folder, writing.nbytes)
            writing.put_checksums(write())
            digests = digests_of(writing.values, optimizers="values" not in writing.part)
            return f"{os.path.basename(self.folder)}/{target.name}\n{digests}\n{pack_part(writing.part)}"

        def first(messages: Sequence[str]) -> dict[str, Any]:
            received[:] = messages
            return self._commit(messages, writing, head, target)

        try:
            outcome = gathering.round(message, first)
            if wanted := outcome.get("wanted"):  # values that differ between ranks
                outcome = gathering.round(
                    lambda: pack_part(pick(writing.values, wanted)),
                    lambda picked: self._commit(received, writing, head, target, picked),
                )
        except CheckpointError as error:
            self._remove_unfinished(gathering)
            self._failure = SaveFailedError(
                f"{os.path.join(self.folder, target.name)} was not saved; earlier steps are unchanged: {error}"
            )
            self._failure.__cause__ = error
            if self._writer is not None and gathering.rank == 0:  # the program may end without asking
                warnings.warn(str(self._failure), CheckpointWarning, stacklevel=2)
        except Exception as error:  # the store is gone
            self._failure = SaveFailedError(f"{target.name} may not have been saved: {type(error).__name__}: {error}")
        else:
            self.saved = target
            if outcome["is_new"]:
                self._holders = None
            if gathering.rank == 0:
                self._told += outcome["warnings"]

    def _commit(
        self,
        messages: Sequence[str],
        writing: RankFile,
        head: dict[str, Any],
        target: Target,
        picked: Sequence[str] | None = None,
    ) -> dict[str, Any]:
        """On the first rank. Returns ``{"wanted": ...}``, and has not committed, where ranks have different values, and what
        they ``picked`` of these is not here yet."""
        names, digests, parts = zip(*(message.split("\n", 2) for message in messages))
        if len(set(names)) > 1:
            raise SaveFailedError(f"ranks save different steps: {sorted(set(names))}; all ranks must save the same one")
        different = differing(digests)
        optimizers = different.pop("optimizer", ())
        if different and picked is None:
            return {"wanted": different}
        if picked is not None:
            add_values_of_ranks(head["values"], [unpack_part(text) for text in picked])
        job = {
            "do": "commit",
            "parent": self.folder,
            "temporary": writing.temporary,
            "name": target.name,
            "id": self._id,
            "head": head,
            "parts": parts,
            "replace": target.replace,
            "points": target.retention is not None,
            "retention": asdict(target.retention) if target.retention is not None else None,
            "aside": list(target.aside),
        }
        found = self._writer.run(job) if self._writer is not None else commit(job)
        found["warnings"] += [
            f"{name}: options, or states that are not tensors, differ between ranks, and those of the first rank are "
            "saved; use the same ones on all ranks"
            for name in optimizers
        ]
        return found


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _part(snapshot: Snapshot, own: Sequence[str], layout: Sequence[Piece], holders: Holders) -> dict[str, Any]:
    """What this rank tells the first one; checksums follow. Tensors are in the order of the layout."""
    tensors: dict[str, Any] = {}
    for name in own:
        entry = snapshot.blocks[name]
        if entry.boxes or 0 in entry.shape:
            tensors[name] = [list(entry.shape), dtype_name(entry.dtype), []]
    for piece in layout:
        tensors[piece.name][2].append([list(piece.box.offset), list(piece.box.sizes), piece.start])
    part: dict[str, Any] = {"file": None, "tensors": tensors, "buffers": sorted(snapshot.buffers)}
    part["lacks_optimizer"] = snapshot.lacks_optimizer
    part["optimizers"] = sorted(snapshot.values["optimizers"])
    part["is_new"] = has_other_ranks() and any(name not in holders for name in shared_names(snapshot.blocks))
    if any(among is not None for among in holders.values()):
        part["values"] = {key: snapshot.values[key] for key in ("model", "optimizers")}
    return part


def _head(snapshot: Snapshot, target: Target) -> dict[str, Any]:
    return {
        "step": target.step,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {"vescale": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "world_size": dist.get_world_size() if has_other_ranks() else 1,
        "meshes": snapshot.meshes(),
        "program": snapshot.program,
        "metric": target.metric,
        "values": snapshot.values,
    }


def _check_space(folder: str, nbytes: int) -> None:
    try:
        free = shutil.disk_usage(folder).free
    except FileNotFoundError:
        raise SaveFailedError(
            f"No such file or directory: {folder} was removed, or its disk is not mounted; the next save creates it "
            "again"
        ) from None
    if free < nbytes:
        raise SaveFailedError(
            f"{folder} has {free} bytes left, and this rank alone has {nbytes} to write: free space, or use another "
            "disk"
        )

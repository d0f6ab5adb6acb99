"""``StepChecks``: the ranks of a mesh compare what they are about to do, before they communicate.

==========  ===================================================================================================
event       what must agree
==========  ===================================================================================================
forward     of a model from its root: the model, training or evaluation, with or without gradients; what it is given
backward    of such a forward
read        of a value that is cut over the whole mesh (``item()``, ``full_tensor()``), outside of forwards
==========  ===================================================================================================

How they compare:

=================================  ==================================================================================
the ranks                          each event
=================================  ==================================================================================
of one host, on gloo               all wait for each other, as the collectives that follow do, and compare digests in
                                   shared memory (:class:`vescale.comm.Board`): microseconds
others                             nobody waits: in the first 3 forwards and every ``VESCALE_CHECK_EVERY``-th,
                                   descriptions go to the store, and a later forward reads those of all ranks
others, with VESCALE_CHECK=steps   all wait for each other in a round through the store
=================================  ==================================================================================

Values are compared in the first 3 forwards and in every ``VESCALE_CHECK_EVERY``-th (100): sums of all bits. In the other
forwards shapes, dtypes, numbers of Python, and a few elements of tensors in the host's memory are. An error is raised on
every rank that has come.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vescale.checks._call_site import call_site
from vescale.checks._mismatches import (
    SAME_STEPS,
    SEVERAL_THREADS,
    InputMismatchError,
    StepMismatchError,
    data_text,
    uneven_text,
)
from vescale.checks._settings import FIRST, check_every, check_mode, is_unchecked
from vescale.comm import Board, Consensus, ConsensusError, RankGoneError, first_difference, wait_limit
from vescale.compat import default_store, default_timeout, is_alone

__all__ = ["LocalPart", "StepChecks", "start_checks", "step_checks"]

Rows = Sequence[tuple[str, str]]


class LocalPart:
    """An input of which each rank gives its part.

    Attributes:
        name: of the input; shape: of this rank's part; text: what its replicas must have, too.
        axes: of the mesh, along which ranks have different parts.
    """

    __slots__ = ("axes", "name", "shape", "text")

    def __init__(self, name: str, shape: Sequence[int], text: str, axes: Sequence[int]) -> None:
        self.name, self.shape, self.text, self.axes = name, tuple(shape), text, tuple(axes)


class StepChecks:
    """The checks on one mesh, and all that are equal to it; use :func:`start_checks`.

    Attributes:
        is_on: whether there is somebody to compare with.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.ranks = mesh.mesh.flatten().tolist()
        self._coordinates = [tuple(index) for index in (mesh.mesh >= 0).nonzero().tolist()]
        self._has_others = mesh.size() > 1 and mesh.get_coordinate() is not None
        self._consensus: Consensus | None = None
        self._board: Board | None = None
        self._is_ready = False
        self._number = self._forwards = 0
        self._awaited: tuple[str, int] | None
        self._noted: list[tuple[str, str]]
        self._open: deque[str] = deque()
        self._lock = threading.Lock()  # one event at a time
        self._threads: set[int] = set()  # that have run forwards
        self.begin()

    def begin(self) -> None:
        """A new model; settings are read anew."""
        self._mode, self._every = check_mode(), check_every()
        self.is_on = self._has_others and self._mode != "off"
        self._forwards, self._noted, self._awaited = 0, [], None
        self._threads.clear()

    @property
    def is_due(self) -> bool:
        """Whether values are compared in this step: sums of all bits."""
        number = self._forwards
        return number <= FIRST or (self._every > 0 and number % self._every == 0)

    @property
    def compares_data(self) -> bool:
        """Whether what is given in this forward is compared."""
        return self.is_on and not is_unchecked() and (self.is_due or not self._is_ready or self.waits)

    @property
    def waits(self) -> bool:
        """Whether ranks wait for each other."""
        return self._board is not None or self._mode == "steps"

    def begin_forward(self, number: int) -> None:
        """``number`` of the model's forward, from 1."""
        if not self._is_ready:
            self._start()
        self._forwards = number

    def forward(
        self, model: str, mode: str, inputs: Rows, parts: Sequence[LocalPart]
    ) -> list[Mapping[int, Any]] | None:
        """Before a forward. Returns None, or where ranks give parts of different sizes, the shape of each part by position
        of the rank.

        Raises StepMismatchError and InputMismatchError, on every rank that comes.
        """
        self._threads.add(threading.get_ident())
        return self._meet(f"forward {self._forwards} of {model}, {mode}", inputs, parts)

    def await_backward(self, model: str) -> int:
        """After a forward with gradients, which number it has."""
        self._awaited = model, self._forwards
        return self._forwards

    def backward(self, model: str, step: int) -> None:
        """Before the backward of a forward."""
        self._awaited = None
        self._meet(f"the backward of forward {step} of {model}", (), ())

    def finish(self) -> None:
        """Of ranks that had no backward, where others may have had one."""
        if self._awaited is not None:
            self.backward(*self._awaited)

    def agree(self, what: str, rows: Rows) -> None:
        """Compare values that are the same on every rank; all wait for each other.

        Raises StepMismatchError and InputMismatchError, on every rank that comes.
        """
        if self.is_on and not is_unchecked():
            if not self._is_ready:
                self._start()
            if self.waits:
                self._meet(what, rows, ())
            else:
                self._compare(self._exchange(self._description(what, rows, ())))

    def read(self, what: str) -> None:
        """Before a value is read whose parts are on all ranks of the mesh."""
        if self.is_on and self._is_ready:
            self._meet(f"a read of {what}", (), ())

    def note(self, name: str, text: str) -> None:
        """Something that is the same on every rank was given outside of a forward: compared with the next event."""
        if len(self._noted) < _MAX_NOTED:
            self._noted.append((name, text))

    # One event

    def _start(self) -> None:
        self._is_ready = True
        self._consensus = Consensus(self.ranks, "steps")
        if is_alone() or dist.get_backend() == "gloo":
            self._board = Board.open(self.ranks, self._consensus.place)

    def _meet(self, site: str, inputs: Rows, parts: Sequence[LocalPart]) -> list[Mapping[int, Any]] | None:
        with self._lock:
            return self._meet_alone(site, inputs, parts)

    def _meet_alone(self, site: str, inputs: Rows, parts: Sequence[LocalPart]) -> list[Mapping[int, Any]] | None:
        if not self._is_ready:
            self._start()
        self._number += 1
        inputs, self._noted = (*self._noted, *inputs), []
        if self._board is not None and self._mode != "steps":
            return self._meet_on_board(self._board, site, inputs, parts)
        if self._mode == "steps":
            return self._compare(self._exchange(self._description(site, inputs, parts)))
        self._look_at_open()
        if self.is_due and site.startswith("forward"):
            self._put(self._description(site, inputs, parts))
        return None

    def _meet_on_board(
        self, board: Board, site: str, inputs: Rows, parts: Sequence[LocalPart]
    ) -> list[Mapping[int, Any]] | None:
        where = call_site() if site.startswith("forward") else ""
        digests = [_digest(site), _digest(inputs) if inputs else 0, 0, 0]
        if parts:
            digests[2] = _digest([(part.name, part.shape) for part in parts])
            digests[3] = _digest([(part.name, part.text) for part in parts])
        marks = board.post(self._number, digests, f"{site} ({where})" if where else site)
        if len(board.ranks) == 1:
            return None
        num_marks = 4 if parts else 3
        try:
            rows = board.wait(self._number, num_marks, _limit(), _is_paused, site)
        except (TimeoutError, RankGoneError) as problem:
            raise self._absence(board, site, where, problem) from None
        first = marks[:3]
        for row in rows:
            if row[:3] != first:
                return self._compare(self._exchange(self._description(site, inputs, parts, where or call_site())))
        if parts:
            seen: dict[tuple[int, ...], int] = {}
            for coordinate, row in zip(self._part_keys(parts), rows):
                if seen.setdefault(coordinate, row[3]) != row[3]:
                    return self._compare(self._exchange(self._description(site, inputs, parts, where)))
        return None

    def _part_keys(self, parts: Sequence[LocalPart]) -> list[tuple[int, ...]]:
        axes = sorted({axis for part in parts for axis in part.axes})
        return [tuple(coordinate[axis] for axis in axes) for coordinate in self._coordinates]

    def _absence(self, board: Board, site: str, where: str, problem: Exception) -> StepMismatchError:
        absent = [board.ranks[index] for index in board.absent(self._number)]
        if isinstance(problem, RankGoneError):
            return StepMismatchError(
                f"rank {dist.get_rank()} is before {site} ({where}), and {problem}: its own error says why",
                [problem.rank],
            )
        last = "; ".join(
            f"rank {board.ranks[index]} came last to {board.text(index) or 'nothing'}"
            for index in board.absent(self._number)[:8]
        )
        return StepMismatchError(
            f"rank {dist.get_rank()} is before {site} ({where}), and ranks {absent} have not come for {_limit():g} s: "
            f"{last}. {self._advice()}",
            absent,
        )

    def _advice(self) -> str:
        return SAME_STEPS + (SEVERAL_THREADS if len(self._threads) > 1 else "")

    # Descriptions, where digests differ or nobody waits

    def _description(self, site: str, inputs: Rows, parts: Sequence[LocalPart], where: str | None = None) -> bytes:
        own = {
            "site": site,
            "where": call_site() if where is None else where,
            "inputs": list(inputs),
            "parts": [[part.name, part.shape, part.text, part.axes] for part in parts],
        }
        return json.dumps(own).encode()

    def _exchange(self, message: bytes) -> list[dict[str, Any]]:
        assert self._consensus is not None
        site = json.loads(message)["site"]
        try:
            messages = self._consensus.exchange(message, lambda: f"comparing {site}")
        except ConsensusError as error:
            raise StepMismatchError(f"{error}. {SAME_STEPS}", error.ranks) from None
        return [json.loads(each) for each in messages]

    def _put(self, message: bytes) -> None:
        assert self._consensus is not None
        key = f"{self._consensus.place} put {self._number}"
        if not is_alone():
            default_store().set(f"{key} {self.ranks.index(dist.get_rank())}", message.hex())
            self._open.append(key)

    def _look_at_open(self) -> None:
        """Descriptions of earlier forwards, if all ranks have put theirs. Nobody waits."""
        while self._open:
            store, key = default_store(), self._open[0]
            keys = [f"{key} {index}" for index in range(len(self.ranks))]
            if not store.check(keys):
                return
            found = [json.loads(bytes.fromhex(store.get(each).decode())) for each in keys]
            self._open.popleft()
            if store.add(f"{key} read", 1) == len(self.ranks):
                for each in (*keys, f"{key} read"):
                    store.delete_key(each)
            if self._compare(found):
                raise InputMismatchError(uneven_text(found, self.ranks), self.ranks)

    def _compare(self, found: Sequence[dict[str, Any]]) -> list[Mapping[int, Any]] | None:
        if len({each["site"] for each in found}) > 1:
            difference = first_difference("", {r: [("", e["site"])] for r, e in zip(self.ranks, found)})
            places = "; ".join(f"rank {r} is before {e['site']} ({e['where']})" for r, e in zip(self.ranks[:16], found))
            raise StepMismatchError(f"ranks run different steps: {places}. {self._advice()}", difference.ranks)
        inputs = {rank: [tuple(row) for row in each["inputs"]] for rank, each in zip(self.ranks, found)}
        if len({tuple(rows) for rows in inputs.values()}) > 1:
            difference = first_difference("what is given", inputs)
            raise InputMismatchError(data_text(found[0]["site"], difference), difference.ranks)
        names = {tuple(part[0] for part in each["parts"]) for each in found}
        if len(names) > 1:
            rows = {r: [(part[0], "given") for part in e["parts"]] for r, e in zip(self.ranks, found)}
            difference = first_difference("what is given", rows)
            raise InputMismatchError(data_text(found[0]["site"], difference), difference.ranks)
        for number, (name, _, _, axes) in enumerate(found[0]["parts"]):
            groups: dict[tuple[int, ...], dict[int, list[tuple[str, str]]]] = {}
            for rank, coordinate, each in zip(self.ranks, self._coordinates, found):
                key = tuple(coordinate[axis] for axis in axes)
                groups.setdefault(key, {})[rank] = [(name, each["parts"][number][2])]
            for group in groups.values():
                if len({tuple(rows) for rows in group.values()}) > 1:
                    difference = first_difference("what is given", group)
                    raise InputMismatchError(data_text(found[0]["site"], difference, local=True), difference.ranks)
        shapes: list[Mapping[int, Any]] = [
            {index: tuple(each["parts"][number][1]) for index, each in enumerate(found)}
            for number in range(len(found[0]["parts"]))
        ]
        return shapes if any(len(set(each.values())) > 1 for each in shapes) else None


_MAX_NOTED = 64


def _digest(value: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=6).digest(), "little")


def _limit() -> float:
    return (wait_limit() or default_timeout()).total_seconds()


def _is_paused() -> bool:
    """Whether ranks are stopped at a breakpoint."""
    with contextlib.suppress(RuntimeError):
        return bool(default_store().add("vescale paused", 0))
    return False


# By default group. Equal meshes share one: ops give results on any of them (PyTorch remembers decisions by equal specs), and
# which of them are still there depends on each rank's garbage collector.
_BY_WORLD: weakref.WeakKeyDictionary[Any, dict[DeviceMesh, StepChecks]] = weakref.WeakKeyDictionary()


def step_checks(mesh: DeviceMesh) -> StepChecks | None:
    """The checks on a mesh; None: no model has been parallelized on it."""
    return _BY_WORLD.get(dist.group.WORLD, _NONE).get(mesh) if dist.is_initialized() else None


def start_checks(mesh: DeviceMesh) -> StepChecks:
    """The checks on a mesh, for a new model, whose first forwards are compared fully. Called in one order on all ranks."""
    known = _BY_WORLD.setdefault(dist.group.WORLD, {})
    found = known.get(mesh)
    if found is None:
        found = known[mesh] = StepChecks(mesh)
    found.begin()
    return found


_NONE: dict[DeviceMesh, StepChecks] = {}

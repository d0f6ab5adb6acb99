"""The ranks that take or skip a step together: those that parameters on common meshes link, directly or through others."""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from vescale.comm import all_reduce_, group_of_ranks, wait_limit
from vescale.compat import default_store, default_timeout, is_alone, root_mesh, without_modes
from vescale.errors import MissingGradientError
from vescale.gradients import shares_of

FINITE = "finite gradients"
"""What the ledger calls the message by which ranks learn whether gradients are finite."""

Ranks = tuple[int, ...]
# By default group, then by kind of optimizer and set of ranks: how many such sets this rank has asked about.
_COUNTERS: weakref.WeakKeyDictionary[Any, dict[tuple[str, Ranks], itertools.count[int]]] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


class LinkedRanks:
    """Finds out which ranks are linked, through the store and once for each list of meshes.

    Two ranks are linked if they are in one mesh of which the meshes of parameters are slices, or hold stages of one model:
    along the other axes of the mesh are copies that would differ, or the rest of the model. A rank knows its own sets of
    ranks only, so that each one writes them, the first rank of each set joins what its ranks have written, and everyone
    follows these.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._found: dict[frozenset[Ranks], Ranks] = {}

    def of(self, parameters: Sequence[torch.Tensor]) -> Ranks:
        """The ranks, ascending, that decide with this one; none where it decides alone. Called by all of them with all
        parameters of an optimizer, frozen ones too; communicates in the first call and when meshes have changed.

        Raises RuntimeError if one of the ranks does not come in time.
        """
        if not dist.is_available() or not dist.is_initialized() or is_alone():
            return ()
        with without_modes():
            sets = frozenset(each for each in _sets_of(parameters) if len(each) > 1)
            if sets not in self._found:
                self._found[sets] = self._joined(sets)
        return self._found[sets]

    def _joined(self, sets: frozenset[Ranks]) -> Ranks:
        if not sets:
            return ()
        store, rank = default_store(), dist.get_rank()
        with _LOCK:
            counters = _COUNTERS.setdefault(dist.group.WORLD, {})
            numbers = {each: next(counters.setdefault((self._kind, each), itertools.count())) for each in sorted(sets)}
        own = json.dumps(sorted(numbers.items()))
        for each, number in numbers.items():
            store.set(f"{self._key(each, number)} {rank}", own)
        for each, number in numbers.items():
            if each[0] == rank:
                key = self._key(each, number)
                written = self._read(store, {f"{key} {member}": member for member in each})
                store.set(f"{key} joined", json.dumps(sorted({item for text in written for item in _items(text)})))
        known: dict[Ranks, int] = {}
        pending = dict(numbers)
        while pending:
            known |= pending
            keys = {f"{self._key(each, number)} joined": each[0] for each, number in pending.items()}
            read = {item for text in self._read(store, keys) for item in _items(text)}
            pending = {each: number for each, number in read if each not in known}
        return tuple(sorted({member for each in known for member in each}))

    def _key(self, ranks: Ranks, number: int) -> str:
        return f"vescale linked {self._kind} {hashlib.sha256(str(ranks).encode()).hexdigest()[:16]} {number}"

    def _read(self, store: dist.Store, keys: dict[str, int]) -> list[str]:
        limit = wait_limit() or default_timeout()
        try:
            store.wait(list(keys), limit)
        except RuntimeError:  # store types have no common error class; a lost store raises again here
            late = sorted({rank for key, rank in keys.items() if not store.check([key])})
            if late:
                raise MissingGradientError(
                    f"skip_nonfinite: rank {dist.get_rank()} takes a step of {self._kind} together with the ranks of its "
                    f"meshes, and ranks {late} did not come within {limit}. All ranks of a mesh, and of its slices, "
                    "must make the optimizer and call step() as often; models that are trained apart need meshes of "
                    "their own"
                ) from None
        return [store.get(key).decode() for key in keys]


def _items(text: str) -> Iterable[tuple[Ranks, int]]:
    return ((tuple(ranks), number) for ranks, number in json.loads(text))


def _sets_of(parameters: Sequence[torch.Tensor]) -> Iterable[Ranks]:
    for mesh in dict.fromkeys(root_mesh(p.device_mesh) for p in parameters if isinstance(p, DTensor)):
        yield tuple(sorted(mesh.mesh.flatten().tolist()))
    for group in {share.group for share in shares_of(parameters) if share is not None}:
        yield tuple(sorted(dist.get_process_group_ranks(group)))


def all_finite(is_finite: bool, ranks: Ranks, device: torch.device) -> bool:
    """Whether gradients are finite on all of ``ranks``, which call this; one all-reduce of a byte."""
    if len(ranks) < 2:
        return is_finite
    with without_modes():
        flag = torch.tensor([not is_finite], dtype=torch.uint8).to(device)
        return not bool(all_reduce_(flag, "max", group_of_ranks(ranks), requester=FINITE).wait())

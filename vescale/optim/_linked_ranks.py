"""The ranks that take or skip a step together: those that parameters on common meshes link, directly or through others."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from vescale.agreement import Round, await_posts, post, wait_limit
from vescale.comm import all_reduce_, group_of_ranks
from vescale.compat import default_timeout, is_alone, root_mesh, without_modes
from vescale.errors import ConsensusError, OptimizerError
from vescale.gradients import shares_of

FINITE = "finite gradients"
"""What the ledger calls the message by which ranks learn whether gradients are finite."""

Ranks = tuple[int, ...]


class LinkedRanks:
    """Finds out which ranks are linked, through the store and once for each list of meshes.

    Two ranks are linked if they are in one mesh of which the meshes of parameters are slices, or hold stages of one model:
    along the other axes of the mesh are copies that would differ, or the rest of the model. A rank knows its own sets of
    ranks only, so that the ranks of each set exchange theirs, the first rank of a set posts what its ranks have, and
    everyone follows these posts to sets of which it is no part.
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
        rounds = {each: Round(each, f"linked {self._kind}") for each in sorted(sets)}
        own = json.dumps([(each, found.place) for each, found in rounds.items()])
        known: dict[Ranks, str] = {}
        for each, found in rounds.items():
            try:
                messages = found.exchange(own.encode(), lambda: f"skip_nonfinite: a step of {self._kind}")
            except ConsensusError as error:
                raise self._absence(error.ranks, found.timeout) from None
            joined = {item for message in set(messages) for item in _items(message.decode())}
            known |= joined
            if each[0] == dist.get_rank() and len(joined) > 1:  # others may follow
                post(found.place, json.dumps(sorted(joined)))
        visited = set(rounds)
        while pending := {each: place for each, place in known.items() if each not in visited}:
            visited |= pending.keys()
            try:
                texts = await_posts({place: each[0] for each, place in pending.items()})
            except ConsensusError as error:
                raise self._absence(error.ranks, wait_limit() or default_timeout()) from None
            known |= {item for text in texts for item in _items(text)}
        return tuple(sorted({member for each in known for member in each}))

    def _absence(self, late: Sequence[int], limit: timedelta) -> OptimizerError:
        return OptimizerError(
            f"skip_nonfinite: rank {dist.get_rank()} takes a step of {self._kind} together with the ranks of its "
            f"meshes, and ranks {list(late)} did not arrive within {limit}. All ranks of a mesh, and of its slices, "
            "must create the optimizer, and call step() the same number of times; models that are trained separately "
            "need separate meshes"
        )


def _items(text: str) -> Iterable[tuple[Ranks, str]]:
    return ((tuple(ranks), place) for ranks, place in json.loads(text))


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

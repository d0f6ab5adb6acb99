"""The gradients of one optimizer step: what to do where some are missing, pending, placed otherwise, or not finite.

A gradient that is missing on some ranks counts as zeros there; one that is missing on all is no gradient. To tell the two
apart, ranks that miss one write that to the store, and then all tell each other, in a message of a byte, that they have come
to this step. Only ranks that miss one wait for it: where all gradients are there, a step waits for nobody, and asks nobody.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial

from vescale.agreement import Beat, Heartbeat, Round, await_posts, post, posted, wait_limit
from vescale.comm import all_gather_v, all_reduce_, axis_group, group_of_ranks
from vescale.compat import (
    AsyncCollectiveTensor,
    default_timeout,
    is_alone,
    local_of,
    make_dtensor,
    make_spec,
    own_part,
    root_mesh,
    spec_of,
    without_modes,
)
from vescale.compat.devices import is_capturing
from vescale.errors import ConsensusError, OptimizerError, kind_of
from vescale.gradients import reduce_pending, shares_of
from vescale.optim._matrix_parameters import MatrixParameter, local_tensor
from vescale.optim._state_loading import replica_axes

# The ranks that take or skip a step together: those that parameters on common meshes link, directly or through
# others.


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


_HISTORY = 64  # steps with missing gradients that a rank remembers for slower ranks
_COUNTERS: weakref.WeakKeyDictionary[Any, dict[str, itertools.count[int]]] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's values of a tensor or DTensor, without autograd; waits for a pending collective."""
    if type(tensor) is torch.Tensor and not tensor.requires_grad:
        return tensor
    local = local_of(tensor) if isinstance(tensor, DTensor) else tensor.detach()
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


class StepBeats:
    """Messages between the ranks of an optimizer's parameters, in each step; only ranks that have to know wait for them."""

    def __init__(self, requester: str) -> None:
        self._requester = requester
        self._by_ranks: dict[Ranks, Heartbeat] = {}
        self._trained: dict[Ranks, list[tuple[int, bool]]] = {}

    def has_changed(self, ranks: Ranks, trained: list[tuple[int, bool]]) -> bool:
        """Whether other parameters of ``ranks`` are trained than in the last step: by number, whether each is."""
        before, self._trained[ranks] = self._trained.get(ranks), trained
        return trained != before

    def send(
        self,
        ranks: Ranks,
        message: bytearray,
        device: torch.device,
        check: Callable[[list[int]], None] = lambda _: None,
    ) -> Beat:
        """See :meth:`vescale.agreement.Heartbeat.send`."""
        if ranks not in self._by_ranks:
            self._by_ranks[ranks] = Heartbeat(group_of_ranks(ranks), self._requester, num_first=0)
        return self._by_ranks[ranks].send(message, device, check)


class StepGradients:
    """Collects the gradients of one optimizer, step by step; made alike on all ranks of the parameters."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._linked = LinkedRanks(kind)
        self._key = ""
        self._step = 0
        self._missed: dict[int, dict[int, list[int]]] = {}
        self._beats = StepBeats(f"step of {kind}")

    def collect(
        self, parameters: Sequence[torch.Tensor], names: Sequence[str], together: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor | None] | None:
        """For each parameter its gradient, placed like it, or None if no rank of its mesh has one; None: skip this step,
        because a gradient is not finite on one of the ranks that :class:`LinkedRanks` finds by the parameters ``together``.

        Communication: one all-reduce of a byte along each set of ranks that DTensors are on, which only ranks wait for that
        miss a gradient; one all-reduce for all Partial gradients together; redistributions of those that are placed
        otherwise than their parameters; with ``together`` one all-reduce of a byte.

        Raises:
            ValueError: a gradient that only replicas of this rank's part have: their parameters would differ.
            RuntimeError: a sparse gradient.
        """
        gradients = [parameter.grad for parameter in parameters]
        for gradient, name in zip(gradients, names):
            if gradient is not None and gradient.is_sparse:
                raise OptimizerError(
                    f"parameter {name} has a sparse gradient; use an optimizer for sparse gradients, or sparse=False"
                )
        gradients = self._with_zeros(parameters, gradients, names)
        held = [index for index, gradient in enumerate(gradients) if gradient is not None]
        reduced = reduce_pending([g for g in gradients if g is not None])
        for index, gradient in zip(held, reduced):
            gradients[index] = _placed_like(parameters[index], gradient)
        if together:
            is_finite = _is_finite([g for g in gradients if g is not None])
            device = local_part(together[0]).device
            if not all_finite(is_finite, self._linked.of(together), device):
                return None
        return gradients

    def _with_zeros(
        self, parameters: Sequence[torch.Tensor], gradients: list[torch.Tensor | None], names: Sequence[str]
    ) -> list[torch.Tensor | None]:
        shared = [index for index, p in enumerate(parameters) if isinstance(p, DTensor) and p.device_mesh.size() > 1]
        if not shared or not dist.is_initialized() or is_alone():
            return gradients
        self._step += 1
        if not self._key:
            self._key = _common_key(self._kind, [parameters[index] for index in shared], [names[i] for i in shared])
        missing = [index for index in shared if gradients[index] is None]
        note: dict[int, list[int]] = {index: [] for index in missing}
        for index in shared:
            gradient = gradients[index]
            if isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements):
                note[index] = [axis for axis, p in enumerate(gradient.placements) if p.is_partial()]
        if note:
            self._missed[self._step] = note
            while len(self._missed) > _HISTORY:
                del self._missed[next(iter(self._missed))]
            key = f"{self._key} {dist.get_rank()}"
            post(key, json.dumps(list(self._missed.items())))
            posted(key)  # it is there now: a store does not acknowledge what is written
        arrivals = self._arrive([parameters[index] for index in shared])
        if not missing:
            return gradients
        for arrival in arrivals:
            arrival.answer()
        found, notes = list(gradients), {dist.get_rank(): note}
        for index in missing:
            found[index] = self._zeros(index, parameters[index], names[index], notes)
        return found

    def _arrive(self, parameters: Sequence[torch.Tensor]) -> list[Beat]:
        """Tell the other ranks of the parameters that this one is in this step, and has written what it misses."""
        sets: dict[Ranks, torch.device] = {}
        for parameter in parameters:
            assert isinstance(parameter, DTensor)
            sets.setdefault(tuple(sorted(parameter.device_mesh.mesh.flatten().tolist())), local_of(parameter).device)
        return [self._beats.send(ranks, bytearray(1), sets[ranks]) for ranks in sorted(sets)]

    def _zeros(
        self, index: int, parameter: torch.Tensor, name: str, notes: dict[int, dict[int, list[int]]]
    ) -> torch.Tensor | None:
        """Zeros with the placements that the gradient has elsewhere; None: it is missing on all ranks."""
        assert isinstance(parameter, DTensor)
        spec = spec_of(parameter)
        mesh, placements = spec.mesh, list(spec.placements)
        own = mesh.get_coordinate()
        is_there = False
        pending: list[int] = []
        replicas: list[int] = []
        for coordinate in itertools.product(*map(range, mesh.shape)):
            rank = int(mesh.mesh[coordinate])
            if rank not in notes:
                notes[rank] = self._note_of(rank)
            note = notes[rank].get(index)
            if note == []:
                continue
            is_there = True
            pending = note or pending
            differs = [axis for axis in range(mesh.ndim) if own is not None and coordinate[axis] != own[axis]]
            if all(placements[axis].is_replicate() and axis not in (note or ()) for axis in differs):
                replicas.append(rank)
        if not is_there:
            return None
        if replicas:
            raise OptimizerError(
                f"parameter {name} of shape {tuple(parameter.shape)} and placements {tuple(placements)} has no gradient on "
                f"rank {dist.get_rank()}, but has one on ranks {replicas}, which hold the same part of it: their copies of "
                "the parameter would differ. Reduce gradients over the replicas before the step, or set .grad to None on all"
            )
        for axis in pending:
            placements[axis] = Partial()
        local = torch.zeros_like(local_of(parameter))
        return make_dtensor(local, make_spec(mesh, placements, spec.shape, spec.stride, parameter.dtype))

    def _note_of(self, rank: int) -> dict[int, list[int]]:
        """What the rank, which has come to this step, has written about it; nothing where it misses nothing."""
        notes = dict(json.loads(posted(f"{self._key} {rank}") or "[]"))
        return {int(index): axes for index, axes in notes.get(self._step, {}).items()}


def _is_finite(gradients: Sequence[torch.Tensor]) -> bool:
    locals_ = [local_part(gradient) for gradient in gradients]
    checks = [torch.isfinite(local).all() for local in locals_ if local.numel()]
    return all(check.item() for check in checks)


def _placed_like(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
        return gradient
    if tuple(gradient.placements) == tuple(parameter.placements):
        return gradient
    return gradient.redistribute(parameter.device_mesh, parameter.placements)


def _common_key(kind: str, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> str:
    """A name for an optimizer that ranks with the same parameters have in common, and other optimizers do not."""
    digest = hashlib.sha256(kind.encode())
    for parameter, name in zip(parameters, names, strict=True):
        digest.update(repr((name, tuple(parameter.shape), str(parameter.dtype))).encode())
    own = f"vescale optimizer {digest.hexdigest()[:24]}"
    with _LOCK:
        counter = _COUNTERS.setdefault(dist.group.WORLD, {}).setdefault(own, itertools.count())
    return f"{own} {next(counter)}"


# The gradients of a step, of which all ranks that hold a parameter have one or none has.

# What a rank has of a gradient, in the order in which one hides another when ranks compare.
_NONE, _LIKE_PARAMETER, _ELSEWHERE, _UNUSABLE = range(4)


def agreed_gradients(
    parameters: Sequence[MatrixParameter],
    beats: StepBeats,
    *,
    compare: Collection[frozenset[int]],
    linked: tuple[int, ...] | None = None,
) -> dict[int, torch.Tensor] | None:
    """The local tensor of each gradient, placed like its parameter, by the parameter's number.

    A gradient that is missing on this rank and present on others is one of zeros, or that of a replica; what no rank
    has is left out. None: ``linked``, ranks that take no step if a gradient of one of them is not finite, are given, and
    one has such a gradient.

    Communication: one all-reduce of two bytes a parameter for each set of ranks that parameters are on, as a rule one, if
    it is part of a set in ``compare``, which its ranks know alike. With ``linked`` for all sets, and one of a byte where
    parameters are on no set of just these ranks, or gradients are placed otherwise. Gradients with other placements than
    their parameter are brought to them. Of a gradient that some ranks lack, replicas that have it give it to those that
    lack it. On a device a rank that lacks nothing does not wait for the others, unless parameters have replicas,
    ``linked`` is given, or it trains other parameters than in its last step.

    Raises:
        RuntimeError: a parameter that is frozen on some ranks only; a gradient that is sparse, complex, of another shape, or
            a plain tensor for a DTensor; one that is placed otherwise than its parameter on some ranks and missing on
            others. With ``compare`` on every rank.
    """
    found = [_status(parameter) for parameter in parameters]
    statuses = [status for status, _ in found]
    agreed, missing = list(statuses), [status == _NONE for status in statuses]
    finite = _are_finite(_gradient_of(p) for p in parameters) if linked is not None else True
    told = False
    if compare or linked is not None:
        agreed, missing, finite, told = _compared(parameters, statuses, finite, linked, compare, beats)
    for parameter, status, (own, problem), lacks in zip(parameters, agreed, found, missing):
        if status == _UNUSABLE:
            raise OptimizerError(
                f"parameter {parameter.name!r} of shape {parameter.place.shape}: "
                + (
                    problem
                    if own == _UNUSABLE
                    else "another rank reports that its gradient cannot be used; see its error"
                )
            )
        if status == _ELSEWHERE and lacks:
            raise OptimizerError(
                f"parameter {parameter.name!r}: its gradient is missing on some ranks, and has other placements than "
                f"the parameter ({parameter.place.placements}) on others; compute a gradient on every rank, with the "
                "placements of the parameter"
            )
    if told and not finite:
        return None
    moved = [p for p, status in zip(parameters, agreed) if status == _ELSEWHERE]
    _place_like_parameters(moved)
    if linked is not None and (moved or not told):  # sums may overflow that were of finite numbers
        finite = finite and _are_finite(p.tensor.grad for p in moved)
        device = parameters[0].local.device if parameters else torch.device("cpu")
        if not all_finite(finite, linked, device):
            return None
    gradients = {}
    for parameter, status, lacks in zip(parameters, agreed, missing):
        if status == _NONE:
            continue
        gradient = _gradient_of(parameter)
        local = torch.zeros_like(parameter.local) if gradient is None else local_tensor(gradient)
        local = local.wait() if isinstance(local, AsyncCollectiveTensor) else local
        if lacks and parameter.place.mesh is not None:
            local = _of_replicas(parameter, local, gradient is not None)
        gradients[parameter.number] = local
    return gradients


def _of_replicas(parameter: MatrixParameter, local: torch.Tensor, is_there: bool) -> torch.Tensor:
    """The part that the first replica with a gradient has; zeros if none has one."""
    mesh = parameter.place.mesh
    assert mesh is not None
    axes = replica_axes(parameter.place.placements, tuple(mesh.shape))
    if not axes:
        return local
    group = axis_group(mesh, axes)
    flag = torch.tensor([is_there], dtype=torch.uint8, device=local.device)
    having = all_gather_v(flag, [1] * group.size, group.group, requester="missing gradients").wait().tolist()
    if not any(having):
        return local
    sizes = [local.numel() if index == having.index(1) else 0 for index in range(group.size)]
    own = local.reshape(-1)[: sizes[group.index]]
    return all_gather_v(own, sizes, group.group, requester="missing gradients").wait().view(local.shape)


def _gradient_of(parameter: MatrixParameter) -> torch.Tensor | None:
    """One that was left when the parameter was frozen does not count."""
    return parameter.tensor.grad if parameter.tensor.requires_grad else None


def _status(parameter: MatrixParameter) -> tuple[int, str]:
    """(what this rank has, what is wrong with it)"""
    gradient, tensor = _gradient_of(parameter), parameter.tensor
    if gradient is None:
        return _NONE, ""
    if gradient.layout != torch.strided or gradient.is_complex():
        return _UNUSABLE, f"its gradient is {gradient.layout} {gradient.dtype}; expected a dense real tensor"
    if gradient.shape != tensor.shape or isinstance(gradient, DTensor) != isinstance(tensor, DTensor):
        return _UNUSABLE, (
            f"its gradient is {kind_of(gradient)} of shape {tuple(gradient.shape)}; expected a "
            f"{'DTensor' if isinstance(tensor, DTensor) else 'plain tensor'} of the parameter's shape"
        )
    if not isinstance(gradient, DTensor):
        return _LIKE_PARAMETER, ""
    spec = spec_of(gradient)
    if spec.mesh != parameter.place.mesh:
        return _UNUSABLE, f"its gradient is on {spec.mesh}, and the parameter on {parameter.place.mesh}"
    return (_LIKE_PARAMETER if tuple(spec.placements) == parameter.place.placements else _ELSEWHERE), ""


def _compared(
    parameters: Sequence[MatrixParameter],
    statuses: Sequence[int],
    finite: bool,
    linked: tuple[int, ...] | None,
    compare: Collection[frozenset[int]],
    beats: StepBeats,
) -> tuple[list[int], list[bool], bool, bool]:
    """(the highest status on any rank, whether some rank has no gradient, whether all gradients are finite on ``linked``,
    whether that has been found out: it is where parameters are on these very ranks).

    On all sets of ranks that parameters are on, with ``linked``; otherwise on parts of ``compare``."""
    agreed, missing = list(statuses), [status == _NONE for status in statuses]
    together: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, parameter in enumerate(parameters):
        everywhere = linked is not None or any(each.issuperset(parameter.ranks) for each in compare)
        if len(parameter.ranks) > 1 and everywhere:
            together[tuple(sorted(parameter.ranks))].append(index)
    pending = []
    with without_modes():
        for ranks, indices in sorted(together.items()):
            members = [parameters[i] for i in indices]
            trained = [parameter.tensor.requires_grad for parameter in members]
            highest = [statuses[i] + 1 if each else 0 for i, each in zip(indices, trained)]
            lacking = [int(missing[i]) if each else 2 for i, each in zip(indices, trained)]
            device = members[0].local.device
            is_asked = linked is not None or device.type == "cpu" or not {*highest} <= {0, _LIKE_PARAMETER + 1}
            is_asked = is_asked or any(_has_replicas(parameter) for parameter in members)
            numbers = [parameter.number for parameter in members]
            is_asked = beats.has_changed(ranks, [*zip(numbers, trained)]) or is_asked  # maybe on this rank only
            message = bytearray([*highest, *lacking, int(not finite)])
            check = functools.partial(_check_answer, members) if not is_asked else _accept
            beat = beats.send(ranks, message, device, check)
            if is_asked:
                pending.append((indices, members, beat))
        answers = [(indices, members, beat.answer()) for indices, members, beat in pending]
    for indices, _, (*flags, is_infinite) in answers:
        for index, status, lacks in zip(indices, flags, flags[len(indices) :]):
            agreed[index], missing[index] = max(status - 1, _NONE), bool(lacks)
        finite = finite and not is_infinite
    _check_frozen([each for _, members, flags in answers for each in _frozen_somewhere(members, flags)])
    return agreed, missing, finite, linked in together


def _has_replicas(parameter: MatrixParameter) -> bool:
    mesh = parameter.place.mesh
    return mesh is not None and bool(replica_axes(parameter.place.placements, tuple(mesh.shape)))


def _frozen_somewhere(members: Sequence[MatrixParameter], flags: Sequence[int]) -> list[str]:
    return [p.name for p, status, lacks in zip(members, flags, flags[len(members) :]) if status and lacks == 2]


def _check_frozen(names: Sequence[str]) -> None:
    if names:
        raise OptimizerError(
            f"parameter {names[0]!r} is frozen (requires_grad=False) on some ranks and trained on others"
            + (f", and so are {len(names) - 1} more" if len(names) > 1 else "")
            + "; set requires_grad in the same way on every rank"
        )


def _accept(flags: Sequence[int]) -> None: ...


def _check_answer(members: Sequence[MatrixParameter], flags: Sequence[int]) -> None:
    """Of a step that this rank has taken without it."""
    _check_frozen(_frozen_somewhere(members, flags))
    unusable = [p.name for p, status in zip(members, flags) if status - 1 == _UNUSABLE]
    if unusable:
        raise OptimizerError(
            f"parameter {unusable[0]!r}: another rank reports that its gradient cannot be used; see its error"
        )


def _are_finite(gradients: Iterable[torch.Tensor | None]) -> bool:
    found: list[torch.Tensor] = []
    for gradient in gradients:
        if gradient is not None and gradient.layout == torch.strided:
            local = own_part(gradient)
            values = local.wait() if isinstance(local, AsyncCollectiveTensor) else local
            found.append(torch.isfinite(values).all())
    return not found or bool(torch.stack([flag.to(found[0].device) for flag in found]).all())


def _place_like_parameters(parameters: Sequence[MatrixParameter]) -> None:
    """Completes pending sums and moves parts; ``grad`` is then what was computed."""
    gradients = [parameter.tensor.grad for parameter in parameters]
    for parameter, gradient in zip(parameters, reduce_pending([g for g in gradients if g is not None])):
        assert isinstance(gradient, DTensor)
        parameter.tensor.grad = gradient.redistribute(placements=parameter.place.placements)


# Refuses to capture a step whose numbers the host computes: replays of the graph would repeat those of the first.


def check_no_capture(what: str, fix: str) -> None:
    """Raises ValueError while the current stream is captured. ``what`` the host computes, and the edit."""
    if is_capturing():
        raise OptimizerError(
            f"a step is being captured in a graph, but the host computes {what}: every replay would repeat it; {fix}"
        )

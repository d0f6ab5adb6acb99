"""Local regions: a module whose forward runs on plain local tensors; experts among them."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.comm import AxisGroup, all_gather_v, all_to_all_v, axis_group, note_locals, requested_by
from vescale.compat import (
    local_of,
    map_tensors,
    no_torch_function,
    note,
    set_versions,
    tensors_in,
    versions,
    with_default_device,
    without_modes,
)
from vescale.errors import BoundaryError
from vescale.ir import Instruction, Local
from vescale.ops import convert, enter_local, leave_local
from vescale.placements import local_region, shard_dim, without_partials
from vescale.plans import PlanError
from vescale.runtime._input_checks import draws_of_this_rank
from vescale.runtime._op_saving import GeneratorStates
from vescale.runtime._runtime import Runtime


class LocalRegion:
    """Runs a module's forward on local tensors: its inputs, its parameters, and everything inside.

    ==============  ==============================================  ===================================================
    tensor          value                                           gradient
    ==============  ==============================================  ===================================================
    input           redistributed to ``inputs``; its local tensor   sharded as the input; Partial on an axis where the
                                                                    input is Replicate and the work differs by rank
    parameter       its local tensor                                the same
    output          with placements ``outputs``, by default         redistributed to ``outputs`` (Replicate for Partial)
                    Replicate
    ==============  ==============================================  ===================================================

    The work differs by rank along an axis when an input, a parameter or an output is not Replicate there. What the module
    writes to an input in place reaches the caller's tensor when it ends.
    """

    def __init__(self, runtime: Runtime, module: nn.Module, path: str, instruction: Instruction) -> None:
        op = instruction.op
        assert isinstance(op, Local)
        self.runtime, self.module, self.path = runtime, module, path
        self.inputs, self.outputs = op.inputs, tuple(Replicate() if p is None else p for p in op.outputs)
        self._forward = module.forward
        module.forward = self.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with no_torch_function():
            requester = f"local region {self.path}"
            given: list[tuple[DTensor, DTensor]] = []

            def converted(x: torch.Tensor) -> torch.Tensor:
                if isinstance(x, DTensor):
                    given.append((x, convert(x, self.inputs, requester=requester)))
                    return given[-1][1]
                return x

            args, kwargs = map_tensors(converted, [args, kwargs])
            found: list[DTensor] = [p for p in self.module.parameters() if isinstance(p, DTensor)]
            found += [x for x in tensors_in([args, kwargs]) if isinstance(x, DTensor)]
            differs = [
                not self.outputs[axis].is_replicate() or any(not x.placements[axis].is_replicate() for x in found)
                for axis in range(self.runtime.mesh.ndim)
            ]

            def entered(x: torch.Tensor) -> torch.Tensor:
                return enter_local(x, _gradient(x.placements, differs)) if isinstance(x, DTensor) else x

            inputs: list[torch.Tensor] = []

            def entered_input(x: torch.Tensor) -> torch.Tensor:
                if isinstance(x, DTensor):
                    inputs.append(entered(x))
                    return inputs[-1]
                return x

            args, kwargs = map_tensors(entered_input, [args, kwargs])
            before = [versions(x) for x in inputs]
            with local_state(self.module, lambda _, x: entered(x)), with_default_device():
                result = self._forward(*args, **kwargs)
            for (x, placed), local, version in zip(given, inputs, before, strict=True):
                if versions(local) != version:
                    write_back_local(x, placed, local, f"{requester}: written back")
            placed_inputs = [placed for _, placed in given]
            return map_tensors(lambda x: self._leave(x, placed_inputs), result)

    def _leave(self, x: torch.Tensor, inputs: Sequence[DTensor]) -> torch.Tensor:
        if isinstance(x, DTensor):
            return x
        shape = [self._size(x, dim, inputs) for dim in range(x.ndim)]
        return leave_local(x, self.runtime.mesh, self.outputs, shape, f"local region {self.path}")

    def _size(self, x: torch.Tensor, dim: int, inputs: Sequence[DTensor]) -> int:
        """Of a dim of the whole output. Parts are as large as each other, unless ranks have parts of different sizes of an
        input: then the output's dim is one of the input's.

        Raises BoundaryError if no input says how large the whole is.
        """
        axes = _axes_of(self.outputs, dim, x.ndim)
        num_ranks = math.prod(self.runtime.mesh.size(axis) for axis in axes)
        cut = [
            (local_of(each).shape[other], each.shape[other])
            for each in inputs
            for other in range(each.ndim)
            if _axes_of(each.placements, other, each.ndim) == axes
        ]
        if not axes or all(size % num_ranks == 0 for _, size in cut):
            return x.shape[dim] * num_ranks
        found = {size for local, size in cut if local == x.shape[dim]}
        if len(found) != 1:
            raise BoundaryError(
                f"the local region {self.path!r} returns size {x.shape[dim]} on dim {dim} of an output of shape "
                f"{tuple(x.shape)} on this rank, but ranks have different parts of inputs of "
                f"{sorted({size for _, size in cut})} in all, so that the global size is not known. Keep a dim of an "
                f"input in the output unchanged, pad the input to a multiple of {num_ranks}, or make the region "
                "smaller"
            )
        return found.pop()


def write_back_local(x: DTensor, placed: DTensor, local: torch.Tensor, requester: str) -> None:
    """A region has written to ``local``, of ``placed``, which ``x`` was converted to: bring the values to ``x``."""
    new = leave_local(local, placed.device_mesh, placed.placements, placed.shape, requester)
    version = versions(local)
    with torch.inference_mode() if x.is_inference() else contextlib.nullcontext():
        x.copy_(convert(new, x.placements, requester=requester))
    if versions(local) != version:  # it is the local tensor of x, and the module's write has counted already
        set_versions((local,), version)


@contextmanager
def local_state(module: nn.Module, entered: Callable[[str, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Hide every parameter and buffer of a module and its submodules behind ``entered(name, tensor)``. What runs inside
    computes with local tensors."""
    note_locals()
    with ExitStack() as undo:
        for path, owner in module.named_modules():
            for name, resting in (*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)):
                hidden = owner.__dict__.get(name)  # a parameter shown with another placement than the one at rest
                full_name = f"{path}.{name}" if path else name
                owner.__dict__[name] = entered(full_name, resting if hidden is None else hidden)
                if hidden is None:
                    undo.callback(owner.__dict__.pop, name)
                else:
                    undo.callback(owner.__dict__.__setitem__, name, hidden)
        yield


def _axes_of(placements: Sequence[Placement], dim: int, ndim: int) -> tuple[int, ...]:
    """The mesh axes that cut a dim."""
    return tuple(
        axis
        for axis, placement in enumerate(placements)
        if (cut := shard_dim(placement)) is not None and cut % ndim == dim
    )


def _gradient(placements: Sequence[Placement], differs: Sequence[bool]) -> tuple[Placement, ...]:
    return tuple(
        Partial() if placement.is_replicate() and apart else placement
        for placement, apart in zip(without_partials(placements), differs)
    )


# Expert regions: the experts of a mixture, a module whose forward takes ``(tokens, expert ids, weights)``.
#
# The role of each mesh axis follows from the placements of the experts' parameters while they run
# (:class:`vescale.ir.ExpertCut`):
#
# ==========  ============  ================================================  ===============================================
# axis        parameters    tokens, ids, weights                              result
# ==========  ============  ================================================  ===============================================
# experts     ``Shard(0)``  ``mask``: every rank has all tokens and           Partial if the tokens are Replicate; if they
#                           computes those of its experts                     are sharded, they are gathered first, and the
#                                                                             result is summed and sharded as they were
# experts     ``Shard(0)``  ``all_to_all``: each token is sent to the ranks   the same; if the tokens are Replicate, each
#                           of its experts, and the result back               rank sends, and adds, its share of them
# features    later dims    every rank has all tokens                         as with ``mask``
# data        Replicate     unchanged                                         as the tokens
# ==========  ============  ================================================  ===============================================
#
# If the result is Partial, the gradient of the weights is summed here, and that of the tokens stays Partial, as it does
# before any column-sharded weight: the ``<in>`` entry of this module, or of one around it, reduces the sum over all of
# their uses. Gradients of parameters are Partial on axes that shard the tokens. Every rank computes all of these
# gradients, zeros if no token was routed to it, so that all ranks take part in each reduction and exchange.
#
# A module that writes to its tokens, ids or weights in place writes to its caller's tensors on one device. Where experts or
# their features are spread over ranks it would write to copies, or a part of a sum, and raises PlanError instead. Elsewhere
# the caller's tensors get the new values.


# Which attributes of a module of experts hold the number of its experts. On a rank with some of the experts, ``for e in
# range(self.num_experts)`` has to run over these, and ``/ self.width`` stays as it is, also where both are 4. No name
# tells them apart; what the module computes does.


def find_counts(
    module: nn.Module, path: str, number: int, count: int, stacked: Collection[str], run: Callable[[int], torch.Tensor]
) -> tuple[str, ...]:
    """The attributes of the module that have to be ``count``, for it to compute with ``count`` experts what it computes with
    these among all ``number``.

    The module is tried on weights that tell experts apart: with all experts, then with ``count`` of them and each choice of
    the attributes that hold ``number``, few first. It has to run on local tensors; random numbers and buffers are the
    caller's to restore. Communication: none.

    Args:
        stacked: parameters and buffers that have one entry an expert in dim 0.
        run: runs the module on one row for each of the first experts, so many as it gets.

    Raises:
        BoundaryError: no choice does.
    """
    candidates = [name for name, value in vars(module).items() if type(value) is int and value == number]
    if not candidates or count == number:
        return ()

    def found(num_experts: int, names: Sequence[str]) -> torch.Tensor:
        def entered(name: str, x: torch.Tensor) -> torch.Tensor:
            return _distinct(x, number)[:num_experts] if name in stacked else x

        with local_state(module, entered), counted(module, names, count):
            return run(count)

    wanted, cause = found(number, ()), None
    for size in range(len(candidates) + 1):
        for names in itertools.combinations(candidates, size):
            try:
                here = found(count, names)
            except Exception as error:  # of a wrong choice, as an index behind the last expert
                cause = error
                continue
            if here.shape == wanted.shape and torch.allclose(
                here.float(), wanted.float(), rtol=1e-2, atol=1e-6, equal_nan=True
            ):
                return names
    raise BoundaryError(
        f"the experts {path!r} compute other results with {count} of their {number} experts, whether attributes with "
        f"the value {number} ({', '.join(candidates)}) are changed accordingly or not. Read the number of experts "
        "from a weight (self.weight.shape[0]) in the module's forward"
    ) from cause


def _distinct(x: torch.Tensor, num_experts: int) -> torch.Tensor:
    """A tensor like ``x`` for so many experts, each with a value of its own, small enough for sums over features."""
    values = torch.arange(1, num_experts + 1, device=x.device, dtype=torch.float32) / (
        num_experts * max(x.shape[-1], 1)
    )
    return values.view(-1, *[1] * (x.ndim - 1)).expand(num_experts, *x.shape[1:]).to(x.dtype).contiguous()


@contextmanager
def counted(module: nn.Module, names: Sequence[str], count: int) -> Iterator[None]:
    """Inside, these attributes are ``count``."""
    before = {name: getattr(module, name) for name in names}
    note("runtime._local_region:instance", module)
    for name in names:
        setattr(module, name, count)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


# Rows of tokens to the ranks that have their experts, and back: an uneven all-to-all each way, with gradients.
#
# A token goes once to every rank that has one of its experts, and to no other; what a rank's experts make of it comes
# back as one row. There is no capacity: whatever is routed is moved, and nothing else.
#
# =============  ===================================================  =====================================================
# function       forward                                              gradient
# =============  ===================================================  =====================================================
# ``plan``       an all-gather of how many rows each rank sends to
#                each other: ``n`` integers a rank
# ``dispatch``   rows of several tensors in one all-to-all            those of floating-point ones, in one all-to-all back
# ``combine``    one all-to-all back                                  one all-to-all
# =============  ===================================================  =====================================================
#
# Every rank of the group calls each of them, also with no row to send or to receive.


@dataclass(frozen=True)
class TokenExchange:
    """Which rows this rank sends to the others, and how many it receives from them.

    Attributes:
        group: the ranks.
        rows: which of this rank's rows go out, those for the first rank first; a row may occur once for each rank.
        send: how many rows go to each rank.
        receive: how many rows come from each.
        requester: for the ledger.
    """

    group: AxisGroup
    rows: torch.Tensor
    send: tuple[int, ...]
    receive: tuple[int, ...]
    requester: str

    @classmethod
    def plan(cls, goes: torch.Tensor, group: AxisGroup, requester: str) -> TokenExchange:
        """``goes``, of shape (ranks, rows): whether a row goes to a rank."""
        counts = goes.sum(dim=1, dtype=torch.int32)
        with requested_by(f"{requester}: counts"):
            every = all_gather_v(counts, [group.size] * group.size, group.group).wait().view(group.size, group.size)
        # One wait for the device: what follows needs sizes.
        send, receive = torch.stack((counts, every[:, group.index])).tolist()
        return cls(group, goes.nonzero(as_tuple=True)[1], tuple(send), tuple(receive), requester)

    def dispatch(self, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The rows of each tensor (rows, columns) that come here, in the order of the ranks."""
        return self._exchanged("dispatch", self.send, self.receive, *(part[self.rows] for part in parts))

    def combine(self, part: torch.Tensor, num_rows: int) -> torch.Tensor:
        """The sum, for each of this rank's ``num_rows`` rows, of what came back for it; zero for a row that went nowhere."""
        (back,) = self._exchanged("combine", self.receive, self.send, part)
        return back.new_zeros(num_rows, back.shape[-1]).index_add(0, self.rows, back)

    def _exchanged(
        self, what: str, send: tuple[int, ...], receive: tuple[int, ...], *parts: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        found: tuple[torch.Tensor, ...] = _Exchange.apply(
            self.group, send, receive, f"{self.requester}: {what}", *parts
        )
        return found


class _Exchange(torch.autograd.Function):
    """Consecutive rows of each part to the ranks; its gradient is the exchange the other way."""

    @staticmethod
    def forward(
        ctx: Any,
        group: AxisGroup,
        send: tuple[int, ...],
        receive: tuple[int, ...],
        requester: str,
        *parts: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.send, ctx.receive, ctx.requester = group, send, receive, requester
        found = _moved(parts, send, receive, group, requester)
        ctx.mark_non_differentiable(*(x for x in found if not x.is_floating_point()))
        return found

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        needed = [n for n, needs in enumerate(ctx.needs_input_grad[4:]) if needs]
        found: list[torch.Tensor | None] = [None] * len(grads)
        requester = f"{ctx.requester}: gradient"
        for n, part in zip(
            needed, _Exchange.apply(ctx.group, ctx.receive, ctx.send, requester, *(grads[n] for n in needed))
        ):
            found[n] = part
        return None, None, None, None, *found


def _moved(
    parts: Sequence[torch.Tensor], send: Sequence[int], receive: Sequence[int], group: AxisGroup, requester: str
) -> tuple[torch.Tensor, ...]:
    """All parts in one message: the bytes of their rows side by side."""
    pieces = [part.contiguous().view(torch.uint8) for part in parts]
    packed = torch.cat(pieces, dim=1) if len(pieces) > 1 else pieces[0]
    width = packed.shape[1]
    with requested_by(requester):
        flat = all_to_all_v(
            packed.view(-1), [n * width for n in send], [n * width for n in receive], group.group
        ).wait()
    rows = flat.view(sum(receive), width)
    widths = [part.shape[1] * part.element_size() for part in parts]
    return tuple(
        piece.contiguous().view(part.dtype) for part, piece in zip(parts, rows.split(widths, dim=1), strict=True)
    )


class _Routing(NamedTuple):
    """One of each for tokens, expert ids and weights: names of arguments, or tensors."""

    tokens: Any
    ids: Any
    weights: Any


class ExpertRegion:
    """Runs a module of experts on local tensors; see the module's table.

    The forward is the model's own, with any implementation (a loop, grouped or batched matmuls). On an axis of experts it is
    called with the routed pairs of this rank's experts, one expert each, with ids counted from this rank's first expert and
    attributes that hold the number of experts set to the local one (:mod:`vescale.runtime._local_region`).

    Communication, over all axes of experts together: with ``mask`` an all-gather of the tokens, if they are sharded; with
    ``all_to_all`` one exchange of tokens and one of results, the same for their gradients, and an all-gather of the numbers
    of rows (:class:`vescale.runtime._local_region.TokenExchange`).

    Raises:
        PlanError: at the first call, if experts are sharded and the forward does not take tokens, ids and weights; on every
            rank, before any communication. If the forward writes to one of its inputs (see the module's description); on
            every rank, unless the values decide whether it does.
    """

    def __init__(self, runtime: Runtime, module: nn.Module, path: str, instruction: Instruction) -> None:
        op = instruction.op
        assert isinstance(op, Local)
        self.runtime, self.module, self.path, self.source, self.op = runtime, module, path, instruction.source, op
        self._requester = f"experts {path}"
        names, mesh = runtime.axes.names, runtime.mesh
        self._expert_axes = tuple(axis for axis, name in enumerate(names) if name in op.experts and mesh.size(axis) > 1)
        self._feature_axes = tuple(axis for axis, name in enumerate(names) if name in op.features)
        self._forward = module.forward
        self._signature = inspect.signature(module.forward)
        self._stacked: set[str] = set()  # names of what has one entry an expert
        self._counts: tuple[str, ...] | None = None  # attributes with the number of experts
        self._results: dict[Any, tuple[int, torch.dtype]] = {}  # features and dtype, by what they depend on
        module.forward = self.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        call = self._signature.bind(*args, **kwargs)
        with no_torch_function():
            callers = _named_tensors(call)
            for name, value in call.arguments.items():
                call.arguments[name] = map_tensors(lambda x: self._placed(x, self.op.inputs), value)
            names = self._routing(call) if self._expert_axes else None
            tokens = call.arguments[names.tokens] if names else _first(call)
            arriving = tuple(self._arriving(axis, p, tokens.ndim) for axis, p in enumerate(tokens.placements))
            leaving = tuple(self._leaving(axis, p) for axis, p in enumerate(arriving))
            for name, value in call.arguments.items():
                call.arguments[name] = map_tensors(lambda x: self._arrived(x, tokens, arriving), value)
            arrived = [x for _, x in _named_tensors(call)]
            for name, value in call.arguments.items():
                call.arguments[name] = map_tensors(lambda x: _entered(x, leaving), value)
            given = [x for _, x in _named_tensors(call)]
            before = [versions(x) for x in given]

            def entered(name: str, x: torch.Tensor) -> torch.Tensor:
                return self._entered_state(name, x, arriving) if isinstance(x, DTensor) else x

            with local_state(self.module, entered), with_default_device():
                if names is None:
                    result = self._forward(*call.args, **call.kwargs)
                    for (name, x), placed, local, version in zip(callers, arrived, given, before, strict=True):
                        if versions(local) != version:
                            self._follow_write(name, x, placed, local)
                else:
                    compute = self._exchanged if self.op.dispatch == "all_to_all" else self._routed
                    result = compute(call, names, _Routing(*(call.arguments[name] for name in names)), arriving)
                result = _joined(result, (*given, *_shown(self.module)))
            shape = (*tokens.shape[:-1], result.shape[-1])
            whole = leave_local(result, self.runtime.mesh, leaving, shape, self._requester)
            gathered = [own != now and _cuts_tokens(own, tokens.ndim) for own, now in zip(tokens.placements, arriving)]
            back = [own if was_gathered else None for own, was_gathered in zip(tokens.placements, gathered)]
            return self._placed(self._placed(whole, back), self.op.outputs)

    # Borders

    def _placed(self, x: torch.Tensor, stage: Sequence[Placement | None]) -> torch.Tensor:
        """``x`` with the placements of ``stage``; None keeps a placement."""
        if not isinstance(x, DTensor) or all(placement is None for placement in stage):
            return x
        return convert(x, stage, requester=self._requester)

    def _arriving(self, axis: int, placement: Placement, ndim: int) -> Placement:
        """The placement on an axis with which the region computes on tokens, ids and weights."""
        if not _cuts_tokens(placement, ndim) or axis in self._feature_axes:
            return Replicate()
        return Replicate() if axis in self._expert_axes and self.op.dispatch != "all_to_all" else placement

    def _leaving(self, axis: int, arriving: Placement) -> Placement:
        is_summed = axis in (*self._expert_axes, *self._feature_axes) and arriving.is_replicate()
        return Partial() if is_summed else arriving

    def _arrived(self, x: torch.Tensor, tokens: DTensor, arriving: Sequence[Placement]) -> torch.Tensor:
        if not isinstance(x, DTensor) or (x is tokens and tuple(x.placements) == tuple(arriving)):
            return x
        return convert(x, arriving, requester=self._requester)

    def _follow_write(self, name: str, x: torch.Tensor, placed: torch.Tensor, local: torch.Tensor) -> None:
        """The module has written to ``local``, of ``placed``, which the caller's tensor ``x`` was converted to."""
        if any(self.runtime.mesh.size(axis) > 1 for axis in self._feature_axes):
            raise self._refused_write(name)
        if isinstance(x, DTensor) and isinstance(placed, DTensor):
            write_back_local(x, placed, local, f"{self._requester}: written back")

    def _refused_write(self, name: str) -> PlanError:
        return BoundaryError(
            f"the experts {self.path!r} write to their input {name!r} in place. On one device this changes the "
            "caller's tensor; here, each rank computes with some experts or features only, and would write other "
            f"values. Write to a copy in the module ({name} = {name}.clone())",
            self.source,
        )

    def _entered_state(self, name: str, x: DTensor, arriving: Sequence[Placement]) -> torch.Tensor:
        """This rank's part of a parameter. Its gradient: each rank adds that of its own tokens.

        A bias behind the sum over features is zero on all ranks but the first. Its gradient is that of the sum, which
        every one of them has.
        """
        gradient = tuple(
            Partial() if own.is_replicate() and not of_tokens.is_replicate() else own
            for own, of_tokens in zip(x.placements, arriving)
        )
        local = enter_local(x, gradient, always=True)
        if any(shard_dim(x.placements[axis]) == 0 for axis in self._expert_axes):
            self._stacked.add(name)
        if name not in self.op.biases:
            return local
        coordinate = self.runtime.mesh.get_coordinate() or ()
        first = all(coordinate[axis] == 0 for axis in self._feature_axes if x.placements[axis].is_replicate())
        return local if first else _ZeroedBias.apply(local)

    # Routing

    def _routing(self, call: inspect.BoundArguments) -> _Routing:
        """The names of the tokens, of the ids (integers) and of the weights (of the shape of the ids)."""
        found = {name: value for name, value in call.arguments.items() if isinstance(value, torch.Tensor)}
        ids = [
            name for name, x in found.items() if not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
        ]
        if len(found) == 3 and len(ids) == 1:
            first, second = (name for name in found if name not in ids)
            shape = found[ids[0]].shape
            tokens, weights = (second, first) if found[second].shape != shape else (first, second)
            if found[weights].shape == shape and found[tokens].shape[:-1] == shape[:-1] and len(shape) > 1:
                return _Routing(tokens, ids[0], weights)
        raise BoundaryError(
            f"the expert region {self.path!r} gets "
            f"{', '.join(f'{name} {tuple(x.shape)} {x.dtype}' for name, x in found.items())}; experts that are "
            "distributed over ranks need tokens (..., features), expert ids (..., choices) and weights (..., "
            "choices): name the module inside it that takes them, or shard the experts' features instead",
            self.source,
        )

    def _exchanged(
        self, call: inspect.BoundArguments, names: _Routing, given: _Routing, arriving: Sequence[Placement]
    ) -> torch.Tensor:
        """Send each token to the ranks of its experts, run them there, and add up the results."""
        flat = _Routing(*(x.reshape(-1, x.shape[-1]) for x in given))
        group = axis_group(self.runtime.mesh, self._expert_axes)
        owner = self._owners(group.coordinates, flat.ids.device)[flat.ids]
        goes = (owner == torch.arange(group.size, device=owner.device)[:, None, None]).any(dim=-1)
        share, num_shares = self._share(arriving)
        if num_shares > 1:  # other ranks have the same tokens, and send the rest of them
            num_rows = len(flat.tokens)
            goes &= torch.arange(num_rows, device=owner.device) * num_shares // max(num_rows, 1) == share
        exchange = TokenExchange.plan(goes, group, self._requester)
        tokens, ids, weights = exchange.dispatch(flat.tokens, flat.ids.int(), flat.weights)
        leading = (1,) * (given.tokens.ndim - 2)
        here = _Routing(*(x.view(*leading, *x.shape) for x in (tokens, ids.to(given.ids.dtype), weights)))
        found = _joined(self._routed(call, names, here, arriving), (tokens, weights, *_shown(self.module)))
        back = exchange.combine(found.reshape(-1, found.shape[-1]), len(flat.tokens))
        return back.view(*given.tokens.shape[:-1], back.shape[-1])

    def _routed(
        self, call: inspect.BoundArguments, names: _Routing, given: _Routing, arriving: Sequence[Placement]
    ) -> torch.Tensor:
        """Run the pairs of this rank's experts and add them up by token; zero for tokens without one."""
        flat = _Routing(*(x.reshape(-1, x.shape[-1]) for x in given))
        first, last = self._own_experts(self.runtime.mesh.get_coordinate() or ())
        rows, slots = ((flat.ids >= first) & (flat.ids < last)).nonzero(as_tuple=True)
        device = flat.tokens.device.type
        kind = (
            flat.tokens.dtype,
            flat.weights.dtype,
            torch.is_autocast_enabled(device),
            torch.get_autocast_dtype(device),
        )

        def run(*pairs: torch.Tensor) -> torch.Tensor:
            leading = (1,) * (given.tokens.ndim - 2)
            arguments = {**call.arguments, **{n: x.view(*leading, *x.shape) for n, x in zip(names, pairs)}}
            local = inspect.BoundArguments(self._signature, arguments)
            before = [versions(x) for x in pairs]
            with counted(self.module, self._counts or (), last - first):
                found: torch.Tensor = self._forward(*local.args, **local.kwargs)
            for name, x, version in zip(names, pairs, before, strict=True):
                if versions(x) != version:
                    raise self._refused_write(name)
            return found.reshape(-1, found.shape[-1])

        def run_each(count: int) -> torch.Tensor:
            rows = torch.linspace(0.5, 1.5, count, device=flat.tokens.device, dtype=torch.float32)[:, None]
            tokens = rows.expand(count, flat.tokens.shape[-1]).to(flat.tokens.dtype).contiguous()
            return run(
                tokens, torch.arange(count, device=tokens.device)[:, None].to(flat.ids), flat.weights.new_ones(count, 1)
            )

        if self._counts is None:
            with self._without_traces(), without_modes(), torch.inference_mode(False), torch.no_grad():
                number, count = self.op.num_experts, max(last - first, 1)
                self._counts = find_counts(self.module, self.path, number, count, self._stacked, run_each)
        if kind not in self._results:  # also on ranks with rows, so that all of them find writes
            # Without modes: a checkpointed forward counts ops, and its recomputation does not come here.
            with self._without_traces(), without_modes(), torch.inference_mode(False), torch.no_grad():
                row = run(*(x.new_zeros(1, n) for x, n in zip(flat, (flat.tokens.shape[-1], 1, 1))))
            self._results[kind] = row.shape[-1], row.dtype
        if len(rows):
            with draws_of_this_rank(self.runtime):
                found = run(
                    flat.tokens[rows], (flat.ids[rows, slots] - first)[:, None], flat.weights[rows, slots][:, None]
                )
            out = found.new_zeros(len(flat.tokens), found.shape[-1]).index_add(0, rows, found)
        else:
            width, dtype = self._results[kind]
            out = flat.tokens.new_zeros(len(flat.tokens), width, dtype=dtype)
        return out.view(*given.tokens.shape[:-1], out.shape[-1])

    @contextmanager
    def _without_traces(self) -> Iterator[None]:
        """Inside, the module runs on copies of its buffers; afterwards these and the random generators are as before."""
        registered = [
            (owner, dict(owner._buffers)) for owner in self.module.modules()
        ]  # `self.count += 1` registers anew
        buffers = {name for name, _ in self.module.named_buffers()}
        states = GeneratorStates(self.runtime.mesh.device_type)
        with local_state(self.module, lambda name, x: x.clone() if name in buffers else x):
            try:
                yield
            finally:
                states.restore()
                for owner, before in registered:
                    owner._buffers.update(before)

    # Owners of experts and tokens

    def _own_experts(self, coordinate: Sequence[int]) -> tuple[int, int]:
        """(first, last + 1) of the experts of the rank at a coordinate."""
        stage = tuple(Shard(0) if axis in self._expert_axes else Replicate() for axis in range(len(coordinate)))
        region = local_region((self.op.num_experts,), stage, tuple(self.runtime.mesh.shape), tuple(coordinate))
        return region.intervals[0][0] if region.intervals[0] else (0, 0)

    def _owners(self, coordinates: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
        """The group rank of each expert; -1 for the ids ``num_experts`` and -1, which mask a choice."""
        owners = [-1] * (self.op.num_experts + 1)
        for rank, coordinate in enumerate(coordinates):
            first, last = self._own_experts(coordinate)
            owners[first:last] = [rank] * (last - first)
        return torch.tensor(owners, device=device)

    def _share(self, arriving: Sequence[Placement]) -> tuple[int, int]:
        """(index, count): this rank's share of the tokens that ``count`` ranks of the group have."""
        mesh, axes = self.runtime.mesh, [axis for axis in self._expert_axes if arriving[axis].is_replicate()]
        share, coordinate = 0, mesh.get_coordinate() or ()
        for axis in axes:
            share = share * mesh.size(axis) + coordinate[axis]
        return share, math.prod(mesh.size(axis) for axis in axes)


def _entered(x: torch.Tensor, leaving: Sequence[Placement]) -> torch.Tensor:
    return enter_local(x, leaving, always=True) if isinstance(x, DTensor) else x


def _named_tensors(call: inspect.BoundArguments) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a call, each with the name of the argument that holds it."""
    return [(name, x) for name, value in call.arguments.items() for x in tensors_in([value])]


def _first(call: inspect.BoundArguments) -> DTensor:
    return next(x for x in tensors_in(list(call.arguments.values())) if isinstance(x, DTensor))


def _cuts_tokens(placement: Placement, ndim: int) -> bool:
    """Whether a placement shards a dim of tokens, and not their features."""
    dim = shard_dim(placement)
    return dim is not None and dim < ndim - 1


def _shown(module: nn.Module) -> Iterator[torch.Tensor]:
    """The module's parameters as its forward sees them."""
    for owner in module.modules():
        for name, _ in owner.named_parameters(recurse=False):
            yield getattr(owner, name)


def _joined(result: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    joined: torch.Tensor = _Joined.apply(result, *(x for x in others if x.requires_grad))
    return joined


class _Joined(torch.autograd.Function):
    """Identity of the first argument, with the others joined to its graph: they get no gradient through this node, but
    backward runs the nodes that made them."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.num_others = len(others)
        return result.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad, *(None,) * ctx.num_others


class _ZeroedBias(torch.autograd.Function):
    """Zeros for a bias that another rank adds to the common sum; the gradient of the sum is the bias's on every rank."""

    @staticmethod
    def forward(ctx: Any, bias: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad

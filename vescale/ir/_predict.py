"""Which collectives a program causes in one training step, found by walking the model's forward on meta tensors.

Placements are followed through the ops that leave DTensor no choice (:mod:`vescale.ir._placement_flow`), and are unknown
after any other op. Collectives inside of ops (a loss over a sharded vocabulary, redistributions that no entry requests) are
not predicted. No rank is started.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.utils.weak import WeakIdKeyDictionary

from vescale.comm import (
    DEFAULT_BUCKET_BYTES,
    BucketBytes,
    ReductionCost,
    bucket_limits,
    link_of,
    per_axis_bytes,
    plan_buckets,
    reduction_cost,
)
from vescale.ir._attention_calls import AttentionCalls
from vescale.ir._expert_sharding import ExpertCalls
from vescale.ir._model_index import ModelIndex, Running
from vescale.ir._operations import Local, Place, Redistribute, Stage, Wrap
from vescale.ir._placement_flow import (
    BATCH_NORM,
    BATCH_NORM_SIGNATURE,
    AxisPlacement,
    Collective,
    Flow,
    FlowMode,
    Move,
    When,
    cuts_operand,
    is_elementwise,
    move_collectives,
    rule_for,
    sums_gradient_first,
    tensors_of,
)
from vescale.ir._program import Hook, Instruction, Program
from vescale.ir._units import unit_buckets
from vescale.placements import RaggedShard, from_front, shard_dim
from vescale.plans import MeshAxes

# What batch normalizations communicate.

# (forward or backward, op, axes, bytes or None where unknown)
Found = tuple[str, str | None, str, int | None]


@dataclass(frozen=True)
class _BatchNormCall:
    path: str
    placements: tuple[AxisPlacement, ...]
    num_channels: int
    element_bytes: int
    has_gradient: bool

    def collectives(self, axes: MeshAxes) -> Iterator[Found]:
        """Means and deviations of each channel, over the axes that cut the batch, or rows, or columns, together."""
        channels, over = self.num_channels, []
        for axis, placement in zip(axes, self.placements):
            if axes.size(axis) == 1 or isinstance(placement, Replicate):
                continue
            if placement is None or shard_dim(placement) is None:
                yield "forward", None, axis, None
                return
            if placement == Shard(1):
                channels //= axes.size(axis)
            else:
                over.append(axis)
        if not over:
            return
        size, together = math.prod(axes.size(axis) for axis in over), ",".join(over)
        yield "forward", "all_gather", together, (2 * channels + 1) * self.element_bytes * (size - 1)
        if self.has_gradient:
            yield "backward", "all_reduce", together, 2 * (2 * channels * self.element_bytes * (size - 1) // size)


class BatchNormCalls:
    """The calls in training seen so far; those in evaluation communicate nothing."""

    def __init__(self) -> None:
        self._running = Running("")
        self._calls: list[_BatchNormCall] = []

    def watched(self, module: nn.Module, path: str) -> contextlib.AbstractContextManager[None]:
        """While open, calls inside the module are known to be its."""
        return self._running.watched(module, lambda _: path)

    def called(
        self,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        placements_of: Callable[[torch.Tensor], tuple[AxisPlacement, ...]],
    ) -> None:
        """``placements_of(tensor)``: its placement on each axis."""
        if len(args) > len(BATCH_NORM_SIGNATURE.parameters):
            return  # torch.batch_norm, whose result is unknown
        call = BATCH_NORM_SIGNATURE.bind(*args, **kwargs)
        call.apply_defaults()
        x, training = call.arguments["input"], call.arguments["training"]
        if not training:
            return
        size = max(x.element_size(), 4)  # statistics of half precision are float32
        has_gradient = any(
            t is not None and t.requires_grad for t in (x, *(call.arguments[n] for n in ("weight", "bias")))
        )
        self._calls.append(_BatchNormCall(self._running.innermost, placements_of(x), x.shape[1], size, has_gradient))

    def collectives(self, axes: MeshAxes) -> Iterator[tuple[str, Found]]:
        """With the module that called."""
        for call in self._calls:
            yield from ((call.path, found) for found in call.collectives(axes))


# Predicts the buckets in which gradients of parameters are reduced, with the functions that the runtime uses.


@dataclass(frozen=True)
class PartialGradient:
    """A gradient that every rank along ``axes`` has a part of: ``num_bytes`` on each rank.

    ``scatter`` is the one of the axes on which the parameter is sharded at rest, if any.
    """

    name: str
    axes: tuple[str, ...]
    num_bytes: int
    dtype: torch.dtype
    scatter: str | None = None


@dataclass(frozen=True)
class PredictedBucket:
    """Gradients that are reduced together.

    Attributes:
        names: of the parameters, in the order in which their gradients get ready.
        axes: their union is one group.
        num_bytes: of the buffer.
        cost: of the reduction, by the ring model.
        per_axis_bytes: what a rank would send if each axis were reduced by itself.
    """

    names: tuple[str, ...]
    axes: tuple[str, ...]
    num_bytes: int
    cost: ReductionCost
    per_axis_bytes: int
    scatter: str | None = None

    @property
    def collectives(self) -> tuple[tuple[str, str, int], ...]:
        """(op, axes joined with ``,``, bytes) of each."""
        axes = ",".join(self.axes)
        if not self.cost.scatters:
            return (("all_reduce", axes, self.cost.num_bytes),)
        rest = self.cost.rest_bytes
        scattered = ("reduce_scatter", str(self.scatter), self.cost.num_bytes - rest)
        others = ",".join(axis for axis in self.axes if axis != self.scatter)
        return (scattered, ("all_reduce", others, rest)) if others else (scattered,)


def predict_buckets(
    gradients: Sequence[PartialGradient],
    axes: MeshAxes,
    bucket_bytes: BucketBytes = DEFAULT_BUCKET_BYTES,
    device_type: str = "cpu",
) -> tuple[PredictedBucket, ...]:
    """The buckets of ``gradients``, given in the order in which they get ready."""
    link = link_of(device_type)
    num_ranks = [math.prod(axes.size(axis) for axis in gradient.axes) for gradient in gradients]
    limits = bucket_limits(bucket_bytes, max(num_ranks, default=1), link)
    found = []
    for indices in plan_buckets([((g.axes, g.dtype, g.scatter), g.num_bytes) for g in gradients], limits):
        first, num_bytes = gradients[indices[0]], sum(gradients[index].num_bytes for index in indices)
        num_pieces = axes.size(first.scatter) if first.scatter is not None else 1
        cost = reduction_cost(num_bytes, num_ranks[indices[0]], num_pieces, link)
        unfused = per_axis_bytes(num_bytes, [axes.size(axis) for axis in first.axes])
        names = tuple(gradients[index].name for index in indices)
        found.append(PredictedBucket(names, first.axes, num_bytes, cost, unfused, first.scatter))
    return tuple(found)


@dataclass(frozen=True)
class Prediction:
    """What one step communicates.

    Attributes:
        collectives: of boundaries and parameters; gradients are listed for each parameter and axis.
        stopped: why the walk ended before the model's output, when it did; what would follow is missing then.
        buckets: how those gradients are reduced that are known to be sums: several in one collective over all their axes,
            in place of their ``collectives``.
        gradients: that go through buckets, those that are not known to be sums among them: with the runtime's batches cut
            over an axis they are.
    """

    collectives: tuple[Collective, ...]
    stopped: str | None = None
    buckets: tuple[PredictedBucket, ...] = ()
    gradients: tuple[PartialGradient, ...] = ()

    @property
    def unbucketed(self) -> tuple[Collective, ...]:
        """The collectives that are carried out one by one."""
        bucketed = {name for bucket in self.buckets for name in bucket.names}
        return tuple(c for c in self.collectives if f"{c.path}.{c.target}".lstrip(".") not in bucketed)

    def count(self, op: str, axis: str | None = None) -> int:
        return sum(c.op == op and axis in (None, c.axis) for c in self.collectives)


def predict(program: Program, model: nn.Module, inputs: Mapping[str, Any]) -> Prediction:
    """The collectives that boundaries and parameters cause in one forward and backward of ``model(**inputs)``.

    ``model`` and the tensors in ``inputs`` are on the meta device; tensors have their global shapes. The model is left as
    it was.

    Args:
        program: the result of :func:`lower` for the plan and ``model``.
    """
    walk = _Walk(program, ModelIndex(model))
    stopped = None
    with walk.hooks(), FlowMode(walk):
        try:
            model(**inputs)
        except Exception as error:  # whatever a model does on meta tensors: data-dependent code has no shapes there
            stopped = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    buckets = predict_buckets(walk.partial_gradients(), walk.axes)
    return Prediction(tuple(walk.collectives()), stopped, buckets, tuple(walk.partial_gradients(unknown=True)))


@dataclass(frozen=True)
class _Tag:
    """What is known of a tensor on one axis; ``origins`` are the boundaries and parameters its values come from."""

    placement: AxisPlacement
    origins: frozenset[int] = frozenset()


# What the forward of one module has passed on to `<in>` entries: by what must be equal so that one conversion serves all.
_Passed = dict[tuple[object, ...], tuple[torch.Tensor, tuple[_Tag, ...]]]


class _Walk:
    def __init__(self, program: Program, index: ModelIndex) -> None:
        self.program, self.index, self.axes = program, index, program.axes
        self.moves: list[Move] = []
        self.experts, self.attention, self.batch_norms = ExpertCalls(), AttentionCalls(program), BatchNormCalls()
        self.tags: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._passed: Running[_Passed] = Running({})
        self._by_path: dict[str, list[Instruction]] = {}
        for instruction in program:
            self._by_path.setdefault(instruction.path, []).append(instruction)
        self.buckets = unit_buckets(program, index.model)
        self._num_pieces = {name: b.num_ranks for b in self.buckets for name in b.names}
        self._unit_axes = {name: (*b.shard, *b.replicate) for b in self.buckets for name in b.names}
        self._tag_states()

    # Parameters and buffers

    def _tag_states(self) -> None:
        resting: dict[str, Stage] = {}
        running: dict[str, Stage] = {}
        for instruction in self.program:
            prefix = f"{instruction.path}." if instruction.path else ""
            if isinstance(instruction.op, Place):
                resting[self.index.state_names[prefix + instruction.target]] = instruction.op.placements
            elif (
                isinstance(instruction.op, Redistribute)
                and instruction.hook is Hook.FORWARD_PRE
                and instruction.target != "<in>"
            ):
                running[self.index.state_names[prefix + instruction.target]] = instruction.op.dst
        for bucket in self.buckets:
            for name in bucket.names:
                whole = zip(self.axes, resting[name])
                running[name] = tuple(Replicate() if axis in bucket.shard else p for axis, p in whole)
        for name, at_rest in resting.items():
            tensor = _state(self.index, name)
            stage = running.get(name, at_rest)
            tags = []
            for axis, rest, run in zip(self.axes, at_rest, stage):
                num_bytes = self._bytes(tensor, axis, stage)
                if name in self._unit_axes and axis not in self._unit_axes[name] and num_bytes is not None:
                    num_bytes //= self._num_pieces[name]  # a piece is left by the unit's reduction
                move = Move(name, "weight", axis, rest, run, num_bytes, True, tensor.requires_grad)
                self.moves.append(move)
                follow = isinstance(run, Replicate) and tensor.requires_grad
                tags.append(_Tag(run, frozenset([len(self.moves) - 1]) if follow else frozenset()))
            self.tags[tensor] = tuple(tags)

    # The walk

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for path, module in self.index.modules.items():
                before, after = self._crossings(path, Hook.FORWARD_PRE), self._crossings(path, Hook.FORWARD_POST)
                if before:
                    place = self._pre_hook(path, before)
                    stack.enter_context(module.register_forward_pre_hook(place, with_kwargs=True))
                if after:
                    stack.enter_context(module.register_forward_hook(self._post_hook(path, after)))
                for op in (i.op for i in self._by_path.get(path, ())):
                    if isinstance(op, Local) and op.kind == "experts":
                        stack.enter_context(self.experts.replaced(module, path, op, self))
                stack.enter_context(self._passed.watched(module, lambda _: {}))
                stack.enter_context(self.attention.watched(module, path))
                stack.enter_context(self.batch_norms.watched(module, path))
            yield

    def _crossings(self, path: str, hook: Hook) -> dict[int | str | None, Redistribute | Wrap | Local]:
        """What happens to the inputs, or outputs, of a module, by index."""
        side = "<in>" if hook is Hook.FORWARD_PRE else "<out>"
        found: dict[int | str | None, Redistribute | Wrap | Local] = {}
        for i in self._by_path.get(path, ()):
            if isinstance(i.op, Local) and side == "<out>":
                found.setdefault(None, i.op)
            if i.hook is not hook:
                continue
            if i.target == side and isinstance(i.op, Wrap | Redistribute):
                found[i.index] = i.op
        return found

    def _pre_hook(self, path: str, crossings: dict[int | str | None, Any]) -> Callable[..., Any]:
        names = self.index.inputs(path).positional

        def hook(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            by_position = [
                self._cross(path, "<in>", names[i] if i < len(names) else i, value, crossings)
                for i, value in enumerate(args)
            ]
            by_name = {key: self._cross(path, "<in>", key, value, crossings) for key, value in kwargs.items()}
            return tuple(by_position), by_name

        return hook

    def _post_hook(self, path: str, crossings: dict[int | str | None, Any]) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if type(output) in (tuple, list):
                return type(output)(self._cross(path, "<out>", i, value, crossings) for i, value in enumerate(output))
            if isinstance(output, dict):
                for key, value in output.items():
                    output[key] = self._cross(path, "<out>", key, value, crossings)
                return output
            return self._cross(path, "<out>", 0, output, crossings)

        return hook

    def _cross(self, path: str, side: str, key: int | str, value: Any, crossings: dict[int | str | None, Any]) -> Any:
        op = crossings.get(key, crossings.get(None))
        if op is None:
            return value
        if type(value) in (tuple, list):
            return type(value)(self._cross(path, side, key, item, {None: op}) for item in value)
        if not isinstance(value, torch.Tensor):
            return value
        named = f"{side[:-1]}:{key}>" if key in crossings else side
        copy = value.view_as(value)  # other users of the tensor, and other inputs that are it too, see it as it was
        if isinstance(op, Wrap):
            self.tags[copy] = tuple(_Tag(placement) for placement in op.placements)
            return copy
        if isinstance(op, Local):
            self.tags[copy] = tuple(_Tag(placement) for placement in op.outputs)
            return copy
        if side == "<out>":
            self.tags[copy] = self._moved(path, named, value, op)
            return copy
        passed, same = self._passed.innermost, (id(value), op, value._version, torch.is_grad_enabled())
        if same not in passed:
            passed[same] = value, self._moved(path, named, value, op)
        self.tags[copy] = passed[same][1]
        return copy

    def _moved(self, path: str, target: str, tensor: torch.Tensor, op: Redistribute) -> tuple[_Tag, ...]:
        arriving = self.tags_of(tensor)
        declared = op.src or (None,) * len(op.dst)
        placements = [choice if choice is not None else tag.placement for choice, tag in zip(declared, arriving)]
        tags = []
        for axis, placement, tag, dst in zip(self.axes, placements, arriving, op.dst):
            if dst is None:
                tags.append(_Tag(placement, tag.origins))
                continue
            dst, shape = from_front(dst, tensor.ndim), tuple(tensor.shape)
            num_bytes = self._bytes(tensor, axis, placements)
            self.moves.append(Move(path, target, axis, placement, dst, num_bytes, False, tensor.requires_grad, shape))
            # Its gradient is brought to a placement here, so nothing Partial flows back beyond it.
            follow = isinstance(dst, Replicate) and tensor.requires_grad
            tags.append(_Tag(dst, frozenset([len(self.moves) - 1]) if follow else frozenset()))
        return tuple(tags)

    # What is known

    def tags_of(self, tensor: torch.Tensor) -> tuple[_Tag, ...]:
        return self.tags.get(tensor, (_Tag(None),) * len(self.axes.names))

    def follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Tag what an op returned, and note what replicated tensors were used for."""
        for op, calls in ((F.scaled_dot_product_attention.__name__, self.attention), (BATCH_NORM, self.batch_norms)):
            if name == op:
                calls.called(args, kwargs, lambda x: tuple(tag.placement for tag in self.tags_of(x)))
        tensors = list(tensors_of((args, kwargs)))
        tags = [self.tags_of(tensor) for tensor in tensors]
        results = list(tensors_of(result))
        if name == "__setitem__":
            results = tensors[:1]
        first = [shard_dim(tag.placement) if tag.placement is not None else None for tag in (tags[0] if tags else ())]
        for output in results:
            merged = []
            for position, axis in enumerate(self.axes):
                on_axis = [tag[position] for tag in tags]
                flow = Flow([t.placement for t in on_axis], tensors, output, args, kwargs, self.axes.size(axis))
                placement = rule_for(name, flow)
                origins = self._use(name, flow, on_axis, placement)
                if isinstance(placement, Replicate) and sums_gradient_first(name, flow, first, self.axes.sizes):
                    origins = frozenset()
                merged.append(_Tag(placement, origins))
            self.tags[output] = tuple(merged)

    def _use(self, name: str, flow: Flow, arguments: Iterable[_Tag], placement: AxisPlacement) -> frozenset[int]:
        """Origins that the result still carries.

        A replicated argument of a result that is cut is used for different parts on different ranks: its gradient is a
        partial sum. Where the argument itself is cut for it (an elementwise op along the cut dim, a product that leaves a
        partial sum) the gradient is cut, too, and what becomes of it is not followed.
        """
        if not flow.result.requires_grad:
            return frozenset()
        carried: set[int] = set()
        for position, (argument, tensor) in enumerate(zip(arguments, flow.tensors)):
            if isinstance(placement, Replicate):
                carried |= argument.origins
                continue
            dim = shard_dim(placement) if placement is not None else None
            own_dim = dim - flow.result.ndim + tensor.ndim if dim is not None else -1
            cut_alike = is_elementwise(name) and own_dim >= 0 and tensor.shape[own_dim] > 1
            cut_alike = cut_alike or cuts_operand(name, flow, placement, position)
            if isinstance(placement, Partial) and tensor.ndim == 1:
                continue  # a bias added to a partial sum: the gradient of the sum is whole, and so is the bias's
            for origin in argument.origins:
                if placement is None or cut_alike or isinstance(placement, Partial):
                    self.moves[origin].uses.unknown = True
                else:
                    self.moves[origin].uses.partial = True
        return frozenset(carried)

    def _bytes(self, tensor: torch.Tensor, axis: str, placements: Iterable[AxisPlacement]) -> int | None:
        """Bytes of the part that the ranks along ``axis`` hold together: of the largest, if they are not equal."""
        total = tensor.numel() * tensor.element_size()
        for other, placement in zip(self.axes, placements):
            if other == axis or self.axes.size(other) == 1:
                continue
            if placement is None:
                return None
            if type(placement) is Shard and (size := tensor.shape[placement.dim]) % self.axes.size(other):
                total = total // size * -(-size // self.axes.size(other))
            elif shard_dim(placement) is not None or isinstance(placement, RaggedShard):
                total //= self.axes.size(other)
        return total

    # The outcome

    def partial_gradients(self, *, unknown: bool = False) -> list[PartialGradient]:
        """Gradients that go through buckets, in about the order in which they get ready: the reverse of the model's.
        ``unknown``: also those that may be sums or not."""
        found = []
        moves: dict[str, list[Move]] = {}
        for move in self.moves:
            if move.is_parameter and move.has_gradient and not self._is_settled(move):
                moves.setdefault(move.path, []).append(move)
        for name, own in reversed(moves.items()):
            whole = [move for move in own if isinstance(move.dst, Replicate)]
            summed = [move for move in whole if move.uses.partial or (unknown and move.uses.unknown)]
            known = unknown or not any(isinstance(move.dst, Replicate) and move.uses.unknown for move in own)
            num_bytes = summed[0].num_bytes if summed else None
            cut = [move.axis for move in summed if not isinstance(move.src, Replicate)]
            if num_bytes is not None and known and len(cut) <= 1:
                axes, dtype = tuple(move.axis for move in summed), _state(self.index, name).dtype
                found.append(PartialGradient(f"{name}.grad", axes, num_bytes, dtype, cut[0] if cut else None))
        return found

    def _is_settled(self, move: Move) -> bool:
        """Nothing moves along the axis, or a unit's collectives do it."""
        by_unit = move.is_parameter and move.axis in self._unit_axes.get(move.path, ())
        return self.axes.size(move.axis) == 1 or by_unit

    def collectives(self) -> Iterator[Collective]:
        for bucket in self.buckets:
            for when, op, axes, num_bytes in bucket.collectives:
                target = "<unit>" if op == "all_gather" else "<unit>.grad"
                yield Collective(bucket.path, target, cast(When, when), axes, op, num_bytes)
        for move in self.moves:
            if not self._is_settled(move):
                yield from move_collectives(move, self.axes)
        for call in self.experts.calls:
            for phase, kind, together, known_bytes in call.collectives(self.axes):
                yield Collective(call.path, "<experts>", cast(When, phase), together, kind, known_bytes)
        for target, calls in (("<attention>", self.attention), ("<statistics>", self.batch_norms)):
            for path, (phase, kind, together, known_bytes) in calls.collectives(self.axes):
                yield Collective(path, target, cast(When, phase), together, kind, known_bytes)

    def tokens_met(self, path: str, tokens: torch.Tensor) -> tuple[AxisPlacement, ...]:
        """The placements of the tokens of a region of experts; axes that shard them make gradients of parameters partial."""
        placements = tuple(tag.placement for tag in self.tags_of(tokens))
        for move in self.moves:
            if (
                move.is_parameter
                and move.path.startswith(f"{path}." if path else "")
                and isinstance(move.dst, Replicate)
            ):
                placement = placements[self.axes.index(move.axis)]
                move.uses.partial |= placement is not None and shard_dim(placement) is not None
                move.uses.unknown |= placement is None
        return placements


def _state(index: ModelIndex, name: str) -> torch.Tensor:
    path, attribute = index.owner(name)
    return getattr(index.modules[path], attribute)

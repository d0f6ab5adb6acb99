"""``Trace``: one forward of the whole model without its parameters' values, from which stages learn what they send.

Parameters are on the meta device, and so is whatever depends on them. All else (masks, positions, labels) is computed, so
that branches on its values are taken as they will be.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from vescale.compat.meta_shapes import result_on_meta
from vescale.compat.tensor_subclasses import TorchDispatchMode, tree_flatten, tree_unflatten
from vescale.errors import PipelineTraceError
from vescale.pipeline._batch_reads import BatchReads, Place, ReadCalls
from vescale.pipeline._carried import Carried
from vescale.pipeline._cut import Cut
from vescale.pipeline._gates import Gate, running
from vescale.pipeline._hooked_calls import TensorLike, noting_hooks
from vescale.pipeline._loss_sums import LossCalls, LossNodes
from vescale.pipeline._math_attention import math_attention
from vescale.pipeline._parameter_reads import SHAPE_ONLY
from vescale.pipeline._row_flow import RowOps
from vescale.pipeline._traced import LossTerm, Origin, OuterResults, Trace, TracedCall
from vescale.pipeline._unknown_values import refuse_reading, why_unknown
from vescale.rng import Draw

__all__ = ["trace"]

aten = torch.ops.aten
# Ops whose result's shape depends on the values of masks among their operands.
_WITH_MASKS = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
_LOSSES = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)


def trace(
    skeleton: nn.Module,
    cut: Cut,
    batch: Mapping[str, Any],
    entry_source: Any = None,
    *,
    grad: bool,
    answers: Mapping[Place, Any] | None = None,
    loss: Callable[[Any], torch.Tensor | None] | None = None,
    beside: Mapping[str, Any] | None = None,
) -> Trace:
    """Run the forward of a gated skeleton on a batch; its generators and buffers are left as they were.

    Args:
        answers: values that the forward gets where it reads from the batch; without, those of the batch.
        loss: called with the output, as a part of what is traced; ``beside`` is what it takes of the batch that the forward
            does not.

    Raises PlanError for a forward that the cut does not fit: a module that runs in another stage than it belongs to, or a
    value that a stage would need from an earlier one and does not get.
    """
    batch = dict(sorted(batch.items()))
    buffers = [(b, b.detach().clone()) for b in skeleton.buffers() if not b.is_meta]
    with contextlib.ExitStack() as stack:
        dtypes = skeleton.__dict__.get("_pipeline_dtypes")
        if dtypes is not None:
            stack.enter_context(dtypes.computing(skeleton))
        recorder = _Recorder(skeleton, cut, batch, dict(sorted((beside or {}).items())), entry_source, answers or {})
        stack.enter_context(torch.random.fork_rng())
        stack.enter_context(torch.set_grad_enabled(grad))
        stack.enter_context(math_attention())
        stack.enter_context(running(recorder))
        stack.enter_context(recorder.loss_calls)
        stack.enter_context(recorder.read_calls)
        # Not held by the recorder, which holds all tensors: in a cycle they would live until garbage is searched for.
        stack.enter_context(OuterResults(recorder.note_origin, lambda: recorder.inside is None))
        stack.enter_context(recorder)
        try:
            output = skeleton(**batch)
        except NotImplementedError as error:  # an op whose result's shape depends on values
            where = f"of {recorder.failed_inside!r}" if recorder.failed_inside else "around the stages' modules"
            raise PipelineTraceError(f"pipeline: the forward {where} {why_unknown(error)}", entry_source) from error
        total = loss(output) if loss is not None else None
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    missing = [path for stage, path in enumerate(cut.splits, 1) if not recorder.carried.has_begun(stage)]
    if missing:
        raise PipelineTraceError(
            f"pipeline: the forward does not call {missing[0]!r}, before which a stage begins", entry_source
        )
    found = Trace(
        recorder.carried.boundaries(),
        recorder.calls,
        recorder.draws,
        recorder.losses,
        output,
        recorder.carried.outside,
        recorder.carried.writes,
        recorder.nodes,
        recorder.replay_of,
        recorder.reads(),
        recorder.draws_before,
        tuple(recorder.of_rows),
        recorder.row_ops,
        total,
    )
    recorder.read_calls.end()  # else in a cycle with the recorder
    return found


def _with_positions(args: Any, kwargs: Any) -> tuple[list[Any], Any]:
    """The leaves of an indexing's arguments, with the positions of what masks choose in place of masks whose values are
    known."""
    indices: list[Any] = []
    for index in args[1]:
        if isinstance(index, torch.Tensor) and not index.is_meta and index.dtype in (torch.bool, torch.uint8):
            indices += index.nonzero().unbind(-1)
        else:
            indices.append(index)
    return tree_flatten(((args[0], indices, *args[2:]), kwargs))


class _Recorder(TorchDispatchMode):
    """Sees every op below autograd, and every call of a gated module.

    ``stage``: whose part of the forward runs. ``inside``: the gated module that runs, ``arguments`` the ids of its
    arguments' leaves.
    """

    def __init__(
        self,
        skeleton: nn.Module,
        cut: Cut,
        batch: Mapping[str, Any],
        beside: Mapping[str, Any],
        source: Any,
        answers: Mapping[Place, Any],
    ) -> None:
        super().__init__()
        self.skeleton, self.cut, self.source = skeleton, cut, source
        self.owners = {id(p): (n, cut.owners[n]) for n, p in skeleton.named_parameters()}
        self.stage, self.inside, self.failed_inside = 0, None, ""
        self.arguments: frozenset[int] = frozenset()
        self.called: set[str] = set()  # in this stage
        self.carried = Carried(source)
        self.values: set[int] = set()  # of tensors that depend on parameters
        self.keep: list[Any] = [batch, beside]
        self.recipes: dict[int, Any] = {}
        self._names = list(batch), list(beside)
        given, others = (tree_flatten(values)[0] for values in (batch, beside))
        for n, value in enumerate((*given, *others)):
            if isinstance(value, torch.Tensor):
                self.recipes[id(value)] = ("batch", n)
        self.nodes = LossNodes(batch={id(v) for v in given if isinstance(v, torch.Tensor)})
        self.row_ops = RowOps([v for v in (*given, *others) if isinstance(v, torch.Tensor)])
        self.loss_calls = LossCalls(self.nodes)
        self.calls: list[TracedCall] = []
        self.draws: list[Draw] = []
        self.draws_before: dict[int, int] = {}
        self.of_rows: dict[str, None] = {}
        counters = "num_batches_tracked"  # of batch normalization, which is noted itself
        self._buffers = {id(b): name for name, b in skeleton.named_buffers() if not name.endswith(counters)}
        self.losses: list[LossTerm] = []
        self.read_calls = ReadCalls(lambda: -1 if self.inside is None else len(self.calls), answers, self._note_read)
        self._reads: dict[
            Place, tuple[Any, Any, Any, Any]
        ] = {}  # function, arguments and value, of reads from the batch

    # Calls of modules

    @property
    def is_outside(self) -> bool:
        return self.inside is None

    def call(self, gate: Gate, proceed: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.inside is not None:  # a module of a gated one
            return proceed(*args, **kwargs)
        given, _ = tree_flatten((args, kwargs))
        if self._begins(gate):
            self._begin(gate, given)
        if self.stage not in gate.stages:
            stages = " or ".join(map(str, sorted(gate.stages)))
            raise PipelineTraceError(
                f"pipeline: the forward calls {gate.path!r} in stage {self.stage}, but by the order of the model's modules "
                f"it belongs to stage {stages}; give stages=[[paths], ...], with {gate.path!r} in that of stage "
                f"{self.stage}",
                self.source,
            )
        self.called.add(gate.path)
        before, number = len(self.draws), len(self.calls)
        self.inside, self.arguments = gate.path, frozenset(map(id, given))  # type: ignore[assignment]
        module = self.skeleton.get_submodule(gate.path)
        try:
            with noting_hooks(
                module,
                lambda: len(self.keep),
                lambda place, n, value: self.note_origin(Origin(None, number, n, place), value),
            ) as hooked:
                result = proceed(*args, **kwargs)
        except NotImplementedError:
            self.failed_inside = gate.path
            raise
        finally:
            self.inside, self.arguments = None, frozenset()
        leaves, tree = tree_flatten(result)
        same = Carried.same_leaves(given, leaves)
        for n, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and n not in same:
                self.note_origin(Origin(None, number, n), leaf)
        shapes = [TensorLike(tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else v for v in leaves]
        self.calls.append(TracedCall(gate.path, tuple(shapes), tree, tuple(self.draws[before:]), same, tuple(hooked)))
        return result

    def note_origin(self, origin: Origin, tensor: torch.Tensor) -> None:
        if origin.function is not None and id(tensor) in self.recipes:
            self.row_ops.origins.setdefault(id(tensor), origin)
        if id(tensor) in self.carried.made:
            self.carried.origin(origin, tensor)

    def _begins(self, gate: Gate) -> bool:
        """Whether a stage begins before this call. A module that the stage before has under another name is called there
        first."""
        if gate.begins is None or self.carried.has_begun(gate.begins):
            return False
        if self.stage not in gate.stages:
            return True
        return self.stage == gate.begins - 1 and gate.path in self.called

    def _begin(self, gate: Gate, leaves: list[Any]) -> None:
        assert gate.begins is not None
        if gate.begins != self.stage + 1:
            raise PipelineTraceError(
                f"pipeline: the forward calls {gate.path!r} after stage {self.stage}, but stage {gate.begins} begins there; "
                "give the beginnings of stages in the order in which the forward calls them",
                self.source,
            )
        self.carried.begin(gate.begins, leaves, gate.path, len(self.calls))
        self.stage, self.called = gate.begins, set()
        self.draws_before[self.stage] = len(self.draws)
        self.loss_calls.restart()

    # Ops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        flat, tree = tree_flatten((args, kwargs))
        tensors = [v for v in flat if isinstance(v, torch.Tensor)]
        reads_values = func not in SHAPE_ONLY
        depends = reads_values and any(id(t) in self.owners or id(t) in self.values for t in tensors)
        only_here = reads_values and any(id(t) in self.owners or id(t) in self.carried.made for t in tensors)
        if reads_values:
            self._check(func, tensors)
        self._note_draw(func, args, kwargs)
        self._note_rows(func, args, depends)
        out, is_replayable = self._run(func, flat, tree, args, kwargs, tensors)
        self._note_loss(func, args, kwargs, depends)
        outs = [v for v in tree_flatten(out)[0] if isinstance(v, torch.Tensor)]
        self.keep.extend(outs)
        self.row_ops.note(func, args, kwargs, outs, depends, self.inside)
        if reads_values:
            self.nodes.note(func, args, kwargs, outs, self._depends, self.loss_calls.current)
        self.carried.note_op(func, args, tensors, outs, self.stage)
        for number, result in enumerate(outs):
            if depends:
                self.values.add(id(result))
            elif is_replayable:
                self.recipes[id(result)] = (func, args, kwargs, number)
            else:
                self.recipes.pop(id(result), None)
            if only_here or self.inside is not None:
                self.carried.made[id(result)] = self.stage
        return out

    def _depends(self, tensor: int) -> bool:
        return tensor in self.values or tensor in self.owners

    def _run(
        self, func: Any, flat: list[Any], tree: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]
    ) -> tuple[Any, bool]:
        is_mutation = func._schema.is_mutable
        if any(t.is_meta for t in tensors):
            if is_mutation and not tensors[0].is_meta and isinstance(args[0], torch.Tensor):
                self.values.add(id(args[0]))  # a computed tensor gets values that are not known
                return args[0], False
            refuse_reading(func, tensors)
            if func in _WITH_MASKS:
                flat, tree = _with_positions(args, kwargs)
            if func.overloadpacket is aten._ctc_loss:  # has no kernel for the meta device
                time, rows, _ = args[0].shape
                return (args[0].new_empty(rows), args[0].new_empty(rows, time, 2 * args[1].shape[-1] + 1)), False
            # Computed values beside unknown ones.
            moved = [v.to("meta") if isinstance(v, torch.Tensor) and not v.is_meta else v for v in flat]
            args, kwargs = tree_unflatten(moved, tree)
            if kwargs.get("device") is not None:
                kwargs = {**kwargs, "device": torch.device("meta")}
            return result_on_meta(func, args, kwargs), False
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta":
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return func(*args, **kwargs), not is_mutation

    def _check(self, func: Any, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            where = f"{func} in {self.inside or 'the forward around the modules of stages'}"
            self.carried.read(tensor, self.stage, where, is_argument=id(tensor) in self.arguments)
            owner = self.owners.get(id(tensor))
            if owner is not None and self.stage not in owner[1]:
                raise PipelineTraceError(
                    f"pipeline: stage {self.stage} reads the parameter {owner[0]!r}, which belongs to stage "
                    f"{min(owner[1])} by the order of the model's modules; give stages=[[paths], ...], with {owner[0]!r} in "
                    f"that of stage {self.stage}; it may be in several",
                    self.source,
                )

    def _note_draw(self, func: Any, args: Any, kwargs: Any) -> None:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return
        if "dropout_p" in kwargs or "scaled_dot_product" in str(func):
            return  # without dropout; with dropout, the math kernel is traced
        if kwargs.get("generator") is not None:
            return
        draw = Draw.of_call(func, args, kwargs)
        if draw is None:
            raise PipelineTraceError(
                f"pipeline: the forward calls {func}, whose numbers cannot be cut by micro-batches; draw with an in-place "
                "op on a tensor that has the batch in one dim (torch.empty_like(x).uniform_()), or give it a "
                "generator of its own",
                self.source,
            )
        self.draws.append(draw)

    def _note_rows(self, func: Any, args: Any, depends: bool) -> None:
        """Batch normalization (that of instances is one of a single row), and buffers that are written to."""
        if "batch_norm" in func._schema.name and "backward" not in func._schema.name:
            if depends and any(value is True for value in args) and args[0].shape[0] > 1:
                where = f"the forward of {self.inside!r}" if self.inside else "the forward"
                self.of_rows[f"{where} takes statistics over the rows of a batch (batch normalization)"] = None
        elif func._schema.is_mutable and args and id(args[0]) in self._buffers:
            self.of_rows[f"the forward writes to the buffer {self._buffers[id(args[0])]!r}"] = None

    def _note_loss(self, func: Any, args: Any, kwargs: Any, depends: bool) -> None:
        if func not in _LOSSES:
            return
        _, target, weight, reduction, ignore_index = args
        labels = self._value_of(target) if depends else None
        weights = None if weight is None else self._value_of(weight)
        self.losses.append(LossTerm(reduction, ignore_index, weight is not None, labels, weights))

    def _value_of(self, tensor: torch.Tensor) -> Callable[[Mapping[str, Any]], torch.Tensor] | None:
        """What computes the tensor from another batch, or a constant; None for one that depends on parameters."""
        if self._depends(id(tensor)) or id(tensor) in self.recipes:
            return self.replay_of(tensor)
        return None if tensor.is_meta else lambda batch: tensor

    def _note_read(self, place: Place, func: Any, args: Any, kwargs: Any, value: Any) -> None:
        tensors = [v for v in tree_flatten((args, kwargs))[0] if isinstance(v, torch.Tensor)]
        of_batch = [t for t in tensors if id(t) in self.nodes.batch]
        if of_batch and all(id(t) in self.recipes for t in of_batch) and not any(self._depends(id(t)) for t in tensors):
            self._reads[place] = func, args, kwargs, value

    def reads(self) -> BatchReads:
        calls = self._reads
        given = [tree_flatten((args, kwargs)) for _, args, kwargs, _ in calls.values()]
        replay = self._replay([v for leaves, _ in given for v in leaves])

        def compute(batch: Mapping[str, Any]) -> dict[Place, Any]:
            values, found = iter(replay(batch)), {}
            for (place, (func, *_)), (leaves, tree) in zip(calls.items(), given):
                args, kwargs = tree_unflatten([next(values) for _ in leaves], tree)
                found[place] = func(*args, **kwargs)
            return found

        return BatchReads(
            dict(self.read_calls.counts),
            {place: value for place, (*_, value) in calls.items()},
            compute if calls else lambda _: {},
        )

    def replay_of(self, tensor: torch.Tensor) -> Callable[[Mapping[str, Any]], torch.Tensor] | None:
        """What computes the tensor from another batch of the same shapes; None for one that depends on parameters."""
        if id(tensor) in self.values or id(tensor) not in self.recipes:
            return None
        replay = self._replay([tensor])
        return lambda batch: replay(batch)[0]

    def _replay(self, wanted: Sequence[Any]) -> Callable[[Mapping[str, Any]], list[Any]]:
        """What computes these from another batch of the same shapes; what is not made from the batch stays as it is."""
        recipes = self._recipes_of([v for v in wanted if isinstance(v, torch.Tensor)])

        def compute(batch: Mapping[str, Any]) -> list[Any]:
            done: dict[int, Any] = {}
            # Reads are of what the forward takes, and get no more.
            taken = [{name: batch[name] for name in names if name in batch} for names in self._names]
            given = [leaf for values in taken for leaf in tree_flatten(values)[0]]

            def value(x: Any) -> Any:
                if not isinstance(x, torch.Tensor) or id(x) not in recipes:
                    return x
                if id(x) not in done:
                    recipe = recipes[id(x)]
                    if recipe[0] == "batch":
                        done[id(x)] = given[recipe[1]]
                    else:
                        func, args, kwargs, number = recipe
                        flat, tree = tree_flatten((args, kwargs))
                        a, k = tree_unflatten([value(v) for v in flat], tree)
                        if k.get("device") is not None and torch.device(k["device"]).type == "meta":
                            k = {**k, "device": torch.device("cpu")}
                        outs = [v for v in tree_flatten(func(*a, **k))[0] if isinstance(v, torch.Tensor)]
                        done[id(x)] = outs[number]
                return done[id(x)]

            with torch.no_grad():
                return [value(x) for x in wanted]

        return compute

    def _recipes_of(self, tensors: Sequence[torch.Tensor]) -> dict[int, Any]:
        """Of tensors and what they are computed from, which they hold."""
        found: dict[int, Any] = {}
        left = list(tensors)
        while left:
            recipe = self.recipes.get(id(left[-1]))
            number = id(left.pop())
            if recipe is None or number in found:
                continue
            found[number] = recipe
            if recipe[0] != "batch":
                left += [v for v in tree_flatten(recipe[1:3])[0] if isinstance(v, torch.Tensor)]
        return found

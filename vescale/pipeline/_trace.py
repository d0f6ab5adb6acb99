"""``Trace``: one forward of the whole model without its parameters' values, from which stages learn what they send.

Parameters are on the meta device, and so is whatever depends on them. All else (masks, positions, labels) is computed, so
that branches on its values are taken as they will be.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vescale.compat import current_autograd_node, sizes_depend_on_values
from vescale.compat.meta_shapes import result_on_meta
from vescale.compat.tensor_subclasses import TorchDispatchMode, tree_flatten, tree_unflatten
from vescale.errors import PipelineTraceError
from vescale.pipeline._backward_code import BackwardCode
from vescale.pipeline._batch_reads import BatchReads, Place, ReadCalls
from vescale.pipeline._cut import Cut
from vescale.pipeline._gates import Gate, StageEnd, running
from vescale.pipeline._hooked_calls import TensorLike, noting_hooks
from vescale.pipeline._parameter_reads import SHAPE_ONLY
from vescale.pipeline._recipes import Recipes
from vescale.pipeline._row_flow import RowOps, users_line
from vescale.pipeline._traced import Boundary, LossTerm, Origin, OuterResults, Trace, TracedCall
from vescale.pipeline._traced_functions import (
    TracedFunctions,
    UnknownResultError,
    UnknownValueError,
    refuse_reading,
    why_unknown,
)
from vescale.rng import Draw, has_drawn, host_draws_undone

# ``Carried``: during a trace, the tensors that each stage receives from earlier ones.


class _Entering:
    """What enters a stage: ``tensors`` by id, of which the first are at ``leaves`` of its first module's arguments."""

    def __init__(self, leaves: Sequence[torch.Tensor | Any], found: Sequence[int], call: int) -> None:
        self.leaves, self.num_leaves, self.call = tuple(found), len(leaves), call
        self.arguments = [leaves[n] for n in found]
        self.later: dict[int, torch.Tensor] = {}

    def has(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self.later or any(tensor is one for one in self.arguments)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*self.arguments, *self.later.values()]


class Carried:
    """A tensor is sent from the stage that makes it to the last one that reads it, through all stages between.

    Attributes:
        made: the stage of a tensor, by id, that only one stage can make.
        outside: stages that read what they have received elsewhere than among the arguments of their modules.
        writes: stages that write in place to what they have received.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self.made: dict[int, int] = {}
        self.outside: set[int] = set()
        self.writes: set[int] = set()
        self._origins: dict[int, list[Origin]] = {}
        self._entering: dict[int, _Entering] = {}
        self._received: dict[int, int] = {}  # of what the stage has received, and its views in it: the id of the former
        self._memory: dict[int, int] = {}  # of a view: the id of the tensor that it is a view of in the end
        self._written: dict[int, tuple[int, int]] = {}  # by such an id: the stage that wrote, and the received tensor

    def origin(self, origin: Origin, tensor: torch.Tensor) -> None:
        self._origins.setdefault(id(tensor), []).append(origin)

    def begin(self, stage: int, leaves: Sequence[Any], path: str, call: int) -> None:
        """A stage begins before call ``call``, of a module, with ``leaves``."""
        found = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and id(leaf) in self.made]
        for n in found:
            self._carry(leaves[n], stage - 1, f"the arguments of {path!r}")
        self._entering[stage] = _Entering(leaves, found, call)
        self._received = {id(leaves[n]): id(leaves[n]) for n in found}

    def read(self, tensor: torch.Tensor, stage: int, where: str, *, is_argument: bool) -> None:
        """Called before an op of a stage reads a tensor."""
        if self.made.get(id(tensor), stage) >= stage:
            return
        self._carry(tensor, stage, where)
        self._received.setdefault(id(tensor), id(tensor))
        if not is_argument:
            self.outside.add(stage)
        written = self._written.get(self._memory.get(id(tensor), id(tensor)))
        if written is not None and written[0] > self.made[id(tensor)] and written[1] != id(tensor):
            raise PipelineTraceError(
                f"pipeline: {where}, in stage {stage}, reads a tensor of shape {tuple(tensor.shape)} that stage "
                f"{self.made[id(tensor)]} has created, and that shares memory with one that stage {written[0]} has "
                "written to, but they are sent separately. Write out of place, or begin the stages before other "
                "modules",
                self._source,
            )

    def _carry(self, tensor: torch.Tensor, last: int, where: str) -> None:
        """Let the tensor enter the stages behind the one that has made it, up to ``last``."""
        made = self.made[id(tensor)]
        for stage in range(made + 1, last + 1):
            entering = self._entering[stage]
            if entering.has(tensor):
                continue
            if current_autograd_node() is not None:
                raise PipelineTraceError(
                    f"pipeline: the forward takes gradients (torch.autograd.grad) at {users_line()}, in stage {last}, "
                    f"through modules of stage {made}, whose graph is on another rank; begin the stages so that these "
                    "modules are all in one stage, or train this model without a pipeline",
                    self._source,
                )
            if id(tensor) not in self._origins:
                raise PipelineTraceError(
                    f"pipeline: {where}, in stage {last}, uses a tensor of shape {tuple(tensor.shape)} that was "
                    f"created in a module of stage {made} but is not part of what the module returns; return it, or "
                    "begin the stages before other modules",
                    self._source,
                )
            entering.later[id(tensor)] = tensor

    def note_op(self, func: Any, args: Any, tensors: Sequence[torch.Tensor], outs: Sequence[Any], stage: int) -> None:
        """After an op of a stage."""
        if func._schema.is_mutable:
            target = args[0] if args and isinstance(args[0], torch.Tensor) else None
            if target is not None and id(target) in self._received:
                self.writes.add(stage)
                self._written[self._memory.get(id(target), id(target))] = stage, self._received[id(target)]
        elif any(returned.alias_info is not None for returned in func._schema.returns):
            memory = self._memory.get(id(tensors[0]), id(tensors[0])) if tensors else None
            received = next((self._received[id(t)] for t in tensors if id(t) in self._received), None)
            for out in outs:
                if memory is not None and memory != id(out):
                    self._memory[id(out)] = memory
                if received is not None:
                    self._received.setdefault(id(out), received)

    def entering(self) -> dict[int, list[torch.Tensor]]:
        return {stage: entering.tensors for stage, entering in self._entering.items()}

    def boundaries(self) -> dict[int, Boundary]:
        return {stage: self._boundary(entering) for stage, entering in self._entering.items()}

    def _boundary(self, entering: _Entering) -> Boundary:
        tensors = entering.tensors
        return Boundary(
            entering.leaves,
            tuple(tuple(self._origins.get(id(tensor), ())) for tensor in tensors),
            tuple(tuple(tensor.shape) for tensor in tensors),
            tuple(tensor.dtype for tensor in tensors),
            tuple(tensor.requires_grad for tensor in tensors),
            entering.num_leaves,
            entering.call,
        )

    def has_begun(self, stage: int) -> bool:
        return stage in self._entering

    @staticmethod
    def same_leaves(given: Sequence[Any], returned: Sequence[Any]) -> Mapping[int, int]:
        """By leaf of what a module returns: the leaf of its arguments that is the same tensor."""
        numbers = {id(value): n for n, value in enumerate(given) if isinstance(value, torch.Tensor)}
        return {n: numbers[id(value)] for n, value in enumerate(returned) if id(value) in numbers}


# Attention by the math kernel while a forward is traced: the others hide what they compute from the trace.

_LOCK = threading.Lock()
_SCOPE, _CONTEXT = contextlib.ExitStack(), contextvars.copy_context()
_inside = 0


@contextlib.contextmanager
def math_attention() -> Iterator[None]:
    """``sdpa_kernel(SDPBackend.MATH)`` for threads that may overlap, as simulated ranks do.

    The choice of kernels belongs to the process. The first thread that enters changes it, and the last one that leaves
    restores it; with a scope for each thread, one would restore what another had set, and all later attention of the process
    would run with the math kernel. Both act in one context: PyTorch resets a context variable where it was set.
    """
    global _inside
    with _LOCK:
        if _inside == 0:
            _CONTEXT.run(_SCOPE.enter_context, sdpa_kernel(SDPBackend.MATH))
        _inside += 1
    try:
        yield
    finally:
        with _LOCK:
            _inside -= 1
            if _inside == 0:
                _CONTEXT.run(_SCOPE.close)


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
    num_calls: int | None = None,
) -> Trace:
    """Run the forward of a gated skeleton on a batch; its generators and buffers are left as they were.

    Args:
        answers: values that the forward gets where it reads from the batch; without, those of the batch.
        loss: called with the output, as a part of what is traced; ``beside`` is what it takes of the batch that the forward
            does not.
        num_calls: of gated modules, behind which the trace ends, without an output.

    Raises PlanError for a forward that the cut does not fit: a module that runs in another stage than it belongs to, or a
    value that a stage would need from an earlier one and does not get.
    """
    batch = dict(sorted(batch.items()))
    buffers = [(b, b.detach().clone()) for b in skeleton.buffers() if not b.is_meta]
    saved = [
        (f"{path}.{name}" if path else name, module._buffers, name, buffer)
        for path, module in skeleton.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]
    with contextlib.ExitStack() as stack:
        dtypes = skeleton.__dict__.get("_pipeline_dtypes")
        if dtypes is not None:
            stack.enter_context(dtypes.computing(skeleton))
        recorder = _Recorder(skeleton, cut, batch, dict(sorted((beside or {}).items())), entry_source, answers or {})
        recorder.num_calls = num_calls
        stack.enter_context(torch.random.fork_rng())
        host_state = stack.enter_context(host_draws_undone())
        stack.enter_context(torch.set_grad_enabled(grad))
        stack.enter_context(math_attention())
        stack.enter_context(running(recorder))
        stack.enter_context(recorder.functions)
        stack.enter_context(recorder.backward_code)
        stack.enter_context(recorder.read_calls)
        # Not held by the recorder, which holds all tensors: in a cycle they would live until garbage is searched for.
        stack.enter_context(OuterResults(recorder.note_origin, lambda: recorder.inside is None))
        stack.enter_context(recorder)
        try:
            output, total = None, None
            with contextlib.suppress(StageEnd):
                output = skeleton(**batch)
        except Exception as error:
            _refuse_host_draws(host_state, entry_source)
            if not isinstance(error, UnknownValueError | UnknownResultError):
                raise
            where = f"of {recorder.failed_inside!r}" if recorder.failed_inside else "around the stages' modules"
            raise PipelineTraceError(f"pipeline: the forward {where} {why_unknown(error)}", entry_source) from error
        if loss is not None and output is not None:
            total = loss(output)
        _refuse_host_draws(host_state, entry_source)
        recorder.backward_code.see_results([*tree_flatten(output)[0], total])
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    for memory, name in _frozen(skeleton).items():
        if memory not in recorder.frozen:
            raise _writes_to(name, entry_source)
    assigned = [place for place, table, name, buffer in saved if table.get(name) is not buffer]
    for _, table, name, buffer in saved:
        table[name] = buffer
    missing = [path for stage, path in enumerate(cut.splits, 1) if not recorder.carried.has_begun(stage)]
    if missing:
        raise PipelineTraceError(
            f"pipeline: the forward does not call {missing[0]!r}, before which a stage begins", entry_source
        )
    recorder.row_ops.entering, recorder.row_ops.assigned = recorder.carried.entering(), assigned
    found = Trace(
        recorder.carried.boundaries(),
        recorder.calls_with_reads(output),
        recorder.draws,
        recorder.losses,
        output,
        recorder.carried.outside,
        recorder.carried.writes,
        recorder.functions.means,
        recorder.replay_of,
        recorder.reads(),
        recorder.draws_before,
        tuple(recorder.of_rows),
        recorder.row_ops,
        total,
        tuple(recorder.backward_code.found),
        num_calls is not None,
    )
    recorder.backward_code.end()
    recorder.read_calls.end()  # else in a cycle with the recorder
    return found


def _writes_to(parameter: str, source: Any) -> PipelineTraceError:
    return PipelineTraceError(
        f"pipeline: the forward writes to the parameter {parameter!r}, which does not require gradients: each micro-batch "
        "would do so, and on one device it is once for the batch. Write to it between steps (a moving average: after "
        "optimizer.step())",
        source,
    )


def _frozen(skeleton: nn.Module) -> dict[int, str]:
    """The names of parameters without gradients, by their memory."""
    named = skeleton.named_parameters()
    return {p.untyped_storage()._cdata: name for name, p in named if not p.requires_grad}


def _refuse_host_draws(before: Any, source: Any) -> None:
    """Raises PlanError for a forward that has drawn from the generators of Python and NumPy."""
    if has_drawn(before):
        raise PipelineTraceError(
            "pipeline: the forward draws random numbers with Python's random module or NumPy; micro-batches and stages "
            "would draw others. Draw them before .step(), and pass them in the batch; to drop a module at random, multiply "
            "its result by 0, because stages call the same modules in each step",
            source,
        )


def _size(chosen: torch.Tensor) -> Any:
    return int(chosen.count_nonzero()) if chosen.dtype is torch.bool else tuple(chosen.shape)


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


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The operands that an op writes to."""
    given = {a.name: v for a, v in zip(func._schema.arguments, args)} | kwargs
    names = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [v for name in names for v in tree_flatten(given.get(name))[0] if isinstance(v, torch.Tensor)]


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
        names = list(batch), list(beside)
        given, others = (tree_flatten(values)[0] for values in (batch, beside))

        def leaves_of(batch: Mapping[str, Any]) -> list[Any]:
            # Reads are of what the forward takes, and get no more.
            taken = [{name: batch[name] for name in each if name in batch} for each in names]
            return [leaf for values in taken for leaf in tree_flatten(values)[0]]

        self.recipes, self._batch = Recipes([*given, *others], leaves_of), {**batch, **beside}
        self.row_ops = RowOps([v for v in (*given, *others) if isinstance(v, torch.Tensor)])
        self.functions, self.backward_code = TracedFunctions(), BackwardCode(lambda: self.inside)
        self.calls: list[TracedCall] = []
        self.num_calls: int | None = None
        self._given: set[int] = set()  # the memory of the arguments of the gated module that runs
        self._results: list[list[Any]] = []  # leaves, by call
        self._read_outside: set[int] = set()  # ids of operands of ops around gated modules
        self.draws: list[Draw] = []
        self.draws_before: dict[int, int] = {}
        self.of_rows: dict[str, None] = {}
        counters = "num_batches_tracked"  # of batch normalization, which is noted itself
        self._buffers = {
            b.untyped_storage()._cdata: (name, id(b))
            for name, b in skeleton.named_buffers()
            if not name.endswith(counters) and b.numel()
        }
        self.frozen = _frozen(skeleton)
        self._unknown_buffers: dict[int, tuple[str, int]] = {}  # of which only a stage has the values, by id
        self.losses: list[LossTerm] = []
        self.read_calls = ReadCalls(lambda: -1 if self.inside is None else len(self.calls), answers, self._note_read)
        self._reads: dict[
            Place, tuple[Any, Any, Any, Any]
        ] = {}  # function, arguments and value, of reads from the batch
        self._choosing: list[torch.Tensor] = []  # masks, and what is as large as their values say

    # Calls of modules

    @property
    def is_outside(self) -> bool:
        return self.inside is None

    @property
    def is_trial(self) -> bool:
        return True

    def call(self, gate: Gate, proceed: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.inside is not None:  # a module of a gated one
            return proceed(*args, **kwargs)
        given, _ = tree_flatten((args, kwargs))
        if self._begins(gate):
            self._begin(gate, given)
        if self.stage not in gate.stages:
            stages = " or ".join(map(str, sorted(gate.stages)))
            again = any(call.path == gate.path for call in self.calls)
            raise PipelineTraceError(
                f"pipeline: the forward calls {gate.path!r} in stage {self.stage}, but in the order of the model's "
                f"modules it belongs to stage {stages}; pass stages=[[paths], ...], with {gate.path!r} in that of "
                f"stage {self.stage}; it may be in several"
                + (
                    ". If the forward runs its blocks twice, call them once, with the inputs of both calls "
                    "concatenated (torch.cat), or keep the result of the first call"
                    if again
                    else ""
                ),
                self.source,
            )
        self.called.add(gate.path)
        before, number = len(self.draws), len(self.calls)
        self.inside, self.arguments = gate.path, frozenset(map(id, given))  # type: ignore[assignment]
        self._given = {v.untyped_storage()._cdata for v in given if isinstance(v, torch.Tensor)}
        module = self.skeleton.get_submodule(gate.path)
        try:
            with noting_hooks(
                module,
                lambda: len(self.keep),
                lambda place, n, value: self.note_origin(Origin(None, number, n, place), value),
            ) as hooked:
                result = proceed(*args, **kwargs)
            leaves, tree = tree_flatten(result)
            self.backward_code.see_results(leaves)
        except NotImplementedError:
            self.failed_inside = gate.path
            raise
        finally:
            self.inside, self.arguments = None, frozenset()
        same = Carried.same_leaves(given, leaves)
        for n, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and n not in same:
                self.note_origin(Origin(None, number, n), leaf)
        shapes = [TensorLike(tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else v for v in leaves]
        self.calls.append(TracedCall(gate.path, tuple(shapes), tree, tuple(self.draws[before:]), same, tuple(hooked)))
        self._results.append(leaves)
        self.row_ops.calls.append((gate.path, self.stage, [v for v in given if isinstance(v, torch.Tensor)], leaves))
        if self.num_calls == len(self.calls):
            raise StageEnd
        return result

    def calls_with_reads(self, output: Any) -> list[TracedCall]:
        read = self._read_outside | {id(leaf) for leaf in tree_flatten(output)[0]}
        return [
            replace(call, is_read=any(id(leaf) in read for leaf in leaves))
            for call, leaves in zip(self.calls, self._results)
        ]

    def note_origin(self, origin: Origin, tensor: torch.Tensor) -> None:
        if origin.function is not None and tensor in self.recipes:
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
                f"pipeline: the forward calls {gate.path!r} after stage {self.stage}, but stage {gate.begins} begins "
                "there; list the first modules of stages in the order in which the forward calls them",
                self.source,
            )
        self.carried.begin(gate.begins, leaves, gate.path, len(self.calls))
        self.stage, self.called = gate.begins, set()
        self.draws_before[self.stage] = len(self.draws)

    # Ops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        flat, tree = tree_flatten((args, kwargs))
        tensors = [v for v in flat if isinstance(v, torch.Tensor)]
        if self.backward_code.see_op():
            self.row_ops.writing.add(self.stage)
        reads_values = func not in SHAPE_ONLY
        depends = reads_values and any(id(t) in self.owners or id(t) in self.values for t in tensors)
        only_here = reads_values and any(id(t) in self.owners or id(t) in self.carried.made for t in tensors)
        if reads_values:
            self._check(func, tensors)
        self._note_draw(func, args, kwargs)
        before, writes = self.recipes.before(flat), _written(func, args, kwargs)
        self._note_statistics(func, args, depends, writes)
        if torch.Tag.nondeterministic_seeded in func.tags:
            before = None  # to draw again would be to draw other numbers
        out, is_replayable = self._run(func, flat, tree, args, kwargs, tensors)
        self._note_loss(func, args, kwargs, depends)
        outs = [v for v in tree_flatten(out)[0] if isinstance(v, torch.Tensor)]
        self.keep.extend(outs)
        self.row_ops.note(func, args, kwargs, outs, depends, self.inside)
        for written in writes:
            self.functions.means.pop(id(written), None)
        self.carried.note_op(func, args, tensors, outs, self.stage)
        if self.inside is not None and any(w.untyped_storage()._cdata in self._given for w in writes):
            self.row_ops.writing.add(self.stage)
        if not depends:
            self.recipes.note(func, before if is_replayable else None, tree, outs, writes)
        else:
            for target in writes:
                self.recipes.lose(target)
        if func in _WITH_MASKS or sizes_depend_on_values(func):
            choosing = (*(t for t in tensors if t.dtype is torch.bool), *(outs if not depends else ()))
            self._choosing += [t for t in choosing if t in self.recipes]
        for result in outs:
            if depends:
                self.values.add(id(result))
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
            if func is aten.masked_select.default and not args[1].is_meta:
                shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
                return args[0].new_empty(int(args[1].expand(shape).sum())), False
            if func.overloadpacket is aten._ctc_loss:  # has no kernel for the meta device
                time, rows, _ = args[0].shape
                return (args[0].new_empty(rows), args[0].new_empty(rows, time, 2 * args[1].shape[-1] + 1)), False
            # Computed values beside unknown ones.
            moved = [v.to("meta") if isinstance(v, torch.Tensor) and not v.is_meta else v for v in flat]
            args, kwargs = tree_unflatten(moved, tree)
            if kwargs.get("device") is not None:
                kwargs = {**kwargs, "device": torch.device("meta")}
            try:
                return result_on_meta(func, args, kwargs), False
            except NotImplementedError as error:
                if not sizes_depend_on_values(func):  # some ops refuse a dtype with this class
                    raise
                raise UnknownResultError(func, str(error)) from error
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta":
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return func(*args, **kwargs), True

    def _check(self, func: Any, tensors: list[torch.Tensor]) -> None:
        if self.inside is None:
            self._read_outside.update(map(id, tensors))
        for tensor in tensors:
            name, written_in = self._unknown_buffers.get(id(tensor), ("", self.stage))
            if written_in != self.stage:
                raise PipelineTraceError(
                    f"pipeline: the forward writes to the buffer {name!r} around the modules of stage {written_in} what it "
                    f"computes from parameters, and reads it in stage {self.stage}, which cannot compute that; write to it "
                    "around the modules of one stage, or in a module, and return what others need",
                    self.source,
                )
            where = f"{func} in {self.inside or 'the forward around the modules of stages'}"
            self.carried.read(tensor, self.stage, where, is_argument=id(tensor) in self.arguments)
            owner = self.owners.get(id(tensor))
            if owner is not None and self.stage not in owner[1]:
                raise PipelineTraceError(
                    f"pipeline: stage {self.stage} reads the parameter {owner[0]!r}, which belongs to stage "
                    f"{min(owner[1])} by the order of the model's modules; pass stages=[[paths], ...], with "
                    f"{owner[0]!r} in that of stage {self.stage}; it may be in several",
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
                f"pipeline: the forward calls {func}, whose random numbers cannot be split by micro-batches; draw "
                "with an in-place op on a tensor that has the batch in one dim (torch.empty_like(x).uniform_()), or "
                "pass a separate generator",
                self.source,
            )
        self.draws.append(draw)

    def _note_statistics(self, func: Any, args: Any, depends: bool, writes: Sequence[torch.Tensor]) -> None:
        """Batch normalization (that of instances is one of a single row), and buffers that are written to."""
        if "batch_norm" in func._schema.name and "backward" not in func._schema.name:
            if any(value is True for value in args):
                self._refuse_state_of_several_stages()
            if depends and any(value is True for value in args) and args[0].shape[0] > 1:
                where = f"the forward of {self.inside!r}" if self.inside else "the forward"
                self.of_rows[f"{where} computes statistics over the rows of a batch (batch normalization)"] = None
            return
        for written in writes:
            frozen = self.frozen.get(written.untyped_storage()._cdata)
            if frozen is not None:
                raise _writes_to(frozen, self.source)
            name, buffer = self._buffers.get(written.untyped_storage()._cdata, (None, 0))
            if name is not None:
                self._refuse_state_of_several_stages()
                self.row_ops.written_buffers[buffer] = name
                if self.inside is None:
                    if self.row_ops.writers.setdefault(name, self.stage) != self.stage:
                        raise PipelineTraceError(
                            f"pipeline: the forward writes to the buffer {name!r} around the modules of stages "
                            f"{self.row_ops.writers[name]} and {self.stage}; write to it around those of one stage",
                            self.source,
                        )
                    if depends:
                        self._unknown_buffers[buffer] = name, self.stage
                self.row_ops.buffer_writes.append((name, len(self.row_ops.ops), func))

    def _refuse_state_of_several_stages(self) -> None:
        """Buffers are written to: each of the module's stages has its own."""
        stages = self.cut.bound.get(self.inside or "", frozenset())
        if len(stages) > 1:
            raise PipelineTraceError(
                f"pipeline: {self.inside!r}, which is called in stages {', '.join(map(str, sorted(stages)))}, writes "
                "to its buffers, but each stage has a copy of them; pass stages=[[paths], ...] with which a single "
                "stage calls it, or use a module without buffers that change",
                self.source,
            )

    def _note_loss(self, func: Any, args: Any, kwargs: Any, depends: bool) -> None:
        if func not in _LOSSES:
            return
        _, target, weight, reduction, ignore_index = args
        labels = self._value_of(target) if depends else None
        weights = None if weight is None else self._value_of(weight)
        self.losses.append(LossTerm(self.stage, reduction, ignore_index, weight is not None, labels, weights))

    def _value_of(self, tensor: torch.Tensor) -> Callable[[Mapping[str, Any]], torch.Tensor] | None:
        """What computes the tensor from another batch, or a constant; None for one that depends on parameters."""
        if self._depends(id(tensor)) or tensor in self.recipes:
            return self.replay_of(tensor)
        return None if tensor.is_meta or self.recipes.has_lost(tensor) else lambda batch: tensor

    def _note_read(self, place: Place, func: Any, args: Any, kwargs: Any, value: Any) -> None:
        tensors = [v for v in tree_flatten((args, kwargs))[0] if isinstance(v, torch.Tensor)]
        self.row_ops.reads.update(map(id, tensors))
        has_recipe = any(t in self.recipes for t in tensors)
        if has_recipe and not any(self._depends(id(t)) or self.recipes.has_lost(t) for t in tensors):
            self._reads[place] = func, args, kwargs, value

    def reads(self) -> BatchReads:
        calls = self._reads
        given = [tree_flatten((args, kwargs)) for _, args, kwargs, _ in calls.values()]
        replay = self.recipes.of([v for leaves, _ in given for v in leaves])

        def compute(batch: Mapping[str, Any]) -> dict[Place, Any]:
            values, found = iter(replay(batch)), {}
            for (place, (func, *_)), (leaves, tree) in zip(calls.items(), given):
                args, kwargs = tree_unflatten([next(values) for _ in leaves], tree)
                found[place] = func(*args, **kwargs)
            return found

        choosing = self.recipes.of(self._choosing)

        def choose(batch: Mapping[str, Any]) -> list[Any] | None:
            try:
                return [_size(tensor) for tensor in choosing(batch)]
            except (RuntimeError, IndexError):
                return None

        return BatchReads(
            dict(self.read_calls.counts),
            {place: value for place, (*_, value) in calls.items()},
            compute if calls else lambda _: {},
            list(map(_size, self._choosing)),
            choose,
        )

    def replay_of(self, tensor: torch.Tensor) -> Callable[[Mapping[str, Any]], torch.Tensor] | None:
        """What computes the tensor from another batch of the same shapes; None for one that depends on parameters, or where
        it does not compute this one of this batch."""
        if id(tensor) in self.values or tensor not in self.recipes:
            return None
        replay = self.recipes.of([tensor])
        found = replay(self._batch)[0]
        is_same = found.shape == tensor.shape and torch.equal(found.nan_to_num(), tensor.nan_to_num())
        return (lambda batch: replay(batch)[0]) if is_same else None

"""One stage's forward of one micro-batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode

from vescale.compat import local_of, make_dtensor, make_spec, no_torch_function, spec_of
from vescale.compat.tensor_subclasses import tree_flatten, tree_unflatten
from vescale.errors import PipelineCallError, PipelineTraceError
from vescale.pipeline._batch_reads import Place, ReadCalls
from vescale.pipeline._batches import Signature
from vescale.pipeline._gates import Gate, StageEnd, current_run, recomputed
from vescale.pipeline._hooked_calls import TensorLike, call_hooks, seeing_values
from vescale.pipeline._traced import NOTHING, Boundary, Origin, OuterResults, TracedCall, WholeValues
from vescale.placements import contiguous_stride
from vescale.plans import PipelineEntry
from vescale.rng import default_generator

_LEAVES = {torch.Tensor, nn.Parameter, DTensor, type(None), bool, int, float, str}  # of pytrees, the usual ones


def _leaves_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    leaves = [*args, *kwargs.values()]
    return leaves if all(type(v) in _LEAVES for v in leaves) else tree_flatten((args, kwargs))[0]


class Surroundings(Protocol):
    """What a forward reads of its runner.

    Attributes:
        states: of the generator behind calls that were skipped, by their number.
        answers: of the whole batch, to what the forward reads from it.
        is_tried: it is no forward of a step.
    """

    model: nn.Module
    mesh: DeviceMesh
    device: torch.device
    entry: PipelineEntry
    states: dict[int, torch.Tensor]
    answers: Mapping[Place, Any]
    is_tried: bool


class StageRun:
    """One forward of one stage: earlier modules answer with placeholders, and the forward ends where the next begins."""

    def __init__(
        self,
        runner: Surroundings,
        known: Signature,
        stage: int,
        received: Sequence[DTensor],
        values: Mapping[Origin, torch.Tensor],
    ) -> None:
        self.runner, self.known, self.stage, self.received = runner, known, stage, received
        self.begun = stage == 0
        self.number = 0  # of the next call of a gated module
        self.replaced: dict[int, tuple[Any, DTensor]] = {}
        self.made: list[DTensor] | None = None
        boundaries = known.part.boundaries
        self.enters, self.leaves = boundaries.get(stage, NOTHING), boundaries.get(stage + 1, NOTHING)
        self.entering, self.leaving = known.origins(stage)
        self.stand_ins: list[tuple[int, Any]] = []  # of what is received, by its number
        self.found: dict[int, Any] = {}  # what is sent beside arguments, by its number
        self.depth = 0
        self.loss_mode: Callable[[], Any] | None = None
        self.at_begin: Callable[[], None] | None = None
        self.around_call: Callable[..., Any] | None = None
        self.saw_result: Callable[[int, Any], None] | None = None
        self.saw_hooked: Callable[[int, tuple[str, int], int, Any], None] | None = None
        self.results: Mapping[Any, Any] | None = None  # of this stage's modules, which do not run then
        self.ends_early = False  # behind the last call
        self.whole_values = WholeValues(values, lambda: not self.depth) if values else None

    @contextlib.contextmanager
    def around_forward(self) -> Iterator[None]:
        """Around the forward of the model itself."""
        with contextlib.ExitStack() as stack:
            if self.whole_values is not None:
                stack.enter_context(self.whole_values)
            if self.stage in self.known.part.outside:
                stack.enter_context(_Arrived(self._replace))
            mode = self.loss_mode() if self.loss_mode is not None else None
            if mode is not None:
                self.at_begin = mode.begin
                stack.enter_context(mode)
            if any(origin.function is not None for origin in (*self.entering, *self.leaving)):
                stack.enter_context(OuterResults(self._see, lambda: not self.depth))
            if self.runner.answers:
                stack.enter_context(ReadCalls(lambda: self.number - 1 if self.depth else -1, self.runner.answers))
            yield

    @property
    def is_outside(self) -> bool:
        return not self.depth

    @property
    def is_trial(self) -> bool:
        return self.runner.is_tried

    def call(self, gate: Gate, proceed: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.depth:
            return proceed(*args, **kwargs)
        if self.begun and not self.replaced and self.number != self.leaves.call and self.results is None:
            self._next_call(gate)
        else:
            with no_torch_function():  # what happens here is no part of the model
                args, kwargs, answer = self._answer(gate, args, kwargs)
            if answer is not None:
                return answer[0]
        number = self.number - 1
        self.depth += 1
        try:
            with self._around_hooks(gate, number):
                call = recomputed(proceed)
                result = call(*args, **kwargs) if self.around_call is None else self.around_call(call, *args, **kwargs)
        finally:
            self.depth -= 1
        if self.saw_result is not None:
            self.saw_result(number, result)
        if self.leaving:
            self._see_leaves(number, tree_flatten(result)[0])
        if self.ends_early and self.number == len(self.known.part.calls):
            raise StageEnd
        return result

    def _around_hooks(self, gate: Gate, number: int) -> contextlib.AbstractContextManager[None]:
        """Around a call of a module of this stage: what hooks keep in it may have to be sent."""
        hooked = self.known.part.calls[number].hooked
        if not hooked or not (self.leaving or self.saw_hooked):
            return contextlib.nullcontext()

        def see(place: tuple[str, int], n: int, value: Any) -> None:
            self._see(Origin(None, number, n, place), value)
            if self.saw_hooked is not None:
                self.saw_hooked(number, place, n, value)

        return seeing_values(hooked, self.runner.model.get_submodule(gate.path), see)

    def _see(self, origin: Origin, value: Any) -> None:
        if origin in self.leaving:
            self.found[self.leaving[origin]] = value
        if not self.begun and origin in self.entering:
            self.stand_ins.append((self.entering[origin], value))

    def _see_leaves(self, number: int, leaves: Sequence[Any]) -> None:
        """Of what a module has returned, or would have."""
        for n, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                self._see(Origin(None, number, n), leaf)

    def _answer(self, gate: Gate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, tuple[Any] | None]:
        """Arguments for the module's call, and what it returns where it does not run."""
        if self.begun and self.number == self.leaves.call:
            self._check_call(gate)
            self.made = self._leaves(gate, args, kwargs)
            raise StageEnd
        if not self.begun and self.number == self.enters.call:
            self.begun = True
            if self.at_begin is not None:
                self.at_begin()
            args, kwargs = self._receive(args, kwargs)
        elif self.replaced:
            args, kwargs = self._replace(args, kwargs)
        call = self._next_call(gate)
        if self.begun and self.results is None:
            return args, kwargs, None
        made = self._stand_in(call, args, kwargs)
        if call.hooked:
            self._call_hooks(gate, call, args, kwargs, made)
        return args, kwargs, (made,)

    def _call_hooks(self, gate: Gate, call: TracedCall, args: Any, kwargs: Any, made: Any) -> None:
        """Of the module that is answered, and those in it, with what stands for values."""
        module = self.runner.model.get_submodule(gate.path)
        for hooked in call.hooked:
            values = (args, kwargs, made)
            if hooked.path:
                known = (self.results or {}).get((self.number - 1, hooked.place), {})
                leaves = [
                    known.get(n, self._placeholder(leaf)) if isinstance(leaf, TensorLike) else leaf
                    for n, leaf in enumerate(hooked.leaves)
                ]
                values = tree_unflatten(leaves, hooked.tree)
            for n, leaf in enumerate(tree_flatten(values)[0]):
                if isinstance(leaf, torch.Tensor):
                    self._see(Origin(None, self.number - 1, n, hooked.place), leaf)
            call_hooks(hooked, module, *values)

    def _next_call(self, gate: Gate) -> TracedCall:
        call = self._check_call(gate)
        self.number += 1
        return call

    def _check_call(self, gate: Gate) -> TracedCall:
        calls = self.known.part.calls
        call = calls[self.number] if self.number < len(calls) else None
        if call is None or call.path != gate.path:
            raise PipelineTraceError(
                f"pipeline: the forward calls {gate.path!r} where the trace of a batch with the same shapes called "
                f"{call.path if call is not None else 'nothing'!r}; calls of modules must not depend on values",
                self.runner.entry.source,
            )
        return call

    def _leaves(self, gate: Gate, args: Any, kwargs: Any) -> list[DTensor]:
        boundary = self.leaves
        leaves = _leaves_of(*(self._replace(args, kwargs) if self.replaced else (args, kwargs)))
        if len(leaves) != boundary.num_leaves:
            raise PipelineTraceError(
                f"pipeline: {gate.path!r} is called with {len(leaves)} values, but with {boundary.num_leaves} in the "
                "trace",
                self.runner.entry.source,
            )
        later = range(len(boundary.leaves), boundary.num_tensors)
        for n in later:
            if n not in self.found:
                raise self._not_made(self.stage + 1, boundary, n)
        others, _ = self._replace(tuple(self.found[n] for n in later), {})
        made: list[Any] = [self._as_dtensor(leaf) for leaf in (*(leaves[n] for n in boundary.leaves), *others)]
        return [one.detach() if n in boundary.detached else one for n, one in enumerate(made)]

    def _not_made(self, stage: int, boundary: Boundary, number: int) -> PipelineTraceError:
        origin = boundary.origins[number][0]
        where = getattr(origin.function[0], "__name__", origin.function[0]) if origin.function is not None else None
        where = self.known.part.calls[origin.number].path if where is None else where
        return PipelineTraceError(
            f"pipeline: stage {stage} needs a tensor of shape {boundary.shapes[number]} that {where} returned in the "
            f"trace of a batch with the same shapes, but that stage {self.stage} did not receive; what the forward "
            "computes around modules must not depend on values",
            self.runner.entry.source,
        )

    def _as_dtensor(self, leaf: Any) -> DTensor:
        if isinstance(leaf, DTensor):
            return leaf
        return DTensor.from_local(leaf, self.runner.mesh, [Replicate()] * self.runner.mesh.ndim, run_check=False)

    def _receive(self, args: Any, kwargs: Any) -> Any:
        leaves, tree = tree_flatten((args, kwargs))
        writes = self.stage in self.known.part.writes
        arrived = [Apart.apply(one) if writes and one.requires_grad else one for one in self.received]
        missing = set(range(len(self.enters.leaves), self.enters.num_tensors)) - {n for n, _ in self.stand_ins}
        if missing:
            raise self._not_made(self.stage, self.enters, min(missing))
        for n, stand_in in self.stand_ins:
            self.replaced[id(stand_in)] = (stand_in, arrived[n])
        for n, received in zip(self.enters.leaves, arrived):
            self.replaced[id(leaves[n])] = (leaves[n], received)
            leaves[n] = received
        return tree_unflatten(leaves, tree)

    def _replace(self, args: Any, kwargs: Any) -> Any:
        replaced = self.replaced
        if all(type(v) in _LEAVES for v in args) and all(type(v) in _LEAVES for v in kwargs.values()):
            given = tuple(replaced[id(v)][1] if id(v) in replaced else v for v in args)
            return given, {name: replaced[id(v)][1] if id(v) in replaced else v for name, v in kwargs.items()}
        leaves, tree = tree_flatten((args, kwargs))
        return tree_unflatten([replaced[id(v)][1] if id(v) in replaced else v for v in leaves], tree)

    def _stand_in(self, call: TracedCall, args: Any, kwargs: Any) -> Any:
        runner = self.runner
        whole = self.known.whole.calls[self.number - 1]
        if whole.draws:
            generator = default_generator(runner.device)
            state = runner.states.get(self.number)
            if state is None:
                for draw in whole.draws:
                    draw.skip(generator)
                runner.states[self.number] = generator.get_state()
            else:
                generator.set_state(state)
        given = tree_flatten((args, kwargs))[0] if call.same else ()
        known = (self.results or {}).get(self.number - 1, call.leaves)
        leaves = [
            given[call.same[n]] if n in call.same else self._placeholder(leaf) if isinstance(leaf, TensorLike) else leaf
            for n, leaf in enumerate(known)
        ]
        self._see_leaves(self.number - 1, leaves)
        return tree_unflatten(leaves, call.tree)

    def _placeholder(self, like: TensorLike) -> DTensor:
        """A tensor that takes no memory, and whose values would be seen where they are used: nan."""
        mesh = self.runner.mesh
        value = float("nan") if like.dtype.is_floating_point else 0
        local = torch.full((), value, dtype=like.dtype, device=self.runner.device).expand(like.shape)
        spec = make_spec(mesh, [Replicate()] * mesh.ndim, like.shape, contiguous_stride(like.shape), like.dtype)
        return make_dtensor(local, spec)


class _Arrived(TorchFunctionMode):
    """Gives functions what a stage has received in place of what stands for it in the forward around its modules."""

    def __init__(self, replace: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self._replace = replace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = self._replace(args, kwargs or {})
        return func(*args, **kwargs)


class Apart(torch.autograd.Function):
    """The same values as a tensor of its own, for ops that write in place: to it (it is no leaf, and no view of one), or to
    what it was made of."""

    @staticmethod
    def forward(ctx: Any, received: DTensor) -> DTensor:
        return (
            make_dtensor(local_of(received), spec_of(received)) if isinstance(received, DTensor) else received.clone()
        )

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def end_forward(model: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of the model itself: it ends with the stage that runs."""

    def run_stage(*args: Any, **kwargs: Any) -> Any:
        run = current_run()
        if not isinstance(run, StageRun):
            raise PipelineCallError(
                f"this {type(model).__name__} runs in stages, so that no rank can run its whole forward; call "
                ".step(**batch) or .evaluate(**batch) instead"
            )
        with run.around_forward():
            try:
                return forward(*args, **kwargs)
            except StageEnd:
                return tuple(run.made or ())

    return run_stage

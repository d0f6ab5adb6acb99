"""One stage's forward of one micro-batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode

from vescale.compat import local_of, make_dtensor, make_spec, no_torch_function, spec_of
from vescale.compat.tensor_subclasses import tree_flatten, tree_unflatten
from vescale.errors import PipelineCallError, PipelineTraceError
from vescale.pipeline._batches import Signature
from vescale.pipeline._gates import Gate, StageEnd, current_run
from vescale.pipeline._trace import TensorLike, TracedCall
from vescale.placements import contiguous_stride
from vescale.plans import PipelineEntry
from vescale.rng import default_generator

__all__ = ["StageRun", "end_forward"]


class Surroundings(Protocol):
    """What a forward reads of its runner; ``states``: of the generator behind calls that were skipped, by their number."""

    mesh: DeviceMesh
    device: torch.device
    entry: PipelineEntry
    states: dict[int, torch.Tensor]


class StageRun:
    """One forward of one stage: earlier modules answer with placeholders, and the forward ends where the next begins."""

    def __init__(self, runner: Surroundings, known: Signature, stage: int, received: Sequence[DTensor]) -> None:
        self.runner, self.known, self.stage, self.received = runner, known, stage, received
        self.begun = stage == 0
        self.number = 0  # of the next call of a gated module
        self.replaced: dict[int, tuple[Any, DTensor]] = {}
        self.made: list[DTensor] | None = None
        self.depth = 0
        self.loss_mode: Callable[[], Any] | None = None
        self.at_begin: Callable[[], None] | None = None

    @contextlib.contextmanager
    def around_forward(self) -> Iterator[None]:
        """Around the forward of the model itself."""
        with contextlib.ExitStack() as stack:
            if self.stage in self.known.part.outside:
                stack.enter_context(_Arrived(self._replace))
            mode = self.loss_mode() if self.loss_mode is not None else None
            if mode is not None:
                self.at_begin = mode.restart
                stack.enter_context(mode)
            yield

    def call(self, gate: Gate, proceed: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.depth:
            return proceed(*args, **kwargs)
        with no_torch_function():  # what happens here is no part of the model
            args, kwargs, answer = self._answer(gate, args, kwargs)
        if answer is not None:
            return answer[0]
        self.depth += 1
        try:
            return proceed(*args, **kwargs)
        finally:
            self.depth -= 1

    def _answer(self, gate: Gate, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, tuple[Any] | None]:
        """Arguments for the module's call, and what it returns where it does not run."""
        if gate.begins == self.stage + 1 and self.begun:
            self.made = self._leaves(gate, args, kwargs)
            raise StageEnd
        if gate.begins == self.stage and not self.begun:
            self.begun = True
            if self.at_begin is not None:
                self.at_begin()
            args, kwargs = self._receive(args, kwargs)
        elif self.replaced:
            args, kwargs = self._replace(args, kwargs)
        call = self._next_call(gate)
        return args, kwargs, None if self.begun else (self._stand_in(call),)

    def _next_call(self, gate: Gate) -> TracedCall:
        calls = self.known.part.calls
        call = calls[self.number] if self.number < len(calls) else None
        self.number += 1
        if call is None or call.path != gate.path:
            raise PipelineTraceError(
                f"pipeline: the forward calls {gate.path!r} where the trace of a batch of the same shapes called "
                f"{call.path if call is not None else 'nothing'!r}; the calls of modules must not depend on values",
                self.runner.entry.source,
            )
        return call

    def _leaves(self, gate: Gate, args: Any, kwargs: Any) -> list[DTensor]:
        boundary = self.known.part.boundaries[self.stage + 1]
        leaves, _ = tree_flatten(self._replace(args, kwargs) if self.replaced else (args, kwargs))
        if len(leaves) != boundary.num_leaves:
            raise PipelineTraceError(
                f"pipeline: {gate.path!r} is called with {len(leaves)} values, and with {boundary.num_leaves} in the trace",
                self.runner.entry.source,
            )
        return [self._as_dtensor(leaves[n]) for n in boundary.leaves]

    def _as_dtensor(self, leaf: Any) -> DTensor:
        if isinstance(leaf, DTensor):
            return leaf
        return DTensor.from_local(leaf, self.runner.mesh, [Replicate()] * self.runner.mesh.ndim, run_check=False)

    def _receive(self, args: Any, kwargs: Any) -> Any:
        leaves, tree = tree_flatten((args, kwargs))
        for n, received in zip(self.known.part.boundaries[self.stage].leaves, self.received, strict=True):
            if received.requires_grad and self.stage in self.known.part.writes:
                received = _Written.apply(received)
            self.replaced[id(leaves[n])] = (leaves[n], received)
            leaves[n] = received
        return tree_unflatten(leaves, tree)

    def _replace(self, args: Any, kwargs: Any) -> Any:
        leaves, tree = tree_flatten((args, kwargs))
        return tree_unflatten([self.replaced[id(v)][1] if id(v) in self.replaced else v for v in leaves], tree)

    def _stand_in(self, call: TracedCall) -> Any:
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
        leaves = [self._placeholder(leaf) if isinstance(leaf, TensorLike) else leaf for leaf in call.leaves]
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


class _Written(torch.autograd.Function):
    """What was received, as a tensor that ops may write to in place: it is no leaf, and no view of one."""

    @staticmethod
    def forward(ctx: Any, received: DTensor) -> DTensor:
        return make_dtensor(local_of(received), spec_of(received))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def end_forward(model: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of the model itself: it ends with the stage that runs."""

    def run_stage(*args: Any, **kwargs: Any) -> Any:
        run = current_run()
        if not isinstance(run, StageRun):
            raise PipelineCallError(
                f"this {type(model).__name__} runs in stages, none of which is the model; call .step(**batch) or "
                ".evaluate(**batch) in place of its forward"
            )
        try:
            with run.around_forward():
                return forward(*args, **kwargs)
        except StageEnd:
            return tuple(run.made or ())

    return run_stage

"""``Runner``: runs the stages of this rank, by a schedule, on the micro-batches of a batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from vescale.compat import make_dtensor, make_spec, no_torch_function
from vescale.compat.random_ops import without_native_fills
from vescale.compat.tensor_subclasses import tree_flatten, tree_unflatten
from vescale.pipeline._cut import Cut
from vescale.pipeline._gates import Gate, StageEnd, current_run, running
from vescale.pipeline._headers import Header, HeaderExchange
from vescale.pipeline._loss import BatchLoss
from vescale.pipeline._schedule import Schedule, build
from vescale.pipeline._stage import ModelStage
from vescale.pipeline._ties import Ties
from vescale.pipeline._trace import TensorLike, Trace, TracedCall, trace
from vescale.placements import contiguous_stride
from vescale.plans import PipelineEntry, PlanError
from vescale.rng import MicrobatchRows, default_generator, drawing_rows
from vescale.runtime import finish_gradients, no_sync

__all__ = ["Runner", "microbatches_of"]


class _Signature:
    """What is known of batches of one signature: traces, headers and the rows of random numbers."""

    def __init__(self, whole: Trace, part: Trace, headers: HeaderExchange, entry: PipelineEntry) -> None:
        self.whole, self.part, self.headers = whole, part, headers
        self.dims = _batch_dims(whole, part, entry)


class Runner:
    """Runs steps. ``model`` is parallelized over ``mesh``, the mesh of one stage's ranks; ``group`` connects the stages."""

    def __init__(
        self,
        model: nn.Module,
        skeleton: nn.Module,
        cut: Cut,
        entry: PipelineEntry,
        schedule: Schedule,
        mesh: DeviceMesh,
        group: dist.ProcessGroup,
        place: str,
    ) -> None:
        self.model, self.skeleton, self.cut, self.entry, self.schedule = model, skeleton, cut, entry, schedule
        self.mesh, self.group, self._place = mesh, group, place
        self.device = torch.device(mesh.device_type)
        self.rank = dist.get_rank(group)
        own = schedule.stages_of(self.rank)
        self.stages = [
            ModelStage(self, model, index, cut.num_stages, self.device, group, mesh) for index in own  # type: ignore[arg-type]
        ]
        self._torch_schedule = build(entry, list(self.stages), lambda output, number: number.new_zeros(()))
        for stage in self.stages:
            stage.stage_index_to_group_rank = dict(enumerate(schedule.rank_of))
        self.ties = Ties(model, cut, schedule, group, self.rank)
        self._signatures: dict[Any, _Signature] = {}
        self._known: _Signature | None = None
        self._batches: list[dict[str, Any]] = []
        self._loss: BatchLoss | None = None
        self._totals: list[torch.Tensor] = []
        self._counts: list[Any] = []
        self._states: dict[int, torch.Tensor] = {}

    # A step

    def step(self, batch: Mapping[str, Any]) -> torch.Tensor:
        if not torch.is_grad_enabled():
            raise RuntimeError("pipeline: .step() under torch.no_grad() has no gradients; call .evaluate()")
        with self._on(batch):
            once = self.entry.reduce == "step"
            kept = self.ties.set_aside() if not callable(self.entry.loss) else self.ties.set_aside(everything=True)
            with no_sync(self.model) if once else contextlib.nullcontext():
                numbers = torch.arange(self.entry.microbatches)
                self._torch_schedule.step(target=numbers, return_outputs=False)
            if once:
                finish_gradients(self.model)
            loss, count = self._global_loss()
            self.ties.add_up()
            self.ties.put_back(kept, 1.0 if count is None else 1.0 / count)
        return loss

    def evaluate(self, batch: Mapping[str, Any]) -> torch.Tensor:
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad(), self._on(batch):
                self._forward_only()
                return self._global_loss()[0]
        finally:
            for module, mode in modes:
                module.training = mode

    def _forward_only(self) -> None:
        """Every stage's forward of every micro-batch; a rank's stages in order, so that nobody waits in a circle."""
        by_index = {stage.stage_index: stage for stage in self.stages}
        pending: list[Any] = []
        for stage in self.stages:
            stage.has_backward = False
            stage.clear_runtime_states()
        for mb in range(self.entry.microbatches):
            for stage in self.stages:
                index = stage.stage_index
                if index - 1 not in by_index:
                    _wait(_start(stage.get_fwd_recv_ops(mb)))
                made = stage.forward_one_chunk(mb, (), {})
                if index + 1 in by_index:
                    by_index[index + 1].set_local_fwd_input(made, mb)
                else:
                    pending += _start(stage.get_fwd_send_ops(mb))
        _wait(pending)
        for stage in self.stages:
            stage.clear_runtime_states()

    def _global_loss(self) -> tuple[torch.Tensor, float | None]:
        """The loss of the whole batch on every rank, and the count of a callable loss. Communication: one broadcast."""
        last = self.schedule.rank_of[-1]
        both = torch.zeros(2, dtype=torch.float64)
        if self.rank == last:
            both[0] = sum(float(total) for total in self._totals)
            both[1] = sum(float(count) for count in self._counts) if self._counts else -1.0
        both = both.to(self.device)
        dist.broadcast(both, dist.get_global_rank(self.group, last), group=self.group)
        value, count = both.tolist()
        dtype = self._loss_dtype()
        if not callable(self.entry.loss):
            return torch.tensor(value, dtype=dtype, device=self.device), None
        return torch.tensor(value / count if count else float("nan"), dtype=dtype, device=self.device), count or 1.0

    def _loss_dtype(self) -> torch.dtype:
        return next((p.dtype for p in self.skeleton.parameters() if p.dtype.is_floating_point), torch.float32)

    @contextlib.contextmanager
    def _on(self, batch: Mapping[str, Any]) -> Iterator[None]:
        """The batch whose micro-batches stages run. The generator is afterwards where one device leaves it."""
        self._batches = microbatches_of(batch, self.entry)
        known = self._known = self._signature(batch, self.model.training)
        self._loss = BatchLoss(self.entry, known.whole.losses, batch)
        self._totals, self._counts, self._states = [], [], {}
        generator = default_generator(self.device)
        before = generator.get_state()
        self._start_state = before
        if known.whole.draws:
            without_native_fills()
        try:
            yield
            generator.set_state(before)
            for draw in known.whole.draws:
                draw.skip(generator)
        finally:
            self._batches, self._states = [], {}

    def _signature(self, batch: Mapping[str, Any], training: bool) -> _Signature:
        key = (training, *sorted((name, _like(value)) for name, value in batch.items()))
        found = self._signatures.get(key)
        if found is None:
            self.skeleton.train(training)
            for module, twin in zip(self.model.modules(), self.skeleton.modules()):
                twin.training = module.training
            whole = trace(self.skeleton, self.cut, batch, self.entry.source)
            part = trace(self.skeleton, self.cut, self._batches[0], self.entry.source)
            headers = HeaderExchange(f"{self._place}/{len(self._signatures)}")
            found = self._signatures[key] = _Signature(whole, part, headers, self.entry)
        return found

    # What stages ask for

    def header(self, stage: int) -> Sequence[Header]:
        assert self._known is not None
        return self._known.headers.get(stage)

    def tell_header(self, stage: int, headers: Sequence[Header]) -> None:
        assert self._known is not None
        self._known.headers.tell(stage, headers)

    def around_backward(self, microbatch: int) -> Any:
        assert self._known is not None
        return drawing_rows(MicrobatchRows(self.entry.microbatches, microbatch, self._known.dims))

    def forward(self, stage: int, microbatch: int, received: Sequence[DTensor]) -> tuple[list[DTensor], Any]:
        known = self._known
        assert known is not None and self._loss is not None
        run = _StageRun(self, known, stage, received)
        generator = default_generator(self.device)
        generator.set_state(self._start_state)
        batch = self._batches[microbatch]
        rows = MicrobatchRows(self.entry.microbatches, microbatch, known.dims)
        with drawing_rows(rows), running(run):
            run.loss_mode = self._loss.around_forward if stage == self.cut.num_stages - 1 else None
            out = self.model(**batch)
        if stage < self.cut.num_stages - 1:
            if run.made is None:
                raise PlanError(f"pipeline: stage {stage} ran to the end of the model's forward", self.entry.source)
            return run.made, None
        if callable(self.entry.loss):
            total, count = self.entry.loss(out, batch)
            self._counts.append(_number(count))
        else:
            total = self._loss.share(out, batch)
        if isinstance(total, DTensor) and any(p.is_partial() for p in total.placements):
            total = total.redistribute(total.device_mesh, [Replicate()] * total.device_mesh.ndim)
        self._totals.append(_number(total.detach()))
        return [], total


class _StageRun:
    """One forward of one stage: earlier modules answer with placeholders, and the forward ends where the next begins."""

    def __init__(self, runner: Runner, known: _Signature, stage: int, received: Sequence[DTensor]) -> None:
        self.runner, self.known, self.stage, self.received = runner, known, stage, received
        self.begun = stage == 0
        self.number = 0  # of the next call of a gated module
        self.replaced: dict[int, tuple[Any, DTensor]] = {}
        self.made: list[DTensor] | None = None
        self.depth = 0
        self.loss_mode: Callable[[], Any] | None = None

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
            raise PlanError(
                f"pipeline: the forward calls {gate.path!r} where the trace of a batch of the same shapes called "
                f"{call.path if call is not None else 'nothing'!r}; the calls of modules must not depend on values",
                self.runner.entry.source,
            )
        return call

    def _leaves(self, gate: Gate, args: Any, kwargs: Any) -> list[DTensor]:
        boundary = self.known.part.boundaries[self.stage + 1]
        leaves, _ = tree_flatten((args, kwargs))
        if len(leaves) != boundary.num_leaves:
            raise PlanError(
                f"pipeline: {gate.path!r} is called with {len(leaves)} values, and was with {boundary.num_leaves} in the trace",
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
            state = runner._states.get(self.number)
            if state is None:
                for draw in whole.draws:
                    draw.skip(generator)
                runner._states[self.number] = generator.get_state()
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


def end_forward(model: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of the model itself: it ends with the stage that runs."""

    def run_stage(*args: Any, **kwargs: Any) -> Any:
        run = current_run()
        if run is None:
            raise RuntimeError(
                f"this {type(model).__name__} runs in stages, none of which is the model; call .step(**batch) or "
                ".evaluate(**batch) in place of its forward"
            )
        mode = run.loss_mode() if run.loss_mode is not None else None  # type: ignore[attr-defined]
        try:
            with mode if mode is not None else contextlib.nullcontext():
                return forward(*args, **kwargs)
        except StageEnd:
            return tuple(run.made)  # type: ignore[attr-defined]

    return run_stage


def microbatches_of(batch: Mapping[str, Any], entry: PipelineEntry) -> list[dict[str, Any]]:
    """The micro-batches of a batch: equal parts of each tensor along dim 0.

    Tensors without dims, tensors of one row beside others of several, and other values go to every micro-batch as they
    are. Raises PlanError for sizes that cannot be cut.
    """
    m = entry.microbatches
    rows = {name: value.shape[0] for name, value in batch.items() if isinstance(value, torch.Tensor) and value.ndim}
    size = max(rows.values(), default=0)
    other = {name: n for name, n in rows.items() if n not in (1, size)}
    if not rows or other:
        raise PlanError(
            f"pipeline: the batch has {'no tensors' if not rows else f'tensors of different sizes in dim 0: {rows}'}; give "
            ".step() tensors that all have the batch in dim 0",
            entry.source,
        )
    if size % m:
        raise PlanError(
            f"pipeline: a batch of {size} rows cannot be cut into {m} equal micro-batches; give a multiple of {m} rows, or "
            "another microbatches=",
            entry.source,
        )
    part = size // m

    def cut(name: str, value: Any, index: int) -> Any:
        return value[index * part : (index + 1) * part] if name in rows and rows[name] == size else value

    return [{name: cut(name, value, index) for name, value in batch.items()} for index in range(m)]


def _batch_dims(whole: Trace, part: Trace, entry: PipelineEntry) -> dict[tuple[int, ...], int | None]:
    """For each shape that is drawn in a micro-batch, its dim that is cut. Raises PlanError where that is ambiguous."""
    m = entry.microbatches
    if [d.op for d in whole.draws] != [d.op for d in part.draws]:
        raise PlanError(
            f"pipeline: the forward draws {len(whole.draws)} times for the whole batch, and {len(part.draws)} times for a "
            "micro-batch; its random numbers cannot be those of one device",
            entry.source,
        )
    found: dict[tuple[int, ...], int | None] = {}
    for big, small in zip(whole.draws, part.draws):
        different = [d for d, (a, b) in enumerate(zip(big.shape, small.shape)) if a != b]
        fits = len(big.shape) == len(small.shape) and len(different) <= 1
        if not fits or any(big.shape[d] != m * small.shape[d] for d in different):
            raise PlanError(
                f"pipeline: {small.op.name} draws for a tensor of shape {big.shape} of the whole batch, and {small.shape} of a "
                f"micro-batch, which is not one of {m} parts of it along a dim; its random numbers cannot be those of one "
                "device",
                entry.source,
            )
        dim = different[0] if different else None
        if found.setdefault(small.shape, dim) != dim:
            raise PlanError(
                f"pipeline: tensors of shape {small.shape} are drawn that depend on the batch, and others that do not; give "
                "one of them another shape",
                entry.source,
            )
    return found


def _like(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.dtype}"
    return f"{type(value).__name__} {value!r}"[:200]


def _number(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach() if isinstance(value, torch.Tensor) else value


def _start(ops: list[dist.P2POp]) -> list[Any]:
    return dist.batch_isend_irecv(ops) if ops else []


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()

"""``Runner``: runs the stages of this rank, by a schedule, on the micro-batches of a batch."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import Node
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from vescale.checks import describe, start_checks_among
from vescale.comm import record, requested_by
from vescale.compat import no_torch_function, own_part
from vescale.compat.random_ops import without_native_fills
from vescale.compat.tensor_subclasses import tree_leaves
from vescale.errors import PipelineCallError, PipelineTraceError, PipelineWarning
from vescale.gradients import StageShare, StepHooks, set_shares
from vescale.ir import state_unchanged
from vescale.pipeline._batch_reads import Place
from vescale.pipeline._batches import (
    MOST_BRANCHES,
    Signature,
    inputs_of,
    like,
    microbatches_of,
    rows_error,
    traced_pair,
    warn_of_rows,
)
from vescale.pipeline._cut import Cut
from vescale.pipeline._gates import running
from vescale.pipeline._gradient_trial import GradientTrial, refused_gradients
from vescale.pipeline._headers import Header, HeaderExchange
from vescale.pipeline._local_inputs import LocalInputs
from vescale.pipeline._loss import BatchLoss
from vescale.pipeline._loss_path import check_loss, output_at
from vescale.pipeline._one_by_one import OneByOne
from vescale.pipeline._row_trial import AGAIN, CHANGES, NOWHERE, TOGETHER, RowTrial, around_call, changed
from vescale.pipeline._schedule import Action, Schedule, build, releases
from vescale.pipeline._settings import Settings
from vescale.pipeline._stage import Backward, ModelStage, backward_of
from vescale.pipeline._stage_results import Results, as_leaves, cloned, mapped, parts_of, seeded, seeds_of, together
from vescale.pipeline._stage_run import Apart, StageRun
from vescale.pipeline._staged_program import stages_of_unit
from vescale.pipeline._step_failures import StepFailures
from vescale.pipeline._ties import Ties
from vescale.pipeline._traced import Origin, Trace
from vescale.pipeline._written_buffers import WrittenBuffer, buffers_of_forward, refuse_assigned, written_buffers
from vescale.plans import PipelineEntry, PlanError
from vescale.rng import MicrobatchRows, default_generator, drawing_rows
from vescale.runtime import (
    Runtime,
    finish_gradients,
    gradient_reducer,
    is_recomputed,
    kept_gathered,
    no_sync,
    recomputed_modules,
    reduce_units,
    unit_groups,
)

_NOTHING = contextlib.nullcontext()


class Runner:
    """Runs steps. ``model`` is parallelized over ``mesh``, the mesh of one stage's ranks; ``group`` connects the stages."""

    tries_rows = True  # False where stages receive no values

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
        column: str,
        local_inputs: LocalInputs,
    ) -> None:
        self.model, self.skeleton, self.cut, self.entry, self.schedule = model, skeleton, cut, entry, schedule
        self.mesh, self.group, self._place, self._local_inputs = mesh, group, f"{place}/{column}", local_inputs
        self.device = torch.device(mesh.device_type)
        self.rank = dist.get_rank(group)
        own = schedule.stages_of(self.rank)
        self.stages = [ModelStage(self, model, index, cut.num_stages, self.device, group, mesh) for index in own]
        self._torch_schedule = build(entry, list(self.stages), lambda output, number: number.new_zeros(()))
        for stage in self.stages:
            stage.stage_index_to_group_rank = dict(enumerate(schedule.rank_of))
        self._let_go = self._let_go_in_step = releases(schedule.actions[self.rank])
        self._gathered: Sequence[Any] = ()
        self._syncs = True
        self._has_unsynced = False  # the last step ran inside of no_sync
        self._resident: set[int] = set()
        self._ended: dict[int, set[int]] = {}  # the stages whose backward of a micro-batch has ended
        self.ties = Ties(model, cut, schedule, group, self.rank)
        self._failures = StepFailures(place, group.size() * mesh.size())
        self._share_out()
        runtime = Runtime.of(model)
        for budget in runtime.budgets.values() if runtime is not None else ():
            of = {path: stages_of_unit(path, cut, frozenset(own)) for path in budget.policies}
            held = schedule.held_together(self.rank)
            budget.moments = [{path: sum(map(one.__getitem__, of[path])) for path in of} for one in held]
        ranks = dist.get_process_group_ranks(group)
        self._checks, self._num_batches = start_checks_among(ranks, [(n,) for n in range(len(ranks))]), 0
        self._modules, self._num_traces = list(model.modules()), 0
        self._settings = Settings(model, skeleton, cut)
        self._signatures: dict[Any, list[Signature]] = {}
        self.answers: Mapping[Place, Any] = {}
        self._known: Signature | None = None
        self.is_tried = False
        self._kept: list[Results] | None = None  # by micro-batch: what the last stage has for a loss
        self._results: Results | None = None  # of the last stage's modules, which do not run then
        self._seeds: list[dict[tuple[int, int], torch.Tensor]] | None = None
        self.gradient_trial: GradientTrial | None = None
        self._batch: Mapping[str, Any] = {}
        self.batches: list[dict[str, Any]] = []
        self._inputs: list[dict[str, Any]] = []  # what of them the model's forward takes
        self._loss: BatchLoss | None = None
        self._whole_values: list[tuple[Origin, torch.Tensor, int | None]] = []
        self._losses: list[tuple[Any, Any]] = []  # of micro-batches, with their counts
        self._before: dict[
            str, tuple[torch.Tensor, tuple[int, ...]]
        ] = {}  # buffers and versions before the step, by name
        self._written: list[WrittenBuffer] = []
        self.states: dict[int, torch.Tensor] = {}

    def _share_out(self) -> None:
        """Tell norms of gradients that these parameters are a part of a larger model."""
        shares = {}
        for place, (name, stages) in enumerate(self.cut.owners.items()):
            ranks = {self.schedule.rank_of[stage] for stage in stages}
            if self.rank in ranks:
                shares[name] = StageShare(self.group, self.rank == min(ranks), place)
        set_shares(self.model, shares)

    # A step

    def step(self, batch: Mapping[str, Any]) -> torch.Tensor:
        if not torch.is_grad_enabled():
            raise PipelineCallError(
                "pipeline: .step() was called under torch.no_grad(), where there are no gradients; call .evaluate()"
            )
        syncs = self._syncs = gradient_reducer(self.model).syncs
        scales = callable(self.entry.loss)
        if scales and not syncs:
            raise PipelineCallError(
                "pipeline: .step() was called inside no_sync() with a callable loss, whose divisor is known only at "
                "the end of the step, after gradients have been accumulated; call .step() outside of no_sync(): it "
                "reduces gradients only once"
            )
        hooks = StepHooks(self.model.parameters())
        if not syncs and self.ties.are_among(hooks.parameters):
            raise PipelineCallError(
                "pipeline: .step() was called inside no_sync(), but the gradient of a parameter that several stages "
                "use has hooks: it is complete only after all stages have added their parts; call .step() outside of "
                "no_sync()"
            )
        with self._failures.shared(), self._on(batch) as known, hooks.muted():
            before_hooks = self._without_gradients(hooks.parameters)
            # The trial may refuse what the step has computed. What steps inside of no_sync have left is not taken apart.
            takes = scales or (known.trial is not None and syncs and not self._has_unsynced)
            self._has_unsynced = not syncs
            earlier = self._without_gradients(self.model.parameters()) if takes else []
            self.ties.set_aside()
            with kept_gathered(self.model) as self._gathered, no_sync(self.model):
                self._ended = {}
                if known.loss.whole:
                    self._seeds = self._loss_of_all(known)
                self.let_go_by(self._let_go_in_step)
                numbers = torch.arange(self.entry.microbatches)
                self._torch_schedule.step(target=numbers, return_outputs=False)
            finish_gradients(self.model, units=self.entry.reduce == "step")
            for group in self._gathered:
                group.reshard()
            loss, count = self._global_loss()
            if syncs:
                self.ties.complete()
            refused = self._end_trial(known)
            if refused is not None:
                for parameter, before in earlier:
                    parameter.grad = before
                raise refused
            if takes:
                _add(earlier, count)
        hooks.run([gradient for _, gradient in before_hooks])
        return loss

    def _without_gradients(self, parameters: Iterable[Any]) -> list[tuple[Any, torch.Tensor | None]]:
        """The parameters with their gradients, which are taken away."""
        found = [(parameter, parameter.grad) for parameter in parameters]
        for parameter, _ in found:
            parameter.grad = None
        return found

    def evaluate(self, batch: Mapping[str, Any]) -> torch.Tensor:
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.no_grad(), self._failures.shared(), self._on(batch) as known:
                with self._gathering():
                    if known.loss.whole:
                        self._loss_of_all(known)
                    else:
                        OneByOne(self).run()
                refused = self._end_trial(known)
                if refused is not None:
                    raise refused
                return self._global_loss()[0]
        finally:
            for module, mode in modes:
                module.training = mode

    @contextlib.contextmanager
    def _gathering(self) -> Iterator[None]:
        """Around forwards without backward."""
        with kept_gathered(self.model) as self._gathered:
            yield
        for group in self._gathered:
            group.reshard()

    def _global_loss(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The loss of the whole batch on every rank, and the count of a callable loss. Communication: one broadcast, for
        which the host does not wait where there is a device."""
        last = self.schedule.rank_of[-1]
        both = torch.zeros(2, dtype=torch.float64, device=self.device)
        if self.rank == last:
            for of, values in zip(both, zip(*self._losses)):
                for value in values:
                    of.add_(value.reshape(()) if isinstance(value, torch.Tensor) else value)
        with record("broadcast", self.group.size(), both.nbytes, requester="pipeline: the loss", group=self.group):
            dist.broadcast(both, dist.get_global_rank(self.group, last), group=self.group)
        loss, count = both
        is_counted = callable(self.entry.loss)
        return (loss / count if is_counted else loss.clone()).to(self._loss_dtype()), count if is_counted else None

    def _loss_dtype(self) -> torch.dtype:
        """The dtype of the output's loss; of a callable's, which one rank alone knows: that of parameters."""
        assert self._known is not None
        if not callable(self.entry.loss):
            found: torch.dtype = output_at(self._known.whole.output, self.entry.loss, self.entry.source).dtype
            return found
        return next((p.dtype for p in self.skeleton.parameters() if p.dtype.is_floating_point), torch.float32)

    @contextlib.contextmanager
    def _on(self, batch: Mapping[str, Any]) -> Iterator[Signature]:
        """The batch whose micro-batches stages run. The generator is afterwards where one device leaves it."""
        runtime = Runtime.of(self.model)
        if runtime is not None and runtime.missing_values is not None:
            runtime.missing_values.check(batch)
        batch = self._local_inputs.whole(batch)
        self._compare(batch)
        parts = microbatches_of(batch, self.entry)
        self._start_state = default_generator(self.device).get_state()
        self._settings.before_step()
        known = self._signature(batch, parts)
        self._use(known, batch, parts)
        try:
            try:
                yield known
            except BaseException:
                known.headers.forget_step()
                raise
            generator = default_generator(self.device)
            generator.set_state(self._start_state)
            for draw in known.whole.draws:
                draw.skip(generator)
            for buffer in self._written:
                buffer.end_step(self.schedule, self.group)
        finally:
            self._batch, self.batches, self._inputs, self.states, self._seeds = {}, [], [], {}, None
            self._written, self._before = [], {}

    def _use(self, known: Signature, batch: Mapping[str, Any], parts: list[dict[str, Any]]) -> None:
        """Run forwards of these micro-batches from now on."""
        whole = inputs_of(self.skeleton, batch, self.entry)
        self._known, self._batch, self.batches = known, batch, parts
        self._inputs = [{name: part[name] for name in whole} for part in parts]
        self.answers = known.answers(whole, self._inputs)
        self._loss = BatchLoss(self.entry, known, batch)
        self._losses, self.states = [], {}
        own = frozenset(self.schedule.stages_of(self.rank))
        self._written = written_buffers(
            self.model, known, self._before, lambda path: stages_of_unit(path, self.cut, own)
        )
        self._whole_values = [(s.origin, s.value(batch), s.dim) for s in known.loss.substitutes]
        known.headers.begin_step()
        if known.whole.draws:
            without_native_fills()

    def _compare(self, batch: Mapping[str, Any]) -> None:
        """All stages do the same with the same batch. (The ranks of one stage compare what its forwards are given.)"""
        checks = self._checks
        if not checks.is_on:
            return
        self._num_batches += 1
        checks.begin_forward(self._num_batches)
        given = sorted(batch.items()) if checks.compares_data else ()
        rows = [row for name, value in given for row in describe(name, value, fully=checks.is_due)]
        what = "a step" if torch.is_grad_enabled() else "an evaluation"
        checks.forward(f"the stages of {type(self.model).__name__}", what, rows, ())
        checks.tell()

    def _signature(self, batch: Mapping[str, Any], parts: list[dict[str, Any]]) -> Signature:
        """What is known of batches of this signature, whose forward reads the same values from them."""
        whole = inputs_of(self.skeleton, batch, self.entry)
        modes = bytes(module.training for module in self._modules)
        key = (modes, torch.is_grad_enabled(), *sorted((name, like(value)) for name, value in batch.items()))
        found = self._signatures.setdefault(key, [])
        numbers = self._settings.numbers()
        alike = [known for known in found if known.fits(whole)]
        for known in alike:
            if known.settings == numbers and known.chooses(whole):
                return known
        self._settings.before_trace()
        pair = traced_pair(self.skeleton, self.cut, self.entry, batch, parts[0])
        check_loss(pair[0].output, self.entry)
        refuse_assigned(pair[0].row_ops.assigned, self.cut, self.entry)
        written = self._settings.ignore_written()
        if written and self.entry.microbatches > 1 and self.entry.rows == "batch":
            again, _ = traced_pair(self.skeleton, self.cut, self.entry, batch, parts[0])
            if not again.row_ops.computes_as(pair[0].row_ops):
                raise rows_error(
                    f"the forward assigns {', '.join(map(repr, written))}, and computes with what it assigns: on one device "
                    "once for the batch",
                    self.entry,
                )
        numbers = self._settings.numbers()
        known = Signature(*pair, self._new_headers, self.entry)
        known.settings = numbers
        known.compare(found)
        for other in alike:
            if known.computes_as(other, batch):
                self._settings.ignore(other.settings, numbers)
                other.settings = known.settings = self._settings.numbers()
                other.ignores_sizes |= not other.chooses(whole)
                return other
        if self.entry.microbatches > 1 and known.of_rows:
            warn_of_rows(known.of_rows, self.entry)
        if self.tries_rows and self.entry.microbatches > 1 and self.entry.rows == "batch":
            self._try_rows(known, batch, parts, pair[0])
        if known.loss.whole and dist.get_rank() == 0:
            warnings.warn(known.loss.why_slow(), PipelineWarning, stacklevel=5)
        found[:] = [known, *found[: MOST_BRANCHES - 1]]
        return known

    def _new_headers(self) -> HeaderExchange:
        self._num_traces += 1
        return HeaderExchange(f"{self._place}/{self._num_traces}", self.device)

    @contextlib.contextmanager
    def _using(
        self, known: Signature, batch: Mapping[str, Any], parts: list[dict[str, Any]], count: Any
    ) -> Iterator[None]:
        """Inside, forwards are of these parts of the batch, each the ``count``-th part of its rows."""
        names = (
            "entry",
            "_known",
            "_batch",
            "batches",
            "_inputs",
            "answers",
            "_loss",
            "_whole_values",
            "_losses",
            "states",
            "_written",
        )
        before = {name: getattr(self, name, None) for name in names}
        self.entry, self.is_tried = replace(self.entry, microbatches=count), True
        try:
            self._use(known, batch, parts)
            yield
        finally:
            self.is_tried = False
            for name, value in before.items():
                setattr(self, name, value)

    def _results_of_forwards(self) -> tuple[list[Results], str]:
        """Run every stage's forward of every micro-batch, up to the loss, and leave the model as it was. Without gradients,
        if no code of the forward wants to have some: its graph goes with each micro-batch.
        Returns, for each micro-batch, what the last stage has for its loss (nothing on ranks without it); and in a
        trial, why it has failed here."""
        found: list[Results] = [{} for _ in self.batches]
        self._kept = found
        assert self._known is not None
        has_backward = torch.is_grad_enabled() and bool(self._known.whole.backward_code)
        try:
            with torch.set_grad_enabled(has_backward), self.unchanged():
                problem = OneByOne(self, may_fail=self.is_tried, has_backward=has_backward).run()
        finally:
            self._kept = None
        return found if found[0] and not problem else [], problem

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """What forwards write to the model's attributes and buffers is undone."""
        local = [b.to_local() if isinstance(b, DTensor) else b for b in self.model.buffers()]
        buffers = [(buffer, buffer.clone()) for buffer in local]
        try:
            with state_unchanged(self.model):
                yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)

    def _loss_of(self, microbatch: int, results: Results) -> torch.Tensor:
        """The last stage's forward with what its modules have returned."""
        self._results = results
        try:
            _, (roots, _) = self.forward(self.cut.num_stages - 1, microbatch, results[-1])
        finally:
            self._results = None
        return roots[0]

    def _loss_of_all(self, known: Signature) -> list[dict[tuple[int, int], torch.Tensor]]:
        """Compute the loss of all rows together, and with gradients enabled those of parameters that it is computed of
        around modules. Returns for each micro-batch the gradients of what the last stage computes the loss of.
        Communication: the messages of all forwards, and one broadcast."""
        count, rows = self.entry.microbatches, known.loss.rows
        assert known.of_all is not None and rows is not None
        known.headers, headers = known.of_all.headers, known.headers  # without gradients
        try:
            known.headers.begin_step()
            parts, _ = self._results_of_forwards()
        finally:
            known.headers = headers
        if not parts:
            return []
        leaves = as_leaves(together(parts, rows)) if torch.is_grad_enabled() else together(parts, rows)
        with self._using(known.of_all, self._batch, [dict(self._batch)], 1):
            total = self._loss_of(0, mapped(Apart.apply, leaves))
            if torch.is_grad_enabled() and total.requires_grad:
                total.backward()
            losses = self._losses
        self._losses = losses
        return seeds_of(leaves, rows, count) if torch.is_grad_enabled() else []

    def _try_rows(self, known: Signature, batch: Mapping[str, Any], parts: list[dict[str, Any]], whole: Trace) -> None:
        """Run the first two micro-batches together, without gradients, for the first step to compare with; and compare the
        loss of what they return together and apart. Communication: forward messages of a micro-batch, and one all-reduce
        for each axis."""
        entry = self.entry
        both = microbatches_of(batch, entry, 2)[:1]
        count: Any = entry.microbatches / 2
        part = whole
        if count > 1:
            part = traced_pair(self.skeleton, self.cut, entry, batch, both[0], whole)[1]
        known_of_both = Signature(whole, part, self._new_headers, replace(entry, microbatches=count))
        trial = known.trial = known_of_both.trial = RowTrial(known, known_of_both, self.model)
        gradients, wrong = self._new_gradient_trial(whole, trial), 3
        with self._gathering(), self._trying(gradients):
            with self._using(known_of_both, batch, both, count):
                results, problem = self._results_of_forwards()
            if gradients is not None and self.first_of_all(int(not problem)):
                gradients.is_both = False
                with self._using(known, batch, parts[:2], entry.microbatches):
                    _, problem = self._results_of_forwards()
        with self._gathering():
            if known.loss.needs_modules:
                results = []
            elif not known.loss.whole and not known_of_both.loss.whole and known.loss.rows is None:
                with self._using(known, batch, parts[:2], entry.microbatches):  # where its rows are is not known
                    more, other = self._results_of_forwards()
                results, problem = [*more, *results], problem or other
            elif known.loss.rows is not None and results:
                both_of = {n: results[0][n] for n in known.loss.rows}
                results = [*parts_of(both_of, known.loss.rows, 2), both_of]
            if len(results) == TOGETHER + 1 and not known.loss.whole and not known_of_both.loss.whole:
                with OneByOne(self, may_fail=True).failing_together("the loss") as failed, self.unchanged():
                    wrong = min(self._try_loss(trial, batch, (parts[:2], both), results, most) for most in CHANGES)
                problem = "".join(failed)
        default_generator(self.device).set_state(self._start_state)
        found = self.first_of_all(0 if problem else wrong)
        if found and gradients is not None:
            refused = self._end_trial(known) or self._refused_gradients(gradients, whole.backward_code)
            if refused is not None:
                raise refused
        if found == 0:
            known.trial = None
            self._warn_of_memory(problem)
        elif found == 1:
            raise rows_error(
                "the loss depends on what an earlier forward has left in the model (an attribute or a buffer that the "
                "forward assigns or writes to): on one device once for the batch",
                entry,
            )
        elif found == 2:
            known.compute_loss_of_all(
                "the loss of two micro-batches together differs from the sum of their separate losses", entry
            )

    def _new_gradient_trial(self, whole: Trace, trial: RowTrial) -> GradientTrial | None:
        """If Python runs in the backward."""
        if not (torch.is_grad_enabled() and whole.backward_code):
            return None
        return GradientTrial(self.model, trial, self.cut.num_stages, is_scaled=callable(self.entry.loss))

    @contextlib.contextmanager
    def _trying(self, gradients: GradientTrial | None) -> Iterator[None]:
        """Inside, backwards are those of a trial."""
        if gradients is None:
            yield
            return
        self.gradient_trial = gradients
        try:
            with no_sync(self.model), StepHooks(self.model.parameters()).muted():
                yield
        finally:
            self.gradient_trial = None

    def _refused_gradients(self, gradients: GradientTrial, code: Sequence[str]) -> PlanError | None:
        """What all ranks raise. Communication: one all-reduce for each axis, and two more."""
        names = list(self.cut.owners)
        name = gradients.first_difference(self.axes(), self.device)
        number = self.first_of_all(names.index(name) if name else NOWHERE)
        return None if number == NOWHERE else refused_gradients(names[number], code, self.entry)

    def _warn_of_memory(self, problem: str) -> None:
        """On the first rank."""
        if dist.get_rank() == 0:
            here = f" ({problem})" if problem else ", on another rank"
            warnings.warn(
                f"pipeline: there is not enough memory to run the first two micro-batches together{here}, so that it "
                "was not tested whether modules make rows of the batch depend on each other; only the trace of the "
                "forward was checked. The step continues. To run the test, use more microbatches=, or a first step "
                "with shorter rows",
                PipelineWarning,
                stacklevel=6,
            )

    def _try_loss(
        self, trial: RowTrial, batch: Mapping[str, Any], given: Any, results: list[Results], most: float
    ) -> int:
        """``given``: the two micro-batches, and both as one. Returns 1 if the state of the model counts, 2 if the losses
        differ, else 3."""
        m = self.entry.microbatches
        for n in (TOGETHER, 0, 1, AGAIN):
            known, parts, count = (trial.apart, given[0], m) if n < TOGETHER else (trial.together, given[1], m / 2)
            of = results[min(n, TOGETHER)]
            leaves = as_leaves(of) if torch.is_grad_enabled() else of
            places = sorted(leaves, key=str)  # in one order for all runs
            dims = {place: trial.dims_of(place, self.cut.num_stages) for place in places}
            moved = [(x, dim) for place in dims for x, dim in zip(leaves[place], dims[place]) if dim is not None]
            others = {id(x): changed(x, most) for x, _ in moved}

            def moved_apart(x: torch.Tensor, others: Mapping[int, Any] = others) -> Any:
                return Apart.apply(others.get(id(x), x))

            with self._using(known, batch, parts, count):
                total = self._loss_of(n if n < TOGETHER else 0, mapped(moved_apart, leaves))
                trial.note_loss(n, total, self._losses[-1][1] if callable(self.entry.loss) else None, moved)
        return 1 if trial.state_counts() else 2 if trial.loss_differs() else 3

    def _end_trial(self, known: Signature) -> PlanError | None:
        """After the forwards that the trial compares with those of two micro-batches together: what all ranks raise."""
        trial, known.trial = known.trial, None
        if trial is None:
            return None
        place = self.first_of_all(trial.first_difference())
        if place == NOWHERE:
            return None
        default_generator(self.device).set_state(self._start_state)
        return rows_error(
            f"the forward computes something across the rows of the batch: {trial.describe(place)}", self.entry
        )

    def axes(self) -> list[dist.ProcessGroup]:
        """The groups of the mesh of one stage."""
        return [self.mesh.get_group(axis) for axis in range(self.mesh.ndim)]

    def first_of_all(self, place: int, groups: Sequence[dist.ProcessGroup] | None = None) -> int:
        """The smallest on any rank. Communication: one all-reduce for each axis."""
        found = torch.tensor(place, dtype=torch.int64, device=self.device)
        for group in groups if groups is not None else [self.group, *self.axes()]:
            dist.all_reduce(found, dist.ReduceOp.MIN, group=group)
        return int(found)

    # What stages ask for

    def header(self, stage: int) -> Sequence[Header] | None:
        assert self._known is not None
        return self._known.headers.get(stage)

    def header_of_arrived(self, stage: int, arrived: list[torch.Tensor]) -> Sequence[Header]:
        assert self._known is not None
        return self._known.headers.of_arrived(stage, arrived)

    def tell_header(self, stage: int, headers: Sequence[Header] | None, *, follows: bool = False) -> None:
        assert self._known is not None
        self._known.headers.tell(stage, headers, follows=follows)

    def flags_of(self, stage: int) -> list[torch.Tensor]:
        assert self._known is not None
        return self._known.headers.message(stage)

    def returned(self, stage: int) -> Sequence[bool]:
        assert self._known is not None
        return self._known.headers.returned(stage)

    @contextlib.contextmanager
    def around_backward(self, stage: int, microbatch: int, kind: str) -> Iterator[Backward]:
        assert self._known is not None
        self._begin(stage, microbatch, kind)
        rows = MicrobatchRows(self.entry.microbatches, microbatch, self._known.dims)
        with drawing_rows(rows), requested_by(f"stage {stage}, micro-batch {microbatch}"):
            yield backward_of if self.gradient_trial is None else self.gradient_trial.backward
            if self.entry.reduce == "microbatch" and kind != "I" and self._syncs and self.gradient_trial is None:
                ended = self._ended.setdefault(microbatch, set())
                ended.add(stage)
                reduce_units(self.model, [g for g in unit_groups(self.model) if stage in self._stages_of(g) <= ended])

    def splits_backward(self) -> Callable[[Node], bool] | None:
        # A unit that is gathered for each backward would be gathered for both halves.
        if len(unit_groups(self.model)) > len(self._gathered):
            return None
        return functools.partial(is_recomputed, recomputed_modules(self.model))

    def _stages_of(self, group: Any) -> frozenset[int]:
        return stages_of_unit(group.path, self.cut, frozenset(self.schedule.stages_of(self.rank)))

    def let_go_by(self, let_go: dict[Action, tuple[int, ...]]) -> None:
        """Run by another order of forwards and backwards, in which parameters of stages may go."""
        self._resident, self._let_go = set(), let_go
        self._failures.note()

    def have_all_failed(self, what: str, number: int) -> bool:
        """Whether all ranks of the stage have run out of memory there, after ``number`` collectives."""
        return self._failures.all_out_of_memory(f"{what} in trial {self._num_traces}", number, self.mesh)

    def _begin(self, stage: int, microbatch: int, kind: str) -> None:
        """Let parameters go that no stage needs soon."""
        self._failures.note()
        gone = self._let_go.get(Action(stage, kind, microbatch), ())
        self._resident = (self._resident - set(gone)) | {stage}
        if gone:
            for group in self._gathered:
                if not self._stages_of(group) & self._resident:
                    group.reshard()

    def _check_draws(self, stage: int, known: Signature) -> None:
        """After a stage's first forward: the generator is where the whole batch's forward up to here leaves it."""
        generator = default_generator(self.device)
        found = generator.get_state()
        generator.set_state(self._start_state)
        for draw in known.whole.draws[: known.whole.draws_before.get(stage + 1)]:
            draw.skip(generator)
        if not torch.equal(generator.get_state(), found):
            raise PipelineTraceError(
                f"pipeline: the forward of stage {stage} draws other random numbers than its trace did, so that they "
                "would differ from one device; do not draw from the default generator in hooks, for local tensors, "
                "or depending on values of parameters",
                self.entry.source,
            )

    def forward(self, stage: int, microbatch: int, received: Sequence[DTensor]) -> tuple[list[DTensor], Any]:
        known = self._known
        assert known is not None and self._loss is not None
        run = StageRun(self, known, stage, received, self._values_of(microbatch))
        if known.whole.draws:
            default_generator(self.device).set_state(self._start_state)
        batch = self.batches[microbatch]
        rows = MicrobatchRows(self.entry.microbatches, microbatch, known.dims)
        self._begin(stage, microbatch, "F")
        is_last = stage == self.cut.num_stages - 1
        run.loss_mode = functools.partial(self._loss.around_forward, stage)
        results = self._follow(run, known, microbatch, received if is_last else None)
        with drawing_rows(rows), requested_by(f"stage {stage}, micro-batch {microbatch}"):
            around = buffers_of_forward(self._written, stage, run.ends_early) if self._written else _NOTHING
            with around, running(run):
                out = self.model(**self._inputs[microbatch])
            if is_last and not run.ends_early:
                takes = run.whole_values if callable(self.entry.loss) else None
                with takes or contextlib.nullcontext():
                    total = self._share(out, batch)
        if known.whole.draws and stage not in known.drawn and not run.ends_early:
            known.drawn.add(stage)
            self._check_draws(stage, known)
        if run.ends_early and self.gradient_trial is not None:
            return [], self.gradient_trial.begin(results)
        if run.ends_early:
            return [], seeded(results, self._seeds[microbatch]) if self._seeds else ([], None)
        if is_last:
            return [], ([total], None)
        if run.made is None:
            raise PipelineTraceError(
                f"pipeline: stage {stage} ran to the end of the model's forward", self.entry.source
            )
        if known.trial is not None and (number := known.trial.run_of(known, microbatch)) is not None:
            known.trial.sent(number, stage + 1, run.made)
        return run.made, None

    def _follow(self, run: StageRun, known: Signature, microbatch: int, received: Sequence[DTensor] | None) -> Results:
        """What the run is to do beside its forward. ``received``: by the last stage. Returns what it has for a loss, where
        that is computed apart."""
        if known.trial is None and self._results is None and self._kept is None and self._seeds is None:
            return {}
        trial = known.trial if self._results is None else None
        number = trial.run_of(known, microbatch) if trial is not None else None
        results: Results = {}
        run.results = self._results if received is not None else None
        keeps = received is not None and self._results is None and (self._kept is not None or self._seeds is not None)
        if keeps:
            run.ends_early = True
            results = self._kept[microbatch] if self._kept is not None else {}
            # Ops may write to what is kept.
            apart = Apart.apply if self._kept is None else torch.clone if self.gradient_trial else cloned
            with no_torch_function():
                results[-1] = [apart(x) for x in received or ()]
            if self._kept is not None:
                run.saw_hooked = lambda call, place, n, x: results.setdefault((call, place), {}).update({n: x})
        if number == TOGETHER:
            run.around_call = around_call

        def saw(call: int, result: Any) -> None:
            if trial is not None and number is not None:
                trial.returned(number, call, result)
            if keeps and known.whole.calls[call].is_read:
                with no_torch_function():
                    results[call] = [
                        apart(x) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
                        for x in tree_leaves(result)
                    ]

        if keeps or number is not None:
            run.saw_result = saw
        return results

    def _values_of(self, microbatch: int) -> dict[Origin, torch.Tensor]:
        """What a micro-batch takes from the whole batch."""

        def part(value: torch.Tensor, dim: int) -> torch.Tensor:
            size = round(value.shape[dim] / self.entry.microbatches)
            return value.narrow(dim, microbatch * size, size)

        return {origin: value if dim is None else part(value, dim) for origin, value, dim in self._whole_values}

    def _share(self, out: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        """What a micro-batch adds to the loss, which is noted."""
        assert self._loss is not None
        count: Any = 1.0 / len(self.batches)  # in all 1
        if callable(self.entry.loss):
            total, count = self.entry.loss(out, batch)
        else:
            total = self._loss.share(out, batch)
        if isinstance(total, DTensor) and any(p.is_partial() for p in total.placements):
            total = total.redistribute(total.device_mesh, [Replicate()] * total.device_mesh.ndim)
        self._losses.append((_number(total.detach()), _number(count)))
        return total


@torch.no_grad()
def _add(earlier: list[tuple[nn.Parameter, torch.Tensor | None]], count: torch.Tensor | None) -> None:
    """Add earlier gradients to those of this step, which are divided by ``count`` first."""
    for parameter, before in earlier:
        new = parameter.grad
        if new is not None and count is not None:
            own = own_part(new)
            wide = torch.promote_types(own.dtype, torch.float32)
            own.copy_(own.to(wide) * count.reciprocal().to(wide))
        if before is not None:
            if new is not None:
                before.add_(new)
            parameter.grad = before


def _number(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach() if isinstance(value, torch.Tensor) else value

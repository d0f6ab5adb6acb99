"""``OneByOne``: forwards, and backwards, of all stages without a schedule: of a loss of all rows, an evaluation, a trial."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist

from vescale.comm import record_comms
from vescale.errors import PipelineCallError
from vescale.pipeline._cut import Cut
from vescale.pipeline._gradient_trial import GradientTrial
from vescale.pipeline._schedule import Action, releases
from vescale.pipeline._stage import ModelStage

_ELSEWHERE = "on another rank"


class Stages(Protocol):
    """What this reads of a runner. ``batches``: the micro-batches; ``gradient_trial``: of backwards that are tried."""

    stages: list[ModelStage]
    batches: list[dict[str, Any]]
    cut: Cut
    gradient_trial: GradientTrial | None

    def header(self, stage: int) -> Any: ...

    def tell_header(self, stage: int, headers: None) -> None: ...

    def let_go_by(self, let_go: dict[Action, tuple[int, ...]]) -> None: ...

    def unchanged(self) -> AbstractContextManager[None]: ...

    def axes(self) -> list[dist.ProcessGroup]: ...

    def first_of_all(self, place: int, groups: Sequence[dist.ProcessGroup] | None = None) -> int: ...

    def have_all_failed(self, what: str, number: int) -> bool: ...


class OneByOne:
    """Runs the stages of a rank in order, so that nobody waits in a circle; each micro-batch to its end.

    With ``may_fail``, what runs out of memory on all ranks of its stage lets later stages go on without it. (If some of them
    wait in a collective, it is an error.) ``has_backward``: forwards build graphs, which :attr:`Stages.gradient_trial`, if
    there is one, goes through backwards.
    """

    def __init__(self, runner: Stages, *, may_fail: bool = False, has_backward: bool = False) -> None:
        self.runner, self.may_fail, self.has_backward = runner, may_fail, has_backward
        self._by_index = {stage.stage_index: stage for stage in runner.stages}
        self._pending: list[dist.Work] = []

    def run(self) -> str:
        """Returns why it has failed here. Communication: the stages' messages; with ``may_fail``, one all-reduce for each
        stage and axis, and in backwards more."""
        runner = self.runner
        count = range(len(runner.batches))
        runner.let_go_by(releases([Action(stage, "F", mb) for mb in count for stage in self._by_index]))
        for stage in runner.stages:
            stage.has_backward = self.has_backward
        self._clear()
        problem = ""
        for mb in count:
            if runner.gradient_trial is not None:
                with runner.unchanged():
                    problem = self._forward(mb)
                    goes_on = runner.first_of_all(int(not problem)) == 1
                    problem = self._backward(mb) if goes_on else problem or _ELSEWHERE
                if problem:
                    break
            else:
                problem = problem or self._forward(mb)
            if self.has_backward:
                self._clear()
        _wait(self._pending)
        self._clear()
        return problem

    def _clear(self) -> None:
        for stage in self.runner.stages:
            stage.clear_runtime_states()

    def _forward(self, mb: int) -> str:
        runner, by_index = self.runner, self._by_index
        problem, arrives = "", True
        for index, stage in by_index.items():
            if index - 1 not in by_index:
                arrives = not index or runner.header(index) is not None
                _wait(_start(stage.get_fwd_recv_ops(mb)) if arrives else [])
            if self.may_fail:
                arrives = runner.first_of_all(int(arrives), runner.axes()) == 1
            with self.failing_together(f"stage {index}") as failed:
                made = stage.forward_one_chunk(mb, (), {}) if arrives else []
            problem, arrives = problem or "".join(failed), arrives and not failed
            if not arrives:
                runner.tell_header(index + 1, None)
            elif index + 1 in by_index:
                by_index[index + 1].set_local_fwd_input(made, mb)
            else:
                self._pending += _start(stage.get_fwd_send_ops(mb))
        return problem

    def _backward(self, mb: int) -> str:
        """All ranks agree after each stage whether the one before comes next."""
        runner, by_index = self.runner, self._by_index
        for index in reversed(range(runner.cut.num_stages)):
            stage, failed = by_index.get(index), list[str]()
            if stage is not None:
                if index + 1 not in by_index:
                    _wait(_start(stage.get_bwd_recv_ops(mb)))
                with self.failing_together(f"the backward of stage {index}") as failed:
                    stage.backward_one_chunk(mb)
            if not runner.first_of_all(int(not failed)):
                return "".join(failed) or _ELSEWHERE
            if stage is not None and index - 1 in by_index:
                by_index[index - 1].set_local_bwd_input(stage.get_local_bwd_output(mb), mb)
            elif stage is not None:
                _wait(_start(stage.get_bwd_send_ops(mb)))
        return ""

    @contextlib.contextmanager
    def failing_together(self, what: str) -> Iterator[list[str]]:
        """Inside, with ``may_fail``, all ranks of a stage may run out of memory; yields why they have. If some of them wait
        for others, it is an error."""
        runner, failed = self.runner, list[str]()
        with record_comms() as ledger:
            try:
                yield failed
            except Exception as error:
                if not self.may_fail or not _is_out_of_memory(error):
                    raise
                failed.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
                if not runner.have_all_failed(what, len(ledger.records)):
                    raise PipelineCallError(
                        "pipeline: there is not enough memory to run the first two micro-batches together, and other ranks "
                        f"of the stage wait for this one ({failed[0]}); give more microbatches=, run a first step with "
                        "shorter rows, or give rows='microbatch' in plan.pipeline(...), with which nothing is tried"
                    ) from error


def _is_out_of_memory(error: Exception) -> bool:
    """Whether the error is of an allocation."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    texts = "out of memory", "can't allocate memory", "not enough memory"
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in texts)


def _start(ops: list[dist.P2POp]) -> list[dist.Work]:
    return dist.batch_isend_irecv(ops) if ops else []


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()

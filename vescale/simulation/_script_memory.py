"""Memory of a training script by the categories of :mod:`vescale.estimation`: which modules and optimizers there are, and
where the run is, is learned from PyTorch's global hooks."""

from __future__ import annotations

import time
import weakref
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from vescale.compat import in_backward
from vescale.estimation import Instant, MemoryLog, Rehearsal, classify, timeline_of
from vescale.runtime import current_activation, locate

_ROUNDING = 512  # of blocks of PyTorch's allocator for CUDA
_FIRST_STEPS = 3  # in which optimizers make their states


class ScriptMemory:
    """Hooks of this process, which stay.

    Attributes:
        log: all memory.
        seconds: processor time that the hooks have taken.
    """

    def __init__(self) -> None:
        self.log = MemoryLog(self._place)
        self.seconds = 0.0
        self._found = Rehearsal(self.log, 1)
        self._micro_step = 0
        self._phase = "start"
        self._first: int | None = None  # the instant of the first forward
        self._depth = 0
        self._has_gone_back = False
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        register_module_forward_pre_hook(self._enters)
        register_module_forward_hook(self._leaves, always_call=True)
        register_optimizer_step_pre_hook(self._optimizer_begins)
        register_optimizer_step_post_hook(self._optimizer_ends)

    def peak(self) -> tuple[int, str, dict[str, int]]:
        """Bytes at the peak, the instant, and its categories.

        From the first forward on: before it, a model may be whole on the host, from where its parts go to devices.
        """
        for model in list(self._models):
            classify(model, None, self._found)
        self.log.is_closed = True
        self._found.num_steps = self._micro_step + 1
        timeline = timeline_of(self._found, (), _ROUNDING)
        first = self._first if self._first is not None and self._first < len(timeline.total) else 0
        if not len(timeline.total):
            return 0, "", {}
        best = first + int(np.argmax(timeline.total[first:]))
        instant = timeline.instants[best]
        at = f"{instant.phase} {instant.module or ''}".rstrip()
        return int(timeline.total[best]), at, {name: size for name, size in timeline.at(best).items() if size}

    def _place(self) -> Instant:
        if in_backward():
            self._has_gone_back = True
            activation = current_activation()
            if activation is not None:
                return Instant(self._micro_step, "recompute", activation.frames[-1].path)
            found = locate()
            return Instant(self._micro_step, "backward", found.path if found is not None else None)
        activation = current_activation()
        if activation is not None:
            return Instant(self._micro_step, "forward", activation.frames[-1].path)
        return Instant(self._micro_step, "forward" if self._depth else self._phase, None)

    def _enters(self, module: nn.Module, _: Any) -> None:
        self._depth += 1
        parameter = next(module.parameters(), None)
        if self._depth > 1 or in_backward() or (parameter is not None and parameter.is_meta):
            return  # a trace on meta tensors, as parallelize makes of stages, is no forward of the program
        if self._first is None:
            self._first = len(self.log.instants)
        if self._has_gone_back:
            self._micro_step += 1
            self._has_gone_back = False
        if module not in self._models:
            self._note(module, None)
            self._models.add(module)

    def _leaves(self, *_: Any) -> None:
        self._depth = max(0, self._depth - 1)
        if not self._depth and not in_backward():
            self._phase = "loss" if torch.is_grad_enabled() else "start"

    def _optimizer_begins(self, optimizer: Any, *_: Any) -> None:
        self._phase = "optimizer"
        for model in list(self._models):
            self._note(model, optimizer)

    def _optimizer_ends(self, optimizer: Any, *_: Any) -> None:
        number = self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if number <= _FIRST_STEPS:
            for model in list(self._models):
                self._note(model, optimizer)
        self._phase = "start"
        self._has_gone_back = True

    def _note(self, model: nn.Module, optimizer: Any) -> None:
        begin = time.thread_time()
        classify(model, optimizer, self._found)
        self.seconds += time.thread_time() - begin

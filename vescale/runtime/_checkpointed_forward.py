"""Activation checkpointing by plan: a module whose forward runs again in backward.

=====================  ================================================================================================
of the module          between forward and backward
=====================  ================================================================================================
inputs                 saved
results of its ops     by the policy: computed again, saved, or copied to the host
collectives inside     their results are saved, unless ``recompute_communication`` is set; ring attention's is that of
                       the attention
its own boundaries,    outside of what runs again: inputs are saved as they have been placed, parameters are gathered for
and gathers of units   backward as without checkpointing
random numbers         where they begin in the generators' streams, if any are drawn
=====================  ================================================================================================

It is :func:`torch.utils.checkpoint.checkpoint` around the module's own forward, inside of its hooks.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from vescale.comm import KeptResults
from vescale.compat import map_tensors, no_torch_function, tensors_in
from vescale.errors import RecomputationError
from vescale.ir import Checkpoint, ForwardState, Instruction, KnownState
from vescale.ops import following_writes
from vescale.plans import CheckpointPolicy
from vescale.runtime._activation import current_activation
from vescale.runtime._checkpoint_budget import Budget, Work
from vescale.runtime._generator_states import GeneratorStates
from vescale.runtime._offloaded_tensors import OffloadedForward
from vescale.runtime._op_saving import saving_contexts
from vescale.runtime._runtime import Runtime
from vescale.runtime._saved_account import storage_of

__all__ = ["CheckpointedForward", "recomputed_modules"]


class CheckpointedForward:
    """Takes the place of a module's forward; see the module's table. Each call is checkpointed on its own."""

    def __init__(self, runtime: Runtime, module: nn.Module, path: str, instruction: Instruction) -> None:
        assert isinstance(instruction.op, Checkpoint)
        self.runtime, self.module, self.path = runtime, module, path
        self.policy = instruction.op.policy
        self.budget: Budget | None = None
        if instruction.op.budget_gib is not None:
            made = Budget(runtime, instruction.op.budget_gib)
            self.budget = runtime.budgets.setdefault(instruction.op.budget, made)
            self.budget.add(path, self.policy)
        self.known = KnownState()
        self._forward = module.forward
        module.forward = self.forward
        runtime.saved.reads_graph = True

    @property
    def saves_by_policy(self) -> bool:
        """Whether results of ops are saved, or copied to the host, and not all computed again."""
        return self.budget is not None or self.policy.kind != "full"

    @property
    def inner(self) -> Callable[..., Any]:
        """The forward that is checkpointed."""
        return self._forward

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """``forward``, checkpointed as this one."""
        twin = copy.copy(self)
        twin._forward = forward
        return twin.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        activation = current_activation()
        if not torch.is_grad_enabled() or activation is None or activation.runtime is not self.runtime:
            return self._forward(*args, **kwargs)
        policy: CheckpointPolicy | None = self.policy
        if self.budget is not None:
            policy = self.budget.policy(self.path)
            if policy is None:
                return self._forward(*args, **kwargs)
        assert policy is not None
        if policy.kind == "offload":
            return self._offloaded(args, kwargs)
        return _Call(self, policy, args, kwargs).run()

    def _offloaded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def note(local: torch.Tensor, copy: torch.Tensor) -> None:
            self.runtime.saved.note([copy], self.path, "offloaded", is_offloaded=True)

        last = self.runtime.last_offloaded
        call = OffloadedForward(self.module, last() if last is not None else None, note)
        self.runtime.last_offloaded = weakref.ref(call)
        try:
            with call.hooks():
                return self._forward(*args, **kwargs)
        finally:
            call.end()


def recomputed_modules(model: nn.Module) -> tuple[str, ...]:
    """The paths of the modules whose forward may run again in backward."""
    owners = (getattr(module.__dict__.get("forward"), "__self__", None) for module in model.modules())
    found = (owner for owner in owners if isinstance(owner, CheckpointedForward))
    return tuple(owner.path for owner in found if owner.budget is not None or owner.policy.kind != "offload")


class _Call:
    """One call of a checkpointed module."""

    def __init__(
        self, owner: CheckpointedForward, policy: CheckpointPolicy, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.owner, self.policy = owner, policy
        self.held: dict[int, int] = {}  # bytes by address, for a budget
        # No method: what holds it is held by this object.
        self._note = functools.partial(_note, owner, self.held)
        self.device_type = owner.runtime.mesh.device_type
        self.inputs: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}  # of the inputs, by id of what stands for them
        with no_torch_function():
            self._first = args, kwargs
            self._given = map_tensors(self._take_out, [args, kwargs])
        self.kept = KeptResults(
            keeps=not policy.recompute_communication,
            on_kept=functools.partial(self._note, op="communication", path=owner.path),
        )
        is_measured = owner.budget is not None and not owner.budget.is_decided
        self.work = Work() if is_measured else None
        self.number = owner.runtime.num_training_forwards
        self.draws: GeneratorStates | None = None
        self.state: ForwardState | None = None
        self.has_run = False

    def _take_out(self, tensor: torch.Tensor) -> torch.Tensor:
        stands_for_it = torch.empty(0, device="meta")
        self._numbers[id(stands_for_it)] = len(self.inputs)
        self.inputs.append(tensor)
        return stands_for_it

    def run(self) -> Any:
        with no_torch_function():
            self._note(self.inputs, self.owner.path, "inputs")
            self.state = state = ForwardState(self.owner.module, self.owner.path, self._given, self.owner.known)
        inputs, self.inputs = self.inputs, []  # the checkpoint keeps them, so that autograd can free them
        options: dict[str, Any] = {}
        if self.policy.kind != "full":
            options["context_fn"] = self._contexts
        result = checkpoint(
            self,
            *inputs,
            use_reentrant=False,
            preserve_rng_state=False,  # GeneratorStates
            early_stop=not (self.policy.recompute_communication or self.work),  # ranks may save others last
            **options,
        )
        with no_torch_function():
            if state.keeps_tensors_in_arguments():
                self._warn_of_state()
            state.ended()
        return result

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        path = self.owner.path

        def running() -> str:
            activation = current_activation()
            return activation.frames[-1].path if activation is not None and activation.frames else path

        def note(op: str, result: Any) -> None:
            with no_torch_function():
                self._note(tensors_in(result), running(), op)

        return saving_contexts(self.policy, path, self.kept, running, note, self.device_type)

    def recomputation_failed(self, error: RuntimeError) -> RecomputationError:
        """The error in place of PyTorch's, which does not name the module."""
        path = self.owner.path
        if isinstance(error, CheckpointError):
            text = str(error).partition("\n\n")[0].removeprefix("torch.utils.checkpoint: ")
            return RecomputationError(
                f"the checkpointed module {path!r} computes otherwise when it runs again than in its forward, by something "
                "that it reads, that has changed since, and that vescale does not know of; keep that in an attribute of the "
                f"module, or leave the module out of the plan's checkpoint entries. {text}"
            )
        return RecomputationError(
            f"an input of the checkpointed module {path!r} was written to in place, in the call or after it, and its "
            "recomputation needs the values before; write to a copy (x = x.clone()), or leave the module out of the plan's "
            f"checkpoint entries. {error}"
        )

    def __call__(self, *inputs: torch.Tensor) -> Any:
        if self.has_run:
            return self._again(inputs)
        self.has_run = True
        with no_torch_function():
            before = GeneratorStates(self.device_type)
        (args, kwargs), self._first = self._first, ((), {})
        with self.kept.keeping(), following_writes(), self.work if self.work is not None else contextlib.nullcontext():
            result = self.owner._forward(*args, **kwargs)
            with no_torch_function():
                for tensor in tensors_in(result):
                    self.kept.watch(tensor)
        with no_torch_function():
            if before.have_moved():
                self.draws = before
        return result

    def _warn_of_state(self) -> None:
        runtime = self.owner.runtime
        if runtime.warned_of_state or not runtime.is_first_rank:
            return
        runtime.warned_of_state = True
        warnings.warn(
            f"the checkpointed module {self.owner.path!r} writes tensors to an object among its arguments, which keeps "
            "them; numbers are right, but their memory is not saved: turn key/value caches off (use_cache=False)",
            stacklevel=2,
        )

    def _forward(self, inputs: Sequence[torch.Tensor]) -> Any:
        numbers = self._numbers
        with no_torch_function():
            args, kwargs = map_tensors(lambda x: inputs[numbers[id(x)]] if id(x) in numbers else x, self._given)
        return self.owner._forward(*args, **kwargs)

    def _again(self, inputs: Sequence[torch.Tensor]) -> Any:
        budget, owner = self.owner.budget, self.owner
        draws = self.draws.again() if self.draws is not None else contextlib.nullcontext()
        assert self.state is not None
        with draws, self.state.again(), self.kept.taking():
            if budget is None or self.work is None:
                try:
                    return self._forward(inputs)
                except CheckpointError as error:  # more tensors are saved
                    raise self.recomputation_failed(error) from error
            num_bytes = sum(self.held.values())
            return budget.measured(owner.path, self.number, owner.module, inputs, num_bytes, self.work, self._forward)


def _note(
    owner: CheckpointedForward, held: dict[int, int], tensors: Iterable[torch.Tensor], path: str, op: str
) -> None:
    """The tensors are held for backward."""
    found = list(tensors)
    owner.runtime.saved.note(found, path, op)
    if owner.budget is not None:
        for storage in filter(None, map(storage_of, found)):
            held[storage._cdata] = storage.nbytes()

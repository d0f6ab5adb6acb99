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
settings of PyTorch    as they are when the forward begins: autocast, the default dtype, kernels of attention, ...; and modes
                       of the program
=====================  ================================================================================================

It is :func:`torch.utils.checkpoint.checkpoint` around the module's own forward, inside of its hooks.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint
from torch.utils.flop_counter import flop_registry

from vescale.comm import KeptResults, all_reduce, axis_group
from vescale.compat import (
    TorchDispatchMode,
    held_tensors,
    is_in_dispatch_mode,
    map_tensors,
    no_torch_function,
    storage_of,
    tensors_in,
)
from vescale.compat.autograd import Modes
from vescale.compat.devices import Settings
from vescale.compat.model_hooks import CHECKPOINTED_APART
from vescale.errors import RecomputationError
from vescale.ir import Checkpoint, ForwardState, Instruction, KnownState
from vescale.ops import following_writes
from vescale.plans import CheckpointPolicy, checkpoint_policy
from vescale.runtime._activation import current_activation
from vescale.runtime._op_saving import (
    PRODUCTS,
    Counting,
    GeneratorStates,
    OffloadedForward,
    is_heavy,
    op_name,
    saving_contexts,
)
from vescale.runtime._runtime import Runtime
from vescale.runtime._shared_memory import SharedMemory

# A memory budget that picks what each checkpointed module saves: measured in the first step, decided before the second.
# The first forward runs with the entry's own policy, which saves least. When its backward computes a module again, it
# is measured what the module would save without checkpointing, and how much work its ops are. The next forward begins
# with an all-reduce of these numbers (their maximum over all ranks), so that all ranks decide alike; if some module has
# not been computed again yet, the forward after it does. The choice is greedy. Nothing is checkpointed at first; then,
# while what the modules save is more than the budget, the change of one module that saves most bytes for each unit of
# work is made: to ``selective``, where the entry says ``full``, or to the entry's own policy. The work of an op is its
# floating-point operations, or what moving its result takes where that is more.

_WORK_OF_A_BYTE = 100.0
"""Floating-point operations in the time that a byte of a result takes; of the order of current accelerators."""


@dataclass(frozen=True)
class Choice:
    """What a module may do: save so many bytes, and do so much work again. ``policy`` None: it is not checkpointed."""

    policy: CheckpointPolicy | None
    num_bytes: float
    work: float


def choose(
    choices: Sequence[Sequence[Choice]], limit: float, moments: Sequence[Sequence[float]] | None = None
) -> list[int]:
    """The index of each module's choice, by the rule of the module's description; of each module the choices come in the
    order of falling bytes. If even the last ones are more than ``limit``, those that save bytes.

    Args:
        moments: how many forwards of each module are held, at the moments that count; one of each by default.
    """
    moments = moments if moments is not None else [[1.0] * len(choices)]
    chosen = [0] * len(choices)
    totals = [sum(n * c[0].num_bytes for n, c in zip(held, choices, strict=True)) for held in moments]
    while max(totals, default=0.0) > limit:
        held = moments[totals.index(max(totals))]
        best: tuple[float, int, int] | None = None
        for number, of_module in enumerate(choices):
            now = of_module[chosen[number]]
            for other in range(chosen[number] + 1, len(of_module)):
                freed = held[number] * (now.num_bytes - of_module[other].num_bytes)
                worth = freed / max(of_module[other].work - now.work, 1e-9)
                if freed > 0 and (best is None or worth > best[0]):
                    best = worth, number, other
        if best is None:
            break
        _, number, other = best
        freed = choices[number][chosen[number]].num_bytes - choices[number][other].num_bytes
        totals = [total - each[number] * freed for total, each in zip(totals, moments)]
        chosen[number] = other
    return chosen


class Budget:
    """What the modules of one entry save together, in GiB of a rank.

    Attributes:
        policies: of each module; None: it is not checkpointed. The entry's own until :attr:`is_decided`.
        moments: how many forwards of each module are held for backward at the moments of a step in which most are; of one
            forward at a time by default.
    """

    def __init__(self, runtime: Any, gib: float) -> None:
        self._runtime, self.gib = runtime, gib
        self.moments: Sequence[Mapping[str, int]] = ()
        self.policies: dict[str, CheckpointPolicy | None] = {}
        self.is_decided = False
        self._calls: Counter[tuple[str, int]] = Counter()  # of a module, in the forward of this number
        self._measured: dict[str, dict[int, list[list[float]]]] = {}  # of a module, by forward: numbers of each call
        self._asked_in: int | None = None  # the number of the forward in which ranks have compared last

    def add(self, path: str, policy: CheckpointPolicy) -> None:
        self.policies[path] = policy

    def policy(self, path: str) -> CheckpointPolicy | None:
        """The policy of a module whose forward begins. Communication: up to the decision, in the first module of each
        forward but the first one, an all-reduce of six numbers for each module."""
        if not self.is_decided:
            now = self._runtime.num_training_forwards
            self._calls[path, now] += 1
            if self._asked_in is None:
                self._asked_in = now
            elif self._asked_in != now:
                self._asked_in = now
                with no_torch_function():
                    self._decide()
        return self.policies[path]

    def measured(
        self,
        path: str,
        number: int,
        module: nn.Module,
        inputs: Sequence[torch.Tensor],
        saved_bytes: float,
        work: Work,
        forward: Callable[[Sequence[torch.Tensor]], Any],
    ) -> Any:
        """Run a call of forward ``number`` again, and measure it; ``work`` is that of its first run, which had a dispatch
        mode, too."""
        with Work():  # ops meet the same kernels as the first time
            result = forward(inputs)
        with no_torch_function():
            roots = [x.grad_fn for x in tensors_in(result) if isinstance(x, torch.Tensor)]
            own = {s._cdata for x in (*module.parameters(), *module.buffers()) if (s := storage_of(x)) is not None}
            held: dict[int, int] = {}
            for tensor in (*(x for _, x in held_tensors(roots, [x.grad_fn for x in inputs])), *inputs):
                storage = storage_of(tensor)
                if storage is not None and storage._cdata not in own:
                    held[storage._cdata] = storage.nbytes()
            whole = sum(held.values())
            selective = saved_bytes + work.selected_bytes
            numbers = [1.0, whole, selective, saved_bytes, work.total - work.selected, work.total]
            self._measured.setdefault(path, {}).setdefault(number, []).append(numbers)
        return result

    def _row(self, path: str) -> list[float]:
        """The numbers of all calls of a module in one forward; calls that did not run again count as the others."""
        for number, rows in self._measured.get(path, {}).items():
            num_calls = self._calls[path, number]
            return [1.0, *(num_calls * sum(column) / len(rows) for column in list(zip(*rows))[1:])]
        return [0.0] * 6

    def _decide(self) -> None:
        paths = list(self.policies)
        rows = [self._row(path) for path in paths]
        # The smallest flag is the largest of their negatives.
        flat = [value for row in rows for value in (-row[0], *row[1:])]
        mesh = self._runtime.mesh
        local = torch.tensor(flat, dtype=torch.float64, device=mesh.device_type)
        if mesh.size() > 1:
            group = axis_group(mesh, tuple(range(mesh.ndim))).group
            local = all_reduce(local, "max", group, requester="memory budget").wait()
        numbers = local.tolist()
        found = [tuple(numbers[start : start + 6]) for start in range(0, len(numbers), 6)]
        if any(row[0] > -1.0 for row in found):
            return
        choices = [_choices(self.policies[path], row) for path, row in zip(paths, found, strict=True)]
        limit = self.gib * 2**30
        moments = [[float(moment.get(path, 0)) for path in paths] for moment in self.moments] or [[1.0] * len(paths)]
        chosen = choose(choices, limit, moments)
        picked = [of_module[index] for of_module, index in zip(choices, chosen, strict=True)]
        self.policies = {path: choice.policy for path, choice in zip(paths, picked, strict=True)}
        self.is_decided = True
        self._calls.clear()
        self._measured.clear()
        total = max(sum(n * choice.num_bytes for n, choice in zip(held, picked)) for held in moments)
        if total > limit and self._runtime.is_first_rank:
            warnings.warn(
                f"the budget of {self.gib:g} GiB for {len(paths)} checkpointed modules ({paths[0]}, ...) is too "
                f"small: with the policy that saves least, they save {total / 2**30:.3g} GiB; raise budget_gib, or "
                "shard more",
                stacklevel=2,
            )


def _choices(policy: CheckpointPolicy | None, row: Sequence[float]) -> list[Choice]:
    assert policy is not None
    _, whole, selective, own, selective_work, own_work = row
    found = [Choice(None, whole, 0.0)]
    if policy.kind == "full" and selective < whole:
        form = {"save": "selective", "recompute_communication": policy.recompute_communication}
        found.append(Choice(checkpoint_policy(form), selective, selective_work))
    found.append(Choice(policy, own, own_work))
    return found


class Work(TorchDispatchMode):
    """Adds up the work of ops, in floating-point operations; of those that ``selective`` saves, also apart."""

    def __init__(self) -> None:
        super().__init__()
        self.total = self.selected = self.selected_bytes = 0.0
        self._calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if getattr(func, "is_view", False):
            return result
        tensors = [
            x for x in (result if isinstance(result, tuple | list) else (result,)) if isinstance(x, torch.Tensor)
        ]
        work = _WORK_OF_A_BYTE * sum(x.numel() * x.element_size() for x in tensors)
        counted = flop_registry.get(getattr(func, "overloadpacket", func))
        if counted is not None:
            work = max(work, float(counted(*args, **kwargs, out_val=result)))
        self.total += work
        name = op_name(func)
        self._calls[name] += 1
        if is_heavy(name) and (name not in PRODUCTS or self._calls[name] % 2 == 1):
            self.selected += work
            self.selected_bytes += sum(s.nbytes() for x in tensors if (s := storage_of(x)) is not None)
        return result


def _as_a_part(options: Mapping[str, Any]) -> AbstractContextManager[None] | None:
    """A function that the model checkpoints itself inside of a forward that a mode sees runs as it is, also when that is
    recomputed: in a recomputation of its own, which no mode would see, ops may save other tensors."""
    return contextlib.nullcontext() if is_in_dispatch_mode(Counting, Work) else None


CHECKPOINTED_APART.append(_as_a_part)


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
        self.memory = SharedMemory(self.kept.note_handed_out)
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
        # Where collectives run again, ranks may save others last.
        is_whole = self.policy.recompute_communication or self.work is not None
        options: dict[str, Any] = {"early_stop": False if is_whole else self.kept}
        if self.policy.kind != "full":
            options["context_fn"] = self._contexts
        result = checkpoint(
            self,
            *inputs,
            use_reentrant=False,
            preserve_rng_state=False,  # GeneratorStates
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
                f"the checkpointed module {path!r} computes different results when it is recomputed than in its "
                "forward, because something that it reads has changed, of which vescale does not know; keep that "
                "state in an attribute of the module, or exclude the module from the plan's checkpoint entries. "
                f"{text}"
            )
        return RecomputationError(
            f"an input of the checkpointed module {path!r} was written to in place, during or after the call, but its "
            "recomputation needs the earlier values; write to a copy (x = x.clone()), or exclude the module from the "
            f"plan's checkpoint entries. {error}"
        )

    def __call__(self, *inputs: torch.Tensor) -> Any:
        if self.has_run:
            return self._again(inputs)
        self.has_run = True
        with no_torch_function():
            before = GeneratorStates(self.device_type)
            self.settings, self.modes = Settings(), Modes()
        (args, kwargs), self._first = self._first, ((), {})
        with self.kept.keeping(), following_writes(), self.work if self.work is not None else contextlib.nullcontext():
            with no_torch_function():
                self.memory.watch(inputs, are_results=False)
            result = self.owner._forward(*args, **kwargs)
            with no_torch_function():
                results = list(tensors_in(result))
                for tensor in results:
                    self.kept.watch(tensor)
        with no_torch_function():
            self.memory.watch(results, are_results=True)
            self.memory.is_running = False
            if before.have_moved():
                self.draws = before
        return result

    def _warn_of_state(self) -> None:
        runtime = self.owner.runtime
        if runtime.warned_of_state or not runtime.is_first_rank:
            return
        runtime.warned_of_state = True
        warnings.warn(
            f"the checkpointed module {self.owner.path!r} writes tensors to an object among its arguments, which "
            "keeps them; results are correct, but checkpointing does not save their memory: turn off key/value "
            "caches (use_cache=False)",
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
        with (
            draws,
            self.settings.again(),
            self.modes.again(),
            self.state.again(),
            self.kept.taking(),
            following_writes(),
        ):
            if budget is None or self.work is None:
                try:
                    return self._shared(inputs)
                except CheckpointError as error:  # more tensors are saved
                    raise self.recomputation_failed(error) from error
            num_bytes = sum(self.held.values())
            return budget.measured(owner.path, self.number, owner.module, inputs, num_bytes, self.work, self._shared)

    def _shared(self, given: Sequence[torch.Tensor]) -> Any:
        with no_torch_function():
            inputs, self.memory.is_running = self.memory.inputs(given), True
        try:
            result = self._forward(inputs)
        finally:
            self.memory.is_running = False
        with no_torch_function():
            self.memory.put(given, inputs, list(tensors_in(result)))
        return result


def _note(
    owner: CheckpointedForward, held: dict[int, int], tensors: Iterable[torch.Tensor], path: str, op: str
) -> None:
    """The tensors are held for backward."""
    found = list(tensors)
    owner.runtime.saved.note(found, path, op)
    if owner.budget is not None:
        for storage in filter(None, map(storage_of, found)):
            held[storage._cdata] = storage.nbytes()

"""A memory budget that picks what each checkpointed module saves: measured in the first step, decided before the second.

The first forward runs with the entry's own policy, which saves least. When its backward computes a module again, it is
measured what the module would save without checkpointing, and how much work its ops are. The next forward begins with an
all-reduce of these numbers (their maximum over all ranks), so that all ranks decide alike; if some module has not been
computed again yet, the forward after it does.

The choice is greedy. Nothing is checkpointed at first; then, while what the modules save is more than the budget, the change
of one module that saves most bytes for each unit of work is made: to ``selective``, where the entry says ``full``, or to the
entry's own policy. The work of an op is its floating-point operations, or what moving its result takes where that is more.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from vescale.comm import all_reduce, axis_group
from vescale.compat import TorchDispatchMode, held_tensors, no_torch_function, tensors_in
from vescale.plans import CheckpointPolicy, checkpoint_policy
from vescale.runtime._op_saving import PRODUCTS, is_heavy, op_name
from vescale.runtime._saved_account import storage_of

__all__ = ["Budget", "Choice", "Work", "choose"]

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
                f"the budget of {self.gib:g} GiB for {len(paths)} checkpointed modules ({paths[0]}, ...) is too small: with "
                f"the policy that saves least they save {total / 2**30:.3g} GiB; raise budget_gib, or "
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

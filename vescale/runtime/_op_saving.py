"""Which results of ops a checkpointed forward saves: policies for ``create_selective_checkpoint_contexts``."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy as Decision
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from vescale.comm import KeptResults
from vescale.compat import TorchDispatchMode
from vescale.plans import CheckpointPolicy, split_selector
from vescale.runtime._generator_states import GeneratorStates

__all__ = ["HEAVY", "PRODUCTS", "op_name", "saving_contexts"]

PRODUCTS = frozenset(
    "aten.mm aten.addmm aten.bmm aten.baddbmm aten.linear aten._scaled_mm aten._grouped_mm aten._scaled_grouped_mm".split()
)
"""Of ``selective`` every second one of these is saved, ..."""
HEAVY = PRODUCTS | frozenset("aten.convolution aten._convolution aten.topk aten.sort".split())
"""... and the others, and attention, always."""
_ATTENTION = "aten._scaled_dot_product"


def op_name(op: Any) -> str:
    """``aten.mm`` of any overload of it."""
    name = str(op)
    return name.rpartition(".")[0] if name.count(".") > 1 else name


def saving_contexts(
    policy: CheckpointPolicy,
    path: str,
    kept: KeptResults,
    running: Callable[[], str],
    on_saved: Callable[[str, Any], None],
    device_type: str,
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of a forward and of its recomputation. ``running``: the path of the innermost running module."""
    rule = _Rule(policy, path, running, on_saved)
    states: dict[tuple[Any, int], GeneratorStates] = {}
    forward, again = create_selective_checkpoint_contexts(rule)
    return (
        _OfModel(forward, kept, states, rule, device_type),
        _OfModel(again, kept, states, None, device_type),
    )


class _Rule:
    """Asked about each op of a forward, after it. It is not asked in the recomputation: decisions are kept."""

    def __init__(
        self, policy: CheckpointPolicy, path: str, running: Callable[[], str], on_saved: Callable[[str, Any], None]
    ) -> None:
        self._policy, self._running, self._on_saved = policy, running, on_saved
        self._calls: Counter[Any] = Counter()
        self.last = False  # whether the last op was saved
        self._selectors: dict[str, set[str]] = defaultdict(set)
        for text in policy.save:
            where, op = split_selector(text)
            full = "*" if where is None else f"{path}.{where}"
            self._selectors[op].add(full)

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> Decision:
        self.last = self._saves(op)
        if self.last:
            self._on_saved(op_name(op), context.op_output)
        return Decision.MUST_SAVE if self.last else Decision.PREFER_RECOMPUTE

    def _saves(self, op: Any) -> bool:
        name = op_name(op)
        if self._policy.kind == "selective":
            if name.startswith(_ATTENTION) or name in HEAVY - PRODUCTS:
                return True
            return name in PRODUCTS and self._counts(name)
        return self._is_named(name, str(op)) and self._counts(name)

    def _counts(self, name: str) -> bool:
        self._calls[name] += 1
        return (self._calls[name] - 1) % self._policy.every == 0

    def _is_named(self, name: str, overload: str) -> bool:
        modules = self._selectors.get(name, set()) | self._selectors.get(overload, set())
        if name.startswith(_ATTENTION):
            modules = modules.union(*(found for op, found in self._selectors.items() if "scaled_dot_product" in op))
        if not modules or "*" in modules:
            return bool(modules)
        path = self._running()
        return any(path == module or path.startswith(f"{module}.") for module in modules)


class _OfModel(TorchDispatchMode):
    """A dispatch mode that sees the ops of the model only, and none of those around a collective, which do not run again.

    Random ops whose results are saved draw nothing the second time, so that the generators are moved on by hand.
    """

    def __init__(
        self,
        inner: Any,
        kept: KeptResults,
        states: dict[tuple[Any, int], GeneratorStates],
        rule: _Rule | None,
        device_type: str,
    ) -> None:
        super().__init__()
        self._inner, self._kept, self._states, self._rule = inner, kept, states, rule
        self._device_type = device_type
        self._draws: Counter[Any] = Counter()

    def __enter__(self) -> Any:
        self._draws.clear()
        with self._inner:  # which forgets what it has counted
            pass
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._kept.is_communicating:
            return func(*args, **(kwargs or {}))
        result = self._inner.__torch_dispatch__(func, types, args, kwargs)
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            number = self._draws[func]
            self._draws[func] += 1
            if self._rule is not None and self._rule.last:
                self._states[func, number] = GeneratorStates(self._device_type)
            elif self._rule is None and (func, number) in self._states:
                self._states[func, number].restore()
        return result

"""Which results of ops a checkpointed forward saves, and where the recomputation finds them."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from vescale.comm import KeptResults, KeptTensors
from vescale.compat import TorchDispatchMode, detached_below_autograd, tensors_in, tree_map, written_tensors
from vescale.ops import begin_anew
from vescale.plans import CheckpointPolicy, split_selector

# Where in the streams of torch's generators a forward draws its numbers.


class GeneratorStates:
    """The states of the default generators: of the CPU, and of the current device of another type.

    On CUDA a state is a seed and an offset, 16 bytes; on a CPU it is that of mt19937, 5 kB.
    """

    def __init__(self, device_type: str) -> None:
        self._module = getattr(torch, device_type) if device_type not in ("cpu", "meta") else None
        self._states = self._now()

    def _now(self) -> tuple[torch.Tensor, ...]:
        states = [torch.get_rng_state()]
        if self._module is not None and self._module.is_initialized():
            states.append(self._module.get_rng_state())
        return tuple(states)

    def have_moved(self) -> bool:
        """Whether something has been drawn since."""
        now = self._now()
        return len(now) != len(self._states) or any(not torch.equal(a, b) for a, b in zip(self._states, now))

    def restore(self) -> None:
        torch.set_rng_state(self._states[0])
        if len(self._states) > 1:
            assert self._module is not None
            self._module.set_rng_state(self._states[1])

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Inside, what was drawn after these states is drawn again; afterwards the generators are as before."""
        before = self._now()
        self.restore()
        try:
            yield
        finally:
            torch.set_rng_state(before[0])
            if len(before) > 1:
                assert self._module is not None
                self._module.set_rng_state(before[1])


PRODUCTS = frozenset(
    [
        "aten.mm",
        "aten.addmm",
        "aten.bmm",
        "aten.baddbmm",
        "aten.linear",
        "aten._scaled_mm",
        "aten._grouped_mm",
        "aten._scaled_grouped_mm",
    ]
)
"""Of ``selective`` every second one of these is saved, ..."""
HEAVY = PRODUCTS | frozenset(["aten.convolution", "aten._convolution", "aten.topk", "aten.sort"])
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
    """The contexts of a forward and of its recomputation, for ``context_fn`` of :func:`torch.utils.checkpoint.checkpoint`.

    They differ from those of ``create_selective_checkpoint_contexts`` in three points. Results that are written to later
    (``x = linear(x); x.relu_()``) are computed again, which is an error there. Random ops whose results are saved leave the
    generators behind as the first time. Backwards may run twice (``retain_graph``).

    Args:
        kept: whose collectives, and the local steps around them, are no ops of the model.
        running: returns the path of the innermost running module.
        on_saved: gets the name of an op, and its result.
    """
    results: dict[tuple[Any, int], _Saved] = {}
    return _Saving(SavingRule(policy, path), kept, results, running, on_saved, device_type), _Restoring(kept, results)


class SavingRule:
    """Says which calls of ops are saved. It is asked in the forward only: the recomputation looks up what was saved."""

    def __init__(self, policy: CheckpointPolicy, path: str) -> None:
        self._policy = policy
        self._calls: Counter[Any] = Counter()
        self._modules: dict[str, set[str | None]] = defaultdict(set)  # of an op; None: all of them
        for text in policy.save:
            where, op = split_selector(text)
            self._modules[_family(op)].add(None if where is None else f"{path}.{where}")

    def saves(self, op: Any, running: Callable[[], str]) -> bool:
        name = op_name(op)
        if self._policy.kind == "selective":
            return is_heavy(name) and (name not in PRODUCTS or self._counts(name))
        return self._is_named(name, str(op), running) and self._counts(name)

    def _counts(self, name: str) -> bool:
        self._calls[name] += 1
        return (self._calls[name] - 1) % self._policy.every == 0

    def _is_named(self, name: str, overload: str, running: Callable[[], str]) -> bool:
        modules = self._modules.get(_family(name), set()) | self._modules.get(overload, set())
        if not modules or None in modules:
            return bool(modules)
        path = running()
        return any(module is not None and (path == module or path.startswith(f"{module}.")) for module in modules)


def is_heavy(name: str) -> bool:
    """Whether ``selective`` saves results of the op, all or every second one."""
    return name in HEAVY or _family(name) == _ATTENTION


def _family(op: str) -> str:
    """Kernels of attention are one op: which of them runs depends on the device."""
    return _ATTENTION if op.partition(".")[2].lstrip("_").startswith("scaled_dot_product") else op


class _Saved:
    """The result of an op, and where it left the generators if it is a random one."""

    def __init__(self, result: Any, states: GeneratorStates | None) -> None:
        self._result = tree_map(_alias, result)
        self.tensors = KeptTensors(list(tensors_in(self._result)))
        self.states = states

    def result(self) -> Any:
        for tensor in self.tensors.tensors:
            begin_anew(tensor)
        return tree_map(_alias, self._result)


def _alias(x: Any) -> Any:
    """The same memory with the same version, apart from the graph that the result gets."""
    return detached_below_autograd(x) if isinstance(x, torch.Tensor) else x


class Counting(TorchDispatchMode, ABC):
    """A dispatch mode that numbers the calls of each op of the model."""

    def __init__(self, kept: KeptResults, results: dict[tuple[Any, int], _Saved]) -> None:
        super().__init__()
        self._kept, self._results = kept, results
        self._calls: Counter[Any] = Counter()

    def __enter__(self) -> Any:
        self._calls.clear()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._kept.is_communicating or func in _UNCOUNTED:
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            result = func(*args, **kwargs)
            for tensor in written_tensors(func, args, kwargs):
                self._kept.note_write(tensor)
            return result
        key = func, self._calls[func]
        self._calls[func] += 1
        return self.run(key, args, kwargs)

    @abstractmethod
    def run(self, key: tuple[Any, int], args: Any, kwargs: Any) -> Any:
        """Run or answer call number ``key[1]`` of the op ``key[0]``."""


# Checkpointing itself calls it, and not as often in the recomputation.
_UNCOUNTED = frozenset((torch.ops.aten.detach.default,))


class _Saving(Counting):
    def __init__(
        self,
        rule: SavingRule,
        kept: KeptResults,
        results: dict[tuple[Any, int], _Saved],
        running: Callable[[], str],
        on_saved: Callable[[str, Any], None],
        device_type: str,
    ) -> None:
        super().__init__(kept, results)
        self._rule, self._running, self._on_saved = rule, running, on_saved
        self._device_type = device_type

    def run(self, key: tuple[Any, int], args: Any, kwargs: Any) -> Any:
        func = key[0]
        result = func(*args, **kwargs)
        if self._rule.saves(func, self._running):
            draws = torch.Tag.nondeterministic_seeded in func.tags
            self._results[key] = saved = _Saved(result, GeneratorStates(self._device_type) if draws else None)
            self._kept.hold(saved.tensors)
            self._on_saved(op_name(func), result)
        return result


class _Restoring(Counting):
    def run(self, key: tuple[Any, int], args: Any, kwargs: Any) -> Any:
        saved = self._results.get(key)
        if saved is None or not saved.tensors.is_unwritten:
            return key[0](*args, **kwargs)
        if saved.states is not None:
            saved.states.restore()
        return saved.result()

"""Arguments that the recorded step did not have: whether a torch function still does the same on local tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from vescale.ops import entries
from vescale.static._analysis import name_of
from vescale.static._observed_ops import LocalRun, ObservedOps, random_state, run_on_locals, set_random_state
from vescale.static._tensor_type import TensorType, UnrecordedError, map_in_order

# Functions whose whole numbers are dims, or sizes that are equal on all ranks: what they do to placements does not depend on
# other sizes.
_OF_DIMS = frozenset((
    "transpose", "permute", "softmax", "log_softmax", "sum", "mean", "cat", "concat", "stack", "unsqueeze", "movedim",
    "swapaxes", "unbind", "layer_norm", "rms_norm", "embedding", "var", "amax", "amin", "logsumexp", "pow", "cross_entropy",
    "dropout", "scaled_dot_product_attention", "__add__", "__sub__", "__mul__", "__truediv__", "__radd__", "__rsub__",
    "__rmul__", "__rtruediv__", "__rpow__", "__pow__", "add", "sub", "mul", "div", "__lt__", "__le__", "__gt__", "__ge__",
    "__eq__", "__ne__", "eq", "ne", "lt", "le", "gt", "ge", "clamp", "masked_fill", "norm", "argmax", "argmin",
))  # fmt: skip


# Functions of sizes that they are not given as numbers.
_OF_SIZES = frozenset(("flatten", "ravel", "squeeze", "view_as", "reshape_as", "expand_as", "tile", "unflatten"))


def needs_sizes(function: Any, has_whole_numbers: bool) -> bool:
    """Whether sizes of tensors may decide what a function, or the whole numbers among its arguments, means."""
    name = name_of(function)
    return name in _OF_SIZES or (has_whole_numbers and name not in _OF_DIMS)


def check_of(
    function: Any, inputs: Sequence[TensorType], outputs: Sequence[TensorType], expected: LocalRun
) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], None]:
    """A function ``(function, args, kwargs)`` of local tensors that raises UnrecordedError where the torch function does not
    do ``expected`` with them. No communication."""
    inputs, outputs = tuple(inputs), tuple(outputs)

    def check(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        state = random_state()
        name = name_of(function)
        try:
            with torch.no_grad():
                copies = [torch.Tensor.clone] * len(inputs)  # the function may write to them
                whole = [lambda x, kind=kind: kind.to_global(x, "check") for kind in inputs]
                (given, named), (again, again_named) = (
                    map_in_order(map_in_order((args, kwargs), copies), whole) for _ in range(2)
                )
                entry = entries().get(called)
                if entry is not None and entry.is_local is not None:
                    if not entry.is_local(*given, **named):
                        raise UnrecordedError(f"{name} gets different arguments than in the recorded step")
                    return
                with OnlyLocalOps(name):
                    result = called(*given, **named)
                local = run_on_locals(called, again, again_named, result, False)
                map_in_order(result, [kind.to_local for kind in outputs])
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, AssertionError) as problem:
            raise UnrecordedError(f"{name}: {problem}") from problem  # eager mode raises it again
        finally:
            set_random_state(state)  # the call itself draws
        if local is not expected and local is not LocalRun.SAME:
            raise UnrecordedError(f"{name} returns {local.value}, given other arguments")
        if local is LocalRun.SAME and expected is LocalRun.TAKES_SIZES:
            raise UnrecordedError(f"{name} takes no sizes, given other arguments")

    return check


class OnlyLocalOps(ObservedOps):
    """Refuses ops on DTensors that do not run on the local tensors as they are, or draw random numbers."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where

    def __torch_dispatch__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if is_random or not self.runs_on_locals(func, args, kwargs or {}):
            raise UnrecordedError(f"{self._where} gets different arguments than in the recorded step")
        return func(*args, **(kwargs or {}))

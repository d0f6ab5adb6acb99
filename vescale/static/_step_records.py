"""What a recorded step consists of: tensors, calls of torch functions and their ops, what entries of the plan place."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.overrides import TorchFunctionMode

from vescale.compat import (
    TorchDispatchMode,
    bytes_of,
    in_transform,
    local_of,
    map_tensors,
    no_torch_function,
    own_part,
    runs_on_locals,
    spec_of,
    tensors_in,
    without_transforms,
)
from vescale.compat.devices import is_capturing, random_states, set_random_states
from vescale.runtime import Placing

# The ops of one torch function, as they are observed while a step is recorded.


class WithObservedOps(TorchFunctionMode):
    """Runs torch functions as a :class:`Recorder` does: by PyTorch's path for each op."""

    def __torch_function__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with ObservedOps():
            return func(*args, **(kwargs or {}))


class ObservedOps(TorchDispatchMode):
    """Sees the ops of one torch function.

    Args:
        known: answers for kinds of calls, which layers of a model share.

    Attributes:
        changed: why they do not all run on the local tensors as they are; "" if they do.
        draws: whether one may draw random numbers.
        has_plain: whether one runs on plain tensors.
    """

    def __init__(self, known: dict[Any, bool] | None = None) -> None:
        super().__init__()
        self._known = {} if known is None else known
        self.changed = ""
        self.draws = False
        self.has_plain = False

    def __torch_dispatch__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags
        if not any(isinstance(x, DTensor) for x in tensors_in((args, kwargs))):
            self.has_plain = True
        elif not self.changed and not self.runs_on_locals(func, args, kwargs):
            self.changed = f"{func} does not run on the local tensors as they are"
        return func(*args, **kwargs)

    def runs_on_locals(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an op on DTensors runs on the local tensors as they are."""
        if not any(isinstance(x, DTensor) for x in tensors_in((args, kwargs))):
            return True
        key = _kind_of(func, args, kwargs)
        if key is None:
            return runs_on_locals(func, args, kwargs)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = runs_on_locals(func, args, kwargs)
        return found


def _kind_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the answer for a call depends on; None: it cannot be a key."""
    key = func, tuple(map(_part_of_kind, args)), tuple((name, _part_of_kind(value)) for name, value in kwargs.items())
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _part_of_kind(value: Any) -> Any:
    if isinstance(value, DTensor):
        return spec_of(value), local_of(value).shape, local_of(value).stride()
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_part_of_kind, value))
    return type(value), value


def random_state() -> list[torch.Tensor]:
    """The states of the default generators; of the CPU's only while a graph of the device is captured, whose replays count
    draws on the device."""
    return [torch.get_rng_state(), *(() if is_capturing() else random_states().values())]


def set_random_state(states: list[torch.Tensor]) -> None:
    torch.set_rng_state(states[0])
    set_random_states(dict(zip(random_states(), states[1:])))


# Running a torch function on local tensors beside its call on DTensors, to compare the results.


# Functions that read sizes of a tensor, of which the model sees the global ones, with the reader in ``csrc/tape.cpp``.
SIZE_READERS: dict[Any, int] = {
    torch.Tensor.shape.__get__: 0,  # type: ignore[attr-defined]
    torch.Tensor.size: 1,
    torch.Tensor.__len__: 2,
    torch.Tensor.numel: 3,
    torch.Tensor.nelement: 3,
    torch.numel: 3,
}
# Methods that are given the sizes of their result, as numbers or one sequence: the model gives global ones.
SIZE_TAKERS = frozenset(
    getattr(torch.Tensor, name) for name in ("view", "reshape", "expand", "new_empty", "new_zeros", "new_ones")
)
# Those of which only the form of the result can be compared.
VALUES_ARE_UNDEFINED = frozenset((torch.Tensor.new_empty,))


class LocalRun(enum.Enum):
    """What a torch function returns for the local tensors."""

    SAME = "the local results, bit for bit"
    SIZES = "local sizes where the DTensors give global ones"
    TAKES_SIZES = "the local results, given local sizes"
    DIFFERS = "something else, or it raises"
    TRANSFORMED = "what a function transform (torch.vmap, torch.func) makes of it"


def run_on_locals(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, is_random: bool) -> LocalRun:
    """Compare ``result`` of a function that writes to none of its arguments."""
    held = [isinstance(x, DTensor) for x in _leaves((args, kwargs))]
    if in_transform():  # values cannot be compared there
        inside = map(without_transforms, _leaves((args, kwargs, result)))
        return LocalRun.TRANSFORMED if is_random or any(isinstance(x, DTensor) for x in inside) else LocalRun.SAME
    if is_random:
        return LocalRun.DIFFERS if any(held) else LocalRun.SAME
    local = _attempt(func, _local(args, True), _local(kwargs, True))
    if func in SIZE_READERS:
        return LocalRun.SAME if local == result else LocalRun.SIZES
    is_same = _has_same_form if func in VALUES_ARE_UNDEFINED else _is_same
    if is_same(_local(result), local):
        return LocalRun.SAME
    if func in SIZE_TAKERS and isinstance(result, DTensor):
        shape = list(local_of(result).shape)
        if "size" not in kwargs and is_same(_local(result), _attempt(func, (_local(args[0]), shape), kwargs)):
            return LocalRun.TAKES_SIZES
    return LocalRun.DIFFERS


def _attempt(func: Any, args: Any, kwargs: Any) -> Any:
    try:
        with no_torch_function(), torch.no_grad():
            return func(*args, **kwargs)
    except Exception:  # whatever the function raises for sizes of a part
        return None


def _local(value: Any, is_kept: bool = False) -> Any:
    """Local tensors; ``is_kept``: of statistics, copies, because batch norm writes to them without a new version."""

    def local(x: torch.Tensor) -> torch.Tensor:
        held = own_part(x).detach()
        may_write = is_kept and not x.requires_grad and x.is_floating_point() and held.is_contiguous()
        return held.clone() if may_write else held

    return map_tensors(local, value)


def _leaves(value: Any) -> list[Any]:
    found: list[Any] = []
    map_tensors(lambda x: found.append(x) or x, value)  # type: ignore[func-returns-value]
    return found


def _has_same_form(expected: Any, found: Any) -> bool:
    """Whether two tensors have the same shape, strides, dtype and device."""
    return (
        isinstance(expected, torch.Tensor)
        and isinstance(found, torch.Tensor)
        and expected.shape == found.shape
        and _strides(expected) == _strides(found)
        and expected.dtype == found.dtype
        and expected.device == found.device
    )


def _is_same(expected: Any, found: Any) -> bool:
    if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):  # bytes, so that NaN equals NaN
        same = _has_same_form(expected, found)
        return same and (expected.is_meta or bool(torch.equal(bytes_of(expected), bytes_of(found))))
    if type(expected) is not type(found):
        return False
    if isinstance(expected, list | tuple):
        return len(expected) == len(found) and all(map(_is_same, expected, found))
    if isinstance(expected, dict):
        return list(expected) == list(found) and all(map(_is_same, expected.values(), found.values()))
    if isinstance(expected, numpy.ndarray):
        return expected.dtype == found.dtype and numpy.array_equal(expected, found)
    return bool(expected == found)


def _strides(x: torch.Tensor) -> list[int]:
    """Strides that decide where elements are."""
    return [stride for stride, size in zip(x.stride(), x.shape) if size > 1]


Placements = tuple[Placement, ...]


@dataclass(eq=False)
class Value:
    """A DTensor that the forward computed, or was given.

    Attributes:
        name: of a parameter, buffer or input; "" for others.
        is_parameter: whether it is a parameter or a buffer.
        grads: placements of the gradients that arrived, each the sum over its uses.
        num_gradients: how many gradients were added.
        is_grad_moved: whether they arrived as parts where the tensor is whole, or the other way round.
    """

    name: str = ""
    is_parameter: bool = False
    grads: set[Placements] = field(default_factory=set)
    num_gradients: int = 0
    is_grad_moved: bool = False


@dataclass(eq=False)
class TensorRecord:
    """A tensor among the arguments or results of a call.

    Attributes:
        placements: None for a plain tensor, which is the same on every rank.
        shape, local_shape: global and of this rank; ``strides``: of the local tensor.
        value: None for a plain tensor.
        grads: placements of the gradients that this use of the value sent back; num_gradients: how many there are.
    """

    placements: Placements | None
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    value: Value | None
    grads: set[Placements] = field(default_factory=set)
    num_gradients: int = 0


@dataclass(eq=False)
class Call:
    """One call of a torch function.

    Attributes:
        module: path of the module that runs.
        changed: why the call is not that of the function on the local tensors; "" if it is.
        local_run: what the function did on the local tensors.
        moves_gradients: whether its backward moved tensors.
        has_gaps: whether the elements of an argument are not next to each other in memory.
        is_random: whether it drew random numbers.
        writes: whether it wrote to one of its arguments.
        communication: collectives that it started, as ``all_reduce over tp``.
        reads_other_unit: whether it got a parameter of a unit that was not running, and may have another form later.
        place: the file and line of the model's code.
    """

    module: str
    function: Any
    inputs: list[TensorRecord]
    outputs: list[TensorRecord] = field(default_factory=list)
    changed: str = ""
    local_run: LocalRun = LocalRun.DIFFERS
    moves_gradients: bool = False
    has_gaps: bool = False
    is_random: bool = False
    writes: bool = False
    communication: Sequence[str] = ()
    reads_other_unit: bool = False
    place: tuple[str, int] = ("", 0)


ModuleCall = tuple[list[TensorRecord], list[TensorRecord]]


@dataclass(eq=False)
class Boundary:
    """One tensor that an entry of the plan places at a module's boundary."""

    placing: Placing
    input: TensorRecord
    output: TensorRecord
    communication: Sequence[str] = ()

"""From a recorded step to what becomes of its modules, and of each call."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import make_spec, native_static
from vescale.ops import (
    ROWS,
    AttentionWork,
    PreparedConversion,
    attend_to_prefixes,
    cross_entropy_of_rows,
    enter_local,
    entries,
    has_whole_rows,
    leave_local,
    sequence_axes,
    without_dim,
)
from vescale.placements import contiguous_stride, shard_dim, without_partials
from vescale.plans import AttentionMethod
from vescale.static._gradients import is_whole, settle_gradients, without_single_ranks
from vescale.static._record import CallEvent, Event, Recorder
from vescale.static._state import is_inside
from vescale.static._step_records import (
    SIZE_READERS,
    SIZE_TAKERS,
    Call,
    LocalRun,
    ObservedOps,
    Placements,
    TensorRecord,
    Value,
    random_state,
    run_on_locals,
    set_random_state,
)
from vescale.static._tensor_type import TensorType, UnrecordedError, map_in_order, types_of

# Torch functions whose collectives a static forward starts between local tensors, without DTensors.


# Attention over a sequence that is cut over ranks, with gathered keys and values, between local tensors.

_MAX_SHAPES = 64

Runs = Sequence[tuple[int, int]]


def gathered_attention(
    inputs: Sequence[TensorType], outputs: Sequence[TensorType], methods: Sequence[str | None]
) -> Callable[..., torch.Tensor | None] | None:
    """What ``vescale.ops.attention`` does with a query, a key and a value of these types, where the plan gathers keys and
    values; None: something else would be moved, or the gradients arrive otherwise."""
    if len(inputs) != 3 or len(outputs) != 1 or not all(_is_usual(kind) for kind in (*inputs, *outputs)):
        return None
    query, key, value = inputs
    given, kept = key.placements, query.placements
    if given is None or kept is None or value.placements != given or len(key.factors) != len(value.factors):
        return None
    mesh, rows = query.mesh, len(query.factors) - 2
    axes = [axis for axis, p in enumerate(kept) if shard_dim(p) == rows and mesh.size(axis) > 1]
    if not axes or not methods or len(key.factors) != len(query.factors):
        return None
    if any(methods[axis] != "all_gather" or shard_dim(given[axis]) != rows for axis in axes):
        return None
    if any(shard_dim(p) == rows + 1 for p in given):
        return None
    names = mesh.mesh_dim_names or ()
    requester = f"attention: all_gather on {','.join(names[axis] for axis in axes)}"
    return _GatheredAttention(query, key, value, outputs[0], axes, requester)


def _is_usual(kind: TensorType) -> bool:
    """Whether the gradient of a tensor arrives as it is placed, and ranks share sizes evenly."""
    placements = kind.placements
    if placements is None or tuple(without_partials(placements)) != placements:
        return False
    return kind.is_even and kind.grad in (None, placements)


class _GatheredAttention:
    """The function itself. It answers None for arguments that take DTensors."""

    def __init__(
        self,
        query: TensorType,
        key: TensorType,
        value: TensorType,
        result: TensorType,
        axes: Sequence[int],
        requester: str,
    ) -> None:
        self._types, self._result, self._requester = (query, key, value), result, requester
        self._mesh = mesh = query.mesh
        assert key.placements is not None
        self._given = key.placements
        self._gathered = tuple(Replicate() if axis in axes else p for axis, p in enumerate(self._given))
        self._summed: tuple[Placement, ...] = tuple(
            Partial() if axis in axes else p for axis, p in enumerate(self._given)
        )
        target = tuple(Replicate() if axis in axes else None for axis in range(mesh.ndim))
        self._convert = PreparedConversion(self._given, target, (None, None), requester)
        self._convert_local = native_static().LocalConversion(
            mesh,
            self._given,
            key.factors,
            key.sizes,
            None,
            self._convert.target,
            self._convert.stages,
            requester,
            self._summed,
            _accept,
        )
        self._runs: dict[Any, Runs | None] = {}  # by shapes; None: the operands are moved or cut otherwise

    def __call__(
        self,
        query: torch.Tensor,  # names and defaults of PyTorch's function
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor | None:
        shapes = query.shape, key.shape, value.shape
        if attn_mask is not None or dropout_p or key.dtype != value.dtype or shapes[1][:-1] != shapes[2][:-1]:
            return None
        runs = self._runs.get(shapes)
        if runs is None:
            if len(self._runs) >= _MAX_SHAPES:
                self._runs.clear()
            runs = self._runs[shapes] = self._runs_of(query, key, value)
            if runs is None:
                return None
        keys, values = self._whole(torch.cat([key, value], -1)).split([key.shape[-1], value.shape[-1]], -1)
        options = {
            "dropout_p": dropout_p,
            "scale": scale,
            "enable_gqa": enable_gqa and query.ndim > 3 and query.shape[-3] != keys.shape[-3],
        }
        function = torch.nn.functional.scaled_dot_product_attention
        if is_causal:
            return attend_to_prefixes(function, query, keys, values, runs, options)
        return function(query, keys, values, **options)  # type: ignore[arg-type]

    def _whole(self, packed: torch.Tensor) -> torch.Tensor:
        found = self._convert_local(packed)
        if found is not None:
            return found
        shape = (*self._types[1].global_shape(packed)[:-1], packed.shape[-1])
        made = leave_local(packed, self._mesh, self._given, shape, self._requester)
        return enter_local(self._convert(made), self._summed)

    def _runs_of(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Runs | None:
        """The rows of the query that this rank has."""
        placed = (self._types[0].placements, self._gathered, self._gathered)
        specs = []
        for x, kind, placements in zip((query, key, value), self._types, placed, strict=True):
            shape = kind.global_shape(x)
            assert placements is not None
            specs.append(make_spec(self._mesh, placements, shape, contiguous_stride(shape), x.dtype))
        if not sequence_axes(specs[0]):
            return None
        work = AttentionWork.of(*specs, None)
        grads = placed[0], self._summed, self._summed
        for spec, name, grad in zip(specs, ("query", "key", "value"), grads, strict=True):
            use = work.use(spec, name)
            if use.placements != tuple(spec.placements) or use.grads != grad or use.cuts:
                return None
        return work.held(work.shape, work.placements, ROWS) if work.placements == self._result.placements else None


def _accept(_: Any) -> None:
    """Of gathered keys and values, only the local tensor counts."""


LocalFunction = Callable[..., torch.Tensor | None]


def local_function(
    function: Any,
    inputs: Sequence[TensorType],
    outputs: Sequence[TensorType],
    attention_methods: Sequence[AttentionMethod | None] = (),
) -> LocalFunction | None:
    """What does on local tensors of these types what ``function`` does on DTensors, with the same bits and collectives; it
    answers None for arguments of which it cannot. None: there is nothing.

    Args:
        attention_methods: of the module that calls the function, on each axis.
    """
    if function is F.scaled_dot_product_attention:
        return gathered_attention(inputs, outputs, attention_methods)
    if function is F.cross_entropy:
        return _cross_entropy(inputs, outputs)
    return _copy(inputs) if function is torch.Tensor.copy_ else None


def _copy(inputs: Sequence[TensorType]) -> LocalFunction | None:
    """A write to a tensor of values that have other placements: these move, the tensor does not."""
    if len(inputs) != 2 or any(kind.placements is None for kind in inputs):
        return None
    written, values = inputs
    placements, found = written.placements, values.placements
    assert placements is not None and found is not None
    are_parts = all(without_partials(kind) == kind for kind in (placements, found))
    if not are_parts or len(written.factors) != len(values.factors) or written.grad not in (None, placements):
        return None
    convert = PreparedConversion(found, placements, (None, None), "copy_")

    def copy(x: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if written.global_shape(x) != values.global_shape(source):
            raise UnrecordedError(f"copy_ of values of shape {tuple(source.shape)} to a tensor of {tuple(x.shape)}")
        moved: Any = convert(values.to_global(source, "copy_"))  # type: ignore[arg-type]
        return x.copy_(enter_local(moved), non_blocking)

    return copy


def _cross_entropy(inputs: Sequence[TensorType], outputs: Sequence[TensorType]) -> LocalFunction | None:
    """The loss of rows that are cut over ranks, each with all classes."""
    if len(inputs) != 2 or len(outputs) != 1:
        return None
    scores, labels, loss = *inputs, outputs[0]
    if scores.placements is None or loss.placements is None or len(scores.factors) != 2:
        return None
    if not has_whole_rows(scores.placements, 2):
        return None
    is_alike = labels.placements == tuple(without_dim(p, 1) for p in scores.placements)
    are_grads_known = scores.grad in (None, scores.placements) and loss.grad in (None, loss.placements)
    if not is_alike or not are_grads_known or not all(p.is_replicate() for p in loss.placements):
        return None
    mesh = scores.mesh
    axes = [axis for axis, p in enumerate(scores.placements) if not p.is_replicate() and mesh.size(axis) > 1]
    add_up = _sum_of_three(mesh, axes)

    def cross_entropy(
        input: torch.Tensor,  # names and defaults of PyTorch's function
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> torch.Tensor | None:
        is_simple = weight is None and size_average is None and reduce is None and not label_smoothing
        if not is_simple or reduction not in ("mean", "sum") or target.is_floating_point():
            return None
        return cross_entropy_of_rows(mesh, axes, input, target, reduction, ignore_index, add_up)

    return cross_entropy


def _sum_of_three(mesh: DeviceMesh, axes: Sequence[int]) -> Callable[[torch.Tensor], torch.Tensor | None] | None:
    """The sum of a vector of three numbers over the ranks along one axis, in C++; it answers None where Python has to. None:
    along several axes, where conversions and the loss may join them differently."""
    if len(axes) != 1:
        return None
    pending = tuple(Partial() if axis in axes else Replicate() for axis in range(mesh.ndim))
    whole = PreparedConversion(pending, (Replicate(),) * mesh.ndim, (None, None), "nll_loss")
    arguments = mesh, pending, (1,), (), None, whole.target, whole.stages, "nll_loss", None, _local_functions_accept
    return native_static().LocalConversion(*arguments)


def _local_functions_accept(_: Any) -> None:
    """Placements are known."""


# Arguments that the recorded step did not have: whether a torch function still does the same on local tensors.


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


# What a static forward does at a call site, decided from the recorded calls there.


@dataclass(frozen=True)
class ReadSizes:
    """A function that reads sizes of a tensor, of which the model sees the global ones."""

    function: Any
    factors: tuple[int, ...]


@dataclass(frozen=True)
class TakeSizes:
    """A function that takes the global sizes of its result."""

    function: Any
    factors: tuple[int, ...]


@dataclass(frozen=True)
class Eager:
    """A function that runs on DTensors.

    Attributes:
        reason: why.
        communication: collectives that the recorded call started.
    """

    function: Any
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]
    reason: str = field(compare=False)
    communication: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Problem:
    """What cannot be done at a call site; its module runs in eager mode."""

    reason: str


Action = ReadSizes | TakeSizes | Eager

_Tensor: Any = torch.Tensor
# What they do is seen in the backward of this tensor alone.
OF_TENSOR_ITSELF = frozenset((
    _Tensor.backward, _Tensor.detach_, _Tensor.register_hook, _Tensor.register_post_accumulate_grad_hook,
    _Tensor.retain_grad, _Tensor.requires_grad_, _Tensor.data.__set__, _Tensor.grad.__get__, _Tensor.grad.__set__,
    _Tensor.requires_grad.__set__, _Tensor.grad_fn.__get__, _Tensor.is_leaf.__get__,
    torch.autograd.grad, torch.autograd.backward,
))  # fmt: skip


def name_of(function: Any) -> str:
    """The name of a torch function, of an attribute that of its getter's owner; of what an entry of the plan places
    otherwise, of which tapes have a weak reference."""
    if isinstance(function, weakref.ref):
        return f"the entry for {getattr(function(), 'requester', 'a module')}"
    owner = getattr(getattr(function, "__self__", None), "__name__", "")
    name = getattr(function, "__name__", str(function))
    return owner if name == "__get__" and owner else name


def action_of(call: Call, mesh: DeviceMesh) -> Action | Problem | None:
    """What happens at the site of a call; None: nothing but the function on the local tensors."""
    if call.function in OF_TENSOR_ITSELF and any(record.placements is not None for record in call.inputs):
        return Problem(f"{name_of(call.function)} belongs to the tensor itself, of which there would be two")
    reason = _why_not_plain(call, mesh)
    if not reason:
        return None
    if call.local_run is LocalRun.TRANSFORMED:
        return Problem(f"{name_of(call.function)} runs on DTensors, or draws random numbers, in a function transform")
    for record in (*call.inputs, *call.outputs):
        if record.value is not None and len(record.value.grads) > 1:
            return Problem(f"a gradient arrives in several placements: {record.value.grads}")
    inputs, outputs = types_of(call.inputs, mesh), types_of(call.outputs, mesh)
    if any(r.value is not None and 1 < r.num_gradients < r.value.num_gradients for r in call.inputs):
        # On DTensors, they would be added before the others.
        return Problem(
            f"{name_of(call.function)} sends several gradients of a tensor that has other uses, and {reason}"
        )
    if not call.changed and not call.reads_other_unit and not _why_not_in_backward(call, mesh):
        if call.function in SIZE_READERS and call.local_run is LocalRun.SIZES and inputs[0].is_even:
            return ReadSizes(call.function, inputs[0].factors)
        if call.function in SIZE_TAKERS and call.local_run is LocalRun.TAKES_SIZES and outputs[0].is_even:
            return TakeSizes(call.function, outputs[0].factors)
    # The gradient of what is copied is brought to the placements that it has, as that of a function on DTensors is.
    checked = call.inputs[:1] if call.function is torch.Tensor.copy_ else call.inputs
    is_grad_moved = any(r.value is not None and r.value.is_grad_moved for r in checked)
    is_on_locals = not is_grad_moved and local_function(call.function, inputs, outputs) is not None
    if is_on_locals and call.reads_other_unit:
        return Problem(f"{name_of(call.function)} gets a parameter of a unit that does not run")
    has_grads = any(r.requires_grad for r in (*call.inputs, *call.outputs))
    if call.writes and (call.has_gaps or has_grads) and not is_on_locals:
        return Problem(
            f"{name_of(call.function)} writes in place, with a gradient or between other elements, and {reason}"
        )
    return Eager(call.function, inputs, outputs, reason, tuple(call.communication))


def _why_not_plain(call: Call, mesh: DeviceMesh) -> str:
    """Why the function may not simply run on the local tensors; "" if it may."""
    if call.reads_other_unit:
        return "it gets a parameter of a unit that does not run"
    if call.changed and (call.is_random or not _is_whole(call, mesh)):
        return call.changed
    if call.local_run is not LocalRun.SAME and not (call.writes and _is_whole(call, mesh)):
        return f"on the local tensors, it returns {call.local_run.value}"
    return _why_not_in_backward(call, mesh)


def _why_not_in_backward(call: Call, mesh: DeviceMesh) -> str:
    if any(record.value is not None and record.value.is_grad_moved for record in call.outputs):
        return "gradients of its results arrive in other placements than theirs"
    for record in call.inputs:
        if record.value is not None and record.grads:
            if record.value.is_grad_moved:
                return f"it sends a gradient with placements {record.grads} of a tensor with others"
            found, settled = (
                {without_single_ranks(p, mesh) for p in placements} for placements in (record.grads, record.value.grads)
            )
            if found != settled:
                return f"it sends a gradient with placements {found}, and the tensor's gradient has {settled}"
    if call.moves_gradients and not _is_whole(call, mesh):
        return "its backward moves tensors"
    return "its backward reduces pending sums" if _reduces_gradients(call, mesh) else ""


def _reduces_gradients(call: Call, mesh: DeviceMesh) -> bool:
    """Whether gradients arrived as pending sums along an axis, and one was sent that is none: attention, whose backward is
    not linear. Functions of vescale's reduce the gradient themselves, and no op is seen to move it."""
    arrived = [p for r in call.outputs if r.value is not None for p in r.value.grads]
    sent = [p for r in call.inputs for p in r.grads]
    return any(
        any(p[axis].is_partial() for p in arrived) and any(not p[axis].is_partial() for p in sent)
        for axis in range(mesh.ndim)
        if mesh.size(axis) > 1
    )


def _is_whole(call: Call, mesh: DeviceMesh) -> bool:
    """Whether all tensors and gradients are whole on every rank, so that nothing can be moved."""
    records = (*call.inputs, *call.outputs)
    grads = [p for r in records if r.value is not None for p in r.value.grads | r.grads]
    return all(is_whole(p, mesh) for p in [*(r.placements for r in records), *grads])


# Tensors that modules in eager mode share with others otherwise than as arguments and results, such as attributes.


def side_channel(recorder: Recorder, eager: Collection[str]) -> tuple[str, str] | None:
    """The first tensor that is a DTensor for a module in eager mode, and a local tensor for one that is not.

    Args:
        eager: paths of the modules in eager mode.

    Returns:
        The path of the innermost module that contains both, and the reason why it cannot be static.
    """
    if not eager or "" in eager:
        return None
    eager = [path for path in eager if not any(path != outer and is_inside(path, outer) for outer in eager)]
    passed = {path: _values_of_module(recorder, path) for path in eager}
    around = functools.cache(lambda path: frozenset(outer for outer in eager if is_inside(path, outer)))
    made = {record.value: "" for record in recorder.inputs if record.value is not None}
    for path, inputs, outputs in _uses(recorder):
        for value in filter(None, (record.value for record in inputs)):
            maker = made.get(value)  # of views for units, and of what entries of the plan place, it is not known
            if value.name in recorder.written_names:
                maker = value.name.rpartition(".")[0]
            crossed = () if maker is None else around(path) ^ around(maker)
            outer = next((outer for outer in crossed if value not in passed[outer]), None)
            if maker is not None and outer is not None:
                places = f"{path or 'the model'} uses a tensor of {maker or 'the model'}"
                reason = f"{places}, which is no argument or result of {outer}, a module in eager mode"
                return _common(recorder, path, maker), reason
        for value in filter(None, (record.value for record in outputs)):
            made.setdefault(value, path)
    return None


def _uses(recorder: Recorder) -> Iterator[tuple[str, list[TensorRecord], list[TensorRecord]]]:
    for call in recorder.calls:
        yield call.module, call.inputs, call.outputs


def _values_of_module(recorder: Recorder, path: str) -> set[Value]:
    """What it gets and returns, also as its entries of the plan place it."""
    records = [record for call in recorder.module_calls.get(path, ()) for part in call for record in part]
    for one in recorder.boundaries:
        if one.placing.instruction.path == path:
            records += [one.input, one.output]
    return {record.value for record in records if record.value is not None}


def _common(recorder: Recorder, first: str, second: str) -> str:
    """The innermost module that has run and contains both."""
    common = first
    while common and not (is_inside(second, common) and common in recorder.module_calls):
        common = common.rpartition(".")[0]
    return common


@dataclass(frozen=True)
class RecordedTape:
    """A recorded step.

    Attributes:
        problems: of the modules that ran, why they run in eager mode, by path; "" if they do not.
        regions: paths of those that run on local tensors by the plan.
        events: those that a static forward repeats, in order.
        actions: what is done in place of a call; the others run on the local tensors.
        inputs, outputs: types of the model's tensors; ``hidden``: of those inside objects in its output.
        grads: placements of the gradients of parameters and buffers, by name; a name without a gradient is missing.
        draws: whether the step drew random numbers.
        names: numbers of parameters and buffers, by name.
        input_numbers, output_numbers: of the model's tensors; ``plain``: of those that are no DTensors.
    """

    problems: Mapping[str, str]
    regions: frozenset[str]
    events: tuple[Event, ...]
    actions: Mapping[Call, Action]
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]
    hidden: tuple[TensorType, ...]
    grads: Mapping[str, Placements]
    draws: bool
    names: Mapping[str, int]
    input_numbers: tuple[int, ...]
    output_numbers: tuple[int, ...]
    plain: frozenset[int]
    num_values: int


def recorded_tape(recorder: Recorder, mesh: DeviceMesh) -> RecordedTape:
    """What a recorder has seen."""
    found = {**settle_gradients(recorder, mesh), **recorder.problems}
    actions: dict[Call, Action] = {}
    for event in recorder.events:
        if not isinstance(event, CallEvent) or any(is_inside(event.module, region) for region in recorder.regions):
            continue
        action = action_of(event.call, mesh)
        if isinstance(action, Problem):
            place = "{}:{}: ".format(*event.call.place) if event.call.place[0] else ""
            found.setdefault(event.module, f"{place}{action.reason}")
        elif action is not None:
            actions[event.call] = action
    problems = dict.fromkeys(["", *recorder.module_calls], "")
    for path, reason in found.items():
        while path not in problems:  # of a module whose call was not seen
            path = path.rpartition(".")[0]
        problems[path] = problems[path] or reason

    def aside() -> list[str]:
        return [path for path, problem in problems.items() if problem or path in recorder.regions]

    while leak := side_channel(recorder, aside()):
        problems[leak[0]] = leak[1]
    events = tuple(recorder.events_outside(frozenset(filter(None, aside()))))
    numbers = recorder.numbers
    return RecordedTape(
        problems,
        recorder.regions,
        events,
        actions,
        types_of(recorder.inputs, mesh),
        types_of(recorder.outputs, mesh),
        types_of(recorder.hidden, mesh),
        {name: next(iter(value.grads)) for name, value in recorder.named.items() if value.grads},
        any(event.call.is_random for event in events if isinstance(event, CallEvent)),
        {name: numbers[value] for name, value in recorder.named.items() if value in numbers},
        tuple(recorder.input_numbers),
        tuple(recorder.output_numbers),
        frozenset(range(recorder.num_values)) - frozenset(numbers.values()),
        recorder.num_values,
    )

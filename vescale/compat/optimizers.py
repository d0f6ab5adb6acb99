"""Optimizers of ``torch.optim`` that treat every element alike: on DTensors they run on the local tensors.

An optimizer's ``step`` collects what a group of parameters consists of in lists (``_init_group``), and calls a function of
its module with them (``adam``, ``sgd``). Both are replaced. The lists and ``optimizer.state`` hold DTensors as before; the
function gets the local tensors where placements are equal, and runs on them whatever it would run: a loop, foreach ops, a
fused kernel. DTensor's dispatcher is not asked, which takes longer than the kernels of small parameters, and in PyTorch
keeps a DTensorSpec of each parameter for every step (pytorch#188174).
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling
from torch.distributed.tensor import DTensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from vescale.compat.autograd import in_transform
from vescale.compat.dtensor import DTensorSpec
from vescale.compat.model_hooks import model_hooks
from vescale.compat.patching import Changes


@dataclass(frozen=True)
class _Optimizer:
    """What an optimizer's module calls the parts of its step.

    Attributes:
        name: the class, in the module of ``torch.optim`` that has its name in lower case, as the function is called.
        states: each list of ``_init_group`` behind parameters and gradients, the state that it takes, and the option of the
            group without which it stays empty ("": none).
        found: what ``_init_group`` returns of dense gradients of real parameters.
    """

    name: str
    states: tuple[tuple[str, str, str], ...]
    found: bool | tuple[bool, bool] = False


_STEPS = ("state_steps", "step", "")
_AVERAGES = ("exp_avgs", "exp_avg", ""), ("exp_avg_sqs", "exp_avg_sq", "")

_OPTIMIZERS = (
    _Optimizer("Adadelta", (("square_avgs", "square_avg", ""), ("acc_deltas", "acc_delta", ""), _STEPS)),
    _Optimizer("Adagrad", (("state_sums", "sum", ""), _STEPS), (False, False)),
    _Optimizer("Adam", (*_AVERAGES, ("max_exp_avg_sqs", "max_exp_avg_sq", "amsgrad"), _STEPS)),  # and AdamW
    _Optimizer("Adamax", (_AVERAGES[0], ("exp_infs", "exp_inf", ""), _STEPS)),
    _Optimizer("ASGD", (("mus", "mu", ""), ("axs", "ax", ""), ("etas", "eta", ""), _STEPS)),
    _Optimizer("NAdam", (*_AVERAGES, ("mu_products", "mu_product", ""), _STEPS)),
    _Optimizer("RAdam", (*_AVERAGES, _STEPS)),
    _Optimizer(
        "RMSprop",
        (
            ("square_avgs", "square_avg", ""),
            ("momentum_buffer_list", "momentum_buffer", "momentum"),
            ("grad_avgs", "grad_avg", "centered"),
            _STEPS,
        ),
    ),
    _Optimizer("Rprop", (("prevs", "prev", ""), ("step_sizes", "step_size", ""), _STEPS)),
    _Optimizer("SGD", (("momentum_buffer_list", "momentum_buffer", "momentum"),)),
)
# Lists of one number a parameter, which is the same on every rank.
_NUMBERS = {"state_steps", "mu_products", "mus", "etas"}


def run_on_local_tensors(changes: Changes, _: Any) -> None:
    for optimizer in _OPTIMIZERS:
        kind = getattr(torch.optim, optimizer.name)
        module, name = sys.modules[kind.__module__], optimizer.name.lower()
        changes.attribute(module, name, _on_local_tensors(getattr(module, name)))
        wanted = ["self", "group", *inspect.signature(kind._init_group).parameters][2:]
        if wanted[-len(optimizer.states) :] == [name for name, _, _ in optimizer.states]:
            changes.attribute(kind, "_init_group", _collected(optimizer, kind._init_group))
    adam, adamw = (sys.modules[f"torch.optim.{name}"] for name in ("adam", "adamw"))
    changes.attribute(adamw, "adam", adam.adam)


def _is_watched() -> bool:
    """Whether somebody sees the ops: a tracer, a mode, a transform, autograd (``differentiable``)."""
    return (
        is_compiling()
        or torch.is_grad_enabled()
        or torch._C._len_torch_dispatch_stack() > 0
        or in_transform()
        or any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack())
    )


def _collected(optimizer: _Optimizer, original: Callable[..., Any]) -> Callable[..., Any]:
    """``_init_group`` for DTensors that have their states: the same lists, for a third of the time. Every attribute of a
    DTensor that PyTorch asks for costs a search for its ``__torch_function__``."""

    @functools.wraps(original)
    def init_group(self: Any, group: dict[str, Any], *lists: list[Any]) -> Any:
        params = group["params"]
        if (
            is_compiling()
            or len(lists) != len(optimizer.states) + 2
            or set(map(type, params)) != {DTensor}
            or group.get("differentiable")
            or isinstance(group["lr"], torch.Tensor)
            or (group.get("fused") and getattr(self, "_need_device_dtype_check_for_fused", False))
            or _is_watched()
        ):
            return original(self, group, *lists)
        with torch._C.DisableTorchFunctionSubclass():
            grads = [p.grad for p in params]
            if any(dtype.is_complex for dtype in {p.dtype for p in params}):
                return original(self, group, *lists)
        kinds = set(map(type, grads))
        if type(None) in kinds:
            params = [p for p, grad in zip(params, grads) if grad is not None]
            grads = [grad for grad in grads if grad is not None]
            kinds.discard(type(None))
        if kinds != {DTensor}:
            return original(self, group, *lists)
        wanted = [state if not option or group[option] else None for _, state, option in optimizer.states]
        found: list[list[Any]] = [[] for _ in wanted]
        if any(wanted):
            known = self.state
            states = [known[p] for p in params]
            try:
                found = [[] if name is None else [state[name] for state in states] for name in wanted]
            except KeyError:  # to be made
                return original(self, group, *lists)
        for into, values in zip(lists, (params, grads, *found)):
            into.extend(values)
        return optimizer.found

    return init_group


def _on_local_tensors(original: Callable[..., None]) -> Callable[..., None]:
    """The function of an optimizer, for lists that may hold DTensors."""
    parameters = inspect.signature(original).parameters.values()
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
    numbers = [position for position, name in enumerate(names) if name in _NUMBERS]
    tensors = [position for position, name in enumerate(names) if name not in _NUMBERS]

    @functools.wraps(original)
    def function(*lists: Any, **options: Any) -> None:
        if (
            is_compiling()
            or len(lists) != len(names)
            or DTensor not in map(type, lists[0])
            or DTensor in map(type, options.values())
            or _is_watched()
        ):
            return original(*lists, **options)
        params = lists[0]
        columns, counts = [lists[position] for position in tensors], [lists[position] for position in numbers]
        if not _are_known(*columns, numbers=counts) and not _all_match(*columns, numbers=counts):
            return original(*lists, **options)
        written = [p for p in params if type(p) is DTensor]
        follow_writes(written)
        on_locals = list(lists)
        for position in tensors:
            on_locals[position] = [x._local_tensor if type(x) is DTensor else x for x in lists[position]]
        original(*on_locals, **options)
        increment_version(written)  # as the ops on DTensors do: backward refuses what it saved before
        return None

    # TorchScript compiles the original: torch.distributed.optim has these functions compiled when it is imported.
    function.__dict__.update({"__script_if_tracing_wrapper": True, "__original_fn": original})
    return function


def follow_writes(dtensors: Sequence[DTensor]) -> None:
    """Tell the models' hooks that the local tensors of these are about to be written."""
    models = model_hooks()
    if models is not None and models.view_copies:
        for dtensor in dtensors:
            models.listener.wrote(dtensor)


def note_writes(tensors: Sequence[torch.Tensor]) -> None:
    """Before their local tensors are written to: what ops on the DTensors among ``tensors`` would have done besides."""
    written = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    follow_writes(written)
    increment_version(written)


def _are_known(
    params: Sequence[Any], grads: Sequence[Any], *states: Sequence[Any], numbers: Sequence[Sequence[Any]]
) -> bool:
    """Whether all are DTensors with equal placements, and states have the very spec of their parameter, as
    :func:`_all_match` leaves them; says no when in doubt."""
    if set(map(type, params)) != {DTensor} or set(map(type, grads)) != {DTensor} or not any(states):
        return False
    specs = [p._spec for p in params]
    if any(
        placement.is_partial() for spec in {id(spec): spec for spec in specs}.values() for placement in spec.placements
    ):
        return False
    try:
        for column in states:
            if column and not all(map(operator.is_, [state._spec for state in column], specs)):
                return False
    except AttributeError:  # not a DTensor
        return False
    for grad, spec in zip(grads, specs):
        if grad._spec is not spec and not _match(grad._spec, spec):
            return False
    return not any(DTensor in map(type, column) for column in numbers)


def _all_match(
    params: Sequence[Any], grads: Sequence[Any], *states: Sequence[Any], numbers: Sequence[Sequence[Any]]
) -> bool:
    """Whether the local results are those of the op, at each index: not where gradient or states have other
    placements than the parameter, where plain tensors are among DTensors, where a sum is pending, and where a state is to be
    made.

    A state with its parameter's placements gets the parameter's spec, by which :func:`_are_known` knows both.
    """
    if any(DTensor in map(type, column) for column in numbers):
        return False
    for index, param in enumerate(params):
        owned = [column[index] for column in states if column]
        kinds = {type(x) for x in (param, grads[index], *owned)}
        if type(None) in kinds:
            return False
        if DTensor not in kinds:
            continue
        if kinds != {DTensor}:
            return False
        spec = param._spec
        if any(placement.is_partial() for placement in spec.placements):
            return False
        if not all(_match(x._spec, spec) for x in (grads[index], *owned)):
            return False
        for state in owned:
            if state._spec.tensor_meta == spec.tensor_meta:
                state._spec = spec
    return True


def _match(spec: DTensorSpec, other: DTensorSpec) -> bool:
    return spec.placements == other.placements and (spec.mesh is other.mesh or spec.mesh == other.mesh)

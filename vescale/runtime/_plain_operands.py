"""Plain tensors among DTensors outside of a parallelized model: metrics, losses and sums that a script makes of outputs.

As everywhere, a plain tensor is the global one, the same on every rank, and ranks compare it with their next event.

Ops on lists (``torch._foreach_*``, fused optimizers) compute each index by itself: indices with plain tensors alone, and
those with DTensors, run apart.

===========================================  ====================================================================
a plain tensor                               the op
===========================================  ====================================================================
is read                                      runs as if it were a DTensor, Replicate on each axis
is read, and requires a gradient             the same; its gradient is made plain: the whole value
is written to (``total += loss.detach()``)   writes the whole value, which all ranks gather
is written to by what requires a gradient    MixedTensorsError: autograd would have to continue through both
===========================================  ====================================================================

Meshes without a parallelized model, and places inside of one, are not treated here: PyTorch's refusal gets advice.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import MutableMapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.hooks import unserializable_hook
from torch.utils.weak import WeakTensorKeyDictionary

from vescale.checks import step_checks
from vescale.compat import local_of, make_dtensor, make_spec, map_tensors, tensors_in, written_tensors
from vescale.errors import MixedTensorsError
from vescale.ops import bring, convert, enter_local, is_listed, running_module
from vescale.placements import contiguous_stride, shard_dim
from vescale.runtime._input_checks import check_read, note_plain_value

_REFUSAL = "got mixed torch.Tensor and DTensor"  # PyTorch's
_ASKED = threading.local()  # whether PyTorch is being asked what it says


def run_mixed(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a call with plain tensors among DTensors; NotImplemented: PyTorch answers it.

    Communication: a plain tensor that is written to needs the whole value of DTensors that are cut or pending.

    Raises MixedTensorsError.
    """
    tensors = [*tensors_in(args), *tensors_in(kwargs)]
    mesh = next((x.device_mesh for x in tensors if isinstance(x, DTensor)), None)
    if mesh is None:
        return NotImplemented
    if is_listed(op):
        apart = _run_apart(op, args, kwargs)
        if apart is not _TOGETHER:
            return apart
    written = [x for x in written_tensors(op, args, kwargs) if not isinstance(x, DTensor)]
    if not written and all(isinstance(x, DTensor) or x.ndim == 0 for x in tensors):
        _keep_gradients_plain(tensors, mesh)
        return NotImplemented
    if running_module() is not None and not written:
        return _on_replicas(op, args, kwargs, mesh)
    if step_checks(mesh) is None:
        return _as_pytorch(op, args, kwargs)
    if op in _COMPARED_EARLIER:  # asked because sizes differ
        if op is not torch.ops.aten.broadcast_tensors.default or not _fit(tensors):
            _refuse_parts(op, tensors)
        return NotImplemented
    if written:
        return _write(op, args, kwargs)
    _keep_gradients_plain(tensors, mesh)
    names = iter(_names(op, args, kwargs))

    def wrapped(x: torch.Tensor) -> torch.Tensor:
        name = next(names)
        if isinstance(x, DTensor):
            return x
        if x.ndim:
            note_plain_value(str(op), name, x, mesh)
        return make_dtensor(x.detach(), make_spec(mesh, (Replicate(),) * mesh.ndim, x.shape, x.stride(), x.dtype))

    args, kwargs = map_tensors(wrapped, tuple(args)), map_tensors(wrapped, dict(kwargs))
    try:
        return op(*args, **kwargs)
    except (RuntimeError, ValueError):
        _refuse_parts(op, tensors)
        raise


_TOGETHER: Any = object()


def _run_apart(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an op on lists in which indices differ in what they hold; ``_TOGETHER`` where all are alike."""
    length = len(args[0])
    lists = [x for x in (*args, *kwargs.values()) if isinstance(x, list | tuple) and len(x) == length]
    written = {id(x) for x in written_tensors(op, args, kwargs) if not isinstance(x, DTensor)}
    kinds: dict[Any, list[int]] = {}
    for index, row in enumerate(zip(*lists)):
        mesh = next((x.device_mesh for x in row if isinstance(x, DTensor)), None)
        kinds.setdefault((mesh, mesh is not None and any(id(x) in written for x in row)), []).append(index)
    if len(kinds) < 2:
        return _TOGETHER
    results: list[Any] = [None] * length
    for indices in kinds.values():

        def chosen(name: str, value: Any, indices: list[int] = indices) -> Any:
            if isinstance(value, list | tuple):
                return [value[index] for index in indices] if len(value) == length else value
            return value[indices] if name == "scalars" and isinstance(value, torch.Tensor) else value

        names = [argument.name for argument in op._schema.arguments]
        found = op(*map(chosen, names, args), **{name: chosen(name, value) for name, value in kwargs.items()})
        for index, result in zip(indices, found or ()):
            results[index] = result
    return results if op._schema.returns else None


# Tensors that have the hook; leaves are used in every step.
_WITH_HOOK: MutableMapping[torch.Tensor, None] = WeakTensorKeyDictionary()


def _keep_gradients_plain(tensors: list[torch.Tensor], mesh: DeviceMesh) -> None:
    """Of plain tensors among DTensors, outside of a model: what made them, and their optimizer, take plain ones."""
    if not torch.is_grad_enabled() or running_module() is not None or step_checks(mesh) is None:
        return
    for x in tensors:
        if not isinstance(x, DTensor) and x.requires_grad and x not in _WITH_HOOK:
            x.register_hook(_whole_gradient)
            _WITH_HOOK[x] = None


@unserializable_hook
def _whole_gradient(grad: torch.Tensor) -> torch.Tensor | None:
    """Communication: the whole gradient, where it is pending or cut."""
    if not isinstance(grad, DTensor):
        return None
    whole = (Replicate(),) * grad.device_mesh.ndim
    return enter_local(convert(grad, whole, requester="gradient of a plain tensor"), whole)


def _on_replicas(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh) -> Any:
    """The op of C++ code that has made a tensor of global sizes, as derivatives do, which the model's function mode does not
    see: that of ``cumprod`` has zeros, that of ``trace`` indices."""
    replicated = (Replicate(),) * mesh.ndim

    def wrapped(x: torch.Tensor) -> torch.Tensor:
        is_whole = not isinstance(x, DTensor) and x.ndim > 0
        return make_dtensor(x, make_spec(mesh, replicated, x.shape, x.stride(), x.dtype)) if is_whole else x

    return op(*map_tensors(wrapped, tuple(args)), **map_tensors(wrapped, dict(kwargs)))


_COMPARED_EARLIER = (
    torch.ops.aten.cross_entropy_loss.default,
    torch.ops.aten.nll_loss_nd.default,
    torch.ops.aten.broadcast_tensors.default,
)


def _as_pytorch(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What PyTorch answers where no model is parallelized; where it refuses, with what to do about parameters of
    fully_shard."""
    if getattr(_ASKED, "is_answering", False):
        return NotImplemented
    _ASKED.is_answering = True
    try:
        return op(*args, **kwargs)
    except RuntimeError as error:
        if _REFUSAL not in str(error):
            raise
        raise MixedTensorsError(
            f"{str(error).rstrip('!.')}. Parameters of fully_shard are DTensors outside of the forward of their module: "
            "call the module itself; for another method that uses them, call "
            'vescale.fsdp.register_fsdp_forward_method(module, "method") once, which gathers them there as in forward; or '
            "read the whole value, parameter.full_tensor()"
        ) from None
    finally:
        _ASKED.is_answering = False


def _fit(tensors: list[torch.Tensor]) -> bool:
    """Whether shapes broadcast."""
    sizes = itertools.zip_longest(*(reversed(x.shape) for x in tensors), fillvalue=1)
    return all(len(set(size) - {1}) < 2 for size in sizes)


def _refuse_parts(op: Any, tensors: list[torch.Tensor]) -> None:
    """Of an op whose operands do not fit together: the case that a plain one is as large as this rank's part of another."""
    for x in tensors:
        for output in tensors:
            if isinstance(x, DTensor) or not isinstance(output, DTensor):
                continue
            part, whole = local_of(output).shape, output.shape
            cut = [d for d in range(min(x.ndim, len(whole))) if x.shape[d] == part[d] != whole[d]]
            if not cut:
                continue
            placements = tuple(p if shard_dim(p) in cut else Replicate() for p in output.placements)
            shape = tuple(whole[d] if d in cut else size for d, size in enumerate(x.shape))
            more = f"shape={shape}, stride={contiguous_stride(shape)}"
            raise MixedTensorsError(
                f"{_short_name(op)} of a DTensor of shape {tuple(whole)}, of which this rank holds {tuple(part)}, and a "
                f"plain tensor of shape {tuple(x.shape)}, which is as large as this rank's part: plain tensors beside a "
                "model's outputs are global. Make it a part, "
                f"`DTensor.from_local(x, out.device_mesh, {placements}, {more})`, or compute with it in the model's "
                'forward, as an input of the plan that is given="local"'
            )


def _short_name(op: Any) -> str:
    return str(op).removeprefix("aten.").partition(".")[0]


def _names(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """The argument of each tensor, in order."""
    given = [*((argument.name, value) for argument, value in zip(op._schema.arguments, args)), *kwargs.items()]
    return [name for name, value in given for _ in tensors_in(value)]


def _write(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op on whole values, into plain tensors.

    Raises MixedTensorsError where it would write to DTensors, too, and for what requires a gradient.
    """
    found = next((x for x in tensors_in((args, kwargs)) if isinstance(x, DTensor) and x.requires_grad), None)
    if found is not None and torch.is_grad_enabled():
        raise MixedTensorsError(
            f"{_short_name(op)} writes a DTensor of shape {tuple(found.shape)} that requires a gradient to a plain "
            "tensor: autograd cannot continue from one to the other. Write the value alone (x.detach(), or x.item()), or "
            "make a new tensor (total = total + x)"
        )
    also = next((x for x in written_tensors(op, args, kwargs) if isinstance(x, DTensor)), None)
    if also is not None:
        raise MixedTensorsError(
            f"{op} writes to plain tensors and to a DTensor of shape {tuple(also.shape)} in one computation (an optimizer's "
            "state beside its parameter): make all that it writes to alike, as `torch.zeros_like(parameter)` does"
        )

    def whole(x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, DTensor):
            return x
        if running_module() is None:
            check_read(x, str(op))
        return local_of(bring(x, (Replicate(),) * x.device_mesh.ndim, str(op), "an operand"))

    result = op(*map_tensors(whole, tuple(args)), **map_tensors(whole, dict(kwargs)))
    written = written_tensors(op, args, kwargs)
    return written[0] if len(written) == 1 and isinstance(result, torch.Tensor) else result

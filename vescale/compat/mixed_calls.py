"""Calls that PyTorch's C++ refuses before it asks anybody, without the C++ dispatcher: plain tensors among DTensors, and
views in inference mode of DTensors that were made outside of it; and writes that it does not count, by way of ``.data``.

A dispatch mode meets them below autograd, where the C++ dispatcher would: in backwards of DTensors, whose ops no function
calls, in functions that have one of these among their operands, and in PyTorch's functions in Python, which make tensors of
their own. PyTorch calls ``DTensor.__torch_function__`` for each function that gets a DTensor.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vescale.compat.dispatch import handlers_of_dtensor
from vescale.compat.ledger import note
from vescale.compat.op_info import is_view
from vescale.compat.patching import Changes

_without_overrides = torch._C.DisableTorchFunctionSubclass
Answer = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class _Ops(TorchDispatchMode):
    """Asks ``answer`` for the ops of one function or backward."""

    leaves_meta_alone = True

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        found = [x for x in tensors if type(x) is DTensor]
        if not found:
            return op(*args, **kwargs)
        for x in found:
            _take_strides_of_whole(x)
        if torch.is_inference_mode_enabled() and is_view(op) and not tensors[0].is_inference():
            with torch.inference_mode(False), torch.no_grad():  # the view shares the versions of what it views
                return op(*args, **kwargs)
        if any(type(x) is not DTensor for x in tensors):
            handler = handlers_of_dtensor().get(op)
            with self:  # the calls that make the answer may be mixed, too
                answer = self.answer(op, args, kwargs) if handler is None else handler(op, args, kwargs)
            if handler is not None or answer is not NotImplemented:
                return answer
        return op(*args, **kwargs)


def install_mixed_calls(changes: Changes, answer: Answer) -> None:
    """Ask ``answer(op, args, kwargs)`` for calls with plain tensors among DTensors; its NotImplemented leaves them to
    PyTorch."""

    def torch_function(
        cls: type[DTensor], function: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with _without_overrides(), _counted_writes(args, kwargs):
            if function == _READ_DATA:
                return _give_out(args[0], function(*args))
            if getattr(function, "__module__", None) not in _IN_PYTHON and not _is_refused(args, kwargs):
                try:
                    return function(*args, **kwargs)
                except RuntimeError as error:
                    # Composites in C++ make tensors, too. They have only computed before: those that write begin with it.
                    if _REFUSAL not in str(error) or getattr(function, "__name__", "_").endswith("_"):
                        raise
            with _Ops(answer):
                return function(*args, **kwargs)

    backward = torch.autograd._engine_run_backward

    @functools.wraps(backward)
    def run(losses: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(x, DTensor) for x in losses):
            return backward(losses, *args, **kwargs)
        with _Ops(answer):
            return backward(losses, *args, **kwargs)

    changes.attribute(DTensor, "__torch_function__", classmethod(torch_function))
    changes.attribute(torch.autograd, "_engine_run_backward", run)


_REFUSAL = "got mixed torch.Tensor and DTensor"  # PyTorch's
_IN_PYTHON = (torch.nn.functional.__name__, torch.functional.__name__)


_READ_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_GIVEN_OUT = "_vescale_given_out"
"""The attribute of a storage with ``(local tensor, .data)`` of each DTensor whose ``.data`` has been read, weakly."""


def _give_out(x: DTensor, data: DTensor) -> DTensor:
    """``data`` has a version of its own, and so do local tensors of its views."""
    storage = data._local_tensor.untyped_storage()
    known = [pair for pair in getattr(storage, _GIVEN_OUT, ()) if pair[1]() is not None]
    note("compat.mixed_calls:instance", storage)
    setattr(storage, _GIVEN_OUT, [*known, (weakref.ref(x._local_tensor), weakref.ref(data))])
    return data


@contextlib.contextmanager
def _counted_writes(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """What the call writes to memory that ``.data`` has given out counts in the version of the local tensor, and of the
    ``.data``, as with the C++ dispatcher."""
    listed = [*args[:1], *((kwargs["out"],) if "out" in kwargs else ())]
    flat = [x for one in listed for x in (one if isinstance(one, list | tuple) else (one,))]
    given = [
        (x, x._version)
        for x in flat
        if type(x) is DTensor and not x.is_inference() and hasattr(x._local_tensor.untyped_storage(), _GIVEN_OUT)
    ]
    yield
    for x, version in given:
        if x._version != version:
            for references in getattr(x._local_tensor.untyped_storage(), _GIVEN_OUT):
                increment_version([one for one in (reference() for reference in references) if one is not None])


def _take_strides_of_whole(x: DTensor) -> None:
    """Dims of size 1 may have any stride, and kernels tell memory formats by strides: they get those of the whole tensor, by
    which PyTorch has decided."""
    local = x._local_tensor
    if local.layout is not torch.strided or type(local) is not torch.Tensor or 1 not in local.shape:
        return
    whole = x._spec.stride
    if len(whole) == local.ndim:
        strides = [w if n == 1 and w > 0 else s for n, s, w in zip(local.shape, local.stride(), whole)]
        if strides != list(local.stride()):
            x._local_tensor = local.as_strided(local.shape, strides)


def _is_refused(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    if torch.is_inference_mode_enabled() and not all(x.is_inference() for x in tensors):
        return True
    return any(type(x) is DTensor for x in tensors) and any(type(x) is not DTensor for x in tensors)

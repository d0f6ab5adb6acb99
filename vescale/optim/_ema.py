"""``EMA``: exponential moving averages of a model's parameters, sharded like them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from vescale.compat import AVERAGED_MODULES, local_of, make_dtensor, make_spec, spec_of, unwrapped_model, unwrapped_name
from vescale.errors import OptimizerError
from vescale.fsdp import state_of
from vescale.optim._step_gradients import local_part
from vescale.placements import distribute_tensor

_LOW_PRECISION = (torch.bfloat16, torch.float16)


class EMA:
    """Averages ``a = decay * a + (1 - decay) * p`` of all parameters ``p`` of a model, frozen ones included.

    Each rank averages the parts that it holds, so that nothing is communicated, and the averages have the bits of one
    device. They have their parameter's placements and dtype, float32 for parameters in lower precision. Tied parameters are
    averaged once; one that is added to the model later starts with its value at the next :meth:`update`.

        ema = EMA(model, 0.999)
        for batch in batches:
            ...
            optimizer.step()
            ema.update()
        with ema.swap():
            evaluate(model)

    Names are those of the model itself: wrappers for compilation, activation checkpointing and DDP leave no trace.
    ``state_dict()`` holds DTensors where parameters are DTensors, and :meth:`load_state_dict` is there, so that
    ``torch.distributed.checkpoint`` saves and loads the object itself, also on another mesh.

    Args:
        model: its parameters are looked up by name in every call, so that they may be replaced.
        decay: in [0, 1].
        use_buffers: average floating-point buffers, too (those of batch norm).

    Raises ValueError for a decay out of range, and for parameters without values (on the meta device).
    """

    def __init__(self, model: nn.Module, decay: float = 0.999, *, use_buffers: bool = False) -> None:
        if not 0 <= decay <= 1:
            raise OptimizerError(f"decay is {decay}; expected a number in [0, 1]")
        self.decay = decay
        self.num_updates = 0
        self._model = model
        self._use_buffers = use_buffers
        self._averages: dict[str, torch.Tensor] = {}
        self._set_aside: dict[str, torch.Tensor] = {}
        self._is_swapped = False
        for name, tensor in self._tensors():
            self._averages[name] = _start(name, tensor)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What is averaged, as it rests: groups of ``fully_shard``, of plans and of FSDP2 that are gathered are sharded
        first."""
        for module in self._model.modules():
            state = state_of(module)
            for group in state.groups if state is not None else ():
                group.reshard()
            if state is None and isinstance(module, FSDPModule):  # its root stays gathered after an evaluation
                module.reshard()
        model = unwrapped_model(self._model)
        for name, parameter in model.named_parameters():
            yield unwrapped_name(name), parameter
        if self._use_buffers:
            for name, buffer in model.named_buffers():
                if buffer.is_floating_point():
                    yield unwrapped_name(name), buffer

    @torch.no_grad()
    def update(self) -> None:
        """Average in the present values; call it after the optimizer's step. No communication.

        Raises RuntimeError while the averages are swapped in, ValueError for a parameter that is gone or has another shape
        or cut.
        """
        self._refuse_swapped("update()")
        present = dict(self._tensors())
        self._check(present)
        for name, tensor in present.items():
            if name not in self._averages:
                self._averages[name] = _start(name, tensor)
                continue
            average = local_part(self._averages[name])
            # One op at a time, so that the length of a part does not show in a bit.
            average += (local_part(tensor).to(average.dtype) - average) * (1 - self.decay)
        self.num_updates += 1

    @torch.no_grad()
    def swap(self) -> _Swapped:
        """Exchange averages and parameters in place, at once; again: back. As a context manager it swaps back at the end.

        Parameters get the averages rounded to their dtype; neither loses a bit by swapping. One parameter at a time needs
        memory twice; those in lower precision are set aside in full. No communication.
        """
        present = dict(self._tensors())
        self._check(present)
        for name, tensor in present.items():
            if name not in self._averages:
                continue
            held, average = local_part(tensor), local_part(self._averages[name])
            if held.dtype == average.dtype:
                before = held.clone()
                held.copy_(average)
                average.copy_(before)
            elif self._is_swapped:
                held.copy_(self._set_aside.pop(name))
            else:
                self._set_aside[name] = held.clone()
                held.copy_(average)
        increment_version([tensor for name, tensor in present.items() if name in self._averages])
        self._is_swapped = not self._is_swapped
        for module in self._model.modules():
            (AVERAGED_MODULES.add if self._is_swapped else AVERAGED_MODULES.discard)(module)
        return _Swapped(self)

    def _refuse_swapped(self, call: str) -> None:
        if self._is_swapped:
            raise OptimizerError(f"the averages are swapped in: call swap() again, or leave its context, before {call}")

    def _check(self, present: dict[str, torch.Tensor]) -> None:
        if gone := [name for name in self._averages if name not in present]:
            raise OptimizerError(f"the model no longer has {gone[0]}, of which there is an average; create a new EMA")
        for name, average in self._averages.items():
            if _form(average) != _form(present[name]):
                raise OptimizerError(
                    f"{name} is {_form(present[name])}, and its average {_form(average)}; create the EMA after the "
                    "model is sharded, and a new one if it is sharded again"
                )

    def state_dict(self) -> dict[str, Any]:
        """``decay``, ``num_updates`` and the ``averages`` by name: the tensors themselves.

        Raises RuntimeError while swapped: what is saved with it of the model would be the averages again.
        """
        self._refuse_swapped("state_dict()")
        return {"decay": self.decay, "num_updates": self.num_updates, "averages": dict(self._averages)}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy saved averages into those of this object. Other placements are brought to these (collectives); plain tensors
        are cut by each rank.

        Raises RuntimeError while swapped, ValueError for other names or shapes; nothing is changed then.
        """
        self._refuse_swapped("load_state_dict()")
        saved = state_dict["averages"]
        if different := saved.keys() ^ self._averages.keys():
            name = min(different)
            where = "the state dict" if name in saved else "the model"
            raise OptimizerError(f"only {where} has an average of {name}; load averages of the same model")
        for name, average in self._averages.items():
            if saved[name].shape != average.shape:
                found, expected = tuple(saved[name].shape), tuple(average.shape)
                raise OptimizerError(f"the saved average of {name} has shape {found}, but its parameter {expected}")
        for name, average in self._averages.items():
            value = saved[name].detach()
            if isinstance(average, DTensor):
                spec = spec_of(average)
                if not isinstance(value, DTensor):
                    value = distribute_tensor(value, spec.mesh, spec.placements, src_data_rank=None)
                elif tuple(value.placements) != tuple(spec.placements):
                    value = value.redistribute(spec.mesh, spec.placements)
            local_part(average).copy_(local_part(value))
        self.decay, self.num_updates = state_dict["decay"], state_dict["num_updates"]


class _Swapped:
    """What ``swap()`` returns: leaving it swaps back."""

    def __init__(self, ema: EMA) -> None:
        self._ema = ema

    def __enter__(self) -> EMA:
        return self._ema

    def __exit__(self, *_: object) -> None:
        self._ema.swap()


def _start(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """An average that begins with the value of ``tensor``."""
    if tensor.is_meta:
        raise OptimizerError(f"{name} is on the meta device; create the EMA after the model has values")
    dtype = torch.float32 if tensor.dtype in _LOW_PRECISION else tensor.dtype
    with torch.no_grad():
        local = local_part(tensor).to(dtype, copy=True)
    if not isinstance(tensor, DTensor):
        return local
    spec = spec_of(tensor)
    assert spec.tensor_meta is not None
    return make_dtensor(local, make_spec(spec.mesh, spec.placements, spec.shape, spec.tensor_meta.stride, dtype))


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What an average has in common with its parameter: shape, cut and mesh."""
    if not isinstance(tensor, DTensor):
        return tuple(tensor.shape), "a plain tensor"
    return tuple(tensor.shape), tuple(tensor.placements), tensor.device_mesh, tuple(local_of(tensor).shape)

"""Parameters and buffers on the meta device without recorded values: told of early, and refused in a forward."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from vescale.compat import tensors_in
from vescale.errors import Coded, MissingValuesError
from vescale.fsdp import check_filled
from vescale.rng import is_deferred

_SHOWN = 4
_ADVICE = (
    "build the model under vescale.deferred_init(), which records how each rank computes its part; or fill it after "
    "parallelize: vescale.checkpoint.load_hf(model, folder) allocates memory and reads a Hugging Face folder; "
    "model.to_empty(device=...) allocates memory, which load_state_dict (except for non-persistent buffers) or the "
    "model's own initialization (nn.init) then fills"
)


class MissingValuesWarning(Coded, UserWarning, code="VS0207"):
    """A model with parameters or buffers without values was passed to ``parallelize``."""


class MissingValues:
    """The parameters and buffers of a model that had no values when it was parallelized.

    Attributes:
        places: module and attribute by name; empty as soon as a forward has found values in all of them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._name = type(model).__name__
        self._model = weakref.ref(model)
        self._num_tensors = 0
        self._plain: list[str] = []  # attributes that are no parameters or buffers
        self.places: dict[str, tuple[weakref.ref[nn.Module], str]] = {}
        for path, module in model.named_modules():
            own = (*module._parameters.items(), *module._buffers.items(), *module.__dict__.items())
            for attribute, tensor in own:
                if isinstance(tensor, torch.Tensor):
                    self._num_tensors += 1
                    if tensor.is_meta and not is_deferred(tensor):
                        name = f"{path}.{attribute}" if path else attribute
                        self.places[name] = weakref.ref(module), attribute
                        if attribute in module.__dict__:
                            self._plain.append(name)

    def warn(self) -> None:
        """On the first rank, before anything is placed."""
        if self.places and (not dist.is_initialized() or dist.get_rank() == 0):
            warnings.warn(self._text(list(self.places)), MissingValuesWarning, stacklevel=4)

    def check(self, inputs: Any) -> None:
        """Before a forward on ``inputs``. Raises PlanError naming what has no values, unless an input has none either."""
        if not self.places or any(x.is_meta for x in tensors_in(inputs)):
            return
        missing = [name for name, place in self.places.items() if (t := _tensor_at(*place)) is not None and t.is_meta]
        if missing:
            raise MissingValuesError(self._text(missing))
        if (model := self._model()) is not None:
            check_filled(model)
        self.places = {}

    def _text(self, names: Sequence[str]) -> str:
        shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        what = f"all {self._num_tensors}" if len(names) == self._num_tensors else f"{len(names)} of {self._num_tensors}"
        plain = [name for name in names if name in self._plain]
        advice = _ADVICE
        if plain:
            advice += (
                f". to_empty and load_state_dict do not reach {', '.join(plain[:_SHOWN])}, which are neither parameters nor "
                "buffers: register_buffer(name, tensor) in the model, or set them after parallelize"
            )
        where = f"parameters and buffers of this {self._name} are on the meta device, without values"
        return f"{what} {where}: {shown}; {advice}"


def _tensor_at(module: weakref.ref[nn.Module], attribute: str) -> torch.Tensor | None:
    owner = module()
    if owner is None:
        return None
    own = (owner._parameters, owner._buffers, owner.__dict__)
    return next((tensor for held in own if (tensor := held.get(attribute)) is not None), None)

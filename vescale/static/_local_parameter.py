"""``LocalParameter``: a parameter of a unit, shown as its local tensor while the unit runs in a static forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import local_of
from vescale.static._missing_gradients import shown_local


class LocalParameter:
    """Shows the local tensor of a parameter as an attribute of its modules, in front of the parameter.

    Args:
        parameter_name: in the model.
        current: gives the parameter, which is another object than the one at rest.
        places: the ``__dict__`` of each module that has the parameter, and its name there.
        grad: placements of the local gradients; None: there are none.
        requires_grad: whether the parameter does.
    """

    def __init__(
        self,
        parameter_name: str,
        current: Callable[[], DTensor],
        places: list[tuple[dict[str, Any], str]],
        grad: tuple[Placement, ...] | None,
        requires_grad: bool,
    ) -> None:
        self.parameter_name = parameter_name
        self.on_show: Callable[[torch.Tensor], None] | None = None
        """Called with the local tensor before modules show it."""
        self._current, self._places, self._grad, self._requires_grad = current, places, grad, requires_grad
        self._source: torch.Tensor | None = None
        self._shown: torch.Tensor | None = None
        self._last: torch.Tensor | None = None

    def show(self) -> None:
        """Show the local tensor if the parameter is gathered, and nothing if it is not."""
        x, (module, own_name) = self._current(), self._places[0]
        if module["_parameters"].get(own_name) is not x:
            self.hide()
            return
        local = local_of(x)
        if self._requires_grad and torch.is_grad_enabled():
            if self._source is not local or self._shown is None or self._shown.data_ptr() != local.data_ptr():
                self._source, self._shown = local, shown_local(x, self._grad, self._places[0][1])
            local = self._shown
        self._last = local
        if self.on_show is not None:
            self.on_show(local)
        self.show_again()

    def show_again(self) -> None:
        """What the last :meth:`show` has shown, if the parameter is still gathered."""
        module, own_name = self._places[0]
        if module["_parameters"].get(own_name) is self._current():
            for held, name in self._places:
                held[name] = self._last

    def hide(self) -> None:
        for held, name in self._places:
            held.pop(name, None)

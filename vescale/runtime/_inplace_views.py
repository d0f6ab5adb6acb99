"""``x.transpose_(0, 1)``, ``x.squeeze_()`` and the like: another look at the same elements, written onto ``x`` itself.

Stock DTensor has no rule for most of them, and lets ``squeeze_`` change the local tensor only: the DTensor keeps its shape.
"""

from __future__ import annotations

from typing import Any

import torch

from vescale.compat import local_of, no_torch_function, spec_of
from vescale.compat.random_ops import correct_inplace_view

__all__ = ["INPLACE_VIEW_HANDLERS"]

_aten = torch.ops.aten
_OUT_OF_PLACE = {
    _aten.squeeze_.default: _aten.squeeze.default,
    _aten.squeeze_.dim: _aten.squeeze.dim,
    _aten.squeeze_.dims: _aten.squeeze.dims,
    _aten.transpose_.default: _aten.transpose.int,
    _aten.unsqueeze_.default: _aten.unsqueeze.default,
}


def _in_place(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with no_torch_function():
        view = _OUT_OF_PLACE[op](*args, **kwargs)
        return correct_inplace_view(op, args, kwargs, local_of(view), spec_of(view))


INPLACE_VIEW_HANDLERS = dict.fromkeys(_OUT_OF_PLACE, _in_place)

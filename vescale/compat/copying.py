"""Copies and pickles of DTensors whose local tensor lies inside of a larger storage, as gradients in buckets do."""

from __future__ import annotations

import functools
from typing import Any

from torch.distributed.tensor import DTensor

from vescale.compat.dtensor import local_of, make_dtensor, spec_of

__all__ = ["wrap_copying"]


def wrap_copying() -> None:
    """Put the wrappers in place; called once, by :func:`vescale.compat.install`.

    ``Tensor.__deepcopy__`` and ``Tensor.__reduce_ex__`` (``torch/_tensor.py``, 2.13) know a tensor without memory of its own
    by its address 0. A DTensor's is its local tensor's offset: where that is not 0 they fail ("invalid python storage").
    """
    deepcopy, reduce = DTensor.__deepcopy__, DTensor.__reduce_ex__

    @functools.wraps(deepcopy)
    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        if id(self) in memo or not self.is_leaf or self.data_ptr() == 0:
            return deepcopy(self, memo)
        aligned = _aligned(self)
        aligned.grad = self.grad
        copied = memo[id(self)] = deepcopy(aligned, memo)
        del memo[id(aligned)]  # which another object may get
        return copied

    @functools.wraps(reduce)
    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return reduce(self if self.data_ptr() == 0 else _aligned(self), protocol)

    for method in (__deepcopy__, __reduce_ex__):
        setattr(DTensor, method.__name__, method)


def _aligned(x: Any) -> DTensor:
    """Equal to ``x``, with a local tensor that begins its storage."""
    twin = make_dtensor(local_of(x).detach().clone(), spec_of(x), requires_grad=x.requires_grad)
    twin.__dict__.update(x.__dict__)
    return twin

"""Which attributes of a module of experts hold the number of its experts.

On a rank with some of the experts, ``for e in range(self.num_experts)`` has to run over these, and ``/ self.width`` stays as
it is, also where both are 4. No name tells them apart; what the module computes does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from vescale.compat import note
from vescale.errors import ExpertRegionError
from vescale.runtime._local_region import local_state

__all__ = ["counted", "find_counts"]


def find_counts(
    module: nn.Module, path: str, number: int, count: int, stacked: Collection[str], run: Callable[[int], torch.Tensor]
) -> tuple[str, ...]:
    """The attributes of the module that have to be ``count``, for it to compute with ``count`` experts what it computes with
    these among all ``number``.

    The module is tried on weights that tell experts apart: with all experts, then with ``count`` of them and each choice of
    the attributes that hold ``number``, few first. It has to run on local tensors; random numbers and buffers are the
    caller's to restore. Communication: none.

    Args:
        stacked: parameters and buffers that have one entry an expert in dim 0.
        run: runs the module on one row for each of the first experts, so many as it gets.

    Raises:
        ExpertRegionError: no choice does.
    """
    candidates = [name for name, value in vars(module).items() if type(value) is int and value == number]
    if not candidates or count == number:
        return ()

    def found(num_experts: int, names: Sequence[str]) -> torch.Tensor:
        def entered(name: str, x: torch.Tensor) -> torch.Tensor:
            return _distinct(x, number)[:num_experts] if name in stacked else x

        with local_state(module, entered), counted(module, names, count):
            return run(count)

    wanted, cause = found(number, ()), None
    for size in range(len(candidates) + 1):
        for names in itertools.combinations(candidates, size):
            try:
                here = found(count, names)
            except Exception as error:  # of a wrong choice, as an index behind the last expert
                cause = error
                continue
            if here.shape == wanted.shape and torch.allclose(
                here.float(), wanted.float(), rtol=1e-2, atol=1e-6, equal_nan=True
            ):
                return names
    raise ExpertRegionError(
        f"the experts {path!r} compute other results with {count} of their {number} experts, whether attributes that are "
        f"{number} ({', '.join(candidates)}) count these or not. Take the number of experts from a weight "
        "(self.weight.shape[0]) in the module's forward"
    ) from cause


def _distinct(x: torch.Tensor, num_experts: int) -> torch.Tensor:
    """A tensor like ``x`` for so many experts, each with a value of its own, small enough for sums over features."""
    values = torch.arange(1, num_experts + 1, device=x.device, dtype=torch.float32) / (
        num_experts * max(x.shape[-1], 1)
    )
    return values.view(-1, *[1] * (x.ndim - 1)).expand(num_experts, *x.shape[1:]).to(x.dtype).contiguous()


@contextmanager
def counted(module: nn.Module, names: Sequence[str], count: int) -> Iterator[None]:
    """Inside, these attributes are ``count``."""
    before = {name: getattr(module, name) for name in names}
    note("runtime._expert_counts:instance", module)
    for name in names:
        setattr(module, name, count)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)

"""``require_in_bounds``: the error of one device for indices out of bounds, where ranks look up parts of a dim.

Each rank takes zeros for what others hold, so that an index which nobody has would give zeros, silently.
"""

from __future__ import annotations

import torch

from vescale.compat import assert_on_device
from vescale.errors import IndexBoundsError

__all__ = ["require_in_bounds"]


def require_in_bounds(indices: torch.Tensor, size: int, op: str, edit: str) -> None:
    """Require ``0 <= index < size`` of every index of a local tensor. No communication; on a GPU no wait of the host.

    Raises:
        IndexBoundsError: on a CPU, as the kernel of one device. A GPU stops at an assertion on the device, as there.
    """
    if type(indices) is not torch.Tensor or indices.is_meta or torch.compiler.is_compiling():
        return
    outside = (indices < 0) | (indices >= size)
    if not indices.is_cpu:
        assert_on_device(~outside.any(), f"{op}: indices out of bounds (0..{size - 1})")
    elif bool(outside.any()):
        first = int(indices[outside][0])
        raise IndexBoundsError(
            f"{op}: {int(outside.sum())} of {indices.numel()} indices are out of bounds, the first is {first}; expected "
            f"0..{size - 1}: {edit}"
        )

"""Random ops on plain local tensors that are parts of a global tensor: for kernels that run on local tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import local_of, make_dtensor, make_spec
from vescale.compat.tensor_subclasses import TorchDispatchMode, tree_map
from vescale.errors import UnsupportedRandomOpError
from vescale.placements import contiguous_stride, local_region
from vescale.rng._op_handlers import handlers


class drawing_part_of(TorchDispatchMode):
    """Inside this context, random ops on plain tensors draw this rank's part of a tensor of global ``shape`` on a mesh.

    ``with drawing_part_of(mesh, placements, shape) as draws: ...``: a random op must be called on a tensor of the local
    shape, with or without dims of size 1 before it, with row-major strides; its result is plain, too. ``draws.count`` is the
    number of random ops: code that skips empty tensors must call :meth:`advance` for them, so that generators stay equal.
    Autograd is not affected.
    Communication: none.

    Raises NotImplementedError for a random op on a tensor of another shape, and the errors of the op on a DTensor.
    """

    def __init__(self, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> None:
        super().__init__()
        self.count = 0
        self._mesh, self._placements, self._shape = mesh, tuple(placements), tuple(shape)
        self._handlers = handlers()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        local = args[0]
        if func not in self._handlers or not isinstance(local, torch.Tensor):
            raise UnsupportedRandomOpError(
                f"{func} where a part of a tensor of shape {self._shape} is drawn; expected a random op of docs/rng.md"
            )
        part = self._without_leading_ones(local)
        placed = self._placed(part, str(func))
        result = self._handlers[func](func, (placed, *args[1:]), kwargs)
        self.count += 1
        if result is placed:
            return local
        found = tree_map(lambda leaf: local_of(leaf) if isinstance(leaf, DTensor) else leaf, result)
        if part is local:
            return found
        return tree_map(lambda leaf: leaf.view(local.shape) if isinstance(leaf, torch.Tensor) else leaf, found)

    def advance(self, function: Callable[[Any], Any], dtype: torch.dtype, device: torch.device) -> None:
        """Advance the generator as ``function`` of the whole tensor does. For empty parts; called after the context."""
        function(self._placed(torch.empty(self._local_shape(), dtype=dtype, device=device), "advance"))

    def _local_shape(self) -> tuple[int, ...]:
        coordinate = self._mesh.get_coordinate()
        assert coordinate is not None  # ranks outside the mesh have no part
        return local_region(self._shape, self._placements, tuple(self._mesh.shape), tuple(coordinate)).local_shape

    def _without_leading_ones(self, local: torch.Tensor) -> torch.Tensor:
        """The part itself, where an op has put dims of size 1 before its own: attention does, for tensors with three dims,
        since torch 2.14. The numbers of the elements are the same."""
        wanted = self._local_shape()
        extra = local.ndim - len(wanted)
        if extra > 0 and tuple(local.shape) == (*(1,) * extra, *wanted):
            return local.view(wanted)
        return local

    def _placed(self, local: torch.Tensor, what: str) -> DTensor:
        if tuple(local.shape) != self._local_shape():
            raise UnsupportedRandomOpError(
                f"{what} on a local tensor of shape {tuple(local.shape)} where a part of shape {self._local_shape()} of "
                f"{self._shape} is drawn; its numbers cannot be those of one device: use a kernel that draws for that "
                "shape (attention: torch.nn.attention.sdpa_kernel(SDPBackend.MATH)), or set the dropout to 0"
            )
        spec = make_spec(self._mesh, self._placements, self._shape, contiguous_stride(self._shape), local.dtype)
        return make_dtensor(local, spec)

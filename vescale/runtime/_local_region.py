"""Local regions: a module whose forward runs on plain local tensors."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.comm import note_locals
from vescale.compat import (
    local_of,
    map_tensors,
    no_torch_function,
    set_versions,
    tensors_in,
    versions,
    with_default_device,
)
from vescale.errors import BoundaryError
from vescale.ir import Instruction, Local
from vescale.ops import convert, enter_local, leave_local
from vescale.placements import shard_dim, without_partials
from vescale.runtime._runtime import Runtime


class LocalRegion:
    """Runs a module's forward on local tensors: its inputs, its parameters, and everything inside.

    ==============  ==============================================  ===================================================
    tensor          value                                           gradient
    ==============  ==============================================  ===================================================
    input           redistributed to ``inputs``; its local tensor   sharded as the input; Partial on an axis where the
                                                                    input is Replicate and the work differs by rank
    parameter       its local tensor                                the same
    output          with placements ``outputs``, by default         redistributed to ``outputs`` (Replicate for Partial)
                    Replicate
    ==============  ==============================================  ===================================================

    The work differs by rank along an axis when an input, a parameter or an output is not Replicate there. What the module
    writes to an input in place reaches the caller's tensor when it ends.
    """

    def __init__(self, runtime: Runtime, module: nn.Module, path: str, instruction: Instruction) -> None:
        op = instruction.op
        assert isinstance(op, Local)
        self.runtime, self.module, self.path = runtime, module, path
        self.inputs, self.outputs = op.inputs, tuple(Replicate() if p is None else p for p in op.outputs)
        self._forward = module.forward
        module.forward = self.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with no_torch_function():
            requester = f"local region {self.path}"
            given: list[tuple[DTensor, DTensor]] = []

            def converted(x: torch.Tensor) -> torch.Tensor:
                if isinstance(x, DTensor):
                    given.append((x, convert(x, self.inputs, requester=requester)))
                    return given[-1][1]
                return x

            args, kwargs = map_tensors(converted, [args, kwargs])
            found: list[DTensor] = [p for p in self.module.parameters() if isinstance(p, DTensor)]
            found += [x for x in tensors_in([args, kwargs]) if isinstance(x, DTensor)]
            differs = [
                not self.outputs[axis].is_replicate() or any(not x.placements[axis].is_replicate() for x in found)
                for axis in range(self.runtime.mesh.ndim)
            ]

            def entered(x: torch.Tensor) -> torch.Tensor:
                return enter_local(x, _gradient(x.placements, differs)) if isinstance(x, DTensor) else x

            inputs: list[torch.Tensor] = []

            def entered_input(x: torch.Tensor) -> torch.Tensor:
                if isinstance(x, DTensor):
                    inputs.append(entered(x))
                    return inputs[-1]
                return x

            args, kwargs = map_tensors(entered_input, [args, kwargs])
            before = [versions(x) for x in inputs]
            with local_state(self.module, lambda _, x: entered(x)), with_default_device():
                result = self._forward(*args, **kwargs)
            for (x, placed), local, version in zip(given, inputs, before, strict=True):
                if versions(local) != version:
                    write_back_local(x, placed, local, f"{requester}: written back")
            placed_inputs = [placed for _, placed in given]
            return map_tensors(lambda x: self._leave(x, placed_inputs), result)

    def _leave(self, x: torch.Tensor, inputs: Sequence[DTensor]) -> torch.Tensor:
        if isinstance(x, DTensor):
            return x
        shape = [self._size(x, dim, inputs) for dim in range(x.ndim)]
        return leave_local(x, self.runtime.mesh, self.outputs, shape, f"local region {self.path}")

    def _size(self, x: torch.Tensor, dim: int, inputs: Sequence[DTensor]) -> int:
        """Of a dim of the whole output. Parts are as large as each other, unless ranks have parts of different sizes of an
        input: then the output's dim is one of the input's.

        Raises BoundaryError if no input says how large the whole is.
        """
        axes = _axes_of(self.outputs, dim, x.ndim)
        num_ranks = math.prod(self.runtime.mesh.size(axis) for axis in axes)
        cut = [
            (local_of(each).shape[other], each.shape[other])
            for each in inputs
            for other in range(each.ndim)
            if _axes_of(each.placements, other, each.ndim) == axes
        ]
        if not axes or all(size % num_ranks == 0 for _, size in cut):
            return x.shape[dim] * num_ranks
        found = {size for local, size in cut if local == x.shape[dim]}
        if len(found) != 1:
            raise BoundaryError(
                f"the local region {self.path!r} returns size {x.shape[dim]} on dim {dim} of an output of shape "
                f"{tuple(x.shape)} on this rank, but ranks have different parts of inputs of "
                f"{sorted({size for _, size in cut})} in all, so that the global size is not known. Keep a dim of an "
                f"input in the output unchanged, pad the input to a multiple of {num_ranks}, or make the region "
                "smaller"
            )
        return found.pop()


def write_back_local(x: DTensor, placed: DTensor, local: torch.Tensor, requester: str) -> None:
    """A region has written to ``local``, of ``placed``, which ``x`` was converted to: bring the values to ``x``."""
    new = leave_local(local, placed.device_mesh, placed.placements, placed.shape, requester)
    version = versions(local)
    with torch.inference_mode() if x.is_inference() else contextlib.nullcontext():
        x.copy_(convert(new, x.placements, requester=requester))
    if versions(local) != version:  # it is the local tensor of x, and the module's write has counted already
        set_versions((local,), version)


@contextmanager
def local_state(module: nn.Module, entered: Callable[[str, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Hide every parameter and buffer of a module and its submodules behind ``entered(name, tensor)``. What runs inside
    computes with local tensors."""
    note_locals()
    with ExitStack() as undo:
        for path, owner in module.named_modules():
            for name, resting in (*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)):
                hidden = owner.__dict__.get(name)  # a parameter shown with another placement than the one at rest
                full_name = f"{path}.{name}" if path else name
                owner.__dict__[name] = entered(full_name, resting if hidden is None else hidden)
                if hidden is None:
                    undo.callback(owner.__dict__.pop, name)
                else:
                    undo.callback(owner.__dict__.__setitem__, name, hidden)
        yield


def _axes_of(placements: Sequence[Placement], dim: int, ndim: int) -> tuple[int, ...]:
    """The mesh axes that cut a dim."""
    return tuple(
        axis
        for axis, placement in enumerate(placements)
        if (cut := shard_dim(placement)) is not None and cut % ndim == dim
    )


def _gradient(placements: Sequence[Placement], differs: Sequence[bool]) -> tuple[Placement, ...]:
    return tuple(
        Partial() if placement.is_replicate() and apart else placement
        for placement, apart in zip(without_partials(placements), differs)
    )

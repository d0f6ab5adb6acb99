"""Listening to collectives: every one of a process, whoever starts it (DTensor, FSDP2, DDP's reducer in C++, user code).

Each method of a process group calls an operator of the ``c10d`` library. While somebody listens, a kernel that PyTorch's own
registration API puts in front of the backends' is called first, on whichever thread; when nobody does, there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import library
from torch._subclasses.fake_tensor import FakeTensor

from vescale.compat.patching import Changes

# The key at which the kernels stand. BackendSelect is passed by every call, with tensors of any device or none.
_KEY = "BackendSelect"

# How an operator is called in PyTorch's public functions.
_NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "barrier": "barrier",
    "monitored_barrier_": "barrier",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
}

Handler = Callable[
    [str, dist.ProcessGroup, Sequence[torch.Tensor], Sequence[torch.Tensor], Callable[[float | None], Any]], Any
]
"""``handler(name, group, inputs, outputs, call)``: ``call(seconds)`` runs the collective, with that timeout unless None, and
returns (what the operator returns, its Work or None). The handler returns the former."""


def register_collective_kernels(changes: Changes, handler: Handler) -> None:
    registered = library.Library("c10d", "IMPL")
    behind = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, _KEY))
    for name in _NAMES:
        packet = getattr(torch.ops.c10d, name, None)
        if packet is not None:
            registered.impl(name, _kernel(name, packet.default, behind, handler), _KEY, with_keyset=True)
    changes.on_undo(
        registered._destroy, *(f"kernel c10d::{name} @ {_KEY}" for name in _NAMES if hasattr(torch.ops.c10d, name))
    )


def _kernel(name: str, op: Any, behind: Any, handler: Handler) -> Any:
    arguments = [argument.name for argument in op._schema.arguments]
    place = arguments.index("process_group")
    timeout_place = arguments.index("timeout") if "timeout" in arguments else None
    defaults = [argument.default_value for argument in op._schema.arguments]
    sides = _sides(name, arguments)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        args = (*args, *(kwargs[a] for a in arguments[len(args) :] if a in kwargs))
        group = args[place]
        if not isinstance(group, dist.ProcessGroup):
            group = dist.ProcessGroup.unbox(group)
        inputs, outputs = ([t for s in side for t in _tensors(args[s])] for side in sides)
        if any(isinstance(tensor, FakeTensor) for tensor in (*inputs, *outputs)):  # only shapes are asked for
            return op.redispatch(keyset & behind, *args)

        def call(seconds: float | None) -> tuple[Any, dist._Work | None]:
            given = args
            if seconds is not None and timeout_place is not None:
                given = (*args, *defaults[len(args) :])
                if given[timeout_place] in (-1, None):
                    changed = list(given)
                    changed[timeout_place] = int(1000 * seconds)
                    given = tuple(changed)
            result = op.redispatch(keyset & behind, *given)
            return result, _work_of(result)

        return handler(_NAMES[name], group, inputs, outputs, call)

    return kernel


def _sides(name: str, arguments: Sequence[str]) -> tuple[list[int], list[int]]:
    """Positions of the tensors that a rank gives, and of those that it gets."""
    inputs = [
        i for i, a in enumerate(arguments) if a in ("input", "inputs", "input_tensor", "input_tensors", "input_list")
    ]
    outputs = [
        i
        for i, a in enumerate(arguments)
        if a in ("output", "outputs", "output_tensor", "output_tensors", "output_lists")
    ]
    if not inputs and not outputs and name not in ("barrier", "monitored_barrier_"):
        both = [i for i, a in enumerate(arguments) if a == "tensors"]
        return both, both
    return inputs, outputs


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in _tensors(item)] if isinstance(value, list | tuple) else []


def _work_of(result: Any) -> dist._Work | None:
    last = result[-1] if isinstance(result, tuple) else result
    if last is None:
        return None
    return last if isinstance(last, dist._Work) else dist._Work.unbox(last)


def on_completion(work: dist._Work, done: Callable[[], None]) -> bool:
    """Call ``done`` when a collective on CPU tensors has ended, also with an error, on the thread that ends it. False for
    works that tell nobody: messages, and gloo's reduce-scatter, which never counts as completed."""
    try:
        work.get_future().add_done_callback(lambda _: done())
    except RuntimeError:
        return False
    return True


def group_description(group: dist.ProcessGroup) -> str:
    """What the group was made for: meshes call theirs ``mesh_<axis>``."""
    return str(getattr(group, "group_desc", ""))

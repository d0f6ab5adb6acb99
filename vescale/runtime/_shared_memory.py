"""``SharedMemory``: inputs and results of one call of a checkpointed module to which the program may write unseen.

Without checkpointing, a backward reads tensors as they are by then, also inputs and results that have been written to
without a version that tells (``x.data``, ``x.numpy()``, ``x.to_local()``). So a recomputation begins with the inputs as they
were, and gives inputs and results the values that those of the forward have by now. What memory the program has been given
is known by an attribute of its storage. Nothing is copied before that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from vescale.compat import local_of, make_dtensor, no_torch_function, own_part, spec_of, storage_of, without_modes

_HOLDERS = "_vescale_recomputed_in"
_IS_OUT = "_vescale_handed_out"


class SharedMemory:
    """``when_handed_out`` gets a tensor on memory that the program has been given.

    Attributes:
        is_running: the forward runs, for the first time or again. What it does to its local tensors, it does again.
    """

    def __init__(self, when_handed_out: Callable[[torch.Tensor], None]) -> None:
        self.is_running = True
        self._when_handed_out = when_handed_out
        self._inputs: dict[int, torch.Tensor] = {}  # by number: copies
        self._results: dict[int, torch.Tensor] = {}  # in the memory of the forward's

    def watch(self, tensors: Sequence[torch.Tensor], are_results: bool) -> None:
        held = self._results if are_results else self._inputs
        for number, tensor in enumerate(tensors):
            storage, local = storage_of(tensor), own_part(tensor)
            if storage is None or local.is_meta:
                continue
            see = weakref.WeakMethod(self._see)
            where = local.dtype, local.storage_offset(), local.shape, local.stride()
            known = [holder for holder in getattr(storage, _HOLDERS, ()) if holder[0]() is not None]
            setattr(storage, _HOLDERS, [*known, (see, held, number, where)])
            if hasattr(storage, _IS_OUT):
                self._see(held, number, storage, *where)

    def _see(self, held: dict[int, torch.Tensor], number: int, storage: Any, dtype: torch.dtype, *where: Any) -> None:
        if number in held:
            return
        with no_torch_function(), torch.no_grad(), without_modes():
            now = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *where)
            held[number] = now if held is self._results else now.clone()
        self._when_handed_out(now)

    def inputs(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """For the forward that runs again."""
        return [self._as_before(number, x) if number in self._inputs else x for number, x in enumerate(given)]

    def _as_before(self, number: int, x: torch.Tensor) -> torch.Tensor:
        with without_modes():
            local = self._inputs[number].clone()
            made = make_dtensor(local, spec_of(x)) if isinstance(x, DTensor) else local
            return made.requires_grad_(x.requires_grad)

    def put(
        self, given: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
    ) -> None:
        """It has run again: what it has saved gets the values of now. ``given``: the inputs of the forward."""
        pairs = [(inputs[number], given[number]) for number in self._inputs]
        pairs += [(results[number], now) for number, now in self._results.items()]
        with torch.no_grad(), without_modes():
            for copy, now in pairs:
                own_part(copy).detach().copy_(own_part(now))


def hand_out(tensor: DTensor, *, is_local: bool = False) -> None:
    """The program gets the memory of ``tensor``; ``is_local``: by ``to_local()``."""
    with no_torch_function():  # no call of the program's
        storage = local_of(tensor).untyped_storage()
    if not is_local:
        setattr(storage, _IS_OUT, True)
    for reference, held, number, where in getattr(storage, _HOLDERS, ()):
        see = reference()
        if see is not None and not (is_local and see.__self__.is_running):
            see(held, number, storage, *where)

"""What a forward holds for its backward, on this rank: bytes by module and op."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.compat import held_tensors, storage_of, tensors_in, weak_node

_MAX_SIGNATURES = 32


@dataclass(frozen=True)
class Held:
    """Memory that is held: its bytes, the module and op that it is attributed to, and whether it is on the host."""

    num_bytes: int
    module: str
    op: str
    is_offloaded: bool = False


@dataclass
class SavedAccount:
    """The account of a model's last forward with gradients.

    Checkpointed modules enter what they hold while they run. What the rest of the graph holds is read from its nodes, when
    somebody asks; while checkpointed modules exist, also at the end of the first forward with outputs like these.

    Attributes:
        noted: by address of the memory.
        reads_graph: whether the graph is read at the end of forwards.
    """

    noted: dict[int, Held] = field(default_factory=dict)
    reads_graph: bool = False
    _roots: list[Callable[[], Any]] = field(default_factory=list)
    _known: dict[Any, dict[int, Held]] = field(default_factory=dict)
    _signature: Any = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> None:
        """A forward with gradients begins."""
        with self._lock:
            self.noted = {}

    def note(self, tensors: Iterable[Any], module: str, op: str, *, is_offloaded: bool = False) -> None:
        for tensor in tensors:
            storage = storage_of(tensor) if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage.nbytes():
                self.noted.setdefault(storage._cdata, Held(storage.nbytes(), module, op, is_offloaded))

    def end(self, output: Any, model: nn.Module, module_of: Callable[[Any], str | None]) -> None:
        """The outermost module has ended with ``output``."""
        if not torch.is_grad_enabled():
            return
        tensors = (output,) if type(output) is DTensor else tuple(tensors_in(output))
        self._roots = [weak_node(x) for x in tensors if x.requires_grad]
        self._signature = (
            model.training,
            tuple([(x.shape, x.dtype) for x in tensors]),
            tuple(sorted((held.module, held.op, held.num_bytes) for held in self.noted.values())) if self.noted else (),
        )
        if self.reads_graph and self._signature not in self._known:
            self._read(model, module_of)

    def total(self, model: nn.Module, module_of: Callable[[Any], str | None]) -> Sequence[Held] | None:
        """All that the last forward held when it had ended; None if that is not known."""
        if self._signature is None:
            return None
        if not (self.reads_graph and self._signature in self._known) and not self._read(model, module_of):
            return None
        return [*self._known[self._signature].values()]

    def _read(self, model: nn.Module, module_of: Callable[[Any], str | None]) -> bool:
        """Whether the graph is still there, and holds something."""
        roots = [node for root in self._roots if (node := root()) is not None]
        if self._roots and not roots:
            return False
        own = {
            storage._cdata for x in (*model.parameters(), *model.buffers()) if (storage := storage_of(x)) is not None
        }
        found = dict(self.noted)
        has_any = not self._roots
        for node, tensor in held_tensors(roots):
            has_any = True
            storage = storage_of(tensor)
            if storage is not None and storage.nbytes() and storage._cdata not in found:
                found[storage._cdata] = Held(storage.nbytes(), module_of(node) or "", node.name())
        if not has_any and not self.noted:
            return False  # a backward has released it
        if len(self._known) >= _MAX_SIGNATURES:
            self._known.clear()
        self._known[self._signature] = {key: held for key, held in found.items() if key not in own}
        return True

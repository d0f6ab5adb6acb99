"""The estimate beside what a run has measured, by category."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.compat import local_of
from vescale.compat.devices import accelerator_module
from vescale.errors import ArgumentError, Coded
from vescale.runtime import report

_WARN_ABOVE = 0.05


class _Memory(Protocol):
    """What is compared of ranks that need the same."""

    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def maximum(self) -> dict[str, int]: ...
    @property
    def saved_bytes(self) -> int: ...
    @property
    def peak_bytes(self) -> int: ...


class _Estimate(Protocol):
    @property
    def ranks(self) -> Sequence[_Memory]: ...


class EstimateWarning(Coded, UserWarning, code="VS1502"):
    """An estimate differs from a measurement, or the batch has an input that the model does not read."""


@dataclass(frozen=True)
class Comparison:
    """Estimated and measured memory of a rank.

    Attributes:
        rank: this rank.
        rows: ``(category, estimated bytes, measured bytes)``.
    """

    rank: int
    rows: tuple[tuple[str, int, int], ...]

    def errors(self) -> dict[str, float]:
        """(estimated - measured) / measured; of nothing measured and nothing estimated 0."""
        return {name: (e - m) / m if m else float(e != m) for name, e, m in self.rows}

    def __str__(self) -> str:
        lines = [f"rank {self.rank}: estimated and measured bytes"]
        for (name, estimated, measured), error in zip(self.rows, self.errors().values()):
            lines.append(f"  {name:<14}{estimated:>16,}{measured:>16,}{error:>+9.1%}")
        return "\n".join(lines)


def compare(model: nn.Module, estimate: _Estimate, optimizer: torch.optim.Optimizer | None = None) -> Comparison:
    """Compare after a step, before ``zero_grad``: parameters, gradients, and with ``optimizer`` its states.

    Also activations where the model's last forward is known; on a GPU the allocator's peak. Prints the table,
    and warns of more than 5 %.

    ``model``: what ran; ``estimate``: what ``vescale.estimate`` returned for it. Communication: none.

    Raises ValueError for a rank that the estimate does not have.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    own = next((r for r in estimate.ranks if rank in r.ranks), None)
    if own is None:
        raise ArgumentError(f"the estimate is for a different mesh, which has no rank {rank}")
    found = Comparison(rank, tuple(_rows(model, own, optimizer)))
    print(found)
    off = [f"{name} {error:+.1%}" for name, error in found.errors().items() if abs(error) > _WARN_ABOVE]
    if off:
        warnings.warn(
            f"the estimate is off by more than {_WARN_ABOVE:.0%}: {', '.join(off)}", EstimateWarning, stacklevel=3
        )
    return found


def _rows(model: nn.Module, own: _Memory, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[str, int, int]]:
    yield "parameters", own.maximum["parameters"], _bytes([*model.parameters(), *model.buffers()])
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    if grads:
        yield "gradients", own.maximum["gradients"], _bytes(grads)
    if optimizer is not None:
        states = [
            value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
        ]
        yield "optimizer", own.maximum["optimizer"], _bytes(states)
    with contextlib.suppress(KeyError, RuntimeError):  # the graph has gone
        yield "activations", own.saved_bytes, report(model).saved_bytes
    peak_of = getattr(accelerator_module(), "max_memory_allocated", None)
    if peak_of is not None and peak_of():
        yield "peak", own.peak_bytes, peak_of()


def _bytes(tensors: Any) -> int:
    """Of all storages, each once; parts of one buffer count what they hold."""
    found: dict[tuple[int, int], int] = {}
    for tensor in tensors:
        local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr(), storage.nbytes()] = storage.nbytes()
    return sum(found.values())

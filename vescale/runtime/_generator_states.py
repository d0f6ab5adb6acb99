"""Where in the streams of torch's generators a forward draws its numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class GeneratorStates:
    """The states of the default generators: of the CPU, and of the current device of another type.

    On CUDA a state is a seed and an offset, 16 bytes; on a CPU it is that of mt19937, 5 kB.
    """

    def __init__(self, device_type: str) -> None:
        self._module = getattr(torch, device_type) if device_type not in ("cpu", "meta") else None
        self._states = self._now()

    def _now(self) -> tuple[torch.Tensor, ...]:
        states = [torch.get_rng_state()]
        if self._module is not None and self._module.is_initialized():
            states.append(self._module.get_rng_state())
        return tuple(states)

    def have_moved(self) -> bool:
        """Whether something has been drawn since."""
        now = self._now()
        return len(now) != len(self._states) or any(not torch.equal(a, b) for a, b in zip(self._states, now))

    def restore(self) -> None:
        torch.set_rng_state(self._states[0])
        if len(self._states) > 1:
            assert self._module is not None
            self._module.set_rng_state(self._states[1])

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Inside, what was drawn after these states is drawn again; afterwards the generators are as before."""
        before = self._now()
        self.restore()
        try:
            yield
        finally:
            torch.set_rng_state(before[0])
            if len(before) > 1:
                assert self._module is not None
                self._module.set_rng_state(before[1])

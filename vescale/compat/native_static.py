"""What static mode does in C++, without which it does not run (``csrc/local_conversion.h``, ``csrc/module_entries.h``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch

from vescale import csrc
from vescale.compat.containers import tensors_in
from vescale.errors import StaticHelpersError

_TAPES: list[Any] = []  # the module, once it is set up


class NativeStatic(Protocol):
    """Entries of dictionaries are given as three lists of one length: the dictionaries, the keys, the values."""

    def LocalConversion(
        self,
        mesh: Any,
        placements: tuple[Any, ...],
        factors: tuple[int, ...],
        sizes: tuple[tuple[int, int], ...],
        grad: tuple[Any, ...] | None,
        target: tuple[Any, ...],
        stages: tuple[Any, ...],
        requester: str,
        grad_after: tuple[Any, ...] | None,
        accept: Callable[[Any], None],
        /,
    ) -> Callable[[torch.Tensor], torch.Tensor | None]:
        """``leave_local``, ``convert`` and ``enter_local`` of :mod:`vescale.ops` in one, on local tensors; the function
        answers None where Python has to make the three calls.

        Args:
            mesh, placements, grad: of the local tensor, and of its gradient.
            factors, sizes: as in ``TensorType``.
            target, stages, requester: of the conversion.
            grad_after: placements of the gradient of the result.
            accept: called with the spec of the result where it is another one than before; may raise.
        """

    def kept(self, placements: tuple[Any, ...]) -> tuple[Any, ...]:
        """The one of all equal tuples of placements that is found without comparing."""

    def thread_settings(self) -> tuple[Any, ...]:
        """Of the process and of this thread: whether there are gradients, whether inference mode is on, the default dtype,
        whether autocast caches, and of autocast on CPUs and on GPUs, whether it is on, and its dtype."""

    def is_installed(self) -> bool:
        """Whether the C++ dispatcher is."""

    def first_resized(self, dicts: Sequence[dict[str, Any]], sizes: Sequence[int]) -> int:
        """The first dictionary that has another number of entries; -1: there is none."""

    def first_changed(self, dicts: Sequence[dict[str, Any]], keys: Sequence[str], values: Sequence[Any]) -> int:
        """The first entry that is missing or another object; -1: there is none."""

    def inputs_key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes | None:
        """What decides about plain inputs: the settings of this thread, shapes, dtypes and devices of tensors without
        gradients, and the values of numbers, flags and texts. None: some are of other kinds."""

    def local_part(self, tensor: torch.Tensor, mesh: Any, placements: tuple[Any, ...]) -> torch.Tensor | None:
        """The local tensor of what :func:`vescale.ops.wrap_global` makes of it; None where Python has to."""

    def first_other_flag(self, tensors: Sequence[torch.Tensor], requires_grad: Sequence[bool]) -> int:
        """The first tensor of which ``requires_grad`` is another one; -1: there is none."""

    def set_entries(self, dicts: Sequence[dict[str, Any]], keys: Sequence[str], values: Sequence[Any]) -> None: ...

    def delete_entries(self, dicts: Sequence[dict[str, Any]], keys: Sequence[str]) -> None:
        """Those that are missing stay so."""

    def have_locals(
        self, dtensors: Sequence[torch.Tensor], locals: Sequence[torch.Tensor], addresses: Sequence[int]
    ) -> bool:
        """Whether each DTensor still has its local tensor, with the memory at its address."""


def native_static() -> NativeStatic:
    return cast(NativeStatic, csrc.dispatcher())


def native_tape() -> Any:
    """The module with ``Tape``, ``Run`` and the cursor of a recorded step (``csrc/tape.cpp``). Raises StaticHelpersError
    where it has not been built."""
    module: Any = csrc.tape()
    if module is None:
        raise StaticHelpersError("static mode needs the C++ helper 'tape', which has not been built")
    if not _TAPES:
        module.set_tensors_in(tensors_in)
        _TAPES.append(module)
    return module

"""Products of groups of rows with matrices (``torch.nn.functional.grouped_mm``) on tensors without values.

The kernels take float32 and float16, too. The meta kernel, which finds the shapes of results for DTensors and for models on
the meta device, refuses all but bfloat16.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import _meta_registrations

from vescale.compat.ledger import note
from vescale.compat.patching import Changes, undo

_LOCK = threading.Lock()
_USES: list[Changes] = []  # the same changes for each use; the last one to end takes them back


def take_more_dtypes(changes: Changes, _: Any) -> None:
    """Let the meta kernel take what the kernels take, until ``changes`` are taken back."""
    _begin_use()
    changes.on_undo(_end_use, "torch._meta_registrations._meta_grouped_mm_common")


@contextlib.contextmanager
def taking_more_dtypes() -> Iterator[None]:
    """The same in a block, for models that are walked before anything is installed."""
    note("compat.grouped_products:torch", "torch._meta_registrations._meta_grouped_mm_common")
    _begin_use()
    try:
        yield
    finally:
        _end_use()


def _begin_use() -> None:
    with _LOCK:
        changes = _USES[-1] if _USES else Changes()
        if not _USES:
            _change(changes)
        _USES.append(changes)


def _end_use() -> None:
    with _LOCK:
        changes = _USES.pop()
        if not _USES:
            undo(changes)


def _change(changes: Changes) -> None:
    original: Any = getattr(_meta_registrations, "_meta_grouped_mm_common", None)
    result_of: Any = getattr(_meta_registrations, "_create_grouped_mm_output_tensor", None)
    if original is None or result_of is None:
        return

    @changes.method(_meta_registrations, "_meta_grouped_mm_common")
    def grouped_mm(
        mat_a: torch.Tensor,
        mat_b: torch.Tensor,
        scale_a: Any,
        scale_b: Any,
        *,
        offs: Any,
        out_dtype: Any,
        **others: Any,
    ) -> Any:
        taken = mat_a.dtype == mat_b.dtype and mat_a.dtype in (torch.float32, torch.float16)
        if scale_a is not None or scale_b is not None or not taken or out_dtype not in (None, mat_a.dtype):
            return original(mat_a, mat_b, scale_a, scale_b, offs=offs, out_dtype=out_dtype, **others)
        original(_as_bfloat16(mat_a), _as_bfloat16(mat_b), None, None, offs=offs, out_dtype=None, **others)
        return result_of(mat_a, mat_b, offs, mat_a.dtype)


def _as_bfloat16(x: torch.Tensor) -> torch.Tensor:
    """A tensor for the original's checks. Its rows begin as many bytes apart, which have to be multiples of 16."""
    times = x.element_size() // 2
    strides = [stride if stride == 1 else stride * times for stride in x.stride()]
    return x.new_empty_strided(x.shape, strides, dtype=torch.bfloat16)

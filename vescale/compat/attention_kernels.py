"""Attention by another function than the host's, on plain tensors of this thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import library

from vescale.compat.ledger import note

_OP = torch.ops.aten.scaled_dot_product_attention.default
_MATH = 0  # of torch.nn.attention.SDPBackend
_THREAD = threading.local()


@contextlib.contextmanager
def attention_by(attend: Callable[..., torch.Tensor | None]) -> Iterator[None]:
    """Inside, ``attend`` gets the arguments of ``scaled_dot_product_attention`` on plain tensors, in this thread.

    Where it returns None, the host's kernel runs. Modes would not see all calls: some run without torch functions."""
    registered = library.Library("aten", "IMPL")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        ours = getattr(_THREAD, "attend", None)
        is_plain = all(type(x) in (torch.Tensor, torch.nn.Parameter) for x in args[:3])
        found = ours(*args, **kwargs) if ours is not None and is_plain else None
        return _OP.decompose(*args, **kwargs) if found is None else found

    before = getattr(_THREAD, "attend", None)
    note("compat.attention_kernels:torch", "aten::scaled_dot_product_attention")
    registered.impl("scaled_dot_product_attention", kernel, "AutogradCPU")
    _THREAD.attend = attend
    try:
        yield
    finally:
        _THREAD.attend = before
        registered._destroy()


def host_has_attention_kernel(*args: Any, **kwargs: Any) -> bool:
    """Whether the host attends with a kernel that keeps no matrix of queries and keys."""
    return int(torch._fused_sdp_choice(*args, **kwargs)) != _MATH

"""Private names of ``nn.Module`` around the call of a forward."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["CALL_OVERRIDE", "MODULE_CALL", "call_module", "has_hooks"]

MODULE_CALL = nn.Module._call_impl  # runs the hooks and the forward of a module
CALL_OVERRIDE = "_compiled_call_impl"  # an attribute that is called in place of ``MODULE_CALL`` where it is not None

_HOOKS = ("_backward_pre_hooks", "_backward_hooks", "_forward_pre_hooks", "_forward_hooks")
_modules = nn.modules.module
_GLOBAL_HOOKS: tuple[dict[Any, Any], ...] = (
    _modules._global_backward_pre_hooks,
    _modules._global_backward_hooks,
    _modules._global_forward_pre_hooks,
    _modules._global_forward_hooks,
)


def call_module(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The hooks and the forward of a module, whatever ``CALL_OVERRIDE`` is."""
    return module._call_impl(*args, **kwargs)


def has_hooks(module: nn.Module | None, ours: int = 0) -> bool:
    """Whether a module has more hooks than the first ``ours`` forward hooks before and after; None: hooks of all modules."""
    if module is None:
        return any(_GLOBAL_HOOKS)
    return any(len(getattr(module, name)) > (ours if "forward" in name else 0) for name in _HOOKS)

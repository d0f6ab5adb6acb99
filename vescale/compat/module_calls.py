"""Private names of ``nn.Module`` around the call of a forward."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["CALL_OVERRIDE", "GLOBAL_HOOKS", "HOOKS_OF_MODULES", "MODULE_CALL", "call_module"]

MODULE_CALL = nn.Module._call_impl  # runs the hooks and the forward of a module
CALL_OVERRIDE = "_compiled_call_impl"  # an attribute that is called in place of ``MODULE_CALL`` where it is not None

HOOKS_OF_MODULES = ("_backward_pre_hooks", "_backward_hooks", "_forward_pre_hooks", "_forward_hooks")
_modules = nn.modules.module
GLOBAL_HOOKS: tuple[dict[Any, Any], ...] = (
    _modules._global_backward_pre_hooks,
    _modules._global_backward_hooks,
    _modules._global_forward_pre_hooks,
    _modules._global_forward_hooks,
)


def call_module(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The hooks and the forward of a module, whatever ``CALL_OVERRIDE`` is."""
    return module._call_impl(*args, **kwargs)

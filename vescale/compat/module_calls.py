"""Private names of ``nn.Module`` around the call of a forward."""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn
from torch.distributed.tensor import DTensor

from vescale import csrc
from vescale.compat.autograd import set_compiler
from vescale.compat.ledger import note
from vescale.compat.native_dispatch import native_boundaries

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
    """The hooks and the forward of a module, whatever ``CALL_OVERRIDE`` is. Hooks that are always called run also where an
    interrupt (Ctrl-C), or the end of a generator, ends the forward: ``nn.Module`` runs them for an ``Exception`` only."""
    try:
        return module._call_impl(*args, **kwargs)
    except Exception:
        raise
    except BaseException:
        for key, hook in tuple(module._forward_hooks.items()):
            if key in module._forward_hooks_always_called:
                more = (kwargs,) if key in module._forward_hooks_with_kwargs else ()
                hook(module, args, *more, None)
        raise


class GuardedCall:
    """What is called in place of a module's call: :func:`call_module`. Copies of the module have one of their own."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None  # it is being called
        return call_module(module, args, kwargs)


def guard_call(module: nn.Module) -> None:
    """Let calls of a module run its hooks as :func:`call_module` does. A module with a way of its own to be called, or that
    is compiled, stays as it is."""
    if is_usual(module) and CALL_OVERRIDE not in module.__dict__:
        note("compat.module_calls:instance", module)
        module.__dict__[CALL_OVERRIDE] = GuardedCall(module)


def compiled_call(module: nn.Module) -> Any:
    """What ``module.compile()`` has made; None for a module that the user has not compiled."""
    found = module.__dict__.get(CALL_OVERRIDE)
    return None if isinstance(found, GuardedCall) else found


def is_usual(module: nn.Module) -> bool:
    """Whether ``nn.Module`` runs the hooks of the module and its forward."""
    kind = type(module)
    return inspect.unwrap(kind.__call__) is nn.Module.__call__ and kind._call_impl is MODULE_CALL


def forward_hooks(module: nn.Module) -> list[tuple[Callable[..., Any], bool]]:
    """The forward hooks of a module, each with whether it takes keyword arguments; without global ones."""
    named = module._forward_hooks_with_kwargs
    return [(hook, key in named) for key, hook in module._forward_hooks.items()]


def shorten_call(module: nn.Module, native: Any) -> None:
    """Let calls of a module whose only hooks are one of ``native.Enter`` and one of ``native.Leave`` run them without
    ``nn.Module``'s Python (``csrc/module_call.h``); with others, ``nn.Module`` runs them all. A module with a way of its own
    to be called, a copy and a module that is compiled run as usual."""
    hooks = [hook for hook in module._forward_pre_hooks.values() if type(hook) is native.Enter]
    hooks += [hook for hook in module._forward_hooks.values() if type(hook) is native.Leave]
    if is_usual(module) and len(hooks) == 2 and compiled_call(module) is None:
        native.set_call_functions(GLOBAL_HOOKS, _run_hooks, _fail, call_module)
        note("compat.module_calls:instance", module)
        module.__dict__[CALL_OVERRIDE] = native.ModuleCall(module, *hooks)


def _run_hooks(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """The forward hooks as ``nn.Module`` runs them, of a module whose forward has added some."""
    named = module._forward_hooks_with_kwargs.keys() | _modules._global_forward_hooks_with_kwargs.keys()
    for key, hook in (*_modules._global_forward_hooks.items(), *module._forward_hooks.items()):
        changed = hook(module, args, kwargs, output) if key in named else hook(module, args, output)
        output = output if changed is None else changed
    return output


def _fail(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], after: Callable[..., Any], error: BaseException
) -> NoReturn:
    """As ``nn.Module`` after an error in the forward, or in the hook before it."""
    try:
        raise error
    except BaseException:
        try:
            after(module, args, kwargs, None)
        except Exception as second:  # not lost: a warning, as nn.Module gives
            warnings.warn(
                "module forward hook with ``always_call=True`` raised an exception that was silenced as another error was "
                f"raised in forward: {second}",
                stacklevel=2,
            )
        raise
    finally:
        del (
            error
        )  # its traceback has this frame: the tensors of all frames would stay until the garbage collector comes


# The forward hooks of a parallelized model's modules in C++ (``csrc/module_hooks.cpp``).


def native_hooks() -> Any:
    """The module with ``Timeline``, and the hooks ``Enter`` and ``Leave``; None where it or the C++ dispatcher has
    not been built, or ``VESCALE_DISPATCH`` leaves everything to Python."""
    functions = native_boundaries()
    module: Any = csrc.load_module("module_hooks") if functions is not None else None
    if module is not None:
        slots = [DTensor.__dict__[name] for name in ("_spec", "_local_tensor")]
        module.install(DTensor, *slots, set_compiler, functions)
    return module

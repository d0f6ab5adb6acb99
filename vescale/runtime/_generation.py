"""``generate`` of a parallelized model: the model's own method, around a model whose outputs are plain global tensors.

The method computes on plain tensors, the same on every rank: tokens, scores, beams. The model is called with plain tensors
and, while it generates, returns plain global ones; what it keeps for its next call (keys and values) stays sharded as the
plan has it. All ranks of the mesh call the method, with the same arguments, and get the same tokens.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.overrides import TorchFunctionMode

from vescale.compat import filter_functions, map_tensors, note, tensors_in
from vescale.ops import convert, enter_local, wrap_global
from vescale.placements import shard_dim
from vescale.runtime._activation import THREAD, current_activation
from vescale.runtime._input_checks import check_generate
from vescale.runtime._runtime import BoundMethod, Runtime


def add_generate(runtime: Runtime, module: nn.Module) -> bool:
    """Give a module whose class has a ``generate`` (Hugging Face's) one of its own. False: it has none."""
    if not hasattr(module, "prepare_inputs_for_generation"):
        return False
    BoundMethod.give(runtime, module, "_prepare_cache_for_generation", _prepare_cache)
    return BoundMethod.give(runtime, module, "generate", _generate)


def is_generating(runtime: Runtime) -> bool:
    """Whether this thread is in ``generate`` of the model."""
    return runtime in THREAD.generating


def whole_output(runtime: Runtime, output: Any) -> Any:
    """``output`` of the model with the plain global tensor in place of each DTensor, but for those in caches."""
    return map_tensors(lambda x: _whole(runtime, x), output)


def _whole(runtime: Runtime, x: torch.Tensor) -> torch.Tensor:
    if not isinstance(x, DTensor):
        return x
    return enter_local(convert(x, runtime.replicated, requester="<out> for generate"))


def _generate(runtime: Runtime, module: Any, *args: Any, **kwargs: Any) -> Any:
    """The class's own method, with the tokens and random numbers of one device. All ranks call it alike."""
    method = type(module).generate
    if is_generating(runtime):
        return method(module, *args, **kwargs)
    check_generate(runtime, module, args, kwargs)
    with _generating(runtime):
        return method(module, *args, **kwargs)


@contextlib.contextmanager
def _generating(runtime: Runtime) -> Iterator[None]:
    THREAD.generating.append(runtime)
    try:
        with _BetweenForwards(runtime):
            yield
    finally:
        THREAD.generating.pop()


class _BetweenForwards(TorchFunctionMode):
    """Between two forwards the method selects rows of what the model has kept (beams) by plain indices: these are the same
    on every rank."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self.runtime = runtime
        filter_functions(self, _BetweenForwards.__torch_function__, {})

    def __torch_function__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if current_activation() is None and any(isinstance(x, DTensor) for x in tensors_in((args, kwargs))):
            args, kwargs = map_tensors(self._global, args), map_tensors(self._global, kwargs)
        return func(*args, **kwargs)

    def _global(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, DTensor) or not x.ndim:
            return x
        return wrap_global(x, self.runtime.mesh, self.runtime.replicated, "plain operand")


# Caches that are allocated before they are filled


def _prepare_cache(runtime: Runtime, module: Any, *args: Any, **kwargs: Any) -> Any:
    """The class's own method; layers that allocate zeros for keys and values then do so with the placements of these."""
    result = type(module)._prepare_cache_for_generation(module, *args, **kwargs)
    for value in (v for given in (*args, *kwargs.values()) if isinstance(given, dict) for v in given.values()):
        for cache in (
            value,
            *(getattr(value, name, None) for name in ("self_attention_cache", "cross_attention_cache")),
        ):
            layers = getattr(cache, "layers", None)
            for layer in layers if isinstance(layers, list) else ():
                if hasattr(layer, "max_cache_len") and not getattr(layer, "is_initialized", True):
                    note("runtime._generation:instance", layer)
                    layer.__dict__["lazy_initialization"] = types.MethodType(_allocate_placed, layer)
    return result


def _allocate_placed(self: Any, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
    type(self).lazy_initialization(self, key_states, value_states)
    for name, states in (("keys", key_states), ("values", value_states)):
        made = getattr(self, name)
        if isinstance(states, DTensor) and isinstance(made, DTensor) and made.ndim == states.ndim:
            setattr(self, name, convert(made, _of_cache(states), requester=f"cache of {name}"))


def _of_cache(states: DTensor) -> tuple[Placement, ...]:
    """The placements of the states, but Replicate along their sequence: that of the cache has another length."""
    sequence = states.ndim - 2
    return tuple(p if shard_dim(p) not in (None, sequence) else Replicate() for p in states.placements)

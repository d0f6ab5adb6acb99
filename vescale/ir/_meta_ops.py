"""The ops that each module of a model runs, found by a forward on meta tensors."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from vescale.compat import TorchDispatchMode
from vescale.compat.meta_shapes import result_on_meta
from vescale.ir._flow_mode import FlowMode
from vescale.ir._forward_state import state_unchanged
from vescale.ir._model_index import ModelIndex
from vescale.ir._skeleton import skeleton_of

__all__ = ["MetaOps"]

_BATCH, _LENGTH = 2, 16
_ATTENTION = "_scaled_dot_product"


class MetaOps:
    """Runs a copy of the model on the meta device when it is first asked; where that fails, single modules of the copy.

    The model itself does not run, and keeps its counters and caches. Of one that cannot be copied nothing is known. Inputs
    are made up: token ids for ``input_ids``, else one tensor that fits the first layer.
    """

    def __init__(self, index: ModelIndex) -> None:
        self._index = index
        self._copied: nn.Module | None = None
        self._found: dict[str, Counter[str] | None] = {}
        self._whole: Mapping[str, Counter[str]] | None = None
        self._has_run = False

    def below(self, path: str) -> Counter[str] | None:
        """(op with overload -> number of calls) in the forward of a module and those inside; None: not known."""
        if not self._has_run:
            self._has_run = True
            with contextlib.suppress(Exception):  # whatever the model's classes raise
                self._copied = skeleton_of(self._index.model).to("meta")
                self._whole = _ops_of(self._copied, "")
        if self._whole is not None and any(_is_in(other, path) for other in self._whole):
            return _sum(self._whole, path)
        if path not in self._found:
            alone = None if self._copied is None else _ops_of(self._copied.get_submodule(path), path)
            self._found[path] = None if alone is None else _sum(alone, path)
        return self._found[path]

    def runs(self, path: str, op: str) -> bool:
        """Whether a forward of the module runs the op (``aten.mm``, ``aten.mm.default``); True where it is not known."""
        found = self.below(path)
        if found is None:
            return True
        if _is_attention(op):  # which kernel runs depends on the device
            return any(map(_is_attention, found))
        return any(name == op or name.rpartition(".")[0] == op for name in found)


def _is_attention(op: str) -> bool:
    return op.partition(".")[2].lstrip("_").startswith(_ATTENTION.lstrip("_"))


def _is_in(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def _sum(by_module: Mapping[str, Counter[str]], path: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for module, ops in by_module.items():
        if _is_in(module, path):
            total += ops
    return total


def _ops_of(module: nn.Module, path: str) -> Mapping[str, Counter[str]] | None:
    """By the innermost module that runs; None if no forward succeeds."""
    for inputs in _made_up_inputs(module):
        counter = _Counter(path)
        with (
            contextlib.suppress(Exception),
            state_unchanged(module),  # globals, and random numbers of the host
            counter.hooks(module),
            FlowMode(counter),
            torch.no_grad(),
        ):
            with counter:
                module(**inputs)
            return counter.ops
    return None


class _Counter(TorchDispatchMode):
    """Counts ops by the running module; also attention, by its function, whatever it is made of on meta tensors."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.ops: dict[str, Counter[str]] = {}
        self._path, self._running = path, [path]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note(str(func))
        return result_on_meta(func, args, kwargs or {})

    def follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if name == "scaled_dot_product_attention":
            self._note(f"aten.{name}.default")

    def _note(self, name: str) -> None:
        self.ops.setdefault(self._running[-1], Counter())[name] += 1

    @contextlib.contextmanager
    def hooks(self, root: nn.Module) -> Iterator[None]:
        handles = []
        for name, module in root.named_modules():
            path = ".".join(part for part in (self._path, name) if part)
            handles.append(module.register_forward_pre_hook(lambda *_, p=path: self._running.append(p)))
            handles.append(module.register_forward_hook(lambda *_: self._running.pop() and None, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _made_up_inputs(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Keyword arguments that the module's forward may take."""
    try:
        parameters = inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        return
    with torch.device("meta"):
        if "input_ids" in parameters:
            tokens = torch.empty(_BATCH, _LENGTH, dtype=torch.int64)
            given = {name: tokens for name in ("input_ids", "decoder_input_ids") if name in parameters}
            yield {**given, "use_cache": False} if "use_cache" in parameters else given
        needed = [
            name
            for name, parameter in parameters.items()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
        if len(needed) == 1:
            for x in _first_inputs(module):
                yield {needed[0]: x}


def _first_inputs(module: nn.Module) -> Iterator[torch.Tensor]:
    """What the first layers of a module take, which may be what the module takes."""
    for layer in module.modules():
        own = next(layer.parameters(recurse=False), None)
        dtype = own.dtype if own is not None else None
        if isinstance(layer, nn.Embedding):
            yield torch.empty(_BATCH, _LENGTH, dtype=torch.int64)
        elif isinstance(layer, nn.Linear):
            yield torch.empty(_BATCH, _LENGTH, layer.in_features, dtype=dtype)
            yield torch.empty(_BATCH, layer.in_features, dtype=dtype)
        elif isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            yield torch.empty(_BATCH, layer.in_channels, *[32] * len(layer.kernel_size), dtype=dtype)
        elif own is not None and own.ndim == 1:  # a norm
            yield torch.empty(_BATCH, _LENGTH, own.shape[0], dtype=dtype)

"""``shard_tokens``: cuts the sequence between the parts of each layer, where nothing in the layer mixes tokens outside of
modules that get all of them.

The layers of a list are followed from their first input to their first output: elementwise code, norms of a token's
features and linear layers keep tokens apart. Where the code does anything else, the list keeps whole sequences.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.utils.weak import WeakIdKeyDictionary

from vescale.ir._feature_trace import FeatureTrace
from vescale.ir._placement_flow import FlowMode, is_elementwise, tensors_of
from vescale.ir._tensor_cuts import Cut


def shard_tokens(model: nn.Module, inputs: Mapping[str, Any], cuts: list[Cut], trace: FeatureTrace) -> list[str]:
    """Change sums of the cuts to parts of the sequence, and add a cut for each list of layers; returns notes on others."""
    layers = _layers(trace, cuts)
    walk = _TokenTrace(trace, cuts, layers)
    with walk.watched(), FlowMode(walk), contextlib.suppress(Exception):
        model(**inputs)
    notes = []
    for name in dict.fromkeys(layers.values()):
        own = [path for path, of in layers.items() if of == name]
        problem = walk.problems.get(name) or next((f"{p} does not run" for p in own if p not in walk.finished), None)
        if problem:
            notes.append(f"The sequence stays whole in {name}: {problem}.")
            continue
        cut = Cut(f"{name}: tokens", "The sequence, between the parts of layers: each rank has a part of the tokens.")
        for path in own:
            first = next(iter(inspect.signature(trace.index.modules[path].forward).parameters))
            cut.tensors[path, f"<in:{first}>"] = Shard(1)
        cut.tensors[own[-1], "<out:0>"] = Replicate()
        for other in cuts:
            for path in other.sums:
                if _layer_of(path, own):
                    for key in [key for key in other.tensors if key[0] == path and key[1].startswith("<out")]:
                        other.tensors[key] = Shard(1)
            for path in other.experts:
                if _layer_of(path, own) and (path, "<out>") in other.tensors:
                    other.tensors[path, "<out>"] = Shard(1) if walk.sharded_experts else Replicate()
        for path in walk.whole_readers:
            if _layer_of(path, own):
                cut.tensors[path, "<in>"] = Replicate()
        cuts.append(cut)
    return notes


def _layers(trace: FeatureTrace, cuts: list[Cut]) -> dict[str, str]:
    """Items of lists that hold sums -> the list."""
    index = trace.index
    found = {}
    for cut in cuts:
        for path in cut.sums:
            parts = path.split(".")
            for length in range(1, len(parts) + 1):
                parent = ".".join(parts[: length - 1])
                if isinstance(index.modules[parent], nn.ModuleList):
                    found[".".join(parts[:length])] = parent
                    break
    lists = set(found.values())
    order = [path for path in index.modules if path.rpartition(".")[0] in lists]
    return {path: path.rpartition(".")[0] for path in order}


def _layer_of(path: str, layers: list[str]) -> bool:
    return any(path.startswith(f"{layer}.") for layer in layers)


class _TokenTrace:
    def __init__(self, trace: FeatureTrace, cuts: list[Cut], layers: dict[str, str]) -> None:
        self.index, self.layers = trace.index, layers
        self.readers = {path for cut in cuts for path in (*cut.readers, *cut.experts)}
        self.sums = {path for cut in cuts for path in cut.sums}
        self.problems: dict[str, str] = {}
        self.finished: set[str] = set()
        self.whole_readers: set[str] = set()
        self.sharded_experts = False
        self._tokens = WeakIdKeyDictionary()
        self._running: list[str] = []

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        handles = []
        for path, module in self.index.modules.items():
            if path in self.layers:
                handles.append(module.register_forward_pre_hook(self._enters(path), with_kwargs=True))
                handles.append(module.register_forward_hook(self._leaves(path)))
            if path in self.readers:
                handles.append(module.register_forward_pre_hook(self._reads, with_kwargs=True))
            if path in self.sums:
                handles.append(module.register_forward_hook(self._sums))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enters(self, path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._running.append(path)
            x = args[0] if args else next(iter(kwargs.values()), None)
            first = next(iter(inspect.signature(module.forward).parameters))
            x = kwargs.get(first, x) if not args else x
            if not isinstance(x, torch.Tensor) or x.ndim != 3:
                self._fail(f"the first input of {path} is no (batch, tokens, features)")
            else:
                self._tokens[x] = True

        return hook

    def _leaves(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            first = next(tensors_of(output), None)
            if first is None or first not in self._tokens:
                self._fail(f"the first output of {path} is not made of its own tokens alone")
            self.finished.add(path)
            self._running.pop()
            if not self._running:
                self._tokens.clear()

        return hook

    def _reads(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module gets all tokens."""

        def whole(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                copy = value.view_as(value)
                self._tokens.pop(copy, None)
                return copy
            return value

        return tuple(map(whole, args)), {key: whole(value) for key, value in kwargs.items()}

    def _sums(self, module: nn.Module, args: Any, output: Any) -> None:
        first = next(tensors_of(output), None)
        if first is None or first.ndim != 3:
            self._fail("a sum has no dim of tokens")
        elif self._running:
            self._tokens[first] = True

    def _fail(self, why: str) -> None:
        if self._running:
            self.problems.setdefault(self.layers[self._running[-1]], why)

    def follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        operands = list(tensors_of((args, kwargs)))
        tokens = [t for t in operands if t in self._tokens]
        outputs = list(tensors_of(result))
        if not tokens or not outputs or not self._running:
            return
        plain = name.strip("_")
        x = tokens[0]
        if plain in ("layer_norm", "rms_norm"):
            self._tokens[outputs[0]] = True
        elif plain in ("mean", "var", "sum"):
            dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
            last = [d % x.ndim for d in ((dims,) if isinstance(dims, int) else dims or ())] == [x.ndim - 1]
            self._tokens[outputs[0]] = True if last and outputs[0].ndim == 3 else self._mixed(plain)
        elif plain == "linear" and args[0] in self._tokens:
            self._tokens[outputs[0]] = True
        elif is_elementwise(name) and outputs[0].ndim == 3:
            for t in operands:
                at = 1 - 3 + t.ndim
                if t not in self._tokens and at >= 0 and t.shape[at] != 1 and t.requires_grad:
                    self._mixed(f"{plain} with a tensor of all tokens")
            self._tokens[outputs[0]] = True
        else:
            self._mixed(plain)

    def _mixed(self, name: str) -> bool:
        self._fail(f"{name} may mix tokens in {self._running[-1]}")
        return True

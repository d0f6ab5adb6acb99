"""In which stages a forward reads parameters, also around the modules that have them: a tied head that is no module, or
parameters of the model itself."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from vescale.compat.meta_shapes import result_on_meta
from vescale.compat.tensor_subclasses import TorchDispatchMode, tree_leaves
from vescale.ir import FlowMode, skeleton_of
from vescale.pipeline._balance import guessed_inputs

aten = torch.ops.aten
# Ops that read the shape of their operand, and no value.
SHAPE_ONLY = {
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.new_full.default,
}

_LENGTH = 16  # tokens of guessed inputs: recurrent layers take as many steps


def stages_that_read(model: nn.Module, splits: Sequence[str]) -> Mapping[str, frozenset[int]]:
    """The stages by parameter, as far as a forward on meta tensors runs; its inputs are guessed.

    Args:
        splits: the module before whose call stage 1, 2, ... begins.
    """
    skeleton = skeleton_of(model).to("meta")
    found: dict[str, frozenset[int]] = {}
    most = -1
    for inputs in guessed_inputs(skeleton, length=_LENGTH):
        reads = _Reads({id(p): name for name, p in skeleton.named_parameters()})
        handles = [
            skeleton.get_submodule(path).register_forward_pre_hook(
                reads.at_begin(stage, _has_other_name(model, splits, stage))
            )
            for stage, path in enumerate(splits, 1)
        ]
        finished = False
        with contextlib.suppress(Exception), _quietly(), torch.no_grad(), FlowMode(reads), reads:
            skeleton(**inputs)
            finished = True
        for handle in handles:
            handle.remove()
        if reads.stage > most or finished:
            most, found = reads.stage, {name: frozenset(stages) for name, stages in reads.found.items()}
        if finished:
            break
    return found


def _has_other_name(model: nn.Module, splits: Sequence[str], stage: int) -> bool:
    """Whether the module before which a stage begins is one of the stage before, too."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    begin, end = (names.index(splits[n]) if n >= 0 else 0 for n in (stage - 2, stage - 1))
    module = model.get_submodule(splits[stage - 1])
    return any(model.get_submodule(name) is module for name in names[begin:end])


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Warnings about guessed inputs concern nobody."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class _Reads(TorchDispatchMode):
    """Notes the stages in which each of some parameters is an operand."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names, self.stage = names, 0
        self.found: dict[str, set[int]] = {}

    def at_begin(self, stage: int, has_other_name: bool) -> Callable[..., None]:
        """A hook for the module before which a stage begins; the stage before calls it first, under another name."""
        called = not has_other_name

        def begin(*_: Any) -> None:
            nonlocal called
            if self.stage == stage - 1:
                if called:
                    self.stage = stage
                called = True

        return begin

    def follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Of torch functions; operands of ops are looked at."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for leaf in tree_leaves((args, kwargs)) if func not in SHAPE_ONLY else ():
            name = self._names.get(id(leaf))
            if name is not None:
                self.found.setdefault(name, set()).add(self.stage)
        return result_on_meta(func, args, kwargs)

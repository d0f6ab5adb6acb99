"""``block_work``: what the blocks of a model compute, relative to each other."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from vescale.compat.meta_shapes import result_on_meta
from vescale.compat.tensor_subclasses import TorchDispatchMode
from vescale.errors import PlanError
from vescale.ir import FlowMode, example_inputs, skeleton_of
from vescale.plans import config_value

__all__ = ["block_work", "guessed_inputs", "num_tokens"]

_LENGTH = 4096
_STEPS = 64  # of recurrent layers, whose forward on meta tensors is many ops for each token


def block_work(model: nn.Module, blocks: str, num_blocks: int) -> list[float]:
    """The floating-point operations of a forward, by block; those before the blocks count for the first, others for the
    last.

    They are counted in a forward on meta tensors: one row of 4,096 tokens (64 with recurrent layers), or as many as the
    model takes, or what fits its first layer. Where the model does not run so (its forward depends on values, as that of
    experts in a loop), the numbers of parameters that multiply stand for them, those of experts by the share that a token
    uses.

    Args:
        blocks: path of the ModuleList.
    """
    skeleton = skeleton_of(model).to("meta")
    inside = list(skeleton.get_submodule(blocks).children())[:num_blocks]
    for inputs in guessed_inputs(skeleton, length=num_tokens(skeleton)):
        counter = _Counter(inside)
        with contextlib.suppress(Exception), torch.no_grad(), FlowMode(counter), counter:
            skeleton(**inputs)
            if all(counter.work) and counter.has_run == len(inside):
                return counter.work
    return _by_parameters(model, model.get_submodule(blocks))


def num_tokens(model: nn.Module, length: int | None = None) -> int:
    """Of a row in a forward on meta tensors that stands for one of ``length`` tokens."""
    is_recurrent = any(isinstance(module, nn.RNNBase | nn.RNNCellBase) for module in model.modules())
    length = length or _LENGTH
    return min(length, _STEPS) if is_recurrent else length


def guessed_inputs(skeleton: nn.Module, rows: int = 1, length: int | None = None) -> Iterator[dict[str, Any]]:
    """Inputs on the meta device that the forward of a model on it may run with.

    Args:
        length: of tokens; None: 4,096, or as many as the model takes.
    """
    found = None
    with contextlib.suppress(PlanError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about guesses
        found = example_inputs(skeleton, rows, length or _LENGTH)
    if found is not None:
        yield found
    parameters = inspect.signature(skeleton.forward).parameters.items()
    required = [n for n, p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    for most in (length or _LENGTH, *_sizes_of_tables(skeleton), 8):  # of ids, and labels
        tokens = torch.empty(rows, most, dtype=torch.int64, device="meta")
        yield dict.fromkeys(required, tokens)


def _sizes_of_tables(skeleton: nn.Module) -> list[int]:
    """Numbers of rows of embeddings, and of parameters around modules: one may be that of positions. The largest first."""
    tables = [m.weight for m in skeleton.modules() if isinstance(m, nn.Embedding)]
    around = [m for m in skeleton.modules() if next(m.children(), None) is not None]
    tables += [p for m in around for p in m.parameters(recurse=False) if p.ndim > 1]
    return sorted({n for table in tables for n in table.shape[:-1] if 8 < n < _LENGTH or 1 < n < 8}, reverse=True)[:6]


class _Counter(TorchDispatchMode):
    """Adds up the operations of products, attention and convolutions."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.work = [0.0] * len(blocks)
        self.has_run, self._running = 0, 0
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(lambda *_, number=number: self._begin(number))
            block.register_forward_hook(lambda *_: self._end())

    def follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Of torch functions; ops are counted."""

    def _begin(self, number: int) -> None:
        self._running = number
        self.has_run = max(self.has_run, number + 1)

    def _end(self) -> None:
        if self.has_run == len(self.work):
            self._running = len(self.work) - 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = result_on_meta(func, args, kwargs or {})
        count: Any = flop_registry.get(func.overloadpacket)
        if count is not None:
            self.work[self._running] += count(*args, **(kwargs or {}), out_val=result)
        return result


def _by_parameters(model: nn.Module, blocks: nn.Module) -> list[float]:
    share = _share_of_experts(model)

    def cost(path: str, module: nn.Module) -> float:
        if isinstance(module, nn.Embedding):  # looked up, not multiplied
            return 0.0
        part = share if "expert" in path and "shared_expert" not in path else 1.0
        return sum(part * p.numel() for p in module.parameters(recurse=False) if p.ndim > 1)

    work = [sum(cost(path, m) for path, m in block.named_modules()) or 1.0 for block in blocks.children()]
    inside, seen = {id(m) for m in blocks.modules()}, False
    for path, module in model.named_modules():
        if id(module) in inside:
            seen = True
        else:
            work[-1 if seen else 0] += cost(path, module)
    return work


def _share_of_experts(model: nn.Module) -> float:
    config: Any = getattr(model, "config", None)
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next(filter(None, (config_value(config, name) for name in names)), None)
    chosen = config_value(config, "num_experts_per_tok")
    return float(chosen) / float(experts) if experts and chosen else 1.0

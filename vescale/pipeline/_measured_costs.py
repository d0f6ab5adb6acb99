"""``measure_costs``: seconds that the blocks of a model take on this device."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from vescale.compat.devices import synchronize
from vescale.compat.tensor_subclasses import tree_flatten, tree_map, tree_unflatten
from vescale.errors import PipelineCutError
from vescale.pipeline._balance import blocks_of


def measure_costs(model: nn.Module, batch: Mapping[str, Any], *, repeat: int = 5) -> dict[str, float]:
    """Seconds of a forward and backward of each block, and of each module with parameters around the blocks: what
    ``plan.pipeline(balance="cost", costs=...)`` takes.

    The model runs once, forward, without gradients, to learn what its modules are called with. Then each one runs by itself,
    ``repeat`` times after a first time that does not count; the median is returned. What the forward computes around
    modules, such as masks and the loss, is not measured. Gradients, buffers and random
    state are left as they were. No communication.

    Args:
        model: on the device that is measured, before ``parallelize``.
        batch: arguments of the model: one micro-batch.

    Raises PlanError for a model without a ModuleList or Sequential of at least two blocks.
    """
    name = blocks_of(model)
    if name is None:
        raise PipelineCutError(
            "measure_costs: the model has no ModuleList of at least 2 blocks; pass costs= to plan.pipeline(...)"
        )
    blocks = model.get_submodule(name)
    wanted = {f"{name}.{n}" if name else n: block for n, block in blocks.named_children()}
    containers = {".".join(name.split(".")[:n]) for n in range(name.count(".") + 2)} | {""}

    def visit(path: str, module: nn.Module) -> None:
        for n, child in module.named_children():
            inner = f"{path}.{n}" if path else n
            if inner in containers:
                visit(inner, child)
            elif inner not in wanted and next(child.parameters(), None) is not None:
                wanted[inner] = child

    for path in sorted(containers - {name}):
        visit(path, model.get_submodule(path))
    calls: dict[str, tuple[Any, Any]] = {}
    handles = [
        module.register_forward_pre_hook(_noting(calls, path), with_kwargs=True) for path, module in wanted.items()
    ]
    with torch.random.fork_rng(), _left_as_it_is(model):
        try:
            with torch.no_grad():
                model(**batch)
        finally:
            for handle in handles:
                handle.remove()
        return {path: _seconds(module, *calls[path], repeat) for path, module in wanted.items() if path in calls}


@contextlib.contextmanager
def _left_as_it_is(model: nn.Module) -> Iterator[None]:
    """Gradients are taken away and put back, with the values of buffers."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def _noting(calls: dict[str, tuple[Any, Any]], path: str) -> Any:
    def note(_: nn.Module, args: Any, kwargs: Any) -> None:
        copied = tree_map(lambda v: v.detach().clone() if isinstance(v, torch.Tensor) else v, (args, kwargs))
        calls.setdefault(path, copied)

    return note


def _seconds(module: nn.Module, args: Any, kwargs: Any, repeat: int) -> float:
    leaves, tree = tree_flatten((args, kwargs))
    found = []
    for _ in range(repeat + 1):
        given = [v.clone().requires_grad_(v.is_floating_point()) if isinstance(v, torch.Tensor) else v for v in leaves]
        # Modules may write to what they are called with, which a leaf does not allow.
        args, kwargs = tree_unflatten(
            [v * 1 if isinstance(v, torch.Tensor) and v.requires_grad else v for v in given], tree
        )
        synchronize()
        start = time.perf_counter()
        outs = [v for v in tree_flatten(module(*args, **kwargs))[0] if isinstance(v, torch.Tensor) and v.requires_grad]
        if outs:
            torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])
        synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])

"""Functions of torch whose rows have nothing to do with each other, run on each rank's rows: recurrent networks, bags of
embeddings.

Every rank runs torch's own function on its part of the batch and on whole weights, whose gradients are Partial then: no
communication, and one call instead of a DTensor op for each step of a sequence. Operands that lie otherwise are gathered,
which is implicit communication. Between the layers of a recurrent network, dropout has to have one device's bits: with it
DTensor's ops run, one for each step.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import PACKING, no_torch_function
from vescale.ops import bring_with_gradient, enter_local, leave_local
from vescale.placements import shard_dim

if TYPE_CHECKING:
    from vescale.runtime._runtime import Runtime

__all__ = ["PACKING", "RECURRENT", "embedding_bag", "packed", "recurrent"]

RECURRENT = [torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu]
_BAG = inspect.signature(F.embedding_bag)


def recurrent(runtime: Runtime, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func(input, state, parameters, biases, layers, dropout, train, bidirectional, batch_first)``, or of a packed
    sequence ``func(data, batch_sizes, state, parameters, biases, layers, dropout, train, bidirectional)``.

    The state is ``(layers, batch, ...)``, a pair of them for an LSTM.
    """
    if kwargs or not isinstance(args[0], DTensor):
        return func(*args, **kwargs)
    if not isinstance(args[1 if func is torch.lstm else 2], tuple | list):
        return packed(runtime, func, args, kwargs)
    x, state, parameters, *numbers, batch_first = args
    batch_dim = 0 if batch_first else 1
    rows, name = _cut(x, batch_dim), func.__name__
    states = state if func is torch.lstm else (state,)
    states = [bring_with_gradient(s, _shards(rows, 1), name, "state") for s in states]
    _biases, _layers, dropout, train, _bidirectional = numbers
    if dropout and train and any(rows):
        return func(x, states if func is torch.lstm else states[0], parameters, *numbers, batch_first)
    local = enter_local(bring_with_gradient(x, _shards(rows, batch_dim), name, "input"))
    own = [enter_local(s) for s in states]
    weights = [_weight(p, rows, name) for p in parameters]
    with no_torch_function():
        output, *last = func(local, own if func is torch.lstm else own[0], weights, *numbers, batch_first)
    mesh, num_rows = x.device_mesh, x.shape[batch_dim]
    wrapped = [_rows_of(output, batch_dim, num_rows, mesh, rows, name)]
    return (*wrapped, *(_rows_of(s, 1, num_rows, mesh, rows, name) for s in last))


def packed(runtime: Runtime, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    """What makes, takes and runs on packed sequences: on every rank alike, with whole operands, dropout, too."""
    name = func.__name__
    mesh = next(x for x in args if isinstance(x, DTensor)).device_mesh
    rows = [False] * mesh.ndim

    def whole(x: Any) -> Any:
        if isinstance(x, tuple | list):
            return [whole(part) for part in x]
        return _weight(x, rows, name) if isinstance(x, DTensor) else x

    with no_torch_function():
        found = func(*whole(args), **kwargs)
    return tuple(_rows_of(x, 0, x.shape[0], mesh, rows, name) for x in found)


def embedding_bag(runtime: Runtime, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``F.embedding_bag``: bags of equal lengths, ``(batch, length)``, are rows; others, one after the other with offsets,
    have to be whole on every rank.

    Raises:
        NotImplementedError: ``max_norm`` and ``scale_grad_by_freq`` over cut bags, which depend on other ranks' bags.
    """
    call = _BAG.bind(*args, **kwargs)
    call.apply_defaults()
    options = call.arguments
    bags, table = options["input"], options["weight"]
    if not isinstance(table, DTensor):  # outside of the model's own parameters
        return func(*args, **kwargs)
    mesh, name = table.device_mesh, "embedding_bag"
    rows = _cut(bags, 0) if bags.ndim == 2 else [False] * mesh.ndim
    if any(rows) and (options["max_norm"] is not None or options["scale_grad_by_freq"]):
        raise NotImplementedError(
            f"{name}: max_norm and scale_grad_by_freq over bags of shape {tuple(bags.shape)} with placements "
            f"{tuple(bags.placements)} need the bags of other ranks; leave them out, or let the module's <in> be R"
        )
    for operand in ("input", "offsets", "per_sample_weights"):
        if isinstance(options[operand], DTensor):
            placed = bring_with_gradient(options[operand], _shards(rows, 0), name, operand)
            options[operand] = enter_local(placed)
    options["weight"] = _weight(table, rows, name)
    with no_torch_function():
        local = func(*call.args, **call.kwargs)
    num_bags = bags.shape[0] if bags.ndim == 2 else local.shape[0]
    return _rows_of(local, 0, num_bags, mesh, rows, name)


def _cut(x: DTensor, batch_dim: int) -> list[bool]:
    """The axes along which ranks hold different rows."""
    return [shard_dim(p) == batch_dim and p.is_shard() for p in x.placements]


def _shards(rows: Sequence[bool], dim: int) -> tuple[Placement, ...]:
    return tuple(Shard(dim) if cut else Replicate() for cut in rows)


def _weight(parameter: DTensor, rows: Sequence[bool], name: str) -> torch.Tensor:
    """The whole of it; what each rank adds to its gradient comes from the rank's rows."""
    whole = bring_with_gradient(parameter, (Replicate(),) * parameter.device_mesh.ndim, name, "weight")
    return enter_local(whole, [Partial() if cut else Replicate() for cut in rows])


def _rows_of(local: torch.Tensor, dim: int, num_rows: int, mesh: Any, rows: Sequence[bool], name: str) -> DTensor:
    shape = [num_rows if d == dim else size for d, size in enumerate(local.shape)]
    return leave_local(local, mesh, _shards(rows, dim), shape, name)

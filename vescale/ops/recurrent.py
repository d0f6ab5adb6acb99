"""Recurrent networks on sharded batches.

Every rank runs torch's own function on its part of the batch and on whole weights, whose gradients are then Partial: no
communication, and one call instead of a DTensor op for each step of a sequence. With dropout between layers, which has to
have one device's bits, DTensor's ops run instead, several for each step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from vescale.compat import PACKING, no_torch_function
from vescale.errors import RandomOpError
from vescale.ops._conversion import bring_with_gradient, local_parameter, local_rows, rows_from_local, sharded_rows
from vescale.ops._registry import OpContext, replaces
from vescale.rng import draws_rows

_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


@replaces(*_RECURRENT)
def _recurrent(context: OpContext, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func(input, state, parameters, biases, layers, dropout, train, bidirectional, batch_first)``, or of a packed
    sequence ``func(data, batch_sizes, state, parameters, biases, layers, dropout, train, bidirectional)``.

    The state is ``(layers, batch, ...)``, a pair of them for an LSTM.
    """
    if kwargs or not isinstance(args[0], DTensor):
        return func(*args, **kwargs)
    if not isinstance(args[1 if func is torch.lstm else 2], tuple | list):
        return _packed(context, func, args, kwargs)
    x, state, parameters, *numbers, batch_first = args
    batch_dim = 0 if batch_first else 1
    rows, name = sharded_rows(x, batch_dim), func.__name__
    states = state if func is torch.lstm else (state,)
    _biases, _layers, dropout, train, _bidirectional = numbers
    if dropout and train and (any(rows) or draws_rows()):
        whole = [Replicate()] * len(rows)  # of a pending sum there is no dropout
        x = bring_with_gradient(x, [Shard(batch_dim) if r else Replicate() for r in rows], name, "input")
        states = [bring_with_gradient(s, [Shard(1) if r else Replicate() for r in rows], name, "state") for s in states]
        parameters = [bring_with_gradient(p, whole, name, "weight") for p in parameters]
        return func(x, states if func is torch.lstm else states[0], parameters, *numbers, batch_first)
    local = local_rows(x, rows, batch_dim, name, "input")
    own = [local_rows(s, rows, 1, name, "state") for s in states]
    weights = [local_parameter(p, rows, name) for p in parameters]
    with no_torch_function():
        output, *last = func(local, own if func is torch.lstm else own[0], weights, *numbers, batch_first)
    mesh, num_rows = x.device_mesh, x.shape[batch_dim]
    result = rows_from_local(output, batch_dim, num_rows, mesh, rows, name)
    return (result, *(rows_from_local(s, 1, num_rows, mesh, rows, name) for s in last))


@replaces(*PACKING)
def _packed(context: OpContext, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    """Functions of packed sequences: the same on every rank, with whole operands, also under dropout."""
    name = func.__name__
    mesh = next(x for x in args if isinstance(x, DTensor)).device_mesh
    rows = [False] * mesh.ndim

    dropout, train = args[6:8] if func in _RECURRENT else (0.0, False)
    if dropout and train and draws_rows():
        raise RandomOpError(
            f"torch.{name} of a packed sequence with dropout={dropout} draws for all rows at once, but a pipeline "
            "runs a part of them at a time; pass padded tensors, or use microbatches=1 (with GPipe)"
        )

    def whole(x: Any) -> Any:
        if isinstance(x, tuple | list):
            return [whole(part) for part in x]
        return local_parameter(x, rows, name) if isinstance(x, DTensor) else x

    with no_torch_function():
        found = func(*whole(args), **kwargs)
    return tuple(rows_from_local(x, 0, x.shape[0], mesh, rows, name) for x in found)

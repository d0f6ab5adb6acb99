"""Expert ids of tokens that other ranks would send: those of the tokens that this rank sends to itself."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from vescale.estimation._unknown_values import Routing
from vescale.runtime import TokenExchange

__all__ = ["balanced_tokens"]


@contextlib.contextmanager
def balanced_tokens(routing: Routing) -> Iterator[None]:
    """Inside, an exchange of tokens among ranks that do not exist brings, from each of them, ids like the own ones."""
    original = TokenExchange.dispatch

    def dispatch(exchange: TokenExchange, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        received = original(exchange, *parts)
        found = []
        for part, there in zip(parts, received):
            if not part.is_floating_point() and len(there):
                first = sum(exchange.send[: exchange.group.index])
                own = exchange.rows[first : first + exchange.send[exchange.group.index]]
                rows = part[own if len(own) else exchange.rows]
                if len(rows):
                    there = rows[torch.arange(len(there)) % len(rows)]
            found.append(there)
        return tuple(found)

    TokenExchange.dispatch = dispatch  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        TokenExchange.dispatch = original  # type: ignore[method-assign]

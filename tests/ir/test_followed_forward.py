"""Which functions keep the tokens of (batch, tokens, features) apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vescale.ir._followed_forward import keeps_tokens

X = (4, 8, 6)


@pytest.mark.parametrize(
    ("name", "shapes", "has_tokens", "result", "arguments", "expected"),
    [
        ("mul", [X, (6,)], [True, False], X, (), True),
        ("__rmul__", [X, X], [True, True], X, (), True),
        ("mul", [(4, 1, 6), X], [True, False], X, (), False),  # one token for all
        ("mul", [(8, 6), X], [True, False], X, (), False),
        ("max", [X], [True], (4, 8), (None, 1), False),
        ("softmax", [X], [True], X, (None, -1), True),
        ("softmax", [X], [True], X, (None, 1), False),
        ("softmax", [X], [True], X, (None, -2), False),
        ("mean", [X], [True], X, (None,), False),
        ("layer_norm", [X, (6,)], [True, False], X, (None, (6,)), True),
        ("layer_norm", [X], [True], X, (None, (8, 6)), False),
        ("view", [X], [True], (4, 8, 6), (), True),
        ("view", [X], [True], (4, 8, 2, 3), (), False),
        ("reshape", [X], [True], (8, 8, 3), (), False),
        ("reshape", [X], [True], (2, 8, 12), (), False),
        ("cat", [X, X], [True, True], (4, 8, 12), (), True),
        ("cat", [(0,), X], [False, True], X, (), True),
        ("cat", [X, X], [True, False], (4, 8, 12), (), False),
        ("cat", [X, X], [True, True], (4, 16, 6), (), False),
        ("linear", [X, (5, 6)], [True, False], (4, 8, 5), (), True),
        ("linear", [(4, 6), X], [False, True], (4, 8, 4), (), False),
        ("matmul", [X, (4, 6, 8)], [True, True], (4, 8, 8), (), False),
        ("transpose", [X], [True], (4, 6, 8), (None, 1, 2), False),
        ("transpose", [(4, 8, 8)], [True], (4, 8, 8), (None, 1, 2), False),
        ("transpose", [X], [True], (6, 8, 4), (None, 0, 2), True),
        ("__getitem__", [X], [True], (4, 8, 3), (None, (..., slice(0, 3))), True),
        ("__getitem__", [X], [True], (4, 7, 6), (None, (slice(None), slice(1, None))), False),
        ("cumsum", [X], [True], X, (None, 1), False),
        ("whatever", [X], [True], X, (), False),
    ],
)
def test_keeps_tokens(
    name: str, shapes: Any, has_tokens: list[bool], result: Any, arguments: tuple[Any, ...], expected: bool
) -> None:
    operands = [torch.empty(shape, device="meta") for shape in shapes]
    assert keeps_tokens(name, operands, has_tokens, torch.empty(result, device="meta"), arguments, {}) is expected

"""A model that does nothing but attend, and its comparison with one device."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

__all__ = ["Attend", "attend_like_one_device"]

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


class Attend(nn.Module):
    """Attention of scaled queries and keys, so that a replicated parameter gets a gradient through both."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.options = options
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, q: Any, k: Any, v: Any, mask: Any = None) -> torch.Tensor:
        return F.scaled_dot_product_attention(q * self.scale, k * self.scale, v, attn_mask=mask, **self.options)


def attend_like_one_device(
    model: Any,
    options: dict[str, Any],
    expected_in: Sequence[torch.Tensor | None],
    found_in: Sequence[torch.Tensor | None],
) -> DTensor | None:
    """The result of a parallelized :class:`Attend`, compared with one device's: values, dropout masks, the generator
    afterwards, gradients of the parameter and of every input. None: one device refuses the arguments, and so does the
    model, with the same error."""
    reference = Attend(options)
    torch.manual_seed(5)
    try:
        expected = reference(*expected_in)
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=re.escape(str(error).splitlines()[0])):
            model(*found_in)
        return None
    state = torch.get_rng_state()
    torch.manual_seed(5)
    found = model(*found_in)
    assert torch.equal(torch.get_rng_state(), state)
    assert isinstance(found, DTensor)
    torch.testing.assert_close(found.full_tensor(), expected, **CLOSE)
    expected.square().sum().backward()
    found.square().sum().backward()
    torch.testing.assert_close(model.scale.grad.full_tensor(), reference.scale.grad, **CLOSE)
    for own, other in zip(found_in, expected_in, strict=True):
        if other is not None and other.requires_grad:
            assert own is not None
            torch.testing.assert_close(own.grad, other.grad, **CLOSE)
    return found

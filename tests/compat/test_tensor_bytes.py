"""The elements of a tensor as bytes."""

from __future__ import annotations

import pytest
import torch

from vescale.compat import bytes_of

TENSORS = {
    "one element, of a strided view": torch.arange(64.0).view(8, 8)[:1, -1],
    "no dims": torch.tensor(3.5, dtype=torch.float64),
    "nothing": torch.empty(0, 3),
    "transposed": torch.arange(6, dtype=torch.int16).view(2, 3).t(),
    "a part": torch.arange(8.0)[3:6],
    "with a gradient": torch.ones(2, 2, requires_grad=True),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS.keys())
def test_bytes_are_those_of_the_elements_in_order(tensor: torch.Tensor) -> None:
    found = bytes_of(tensor)
    assert found.dtype == torch.uint8 and found.ndim == 1
    assert found.numpy().tobytes() == tensor.detach().numpy().tobytes()


def test_bytes_of_a_contiguous_tensor_are_its_memory() -> None:
    x = torch.zeros(3)
    bytes_of(x)[:] = 255
    assert x.isnan().all()

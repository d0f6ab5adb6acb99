"""What commands leave out when they build a model: values, and imports that no command needs."""

from __future__ import annotations

import torch
from torch import nn

from vescale.cli._without_fills import WithoutFills
from vescale.ir import packed_dims


def test_only_tensors_without_memory_are_left_as_they_are() -> None:
    with torch.device("meta"), WithoutFills():
        layer = nn.Linear(4, 4)
    assert layer.weight.is_meta and layer.weight.shape == (4, 4)
    with WithoutFills():
        torch.manual_seed(0)
        found = nn.Linear(4, 4).weight
    torch.manual_seed(0)
    assert torch.equal(found, nn.Linear(4, 4).weight)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.pair(x).chunk(2, -1)
        return x + gate * up


class Layers(nn.Module):
    """``counts``: the forward asks for layers by number, so that none can be left out."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(6))
        self.counts = counts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(6) if self.counts else self.layers:
            x = (self.layers[number] if self.counts else number)(x)
        return x


def test_a_packed_weight_of_repeated_layers_is_named_in_each() -> None:
    for counts in (False, True):
        with torch.device("meta"):
            model = Layers(counts)
            found = packed_dims(model, {"x": torch.empty(2, 4)})
        named = {(each.name, each.dim, each.num_parts) for each in found}
        expected = {(f"layers.{n}.pair.{w}", 0, 2) for n in range(6) for w in ("weight", "bias")}
        assert named == expected, (counts, named)
        assert [name for name, _ in model.layers.named_children()] == [str(n) for n in range(6)]

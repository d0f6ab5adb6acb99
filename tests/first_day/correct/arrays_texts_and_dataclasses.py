"""The same arrays, texts, numbers and dataclasses on all ranks; names of files differ."""

from dataclasses import dataclass

import numpy as np
import torch

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize


@dataclass
class Batch:
    x: np.ndarray
    texts: list[str]
    scale: float
    file: str


class OfBatches(Net):
    def forward(self, batch: Batch) -> torch.Tensor:
        lengths = torch.tensor([[float(len(text))] for text in batch.texts])
        return super().forward(torch.from_numpy(batch.x) + lengths, batch.scale)


mesh = start(tp=2)
model = parallelize(OfBatches(), plan(mesh))
for step in range(5):
    model(Batch(inputs(step).numpy(), ["a", "bc", "d", "e"], 0.5 * step, f"part{rank()}")).sum().backward()

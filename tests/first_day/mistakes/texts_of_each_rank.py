"""The model is given texts, other ones on each rank, which it makes a tensor of.

error: InputMismatchError
says: have created different values | same texts | given="local"
"""

import torch

from tests.first_day.start import Net, plan, rank, start
from vescale import parallelize


class OfTexts(Net):
    def forward(self, texts: list[str]) -> torch.Tensor:
        return super().forward(torch.tensor([[float(ord(letter)) for letter in text] for text in texts]))


mesh = start(tp=2)
model = parallelize(OfTexts(), plan(mesh))
model([("abcdefgh", "ijklmnop")[rank()]]).sum().backward()

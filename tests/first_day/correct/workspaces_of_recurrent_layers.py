"""Losses that run recurrent layers, attention and pooling outside of the model: ops that keep workspaces."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.first_day.start import Net, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
lstm, gru, norm = nn.LSTM(8, 8, batch_first=True), nn.GRU(8, 8), nn.BatchNorm1d(8)
for step in range(4):
    garbage = [torch.full((size,), float(rank())) for size in range(1, 400)]
    del garbage
    y = model(torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(step))).full_tensor()
    q = y.unsqueeze(1)
    attended = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    pooled = F.adaptive_max_pool1d(y, 2).sum() + F.max_pool1d(y, 2).sum() + F.logsigmoid(y).sum()
    packed = nn.utils.rnn.pack_padded_sequence(y, torch.tensor([6, 5, 3, 1]), batch_first=True)
    states = lstm(packed)[0].data.sum() + lstm(y)[0].sum() + gru(y)[0].sum()
    (attended.sum() + pooled + states + norm(y.transpose(1, 2)).square().sum()).backward()

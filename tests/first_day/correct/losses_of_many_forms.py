"""Losses of many forms, whose ops and numbers ranks compare before each backward, of uneven rows."""

import os

os.environ["VESCALE_CHECK_EVERY"] = "1"

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Shard

from tests.first_day.start import Net, plan, start
from vescale import parallelize

mesh = start(dp=2, tp=1)
model = parallelize(Net(), plan(mesh).shard("<in:x>", Shard(0), mesh="dp"))
x, t = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
labels = t.argmax(-1)
LOSSES = [
    lambda y: F.huber_loss(y, t),
    lambda y: F.cross_entropy(y, labels, label_smoothing=0.1),
    lambda y: F.cross_entropy(y, labels, reduction="sum") / len(y),
    lambda y: F.kl_div(y.log_softmax(-1), t.softmax(-1), reduction="batchmean"),
    lambda y: F.binary_cross_entropy_with_logits(y, t.sigmoid()),
    lambda y: F.gaussian_nll_loss(y, t, t.square() + 0.1),
    lambda y: 1 - F.cosine_similarity(y, t).mean(),
    lambda y: (y * (t > 0)).sum() / (t > 0).sum(),
    lambda y: y[t > 0].mean(),
    lambda y: y.topk(2, -1).values.mean() + y.sort(-1).values[:, 0].mean(),
    lambda y: y.max() - y.min() + y.var(),
    lambda y: y[0].sum() + y[-1, 2:].mean() + y[torch.tensor([0, 0])].sum(),
    lambda y: F.dropout(y, 0.5).mean() + (y + torch.randn_like(y)).square().mean(),
    lambda y: F.cross_entropy(F.normalize(y) @ F.normalize(t).t(), torch.arange(len(y))),
    lambda y: F.triplet_margin_loss(y, t, t.flip(0)),
    lambda y: sum(part.mean() for part in y.split(2)) + torch.cat([y, t]).mean(),
    lambda y: y[torch.randperm(len(y))].square().mean() / y.detach().abs().mean(),
    lambda y: y.double().mean().float() * torch.tensor(3.0) + y.mean() / float(t.abs().mean()),
]
for loss in LOSSES:
    loss(model(x)).backward()
    loss(model(x.roll(1, 0))).backward()

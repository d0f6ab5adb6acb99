"""A network on a graph gets its adjacency as a sparse matrix."""

import torch
import torch.distributed as dist

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize


class Graph(Net):
    def forward(self, x, adjacency):
        return super().forward(torch.sparse.mm(adjacency, x))


mesh = start(tp=2)
model = parallelize(Graph(), plan(mesh))
for step in range(2):
    model(inputs(step), torch.eye(4).to_sparse()).square().mean().backward()
    model.zero_grad()
dist.destroy_process_group()

"""What a forward calls logs with times, numbers of its process and names that it draws, and is imported there."""

import importlib
import logging
import os
import time

import torch.distributed as dist

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

logging.basicConfig(level=logging.INFO, filename=os.devnull)


class Logged(Net):
    def forward(self, x):
        began, uuid = time.perf_counter(), importlib.import_module("uuid")
        out = super().forward(x)
        name = f"{os.getpid()} {uuid.uuid4()} {importlib.import_module('secrets').token_hex(4)}"
        logging.getLogger("library").info("%s %s %f", name, tuple(out.shape), time.perf_counter() - began)
        return out


mesh = start(tp=2)
model = parallelize(Logged(), plan(mesh))
for step in range(3):
    model(inputs(step)).square().mean().backward()
    model.zero_grad()
dist.destroy_process_group()

"""A thread of a rank draws from all default generators while forwards of a model that draws nothing run."""

import random
import threading

import numpy as np
import torch

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
is_over = threading.Event()


def draw() -> None:
    while not is_over.wait(1e-4):
        random.random(), np.random.rand()
        if rank() == 0:
            torch.rand(1)


thread = threading.Thread(target=draw)
thread.start()
for _ in range(6):
    model(inputs()).sum().backward()
is_over.set()
thread.join()

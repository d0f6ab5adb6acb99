"""Outputs are cut to a length that differs between ranks.

error: InputMismatchError
says: different losses | Sum(
"""

from tests.first_day.start import Net, inputs, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
model(inputs())[: 2 + rank()].sum().backward()

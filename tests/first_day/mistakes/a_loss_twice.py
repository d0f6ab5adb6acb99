"""`backward` runs twice through one graph.

error: RuntimeError
says: second time
"""

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
loss = model(inputs()).sum()
loss.backward()
loss.backward()

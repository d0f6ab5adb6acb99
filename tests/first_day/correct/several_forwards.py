"""One model runs twice in each step, as in contrastive losses."""

from tests.first_day.start import Net, inputs, plan, start
from vescale import parallelize

mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
for step in range(4):
    (model(inputs(step)) * model(inputs(step + 1)[:, :])).sum().backward()

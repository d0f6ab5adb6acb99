"""The model of one rank is larger.

error: PlanMismatchError
says: 'up.weight' | (16, 8) float32 on rank 0 and (32, 8) float32 on rank 1
"""

from tests.first_day.start import Net, plan, rank, start
from vescale import parallelize

mesh = start(tp=2)
parallelize(Net(16 + 16 * rank()), plan(mesh))

"""The plan is given in place of the model.

error: ArgumentTypeError
says: plan is a Net; pass a vescale.Plan
"""

from tests.first_day.start import Net, plan, start
from vescale import parallelize

mesh = start(tp=2)
parallelize(plan(mesh), Net())

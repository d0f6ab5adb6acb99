"""The model is to be shared with processes of this host: the process crashed.

error: DTensorStorageError
says: to_local() | x.to_local().share_memory_()
"""

from tests.first_day.start import Net, plan, start
from vescale import parallelize

mesh = start(tp=2)
parallelize(Net(), plan(mesh)).share_memory()

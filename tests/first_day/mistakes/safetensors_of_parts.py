"""safetensors is given a state dict whose tensors are cut.

error: DTensorStorageError
says: full_tensor() | vescale.checkpoint.save
"""

import tempfile
import warnings

from safetensors.torch import save_file

from tests.first_day.start import Net, plan, start
from vescale import parallelize

warnings.simplefilter("ignore")
mesh = start(tp=2)
model = parallelize(Net(), plan(mesh))
save_file(model.state_dict(), f"{tempfile.mkdtemp()}/model.safetensors")

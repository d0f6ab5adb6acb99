"""Static mode: after one recorded step, the model runs on local tensors, with the collectives that its plan needs."""

from vescale.runtime import parallelize, register_mode
from vescale.static._install import install, program_of

__all__ = ["install", "parallelize", "program_of"]

register_mode("static", install)

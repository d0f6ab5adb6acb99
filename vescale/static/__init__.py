"""Static mode: after one recorded step, the model runs on local tensors, with the collectives that its plan needs."""

from vescale.runtime import parallelize, register_mode
from vescale.static._install import install
from vescale.static._report import EagerFunction, Fallback, StaticReport, report

__all__ = ["EagerFunction", "Fallback", "StaticReport", "parallelize", "report"]

register_mode("static", install)

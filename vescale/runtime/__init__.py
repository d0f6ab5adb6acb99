"""``parallelize``: a lowered plan becomes DTensor parameters and hooks, and the model runs on the mesh."""

from vescale.runtime._parallelize import implicit_communication, install, parallelize
from vescale.runtime._runtime import Runtime
from vescale.runtime._sites import ImplicitCommunicationError, ImplicitCommunicationWarning, ImplicitSite

__all__ = [
    "ImplicitCommunicationError",
    "ImplicitCommunicationWarning",
    "ImplicitSite",
    "Runtime",
    "implicit_communication",
    "install",
    "parallelize",
]

"""``parallelize``: a lowered plan becomes DTensor parameters and hooks, and the model runs on the mesh."""

from vescale.runtime._parallelize import gradient_reducer, implicit_communication, install, no_sync, parallelize
from vescale.runtime._runtime import Runtime, locate, path_of_sequence
from vescale.runtime._sites import ImplicitCommunicationError, ImplicitCommunicationWarning, ImplicitSite

__all__ = [
    "ImplicitCommunicationError",
    "ImplicitCommunicationWarning",
    "ImplicitSite",
    "Runtime",
    "gradient_reducer",
    "implicit_communication",
    "install",
    "locate",
    "no_sync",
    "parallelize",
    "path_of_sequence",
]

"""``parallelize``: a lowered plan becomes DTensor parameters and hooks, and the model runs on the mesh."""

from vescale.runtime._attribution import locate, module_of_node
from vescale.runtime._implicit_site import ImplicitCommunicationError, ImplicitCommunicationWarning, ImplicitSite
from vescale.runtime._parallelize import gradient_reducer, implicit_communication, install, no_sync, parallelize

__all__ = [
    "ImplicitCommunicationError",
    "ImplicitCommunicationWarning",
    "ImplicitSite",
    "gradient_reducer",
    "implicit_communication",
    "install",
    "locate",
    "module_of_node",
    "no_sync",
    "parallelize",
]

"""What is installed by functions of lower floors, and stands on higher ones: nothing depends on what a process did before.

The package fills the lists when it is imported. Placements run the first when one is constructed, whatever shards a model
runs both.
"""

from collections.abc import Callable

PLACEMENT_PARTS: list[Callable[[], None]] = []
MODEL_PARTS: list[Callable[[], None]] = []


def install_placement_parts() -> None:
    """Install ops on DTensors with placements of vescale."""
    for install in PLACEMENT_PARTS:
        install()


def install_model_parts() -> None:
    """Install what models need beside ops: handlers of functions on DTensors."""
    for install in MODEL_PARTS:
        install()

"""What the first function that shards a model installs, whichever that is: nothing depends on what a process did before.

The package fills the list when it is imported; what is in it stands above some of the functions that call it.
"""

from collections.abc import Callable

__all__ = ["MODEL_PARTS", "install_model_parts"]

MODEL_PARTS: list[Callable[[], None]] = []


def install_model_parts() -> None:
    for install in MODEL_PARTS:
        install()

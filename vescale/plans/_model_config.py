"""Reading a model's configuration."""

from __future__ import annotations

from typing import Any

__all__ = ["config_value"]


def config_value(config: Any, name: str, layer: int | None = None) -> Any:
    """An attribute of a configuration; None if it has none, or another one for each layer and ``layer`` is None.

    Configurations of transformers whose layers differ (Gemma 4) raise RuntimeError for such an attribute of the whole, and
    have one configuration for each layer.
    """
    try:
        return getattr(config, name, None)
    except RuntimeError:
        layers = getattr(config, "per_layer_config", None)
        return None if layer is None or layers is None else getattr(layers[layer], name, None)

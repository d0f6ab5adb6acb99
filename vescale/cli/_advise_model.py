"""The model of ``vescale advise``: a Hugging Face configuration, a list of shapes, or a shipped list."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from vescale.buffer import ModelShapes, group_units, shape_list, shape_list_names
from vescale.cli._hf_config import CONFIG_HELP, config_file
from vescale.cli._inputs import load_model
from vescale.cli._main import UsageError

__all__ = ["read_model"]


def read_model(text: str) -> ModelShapes:
    """The model named on the command line.

    Raises:
        UsageError: no such file or list, a broken file, or a configuration that transformers does not know.
    """
    if text in shape_list_names():
        return shape_list(text)
    names = shape_list_names()
    if not text.startswith("hf:") and not Path(text).exists():
        close = difflib.get_close_matches(text, names, n=1, cutoff=0.5)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise UsageError(
            f"{text!r} is neither a file nor a shipped shape list.{hint} Shipped are {', '.join(names)}; a file is "
            f"{CONFIG_HELP}, or a JSON list of shapes."
        )
    config = config_file(text)
    if config is not None:
        shapes = {name: tuple(parameter.shape) for name, parameter in load_model(text).named_parameters()}
        return ModelShapes(config.name, f"Hugging Face configuration {config}", group_units(shapes))
    path = Path(text)
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}. Pass a JSON file.") from error
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}. Correct the file at this place."
        ) from error
    if isinstance(data, dict) and "format" in data:
        try:
            model = ModelShapes.from_json(json.dumps(data))
        except ValueError as error:
            raise UsageError(f"{path}: {error}") from error
        if not any(unit.parameters for unit in model.units):
            raise UsageError(f"{path}: no shapes. List at least one tensor.")
        return model
    return ModelShapes(path.name, f"shapes in {path}", group_units(_from_shapes(path, data)))


def _from_shapes(path: Path, data: Any) -> dict[str, tuple[int, ...]]:
    """``[[4096, 4096], [4096]]``, ``[["name", [4096]], ...]`` or ``{"name": [4096], ...}``."""
    if isinstance(data, dict):
        pairs = list(data.items())
    elif isinstance(data, list):
        pairs = [
            (entry[0], entry[1])
            if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str)
            else (f"tensor{i}", entry)
            for i, entry in enumerate(data)
        ]
    else:
        raise UsageError(f"{path} holds {json.dumps(data)[:40]}; expected shapes, in a list or by name.")
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in pairs:
        if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            raise UsageError(
                f"{path}: the shape of {name!r} is {json.dumps(shape)}; expected a list of sizes like [4096, 1024]."
            )
        if name in shapes:
            raise UsageError(f"{path}: {name!r} occurs twice. Give each tensor its own name.")
        shapes[name] = tuple(shape)
    if not shapes:
        raise UsageError(f"{path}: no shapes. List at least one tensor.")
    return shapes

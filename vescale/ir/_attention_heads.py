"""The positions of attention heads in the weights of a model, found by names and sizes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import regex
from torch import nn

from vescale.ir._model_index import ModelIndex
from vescale.plans import config_value

# The projections of an attention module, by the usual names of the modules that hold them.
_QUERY = regex.compile(r"(?:w|to_|add_)?(?:q|query)(?:_proj|_b_proj|_lin|_linear)?")
_KEY_VALUE = regex.compile(r"(?:w|to_|add_)?(?:k|v|key|value)(?:_proj|_lin|_linear)?")
_OUTPUT = regex.compile(r"(?:w|to_|to_add_)?(?:o|out)(?:_proj|_lin|_linear)?|c_proj")

_NUM_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "heads")
_NUM_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_HEAD_DIM = ("head_dim", "attention_head_size", "key_value_proj_dim", "dim_head")


@dataclass(frozen=True)
class Heads:
    """The heads along one dim of a weight: ``count`` of them, ``size`` rows (or columns) each, one after the other."""

    count: int
    size: int
    kind: str  # "query", "key/value"
    attribute: str  # the name of the number in the model or its config


def heads_of(index: ModelIndex, names: Sequence[str], shape: Sequence[int], dim: int) -> Heads | None:
    """The heads that a cut of ``dim`` of the parameter ``names`` (its first and tied names) would go through.

    None when the tensor is no projection of an attention module, when ``dim`` is not the one that runs over heads, or when
    the sizes do not show where heads begin.
    """
    path, attribute = index.owner(names[0])
    owner = index.modules[path]
    parent_path, _, own_name = path.rpartition(".")
    if own_name.isdecimal():  # a list of the projection and a dropout
        parent_path, _, own_name = parent_path.rpartition(".")
    parent = index.modules[index.module_names[parent_path]]
    if isinstance(owner, nn.MultiheadAttention):  # separate projections: q_proj_weight and so on
        parent, own_name = owner, attribute.removesuffix("_weight")
    names_of_number: tuple[str, ...]
    if _QUERY.fullmatch(own_name):
        names_of_number, kind, over_rows = _NUM_HEADS, "query", True
    elif _KEY_VALUE.fullmatch(own_name):
        names_of_number, kind, over_rows = (*_NUM_KEY_VALUE_HEADS, *_NUM_HEADS), "key/value", True
    elif _OUTPUT.fullmatch(own_name):
        names_of_number, kind, over_rows = _NUM_HEADS, "query", False
    else:
        return None
    if dim != _head_dim_of(owner, len(shape), over_rows):
        return None
    found = _number(parent, names_of_number)
    if found is None or not is_attention(parent):
        return None
    attribute, count = found
    if count < 1 or shape[dim] % count:
        return None
    size = shape[dim] // count
    head_dim = _number(parent, _HEAD_DIM)
    if head_dim is not None and head_dim[1] != size:  # heads of another make (latent attention, packed projections)
        return None
    return Heads(count, size, kind, attribute)


def _head_dim_of(owner: nn.Module, ndim: int, over_rows: bool) -> int | None:
    """The tensor dim that runs over heads: the output dim of q, k and v, the input dim of the output projection."""
    if ndim == 1:
        return 0 if over_rows else None  # a bias has the output dim only
    transposed = type(owner).__name__ == "Conv1D"  # transformers' Conv1D keeps (in, out)
    return 0 if over_rows != transposed else 1


def is_attention(module: nn.Module) -> bool:
    """A config is shared by the whole model, so that its numbers alone do not make a module an attention module."""
    name = type(module).__name__.lower()
    return "attention" in name or "attn" in name or any(hasattr(module, number) for number in _NUM_HEADS)


def _number(module: nn.Module, names: Sequence[str]) -> tuple[str, int] | None:
    """The first of the attributes that the module, or else its config, has as an int."""
    config: Any = getattr(module, "config", None)
    layer = getattr(module, "layer_idx", None)
    for holder in (module, config):
        for name in names:
            value = config_value(holder, name, layer)
            if isinstance(value, int) and not isinstance(value, bool):
                return name, value
    return None

"""``copy_model``: a deep copy whose functions use the modules of the copy.

``copy.deepcopy`` takes a function as it is. One that an attribute holds, such as minGPT's ``self.mlpf``, a lambda that calls
modules of its closure, would go on calling those of the original.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any, TypeVar

import torch
from torch import nn

from vescale.errors import DerivedPlanError
from vescale.plans import config_value
from vescale.rng import is_deferred

Model = TypeVar("Model", bound=nn.Module)

_OF_MODULES = ("_modules", "_parameters", "_buffers")


def copy_model(model: Model, memo: dict[int, Any] | None = None) -> Model:
    """As ``copy.deepcopy(model, memo)``. Functions in attributes of modules, in containers there and inside of each other
    see copies in their closures and defaults."""
    rebinding = _Rebinding({} if memo is None else memo)
    copied = deepcopy(model, rebinding.memo)
    for module in copied.modules():
        own = {name: value for name, value in module.__dict__.items() if name not in _OF_MODULES}
        module.__dict__.update({name: rebinding.of(value) for name, value in own.items()})
    return copied


class _Rebinding:
    """What a copy has in place of what the original has: ``memo``, as ``copy.deepcopy`` fills it, and functions."""

    def __init__(self, memo: dict[int, Any]) -> None:
        self.memo = memo
        self._functions: dict[int, types.FunctionType] = {}

    def of(self, value: Any) -> Any:
        """An attribute of the copy, with functions that see the copy."""
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType) and isinstance(value.__func__, types.FunctionType):
            return types.MethodType(self._function(value.__func__), value.__self__)
        if type(value) is functools.partial:
            keywords = {key: self.of(item) for key, item in value.keywords.items()}
            return functools.partial(self.of(value.func), *map(self.of, value.args), **keywords)
        if type(value) in (list, tuple):
            found = [self.of(each) for each in value]
            return value if all(map(_same, found, value)) else type(value)(found)
        if isinstance(value, dict):
            for key, each in list(value.items()):
                if (changed := self.of(each)) is not each:
                    value[key] = changed
        return value

    def _held(self, value: Any) -> Any:
        """What a function of the original holds: what the copy has in its place."""
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if id(value) in self.memo:
            return self.memo[id(value)]
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self._held(value.__self__))
        if type(value) is functools.partial:
            arguments = [self._held(each) for each in value.args]
            return functools.partial(self._held(value.func), *arguments, **self._held(value.keywords))
        if type(value) in (list, tuple, dict):
            values = list(value.values()) if isinstance(value, dict) else value
            found = [self._held(each) for each in values]
            if all(map(_same, found, values)):
                return value
            return dict(zip(value, found)) if isinstance(value, dict) else type(value)(found)
        return value

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        known = self._functions.get(id(function))
        if known is not None:
            return known
        cells = function.__closure__ or ()
        copy = types.FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            None,
            tuple(types.CellType() for _ in cells) if cells else None,
        )
        self._functions[id(function)] = self._functions[id(copy)] = copy  # one may hold itself
        changed = False
        for cell, own in zip(cells, copy.__closure__ or ()):
            try:
                content = cell.cell_contents
            except ValueError:  # nothing yet
                continue
            own.cell_contents = self._held(content)
            changed |= own.cell_contents is not content and own.cell_contents is not copy
        copy.__defaults__ = self._held(function.__defaults__)
        copy.__kwdefaults__ = self._held(function.__kwdefaults__)
        changed |= copy.__defaults__ is not function.__defaults__ or copy.__kwdefaults__ is not function.__kwdefaults__
        if not changed:
            self._functions[id(function)] = function
            return function
        copy.__dict__.update(function.__dict__)
        copy.__qualname__, copy.__doc__ = function.__qualname__, function.__doc__
        return copy


def _same(one: Any, other: Any) -> bool:
    return one is other


# ``skeleton_of``: a model without the memory of its parameters.


def skeleton_of(model: nn.Module) -> nn.Module:
    """A copy of the model whose parameters are on the meta device; buffers have their values, if there are any."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        tensors = {**module._parameters, **module._buffers, **module.__dict__}
        for tensor in tensors.values():
            if not isinstance(tensor, torch.Tensor) or id(tensor) in memo:
                continue
            if isinstance(tensor, nn.Parameter):
                meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
                memo[id(tensor)] = nn.Parameter(meta, requires_grad=tensor.requires_grad)
            elif is_deferred(tensor) or tensor.is_meta:
                memo[id(tensor)] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            else:
                memo[id(tensor)] = tensor.detach().clone()
    return copy_model(model, memo)


# Inputs to trace a model's forward with, guessed from its signature, its config and its first layer.


def example_inputs(model: nn.Module, batch: int = 8, length: int = 128) -> dict[str, Any]:
    """Meta tensors that the forward runs with.

    Args:
        model: a model on the meta device.
        batch: rows.
        length: tokens of a row, or the edge of an image.

    Raises:
        PlanError: none of the guesses runs.
    """
    found = hf_inputs(model, batch, length)
    if found:
        return found
    required = [
        name
        for name, p in inspect.signature(model.forward).parameters.items()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if len(required) == 1:
        for guess in _guesses(model, batch, length):
            try:
                model(guess)
            except Exception:  # the next guess
                continue
            return {required[0]: guess}
    raise DerivedPlanError(
        f"the inputs of {type(model).__name__}.forward({', '.join(required)}) cannot be guessed; pass them as inputs= "
        "(or --input x=8x16 for each)"
    )


def _guesses(model: nn.Module, batch: int, length: int) -> Iterator[torch.Tensor]:
    """By the model's first layer."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            yield torch.empty(batch, length, dtype=torch.int64, device="meta")
        elif isinstance(module, nn.Linear):
            yield torch.empty(batch, length, module.in_features, device="meta")
            yield torch.empty(batch, module.in_features, device="meta")
        elif isinstance(module, nn.Conv2d):
            yield torch.empty(batch, module.in_channels, 32, 32, device="meta")
            yield torch.empty(batch, module.in_channels, 224, 224, device="meta")
        else:
            continue
        return


def dtype_of_input(name: str) -> torch.dtype:
    """What an input of a model of transformers has, by its name: token ids, labels, masks and time steps are integers."""
    is_index = name.endswith(("ids", "labels", "mask", "timestep"))
    return torch.int64 if is_index else torch.get_default_dtype()


def hf_inputs(model: nn.Module, batch: int, length: int) -> dict[str, Any]:
    """Token ids with labels, images or sounds, for models of transformers; nothing for others."""
    names = inspect.signature(model.forward).parameters
    config: Any = getattr(model, "config", None)
    text = getattr(config, "text_config", None) or config
    most = min((n for n in (_number(text, _POSITIONS), length) if n), default=length)
    tokens = torch.empty(batch, most, dtype=torch.int64, device="meta")
    found: dict[str, Any] = {}
    if "pixel_values" in names and (
        "input_ids" not in names
        or getattr(model, "main_input_name", "pixel_values") == "pixel_values"
        or names["pixel_values"].default is inspect.Parameter.empty
    ):
        vision = getattr(config, "vision_config", None) or config
        size = getattr(vision, "image_size", None) or 224
        height, width = size if isinstance(size, tuple | list) else (size, size)
        channels = getattr(vision, "num_channels", None) or 3
        found["pixel_values"] = torch.empty(batch, channels, height, width, device="meta")
    if "input_values" in names:
        found["input_values"] = torch.empty(batch, 16 * length, device="meta")
    if "input_features" in names:
        bins = getattr(config, "num_mel_bins", None) or 80
        frames = 2 * (getattr(config, "max_source_positions", None) or length)
        found["input_features"] = torch.empty(batch, bins, frames, device="meta")
    if "input_ids" in names:
        found["input_ids"] = tokens
    if not found:
        return {}
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
        found["decoder_input_ids"] = tokens
    found |= _labels(model, names, tokens)
    if "use_cache" in names:
        found["use_cache"] = False
    return found


_POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions")
# Ends of class names -> what labels are: a class for each sequence, a token or class for each token.
_LABELS = {
    "ForSequenceClassification": "sequence",
    "ForImageClassification": "sequence",
    "ForMultipleChoice": "",
    "ForTokenClassification": "token",
    "ForCausalLM": "token",
    "LMHeadModel": "token",
    "ForMaskedLM": "token",
    "ForConditionalGeneration": "token",
}


def _labels(model: nn.Module, names: Mapping[str, Any], tokens: torch.Tensor) -> dict[str, Any]:
    kind = next((kind for end, kind in _LABELS.items() if type(model).__name__.endswith(end)), "")
    if "labels" not in names or not kind:
        return {}
    return {"labels": tokens if kind == "token" else tokens[:, 0]}


def _number(config: Any, names: tuple[str, ...]) -> int | None:
    found = (config_value(config, name) for name in names)
    return next((n for n in found if isinstance(n, int) and n > 0), None)


def random_inputs(inputs: Mapping[str, Any], model: nn.Module, seed: int) -> dict[str, Any]:
    """Random numbers in the shapes of meta tensors; whole numbers below the size of the vocabulary, labels below the number
    of classes."""
    generator = torch.Generator().manual_seed(seed)
    config: Any = getattr(model, "config", None)
    tables = (m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding))
    vocabulary = _number(getattr(config, "text_config", config), ("vocab_size",)) or min(tables, default=2)
    is_class = type(model).__name__.endswith(("Classification", "Classifier"))
    classes = (_number(config, ("num_labels",)) or 2) if is_class else vocabulary
    found = dict(inputs)
    for name, value in inputs.items():
        if not isinstance(value, torch.Tensor):
            continue
        if value.is_floating_point():
            found[name] = torch.randn(value.shape, dtype=value.dtype, generator=generator)
        else:
            most = classes if name == "labels" else vocabulary
            found[name] = torch.randint(0, most, value.shape, dtype=value.dtype, generator=generator)
    return found

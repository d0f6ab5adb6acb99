"""Names and shapes of Hugging Face's files and of a model, in both directions, by what transformers itself prescribes.

``transformers.conversion_mapping`` has, for each kind of model, regular expressions that rename and programs of shape
operations that merge, split and reorder. This module runs them on :class:`MappedTensor`, in the order in which
``from_pretrained`` and ``save_pretrained`` do. Programs that compute values are run on whole tensors, one result at a time.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn

from vescale.checkpoint._index_map import IndexMap, MappedTensor, NotAnIndexMapError
from vescale.checkpoint._model_state import modules_by_path
from vescale.errors import ContentMismatchError
from vescale.fsdp import FSDPModule

Form = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class Computed:
    """Results that a program computes from whole tensors.

    Attributes:
        sources: names of what it needs.
        results: what it makes.
        run: calls back for each source, and returns the results.
    """

    sources: tuple[str, ...]
    results: Mapping[str, Form]
    run: Callable[[Callable[[str], torch.Tensor]], dict[str, torch.Tensor]]


@dataclass
class Conversion:
    """What becomes of tensors in the other naming.

    Attributes:
        mapped: result name -> where its elements are from.
        computed: the results that no map can describe.
        unused: sources that lead to no result that is wanted.
        used: transformers' own record of the transforms that matched, which its ``save_pretrained`` reverts.
    """

    mapped: dict[str, IndexMap] = field(default_factory=dict)
    computed: list[Computed] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    used: list[Any] | None = None

    def form(self, name: str) -> Form | None:
        """Shape and dtype of a result; None for none of this name."""
        if name in self.mapped:
            return self.mapped[name].shape, self.mapped[name].dtype
        return next((found.results[name] for found in self.computed if name in found.results), None)


@dataclass
class _Group:
    """Tensors that one program takes together: ``(pattern, source)`` each, in order."""

    transform: Any
    sources: list[tuple[str, str]] = field(default_factory=list)


def is_transformers_model(model: nn.Module) -> bool:
    """Whether transformers has names of its own for the model's files."""
    try:
        from transformers import PreTrainedModel
    except ImportError:
        return False
    return isinstance(model, PreTrainedModel)


def written_class(kind: type) -> type:
    """The class that the user wrote: ``fully_shard``, ours and PyTorch's, puts one of its own in front of it."""
    sharded = (FSDPModule, torch_fsdp.FSDPModule)
    return next((base for base in kind.__mro__ if not issubclass(base, sharded)), kind)


class _AsWritten:
    """A model for transformers, which looks conversions up by the names of classes: each module with the class that the
    user wrote."""

    def __init__(self, model: Any) -> None:
        self._model, self.base_model_prefix = model, model.base_model_prefix

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        seen: set[int] = set()
        classes: dict[type, type] = {}
        for name, module in modules_by_path(self._model):
            if id(module) in seen:
                continue
            seen.add(id(module))
            kind = type(module)
            written = classes.get(kind) or classes.setdefault(kind, written_class(kind))
            if written is not kind:
                state = module.__dict__
                module = object.__new__(written)
                object.__setattr__(module, "__dict__", state)
            yield name, module


def _prescribed(model: nn.Module, *, add_legacy: bool = True) -> list[Any]:
    """The transforms of transformers for a model and its parts."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    as_written: Any = _AsWritten(model)
    return list(get_model_conversion_mapping(as_written, add_legacy=add_legacy))


def to_model(model: nn.Module, files: Mapping[str, Form], wanted: Mapping[str, Any]) -> Conversion:
    """How a model's tensors, ``wanted`` by name, come from those of files. Models of other kinds than transformers' have
    the same names in files."""
    found = Conversion()
    if not is_transformers_model(model):
        found.mapped = {name: IndexMap.of(name, *files[name]) for name in files if name in wanted}
        found.unused = [name for name in files if name not in wanted]
        return found
    from transformers import core_model_loading as loading

    transforms = _prescribed(model)
    renamings = [one for one in transforms if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, loading.WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    prefix: str = model.base_model_prefix  # type: ignore[assignment]
    present: Any = dict.fromkeys(wanted, True)
    groups: dict[str, _Group] = {}
    for name in sorted(files, key=loading.dot_natural_key):
        target, pattern = loading.rename_source_key(name, renamings, converters, prefix, present)
        if target not in present and name in present:
            target, pattern = loading.rename_source_key(name, [], [], base_model_prefix=prefix, meta_state_dict=present)
        if target not in present:
            found.unused.append(name)
        elif pattern is None:
            found.mapped[target] = IndexMap.of(name, *files[name])
        else:
            groups.setdefault(target, _Group(by_pattern[pattern])).sources.append((pattern, name))
    for target, group in groups.items():
        _convert(found, model, target, group, files, lambda name: name)
    for name in [name for name in found.mapped if name not in present]:
        del found.mapped[name]
    found.used = [one for one in transforms if one.was_used()]
    return found


def to_files(model: nn.Module, tensors: Mapping[str, Form]) -> Conversion:
    """How the tensors of files come from those of a model, as ``save_pretrained`` arranges them."""
    found = Conversion()
    transforms = _transforms_to_revert(model) if is_transformers_model(model) else []
    if not transforms:
        found.mapped = {name: IndexMap.of(name, *form) for name, form in tensors.items()}
        return found
    from transformers import core_model_loading as loading

    reverse = [one.reverse_transform() for one in transforms[::-1]]
    renamings = [one for one in reverse if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in reverse if isinstance(one, loading.WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    groups: dict[str, _Group] = {}
    for name in sorted(tensors, key=loading.dot_natural_key):
        target, pattern = loading.apply_converters(name, converters)
        if pattern is None:
            target = loading.apply_renamings(name, renamings)
            if target in found.mapped:
                raise ContentMismatchError(f"{name}: transformers gives the name {target} to two tensors of the model")
            found.mapped[target] = IndexMap.of(name, *tensors[name])
        else:
            groups.setdefault(target, _Group(by_pattern[pattern])).sources.append((pattern, name))
    for target, group in groups.items():
        _convert(found, model, target, group, tensors, lambda name: loading.apply_renamings(name, renamings))
    return found


def _transforms_to_revert(model: Any) -> list[Any]:
    """As in transformers' ``revert_weight_conversion``: those that matched at loading, else those of the model's kind."""
    from transformers import core_model_loading as loading

    used = getattr(model, "_weight_conversions", None)
    if used is not None:
        return list(used)
    return [one for one in _prescribed(model, add_legacy=False) if not isinstance(one, loading.PrefixChange)]


def _convert(
    found: Conversion,
    model: Any,
    target: str,
    group: _Group,
    forms: Mapping[str, Form],
    final_name: Callable[[str], str],
) -> None:
    """Add the results of one program."""

    def run(tensor_of: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        transform = deepcopy(group.transform)
        for pattern, name in group.sources:
            transform.add_tensor(target, name, pattern, tensor_of(name))
        made = transform.convert(target, model=model, config=model.config)
        return {final_name(name): value[0] if isinstance(value, list) else value for name, value in made.items()}

    names = tuple(name for _, name in group.sources)
    try:
        mapped: dict[str, Any] = run(lambda name: MappedTensor.of(name, *forms[name]))
        found.mapped.update({name: tensor.index_map for name, tensor in mapped.items()})
    except NotAnIndexMapError:
        shapes = _run_on_meta(run, forms, target)
        results = {name: (tuple(value.shape), value.dtype) for name, value in shapes.items()}
        found.computed.append(Computed(names, results, run))
    except Exception as error:  # programs of transformers raise many kinds where sources do not fit together
        raise ContentMismatchError(
            f"{target}: transformers' conversion of {', '.join(names[:4])}{' ...' if len(names) > 4 else ''} failed: "
            f"{error}; the tensors do not match the model's configuration"
        ) from error


def _run_on_meta(run: Callable[..., dict[str, torch.Tensor]], forms: Mapping[str, Form], target: str) -> Any:
    try:
        return run(lambda name: torch.empty(forms[name][0], dtype=forms[name][1], device="meta"))
    except Exception as error:
        raise ContentMismatchError(f"{target}: transformers' conversion failed: {error}") from error


# What a folder of Hugging Face has beside the weights: configuration, generation settings, tokenizer, custom code.

_COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "*.jinja",
    "chat_template*",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "*.py",
)


def file_base(model: nn.Module) -> str:
    """The name that the weights' files begin with."""
    return "diffusion_pytorch_model" if _is_diffusers_model(model) else "model"


def _is_diffusers_model(model: Any) -> bool:
    return not is_transformers_model(model) and callable(getattr(model, "save_config", None))


def write_beside(model: Any, folder: Path, source: Path | None, dtype: torch.dtype | None) -> None:
    """Write the model's configuration, and copy tokenizer files and code from the folder that it came from.

    Args:
        dtype: of the weights, for the configuration.
    """
    if source is not None and source.is_dir() and source.resolve() != folder.resolve():
        copy_beside(source, folder)
    if _is_diffusers_model(model):
        model.save_config(folder)
    if not is_transformers_model(model):
        return
    config = copy.deepcopy(model.config)
    if dtype is not None:
        config.dtype = dtype
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # what is written are values
    config.architectures = [written_class(type(model)).__name__]
    config.save_pretrained(folder)
    if model.can_generate() and getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)


def copy_beside(source: Path, folder: Path, *, configuration: bool = False) -> list[str]:
    """Copy tokenizer files and code, and with ``configuration`` the configuration files, too; returns their names."""
    patterns = (*_COPIED, "config.json", "generation_config.json") if configuration else _COPIED
    names = sorted({path.name for pattern in patterns for path in source.glob(pattern) if path.is_file()})
    for name in names:
        shutil.copyfile(source / name, folder / name)
    return names

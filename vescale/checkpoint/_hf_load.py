"""Fill a model from a folder of Hugging Face, by slices: each rank reads the bytes that it holds."""

from __future__ import annotations

import json
import os
import re
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.checkpoint._hf_conversion import Conversion, is_transformers_model, to_model
from vescale.checkpoint._index_map import IndexMap, Part, row_major, source_axes
from vescale.checkpoint._local_blocks import local_blocks
from vescale.checkpoint._model_state import check_model, model_tensors, replace_tensors, tied_groups
from vescale.checkpoint._reader import read_tensors, read_whole
from vescale.checkpoint._safetensors import open_safetensors
from vescale.checkpoint._step_folder import read_regular
from vescale.checkpoint._stored import Differences, Stored, StoredBox, StoredTensor, nearest
from vescale.checkpoint._stored_blocks import block_values
from vescale.compat import note_writes
from vescale.errors import ContentMismatchError
from vescale.fsdp import unfilled
from vescale.gradients import other_stages
from vescale.rng import is_deferred, materialize

# Quantized tensors of checkpoints, dequantized by slices: only the blocks of a rank's part are read.
#
# ========== ======================================= ==================================================================
# kind       in files                                values
# ========== ======================================= ==================================================================
# fp8        ``X`` (8-bit floats), ``X_scale_inv``    ``X * scale`` of its block, 128 x 128 or what the scales' shape says
# MXFP4      ``X_blocks`` (..., G, 16), ``X_scales``  4-bit floats, two a byte, times a power of two for each 32
# ========== ======================================= ==================================================================
#
# MXFP4 weights of gpt-oss have rows of outputs where transformers' parameters have columns; they are transposed.


_FP8 = {torch.float8_e4m3fn, torch.float8_e5m2}
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class Quantized:
    """A tensor in two files' tensors.

    Attributes:
        shape: of the values.
        weights, scales: names in the checkpoint.
        block: rows and columns that share a scale; None for MXFP4.
        transposed: the last two dims are exchanged in the model.
    """

    shape: tuple[int, ...]
    weights: str
    scales: str
    block: tuple[int, int] | None

    @property
    def transposed(self) -> bool:
        return self.block is None


def find_quantized(stored: Stored, block: Sequence[int] | None = None) -> dict[str, Quantized]:
    """The quantized tensors of a checkpoint, by the name of their values.

    Args:
        block: rows and columns of a block, as the configuration says; None: 128 x 128.

    Raises CheckpointError where weights and scales do not fit together.
    """
    found: dict[str, Quantized] = {}
    for name, tensor in stored.tensors.items():
        if tensor.dtype in _FP8:
            scales = next((scale for scale in _scale_names(name) if scale in stored.tensors), None)
            if scales is not None:
                grid = stored.tensors[scales].shape
                found[name] = Quantized(tensor.shape, name, scales, _block(name, tensor.shape, grid, block))
        elif name.endswith("_blocks") and tensor.dtype == torch.uint8:
            values, scales = name.removesuffix("_blocks"), name.removesuffix("_blocks") + "_scales"
            if scales not in stored.tensors:
                raise ContentMismatchError(f"{stored.folder}: {name} has no {scales} next to it")
            if tensor.shape[:-1] != stored.tensors[scales].shape or len(tensor.shape) < 3:
                raise ContentMismatchError(
                    f"{stored.folder}: {name} of shape {tensor.shape} and {scales} of shape "
                    f"{stored.tensors[scales].shape}; expected scales of shape {tensor.shape[:-1]}"
                )
            *lead, groups, width = tensor.shape
            found[values] = Quantized((*lead, groups * width * 2), name, scales, None)
    return found


def _scale_names(name: str) -> Iterator[str]:
    yield f"{name}_scale_inv"
    yield f"{name}_scale"
    if name.endswith(".weight"):
        yield name.removesuffix(".weight") + ".scale"
        yield name.removesuffix(".weight") + ".qscale_weight"


def _block(name: str, shape: tuple[int, ...], grid: tuple[int, ...], wanted: Sequence[int] | None) -> tuple[int, int]:
    rows, columns = shape[-2:] if len(shape) > 1 else (1, *shape)
    scale_rows, scale_columns = (1, 1) if not grid else ((1, 1, *grid)[-2:])
    if len(grid) > 2 and grid[:-2] != shape[:-2]:
        raise ContentMismatchError(f"{name} of shape {shape} has scales of shape {grid}")

    def size(total: int, count: int, given: int) -> int:
        if -(-total // given) == count:
            return given
        if count and total % count == 0:
            return total // count
        raise ContentMismatchError(f"{name} of shape {shape} has scales of shape {grid}; expected one for each {given}")

    sizes = wanted or (128, 128)
    return size(rows, scale_rows, sizes[0]), size(columns, scale_columns, sizes[1])


def read_block(
    stored: Stored, source: str, quantized: Mapping[str, Quantized], first: Sequence[int], sizes: Sequence[int]
) -> torch.Tensor:
    """A block of a tensor's values: float32 where it is quantized, else as stored."""
    entry = quantized.get(source)
    if entry is None:
        return block_values(stored, source, first, sizes)
    if entry.block is not None:
        return _fp8(stored, entry, tuple(first), tuple(sizes))
    return _mxfp4(stored, entry, tuple(first), tuple(sizes))


def _fp8(stored: Stored, entry: Quantized, first: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    values = block_values(stored, entry.weights, first, sizes).to(torch.float32)
    assert entry.block is not None
    grid = stored.tensors[entry.scales].shape
    dims = min(2, len(sizes))
    heights = entry.block[2 - dims :]
    low = [at // height for at, height in zip(first[-dims:], heights)]
    high = [-(-(at + n) // height) for at, n, height in zip(first[-dims:], sizes[-dims:], heights)]
    if len(grid) < dims or (len(grid) == 1 and dims == 2):  # one scale for all, or one a row
        scales = block_values(stored, entry.scales, (0,) * len(grid), grid).reshape(
            (1,) * (2 - len(grid)) + tuple(grid)
        )
        scales = _powers(scales)[low[0] : high[0], low[1] : high[1]] if dims == 2 else _powers(scales).reshape(-1)
    else:
        lead = len(grid) - dims
        counts = [b - a for a, b in zip(low, high)]
        begins = (*first[:lead], *low) if lead else tuple(low)
        scales = _powers(block_values(stored, entry.scales, begins, (*sizes[:lead], *counts)))
    for dim, (at, begin, height, n) in enumerate(zip(first[-dims:], low, heights, sizes[-dims:])):
        axis = dim - dims
        if scales.shape[axis] * height >= n:
            wide = scales.repeat_interleave(height, axis)
            scales = wide.narrow(axis, at - begin * height, n)
    return values.mul_(scales)


def _powers(scales: torch.Tensor) -> torch.Tensor:
    """float32; bytes are exponents of two, as in E8M0."""
    if scales.dtype == torch.uint8:
        return torch.exp2(scales.to(torch.float32) - 127)
    return scales.to(torch.float32)


def _mxfp4(stored: Stored, entry: Quantized, first: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    width = stored.tensors[entry.weights].shape[-1]
    low, high = first[-1] // (2 * width), -(-(first[-1] + sizes[-1]) // (2 * width))
    begins, counts = (*first[:-1], low), (*sizes[:-1], high - low)
    packed = block_values(stored, entry.weights, (*begins, 0), (*counts, width))
    exponents = block_values(stored, entry.scales, begins, counts).to(torch.int32) - 127
    table = torch.tensor(_FP4, dtype=torch.float32, device="cpu")
    values = torch.empty(*counts, 2 * width, dtype=torch.float32, device="cpu")
    values[..., 0::2] = table[(packed & 15).int()]
    values[..., 1::2] = table[(packed >> 4).int()]
    values = torch.ldexp(values, exponents.unsqueeze(-1)).flatten(-2)
    return values.narrow(-1, first[-1] - low * 2 * width, sizes[-1])


# A model that PEFT has adapted, as its files know it: without PEFT's classes and without the adapters.


def base_of(model: nn.Module) -> nn.Module:
    """The model inside of PEFT's, or ``model`` itself."""
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        return model.get_base_model()  # type: ignore[operator]
    return model


def base_tensors(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of the model that was adapted, by the names that they had: ``q_proj.weight`` for
    ``q_proj.base_layer.weight``. Those of adapters are left out.

    Raises CheckpointError for modules that PEFT trains as copies (``modules_to_save``): the copies were made of what the
    model held before.
    """
    if "peft" not in sys.modules:
        return dict(tensors)
    modules = dict(model.named_modules(remove_duplicate=False))
    if not any(_is_adapted(module) for module in modules.values()):
        return dict(tensors)
    found = {}
    for name, tensor in tensors.items():
        parts, plain = name.split("."), []
        for position, part in enumerate(parts):
            around = modules.get(".".join(parts[:position]))
            if around is None or not _is_adapted(around):
                plain.append(part)
            elif part == "modules_to_save":
                raise ContentMismatchError(
                    f"{name} is PEFT's copy of a module, which it trains instead (modules_to_save): load the weights "
                    "before get_peft_model is called, or leave modules_to_save out"
                )
            elif part not in ("base_layer", "original_module"):
                break  # an adapter's
        else:
            found[".".join(plain)] = tensor
    return found


def _is_adapted(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == "peft"


# Memory for models that have none yet, and values for what a checkpoint does not hold.


def give_memory(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None
) -> dict[int, torch.Tensor]:
    """Replace deferred and meta tensors of a model by empty ones, under all of their names; by id of what they replace.

    Deferred tensors come to the device that the constructor chose, meta tensors to that of the model's meshes, or, where it
    has none, to the current default device.
    """
    made: dict[int, torch.Tensor] = {}
    default = _device_of(tensors.values())
    for tensor in tensors.values():
        if isinstance(tensor, DTensor) or (not tensor.is_meta and not is_deferred(tensor)):
            continue
        device = tensor.device if is_deferred(tensor) and tensor.device.type != "meta" else default
        kept = tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype
        values = torch.empty(tensor.shape, dtype=kept, device=device)
        if isinstance(tensor, nn.Parameter):
            values = nn.Parameter(values, tensor.requires_grad)
        values.__dict__.update({key: value for key, value in tensor.__dict__.items() if key != "_is_param"})
        made[id(tensor)] = values
    if made:
        replace_tensors(model, made)
    return made


def give_parts_memory(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Give this rank's parts of DTensors on the meta device memory on the devices of their meshes; whether there are any."""
    if not any(isinstance(tensor, DTensor) and tensor.is_meta for tensor in tensors.values()):
        return False

    def given(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, DTensor) or not tensor.is_meta:
            return tensor
        return torch.empty_like(tensor, device=tensor.device_mesh.device_type)

    model._apply(given)
    return True


def _device_of(tensors: Iterable[torch.Tensor]) -> torch.device:
    meshes = (torch.device(tensor.device_mesh.device_type) for tensor in tensors if isinstance(tensor, DTensor))
    return next(meshes, torch.get_default_device())


def fill_the_rest(model: nn.Module, *, is_new: bool) -> None:
    """Give values to what is still deferred (as the constructor would), and to what is on the meta device, or got memory and
    no values (as transformers would).

    ``is_new``: memory was given to a part of the model, so that attributes may be deferred, too.

    Raises CheckpointError for other models with tensors without values that no file holds.
    """
    names = dict(unfilled(model))
    if not names and not is_new and not _has_tensors_without_values(model):
        return
    materialize(model)
    rest = {
        name: tensor
        for named in (model.named_parameters(), model.named_buffers())
        for name, tensor in named
        if tensor.is_meta and not isinstance(tensor, DTensor)
    }
    if not rest and not names:
        return
    if not is_transformers_model(model):
        raise ContentMismatchError(
            f"{', '.join([*rest, *names][:5])}: they had no values before and are not in the checkpoint, so that "
            "their values are unknown; build the model under vescale.deferred_init(), which records what the "
            "constructor computes"
        )
    device = _device_of(model.parameters())
    made: dict[int, torch.Tensor] = {}
    for tensor in rest.values():
        empty = torch.empty_like(tensor, device=device)
        made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    replace_tensors(model, made)
    made |= {id(tensor): tensor for tensor in names.values()}
    fresh = {id(tensor) for tensor in made.values()}
    marked = [t for named in (model.parameters(), model.buffers()) for t in named if id(t) not in fresh]
    for tensor in marked:
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    try:
        model.initialize_weights()  # type: ignore[operator]
    finally:
        for tensor in marked:
            del tensor._is_hf_initialized  # type: ignore[attr-defined]
        for module in model.modules():
            module.__dict__.pop("_is_hf_initialized", None)


def _has_tensors_without_values(model: nn.Module) -> bool:
    modules: list[nn.Module | None] = [model]
    while modules:
        module = modules.pop()
        if module is None:
            continue
        modules += module._modules.values()
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and not isinstance(tensor, DTensor) and (tensor.is_meta or is_deferred(tensor)):
                return True
    return False


_MAX_ELEMENTS = 4 << 20  # of a block that is dequantized at once: 16 MiB of float32


@dataclass(frozen=True)
class Origin:
    """What a model was loaded from: :func:`export_hf` takes dtypes and files beside the weights from there.

    Attributes:
        dtypes: of a tensor in the folder's files, by the model's name of it; without quantized ones.
    """

    folder: Path
    dtypes: Mapping[str, torch.dtype]


_ORIGINS: weakref.WeakKeyDictionary[nn.Module, Origin] = weakref.WeakKeyDictionary()


def origin_of(model: nn.Module) -> Origin | None:
    return _ORIGINS.get(model)


def load_hf(
    model: nn.Module, folder: str | os.PathLike[str], *, dtype: torch.dtype | None = None, strict: bool = True
) -> Differences:
    """Fill a model from safetensors files with Hugging Face's names, and return what did not fit.

    The model may be parallelized, sharded by ``fully_shard``, built under ``deferred_init()`` or on the meta device, or an
    ordinary one. PEFT may have added adapters: they keep their values. Names and layouts of files become the model's as
    ``from_pretrained`` does it: renamed and merged experts, fused and split projections, tied weights; fp8 (128 x 128
    blocks) and MXFP4 weights are dequantized.

    Every rank reads the slices that it holds; ranks that hold the same share the reading (not of quantized tensors). Extra
    memory is at most 64 MiB, or one whole tensor for conversions that compute values. Called by every rank of the job if
    the model has DTensors; otherwise nothing is communicated.

    Args:
        folder: with ``model.safetensors`` or ``model.safetensors.index.json``; or one file.
        dtype: of parameters that are not allocated yet (deferred, meta). None: the model's dtypes. Values are cast to
            the dtype of the tensor that they fill.
        strict: raise where names or shapes differ. False: load what fits, and leave the rest as the constructor made it.

    Raises:
        CheckpointError: missing, surplus and misshapen tensors, with the nearest names; damaged files; a ``dtype`` that
            contradicts tensors that have memory. Before the model is changed.
    """
    check_model(model)
    model = base_of(model)
    stored = open_safetensors(Path(folder))
    config = _config(stored.folder)
    quantized = find_quantized(stored, _block_of(config))
    files = _forms(stored, quantized)
    wanted = base_tensors(model, model_tensors(model))
    groups = tied_groups(wanted)
    conversion = to_model(model, files, wanted)
    _transpose(conversion, quantized)
    chosen = _choose(model, conversion, groups, wanted)
    found = _differences(model, conversion, groups, wanted, chosen)
    if strict:
        found.refuse(str(stored.folder))
    _check_dtype(wanted, dtype)
    sources = {name: source for name, source in chosen.items() if name not in found.misshapen}
    if give_parts_memory(model, wanted):
        wanted = base_tensors(model, model_tensors(model))
    made = give_memory(model, {name: wanted[name] for name in sources}, dtype)
    targets = {name: made.get(id(wanted[name]), wanted[name]) for name in sources}
    _fill(stored, quantized, conversion, targets, sources)
    fill_the_rest(model, is_new=bool(made))
    if is_transformers_model(model):
        model._weight_conversions = conversion.used  # type: ignore[assignment]
    dtypes = {name: _stored_dtype(conversion, stored, source) for name, source in sources.items()}
    _ORIGINS[model] = Origin(stored.folder, {name: found for name, found in dtypes.items() if found is not None})
    return found


def _config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_regular(folder / "config.json"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ContentMismatchError(f"{folder / 'config.json'} cannot be read as JSON: {error}") from None
    return found if isinstance(found, dict) else {}


def _block_of(config: Mapping[str, Any]) -> Sequence[int] | None:
    settings = config.get("quantization_config") or {}
    block = settings.get("weight_block_size") if isinstance(settings, dict) else None
    sound = isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    return block if sound else None


def _forms(stored: Stored, quantized: Mapping[str, Quantized]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """What files hold once quantized tensors are values."""
    hidden = {name for entry in quantized.values() for name in (entry.weights, entry.scales)}
    forms = {name: (tensor.shape, tensor.dtype) for name, tensor in stored.tensors.items() if name not in hidden}
    forms |= {name: (entry.shape, torch.float32) for name, entry in quantized.items()}
    if quantized:  # scales of activations are of no use to a model in another precision
        forms = {name: form for name, form in forms.items() if not name.endswith((".activation_scale", ".input_scale"))}
    return forms


def _transpose(conversion: Conversion, quantized: Mapping[str, Quantized]) -> None:
    turned = {name for name, entry in quantized.items() if entry.transposed}
    for name, mapped in conversion.mapped.items() if turned else ():
        if any(part.source in turned for part in mapped.parts):
            conversion.mapped[name] = mapped.swap_last_dims()


def _choose(
    model: nn.Module, conversion: Conversion, groups: Sequence[Sequence[str]], wanted: Mapping[str, torch.Tensor]
) -> dict[str, str]:
    """For each tensor of the model, under its first name, the name of the conversion that fills it."""
    declared = getattr(model, "all_tied_weights_keys", None) or {}
    chosen = {}
    for names in groups:
        fitting = [name for name in names if (form := conversion.form(name)) and form[0] == tuple(wanted[name].shape)]
        there = fitting or [name for name in names if conversion.form(name) is not None]
        if not there:  # tied by the configuration, but not in memory
            there = [declared[name] for name in names if name in declared and conversion.form(declared[name])]
        if there:
            chosen[names[0]] = there[0]
    return chosen


def _differences(
    model: nn.Module,
    conversion: Conversion,
    groups: Sequence[Sequence[str]],
    wanted: Mapping[str, torch.Tensor],
    chosen: Mapping[str, str],
) -> Differences:
    missing_is_fine = _patterns(model, "_keys_to_ignore_on_load_missing")
    surplus_is_fine = [*_patterns(model, "_keys_to_ignore_on_load_unexpected"), re.compile(r"rotary_emb\.inv_freq$")]
    surplus_is_fine.append(re.compile(r"(^|\.)position_ids$"))
    found = Differences()
    for names in groups:
        if names[0] not in chosen and not any(p.search(name) for p in missing_is_fine for name in names):
            found.missing[names[0]] = nearest(names[0], conversion.unused)
        elif names[0] in chosen:
            form = conversion.form(chosen[names[0]])
            shape = tuple(wanted[names[0]].shape)
            if form is not None and form[0] != shape:
                found.misshapen[names[0]] = (f"shape {form[0]}", f"shape {shape}")
    others = other_stages(model)
    for name in conversion.unused:
        if not others.have(name) and not any(pattern.search(name) for pattern in surplus_is_fine):
            found.surplus[name] = nearest(name, list(wanted)) if len(found.surplus) < 8 else []
    return found


def _patterns(model: nn.Module, attribute: str) -> list[re.Pattern[str]]:
    given = getattr(model, attribute, None) or ()
    return [re.compile(pattern) for pattern in given]


def _check_dtype(wanted: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> None:
    if dtype is None:
        return
    for name, tensor in wanted.items():
        fixed = isinstance(tensor, DTensor) or not (tensor.is_meta or type(tensor).__name__ == "DeferredTensor")
        if fixed and tensor.is_floating_point() and tensor.dtype != dtype:
            raise ContentMismatchError(
                f"{name} is allocated in {tensor.dtype}, but dtype={dtype} was requested; build the model in that "
                "dtype, or leave dtype out: values are cast to the model's dtypes"
            )


def _stored_dtype(conversion: Conversion, stored: Stored, name: str) -> torch.dtype | None:
    """The dtype in files; None for quantized and computed tensors."""
    mapped = conversion.mapped.get(name)
    found = (
        {stored.tensors[part.source].dtype for part in mapped.parts if part.source in stored.tensors}
        if mapped is not None
        else set()
    )
    usual = {dtype for dtype in found if dtype.itemsize > 1 or not dtype.is_floating_point}
    return usual.pop() if len(usual) == 1 and usual == found else None


def _fill(
    stored: Stored,
    quantized: Mapping[str, Quantized],
    conversion: Conversion,
    targets: Mapping[str, torch.Tensor],
    sources: Mapping[str, str],
) -> None:
    tensors: dict[str, StoredTensor] = {}
    sliced: dict[str, IndexMap] = {}
    for name, source in sources.items():
        mapped = conversion.mapped.get(source)
        if mapped is None:
            continue
        if any(part.source in quantized for part in mapped.parts):
            sliced[name] = mapped
        else:
            tensors[name] = _mapped(stored, mapped)
    share = any(isinstance(tensor, DTensor) for tensor in targets.values())
    plain = {name: targets[name] for name in tensors}
    read_tensors(Stored(stored.folder, tensors, "safetensors"), plain, cast=True, share=share)
    for name, mapped in sliced.items():
        _fill_sliced(stored, quantized, name, targets[name], mapped)
    for computed in conversion.computed:
        _fill_computed(stored, quantized, computed, targets, sources)


def _mapped(stored: Stored, mapped: IndexMap) -> StoredTensor:
    part = mapped.parts[0] if len(mapped.parts) == 1 else None
    if part is not None and part.start == 0 and part.strides == row_major(part.sizes):
        source = stored.tensors[part.source]
        if source.shape == part.sizes == mapped.shape and source.dtype == mapped.dtype:
            return source  # as it is
    return StoredTensor(mapped.shape, mapped.dtype, tuple(_box(stored, part) for part in mapped.parts))


def _box(stored: Stored, part: Part) -> StoredBox:
    (box,) = stored.tensors[part.source].boxes
    start = box.start + part.start * stored.tensors[part.source].dtype.itemsize
    strides = None if part.strides == row_major(part.sizes) else part.strides
    return StoredBox(part.offset, part.sizes, box.file, start, strides)


@torch.no_grad()
def _fill_sliced(
    stored: Stored, quantized: Mapping[str, Quantized], name: str, target: torch.Tensor, mapped: IndexMap
) -> None:
    blocks = local_blocks(name, target)
    for box in blocks.boxes:
        view = blocks.view(box)
        for part in mapped.parts:
            low = [max(a, b) for a, b in zip(box.offset, part.offset)]
            high = [min(a + n, b + m) for a, n, b, m in zip(box.offset, box.sizes, part.offset, part.sizes)]
            if all(a < b for a, b in zip(low, high)):
                inner = tuple(slice(a - at, b - at) for a, b, at in zip(low, high, box.offset))
                first = [a - at for a, at in zip(low, part.offset)]
                _fill_part(stored, quantized, view[inner], part, first)
    note_writes([blocks.tensor])
    if blocks.local is not None and not blocks.local.is_inference():
        torch.autograd.graph.increment_version(blocks.local)


def _fill_part(
    stored: Stored, quantized: Mapping[str, Quantized], view: torch.Tensor, part: Part, first: Sequence[int]
) -> None:
    """Write elements ``[first, first + view.shape)`` of a part to a view."""
    entry = quantized.get(part.source)
    shape = entry.shape if entry is not None else stored.tensors[part.source].shape
    place = source_axes(part, shape)
    if place is None:
        raise ContentMismatchError(
            f"{part.source}: a quantized tensor whose dims the model merges cannot be read in slices"
        )
    origin, axes = place
    for begin, sizes in _blocks_of(tuple(view.shape), [dim for dim, _ in axes]):
        at, count = list(origin), [1] * len(shape)
        picked = [slice(None)] * len(shape)
        for (dim, step), here, n in zip(axes, (a + b for a, b in zip(first, begin)), sizes):
            if dim >= 0:
                at[dim] += here * step
                count[dim] = (n - 1) * step + 1
                picked[dim] = slice(None, None, step)
        values = read_block(stored, part.source, quantized, at, count)[tuple(picked)]
        used = [dim for dim, _ in axes if dim >= 0]
        values = values.permute(used + [dim for dim in range(len(shape)) if dim not in used]).reshape(sizes)
        view[tuple(slice(a, a + n) for a, n in zip(begin, sizes))].copy_(values)


def _blocks_of(shape: tuple[int, ...], order: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Blocks of at most ``_MAX_ELEMENTS``; cut along the dims that are outermost in the source."""
    pending = [((0,) * len(shape), shape)]
    while pending:
        begin, sizes = pending.pop()
        numel = 1
        for n in sizes:
            numel *= n
        if numel <= _MAX_ELEMENTS:
            yield begin, sizes
            continue
        dim = min((d for d in range(len(sizes)) if sizes[d] > 1), key=lambda d: order[d])
        half = sizes[dim] // 2
        if half > 128:
            half -= half % 128  # a block that shares a scale is read once
        pending.append((_with(begin, dim, begin[dim] + half), _with(sizes, dim, sizes[dim] - half)))
        pending.append((begin, _with(sizes, dim, half)))


def _with(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


@torch.no_grad()
def _fill_computed(
    stored: Stored,
    quantized: Mapping[str, Quantized],
    computed: Any,
    targets: Mapping[str, torch.Tensor],
    sources: Mapping[str, str],
) -> None:
    """Run a program on whole tensors, and keep this rank's part of the results."""

    def whole(name: str) -> torch.Tensor:
        entry = quantized.get(name)
        if entry is None:
            return read_whole(stored, [name])[name]
        return read_block(stored, name, quantized, (0,) * len(entry.shape), entry.shape)

    wanted = {name: source for name, source in sources.items() if source in computed.results}
    if not wanted:
        return
    made = computed.run(whole)
    for name, source in wanted.items():
        blocks = local_blocks(name, targets[name])
        for box in blocks.boxes:
            block = tuple(slice(at, at + n) for at, n in zip(box.offset, box.sizes))
            blocks.view(box).copy_(made[source][block])
        note_writes([blocks.tensor])

"""A checkpoint of a model as Hugging Face has it, without the model's memory: streamed, in one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from vescale.checkpoint._hf_conversion import file_base, to_files
from vescale.checkpoint._hf_export import Export, once
from vescale.checkpoint._model_state import model_tensors
from vescale.checkpoint._names import compare
from vescale.checkpoint._reader import read_whole
from vescale.checkpoint._safetensors import plan_files, write_block
from vescale.checkpoint._stored import Stored
from vescale.checkpoint._stored_blocks import blocks_of
from vescale.errors import HfExportError

_PREFIXES = ("model.", "", "module.", "state_dict.", "app.model.")


def export_stored(
    stored: Stored,
    model: nn.Module,
    folder: Path,
    max_shard_size: int | str,
    beside: Path | None,
    progress: Callable[[int], None] = lambda count: None,
) -> int:
    """Write the tensors of a model from a checkpoint of any format that has the model's own names, perhaps behind
    ``model.``, ``module.`` or the like; returns the bytes written. dtypes are those of the checkpoint. Memory: 64 MiB, or
    one whole tensor where transformers' conversion computes values.

    Args:
        model: on the meta device; only names, shapes and configuration are used.
        beside: the folder that tokenizer files are copied from.

    Raises CheckpointError for tensors that the checkpoint does not have, or in other shapes.
    """
    wanted = once(model, model_tensors(model))
    prefix = max(_PREFIXES, key=lambda prefix: sum(f"{prefix}{name}" in stored.tensors for name in wanted))
    names = {name: f"{prefix}{name}" for name in wanted}
    compare(stored.tensors, {names[name]: tensor for name, tensor in wanted.items()}, cast=True).refuse(
        str(stored.folder)
    )
    tensors = {
        name: torch.empty(tensor.shape, dtype=stored.tensors[names[name]].dtype, device="meta")
        for name, tensor in wanted.items()
    }
    forms = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    conversion = to_files(model, forms)
    results = {name: (mapped.shape, mapped.dtype) for name, mapped in conversion.mapped.items()}
    for computed in conversion.computed:
        results |= computed.results
    files = plan_files(results, max_shard_size, file_base(model))
    work = Export(folder, files, tensors, conversion)
    written = 0
    opened: dict[str, int] = {}
    try:
        with work.discarded_on_failure():
            work.create()
            for name in work.targets:
                for offset, values in blocks_of(stored, names[name]):
                    count = work.write_part(opened, name, offset, values)
                    progress(count)
                    written += count
            for item in work.planned_whole():
                made = item.run(lambda name: read_whole(stored, [names[name]])[names[name]])
                for file in files:
                    for name in file.tensors.keys() & item.results.keys():
                        descriptor = work.descriptor(opened, file)
                        written += write_block(descriptor, file.tensors[name], (0,) * made[name].ndim, made[name])
            for descriptor in opened.values():
                os.fsync(descriptor)
            work.finish(model, beside)
    except OSError as error:
        raise HfExportError(f"{folder}: {error}") from error
    finally:
        for descriptor in opened.values():
            os.close(descriptor)
    return written

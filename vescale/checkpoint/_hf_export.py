"""Write a model as Hugging Face has it: every rank writes the elements that it holds to their places in shared files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.agreement import Round
from vescale.checkpoint._hf_conversion import Computed, Conversion, Form, file_base, to_files, write_beside
from vescale.checkpoint._hf_load import origin_of
from vescale.checkpoint._index_map import IndexMap, Part, source_axes
from vescale.checkpoint._local_blocks import LocalBlocks, local_blocks
from vescale.checkpoint._model_state import check_model, model_tensors, tied_groups
from vescale.checkpoint._reader import read_whole
from vescale.checkpoint._replicas import assign, has_other_ranks, repeated_position
from vescale.checkpoint._safetensors import FileLayout, create_file, index_of, plan_files, write_block
from vescale.checkpoint._stored import Stored, compare
from vescale.checkpoint._stored_blocks import blocks_of
from vescale.errors import ArgumentError, CheckpointError, HfExportError

_SMALL = 4 << 10  # bytes; smaller parts are written by one of the ranks that hold them


def export_hf(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    source: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
) -> list[int]:
    """Write a model to a folder that ``from_pretrained`` loads; returns how many bytes each rank has written.

    Names, shapes and experts are those of the files that transformers writes; tied weights are written once. Elements are
    not communicated: every rank writes the slices that it holds, ranks that hold the same divide them, and several ranks
    write to one file. (Where transformers' conversion computes values, whole tensors are gathered, one at a time.)

    The files are complete, with their last names, only when the function returns; the index is written last. Other
    safetensors files of a model that was in the folder are then removed. Called by every rank of the job.

    Args:
        max_shard_size: of a file, ``"5GB"`` or bytes.
        source: the folder whose tokenizer files are copied. None: the one that :func:`load_hf` read, if it did.
        dtype: of floating-point tensors in the files. None: the one they had in the files that :func:`load_hf` read, else
            the model's.
        model: a model of transformers, parallelized or not.
        folder: where the files go; it is made if it is missing.

    Raises:
        CheckpointError: on every rank, if one of them cannot write; tensors that safetensors files cannot hold.
    """
    check_model(model)
    place = Path(folder)
    if source is not None and not Path(source).is_dir():
        raise ArgumentError(f"source is {os.fspath(source)!r}; expected the folder whose tokenizer files are copied")
    tensors = once(model, model_tensors(model))
    forms: dict[str, Form] = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    conversion = to_files(model, forms)
    files = plan_files(_file_forms(model, conversion, forms, dtype), max_shard_size, file_base(model))
    work = Export(place, files, tensors, conversion)
    consensus = Round(range(dist.get_world_size()), "checkpoint export") if has_other_ranks() else None
    first = consensus is None or dist.get_rank() == 0
    with work.discarded_on_failure() if first else contextlib.nullcontext():
        _together(consensus, "preparation of the exported files", work.create if first else _nothing)
        whole = work.planned_whole()
        written = _together(consensus, "write an export", work.write)
        for number, item in enumerate(whole):
            written = [a + b for a, b in zip(written, _write_whole(work, item, number, consensus))]
        origin = origin_of(model)
        given = Path(source) if source is not None else origin.folder if origin is not None else None
        _together(consensus, "finish an export", (lambda: work.finish(model, given)) if first else _nothing)
    return written


def _nothing() -> int:
    return 0


def _together(consensus: Round | None, about: str, run: Callable[[], int]) -> list[int]:
    """Run something on every rank; every rank gets what all of them returned, or the error that one has met."""

    def outcome() -> bytes:
        try:
            return f"{run()} ".encode()
        except (OSError, CheckpointError, ValueError) as error:
            failure = f"{type(error).__name__}: {error}" if not isinstance(error, CheckpointError) else str(error)
            if consensus is None:
                raise error if isinstance(error, CheckpointError) else HfExportError(failure) from error
            return f"0 {failure}".encode()

    if consensus is None:
        messages = [outcome()]
    else:
        messages = consensus.exchange(outcome, lambda: f"ranks {about}; all of them must call this")
    found = [message.decode().split(" ", 1) for message in messages]
    for rank, (_, text) in enumerate(found):
        if text:
            raise HfExportError(f"rank {rank}: {text}")
    return [int(number) for number, _ in found]


def once(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each tensor under the name that ``save_pretrained`` keeps, if it is tied."""
    derived = getattr(model, "all_tied_weights_keys", None) or {}
    left_out = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    kept = {}
    for names in tied_groups(tensors):
        names = [name for name in names if name not in left_out]
        own = [name for name in names if name not in derived] or names
        kept.update({name: tensors[name] for name in own[:1]})
    return {name: tensor for name, tensor in tensors.items() if name in kept}


def _file_forms(
    model: nn.Module, conversion: Conversion, forms: Mapping[str, Form], dtype: torch.dtype | None
) -> dict[str, Form]:
    origin = origin_of(model)
    known = {} if origin is None else dict(origin.dtypes)
    if known:
        for names in tied_groups(model_tensors(model)):
            known.update({name: known[names[0]] for name in names if names[0] in known})

    def chosen(found: torch.dtype, sources: set[str]) -> torch.dtype:
        before = {known.get(name, found) for name in sources}
        usual = before.pop() if len(before) == 1 else found
        wanted = dtype or usual
        return wanted if found.is_floating_point and wanted.is_floating_point else found

    result = {
        name: (mapped.shape, chosen(mapped.dtype, {part.source for part in mapped.parts}))
        for name, mapped in conversion.mapped.items()
    }
    for computed in conversion.computed:
        for name, (shape, found) in computed.results.items():
            result[name] = (shape, chosen(found, set(computed.sources)))
    return dict(sorted(result.items(), key=lambda item: _natural(item[0])))


def _natural(name: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in name.split(".")]


@dataclass
class Export:
    """The files while they are written.

    Attributes:
        targets: for each tensor of the model, the parts of files that are its elements: (file, name there, part).
        skipped: names in files whose parts cannot be cut by slices.
    """

    folder: Path
    files: Sequence[FileLayout]
    tensors: Mapping[str, torch.Tensor]
    conversion: Conversion
    targets: dict[str, list[tuple[FileLayout, str, Part]]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        where = {name: file for file in self.files for name in file.tensors}
        for name, mapped in self.conversion.mapped.items():
            shapes = {part.source: tuple(self.tensors[part.source].shape) for part in mapped.parts}
            if any(source_axes(part, shapes[part.source]) is None for part in mapped.parts):
                self.skipped.append(name)
                continue
            for part in mapped.parts:
                self.targets.setdefault(part.source, []).append((where[name], name, part))

    def path(self, file: FileLayout) -> Path:
        return self.folder / f"{file.name}.part"

    @contextlib.contextmanager
    def discarded_on_failure(self) -> Iterator[None]:
        """Remove the unfinished files if the block raises, and the folder if it was made for them. For one process, of an
        export by several the first."""
        is_new = not os.path.lexists(self.folder)
        try:
            yield
        except BaseException:
            with contextlib.suppress(OSError):
                for path in [*map(self.path, self.files), *self.folder.glob("*.safetensors.index.json.part")]:
                    path.unlink(missing_ok=True)
                if is_new:
                    self.folder.rmdir()  # fails if something is in it
            raise

    def create(self) -> int:
        self.folder.mkdir(parents=True, exist_ok=True)
        for file in self.files:
            create_file(self.path(file), file)
        return 0

    def planned_whole(self) -> list[Computed]:
        """What is written from gathered tensors, in an order that all ranks share."""
        made = [*self.conversion.computed]
        for name in self.skipped:
            mapped = self.conversion.mapped[name]
            sources = tuple(sorted({part.source for part in mapped.parts}))
            made.append(Computed(sources, {name: (mapped.shape, mapped.dtype)}, _copier(name, mapped)))
        return made

    def write(self) -> int:
        """What this rank holds, and among ranks that hold the same is to write."""
        blocks = {name: local_blocks(name, self.tensors[name]) for name in self.targets}
        owners = _owners(blocks)
        written = 0
        opened: dict[str, int] = {}
        try:
            for name, entry in blocks.items():
                for offset, view in _own_parts(entry, owners.get(name)):
                    written += self.write_part(opened, name, offset, view)
            for descriptor in opened.values():
                os.fsync(descriptor)
        finally:
            for descriptor in opened.values():
                os.close(descriptor)
        return written

    def write_part(self, opened: dict[str, int], name: str, offset: Sequence[int], view: torch.Tensor) -> int:
        """A block of a tensor of the model, to all places of files that it belongs to."""
        written = 0
        shape = tuple(self.tensors[name].shape)
        for file, target, part in self.targets[name]:
            found = _meet(part, shape, offset, view)
            if found is None:
                continue
            written += write_block(self.descriptor(opened, file), file.tensors[target], *found)
        return written

    def descriptor(self, opened: dict[str, int], file: FileLayout) -> int:
        """The open file; the caller closes all of ``opened``."""
        if file.name not in opened:
            opened[file.name] = os.open(self.path(file), os.O_WRONLY)
        return opened[file.name]

    def finish(self, model: nn.Module, source: Path | None) -> int:
        base = file_base(model)
        before = {path.name for path in self.folder.glob(f"{base}*.safetensors")}
        for file in self.files:
            os.replace(self.path(file), self.folder / file.name)
        index = self.folder / f"{base}.safetensors.index.json"
        if len(self.files) > 1:
            partial = index.with_name(index.name + ".part")
            partial.write_text(index_of(self.files), encoding="utf-8")
            os.replace(partial, index)
        else:
            index.unlink(missing_ok=True)
        left = {path.name for path in self.folder.glob(f"{base}*.safetensors.part")}  # of an export that was killed
        for name in (before | left) - {file.name for file in self.files}:
            (self.folder / name).unlink(missing_ok=True)
        used = next(
            (dtype for file in self.files for dtype, _, _ in file.tensors.values() if dtype.is_floating_point), None
        )
        write_beside(model, self.folder, source, used)
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return 0


def _copier(name: str, mapped: IndexMap) -> Callable[[Callable[[str], torch.Tensor]], dict[str, torch.Tensor]]:
    def run(tensor_of: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        made = torch.empty(mapped.shape, dtype=mapped.dtype, device="cpu")
        for part in mapped.parts:
            block = tuple(slice(at, at + size) for at, size in zip(part.offset, part.sizes))
            made[block] = tensor_of(part.source).as_strided(part.sizes, part.strides, part.start)
        return {name: made}

    return run


def _owners(blocks: Mapping[str, LocalBlocks]) -> dict[str, bool]:
    """Of small parts, whether this rank writes them; larger ones are cut among the ranks that hold them."""
    small: dict[tuple[object, tuple[int, ...]], list[str]] = {}
    for name, entry in blocks.items():
        if entry.nbytes < _SMALL and entry.local is not None:
            small.setdefault((entry.mesh, entry.repeated), []).append(name)
    found: dict[str, bool] = {}
    for names in small.values():
        number, count = _replica(blocks[names[0]])
        owners = assign(((name, blocks[name].nbytes) for name in names), count)
        found |= {name: owners[name] == number for name in names}
    return found


def _replica(entry: LocalBlocks) -> tuple[int, int]:
    if entry.mesh is not None:
        return repeated_position(entry.mesh, entry.repeated)
    return (dist.get_rank(), dist.get_world_size()) if has_other_ranks() else (0, 1)


def _own_parts(entry: LocalBlocks, small: bool | None) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """(offset in the tensor, values) of what this rank writes."""
    if small is False or entry.local is None:
        return []
    number, count = _replica(entry) if small is None else (0, 1)
    found = []
    for box in entry.boxes:
        view = entry.view(box)
        dim = next((dim for dim, size in enumerate(box.sizes) if size >= count), None)
        if count > 1 and dim is None:
            if number == 0:
                found.append((box.offset, view))
            continue
        low, high = (0, view.shape[dim]) if dim is not None else (0, 0)
        if count > 1 and dim is not None:
            low, high = box.sizes[dim] * number // count, box.sizes[dim] * (number + 1) // count
            view = view.narrow(dim, low, high - low)
        offset = box.offset if dim is None else (*box.offset[:dim], box.offset[dim] + low, *box.offset[dim + 1 :])
        found.append((offset, view))
    return found


def _meet(
    part: Part, shape: tuple[int, ...], offset: Sequence[int], view: torch.Tensor
) -> tuple[tuple[int, ...], torch.Tensor] | None:
    """The elements of a part of a file among those of a block of its source: (offset in the file's tensor, values)."""
    place = source_axes(part, shape)
    assert place is not None
    origin, axes = place
    picked: list[slice] = [slice(at - low, at - low + 1) for at, low in zip(origin, offset)]
    begin = list(part.offset)
    sizes = list(part.sizes)
    mapped = {dim for dim, _ in axes}
    for dim, (at, low) in enumerate(zip(origin, offset)):
        if dim not in mapped and not low <= at < low + view.shape[dim]:
            return None
    for own, (dim, step) in enumerate(axes):
        if dim < 0:
            continue
        low, high = offset[dim], offset[dim] + view.shape[dim]
        first = max(0, -(-(low - origin[dim]) // step))
        stop = min(part.sizes[own], -(-(high - origin[dim]) // step))
        if first >= stop:
            return None
        start = origin[dim] + first * step - low
        picked[dim] = slice(start, start + (stop - first - 1) * step + 1, step)
        begin[own] += first
        sizes[own] = stop - first
    values = view[tuple(picked)]
    used = [dim for dim, _ in axes if dim >= 0]
    values = values.permute(used + [dim for dim in range(len(shape)) if dim not in used])
    return tuple(begin), values.reshape(sizes)


def _write_whole(work: Export, item: Computed, number: int, consensus: Round | None) -> list[int]:
    """Gather the sources of a result, and write it on one rank."""
    gathered = {name: _whole(work.tensors[name]) for name in item.sources}

    def run() -> int:
        if consensus is not None and dist.get_rank() != number % dist.get_world_size():
            return 0
        made = item.run(lambda name: gathered[name])
        written = 0
        for file in work.files:
            for name in file.tensors.keys() & item.results.keys():
                descriptor = os.open(work.path(file), os.O_WRONLY)
                try:
                    dtype, shape, _ = file.tensors[name]
                    written += write_block(descriptor, file.tensors[name], (0,) * len(shape), made[name].to(dtype))
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
        return written

    return _together(consensus, "write an export", run)


@torch.no_grad()
def _whole(tensor: torch.Tensor) -> torch.Tensor:
    found = tensor.detach()
    return (found.full_tensor() if isinstance(found, DTensor) else found).cpu().contiguous()


# A checkpoint of a model as Hugging Face has it, without the model's memory: streamed, in one process.


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

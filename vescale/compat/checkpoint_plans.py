"""Where PyTorch's checkpoint code meets custom placements: DCP's planning protocol, and full state dicts.

Stock planning knows one block per rank and asks ``compute_local_shape_and_global_offset`` for it, which skips
placements it does not know. The wrappers here take over for DTensors that carry a custom placement and leave all else
to PyTorch.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.distributed import _state_dict_utils as state_dict_utils
from torch.distributed.tensor import DTensor

from vescale.compat.needed_names import CHECKPOINTS
from vescale.compat.needs import lacking, require
from vescale.compat.patching import Changes
from vescale.errors import ShardedStateError


@dataclass(frozen=True)
class CheckpointHooks:
    """What runs for a DTensor with a custom placement.

    Attributes:
        write_items: ``(fqn, dtensor)`` to the DCP ``WriteItem`` list of this rank.
        chunk_list: ``(dtensor)`` to the ``ChunkStorageMetadata`` list that this rank loads.
        tensor_shard: ``(dtensor, index)`` to the view of the local tensor that one chunk is.
        metadata_items: ``(fqn, dtensor)`` to the ``WriteItem`` list of all ranks together.
        check_load: ``(fqn, dtensor, saved)`` raises when what was saved cannot be loaded into the DTensor.
        check_full: ``(fqn, dtensor, full)`` raises when a full value does not fit the DTensor.
        fill: ``(fqn, dtensor, full)`` to the DTensor with its part of a full tensor that this rank holds.
    """

    write_items: Callable[..., Any]
    chunk_list: Callable[..., Any]
    tensor_shard: Callable[..., Any]
    metadata_items: Callable[..., Any]
    check_load: Callable[..., None]
    check_full: Callable[..., None]
    fill: Callable[..., Any]


def _is_custom(hooks: Any) -> Callable[[Any], bool]:
    """What tells whether a value is a DTensor with a custom placement."""
    return lambda value: isinstance(value, DTensor) and hooks.has_custom(value._spec.placements)


def wrap_protocol(changes: Changes, dtensor_hooks: Any) -> None:
    """DTensor's side of DCP's ``_Checkpointable`` protocol."""
    hooks, is_complete = dtensor_hooks.checkpoint, not lacking(CHECKPOINTS)

    def is_custom(value: Any) -> bool:
        if not dtensor_hooks.has_custom(value._spec.placements):
            return False
        if not is_complete:  # PyTorch's own plans would leave blocks out
            require(CHECKPOINTS)
        return True

    write_items = DTensor.__create_write_items__
    chunk_list = DTensor.__create_chunk_list__
    tensor_shard = DTensor.__get_tensor_shard__

    @functools.wraps(write_items)
    def __create_write_items__(self: Any, fqn: str, value: Any) -> Any:
        return hooks.write_items(fqn, self) if is_custom(self) else write_items(self, fqn, value)

    @functools.wraps(chunk_list)
    def __create_chunk_list__(self: Any) -> Any:
        return hooks.chunk_list(self) if is_custom(self) else chunk_list(self)

    @functools.wraps(tensor_shard)
    def __get_tensor_shard__(self: Any, index: Any) -> Any:
        return hooks.tensor_shard(self, index) if is_custom(self) else tensor_shard(self, index)

    for method in (__create_write_items__, __create_chunk_list__, __get_tensor_shard__):
        changes.attribute(DTensor, method.__name__, method)


def wrap_plans(changes: Changes, dtensor_hooks: Any) -> None:
    """Of saving and of loading."""
    # Loaded with the first placement rather than with vescale.compat: it costs more than all of vescale.placements.
    from torch.distributed.checkpoint import default_planner, planner_helpers
    from torch.distributed.checkpoint.planner import SavePlan

    is_custom, hooks = _is_custom(dtensor_hooks), dtensor_hooks.checkpoint
    metadata_only_plan = planner_helpers._create_default_metadata_only_plan
    load_plan = default_planner.create_default_local_load_plan

    @functools.wraps(metadata_only_plan)
    def _create_default_metadata_only_plan(state_dict: Any) -> Any:
        if not any(map(is_custom, state_dict.values())):
            return metadata_only_plan(state_dict)
        items: list[Any] = []
        for fqn, value in state_dict.items():
            items += hooks.metadata_items(fqn, value) if is_custom(value) else metadata_only_plan({fqn: value}).items
        return SavePlan(items)

    @functools.wraps(load_plan)
    def create_default_local_load_plan(state_dict: Any, metadata: Any, strict: bool = True) -> Any:
        for fqn, value in state_dict.items():
            if is_custom(value) and fqn in metadata.state_dict_metadata:
                hooks.check_load(fqn, value, metadata.state_dict_metadata[fqn])
        return load_plan(state_dict, metadata, strict)

    changes.function(metadata_only_plan, _create_default_metadata_only_plan)
    changes.function(load_plan, create_default_local_load_plan)


def wrap_full_state_dicts(changes: Changes, dtensor_hooks: Any) -> None:
    """``set_*_state_dict`` from full tensors, held by every rank or broadcast by rank 0."""
    import torch.distributed.checkpoint.state_dict  # noqa: F401  # which binds these names

    is_custom, hooks = _is_custom(dtensor_hooks), dtensor_hooks.checkpoint
    distribute_tensors = state_dict_utils._distribute_tensors

    @functools.wraps(distribute_tensors)
    def _distribute_tensors(local_state_dict: Any, keys: Any, device: Any, pg: Any = None) -> None:
        """Replaces each ``(dtensor, full tensor)`` pair by the DTensor, filled."""
        others = []
        for key in keys:
            pair = local_state_dict.get(key)
            if isinstance(pair, tuple) and is_custom(pair[0]):
                local_state_dict[key] = hooks.fill(key, *pair)
            else:
                others.append(key)
        distribute_tensors(local_state_dict, others, device, pg)

    def keeping_scalars_placed(original: Callable[..., None], every_rank_has_full: bool) -> Callable[..., None]:
        @functools.wraps(original)
        def wrapper(full_state_dict: Any, local_state_dict: Any, *args: Any, **options: Any) -> None:
            targets = {key: value for key, value in local_state_dict.items() if is_custom(value)}
            if every_rank_has_full:  # otherwise the check follows the broadcast, or only rank 0 would raise
                for key, target in targets.items():
                    if key in full_state_dict:
                        hooks.check_full(key, target, full_state_dict[key])
            original(full_state_dict, local_state_dict, *args, **options)
            for key, target in targets.items():
                # PyTorch puts a plain tensor in the place of a DTensor without dims.
                if key in local_state_dict and not isinstance(local_state_dict[key], DTensor):
                    local_state_dict[key] = hooks.fill(key, target, local_state_dict[key])

        return wrapper

    changes.function(distribute_tensors, _distribute_tensors)
    for name, every_rank_has_full in (("_broadcast_state_dict", False), ("_distribute_state_dict", True)):
        original = getattr(state_dict_utils, name)
        changes.function(original, keeping_scalars_placed(original, every_rank_has_full))


def refuse_lossy_safetensors(changes: Changes, _: Any) -> None:
    """The safetensors format names a file's tensors by their FQN, so of several blocks of a tensor in one file PyTorch's
    writer keeps the last only, without a word. Raise instead, on every rank, before anything is written."""
    from torch.distributed.checkpoint.filesystem import SerializationFormat, _FileSystemWriter
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    def checked(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def prepare_global_plan(self: Any, plans: Any) -> Any:
            if self.serialization_format == SerializationFormat.SAFETENSORS:
                for rank, plan in enumerate(plans):
                    counts = Counter(item.index.fqn for item in plan.items)
                    for fqn, count in counts.items():
                        if count > 1:
                            raise ShardedStateError(
                                f"{fqn}: rank {rank} holds {count} blocks of it, but a safetensors file holds one block "
                                "of each tensor, so all but one would be lost; save with "
                                "torch.distributed.checkpoint.FileSystemWriter, or save full tensors "
                                "(get_model_state_dict with full_state_dict=True, save_distributed=False)"
                            )
            return original(self, plans)

        return prepare_global_plan

    for writer in (_FileSystemWriter, HuggingFaceStorageWriter):
        changes.attribute(writer, "prepare_global_plan", checked(writer.prepare_global_plan))

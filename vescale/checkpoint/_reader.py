"""Fill local tensors from a checkpoint of any format: only the bytes that a rank needs, read once per replica group."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from vescale.checkpoint._stored import Stored

__all__ = ["read_tensors"]


def read_tensors(
    stored: Stored, targets: Mapping[str, torch.Tensor], *, cast: bool = False, share: bool = True
) -> None:
    """Fill tensors in place with the values that ``stored`` has under their names.

    A target is a plain tensor, which gets the whole value, or a DTensor in any placement, of which each rank reads the
    blocks that it holds, on any device. Local tensors may be views of larger buffers; nothing beside them is written.

    Every rank of a DTensor's mesh calls this with the same names. Ranks that hold equal parts (replicated axes, and
    plain tensors where all ranks of the job have the same ones) share the reading: one reads, and broadcasts along these
    axes. Extra memory is at most 64 MiB.

    Args:
        stored: the index of the checkpoint.
        targets: by name, each a name of ``stored.tensors`` with an equal global shape.
        cast: convert where dtypes differ; otherwise that is an error.
        share: False: no communication, each rank reads all that it holds.

    Raises:
        CheckpointError: names that are not there (with the nearest ones), other shapes or dtypes, pending reductions,
            tensors without memory; before anything is read. Files that are shorter than the index says.
    """
    raise NotImplementedError

"""Data order and per-sample randomness that do not depend on the mesh."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence, Sized
from typing import Any, Generic, TypeVar, cast

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.utils.data import Dataset, RandomSampler, Sampler, SequentialSampler

from vescale.placements import local_region

__all__ = ["SampleSeeds", "ShardedBatchSampler"]

Sample = TypeVar("Sample", covariant=True)


class ShardedBatchSampler(Sampler[list[int]]):
    """This rank's part of the batches that one device would see: a ``batch_sampler`` for ``DataLoader``.

    Every rank runs the same sampler and takes its rows of each global batch, as ``Shard(0)`` over ``axes`` would: the
    k-th batch of all ranks together is the k-th batch of one device, in its order, on any mesh, and the generators of
    all ranks stay where one device's is. Ranks that differ only on other axes get the same rows.

    ```python
    batches = ShardedBatchSampler(dataset, 64, mesh, "dp", shuffle=True)
    for inputs in DataLoader(dataset, batch_sampler=batches): ...
    ```

    Args:
        data: a dataset, or a sampler of indices (its randomness must come from equally seeded generators).
        batch_size: rows of the global batch, not of a rank's part.
        mesh, axes: the axes that rows are sharded over, by name, outermost first.
        shuffle: a new permutation for each epoch, drawn as ``DataLoader(shuffle=True)`` draws it; for datasets only.
        drop_last: leave out a last batch that is not full.
        generator: of the shuffle; None: the default one, which must be seeded alike on all ranks.

    Raises:
        ValueError: unknown axes; batches in which some rank would have no row (a smaller last batch included); shuffle
            or generator together with a sampler; a rank outside of the mesh.
    """

    def __init__(
        self,
        data: Sized | Sampler[int],
        batch_size: int,
        mesh: DeviceMesh,
        axes: str | Sequence[str],
        *,
        shuffle: bool = False,
        drop_last: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        if isinstance(data, Sampler):
            if shuffle or generator is not None:
                raise ValueError(
                    f"shuffle={shuffle} or a generator together with the sampler {data!r}; expected one of them: the "
                    "sampler decides the order, pass it alone"
                )
            self.sampler: Sampler[int] = data
        elif shuffle:
            self.sampler = RandomSampler(data, generator=generator)
        else:
            self.sampler = SequentialSampler(data)
        self.batch_size, self.drop_last = batch_size, drop_last
        self._mesh_shape = tuple(mesh.shape)
        wanted = (axes,) if isinstance(axes, str) else tuple(axes)
        names = mesh.mesh_dim_names or ()
        if not wanted or not set(wanted) <= set(names):
            raise ValueError(f"axes {wanted} of a mesh with axes {names}; expected some of its names")
        self._placements = tuple(Shard(0) if name in wanted else Replicate() for name in names)
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise ValueError(
                "ShardedBatchSampler on a rank outside of the mesh; expected a rank that trains: skip it here"
            )
        self._coordinate = tuple(coordinate)
        self._check_that_every_rank_has_rows()

    def _check_that_every_rank_has_rows(self) -> None:
        last = len(cast(Sized, self.sampler)) % self.batch_size
        for rows in [self.batch_size] + ([last] if last and not self.drop_last else []):
            corner = tuple(size - 1 for size in self._mesh_shape)
            if local_region((rows,), self._placements, self._mesh_shape, corner).numel == 0:
                raise ValueError(
                    f"a global batch of {rows} rows over a mesh of {self._mesh_shape} leaves ranks without a row; "
                    "expected at least one row a rank: pass drop_last=True, or a larger batch_size"
                )

    def __len__(self) -> int:
        rows = len(cast(Sized, self.sampler))
        return rows // self.batch_size if self.drop_last else -(-rows // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in self.sampler:
            batch.append(index)
            if len(batch) == self.batch_size:
                yield self._own_rows(batch)
                batch = []
        if batch and not self.drop_last:
            yield self._own_rows(batch)

    def _own_rows(self, batch: list[int]) -> list[int]:
        region = local_region((len(batch),), self._placements, self._mesh_shape, self._coordinate)
        return [index for start, stop in region.intervals[0] for index in batch[start:stop]]


class SampleSeeds(Dataset[Sample], Generic[Sample]):
    """A dataset whose random transforms depend on (seed, epoch, index) only: not on the mesh, the order or the worker.

    While a sample is read, the generators of torch (CPU), numpy and Python are seeded for it; afterwards they are restored.
    Call :meth:`set_epoch` before each epoch to draw other numbers.
    """

    def __init__(self, dataset: Dataset[Sample], seed: int) -> None:
        self.dataset, self.seed, self.epoch = dataset, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Draw the numbers of this epoch from now on. Persistent worker processes do not see the change."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(cast(Sized, self.dataset))

    def __getitem__(self, index: int) -> Sample:
        digest = hashlib.sha256(f"{self.seed}/{self.epoch}/{index}".encode()).digest()
        states: tuple[Any, ...] = torch.get_rng_state(), np.random.get_state(), random.getstate()
        torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little"))
        np.random.seed(np.frombuffer(digest[:16], np.uint32))
        random.seed(digest)
        try:
            return self.dataset[index]
        finally:
            torch.set_rng_state(states[0])
            np.random.set_state(states[1])
            random.setstate(states[2])

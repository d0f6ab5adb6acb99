"""Data order and per-sample randomness that do not depend on the mesh."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any, Generic, TypeVar, cast

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.utils.data import Dataset, RandomSampler, Sampler, SequentialSampler

from vescale.compat.devices import random_states, set_random_states
from vescale.errors import GeneratorError
from vescale.placements import local_region

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

    ``state_dict`` and ``load_state_dict`` go on in the middle of an epoch, on the same or another mesh.

    Args:
        data: a dataset, or a sampler of indices (its randomness must come from equally seeded generators).
        batch_size: rows of the global batch, not of a rank's part.
        mesh, axes: the axes that rows are sharded over, by name, outermost first.
        shuffle: a new permutation for each epoch, drawn as ``DataLoader(shuffle=True)`` draws it; for datasets only.
        drop_last: leave out a last batch that is not full.
        generator: of the shuffle; None: the default one, which must have the same seed on all ranks.

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
                raise GeneratorError(
                    f"shuffle={shuffle} or a generator together with the sampler {data!r}; expected one of them: the "
                    "sampler determines the order, so pass only it"
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
            raise GeneratorError(f"axes {wanted} of a mesh with axes {names}; expected some of these names")
        self._placements = tuple(Shard(0) if name in wanted else Replicate() for name in names)
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise GeneratorError(
                "ShardedBatchSampler was created on a rank outside of the mesh; expected a rank of the mesh: skip it "
                "on this rank"
            )
        self._coordinate = tuple(coordinate)
        self._generator = generator
        self._epoch_state: tuple[torch.Tensor, dict[str, torch.Tensor]] | None = None
        self._drawn = 0
        self._taken: int | None = None
        self._resumed: dict[str, Any] | None = None
        self._check_that_every_rank_has_rows()

    def _check_that_every_rank_has_rows(self) -> None:
        last = len(cast(Sized, self.sampler)) % self.batch_size
        for rows in [self.batch_size] + ([last] if last and not self.drop_last else []):
            corner = tuple(size - 1 for size in self._mesh_shape)
            if local_region((rows,), self._placements, self._mesh_shape, corner).numel == 0:
                raise GeneratorError(
                    f"a global batch of {rows} rows over a mesh of {self._mesh_shape} leaves some ranks without rows; "
                    "expected at least one row per rank: pass drop_last=True, or a larger batch_size"
                )

    def __len__(self) -> int:
        rows = len(cast(Sized, self.sampler))
        return rows // self.batch_size if self.drop_last else -(-rows // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            self._set_generator(resumed["epoch"])
            set_random_states(resumed.get("epoch_devices", {}))
        self._epoch_state = self._get_generator(), _device_states()
        skipped = self._drawn = resumed["batches"] if resumed is not None else 0
        for number, batch in enumerate(self._batches()):
            if number < skipped:
                continue
            if resumed is not None and number == skipped:  # what iterating has drawn is not drawn twice
                self._continue_generators(resumed)
            self._drawn += 1
            yield self._own_rows(batch)
        if resumed is not None and self._drawn == skipped:
            self._continue_generators(resumed)
        if self._taken is None:
            self._end_epoch()

    def _end_epoch(self) -> None:
        self._epoch_state, self._drawn, self._taken = None, 0, None

    def _continue_generators(self, resumed: dict[str, Any]) -> None:
        torch.set_rng_state(resumed["default_generator"])
        set_random_states(resumed.get("devices", {}))
        self._set_generator(resumed["generator"])

    def _batches(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in self.sampler:
            batch.append(index)
            if len(batch) == self.batch_size:
                yield batch
                batch = []
        if batch and not self.drop_last:
            yield batch

    def track(self, loader: Iterable[Sample]) -> Iterator[Sample]:
        """Iterate over a ``DataLoader`` with this sampler, and count its batches. With worker processes the loader
        draws batches before they are trained on, which :meth:`state_dict` knows only if the loop iterates through this:
        ``for inputs in batches.track(loader)``."""
        self._taken = self._resumed["batches"] if self._resumed is not None else 0
        for sample in loader:
            self._taken += 1
            yield sample
        self._end_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Where in the epoch the run is, for :meth:`load_state_dict`: numbers and states of generators, equal on all ranks.

        Batches count as done when they have been drawn, or, with :meth:`track`, when the loop has got them.
        """
        if self._resumed is not None:
            return dict(self._resumed)
        batches = self._drawn if self._taken is None else self._taken
        epoch, devices = self._epoch_state or (self._get_generator(), _device_states())
        state: dict[str, Any] = {"epoch": epoch.clone(), "generator": self._get_generator(), "batches": batches}
        state["default_generator"] = torch.get_rng_state()
        state |= {"epoch_devices": devices, "devices": _device_states()}
        return state | {"batch_size": self.batch_size, "length": len(cast(Sized, self.sampler))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The next iteration yields the remaining batches, in the same order, on any mesh, and random numbers
        afterwards are those of a run that was not interrupted. At the end of an epoch the next one begins as usual.

        Raises ValueError for another batch size or number of samples.
        """
        for name, own in (("batch_size", self.batch_size), ("length", len(cast(Sized, self.sampler)))):
            if state_dict[name] != own:
                raise GeneratorError(
                    f"the state was saved with {name}={state_dict[name]}, but this sampler has {own}, so that the "
                    "order of the data would differ: use the same global batch size and data"
                )
        self._resumed = dict(state_dict) if state_dict["batches"] else None
        if self._resumed is None:
            self._set_generator(state_dict["generator"])

    def _get_generator(self) -> torch.Tensor:
        return torch.get_rng_state() if self._generator is None else self._generator.get_state()

    def _set_generator(self, state: torch.Tensor) -> None:
        if self._generator is None:
            torch.set_rng_state(state)
        else:
            self._generator.set_state(state)

    def _own_rows(self, batch: list[int]) -> list[int]:
        region = local_region((len(batch),), self._placements, self._mesh_shape, self._coordinate)
        return [index for start, stop in region.intervals[0] for index in batch[start:stop]]


def _device_states() -> dict[str, torch.Tensor]:
    """Of the generator that samplers and loaders draw from where the default device is an accelerator."""
    return random_states() if torch.get_default_device().type != "cpu" else {}


class SampleSeeds(Dataset[Sample], Generic[Sample]):
    """A dataset whose random transforms depend on (seed, epoch, index) only: not on the mesh, the order or the worker.

    While a sample is read, the generators of torch (CPU), numpy and Python are seeded for it; afterwards they are restored.
    Call :meth:`set_epoch` before each epoch to draw other numbers.

    Args:
        dataset: what is read, by index.
        seed: the same on every rank.
    """

    def __init__(self, dataset: Dataset[Sample], seed: int) -> None:
        self.dataset, self.seed, self.epoch = dataset, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Draw the numbers of this epoch from now on. Persistent worker processes do not see the change.

        Args:
            epoch: a number.
        """
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

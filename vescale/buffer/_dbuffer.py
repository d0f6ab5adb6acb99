"""``DBuffer``: a group of tensors in one flat buffer that is distributed over a mesh."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.buffer._layout import ShardSlice
from vescale.buffer._tensor_group import TensorGroup
from vescale.comm import Pending, all_gather_into, all_reduce_, axis_group, reduce_scatter_into
from vescale.compat import set_access_error
from vescale.compat.devices import use_memory_pool
from vescale.errors import BufferMemoryError, DBufferError
from vescale.placements import RaggedShard, contiguous_stride

# ``Allocation``: one block of memory for all the buffers that are needed at the same time.


_OBSERVERS: list[Callable[[torch.UntypedStorage, int], None]] = []


@contextlib.contextmanager
def observe_allocations(observer: Callable[[torch.UntypedStorage, int], None]) -> Iterator[None]:
    """Inside, ``observer`` is called with each storage that an :class:`Allocation` has allocated or freed, and its bytes."""
    _OBSERVERS.append(observer)
    try:
        yield
    finally:
        _OBSERVERS.remove(observer)


_ALIGNMENT_BYTES = 256  # a buffer starts where the allocators of devices would start it


class Allocation:
    """Memory that several buffers share: one request allocates it for all of them, and one frees it.

    Buffers first :meth:`reserve` their places; :meth:`allocate` and :meth:`free` then act on all of them. The storage
    stays the same object, so that tensors over it stay valid, and see the memory of the next allocation. Freed memory
    returns to the allocator at once, on the stream that allocated it. What another stream uses is borrowed by it, and not
    freed before it has been given back.

    Args:
        device, pin_memory, pool: what the memory is.
        access_error: what reads and writes of freed memory raise, in C++; None: they end the process.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        pin_memory: bool = False,
        pool: Any = None,
        access_error: str | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.pin_memory = pin_memory
        self.pool = pool
        self._access_error = None if access_error is None else access_error.encode()
        self.num_bytes = 0
        self._storage: torch.UntypedStorage | None = None
        self._is_free = True
        self._attached: dict[int, tuple[torch.UntypedStorage, int]] = {}
        self._owner_waits: Callable[[Any], None] | None = None

    def reserve(self, num_bytes: int) -> int:
        """The byte offset of a new place. Raises RuntimeError once memory has been allocated."""
        if self._storage is not None:
            raise BufferMemoryError(
                "a place was requested in an allocation that is already in use; reserve all places before the first use"
            )
        offset = -(-self.num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self.num_bytes = offset + num_bytes
        return offset

    @property
    def is_allocated(self) -> bool:
        return self._storage is not None and (self.num_bytes == 0 or not self._is_free)

    @property
    def storage(self) -> torch.UntypedStorage:
        """Raises RuntimeError before the first :meth:`allocate`."""
        if self._storage is None:
            raise BufferMemoryError("the memory of this buffer has never been allocated; call allocate() first")
        return self._storage

    def contains(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is over this memory."""
        if self._storage is None or tensor.layout is not torch.strided or tensor.device.type != self.device.type:
            return False
        storage = tensor.untyped_storage()
        if self._is_free or not storage.nbytes():
            return False
        return self.is_among((storage.data_ptr(),))

    def is_among(self, addresses: Collection[int]) -> bool:
        """Whether this memory is at one of these addresses."""
        if self._storage is None or self._is_free:
            return False
        return self._storage.data_ptr() in addresses or any(address in addresses for address in self._attached)

    def attach(self, storage: torch.UntypedStorage) -> None:
        """From now on, also allocate and free this memory, which another owner has allocated with its current size."""
        if storage.nbytes():
            self._attached.setdefault(storage.data_ptr(), (storage, storage.nbytes()))

    def allocate(self) -> None:
        """Get the memory, uninitialized, from the current stream's pool; no effect if it is allocated."""
        with use_memory_pool(self.device, self.pool):
            self._allocate()

    def _allocate(self) -> None:
        if self._storage is None:
            block = torch.empty(self.num_bytes, dtype=torch.uint8, device=self.device, pin_memory=self.pin_memory)
            self._storage = block.untyped_storage()
        else:
            self._resize(self._storage, self.num_bytes)
        self._is_free = False
        try:
            for storage, num_bytes in self._attached.values():
                self._resize(storage, num_bytes)
        except BaseException:
            self.free()
            raise
        self._tell()

    def lend(self, owner_waits: Callable[[Any], None]) -> None:
        """Another stream uses the memory from now on. ``owner_waits(event)`` makes the stream that has allocated it wait."""
        self._owner_waits = owner_waits

    def give_back(self, *events: Any) -> None:
        """The owner waits for ``events``, after which no other stream uses the memory; no effect if it is not borrowed."""
        owner_waits, self._owner_waits = self._owner_waits, None
        if owner_waits is not None:
            for event in events:
                if event is not None:
                    owner_waits(event)

    def free(self) -> None:
        """Free the memory; tensors over it must not be used until :meth:`allocate`. Raises RuntimeError while borrowed."""
        if self._owner_waits is not None:
            raise BufferMemoryError(
                "memory would be freed while another stream may still use it; expected an earlier give_back() with "
                "the event that ends that stream's use. This is a bug in vescale"
            )
        if self._storage is not None:
            self._resize(self._storage, 0)
        for storage, _ in self._attached.values():
            self._resize(storage, 0)
        self._is_free = True
        self._tell()

    def _resize(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Addresses without memory, which an estimate takes for more than the host has, stay."""
        if storage.nbytes() != num_bytes and self.device.type != "meta" and storage.resizable():
            if self._access_error is not None:
                set_access_error(storage, None)
            storage.resize_(num_bytes)
            if self._access_error is not None and not num_bytes:
                set_access_error(storage, self._access_error)

    def _tell(self) -> None:
        for observer in tuple(_OBSERVERS):  # another thread may add one
            for storage in (self._storage, *(storage for storage, _ in self._attached.values())):
                if storage is not None:
                    observer(storage, 0 if self._is_free else storage.nbytes())


# ``LocalPart``: the elements of a group's buffer that one rank holds, their memory, and the tensors over it.


class LocalPart:
    """The elements [begin, begin + numel) of a group's buffer in local memory, in an ``allocation``.

    ``is_sharded``: views are runs of the tensors, flat and maybe empty, instead of whole tensors.
    """

    def __init__(
        self,
        group: TensorGroup,
        begin: int,
        numel: int,
        dtype: torch.dtype,
        allocation: Allocation,
        *,
        is_sharded: bool,
    ) -> None:
        self.group, self.begin, self.numel, self.dtype, self.is_sharded = group, begin, numel, dtype, is_sharded
        self._allocation = allocation
        self._byte_offset = allocation.reserve(numel * dtype.itemsize)
        self._local: torch.Tensor | None = None
        self._views: list[torch.Tensor] | None = None

    # Memory -----------------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of the local part."""
        return self._allocation.device

    @property
    def is_pinned(self) -> bool:
        """Whether the memory of the local part is page-locked."""
        return self._allocation.pin_memory

    @property
    def num_bytes(self) -> int:
        """Bytes of the local part, padding included."""
        return self.numel * self.dtype.itemsize

    @property
    def allocation(self) -> Allocation:
        """The memory, which other buffers may share."""
        return self._allocation

    @property
    def is_allocated(self) -> bool:
        """Whether the local part has memory; :meth:`allocate` gets it."""
        return self._allocation.is_allocated

    def allocate(self) -> Self:
        """Get memory for this buffer and all that share its allocation; contents are undefined, padding is zero."""
        if not self._allocation.is_allocated:
            self._allocation.allocate()
        self.zero_padding()
        return self

    def free(self) -> None:
        """Free the memory of this buffer and of all that share its allocation; ``local`` and the views stay the same
        tensors and are usable again after :meth:`allocate`."""
        self._allocation.free()

    @property
    def local(self) -> torch.Tensor:
        """This rank's elements [begin, begin + numel) of the buffer, flat; RuntimeError before :meth:`allocate`."""
        if self._local is None:
            self._local = self.alias(0, (self.numel,))
        return self._local

    def alias(self, offset: int, shape: tuple[int, ...], *, own_storage: bool = False) -> torch.Tensor:
        """A contiguous tensor over the memory, ``offset`` elements in, with its own version counter: when a collective
        writes to the buffer, tensors that autograd has saved do not count as modified.

        With ``own_storage``, its storage begins and ends with it and keeps the memory alive; :meth:`free` does not affect
        it. ``torch.save`` and ``copy.deepcopy`` act on whole storages, and fail on DTensors whose local tensor is a part
        of one.

        Args:
            shape: of the result.
        """
        if self.device.type == "meta":
            return torch.empty(shape, dtype=self.dtype, device="meta")
        storage, itemsize = self._allocation.storage, self.dtype.itemsize
        first = self._byte_offset // itemsize + offset
        if own_storage:
            storage, first = storage[first * itemsize : (first + math.prod(shape)) * itemsize], 0
        with torch.inference_mode(False):  # tensors made in inference mode could not be saved for a backward later
            empty = torch.empty(0, dtype=self.dtype, device=self.device)
            return empty.set_(storage, first, shape, contiguous_stride(shape))

    def zero_padding(self) -> None:
        """Set the elements that belong to no tensor to zero."""
        for begin, end in self._gaps:
            self.local[begin:end].zero_()

    @cached_property
    def _gaps(self) -> list[tuple[int, int]]:
        return self.group.gaps(self.begin, self.begin + self.numel)

    @cached_property
    def slices(self) -> list[ShardSlice]:
        """The parts of tensors in the local part: (tensor, begin, end, local_offset), in buffer order."""
        return self.group.slices(self.begin, self.begin + self.numel)

    @property
    def views(self) -> list[torch.Tensor]:
        """One tensor over the local memory for each tensor of the group, in the group's order: the whole tensor in its
        shape if no axis is sharded, else this rank's run of it, flat and maybe empty. Made once; they keep their
        addresses while the buffer is allocated."""
        if self._views is None:
            if self.is_sharded:
                held = {part.tensor: part for part in self.slices}
                self._views = [
                    self.alias(part.local_offset, (part.end - part.begin,)) if part is not None else self.alias(0, (0,))
                    for part in (held.get(i) for i in range(len(self.group)))
                ]
            else:
                offsets = self.group.layout.offsets
                self._views = [self.alias(*at) for at in zip(offsets, self.group.shapes, strict=True)]
        return self._views

    def __len__(self) -> int:
        return len(self.group)

    def __getitem__(self, tensor: int | str) -> torch.Tensor:
        """The view of one tensor, by index or name."""
        return self.views[self.group.index(tensor) if isinstance(tensor, str) else tensor]

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names of the group's tensors, with the views of what this rank holds of each."""
        return zip(self.group.names, self.views, strict=True)

    def load(self, tensor: int | str, whole: torch.Tensor) -> None:
        """Copy this rank's part of a whole tensor, which it holds, into its place; casts.

        Args:
            tensor: its name, or its number in the group.
            whole: the global values.
        """
        index = self.group.index(tensor) if isinstance(tensor, str) else tensor
        if tuple(whole.shape) != self.group.shapes[index]:
            raise DBufferError(
                f"{self.group.names[index]}: a tensor of shape {tuple(whole.shape)} for a place of shape "
                f"{self.group.shapes[index]}; pass the tensor that the group was planned for"
            )
        view = self.views[index]
        with torch.no_grad():
            if not self.is_sharded:
                view.copy_(whole)
            elif view.numel():
                begin = max(0, self.begin - self.group.layout.offsets[index])
                view.copy_(whole.reshape(-1)[begin : begin + view.numel()])


Axes = Sequence[int | str]


class DBuffer(LocalPart):
    """One logical flat buffer of ``group.layout.buffer_size`` elements, placed on a mesh.

    ==================  ==================================================================================
    placement of axis   along the axis, a rank holds
    ==================  ==================================================================================
    ``Replicate()``     the same elements as the others
    ``RaggedShard()``   one of equal, consecutive pieces; the cuts fall between blocks of every tensor
    ``Partial(op)``     its contribution to a pending reduction (``sum`` or ``avg``, ...)
    ``None``            a buffer of its own, unrelated to the others' (tensor parallelism has cut the tensors)
    ==================  ==================================================================================

    Several sharded axes divide the buffer in their order on the mesh, the last one most finely. Each collective moves
    the whole buffer in one call, without copies; a group operation is one kernel on ``local``. Padding is zero when
    memory is allocated, and stays zero under all of them.

    Args:
        group: the tensors and their layout, the same on every rank.
        mesh: its axes are named by index or by name.
        placements: one for each axis of ``mesh``.
        dtype, device: of the elements; the device is the mesh's unless given.
        allocation: memory that is shared with other buffers (batched allocation); None: its own.

    Raises:
        ValueError: a placement count that is not the mesh's, a placement of another kind, more pieces than the layout
            was planned for, a mesh whose ranks are not in order along the sharded axes.
    """

    def __init__(
        self,
        group: TensorGroup,
        mesh: DeviceMesh,
        placements: Sequence[Placement | None],
        *,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        allocation: Allocation | None = None,
    ) -> None:
        self.mesh = mesh
        self.placements = _checked(group, mesh, placements)
        self.shard_axes = tuple(a for a, p in enumerate(self.placements) if isinstance(p, RaggedShard))
        self.partial_axes = tuple(a for a, p in enumerate(self.placements) if isinstance(p, Partial))
        self.num_pieces, piece = _piece(mesh, self.shard_axes)
        numel = group.layout.buffer_size // self.num_pieces
        allocation = allocation or Allocation(device if device is not None else mesh.device_type)
        super().__init__(group, piece * numel, numel, dtype, allocation, is_sharded=bool(self.shard_axes))
        self._geometry = object()
        """Equal for buffers that differ in memory only."""
        self._routes: dict[tuple[Any, ...], dist.ProcessGroup] = {}
        """The groups of all-gathers that have passed all checks, by (kind, axes, geometry of the result)."""
        self._scatters: dict[tuple[Any, ...], tuple[dist.ProcessGroup, str, DBuffer | None]] = {}
        """The same of reduce-scatters: group, op, and the result, without memory, where the caller gives none."""

    def placement(self, tensor: int | str, split_factor: int = 1) -> RaggedShard:
        """The ragged placement of a tensor along the (only) sharded axis; see :meth:`TensorGroup.placement`.

        Args:
            tensor: its name, or its number in the group.
            split_factor: the number of pieces into which later axes divide dim 0, for a strided placement.
        """
        index = self.group.index(tensor) if isinstance(tensor, str) else tensor
        return self.group.placement(index, self.num_pieces, split_factor)

    # Group operations: one kernel on the local part, no communication unless documented ------------------------------

    def zero_(self) -> DBuffer:
        """Set the local part to zero, padding included; returns the buffer."""
        self.local.zero_()
        return self

    def mul_(self, factor: float | torch.Tensor) -> DBuffer:
        """Multiply all tensors by ``factor``, a number or a 0-dim tensor."""
        self.local.mul_(factor)
        return self

    def add_(self, other: DBuffer, *, alpha: float = 1) -> DBuffer:
        """Add ``alpha * other``, of any dtype and the same group and placements."""
        self._must_match(other, "add_")
        self.local.add_(other.local, alpha=alpha)
        return self

    def copy_(self, other: DBuffer) -> DBuffer:
        """Copy the other's values; converts dtypes and crosses devices.

        Args:
            other: a buffer of the same group and placements.
        """
        self._must_match(other, "copy_")
        self.local.copy_(other.local, non_blocking=True)
        return self

    def like(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> DBuffer:
        """An unallocated buffer of the same group and placements."""
        return DBuffer(self.group, self.mesh, self.placements, dtype=dtype or self.dtype, device=device or self.device)

    def to(self, dtype: torch.dtype) -> DBuffer:
        """A copy in another dtype."""
        return self.like(dtype=dtype).allocate().copy_(self)

    def clone(self) -> DBuffer:
        """Return a buffer with the same values in separate memory."""
        return self.to(self.dtype)

    def norm(self, order: float = 2.0) -> torch.Tensor:
        """The vector norm of all tensors together, the same on every rank; 0-dim, float32 for half precision.

        One all-reduce of a number where axes are sharded. Raises ValueError for a pending reduction.

        Args:
            order: of the norm, such as 2 or infinity.
        """
        if self.partial_axes:
            raise DBufferError(
                f"norm of a buffer placed as {self.placements}: its sum is still pending; reduce it first"
            )
        wide = torch.float32 if self.dtype in (torch.float16, torch.bfloat16) else self.dtype
        part = _norm(self.local if order >= 0 else self._without_padding(), order, wide)
        if not self.shard_axes:
            return part
        along = axis_group(self.mesh, self.shard_axes).group
        if math.isinf(order):
            return all_reduce_(part.view(1), "max" if order > 0 else "min", along).wait().view(())
        power = part if order in (0, 1) else part.pow(order)  # of an empty part and a negative order: inf ** order = 0
        total = all_reduce_(power.view(1), "sum", along).wait().view(())
        return total if order in (0, 1) else total.pow(1 / order)

    def _without_padding(self) -> torch.Tensor:
        """A copy of the tensors' elements: padding is zero, which negative orders would count."""
        return torch.cat([self.local[:0], *(self.local[s.local_offset :][: s.end - s.begin] for s in self.slices)])

    def _must_match(self, other: DBuffer, what: str) -> None:
        if other.group.layout != self.group.layout or other.begin != self.begin or other.numel != self.numel:
            raise DBufferError(
                f"{what} between buffers of {self.group.names[:3]}... placed as {self.placements} and of "
                f"{other.group.names[:3]}... placed as {other.placements}; both must have the same layout and hold "
                "the same elements: use the same TensorGroup, and gather or scatter one of them"
            )

    # Communication: the whole buffer in one collective ----------------------------------------------------------------

    def piece(self, axes: Axes) -> DBuffer:
        """This rank's piece along ``axes``, on which the buffer is Replicate or Partial, as a buffer over the same
        memory: the input of an in-place all-gather, and the output of an in-place reduce-scatter."""
        numbers = self._numbers(axes)
        for axis in numbers:
            if not isinstance(self.placements[axis], Replicate | Partial):
                raise DBufferError(
                    f"piece along axis {axis} of a buffer placed as {self.placements}; a buffer can be cut only along "
                    "an axis on which every rank holds all of it"
                )
        part = self._placed(numbers, RaggedShard())
        part._must_nest(self)
        part._allocation = self._allocation
        part._byte_offset = self._byte_offset + (part.begin - self.begin) * self.dtype.itemsize
        return part

    def fresh(self) -> DBuffer:
        """An allocated buffer of the same geometry with its own memory."""
        twin = copy.copy(self)
        twin._allocation = Allocation(self.device)
        twin._byte_offset = twin._allocation.reserve(self.num_bytes)
        twin._local = twin._views = None
        return twin.allocate()

    def over(self, placements: Sequence[Placement | None]) -> DBuffer:
        """The same memory with other placements: contributions to a sum (Partial) where the buffer was Replicate. The
        sharded axes must be the same (ValueError)."""
        other = DBuffer(self.group, self.mesh, placements, dtype=self.dtype, device=self.device)
        self._must_match(other, "over")
        other._allocation, other._byte_offset = self._allocation, self._byte_offset
        return other

    def all_gather(self, axes: Axes | None = None, *, out: DBuffer | None = None, requester: str = "") -> PendingBuffer:
        """Replicate the buffer along sharded axes, by default all: one all-gather, of ``num_bytes`` from every rank.

        ``out``: the allocated result; if this buffer is its :meth:`piece`, nothing is copied on this rank. None: a new
        buffer. Inner axes must be gathered before outer ones (ValueError).

        Args:
            axes: names or numbers of mesh axes. None: all that are sharded.
            requester: who asks, for traces and reports.
        """
        numbers = self.shard_axes if axes is None else self._numbers(axes)
        route = self._routes.get(("all_gather", numbers, out._geometry)) if out is not None else None
        if out is not None and route is not None:
            return PendingBuffer(out, all_gather_into(out.local, self.local, route, requester=requester))
        self._must_be(numbers, RaggedShard, "all_gather")
        out = out if out is not None else self._placed(numbers, Replicate()).allocate()
        self._must_nest(out)
        if out.dtype != self.dtype or _kinds(out.placements) != _kinds(self._replaced(numbers, Replicate())):
            raise DBufferError(
                f"all_gather of {self.dtype} {self.placements} along {numbers} into {out.dtype} {out.placements}; the "
                "dtypes must be equal and the axes replicated"
            )
        along = self._routes["all_gather", numbers, out._geometry] = self._along(numbers)
        return PendingBuffer(out, all_gather_into(out.local, self.local, along, requester=requester))

    def reduce_scatter(
        self,
        axes: Axes | None = None,
        *,
        op: str | None = None,
        out: DBuffer | None = None,
        process_group: dist.ProcessGroup | None = None,
        at_once: bool = False,
        collective: Callable[..., Pending] = reduce_scatter_into,
        requester: str = "",
    ) -> PendingBuffer:
        """Reduce pending axes, by default all, and leave each rank its piece: one reduce-scatter over all of them.

        ``op`` is by default the axes' own (``Partial("avg")`` divides). ``out`` has its own memory, or is this buffer's
        :meth:`piece` (in place); None: a new buffer. The rest of this buffer is undefined afterwards. ``process_group``:
        another group of the same ranks in the same order, to overlap with other collectives. ``at_once``: if the backend
        needs memory to do this in the background (gloo), do it synchronously, without memory. ``collective`` replaces
        :func:`vescale.comm.reduce_scatter_into`.

        Args:
            axes: names or numbers of mesh axes. None: all that are pending.
            requester: who asks, for traces and reports.
        """
        key = "reduce_scatter", None if axes is None else tuple(axes), op, None if out is None else out._geometry
        route = self._scatters.get(key)
        if route is None:
            numbers, reduce_op = self._pending(axes, op, "reduce_scatter")
            piece = out if out is not None else self._placed(numbers, RaggedShard())
            piece._must_nest(self)
            if piece.dtype != self.dtype or _kinds(piece.placements) != _kinds(self._replaced(numbers, RaggedShard())):
                raise DBufferError(
                    f"reduce_scatter of {self.dtype} {self.placements} along {numbers} into {piece.dtype} "
                    f"{piece.placements}; the dtypes must be equal and the axes sharded"
                )
            route = self._scatters[key] = self._along(numbers), reduce_op, piece if out is None else None
        along, reduce_op, geometry = route
        if out is None:
            assert geometry is not None
            out = geometry.fresh()
        return PendingBuffer(
            out,
            collective(out.local, self.local, reduce_op, process_group or along, requester=requester, at_once=at_once),
        )

    def all_reduce(self, axes: Axes | None = None, *, op: str | None = None, requester: str = "") -> PendingBuffer:
        """Reduce pending axes, by default all, in place: one all-reduce over all of them. The result is a buffer over
        the same memory, replicated along them.

        Args:
            axes: names or numbers of mesh axes. None: all that are pending.
            requester: who asks, for traces and reports.
        """
        numbers, op = self._pending(axes, op, "all_reduce")
        result = self._placed(numbers, Replicate())
        result._allocation, result._byte_offset = self._allocation, self._byte_offset
        return PendingBuffer(result, all_reduce_(self.local, op, self._along(numbers), requester=requester))

    def _pending(self, axes: Axes | None, op: str | None, what: str) -> tuple[tuple[int, ...], str]:
        numbers = self.partial_axes if axes is None else self._numbers(axes)
        self._must_be(numbers, Partial, what)
        ops = {str(getattr(self.placements[axis], "reduce_op", "")) for axis in numbers}
        if op is None and len(ops) > 1:
            raise DBufferError(
                f"{what} of axes {numbers} placed as {self.placements}: a collective has a single reduction "
                "operation; reduce one axis after the other, or pass op="
            )
        return numbers, op or ops.pop()

    def _numbers(self, axes: Axes) -> tuple[int, ...]:
        names = self.mesh.mesh_dim_names or ()
        found = []
        for axis in axes:
            number = names.index(axis) if isinstance(axis, str) and axis in names else axis
            if not isinstance(number, int) or not 0 <= number < self.mesh.ndim:
                raise DBufferError(f"axis {axis!r} of a mesh with axes {names or self.mesh.ndim}; name one of them")
            found.append(number)
        return tuple(sorted(found))

    def _must_be(self, axes: tuple[int, ...], kind: type[Placement], what: str) -> None:
        if not axes or any(not isinstance(self.placements[axis], kind) for axis in axes):
            raise DBufferError(
                f"{what} along axes {axes} of a buffer placed as {self.placements}: they must be {kind.__name__}; "
                "choose other axes, or build the buffer with that placement"
            )

    def _must_nest(self, whole: DBuffer) -> None:
        """Raise unless the pieces along the axes that differ, in rank order, are the whole's local part; the same on
        every rank."""
        finer = set(self.shard_axes) - set(whole.shard_axes)
        coarser = set(whole.shard_axes) - set(self.shard_axes)
        in_order = not coarser and all(axis < min(finer) for axis in whole.shard_axes) if finer else not coarser
        if whole.group.layout != self.group.layout or whole.mesh != self.mesh or not in_order:
            raise DBufferError(
                f"the pieces of {self.placements} are not consecutive in {whole.placements}: later mesh axes "
                "subdivide the pieces of earlier ones, so gather them first (and scatter them last), on the same "
                "mesh and with the same TensorGroup"
            )

    def _along(self, axes: tuple[int, ...]) -> Any:
        return axis_group(self.mesh, axes).group

    def _replaced(self, axes: tuple[int, ...], placement: Placement) -> tuple[Placement | None, ...]:
        return tuple(placement if axis in axes else p for axis, p in enumerate(self.placements))

    def _placed(self, axes: tuple[int, ...], placement: Placement) -> DBuffer:
        placements = self._replaced(axes, placement)
        return DBuffer(self.group, self.mesh, placements, dtype=self.dtype, device=self.device)

    def __repr__(self) -> str:
        names = self.mesh.mesh_dim_names or range(self.mesh.ndim)
        placed = ", ".join(f"{name}: {p}" for name, p in zip(names, self.placements, strict=True))
        return f"DBuffer({len(self)} tensors, {self.numel} local elements, {self.dtype}, {placed})"


class PendingBuffer:
    """A collective of a whole buffer in flight; after :meth:`wait`, ``buffer`` holds the result."""

    def __init__(self, buffer: DBuffer, pending: Pending) -> None:
        self.buffer = buffer
        self._pending = pending

    def wait(self) -> DBuffer:
        """Wait until the collective is done; returns ``buffer``."""
        self._pending.wait()
        return self.buffer

    def is_completed(self) -> bool:
        """Whether :meth:`wait` is known to return at once. Do not poll: on gloo it is False until :meth:`wait` has been
        called."""
        return self._pending.is_completed()


def _checked(
    group: TensorGroup, mesh: DeviceMesh, placements: Sequence[Placement | None]
) -> tuple[Placement | None, ...]:
    placements = tuple(placements)
    if len(placements) != mesh.ndim:
        raise DBufferError(
            f"{len(placements)} placements {placements} for a mesh of {mesh.ndim} axes; pass one for each axis"
        )
    for placement in placements:
        if placement is not None and not isinstance(placement, Replicate | Partial | RaggedShard):
            raise DBufferError(
                f"a buffer placed as {placement!r}; use Replicate(), RaggedShard(), Partial(), or None for an axis "
                "along which each rank has its own buffer"
            )
    num_pieces = math.prod(mesh.size(axis) for axis, p in enumerate(placements) if isinstance(p, RaggedShard))
    if group.layout.num_shards % num_pieces:
        raise DBufferError(
            f"placements {placements} divide the buffer into {num_pieces} pieces, but its layout was planned for "
            f"{group.layout.num_shards} shards; plan it for a multiple of {num_pieces}"
        )
    return placements


def _piece(mesh: DeviceMesh, axes: tuple[int, ...]) -> tuple[int, int]:
    """(number of pieces, this rank's) along ``axes``."""
    if not axes:
        return 1, 0
    found = axis_group(mesh, axes)
    if list(found.coordinates) != sorted(found.coordinates):
        raise DBufferError(
            f"the ranks of {mesh} are not in ascending order along axes {axes}, so that a collective would put pieces "
            "in a different order than the mesh; build the mesh from ranks in ascending order"
        )
    return found.size, found.index


def _norm(flat: torch.Tensor, order: float, dtype: torch.dtype) -> torch.Tensor:
    """The vector norm; of no elements the neutral element of the reduction over ranks, where torch raises or returns 0."""
    if flat.numel() == 0 and order < 0:
        return torch.full((), math.inf, dtype=dtype, device=flat.device)
    return torch.linalg.vector_norm(flat, order, dtype=dtype)


def _kinds(placements: Sequence[Placement | None]) -> list[type]:
    return [type(placement) for placement in placements]

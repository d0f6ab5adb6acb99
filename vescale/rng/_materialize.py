"""Computes deferred tensors: whole, or as DTensors of which each rank computes its part."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import DTensorSpec, bytes_of, make_dtensor, make_spec
from vescale.compat.tensor_subclasses import tree_leaves, without_modes
from vescale.errors import ArgumentTypeError, MaterializeError, UnsupportedDeferredError, kind_of
from vescale.placements import Region, local_region, normalize_placements
from vescale.rng._deferred_replay import Constant, Record, View, needed_ops, next_time, part_values, whole_values
from vescale.rng._deferred_tensor import DeferredTensor, view_of
from vescale.rng._dtensor_fill import part_of_whole
from vescale.rng._random_ops import RandomOp

# (qualified name, deferred tensor) -> one placement per mesh axis, or None: a plain tensor, whole on every rank.
PlacementFn = Callable[[str, torch.Tensor], Sequence[Placement] | None]
Module = TypeVar("Module", bound=nn.Module)


def materialize(
    module: Module,
    mesh: DeviceMesh | None = None,
    placements: PlacementFn | None = None,
    *,
    device: torch.device | str | None = None,
    into: Callable[[str], torch.Tensor | None] | None = None,
    mesh_of: Callable[[str], DeviceMesh | None] | None = None,
) -> Module:
    """Compute every deferred parameter, buffer and tensor attribute of a module, and return the module.

    ====================  ==================================================  =============================
    tensor                becomes                                             memory of a rank, peak
    ====================  ==================================================  =============================
    placed parameter      ``nn.Parameter`` of a DTensor                       its part, and one such part
    placed buffer         a DTensor                                           the same
    other tensor          a plain tensor, whole on every rank                 the whole
    ====================  ==================================================  =============================

    Tensors whose initialization is not elementwise (``orthogonal_``, ``sparse_``) are computed whole, one at a time.
    Tensors with values are placed if ``placements`` returns placements for them, and otherwise kept. Tied parameters stay
    one object; tensors that share memory keep sharing it. Attributes and ``requires_grad`` of parameters are kept. The
    state of generators does not change.

    Args:
        mesh: of the placed tensors. None: all tensors become plain and whole, as without ``deferred_init``.
        placements: called once for each parameter and buffer, with its first name. None: no tensor is placed.
        device: of plain tensors, and of all tensors without a mesh. None: the device that the constructor chose.
        into: returns the memory of a placed tensor's part, by name. None, or if it returns None: new memory.
        mesh_of: returns the mesh of a placed tensor, by name; it has the same ranks as ``mesh``. None, or if it returns
            None: ``mesh``.
        module: a module that was constructed inside :func:`deferred_init`.

    Raises:
        ValueError: placements that do not fit a tensor or the mesh.
        RuntimeError: ranks of the mesh recorded different random numbers (raised before anything is computed); placed
            tensors that overlap in memory.

    Communication: with a mesh, one all-reduce of 16 bytes on each axis, which compares the ranks.
    """
    if placements is not None and mesh is None:
        raise MaterializeError(
            "materialize(module, placements=...) without a mesh; expected both: pass the mesh that they refer to"
        )
    named = list(_named_tensors(module))
    if mesh is not None:
        deferred = [tensor for _, tensor in named if isinstance(tensor, DeferredTensor)]
        check_recorded_alike(mesh, deferred)
    maker = _Maker(mesh, device, into, mesh_of)
    with without_modes():  # also inside of deferred_init()
        for name, tensor in named:
            maker.make(name, tensor, None if placements is None else placements(name, tensor))
        for submodule in module.modules():
            maker.replace_in(submodule)
    return module


def materialize_tensor(
    tensor: torch.Tensor, mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None
) -> torch.Tensor:
    """One deferred tensor with values: whole, or as a DTensor of which this rank computes its part.

    Raises TypeError for a tensor that has values, ValueError for placements that do not fit. Communication: none.

    Args:
        tensor: a tensor or parameter that was created inside ``deferred_init``.
        mesh: None: the result is plain and whole.
        placements: one for each axis of ``mesh``.
    """
    _check_deferred(tensor)
    maker = _Maker(mesh, None)
    with without_modes():
        maker.make("tensor", tensor, placements)
    return maker.made[id(tensor)]


def materialize_part(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    """The region's part of a deferred tensor's values, with its local shape. If possible, nothing else is computed.

    Raises TypeError for a tensor that has values. Communication: none.
    """
    assert _check_deferred(tensor)
    with without_modes():
        return part_values(view_of(tensor), next_time(), region)


def _check_deferred(tensor: torch.Tensor) -> TypeGuard[DeferredTensor]:
    if not isinstance(tensor, DeferredTensor):
        raise ArgumentTypeError(
            f"{kind_of(tensor)} of shape {tuple(tensor.shape)} already has its values; expected a tensor created "
            "inside deferred_init(): use distribute_tensor for others"
        )
    return True


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, then buffers, each under its first name; those that are DTensors already are done."""
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        if not isinstance(tensor, DTensor):
            yield name, tensor


class _Maker:
    """The tensors that one call of :func:`materialize` makes, by the deferred tensor that they replace."""

    def __init__(
        self,
        mesh: DeviceMesh | None,
        device: torch.device | str | None,
        into: Callable[[str], torch.Tensor | None] | None = None,
        mesh_of: Callable[[str], DeviceMesh | None] | None = None,
    ) -> None:
        self.mesh = mesh
        self._into, self._mesh_of = into, mesh_of
        self.device = None if device is None else torch.device(device)
        self.time = next_time()
        self.made: dict[int, torch.Tensor] = {}
        self._kept: list[torch.Tensor] = []  # keeps the originals, so that ids stay unique
        self._storages: dict[int, torch.UntypedStorage] = {}  # by record: what plain tensors share
        self._locals: dict[int, tuple[str, View, DTensorSpec, torch.Tensor]] = {}  # by record: placed ones

    def make(self, name: str, tensor: torch.Tensor, placements: Sequence[Placement] | None) -> torch.Tensor:
        if id(tensor) in self.made:
            return self.made[id(tensor)]
        if placements is None and not isinstance(tensor, DeferredTensor):
            return tensor
        if tensor._backward_hooks:
            raise UnsupportedDeferredError(
                f"{name}: a deferred tensor with backward hooks; expected none before materialize(): register them "
                "afterwards"
            )
        values = self._plain(name, tensor) if placements is None else self._placed(name, tensor, placements)
        if isinstance(tensor, nn.Parameter):
            values = nn.Parameter(values, tensor.requires_grad)
        elif tensor.requires_grad and tensor.is_leaf:
            values.requires_grad_()
        values.__dict__.update({key: value for key, value in tensor.__dict__.items() if key != "_is_param"})
        self._kept.append(tensor)
        self.made[id(tensor)] = values
        return values

    def _plain(self, name: str, tensor: Any) -> torch.Tensor:
        view = view_of(tensor)
        key = id(view.record)
        if key in self._locals:
            self._refuse_overlap(name, self._locals[key][0])
        if key not in self._storages:
            values = whole_values(view, self.time)
            storage = values.untyped_storage()
            if self.device is not None and storage.device != self.device:
                moved = torch.empty(0, dtype=torch.uint8).set_(storage).to(self.device)
                storage = moved.untyped_storage()
            self._storages[key] = storage
        return view.on(self._storages[key])

    def _placed(self, name: str, tensor: torch.Tensor, placements: Sequence[Placement]) -> DTensor:
        if self.mesh is None:
            raise MaterializeError(
                f"{name}: placements {tuple(placements)} without a mesh; expected a mesh: pass it, too"
            )
        mesh = (self._mesh_of(name) if self._mesh_of is not None else None) or self.mesh
        try:
            resolved = normalize_placements(placements, tensor.shape, mesh)
        except ValueError as error:
            raise MaterializeError(f"{name}: {error}") from error
        if any(placement.is_partial() for placement in resolved):
            raise MaterializeError(
                f"{name}: placements {resolved}; expected no Partial: initial values are not terms of a sum; use "
                "Replicate() there"
            )
        spec = make_spec(mesh, resolved, tensor.shape, tensor.stride(), tensor.dtype)
        if not isinstance(tensor, DeferredTensor):
            plain = tensor.detach()
            local = _local(mesh, plain.shape, plain.dtype, resolved, lambda region: _own_part(plain, region))
            return make_dtensor(local, spec)
        view = view_of(tensor)
        key = id(view.record)
        if key in self._storages:
            self._refuse_overlap(name, "a tensor without placements")
        if key in self._locals:
            other, other_view, other_spec, local = self._locals[key]
            if (other_view, other_spec.mesh, other_spec.placements) != (view, mesh, resolved):
                self._refuse_overlap(name, other)
        else:
            own = self._into(name) if self._into is not None else None
            local = _local(
                mesh, view.shape, view.dtype, resolved, lambda region: part_values(view, self.time, region, own)
            )
            if own is not None:
                local = own if local is own else own.copy_(local)
            self._locals[key] = (name, view, spec, local)
        return make_dtensor(local, spec)

    def _refuse_overlap(self, name: str, other: str) -> None:
        raise MaterializeError(
            f"{name} shares memory with {other}, but they are placed differently; expected the same placement for all "
            "tensors that share memory: place them in the same way, tie the parameters themselves, or clone one in "
            "the constructor"
        )

    def replace_in(self, module: nn.Module) -> None:
        """Replace deferred tensors by the made ones, also in lists, tuples, dicts and plain attributes."""
        registered: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in registered:
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = self.made.get(id(tensor), tensor)
        for name, value in list(module.__dict__.items()):
            if name not in ("_parameters", "_buffers", "_modules"):
                replaced = self._replaced(name, value)
                if replaced is not value:
                    module.__dict__[name] = replaced

    def _replaced(self, name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.make(name, value, None)
        if type(value) in (list, tuple):
            items = [self._replaced(name, item) for item in value]
            changed = any(new is not old for new, old in zip(items, value, strict=True))
            return type(value)(items) if changed else value
        if type(value) is dict:
            pairs = {key: self._replaced(name, item) for key, item in value.items()}
            return pairs if any(pairs[key] is not value[key] for key in value) else value
        return value


def _local(
    mesh: DeviceMesh,
    shape: Sequence[int],
    dtype: torch.dtype,
    placements: tuple[Placement, ...],
    part: Callable[[Region], torch.Tensor],
) -> torch.Tensor:
    """This rank's part, of which ``part`` computes the values."""
    device = torch.device(mesh.device_type)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return torch.empty(0, dtype=dtype, device=device)
    return part(local_region(tuple(shape), placements, tuple(mesh.shape), tuple(coordinate))).to(device)


def _own_part(whole: torch.Tensor, region: Region) -> torch.Tensor:
    part = part_of_whole(whole, region)
    return part.clone() if part is whole else part


def has_deferred(module: nn.Module) -> bool:
    """Whether a module has a parameter or buffer that is to be materialized."""
    return any(isinstance(tensor, DeferredTensor) for _, tensor in _named_tensors(module))


def fingerprint(tensor: torch.Tensor) -> int:
    """A number of 56 bits that differs for deferred tensors of different values, without computing them: a hash of the
    recorded ops, their arguments and generator states. Raises TypeError for a tensor that has values."""
    return _fingerprint([tensor])


def _fingerprint(tensors: Sequence[torch.Tensor]) -> int:
    digest = hashlib.sha256()
    records: dict[int, Record] = {}
    for tensor in tensors:
        if not isinstance(tensor, DeferredTensor):
            raise ArgumentTypeError(f"{kind_of(tensor)} of shape {tuple(tensor.shape)}; expected a deferred tensor")
        view = view_of(tensor)
        digest.update(repr((view.shape, view.strides, view.offset, view.dtype)).encode())
        records[id(view.record)] = view.record
    time = next_time()
    for record in records.values():
        for op in needed_ops(record, time):
            digest.update(f"{op.func} {op.draws if isinstance(op.draws, RandomOp) else ''}".encode() + op.state)
            for leaf in tree_leaves((op.args, op.kwargs)):
                if isinstance(leaf, Constant):
                    leaf = (tuple(leaf.tensor.shape), _sum_of_bits(leaf.value()))
                elif isinstance(leaf, View):
                    leaf = (leaf.shape, leaf.strides, leaf.offset)
                digest.update(f"{leaf}\n".encode())
    return int.from_bytes(digest.digest()[:7], "little")


def _sum_of_bits(values: torch.Tensor) -> int:
    """A sum that changes if one element changes."""
    if values.is_meta or values.numel() == 0:
        return 0
    return int(bytes_of(values).sum(dtype=torch.int64))


def check_recorded_alike(mesh: DeviceMesh, tensors: Sequence[torch.Tensor]) -> None:
    """Raise RuntimeError on every rank of the mesh if the ranks' constructors started from different generator states or
    ran different ops. Communication: an all-reduce of 16 bytes on each axis."""
    if mesh.get_coordinate() is None:
        return
    number = _fingerprint(tensors)
    extremes = torch.tensor([number, -number], device=mesh.device_type)
    for axis in range(mesh.ndim):
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=mesh.get_group(axis))
    if extremes[0] != -extremes[1]:
        raise MaterializeError(
            "the ranks of the mesh recorded different constructors or generator states; expected the same "
            "model and seed on every rank: call torch.manual_seed(seed) with one seed before deferred_init()"
        )

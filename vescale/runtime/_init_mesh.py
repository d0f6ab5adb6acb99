"""``init_mesh``: a mesh of the ranks of this job, on GPUs or CPUs, under ``torchrun`` or in one process."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from vescale.agreement import Round, compare_descriptions
from vescale.checks import describe, step_checks
from vescale.compat import map_tensors, no_torch_function
from vescale.errors import ConsensusError, ParallelizeError, PlanValueError, RestartedStoreError, kind_of
from vescale.ir import Wrap
from vescale.ops import wrap_global
from vescale.placements import shard_dim
from vescale.plans import MeshAxes, PlanMismatchError, axis_sizes
from vescale.runtime._runtime import Runtime


def init_mesh(axes: str | Mapping[str, int], *, device: str | None = None) -> DeviceMesh:
    """A mesh of all ranks of the job, outermost axis first; the process group is initialized if it is not.

    The same script runs under ``torchrun``, and alone (``python script.py``: one rank, every axis has size 1), on GPUs and
    on CPUs:

    ```python
    mesh = vescale.init_mesh("dp=-1,tp=2")
    model.to(mesh.device_type)
    ```

    Args:
        axes: ``"dp=2,tp=2"`` or ``{"dp": 2, "tp": 2}``. One axis may be -1: the ranks that the others leave. In a process
            without a launcher, sizes are ignored: each axis has the one rank.
        device: the type of device, ``"cpu"`` or the accelerator's; None: the accelerator if there is one, else ``"cpu"``.
            The accelerator's device number ``LOCAL_RANK`` becomes the current one.

    Raises:
        ValueError: invalid names or sizes, or a number of ranks that differs from the job's.
        RuntimeError: torchrun has restarted the ranks with the store of the attempt before, in which they would find each
            other's old addresses.
        PlanMismatchError: ranks pass different axes, sizes or types of device, on every rank, or some ranks do not
            arrive (``init_device_mesh`` hangs then).

    Communication: a rendezvous if the process group is not initialized, a round through its store in which the ranks compare
    the mesh, and what making the groups of a mesh takes.
    """
    if not isinstance(axes, str | Mapping):
        raise PlanValueError(f'axes is {axes!r}, {kind_of(axes)}; pass sizes by name, such as "dp=2,tp=2"')
    sizes = axis_sizes(axes, may_be_open=True) if isinstance(axes, str) else dict(axes)
    kind = device or _accelerator()
    if kind not in ("cpu", "meta") and not dist.is_initialized():
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
    is_alone = not dist.is_initialized() and "WORLD_SIZE" not in os.environ
    filled = _fill(dict.fromkeys(sizes, 1) if is_alone else sizes, _num_ranks())
    if is_alone:
        dist.init_process_group(_backend(kind), store=dist.HashStore(), rank=0, world_size=1)
    elif not dist.is_initialized():
        _check_store()
        dist.init_process_group(_backend(kind))
    if math.prod(filled.sizes) > 1:
        _compare(f"{filled} on {kind}")
    return init_device_mesh(kind, filled.sizes, mesh_dim_names=filled.names)


def _compare(mesh: str) -> None:
    """Raise on every rank if ranks are about to make different meshes: their groups would wait for each other."""
    rounds = Round(range(dist.get_world_size()), "init_mesh")
    try:
        found = compare_descriptions({"mesh": [("axes", mesh)]}, rounds, lambda: f"init_mesh({mesh})")
    except ConsensusError as error:
        raise PlanMismatchError(f"{error}; call init_mesh on every rank", error.ranks) from None
    if found is not None:
        raise PlanMismatchError(
            f"ranks disagree about init_mesh: {found.text()}; pass the same axes on every rank", found.ranks
        )


def _check_store() -> None:
    """The agent of torchrun keeps one store for all attempts unless it is told otherwise (pytorch#135712): ranks that are
    restarted read keys of the attempt before, and wait for addresses where nobody is."""
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if attempt and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise RestartedStoreError(
            f"torchrun has restarted this job (attempt {attempt}) with the store of the previous attempt, in which "
            "ranks find addresses of processes that have ended; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the "
            "environment of torchrun, on every host"
        )


def _accelerator() -> str:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found.type if found is not None else "cpu"


def _backend(kind: str) -> str:
    """One for the device's tensors and one for those of the host, which checks and state dicts use."""
    return "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}"


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def _fill(sizes: Mapping[str, int], num_ranks: int) -> MeshAxes:
    """The axes with the ranks of the job: -1 replaced, and the product checked."""
    written = ",".join(f"{name}={size}" for name, size in sizes.items())
    free = [name for name, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise ParallelizeError(
            f"mesh {written} has {len(free)} axes of size -1 ({', '.join(free)}); only one axis may be -1"
        )
    known = MeshAxes.of({name: size for name, size in sizes.items() if size != -1}) if sizes else MeshAxes((), ())
    product = math.prod(known.sizes)
    if not sizes or num_ranks % product or (not free and product != num_ranks):
        raise ParallelizeError(
            f"mesh {written or 'without axes'} has {product}{' x n' if free else ''} ranks, but this job has "
            f"{num_ranks}; pass sizes whose product is {num_ranks}, start torchrun with --nproc-per-node {product}, "
            "or write -1 for one axis"
        )
    return MeshAxes.of({name: num_ranks // product if size == -1 else size for name, size in sizes.items()})


# ``shard_batch``: a global batch, which every rank has, as DTensors.

Batch = TypeVar("Batch")
_DATA_AXES = frozenset(["batch", "data", "ddp", "dp", "dp_replicate", "dp_shard", "fsdp", "hsdp", "replicate", "shard"])


def shard_batch(batch: Batch, where: DeviceMesh | nn.Module, axes: str | Sequence[str] | None = None) -> Batch:
    """The global batch ``batch``, the same on every rank, as DTensors whose rows (dim 0) are sharded over ranks.

    Each rank keeps its rows, as ``Shard(0)`` over ``axes``. The model and losses take the DTensors as they are, whether
    the plan says ``given="local"`` or not. Tensors in tuples, lists, mappings and dataclasses are sharded, tensors
    without dims become Replicate, DTensors and other objects stay.

        for tokens, labels in loader:  # the global batch on every rank, from equally seeded samplers
            tokens, labels = vescale.shard_batch((tokens, labels), model)
            loss = F.cross_entropy(model(tokens), labels)

    A rank that reads only its rows from a data set is served by :class:`vescale.ShardedBatchSampler` instead.

    Args:
        where: a parallelized model, or a mesh.
        axes: of the mesh, outermost first. None: those over which the model's plan shards rows of inputs; of a mesh,
            its only axis, or those that are called ``dp``, ``fsdp``, ``data`` and the like.

    No communication; ranks compare the batch with the model's next forward, as its inputs
    (:class:`vescale.checks.InputMismatchError`).

    Raises:
        PlanError: a model that is not parallelized.
        ValueError: axes that the mesh does not have, or no axes that are known to be the data's.
    """
    mesh, names = _mesh_and_axes(where, axes)
    known = tuple(mesh.mesh_dim_names or ())
    placements = tuple(Shard(0) if name in names else Replicate() for name in known) or (Shard(0),) * mesh.ndim

    def cut(x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, DTensor):
            return x
        return wrap_global(x, mesh, placements if x.ndim else (Replicate(),) * mesh.ndim, "shard_batch")

    checks = step_checks(mesh)
    with no_torch_function():
        if checks is not None and checks.compares_data:
            for name, text in describe("batch", batch, fully=checks.is_due):
                checks.note(name, text)
        return map_tensors(cut, batch)


def _mesh_and_axes(where: DeviceMesh | nn.Module, axes: str | Sequence[str] | None) -> tuple[DeviceMesh, set[str]]:
    if isinstance(where, nn.Module):
        runtime = Runtime.of(where)
        if runtime is None:
            raise ParallelizeError(
                f"shard_batch got {kind_of(where)} that is not parallelized; expected the model that parallelize "
                "returned, or a mesh and its axes"
            )
        mesh = runtime.mesh
        found = {
            axis
            for instruction in runtime.program
            if instruction.path == "" and isinstance(instruction.op, Wrap)
            for axis, p in zip(runtime.axes.names, instruction.op.placements)
            if p is not None and shard_dim(p) == 0
        }
    else:
        mesh = where
        names = tuple(mesh.mesh_dim_names or ())
        found = set(names) if len(names) == 1 else set(names) & _DATA_AXES
        if axes is None and names and not found:
            raise ParallelizeError(
                f"shard_batch got a mesh with axes {names}, none of which is known to be an axis of the data; pass "
                f"their names: shard_batch(batch, mesh, {names[0]!r})"
            )
    if axes is None:
        return mesh, found
    wanted = {axes} if isinstance(axes, str) else set(axes)
    if not wanted <= set(mesh.mesh_dim_names or ()):
        raise ParallelizeError(f"shard_batch got axes {sorted(wanted)}; the mesh has {mesh.mesh_dim_names}")
    return mesh, wanted

"""What one save holds: tensors by global name, states of optimizers among them, and plain values; of a rank."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from vescale.checkpoint._local_blocks import LocalBlocks, local_blocks
from vescale.checkpoint._model_state import check_model, get_random_state, model_state
from vescale.checkpoint._step_format import TensorName, decode, encode
from vescale.checkpoint._stored import StoredTensor, nearest
from vescale.compat import AVERAGED_MODULES, bytes_of
from vescale.errors import ContentMismatchError, DamagedFileError, UnsavableError, kind_of
from vescale.runtime import Runtime

# States of optimizers by the names of parameters, never by numbers: what is saved, and where it is loaded to.


# Options that decide what the states mean; the others (learning rates, ...) are loaded.
_STRUCTURE = ("algorithm", "blocks", "block", "block_size", "state_dtype", "min_numel", "stochastic_rounding")
_SCALARS = ("step", "mu_product", "eta", "mu")
"""States without dims, also of a parameter without dims."""


def named_optimizers(optimizer: Any) -> dict[str, Optimizer]:
    """One optimizer, a list or a dict of them, each under the name that its tensors have in a checkpoint."""
    if optimizer is None:
        return {}
    if isinstance(optimizer, Mapping):
        found = {f"optimizer.{key}": each for key, each in optimizer.items()}
    elif isinstance(optimizer, list | tuple):
        found = {f"optimizer.{index}": each for index, each in enumerate(optimizer)}
    else:
        found = {"optimizer": optimizer}
    for name, each in found.items():
        if not hasattr(each, "state") or not hasattr(each, "param_groups"):
            raise ContentMismatchError(
                f"{name} is {kind_of(each)} without state and param_groups; expected a torch.optim.Optimizer, a list "
                "or a dict of them. Pass other objects as keyword arguments"
            )
    return found


def optimizer_state(
    prefix: str, optimizer: Optimizer, names: Mapping[int, str], tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """``{"class": ..., "param_groups": [...], "state": {parameter: {...}}}`` as JSON; tensors are added to ``tensors``."""
    groups, states = [], {}
    for index, group in enumerate(optimizer.param_groups):
        members = list(_members(prefix, index, group, names))
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        encoded = encode(options, f"{prefix}.param_groups.{index}", tensors)
        groups.append({"params": [name for name, _ in members], "options": encoded})
        for name, parameter in members:
            state = optimizer.state.get(parameter)
            if state:
                states[name] = encode(dict(state), f"{prefix}.state.{name}", tensors)
    found = {"class": type(optimizer).__name__, "param_groups": groups, "state": states}
    if further := _further_values(prefix, optimizer):
        found["beside"] = encode(further, f"{prefix}.beside", tensors)
    return found


def _further_values(prefix: str, optimizer: Optimizer) -> dict[str, Any]:
    """What a ``state_dict`` of the optimizer's own class has beside states and groups.

    Raises ContentMismatchError if it has states that ``optimizer.state`` has not: they would be lost."""
    own = getattr(type(optimizer), "state_dict", Optimizer.state_dict)
    if own is Optimizer.state_dict:
        return {}
    try:
        found = optimizer.state_dict()
    except RuntimeError as error:
        raise ContentMismatchError(
            f"{prefix}: {type(optimizer).__qualname__}.state_dict() fails ({error}), so that only its .state is "
            "known; pass what should be saved of it as a keyword argument: save(..., my_optimizer=...)"
        ) from error
    states = found.get("state")
    theirs = sum(1 for state in states.values() if state) if isinstance(states, Mapping) else 0
    ours = sum(1 for state in optimizer.state.values() if state)
    if theirs > ours:
        raise ContentMismatchError(
            f"{prefix} is {kind_of(optimizer)}, whose state_dict() has states of {theirs} parameters, and whose "
            f".state has {ours}; the others would be lost. Pass it as a keyword argument, so that its state_dict() is "
            "saved: save(..., my_optimizer=optimizer)"
        )
    return {key: value for key, value in found.items() if key not in ("state", "param_groups")}


def named_groups(prefix: str, optimizer: Optimizer, names: Mapping[int, str]) -> list[list[tuple[str, Any]]]:
    """(name, parameter) of each group."""
    return [list(_members(prefix, index, group, names)) for index, group in enumerate(optimizer.param_groups)]


def _members(prefix: str, index: int, group: Mapping[str, Any], names: Mapping[int, str]) -> Iterator[tuple[str, Any]]:
    own = group.get("param_names") or ()
    if len(own) != len(group["params"]):  # the list of parameters was edited
        own = [None] * len(group["params"])
    for place, (parameter, given) in enumerate(zip(group["params"], own)):
        name = names.get(id(parameter), given)
        if name is None:
            raise ContentMismatchError(
                f"{prefix}: parameter {place} of group {index}, of shape {tuple(parameter.shape)}, is not one of the "
                "model's, so that its state has no name; pass the model that the optimizer was created for, or "
                "create the optimizer with named_parameters()"
            )
        yield name, parameter


@dataclass
class OptimizerLoad:
    """What loading an optimizer takes.

    Attributes:
        targets: tensors to fill, by their names in the checkpoint.
        missing: names of states that the optimizer has and the checkpoint has not.
        structure: names of groups and options that differ in what states mean, as (found, expected).
        makes_as_torch: the optimizer is torch's, which makes states from parameters and gradients.

    What the optimizer's own ``state_dict`` had beside states and groups goes through its ``load_state_dict``.
    """

    targets: dict[str, torch.Tensor] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    structure: dict[str, tuple[str, str]] = field(default_factory=dict)
    makes_as_torch: bool = False
    _states: list[tuple[Any, Any, dict[str, Any]]] = field(default_factory=list)
    _options: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    _further: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)

    def finish(self) -> None:
        """When the targets are filled: put them, and all other values, into the optimizer."""
        for optimizer, further in self._further:  # before states, which torch's loading would cast
            groups = list(optimizer.param_groups)
            optimizer.load_state_dict({**optimizer.state_dict(), **further})
            optimizer.param_groups[:] = groups
        for optimizer, parameter, state in self._states:
            if state:
                optimizer.state[parameter] = {**optimizer.state.get(parameter, {}), **state}
            else:
                optimizer.state.pop(parameter, None)
        for group, options in self._options:
            group.update(options)


def plan_optimizer_load(
    prefix: str,
    optimizer: Optimizer,
    names: Mapping[int, str],
    saved: Mapping[str, Any],
    stored: Mapping[str, StoredTensor],
) -> OptimizerLoad:
    """Nothing is changed before :meth:`OptimizerLoad.finish`, but tensors that are there already are among the targets.

    States that the optimizer would make in its first step are made here, placed like their parameter; where the
    checkpoint has none (it was saved before the first step), the optimizer's are dropped, if it makes them in a step.
    """
    load = OptimizerLoad(makes_as_torch=type(optimizer).__module__.startswith("torch.optim"))
    kind = type(optimizer).__name__
    if saved.get("class", kind) != kind:  # equal names of states need not mean the same
        load.structure[prefix] = (f"the states of {saved['class']}", f"those of {kind}")
    by_member = {name: group for group in saved["param_groups"] for name in group["params"]}
    without = _groups_without_members(saved["param_groups"], optimizer.param_groups)
    for index, group in enumerate(optimizer.param_groups):
        path = f"{prefix}.param_groups.{index}"
        members = list(_members(prefix, index, group, names))
        for name, parameter in members:
            _plan_state(load, f"{prefix}.state.{name}", optimizer, group, parameter, saved["state"].get(name), stored)
        found = [by_member[name] for name, _ in members if name in by_member] if members else without.get(index, [])
        if found:
            _plan_options(load, path, group, found, stored)
        elif members:
            near = nearest(members[0][0], list(by_member))
            load.structure[path] = (
                f"no group with {members[0][0]}" + (f" (nearest: {', '.join(near)})" if near else ""),
                f"the options of {len(members)} parameters",
            )
        elif any(each["options"] for each in saved["param_groups"]):  # files of other programs may have none
            load.structure[path] = (
                f"{len(saved['param_groups'])} groups, and it is not clear which one has no parameters here",
                f"the options of a group without parameters, one of {len(optimizer.param_groups)}",
            )
    if saved.get("beside"):
        some = ((group, parameter) for group in optimizer.param_groups for parameter in group["params"])
        group, parameter = next(some, (optimizer.param_groups[0], torch.zeros(())))
        own = _further_values(prefix, optimizer)
        further = _placed(load, decode(saved["beside"]), own, None, group, parameter, stored)
        load._further.append((optimizer, further))
    return load


def _groups_without_members(
    saved: Sequence[dict[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> dict[int, list[dict[str, Any]]]:
    """The saved group of each group that has no parameters, by which it could be found: that in the same place, else among
    those without parameters."""
    if len(saved) == len(groups):
        return {index: [group] for index, group in enumerate(saved)}
    empty = [group for group in saved if not group["params"]]
    places = [index for index, group in enumerate(groups) if not group["params"]]
    return {index: [group] for index, group in zip(places, empty)} if len(empty) == len(places) else {}


def _plan_state(
    load: OptimizerLoad,
    path: str,
    optimizer: Optimizer,
    group: Mapping[str, Any],
    parameter: torch.Tensor,
    saved: Any,
    stored: Mapping[str, StoredTensor],
) -> None:
    own = optimizer.state.get(parameter) or {}
    if saved is None:
        if own and type(optimizer).__module__.startswith("torch.optim"):
            load._states.append((optimizer, parameter, {}))
        else:
            load.missing += [f"{path}.{key}" for key, value in own.items() if isinstance(value, torch.Tensor)]
        return
    state = {}
    for key, value in decode(saved).items():
        state[key] = _placed(load, value, own.get(key), key, group, parameter, stored)
    load.missing += [
        f"{path}.{key}" for key, value in own.items() if isinstance(value, torch.Tensor) and key not in state
    ]
    load._states.append((optimizer, parameter, state))


def _placed(
    load: OptimizerLoad,
    value: Any,
    own: Any,
    key: Any,
    group: Mapping[str, Any],
    parameter: torch.Tensor,
    stored: Mapping[str, StoredTensor],
) -> Any:
    """``value`` with tensors in place of their names: the optimizer's own, or new ones."""
    if isinstance(value, dict):
        inner = own if isinstance(own, Mapping) else {}
        return {k: _placed(load, item, inner.get(k), k, group, parameter, stored) for k, item in value.items()}
    if isinstance(value, list | tuple):
        others = own if isinstance(own, list | tuple) and len(own) == len(value) else [None] * len(value)
        return type(value)(
            _placed(load, item, each, key, group, parameter, stored) for item, each in zip(value, others)
        )
    if not isinstance(value, TensorName):
        return value
    if not isinstance(own, torch.Tensor):
        entry = stored.get(value)
        if entry is None:
            raise DamagedFileError(
                f"{value}: the checkpoint's values refer to this tensor, but its index does not contain it"
            )
        own = _new_state(entry, key, group, parameter, like_parameter=value.is_sharded or load.makes_as_torch)
    load.targets[str(value)] = own
    return own


@torch.no_grad()
def _new_state(
    entry: StoredTensor, key: Any, group: Mapping[str, Any], parameter: torch.Tensor, *, like_parameter: bool
) -> torch.Tensor:
    """As torch.optim makes it: like the parameter, or a scalar on the CPU, unless a step must not wait for the device.

    ``like_parameter``: a state of another shape (sums of rows and columns) is a DTensor where the parameter is one."""
    if tuple(entry.shape) == tuple(parameter.shape) and key not in _SCALARS:
        return torch.zeros_like(parameter, dtype=entry.dtype, requires_grad=False)
    if entry.shape and like_parameter and isinstance(parameter, DTensor):
        return parameter.detach().new_zeros(entry.shape, dtype=entry.dtype)
    on_device = group.get("capturable") or group.get("fused") or bool(entry.shape)
    return torch.zeros(entry.shape, dtype=entry.dtype, device=parameter.device if on_device else "cpu")


def _plan_options(
    load: OptimizerLoad,
    path: str,
    group: dict[str, Any],
    found: list[dict[str, Any]],
    stored: Mapping[str, StoredTensor],
) -> None:
    if any(each["options"] != found[0]["options"] for each in found):
        load.structure[path] = ("several groups with other options", "one group")
        return
    options = {}
    for key, value in decode(found[0]["options"]).items():
        own = group.get(key)
        if key in _STRUCTURE and key in group and own != value:
            load.structure[f"{path}.{key}"] = (repr(value), repr(own))
        if isinstance(value, TensorName):
            if not isinstance(own, torch.Tensor):
                entry = stored[value]
                own = torch.zeros(entry.shape, dtype=entry.dtype, device="cpu")
            load.targets[str(value)] = own
            options[key] = own
        elif isinstance(own, torch.Tensor) and isinstance(value, int | float):
            options[key] = torch.full_like(own, value)
        else:
            options[key] = value
    load._options.append((group, options))


MODEL = "model"
RANDOM = "rng"
RESERVED = (MODEL, "optimizer", RANDOM, "step", "not_loaded")
_SAMPLE = 64  # elements at the front and at the back of a tensor


@dataclass
class Snapshot:
    """What this rank has of a save.

    Attributes:
        blocks: of all tensors, sorted by name. They refer to the tensors' memory: nothing is copied.
        values: JSON; ``model``, ``optimizers`` and ``beside``.
        buffers: names of tensors that may differ between ranks.
        program: of a parallelized model, as text.
        lacks_optimizer: the model has parameters that are trained, and no optimizer was given.
    """

    blocks: dict[str, LocalBlocks]
    values: dict[str, Any]
    buffers: set[str] = field(default_factory=set)
    program: str | None = None
    lacks_optimizer: bool = False

    def meshes(self) -> list[dict[str, Any]]:
        """Shapes and axes of the meshes that tensors are placed on."""
        found = []
        for mesh in dict.fromkeys(entry.mesh for entry in self.blocks.values() if entry.mesh is not None):
            known = {"shape": list(mesh.shape), "axes": list(mesh.mesh_dim_names or ())}
            if known not in found:
                found.append(known)
        return found


def take_snapshot(model: nn.Module | None, optimizer: Any, more: Mapping[str, Any], *, rng: bool = True) -> Snapshot:
    """No communication; nothing is copied. Raises CheckpointError for what cannot be saved, with its name."""
    for name in more:
        if name.split(".", 1)[0] in RESERVED or name == "optimizers":
            raise UnsavableError(
                f"{name!r} is a name that checkpoints use themselves; pass this value under another name"
            )
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {"model": None, "optimizers": {}, "beside": {}}
    buffers: set[str] = set()
    names: dict[int, str] = {}
    program = None
    if model is not None:
        check_model(model)
        if optimizer is not None and any(module in AVERAGED_MODULES for module in model.modules()):
            raise UnsavableError(
                "the model's parameters are the averages that EMA.swap() has put in their place, from which training "
                "cannot continue: save after the swap has ended, or, to export the averages, save the model without "
                "an optimizer"
            )
        state = model_state(model)
        tensors |= {f"{MODEL}.{name}": tensor for name, tensor in state.tensors.items()}
        buffers = {f"{MODEL}.{name}" for name in state.buffers}
        names = state.names
        known = set(tensors)
        extra = encode(state.extra, MODEL, tensors)
        buffers |= tensors.keys() - known
        values["model"] = {"aliases": state.aliases, "extra": extra}
        runtime = Runtime.of(model)
        program = runtime.program.to_text(merge_layers=True) if runtime is not None else None
    for prefix, each in named_optimizers(optimizer).items():
        values["optimizers"][prefix] = optimizer_state(prefix, each, names, tensors)
    for key, value in more.items():
        try:
            values["beside"][key] = encode(_state_of(value), key, tensors)
        except RecursionError:
            raise UnsavableError(f"{key} contains itself, or is nested too deeply; expected plain data") from None
    if rng:
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        tensors[f"{RANDOM}.{rank}"] = get_random_state()
    blocks = {name: local_blocks(name, _resolved(tensors[name])) for name in sorted(tensors)}
    is_trained = model is not None and any(parameter.requires_grad for parameter in model.parameters())
    return Snapshot(blocks, values, buffers, program, is_trained and optimizer is None)


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Without a conjugation or negation that is done when the tensor is used: its memory has other values."""
    if type(tensor) is torch.Tensor and (tensor.is_conj() or tensor.is_neg()):
        return tensor.resolve_conj().resolve_neg()
    return tensor


def _state_of(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    return value.state_dict() if hasattr(value, "state_dict") else value


def samples(snapshot: Snapshot) -> dict[str, str]:
    """Checksums of some elements of the tensors that every rank has whole: ranks that have different ones under one name
    (experts of their own) are found by them."""
    plain = {
        name: entry.local
        for name, entry in snapshot.blocks.items()
        if entry.mesh is None and entry.local is not None and entry.local.numel() and not name.startswith(RANDOM + ".")
    }
    if not plain:
        return {}
    picked = {name: _ends(local) for name, local in plain.items()}
    by_device: dict[torch.device, list[str]] = {}
    for name, piece in picked.items():
        by_device.setdefault(piece.device, []).append(name)
    found = {}
    for names in by_device.values():  # one copy from each device
        together: Any = torch.cat([picked[name] for name in names]).cpu().numpy()
        stops = list(itertools.accumulate(picked[name].numel() for name in names))
        for name, start, stop in zip(names, [0, *stops], stops):
            found[name] = f"{zlib.crc32(together[start:stop]):08x}"
    return found


def _ends(local: torch.Tensor) -> torch.Tensor:
    """Bytes of the first and last elements."""
    if local.numel() <= 2 * _SAMPLE:
        return bytes_of(local)
    if local.is_contiguous():
        flat = local.view(-1)
        return bytes_of(torch.cat([flat[:_SAMPLE], flat[-_SAMPLE:]]))
    first = local[(0,) * (local.ndim - 1)][:_SAMPLE]
    last = local[(-1,) * (local.ndim - 1)][-_SAMPLE:]
    return bytes_of(torch.cat([first, last]))

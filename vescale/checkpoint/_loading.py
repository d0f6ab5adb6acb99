"""Fill a model, optimizers and other objects from an index of a checkpoint."""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from vescale.checkpoint._model_state import (
    ModelState,
    check_model,
    different_seeds,
    load_extra,
    model_state,
    set_random_state,
)
from vescale.checkpoint._rank_file import values_of_rank
from vescale.checkpoint._reader import read_tensors, read_whole
from vescale.checkpoint._replicas import together
from vescale.checkpoint._snapshot import (
    MODEL,
    RANDOM,
    OptimizerLoad,
    named_groups,
    named_optimizers,
    plan_optimizer_load,
)
from vescale.checkpoint._step_format import TensorName, decode, encode
from vescale.checkpoint._stored import Stored, StoredTensor, compare, nearest
from vescale.checkpoint._torch_save import with_bytes
from vescale.compat import unwrapped_name
from vescale.errors import CheckpointWarning, ContentMismatchError, kind_of
from vescale.gradients import OtherStages, other_stages

# Which tensors fill an object that was saved beside the model, and the state that it is given then.
#
# What counts is what the object itself has now. On another mesh, and in other stages of a pipeline, that may be more
# or less than this rank's object had when it was saved: tensors are found by name, whichever rank has written them.


@dataclass
class ObjectLoad:
    """How one object is filled.

    Attributes:
        targets: its own tensors that the checkpoint has, by name.
        sources: what the checkpoint has for those whose name is another one there, of a tied parameter.
        state: to give to the object, in JSON: what was saved, with the names of its own tensors.
        homeless: sharded tensors of the checkpoint for which it has no place, with the nearest names that it has.
    """

    targets: dict[str, torch.Tensor] = field(default_factory=dict)
    sources: dict[str, StoredTensor] = field(default_factory=dict)
    state: Any = None
    homeless: dict[str, list[str]] = field(default_factory=dict)


def plan_object(
    key: str,
    value: Any,
    saved: Any,
    tensors: Mapping[str, StoredTensor],
    aliases: Mapping[str, str],
    is_of_others: Callable[[str], bool],
) -> ObjectLoad:
    """No communication. Alike on ranks whose objects have the same tensors, whatever each had in the save.

    Args:
        key, value: the object and its name.
        saved: its state, in JSON.
        tensors: of the checkpoint.
        aliases: names of tied parameters to the first one, in the model or in the checkpoint.
        is_of_others: whether a parameter of this name is in another stage of the model.
    """
    found, own = ObjectLoad(), dict[str, torch.Tensor]()
    present = encode(value.state_dict(), key, own) if hasattr(value, "state_dict") else None
    for name, tensor in own.items():
        source = next((each for each in _also_called(name, aliases) if each in tensors), None)
        if source is not None:
            found.targets[name] = tensor
        if source is not None and source != name:
            found.sources[name] = tensors[source]

    def is_elsewhere(name: str) -> bool:
        parts = name.removeprefix(f"{key}.").split(".")
        if any(is_of_others(".".join(parts[start:])) for start in range(len(parts))):
            return True
        return any(each in found.targets for each in _also_called(name, aliases))

    names: list[TensorName] = []
    decode(saved, names.append)
    dropped = {str(name) for name in names if name not in own and is_elsewhere(name)}
    found.homeless = {
        str(name): nearest(name, list(own))
        for name in names
        if name.is_sharded and name not in own and name not in dropped
    }
    found.state = _completed(saved, present, found.targets, dropped)
    return found


def _also_called(name: str, aliases: Mapping[str, str]) -> Iterator[str]:
    """The name, and those that end in another name of the same parameter."""
    yield name
    for alias, first in aliases.items():
        for here, there in ((alias, first), (first, alias)):
            if name.endswith(f".{here}"):
                yield name.removesuffix(here) + there


def _completed(saved: Any, present: Any, targets: Mapping[str, Any], dropped: set[str]) -> Any:
    """``saved`` without the tensors that are dropped, and with those of ``present`` that are filled."""
    if not _is_plain_dict(saved) or not _is_plain_dict(present):
        return saved
    found = {
        key: _completed(value, present.get(key), targets, dropped)
        for key, value in saved.items()
        if _tensor_of(value) not in dropped
    }
    return found | {key: v for key, v in present.items() if key not in saved and _is_filled(v, targets)}


def _is_filled(value: Any, targets: Mapping[str, Any]) -> bool:
    name = _tensor_of(value)
    if name is not None:
        return name in targets
    return _is_plain_dict(value) and bool(value) and all(_is_filled(each, targets) for each in value.values())


def _is_plain_dict(value: Any) -> bool:
    return isinstance(value, dict) and not any(key.startswith("$") for key in value)


def _tensor_of(value: Any) -> str | None:
    if isinstance(value, dict) and len(value) == 1 and (tag := next(iter(value))) in ("$tensor", "$dtensor"):
        return str(value[tag])
    return None


def differ_beyond_tensors(values: Mapping[str, Any]) -> bool:
    """Whether ranks have saved different numbers and text, and not only tensors of different names."""
    plain = [_without_tensors(value) for value in values.values()]
    return any(each != plain[0] for each in plain)


def _without_tensors(value: Any) -> Any:
    if not _is_plain_dict(value):
        return value
    kept = {key: _without_tensors(each) for key, each in value.items() if _tensor_of(each) is None}
    return {key: each for key, each in kept.items() if each != {}}


# States of an optimizer whose parameters have numbers, as ``optimizer.state_dict()`` has them in ``torch.save`` files.

_STATE = re.compile(r"(?:(.*)\.)?state\.(\d+)\.([^.]+)")
_GROUP = re.compile(r"param_groups\.(\d+)(?:\.([^.]+))?")


def numbered_states(stored: Stored, groups: Sequence[Sequence[tuple[str, torch.Tensor]]]) -> dict[str, Any] | None:
    """Groups and states by names, in the form of a manifest; None if the file has no such optimizer, or several.

    Args:
        groups: (name, parameter) of each group of the optimizer that is loaded. Numbers count them in this order.

    Raises CheckpointError where numbers or sizes of the groups differ, or states do not fit their parameters.
    """
    states = {name: match for name in (*stored.tensors, *stored.values) if (match := _STATE.fullmatch(name))}
    prefixes = {match[1] or "" for match in states.values()}
    if len(prefixes) != 1:
        return None
    prefix = f"{prefixes.pop()}.".removeprefix(".")
    saved = _saved_groups(stored, prefix)
    sizes = [len(group["params"]) for group in saved]
    if sizes != [len(group) for group in groups]:
        raise ContentMismatchError(
            f"{stored.path}: the optimizer that was saved has groups of {sizes} parameters, without names, but this "
            f"one has groups of {[len(group) for group in groups]}; create it with the same groups in the same order"
        )
    members = [member for group in groups for member in group]
    numbers = [number for group in saved for number in group["params"]]
    place = dict(zip(numbers, members))
    state: dict[str, dict[str, Any]] = {}
    for found, match in states.items():
        if int(match[2]) not in place:
            raise ContentMismatchError(f"{stored.path}: {found} is the state of a parameter that is in no group")
        name, parameter = place[int(match[2])]
        if found in stored.tensors:
            shape = tuple(stored.tensors[found].shape)
            if len(shape) == parameter.ndim and shape != tuple(parameter.shape):
                raise ContentMismatchError(
                    f"{stored.path}: {found} has shape {shape}, and {name}, the parameter in its place, has shape "
                    f"{tuple(parameter.shape)}; create the optimizer with the parameters in the order in which they "
                    "were saved"
                )
            state.setdefault(name, {})[match[3]] = {"$tensor": found}
        else:
            state.setdefault(name, {})[match[3]] = encode(stored.values[found], found, {})
    named = [
        {"params": [name for name, _ in group], "options": {k: v for k, v in own.items() if k != "params"}}
        for group, own in zip(groups, saved)
    ]
    return {"param_groups": named, "state": state}


def _saved_groups(stored: Stored, prefix: str) -> list[dict[str, Any]]:
    """The options of each group, encoded; ``params`` are numbers."""
    groups: dict[int, dict[str, Any]] = dict(enumerate(stored.values.get(f"{prefix}param_groups", ())))
    for name in (*stored.values, *stored.tensors):  # groups with tensors among their options are taken apart
        match = _GROUP.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None
        if match is None:
            continue
        if match[2] is None:
            groups[int(match[1])] = stored.values[name]
        else:
            value = TensorName(name) if name in stored.tensors else stored.values[name]
            groups.setdefault(int(match[1]), {})[match[2]] = value
    wrong = ContentMismatchError(f"{stored.path}: {prefix}param_groups do not list their parameters")
    if not all(isinstance(group, dict) for group in groups.values()):
        raise wrong
    found = [
        {
            key: {"$tensor": value} if isinstance(value, TensorName) else encode(value, key, {})
            for key, value in groups[number].items()
        }
        for number in sorted(groups)
    ]
    numbers = [group.get("params") for group in found]
    if not all(isinstance(each, list) and all(type(number) is int for number in each) for each in numbers):
        raise wrong
    return found


_COMPARED_STATES = 16  # of ranks whose random states differ, to tell which generators do

# What other programs put in front of the names of a model's tensors.
_PREFIXES = (
    "model.",
    "",
    "module.",
    "state_dict.",
    "state_dict.model.",
    "model_state_dict.",
    "model.module.",
    "app.model.",
)
# And in front of states of their only optimizer.
_OPTIMIZER_PREFIXES = ("optimizer", "optim", "app.optim", "app.optimizer", "optimizer_state_dict")

# Plain values that belong to an optimizer or to a model, in foreign checkpoints.
_NOT_BESIDE = re.compile(r"(?:^|\.)(?:param_groups(?:$|\.)|state\.|_extra_state(?:$|\.))")


def load_stored(
    opened: Callable[[], Stored],
    model: nn.Module | None,
    optimizer: Any,
    more: Mapping[str, Any],
    *,
    strict: bool,
    rng: bool,
    cast: bool,
    call: str,
) -> dict[str, Any]:
    """See ``Checkpointer.restore``. Called by all ranks of the job, in ``call`` of the user."""
    with together(call):  # before anything is changed anywhere
        stored = opened()
        if model is not None:
            check_model(model)
        plan = _Plan(stored, model, optimizer, more, strict=strict, cast=cast)
        if strict:
            plan.differences.refuse(str(stored.path))
    targets = {name: target for name, target in plan.targets.items() if name in plan.fitting}
    read_tensors(plan.stored, targets, cast=cast)
    for load in plan.loads.values():
        load.finish()
    if plan.others and _rank_and_world()[0] == 0:
        warnings.warn(
            f"{stored.path} was saved by {stored.values['world_size']} ranks with different values of "
            f"{', '.join(plan.others)}, and there are {_rank_and_world()[1]} now: all of them get the values of the "
            "first rank",
            CheckpointWarning,
            stacklevel=3,
        )
    if model is not None and plan.extra:
        load_extra(model, plan.extra)
    result: dict[str, Any] = {"step": stored.values.get("step")} if stored.format == "vescale" else {}
    result |= plan.beside(targets) if stored.format == "vescale" else _foreign_values(stored)
    for key, value in more.items():
        if key in result:
            _give_back(value, result[key])
    if rng and stored.format == "vescale":
        _restore_random_state(stored)
    if not strict:
        result["not_loaded"] = plan.differences.as_dict()
    return result


class _Plan:
    """What is read into what, and what does not fit."""

    def __init__(
        self,
        stored: Stored,
        model: nn.Module | None,
        optimizer: Any,
        more: Mapping[str, Any],
        *,
        strict: bool,
        cast: bool,
    ) -> None:
        self.targets: dict[str, torch.Tensor] = {}
        self.loads: dict[str, OptimizerLoad] = {}
        self.extra: dict[str, Any] = {}
        self.saved, self.others = _values_here(stored)
        state = model_state(model) if model is not None else ModelState({}, {}, set(), {}, {})
        self.stored = stored = _with_our_names(stored, state)
        structure: dict[str, tuple[str, str]] = {}
        extra_missing: list[str] = []
        surplus: set[str] = set()
        if model is not None:
            self.targets |= {f"{MODEL}.{name}": tensor for name, tensor in state.tensors.items()}
            surplus |= {name for name in stored.tensors if name.startswith(f"{MODEL}.")}
            surplus -= {f"{MODEL}.{alias}" for alias in (*state.aliases, *self._aliases())}
            structure |= self._untied(stored, state)
            surplus -= self._take_extra(state, extra_missing)
        for prefix, each in named_optimizers(optimizer).items():
            saved = (self.saved.get("optimizers") or {}).get(prefix) or _by_names(stored, prefix, state)
            if saved is None and stored.format == "torch" and prefix == "optimizer":
                saved = numbered_states(stored, named_groups(prefix, each, state.names))
            if saved is None:
                if strict:
                    raise ContentMismatchError(
                        f"{stored.path} has no {prefix}; it has {sorted(self.saved.get('optimizers') or {}) or 'none'}. "
                        "Pass optimizers in the form they were saved in (one, a list or a dict), or none"
                    )
                extra_missing.append(prefix)
                continue
            load = self.loads[prefix] = plan_optimizer_load(prefix, each, state.names, saved, stored.tensors)
            self.targets |= load.targets
            extra_missing += load.missing
            structure |= load.structure
            surplus |= {name for name in stored.tensors if name.startswith(f"{prefix}.state.")}
        others = other_stages(model) if model is not None else OtherStages()
        self.homeless: dict[str, list[str]] = {}
        extra_missing += self._take_beside(more, state.aliases | self._aliases(), others, strict=strict)
        stored = self.stored
        given = ((stored.values.get("values") or {}).get("ranks") or {}).get("beside") or {}
        self.others = [k for k in self.others if k not in more or k not in given or differ_beyond_tensors(given[k])]
        prefixes = (f"{MODEL}.", *(f"{prefix}.state." for prefix in self.loads))
        surplus = {n for n in surplus if not any(n.startswith(p) and others.have(n.removeprefix(p)) for p in prefixes)}
        self.differences = compare(stored.tensors, self.targets, cast=cast, surplus=surplus)
        for name in extra_missing:
            self.differences.missing[name] = nearest(name, list(stored.tensors))
        self.differences.misshapen |= structure
        self.differences.surplus |= self.homeless
        if isinstance(optimizer, list | tuple | Mapping) or optimizer is not None:
            self._other_optimizers(named_optimizers(optimizer))
        self.fitting = set(self.targets) - self.differences.missing.keys() - self.differences.misshapen.keys()

    def beside(self, targets: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """What was saved beside model and optimizer, by name."""
        result = {}
        left_out = []
        saved = self.saved.get("beside") or {}
        for key, value in saved.items():
            names: list[TensorName] = []
            decode(value, lambda name, names=names: names.append(name))  # type: ignore[misc]
            unread = [name for name in names if name not in targets]
            if any(name.is_sharded for name in unread):
                if not any(name in self.homeless for name in unread):
                    left_out.append(key)
                continue
            whole = read_whole(self.stored, map(str, unread))
            result[key] = decode(value, lambda name, whole=whole: targets.get(name, whole.get(name)))  # type: ignore[misc]
        if left_out:
            warnings.warn(
                f"{self.stored.path} also holds {left_out}, whose tensors are sharded; to load them, pass objects by "
                "these names",
                CheckpointWarning,
                stacklevel=4,
            )
        return result

    def _aliases(self) -> dict[str, str]:
        return dict((self.saved.get("model") or {"aliases": {}})["aliases"])

    def _untied(self, stored: Stored, state: ModelState) -> dict[str, tuple[str, str]]:
        """Tied in the model, but two tensors in a checkpoint of ours."""
        if stored.format != "vescale":
            return {}
        found = {}
        for alias, first in state.aliases.items():
            one, other = stored.tensors.get(f"{MODEL}.{alias}"), stored.tensors.get(f"{MODEL}.{first}")
            if one is not None and other is not None and one is not other:
                found[f"{MODEL}.{alias}"] = (
                    "a tensor of its own",
                    f"one tensor with {MODEL}.{first}, which it is tied to",
                )
        return found

    def _take_extra(self, state: ModelState, missing: list[str]) -> set[str]:
        """The tensors of the checkpoint that it takes."""
        saved = (self.saved.get("model") or {}).get("extra") or {}
        names: list[str] = []
        decode(saved, lambda name: names.append(str(name)))
        whole = read_whole(self.stored, names)
        self.extra = decode(saved, lambda name: whole[str(name)])
        for name in sorted(state.extra.keys() - self.extra.keys()):
            parts = _parts_of(self.stored, name)
            held = read_whole(self.stored, [part for part in parts.values() if isinstance(part, TensorName)])
            for path, part in parts.items():
                value = held[part] if isinstance(part, TensorName) else with_bytes(part)
                *parents, last = (name, *path.split(".")) if path else (name,)
                functools.reduce(lambda at, key: at.setdefault(key, {}), parents, self.extra)[last] = value
            names += held
        if self.stored.format != "safetensors":  # which holds tensors only
            missing += [f"{MODEL}.{name}" for name in state.extra if name not in self.extra]
        return set(names)

    def _take_beside(
        self, more: Mapping[str, Any], aliases: Mapping[str, str], others: OtherStages, *, strict: bool
    ) -> list[str]:
        """Names that the checkpoint does not have."""
        saved = self.saved["beside"] = dict(self.saved.get("beside") or {})
        missing = []
        sources: dict[str, StoredTensor] = {}
        for key, value in more.items():
            if not isinstance(value, torch.Generator) and not hasattr(value, "load_state_dict"):
                raise ContentMismatchError(
                    f"{key} is {kind_of(value)} without load_state_dict; take result[{key!r}] instead of passing it"
                )
            if key not in saved:
                if strict:
                    raise ContentMismatchError(
                        f"{self.stored.path} has nothing saved as {key!r}; it has {sorted(saved)}: use the name that "
                        "was passed to save(), or leave it out"
                    )
                missing.append(key)
                continue
            load = plan_object(key, value, saved[key], self.stored.tensors, aliases, others.have)
            self.targets |= load.targets
            sources |= load.sources
            self.homeless |= load.homeless
            saved[key] = load.state
        self.stored = replace(self.stored, tensors={**self.stored.tensors, **sources})
        return missing

    def _other_optimizers(self, ours: Mapping[str, Any]) -> None:
        for prefix in (self.saved.get("optimizers") or {}).keys() - ours.keys():
            self.differences.surplus[prefix] = []


def _values_here(stored: Stored) -> tuple[dict[str, Any], list[str]]:
    """(what was saved beside tensors, for this rank; names of values that differed between ranks, and are the first's)."""
    values = stored.values.get("values") if stored.format == "vescale" else None
    if not values:
        return {}, []
    rank, world = _rank_and_world()
    return values_of_rank(values, rank, same_world=stored.values.get("world_size") == world)


def _parts_of(stored: Stored, name: str) -> dict[str, Any]:
    """Tensors (their names) and plain values of a module's extra state, by their paths in it; other programs take dicts
    apart."""
    found: dict[str, Any] = {}
    values = stored.values if stored.format in ("torch", "dcp") else {}
    for prefix in reversed(_PREFIXES):
        start = f"{prefix}{name}"
        parts = {key.removeprefix(start): value for key, value in values.items() if key.startswith(start)}
        found |= {path[1:]: value for path, value in parts.items() if path[:1] in ("", ".")}
    start = f"{MODEL}.{name}"
    parts = {key.removeprefix(start): TensorName(key) for key in stored.tensors if key.startswith(start)}
    return found | {path[1:]: key for path, key in parts.items() if path[:1] in ("", ".")}


def _foreign_values(stored: Stored) -> dict[str, Any]:
    """What a file of ``torch.save`` or a DCP folder holds beside the states of models and optimizers, as in JSON."""
    if stored.format not in ("torch", "dcp"):
        return {}
    return {name: with_bytes(value) for name, value in stored.values.items() if not _NOT_BESIDE.search(name)}


def _rank_and_world() -> tuple[int, int]:
    there = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if there else (0, 1)


def _with_our_names(stored: Stored, state: ModelState) -> Stored:
    """A foreign checkpoint with its model's tensors under ``model.``, whatever its names begin with."""
    if stored.format == "vescale" or not state.tensors:
        return stored

    entries = _without_wrappers(stored.tensors)
    names = (*state.tensors, *state.aliases)
    prefix = max(_PREFIXES, key=lambda prefix: sum(f"{prefix}{name}" in entries for name in names))
    if not any(f"{prefix}{name}" in entries for name in names):
        other = _other_prefix(entries, [*state.tensors])
        if other is not None:
            warnings.warn(
                f"{stored.path} has the model's names only with the prefix {other!r}; these tensors are loaded as the "
                "model's",
                CheckpointWarning,
                stacklevel=5,
            )
            prefix = other
    tensors = {}
    for name, entry in entries.items():
        if not name.startswith(prefix) or (name.startswith("optimizer.") and prefix == ""):
            tensors[name] = entry
        else:
            tensors[f"{MODEL}.{name.removeprefix(prefix)}"] = entry
    for alias, first in state.aliases.items():  # a model whose ties were saved under another name
        if f"{MODEL}.{first}" not in tensors and f"{MODEL}.{alias}" in tensors:
            tensors[f"{MODEL}.{first}"] = tensors[f"{MODEL}.{alias}"]
    return replace(stored, tensors=tensors)


def _without_wrappers(tensors: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
    """By names without the parts that wrappers of modules add, unless two tensors then have one name."""
    plain = {unwrapped_name(name): tensor for name, tensor in tensors.items()}
    return plain if len(plain) == len(tensors) else tensors


def _other_prefix(tensors: Mapping[str, StoredTensor], names: Sequence[str]) -> str | None:
    """What stands in front of the names of one whole model; None where nothing does, or more than one thing."""
    found = {name.removesuffix(names[0]) for name in tensors if name.endswith(f".{names[0]}")}
    whole = [prefix for prefix in found if all(f"{prefix}{name}" in tensors for name in names)]
    return whole[0] if len(whole) == 1 else None


def _by_names(stored: Stored, prefix: str, state: ModelState) -> dict[str, Any] | None:
    """The states of a foreign checkpoint whose names are ``optimizer.state.PARAMETER.STATE``, or ``optim.state...`` as in
    PyTorch's tutorials; options are not taken."""
    if stored.format == "vescale":
        return None
    prefixes = _OPTIMIZER_PREFIXES if prefix == "optimizer" else (prefix,)
    start = next((s for p in prefixes for s in (f"{p}.state.",) if any(n.startswith(s) for n in stored.tensors)), "")
    found: dict[str, dict[str, Any]] = {}
    parameters = sorted(state.names.values(), key=len, reverse=True)
    for name in stored.tensors if start else ():
        if name.startswith(start):
            rest = name.removeprefix(start)
            owner = next((each for each in parameters if rest.startswith(f"{each}.")), None)
            if owner is not None:
                found.setdefault(owner, {})[rest.removeprefix(f"{owner}.")] = {"$tensor": name}
    if not found:
        return None
    return {"param_groups": [{"params": parameters, "options": {}}], "state": found}


def _give_back(value: Any, state: Any) -> None:
    if isinstance(value, torch.Generator):
        value.set_state(state.cpu())
    else:
        value.load_state_dict(state)


def _restore_random_state(stored: Stored) -> None:
    rank, world = _rank_and_world()
    names = sorted((name for name in stored.tensors if name.startswith(f"{RANDOM}.")), key=lambda name: int(name[4:]))
    if not names:
        return
    if stored.values.get("same_random_state") or len(names) == world:
        own = names[0] if stored.values.get("same_random_state") else f"{RANDOM}.{rank}"
    else:
        own = names[0]
        if rank == 0:
            seeds = different_seeds([*read_whole(stored, names[:_COMPARED_STATES]).values()])
            calls = f", the ones of {', '.join(seeds)}" if seeds else ""
            warnings.warn(
                f"{stored.path} was saved by {len(names)} ranks whose random states differ{calls}, and there are "
                f"{world} now: all continue with the state of the first rank. Use the same seed on all ranks to draw "
                "the same numbers on any mesh",
                CheckpointWarning,
                stacklevel=5,
            )
    set_random_state(read_whole(stored, [own])[own])

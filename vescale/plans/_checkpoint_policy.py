"""What a checkpointed module saves for backward: the policies of ``plan.checkpoint``, and their forms in a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import regex

from vescale.errors import CheckpointPolicyError, did_you_mean
from vescale.plans._path import Path, Target

__all__ = ["CheckpointKind", "CheckpointPolicy", "checkpoint_budget", "checkpoint_policy", "split_selector"]

CheckpointKind = Literal["full", "selective", "save", "offload"]
_NAMES: tuple[str, ...] = tuple(kind for kind in get_args(CheckpointKind) if kind != "save")
_OPTIONS = ("save", "every", "recompute_communication")
_OP = regex.compile(r"[A-Za-z_]\w*\.[A-Za-z_]\w*(\.[A-Za-z_]\w*)?")


@dataclass(frozen=True)
class CheckpointPolicy:
    """What is saved between the forward of a checkpointed module and its backward.

    Attributes:
        kind: ``full``: the inputs; ``selective``: also results of ops that take long to compute; ``save``: also those of
            the ops that are named; ``offload``: everything, in host memory.
        save: ops (``aten.mm``, ``aten.mm.default``), or ``path :: op`` for those of some modules.
        every: of the ops in ``save``, or the products of ``selective``, every so-manieth call is saved, the first one among
            them; calls are counted for each op and call of the module.
        recompute_communication: collectives in the forward run again, instead of being saved.
    """

    kind: CheckpointKind
    save: tuple[str, ...] = ()
    every: int = 1
    recompute_communication: bool = False

    def form(self) -> str | dict[str, Any]:
        """The policy as a plan has it; :func:`checkpoint_policy` reads it."""
        default = _EVERY.get(self.kind, 1)
        if self.every == default and not self.recompute_communication and self.kind != "save":
            return self.kind
        options: dict[str, Any] = {"save": list(self.save) if self.kind == "save" else self.kind}
        if self.kind == "full":
            options["save"] = []
        if self.every != default:
            options["every"] = self.every
        if self.recompute_communication:
            options["recompute_communication"] = True
        return options

    def text(self) -> str:
        """For programs and tables."""
        parts = [",".join(name.replace(" ", "") for name in self.save) if self.kind == "save" else self.kind]
        parts += [f"every={self.every}"] if self.every != 1 else []
        parts += ["recompute_communication"] if self.recompute_communication else []
        return ";".join(parts)


# Calls of which one is saved, by default.
_EVERY = {"selective": 2}


def checkpoint_policy(given: str | Mapping[str, Any] | CheckpointPolicy) -> CheckpointPolicy:
    """The policy of its form in a plan. Raises ValueError with the right form."""
    if isinstance(given, CheckpointPolicy):
        return given
    if isinstance(given, str):
        if given not in _NAMES:
            raise CheckpointPolicyError(
                f"policy={given!r}; use {', '.join(map(repr, _NAMES))}, or {{'save': ['aten.mm'], 'every': 2}}"
                f"{did_you_mean(given, _NAMES)}"
            )
        return CheckpointPolicy(given, every=_EVERY.get(given, 1))  # type: ignore[arg-type]
    if not isinstance(given, Mapping):
        raise CheckpointPolicyError(
            f"policy={given!r}; use {', '.join(map(repr, _NAMES))}, or {{'save': ['aten.mm'], 'every': 2}}"
        )
    unknown = sorted(set(map(str, given)) - set(_OPTIONS))
    if unknown:
        raise CheckpointPolicyError(
            f"policy has no {unknown[0]!r}; use {', '.join(_OPTIONS)}{did_you_mean(unknown[0], _OPTIONS)}"
        )
    if "save" not in given:
        raise CheckpointPolicyError("policy lacks 'save': a list of ops such as ['aten.mm'], or 'selective'")
    kind, save = _saved(given["save"])
    every, again = given.get("every", _EVERY.get(kind, 1)), given.get("recompute_communication", False)
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise CheckpointPolicyError(
            f"every={every!r}; use 1 to save each call of an op, 2 for every second one, and so on"
        )
    if every != 1 and kind == "full":
        raise CheckpointPolicyError(f"every={every} with nothing to save; name ops in save, or leave every out")
    if not isinstance(again, bool):
        raise CheckpointPolicyError(f"recompute_communication={again!r}; use True or False")
    return CheckpointPolicy(kind, save, every, again)


def checkpoint_budget(given: Any, policy: CheckpointPolicy) -> float | None:
    """``budget_gib`` of an entry. Raises ValueError with the right form."""
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < float("inf"):
        raise CheckpointPolicyError(f"budget_gib={given!r}; use GiB on each rank, as 4 or 0.5")
    if policy.kind == "offload":
        raise CheckpointPolicyError(
            "budget_gib with 'offload', which computes nothing again; a budget chooses what is: use policy='full' with it"
        )
    return float(given)


def _saved(given: Any) -> tuple[CheckpointKind, tuple[str, ...]]:
    if given == "selective":
        return "selective", ()
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise CheckpointPolicyError(f"save={given!r}; use a list of ops such as ['aten.mm'], or 'selective'")
    names = tuple(_normalized(name) for name in given)
    return ("save", names) if names else ("full", ())


def _normalized(text: Any) -> str:
    if not isinstance(text, str):
        text = f"{text}" if hasattr(text, "_schema") or hasattr(text, "overloads") else text
    if not isinstance(text, str):
        raise CheckpointPolicyError(
            f"save holds {text!r}; name ops as 'aten.mm' or 'aten.mm.default', or 'path :: aten.mm'"
        )
    path, op = split_selector(text)
    if not _OP.fullmatch(op):
        raise CheckpointPolicyError(
            f"save holds {text!r}; name ops as 'aten.mm' or 'aten.mm.default', or 'path :: aten.mm'"
        )
    if path is None:
        return op
    if Path.parse(path).target is not Target.STATE:
        raise CheckpointPolicyError(f"save holds {text!r}: {path!r} must name modules; leave out <...> and .grad")
    return f"{path} :: {op}"


def split_selector(text: str) -> tuple[str | None, str]:
    """(path, op) of ``path :: op``; None for an op of any module."""
    path, colons, op = text.rpartition("::")
    return (path.strip() if colons else None), op.strip().removeprefix("torch.ops.")

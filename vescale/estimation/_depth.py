"""Repeated blocks of a model: one stands for several equal ones that follow each other."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from torch import nn

from vescale.estimation._rehearsal import Rehearsal, is_of_parameters
from vescale.estimation._skeleton import skeleton_of
from vescale.ir import Repeats


def first_and_last_of(model: nn.Module, repeats: tuple[Repeats, ...]) -> nn.Module:
    """A copy of ``model`` without memory and without the modules of the runs between the first and the last; the rest keep
    their names."""
    left_out = [(run.path, name) for run in repeats for name in run.names[1:-1]]
    found = skeleton_of(model, [getattr(model.get_submodule(path), name) for path, name in left_out])
    for path, name in left_out:
        del found.get_submodule(path)._modules[name]
    return found


def typical_runs(repeats: tuple[Repeats, ...], seen: Rehearsal) -> tuple[Repeats, ...]:
    """The same runs, each without its first module if that one is not like the others: parts of it were called from
    elsewhere, or it communicated otherwise than the last one. The second one then stands for those that are left out.

    Args:
        repeats: runs of equal modules, of which the first and the last ones have run.
        seen: what they did.
    """
    return tuple(
        replace(run, names=run.names[1:]) if len(run.names) > 3 and _is_special(run, seen) else run for run in repeats
    )


def _is_special(run: Repeats, seen: Rehearsal) -> bool:
    """Whether the first module is."""
    first, last = (_what_it_did(run, name, seen) for name in (run.names[0], run.names[-1]))
    is_inside = [(path, caller) for path, caller in seen.calls if run.holds(path) and path != run.stand_in]
    return first != last or any(not run.holds(caller) for _, caller in is_inside)


def _what_it_did(run: Repeats, name: str, seen: Rehearsal) -> Counter[Any]:
    """Collectives of activations of one module, and how its gradients are reduced beside a unit."""
    own = f"{run.path}.{name}.".lstrip(".")
    moved = (one for one in seen.collectives if not is_of_parameters(one.requester))
    found = Counter(
        (one.op, one.axes, one.bytes, one.requester.replace(own, "")) for one in moved if own in one.requester
    )
    gradients = (one for one in seen.in_buckets if one.name.startswith(own))
    return found + Counter((one.name.removeprefix(own), one.axes, one.is_scattered) for one in gradients)

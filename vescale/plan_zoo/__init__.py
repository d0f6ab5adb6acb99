"""Plans that ship with the library: ``plan_zoo.load("llama", mesh)``. Names and descriptions are read without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from vescale.errors import DerivedPlanError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from vescale.plans import MeshAxes, Plan

__all__ = ["About", "about", "load", "names", "path_of"]

_FOLDER = Path(__file__).parent
_ENTRIES = re.compile(r"^(?:vars|shard|local):", re.MULTILINE)  # a description and a mesh stand before them


@dataclass(frozen=True)
class About:
    """The description in a plan file of the zoo.

    Attributes:
        name: of the plan, for ``load``.
        axes: the axes that its mesh must have.
        description: one or two sentences.
    """

    name: str
    axes: tuple[str, ...]
    description: str


def names() -> tuple[str, ...]:
    """The names of all plans, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


def path_of(name: str) -> Path:
    """The YAML file of a plan, to read or to copy. Raises PlanError naming the plans there are.

    Args:
        name: one of :func:`names`.
    """
    if name not in names():
        from vescale.plans import did_you_mean

        raise DerivedPlanError(
            f"the plan zoo has no plan {name!r} (plans: {', '.join(names())}){did_you_mean(name, names())}"
        )
    return _FOLDER / f"{name}.yaml"


def about(name: str) -> About:
    """The axes and description in the plan's file.

    Args:
        name: one of :func:`names`.
    """
    text = path_of(name).read_text(encoding="utf-8")
    data = yaml.safe_load(_ENTRIES.split(text, 1)[0])
    return About(name, tuple(data.get("mesh", {})), str(data.get("description", "")))


def load(name: str, mesh: DeviceMesh | Mapping[str, int] | MeshAxes) -> Plan:
    """The plan ``name`` for a mesh with the axes that the plan names, or more.

    Raises PlanError for an unknown name, or a mesh that lacks an axis of the plan.

    Args:
        mesh: a ``DeviceMesh``, or names and sizes of axes.
    """
    from vescale.plans import Plan

    return Plan.from_yaml(path_of(name), mesh)

"""Errors of plans: what is written in Python or YAML, before a model is looked at."""

from __future__ import annotations

from collections.abc import Iterable

from vescale.errors._coded import Coded, Source

# ``PlanError``, with the place to edit.


class PlanError(Coded, ValueError):
    """An invalid plan: what was found, what was expected, and the edit that fixes it, with its source.

    ``source`` is the position of the mistake, if known; ``problem`` is the message without it.
    """

    code = "VS0100"

    def __init__(self, problem: str, source: Source | None = None) -> None:
        super().__init__(f"{source}: {problem}" if source is not None else problem)
        self.problem = problem
        self.source = source


class MissingMeshError(PlanError):
    """A plan file without sizes of its axes was read without a mesh."""

    code = "VS0120"


class PlanMismatchError(PlanError):
    """Ranks are about to run different things; the same error on every rank, before any collective.

    ``ranks``: the global ranks that differ from the majority, or have not come.
    """

    code = "VS0201"

    def __init__(self, problem: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(problem)
        self.ranks = tuple(ranks)


class PathError(Coded, ValueError):
    """The path of an entry cannot be read: it is empty, no regular expression, or uses what paths do not have."""

    code = "VS0101"


class EntryError(PlanError):
    """An entry of a plan contradicts itself or the mesh: an unknown axis, no placement, arguments that exclude others."""

    code = "VS0100"


class YamlPlanError(PlanError):
    """A YAML plan has a section, key or value that plans do not have."""

    code = "VS0120"


class BufferMismatchError(Coded, ValueError):
    """Ranks of one process group have planned different buffers."""

    code = "VS0201"


class ShardingMismatchError(PlanMismatchError, BufferMismatchError):
    """Ranks have given different parameters, or options, to ``fully_shard``."""

    code = "VS0201"


class PlanValueError(Coded, ValueError):
    """A mesh, a phase or a policy of a plan has a value that is not possible."""

    code = "VS0100"

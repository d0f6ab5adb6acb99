"""What a simulated rank has done, as plain data: its collectives, its waits, memory, and how its program ended."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

# Where ranks meet, and move nothing: to make a group, and to compare a plan, a program or other descriptions.
NEW_GROUP, COMPARISON = "new_group", "comparison"


@dataclass
class Collective:
    """A collective, or a message, as one rank started it.

    Attributes:
        op: ``all_reduce``, ``all_gather``, ``send``, ... as in :class:`vescale.comm.Operation`.
        group: the process group's name, by which ranks find each other; ``ranks``: its global ranks.
        axis: the mesh axes it spans, joined with ``,``, or "".
        bytes: that this rank receives from others.
        site: who asked for it, and the line of the program.
        peer: of a message, the other rank; None: any.
        agreed: what must be equal on all ranks of the group, by name: sizes, dtype, root, reduction; of a comparison, its
            sections.
        about: of a comparison, what it is for.
    """

    op: str
    group: str
    ranks: list[int]
    axis: str
    bytes: int
    site: str
    peer: int | None = None
    agreed: dict[str, Any] = field(default_factory=dict)
    about: str = ""

    @property
    def is_message(self) -> bool:
        """Between two ranks."""
        return self.op in ("send", "recv")

    def text(self) -> str:
        """A line for people."""
        over = f"axis {self.axis!r}" if self.axis else "ranks"
        if self.op == COMPARISON:
            return f"{self.about} of ranks {ranks_text(self.ranks)} at {self.site}"
        agreed = self.agreed if self.op != NEW_GROUP else {}
        details = ", ".join(f"{name} {value}" for name, value in agreed.items())
        details = f" ({details})" if details else ""
        if self.is_message:
            to = "to" if self.op == "send" else "from"
            other = "any rank" if self.peer is None else f"rank {self.peer}"
            return f"{self.op} {to} {other}{details} at {self.site}"
        return f"{self.op} of {over} {ranks_text(self.ranks)}{details} at {self.site}"


@dataclass
class Ending:
    """How a rank's program ended.

    Attributes:
        how: ``normally``; ``error``; ``never-comes``: it waited for a key of the store; ``timeout``.
        text: of an error, its type and message. at: the line of the program.
    """

    how: str = "normally"
    text: str = ""
    at: str = ""


@dataclass
class RankRecord:
    """One simulated rank.

    Attributes:
        calls: collectives, and where groups were made and descriptions compared, in the order in which they were started.
        order: ``n`` where call n was started, ``~n`` where the program waited for it.
        rank: its global number; ``ending``: how its program ended.
        peak_bytes: of memory, at ``peak_at``; ``categories``: those of :mod:`vescale.estimation` at that instant.
        host_seconds: processor seconds of the program without those of the simulated ops.
    """

    rank: int
    calls: list[Collective] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    peak_bytes: int = 0
    peak_at: str = ""
    categories: dict[str, int] = field(default_factory=dict)
    host_seconds: float = 0.0
    ending: Ending = field(default_factory=Ending)

    @property
    def collectives(self) -> list[Collective]:
        """Those of ``calls`` that move something."""
        return [one for one in self.calls if one.op not in (NEW_GROUP, COMPARISON)]

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RankRecord:
        """What ``to_json`` returned, as ``data``."""
        calls = [Collective(**one) for one in data["calls"]]
        return cls(**{**data, "calls": calls, "ending": Ending(**data["ending"])})


def ranks_text(ranks: list[int] | tuple[int, ...]) -> str:
    """``[0, 1, 2]``; of many, ``[0, 1, 2, ..., 1023]``."""
    if len(ranks) <= 8:
        return str(list(ranks))
    return f"[{', '.join(map(str, ranks[:3]))}, ..., {ranks[-1]}]"

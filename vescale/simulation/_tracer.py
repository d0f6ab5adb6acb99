"""``Tracer``: the collectives of a simulated rank in order, and where its program waits for them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist

from vescale.agreement import Description, Round
from vescale.comm import Operation, received_bytes
from vescale.compat import tree_leaves
from vescale.compat.simulated_ranks import reduction_name
from vescale.debug import CommTrace, running_place

# What a simulated rank has done, as plain data: its collectives, its waits, memory, and how its program ended.


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


_SIZED = (
    "allreduce_",
    "broadcast_",
    "reduce_",
    "_allgather_base_",
    "_reduce_scatter_base_",
    "send",
    "recv_",
    "recv_any_source_",
)
# Operators whose sizes must be equal on all ranks. Those of lists may differ by rank, and of all-to-alls as well.


_UNKNOWN = ("values", "random state")  # sections of descriptions
_LISTED = 64  # entries of a section that are kept; of more, a digest


@dataclass
class Call:
    """A call of an operator of c10d.

    Attributes:
        name: of the operator; ``arguments``: by name.
        ranks: global ranks of the group.
        agreed: see :class:`Collective`. root, peer: global ranks.
    """

    name: str
    arguments: dict[str, Any]
    group: str
    ranks: tuple[int, ...]
    is_async: bool
    agreed: dict[str, Any] = field(default_factory=dict)
    root: int | None = None
    peer: int | None = None

    @classmethod
    def of(cls, op: Any, args: Any, kwargs: Any) -> Call:
        names = [argument.name for argument in op._schema.arguments]
        arguments = {**dict(zip(names, args)), **kwargs}
        group = arguments["process_group"]
        if not isinstance(group, dist.ProcessGroup):
            group = dist.ProcessGroup.unbox(group)
        ranks = tuple(dist.get_process_group_ranks(group))
        call = cls(
            op.overloadpacket.__name__, arguments, str(group.group_name), ranks, bool(arguments.get("async_op", True))
        )
        for name in ("src", "dst"):
            if name in arguments:
                call.peer = ranks[arguments[name]]
        if "root_rank" in arguments:
            call.root = call.agreed["root"] = ranks[arguments["root_rank"]]
        if "reduce_op" in arguments:
            call.agreed["reduction"] = reduction_name(arguments["reduce_op"])
        if call.name in _SIZED:
            given = next((arguments[n] for n in ("input_tensor", "input", "tensors") if n in arguments), ())
            tensors = [x for x in tree_leaves(given) if isinstance(x, torch.Tensor)]
            call.agreed["bytes"] = sum(x.numel() * x.element_size() for x in tensors)
            call.agreed["dtype"] = ", ".join(sorted({str(x.dtype).removeprefix("torch.") for x in tensors}))
        return call

    def sides(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The tensors that the rank gives, and those that it gets."""
        given = [n for n in self.arguments if n.startswith("input")]
        got = [n for n in self.arguments if n.startswith("output")]
        if not any(isinstance(x, torch.Tensor) for n in (*given, *got) for x in tree_leaves(self.arguments[n])):
            given = got = ["tensors"]
        found = [
            [x for n in names for x in tree_leaves(self.arguments.get(n, ())) if isinstance(x, torch.Tensor)]
            for names in (given, got)
        ]
        return found[0], found[1]


class Tracer(CommTrace):
    """A communication trace, with what ranks must agree on and with waits.

    Attributes:
        calls, order: see :class:`RankRecord`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Collective] = []
        self.order: list[int] = []
        self._call: Call | None = None
        self._functional = False
        self._works: dict[int, tuple[Any, int]] = {}
        self._results: dict[int, int] = {}
        self._waited: set[int] = set()

    def started(self, operation: Operation) -> None:
        """Called for each operation, before it runs."""
        super().started(operation)
        if not self.operations or self.operations[-1] is not operation:
            return
        number, call = len(self.calls), self._call
        if call is not None and not operation.requester:  # it runs on tensors without elements
            operation.bytes = received_bytes(operation.op, len(call.ranks), *call.sides())
        one = Collective(
            operation.op, operation.group, list(operation.ranks), operation.axes, operation.bytes, _site(operation)
        )
        if call is not None and not operation.requester:
            one.agreed = call.agreed
        if call is not None and one.is_message:
            one.peer = call.peer
        self.calls.append(one)
        self.order.append(number)
        if call is None and not self._functional:  # it cannot be seen where the program waits
            self._wait(number)

    def made_group(self, group: dist.ProcessGroup) -> None:
        """The program has made a group, in which its ranks meet: backends connect them."""
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) > 1:
            self._meet(Collective(NEW_GROUP, str(group.group_name), ranks, "", 0, running_place().line))

    def compared(self, consensus: Round, about: str, own: Description) -> None:
        """Ranks compare what they have before the first collective. Their numbers are not known here."""
        sections = {name: [list(entry) for entry in own[name]] for name in own if name not in _UNKNOWN}
        agreed: dict[str, Any] = {
            name: found if len(found) <= _LISTED else sha256(json.dumps(found).encode()).hexdigest()
            for name, found in sections.items()
        }
        line = running_place().line
        if len(consensus.ranks) > 1:
            self._meet(Collective(COMPARISON, consensus.place, list(consensus.ranks), "", 0, line, None, agreed, about))

    def _meet(self, one: Collective) -> None:
        self.calls.append(one)
        self.order.append(len(self.calls) - 1)
        self._wait(len(self.calls) - 1)

    def begin(self, call: Call) -> None:
        """The next operation is this call."""
        self._call = call

    def end(self, work: Any) -> int | None:
        """The call has returned. The number of the operation; None: of a group of one rank."""
        call, self._call = self._call, None
        if call is None or len(call.ranks) == 1 or not self.calls:
            return None
        number = len(self.calls) - 1
        if work is not None:
            self._works[id(work)] = work, number
        if not call.is_async:
            self._wait(number)
        return number

    def begin_functional(self) -> None:
        self._functional = True

    def end_functional(self, before: int, result: Any) -> None:
        """A functional collective has returned; ``before``: how many operations there were."""
        self._functional = False
        if len(self.calls) > before:
            for x in tree_leaves(result):
                if isinstance(x, torch.Tensor):
                    self._results[x.untyped_storage()._cdata] = len(self.calls) - 1

    def waited_for_result(self, tensor: torch.Tensor) -> None:
        number = self._results.get(tensor.untyped_storage()._cdata)
        if number is not None:
            self._wait(number)

    def waited(self, work: Any) -> None:
        """The program waits for a work."""
        _, number = self._works.pop(id(work), (None, None))
        if number is not None:
            self._wait(number)

    def _wait(self, number: int) -> None:
        if number not in self._waited:
            self._waited.add(number)
            self.order.append(~number)


def _site(operation: Operation) -> str:
    who = operation.requester or operation.module
    if operation.module and operation.module not in who:
        who = f"{who} in {operation.module}"
    phase = f"({operation.phase})" if operation.phase else ""
    return " ".join(part for part in (operation.line, who, phase) if part)

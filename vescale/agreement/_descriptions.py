"""Descriptions that ranks compare before the first collective, and the first difference between them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vescale.agreement._round import Round
from vescale.agreement._store import ranks_text

Description = Mapping[str, Sequence[tuple[str, str]]]
"""What a rank brings: for each section, in the order of importance, (name, text) in an order that matters."""

_NOTHING = "nothing"
_LISTENERS: list[Callable[[Round, str, Description], None]] = []


@dataclass(frozen=True)
class Difference:
    """The first entry that differs between ranks.

    Attributes:
        section: of the description.
        name: of the entry in it.
        found: each text, with the global ranks that have it; most ranks first. "nothing" if a rank has no such entry.
    """

    section: str
    name: str
    found: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that differ from the majority, in order; if two halves differ, the half without the first rank."""
        return tuple(sorted(rank for _, ranks in self.found[1:] for rank in ranks))

    def text(self) -> str:
        """``'a.weight' of parameters is (4, 4) on ranks [0, 1, 3] and (4, 5) on rank [2]``."""
        named = f"{self.name!r} of {self.section}" if self.name else self.section
        return f"{named} is " + " and ".join(f"{text} on {ranks_text(ranks)}" for text, ranks in self.found)


def listen_to_descriptions(listener: Callable[[Round, str, Description], None]) -> None:
    """From now on, ``listener`` gets each comparison, what it is about, and this rank's description: of ranks that are
    tried out alone, who compare nothing themselves."""
    _LISTENERS.append(listener)


def compare_descriptions(own: Description, round_: Round, about: Callable[[], str]) -> Difference | None:
    """The first difference between the ranks' descriptions, the same on every rank; None: all are equal.

    One round, without a collective. Descriptions are transferred only if they differ.

    Raises ConsensusError if a rank does not come in time.
    """
    for listener in _LISTENERS:
        listener(round_, about(), own)
    message = zlib.compress(json.dumps([[section, list(map(list, own[section]))] for section in own]).encode(), 1)
    messages = round_.exchange(message, about)
    if all(other == message for other in messages):
        return None
    everyone = {rank: dict(json.loads(zlib.decompress(m))) for rank, m in zip(round_.ranks, messages)}
    sections = dict.fromkeys(section for sections in everyone.values() for section in sections)
    for section in sections:
        entries = {rank: [tuple(entry) for entry in found.get(section, ())] for rank, found in everyone.items()}
        if len(set(map(tuple, entries.values()))) > 1:
            return first_difference(section, entries)
    return None


def first_difference(section: str, entries: Mapping[int, Sequence[tuple[str, str]]]) -> Difference:
    """Of what each rank has in a section; not all have the same."""
    texts = {rank: dict(found) for rank, found in entries.items()}
    for name in dict.fromkeys(name for found in texts.values() for name in found):
        if len({found.get(name) for found in texts.values()}) > 1:
            return Difference(section, name, _grouped({rank: f.get(name, _NOTHING) for rank, f in texts.items()}))
    # The same entries, in another order (or some of them more often).
    for place in range(max(map(len, entries.values()))):
        names = {rank: found[place][0] if place < len(found) else _NOTHING for rank, found in entries.items()}
        if len(set(names.values())) > 1:
            return Difference(section, f"number {place} in the order", _grouped(names))
    raise AssertionError("descriptions differ and nothing in them does")


def _grouped(texts: Mapping[int, str]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    ranks_of: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks_of.setdefault(text, []).append(rank)
    most_first = sorted(ranks_of.items(), key=lambda item: (-len(item[1]), item[1][0]))
    return tuple((text, tuple(ranks)) for text, ranks in most_first)

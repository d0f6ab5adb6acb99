"""Values that are no tensors and differ between ranks, as positions of data loaders do: each rank gets its own back."""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

__all__ = ["add_values_of_ranks", "differing", "digests_of", "pick", "values_of_rank"]

Values = Mapping[str, Any]
"""``values`` of a manifest: JSON with ``model``, ``optimizers`` and ``beside``."""

_BESIDE, _EXTRA, _OPTIMIZER = "beside", "extra", "optimizer"


def digests_of(values: Values, *, optimizers: bool) -> str:
    """``{kind: {key: checksum of the value}}`` as text that is equal on ranks whose values are equal.

    ``optimizers``: whether all ranks hold the same parameters, so that the options of their optimizers may be compared.
    """
    found: dict[str, dict[str, str]] = {
        _BESIDE: {key: _digest(value) for key, value in values["beside"].items()},
        _EXTRA: {key: _digest(value) for key, value in ((values["model"] or {}).get("extra") or {}).items()},
    }
    if optimizers:
        found[_OPTIMIZER] = {key: _digest(value) for key, value in values["optimizers"].items()}
    return json.dumps(found, separators=(",", ":"), sort_keys=True)


def _digest(value: Any) -> str:
    return f"{zlib.crc32(json.dumps(value, separators=(',', ':'), sort_keys=True).encode()):08x}"


def differing(texts: Sequence[str]) -> dict[str, list[str]]:
    """By kind, the keys whose values are not the same on all ranks, from what :func:`digests_of` gave on each. A module that
    only some ranks have, as in a pipeline, is compared among these."""
    if len(set(texts)) == 1:
        return {}
    ranks = [json.loads(text) for text in texts]
    found = {}
    for kind in (_BESIDE, _EXTRA, _OPTIMIZER):
        keys = sorted({key for rank in ranks for key in rank.get(kind, ())})
        digests = {key: {rank.get(kind, {}).get(key) for rank in ranks} for key in keys}
        if kind != _BESIDE:
            digests = {key: those - {None} for key, those in digests.items()}
        different = [key for key, those in digests.items() if len(those) > 1]
        if different:
            found[kind] = different
    return found


def pick(values: Values, wanted: Mapping[str, Collection[str]]) -> dict[str, dict[str, Any]]:
    """What this rank has of the keys that :func:`differing` found, without optimizers."""
    there = {_BESIDE: values["beside"], _EXTRA: (values["model"] or {}).get("extra") or {}}
    return {
        kind: {key: there[kind][key] for key in keys if key in there[kind]}
        for kind, keys in wanted.items()
        if kind in there
    }


def add_values_of_ranks(values: dict[str, Any], picked: Sequence[Mapping[str, Mapping[str, Any]]]) -> None:
    """Put what the ranks have picked, in rank order, into the first rank's values as ``ranks``: ``{kind: {key: {rank:
    value}}}``. The values themselves stay those of the first rank that has them."""
    ranks: dict[str, dict[str, dict[str, Any]]] = {}
    for rank, kinds in enumerate(picked):
        for kind, held in kinds.items():
            for key, value in held.items():
                ranks.setdefault(kind, {}).setdefault(key, {})[str(rank)] = value
    values["ranks"] = ranks
    for key, held in ranks.get(_BESIDE, {}).items():
        values["beside"].setdefault(key, next(iter(held.values())))


def values_of_rank(values: Values, rank: int, *, same_world: bool) -> tuple[dict[str, Any], list[str]]:
    """(values with those of this rank in place of the first rank's, names of those that differed and now are the first's).

    ``same_world``: there are as many ranks as in the save; otherwise all of them get the first rank's.
    """
    ranks = values.get("ranks") or {}
    if not same_world:
        return dict(values), sorted(key for held in ranks.values() for key in held)
    found = dict(values)
    if _BESIDE in ranks:
        found["beside"] = _own(values["beside"], ranks[_BESIDE], rank)
    if _EXTRA in ranks and values["model"] is not None:
        found["model"] = {**values["model"], "extra": _own(values["model"]["extra"], ranks[_EXTRA], rank, keep=True)}
    return found, []


def _own(common: Values, held: Values, rank: int, *, keep: bool = False) -> dict[str, Any]:
    """``keep``: a value that this rank did not have stays that of another one."""
    found = dict(common)
    for key, values in held.items():
        if str(rank) in values:
            found[key] = values[str(rank)]
        elif not keep:
            found.pop(key, None)
    return found

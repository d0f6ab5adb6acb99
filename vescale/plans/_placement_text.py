"""Placements as text: ``R``, ``S(0)``, ``P(sum)``, ``Ragged(...)``, ``Interleaved(dim, n)``.

========================================  =====================================================================
text                                      placement
========================================  =====================================================================
``R``                                     ``Replicate()``
``S(0)``, ``S(-1)``                       ``Shard(0)``, ``Shard(-1)``
``P``, ``P(sum)``, ``P(avg|max|min)``     ``Partial("sum")``, ...
``Ragged``                                ``RaggedShard()``, balanced
``Ragged(dims=(0, 1))``                   ``RaggedShard((0, 1))``
``Ragged(units=(1, 0, 3), block=128)``    ``RaggedShard((0,), (1, 0, 3), 128)``
``StridedRagged(split=2, ...)``           ``StridedRaggedShard(..., split_factor=2)``
``Interleaved(0, 3)``                     ``InterleavedShard(0, 3)``
========================================  =====================================================================

The reader is a small tokenizer: nothing is ever evaluated.
"""

from __future__ import annotations

from typing import Any

import regex
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.errors import PlacementError
from vescale.placements import InterleavedShard, RaggedShard, StridedRaggedShard

_FORM = regex.compile(r"\s*(?P<name>[A-Za-z]+)\s*(?:\((?P<arguments>[^{}]*)\))?\s*", regex.V1)
_TOKEN = regex.compile(r"\s*(?:(?P<int>-?\d{1,18}(?!\d))|(?P<word>[A-Za-z_]+)|(?P<mark>[(),=]))")
_REDUCE_OPS = ("sum", "avg", "max", "min")
_EXPECTED = "R, S(dim), P(sum|avg|max|min), Ragged(...), StridedRagged(...) or Interleaved(dim, chunks)"


def parse_placement(text: str) -> Placement:
    """The placement that ``text`` names. Raises ValueError saying what was expected."""
    form = _FORM.fullmatch(text)
    if form is None:
        raise PlacementError(f"{shown_text(text)} is not a placement; expected {_EXPECTED}")
    name = form["name"]
    positional, named = _arguments(form["arguments"] or "", text)
    try:
        return _build(name, positional, named)
    except (TypeError, KeyError, IndexError) as error:
        raise PlacementError(f"{shown_text(text)} is not a placement ({error}); expected {_EXPECTED}") from None


def shown_text(text: str) -> str:
    """The text in quotes, truncated for messages."""
    return repr(text) if len(text) <= 100 else f"{text[:100]!r}..."


def _build(name: str, positional: list[Any], named: dict[str, Any]) -> Placement:
    if name == "R" and not positional and not named:
        return Replicate()
    if name == "S" and len(positional) == 1 and isinstance(positional[0], int) and not named:
        return Shard(positional[0])
    if name == "P" and not named and len(positional) <= 1:
        op = positional[0] if positional else "sum"
        if op not in _REDUCE_OPS:
            raise TypeError(f"{op!r} is not a reduction; use {', '.join(_REDUCE_OPS)}")
        return Partial(op)
    if name == "Interleaved" and len(positional) == 2 and not named:
        return InterleavedShard(positional[0], positional[1])
    if name in ("Ragged", "StridedRagged") and len(positional) <= 1:
        dims = named.pop("dims", positional[0] if positional else (0,))
        units, block = named.pop("units", None), named.pop("block", None)
        split = named.pop("split") if name == "StridedRagged" else None
        if named:
            raise TypeError(f"unknown argument {next(iter(named))!r}; use dims=, units=, block=")
        dims = (dims,) if isinstance(dims, int) else dims
        units = (units,) if isinstance(units, int) else units
        if split is not None:
            return StridedRaggedShard(dims, units, block, split_factor=split)
        return RaggedShard(dims, units, block)
    raise TypeError(f"{name} does not take these arguments")


def _arguments(text: str, whole: str) -> tuple[list[Any], dict[str, Any]]:
    """Split ``0, units=(1, 2)`` into positional and named values: integers, names, and tuples of integers."""
    tokens: list[tuple[str, str]] = []
    position = 0
    while text[position:].strip():
        found = _TOKEN.match(text, position)
        if found is None:
            raise PlacementError(
                f"{shown_text(whole)}: unexpected {text[position:].strip()[0]!r}; expected {_EXPECTED}"
            )
        tokens.append((found.lastgroup or "", found[found.lastgroup or 0]))
        position = found.end()
    positional: list[Any] = []
    named: dict[str, Any] = {}
    index = 0

    def peek(offset: int = 0) -> str:
        return tokens[index + offset][1] if index + offset < len(tokens) else ""

    def value() -> Any:
        nonlocal index
        if peek() == "(":
            index += 1
            items = []
            while peek() != ")":
                if peek() == "(":
                    raise PlacementError(f"{shown_text(whole)}: nested tuples are not allowed; write (0, 1)")
                items.append(value())
                if peek() == ",":
                    index += 1
                elif peek() != ")":
                    raise PlacementError(f"{shown_text(whole)}: a tuple is not closed; write (0, 1)")
            index += 1
            return tuple(items)
        if index >= len(tokens) or tokens[index][0] == "mark":
            raise PlacementError(f"{shown_text(whole)}: a value is missing; expected {_EXPECTED}")
        kind, word = tokens[index]
        index += 1
        return int(word) if kind == "int" else word

    while index < len(tokens):
        if tokens[index][0] == "word" and peek(1) == "=":
            key = peek()
            index += 2
            named[key] = value()
        else:
            positional.append(value())
        if index < len(tokens):
            if peek() != ",":
                raise PlacementError(f"{shown_text(whole)}: expected a comma before {peek()!r}")
            index += 1
    return positional, named


def placement_text(placement: Placement) -> str:
    """The text that :func:`parse_placement` reads back as ``placement``.

    Raises ValueError for a placement that plans cannot name.
    """
    if isinstance(placement, RaggedShard):
        parts = [] if placement.dims == (0,) else [f"dims={_tuple_text(placement.dims)}"]
        if placement.local_units is not None:
            parts.append(f"units={_tuple_text(placement.local_units)}")
        if placement.block is not None:
            parts.append(f"block={placement.block}")
        if isinstance(placement, StridedRaggedShard):
            return f"StridedRagged({', '.join([f'split={placement.split_factor}', *parts])})"
        return f"Ragged({', '.join(parts)})" if parts else "Ragged"
    if isinstance(placement, InterleavedShard):
        return f"Interleaved({placement.dim}, {placement.num_chunks})"
    if type(placement) is Shard:
        return f"S({placement.dim})"
    if type(placement) is Partial and placement.reduce_op in _REDUCE_OPS:
        return f"P({placement.reduce_op})"
    if type(placement) is Replicate:
        return "R"
    raise PlacementError(f"{placement!r} cannot be written in a plan; use {_EXPECTED}")


def _tuple_text(values: tuple[int, ...]) -> str:
    return "(" + ", ".join(map(str, values)) + ("," if len(values) == 1 else "") + ")"
